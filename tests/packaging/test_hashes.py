"""constraints.txt pins every package with hashes, and every installation of packages requires these hashes."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==[^\s;]+(?: ;[^\n\\]*)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+$", re.MULTILINE
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> set[str]:
    return {normal(each["name"]) for each in PIN.finditer((ROOT / "constraints.txt").read_text())}


def test_every_pinned_package_has_hashes() -> None:
    text = (ROOT / "constraints.txt").read_text()
    rest = re.sub(r"^#.*\n", "", PIN.sub("", text), flags=re.M)
    assert rest.split() == []


def test_every_declared_package_is_pinned() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = [*document["project"]["dependencies"], *document["build-system"]["requires"], "uv"]
    for extra in document["project"]["optional-dependencies"].values():
        declared += [each for each in extra if not each.startswith("dualmap[")]
    names = {normal(match[0]) for each in declared if (match := re.match(r"[A-Za-z0-9._-]+", each))}
    assert len(names) > 30
    assert names - pins() == set()


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile"])
def test_every_installation_requires_hashes_or_installs_only_the_project(file: str) -> None:
    # A command may continue on the next lines. The variables of the Makefile are replaced.
    text = (ROOT / file).read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^([A-Z]+) := (.*)$", text, re.M))
    for _ in range(3):
        text = re.sub(r"\$\(([A-Z]+)\)", lambda match: variables.get(match[1], match[0]), text)
    commands = [each for line in text.splitlines() for each in line.split("&&") if re.search(r"pip install\b", each)]
    commands = [each for each in commands if not re.match(r"\s*(#|[A-Z]+ :=|.*apt-get)", each)]
    assert len(commands) >= 3
    for each in commands:
        assert "--require-hashes" in each or "--no-deps --build-constraint constraints.txt" in each, each
