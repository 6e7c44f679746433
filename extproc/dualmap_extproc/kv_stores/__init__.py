"""Asks the KV stores of pools what they hold of prompts, for a bounded time of each request.

``stores`` adds what a store holds to the token ids of a request; ``mooncake``, ``lmcache`` and ``redis_sets`` are the
clients. This package may import the packages below ``tokens``. Only ``http_client`` imports aiohttp here, and only
``redis_sets`` imports redis.
"""
