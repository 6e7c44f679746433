"""Makes the configuration that keeps Envoy below its memory limit, whatever clients send.

Envoy holds a request's body until the router has picked a member. Clients that send large bodies slowly could therefore
fill Envoy's memory. While the heap is nearly full, Envoy drops requests that hold or send much data. Envoy's page
"Configuring Envoy as an edge proxy" recommends these limits. The numbers in comments were measured with Envoy 1.40.
"""

from datetime import timedelta

from envoy_data_plane.envoy.config.bootstrap.v3 import MemoryAllocatorManager
from envoy_data_plane.envoy.config.overload.v3 import (
    BufferFactoryConfig,
    LoadShedPoint,
    OverloadAction,
    OverloadManager,
    ResourceMonitor,
    ScaledTrigger,
    ThresholdTrigger,
    Trigger,
)
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import DownstreamConnectionsConfig
from envoy_data_plane.envoy.extensions.resource_monitors.fixed_heap.v3 import FixedHeapConfig

from dualmap_extproc.envoy.config.extensions import packed
from dualmap_extproc.envoy.config.settings import EnvoySettings

# The share of the memory limit that the heap may use. The rest is for stacks, freed memory and data that arrives
# between two measurements of the heap.
HEAP_SHARE = 0.8
# The pressure (used heap divided by the largest heap) from which Envoy drops requests, and at which it drops all.
DROP_FROM, DROP_ALL = 0.6, 0.9
# Within Envoy's default of 1 s, clients on the same machine send more than 1 GiB.
_REFRESH_INTERVAL = timedelta(milliseconds=25)
# The smallest amount of memory of one HTTP/2 stream that Envoy compares with other streams, as a power of two: 1 MiB.
_TRACKED_POWER = 20
# The memory limit divided by the largest number of connections. An idle connection takes less.
_BYTES_PER_CONNECTION = 32 * 1024

_HEAP = "envoy.resource_monitors.fixed_heap"
_CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"


def overload_manager(settings: EnvoySettings) -> OverloadManager:
    """Return the limits of heap and connections, and what Envoy does near the heap's limit.

    Envoy resets the HTTP/2 streams that hold the most memory. Envoy does not track the memory of HTTP/1 requests.
    Instead, each time an HTTP/1 connection has data, Envoy closes the connection with a probability that grows with the
    pressure. A large or slow body needs many reads, so most closed connections have such bodies.
    """
    gradually = Trigger(name=_HEAP, scaled=ScaledTrigger(scaling_threshold=DROP_FROM, saturation_threshold=DROP_ALL))
    nearly_full = Trigger(name=_HEAP, threshold=ThresholdTrigger(value=DROP_ALL))
    connections = DownstreamConnectionsConfig(
        max_active_downstream_connections=settings.memory_bytes // _BYTES_PER_CONNECTION
    )
    return OverloadManager(
        refresh_interval=_REFRESH_INTERVAL,
        resource_monitors=[
            ResourceMonitor(
                name=_HEAP, typed_config=packed(FixedHeapConfig(max_heap_size_bytes=_heap_bytes(settings)))
            ),
            ResourceMonitor(name=_CONNECTIONS, typed_config=packed(connections)),
        ],
        actions=[
            OverloadAction(name="envoy.overload_actions.reset_high_memory_stream", triggers=[gradually]),
            OverloadAction(name="envoy.overload_actions.stop_accepting_requests", triggers=[nearly_full]),
        ],
        loadshed_points=[
            LoadShedPoint(name="envoy.load_shed_points.http1_server_abort_dispatch", triggers=[gradually])
        ],
        buffer_factory_config=BufferFactoryConfig(minimum_account_to_track_power_of_two=_TRACKED_POWER),
    )


def allocator(settings: EnvoySettings) -> MemoryAllocatorManager:
    """Return a limit above which Envoy returns freed memory to the system at once; without it, freed memory stays."""
    return MemoryAllocatorManager(soft_memory_limit_bytes=int(_heap_bytes(settings) * DROP_ALL))


def _heap_bytes(settings: EnvoySettings) -> int:
    return int(settings.memory_bytes * HEAP_SHARE)
