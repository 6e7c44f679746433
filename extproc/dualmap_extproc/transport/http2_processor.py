"""The ext_proc service on the HTTP/2 server: passes messages to each stream's state machine and sends the answers."""

from google.protobuf.message import DecodeError

from dualmap_extproc.transport.http2.calls import Call, CallHandler, Factory
from dualmap_extproc.transport.http2.status import Status
from dualmap_extproc.transport.processor import Answers, ExternalProcessor


def http2_method(processor: ExternalProcessor) -> Factory:
    """Return what serves a call of the ext_proc method."""

    def begin(call: Call) -> CallHandler:
        return _Exchange(processor, call)

    return begin


class _Exchange:
    """One stream of ext_proc: answers are sent while a message is processed, so no task exists per stream."""

    __slots__ = ("_call", "_open", "_processor", "_stream")

    def __init__(self, processor: ExternalProcessor, call: Call) -> None:
        self._processor = processor
        self._call = call
        self._stream = processor.open(self._write, call.peer)
        self._open = True

    def message(self, now: float, data: memoryview | bytes) -> None:
        stream, processor = self._stream, self._processor
        echoed = stream.echo(now, data)
        if echoed is not None:
            self._call.send(echoed)
            return
        try:
            self._write(processor.receive(stream, now, data))
        except DecodeError as error:
            self._close(now, cancelled=True)
            self._call.finish(Status.INVALID_ARGUMENT, str(error))
            return
        except Exception:
            self._close(now, cancelled=True)
            raise
        if stream.ended:
            self._end(now)
        elif stream.deadline_s is not None:
            processor.watch(stream, self._write)

    def half_closed(self, now: float) -> None:
        self._end(now)

    def cancelled(self, now: float) -> None:
        self._close(now, cancelled=True)

    def drained(self) -> None:
        self._stream.written()

    def _write(self, answers: Answers) -> None:
        call = self._call
        for answer in answers:
            call.send(answer)
        if not call.unsent_bytes:
            self._stream.written()

    def _end(self, now: float) -> None:
        self._close(now, cancelled=False)
        self._call.finish()

    def _close(self, now: float, *, cancelled: bool) -> None:
        if self._open:
            self._open = False
            self._processor.close(self._stream, now, cancelled=cancelled)
