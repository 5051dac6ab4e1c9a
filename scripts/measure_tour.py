#!/usr/bin/env python3
"""Measures the tour over seeds, with its controls: `scripts/measure_tour.py --seeds 0 1 --rl-seeds 0 1 2 [--controls]`.

For each mid-training seed one full run, and forks of it for the other RL seeds; with `--controls` two more forks of the first:
shuffled rewards, and more SFT for as long as RL took. Prints a Markdown table (docs/benchmarks.md keeps it) from the runs'
reports; `--table-only` prints it for runs that are there already. Interrupted, it can be started again: complete runs are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from composer_nb.harness.files import write_json
from composer_nb.settings import Settings, override, to_dict
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.report import build_report, within_12
from composer_nb.trainer.records.rundir import RunDir, create, provenance


def run(runs: Path, name: str, settings: Settings, source: RunDir | None = None) -> RunDir:
    """The run `name`: begun, forked from `source`, or taken up again."""
    path = runs / name
    if not (path / "run.db").is_file():
        made = fork(source, settings, runs=runs, name=name) if source else create(runs, name)
        write_json(made.path / "settings.json", to_dict(settings))
        write_json(made.path / "provenance.json", provenance())
    print(f"== {name}", flush=True)
    return start_or_resume(path, say=lambda line: print(line, flush=True))


def control_steps(source: RunDir) -> int:
    """Steps of SFT that take as long as RL took, by the speed of the run's own SFT stage."""
    sft, rl = source.finished("sft"), source.finished("rl")
    assert sft is not None and rl is not None
    settings = json.loads((source.path / "settings.json").read_text())
    return round(rl["seconds"] / (sft["seconds"] / settings["sft"]["steps"]))


FIGURES = ("pass_at_1", "pass_greedy", "best_of_k")


def row(name: str, run: RunDir, report: dict[str, Any]) -> str:
    scores = report["eval"]
    after = "final" if "final" in scores else "control"
    cells = [name]
    for policy in (scores["midtrained"], scores["start"], scores[after]):
        cells.append(" / ".join(f"{value:.3f}" for value in (policy["pass_within"]["12"], *map(policy.get, FIGURES))))
    for kind in ("heldout", "structures"):
        found = within_12(run, scores, kind, after)
        low, high = (100 * end for end in found["ci95"])
        cells.append(f"{100 * found['gain']:+.1f} ({low:+.1f} to {high:+.1f})")
    cells.append(" → ".join(f"{scores[policy]['recovery']:.2f}" for policy in ("start", after)))
    cells.append(f"{scores[after]['tests_after_wrong_edit']:.0%}")
    return "| " + " | ".join([*cells, f"{report['wall_s'].get('rl', 0):.0f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rl-seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--runs", type=Path, default=Path("runs/measure"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    base = override(Settings(), dict(pair.split("=", 1) for pair in arguments.set))
    done: dict[str, RunDir] = {}
    for seed in arguments.seeds:
        source: RunDir | None = None
        for rl_seed in arguments.rl_seeds:
            name = f"seed{seed}-rl{rl_seed}"
            if arguments.table_only:
                if (arguments.runs / name / "run.db").is_file():
                    done[name] = RunDir(arguments.runs / name)
                continue
            settings = override(base, {"seed": seed, "rl_seed": rl_seed})
            done[name] = run(arguments.runs, name, settings, source)
            source = source or done[name]
    first = next(iter(done.values()))
    if arguments.controls and not arguments.table_only:
        settings = override(base, {"seed": arguments.seeds[0]})
        shuffled = override(settings, {"rl.shuffle_rewards": True})
        done["shuffled rewards"] = run(arguments.runs, "shuffled", shuffled, first)
        more = override(settings, {"control_steps": control_steps(first)})
        done["more SFT"] = run(arguments.runs, "more-sft", more, first)
    elif arguments.table_only:
        done |= {
            n: RunDir(arguments.runs / n) for n in ("shuffled", "more-sft") if (arguments.runs / n / "run.db").is_file()
        }
    print(
        "\nPolicies: solved in 12 calls / pass@1 / greedy / best of 4. Gains: in 12 calls, over the better policy before.\n"
    )
    print("| run | midtrained | start | after | gain | gain, new structures | recovery | tests a wrong edit | RL s |")
    print("|---|---|---|---|---|---|---|---|---|")
    reports = {name: build_report(found) for name, found in done.items()}
    for name, report in reports.items():
        print(row(name, done[name], report))
    for kind in ("heldout", "structures"):
        seeds = [report["gain"]["within_12"][kind] for name, report in reports.items() if name.startswith("seed")]
        gains = sorted(100 * found["gain"] for found in seeds)
        print(
            f"\n{kind}: median {statistics.median(gains):+.1f} points in 12 calls ({gains[0]:+.1f} … {gains[-1]:+.1f})"
        )


if __name__ == "__main__":
    main()
