"""Drains Envoy before it ends; runs as a second container in the gateway's pods (templates/gateway.yaml).

Kubernetes stops both containers of a pod at the same time. SIGTERM starts the drain: this program tells Envoy to close
each connection after its answer, and polls the number of open requests. Envoy's preStop requests /drained, which is
answered when none is open or the timeout ends. Only then Envoy gets its SIGTERM, which cuts the remaining requests.
Standard library only: the file runs as it is.
"""

import argparse
import http.client
import signal
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# The time in which clients and load balancers may still send requests to a terminating pod.
LEAST_S = 5.0
INTERVAL_S = 0.5
# Envoy flushes its access log ten times a second. A router without a completion counts the request for minutes.
TOLD_AFTER_S = 1.0
ANSWER_WITHIN_S = 5.0
# A busy Envoy may fail to answer once. That must not cut its open requests.
GONE_AFTER = 3
OPEN = "http.requests.downstream_rq_active"


def call(admin: str, path: str, *, method: str) -> str:
    """Call Envoy's admin interface at HOST:PORT; return the answer. Raises OSError or HTTPException."""
    request = urllib.request.Request(f"http://{admin}{path}", method=method)
    with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:
        return str(answer.read().decode())


def open_requests(admin: str) -> int:
    """Return the number of open client requests. Raises OSError or HTTPException."""
    lines = call(admin, f"/stats?filter={OPEN}", method="GET").splitlines()
    return sum(int(line.split(": ")[1]) for line in lines if line.startswith(f"{OPEN}: "))


def drain(admin: str, *, timeout_s: float, least_s: float) -> bool:
    """Make Envoy close connections and wait until no request is open; return False on timeout."""
    begun_s = time.monotonic()
    told, missed = False, 0
    while time.monotonic() < begun_s + timeout_s:
        try:
            if not told:
                call(admin, "/healthcheck/fail", method="POST")
                told = True
            if time.monotonic() >= begun_s + least_s and open_requests(admin) == 0:
                time.sleep(TOLD_AFTER_S)
                if open_requests(admin) == 0:
                    return True
            missed = 0
        except (OSError, http.client.HTTPException) as error:
            print(f"Envoy at {admin} does not answer: {error}", file=sys.stderr, flush=True)
            missed += 1
            # Envoy has exited, so no request is open.
            if missed == GONE_AFTER:
                return True
        time.sleep(INTERVAL_S)
    return False


def serve(port: int, drained: threading.Event) -> ThreadingHTTPServer:
    """Answer GET /drained once the event is set, each request in its own thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Wait for the event, then answer 200; answer 404 for other paths."""
            if self.path == "/drained":
                drained.wait()
            self.send_response(200 if self.path == "/drained" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests."""

    server = ThreadingHTTPServer(("", port), Handler)
    # The server completes open answers before the process ends.
    server.daemon_threads = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Wait for SIGTERM, drain, answer /drained, and return."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--admin", required=True, metavar="HOST:PORT", help="Envoy's administration")
    parser.add_argument("--port", required=True, type=int, help="where /drained is answered")
    parser.add_argument("--timeout", required=True, type=float, metavar="SECONDS", help="longest wait")
    parser.add_argument("--least", default=LEAST_S, type=float, metavar="SECONDS", help="shortest wait")
    options = parser.parse_args()
    # Block the signal before any thread starts, so that no thread receives it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    drained = threading.Event()
    server = serve(options.port, drained)
    print(f"waiting for SIGTERM; /drained on port {server.server_address[1]}", file=sys.stderr, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    done = drain(options.admin, timeout_s=options.timeout, least_s=options.least)
    print("nothing is open" if done else f"requests are open after {options.timeout:g} s", file=sys.stderr, flush=True)
    drained.set()
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
