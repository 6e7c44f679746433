"""Records the router's requests in a folder, in the format of ``dualmap.recordings`` (docs/recordings.md).

``recorder`` subscribes to ``request.observations`` on the event loop; ``writer`` encodes and writes in a thread. This
package may import the packages below ``autoscaling``. Only ``hashing`` imports cryptography here, only ``encoding``
orjson, and only ``metrics`` prometheus_client.
"""
