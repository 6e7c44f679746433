"""Settings for an Envoy in front of scripted engines and pickers; Envoy chooses its own ports."""

from collections.abc import Sequence

from dualmap.pools.pool import Member, MemberState, Model, Pool
from dualmap_extproc.envoy.config.settings import Address, EnvoySettings, Mode
from harness.picker import Picker
from harness.upstream import Upstream


def pool_of(engines: Sequence[Upstream], *, name: str = "qwen", draining: Sequence[Upstream] = ()) -> Pool:
    """Return a pool whose members are these engines, by name."""
    states = [(engine, MemberState.ACTIVE) for engine in engines]
    states += [(engine, MemberState.DRAINING) for engine in draining]
    members = [Member(id=engine.name, address=engine.host, port=engine.port, state=state) for engine, state in states]
    return Pool(namespace="llm", name=name, model=Model(name=f"{name}-model"), members=tuple(members))


def settings_for(
    pools: Sequence[Pool], pickers: Sequence[Picker], *, mode: Mode = Mode.STREAMED, static_endpoints: bool = True
) -> EnvoySettings:
    """Return settings of an Envoy that uses these pickers and sends its access log to each picker.

    Besides the inference paths, Envoy serves the path ``/``.
    """
    routers = tuple(Address(host="127.0.0.1", port=picker.port) for picker in pickers)
    anywhere = Address(host="127.0.0.1", port=0)
    return EnvoySettings(
        pools=tuple(pools),
        routers=routers,
        access_logs=routers,
        listen=anywhere,
        admin=anywhere,
        mode=mode,
        static_endpoints=static_endpoints,
        allow_paths=("/",),
    )
