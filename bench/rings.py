"""Measures the spread and the cost of the two ring algorithms, at 8 to 1024 members."""

import random
import time
from collections import Counter

from dualmap.keys.rings import DualRing
from dualmap.pools.pool import Member, Ring, RingAlgorithm

SIZES = (8, 32, 256, 1024)


def members(count: int) -> list[Member]:
    return [Member(id=f"qwen-{n}", address=f"10.0.{n // 250}.{n % 250 + 1}", port=8000) for n in range(count)]


def cost_us(ring: DualRing, keys: list[int]) -> float:
    began = time.perf_counter()
    for key in keys:
        ring.pair(key)
    return (time.perf_counter() - began) / len(keys) * 1e6


def main() -> None:
    chance = random.Random(1)
    print("rings: busiest member's share over the mean (40 000 keys, at least 100 a member); time for a key's pair")
    print("| members | algorithm | perfect | ring 1 | pair | build ms | new key us | known key us |")
    print("|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        keys = [chance.getrandbits(64) for _ in range(max(40_000, 100 * size))]
        # The spread of keys distributed at random. A larger spread comes from the algorithm.
        perfect = max(Counter(chance.randrange(size) for _ in keys).values()) * size / len(keys)
        for spec in (Ring(), Ring(algorithm=RingAlgorithm.VIRTUAL_NODES)):
            began = time.perf_counter()
            ring = DualRing(members(size), spec)
            build_ms = (time.perf_counter() - began) * 1e3
            new_us = cost_us(ring, keys[:2000])
            known_us = cost_us(ring, keys[:2000])
            pairs = [ring.pair(key) for key in keys]
            first = max(Counter(pair[0] for pair in pairs).values()) * size / len(keys)
            either = max(Counter(id for pair in pairs for id in pair).values()) * size / len(keys) / 2
            spread = f"{perfect:.2f} | {first:.2f} | {either:.2f}"
            print(f"| {size} | {spec.algorithm.value} | {spread} | {build_ms:.1f} | {new_us:.1f} | {known_us:.2f} |")
    print()
