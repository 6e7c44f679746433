"""Pool files for tests: content, and helpers that write the files."""

from pathlib import Path

import yaml

API = "serving.dualmap.dev/v1alpha1"


def document(name: str = "qwen", *, members: int = 2, model: str | None = None, **spec: object) -> dict[str, object]:
    return {
        "apiVersion": API,
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {"model": {"name": model or f"m/{name}"}, **spec},
        "status": {
            "ring": {
                "version": members,
                "members": [{"id": f"{name}-{n}", "address": f"10.0.0.{n + 1}", "port": 8000} for n in range(members)],
            }
        },
    }


def write(path: Path, *documents: object) -> Path:
    return write_text(path, yaml.safe_dump_all(documents))


def write_text(path: Path, text: str) -> Path:
    """Write a file by rename, so that a watcher in another thread reads either the old or the new content."""
    new = path.with_suffix(".new")
    new.write_text(text)
    return new.rename(path)
