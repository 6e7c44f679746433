"""The error classes of the simulated engine.

EngineSimError
├── CannotPublish          the publisher of KV events: a port cannot be used
├── RequestDoesNotFit      the engine model: the request is larger than the engine's KV memory
├── KvNotPulled            the KV of a prompt could not be pulled from another engine
└── ApiError               the HTTP server: an error response with its status, in OpenAI's format
"""


class EngineSimError(Exception):
    """Base class of the simulated engine's errors."""


class RequestDoesNotFit(EngineSimError):
    """A request needs more KV memory than the engine has, so the engine can never admit it."""

    def __init__(self, *, needed_tokens: int, memory_tokens: int) -> None:
        super().__init__(f"prompt and output need {needed_tokens} tokens of KV memory, the engine has {memory_tokens}")
        self.needed_tokens = needed_tokens
        self.memory_tokens = memory_tokens


class CannotPublish(EngineSimError):
    """The publisher of KV events cannot listen on an address."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(f"cannot publish KV events on {endpoint}: {reason}")


class KvNotPulled(EngineSimError):
    """The KV of a prompt could not be pulled: the other engine is gone, or does not have it."""


class ApiError(EngineSimError):
    """A request that the server answers with an OpenAI error body.

    ``kind`` is the ``type`` field of vLLM's error body. ``param`` is the invalid field, if the error concerns a field.
    """

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
