#!/usr/bin/env python
"""Kills the processes of a live run one by one, and checks at the end that nothing came of it.

    python scripts/studies/kill_trial.py --kills 20 --seed 0 --folder /tmp/kills
    python scripts/studies/kill_trial.py --kills 20 --ranks 2 --only trainer    # a trainer of two ranks, either of them

A micro run with services on Ray is started as a notebook would start it. Each time it has gone on by a step, one of its
processes gets SIGKILL: the launcher (which a notebook's kernel is), the coordinator, the trainer, an engine, an environment
worker, Ray's raylet or its control service. A launcher that died is started again; everything else has to mend itself. Exit
status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from composer_nb.harness.sandbox.reap import reap, started
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.replay import replay
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.journal import Journal
from composer_nb.trainer.settings import Settings, override

MICRO = {
    "ranks": 1,
    "data.level": "functions",
    "data.demonstrations": 32,
    "data.mistaken_demonstrations": 16,
    "data.heldout_tasks": 8,
    "data.structure_tasks": 4,
    "data.tune_tasks": 4,
    "midtrain.steps": 10,
    "midtrain.tokens": 256,
    "sft.steps": 2,
    "sft.tokens": 256,
    "services.on": False,
    "rl.steps": 1,
    "rl.prompts": 2,
    "rl.group": 4,
    "rl.checkpoint_every": 3,
    "rl.max_seconds": 0.0,
    "rl.evaluate_every": 0,
    "eval.samples": 1,
    "limits.tokens": 144,
    "limits.turn_tokens": 24,
}
ON_RAY = {"services.on": True, "services.ahead": 1, "services.engines": 2}
MARKS = {
    "launcher": "start_or_resume",
    "coordinator": "composer_nb.trainer.services.run",
    "trainer": "ray::Trainer",
    "engine": "ray::EngineService",
    "environment": "ray::EnvironmentService",
    "raylet": "raylet/raylet ",
    "control": "gcs/gcs_server ",
}
LAUNCHER = "import sys; from pathlib import Path; from composer_nb.trainer.recipe.launch import start_or_resume; " + (
    "start_or_resume(Path(sys.argv[1]), say=lambda line: None)"
)
PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    victim: str
    pid: int
    at: float
    """Seconds since the start."""
    step: int
    doing: str
    """The title of the process."""
    seconds: float
    """Until another step was trained."""


class Trial:
    """A live run and what was seen of its processes."""

    def __init__(self, run: RunDir, temporary: Path) -> None:
        self.run, self.temporary = run, temporary
        self.begin = time.monotonic()
        self.seen: dict[int, int] = {}
        self.starts = 0
        self.launch()

    def launch(self) -> None:
        self.starts += 1
        with (self.run.path / "launcher.log").open("ab") as log:
            self.launcher = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(self.run.path)],
                stdout=log,
                stderr=log,
                env=os.environ
                | {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.run.path / "cache")},
                start_new_session=True,
            )

    def steps(self) -> int:
        return int(self.run.query("SELECT COUNT(*) FROM step WHERE stage = 'rl'")[0][0])

    def processes(self) -> dict[int, str]:
        """pid -> command line of the launcher and everything below it."""
        parents, titles = {}, {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit():
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                    titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() + " "
        found = [self.launcher.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        for pid in found:
            if tick := started(pid):
                self.seen[pid] = tick
        return {pid: titles[pid] for pid in found if titles.get(pid)}

    def until(self, step: int) -> bool:
        """Waits until so many steps are trained; False when the run is complete before. Raises RuntimeError for a run that ends
        of itself, TimeoutError."""
        deadline = time.monotonic() + PATIENCE_S
        while self.steps() < step:
            self.processes()
            if (code := self.launcher.poll()) is not None:
                if code:
                    last = (self.run.path / "launcher.log").read_text().splitlines()[-1:]
                    raise RuntimeError(f"the launcher ended of itself with {code}: {last}")
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"no step {step} within {PATIENCE_S:g} s; see {self.run.path}/services.log")
            time.sleep(0.1)
        return True

    def kill(self, victim: str, random: Random) -> Kill | None:
        """Kills one, and waits until the run goes on; None when it was complete before."""
        deadline = time.monotonic() + PATIENCE_S
        while not (pids := [pid for pid, title in self.processes().items() if MARKS[victim] in title]):
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        pid = random.choice(pids)
        title = self.processes().get(pid, "")
        step, now = self.steps(), time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            self.launcher.wait()
            self.launch()
        self.until(step + 1)
        doing = title.strip() if title.startswith("ray::") else ""
        after = time.monotonic() - now
        return Kill(victim=victim, pid=pid, at=now - self.begin, step=step, doing=doing, seconds=after)

    def end(self) -> None:
        """Waits until the run is complete."""
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.launcher.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the run does not come to its end")
            self.processes()
            time.sleep(0.2)
        if code:
            raise RuntimeError(f"the launcher ended of itself with {code}; see {self.run.path}/launcher.log")


def check(trial: Trial, settings: Settings) -> dict[str, str]:
    """What does not hold, by name of the check; empty when all is well."""
    run, rl, wrong = trial.run, settings.rl, {}
    journal = Journal(run)
    batches = journal.batches(0, rl.steps)
    journal.close()
    slots = Counter(slot for train in batches for slot in train.slots)
    if len(batches) != rl.steps or slots != Counter(range(rl.steps * rl.prompts)):
        skipped = sorted(set(range(rl.steps * rl.prompts)) - set(slots))
        twice = [slot for slot, count in slots.items() if count > 1]
        wrong["prompts"] = f"{len(batches)} batches, {skipped} skipped, {twice} twice, {max(slots)} the last"
    info, ledger = run.finished("rl"), run.ledger()
    if info is None or sum(ledger.values()) != info["sampled"]:
        wrong["ledger"] = f"{ledger} is not {info and info['sampled']}"
    made = dict(run.query("SELECT version, hash FROM version"))
    others = [
        version for version, hash in run.query("SELECT version, hash FROM served") if made.get(version, hash) != hash
    ]
    if sorted(made) != [(step + 1) * rl.minibatches for step in range(rl.steps)] or others:
        wrong["versions"] = f"made {sorted(made)}, served others as {others}"
    if settings.trainers == 1 and (  # ranks add up in another order than the one process that replays
        differ := [one.step for one in replay(run, settings, rl.steps) if not one.same]
    ):
        wrong["replay"] = f"steps {differ} come out differently"
    if failed := reap(run.path).failed:
        wrong["reap"] = str(failed)
    if left := [pid for pid, tick in trial.seen.items() if started(pid) == tick]:
        wrong["processes"] = str({pid: Path(f"/proc/{pid}/cmdline").read_text()[:80] for pid in left})
    if folders := list(trial.temporary.iterdir()):
        wrong["folders"] = str(folders)
    if journals := list((run.path / "journal").glob("*")):
        wrong["journals"] = str(journals)
    return wrong


def prepared(folder: Path, steps: int, ranks: int) -> tuple[RunDir, Settings]:
    """A run that is about to begin RL; what comes before is done once a folder."""
    micro = MICRO | {"data.rl_tasks": 3 * steps}
    base = folder / f"base{steps}"
    if not (base / "base" / "run.db").is_file():
        start_or_resume(None, override(Settings(), micro), runs=base, name="base")
    many = {"ranks": ranks, "mesh.shard": ranks}
    settings = override(Settings(), micro | ON_RAY | many | {"rl.steps": steps})
    return fork(RunDir(base / "base"), settings, runs=folder, name="killed"), settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of RL (12 + 4 a kill)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the trainer")
    parser.add_argument(
        "--only", nargs="+", choices=MARKS, default=list(MARKS), metavar="VICTIM", help=", ".join(MARKS)
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"), help="where the runs are (runs/kills)")
    given = parser.parse_args()
    random = Random(given.seed)
    run, settings = prepared(given.folder, given.steps or 12 + 4 * given.kills, given.ranks)
    temporary = Path(tempfile.mkdtemp(prefix="kt-"))  # short: the path of a socket lies in it
    trial, kills, victims = Trial(run, temporary), list[Kill](), list[str]()
    print(f"{run.path}\nkill victim        pid      at   step  went on after  (it was)", flush=True)
    trial.until(2)
    while len(kills) < given.kills:
        victims = victims or random.sample(given.only, len(given.only))
        time.sleep(random.uniform(0.0, 1.5))
        kill = trial.kill(victims.pop(), random)
        if kill is None:
            break
        kills.append(kill)
        print(
            f"{len(kills):4} {kill.victim:12} {kill.pid:7} {kill.at:6.0f} s {kill.step:5} {kill.seconds:11.1f} s    {kill.doing}",
            flush=True,
        )
    trial.end()
    wrong = check(trial, settings)
    shutil.rmtree(temporary)
    record = {"kills": [asdict(kill) for kill in kills], "launches": trial.starts, "wrong": wrong}
    (run.path / "kills.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{len(kills)} of {given.kills} kills, {trial.starts} launches, {len(trial.seen)} processes in all")
    for name in ("prompts", "ledger", "versions", "replay", "reap", "processes", "folders", "journals"):
        unasked = name == "replay" and settings.trainers > 1
        print(f"{name:10} {wrong.get(name, 'not asked' if unasked else 'as it should be')}")
    return int(bool(wrong) or len(kills) < given.kills)


if __name__ == "__main__":
    sys.exit(main())
