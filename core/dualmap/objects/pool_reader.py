"""Converts InferencePool objects, parsed from YAML or from the Kubernetes API, into Pool values.

Every error is a PoolError with the field's path, its value and the accepted values. Unknown fields in ``spec`` and in a
ring's members are also errors, so that a misspelled setting is not ignored. The API server removes other unknown fields
from its objects. In a file they are errors too (``refuse_unknown``). ``metadata``, ``spec.workload`` and the fields of
``status`` that only the operator reads may have any content, so that the output of ``kubectl get dmpool -o yaml`` is
valid input.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple

from dualmap.errors import PoolError
from dualmap.objects.fields import Fields, without_secrets
from dualmap.objects.kv_store_reader import read_kv_store
from dualmap.policies.registry import POLICIES
from dualmap.pools.claims import addressed_pools
from dualmap.pools.kv_store import KvStore
from dualmap.pools.pool import (
    BODY_BYTES,
    Discovery,
    Engine,
    Fairness,
    KvEvents,
    Member,
    MemberState,
    Model,
    Pool,
    Prefix,
    Queue,
    Rebalance,
    ReceiptFields,
    Ring,
    RingAlgorithm,
    Routing,
    Session,
    SessionMigration,
    Slo,
    Spill,
    Tokenizer,
    TokenSource,
)

GROUP: Final = "serving.dualmap.dev"
API_VERSION: Final = f"{GROUP}/v1alpha1"
ENGINE_TYPES: Final = ("vLLM", "SGLang", "TensorRTLLM", "Generic")
SHADOWS_MAX: Final = 4
QUEUE_ORDERS: Final = ("Fcfs", "Deadline")
# The fields of ``spec`` that only the operator reads.
_OPERATORS_OWN: Final = ("replicas", "workload", "drain")
# The fields of ``status`` that routers do not read.
_STATUS: Final = ("observedGeneration", "replicas", "readyReplicas", "inRing", "selector", "traffic", "conditions")
_LISTS: Final = ("List", "InferencePoolList")
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_MEMBER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,252}", re.ASCII)
_NAT64: Final = IPv6Network("64:ff9b::/96")
# The network of 0.0.0.0 that is no part of the reserved networks of ``ipaddress``.
_THIS_NETWORK: Final = ip_network("0.0.0.0/8")
# Metadata services of clouds that are outside the link-local networks. The networks around them may contain pods.
_METADATA_SERVICES: Final = frozenset(
    ip_address(address)
    for address in (
        "fd00:ec2::254",  # AWS
        "fd00:ec2::23",  # AWS: EKS Pod Identity
        "fd20:ce::254",  # Google Cloud
        "100.100.100.200",  # Alibaba Cloud
        "192.0.0.192",  # Oracle Cloud
        "168.63.129.16",  # Azure
    )
)
_HEADER_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}", re.ASCII)
_LONGEST_PATH: Final = 1024
# The same as in the schema. A server is named without user, query and fragment.
_PORT: Final = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HTTP_URL: Final = re.compile(
    rf"https?://([A-Za-z0-9._-]{{1,253}}|\[[0-9A-Fa-f:.]{{2,45}}\]):{_PORT}(/[A-Za-z0-9._~/-]{{0,200}})?", re.ASCII
)
_HTTP_URL_ACCEPTED: Final = (
    "http://HOST:PORT or https://HOST:PORT with a port from 1 to 65535, optionally with a path, "
    "without user, password, query and fragment"
)
_TOPIC: Final = re.compile(r".{0,253}", re.DOTALL)
_HEADER_NAME_OR_NONE: Final = re.compile(rf"({_HEADER_NAME.pattern})?", re.ASCII)


def read_pools(document: object, *, refuse_unknown: bool = False) -> tuple[Pool, ...]:
    """Read one InferencePool, a ``List`` or an ``InferencePoolList``.

    Raises PoolError for any other document, for an invalid field, and for two pools with the same name or model. With
    ``refuse_unknown``, a field that an InferencePool does not have is an error everywhere except in ``metadata``.
    """
    root = Fields(document, "")
    if root.raw.get("kind") in _LISTS:
        items = root.items("items")
        pools = tuple(_read_pool(item, refuse_unknown=refuse_unknown) for item in items)
    else:
        pools = (_read_pool(root, refuse_unknown=refuse_unknown),)
    check_distinct(pools)
    return pools


class PoolSettings(NamedTuple):
    """The settings of a pool that do not say what it serves: ``spec`` without the model and the operator's fields."""

    engine: Engine = Engine()
    slo: Slo = Slo()
    routing: Routing = Routing()
    kv_store: KvStore = KvStore()


def read_settings(document: object) -> PoolSettings:
    """Read the settings of a pool from an InferencePool, or from a document with ``spec`` alone. Raises PoolError.

    The other fields of ``spec`` may have any content.
    """
    root = Fields(document, "")
    for name, expected in (("apiVersion", API_VERSION), ("kind", "InferencePool")):
        if root.raw.get(name, expected) != expected:
            raise PoolError(root.at(name), root.raw.get(name), f"{expected}, or no {name}")
    if "spec" not in root.raw:
        raise PoolError("spec", None, "a mapping with engine, slo and routing, as in an InferencePool")
    spec = root.sub("spec")
    engine = _read_engine(spec.sub("engine"))
    settings = PoolSettings(
        engine=engine,
        slo=_read_slo(spec.sub("slo")),
        routing=_read_routing(spec.sub("routing")),
        kv_store=read_kv_store(spec.sub("kvStore"), engine.tokenizer),
    )
    for other in ("model", "prefillPool", "prefillMinTokens", *_OPERATORS_OWN):
        spec.get(other)
    spec.refuse_others()
    return settings


def is_pod_address(address: str) -> bool:
    """Return whether a pod may have an IP address.

    No pod has an address that is loopback, link-local, multicast, broadcast, unspecified or reserved, has a zone, or
    belongs to a known metadata service of a cloud. The IPv4 address in a mapped, NAT64 or 6to4 address counts.
    """
    ip = _embedded_ipv4(ip_address(address))
    if "%" in address or ip in _METADATA_SERVICES or ip in _THIS_NETWORK:
        return False
    # ``is_reserved`` includes the broadcast address and IPv4-compatible IPv6 addresses.
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip.is_reserved)


def _embedded_ipv4(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address to which the network translates an IPv6 address, or the address itself."""
    if not isinstance(ip, IPv6Address):
        return ip
    return (IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in _NAT64 else None) or ip.ipv4_mapped or ip.sixtofour or ip


def check_addresses(pool: Pool) -> None:
    """Raise PoolError when a member of a pool from the Kubernetes API has an address that no pod may have.

    Such an address could lead Envoy to its own ports, or to the metadata service of the cloud. A pool file may have it.
    """
    for member in pool.members:
        if not is_pod_address(member.address):
            accepted = (
                "an address that is not loopback, link-local, multicast, broadcast, unspecified, reserved, "
                "or of a cloud's metadata service"
            )
            raise PoolError("status.ring.members.address", member.address, accepted)


def check_distinct(pools: Iterable[Pool]) -> None:
    """Raise PoolError if two pools have the same name, or the same model name, alias or adapter.

    Clients do not address a pool that prefills for another one, so its names do not count.
    """
    pools = tuple(pools)
    addressed = {pool.id for pool in addressed_pools(pools)}
    ids: set[str] = set()
    owners: dict[str, str] = {}
    for pool in pools:
        if pool.id in ids:
            raise PoolError("metadata.name", pool.id, "a namespace and name that no other pool has")
        ids.add(pool.id)
        for model in pool.model.names if pool.id in addressed else ():
            owner = owners.setdefault(model, pool.id)
            if owner != pool.id:
                accepted = f"a model name, alias or adapter that pool {owner} does not have"
                raise PoolError(f"{pool.id}: spec.model", model, accepted)


def _read_pool(root: Fields, *, refuse_unknown: bool) -> Pool:
    for name, expected in (("apiVersion", API_VERSION), ("kind", "InferencePool")):
        if root.get(name) != expected:
            raise PoolError(root.at(name), root.get(name), expected)
    metadata = root.sub("metadata")
    name = metadata.matching("name", _DNS_LABEL, "a DNS label (lower-case letters, digits, -) of at most 50 characters")
    if len(name) > 50:
        raise PoolError(metadata.at("name"), name, "a DNS label of at most 50 characters")
    namespace = metadata.matching("namespace", _DNS_LABEL, "a DNS label of at most 63 characters", "default")
    spec = root.sub("spec")
    model = _read_model(spec.sub("model"))
    engine = _read_engine(spec.sub("engine"))
    slo = _read_slo(spec.sub("slo"))
    routing = _read_routing(spec.sub("routing"))
    kv_store = read_kv_store(spec.sub("kvStore"), engine.tokenizer, model=model.name)
    prefill_pool = _read_prefill_pool(spec, own_name=name)
    prefill_min_tokens = spec.integer("prefillMinTokens", 512, 1, 10**8)
    for operators_own in _OPERATORS_OWN:
        spec.get(operators_own)
    spec.refuse_others()
    status = root.sub("status")
    ring = status.sub("ring")
    members, ring_version = _read_members(ring, default_port=engine.port), ring.integer("version", 0, 0, 2**53)
    if refuse_unknown:
        for operators_own in _STATUS:
            status.get(operators_own)
        for fields in (ring, status, root):
            fields.refuse_others()
    return Pool(
        namespace=namespace,
        name=name,
        model=model,
        engine=engine,
        slo=slo,
        routing=routing,
        kv_store=kv_store,
        members=members,
        ring_version=ring_version,
        prefill_pool=prefill_pool,
        prefill_min_tokens=prefill_min_tokens,
    )


def _read_prefill_pool(spec: Fields, *, own_name: str) -> str:
    """Return the name of the prefill pool; empty for none."""
    name = spec.get("prefillPool")
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or not _DNS_LABEL.fullmatch(name) or len(name) > 50 or name == own_name:
        raise PoolError(spec.at("prefillPool"), name, "the name of another pool in the same namespace, or no name")
    return name


def _read_model(fields: Fields) -> Model:
    model = Model(name=fields.text("name"), aliases=fields.texts("aliases"), adapters=fields.texts("adapters"))
    fields.refuse_others()
    for position, alias in enumerate(model.aliases):
        if alias in model.aliases[:position]:
            raise PoolError(f"{fields.at('aliases')}[{position}]", alias, "a name that is given once")
    taken = {model.name, *model.aliases}
    for position, adapter in enumerate(model.adapters):
        if adapter in taken:
            raise PoolError(
                f"{fields.at('adapters')}[{position}]",
                adapter,
                "a name that is neither the model nor an alias, given once",
            )
        taken.add(adapter)
    return model


def _read_engine(fields: Fields) -> Engine:
    events, discovery = fields.sub("kvEvents"), fields.sub("discovery")
    # 0 means that the engines say it; the values of Engine() are for engines that do not.
    cache_tokens = fields.integer("cacheTokens", 0, 0, 10**10)
    max_model_len = fields.integer("maxModelLen", 0, 0, 10**8)
    engine = Engine(
        type=fields.choice("type", "vLLM", ENGINE_TYPES),
        port=fields.integer("port", 8000, 1, 65_535),
        prefill_tokens_per_second=fields.number("prefillTokensPerSecond", 7000.0, 100, 1_000_000),
        cache_tokens=cache_tokens or Engine().cache_tokens,
        kv_tokens=fields.integer("kvTokens", 0, 0, 10**10) or None,
        max_model_len=max_model_len or Engine().max_model_len,
        kv_events=KvEvents(
            enabled=events.flag("enabled", default=False),
            port=events.integer("port", 5557, 1, 65_535),
            replay_port=events.integer("replayPort", 5558, 1, 65_535),
            topic=events.matching("topic", _TOPIC, "a text of at most 253 characters", ""),
        ),
        tokenizer=_read_tokenizer(fields.sub("tokenizer")),
        discovery=Discovery(
            enabled=discovery.flag("enabled", default=True),
            interval_s=discovery.duration("interval", 10.0, low_s=1.0, high_s=3600.0),
            cache_tokens=not cache_tokens,
            max_model_len=not max_model_len,
        ),
    )
    if engine.kv_events.port == engine.kv_events.replay_port:
        raise PoolError(events.at("replayPort"), engine.kv_events.replay_port, "another port than kvEvents.port")
    events.refuse_others()
    discovery.refuse_others()
    fields.refuse_others()
    if engine.kv_events.enabled and engine.tokenizer.source is TokenSource.ESTIMATE:
        accepted = "false while spec.engine.tokenizer.source is Estimate, because KV events contain token ids"
        raise PoolError(events.at("enabled"), True, accepted)
    return engine


def _read_tokenizer(fields: Fields) -> Tokenizer:
    source = TokenSource(fields.choice("source", TokenSource.ESTIMATE, list(TokenSource)))
    tokenizer = Tokenizer(
        source=source,
        path=fields.text("path", longest=_LONGEST_PATH) if source is TokenSource.FILES else "",
        url=fields.address("url", _HTTP_URL, _HTTP_URL_ACCEPTED) if source is TokenSource.RENDERER else "",
    )
    for name, owner in (("path", TokenSource.FILES), ("url", TokenSource.RENDERER)):
        if source is not owner and fields.get(name) not in (None, ""):
            shown = without_secrets(fields.get(name))
            raise PoolError(fields.at(name), shown, f"no value, because source is {source} and not {owner}")
    fields.refuse_others()
    return tokenizer


def _read_slo(fields: Fields) -> Slo:
    slo = Slo(
        ttft_s=fields.duration("ttft", 5.0, low_s=0.1, high_s=600.0),
        attainment=fields.number("attainment", 0.9, 0.01, 0.9999),
    )
    fields.refuse_others()
    return slo


def _read_routing(fields: Fields) -> Routing:
    ring, spill, rebalance = fields.sub("ring"), fields.sub("spill"), fields.sub("rebalance")
    fairness = fields.sub("fairness")
    routing = Routing(
        policy=fields.choice("policy", "dualmap", POLICIES),
        shadow=_read_shadow(fields),
        shadow_sample=fields.number("shadowSample", 0.1, 0.0, 1.0),
        receipt_header=fields.flag("receiptHeader", default=True),
        receipt_fields=ReceiptFields(
            fields.choice("receiptFields", ReceiptFields.FULL, [each.value for each in ReceiptFields])
        ),
        max_body_bytes=fields.integer("maxBodyBytes", BODY_BYTES, 1024, 2**30),
        continues=fields.flag("continue", default=False),
        fairness=Fairness(
            header=fairness.matching("header", _HEADER_NAME_OR_NONE, "a lower-case header name, or an empty text", "")
        ),
        ring=Ring(
            algorithm=RingAlgorithm(ring.choice("algorithm", "Rendezvous", [each.value for each in RingAlgorithm])),
            virtual_nodes=ring.integer("virtualNodes", 128, 1, 1024),
            seed=ring.integer("seed", 0, 0, 2**53),
        ),
        prefix=_read_prefix(fields.sub("prefix")),
        spill=Spill(
            slo_fraction=spill.number("sloFraction", 0.5, 0.0, 1.0),
            prefill_weight=spill.number("prefillWeight", 3.0, 0.0, 100.0),
            active_kv_weight=spill.number("activeKvWeight", 0.2, 0.0, 100.0),
        ),
        rebalance=Rebalance(
            enabled=rebalance.flag("enabled", default=True),
            decode_stall_s=rebalance.duration("decodeStall", 3.0, low_s=0.001, high_s=600.0),
        ),
        queue=_read_queue(fields.sub("queue")),
        session=_read_session(fields.sub("session")),
    )
    for each in (ring, spill, rebalance, fairness, fields):
        each.refuse_others()
    return routing


def _read_shadow(fields: Fields) -> tuple[str, ...]:
    """Return the names of the shadow policies."""
    shadow = fields.texts("shadow")
    if len(shadow) > SHADOWS_MAX:
        raise PoolError(fields.at("shadow"), list(shadow), f"at most {SHADOWS_MAX} policies")
    for position, policy in enumerate(shadow):
        if policy not in POLICIES:
            raise PoolError(f"{fields.at('shadow')}[{position}]", policy, f"one of {', '.join(POLICIES)}")
        if policy in shadow[:position]:
            raise PoolError(f"{fields.at('shadow')}[{position}]", policy, "a policy that is given once")
    return shadow


def _read_prefix(fields: Fields) -> Prefix:
    prefix = Prefix(
        block_tokens=fields.integer("blockTokens", 128, 1, 8192),
        initial_blocks=fields.integer("initialBlocks", 2, 1, 1024),
        max_blocks=fields.integer("maxBlocks", 64, 1, 1024),
        window_s=fields.duration("window", 60.0, low_s=5.0, high_s=3600.0),
    )
    fields.refuse_others()
    if prefix.initial_blocks > prefix.max_blocks:
        raise PoolError(fields.at("initialBlocks"), prefix.initial_blocks, f"at most maxBlocks, {prefix.max_blocks}")
    return prefix


def _read_queue(fields: Fields) -> Queue:
    queue = Queue(
        dispatch_window_s=fields.duration("dispatchWindow", 0.25, low_s=0.001, high_s=600.0, unlimited=True),
        max_held=fields.integer("maxHeld", 1000, 0, 100_000),
        max_overtaken=fields.integer("maxOvertaken", 8, 0, 1000),
        max_wait_s=fields.duration("maxWait", 30.0, low_s=0.1, high_s=600.0),
        order=fields.choice("order", "Fcfs", QUEUE_ORDERS),
        hold_when_empty=fields.flag("holdWhenEmpty", default=False),
    )
    fields.refuse_others()
    return queue


def _read_session(fields: Fields) -> Session:
    migration = fields.sub("migration")
    session = Session(
        header=fields.matching("header", _HEADER_NAME, "a lower-case header name", "x-session-id"),
        ttl_s=fields.duration("ttl", 1800.0, low_s=1.0, high_s=86_400.0),
        migration=SessionMigration(
            enabled=migration.flag("enabled", default=False),
            hot_ratio=migration.number("hotRatio", 0.2, 0.0, 1.0),
            cooldown_s=migration.duration("cooldown", 30.0, low_s=0.001, high_s=3600.0),
            pull=migration.flag("pull", default=False),
        ),
    )
    migration.refuse_others()
    fields.refuse_others()
    return session


def _read_members(ring: Fields, *, default_port: int) -> tuple[Member, ...]:
    members: dict[str, Member] = {}
    endpoints: dict[str, str] = {}
    for fields in ring.items("members"):
        state = MemberState(fields.choice("state", "Active", [each.value for each in MemberState]))
        leave_at_s = fields.time("leaveAt")
        member = Member(
            id=fields.matching(
                "id", _MEMBER_ID, "1 to 253 letters, digits or . _ - : / @, beginning with a letter or digit"
            ),
            address=_read_address(fields),
            port=fields.integer("port", default_port, 1, 65_535),
            state=state if leave_at_s is None else MemberState.DRAINING,
            weight=fields.integer("weight", 100, 0, 1000),
            incarnation=fields.text("incarnation", ""),
            leave_at_s=leave_at_s,
        )
        fields.get("since")
        fields.refuse_others()
        if member.id in members:
            raise PoolError(fields.at("id"), member.id, "an id that no other member has")
        if member.endpoint in endpoints:
            raise PoolError(
                fields.at("address"),
                member.endpoint,
                f"an address and port that member {endpoints[member.endpoint]} does not have",
            )
        members[member.id] = member
        endpoints[member.endpoint] = member.id
    # Sort by id: the order in the file must not affect rings, tie-breaking or round robin.
    return tuple(sorted(members.values(), key=lambda member: member.id))


def _read_address(fields: Fields) -> str:
    value = fields.get("address")
    try:
        if not isinstance(value, str):
            raise ValueError
        return str(ip_address(value))
    except ValueError:
        raise PoolError(fields.at("address"), value, "an IPv4 or IPv6 address") from None
