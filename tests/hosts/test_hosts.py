"""Hosts are apart but for their links, and end with the process that made them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from network import HOME, Host, Link, Network

from composer_nb.harness.sandbox.system.linux import patience

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("listens", flush=True)
    while True:
        with server.accept()[0] as client:
            while data := client.recv(1 << 16):
                if data.endswith(b"?"):
                    client.sendall(b"!")
"""
# Sends bytes to an address, waits for the answer, and prints the seconds of each of five times.
SEND = """
import json, socket, sys, time
seconds = []
with socket.create_connection((sys.argv[1], 7000), 20) as connection:
    for _ in range(5):
        begin = time.monotonic()
        connection.sendall(bytes(int(sys.argv[2])) + b"?")
        assert connection.recv(1) == b"!"
        seconds.append(time.monotonic() - begin)
print(json.dumps(seconds))
"""
KILLED = """
import time
from network import Link, Network
with Network() as network:
    host = network.host("short", Link(rate=10, delay=5))
    sleeper = host.start("sleep", "1234567")
    print(host.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(network: Network) -> Host:
    host = network.host("server")
    process = host.start("python", "-c", SERVE)
    assert process.stdout is not None and process.stdout.readline() == "listens\n"
    return host


def seconds_to(server: Host, host: Host, size: int) -> float:
    return min(json.loads(host.python(SEND, server.address, str(size))))


def test_links_have_their_rate_and_delay_and_lead_nowhere_else(network: Network, server: Host) -> None:
    """Lower bounds alone: a busy machine makes links slower, and nothing faster."""
    near, slow, far = (network.host(name, link) for name, link in LINKS.items())
    assert seconds_to(server, near, 1_000_000) < seconds_to(server, slow, 1_000_000)
    assert seconds_to(server, slow, 1_000_000) > 0.9 * 8 / LINKS["slow"].rate
    assert seconds_to(server, far, 1) > 2 * LINKS["far"].delay / 1000
    assert "Network is unreachable" in near.python(f"{TRY}('192.0.2.1')")
    network.cut(far)
    assert "timed out" in far.python(f"{TRY}({server.address!r})")
    network.cut(far, down=False)
    assert seconds_to(server, far, 1) > 0


LINKS = {"near": Link(), "slow": Link(rate=40), "far": Link(rate=100, delay=20)}
TRY = """
import socket
def attempt(address):
    try:
        socket.create_connection((address, 7000), 2)
    except OSError as error:
        print(error)
attempt"""


def test_hosts_share_no_folder_and_no_process(network: Network, server: Host, tmp_path: Path) -> None:
    neighbour = network.host("other")
    (tmp_path / "file").touch()
    for folder in (HOME, "/tmp", "/dev/shm"):
        server.run("touch", f"{folder}/only-here")
        assert server.run("ls", folder) == "only-here\n" and neighbour.run("ls", folder) == ""
    assert f"cannot touch '{Path(__file__).parent}" in server.run(
        "sh", "-c", f"touch {Path(__file__).parent}/x || true"
    )
    assert neighbour.python(
        "import os; print(os.uname().nodename, len([n for n in os.listdir('/proc') if n.isdigit()]))"
    ) == ("other 2\n")
    neighbour.send(tmp_path, f"{HOME}/copy")
    assert neighbour.run("ls", f"{HOME}/copy") == "file\n"


def test_nothing_outlives_a_killed_test() -> None:
    command = [sys.executable, "-c", KILLED]
    process = subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    inner_process = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + patience(20)
    while inner_process.is_running() and inner_process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1234567"]]
