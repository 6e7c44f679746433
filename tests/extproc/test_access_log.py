import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from dualmap.requests import Usage
from dualmap_extproc.envoy.access_log.entry import read_entry, read_id
from dualmap_extproc.envoy.access_log.forwarding import Connections
from dualmap_extproc.envoy.access_log.sink import AccessLogSink
from dualmap_extproc.names import ACCESS_LOG_METHOD, ACCESS_LOG_SERVICE, SHARED_ACCESS_LOG
from dualmap_extproc.request.ending import BROKEN_FLAGS, FAILED_FLAGS, AccessLogEntry, Ending
from dualmap_extproc.request.ids import RequestIds
from dualmap_extproc.wire import access_log_pb2 as wire
from extproc import transports
from waiting import WAIT_S

METHOD = f"/{ACCESS_LOG_SERVICE}/{ACCESS_LOG_METHOD}"


def entry(request_id: str = "r-1", *, status: int | None = 200, **tags: str) -> wire.HTTPAccessLogEntry:
    """Return Envoy 1.40's entry for a successful stream."""
    message = wire.HTTPAccessLogEntry()
    common = message.common_properties
    common.upstream_remote_address.socket_address.address = "10.0.0.1"
    common.upstream_remote_address.socket_address.port_value = 8000
    common.response_flags.SetInParent()
    common.custom_tags.update(
        {"id": request_id, "prompt_tokens": "1310", "completion_tokens": "120", "cached_tokens": "1024"} | tags
    )
    if status is not None:
        message.response.response_code.value = status
    return message


def read(message: wire.HTTPAccessLogEntry) -> AccessLogEntry:
    request_id = read_id(message)
    assert request_id
    return read_entry(message, request_id)


class TestReading:
    def test_access_log_entry_of_finished_stream_is_parsed(self) -> None:
        assert read(entry()) == AccessLogEntry(
            request_id="r-1",
            status=200,
            flags=(),
            served_endpoint="10.0.0.1:8000",
            usage=Usage(prompt_tokens=1310, completion_tokens=120, cached_tokens=1024),
        )
        assert read(entry()).ending is Ending.FINISHED

    def test_access_log_entry_has_duration_and_attempts(self) -> None:
        message = entry(total_us="1.5e+06")
        message.common_properties.upstream_request_attempt_count = 2

        assert (read(message).total_s, read(message).attempts) == (1.5, 2)
        assert read(entry(total_us="-")).total_s is None
        assert read(entry(total_us="1e300")).total_s is None

    @pytest.mark.parametrize("absent", ["-", ""])
    def test_access_log_entry_missing_values_are_none(self, absent: str) -> None:
        assert read(entry(prompt_tokens=absent, completion_tokens=absent, cached_tokens=absent)).usage is None

    def test_access_log_entry_with_only_a_request_id_is_parsed(self) -> None:
        message = wire.HTTPAccessLogEntry()
        message.common_properties.custom_tags["id"] = "r"
        assert read(message) == AccessLogEntry(request_id="r")
        assert read(message).ending is Ending.ABORTED

    @pytest.mark.parametrize("request_id", ["", "-"])
    def test_access_log_entry_without_pick_has_no_request_id(self, request_id: str) -> None:
        assert read_id(entry(request_id)) == ""
        assert read_id(wire.HTTPAccessLogEntry()) == ""
        assert read_id(entry("r")) == "r"

    def test_access_log_entry_id_is_read_only_from_metadata(self) -> None:
        message = wire.HTTPAccessLogEntry()
        message.common_properties.metadata.filter_metadata["dualmap"].update({"id": "r-7"})
        assert read(message).request_id == "r-7"

    @pytest.mark.parametrize("odd", [5, None, {"id": "x"}, ["x"], True])
    def test_access_log_entry_id_of_another_type_is_none(self, odd: Any) -> None:
        message = wire.HTTPAccessLogEntry()
        message.common_properties.metadata.filter_metadata["dualmap"].update({"id": odd})
        assert read_id(message) == ""

    def test_access_log_entry_is_unchanged_by_parsing(self) -> None:
        message = entry("-")
        before = message.SerializeToString(deterministic=True)
        read_entry(message, read_id(message))
        assert message.SerializeToString(deterministic=True) == before

    @pytest.mark.parametrize(
        ("flag", "complete"),
        [
            ("downstream_connection_termination", False),
            ("downstream_remote_reset", False),
            ("upstream_remote_reset", False),
            ("upstream_connection_termination", False),
            ("stream_idle_timeout", False),
            ("upstream_overflow", False),
            ("upstream_retry_limit_exceeded", True),
        ],
    )
    def test_access_log_entry_flags_show_if_the_request_completed(self, flag: str, *, complete: bool) -> None:
        message = entry()
        setattr(message.common_properties.response_flags, flag, True)
        got = read(message)
        assert got.flags == (flag,)
        assert (got.ending is Ending.FINISHED) is complete

    @pytest.mark.parametrize(
        ("flags", "ending"),
        [
            (["upstream_remote_reset"], Ending.FAILED),
            (["upstream_connection_termination"], Ending.FAILED),
            (["upstream_request_timeout"], Ending.FAILED),
            (["downstream_connection_termination"], Ending.ABORTED),
            (["stream_idle_timeout"], Ending.ABORTED),
            (["downstream_remote_reset", "upstream_remote_reset"], Ending.ABORTED),
        ],
    )
    def test_access_log_entry_flags_show_the_aborting_side(self, flags: list[str], ending: Ending) -> None:
        """An instance that aborts its response has failed, unless the client also disconnected."""
        message = entry()
        for flag in flags:
            setattr(message.common_properties.response_flags, flag, True)
        assert read(message).ending is ending

    def test_access_log_abort_flags_all_exist_in_envoy(self) -> None:
        names = {field.name for field in wire.ResponseFlags.DESCRIPTOR.fields}
        assert names >= BROKEN_FLAGS
        assert names >= FAILED_FLAGS
        assert not BROKEN_FLAGS & FAILED_FLAGS

    @pytest.mark.parametrize(("length", "known"), [(512, True), (513, False)])
    def test_access_log_entry_id_above_maximum_length_is_none(self, length: int, *, known: bool) -> None:
        assert (read_id(entry("r" * length)) != "") is known

    @pytest.mark.parametrize(
        ("ending", "statuses"),
        [
            (Ending.FINISHED, [200, 204, 304, 399]),
            (Ending.REJECTED, [400, 401, 404, 413, 422, 499]),
            (Ending.ABORTED, [0, 101, 408, 429, 600]),
            (Ending.FAILED, [500, 502, 503, 504]),
        ],
    )
    def test_access_log_entry_status_determines_the_outcome(self, ending: Ending, statuses: list[int]) -> None:
        assert [read(entry(status=status)).ending for status in statuses] == [ending] * len(statuses)

    def test_access_log_entry_of_aborted_rejection_has_no_outcome(self) -> None:
        message = entry(status=400)
        message.common_properties.response_flags.upstream_remote_reset = True
        assert read(message).ending is Ending.FAILED

    def test_access_log_entry_without_status_is_not_complete(self) -> None:
        assert read(entry(status=None)).status is None
        assert read(entry(status=None)).ending is Ending.ABORTED

    def test_access_log_entry_ipv6_endpoint_has_brackets(self) -> None:
        message = entry()
        message.common_properties.upstream_remote_address.socket_address.address = "fd00::1"
        assert read(message).served_endpoint == "[fd00::1]:8000"

    def test_access_log_entry_address_without_port_is_none(self) -> None:
        message = entry()
        message.common_properties.upstream_remote_address.socket_address.named_port = "http"
        assert read(message).served_endpoint is None

    def test_access_log_entry_with_a_long_address_has_no_endpoint(self) -> None:
        message = entry()
        message.common_properties.upstream_remote_address.socket_address.address = "f" * 46
        assert read(message).served_endpoint is None

    def test_access_log_entry_with_invalid_port_has_no_endpoint(self) -> None:
        message = entry()
        message.common_properties.upstream_remote_address.socket_address.port_value = 65_536
        assert read(message).served_endpoint is None

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("7", 7),
            ("7.0", 7),
            ("1e+06", 1_000_000),
            ("0", 0),
            ("-1", None),
            ("1e999", None),
            ("nan", None),
            ("1e300", None),
            ("many", None),
            ("9" * 400, None),
        ],
    )
    def test_access_log_entry_number_tag_is_parsed_or_none(self, text: str, value: int | None) -> None:
        usage = read(entry(cached_tokens=text)).usage
        assert usage is not None
        assert usage.cached_tokens == value

    @given(st.dictionaries(st.sampled_from(["id", "ttft_us", "prompt_tokens", "cached_tokens"]), st.text()))
    def test_access_log_entry_tags_of_any_text_raise_no_error(self, tags: dict[str, str]) -> None:
        message = wire.HTTPAccessLogEntry()
        for name, text in tags.items():
            try:
                message.common_properties.custom_tags[name] = text
            except UnicodeEncodeError:
                return  # A surrogate cannot arrive in a protobuf string.
        read_entry(message, read_id(message))

    @given(st.binary(max_size=300))
    def test_access_log_entry_of_any_bytes_raises_no_error(self, data: bytes) -> None:
        message = wire.HTTPAccessLogEntry()
        try:
            message.ParseFromString(data)
        except Exception:  # noqa: BLE001  # protobuf raises errors of several classes for invalid bytes
            return
        read_entry(message, read_id(message))


class Counts:
    def __init__(self) -> None:
        self.known = self.others = self.unreadable = self.foreign = self.undelivered = 0

    def access_log_entries(self, *, known: int, others: int) -> None:
        self.known += known
        self.others += others

    def access_log_unreadable(self) -> None:
        self.unreadable += 1

    def access_log_foreign(self, count: int) -> None:
        self.foreign += count

    def access_log_undelivered(self, count: int) -> None:
        self.undelivered += count


class AnySender(RequestIds):
    """Ids of which every client may report."""

    def __init__(self, prefix: str) -> None:
        super().__init__("", b"")
        self.prefix = prefix

    def is_from(self, request_id: str, peer: str) -> bool:
        return bool(request_id)


Stream = grpc.aio.StreamUnaryCall[bytes, wire.StreamAccessLogsResponse]


@asynccontextmanager
async def serving(
    on_entries: Callable[[tuple[AccessLogEntry, ...]], None],
    counts: Counts,
    *,
    ids: RequestIds | None = None,
    connections: Connections | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Callable[[], Stream]]:
    """Run an access log sink on its own port; yield a function that opens streams of raw bytes to the sink."""
    sink = AccessLogSink(on_entries, counts, ids=ids or AnySender(""), connections=connections, clock=clock)
    async with (
        transports.serving((sink.handler(),)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        method = channel.stream_unary(METHOD, bytes, wire.StreamAccessLogsResponse.FromString)
        yield lambda: method(None)


def batch(*entries: wire.HTTPAccessLogEntry) -> bytes:
    message = wire.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return message.SerializeToString()


@pytest.mark.usefixtures("transport")
class TestServing:
    async def test_access_log_sink_reads_several_streams_to_their_end(self) -> None:
        received: list[str] = []
        counts = Counts()
        async with serving(lambda some: received.extend(each.request_id for each in some), counts) as opened:
            streams = [opened() for _ in range(3)]
            for number, stream in enumerate(streams):
                await stream.write(batch(entry(f"{number}-a"), entry("-"), entry(f"{number}-b")))
                await stream.write(batch())
                await stream.write(batch(entry(f"{number}-c")))
            for stream in streams:
                await stream.done_writing()
                assert await stream == wire.StreamAccessLogsResponse()
        for number in range(3):
            assert [each for each in received if each.startswith(f"{number}-")] == [
                f"{number}-a",
                f"{number}-b",
                f"{number}-c",
            ]
        assert (counts.known, counts.others, counts.unreadable) == (9, 3, 0)

    async def test_access_log_sink_only_counts_entries_of_other_routers(self) -> None:
        received: list[str] = []
        counts = Counts()
        async with serving(
            lambda some: received.extend(each.request_id for each in some), counts, ids=AnySender("b-1f")
        ) as opened:
            stream = opened()
            await stream.write(batch(entry("a-1f-0"), entry("b-1f-0"), entry("-"), entry("b-2e-0"), entry("b-1f-1")))
            await stream.done_writing()
            await stream
        assert received == ["b-1f-0", "b-1f-1"]
        assert (counts.known, counts.others) == (4, 1)

    async def test_access_log_sink_forwards_entries_of_other_routers(self) -> None:
        forwarded: list[AccessLogEntry] = []
        counts = Counts()

        class Others:
            def forward(self, sent: AccessLogEntry) -> bool:
                forwarded.append(sent)
                return True

            def orphan(self, sent: AccessLogEntry) -> None:
                raise AssertionError(sent)

            def on_lost(self, lost: Callable[[str], None]) -> None:
                pass

        async with serving(lambda _: None, counts, ids=AnySender("b-1f"), connections=Others()) as opened:
            stream = opened()
            named = wire.StreamAccessLogsMessage()
            named.identifier.log_name = SHARED_ACCESS_LOG
            entries = batch(entry("a-1f-0"), entry("b-1f-0"), entry("-"), entry("b-2e-0"))
            await stream.write(named.SerializeToString() + entries)
            await stream.done_writing()
            await stream
        assert [each.request_id for each in forwarded] == ["a-1f-0", "b-2e-0"]
        assert {each.sender for each in forwarded} == {"127.0.0.1"}
        assert (counts.known, counts.others) == (3, 1)

    async def test_access_log_sink_drops_only_the_unreadable_batch(self, caplog: pytest.LogCaptureFixture) -> None:
        received: list[str] = []
        counts = Counts()
        async with serving(lambda some: received.extend(each.request_id for each in some), counts) as opened:
            stream = opened()
            # The second entry has invalid UTF-8 in a string field.
            for data in (b"\xff\xff\xff", batch(entry("r-bad")).replace(b"r-bad", b"r-\xff\xfe\xfd"), batch(entry())):
                await stream.write(data)
            await stream.done_writing()
            await stream
        assert received == ["r-1"]
        assert (counts.known, counts.unreadable) == (1, 2)
        assert len(caplog.records) == 1

    async def test_sink_junk_batches_log_one_line_a_minute(self, caplog: pytest.LogCaptureFixture) -> None:
        counts = Counts()
        now = [1000.0]
        async with serving(lambda _: None, counts, clock=lambda: now[0]) as opened:
            for at_s in (1000.0, 1059.0, 1060.0):
                now[0] = at_s
                stream = opened()
                for _ in range(50):
                    await stream.write(b"\xff\xff\xff")
                await stream.done_writing()
                await stream
        assert counts.unreadable == 150
        logged = [record.__dict__["details"]["count"] for record in caplog.records]
        assert logged == [1, 100]

    async def test_access_log_sink_passes_long_batch_in_parts(self) -> None:
        pieces: list[int] = []
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += bool(pieces)
                await asyncio.sleep(0)

        async with serving(lambda some: pieces.append(len(some)), Counts()) as opened:
            waiting = asyncio.create_task(others())
            stream = opened()
            await stream.write(batch(*(entry(f"r-{n}") for n in range(250))))
            await stream.done_writing()
            await stream
            waiting.cancel()
        assert pieces == [100, 100, 50]
        assert turns >= 2

    async def test_access_log_sink_keeps_other_streams_after_an_abort(self) -> None:
        received: asyncio.Queue[str] = asyncio.Queue()

        def take(some: tuple[AccessLogEntry, ...]) -> None:
            for each in some:
                received.put_nowait(each.request_id)

        async with serving(take, Counts()) as opened:
            broken, whole = opened(), opened()
            await broken.write(batch(entry("broken")))
            assert await asyncio.wait_for(received.get(), WAIT_S) == "broken"
            broken.cancel()
            await whole.write(batch(entry("whole")))
            assert await asyncio.wait_for(received.get(), WAIT_S) == "whole"


def test_access_log_entry_metadata_without_id_is_none() -> None:
    message = wire.HTTPAccessLogEntry()
    message.common_properties.metadata.filter_metadata["dualmap"].CopyFrom(struct_pb2.Struct())
    assert read_id(message) == ""
