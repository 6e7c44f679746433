"""Makes Envoy's bootstrap from settings, and writes it as YAML. Pure.

``clusters``, ``listeners``, ``filters`` and ``access_log`` make one part each. Comments give the reason of each value;
numbers were measured with Envoy 1.40.
"""

from typing import cast

import betterproto2
import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import (
    Admin,
    Bootstrap,
    BootstrapDynamicResources,
    BootstrapStaticResources,
)
from envoy_data_plane.envoy.config.core.v3 import Node
from envoy_data_plane.google.protobuf import Struct

from dualmap_extproc.envoy.config.clusters import clusters
from dualmap_extproc.envoy.config.extensions import socket_address
from dualmap_extproc.envoy.config.http.listeners import listener
from dualmap_extproc.envoy.config.settings import EnvoySettings
from dualmap_extproc.envoy.config.sources import shared_stream, shared_stream_to
from dualmap_extproc.envoy.config.status import admin_cluster, status_listener
from dualmap_extproc.names import LONGEST_WAIT_KEY


def bootstrap(settings: EnvoySettings) -> Bootstrap:
    """Return the whole configuration of an Envoy that serves the pools."""
    listeners, needed = [listener(settings)], clusters(settings)
    if settings.status is not None:
        listeners.append(status_listener(settings.status))
        needed.append(admin_cluster(settings.admin))
    node = Node(id="dualmap-envoy", cluster="dualmap")
    dynamic = None
    if settings.discover is not None:
        # The routers read this and warn of pools that queue requests for longer. As text: Envoy turns a number with a
        # decimal point in YAML into text anyway.
        node.metadata = Struct.from_dict({LONGEST_WAIT_KEY: str(settings.discover.longest_wait_s)})
        dynamic = BootstrapDynamicResources(ads_config=shared_stream_to(), cds_config=shared_stream())
    return Bootstrap(
        node=node,
        admin=Admin(address=socket_address(settings.admin)),
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=needed),
        dynamic_resources=dynamic,
    )


def to_yaml(message: betterproto2.Message) -> str:
    """Return a bootstrap as YAML for ``envoy -c``, or a discovery file as YAML.

    Field names are the proto's, as in Envoy's own examples.
    """
    # Field names stay unchanged: both of the library's casings break "5xx" (5_xx, 5Xx), which Envoy rejects.
    document = message.to_dict(casing=cast(betterproto2.Casing, str))
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a literal block, so that the Lua script stays readable."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)
