"""Writes docs/crd.md, the reference of the InferencePool, from the CRD's schema: ``python crds/reference.py``.

Only the schema contains descriptions, defaults and limits. ``tests/packaging/test_references.py`` checks that
docs/crd.md is current.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CRD = ROOT / "crds" / "serving.dualmap.dev_inferencepools.yaml"
FILE = ROOT / "docs" / "crd.md"
_HEAD = """\
# InferencePool: every field

Generated from the schema in [crds/](../crds/) by `python crds/reference.py`.
`kubectl explain dmpool.spec` shows the same texts.
Pools with examples: [pool.md](pool.md).

Group `{group}`, version `{version}`, kind `{kind}`; `kubectl get {short}`.
"""
_SECTIONS = {"spec": "Desired state", "status": "Observed state"}
_Schema = Mapping[str, Any]


def page() -> str:
    """Return the complete text of docs/crd.md."""
    crd = yaml.safe_load(CRD.read_text())["spec"]
    (version,) = crd["versions"]
    names = crd["names"]
    head = _HEAD.format(group=crd["group"], version=version["name"], kind=names["kind"], short=names["shortNames"][0])
    schema = version["schema"]["openAPIV3Schema"]
    sections = [head]
    for name, title in _SECTIONS.items():
        of = schema["properties"][name]
        rows = [_row(path, field, required) for path, field, required in _fields(name, of)]
        table = ["| Field | Type | Default | Accepted | Meaning |", "|---|---|---|---|---|", *rows]
        sections.append("\n".join((f"## {title}: `{name}`\n", f"{_text(of.get('description', ''))}\n", *table)) + "\n")
    return "\n".join(sections)


def _fields(path: str, schema: _Schema) -> Iterator[tuple[str, _Schema, bool]]:
    """Yield every field below ``path`` with its schema and whether it is required, in the schema's order."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, field, name in required
        yield from _fields(here, field)
        if "items" in field:
            yield from _fields(f"{here}[]", field["items"])


def _row(path: str, field: _Schema, required: bool) -> str:
    default = "required" if required else _code(field["default"]) if "default" in field else ""
    cells = (f"`{path}`", _type(field), default, _accepted(field), _text(field.get("description", "")))
    return f"| {' | '.join(cells)} |"


def _type(field: _Schema) -> str:
    kind = "int or string" if field.get("x-kubernetes-int-or-string") else str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object" and "additionalProperties" in field:
        return "map"
    return kind


def _accepted(field: _Schema) -> str:
    parts = [", ".join(_code(value) for value in field["enum"])] if "enum" in field else []
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None or high is not None:
        parts.append(f"{low if low is not None else '...'} to {high if high is not None else '...'}")
    if field.get("format") == "date-time":
        parts.append("a time as in RFC 3339")
    if "minItems" in field or "maxItems" in field:
        parts.append(f"{field.get('minItems', 0)} to {field.get('maxItems', '...')} of them")
    if "pattern" in field:
        parts.append(f"`{field['pattern']}`".replace("|", "\\|"))
    elif "maxLength" in field and "enum" not in field:
        parts.append(f"{field.get('minLength', 0)} to {field['maxLength']} characters")
    return "; ".join(parts)


def _code(value: object) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _text(description: str) -> str:
    return " ".join(description.split()).replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(page())
