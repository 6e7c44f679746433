"""Builds the gateways and the conformance suite from Go modules, once per machine, like the control plane.

`make gateways` runs this file. The results are in the folder that `emulated_cluster.control_plane.build` also uses.
"""

import sys
from pathlib import Path

from emulated_cluster.control_plane.build import CONTROL_PLANE, BuildError, Catalogue, Definitions, Module, Program

ISTIOD = "pilot-discovery"
SUITE = "conformance.test"
ECHO_SERVER = "echo-basic"
ENVOY_GATEWAY = "envoy-gateway"
# The module istio.io/istio has no releases in the Go module proxy, only this commit of its main branch.
ISTIO_VERSION = "v0.0.0-20260827124520-eed52ebb66ad"
# From istio's chart, the tests use the templates of the ConfigMaps.
ISTIO_CHART = "istio-discovery"
ISTIO_CRDS = "crd-all.gen.yaml"
GATEWAY_API_CRDS = "standard"
_SOURCES = Path(__file__).parent / "go"

GATEWAYS = Catalogue(
    modules=(
        Module(
            name="istio",
            sources=_SOURCES,
            programs=(Program(name=ISTIOD, package="istio.io/istio/pilot/cmd/pilot-discovery"),),
        ),
        Module(
            name="conformance",
            sources=_SOURCES,
            programs=(
                Program(
                    name=SUITE,
                    package="sigs.k8s.io/gateway-api-inference-extension/conformance",
                    test=True,
                ),
                Program(name=ECHO_SERVER, package="sigs.k8s.io/gateway-api/conformance/echo-basic"),
            ),
        ),
        Module(
            name="envoy-gateway",
            sources=_SOURCES,
            programs=(Program(name=ENVOY_GATEWAY, package="github.com/envoyproxy/gateway/cmd/envoy-gateway"),),
        ),
    ),
    definitions=(
        Definitions(
            name="gateway-api-crds",
            module="sigs.k8s.io/gateway-api@v1.6.1",
            base="config/crd",
            files=(GATEWAY_API_CRDS,),
        ),
        Definitions(
            name="istio-crds",
            module=f"istio.io/istio@{ISTIO_VERSION}",
            base="manifests/charts/base/files",
            files=(ISTIO_CRDS,),
        ),
        Definitions(
            name="istio-chart",
            module=f"istio.io/istio@{ISTIO_VERSION}",
            base="manifests/charts/istio-control",
            files=(ISTIO_CHART,),
        ),
    ),
    needs="all of them need 9 minutes on 2 idle cores, and 450 MB",
)


def main() -> int:
    """Build the control plane and the gateways, and print the gateways' folder; on failure, print the reason."""
    try:
        CONTROL_PLANE.build()
        print(GATEWAYS.build())
    except BuildError as error:
        print(f"gateways: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
