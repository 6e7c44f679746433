"""The limits of one HTTP/2 connection, and the counters of what a server refused."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """The limits of one connection. Every value bounds memory or CPU time that a peer can cause.

    ``streams`` bounds the calls that are open at the same time; a further call is refused with REFUSED_STREAM.
    ``header_block_bytes`` and ``continuations`` bound a compressed header block, ``header_list_bytes`` the decoded
    list (RFC 9113 section 6.5.2), ``settings_entries`` one SETTINGS frame.

    ``message_bytes`` bounds one gRPC message, and ``unfinished_bytes`` all incomplete messages of the connection. A
    call above either gets RESOURCE_EXHAUSTED. ``unsent_stream_bytes`` and ``unsent_connection_bytes`` bound messages
    that wait to be sent; a call above either is reset. ``output_bytes`` bounds the messages in one piece of output, so
    that answers to PING do not wait behind many messages.

    ``stream_window_bytes`` and ``connection_window_bytes`` are the windows that the server grants.

    ``reset_burst`` and ``reset_rate`` (per second) bound resets of calls younger than ``reset_age_s``, received or
    provoked by errors. ``control_burst`` and ``control_rate`` bound frames that carry nothing: PING, SETTINGS,
    PRIORITY, GOAWAY, empty DATA, WINDOW_UPDATE below ``small_update_bytes``, unknown frames, and late frames of ended
    calls. Each finished call returns ``control_per_call``, because Envoy answers every call that the server ends with
    RST_STREAM, and often with a late message. Each received message returns 1, because clients measure the round trip
    with PINGs while they send. Above either bound, the connection ends with GOAWAY(ENHANCE_YOUR_CALM).

    ``handshake_s`` is the time for preface and SETTINGS. After ``ping_s`` without a byte the server sends PING, and
    after ``silence_s`` it closes the connection. ``drain_ping_s`` is the longest wait for the answer to a drain's PING.
    ``ended_ids`` is the least number of ended streams that the connection remembers.
    """

    streams: int = 131_072
    header_block_bytes: int = 16_384
    continuations: int = 8
    header_list_bytes: int = 16_384
    settings_entries: int = 40
    message_bytes: int = 40 * 1024 * 1024
    unfinished_bytes: int = 64 * 1024 * 1024
    unsent_stream_bytes: int = 17 * 1024 * 1024
    unsent_connection_bytes: int = 512 * 1024 * 1024
    output_bytes: int = 262_144
    stream_window_bytes: int = 1_048_576
    connection_window_bytes: int = 64 * 1024 * 1024
    reset_burst: int = 8_000
    reset_rate: int = 500
    reset_age_s: float = 1.0
    control_burst: int = 2_000
    control_rate: int = 500
    control_per_call: int = 8
    small_update_bytes: int = 1_024
    handshake_s: float = 10.0
    ping_s: float = 30.0
    silence_s: float = 60.0
    drain_ping_s: float = 1.0
    ended_ids: int = 4_096


@dataclass(slots=True)
class Http2Counters:
    """The counters of all connections of a server. They only grow.

    ``goaways`` has the number of connections that the server ended, by the reason: ``drain``, ``silence``,
    ``handshake``, ``resets``, ``control_frames``, ``header_bytes``, ``settings``, or an error of RFC 9113 section 7 in
    lower case. ``refused_streams`` are calls above ``Http2Limits.streams``, ``stream_errors`` calls that a frame's
    error reset, ``overflows`` calls above the limits of unsent bytes, ``late_frames`` frames of ended calls, and
    ``failed_handlers`` exceptions of handlers.
    """

    goaways: Counter[str] = field(default_factory=Counter)
    refused_streams: int = 0
    stream_errors: int = 0
    overflows: int = 0
    late_frames: int = 0
    failed_handlers: int = 0
