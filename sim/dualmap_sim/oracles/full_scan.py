"""The router that knows everything and decides at once: what perfect knowledge alone is worth.

ALGORITHMS section 5: each arrival goes to the instance with the least T_q + T_c (paper, eq. 1), both true: the engine's
own backlog and the cache it really has. It looks at each request by itself, so a policy that spreads prefixes with
foresight, or holds requests back, can do better.
"""

from collections.abc import Sequence

from dualmap_sim.oracles.replay import HandOver, Instance
from dualmap_sim.records import Record


class FullScan:
    """Least true TTFT; among equals the least KV reserved, then the first instance."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.instances = instances

    def arrive(self, now: float, record: Record, hand_over: HandOver) -> None:
        """Hand a request over at once."""
        work = record.arrival.work

        def cost(instance: Instance) -> tuple[float, int]:
            ttft_s = instance.engine.backlog_s(now) + instance.prefill_s(work)
            return ttft_s, instance.engine.kv_tokens_reserved

        hand_over(record, min(self.instances, key=cost))

    def changed(self, now: float, hand_over: HandOver) -> None:
        """Do nothing: nobody waits here."""
