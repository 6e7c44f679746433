"""The termination of a pool's pods: the preStop script of the engine's container, and the grace period.

Kubernetes runs preStop, then sends SIGTERM, and sends SIGKILL at the end of the grace period. If the operator has
drained a pod before its deletion, the pod is idle and the script takes a few seconds. If a pod is deleted or evicted
without a drain, the script waits for the pod's requests; routers stop picking a terminating pod at once. ``children``
adds the script and the grace period to the pod template. ``checks`` creates a warning if the user's grace period is too
short.
"""

import math
from typing import Final

from dualmap_operator.decide.spec import PoolSpec, TemplateWorkload
from dualmap_operator.decide.workload.arguments import SHUTDOWN_TIMEOUT, whole_option, words
from dualmap_operator.decide.workload.template import engine_container

POD_IP_VARIABLE: Final = "DUALMAP_POD_IP"
"""The variable with the pod's address: some engines listen on this address and not on 127.0.0.1."""

_LAST_LOOK_S: Final = 10
"""The extra time of the script after drain.timeout: one more check, with up to two request timeouts."""

_ENGINE_STOP_S: Final = 30
"""An engine's time from SIGTERM to SIGKILL, equal to Kubernetes' default grace period."""

_SETTLE_S: Final = 5
"""The time in which a deleted pod may still receive requests (docs/operator.md)."""

_METRICS_PATHS: Final = {"TensorRTLLM": "/prometheus/metrics"}
"""The metrics paths of engine types that do not use /metrics."""

_HEAD: Final = """\
# The DualMap operator generated this script. It keeps the engine running until the engine has no request, at most for
# spec.drain.timeout.
port={port} metrics={metrics} timeout={timeout} settle={settle}
"""

_BODY: Final = r"""
# Print a page of the engine with the first available tool. Proxies are not used.
unset http_proxy HTTP_PROXY all_proxy ALL_PROXY
page() {
  if command -v curl >/dev/null; then
    curl -fgs -m 2 "$1"
  elif command -v wget >/dev/null; then
    wget -q -O - -T 2 -t 1 "$1"
  else
    python3 -I -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=2).read().decode())' "$1"
  fi 2>/dev/null
}

# Return 0 if no request runs or waits, 1 if a request runs or waits, and 2 if the metrics are missing.
look() {
  page "http://$1:$port$metrics" | (
    said=2
    while read -r line; do
      case ${line%%[{ ]*} in
        vllm:num_requests_running | vllm:num_requests_waiting) ;;
        sglang:num_running_reqs | sglang:num_queue_reqs) ;;
        trtllm_num_requests_running | trtllm_num_requests_waiting) ;;
        *) continue ;;
      esac
      case ${line##* } in
        *[!0.]*) exit 1 ;;
        *) said=0 ;;
      esac
    done
    exit $said
  )
}

host=${DUALMAP_POD_IP:-127.0.0.1}
case $host in *:*) host="[$host]" ;; esac

# During this time, routers and Envoy observe that the pod terminates.
end=$(($(date +%s) + timeout))
sleep $settle || exit 1

# End when the engine is idle twice in a row, at the timeout, or when its metrics are missing for 30 s.
idle=0 heard=$(date +%s)
while :; do
  look "$host"
  said=$?
  [ $said = 2 ] && { look 127.0.0.1; said=$?; }
  now=$(date +%s)
  case $said in
    0) idle=$((idle + 1)) heard=$now ;;
    1) idle=0 heard=$now ;;
    *) idle=0 ;;
  esac
  [ $idle -lt 2 ] && [ $now -lt $end ] && [ $((now - heard)) -lt 30 ] || exit 0
  sleep 2
done
"""


def pre_stop_script(spec: PoolSpec) -> str:
    """Return the script for ``/bin/sh -c``, which ends when the engine is idle, at the latest after ``drain.timeout``.

    The script needs ``sleep`` and ``date``, and one of curl, wget and python3 to read the engine's metrics. If the
    metrics cannot be read, the script waits 30 s. The metrics cannot be read without such a tool, for other engine
    types, or with TLS on the engine's port.
    """
    timeout_s = math.ceil(spec.drain_timeout_s)
    head = _HEAD.format(
        port=spec.engine.port,
        metrics=_METRICS_PATHS.get(spec.engine.type, "/metrics"),
        timeout=timeout_s,
        settle=min(_SETTLE_S, timeout_s),
    )
    return head + _BODY


def grace_period_s(spec: PoolSpec) -> int:
    """Return the shortest grace period that includes a complete drain and the engine's shutdown, in seconds.

    The period includes vLLM's ``--shutdown-timeout`` after SIGTERM if the template sets this option.
    """
    shutdown_s = None
    if isinstance(spec.workload, TemplateWorkload):
        engine = engine_container(spec.workload.template, spec.engine.port)
        shutdown_s = whole_option(words(engine.written), SHUTDOWN_TIMEOUT) if engine else None
    return math.ceil(spec.drain_timeout_s) + _LAST_LOOK_S + max(_ENGINE_STOP_S, shutdown_s or 0)
