"""Draws sentences at random from every place where people read: ``python docs/sentences.py --seed 7 --count 40``.

A reader without knowledge of the project reads the drawn sentences once. Each sentence that needs a second reading is a
fault of the text. A draw takes about the same number of sentences from each place. So the few log messages count as
much as the thousands of docstrings. The same seed draws the same sentences from the same tree.
"""

import argparse
import ast
import io
import json
import random
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PLACES: Final = {
    "logs": "log messages",
    "errors": "errors that programs raise, print or answer",
    "conditions": "the operator's conditions and Events",
    "alerts": "alerts and Grafana panels",
    "metrics": "help texts of metrics",
    "help": "help texts of commands",
    "dashboard": "the router's dashboard",
    "chart": "values, messages and comments of the chart",
    "crd": "descriptions and messages of the CRD",
    "docs": "README and the pages",
    "changelog": "CHANGELOG",
    "docstrings": "docstrings",
    "comments": "comments",
    "tests": "names of tests",
}
# Excluded files: generated from a text in another place, recorded, or not written in this project.
_EXCLUDED: Final = re.compile(
    r"_pb2\.pyi?$|^LICENSE$|^constraints\.txt$|^docs/crd\.md$|^bench/results/|^fuzz/corpus/|^e2e/controlplane/go/"
    r"|^helm/dualmap/files/crds/|^manifests/install.*\.yaml$|/(fixtures|goldens|recorded)/"
)
_TABLE_OF_VALUES: Final = re.compile(r"(?<=<!-- values: made by `make manifests` -->\n).*?(?=<!-- /values -->)", re.S)
_HASH_COMMENTS: Final = (".yaml", ".yml", ".sh", ".tpl", "Makefile", "Dockerfile", ".toml", ".ci/run")
_SLASH_COMMENTS: Final = (".proto", ".js")
_DIRECTIVE: Final = re.compile(r"^(noqa|type:|fmt:|pragma|!|-\*-)")
_END: Final = re.compile(r"(?<=[a-z0-9)`\"'\]}*][.!?])\s+(?=[\"'(`*\[]*[A-Z`])|\n\s*\n")
_WORD: Final = re.compile(r"[A-Za-z]{2}")
# In tables and diagrams, two words are no sentence. In logs, two words can be a message.
_FEWEST_WORDS: Final = 3
_SHORT: Final = ("logs", "conditions", "metrics", "alerts", "tests", "dashboard")
_LOG_CALLS: Final = ("debug", "info", "warning", "error", "exception", "critical")
# Names of calls that make an error: exceptions, answers to rejected requests, and calls of click and sys that end a
# command.
_ERROR_CALL: Final = re.compile(r"(Error|Refused|Rejection|Invalid)$|\b(fail|sys\.exit|BadParameter|UsageError)$")
_EXPRESSION: Final = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")


@dataclass(frozen=True, slots=True, order=True)
class Sentence:
    """One sentence: the kind of place, the file and line of its beginning, and its text on one line."""

    place: str
    file: str
    line: int
    text: str


def sentences(file: str, text: str) -> Iterator[Sentence]:
    """Yield every sentence of one file. ``file`` is the path relative to the repository's root."""
    path = PurePosixPath(file)
    if path.suffix == ".py":
        yield from _of_python(file, text)
    elif path.suffix == ".md":
        yield from _of_markdown("changelog" if file == "CHANGELOG.md" else "docs", file, text)
    elif file == "helm/dualmap/files/dashboard.json":
        yield from _of_fields("alerts", file, text, json.loads(text), ("title", "description"))
    elif file == "helm/dualmap/values.schema.json":
        yield from _of_fields("chart", file, text, json.loads(text), ("description",))
    elif path.name == "NOTES.txt":
        yield from _split("chart", file, 1, re.sub(r"{{-?.*?-?}}", "", text))
    elif path.suffix == ".html":
        for found in re.finditer(r">([^<>{}]+)<|(?:title|aria-label|alt)=\"([^\"]+)\"", text):
            yield from _split("dashboard", file, _line(text, found.start()), found[1] or found[2])
    elif path.suffix == ".lua":
        yield from _of_comments("comments", file, text, "--")
    elif file.endswith(_SLASH_COMMENTS):
        yield from _of_comments("comments", file, text, "//")
        for found in re.finditer(r"([\"`])((?:(?!\1)[^\n\\])+)\1", text if path.suffix == ".js" else ""):
            if _is_prose(found[2]):
                yield from _split("dashboard", file, _line(text, found.start()), found[2])
    elif file.endswith(_HASH_COMMENTS):
        yield from _of_comments("chart" if file.startswith("helm/") else "comments", file, text, "#")
        yield from _of_yaml(file, text)


def _of_yaml(file: str, text: str) -> Iterator[Sentence]:
    """Yield the descriptions of the CRD, the texts of the alerts, and the chart's template errors and comments."""
    if file.startswith("helm/dualmap/templates/"):
        for found in re.finditer(r"{{-?\s*/\*(.*?)\*/", text, re.S):
            yield from _split("chart", file, _line(text, found.start(1)), found[1])
        for found in re.finditer(r"\bfail \(?(?:printf )?\"((?:[^\"\\]|\\.)+)\"", text):
            yield from _split("chart", file, _line(text, found.start()), found[1])
    place = {"crds": "crd", "helm": "alerts"}.get(file.partition("/")[0])
    if place == "crd" or file == "helm/dualmap/files/alerts.yaml":
        keys = r"description|message|messageExpression|summary"
        for found in re.finditer(rf"^([ -]*)(?:{keys}): (?:>-\n)?(.+\n(?:\1 [ ]*(?!\w+:).+\n)*)", text, re.M):
            # The end of an expression is removed: '...'.format([self])
            yield from _split(str(place), file, _line(text, found.start()), re.sub(r"\.format\(.*", "", found[2]))
        for found in re.finditer(r"\bdescription: ([^{}>|\n]+)}", text):
            yield from _split(str(place), file, _line(text, found.start()), found[1])


def _of_fields(place: str, file: str, text: str, value: Any, names: Sequence[str]) -> Iterator[Sentence]:
    """Yield the texts of the fields with these names, at any depth of a JSON document."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for name in names if isinstance(value, dict) else ():
        if isinstance(each := value.get(name), str):
            yield from _split(place, file, _line(text, max(0, text.find(json.dumps(each)))), each)
    for child in children:
        yield from _of_fields(place, file, text, child, names)


def _of_markdown(place: str, file: str, text: str) -> Iterator[Sentence]:
    """Yield headings, table cells, list items and paragraphs, without code blocks and generated tables."""
    # The line breaks of a removed block stay, so that lines keep their numbers.
    text = re.sub(r"^( *)```.*?^ *```", lambda found: re.sub(r"[^\n]+", "", found[0]), text, flags=re.M | re.S)
    text = _TABLE_OF_VALUES.sub(lambda found: "\n" * found[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    block, began = "", 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.strip()
        new = not bare or bare.startswith(("#", "|", "<!--")) or re.match(r"([-*]|\d+\.) ", bare) is not None
        if new:
            yield from _split(place, file, began, block)
            block = ""
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare.strip("|")):
                yield from _split(place, file, number, cell)
        elif bare.startswith("#"):
            yield from _split(place, file, number, bare.lstrip("# "))
        elif bare and not bare.startswith("<!--"):
            began = began if block else number
            block += re.sub(r"^([-*]|\d+\.) ", "", bare) + "\n"


def _of_comments(place: str, file: str, text: str, mark: str) -> Iterator[Sentence]:
    """Yield the sentences of comments. Consecutive comment lines without code are one text."""
    if file.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [(each.start[0], each.line, each.string) for each in tokens if each.type == tokenize.COMMENT]
    else:
        pattern = re.compile(rf"(?:^|\s)({re.escape(mark)} .*)$")
        lines = enumerate(text.splitlines(), 1)
        found = [(number, line, match[1]) for number, line in lines if (match := pattern.search(line))]
    block, began, last = "", 0, -1
    for number, line, comment in found:
        bare = comment.removeprefix(mark).strip()
        alone = line.strip().startswith(mark)
        if number != last + 1 or not alone:
            yield from _split(place, file, began, block)
            block, began = "", number
        if not _DIRECTIVE.match(bare):
            block += bare + "\n"
        last = number if alone else -1
    yield from _split(place, file, began, block)


def _of_python(file: str, text: str) -> Iterator[Sentence]:
    yield from _of_comments("comments", file, text, "#")
    tree = ast.parse(text)
    # Users do not read other strings of tests. The panels of helm/grafana.py are read in the generated file.
    unread = file.startswith(("tests/", "e2e/", "testing/tests/", "helm/grafana.py"))
    others = (
        "conditions" if file.startswith("operator/") else "dashboard" if file.endswith("/dashboard/verdict.py") else ""
    )
    of_metrics = any(isinstance(each, ast.ImportFrom) and each.module == "prometheus_client" for each in tree.body)
    places: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and node.body and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            commands = () if isinstance(node, ast.Module) else node.decorator_list
            is_help = any(re.search(r"\b(command|group)\(", ast.unparse(each)) for each in commands)
            places[first.value] = "help" if is_help else "docstrings"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            words = node.name.removeprefix("test_").replace("_", " ")
            yield Sentence("tests", file, node.lineno, words)
        if isinstance(node, ast.Call):
            if _is_log(node):
                places.update(dict.fromkeys(node.args, "logs"))
            elif _is_error(node) and not unread:
                places.update(_said(node))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and not unread:
            places.update(_said(node.exc))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "message":
            places[node.value] = "" if unread else "errors"
        elif isinstance(node, ast.Expr):
            # This may be an attribute's docstring. The docstrings of modules, classes and functions were visited
            # before.
            places.setdefault(node.value, "docstrings")
        elif isinstance(node, ast.keyword) and node.arg in ("help", "short_help", "epilog"):
            places[node.value] = "help"
        elif isinstance(node, ast.JoinedStr):
            places.update(dict.fromkeys((each for each in ast.walk(node) if each is not node), ""))
    for node in ast.walk(tree):
        place = places.get(node, "" if unread else "metrics" if of_metrics else others)
        if place and isinstance(node, ast.Constant | ast.JoinedStr):
            literal = _literal(node)
            if place not in (others, "errors") or _is_prose(literal):
                yield from _split(place, file, node.lineno, literal)


def _is_log(call: ast.Call) -> bool:
    """Return whether a call writes a log message."""
    method = call.func
    return (
        isinstance(method, ast.Attribute) and method.attr in _LOG_CALLS and "log" in ast.unparse(method.value).lower()
    )


def _said(call: ast.Call) -> dict[ast.AST, str]:
    """Return the places of an error's texts. The third argument is skipped: it has the accepted values."""
    arguments = [*call.args[:2], *(each.value for each in call.keywords)]
    return {node: "errors" for argument in arguments for node in ast.walk(argument)}


def _is_error(call: ast.Call) -> bool:
    """Return whether a call makes an error, ends a command with an error, or prints an error to stderr."""
    to_stderr = any(ast.unparse(each) in ("err=True", "file=sys.stderr") for each in call.keywords)
    return to_stderr or _ERROR_CALL.search(ast.unparse(call.func)) is not None


def _literal(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a string literal's text with each expression in braces; return an empty text for a number."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    shown = (f"{{{ast.unparse(each.value)}}}" if isinstance(each, ast.FormattedValue) else each for each in node.values)
    return "".join(each if isinstance(each, str) else str(getattr(each, "value", "")) for each in shown)


def _is_prose(literal: str) -> bool:
    """Return whether a string consists of words; most strings of a program are names, paths or patterns."""
    return (
        _words(literal) >= 3 and re.search(r"[a-z,:;] [a-z]", literal) is not None and not re.search(r"[\\$]", literal)
    )


def _words(text: str) -> int:
    """Return the number of words. A name with underscores or dots is one word; code and expressions count none."""
    return sum(_WORD.search(each) is not None for each in _EXPRESSION.sub("", re.sub(r"`[^`]*`", "", text)).split())


def _split(place: str, file: str, line: int, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a text that begins in ``line``. Sentences with too few words are left out."""
    start = 0
    breaks = [each.start() for each in re.finditer("\n", text)]
    for end, following in [*((found.start(), found.end()) for found in _END.finditer(text)), (len(text), len(text))]:
        sentence = text[start:end]
        begins = start + len(sentence) - len(sentence.lstrip())
        if _words(sentence) >= (2 if place in _SHORT else _FEWEST_WORDS):
            yield Sentence(place, file, line + bisect_right(breaks, begins), " ".join(sentence.split()))
        start = following


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def tree(root: Path) -> list[Sentence]:
    """Return every sentence of the files that git tracks or would add, in a fixed order."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [each for each in sorted(set(listed)) if not _EXCLUDED.search(each) and (root / each).is_file()]
    found: set[Sentence] = set()
    for file in files:
        try:
            found.update(sentences(file, (root / file).read_text()))
        except UnicodeDecodeError:
            continue  # The file is an image.
    return sorted(found)


def draw(found: Sequence[Sentence], places: Sequence[str], count: int, seed: int) -> list[Sentence]:
    """Return ``count`` different sentences in the order of the places, drawn from one place after another."""
    chance = random.Random(seed)
    stacks = {place: [each for each in found if each.place == place] for place in places}
    for stack in stacks.values():
        chance.shuffle(stack)
    order = [place for place in places if stacks[place]]
    chance.shuffle(order)
    drawn: list[Sentence] = []
    while len(drawn) < count and any(stacks.values()):
        drawn += [stacks[place].pop() for place in order if stacks[place]]
    return sorted(drawn[:count], key=lambda each: (places.index(each.place), each))


def main() -> None:
    """Print a draw, one sentence per line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="seed of the random draw")
    parser.add_argument("--count", type=int, default=40, help="number of sentences to draw (default 40)")
    parser.add_argument("--from", dest="places", default=",".join(PLACES), help=f"places: {', '.join(PLACES)}")
    parser.add_argument(
        "--list", action="store_true", help="print the number of sentences in each place, without a draw"
    )
    options = parser.parse_args()
    places = options.places.split(",")
    if unknown := sorted(set(places) - set(PLACES)):
        sys.exit(f"sentences: --from: unknown place {unknown[0]!r}; accepted are {', '.join(PLACES)}")
    found = tree(ROOT)
    if options.list:
        for place in places:
            print(f"{sum(each.place == place for each in found):6}  {place:10}  {PLACES[place]}")
        return
    for each in draw(found, places, options.count, options.seed):
        print(f"{each.place:10}  {each.file}:{each.line}: {each.text}")


if __name__ == "__main__":
    main()
