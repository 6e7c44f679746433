"""Makes the route matches for the paths and methods that Envoy sends to engines.

Engines also serve paths for administration, such as ``/shutdown``. Envoy answers 404 to every path that is not allowed.
Envoy answers 405 to an inference path with another method than the engines serve. Envoy compares the normalised path,
without the query.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, RouteMatch
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from dualmap.prompts.api import PATHS, RENDER
from dualmap_extproc.envoy.config.settings import ANY_PATH

# The longest regular expression that Envoy compiles, in RE2 instructions. Envoy's default of 100 is too small for the
# list of paths.
REGEX_SIZE_MAX: Final = 10_000

# Regular expressions of the paths of all APIs (docs/prompts.md), and of the model list and a single model.
_APIS: Final = f"(/v1)?({'|'.join(map(re.escape, PATHS))})({RENDER})?"
_MODELS: Final = "/v1/models(/.+)?"
# Browsers send OPTIONS before a request to another origin, without credentials, and engines answer it.
_METHODS: Final = {_APIS: ("POST", "OPTIONS"), _MODELS: ("GET", "HEAD", "OPTIONS")}


def allowed_paths(added: Sequence[str]) -> RouteMatch:
    """Return a match of the inference paths and the paths in ``added``, or of every path if ANY_PATH is added."""
    if ANY_PATH in added:
        return RouteMatch(prefix="/")
    return RouteMatch(safe_regex=RegexMatcher(regex="|".join([_APIS, _MODELS, *map(re.escape, added)])))


def refused_methods(added: Sequence[str]) -> Mapping[tuple[str, ...], RouteMatch]:
    """Return a match of the inference paths with other methods, by the allowed methods; none if ANY_PATH is added."""
    if ANY_PATH in added:
        return {}
    return {
        methods: RouteMatch(
            safe_regex=RegexMatcher(regex=paths),
            headers=[
                HeaderMatcher(
                    name=":method",
                    string_match=StringMatcher(safe_regex=RegexMatcher(regex="|".join(methods))),
                    invert_match=True,
                )
            ],
        )
        for paths, methods in _METHODS.items()
    }
