import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dualmap.policies import POLICIES
from dualmap_extproc.explain import explain, policies

POOL = """
apiVersion: serving.dualmap.dev/v1alpha1
kind: InferencePool
metadata: {name: qwen, namespace: llm}
spec: {model: {name: Qwen, aliases: [qwen]}}
status:
  ring:
    members: [{id: qwen-0, address: 10.0.0.1}, {id: qwen-1, address: 10.0.0.2}, {id: qwen-2, address: 10.0.0.3}]
"""
BODY = json.dumps({"model": "qwen", "prompt": "Once upon a time " * 100})


@pytest.fixture
def pool_file(tmp_path: Path) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    return str(path)


def test_the_receipt_as_json_has_the_contracts_fields(pool_file: str) -> None:
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-", "--json"], input=BODY)
    assert result.exit_code == 0
    receipt = json.loads(result.stdout)
    assert receipt["policy"] == "dualmap"
    assert receipt["key"].keys() == {"hash", "blocks", "tokens"}
    assert receipt["key"]["blocks"] == 2
    assert len(receipt["pair"]) == 2
    assert receipt["chosen"] in receipt["pair"]
    assert receipt["address"].endswith(":8000")
    assert receipt["prompt_tokens"] == 425
    assert [each["id"] for each in receipt["candidates"]] == receipt["pair"]
    assert receipt["candidates"][0].keys() == {"id", "state", "matched_tokens", "pending_tokens", "in_flight", "ttft_s"}


def test_words_name_the_choice_the_reason_and_the_pair(pool_file: str, tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_text(BODY)
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", str(body)])
    receipt = json.loads(CliRunner().invoke(explain, ["--pool", pool_file, "--request", str(body), "--json"]).stdout)
    assert result.stdout.startswith(f"{receipt['chosen']} ({receipt['address']}) gets this request of pool llm/qwen.")
    assert f"Because {receipt['reason']}" in result.stdout
    assert f"Pair: {receipt['pair'][0]} and {receipt['pair'][1]}" in result.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [("{", "400"), ("", "400"), ('{"model": "llama"}', "404"), ("[]", "400"), ('{"model": 3}', "model")],
)
def test_a_request_that_would_be_refused_is_bad_input(pool_file: str, body: str, said: str) -> None:
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=body)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not result.stdout


def test_a_body_above_the_routers_limit_is_refused_as_there(pool_file: str) -> None:
    body = json.dumps({"model": "qwen", "prompt": "x" * 16 * 1024 * 1024})
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=body)
    assert result.exit_code == 2
    assert "413" in result.stderr


def test_an_empty_pool_fails(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.split("status:")[0])
    result = CliRunner().invoke(explain, ["--pool", str(path), "--request", "-"], input=BODY)
    assert (result.exit_code, "503" in result.stderr) == (1, True)


def test_a_bad_pool_file_is_bad_input_and_named(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.replace("10.0.0.2", "nowhere"))
    result = CliRunner().invoke(explain, ["--pool", str(path), "--request", "-"], input=BODY)
    assert result.exit_code == 2
    for part in (str(path), "status.ring.members[1].address", "'nowhere'", "an IPv4 or IPv6 address"):
        assert part in result.stderr


def test_policies_are_listed_with_their_sources() -> None:
    lines = CliRunner().invoke(policies).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(POLICIES)
    rows = json.loads(CliRunner().invoke(policies, ["--json"]).stdout)
    assert {row["name"] for row in rows} == set(POLICIES)
    assert all(row["source"] and row["summary"] for row in rows)


def words(pool_file: str, **body: object) -> str:
    request = json.dumps({"model": "qwen", **body})
    return CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=request).stdout


def test_words_count_as_people_do(pool_file: str) -> None:
    assert "Key: 1 block, 1 of the prompt's 1 token (" in words(pool_file, prompt="hi")
    assert "Key: 2 blocks, 256 of the prompt's 300 tokens (" in words(pool_file, prompt="x" * 1200)


def test_words_give_milliseconds_below_a_second(pool_file: str) -> None:
    assert re.search(r"predicted TTFT \d+ ms$", words(pool_file, prompt="x" * 2000), re.MULTILINE)
    assert re.search(r"predicted TTFT \d+\.\d{3} s$", words(pool_file, prompt="x" * 200_000), re.MULTILINE)


def test_words_say_where_there_is_no_prompt(pool_file: str) -> None:
    said = words(pool_file)
    assert "Key: no prompt, so the request's own id (" in said
    assert "tokens of the prompt" not in said
