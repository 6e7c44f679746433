"""Converts InferencePool objects, parsed from YAML or from the Kubernetes API, into Pool values.

Every error is a PoolError with the field's path, its value and the accepted values. Unknown fields in ``spec`` and in a
ring's members are also errors, so that a misspelled setting is not ignored. ``metadata``, ``spec.workload`` and the
other fields of ``status`` may have any content, so that the output of ``kubectl get dmpool -o yaml`` is valid input.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from math import inf
from typing import Final, NamedTuple

from dualmap.errors import PoolError
from dualmap.policies.registry import POLICIES
from dualmap.pools.claims import addressed_pools
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
QUEUE_ORDERS: Final = ("Fcfs", "Deadline")
UNLIMITED: Final = "Unlimited"
# The fields of ``spec`` that only the operator reads.
_OPERATORS_OWN: Final = ("replicas", "workload", "drain")
_LISTS: Final = ("List", "InferencePoolList")
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
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
_HTTP_URL_ACCEPTED: Final = "http://HOST:PORT or https://HOST:PORT, optionally with a path"
_TOPIC: Final = re.compile(r".{0,253}", re.DOTALL)
_HEADER_NAME_OR_NONE: Final = re.compile(rf"({_HEADER_NAME.pattern})?", re.ASCII)


def read_pools(document: object) -> tuple[Pool, ...]:
    """Read one InferencePool, a ``List`` or an ``InferencePoolList``.

    Raises PoolError for any other document, for an invalid field, and for two pools with the same name or model.
    """
    root = _Fields(document, "")
    if root.raw.get("kind") in _LISTS:
        items = root.items("items")
        pools = tuple(_read_pool(item) for item in items)
    else:
        pools = (_read_pool(root),)
    check_distinct(pools)
    return pools


class PoolSettings(NamedTuple):
    """The settings of a pool that do not say what it serves: ``spec.engine``, ``spec.slo`` and ``spec.routing``."""

    engine: Engine = Engine()
    slo: Slo = Slo()
    routing: Routing = Routing()


def read_settings(document: object) -> PoolSettings:
    """Read the settings of a pool from an InferencePool, or from a document with ``spec`` alone. Raises PoolError.

    The other fields of ``spec`` may have any content.
    """
    root = _Fields(document, "")
    for name, expected in (("apiVersion", API_VERSION), ("kind", "InferencePool")):
        if root.raw.get(name, expected) != expected:
            raise PoolError(root.at(name), root.raw.get(name), f"{expected}, or no {name}")
    if "spec" not in root.raw:
        raise PoolError("spec", None, "a mapping with engine, slo and routing, as in an InferencePool")
    spec = root.sub("spec")
    settings = PoolSettings(
        engine=_read_engine(spec.sub("engine")),
        slo=_read_slo(spec.sub("slo")),
        routing=_read_routing(spec.sub("routing")),
    )
    for other in ("model", "prefillPool", *_OPERATORS_OWN):
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


def parse_duration(value: object, field: str, *, low_s: float = 0.001, high_s: float = 86_400.0) -> float:
    """Return a duration such as ``500ms``, ``5s``, ``10m`` or ``1h`` in seconds; raise PoolError for ``field``."""
    accepted = f"a number and a unit (ms, s, m or h) from {_spell_s(low_s)} to {_spell_s(high_s)}, such as 5s"
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PoolError(field, value, accepted)
    seconds = float(match[1]) * _UNIT_S[match[2]]
    if not low_s <= seconds <= high_s:
        raise PoolError(field, value, accepted)
    return seconds


class _Fields:
    """A mapping and its path. Each method returns one checked field, or raises PoolError with the field's path."""

    def __init__(self, value: object, path: str) -> None:
        if value is None and path:
            value = {}  # In YAML, `slo:` without a value is null.
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise PoolError(path or "document", value, "a mapping of field names to values")
        self.raw: Mapping[str, object] = value
        self.path = path
        self._seen: set[str] = set()

    def at(self, name: str) -> str:
        shown = _shown_name(name)
        return f"{self.path}.{shown}" if self.path else shown

    def get(self, name: str) -> object:
        self._seen.add(name)
        return self.raw.get(name)

    def refuse_others(self) -> None:
        for name in self.raw:
            if name not in self._seen:
                raise PoolError(self.at(name), self.raw[name], f"one of the fields {', '.join(sorted(self._seen))}")

    def sub(self, name: str) -> "_Fields":
        return _Fields(self.get(name), self.at(name))

    def items(self, name: str) -> list["_Fields"]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise PoolError(self.at(name), value, "a list")
        fields = []
        for position, item in enumerate(value):
            path = f"{self.at(name)}[{position}]"
            if item is None:
                raise PoolError(path, item, "a mapping of field names to values")
            fields.append(_Fields(item, path))
        return fields

    def text(self, name: str, default: str | None = None, *, longest: int = 253) -> str:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise PoolError(self.at(name), value, f"a text of 1 to {longest} characters")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise PoolError(self.at(name), value, "a list of names")
        for position, text in enumerate(value):
            if not isinstance(text, str) or not 0 < len(text) <= 253:
                raise PoolError(f"{self.at(name)}[{position}]", text, "a text of 1 to 253 characters")
        return tuple(value)

    def matching(self, name: str, pattern: re.Pattern[str], accepted: str, default: str | None = None) -> str:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise PoolError(self.at(name), value, accepted)
        return value

    def choice(self, name: str, default: str, options: Iterable[str]) -> str:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in options:
            raise PoolError(self.at(name), value, f"one of {', '.join(options)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PoolError(self.at(name), value, "true or false")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise PoolError(self.at(name), value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise PoolError(self.at(name), value, f"a number from {low:g} to {high:g}")
        return float(value)

    def duration(self, name: str, default_s: float, *, low_s: float, high_s: float, unlimited: bool = False) -> float:
        value = self.get(name)
        if value is None:
            return default_s
        if unlimited and value == UNLIMITED:
            return inf
        try:
            return parse_duration(value, self.at(name), low_s=low_s, high_s=high_s)
        except PoolError as error:
            accepted = f"{error.accepted}, or {UNLIMITED}" if unlimited else error.accepted
            raise PoolError(error.field, value, accepted) from None


def _read_pool(root: _Fields) -> Pool:
    for name, expected in (("apiVersion", API_VERSION), ("kind", "InferencePool")):
        if root.raw.get(name) != expected:
            raise PoolError(root.at(name), root.raw.get(name), expected)
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
    prefill_pool = _read_prefill_pool(spec, own_name=name)
    for operators_own in _OPERATORS_OWN:
        spec.get(operators_own)
    spec.refuse_others()
    ring = root.sub("status").sub("ring")
    return Pool(
        namespace=namespace,
        name=name,
        model=model,
        engine=engine,
        slo=slo,
        routing=routing,
        members=_read_members(ring, default_port=engine.port),
        ring_version=ring.integer("version", 0, 0, 2**53),
        prefill_pool=prefill_pool,
    )


def _read_prefill_pool(spec: _Fields, *, own_name: str) -> str:
    """Return the name of the prefill pool; empty for none."""
    name = spec.get("prefillPool")
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or not _DNS_LABEL.fullmatch(name) or len(name) > 50 or name == own_name:
        raise PoolError(spec.at("prefillPool"), name, "the name of another pool in the same namespace, or no name")
    return name


def _read_model(fields: _Fields) -> Model:
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


def _read_engine(fields: _Fields) -> Engine:
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


def _read_tokenizer(fields: _Fields) -> Tokenizer:
    source = TokenSource(fields.choice("source", TokenSource.ESTIMATE, list(TokenSource)))
    tokenizer = Tokenizer(
        source=source,
        path=fields.text("path", longest=_LONGEST_PATH) if source is TokenSource.FILES else "",
        url=fields.matching("url", _HTTP_URL, _HTTP_URL_ACCEPTED) if source is TokenSource.RENDERER else "",
    )
    for name, owner in (("path", TokenSource.FILES), ("url", TokenSource.RENDERER)):
        if source is not owner and fields.get(name) not in (None, ""):
            raise PoolError(fields.at(name), fields.get(name), f"no value, because source is {source} and not {owner}")
    fields.refuse_others()
    return tokenizer


def _read_slo(fields: _Fields) -> Slo:
    slo = Slo(
        ttft_s=fields.duration("ttft", 5.0, low_s=0.1, high_s=600.0),
        attainment=fields.number("attainment", 0.9, 0.01, 0.9999),
    )
    fields.refuse_others()
    return slo


def _read_routing(fields: _Fields) -> Routing:
    ring, spill, rebalance = fields.sub("ring"), fields.sub("spill"), fields.sub("rebalance")
    fairness = fields.sub("fairness")
    routing = Routing(
        policy=fields.choice("policy", "dualmap", POLICIES),
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
        prefill_threshold_tokens=fields.integer("prefillThresholdTokens", 2048, 0, 10**8),
    )
    for each in (ring, spill, rebalance, fairness, fields):
        each.refuse_others()
    return routing


def _read_prefix(fields: _Fields) -> Prefix:
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


def _read_queue(fields: _Fields) -> Queue:
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


def _read_session(fields: _Fields) -> Session:
    migration = fields.sub("migration")
    session = Session(
        header=fields.matching("header", _HEADER_NAME, "a lower-case header name", "x-session-id"),
        ttl_s=fields.duration("ttl", 1800.0, low_s=1.0, high_s=86_400.0),
        migration=SessionMigration(
            enabled=migration.flag("enabled", default=False),
            hot_ratio=migration.number("hotRatio", 0.2, 0.0, 1.0),
            cooldown_s=migration.duration("cooldown", 30.0, low_s=0.001, high_s=3600.0),
        ),
    )
    migration.refuse_others()
    fields.refuse_others()
    return session


def _read_members(ring: _Fields, *, default_port: int) -> tuple[Member, ...]:
    members: dict[str, Member] = {}
    endpoints: dict[str, str] = {}
    for fields in ring.items("members"):
        state = fields.choice("state", "Active", [each.value for each in MemberState])
        member = Member(
            id=fields.matching(
                "id", _MEMBER_ID, "1 to 253 letters, digits or . _ - : / @, beginning with a letter or digit"
            ),
            address=_read_address(fields),
            port=fields.integer("port", default_port, 1, 65_535),
            state=MemberState(state),
            weight=fields.integer("weight", 100, 0, 1000),
            incarnation=fields.text("incarnation", ""),
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


def _read_address(fields: _Fields) -> str:
    value = fields.get("address")
    try:
        if not isinstance(value, str):
            raise ValueError
        return str(ip_address(value))
    except ValueError:
        raise PoolError(fields.at("address"), value, "an IPv4 or IPv6 address") from None


def _shown_name(name: str) -> str:
    """Return a field's name as a short printable line, because an unknown field may have any name."""
    shown = name if name.isprintable() else repr(name)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _spell_s(seconds: float) -> str:
    """Return a limit in the pool's format for durations."""
    for unit in ("h", "m", "s"):
        if seconds >= _UNIT_S[unit] and seconds % _UNIT_S[unit] == 0:
            return f"{seconds / _UNIT_S[unit]:g}{unit}"
    return f"{seconds * 1000:g}ms"
