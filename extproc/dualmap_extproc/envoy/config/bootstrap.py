"""Makes Envoy's bootstrap from settings, and converts the bootstrap to YAML. The functions do no I/O.

``clusters``, ``listeners``, ``filters`` and ``access_log`` each make one section. Comments give the reason for each
value. The numbers in comments were measured with Envoy 1.40.
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
    """Return the complete configuration of an Envoy that serves the pools."""
    listeners, needed = [listener(settings)], clusters(settings)
    if settings.status is not None:
        listeners.append(status_listener(settings.status))
        needed.append(admin_cluster(settings.admin))
    node = Node(id="dualmap-envoy", cluster="dualmap")
    dynamic = None
    if settings.discover is not None:
        # The routers read this value and warn of pools that may queue requests for a longer time than Envoy waits. The
        # value is text, because Envoy converts a YAML number with a decimal point to text.
        node.metadata = Struct.from_dict({LONGEST_WAIT_KEY: str(settings.discover.longest_wait_s)})
        dynamic = BootstrapDynamicResources(ads_config=shared_stream_to(), cds_config=shared_stream())
    return Bootstrap(
        node=node,
        admin=Admin(address=socket_address(settings.admin)),
        static_resources=BootstrapStaticResources(listeners=listeners, clusters=needed),
        dynamic_resources=dynamic,
    )


def to_yaml(message: betterproto2.Message) -> str:
    """Return a bootstrap (for ``envoy -c``) or a discovery file as YAML.

    The field names are those of the .proto files, as in Envoy's own examples.
    """
    # ``str`` keeps field names unchanged. The library's casings change "5xx" to "5_xx" or "5Xx", which Envoy rejects.
    document = message.to_dict(casing=cast(betterproto2.Casing, str))
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """A YAML writer that writes text of several lines as a literal block, so that the Lua script stays readable."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)
