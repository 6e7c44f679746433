"""The program of a process that reads large bodies: frames of bodies on stdin, frames of results on stdout.

The process ends when the router closes stdin, also if the router is killed. Signals for the whole process group, such
as Ctrl-C or a supervisor's SIGTERM, therefore do not end the process before the router has drained.
"""

import gc
import os
import signal
import sys
from collections import OrderedDict
from typing import BinaryIO, Final

from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Rendered
from dualmap_extproc.request.reading import PREFIX_BYTES, decode_body, encode_result, lengths, read_large
from dualmap_extproc.tokens.rendering import CONFIG, TEMPLATE, PromptTexts, TokenizerError, Version, version_of

# The event loop comes first if CPU time is short.
_NICE: Final = 5
RENDER_S: Final = 0.2
"""The longest time of rendering a body."""
RENDERED_MAX_CHARACTERS: Final = 4 * 1024 * 1024
"""The longest text that the router tokenizes."""
_FOLDERS_MAX: Final = 32


class Templates:
    """The chat templates that this process has used. It implements ``request.reading.Render``.

    A template may take long for a crafted request, so rendering ends after RENDER_S. A folder that changes is read
    again. The router says why a folder cannot be read.
    """

    def __init__(self) -> None:
        self._read: OrderedDict[str, tuple[Version, PromptTexts | None]] = OrderedDict()

    def __call__(self, folder: str, body: object, api: Api) -> Rendered | None:
        """Return the text of a parsed body; None if it is unknown, too long or takes too long."""
        texts = self._texts(folder)
        if texts is None:
            return None
        try:
            signal.setitimer(signal.ITIMER_REAL, RENDER_S)
            try:
                rendered = texts.rendered(body, api)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (Exception, _TooLate):  # noqa: BLE001  # the request is routed, whatever is wrong with the template
            return None
        return rendered if len(rendered.text) <= RENDERED_MAX_CHARACTERS else None

    def _texts(self, folder: str) -> PromptTexts | None:
        version = version_of(folder, CONFIG, TEMPLATE)
        known = self._read.pop(folder, None)
        if known is None or known[0] != version:
            try:
                known = (version, PromptTexts(folder))
            except TokenizerError:
                known = (version, None)
        self._read[folder] = known
        if len(self._read) > _FOLDERS_MAX:
            self._read.popitem(last=False)
        return known[1]


class _TooLate(BaseException):
    """Raised by the timer. Templates' own handlers of errors do not catch it."""


def _stop_rendering(_number: int, _frame: object) -> None:
    raise _TooLate


def serve(bodies: BinaryIO, results: BinaryIO) -> None:
    """Read bodies until their input ends."""
    signal.signal(signal.SIGALRM, _stop_rendering)
    render = Templates()
    while len(prefix := bodies.read(PREFIX_BYTES)) == PREFIX_BYTES:
        header, payload = (bodies.read(length) for length in lengths(prefix))
        results.write(encode_result(read_large(decode_body(header, payload), render)))
        results.flush()
        del header, payload
        # The collector is off, because it would search millions of parsed objects in vain. Exceptions leave cycles.
        gc.collect()


def main() -> None:
    """Serve stdin and stdout."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    gc.disable()
    # The collection after each body leaves out the objects of the program itself: they take longer than a small body.
    gc.freeze()
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # The router has ended. Nothing may write to stdout at the interpreter's end either.
        os._exit(0)


if __name__ == "__main__":
    main()
