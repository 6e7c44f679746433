"""The commands that the documents tell people to type: the lines of their shell blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "helm/**/*.md", "manifests/*.md")
_BLOCK = re.compile(r"^```(?:sh|shell|console|bash|)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROGRAMS = ("dualmap", "kubectl", "helm", "make", "sed", "curl", "python", "promtool")


@dataclass(frozen=True, slots=True)
class Command:
    """One line as it is typed, without its prompt and comment, and the page it stands on."""

    page: str
    line: str

    @property
    def program(self) -> str:
        return self.line.split()[0]


def commands(*programs: str) -> Iterator[Command]:
    """Yield every command of the documents that begins with one of these programs."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            for block in _BLOCK.findall(path.read_text()):
                for line in block.replace("\\\n", " ").splitlines():
                    typed = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
                    if typed.split(" ", 1)[0] in (programs or _PROGRAMS):
                        yield Command(str(path.relative_to(ROOT)), " ".join(typed.split()))
