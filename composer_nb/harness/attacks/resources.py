"""Attacks on the limits: processes, memory, disk, time and output."""

from __future__ import annotations

import time

from composer_nb.harness.attacks.case import HELPERS, Case, Host, Verdict, case, descendants
from composer_nb.harness.linux import machine

CASES: list[Case] = []


@case(CASES, "fork bomb")
def fork_bomb(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import subprocess, threading, time
def f(clone):
    found = []
    for _ in range(50):
        attempt(found, "fork", lambda: os.fork() or os._exit(0))
        attempt(found, "clone", lambda: syscall(clone, 17, 0, 0, 0, 0) or os._exit(0))
    attempt(found, "spawn", lambda: subprocess.run(["/usr/bin/python3", "-c", "0"]))
    attempt(found, "exec", lambda: os.execv("/usr/bin/python3", ["python3"]))
    threads = 0
    try:
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
            threads += 1
    except RuntimeError:
        pass
    return [found, threads]
"""
    )
    found, threads = host.report(source, machine()["clone"])
    blocked = found == [] and threads <= host.boxes.limits.threads
    return Verdict(blocked=blocked, detail=f"processes: {found}, threads: {threads}")


@case(CASES, "memory bomb")
def memory_bomb(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import mmap
def f():
    held = []
    try:
        while len(held) < 4096:
            held.append(mmap.mmap(-1, 1 << 20))
    except (OSError, MemoryError):
        pass
    found = []
    attempt(found, "memfd", lambda: os.memfd_create("x"))
    attempt(found, "shm", lambda: syscall(29, 0, 1 << 30, 0o1600))
    return [len(held), found]
"""
    )
    megabytes, found = host.report(source)
    limit = host.boxes.limits.memory_bytes >> 20
    grabbed = host.run("def f():\n    return len(bytearray(1 << 34))\n")[0]
    blocked = megabytes <= limit and found == [] and grabbed.status in ("raised", "died")
    detail = f"{megabytes} of {limit} MiB mapped; 16 GiB at once: {grabbed.status}; other ways: {found}"
    return Verdict(blocked=blocked, detail=detail)


@case(CASES, "fill the disk, and use up its inodes")
def disk_fill(host: Host) -> Verdict:
    source = """
def f():
    total = files = 0
    try:
        while total < 1 << 30:
            with open("fill%d" % files, "wb", buffering=0) as file:
                files += 1
                for _ in range(4):
                    total += file.write(bytes(1 << 16))
    except OSError:
        pass
    empty = 0
    try:
        while empty < 500:
            open("empty%d" % empty, "w").close()
            empty += 1
    except OSError:
        pass
    return [total, files + empty]
"""
    limits = host.boxes.limits
    total, files = host.report(source)
    counted = files <= limits.inodes or not host.boxes.capabilities["limits"]["inodes"]
    return Verdict(blocked=total <= limits.disk_bytes and counted, detail=f"{total} bytes in {files} files")


def _timed(host: Host, source: str, longest_s: float) -> Verdict:
    """Blocked when the first argument is reported as timed out, in time, and the second was not run."""
    started = time.monotonic()
    outcomes = host.run(source, "()", "()")
    took = time.monotonic() - started
    statuses = [outcome.status for outcome in outcomes]
    blocked = statuses == ["timeout", "not_run"] and took < longest_s
    return Verdict(blocked=blocked, flagged="timeout" in statuses, detail=f"{statuses} after {took:.2f} s")


@case(CASES, "endless loop")
def endless_loop(host: Host) -> Verdict:
    return _timed(host, "def f():\n    while True:\n        pass\n", host.boxes.limits.cpu_s + 1.0)


@case(CASES, "endless loop that blocks signals and stops timers")
def endless_loop_without_signals(host: Host) -> Verdict:
    source = """
import signal
def f():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    while True:
        pass
"""
    return _timed(host, source, host.boxes.limits.cpu_s + 1.0)


@case(CASES, "sleep past the wall deadline")
def sleep_past_deadline(host: Host) -> Verdict:
    source = "import time\ndef f():\n    time.sleep(60)\n"
    return _timed(host, source, host.boxes.limits.wall_s + 1.0)


@case(CASES, "stop oneself and one's process group")
def stop_group(host: Host) -> Verdict:
    source = """
import os, signal
def f():
    os.kill(0, signal.SIGSTOP)
    while True:
        signal.pause()
"""
    verdict = _timed(host, source, host.boxes.limits.wall_s + 1.0)
    started = time.monotonic()
    host.report("def f():\n    return 0\n")  # SIGSTOP to one's process group must not reach the next worker
    neighbour_s = time.monotonic() - started
    detail = f"{verdict.detail}; the next request took {neighbour_s:.2f} s"
    return Verdict(blocked=verdict.blocked and neighbour_s < 1.0, flagged=verdict.flagged, detail=detail)


@case(CASES, "a daemon that outlives its request")
def daemon(host: Host) -> Verdict:
    source = """
import os, threading, time
def f():
    threading.Thread(target=time.sleep, args=(60,)).start()
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
    except OSError:
        return "refused"
    return "forked"
"""
    host.report("def f():\n    return 0\n")
    before = len(descendants(host.boxes))
    outcome = host.run(source)[0]
    after = len(descendants(host.boxes))
    detail = f"fork {outcome.text}; processes in the box before {before}, after {after}"
    return Verdict(blocked=after <= before, detail=detail)


@case(CASES, "huge output")
def huge_output(host: Host) -> Verdict:
    printed = host.run("def f():\n    print('x' * 10_000_000, flush=True)\n    return 1\n")[0]
    value = host.run("def f():\n    return 'x' * 10_000_000\n")[0]
    flood = host.run("import os\ndef f():\n    while True:\n        os.write(3, b'x' * 60000)\n")[0]
    deep = host.run("def f():\n    v = []\n    for _ in range(9999):\n        v = [v, v]\n    return v\n")[0]
    statuses = [outcome.status for outcome in (printed, value, flood, deep)]
    blocked = printed.text in ("1", "") and "returned" not in statuses[1:] and statuses[1] == "unreadable"
    return Verdict(blocked=blocked, flagged="unreadable" in statuses, detail=str(statuses))
