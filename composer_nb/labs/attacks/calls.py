"""Attacks on function calls: on the host and other requests, on limits, on results. All run through `Executor.run`."""

from __future__ import annotations

import os
import time

from composer_nb.harness.grading.grade import grade_functions
from composer_nb.harness.sandbox.reap import below
from composer_nb.harness.sandbox.requests import CallOutcome
from composer_nb.harness.sandbox.system.linux import machine
from composer_nb.labs.attacks.case import LIMITS, SECRET, AttackVerdict, Judge, Site, nothing, register
from composer_nb.labs.attacks.joint import CODEC, LOOKED_UP, ROUND_TRIPS

FINE = "def f():\n    return 0\n"


# The host and other requests.


@register(0, "see or signal other processes, the resident among them")
def processes(site: Site) -> AttackVerdict:
    source = """
import signal
def f():
    found = []
    for pid in range(2, 400):
        if pid != os.getpid():
            attempt(found, "pid", lambda: os.kill(pid, 0))
    for victim in {1, os.getppid()} - {0, os.getpid()}:
        attempt([], "supervisor", lambda: os.kill(victim, signal.SIGKILL))  # judged by what still answers
    if not found:  # whoever sees others is not blocked anyway, and had better not do this
        attempt(found, "everybody", lambda: os.kill(-1, signal.SIGKILL))
    for name in ("1/environ", "1/mem", "1/root/etc/passwd", "1/fd/0"):
        attempt(found, name, lambda: open("/proc/" + name, "rb").read(1))
    attempt(found, "pidfd", lambda: os.pidfd_open(1))
    return found
"""
    site.report(FINE)
    before = set(below(os.getpid()))
    verdict = nothing(site.report(source))
    after = site.call(FINE)[0]
    lost = len(before - set(below(os.getpid())))
    # The worker that was attacked from and the one made ahead of it are new.
    return AttackVerdict(verdict.blocked and after.status == "returned" and lost <= 3, verdict.detail)


@register(0, "find what another request left")
def leftovers(site: Site) -> AttackVerdict:
    folders = 'import builtins, tempfile\nfolders = [".", tempfile.gettempdir(), *"/dev/shm /var/tmp /dev /proc /run".split()]\n'
    leave = """
def f(secret):
    builtins.left = sys.modules["left"] = secret
    written = []
    for folder in folders:
        attempt(written, folder, lambda: open(os.path.join(folder, "left"), "w").write(secret) > 0)
    return len(written)
"""
    look = """
def f():
    found = [folder for folder in folders if os.path.exists(os.path.join(folder, "left"))]
    found += [name for name in os.listdir(".") if name != "f.py"]
    return found + ["builtins"] * hasattr(builtins, "left") + ["modules"] * ("left" in sys.modules)
"""
    written = site.report(folders + leave, SECRET)
    verdict = nothing(site.report(folders + look))
    return AttackVerdict(verdict.blocked and written > 0, f"{written} files written; {verdict.detail}")


@register(0, "read the memory of earlier requests")
def stale_memory(site: Site) -> AttackVerdict:
    marker = "stale-" + os.urandom(6).hex()
    site.report("def f(marker):\n    return [marker] * 50\n", marker)
    # Reads around live objects, where an inherited heap would be; the search text is made from parts.
    source = """
import ctypes
def f(head, tail):
    chunk, start = 1 << 18, id(object()) & ~0xFFFFF
    text = ctypes.string_at(start, chunk)
    own = text.count((head + tail).encode())
    return own > 1
"""
    outcome = site.call(source, repr((marker[:9], marker[9:])))[0]
    leaked = outcome.status == "returned" and outcome.text == "True"
    return AttackVerdict(not leaked, f"{outcome.status} {outcome.text}: copies found beyond its own: {leaked}")


@register(0, "lock or watch files of the library, which other requests see")
def call_locks(site: Site) -> AttackVerdict:
    source = """
import fcntl
def f():
    found = []
    for path in (os.__file__, os.path.dirname(os.__file__), "/dev/null", "/"):
        with_it = os.open(path, os.O_RDONLY)
        attempt(found, "flock " + path, lambda: fcntl.flock(with_it, fcntl.LOCK_EX | fcntl.LOCK_NB))
        for command in (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_SETLEASE, fcntl.F_NOTIFY):
            value = bytes(32) if command < 99 else 0
            attempt(found, f"fcntl {command} {path}", lambda: fcntl.fcntl(with_it, command, value) and None)
    attempt(found, "inotify", lambda: libc.inotify_init1(0) >= 0 or 1 / 0)
    return found
"""
    return nothing(site.report(source))


# Limits.


@register(0, "fork bomb")
def fork_bomb(site: Site) -> AttackVerdict:
    source = """
import subprocess, threading, time
def f(clone):
    found = []
    for _ in range(50):
        attempt(found, "fork", lambda: os.fork() or os._exit(0))
        attempt(found, "clone", lambda: syscall(clone, 17, 0, 0, 0, 0) or os._exit(0))
    attempt(found, "spawn", lambda: subprocess.run(["/usr/bin/python3", "-c", "0"]))
    attempt(found, "exec", lambda: os.execv("/usr/bin/python3", ["python3"]))
    return [found, repeat(lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(), 200)]
"""
    successes, threads = site.report(source, machine()["clone"])
    blocked = successes == [] and threads <= LIMITS.threads
    return AttackVerdict(blocked, f"processes: {successes}, threads: {threads}")


@register(0, "memory bomb")
def memory_bomb(site: Site) -> AttackVerdict:
    source = """
import mmap
def f():
    held, found = [], []
    repeat(lambda: held.append(mmap.mmap(-1, 1 << 20)), 4096)
    attempt(found, "memfd", lambda: os.memfd_create("x"))
    attempt(found, "shm", lambda: syscall(29, 0, 1 << 30, 0o1600))
    return [len(held), found]
"""
    megabytes, successes = site.report(source)
    limit = LIMITS.memory_bytes >> 20
    large = site.call("def f():\n    return len(bytearray(1 << 34))\n")[0]
    detail = f"{megabytes} of {limit} MiB mapped; 16 GiB at once: {large.status}; other ways: {successes}"
    return AttackVerdict(megabytes <= limit and successes == [] and large.status in ("raised", "died"), detail)


@register(0, "a daemon that outlives its request")
def daemon(site: Site) -> AttackVerdict:
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
    site.report(FINE)
    before = len(below(os.getpid()))
    outcome = site.call(source)[0]
    after = len(below(os.getpid()))
    return AttackVerdict(after <= before, f"fork {outcome.text}; processes before {before}, after {after}")


@register(0, "huge output")
def huge_output(site: Site) -> AttackVerdict:
    floods = (
        "    print('x' * 10_000_000, flush=True)\n    return 1\n",
        "    return 'x' * 10_000_000\n",
        "    while True:\n        os.write(3, b'x' * 60000)\n",
        "    v = []\n    for _ in range(9999):\n        v = [v, v]\n    return v\n",
    )
    outcomes = [site.call(F + flood)[0] for flood in floods]
    statuses = [outcome.status for outcome in outcomes]
    blocked = outcomes[0].text in ("1", "") and "returned" not in statuses[1:] and statuses[1] == "unreadable"
    return AttackVerdict(blocked, str(statuses), flagged="unreadable" in statuses)


# Results.


@register(0, "forge result lines on every descriptor")
def forged_lines(site: Site) -> AttackVerdict:
    source = """
import os
for fd in range(64):
    for nonce in ("", "ready ", "0 ", "0000000000000000 "):
        try:
            os.write(fd, (nonce + '["returned", "42"]\\n').encode())
        except OSError:
            pass
print('["returned", "42"]')
def f():
    raise ValueError
"""
    statuses = [outcome.status for outcome in site.call(source, "()", "()")]
    return AttackVerdict("returned" not in statuses, str(statuses), flagged="unreadable" in statuses)


@register(0, "find the expected values")
def expected_values(site: Site) -> AttackVerdict:
    source = """
import gc, sys
def f(head, tail):
    wanted, seen, frame = head + tail, [], sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals)[:20000].replace(repr(head), ""))
        frame = frame.f_back
    kept = [o for o in gc.get_objects() if type(o) in (list, tuple) and o is not seen]
    seen += [repr(o)[:2000] for o in kept[:500]]
    return any(wanted in text for text in seen[1:])
"""
    marker = "expected-" + os.urandom(6).hex()  # stays here, as the right answers of a test do
    outcome = site.call(source, repr((marker[:9], marker[9:])))[0]
    return AttackVerdict(outcome.status == "returned" and outcome.text != "True", f"{outcome.status} {outcome.text}")


@register(0, "a value that claims to equal everything")
def always_equal(site: Site) -> AttackVerdict:
    source = """
class Equal(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "42"
def f(kind):
    return Equal(1) if kind == 0 else [Equal(1)] if kind == 1 else {Equal(1): 1}
"""
    statuses = [outcome.status for outcome in site.call(source, "(0,)", "(1,)", "(2,)")]
    return AttackVerdict(set(statuses) == {"unreadable"}, str(statuses), flagged="unreadable" in statuses)


@register(0, "look answers up among the arguments of other calls")
def looked_up(site: Site) -> AttackVerdict:
    if site.calls is None:
        raise ValueError("this backend serves no calls")
    details, blocked = [], True
    for name, task in ROUND_TRIPS.items():
        attack, right = (grade_functions(task, {"codec.py": text}, site.calls) for text in (LOOKED_UP, CODEC))
        blocked &= right.passed and not any(attack.tests.values())
        details.append(f"{name}: {sum(attack.tests.values())} of {len(attack.tests)} tests")
    return AttackVerdict(blocked, "; ".join(details))


TIMEOUT, DIED = CallOutcome(status="timeout"), CallOutcome(status="died")
EXITED = CallOutcome(status="raised", text="SystemExit")
UNSIGNALLED = """\
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    while True:
        pass
"""
STOPPED = "    os.kill(0, signal.SIGSTOP)\n    while True:\n        signal.pause()\n"
F = "import os, signal, sys, time\ndef f():\n"
# Programs without a result: id -> title, source, and the outcome of the first of two calls.
ENDINGS = {
    "endless-loop": ("endless loop", F + "    while True:\n        pass\n", TIMEOUT),
    "endless-loop-without-signals": ("endless loop that blocks signals and timers", F + UNSIGNALLED, TIMEOUT),
    "sleep-past-deadline": ("sleep past the wall deadline", F + "    time.sleep(60)\n", TIMEOUT),
    "stop-group": ("stop oneself and one's process group", F + STOPPED, TIMEOUT),
    "exit-at-import": ("os._exit(0) at import", "import os\nos._exit(0)\n", DIED),
    "sys-exit-at-import": ("sys.exit(0) at import", "import sys\nsys.exit(0)\n", EXITED),
    "closed-pipe": ("close the result pipe and go on", F + "    os.closerange(0, 4096)\n    return 42\n", DIED),
}


def _judge_of(id: str, source: str, expected: CallOutcome) -> Judge:
    def judge(site: Site) -> AttackVerdict:
        """Blocked when the outcomes are the expected ones and the next request is answered."""
        began = time.monotonic()
        outcomes = site.call(source, "()", "()")
        texts = [f"{outcome.status} {outcome.text}".strip() for outcome in outcomes]
        second = EXITED if expected == EXITED else CallOutcome(status="not_run")
        blocked = outcomes == (expected, second) and site.report(FINE) == 0
        detail = f"{texts} after {time.monotonic() - began:.2f} s"
        return AttackVerdict(blocked, detail, flagged=expected in (TIMEOUT, DIED))

    judge.__name__ = id
    return judge


for _id, (_title, _source, _expected) in ENDINGS.items():
    register(0, _title)(_judge_of(_id, _source, _expected))
