"""Ports for servers that bind late: outside the range from which the kernel gives ports to outgoing connections."""

import socket
from pathlib import Path

from helpers.rollout import free_port


def test_ports_are_free_below_the_ephemeral_range_and_differ():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert all(1024 < port < first for port in ports)
    assert len(set(ports)) > 15
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports[0]))


def test_a_taken_port_is_not_given(monkeypatch):
    """The first candidate is taken, so the second one comes."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken, free = server.getsockname()[1], free_port()
        candidates = iter([taken, free])
        monkeypatch.setattr("random.SystemRandom.randrange", lambda *_: next(candidates))
        assert free_port() == free
