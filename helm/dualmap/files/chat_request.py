"""Sends one chat request through the gateway and reports the result: the chart's `helm test`.

It succeeds on an answer with text whose endpoint a router picked (header x-dualmap-decision). It retries until the
timeout, because a pool may still be starting. Exit status: 0 on success, 1 on failure. Standard library only: the file
runs as it is.
"""

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

AGAIN_AFTER_S = 2.0
DECISION = "x-dualmap-decision"
QUESTION = "Say hello."


class NotGoodError(Exception):
    """The gateway's answer is not as expected; the message describes it."""


def ask(url: str, body: dict[str, Any] | None, *, timeout_s: float) -> tuple[dict[str, Any], str]:
    """Send a GET, or a POST of ``body``; return the answer and the router's decision ("" without one).

    Raises NotGoodError.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            read, decision = answer.read(), answer.headers.get(DECISION, "")
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise NotGoodError(f"{url}: HTTP {error.code}: {said}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NotGoodError(f"{url}: {error}") from error
    try:
        parsed = json.loads(read)
    except ValueError as error:
        raise NotGoodError(f"{url}: the response is not JSON: {read[:200]!r}") from error
    if not isinstance(parsed, dict):
        raise NotGoodError(f"{url}: the response is not a JSON object: {read[:200]!r}")
    return parsed, decision


def first_model(url: str, *, timeout_s: float) -> str:
    """Return the first model that the gateway lists. Raises NotGoodError."""
    listed, _ = ask(f"{url}/v1/models", None, timeout_s=timeout_s)
    models = listed.get("data") or []
    if not models:
        raise NotGoodError(f"{url}/v1/models returned no models")
    return str(models[0]["id"])


def chat(url: str, model: str, *, timeout_s: float) -> str:
    """Send a short chat request and return a line with its result. Raises NotGoodError."""
    named = model or first_model(url, timeout_s=timeout_s)
    body = {"model": named, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
    begun_s = time.monotonic()
    answer, decision = ask(f"{url}/v1/chat/completions", body, timeout_s=timeout_s)
    took_s = time.monotonic() - begun_s
    choices = answer.get("choices") or [{}]
    message = choices[0].get("message") or {}
    # A reasoning model may produce only reasoning within these few tokens.
    text = next((message[key] for key in ("content", "reasoning", "reasoning_content") if message.get(key)), None)
    if not text:
        raise NotGoodError(f"{url}: the response has no text: {json.dumps(answer)[:500]}")
    if not decision:
        raise NotGoodError(f"{url}: the response has no header {DECISION}; does Envoy fail open?")
    return f"model {named} answered {text!r} after {took_s:.2f} s\n{DECISION}: {decision}"


def main() -> int:
    """Send the request until it succeeds or the timeout ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="gateway URL, http://HOST[:PORT]")
    parser.add_argument("--model", default="", help="model name; default: the first model of /v1/models")
    parser.add_argument(
        "--timeout", default=60.0, type=float, metavar="SECONDS", help="total time limit for all attempts"
    )
    options = parser.parse_args()
    ends_s = time.monotonic() + options.timeout
    while True:
        try:
            print(chat(options.url.rstrip("/"), options.model, timeout_s=max(1.0, ends_s - time.monotonic())))
            return 0
        except NotGoodError as error:
            print(error, file=sys.stderr, flush=True)
        if time.monotonic() + AGAIN_AFTER_S > ends_s:
            print(f"no successful answer within {options.timeout:g} s", file=sys.stderr)
            return 1
        time.sleep(AGAIN_AFTER_S)


if __name__ == "__main__":
    sys.exit(main())
