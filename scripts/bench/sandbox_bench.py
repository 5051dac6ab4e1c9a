"""How fast sandboxes are on this machine, each figure beside a peer's that was measured in the same minute.

The peers: for `bwrap`, a bubblewrap process around `true`, as one would start it by hand; for `docker`, `docker exec` of `true`
through the SDK, and the docker program started for every command, which is how mini-swe-agent's Docker environment works.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxUnavailable

SPEC = SandboxSpec(memory_bytes=128 << 20, disk_bytes=16 << 20)
CALLS, STARTS, AT_ONCE, LIMITED = 200, 200, 4, 40
TIME_LIMIT_S = 0.1


def measure(backend: Backend) -> dict[str, float]:
    """Return milliseconds (p50, p95, p99), and starts a second."""
    with backend.create(SPEC) as box:
        figures = tools(box)
        figures |= _quantiles("timeout_overshoot_ms", overshoot(box), (0.5, 0.99))
    if backend.name == "docker":
        cold = statistics.median(_ms(lambda: backend.create(SPEC).destroy()) for _ in range(5))
        return figures | {"cold_start_ms": cold} | docker_peers(backend)
    figures |= starts(backend)
    return figures | bwrap_peer() if backend.name == "bwrap" else figures


def tools(box: Sandbox) -> dict[str, float]:
    """What an agent's commonest calls cost, one after another."""
    box.write("file", b"x" * 10_000)
    box.exec(["true"])
    reads = [_ms(lambda: box.read("file")) for _ in range(CALLS)]
    commands = [_ms(lambda: box.exec(["true"])) for _ in range(CALLS)]
    return _quantiles("read_file_ms", reads, (0.5, 0.95)) | _quantiles("true_ms", commands, (0.5, 0.95))


def overshoot(box: Sandbox) -> list[float]:
    """How much later than its limit a command that ignores every signal is over, in ms."""
    stubborn = ["bash", "-c", "trap '' TERM INT HUP; (setsid sleep 60 &); sleep 60"]
    return [_ms(lambda: box.exec(stubborn, timeout_s=TIME_LIMIT_S)) - 1e3 * TIME_LIMIT_S for _ in range(LIMITED)]


def starts(backend: Backend) -> dict[str, float]:
    """Measure how fast sandboxes are made and destroyed, AT_ONCE at a time."""

    def start_ms(_: int) -> float:
        return _ms(lambda: backend.create(SPEC).destroy())

    begin = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        spent = list(pool.map(start_ms, range(STARTS)))
    return {"starts_per_s": STARTS / (time.perf_counter() - begin)} | _quantiles("start_ms", spent, (0.5, 0.95))


def bwrap_peer() -> dict[str, float]:
    """bubblewrap around `true`, started by hand."""
    command = ["bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
    command += [
        "--symlink",
        "usr/lib",
        "/lib",
        "--symlink",
        "usr/lib64",
        "/lib64",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "true",
    ]
    return {
        "peer_bwrap_true_ms": statistics.median(_ms(lambda: subprocess.run(command, check=True)) for _ in range(30))
    }


def docker_peers(backend: Backend) -> dict[str, float]:
    """Measure `docker exec` of `true` in one of our own containers."""
    from composer_nb.harness.sandbox.engine import connect

    medians: dict[str, float] = {}
    with backend.create(SPEC) as box, contextlib.closing(connect()) as client:
        container: Any = client.containers.get(box.id)
        sdk = [_ms(lambda: container.exec_run("true")) for _ in range(30)]
        medians["peer_docker_exec_true_ms"] = statistics.median(sdk)
        if program := shutil.which("docker"):
            command = [program, "exec", container.id, "bash", "-lc", "true"]
            cli = [_ms(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(15)]
            medians["peer_docker_program_true_ms"] = statistics.median(cli)
    return medians


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def _quantiles(name: str, values: list[float], shares: tuple[float, ...]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name}_p{100 * share:.0f}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares}


def report() -> Iterator[tuple[str, dict[str, float] | str]]:
    """(backend, its figures, or why it does not work here) of those that isolate."""
    for name in ("bwrap", "docker"):
        try:
            with contextlib.closing(open_backend(name)) as backend:
                yield name, measure(backend)
        except SandboxUnavailable as error:
            yield name, str(error)
