"""The program of a process that reads large bodies: frames of bodies on stdin, frames of results on stdout.

The process ends when the router closes stdin, also if the router is killed. Signals for the whole process group, such
as Ctrl-C or a supervisor's SIGTERM, therefore do not end the process before the router has drained.
"""

import gc
import os
import signal
import sys
from typing import BinaryIO, Final

from dualmap_extproc.request.reading import PREFIX_BYTES, decode_body, encode_result, lengths, read_large

# The event loop comes first if CPU time is short.
_NICE: Final = 5


def serve(bodies: BinaryIO, results: BinaryIO) -> None:
    """Read bodies until their input ends."""
    while len(prefix := bodies.read(PREFIX_BYTES)) == PREFIX_BYTES:
        header, payload = (bodies.read(length) for length in lengths(prefix))
        results.write(encode_result(read_large(decode_body(header, payload))))
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
