"""The options of the recording, and the settings that they make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from dualmap_edge.options import Size
from dualmap_extproc.recording.folder import RecordingError, RecordingFolder
from dualmap_extproc.settings import RecordingSettings

_Function = TypeVar("_Function", bound=Callable[..., Any])
_DEPENDENT: Final = ("record_sample", "record_max")


class _Share(click.ParamType[float]):
    """The parameter type of a share above 0 and at most 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 1.0:
            self.fail(f"{value!r} is not accepted; give a share above 0 and at most 1, such as 0.1", param, ctx)
        return share


class _Folder(click.Path):
    """The parameter type of a folder; an empty name, as of an unset variable, is no folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("'' is not accepted; give a folder", param, ctx)
        return super().convert(value, param, ctx)


def record_options(function: _Function) -> _Function:
    """Add the options of the recording."""
    for option in (
        click.option(
            "--record-max",
            default="10GB",
            type=Size(),
            help="Maximum size of the recording. The router deletes the oldest files first.",
        ),
        click.option("--record-sample", default="1", type=_Share(), help="Share of the sessions to record."),
        click.option(
            "--record",
            type=_Folder(path_type=Path),
            metavar="DIR",
            help="Record each request in this folder, without its text. No other router may record there.",
        ),
    ):
        function = option(function)
    return function


def recording_settings(
    folder: Path | None, *, sample: float, max_bytes: int
) -> tuple[RecordingSettings | None, bytes | None]:
    """Return the settings of the recording, and its secret. Makes the folder and its key at the first start.

    Both are None without a folder. The secret is None if the folder cannot be used now: the router then runs without a
    recording, and tries again. Raises UsageError for a folder that this router may not use.
    """
    ctx = click.get_current_context()
    if folder is None:
        given = [
            each for each in _DEPENDENT if ctx.get_parameter_source(each) is click.core.ParameterSource.COMMANDLINE
        ]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise click.UsageError(f"{option} requires --record; add --record DIR or omit {option}")
        return None, None
    opened = RecordingFolder(folder)
    secret = None
    try:
        secret = opened.open()
    except (FileExistsError, NotADirectoryError):
        raise click.UsageError(f"--record {folder}: is not a folder; give the path of a folder") from None
    except RecordingError as error:
        raise click.UsageError(f"--record {error}") from None
    except OSError:
        # A full or failing disk stops the recording, and never the router. ``recording.writer`` logs it.
        secret = None
    finally:
        opened.close()
    return RecordingSettings(folder=folder, sample=sample, max_bytes=max_bytes), secret
