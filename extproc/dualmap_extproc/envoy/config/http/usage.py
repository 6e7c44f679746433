"""Makes the Envoy filter that copies token usage from engines' answers to dynamic metadata, for the access log.

The router gets token counts without reading the answers. The filter runs the script ``usage.lua`` in Envoy's Lua
filter, because Envoy's own filters for token usage crash or reject answers (docs/adr/0006-usage-from-responses.md).

The script reads these forms of ``usage``. The sources are vLLM 0.32.0 and SGLang 0.5.23:

- Chat completions, completions, embeddings: ``prompt_tokens`` contains ``prompt_tokens_details.cached_tokens``. With
  ``n`` above 1, ``prompt_tokens`` counts the prompt once.
- Responses (``ResponseUsage`` in vllm/entrypoints/openai/responses): ``input_tokens`` contains
  ``input_tokens_details.cached_tokens``. If vLLM calls tools itself, both are sums over several prompts. The lists
  ``input_tokens_per_turn`` and ``cached_tokens_per_turn`` then have the counts of each prompt (``HarmonyContext``). The
  first prompt is the client's.
- Messages (``_build_anthropic_usage`` in vllm/entrypoints/anthropic/serving.py): the prompt is the sum of
  ``input_tokens``, ``cache_read_input_tokens`` and ``cache_creation_input_tokens``. If vLLM does not know the counts of
  the cache, the fields are absent, and ``input_tokens`` is the prompt. This is so in ``message_start``, and without
  ``--enable-prompt-tokens-details`` in all answers. The event ``message_delta`` repeats all counts. In SGLang
  (``_anthropic_usage_from_openai`` in sglang/srt/entrypoints/anthropic/serving.py), only ``message_start`` has the
  counts of the prompt, and a count of 0 cached tokens is absent.
"""

from importlib.resources import files

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

from dualmap_extproc.envoy.config.extensions import packed
from dualmap_extproc.names import TAG_CACHED_TOKENS, TAG_COMPLETION_TOKENS, TAG_PROMPT_TOKENS, USAGE_NAMESPACE

_NAMES = {
    "NAMESPACE": USAGE_NAMESPACE,
    "PROMPT": TAG_PROMPT_TOKENS,
    "COMPLETION": TAG_COMPLETION_TOKENS,
    "CACHED": TAG_CACHED_TOKENS,
}


def usage_filter() -> HttpFilter:
    """Return the filter. If the script fails, Envoy logs the error, and the filter reads no more of that response."""
    return HttpFilter(
        name="envoy.filters.http.lua",
        typed_config=packed(Lua(default_source_code=DataSource(inline_string=_script()))),
    )


def _script() -> str:
    """Return the script, preceded by the names of the metadata that the script writes."""
    names = "".join(f'local {variable} = "{name}"\n' for variable, name in _NAMES.items())
    return names + files("dualmap_extproc.envoy.config.http").joinpath("usage.lua").read_text(encoding="utf-8")
