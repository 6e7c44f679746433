"""A request's body as bytes: its prompt (for ``picker``), and whether more bytes could make it one (for ``stream``)."""

import orjson

from dualmap.errors import BadRequest
from dualmap.prompts.api import Api
from dualmap.prompts.prompt import Prompt, read_prompt
from dualmap_extproc.errors import Refused, invalid_body

_JSON_SPACE = b" \t\r\n"
# How orjson begins to say that a JSON text ends too early.
_TRUNCATED = "unexpected end of data"


def read_body(body: bytes, api: Api) -> Prompt | Refused:
    """Return the prompt of a whole body that was sent to ``api``, or the 400 that says what is wrong with it."""
    if not body:
        return invalid_body("the request has no body")
    try:
        return read_prompt(orjson.loads(body), api)
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
