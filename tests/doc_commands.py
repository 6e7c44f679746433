"""The commands in the documents' shell blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "helm/**/*.md", "manifests/*.md")
_SHELLS = ("", "sh", "shell", "bash", "console")


@dataclass(frozen=True, slots=True)
class Command:
    """One command line without prompt and comment, and its documentation page."""

    page: str
    line: str

    @property
    def program(self) -> str:
        return self.line.split()[0]


def commands(*programs: str) -> Iterator[Command]:
    """Yield all commands of the documents that begin with one of these programs."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            for line in _typed(path.read_text()):
                if line.split(" ", 1)[0] in programs:
                    yield Command(str(path.relative_to(ROOT)), line)


def _typed(page: str) -> Iterator[str]:
    """Yield the complete lines of a page's shell blocks, without prompt and comment."""
    language: str | None = None
    for line in page.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            language = line[3:].strip() if language is None else None
        elif language in _SHELLS:
            yield " ".join(re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ ")).split())
