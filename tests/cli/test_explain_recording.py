"""Tests of ``dualmap explain --recording``: what a recording's router knew when it decided."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dualmap.receipt import CandidateReceipt
from dualmap.recordings.values import RecordedOutcome
from dualmap_cli.main import main
from dualmap_extproc.recording.folder import RecordingFolder
from dualmap_extproc.recording.hashing import KeyedHashes, Purpose
from recorded import CHANGED, receipt, request, write

ID = "0d3c1f5e-6d0c-4a59-8f0e-2f6d4f1f7c11"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "recording"
    hashes = KeyedHashes(RecordingFolder(folder).open())
    candidates = (
        CandidateReceipt("qwen-0", "Active", 256, 3000, 2, 0.61),
        CandidateReceipt("qwen-1", "Active", 0, 120, 1, 0.2),
    )
    chosen = receipt("qwen-0")._replace(candidates=candidates, matched_tokens=256, predicted_ttft_s=0.61)
    write(
        folder / "requests-1.jsonl.gz",
        CHANGED,
        request(0.0, request=hashes.text("another", Purpose.REQUEST)),
        request(1.0, request=hashes.text(ID, Purpose.REQUEST), receipt=chosen, queued_s=0.25, cached_tokens=128),
        request(
            2.0,
            request=hashes.text("refused", Purpose.REQUEST),
            receipt=None,
            outcome=RecordedOutcome.REFUSED,
            code="queue_full",
            ttft_s=None,
        ),
    )
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["explain", *(str(each) for each in arguments)])


def test_text_has_the_decision_and_how_the_request_went(folder: Path) -> None:
    result = invoke("--recording", folder, "--request", ID)
    assert result.exit_code == 0, result.stderr
    for told in (
        "qwen-0 got this request of pool llm/qwen.",
        "Rule: pair-warm of the policy dualmap: ",
        "Pair: qwen-0 and qwen-1, by ring 1 and ring 2.",
        "Tokens that qwen-0 held: 256, known from records.",
        "qwen-1 (Active): held 0 tokens of the prompt; 120 prefill tokens pending, 1 in flight; predicted TTFT 0.200 s",
        "Outcome: ok, queued for 0.250 s, first token after 0.500 s (predicted 0.610 s), end after 1.500 s, "
        "the engine had 128 tokens cached.",
    ):
        assert told in result.stdout


def test_json_has_the_lines_of_the_request(folder: Path) -> None:
    (only,) = json.loads(invoke("--recording", folder, "--request", ID, "--json").stdout)
    assert only["receipt"]["chosen"] == "qwen-0"
    assert [each["id"] for each in only["receipt"]["candidates"]] == ["qwen-0", "qwen-1"]
    assert only["queued_s"] == 0.25


def test_refused_request_has_its_reason(folder: Path) -> None:
    told = invoke("--recording", folder, "--request", "refused").stdout
    assert told == "No instance got this request of pool llm/qwen: the router answered queue_full.\n"


def test_single_file_needs_the_key(folder: Path, tmp_path: Path) -> None:
    file = folder / "requests-1.jsonl.gz"
    without = invoke("--recording", file, "--request", ID)
    assert without.exit_code == 2
    assert "give --key with the file key of a router's folder" in without.stderr
    assert invoke("--recording", file, "--request", ID, "--key", folder / "key").exit_code == 0
    (tmp_path / "key").write_text("ab" * 32)
    other = invoke("--recording", file, "--request", ID, "--key", tmp_path / "key")
    assert other.exit_code == 1
    assert "has no request with x-request-id" in other.stderr


def test_options_that_contradict_are_usage_errors(folder: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    for arguments, told in (
        (("--recording", folder), "Missing option '--request'"),
        (("--request", ID), "Missing option '--pool' or '--recording'"),
        (("--recording", folder, "--request", ID, "--pool", pool), "--recording excludes --pool"),
        (("--recording", folder, "--request", ID, "--header", "a=b"), "--recording excludes --pool, --header"),
        (("--pool", pool, "--request", ID, "--key", folder / "key"), "--key needs --recording"),
        (("--recording", tmp_path, "--request", ID), "does not exist; give the file `key`"),
        (("--recording", tmp_path / "absent", "--request", ID, "--key", folder / "key"), "give the folder of"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert told in " ".join(result.stderr.split())
