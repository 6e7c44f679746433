"""Makes the route match for the paths that Envoy sends to engines.

Engines also serve paths for administration, such as ``/shutdown``. Envoy answers 404 to every path that is not allowed.
Envoy compares the normalised path, without the query.
"""

import re
from collections.abc import Sequence
from typing import Final

from envoy_data_plane.envoy.config.route.v3 import RouteMatch
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher

from dualmap.prompts.api import PATHS, RENDER
from dualmap_extproc.envoy.config.settings import ANY_PATH

# The longest regular expression that Envoy compiles, in RE2 instructions. Envoy's default of 100 is too small for the
# list of paths.
REGEX_SIZE_MAX: Final = 10_000

# The APIs that the router knows (docs/prompts.md), the list of models, and one model by its name.
_INFERENCE: Final = f"(/v1)?({'|'.join(map(re.escape, PATHS))})({RENDER})?|/v1/models(/.+)?"


def allowed_paths(added: Sequence[str]) -> RouteMatch:
    """Return a match of the inference paths and the paths in ``added``, or of every path if ANY_PATH is added."""
    if ANY_PATH in added:
        return RouteMatch(prefix="/")
    return RouteMatch(safe_regex=RegexMatcher(regex="|".join([_INFERENCE, *map(re.escape, added)])))
