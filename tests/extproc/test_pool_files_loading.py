"""Tests of reading pool files: accepted forms, and the errors of invalid files, including YAML bombs."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from dualmap_extproc.pools import file as pool_file
from dualmap_extproc.pools.file import PoolFileError, PoolFileWatcher, load_pool_files
from extproc.pool_files import API, document, write


class TestLoadPoolFiles:
    def test_load_file_with_one_object_returns_its_pool(self, tmp_path: Path) -> None:
        (pool,) = load_pool_files([write(tmp_path / "p.yaml", document(members=3))])
        assert pool.id == "llm/qwen"
        assert [member.id for member in pool.members] == ["qwen-0", "qwen-1", "qwen-2"]

    def test_load_keeps_order_of_documents_and_files(self, tmp_path: Path) -> None:
        one = tmp_path / "one.yaml"
        one.write_text("---\n" + yaml.safe_dump(document("b")) + "---\n" + yaml.safe_dump(document("a")) + "---\n")
        two = write(tmp_path / "two.yaml", document("c"))
        assert [pool.id for pool in load_pool_files([one, two])] == ["llm/b", "llm/a", "llm/c"]

    @pytest.mark.parametrize(
        ("other", "said"),
        [
            (None, "does not exist"),
            (document("prefill", model="other"), "another model"),
        ],
    )
    def test_watcher_serves_a_pool_without_its_unusable_prefill_pool(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, other: object, said: str
    ) -> None:
        named = document("qwen", model="m", prefillPool="prefill")
        files = [write(tmp_path / "p.yaml", named)]
        files += [] if other is None else [write(tmp_path / "q.yaml", other)]

        pools = PoolFileWatcher(files).load()

        assert pools[0].id == "llm/qwen"
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert said in str(warning.__dict__["details"])

    def test_load_pools_of_one_model_with_a_wrong_prefill_pool_names_both_faults(self, tmp_path: Path) -> None:
        decode = write(tmp_path / "p.yaml", document("qwen", model="m", prefillPool="nope"))
        prefill = write(tmp_path / "q.yaml", document("prefill", model="m"))
        with pytest.raises(PoolFileError, match=r"spec.model: 'm' .*spec.prefillPool of llm/qwen: pool nope does not"):
            load_pool_files([decode, prefill])

    def test_load_pool_that_prefills_for_itself_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PoolFileError, match="another pool in the same namespace"):
            load_pool_files([write(tmp_path / "p.yaml", document("qwen", prefillPool="qwen"))])

    @pytest.mark.parametrize("kind", ["List", "InferencePoolList"])
    def test_load_accepts_the_list_output_of_kubectl(self, tmp_path: Path, kind: str) -> None:
        listed = {"apiVersion": "v1", "kind": kind, "items": [document("a"), document("b")], "metadata": {}}
        assert [pool.id for pool in load_pool_files([write(tmp_path / "p.yaml", listed)])] == ["llm/a", "llm/b"]

    def test_load_accepts_json(self, tmp_path: Path) -> None:
        path = tmp_path / "p.json"
        path.write_text(json.dumps(document()))
        assert len(load_pool_files([path])) == 1

    def test_load_resolves_yaml_anchors(self, tmp_path: Path) -> None:
        path = tmp_path / "p.yaml"
        path.write_text(
            f"apiVersion: {API}\nkind: InferencePool\nmetadata: {{name: a, namespace: n}}\n"
            "spec: {model: {name: a}, slo: &slo {ttft: 2s}}\n---\n"
            f"apiVersion: {API}\nkind: InferencePool\nmetadata: {{name: b, namespace: n}}\n"
            "spec:\n  model: {name: b}\n  slo: &other {ttft: 3s}\n  engine: {port: &port 81}\n"
            "status: {ring: {members: [{id: x, address: 10.0.0.1, port: *port}]}}\n"
        )
        assert load_pool_files([path])[1].members[0].port == 81

    def test_load_accepts_a_key_that_overrides_a_merged_one(self, tmp_path: Path) -> None:
        """PyYAML may merge a mapping into another one before it constructs the first one."""
        path = tmp_path / "p.yaml"
        path.write_text(
            f"apiVersion: {API}\nkind: InferencePool\nspec: {{model: {{name: a}}}}\n"
            "metadata: {name: a, x: {y: {z: &z {v: 1}, w: &w {<<: *z, v: 2}}}, u: {<<: *w}}\n"
        )
        assert len(load_pool_files([path])) == 1

    def test_load_reads_a_pipe_once(self) -> None:
        reader, writer = os.pipe()
        os.write(writer, yaml.safe_dump(document()).encode())
        os.close(writer)
        try:
            assert len(load_pool_files([Path(f"/dev/fd/{reader}")])) == 1
        finally:
            os.close(reader)

    def test_load_without_libyaml_gives_the_same_pools(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pool_file, "_Loader", yaml.SafeLoader)
        path = write(tmp_path / "p.yaml", document())
        assert len(load_pool_files([path])) == 1
        path.write_text("[" * 100)
        with pytest.raises(PoolFileError):
            load_pool_files([path])


class TestRejectedFiles:
    @pytest.mark.parametrize(
        ("content", "field"),
        [
            ("", "document"),
            ("# nothing but a comment\n", "document"),
            ("---\n---\n", "document"),
            ("kind: [", "line 2, column 1"),
            ("a: b: c", "line 1, column 5"),
            ("just text", "document"),
            ("- 1\n- 2\n", "document"),
            ("kind: List\napiVersion: v1\nitems: []\n", "document"),
            ("kind: Deployment\napiVersion: apps/v1\n", None),
            ("since: 2026-13-45\n", "line 1, column 8"),
            ("n: " + "9" * 5000, "line 1, column 4"),
            ("replicas: !!bool maybe\n", "line 1, column 11"),
            ('n: !!int ""\n', "line 1, column 4"),
            ('n: !!float ""\n', "line 1, column 4"),
            ("since: !!timestamp x\n", "line 1, column 8"),
            ("n: !!float 1" + ":1" * 200, "line 1, column 4"),
            ("? [a]\n: b\n", None),
            ("a: !!python/object:os.system b\n", None),
            ("a: *nowhere\n", None),
            ("\x00", "document"),
        ],
    )
    def test_load_invalid_pool_error_has_file_field_and_accepted_form(
        self, tmp_path: Path, content: str, field: str | None
    ) -> None:
        path = tmp_path / "p.yaml"
        path.write_text(content)
        with pytest.raises(PoolFileError) as refused:
            load_pool_files([path])
        if field is not None:
            assert refused.value.field == field
        said = str(refused.value)
        assert said.startswith(f"{path}: ")
        assert "; give " in said
        assert "\n" not in said
        if refused.value.field != "document":
            assert said.startswith(f"{path}: {refused.value.field}: ")

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "No such file or directory; give a readable file"),
            ("", "it contains no pool; give at least one InferencePool of serving.dualmap.dev/v1alpha1"),
            ("kind: [", "line 2, column 1: "),
            ("a: &a [*a]", "*a inside &a; give aliases that are not circular"),
            ("x: " + "[" * 100, "more than 64 levels; give a flatter file"),
            ("since: 2026-12-31T23:59:60Z", "line 1, column 8: '2026-12-31T23:59:60Z' is no valid timestamp"),
            ("a: {b: 1}\nd:\n- b: 1\n  b: 2", "line 4, column 3: the mapping has the key 'b' already in line 3; "),
        ],
    )
    def test_load_invalid_file_error_describes_the_fault(self, tmp_path: Path, content: str | None, said: str) -> None:
        path = tmp_path / "p.yaml"
        if content is not None:
            path.write_text(content)
        with pytest.raises(PoolFileError) as refused:
            load_pool_files([path])
        assert str(refused.value).startswith(f"{path}: {said}")
        assert "is not accepted" not in str(refused.value)

    def test_load_rejects_a_binary_file(self, tmp_path: Path) -> None:
        path = tmp_path / "p.yaml"
        path.write_bytes(b"\xff\x00\xfe\x80kind")
        with pytest.raises(PoolFileError):
            load_pool_files([path])

    def test_load_invalid_field_error_has_path_and_document_number(self, tmp_path: Path) -> None:
        path = write(tmp_path / "p.yaml", document("a"), document("b", engine={"port": 99999}))
        with pytest.raises(PoolFileError) as refused:
            load_pool_files([path])
        assert refused.value.field == "document 2: spec.engine.port"
        assert refused.value.value == 99999

    @pytest.mark.parametrize(
        ("place", "field"),
        [((), "leaveAt"), (("status",), "status.leaveAt"), (("status", "ring"), "status.ring.leaveAt")],
    )
    def test_load_rejects_a_field_that_has_no_meaning_there(
        self, tmp_path: Path, place: tuple[str, ...], field: str
    ) -> None:
        wrong: dict[str, Any] = document()
        inner = wrong
        for name in place:
            inner = inner[name]
        inner["leaveAt"] = "2026-11-27T21:00:00Z"
        with pytest.raises(PoolFileError, match="one of the fields") as refused:
            load_pool_files([write(tmp_path / "p.yaml", wrong)])
        assert refused.value.field == field

    @pytest.mark.parametrize(
        ("engine", "shown"),
        [
            ("{port: 2026-11-27}", "spec.engine.port: 2026-11-27 is not accepted"),
            ("{port: true}", "spec.engine.port: true is not accepted"),
            ("[on, 2026-11-27, ~]", "spec.engine: [true, 2026-11-27, null] is not accepted"),
            ("{kvEvents: {topic: {a: off}}}", "spec.engine.kvEvents.topic: {'a': false} is not accepted"),
        ],
    )
    def test_load_error_shows_a_value_in_the_words_of_yaml(self, tmp_path: Path, engine: str, shown: str) -> None:
        path = tmp_path / "p.yaml"
        path.write_text(
            f"apiVersion: {API}\nkind: InferencePool\nmetadata: {{name: a}}\n"
            f"spec: {{model: {{name: a}}, engine: {engine}}}\n"
        )
        with pytest.raises(PoolFileError) as refused:
            load_pool_files([path])
        assert shown in str(refused.value)

    @pytest.mark.parametrize("name", ["absent.yaml", ""])
    def test_load_rejects_an_unreadable_file(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(PoolFileError) as refused:
            load_pool_files([tmp_path / name])
        assert refused.value.field == "file"

    def test_load_error_for_pool_in_two_files_names_the_second_file(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / f"{n}.yaml", document("a")) for n in (1, 2)]
        with pytest.raises(PoolFileError) as refused:
            load_pool_files(paths)
        assert refused.value.file == paths[1]
        assert refused.value.value == "llm/a"

    def test_load_rejects_the_same_model_in_two_files(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / f"{name}.yaml", document(name, model="same")) for name in ("a", "b")]
        with pytest.raises(PoolFileError, match="same"):
            load_pool_files(paths)

    @pytest.mark.parametrize(
        "bomb",
        [
            b"[" * 300_000,
            b"- " * 300_000,
            b"{a: " * 300_000,
            b"? " * 300_000,
            b"a: &a [*a]\n",
            b"a: &a {b: [1, *a]}\n",
            b"a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
            + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 30)),
            b"m0: &m0 {a: 1}\n"
            + b"".join(b"m%d: &m%d {<<: [%s]}\n" % (n, n, b",".join([b"*m%d" % (n - 1)] * 10)) for n in range(1, 30)),
            b"x: [" + b"1," * 600_000 + b"]",
            b"#" * (pool_file.MAX_BYTES + 1),
        ],
        ids=["flow", "block", "mapping", "key", "circle", "inner circle", "aliases", "merges", "many", "long"],
    )
    def test_load_rejects_a_yaml_bomb_in_one_line(self, tmp_path: Path, bomb: bytes) -> None:
        path = tmp_path / "p.yaml"
        path.write_bytes(bomb)
        with pytest.raises(PoolFileError) as refused:
            load_pool_files([path])
        assert len(str(refused.value)) < 1000

    def test_load_stops_reading_an_endless_file(self) -> None:
        with pytest.raises(PoolFileError, match="more than"):
            load_pool_files([Path("/dev/zero")])
