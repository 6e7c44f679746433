"""The errors of the simulated engine, as one small tree.

EngineSimError
├── RequestDoesNotFit      the model: no amount of waiting would make room for this request
└── ApiError               the HTTP surface: a refusal with its status, in OpenAI's shape
"""


class EngineSimError(Exception):
    """Root of the simulator's errors."""


class RequestDoesNotFit(EngineSimError):
    """A request needs more KV memory than the whole engine has, so it could never be admitted."""

    def __init__(self, *, needed_tokens: int, memory_tokens: int) -> None:
        super().__init__(f"prompt and output need {needed_tokens} tokens of KV memory, the engine has {memory_tokens}")
        self.needed_tokens = needed_tokens
        self.memory_tokens = memory_tokens


class ApiError(EngineSimError):
    """A request that the server answers with an OpenAI error body.

    ``kind`` is the ``type`` vLLM puts in that body; ``param`` names the offending field where there is one.
    """

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
