"""Tests that links, anchors and commands in the documents exist."""

import re
from pathlib import Path

import pytest

from dualmap.policies import migration, situation
from dualmap.policies.pair import dualmap as default_policy
from dualmap.policies.situation import Rule
from dualmap.queue import rebalance
from dualmap_cli.main import COMMANDS
from dualmap_operator.names import EventReason

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "bench", "crds", "helm", "manifests", "operator", "e2e")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.md"))])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_in_documents_resolve(document: Path) -> None:
    # The test ignores code, because a regular expression can look like a link.
    targets = re.findall(r"\]\(([^)#]+)", re.sub(r"`[^`\n]+`", "code", document.read_text()))
    missing = [target for target in targets if "://" not in target and not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_anchor_links_in_documents_resolve_to_headings(document: Path) -> None:
    links = re.findall(r"\]\(([^):#]*)#([^)]+)\)", document.read_text())
    missing = []
    for target, anchor in links:
        text = (document.parent / target).read_text() if target else document.read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        # Return the anchors that GitHub generates.
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if anchor not in anchors:
            missing.append(f"{target}#{anchor}")
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_have_no_placeholders(document: Path) -> None:
    assert not re.findall(r"@@|TODO|FIXME|XXX", document.read_text())


def test_readme_lists_exactly_the_existing_commands() -> None:
    named = set(re.findall(r"dualmap ([a-z]+(?:-[a-z]+)*)", (ROOT / "README.md").read_text()))
    assert set(COMMANDS) <= named
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    documents = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"`make ([a-z0-9-]+)", documents)) <= set(targets)


def test_operator_page_lists_exactly_the_event_reasons() -> None:
    _, _, rest = (ROOT / "docs" / "operator.md").read_text().partition("Events on a pool have stable reasons:")
    listed, _, _ = rest.partition("\n\n")
    assert re.findall(r"`(\w+)`", listed) == list(EventReason)


def test_policies_page_lists_exactly_the_rules_of_the_default_policy() -> None:
    _, _, rest = (ROOT / "docs" / "policies.md").read_text().partition("The policy `dualmap` has these rules:")
    rules, _, others = rest.partition("\n\nWith ")
    modules = (situation, default_policy, rebalance)
    names = {each.name for module in modules for each in vars(module).values() if isinstance(each, Rule)}
    assert set(re.findall(r"^\| `([a-z-]+)` \|", rules, re.MULTILINE)) == names
    assert {rule.name for rule in (migration.SESSION_HOST, migration.SESSION_MOVE)} <= set(
        re.findall(r"`([a-z-]+)`", others.partition("\n\n")[0])
    )


def test_architecture_page_lists_only_existing_files() -> None:
    """`core/router.py` refers to `core/dualmap/router.py`.

    A file name without a folder is in the folder that the text mentions before.
    """
    packages = {
        "core": "dualmap",
        **{each: f"dualmap_{each}" for each in ("edge", "extproc", "operator", "sim", "sidecar", "cli")},
    }
    folder, missing = ROOT, []
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"(?<![\w./(-])(?:[a-z_]+/)*[a-z_]+(?:/|\.py)(?![\w.])", text):
        first, _, rest = name.partition("/")
        candidates = [ROOT / first / packages[first] / rest] if first in packages and rest else [folder / name]
        found = next((each for each in (*candidates, ROOT / name) if each.exists()), None)
        if found is None:
            missing.append(name)
        elif "/" in name:
            folder = found if found.is_dir() else found.parent
    assert not missing
