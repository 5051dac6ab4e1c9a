"""Egress through the proxy: the listed host and port alone, whatever a program in the sandbox sends or changes."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.scripts import play, turn
from composer_nb.harness.agent.turns import ScriptTurnPolicy
from composer_nb.harness.attempt import Environment, attempt
from composer_nb.harness.grading.check import check_tasks
from composer_nb.harness.sandbox import egress, open_backend
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.sandbox.egress import EgressProxy, destinations, listen_in
from composer_nb.harness.store import load_attempts, save_attempts
from composer_nb.harness.tasks.task import Task, read_tasks
from composer_nb.harness.tools.tool_call import call as tool_call
from composer_nb.harness.tools.toolset import ToolSet
from tests.harness.foreign import lay
from tests.waiting import wait_until

CLIENT = """
import socket, sys
host, port, message = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode().decode("unicode_escape").encode()
with socket.create_connection((host, port), timeout=10) as peer:
    peer.sendall(message)
    peer.shutdown(socket.SHUT_WR)
    print(peer.makefile("rb").read().decode())
"""


class Server:
    """Answers each connection with its name and what arrived."""

    def __init__(self, name: str) -> None:
        self.name, self.arrived = name, list[bytes]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer = self.listener.accept()[0]
            except OSError:
                return
            with peer:
                self.arrived.append(peer.makefile("rb").read())
                peer.sendall(self.name.encode() + b" got " + self.arrived[-1])


@pytest.fixture
def listed_server() -> Iterator[Server]:
    server = Server("listed")
    yield server
    server.listener.close()


@pytest.fixture
def unlisted_server() -> Iterator[Server]:
    server = Server("other")
    yield server
    server.listener.close()


def test_only_the_listed_host_answers(bwrap: Backend, listed_server: Server, unlisted_server: Server) -> None:
    spec = SandboxSpec(egress=destinations(f"mirror.test=127.0.0.1:{listed_server.port}"))
    with bwrap.create(spec) as box:

        def call(host: str, port: int, message: str) -> tuple[int, str]:
            result = box.exec(["python3", "-c", CLIENT, host, str(port), message], timeout_s=30)
            return result.exit_code, (result.stdout or result.stderr.strip().rpartition(b"\n")[2]).decode().strip()

        assert call("mirror.test", listed_server.port, "hello") == (0, "listed got hello")
        address = f"127.0.0.1:{unlisted_server.port}"
        smuggled = f"CONNECT {address} HTTP/1.1\\r\\nHost: {address}\\r\\n\\r\\n"
        assert call("mirror.test", listed_server.port, smuggled)[1].startswith("listed got CONNECT")
        # Names of other hosts, other ports of the listed one, this machine's addresses, and a list of one's own.
        hosts = ("other.test", "mirror.test", "127.0.0.1", "127.80.0.2", "10.0.0.1", "169.254.169.254", "93.184.215.14")
        for host in hosts:
            assert call(host, unlisted_server.port, "x")[0], host
        changed = box.exec(["sh", "-c", "echo '127.80.0.1 other.test' > /etc/hosts || mount -t tmpfs none /etc"])
        assert changed.exit_code and call("other.test", listed_server.port, "x")[0]
        query = "import socket; s = socket.socket(2, 2); s.sendto(b'q', ('8.8.8.8', 53))"
        assert b"unreachable" in box.exec(["python3", "-c", query]).stderr
        assert box.exec(["sh", "-c", "ls /proc/1/fd"]).exit_code  # where the sockets that accept came from
        first, second = box.egress_log
    assert f"mirror.test:{listed_server.port} 127.0.0.1, 5 bytes out, {len('listed got hello')} in" in first
    assert "refused" not in second and unlisted_server.arrived == [] and len(listed_server.arrived) == 2


@pytest.mark.parametrize("answer", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"])
def test_a_name_with_a_private_address_is_refused(bwrap: Backend, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A public address among the answers does not help: the name of a listed host may be hostile, or answer in turns."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.215.14", answer)]
    lookups: list[str] = []
    monkeypatch.setattr(egress.socket, "getaddrinfo", lambda host, *_, **__: lookups.append(host) or answers)
    with bwrap.create(SandboxSpec(egress=destinations("rebound.test:80"))) as box:
        result = box.exec(["python3", "-c", CLIENT, "rebound.test", "80", "x"], timeout_s=30)
        assert b"got" not in result.stdout and lookups == ["rebound.test"]
        assert f"the private address {answer}: list rebound.test={answer}:80" in box.egress_log[0]


def test_a_connection_goes_to_the_address_that_was_checked(
    bwrap: Backend, listed_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(["93.184.215.14", "127.0.0.1"])
    connected: list[str] = []
    open_connection = asyncio.open_connection

    async def connect(host: str, port: int) -> object:
        connected.append(host)
        return await open_connection("127.0.0.1", listed_server.port)

    monkeypatch.setattr(egress.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (next(turns), 80))])
    monkeypatch.setattr(egress.asyncio, "open_connection", connect)
    with bwrap.create(SandboxSpec(egress=destinations("turns.test:80"))) as box:
        assert b"listed got x" in box.exec(["python3", "-c", CLIENT, "turns.test", "80", "x"]).stdout
        box.exec(["python3", "-c", CLIENT, "turns.test", "80", "x"])
        assert connected == ["93.184.215.14"] and "127.0.0.1" in box.egress_log[1]


def test_connections_whose_answers_nobody_reads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a file of this process, of which it has a fixed number for all sandboxes."""
    monkeypatch.setattr(egress, "AT_A_TIME", 2)
    server, listener = Server("x" * 60_000), socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    proxy = EgressProxy([egress.Destination("mirror.test", server.port, "", "127.0.0.1")], [listener])
    peers = list[socket.socket]()
    for count in (1, 2, 3):
        peers.append(socket.socket())
        peers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        peers[-1].connect(listener.getsockname())
        peers[-1].shutdown(socket.SHUT_WR)
        wait_until(lambda count=count: len(proxy.log) >= count)
    assert [line.endswith(": more than 2 connections at a time") for line in proxy.log] == [False, False, True]
    peers[0].close()
    wait_until(lambda: proxy._open == 1)
    proxy.close()
    server.listener.close()


@pytest.mark.parametrize(
    "entry", ["pypi.org", "10.0.0.5:80", "*.org:443", "localhost:80", "a=10.0.0:1", "a:0", "a:70000"]
)
def test_wrong_entries_name_the_setting(entry: str) -> None:
    with pytest.raises(ValueError, match=r"env\.egress|4 octets"):
        destinations(f"pypi.org:443,{entry}")


def test_a_task_that_needs_a_network_runs_with_a_list_alone(tmp_path: Path, listed_server: Server) -> None:
    folder = lay("plain", tmp_path)
    (folder / "task.toml").write_text("environment.allow_internet = true\n")
    client = f"python3 -c '{CLIENT}' mirror.test {listed_server.port} x"
    (folder / "solution/solve.sh").write_text(f"#!/bin/bash\n{client} > fetched\n")
    script = "#!/bin/bash\ngrep -q 'listed got x' fetched && echo 1 > /logs/verifier/reward.txt\n"
    (folder / "tests/test.sh").write_text(script)
    destination = f"mirror.test=127.0.0.1:{listed_server.port}"
    [row] = check_tasks(read_tasks(folder))
    assert "allow_internet = true: sandboxes have no network; list the hosts" in row["problem"]
    [row] = check_tasks(read_tasks(folder), egress=destination)
    assert row["ok"] and row["gold"] and not row["none"]
    task = Task.from_harbor(folder)
    fetch = tool_call("run_terminal_cmd", command=f"{client} > fetched", is_background=False)
    spoken = [turn([fetch]), Said(text="Done.")]
    with open_backend("bwrap", egress=destination) as sandboxes:
        played = attempt(task, Environment(tools=ToolSet.cursor(), backend=sandboxes), ScriptTurnPolicy(play(spoken)))
    save_attempts(tmp_path / "rollouts.parquet", [played])
    [stored] = load_attempts(tmp_path / "rollouts.parquet", {task.id: task})
    assert played.grade.passed
    assert f"mirror.test:{listed_server.port} 127.0.0.1, 1 bytes out" in stored.rollout.egress[0]


@pytest.mark.skipif(os.getuid() != 0, reason="root alone enters the network of a container")
def test_a_container_gets_its_sockets_from_outside(bwrap: Backend, listed_server: Server) -> None:
    """The way of the backend `docker`, tried on a sandbox of bubblewrap, which has a network of its own too."""
    allowlist = destinations(f"mirror.test=127.0.0.1:{listed_server.port}")
    with bwrap.create() as box:
        proxy = EgressProxy(allowlist, listen_in(box._machine.channel.peer, allowlist))
        reply = box.exec(["python3", "-c", CLIENT, allowlist[0].local, str(listed_server.port), "x"])
        proxy.close()
    assert reply.stdout.strip() == b"listed got x" and "1 bytes out" in proxy.log[0]
