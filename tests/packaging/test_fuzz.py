"""Tests of ``make fuzz``: the corpus and a short run of each target pass, and a failing target is reported."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "fuzz" / "targets").glob("[!_]*.py"))
# A target that fails on an input with three exclamation marks, and that adds an exclamation mark in each mutation.
PLANTED = '''
"""Planted."""

from dualmap.errors import PoolError


def check(data: bytes) -> None:
    """Fail on some inputs."""
    if data.count(b"!") > 2:
        raise PoolError("planted", 1, "nothing")


def mutate(data, random):
    """Add an exclamation mark."""
    return data + b"!"
'''


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch):
    """Return the fuzz package, which is not installed."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("fuzz")


def run(*options: object, root: Path = ROOT, preamble: str = "pass") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {preamble}; from fuzz.__main__ import main; main()"
    command = [sys.executable, "-c", code, *map(str, options)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_fuzz_targets_accept_the_whole_corpus(fuzz, name: str) -> None:
    check = importlib.import_module("fuzz.targets").load(name).check
    inputs = list((ROOT / "fuzz" / "corpus" / name).iterdir())
    assert inputs
    for path in inputs:
        assert path.name == importlib.import_module("fuzz.engine").name_of(path.read_bytes())
        check(path.read_bytes())


def test_fuzz_corpus_stays_below_its_size_limit(fuzz) -> None:
    corpora = {path: list(path.iterdir()) for path in (ROOT / "fuzz" / "corpus").iterdir()}
    assert sorted(path.name for path in corpora) == NAMES == sorted(importlib.import_module("fuzz.targets").TARGETS)
    # The number of inputs that ``--minimise`` keeps, plus some inputs of earlier crashes.
    assert max(map(len, corpora.values())) <= importlib.import_module("fuzz.minimise").INPUTS + 20
    assert sum(path.stat().st_size for inputs in corpora.values() for path in inputs) <= 300_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_short_fuzz_run_passes(name: str, tmp_path: Path) -> None:
    ran = run("--runs", 2000, "--seconds", 2, "--seed", 1, "--work", tmp_path, name)
    assert ran.returncode == 0, ran.stderr
    executions, result = re.search(rf"^{name} +(\d+) .* (\w+)$", ran.stdout, re.MULTILINE).groups()
    assert (int(executions) > 0, result) == (True, "ok")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "fuzz", tmp_path / "fuzz", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fuzz" / "targets" / "access_log.py").write_text(PLANTED)
    return tmp_path


@pytest.mark.parametrize("options", [[], ["--random"]], ids=["guided", "random"])
def test_fuzz_failure_reports_its_input(planted: Path, options: list[str]) -> None:
    if not options:
        pytest.importorskip("atheris", reason="no coverage guidance without atheris")
    ran = run("--runs", 1000, "--work", planted, *options, "access_log", "body", root=planted)
    assert ran.returncode == 1
    assert "planted: 1 is not accepted" in ran.stderr
    assert re.search(r"^access_log .* crashed$", ran.stdout, re.MULTILINE)
    assert re.search(r"^body .* ok$", ran.stdout, re.MULTILINE), "the targets after it still run"
    (reproducer,) = re.findall(r"reproducer: (.*)", ran.stdout)
    assert Path(reproducer).read_bytes().count(b"!") > 2


def test_fuzz_without_atheris_mutates_at_random(tmp_path: Path) -> None:
    ran = run("--runs", 500, "--work", tmp_path, "body", preamble="sys.modules['atheris'] = None")
    assert ran.returncode == 0, ran.stderr
    assert "atheris is not installed" in ran.stderr
    assert re.search(r"^body +500 +- ", ran.stdout, re.MULTILINE)


def test_fuzz_minimise_removes_inputs_without_new_coverage(fuzz, tmp_path: Path) -> None:
    kept, found = tmp_path / "kept", tmp_path / "found"
    found.mkdir()
    needed = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    for data in (b"{", needed, needed.replace(b'"a"', b'"longer"')):
        (found / str(len(data))).write_bytes(data)

    count, of, size = importlib.import_module("fuzz.minimise").minimise("body", kept, found)

    assert (count, of, size) == (1, 3, len(needed))
    assert [path.read_bytes() for path in kept.iterdir()] == [needed]


def test_fuzz_help_lists_targets_and_unknown_target_is_rejected() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in NAMES)
    refused = run("bodies")
    assert refused.returncode == 2
    assert "body" in refused.stderr
