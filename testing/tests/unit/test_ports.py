"""Tests of the ports that other tests reserve for their servers."""

import itertools
import socket

import pytest

import ports


def test_reserved_ports_are_distinct_and_free() -> None:
    reserved = [ports.reserved_port() for _ in range(10)]
    assert len(set(reserved)) == len(reserved)
    for port in reserved:
        socket.create_server(("127.0.0.1", port)).close()


def test_port_in_use_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ports.reserved_port(), ports.reserved_port()
    monkeypatch.setattr(ports, "_reserved", iter((first, second)))
    with socket.create_server(("127.0.0.1", first)):
        assert ports.reserved_port() == second


def test_workers_of_a_run_reserve_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    of_workers = []
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    for worker in ("gw0", "gw1", "gw2"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        of_workers.append(set(itertools.islice(ports._worker_ports(), 10_000)))
    assert set.union(*of_workers) == set(ports._PORTS)
    assert sum(map(len, of_workers)) == len(ports._PORTS)
