"""A real Kubernetes control plane for tests: etcd, API server, controller manager and scheduler, without nodes.

The fixtures of `fixtures.py` start one per test session. `build.py` builds its programs. `netns.sh` creates the network
namespace, which permits fixed ports and real addresses for pods. `kubelet/` runs pods.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from emulated_cluster.api.client import ApiClient
from emulated_cluster.control_plane import kubeconfigs
from emulated_cluster.control_plane.certificates import Authority, write_signing_keys
from emulated_cluster.control_plane.programs import Program

# The advertised address of the API server, which must not be a loopback address. Pods use the other /24 blocks of
# 10.244.0.0/16.
ADVERTISED = "10.244.255.1"
# Pods connect to this address, because the Service `kubernetes` has no endpoints.
API_SERVER = (ADVERTISED, 6443)
_ETCD = "http://127.0.0.1:2379"
_SERVER = "https://127.0.0.1:6443"
_SCHEDULER = "https://127.0.0.1:10259"
_PODS = ipaddress.ip_network("10.244.0.0/16")
_SERVICES = "10.0.0.0/24"
# The start takes 8 s on an idle machine and much longer on a busy machine.
_READY_TIMEOUT_S = 90.0
# On SIGTERM the API server waits up to a minute for open watches.
_STOP_GRACE_S = 1.0
_KUBECTL_TIMEOUT_S = 60.0
_HTTP_TIMEOUT_S = 5.0
_NODE_LIFECYCLE_OFF = "--controllers=*,-node-lifecycle-controller"
_NODE_LIFECYCLE_ON = ("--controllers=*", "--node-monitor-period=1s", "--node-monitor-grace-period=5s")
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [{"level": "Metadata"}],
}


class KubectlError(AssertionError):
    """kubectl failed. The message has the command and its output."""


class Cluster:
    """The control plane as a context manager, which starts and stops the programs. Leaving the context keeps the logs
    in `directory`/logs.

    All methods are synchronous, so tests can use the methods with any event loop. Only the start and
    `restart_apiserver` take long.
    """

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries = binaries
        self._directory = directory
        self.logs = directory / "logs"
        self._kubeconfigs = directory / "kubeconfigs"
        for folder in (directory, self.logs, self._kubeconfigs):
            folder.mkdir(exist_ok=True)
        self._authority = Authority()
        self._programs: dict[str, Program] = {}
        self._numbers = itertools.count(1)
        self._blocks = _PODS.subnets(new_prefix=24)
        self._audit_read = 0
        self._audited: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def kubeconfig(self, user: str = "admin", groups: Sequence[str] = ("system:masters",)) -> Path:
        """Write a kubeconfig for a user with a client certificate, and return the file's path.

        A user without groups has no rights until a role is bound to it.
        """
        path = self._kubeconfigs / f"{next(self._numbers)}-{user.replace(':', '-')}.json"
        return kubeconfigs.write_for_certificate(
            path, server=_SERVER, authority=self._authority.certificate, user=self._authority.user(user, groups)
        )

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Write a kubeconfig with a token of an existing service account, and return the file's path."""
        token = self.kubectl("create", "token", name, "--namespace", namespace, "--duration", "24h").strip()
        path = self._kubeconfigs / f"{next(self._numbers)}-{namespace}-{name}.json"
        return kubeconfigs.write_for_token(
            path, server=_SERVER, authority=self._authority.certificate, token=token, namespace=namespace
        )

    def client(self) -> ApiClient:
        """Return a client with the administrator's rights for the running event loop. The caller closes it."""
        return ApiClient.from_kubeconfig(self._admin)

    def kubectl(self, *args: str, input: str | None = None, check: bool = True) -> str:
        """Run kubectl as the administrator (another user: `--kubeconfig PATH` among `args`) and return its stdout.

        Raises `KubectlError` on failure; with `check=False` the method returns stdout and stderr instead.
        """
        command = [str(self._binaries / "kubectl"), "--kubeconfig", str(self._admin), *self._kubectl_cache(), *args]
        ran = subprocess.run(command, input=input, capture_output=True, text=True, timeout=_KUBECTL_TIMEOUT_S)
        if ran.returncode == 0:
            return ran.stdout
        if check:
            raise KubectlError(f"kubectl {' '.join(args)} exited with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return ran.stdout + ran.stderr

    def namespace(self) -> str:
        """Create a namespace and wait until it accepts pods; return its name."""
        name = f"e2e-{next(self._numbers)}"
        self.kubectl("create", "namespace", name)
        self._wait_for_service_account(name)
        return name

    def remove_namespace(self, name: str) -> None:
        """Delete a namespace and its pods; does not wait."""
        self.kubectl("delete", "namespace", name, "--wait=false", check=False)
        # One request deletes all pods. kubectl deletes a thousand pods one by one, which takes minutes.
        self.kubectl("delete", "--raw", f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=1", check=False)

    def address_block(self) -> ipaddress.IPv4Network:
        """Reserve 256 pod addresses for one node and return them."""
        block = next(self._blocks)
        assert isinstance(block, ipaddress.IPv4Network)
        assert ipaddress.ip_address(ADVERTISED) not in block, "no pod addresses left"
        return block

    def audit(self) -> list[dict[str, Any]]:
        """Return the audit log: user (`user.username`), action (`verb`, `objectRef`) and response code of each request.

        The server writes a request's entry (`stage` ResponseComplete) just after the response, so callers must wait for
        the entry. The log also has an entry for each watch's start (ResponseStarted).
        """
        with (self.logs / "audit.jsonl").open("rb") as log:
            log.seek(self._audit_read)
            *lines, _half_written = log.read().split(b"\n")
        self._audit_read += sum(len(line) + 1 for line in lines)
        self._audited += (json.loads(line) for line in lines)
        return list(self._audited)

    def stop_apiserver(self) -> None:
        """Stop the API server: watches end, and requests fail until `start_apiserver`."""
        self._programs["kube-apiserver"].stop(grace_s=_STOP_GRACE_S)

    def start_apiserver(self) -> None:
        """Start the API server and wait until it is ready."""
        apiserver = self._programs["kube-apiserver"]
        apiserver.start()
        apiserver.wait_until(lambda: self._answers(f"{_SERVER}/readyz"), "/readyz", timeout_s=_READY_TIMEOUT_S)

    def restart_apiserver(self) -> None:
        """Restart the API server with the same etcd and wait until it is ready."""
        self.stop_apiserver()
        self.start_apiserver()

    @contextmanager
    def node_lifecycle(self) -> Iterator[None]:
        """Run the node-lifecycle controller, which marks nodes as lost after 5 s without a heartbeat. The controller is
        off outside this context.
        """
        self._restart_controller_manager(*_NODE_LIFECYCLE_ON)
        try:
            yield
        finally:
            self._restart_controller_manager(_NODE_LIFECYCLE_OFF)

    @property
    def _admin(self) -> Path:
        return self._kubeconfigs / "admin.json"

    def _kubectl_cache(self) -> tuple[str, ...]:
        # kubectl caches API discovery by the server's address, which is the same in every run.
        return "--cache-dir", str(self._directory / "kubectl-cache")

    def _start(self) -> None:
        self._write_credentials()
        etcd = self._program("etcd", *self._etcd_flags())
        etcd.start()
        etcd.wait_until(lambda: self._answers(f"{_ETCD}/health"), "/health", timeout_s=_READY_TIMEOUT_S)
        self._program("kube-apiserver", *self._apiserver_flags())
        self.start_apiserver()
        controllers = self._program("kube-controller-manager", *self._controller_manager_flags())
        controllers.start(_NODE_LIFECYCLE_OFF)
        scheduler = self._program("kube-scheduler", *self._client_flags("kube-scheduler"), "--leader-elect=false")
        scheduler.start()
        scheduler.wait_until(lambda: self._answers(f"{_SCHEDULER}/readyz"), "/readyz", timeout_s=_READY_TIMEOUT_S)
        self._wait_for_service_account("default")

    def _stop(self) -> None:
        """Stop all programs, clients before servers; keep the logs and remove etcd's data."""
        for program in reversed(self._programs.values()):
            program.stop(grace_s=_STOP_GRACE_S)
        shutil.rmtree(self._directory / "etcd", ignore_errors=True)

    def _program(self, name: str, *flags: str) -> Program:
        program = Program([self._binaries / name, *flags], log=self.logs / f"{name}.log")
        self._programs[name] = program
        return program

    def _restart_controller_manager(self, *flags: str) -> None:
        controllers = self._programs["kube-controller-manager"]
        controllers.stop(grace_s=_STOP_GRACE_S)
        controllers.start(*flags)
        # The controllers run when the service account controller has created this account.
        self.namespace()

    def _wait_for_service_account(self, namespace: str) -> None:
        """Wait until the controller manager has created the default account, which every new pod needs."""

        def made() -> bool:
            name = self.kubectl("get", "serviceaccount", "default", "-n", namespace, "-o", "name", "--ignore-not-found")
            return name != ""

        controllers = self._programs["kube-controller-manager"]
        controllers.wait_until(made, f"the service account of {namespace}", timeout_s=_READY_TIMEOUT_S)

    def _answers(self, url: str) -> bool:
        """Return whether a GET of the URL succeeds with status 200."""
        context = ssl.create_default_context(cadata=self._authority.certificate.decode())
        try:
            with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S, context=context):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _write_credentials(self) -> None:
        hosts = ("127.0.0.1", "localhost", ADVERTISED, "10.0.0.1", "kubernetes.default.svc")
        (self._directory / "ca.crt").write_bytes(self._authority.certificate)
        self._authority.server("kube-apiserver", hosts).write(self._directory, "server")
        self._authority.user("front-proxy").write(self._directory, "front-proxy")
        write_signing_keys(self._directory, "service-accounts")
        self.kubeconfig().rename(self._admin)
        for component in ("kube-controller-manager", "kube-scheduler"):
            self.kubeconfig(f"system:{component}", ()).rename(self._kubeconfigs / f"{component}.json")
        (self._directory / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))

    def _etcd_flags(self) -> tuple[str, ...]:
        return (
            f"--data-dir={self._directory / 'etcd'}",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        )

    def _apiserver_flags(self) -> tuple[str, ...]:
        here = self._directory
        return (
            f"--etcd-servers={_ETCD}",
            "--bind-address=0.0.0.0",
            "--secure-port=6443",
            f"--advertise-address={ADVERTISED}",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            f"--service-cluster-ip-range={_SERVICES}",
            "--authorization-mode=Node,RBAC",
            f"--client-ca-file={here / 'ca.crt'}",
            f"--tls-cert-file={here / 'server.crt'}",
            f"--tls-private-key-file={here / 'server.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={here / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={here / 'service-accounts.key'}",
            f"--requestheader-client-ca-file={here / 'ca.crt'}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={here / 'front-proxy.crt'}",
            f"--proxy-client-key-file={here / 'front-proxy.key'}",
            f"--audit-policy-file={here / 'audit-policy.json'}",
            f"--audit-log-path={self.logs / 'audit.jsonl'}",
            # Megabytes before a log rotation, so that long test runs also write a single file.
            "--audit-log-maxsize=4096",
        )

    def _client_flags(self, component: str) -> tuple[str, ...]:
        config = self._kubeconfigs / f"{component}.json"
        return (
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            f"--tls-cert-file={self._directory / 'server.crt'}",
            f"--tls-private-key-file={self._directory / 'server.key'}",
            # With the default of 20 requests per second, the creation of a thousand pods takes minutes.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        )

    def _controller_manager_flags(self) -> tuple[str, ...]:
        return (
            *self._client_flags("kube-controller-manager"),
            "--leader-elect=false",
            f"--root-ca-file={self._directory / 'ca.crt'}",
            f"--service-account-private-key-file={self._directory / 'service-accounts.key'}",
            "--use-service-account-credentials",
            "--horizontal-pod-autoscaler-sync-period=2s",
            "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
            "--horizontal-pod-autoscaler-downscale-stabilization=5s",
        )
