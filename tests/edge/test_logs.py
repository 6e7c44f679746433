import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dualmap_edge.logs import LOG_FORMATS, LogFormat, configure, get_logger
from dualmap_extproc.request.picker import Picker
from dualmap_extproc.settings import Limits
from extproc.envoy_messages import (
    MODES,
    NO_WAIT,
    Conversation,
    Recorder,
    chat,
    crowded_pool,
    request_body,
    request_headers,
    response_body,
    response_headers,
)

NAME = "dualmap_extproc.somewhere"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("dualmap_extproc")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    # A call of setLevel also clears logging's cache of enabled levels.
    root.setLevel(before[1])
    ours.setLevel(before[2])


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_json_log_has_message_details_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger(NAME)
    configure(level="info", log_format="json")
    log.info("pool file reloaded", file="p.yaml", version=7)
    (line,) = lines(capsys)
    assert str(line.pop("timestamp")).endswith("Z")
    assert line == {
        "event": "pool file reloaded",
        "file": "p.yaml",
        "version": 7,
        "level": "info",
        "logger": NAME,
    }


def test_text_log_is_a_single_line_with_the_details(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format="text")
    get_logger(NAME).warning("refused", value="two\nlines")
    (line,) = capsys.readouterr().err.splitlines()
    assert "refused" in line
    assert r"value='two\nlines'" in line


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_log_level_sets_the_lowest_level_written(
    level: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure(level=level, log_format="json")
    log = get_logger(NAME)
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.error("e")
    assert [line["level"] for line in lines(capsys)] == expected
    assert log.debugging is ("debug" in expected)


def test_library_logs_start_at_warning_in_the_same_format(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="debug", log_format="json")
    library = logging.getLogger("some.library")
    library.info("chatter %s", 1)
    library.warning("trouble %s", 2)
    assert [(line["event"], line["level"]) for line in lines(capsys)] == [("trouble 2", "warning")]


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_logged_traceback_has_no_local_variables(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format=log_format)
    prompt = "".join(["a secret", " prompt"])
    try:
        _ = prompt.missing  # type: ignore[attr-defined]  # the failure is the point
    except AttributeError:
        logging.getLogger("some.library").exception("unforeseen")
    written = capsys.readouterr().err
    assert "AttributeError" in written
    assert "Traceback" in written
    assert "secret prompt" not in written


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_log_writes_values_of_any_type(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format=log_format)
    get_logger(NAME).info("odd", name="n", msg="m", args=(1,), what=object(), level=object())
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_log_configured_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format="json")
    configure(level="info", log_format="json")
    get_logger(NAME).info("once")
    assert len(lines(capsys)) == 1


@pytest.mark.parametrize(("level", "log_format"), [("loud", "text"), ("INFO", "text"), ("info", "xml")])
def test_log_with_unknown_level_or_format_is_rejected_with_choices(level: str, log_format: str) -> None:
    with pytest.raises(ValueError, match="give one of"):
        configure(level=level, log_format=log_format)  # type: ignore[arg-type]  # what no type checker saw


def test_log_to_closed_stderr_does_not_fail_the_caller() -> None:
    code = (
        "import os, sys\n"
        "from dualmap_edge.logs import LOG_FORMATS, LogFormat, configure, get_logger\n"
        "configure(level='info', log_format='text')\n"
        "os.close(2)\n"
        "get_logger('dualmap_extproc.x').info('into the void')\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n"


def test_get_logger_does_not_import_the_renderer() -> None:
    code = "import sys; from dualmap_edge.logs import get_logger; get_logger('x'); print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


SECRET = "hush-hush"
SECRET_FIELDS = {"cache_salt": f"{SECRET} salt", "user": f"{SECRET} user", "lora_path": f"{SECRET} adapter"}
SECRET_HEADERS = {"authorization": f"Bearer {SECRET}", "x_session_id": f"{SECRET} session", "cookie": SECRET}


def everything_happens(picker: Picker | None = None) -> None:
    """Send requests with secrets through every path of a request."""
    bodies = [chat(SECRET, **SECRET_FIELDS), chat(SECRET * 10_000, **SECRET_FIELDS), chat(SECRET, model=SECRET)]
    bodies += [SECRET.encode(), b'{"model": "' + SECRET.encode()]
    talks = []
    first = Conversation(crowded_pool(max_held=3, max_wait_s=60.0), picker=picker)
    for config in MODES.values():
        for body in bodies:
            talk = Conversation(picker=first.picker)
            talk.send(request_headers(config, **SECRET_HEADERS), request_body(body))
            talks.append(talk)
        odd = Conversation(picker=first.picker)
        odd.send(request_headers(config, content_encoding=SECRET, **SECRET_HEADERS))
    for status in (200, 404, 503):
        for talk in talks:
            talk.send(response_headers(status, x_secret=SECRET), response_body(SECRET.encode()))
    first.picker.on_deadline(1000.0)
    first.picker.set_pools(1000.0, ())
    for talk in talks:
        talk.close(cancelled=True)


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_log_by_default_has_no_client_content(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="debug", log_format=log_format)
    everything_happens()
    captured = capsys.readouterr()
    written = captured.err + captured.out
    assert written.count("Routed") >= 3
    assert written.count("Queued") >= 2
    assert SECRET not in written


def quoting(*, log_prompts: bool = True) -> Picker:
    picker = Picker(Limits(), Recorder().report, id_prefix="r", log_prompts=log_prompts)
    picker.set_pools(0.0, (crowded_pool(),))
    return picker


def test_debug_log_quotes_client_content_only_if_enabled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(level="debug", log_format="json")
    picker = quoting()
    body = chat(SECRET * 1000, **SECRET_FIELDS)
    for talk in (Conversation(picker=picker), Conversation(picker=picker)):
        talk.send(request_headers(NO_WAIT, **SECRET_HEADERS), request_body(body))
    picker.stop_queueing(200.0)
    written = lines(capsys)
    # The second request was queued, and its prompt is also in the log.
    at_once, later = [line for line in written if line["event"] == "Routed"]
    for line in (at_once, later):
        prompt = line["prompt"]
        assert isinstance(prompt, str)
        assert len(prompt) == 2000
        assert prompt.count(SECRET) > 200
        assert line["headers"] == {"x-session-id": f"'{SECRET} session'"}
    assert not any(word in str(written) for word in (f"{SECRET} salt", "Bearer", f"{SECRET} user"))


def test_log_above_debug_quotes_no_client_content(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format="json")
    everything_happens(quoting())
    assert SECRET not in capsys.readouterr().err


def test_log_writes_quoted_bytes_as_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="debug", log_format="text")
    message = request_headers(NO_WAIT)
    message.request_headers.headers.headers.add(key="x-session-id", raw_value=b"\xff\n\x1b[31m")
    Conversation(picker=quoting()).send(message, request_body(chat("two\nlines \x1b[31m")))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Routed" in line]
    assert "two" in line
    assert "\x1b" not in line
