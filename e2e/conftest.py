"""Fixtures of the end-to-end tests: settings for an Envoy in front of controlled engines."""

from collections.abc import Callable, Sequence

import pytest

from dualmap.pool import Member, MemberState, Model, Pool
from dualmap_extproc.envoy.settings import Address, EnvoySettings, Mode
from harness.picker import Picker
from harness.upstream import Upstream


def pool_of(engines: Sequence[Upstream], *, name: str = "qwen", draining: Sequence[Upstream] = ()) -> Pool:
    """Describe a pool whose members are these engines, by their names."""
    members = [Member(id=e.name, address=e.host, port=e.port) for e in engines]
    members += [Member(id=e.name, address=e.host, port=e.port, state=MemberState.DRAINING) for e in draining]
    return Pool(namespace="llm", name=name, model=Model(name=f"{name}-model"), members=tuple(members))


SettingsFor = Callable[..., EnvoySettings]


@pytest.fixture(name="settings_for")
def _settings_for() -> SettingsFor:
    """Make settings for pools and pickers, every port of Envoy's own being any free one."""

    def make(
        pools: Sequence[Pool],
        pickers: Sequence[Picker],
        *,
        mode: Mode = Mode.STREAMED,
        tls: bool = False,
        static_endpoints: bool = True,
    ) -> EnvoySettings:
        routers = tuple(Address(host="127.0.0.1", port=picker.port) for picker in pickers)
        return EnvoySettings(
            pools=tuple(pools),
            routers=routers,
            access_logs=routers,
            listen=Address(host="127.0.0.1", port=0),
            admin=Address(host="127.0.0.1", port=0),
            mode=mode,
            tls=tls,
            static_endpoints=static_endpoints,
        )

    return make
