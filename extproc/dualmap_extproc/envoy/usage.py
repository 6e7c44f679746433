"""Envoy's filters that read token usage from engines' answers into dynamic metadata, for the access log.

The router thus learns what a prefix hit was really worth without seeing the answers. The paths are those of OpenAI's
chat completions, completions and embeddings, and of its responses API, whose stream wraps the response in an event.
"""

from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.content_parsers.json.v3 import (
    JsonContentParser,
    JsonContentParserRuleConfig,
)
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata.v3 import (
    JsonToMetadata,
    JsonToMetadataKeyValuePair,
    JsonToMetadataMatchRules,
    JsonToMetadataRule,
    JsonToMetadataSelector,
    JsonToMetadataValueType,
)
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata.v3 import (
    SseToMetadata,
    SseToMetadataProcessingRules,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import HttpResponseHeaderMatchInput, RegexMatcher
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig as XdsExtension
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    StringMatcher,
)
from envoy_data_plane.xds.type.matcher.v3 import RegexMatcher as XdsRegexMatcher
from envoy_data_plane.xds.type.matcher.v3 import RegexMatcherGoogleRe2 as Re2

from dualmap_extproc.envoy.extensions import extension, packed
from dualmap_extproc.names import TAG_CACHED_TOKENS, TAG_COMPLETION_TOKENS, TAG_PROMPT_TOKENS, USAGE_NAMESPACE

# Where an answer says what it used -> the name we give it.
_COMPLETIONS = {
    ("usage", "prompt_tokens"): TAG_PROMPT_TOKENS,
    ("usage", "completion_tokens"): TAG_COMPLETION_TOKENS,
    ("usage", "prompt_tokens_details", "cached_tokens"): TAG_CACHED_TOKENS,
}
_RESPONSES = {
    ("usage", "input_tokens"): TAG_PROMPT_TOKENS,
    ("usage", "output_tokens"): TAG_COMPLETION_TOKENS,
    ("usage", "input_tokens_details", "cached_tokens"): TAG_CACHED_TOKENS,
}
_RESPONSE_EVENTS = {("response", *path): name for path, name in _RESPONSES.items()}

# Lengths of up to 9 999 999 bytes, as content-length spells them.
_SHORT = r"\d{1,7}"


def usage_filters() -> list[HttpFilter]:
    """Write the filter for streamed answers and the one for whole ones."""
    return [
        HttpFilter(name="envoy.filters.http.sse_to_metadata", typed_config=packed(_streamed())),
        HttpFilter(name="envoy.filters.http.match_delegate", typed_config=packed(_whole_where_short())),
    ]


def _streamed() -> SseToMetadata:
    rules = [JsonContentParserRuleConfig(rule=rule) for rule in _rules({**_COMPLETIONS, **_RESPONSE_EVENTS})]
    parser = extension("envoy.content_parsers.json", JsonContentParser(rules=rules))
    return SseToMetadata(response_rules=SseToMetadataProcessingRules(content_parser=parser))


def _whole_where_short() -> ExtensionWithMatcher:
    """Read whole answers, but only those known to be short.

    json_to_metadata keeps the answer until its end, and turns one larger than the listener's buffer into a 500
    (20 MiB of embeddings, measured). Hence answers of unknown length pass it by as well.
    """
    rules = JsonToMetadataMatchRules(
        rules=_rules({**_COMPLETIONS, **_RESPONSES}),
        allow_content_types_regex=RegexMatcher(regex="application/json(;.*)?"),
    )
    return ExtensionWithMatcher(
        extension_config=extension("envoy.filters.http.json_to_metadata", JsonToMetadata(response_rules=rules)),
        xds_matcher=_skip_unless_short(),
    )


def _skip_unless_short() -> Matcher:
    length = XdsExtension(
        name="content-length", typed_config=packed(HttpResponseHeaderMatchInput(header_name="content-length"))
    )
    short = MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=length,
            value_match=StringMatcher(safe_regex=XdsRegexMatcher(google_re2=Re2(), regex=_SHORT)),
        )
    )
    skip = MatcherOnMatch(action=XdsExtension(name="skip", typed_config=packed(SkipFilter())))
    return Matcher(
        matcher_list=MatcherMatcherList(
            matchers=[
                MatcherMatcherListFieldMatcher(predicate=MatcherMatcherListPredicate(not_matcher=short), on_match=skip)
            ]
        )
    )


def _rules(paths: dict[tuple[str, ...], str]) -> list[JsonToMetadataRule]:
    return [
        JsonToMetadataRule(
            selectors=[JsonToMetadataSelector(key=key) for key in path],
            on_present=JsonToMetadataKeyValuePair(
                metadata_namespace=USAGE_NAMESPACE, key=name, type=JsonToMetadataValueType.NUMBER
            ),
        )
        for path, name in paths.items()
    ]
