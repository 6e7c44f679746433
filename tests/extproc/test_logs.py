import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dualmap_extproc.logs import LOG_FORMATS, LogFormat, configure, get_logger

NAME = "dualmap_extproc.somewhere"


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("dualmap_extproc")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    # Levels set directly leave logging's cache of enabled levels as it was.
    root.setLevel(before[1])
    ours.setLevel(before[2])


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_json_has_the_sentence_the_details_and_where_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_text_is_one_line_with_the_details(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_the_level_is_the_least_that_is_written(
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


def test_libraries_are_heard_from_warning_on_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="debug", log_format="json")
    library = logging.getLogger("some.library")
    library.info("chatter %s", 1)
    library.warning("trouble %s", 2)
    assert [(line["event"], line["level"]) for line in lines(capsys)] == [("trouble 2", "warning")]


@pytest.mark.parametrize("log_format", LOG_FORMATS)
def test_a_traceback_never_shows_local_variables(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_values_of_any_type_are_written(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format=log_format)
    get_logger(NAME).info("odd", name="n", msg="m", args=(1,), what=object(), level=object())
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_configuring_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure(level="info", log_format="json")
    configure(level="info", log_format="json")
    get_logger(NAME).info("once")
    assert len(lines(capsys)) == 1


@pytest.mark.parametrize(("level", "log_format"), [("loud", "text"), ("INFO", "text"), ("info", "xml")])
def test_another_level_or_format_is_refused_with_what_is_accepted(level: str, log_format: str) -> None:
    with pytest.raises(ValueError, match="give one of"):
        configure(level=level, log_format=log_format)  # type: ignore[arg-type]  # what no type checker saw


def test_a_closed_stderr_does_not_reach_the_caller() -> None:
    code = (
        "import os, sys\n"
        "from dualmap_extproc.logs import LOG_FORMATS, LogFormat, configure, get_logger\n"
        "configure(level='info', log_format='text')\n"
        "os.close(2)\n"
        "get_logger('dualmap_extproc.x').info('into the void')\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n"


def test_getting_a_logger_does_not_import_the_renderer() -> None:
    code = "import sys; from dualmap_extproc.logs import get_logger; get_logger('x'); print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
