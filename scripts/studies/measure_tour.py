#!/usr/bin/env python3
"""Measures the tour over seeds, with its controls: `scripts/studies/measure_tour.py --seeds 0 1 --rl-seeds 0 1 2 [--controls]`.

For each mid-training seed one full run, and forks of it for the other RL seeds. Prints Markdown tables from the runs' reports.
With `--controls` each seed's first run is also compared, paired by task, with what RL must beat in as many calls:

    more SFT          supervised training for as long as fine-tuning and RL took, on all demonstrations, its sharpness calibrated
                      like the start's; and RL that begins where this ends
    expert iteration  RL's own tasks and batches, but the solved rollouts are imitated: no baseline, no blame
    shuffled rewards  rewards permuted within each batch
    masked tests      RL where the tests of an edit say nothing (`masked.py`), scored like all others
    masked tries      mid-training, fine-tuning and RL again, where no failed try of a demonstration is trained on
    fresh contexts    the start, begun anew after k calls until the visible tests pass; the best k. No training
    blind             `scripted:blind`, a search without repeats. No training

`--fork KEY=VALUE …` adds a fork of each first run with one other setting. `--table-only` prints what there is already.
Interrupted, it can be started again: complete runs are kept. Runs with other settings need another folder, `--runs`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import Course, bootstrap, run_eval
from composer_nb.harness.environment import make_agent
from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.store import load_attempts
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.tour.expert import TINY_SCRIPTS, Script, ScriptedPolicy
from composer_nb.trainer.learning.data import load_rows, save_rows
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.reader import solved_by_task
from composer_nb.trainer.recipe.report import build_report, within_12
from composer_nb.trainer.records.rundir import RunDir, create, provenance
from composer_nb.trainer.settings import Settings, from_dict, override, to_dict
from scripts.studies.masked import without_tries

CALLS = 12
CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "expert iteration": {"loss.baseline": "none", "reward.weights": {"solved": 1.0}},
    "shuffled rewards": {"rl.shuffle_rewards": True},
    "masked tests": {"env.tasks": "scripts.studies.masked:Masked", "env.sandboxes": 128},
}
MORE_SFT, AFTER = "more SFT", "RL after more SFT"
MASKED, SEEN = "masked tests", "masked tests, scored with them"
UNTRIED = "masked tries"


def folder(seed: int, control: str) -> str:
    return f"seed{seed}-{control.replace(' ', '-')}"


def run(runs: Path, name: str, settings: Settings, source: RunDir | None = None) -> RunDir:
    """Return the run `name`: started, forked from `source`, or resumed. A fork may have another environment: RL's own."""
    path = runs / name
    if not (path / "run.db").is_file():
        if source:  # which refuses another environment than the source's
            new_run = fork(source, replace(settings, env=from_dict(source.settings()).env), runs=runs, name=name)
        else:
            new_run = create(runs, name)
        write_json(new_run.path / "settings.json", to_dict(settings))
        write_json(new_run.path / "provenance.json", provenance())
    return finished(path, settings)


def is_complete(path: Path) -> bool:
    return (path / "run.db").is_file() and RunDir(path).finished("numerics") is not None


def finished(path: Path, settings: Settings) -> RunDir:
    """Return the run in `path`, resumed if it is not complete. Raises ValueError for one that began with other settings."""
    print(f"== {path.name}", flush=True)
    return start_or_resume(path, settings, say=lambda line: print(line, flush=True))


def rescored(runs: Path, name: str, settings: Settings, source: RunDir, trained: RunDir) -> RunDir:
    """Return a fork of `source` that takes what RL left in `trained`, and does what follows RL by its own settings."""
    path = runs / name
    if not (path / "run.db").is_file():
        take_rl(fork(source, settings, runs=runs, name=name), trained)
    return finished(path, settings)


def take_rl(run: RunDir, trained: RunDir) -> None:
    """Take over RL's weights, metrics and batches, which the sharpness of the final policy is set on."""
    for source_weights in (trained.path / "weights" / "before_final", trained.trained_weights):
        name = "before_final" if source_weights.name == "before_final" else "final"
        shutil.copytree(source_weights, run.path / "weights" / name)
    for file in (trained.path / "rollouts").glob("rl_*"):
        copy = shutil.copytree if file.is_dir() else shutil.copyfile
        copy(file, run.path / "rollouts" / file.name)
    run.take_steps("rl", trained.steps("rl"))
    info = trained.finished("rl")
    assert info is not None
    run.finish("rl", info.pop("seconds"), info)


def rl_after_control(runs: Path, name: str, settings: Settings, source: RunDir, taught: RunDir) -> RunDir:
    """Return RL that starts from the control of `taught`, as `source` starts from its fine-tuning."""
    path = runs / name
    if not (path / "run.db").is_file():
        new_run = fork(source, settings, runs=runs, name=name)
        shutil.rmtree(new_run.path / "weights" / "start")
        shutil.copytree(taught.path / "weights" / "control", new_run.path / "weights" / "start")
        for file in (taught.path / "rollouts").glob("eval_control*"):
            shutil.copyfile(file, new_run.path / "rollouts" / file.name.replace("control", "start"))
        info = taught.finished("eval_control")
        assert info is not None
        new_run.finish("eval_start", info.pop("seconds"), info)
    return finished(path, settings)


def untried(runs: Path, name: str, settings: Settings, source: RunDir) -> RunDir:
    """Return a run on the tokenizer and the data of `source`, whose demonstrations are masked by `without_tries`."""
    path = runs / name
    if not (path / "run.db").is_file():
        new_run = create(runs, name)
        shutil.copytree(source.path / "data", new_run.path / "data", dirs_exist_ok=True)
        tokenizer = load_tokenizer(new_run.path / "data", needed=())
        for file in (new_run.path / "data").glob("mistaken-*.npz"):
            save_rows([without_tries(row, tokenizer) for row in load_rows(file)], file)
        for stage in ("tokenizer", "data"):
            info = source.finished(stage)
            assert info is not None
            new_run.finish(stage, info.pop("seconds"), info)
        write_json(new_run.path / "settings.json", to_dict(settings))
        write_json(new_run.path / "provenance.json", provenance())
    return finished(path, settings)


def control_steps(source: RunDir) -> int:
    """Steps of SFT that take as long as SFT and RL together took, by the speed of the run's own SFT, without its calibration."""
    seconds, steps = dict(source.query("SELECT stage, seconds FROM checkpoint")), source.settings()["sft"]["steps"]
    return steps + round(seconds["rl"] / seconds["sft"] * steps)


# Without training


def restarted(tries: Sequence[Attempt], patience: int, calls: int = CALLS) -> float:
    """Return how often a task is solved within `calls` if an attempt that has not ended after `patience` of them, or whose
    visible tests do not pass, is followed by another one, in a fresh context; over which attempt comes first."""
    outcomes = []
    for first in range(len(tries)):
        calls_left, solved = calls, False
        for attempt in (*tries[first:], *tries[:first]):
            spent = attempt.rollout.calls
            if spent <= min(patience, calls_left) and Course.of(attempt.rollout.turns).accepted:
                solved = attempt.grade.passed
                break
            calls_left -= min(spent, patience)
            if calls_left <= 0:
                break
        outcomes.append(float(solved))
    return float(np.mean(outcomes))


def sampled(run: RunDir, policy: str, kind: str) -> dict[str, list[Attempt]]:
    """Return the sampled attempts of a policy by task."""
    tasks = {task.id: task for task in load_tasks(run.path / "data" / f"{kind}.jsonl")}
    suffix = "" if kind == "heldout" else f"_{kind}"
    attempts = load_attempts(run.path / "rollouts" / f"eval_{policy}{suffix}.parquet", tasks)
    attempts_by_task: dict[str, list[Attempt]] = {task: [] for task in tasks}
    for attempt in attempts[: -len(tasks)]:  # greedy attempts come last
        attempts_by_task[attempt.task.id].append(attempt)
    return attempts_by_task


def fresh_contexts(run: RunDir) -> tuple[int, dict[str, dict[str, float]]]:
    """Return the start's best patience on the held-out tasks, and with it the share solved of each task of each kind."""
    tries = {kind: sampled(run, "start", kind) for kind in KINDS}
    shares = {
        patience: {
            kind: {t: restarted(task_attempts, patience) for t, task_attempts in tries[kind].items()} for kind in KINDS
        }
        for patience in range(3, CALLS)
    }
    best = max(shares, key=lambda patience: statistics.mean(shares[patience]["heldout"].values()))
    return best, shares[best]


def blind(run: RunDir, runs: Path) -> dict[str, dict[str, float]]:
    """Return the share solved of each task by a search that knows nothing, in the run's tokens; kept beside the runs."""
    file, settings = runs / f"blind-{run.path.name}.json", from_dict(run.settings())
    if not file.is_file():
        agent, shares = make_agent(settings.env, load_tokenizer(run.path / "data", needed=()), settings.limits), {}
        for kind in KINDS:
            with SandboxExecutor() as sandboxes:
                shares[kind] = _searched(
                    load_tasks(run.path / "data" / f"{kind}.jsonl"), agent, CachedExecutor(sandboxes)
                )
        write_json(file, shares)
    stored_shares: dict[str, dict[str, float]] = json.loads(file.read_text())
    return stored_shares


def _searched(tasks: Sequence[Task], agent: Agent, executor: CachedExecutor, samples: int = 4) -> dict[str, float]:
    def script(rollout: int) -> Script:
        return TINY_SCRIPTS["blind"](tasks[rollout // samples], Random(f"blind {rollout}"))

    solved: dict[str, list[bool]] = {task.id: [] for task in tasks}
    for attempt in run_eval(ScriptedPolicy(agent.renderer, script), agent, tasks, executor, samples):
        solved[attempt.task.id].append(attempt.grade.passed and attempt.rollout.calls <= CALLS)
    return {task: float(np.mean(outcomes)) for task, outcomes in solved.items()}


# Tables

KINDS = ("heldout", "structures")
FIGURES = ("pass_at_1", "pass_greedy", "best_of_k")


def row(name: str, run: RunDir, report: dict[str, Any]) -> str:
    scores = report["eval"]
    cells = [name]
    for policy in (scores["midtrained"], scores["start"], scores["final"]):
        cells.append(" / ".join(f"{value:.3f}" for value in (policy["pass_within"]["12"], *map(policy.get, FIGURES))))
    for kind in KINDS:
        gain = within_12(run, scores, kind)
        low, high = (100 * end for end in gain["ci95"])
        cells.append(f"{100 * gain['gain']:+.1f} ({low:+.1f} to {high:+.1f})")
    cells.append(" → ".join(f"{scores[policy]['recovery']:.2f}" for policy in ("start", "final")))
    cells.append(f"{scores['final']['tests_after_wrong_edit']:.0%}")
    return "| " + " | ".join([*cells, f"{report['wall_s'].get('rl', 0):.0f}"]) + " |"


def print_seeds(runs: Mapping[str, RunDir]) -> None:
    print(
        "\nPolicies: solved in 12 calls / pass@1 / greedy / best of 4. Gains: in 12 calls, over the better policy before.\n"
    )
    print("| run | midtrained | start | after | gain | gain, new structures | recovery | tests a wrong edit | RL s |")
    print("|---|---|---|---|---|---|---|---|---|")
    reports = {name: build_report(run) for name, run in runs.items()}
    for name, report in reports.items():
        print(row(name, runs[name], report))
    for kind in KINDS:
        gains = sorted(100 * report["gain"]["within_12"][kind]["gain"] for report in reports.values())
        print(
            f"\n{kind}: median {statistics.median(gains):+.1f} points in 12 calls ({gains[0]:+.1f} … {gains[-1]:+.1f})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What is compared with RL."""

    shares: Mapping[str, Mapping[str, float]]
    """By kind and task: the share of attempts that solved it in at most CALLS calls."""
    score: Mapping[str, Any] | None = None
    seconds: float | None = None


def line_of(run: RunDir, policy: str, stage: str) -> Line:
    shares = {kind: solved_by_task(run, policy + ("" if kind == "heldout" else f"_{kind}"), CALLS) for kind in KINDS}
    seconds = (run.finished(stage) or {}).get("seconds")
    return Line(shares=shares, score=run.finished(f"eval_{policy}"), seconds=seconds)


def print_controls(seed: int, rl: Sequence[RunDir], controls: Mapping[str, RunDir], runs: Path) -> None:
    """Print what each policy solves, and how much more RL does: the mean of its seeds, paired by task."""
    trained = [line_of(run, "final", "rl") for run in rl]
    lines = {"start": line_of(rl[0], "start", "sft")}
    patience, shares = fresh_contexts(rl[0])
    lines[f"fresh contexts after {patience} calls"] = Line(shares=shares)
    lines["blind"] = Line(shares=blind(rl[0], runs))
    for name, run in controls.items():
        lines[name] = line_of(run, *(("control", "control") if name == MORE_SFT else ("final", "rl")))
    print(
        f"\nSeed {seed}. Solved in {CALLS} calls, and RL's mean over {len(rl)} seeds less that (95 %, paired by task).\n"
    )
    print("| policy | held out | RL less that | new structures | RL less that | pass@1 | best of 4 | recovery | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n, line in enumerate(trained):
        print(_line(f"RL, seed {n}", line, ()))
    for name, line in lines.items():
        print(_line(name, line, trained))


def _line(name: str, line: Line, trained: Sequence[Line]) -> str:
    cells = [name]
    for kind in KINDS:
        cells.append(f"{statistics.mean(line.shares[kind].values()):.3f}")
        gains = (
            [np.mean([rl.shares[kind][t] for rl in trained]) - line.shares[kind][t] for t in line.shares[kind]]
            if trained
            else []
        )
        low, high = (100 * end for end in bootstrap(np.array(gains), 0)) if gains else (0.0, 0.0)
        cells.append(f"{100 * float(np.mean(gains)):+.1f} ({low:+.1f} to {high:+.1f})" if gains else "")
    cells += [f"{line.score[key]:.3f}" if line.score else "" for key in ("pass_at_1", "best_of_k", "recovery")]
    return "| " + " | ".join([*cells, "" if line.seconds is None else f"{line.seconds:.0f}"]) + " |"


def compare(seed: int, rl: Sequence[RunDir], settings: Settings, args: argparse.Namespace) -> dict[str, RunDir]:
    """Return the finished controls of a seed by name, run where that is asked for."""
    changes: dict[str, Mapping[str, Any]] = {pair: dict([pair.split("=", 1)]) for pair in args.fork}
    if args.controls:
        changes = {MORE_SFT: {"control_steps": control_steps(rl[0])}, **CONTROLS, **changes}
    for name, changed in () if args.table_only else changes.items():
        control_run = run(args.runs, folder(seed, name), override(settings, changed), rl[0])
        if name == MASKED:
            rescored(args.runs, folder(seed, SEEN), settings, rl[0], control_run)
        if name == MORE_SFT:
            rl_after_control(args.runs, folder(seed, AFTER), settings, rl[0], control_run)
    if args.controls and not args.table_only:
        untried(args.runs, folder(seed, UNTRIED), settings, rl[0])
    paths = {name: args.runs / folder(seed, name) for name in (*changes, SEEN, AFTER, UNTRIED)}
    stored_runs = {name: RunDir(path) for name, path in paths.items() if (path / "run.db").is_file()}
    return {
        name: control_run
        for name, control_run in stored_runs.items()
        if any(map(control_run.finished, ("eval_final", "eval_control")))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rl-seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--fork", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/measure"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(
        Path(__file__).resolve().parents[2]
    )  # for `scripts.studies.masked`, in every process of a run
    base = override(Settings(), dict(pair.split("=", 1) for pair in arguments.set))
    seeds: dict[int, dict[str, RunDir]] = {}
    for seed in arguments.seeds:
        source: RunDir | None = None
        for rl_seed in arguments.rl_seeds:
            name = f"seed{seed}-rl{rl_seed}"
            if arguments.table_only and not is_complete(arguments.runs / name):
                continue
            settings = override(base, {"seed": seed, "rl_seed": rl_seed})
            rl_run = (
                RunDir(arguments.runs / name) if arguments.table_only else run(arguments.runs, name, settings, source)
            )
            seeds.setdefault(seed, {})[name] = rl_run
            source = source or rl_run
    print_seeds({name: rl_run for named_runs in seeds.values() for name, rl_run in named_runs.items()})
    for seed, rl in seeds.items():
        if arguments.controls or arguments.fork:
            controls = compare(seed, list(rl.values()), override(base, {"seed": seed}), arguments)
            print_controls(seed, list(rl.values()), controls, arguments.runs)


if __name__ == "__main__":
    main()
