"""Tests that the objects of manifests/ are consistent with each other and with their programs. e2e/ tests the
permissions.

install*.yaml are generated from the chart, which tests/chart tests. e2e/controlplane/test_examples.py tests the
examples.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import builders
from dualmap.objects.pool_reader import API_VERSION
from dualmap.objects.reservations import CONFIG_MAP
from dualmap.router import PoolRouter
from dualmap_extproc.app.main import router
from dualmap_extproc.autoscaling.demand import Demand
from dualmap_extproc.telemetry.metrics import Metrics
from dualmap_extproc.transport.server import LIVENESS_SERVICE
from dualmap_operator.main import operator
from dualmap_operator.names import KIND
from dualmap_operator.settings import LeaseSettings

FOLDER = Path(__file__).parents[2] / "manifests"
SYSTEM = "dualmap-system"
Object = Mapping[str, Any]


@cache
def documents(file: str) -> tuple[Object, ...]:
    return tuple(yaml.safe_load_all((FOLDER / file).read_text()))


def files() -> list[str]:
    paths = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))
    return [path for path in paths if not path.startswith("examples/")]


def every(kind: str) -> list[Object]:
    found = [each for file in files() for each in documents(file) if each["kind"] == kind]
    assert found
    return found


def only(file: str, kind: str, name: str) -> Object:
    (found,) = [each for each in documents(file) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def rules(file: str) -> Iterator[tuple[Object, Object]]:
    for role in documents(file):
        for rule in role.get("rules", ()):
            yield role, rule


RBAC_FILES = ("rbac/system.yaml", "rbac/cluster.yaml", "rbac/namespaced.yaml")
INSTALL_FILES = ("install.yaml", "install-namespaced.yaml")
PROGRAMS: tuple[tuple[str, str, click.Command], ...] = tuple(
    (file, f"dualmap-{command.name}", command) for file in INSTALL_FILES for command in (operator, router)
)


def test_manifests_readme_lists_every_file() -> None:
    linked = re.findall(r"\]\(([^.)]\S+\.yaml)\)", (FOLDER / "README.md").read_text())
    assert sorted(each for each in linked if not each.startswith("examples/")) == files()


def test_manifests_omit_namespace_only_if_the_user_selects_it() -> None:
    without = {
        (file, each["kind"]) for file in files() for each in documents(file) if "namespace" not in each["metadata"]
    }
    everywhere = {(file, kind) for file in INSTALL_FILES for kind in ("Namespace",)} | {
        ("install.yaml", kind) for kind in ("ClusterRole", "ClusterRoleBinding")
    }
    everywhere |= {
        (file, kind)
        for file in INSTALL_FILES
        for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    }
    assert without == everywhere | {
        ("namespace.yaml", "Namespace"),
        ("rbac/cluster.yaml", "ClusterRole"),
        ("rbac/cluster.yaml", "ClusterRoleBinding"),
        ("rbac/namespaced.yaml", "Role"),
        ("rbac/namespaced.yaml", "RoleBinding"),
    }


class TestRights:
    @pytest.mark.parametrize("file", RBAC_FILES)
    def test_rbac_role_is_bound_to_its_service_account(self, file: str) -> None:
        accounts = {each["metadata"]["name"] for each in every("ServiceAccount")}
        roles = {(each["kind"], each["metadata"]["name"]) for each in documents(file) if "rules" in each}
        bindings = [each for each in documents(file) if "roleRef" in each]
        assert {(each["roleRef"]["kind"], each["roleRef"]["name"]) for each in bindings} == roles
        assert len(bindings) == len(roles) == len(documents(file)) / 2
        for each in bindings:
            (subject,) = each["subjects"]
            account = each["metadata"]["name"].removesuffix("-models")
            assert subject == {"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}
            assert each["metadata"]["name"] == each["roleRef"]["name"]
            assert subject["name"] in accounts

    @pytest.mark.parametrize("file", RBAC_FILES)
    def test_rbac_rights_have_no_wildcards(self, file: str) -> None:
        for role, rule in rules(file):
            granted = {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
            assert not [each for each in granted if "*" in each]
            assert granted.isdisjoint({"pods/exec", "deletecollection", "impersonate"})
            if "configmaps" in granted:
                assert role["metadata"]["namespace"] == SYSTEM
                assert rule["resources"] == ["configmaps"]
                assert rule["resourceNames"] == [CONFIG_MAP]
            if "secrets" in granted:
                assert granted == {"", "secrets", "get", "patch"}
                assert rule["resourceNames"]

    def test_rbac_rights_are_equal_in_role_and_cluster_role(self) -> None:
        forms = [
            {
                (role["metadata"]["name"], str(rule))
                for role, rule in rules(file)
                # Within one namespace, no model name is reserved.
                if not role["metadata"]["name"].endswith("-models")
            }
            for file in ("rbac/cluster.yaml", "rbac/namespaced.yaml")
        ]
        assert forms[0] == forms[1]
        assert {name for name, _ in forms[0]} == {"dualmap-operator", "dualmap-router"}

    @pytest.mark.parametrize(("file", "form"), list(zip(INSTALL_FILES, ("cluster", "namespaced"), strict=True)))
    def test_rbac_rights_of_install_file_equal_the_rbac_files(self, file: str, form: str) -> None:
        def granted(*sources: str) -> list[tuple[str, str, str]]:
            return sorted(
                (role["kind"], role["metadata"]["name"].removesuffix("-system"), str(rule))
                for source in sources
                for role, rule in rules(source)
            )

        assert granted(file) == granted("rbac/system.yaml", f"rbac/{form}.yaml")

    def test_router_rbac_rights_are_read_only(self) -> None:
        verbs = {
            verb
            for role, rule in rules("rbac/cluster.yaml")
            if role["metadata"]["name"] == "dualmap-router"
            for verb in rule["verbs"]
        }
        assert verbs == {"list", "watch"}

    def test_rbac_rights_on_secrets_name_the_generated_ones(self) -> None:
        (named,) = [rule["resourceNames"] for _, rule in rules("rbac/system.yaml") if "secrets" in rule["resources"]]
        generated = [each["metadata"]["name"] for each in documents("install.yaml") if each["kind"] == "Secret"]
        assert sorted(named) == sorted(generated)

    def test_rbac_rights_cover_the_operators_lease(self) -> None:
        named = [
            rule
            for _, rule in rules("rbac/system.yaml")
            if "resourceNames" in rule and "secrets" not in rule["resources"]
        ]
        assert [rule["resourceNames"] for rule in named] == [[LeaseSettings().name]]
        assert [rule["verbs"] for rule in named] == [["get", "update"]]


def workload(file: str, name: str) -> Any:
    return only(file, "Deployment", name)


def with_readable_key(arguments: list[str]) -> list[str]:
    """Return a router's arguments with an existing key file, which the router reads while it parses the arguments."""
    return [each.replace("/etc/dualmap/hash-key/key", __file__) for each in arguments]


@pytest.mark.parametrize(("file", "name", "command"), PROGRAMS)
class TestPrograms:
    def pod(self, file: str, name: str) -> Any:
        return workload(file, name)["spec"]["template"]["spec"]

    def parsed(self, file: str, name: str, command: click.Command) -> Mapping[str, Any]:
        (container,) = self.pod(file, name)["containers"]
        assert container["command"] == ["dualmap", command.name]
        return command.make_context("dualmap", with_readable_key(container["args"])).params

    def test_programs_accept_their_arguments_and_watch_correct_namespaces(
        self, file: str, name: str, command: click.Command
    ) -> None:
        options = self.parsed(file, name, command)
        assert (options["all_namespaces"], options["namespace"]) == {
            "install.yaml": (True, None),
            "install-namespaced.yaml": (False, "llm"),
        }[file]
        assert options["log_format"] == "json"

    def test_programs_listen_on_the_declared_and_probed_ports(
        self, file: str, name: str, command: click.Command
    ) -> None:
        options = self.parsed(file, name, command)
        (container,) = self.pod(file, name)["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports == {key.removesuffix("_port"): value for key, value in options.items() if key.endswith("_port")}
        for probe in (container["livenessProbe"], container["readinessProbe"]):
            if "grpc" in probe:
                assert probe["grpc"]["port"] == ports["health"]
            else:
                assert probe["httpGet"] == {"path": "/healthz", "port": "health"}

    def test_workloads_select_their_pods_and_meet_restricted_security(
        self, file: str, name: str, command: click.Command
    ) -> None:
        spec = workload(file, name)["spec"]
        selected = spec["selector"]["matchLabels"]
        assert selected.items() <= spec["template"]["metadata"]["labels"].items()
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == selected
        pod = spec["template"]["spec"]
        assert pod["serviceAccountName"] == name
        assert pod["automountServiceAccountToken"] is True
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not container["image"].endswith(":latest")


def test_operators_use_leader_election_and_know_their_namespace() -> None:
    spec = only("install.yaml", "Deployment", "dualmap-operator")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 2
    assert "--leader-election" in container["args"]
    assert container["env"] == [
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    ]


class TestRouter:
    def test_router_liveness_probe_differs_from_readiness_probe(self) -> None:
        """A draining router is not ready, but the kubelet must not kill this router."""
        (container,) = only("install.yaml", "Deployment", "dualmap-router")["spec"]["template"]["spec"]["containers"]
        assert container["livenessProbe"]["grpc"]["service"] == LIVENESS_SERVICE
        assert container["startupProbe"]["grpc"]["service"] == LIVENESS_SERVICE
        assert "service" not in container["readinessProbe"]["grpc"]

    def test_router_grace_period_covers_the_drain(self) -> None:
        pod = only("install.yaml", "Deployment", "dualmap-router")["spec"]["template"]["spec"]
        arguments = with_readable_key(pod["containers"][0]["args"])
        options = router.make_context("router", arguments).params
        assert pod["terminationGracePeriodSeconds"] >= options["drain_timeout"] + 10

    def test_router_service_has_the_name_and_port_the_operator_uses(self) -> None:
        service, deployment = (only("install.yaml", kind, "dualmap-router") for kind in ("Service", "Deployment"))
        pod = deployment["spec"]["template"]
        assert operator.make_context("operator", []).params["router_service"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        listened = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == listened
        assert {each["name"]: each["appProtocol"] for each in service["spec"]["ports"]} == {
            "grpc": "http2",
            "health": "kubernetes.io/h2c",
            "als": "http2",
            "metrics": "http",
        }

    def test_router_disruption_budget_selects_its_pods(self) -> None:
        budget = only("install.yaml", "PodDisruptionBudget", "dualmap-router")
        service = only("install.yaml", "Service", "dualmap-router")
        assert budget["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


class TestHpa:
    def test_hpa_targets_the_pool_by_its_full_name(self) -> None:
        (hpa,) = documents("examples/hpa.yaml")
        assert hpa["spec"]["scaleTargetRef"] == {"apiVersion": API_VERSION, "kind": KIND, "name": "qwen"}

    def test_hpa_metric_is_exported_by_the_router(self) -> None:
        ((hpa,), made, demand) = documents("examples/hpa.yaml"), Metrics(version="1", replica_id="r"), Demand()
        made.set_pools([builders.pool(2)])
        demand.set_pools([builders.pool(2)])
        statuses = [PoolRouter(builders.pool(2)).status()]
        page = made.render(statuses, demand.signals(statuses)).decode()
        for metric in hpa["spec"]["metrics"]:
            assert f'\n{metric["external"]["metric"]["name"]}{{pool="llm/qwen"}} ' in page

    def test_hpa_scales_down_more_slowly_than_up(self) -> None:
        behavior = documents("examples/hpa.yaml")[0]["spec"]["behavior"]
        up, down = (behavior[each]["stabilizationWindowSeconds"] for each in ("scaleUp", "scaleDown"))
        assert up < 300 <= down
