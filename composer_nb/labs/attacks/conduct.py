"""Attacks on those who run sandboxes: a harness that is killed, methods that are abused. Cases 28 and 30."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import Sandbox
from composer_nb.harness.sandbox.reap import FOLDER, Kind, below, mark_of, reap, started
from composer_nb.labs.attacks.case import REFUSED, SPEC, AttackVerdict, Site, alive, register

HARNESS = """
import sys, threading, time
from pathlib import Path
from composer_nb.harness.sandbox import open_backend
from composer_nb.labs.attacks.case import SPEC
from composer_nb.harness.sandbox.reap import FOLDER
backend = open_backend(sys.argv[1], "killed", Path(sys.argv[2]) / FOLDER)
box = backend.create(SPEC)
box.write("a", b"x")
threading.Thread(target=lambda: box.exec(["bash", "-c", "(setsid sleep 300 &); sleep 300"], timeout_s=300), daemon=True).start()
def churn():
    while True:
        backend.create(SPEC).destroy()
threading.Thread(target=churn, daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
time.sleep(300)
"""


@register(28, "kill the harness in the middle of everything, then reap")
def killed_harness(site: Site) -> AttackVerdict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", HARNESS, site.backend.name, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/")
        assert process.stdout is not None
        with process.stdout as told:
            ready = told.readline()
        running = below(process.pid)
        process.kill()
        process.wait()
        if ready != b"ready\n":
            return AttackVerdict(blocked=False, detail="no evidence: the harness did not start")
        time.sleep(0.5)
        noted = _noted(Path(folder) / FOLDER)
        done = reap(Path(folder))
        left = [pid for pid, tick in running if started(pid) == tick]
        again = reap(Path(folder))
        (Path(folder) / FOLDER).rmdir()  # empty: nothing is held any more
        found = [f"{kind} {name}" for kind, name, mark in noted if mark_of(kind, name) == mark]
    problems = [*(f"process {pid}" for pid in left), *found, *done.failed, *again.failed]
    ended = ", ".join(f"{len(getattr(done, kind))} {kind}" for kind in ("processes", "cgroups", "containers"))
    detail = f"{len(running)} processes were running; reap ended {ended}"
    return AttackVerdict(blocked=not problems, detail=f"left: {problems}" if problems else detail)


def _noted(folder: Path) -> set[tuple[Kind, str, str]]:
    """Return (kind, name, mark) of all resources in the journals of a folder."""
    entries = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().split("\n")[:-1]]
    return {(entry["kind"], entry["name"], entry["mark"]) for entry in entries}


@register(30, "abuse of the sandbox's own methods: random, huge and broken requests")
def abuse(site: Site) -> AttackVerdict:
    rng = random.Random(30)
    texts = ["", ".", "..", "/", "a\0b", "\n", "x" * 5000, "../../etc/passwd", "</parameter>", "\udcff", "-rf", "~"]
    texts += ["$(id)", "\x1b[2J"]

    def anything(box: Sandbox) -> Any:
        text, number = rng.choice(texts), rng.choice([-1, 0, 1, 1 << 40])
        requests: list[Callable[[], Any]] = [
            lambda: box.read(text, offset=max(number, 0), max_bytes=number),
            lambda: box.read(text, offset=number),
            lambda: box.write(text, b"x" * rng.choice([0, 10, 1 << 20])),
            lambda: box.upload({text: b"x", rng.choice(texts): b"y"}),
            lambda: box.exec([text, text], timeout_s=5, output_bytes=rng.choice([1, 100])),
            lambda: box.exec(["true"], cwd=text, env={text: text}, timeout_s=5),
            lambda: box.exec_background(["true"], log=text),
            lambda: box.entries(text),
            lambda: box.remove(text),
            lambda: box.exec(["true"] * 3000, timeout_s=5),
            lambda: box.download(max_bytes=number),
        ]
        return rng.choice(requests)()

    with site.backend.create(SPEC) as box:
        for _ in range(300):
            try:
                anything(box)
            except REFUSED:
                pass
            except Exception as error:
                return AttackVerdict(blocked=False, detail=f"{type(error).__name__}: {error}"[:100])
        return AttackVerdict(blocked=alive(box), detail="300 requests: results or clear errors, and it still works")
