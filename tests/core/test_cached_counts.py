"""Which requests' cached tokens say what an engine caches."""

from typing import Any

import pytest

from dualmap.prompts.api import Api
from dualmap.prompts.cached_counts import is_comparable
from dualmap.prompts.prompt import read_prompt

TEXT = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "logprobs": True, "top_logprobs": 5, "temperature": 0.5, "stop": ["."], "cache_salt": "a"},
        {"n": None, "prompt_logprobs": None, "echo": None, "kv_transfer_params": None},
        {"echo": False, "return_logprob": False, "use_beam_search": False},
        {"sampling_params": {"temperature": 0.5, "n": 1}},
        {"messages": "no list"},
        {"messages": [None, 1, "text", {"role": "user", "content": ["hello", {"type": "text", "text": "hello"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "ok"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}]}]}]},
        {"input": [{"type": "function_call_output", "output": "ok"}]},
        {"prompt": "hello"},
        {"prompt": ["hello"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
    ],
)
def test_request_of_one_text_is_comparable(fields: dict[str, Any]) -> None:
    assert is_comparable({"model": "m", "messages": [TEXT], **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": 0},
        {"prompt_logprobs": False},
        {"prompt_logprobs": 5},
        {"echo": True},
        {"echo": "true"},
        {"echo": True, "logprobs": 1},
        {"return_logprob": True, "logprob_start_len": 0},
        {"n": 2},
        {"n": "2"},
        {"best_of": 2},
        {"use_beam_search": True},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 100},
        {"vllm_xargs": {"a": 1}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 0}},
        {"extra_key": "a"},
        {"previous_response_id": "resp_1"},
        {"sampling_params": {"prompt_logprobs": 1}},
        {"sampling_params": {"skip_reading_prefix_cache": True}},
        {"sampling_params": {"n": 2}},
        {"sampling_params": [{"n": 1}]},
        {"prompt": ["hello", "you"]},
        {"prompt": [[1], [2]]},
        {"messages": [TEXT, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
        {"messages": [{"role": "user", "content": [{"image_url": {"url": "http://a/b"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        {"messages": [{"role": "user", "content": [{"type": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": []}]}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
    ],
)
def test_request_that_changes_the_count_is_not_comparable(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [TEXT], **fields}
    assert not is_comparable(body)
    assert not read_prompt(body, Api.UNKNOWN).comparable
    assert read_prompt({"model": "m", "messages": [TEXT]}, Api.CHAT).comparable
