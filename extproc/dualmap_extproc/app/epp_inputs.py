"""What ``dualmap epp`` serves: the pool its options name, the settings its files contain, the cluster it watches."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from dualmap.errors import PoolError
from dualmap.objects.gaie import PORTS_MAX, ROLE, GaiePool, selector_of
from dualmap.objects.pool_reader import PoolSettings, read_settings
from dualmap_edge.kube.client import KubeClient, KubeConfigError
from dualmap_edge.logs import get_logger
from dualmap_extproc.app.pool_source import OpenPools, PoolSource, PoolUser
from dualmap_extproc.epp import other_flags, plugins
from dualmap_extproc.epp.plugins import PickerConfig
from dualmap_extproc.epp.pools import GaiePools, PoolRef
from dualmap_extproc.epp.prefills import RoleUse
from dualmap_extproc.pools.file import PoolFileError, load_documents, parse_documents
from dualmap_extproc.pools.metrics import KubeMetrics

_log = get_logger(__name__)


def pool_ref(namespace: str, name: str | None, group: str, selector: str | None, ports: str | None) -> PoolRef:
    """Return the pool to serve. Raises UsageError."""
    if bool(name) == bool(selector):
        raise click.UsageError("give --pool-name NAME, or --endpoint-selector with --endpoint-target-ports")
    if bool(selector) != bool(ports):
        raise click.UsageError(
            "--endpoint-selector and --endpoint-target-ports require each other; give both or neither"
        )
    if not selector or not ports:
        return PoolRef(namespace=namespace, name=name or "", group=group)
    labels = dict(each.partition("=")[::2] for each in selector.split(","))
    numbers = [int(each) if each.isdecimal() and len(each) < 6 else 0 for each in ports.split(",")]
    if not all(0 < each <= 65_535 for each in numbers) or len(numbers) > PORTS_MAX:
        raise click.UsageError(f"--endpoint-target-ports: {ports!r} is not accepted; give 1 to {PORTS_MAX} ports")
    try:
        fixed = GaiePool(selector=selector_of(labels, "--endpoint-selector"), ports=tuple(dict.fromkeys(numbers)))
    except PoolError as error:
        raise click.UsageError(str(error)) from None
    return PoolRef(namespace=namespace, name="endpoints", group=group, fixed=fixed)


def read_routing(file: Path) -> PoolSettings:
    """Return the settings in a file. Raises UsageError."""
    try:
        documents = load_documents(file)
        if len(documents) != 1:
            raise click.UsageError(f"--routing {file}: has {len(documents)} documents; give one")
        return read_settings(documents[0])
    except PoolFileError as error:
        raise click.UsageError(f"--routing {error}") from None
    except PoolError as error:
        raise click.UsageError(f"--routing {file}: {error}") from None


def read_picker_config(file: Path | None, text: str | None) -> PickerConfig:
    """Return what the configuration of another picker says. Raises UsageError."""
    if file is not None and text is not None:
        raise click.UsageError("--config-file and --config-text exclude each other; give one of them")
    if file is None and text is None:
        return PickerConfig()
    shown = Path("--config-text") if file is None else file
    option = "" if file is None else "--config-file "
    try:
        documents = load_documents(shown) if text is None else parse_documents(shown, text.encode())
        return plugins.read_plugins(documents)
    except PoolFileError as error:
        raise click.UsageError(f"{option}{error}") from None
    except PoolError as error:
        raise click.UsageError(f"{option}{shown}: {error}") from None


def log_effects(flags: Sequence[str], config: PickerConfig) -> None:
    """Log what is done instead of flags and plugins of other pickers that have no effect, and how roles count."""
    for instead, names in other_flags.explained(flags, other_flags.UNNEEDED).items():
        _log.warning("Flags have no effect", flags=[f"--{each}" for each in names], instead=instead)
    for instead, names in other_flags.explained(config.unneeded, plugins.UNNEEDED).items():
        _log.warning("Plugins have no effect", plugins=names, instead=instead)
    for reason in config.unused:
        _log.warning("Part of the picker's configuration has no effect", reason=reason)
    if config.roles.respected:
        _log.info("Respecting the roles of pods", label=ROLE, prefill_min_tokens=config.roles.prefill_min_tokens)


def opener(kubeconfig: Path | None, wanted: PoolRef, settings: PoolSettings, roles: RoleUse) -> OpenPools:
    """Return a function that opens the connection to the API server. It raises KubeConfigError."""

    async def open_source(user: PoolUser) -> PoolSource:
        try:
            client = await KubeClient.connect(kubeconfig)
        except KubeConfigError as error:
            raise error if kubeconfig is None else KubeConfigError(f"--kubeconfig: {error}") from None
        return _GaieSource(client, wanted, settings, roles, user)

    return open_source


class _GaieSource:
    """The pool of the Inference Extension (PoolSource)."""

    def __init__(
        self, client: KubeClient, wanted: PoolRef, settings: PoolSettings, roles: RoleUse, user: PoolUser
    ) -> None:
        self._client = client
        self._user = user
        observer = KubeMetrics(user.metrics.registry, user.metrics.pools_refused)
        self._pools = GaiePools(client, wanted, settings, observer, roles)
        observer.show_ages(self._pools.ages_s)

    async def run(self) -> None:
        await self._pools.run(self._user.adopt)

    async def known(self) -> None:
        await self._pools.known()

    async def close(self) -> None:
        await self._client.close()

    def ages_s(self) -> Mapping[str, float]:
        return self._pools.ages_s()
