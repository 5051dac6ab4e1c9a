#!/usr/bin/env python3
"""Does the loss of mid-training predict the reward of RL? `scripts/studies/transfer.py [--budgets
STEPS …] [--seeds N …]`.

Composer 2 (arXiv 2603.24477, figure 2, left) trained three budgets, logarithmically spaced, fine-tuned each alike, and ran the
same RL: the loss after fine-tuning predicted the reward after a fixed number of steps, and the loss on a codebase was linear in
the logarithm of the compute (right). During RL the mean and the best of several attempts rose both (figure 5): here pass_at_1 and
best_of_k on held-out tasks, before RL and after. Budgets are steps of mid-training. Each seed has a run of its own at each
budget, with its whole learning-rate schedule. Writes transfer.csv, and transfer.png with the rank correlation and the log-linear
fit, to the folder of the runs. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from composer_nb.harness.files import write_atomic
from composer_nb.labs.scaling import LossFit, fit_loss
from composer_nb.operations import overrides
from composer_nb.trainer.recipe.launch import start_or_resume
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override
from composer_nb.views import style

LAST = 0.25
"""Share of RL's steps, at its end, whose reward is averaged."""
SETTINGS: dict[str, Any] = {"services.on": False, "rl.max_seconds": 0.0, "rl.gate": False, "rl.steps": 40}


def row(run: RunDir) -> dict[str, Any]:
    """The figures of a finished run."""
    report, steps = build_report(run), run.steps("rl")
    midtrain, sft = run.steps("midtrain")[-1], run.steps("sft")[-1]
    rewards = [step["reward"] for step in steps]
    return {
        "seed": report["seed"],
        "steps": midtrain["step"],
        "tokens": midtrain["step"] * run.settings()["midtrain"]["tokens"],
        "code_loss": midtrain["heldout_code_loss"],
        "loss": sft["heldout_agent_loss"],
        "reward": float(np.mean(rewards[-max(1, round(LAST * len(rewards))) :])),
    } | {
        f"{policy}_{score}": report["eval"][policy][score]
        for score in ("pass_at_1", "best_of_k")
        for policy in ("start", "final")
    }


def rank_correlation(first: pd.Series, second: pd.Series) -> float:
    """Spearman's: the correlation of ranks, ties sharing theirs."""
    return float(first.rank().corr(second.rank()))


def within_seeds(table: pd.DataFrame) -> float:
    """Mean over seeds of the rank correlation of loss and reward: what a seed changes in all its runs alike is left out."""
    return float(
        np.mean([rank_correlation(seed_rows["loss"], seed_rows["reward"]) for _, seed_rows in table.groupby("seed")])
    )


def law(table: pd.DataFrame) -> tuple[LossFit, float]:
    """Fit the log-linear law to the codebase's loss at all budgets but the largest. Return it and its mean error there, predicted
    minus measured, in nats a token. Raises ValueError for fewer than three budgets."""
    last = table["tokens"] == table["tokens"].max()
    fit = fit_loss(list(table[~last]["tokens"]), list(table[~last]["code_loss"]))
    return fit, float(np.mean(fit.predict(table[last]["tokens"]) - table[last]["code_loss"]))


def figure(table: pd.DataFrame) -> style.Picture:
    """Reward over loss, and the codebase's loss over tokens with the law fitted to all budgets but the largest: a mark a run, a
    colour a budget."""
    picture = style.Picture(10, 4)
    reward_ax, loss_ax = picture.panels(1, 2)
    fit, error = law(table)
    for hue, (steps, budget_rows) in zip(
        (style.SKY, style.BLUE, style.VERMILION, style.PURPLE), table.groupby("steps"), strict=False
    ):
        reward_ax.plot(
            budget_rows["loss"], budget_rows["reward"], "o", color=hue, label=f"{steps} steps of mid-training"
        )
        loss_ax.plot(budget_rows["tokens"], budget_rows["code_loss"], "o", color=hue)
    line = np.geomspace(table["tokens"].min(), table["tokens"].max(), 50)
    loss_ax.plot(line, fit.predict(line), "--", color=style.INK)
    loss_ax.set_xscale("log")
    style.title(
        loss_ax,
        f"the law is {error:+.2f} nats off at the largest budget",
        "tokens",
        "loss on the codebase, nats a token",
    )
    for _, seed_rows in table.groupby("seed"):
        reward_ax.plot(seed_rows["loss"], seed_rows["reward"], color=style.PALE, zorder=0)
    style.title(
        reward_ax,
        f"rank correlation {within_seeds(table):+.2f} within seeds (lines)",
        "loss after fine-tuning, nats a token",
        "reward in RL",
    )
    style.key(reward_ax)
    return picture


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[100, 400, 1600])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/transfer"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every run")
    args = parser.parse_args(arguments)
    rows = []
    for seed in args.seeds:
        for steps in args.budgets:
            values = SETTINGS | {"seed": seed, "midtrain.steps": steps} | overrides(args.set)
            name = f"{steps}-{seed}"
            print(f"== {name}", flush=True)
            rows.append(
                row(start_or_resume(None, override(Settings(), values), runs=args.runs, name=name, resume=True))
            )
            table = pd.DataFrame(rows)
            table.to_csv(args.runs / "transfer.csv", index=False)
    print(table.round(3).to_string(index=False))
    if table["tokens"].nunique() < 3:
        return
    fit, error = law(table)
    overall = rank_correlation(table["loss"], table["reward"])
    print(f"rank correlation of loss and reward: {within_seeds(table):+.2f} within seeds, {overall:+.2f} over all runs")
    print(f"loss on the codebase: {fit.intercept:.3f} {fit.slope:+.4f} ln(tokens), {error:+.2f} at the largest budget")
    write_atomic(args.runs / "transfer.png", figure(table).png())


if __name__ == "__main__":
    main()
