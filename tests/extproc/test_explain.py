import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dualmap.keys.sessions import session_key
from dualmap.policies.registry import POLICIES
from dualmap.prompts.blocks import chain_root
from dualmap.replicas.update import HotnessCounts, ReplicaUpdate, SharedBinding, SharedLoad
from dualmap_cli.explain.command import explain
from dualmap_extproc.app.explain import policies
from dualmap_extproc.settings import RedisSettings
from dualmap_extproc.store.contract import Claim, Post
from dualmap_extproc.store.redis import RedisStore
from dualmap_extproc.store.target import target_of
from redis_server import RedisServer, redis_server

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


def test_explain_json_has_all_receipt_fields(pool_file: str) -> None:
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


def test_explain_names_a_missing_tokenizer_folder(pool_file: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    engine = f", engine: {{tokenizer: {{source: Files, path: {folder}}}}}}}"
    Path(pool_file).write_text(POOL.replace("aliases: [qwen]}}", "aliases: [qwen]}" + engine))
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-", "--json"], input=BODY)
    assert (result.exit_code, json.loads(result.stdout)["pool"]) == (0, "llm/qwen")
    assert f"{folder} contains no tokenizer.json on this machine." in result.stderr
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=BODY)
    assert (result.exit_code, result.stderr) == (0, "")


def test_explain_text_contains_choice_reason_and_pair(pool_file: str, tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_text(BODY)
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", str(body)])
    receipt = json.loads(CliRunner().invoke(explain, ["--pool", pool_file, "--request", str(body), "--json"]).stdout)
    assert result.stdout.startswith(f"{receipt['chosen']} ({receipt['address']}) gets this request of pool llm/qwen.")
    assert f"Reason: {receipt['reason']}" in result.stdout
    assert f"Pair: {receipt['pair'][0]} and {receipt['pair'][1]}" in result.stdout
    assert f"Tokens that {receipt['chosen']} holds: known from the router's own records." in result.stdout


def test_explain_names_members_that_get_no_new_keys(pool_file: str) -> None:
    def explained(*members: str) -> str:
        ring = ", ".join(f"{{id: qwen-{n}, address: 10.0.0.{n + 1}{each}}}" for n, each in enumerate(members))
        Path(pool_file).write_text(POOL.split("members:")[0] + f"members: [{ring}]\n")
        result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=BODY)
        assert result.exit_code == 0
        return result.stdout

    leaves, drains, weightless = ", leaveAt: 2100-01-01T00:00:00Z", ", state: Draining", ", weight: 0"
    assert (
        "\nWithout new keys: qwen-0 (leaves at 2100-01-01T00:00:00Z), qwen-2 (draining), qwen-3 (weight 0).\n"
        in explained(leaves, "", drains, weightless)
    )
    assert "Without new keys" not in explained("", "")
    assert "Without new keys" not in explained(leaves, leaves)


def test_explain_says_that_an_adapter_is_not_known_to_be_loaded(pool_file: str) -> None:
    Path(pool_file).write_text(POOL.replace("aliases: [qwen]", "adapters: [sql]"))
    body = json.dumps({"model": "sql", "prompt": "Once upon a time"})
    receipt = json.loads(
        CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-", "--json"], input=body).stdout
    )
    assert receipt["adapter"] == "unknown"
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=body)
    assert f"Adapter: not known whether {receipt['chosen']} has loaded it.\n" in result.stdout
    base = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=body.replace("sql", "Qwen"))
    assert "Adapter" not in base.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [("{", "400"), ("", "400"), ('{"model": "llama"}', "404"), ("[]", "400"), ('{"model": 3}', "model")],
)
def test_explain_rejected_request_is_an_input_error(pool_file: str, body: str, said: str) -> None:
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=body)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not result.stdout


def test_explain_body_above_the_limit_is_rejected(pool_file: str) -> None:
    body = json.dumps({"model": "qwen", "prompt": "x" * 16 * 1024 * 1024})
    result = CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=body)
    assert result.exit_code == 2
    assert "413" in result.stderr


def test_explain_with_an_empty_pool_fails(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.split("status:")[0])
    result = CliRunner().invoke(explain, ["--pool", str(path), "--request", "-"], input=BODY)
    assert (result.exit_code, "503" in result.stderr) == (1, True)


def test_explain_invalid_pool_file_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL.replace("10.0.0.2", "nowhere"))
    result = CliRunner().invoke(explain, ["--pool", str(path), "--request", "-"], input=BODY)
    assert result.exit_code == 2
    for part in (str(path), "status.ring.members[1].address", "'nowhere'", "an IPv4 or IPv6 address"):
        assert part in result.stderr


def test_policies_command_lists_each_policy_with_its_source() -> None:
    lines = CliRunner().invoke(policies).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(POLICIES)
    rows = json.loads(CliRunner().invoke(policies, ["--json"]).stdout)
    assert {row["name"] for row in rows} == set(POLICIES)
    assert all(row["source"] and row["summary"] for row in rows)


def words(pool_file: str, **body: object) -> str:
    request = json.dumps({"model": "qwen", **body})
    return CliRunner().invoke(explain, ["--pool", pool_file, "--request", "-"], input=request).stdout


def test_explain_text_uses_singular_and_plural(pool_file: str) -> None:
    assert "Key: 1 block, 1 of the prompt's 1 token (" in words(pool_file, prompt="hi")
    assert "Key: 2 blocks, 256 of the prompt's 300 tokens (" in words(pool_file, prompt="x" * 1200)


def test_explain_text_shows_milliseconds_below_a_second(pool_file: str) -> None:
    assert re.search(r"predicted TTFT \d+ ms$", words(pool_file, prompt="x" * 2000), re.MULTILINE)
    assert re.search(r"predicted TTFT \d+\.\d{3} s$", words(pool_file, prompt="x" * 200_000), re.MULTILINE)


def test_explain_text_reports_a_missing_prompt(pool_file: str) -> None:
    said = words(pool_file)
    assert "Key: no prompt, so the request's own id (" in said
    assert "tokens of the prompt" not in said


def test_explain_reads_only_the_fields_of_the_guessed_api(pool_file: str) -> None:
    messages = [{"role": "user", "content": "x" * 1200}]
    assert words(pool_file, messages=messages, text_2="y" * 4000) == words(pool_file, messages=messages)
    assert words(pool_file, messages=messages, system="Be brief.") != words(pool_file, messages=messages)


class TestWithRedis:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
        with redis_server(tmp_path_factory.mktemp("redis"), password="hidden-word") as running:
            yield running

    def explained(self, pool_file: str, *options: str, **environment: str) -> Result:
        arguments = ["--pool", pool_file, "--request", "-", "--json", *options]
        return CliRunner(env=environment).invoke(explain, arguments, input=BODY)

    def tell(self, server: RedisServer, update: ReplicaUpdate, *bindings: SharedBinding) -> None:
        async def publish() -> None:
            store = RedisStore(target_of(RedisSettings(url=server.url, password=server.password)))
            await store.publish("router-0", [Post(pool="llm/qwen", keep_s=60.0, update=update, loads=update.loads)])
            if bindings:
                await store.resolve([Claim(pool="llm/qwen", ttl_s=60.0, bindings=bindings)])
            await store.close()

        with server.admin as admin:
            admin.flushall()
        asyncio.run(publish())

    def test_explain_with_redis_uses_loads_of_other_routers(self, pool_file: str, server: RedisServer) -> None:
        alone = json.loads(self.explained(pool_file).stdout)
        # With this load a router would queue the request; the explanation still shows the chosen member.
        busy = SharedLoad(pending_prefill_tokens=5000, backlog_s=60.0, in_flight=3)
        # The member outside of the pair has less backlog, so that no tie decides.
        loads = {
            each: busy if each in alone["pair"] else replace(busy, backlog_s=59.0)
            for each in (f"qwen-{number}" for number in range(3))
        }
        self.tell(server, ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads=loads))

        joined = self.explained(pool_file, "--redis", server.url, DUALMAP_REDIS_PASSWORD="hidden-word")

        assert joined.exit_code == 0, joined.stderr
        receipt = json.loads(joined.stdout)
        assert receipt["pair"] == alone["pair"]
        assert [each["in_flight"] for each in receipt["candidates"]] == [3, 3, 3]
        assert [each["pending_tokens"] for each in receipt["candidates"]] == [5000, 5000, 5000]

    def test_explain_with_redis_uses_the_session_binding(self, tmp_path: Path, server: RedisServer) -> None:
        path = tmp_path / "pool.yaml"
        session = "routing: {session: {header: x-chat, migration: {enabled: true}}}"
        path.write_text(POOL.replace("aliases: [qwen]}}", f"aliases: [qwen]}}, {session}}}"))
        quiet = ReplicaUpdate(hotness=HotnessCounts(requests=0, nodes={}), loads={})
        key = session_key("chat 7 = ours", chain_root(model="Qwen"))
        chosen = set()
        for host in ("qwen-0", "qwen-1", "qwen-2"):
            bound = SharedBinding(session=key, host=host, tokens=400, version=1, moved_ago_s=100.0)
            self.tell(server, quiet, bound)
            options = ("--redis", server.url.replace("redis://", "redis://:hidden-word@"), "--header")
            with_header = json.loads(self.explained(str(path), *options, "x-CHAT=chat 7 = ours").stdout)
            another = json.loads(self.explained(str(path), *options, "x-chat=another").stdout)
            assert with_header["chosen"] == host
            chosen.add(another["chosen"])
        assert len(chosen) == 1

    def test_explain_with_unreachable_redis_fails(self, pool_file: str, tmp_path: Path) -> None:
        gone = RedisServer(tmp_path / "redis")
        result = self.explained(pool_file, "--redis", gone.url.replace("redis://", "redis://:hidden-word@"))
        assert result.exit_code == 1
        assert result.stderr.startswith("dualmap explain: --redis: cannot read shared state: ")
        assert str(gone.port) in result.stderr
        assert "hidden-word" not in result.stderr
        assert not result.stdout

    def test_explain_with_hung_redis_fails_soon(self, pool_file: str, tmp_path: Path) -> None:
        with redis_server(tmp_path / "redis") as server:
            server.pause()
            result = self.explained(pool_file, "--redis", server.url)
            server.resume()
        assert (result.exit_code, result.stdout) == (1, "")

    def test_explain_with_wrong_redis_password_hides_the_password(self, pool_file: str, server: RedisServer) -> None:
        result = self.explained(pool_file, "--redis", server.url, DUALMAP_REDIS_PASSWORD="hidden-ward")
        assert result.exit_code == 1
        assert "hidden" not in result.stderr

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--redis", "http://cache"), "--redis: the URL is not accepted: the scheme is unknown; give redis://"),
            (("--header", "no-value"), "'no-value' is not accepted; give NAME=VALUE"),
            (("--header", "=no-name"), "'=no-name' is not accepted; give NAME=VALUE"),
            (("--redis-ca", "ca.crt"), "--redis-ca requires --redis"),
            (
                ("--redis", "redis://c", "--redis-password", "x"),
                "other users of this machine can read a password on the command line",
            ),
        ],
    )
    def test_explain_with_invalid_redis_options_is_a_usage_error(
        self, pool_file: str, options: tuple[str, ...], said: str
    ) -> None:
        result = self.explained(pool_file, *options)
        assert result.exit_code == 2
        assert said in result.stderr


def test_explain_names_the_prefill_member_and_the_reason_for_a_local_prefill(tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    prefill = POOL.replace("name: qwen", "name: prefill").replace("10.0.0", "10.0.1").replace("qwen-", "prefill-")
    pools.write_text(POOL.replace("spec: {", "spec: {prefillPool: prefill, ") + "---" + prefill)

    def explained(text: str, *options: str) -> Result:
        body = json.dumps({"model": "qwen", "prompt": text})
        return CliRunner().invoke(explain, ["--pool", str(pools), "--request", "-", *options], input=body)

    remote, local = explained("Once upon a time " * 1000), explained("Once")
    assert re.search(r"Prefill: prefill-\d \(10\.0\.1\.\d:8000\) of pool llm/prefill computes", remote.output)
    assert "computes the prompt itself, because few tokens of the prompt are uncached" in local.output
    assert json.loads(explained("Once", "--json").output)["prefill"]["reason"] == "short"
