# Every target installs its dependencies. `make` without a target lists the targets.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
IMAGE ?= ghcr.io/dualmap/dualmap:0.1.0
# uv uses the machine's certificates, because a company's proxy may have its own certificate.
export UV_SYSTEM_CERTS := 1
INSTALL := $(UV) pip install --python $(BIN)/python
# Every package must have one of the hashes in constraints.txt. The project itself has no hash, so it is installed alone.
PACKAGES := $(INSTALL) --require-hashes --constraint constraints.txt --requirement pyproject.toml
PROJECT := $(INSTALL) --no-deps --build-constraint constraints.txt --editable .

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python >= 3.11 or say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "make: python3 -m venv failed; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.uv: constraints.txt | $(BIN)/python
	@sed -n '/^uv==/,/[^\\]$$/p' constraints.txt > $(VENV)/uv.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(VENV)/uv.txt
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.uv
	@echo "installing the demo's packages into $(VENV)"
	@$(PACKAGES) --extra demo
	@$(PROJECT)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.uv
	@echo "installing the development packages into $(VENV)"
	@$(PACKAGES) --extra dev
	@$(PROJECT)
	@touch $@ $(VENV)/.demo

# vLLM has its own Python 3.11, because its packages conflict with the project's. It takes 5 GB.
.vllm/.installed: bench/engine/vllm-requirements.txt | $(VENV)/.uv
	@echo "installing vLLM into .vllm (5 GB)"
	@$(UV) venv --quiet --clear --python 3.11 .vllm
	@$(UV) pip install --python .vllm/bin/python --no-deps --require-hashes --compile-bytecode --requirement $<
	@touch $@

# Dynamo's packages conflict with the project's. `python -m bench yardstick` uses it.
.dynamo/.installed: bench/yardstick/dynamo-requirements.txt | $(VENV)/.uv
	@echo "installing Dynamo into .dynamo (450 MB)"
	@$(UV) venv --quiet --clear --python 3.11 .dynamo
	@$(UV) pip install --quiet --python .dynamo/bin/python --require-hashes --compile-bytecode --requirement $<
	@touch $@

.PHONY: help demo test lint unit e2e gateways vllm controlplane wheel-test fuzz bench constraints proto manifests image clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.demo ## real Envoy + router + simulated engines: DualMap beside round robin (ARGS="--engines 8 ...")
	@$(BIN)/dualmap demo $(ARGS)

# End-to-end tests run real programs on a shared machine. A failed one gets a second run, and pytest prints "RERUN" with
# its first failure. Both runs share one time limit, so a test that exceeds the limit gets no second run.
AGAIN := --reruns 1 --rerun-except "Timeout \(" --max-suite-reruns 4 --rerun-show-tracebacks --timeout 300

# Simulations fork, which may hang in a process with threads of gRPC, as end-to-end tests have them. So these run apart.
test: lint wheel-test ## everything: lint, unit tests on the built wheel, command line, end-to-end tests
	@e2e/debian.sh
	@$(BIN)/pytest --numprocesses 2 --dist loadfile tests/chart tests/cli tests/contract tests/packaging tests/bench
	@$(BIN)/pytest $(AGAIN) --numprocesses 2 --dist loadfile --ignore-glob 'e2e/test_faults_*' --ignore e2e/controlplane --ignore e2e/gateways e2e
	@$(BIN)/pytest $(AGAIN) e2e/test_faults_*.py

unit: $(VENV)/.dev ## the unit tests, on the working tree (ARGS="tests/core -k hotness")
	@$(BIN)/pytest --numprocesses 2 $(or $(ARGS),tests testing/tests/unit)

e2e: controlplane ## tests against a real Kubernetes control plane, built on the first run (ARGS="-k survive")
	@testing/emulated_cluster/control_plane/netns.sh $(BIN)/pytest $(AGAIN) testing/tests/control_plane e2e/controlplane $(ARGS)

gateways: $(VENV)/.dev ## tests behind Istio, Envoy Gateway and llm-d's Envoy configuration, built on the first run (ARGS="-k llm_d")
	@e2e/debian.sh
	@PYTHONPATH=testing:e2e $(BIN)/python -m gateways.build >/dev/null
	@testing/emulated_cluster/control_plane/netns.sh $(BIN)/pytest e2e/gateways $(ARGS)

vllm: $(VENV)/.dev .vllm/.installed ## tests against three real vLLM engines on the CPU, 5 GB (ARGS=e2e/test_vllm_prefill_decode.py, e2e/test_real_vllm.py)
	@DUALMAP_VLLM_PYTHON=$(CURDIR)/.vllm/bin/python $(BIN)/pytest -s $(or $(ARGS),e2e/test_vllm_truth.py)

controlplane: $(VENV)/.dev # Builds the control plane's programs and the chart's images for e2e.
	@e2e/debian.sh
	@$(BIN)/python testing/emulated_cluster/control_plane/build.py >/dev/null
	@$(BIN)/python e2e/controlplane/images.py >/dev/null || echo "make: the tests that need the images are skipped" >&2

lint: $(VENV)/.dev ## ruff, mypy --strict and the import layers
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

wheel-test: $(VENV)/.dev ## build the wheel, install it alone, run the unit tests against it
	@$(BIN)/python tests/packaging/wheel_run.py

fuzz: $(VENV)/.dev ## feed the router's parsers with random and invalid input (ARGS="--seconds 60 body"; ARGS=--help)
	@$(BIN)/python -m fuzz $(ARGS)

bench: $(VENV)/.dev ## benchmarks; results are printed as ratios within the run
	@$(BIN)/python -m bench $(ARGS)

constraints: $(VENV)/.uv ## pin every package of pyproject.toml in constraints.txt, with hashes (ARGS=--upgrade for new versions)
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --all-extras --no-annotate \
		--custom-compile-command 'make constraints' pyproject.toml --output-file constraints.txt $(ARGS)

proto: $(VENV)/.dev ## regenerate the protobuf stubs of extproc/dualmap_extproc/wire, and the cluster that routers send to Envoy
	@$(BIN)/python -m grpc_tools.protoc -Iextproc/proto --python_out=extproc --pyi_out=extproc extproc/proto/dualmap_extproc/wire/*.proto
	@$(BIN)/python -W ignore extproc/proto/pool_cluster.py

manifests: $(VENV)/.dev ## regenerate manifests/install*.yaml and the chart's README from helm/dualmap
	@$(BIN)/python helm/generate.py

image: ## build the container image with docker, podman or buildah (IMAGE=registry/name:tag ARGS="--platform linux/arm64")
	@engine=$$(command -v docker || command -v podman || command -v buildah) || { echo "make: none of docker, podman and buildah found" >&2; exit 1; }; \
	$$engine build --tag $(IMAGE) $(ARGS) .

clean: ## remove what the targets made
	rm -rf $(VENV) .vllm .dynamo build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache demo-out
