"""The progress of the runs, as one bar on stderr.

The bar is redrawn at each report. The bar uses no thread, because this process forks the worker processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A progress bar with a text for the current activity."""

    def __init__(self, progress: Progress, total: int | None, doing: str) -> None:
        self._progress = progress
        self._task = progress.add_task(doing, total=total)
        progress.refresh()

    def done(self, amount: int) -> None:
        """Advance the bar."""
        self._progress.update(self._task, advance=amount, refresh=True)

    def doing(self, what: str) -> None:
        """Show the current activity."""
        self._progress.update(self._task, description=what, refresh=True)

    def complete(self) -> None:
        """Fill the bar, including requests that were not reported."""
        task = next(each for each in self._progress.tasks if each.id == self._task)
        self._progress.update(self._task, completed=task.total, refresh=True)


@contextmanager
def bar(total: int | None, doing: str) -> Iterator[Bar]:
    """Show a bar on stderr while the context is open. ``total`` is None if it is unknown."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        yield Bar(progress, total, doing)
