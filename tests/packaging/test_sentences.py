"""Tests that the script for random sentences finds sentences in every kind of source."""

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "sentences.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
assert spec is not None
assert spec.loader is not None
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)

PYTHON = '''\
"""The module.

It has
two sentences of its own."""
# A comment that goes on
# for two lines.
import click


@click.command()
@click.option("--port", help="Port to listen on.")
def serve(port: int) -> None:
    """Serve the page."""
    _log.warning("Store lost", port=port)
    raise ValueError(f"port: {port} is not free; give another one")


def test_server_without_port_refuses() -> None: ...


HEADING = "requests of each kind, in seconds"
SCRIPT = "while true; do sleep one; done"


def check(path: str, rate: float) -> None:
    """Check the rate."""
    click.echo(f"no rate is known: {path}", err=True)
    click.echo(f"the rate of each kind: {path}")
    if rate < 0:
        raise PoolError("spec.rate", rate, "a number of requests, at least 0")
    message = "The rate was too high; try again"
    raise Refused(status=429, message=message, detail=f"{rate} of {', '.join(path)}: {path}")
'''
MARKDOWN = """\
# The first heading here

A paragraph that
goes [on](page.md). It ends here. `code.only.here` alone

```sh
echo this is no sentence
```

| one cell with words | the second cell here |
"""


def found(file: str, text: str) -> list[tuple[str, int, str]]:
    return sorted((each.place, each.line, each.text) for each in made.sentences(file, text))


def test_sentences_of_a_python_file_have_every_place() -> None:
    assert found("extproc/dualmap_extproc/page.py", PYTHON) == [
        ("comments", 5, "A comment that goes on for two lines."),
        ("docstrings", 3, "It has two sentences of its own."),
        ("docstrings", 26, "Check the rate."),
        ("errors", 15, "port: {port} is not free; give another one"),
        ("errors", 27, "no rate is known: {path}"),
        ("errors", 31, "The rate was too high; try again"),
        ("help", 11, "Port to listen on."),
        ("help", 13, "Serve the page."),
        ("logs", 14, "Store lost"),
        ("tests", 18, "server without port refuses"),
    ]


def test_sentences_of_markdown_exclude_code_and_link_targets() -> None:
    assert found("docs/page.md", MARKDOWN) == [
        ("docs", 1, "The first heading here"),
        ("docs", 3, "A paragraph that goes on."),
        ("docs", 4, "It ends here."),
        ("docs", 10, "one cell with words"),
        ("docs", 10, "the second cell here"),
    ]


def test_sentences_of_the_tree_exclude_generated_files() -> None:
    tree = made.tree(made.ROOT)
    counts = Counter(each.place for each in tree)
    assert set(counts) == set(made.PLACES)
    assert min(counts.values()) >= 20
    files = {each.file for each in tree}
    excluded = (
        "bench/results/",
        "_pb2.py",
        "/fixtures/",
        "/goldens/",
        "/recorded/",
        "manifests/install",
        "docs/crd.md",
    )
    assert not [file for file in files if any(part in file for part in excluded)]


def test_draw_is_fixed_by_its_seed_and_covers_every_place() -> None:
    tree = [made.Sentence(place, "file.py", line, f"{line}") for place in made.PLACES for line in range(5)]
    first = made.draw(tree, tuple(made.PLACES), 28, 1)
    assert first == made.draw(tree, tuple(made.PLACES), 28, 1)
    assert first != made.draw(tree, tuple(made.PLACES), 28, 2)
    assert len(set(first)) == 28
    assert Counter(each.place for each in first) == dict.fromkeys(made.PLACES, 2)
    assert len(made.draw(tree, ["logs"], 28, 1)) == 5


def test_sentences_command_prints_place_line_and_sentence() -> None:
    command = [sys.executable, SCRIPT, "--seed", "1", "--count", "2", "--from", "logs,help"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["logs", "help"]
    file, line, _ = lines[0].split()[1].split(":")
    assert 1 <= int(line) <= len((made.ROOT / file).read_text().splitlines())


def test_sentences_command_rejects_unknown_place_and_lists_places() -> None:
    command = [sys.executable, SCRIPT, "--seed", "1", "--from", "poems"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "unknown place 'poems'; accepted are logs, errors" in answer.stderr
