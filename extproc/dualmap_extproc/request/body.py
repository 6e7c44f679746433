"""Reads request bodies: the prompt, its session, its quotation for the log, and whether more of the body may come."""

from collections.abc import Mapping

import orjson

from dualmap.errors import BadRequest
from dualmap.keys.sessions import session_key
from dualmap.prompts.prompt import Prompt, read_prompt
from dualmap_extproc.errors import Refused, invalid_body
from dualmap_extproc.settings import Limits

_JSON_SPACE = b" \t\r\n"
# How orjson begins to say that a JSON text ends too early.
_TRUNCATED = "unexpected end of data"


def read_body(body: bytes) -> Prompt | Refused:
    """Return the prompt of a whole body, or the 400 that says what is wrong with it."""
    if not body:
        return invalid_body("the request has no body")
    try:
        return read_prompt(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        return invalid_body(f"the body is not JSON: {error}")
    except BadRequest as error:
        return invalid_body(str(error), param=error.param)


def may_go_on(body: bytes) -> bool:
    """Say whether a body is the beginning of a JSON object that more bytes could complete, and not complete yet."""
    text = body.lstrip(_JSON_SPACE)
    if not text.startswith(b"{"):
        return not text
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        # Position 0 holds the brace: what is reported there is bytes that are no UTF-8, as when a character is cut.
        return error.pos == 0 or error.msg.startswith(_TRUNCATED)
    return False


def session_of(name: str, root: int, limits: Limits) -> int | None:
    """Return the session that a request names; None for a name that is empty or too long."""
    return session_key(name, root) if 0 < len(name) <= limits.session_characters else None


def quoted_of(prompt: Prompt, headers: Mapping[str, str], limits: Limits) -> Mapping[str, object]:
    """Return what a debug line quotes of a request."""
    text = prompt.text.decode("utf-8", "replace")[: limits.quoted_characters]
    return {"prompt": text, "headers": {name: ascii(value) for name, value in headers.items()}}
