from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Step(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Step]
    HEARD: _ClassVar[Step]
    FIRST_TOKEN: _ClassVar[Step]
    SERVED: _ClassVar[Step]
    FINISHED: _ClassVar[Step]
    COUNTED: _ClassVar[Step]
    ABORTED: _ClassVar[Step]
    FAILED: _ClassVar[Step]
UNKNOWN: Step
HEARD: Step
FIRST_TOKEN: Step
SERVED: Step
FINISHED: Step
COUNTED: Step
ABORTED: Step
FAILED: Step

class Frame(_message.Message):
    __slots__ = ("hello", "proof", "state", "accept", "messages", "entries", "shared")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proof: Proof
    state: State
    accept: bool
    messages: _containers.RepeatedCompositeFieldContainer[PoolMessage]
    entries: _containers.RepeatedCompositeFieldContainer[AccessLogEntry]
    shared: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., accept: _Optional[bool] = ..., messages: _Optional[_Iterable[_Union[PoolMessage, _Mapping]]] = ..., entries: _Optional[_Iterable[_Union[AccessLogEntry, _Mapping]]] = ..., shared: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "name", "nonce")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    nonce: bytes
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("hash",)
    HASH_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    def __init__(self, hash: _Optional[bytes] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("warm", "leaving", "ended")
    WARM_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    warm: bool
    leaving: bool
    ended: bool
    def __init__(self, warm: _Optional[bool] = ..., leaving: _Optional[bool] = ..., ended: _Optional[bool] = ...) -> None: ...

class PoolMessage(_message.Message):
    __slots__ = ("pool", "ask", "answer", "declined", "sent", "progress", "left")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    ask: Ask
    answer: Answer
    declined: Declined
    sent: Sent
    progress: Progress
    left: Left
    def __init__(self, pool: _Optional[str] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., sent: _Optional[_Union[Sent, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., left: _Optional[_Union[Left, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "chain", "subset", "whole", "session", "client", "client_is_salt", "incomparable", "tokens", "sequences", "adapter", "model", "priority", "prefills_up_to", "stored")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    SUBSET_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_IS_SALT_FIELD_NUMBER: _ClassVar[int]
    INCOMPARABLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_UP_TO_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    id: str
    chain: Chain
    subset: Subset
    whole: bool
    session: int
    client: int
    client_is_salt: bool
    incomparable: bool
    tokens: _containers.RepeatedCompositeFieldContainer[TokenChain]
    sequences: int
    adapter: str
    model: str
    priority: int
    prefills_up_to: int
    stored: Stored
    def __init__(self, id: _Optional[str] = ..., chain: _Optional[_Union[Chain, _Mapping]] = ..., subset: _Optional[_Union[Subset, _Mapping]] = ..., whole: _Optional[bool] = ..., session: _Optional[int] = ..., client: _Optional[int] = ..., client_is_salt: _Optional[bool] = ..., incomparable: _Optional[bool] = ..., tokens: _Optional[_Iterable[_Union[TokenChain, _Mapping]]] = ..., sequences: _Optional[int] = ..., adapter: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[int] = ..., prefills_up_to: _Optional[int] = ..., stored: _Optional[_Union[Stored, _Mapping]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("tokens", "held_at")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_AT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    held_at: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, tokens: _Optional[int] = ..., held_at: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("address", "tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    tokens: int
    def __init__(self, address: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Chain(_message.Message):
    __slots__ = ("hashes", "block_tokens", "tokens", "exact", "full_blocks")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    tokens: int
    exact: bool
    full_blocks: int
    def __init__(self, hashes: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., exact: _Optional[bool] = ..., full_blocks: _Optional[int] = ...) -> None: ...

class TokenChain(_message.Message):
    __slots__ = ("keys", "block_tokens", "tokens")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    tokens: int
    def __init__(self, keys: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Subset(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("request", "age_s", "number")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request: Request
    age_s: float
    number: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., age_s: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("decision", "rejection", "queued", "tokens_per_second", "number")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    rejection: Rejection
    queued: Queued
    tokens_per_second: float
    number: int
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., tokens_per_second: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("request_id", "endpoints", "receipt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    receipt: Receipt
    def __init__(self, request_id: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("pool", "policy", "rule", "reason", "key_hash", "key_blocks", "key_tokens", "pair", "chosen", "address", "prompt_tokens", "matched_tokens", "predicted_ttft_s", "candidates", "source", "adapter", "fetch_tokens", "host", "host_source")
    POOL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    KEY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HOST_SOURCE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    policy: str
    rule: str
    reason: str
    key_hash: int
    key_blocks: int
    key_tokens: int
    pair: _containers.RepeatedScalarFieldContainer[str]
    chosen: str
    address: str
    prompt_tokens: int
    matched_tokens: int
    predicted_ttft_s: float
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    source: str
    adapter: str
    fetch_tokens: int
    host: str
    host_source: str
    def __init__(self, pool: _Optional[str] = ..., policy: _Optional[str] = ..., rule: _Optional[str] = ..., reason: _Optional[str] = ..., key_hash: _Optional[int] = ..., key_blocks: _Optional[int] = ..., key_tokens: _Optional[int] = ..., pair: _Optional[_Iterable[str]] = ..., chosen: _Optional[str] = ..., address: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., source: _Optional[str] = ..., adapter: _Optional[str] = ..., fetch_tokens: _Optional[int] = ..., host: _Optional[str] = ..., host_source: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("id", "state", "matched_tokens", "pending_tokens", "in_flight", "ttft_s", "fetch_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    matched_tokens: int
    pending_tokens: int
    in_flight: int
    ttft_s: float
    fetch_tokens: int
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., matched_tokens: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., in_flight: _Optional[int] = ..., ttft_s: _Optional[float] = ..., fetch_tokens: _Optional[int] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("request_id", "reason", "retry_after_s", "limited")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    LIMITED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    retry_after_s: float
    limited: bool
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., limited: _Optional[bool] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("request_id", "number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    number: int
    def __init__(self, request_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("request", "age_s", "endpoint", "sent_ago_s", "matched_tokens", "predicted_ttft_s", "prefilled")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SENT_AGO_S_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    request: Request
    age_s: float
    endpoint: str
    sent_ago_s: float
    matched_tokens: int
    predicted_ttft_s: float
    prefilled: bool
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., age_s: _Optional[float] = ..., endpoint: _Optional[str] = ..., sent_ago_s: _Optional[float] = ..., matched_tokens: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., prefilled: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("request_id", "step", "endpoint", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    step: Step
    endpoint: str
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., step: _Optional[_Union[Step, str]] = ..., endpoint: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AccessLogEntry(_message.Message):
    __slots__ = ("request_id", "status", "flags", "served_endpoint", "usage", "sender", "total_s", "attempts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    SERVED_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    status: int
    flags: _containers.RepeatedScalarFieldContainer[str]
    served_endpoint: str
    usage: Usage
    sender: str
    total_s: float
    attempts: int
    def __init__(self, request_id: _Optional[str] = ..., status: _Optional[int] = ..., flags: _Optional[_Iterable[str]] = ..., served_endpoint: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., sender: _Optional[str] = ..., total_s: _Optional[float] = ..., attempts: _Optional[int] = ...) -> None: ...
