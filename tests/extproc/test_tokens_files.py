"""Tests of tokenizing requests with the files of a model."""

import json
import os
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dualmap.prompts.api import Api
from dualmap_extproc.tokens import files
from dualmap_extproc.tokens.files import FilesTokenizer
from dualmap_extproc.tokens.messages import UnsupportedRequest, prepared_messages, prepared_tools
from dualmap_extproc.tokens.rendering import MAX_BYTES, TokenizerError
from dualmap_extproc.tokens.template import ChatTemplate
from extproc.tokenizer_files import SPECIAL, TEMPLATE, byte_letters, tokenizer_json, write_tokenizer
from shared_data import shared_file

USER = {"role": "user", "content": "hello world"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer")


def text_of(ids: "array[int]") -> str:
    """Return the text that token ids stand for, with special tokens."""
    tokens = {number: token for token, number in tokenizer_json()["model"]["vocab"].items()}
    byte_of = {letter: bytes([byte]) for byte, letter in byte_letters().items()}
    parts = [
        tokens[each].encode() if tokens[each] in SPECIAL else b"".join(byte_of[letter] for letter in tokens[each])
        for each in ids
    ]
    return b"".join(parts).decode()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_file_above_the_limit_is_refused(folder: Path, name: str) -> None:
    with open(folder / name, "a+b") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(TokenizerError, match=f"{name} is larger than 67108864 bytes"):
        FilesTokenizer(str(folder))


def test_chat_is_rendered_and_tokenized(folder: Path) -> None:
    ids = FilesTokenizer(str(folder)).ids({"model": "m", "messages": [USER]}, Api.CHAT)
    assert text_of(ids) == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    vocab = tokenizer_json()["model"]["vocab"]
    assert ids[:4].tolist() == [1, vocab["user"], vocab["Ċ"], vocab["hello"]]


def test_chat_equals_the_text_of_real_engine() -> None:
    answer = shared_file("fixtures/vllm/tokenize_chat.json").read_text()
    recorded = "".join(json.loads(answer)["token_strs"]).replace("Ċ", "\n").replace("Ġ", " ")
    assert ChatTemplate(TEMPLATE, {}).render({"messages": [USER]}) == recorded


def test_completion_is_tokenized_without_template(folder: Path) -> None:
    tokenizer = FilesTokenizer(str(folder))
    assert text_of(tokenizer.ids({"prompt": "hello wörld"}, Api.COMPLETIONS)) == "hello wörld"
    assert tokenizer.ids({"prompt": ["hello"]}, Api.COMPLETIONS) == tokenizer.ids({"prompt": "hello"}, Api.COMPLETIONS)


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ([], Api.CHAT),
        ({"messages": []}, Api.CHAT),
        ({"messages": "x"}, Api.CHAT),
        ({"messages": [{"content": "x"}]}, Api.CHAT),
        ({"messages": [{"role": "user", "content": 7}]}, Api.CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, Api.CHAT),
        ({"messages": [USER], "chat_template": "{{ messages }}"}, Api.CHAT),
        ({"messages": [USER], "chat_template_kwargs": [1]}, Api.CHAT),
        ({"messages": [USER], "input_ids": [1]}, Api.CHAT),
        ({"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}}, Api.CHAT),
        ({"messages": [USER], "tools": [{"type": "function"}]}, Api.CHAT),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, Api.CHAT),
        ({"prompt": [1, 2]}, Api.COMPLETIONS),
        ({"prompt": ["a", "b"]}, Api.COMPLETIONS),
        ({"prompt": "a", "suffix": "b"}, Api.COMPLETIONS),
        ({"messages": [USER]}, Api.MESSAGES),
        ({"input": "x"}, Api.RESPONSES),
    ],
)
def test_request_beyond_the_files_is_unsupported(folder: Path, body: Any, api: Api) -> None:
    with pytest.raises(UnsupportedRequest):
        FilesTokenizer(str(folder)).ids(body, api)


def test_template_that_fails_is_unsupported(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = FilesTokenizer(str(write_tokenizer(tmp_path / "t", template=template)))
    with pytest.raises(UnsupportedRequest, match="roles must alternate"):
        tokenizer.ids({"messages": [USER]}, Api.CHAT)


def test_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(UnsupportedRequest, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render({"messages": [USER]})


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}, "a\nb"),
        ({"role": "user", "content": None}, ""),
        ({"role": "user"}, ""),
        ({"role": "user", "content": [{"type": "text", "text": None}, "b", ""]}, "b"),
        ({"role": "system", "content": ["x-anthropic-billing-header: 1", "b"]}, "b"),
        ({"role": "system", "content": "x-anthropic-billing-header: 1\na\nb"}, "a\nb"),
        ({"role": "user", "content": "x-anthropic-billing-header: 1"}, "x-anthropic-billing-header: 1"),
    ],
)
def test_message_parts_are_joined_by_line_feeds(message: Any, content: str) -> None:
    assert prepared_messages([message], wrap_parts=False)[0]["content"] == content


def test_message_keeps_parts_for_templates_that_read_parts() -> None:
    template = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }};{% endfor %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": ["a", "b"]}]}
    assert ChatTemplate(template, {}).render(body) == "a;b;"
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(body) == "a\nb"


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning": None}, None),
    ],
)
def test_reasoning_has_both_names(fields: dict[str, Any], reasoning: str | None) -> None:
    (prepared,) = prepared_messages([{"role": "assistant", "content": "", **fields}], wrap_parts=False)
    expected = {} if reasoning is None else {"reasoning": reasoning, "reasoning_content": reasoning}
    assert prepared == {"role": "assistant", "content": "", **expected}


def test_reasoning_of_embeddings_is_unsupported() -> None:
    message = {"role": "assistant", "content": "", "reasoning": {"type": "prompt_embeds"}}
    with pytest.raises(UnsupportedRequest, match="reasoning"):
        prepared_messages([message], wrap_parts=False)


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("", {}), (None, {}), ("[1]", {}), ("no json", {}), ({"a": 1}, {"a": 1})],
)
def test_tool_call_arguments_are_decoded(arguments: Any, decoded: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (prepared,) = prepared_messages([message], wrap_parts=False)
    assert prepared["tool_calls"] == [{**call, "function": {"name": "f", "arguments": decoded}}]
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_tools_have_the_engines_order_outside_of_parameters() -> None:
    parameters = {"type": "object", "properties": {"z": 1, "a": 2}}
    tool = {"function": {"parameters": parameters, "strict": True, "name": "f"}, "type": "function"}
    (prepared,) = prepared_tools([tool]) or ()
    expected = {"name": "f", "description": None, "parameters": parameters, "strict": True}
    assert json.dumps(prepared) == json.dumps({"type": "function", "function": expected})
    assert prepared_tools([]) is None


def test_tool_fields_that_the_engine_drops_are_not_rendered() -> None:
    function = {"defer_loading": True, "returns": "text", "strict": False, "name": "f", "description": None}
    (kept,) = prepared_tools([{"kind": "read", "function": function}]) or ()
    expected = {"name": "f", "description": None, "parameters": None, "strict": False, "defer_loading": True}
    assert json.dumps(kept) == json.dumps({"type": "function", "function": expected})
    (empty,) = prepared_tools([{"function": {"name": "f", "strict": None, "defer_loading": None}}]) or ()
    assert empty == {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}


def test_template_receives_settings_and_special_tokens() -> None:
    template = "{{ eos_token }}{{ reasoning_effort }}{{ thinking }}{{ add_generation_prompt }}{{ {'é': '<'} | tojson }}"
    body = {
        "messages": [USER],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"thinking": 1},
        "add_generation_prompt": False,
    }
    rendered = ChatTemplate("{% generation %}" + template + "{% endgeneration %}", {"eos_token": "</s>"}).render(body)
    assert rendered == '</s>low1False{"é": "<"}'


def test_seen_text_comes_from_the_cache(folder: Path) -> None:
    tokenizer = FilesTokenizer(str(folder))
    body = {"messages": [USER, {"role": "assistant", "content": "hello"}, USER]}
    first = tokenizer.ids(body, Api.CHAT)
    before = tokenizer.cache_use()
    assert tokenizer.ids(body, Api.CHAT) == first
    after = tokenizer.cache_use()
    assert after.bytes - before.bytes == after.of_bytes - before.of_bytes > 0


@pytest.mark.parametrize("special", [("<|", "<|EOS|>"), ("[a]", "]b["), ("a<>", "<>b")])
def test_overlapping_special_tokens_are_not_cached(tmp_path: Path, special: tuple[str, ...]) -> None:
    tokenizer = FilesTokenizer(str(write_tokenizer(tmp_path / "t", special=special)))
    assert not tokenizer.cached
    plain = [tokenizer.ids({"prompt": f"x{each}y"}, Api.COMPLETIONS).tolist() for each in special]
    assert plain == [tokenizer.ids({"prompt": f"x{each}y"}, Api.COMPLETIONS).tolist() for each in special]


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True}])
def test_tokens_that_change_their_surroundings_are_tokenized_alike(tmp_path: Path, flags: dict[str, bool]) -> None:
    folder = write_tokenizer(tmp_path / "t", **flags)
    tokenizer, other = FilesTokenizer(str(folder)), FilesTokenizer(str(folder))
    text = "hello <|im_end|>  world<|im_end|>x <|im_start|> hello"
    tokenizer.ids({"prompt": "hello <|im_end|>"}, Api.COMPLETIONS)
    assert tokenizer.ids({"prompt": text}, Api.COMPLETIONS) == other.ids({"prompt": text}, Api.COMPLETIONS)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer.json", None, "No such file"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "[]", "tokenizer.json"),
        ("tokenizer_config.json", None, "No such file"),
        ("tokenizer_config.json", "[", "not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("chat_template.jinja", "{% for %}", "the chat template is invalid"),
    ],
)
def test_folder_that_cannot_be_read_is_refused(folder: Path, name: str, content: str | None, named: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=named):
        FilesTokenizer(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_pipe_in_a_folder_is_refused_without_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(TokenizerError, match=f"{name} is not a regular file"):
        FilesTokenizer(str(folder))


def test_template_may_be_a_file_of_its_own(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert text_of(FilesTokenizer(str(folder)).ids({"messages": [USER]}, Api.CHAT)) == "hello world"


def test_template_for_tools_is_used_with_tools(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = FilesTokenizer(str(folder))
    tool = {"type": "function", "function": {"name": "f"}}
    assert text_of(tokenizer.ids({"messages": [USER]}, Api.CHAT)) == "plain"
    assert text_of(tokenizer.ids({"messages": [USER], "tools": [tool]}, Api.CHAT)) == "tools"


def test_cache_is_off_if_its_ids_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilesTokenizer, "_cache_is_right", lambda *_: False)
    tokenizer = FilesTokenizer(str(folder))
    assert not tokenizer.cached
    assert text_of(tokenizer.ids({"prompt": "hello"}, Api.COMPLETIONS)) == "hello"
    assert tokenizer.cache_use().of_bytes == 0


def test_tokenizer_without_special_tokens_is_not_cached(tmp_path: Path) -> None:
    assert not FilesTokenizer(str(write_tokenizer(tmp_path / "t", special=()))).cached


# Texts that end or begin where a special token, one of its parts, or a merge of the vocabulary could span the cut.
PIECES = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "<|", "|>", "hell", "o", " w", "orld", " ",
          "\n", "h", "e", "llo", "<", "|", "im_end", "\N{SNOWMAN}", "\x00", "us", "er", "")  # fmt: skip


@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True}])
@pytest.mark.parametrize("special", [SPECIAL, ("<|", "<|EOS|>", "|>"), (*SPECIAL, "<|im_end|><|im_start|>")])
def test_cache_gives_the_ids_of_a_tokenizer_without_it(
    tmp_path: Path, special: tuple[str, ...], flags: dict[str, bool]
) -> None:
    folder = str(write_tokenizer(tmp_path / "t", special=special, **flags))
    cached, plain, random = FilesTokenizer(folder), FilesTokenizer(folder), Random(7)
    plain._encoder.enable_segment_cache(0)
    for _ in range(300):
        # The prompts share beginnings, as the turns of conversations do.
        text = "".join(random.choices(PIECES, k=random.randint(1, 12)))
        for end in (len(text) // 2, len(text)):
            body = {"prompt": text[:end]}
            assert cached.ids(body, Api.COMPLETIONS) == plain.ids(body, Api.COMPLETIONS), text[:end]


class Panic(BaseException):
    """What a panic of the tokenizer's library raises."""


def test_panic_of_the_library_is_an_unsupported_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panicking:
        def encode_batch_flat(self, *_: object, **__: object) -> None:
            raise Panic

    tokenizer = FilesTokenizer(str(folder))
    monkeypatch.setattr(tokenizer, "_encoder", Panicking())
    with pytest.raises(UnsupportedRequest, match="cannot be tokenized"):
        tokenizer.ids({"prompt": "hello"}, Api.COMPLETIONS)


def test_macro_that_calls_itself_too_often_is_unsupported() -> None:
    twice = "{%- macro f(n) %}{%- if n %}{{ f(n - 1) }}{{ f(n - 1) }}{%- endif %}{%- endmacro %}"
    template = ChatTemplate(twice + "{{ f(messages | length) }}", {})
    assert template.render({"messages": [USER]}, 10.0) == ""
    with pytest.raises(UnsupportedRequest, match="it takes too long"):
        template.render({"messages": [USER] * 60}, 0.01)


def test_deeply_nested_arguments_are_unsupported() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 3000}}
    with pytest.raises(UnsupportedRequest, match="nested too deeply"):
        prepared_messages([{"role": "assistant", "tool_calls": [call]}], wrap_parts=False)


def test_cache_of_prefixes_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CACHE_BYTES", 64 * 1024)
    tokenizer = FilesTokenizer(str(folder))
    for number in range(300):
        tokenizer.ids({"prompt": f"<|im_end|>{number} hello" * 50}, Api.COMPLETIONS)
        tokenizer.ids({"prompt": f"hello {number}" * 1000}, Api.COMPLETIONS)
    kept = tokenizer._encoder.segment_cache_stats()
    assert kept is not None
    assert 0 < kept["bytes"] <= kept["max_bytes"] == 64 * 1024
