"""The conformance suite of the Gateway API Inference Extension v1.6.0, through Istio, with DualMap as the picker."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from emulated_cluster.control_plane.cluster import Cluster
from gateways import istio
from gateways.build import GATEWAYS, SUITE

_NAMESPACE = "inference-conformance-app-backend"
_PICKERS = ("primary", "secondary", "appprotocol-http", "appprotocol-h2c", "dp")
_PASSING = {
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolAppProtocol",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolResolvedRefsCondition",
    "HTTPRouteMultipleRulesDifferentPools",
}
# With two pools in one rule, Istio asks only the picker of the last pool, so requests for the other pool's endpoints
# get a 503. A pool without a picker ends istiod.
_SKIPPED = ("GatewayWeightedAcrossTwoInferencePools", "InferencePoolMissingEPPRef")
_TIMEOUT_S = 900
_RESULT = re.compile(r"^    --- (PASS|FAIL|SKIP): TestConformance/(\w+) ", re.MULTILINE)


@pytest.mark.timeout(_TIMEOUT_S)
def test_conformance_suite_passes(cluster: Cluster, running_istio: None, tmp_path: Path) -> None:
    for picker in _PICKERS:
        istio.use_tls_without_verification(cluster, f"{picker}-endpoint-picker-svc", _NAMESPACE)
    output = cluster.logs / "conformance.log"
    with output.open("w") as log:
        ran = subprocess.run(
            [
                GATEWAYS.folder / SUITE, "-test.run=TestConformance", "-test.v", f"-test.timeout={_TIMEOUT_S}s",
                f"--gateway-class={istio.CLASS}", f"--skip-tests={','.join(_SKIPPED)}", "--allow-crds-mismatch",
            ],
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig("conformance"))},
            cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    results = {name: result for result, name in _RESULT.findall(output.read_text())}
    assert {name for name, result in results.items() if result == "FAIL"} == set(), output.read_text()[-4000:]
    assert {name for name, result in results.items() if result == "PASS"} == _PASSING
    assert ran.returncode == 0
