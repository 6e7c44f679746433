"""The ext_proc service in grpc.aio: passes messages to each stream's state machine and writes the answers."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dualmap_extproc.names import EXT_PROC_METHOD, EXT_PROC_SERVICE
from dualmap_extproc.transport.grpc_server import Handler
from dualmap_extproc.transport.processor import Answers, ExternalProcessor
from dualmap_extproc.wire.peer import peer_of

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"

_EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined] # grpc-stubs declares only the type


def grpc_handler(processor: ExternalProcessor) -> Handler:
    """Return the handler of the ext_proc service, for registration in grpc.aio."""

    async def process(_: object, context: _Context) -> None:
        await _process(processor, context)

    # Without serializers, gRPC passes bytes in both directions.
    method = grpc.stream_stream_rpc_method_handler(process)
    return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {EXT_PROC_METHOD: method})


async def _process(processor: ExternalProcessor, context: _Context) -> None:
    """Serve one stream, and close its state machine after any end of the stream."""
    clock = asyncio.get_running_loop().time
    writer = _UnpromptedWriter(context)
    stream = processor.open(writer.write, peer_of(context))
    writer.on_written = stream.written
    cancelled = True
    try:
        while not stream.ended:
            message = await context.read()
            if writer.writing is not None:
                await writer.writing
            if message is _EOF:
                break
            answers = processor.receive(stream, clock(), message)
            for answer in answers:
                await context.write(answer)
            stream.written()
            # The next message may come much later; what this one and its answers contain is not stored until then.
            del message, answers
            processor.watch(stream, writer.write)
        cancelled = False
    except DecodeError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    finally:
        processor.close(stream, clock(), cancelled=cancelled)
        writer.cancel()


class _UnpromptedWriter:
    """The writer of answers without a preceding message: after a stream's deadline or a queued request's decision.

    The stream's handler awaits the next message meanwhile. gRPC accepts only one write at a time, so the handler must
    await ``writing`` before it writes anything.
    """

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.writing: asyncio.Task[None] | None = None
        self.on_written: Callable[[], None] = lambda: None

    def write(self, answers: Answers) -> None:
        """Start to write answers after the current write ends."""
        self.writing = asyncio.create_task(self._write(answers, after=self.writing))
        # If the call ends meanwhile, the write fails. The handler also detects the end, so the callback drops the
        # error.
        self.writing.add_done_callback(lambda task: task.cancelled() or task.exception())

    def cancel(self) -> None:
        """Stop writing, because the stream has ended."""
        if self.writing is not None:
            self.writing.cancel()

    async def _write(self, answers: Answers, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await after
        for answer in answers:
            await self._context.write(answer)
        self.on_written()
