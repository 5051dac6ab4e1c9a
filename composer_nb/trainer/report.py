"""What a run did, as one dictionary: every number is read from the run directory, none is worked out from settings.

    report = build_report(open_run(path))       # a run that is still going gives what is there, and `complete: false`
    console.print(table(report))
    write_report(run, pictures)                 # report.json, and report.html that needs nothing but itself

Leaves out: figures. They are made in `views`, which knows this module, and arrive as PNG bytes.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Group
from rich.table import Table

from composer_nb.trainer.rundir import RunDir, write_json, write_text

POLICIES = ("base", "midtrained", "start", "final")
STAGES = (
    *("tokenizer", "data", "midtrain", "sft", "eval_base", "eval_midtrained", "eval_start"),
    *("rl", "eval_final", "numerics"),
)
"""What a complete run has finished, in the order of the recipe."""
RL_FILE = re.compile(r"rl_(\d+)_\d+\.parquet")
EXAMPLE = Path(__file__).parents[2] / "data" / "example"


def open_run(path: Path) -> RunDir:
    """The run in `path`. Raises FileNotFoundError when there is none: looking at a run never makes one."""
    if not (path / "run.db").is_file():
        raise FileNotFoundError(f"{path}: no run here (run.db is missing)")
    return RunDir(path)


def example_run() -> RunDir:
    """The excerpt of a full run that ships with the checkout (`scripts/make_example.py` makes it). Raises FileNotFoundError
    where there is no checkout around the package."""
    if not (EXAMPLE / "run.db").is_file():
        raise FileNotFoundError(
            f"{EXAMPLE}: the stored example comes with the repository; give a run directory instead"
        )
    return RunDir(EXAMPLE)


def build_report(run: RunDir) -> dict[str, Any]:
    """All that a run found. What has not happened yet is absent; `complete` says whether anything is. An excerpt holds too
    little to work this out from: it has the report of the run that it was cut from, and `excerpt` says what is left of it.

    `eval.NAME`        held-out scores and behaviour of a published policy (`harness.bench.summarise`)
    `gain`             final − midtrained, with a paired bootstrap over tasks; and over the better of it and the start
    `midtrain`, `sft`  first and last point of the loss curves
    `extend`           the same of the long-context phase, with the losses on long rows before it
    `train`            see `training`
    `rewards`          mean of each reward term over RL rollouts, attempts lost to the infrastructure, flagged rollouts
    `replay`           mismatch of an engine and the trainer (`pair`), with its own routes (off) and the engine's (on)
    `weights`          versions published in RL; bytes of the last in full and as a delta against the one before
    `ledger`           RL's sampled tokens by what became of them
    `wall_s`           seconds of stages. `total` sums all that ran, including what is not named here; starting the
                       processes is not in it, nor are steps that a killed process did and a resumed one did again
    """
    if run.excerpt is not None:
        stored: dict[str, Any] = json.loads((run.path / "report.json").read_text())
        return stored
    begun = (run.path / "settings.json").is_file()
    settings = run.settings() if begun else {}
    made = _read(run, "provenance.json")
    stages = {name: found for name in _stage_names(run) if (found := run.finished(name)) is not None}
    report: dict[str, Any] = {
        "run": run.path.name,
        "complete": all(name in stages for name in STAGES),
        "seed": settings.get("seed"),
        "versions": made.get("versions"),
        "settings": settings,
        "provenance": made,
        "stages": {name: found["seconds"] for name, found in stages.items()},
        "wall_s": wall_seconds(run, stages),
    }
    for stage in ("tokenizer", "data"):
        if stage in stages:
            report[stage] = _without_seconds(stages[stage])
    report |= {stage: curve for stage in ("midtrain", "extend", "sft") if (curve := supervised(run, stage))}
    if "extend" in stages:
        report["extend"]["before"] = {name: stages["extend"][name] for name in ("plain", "stretched")}
    scores = {name[5:]: _without_seconds(found) for name, found in stages.items() if name.startswith("eval_")}
    if scores:
        report["eval"] = {name: scores[name] for name in sorted(scores, key=_policy_order)}
    if gain := gained(run, scores):
        report["gain"] = gain
    if run.steps("rl"):
        report |= {"train": training(run, stages), "rewards": rewards(run), "ledger": run.ledger()}
    if "numerics" in stages:
        report["replay"] = stages["numerics"]["replay"]
        report["weights"] = {**_published(stages), **stages["numerics"]["weights"]}
    return report


def wall_seconds(run: RunDir, stages: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by part of the recipe; an unfinished stage counts up to its last checkpoint."""
    seconds = {name: float(spent) for name, spent in run.query("SELECT stage, seconds FROM checkpoint")}
    seconds |= {name: found["seconds"] for name, found in stages.items()}
    parts = {name: seconds[name] for name in ("midtrain", "extend", "sft", "rl") if name in seconds}
    if scored := [spent for name, spent in seconds.items() if name.startswith("eval_")]:
        parts["eval"] = sum(scored)
    return {**parts, "total": sum(seconds.values())}


def supervised(run: RunDir, stage: str) -> dict[str, Any]:
    """Steps and the first and last logged losses of a supervised stage, in nats a token; {} before its first checkpoint."""
    steps = run.steps(stage)
    if not steps:
        return {}
    losses = ("loss", "agent_loss", "heldout_agent_loss", "heldout_code_loss", "heldout_long_loss")

    def at(point: Mapping[str, Any]) -> dict[str, Any]:
        return {name: point[name] for name in losses if point.get(name) is not None}

    return {"steps": steps[-1]["step"], "first": at(steps[0]), "last": at(steps[-1])}


def training(run: RunDir, stages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """RL in figures.

    `samples` rollouts, `tokens` read and written, `sampled` tokens written. `tokens_accounted` is the sum of the ledger over
    `sampled`: 1 when every sampled token was trained on or has a reason why not.
    `trainer_idle` is the share of RL's wall-clock time in which an average trainer rank was in no optimiser step: it waited
    for a batch or for the processes to start; in the plain loop it also sampled, looked at the tuning tasks or saved.
    Waiting for another rank's gradients counts as training.
    `staleness` is counted in batches: of the oldest token of each rollout when it was trained. In the plain loop every batch is
    sampled from the newest weights, so the bound is 0. A batch is learnt in `optimizer_steps_per_batch` steps, and the last of
    them is that many − 1 steps further away from the weights that sampled. `mixed_versions` is the share of rollouts that were
    sampled from more than one version. `in_flight` and `in_queue` split the staleness of trained rollouts by where it arose.
    """
    steps = run.steps("rl")
    settings = run.settings()
    done = stages.get("rl", {})
    sampled = done.get("sampled") or sum(step["sampled"] for step in steps)
    staleness = [step["staleness"] for step in steps]
    seconds = wall_seconds(run, stages)["rl"]
    busy = sum(step["time"]["train_s"] for step in steps)
    tail = steps[-min(10, len(steps)) :]
    services = settings.get("services", {"on": False})  # runs of before there were any
    return {
        "steps": len(steps),
        "samples": int(sum(step["samples"] for step in steps)),
        "tokens": int(sum(step["tokens"] for step in steps)),
        "sampled": int(sampled),
        "tokens_accounted": sum(run.ledger().values()) / sampled if sampled else math.nan,
        "staleness_bound": services["bound"] if services["on"] else 0,
        "staleness_max": max(step.get("staleness_max", step["staleness"]) for step in steps),
        "staleness_mean": float(np.mean(staleness)),
        **_asynchronous(steps, done),
        "optimizer_steps_per_batch": settings["rl"]["minibatches"],
        "trainer_idle": 1.0 - busy / seconds if seconds else math.nan,
        "solved_first": float(np.mean([step["solved"] for step in steps[: len(tail)]])),
        "solved_last": float(np.mean([step["solved"] for step in tail])),
        "averaged_steps": len(tail),
        "seconds_per_step": float(np.mean([step["time"]["wall_s"] for step in steps])),
        **({"stopped_early": done["stopped_early"]} if "stopped_early" in done else {}),
        **({"shuffled_rewards": True} if settings["rl"]["shuffle_rewards"] else {}),
    }


def _asynchronous(steps: Sequence[Mapping[str, Any]], done: Mapping[str, Any]) -> dict[str, Any]:
    """What only services can tell."""
    found: dict[str, Any] = {}
    if "mixed_versions" in steps[-1]:
        found["mixed_versions"] = float(np.mean([step["mixed_versions"] for step in steps]))
    for name in ("in_flight", "in_queue"):
        if counts := done.get("staleness", {}).get(name):
            found[name] = sum(age * count for age, count in counts) / sum(count for _, count in counts)
    if "lengths" in done:
        found["lengths"] = {what: done["lengths"].get(what, {}) for what in ("finished", "trained", "stale")}
    return found


def rewards(run: RunDir) -> dict[str, Any]:
    """Mean of each reward term and of the total over the stored RL rollouts, and what should not happen, counted."""
    steps = run.steps("rl")
    sums: dict[str, float] = {}
    total = count = 0.0
    for _, table_ in rl_tables(run, ("terms", "reward")):
        for text, value in zip(table_["terms"].to_pylist(), table_["reward"].to_pylist(), strict=True):
            total, count = total + value, count + 1
            for name, part in json.loads(text).items():
                sums[name] = sums.get(name, 0.0) + part
    return {
        "terms": {name: value / count for name, value in sums.items()},
        "mean": total / count if count else math.nan,
        "rollouts": int(count),
        "infra_errors": int(sum(step["infra_errors"] for step in steps)),
        "flagged": int(sum(step["flagged"] for step in steps)),
    }


def stored_steps(run: RunDir) -> list[int]:
    """The durable RL steps, from 1, whose rollouts are there: all of a run's, a few of an excerpt's."""
    durable = len(run.steps("rl"))
    numbers = {int(match[1]) for path in (run.path / "rollouts").iterdir() if (match := RL_FILE.fullmatch(path.name))}
    return [number + 1 for number in sorted(numbers) if number < durable]


def rl_tables(run: RunDir, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
    """(step from 0, columns) of every stored file of rollouts of a durable step, in order. Raises ValueError for a damaged
    file."""
    durable = len(run.steps("rl"))
    for path in sorted((run.path / "rollouts").glob("rl_*.parquet")):
        match = RL_FILE.fullmatch(path.name)
        if match and int(match[1]) < durable:
            try:
                yield int(match[1]), pq.read_table(path, columns=list(columns))
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path}: damaged or incomplete ({error})") from None


def gained(run: RunDir, scores: Mapping[str, Mapping[str, Any]], before: str = "midtrained") -> dict[str, Any]:
    """What the run added to `before`, the clean mid-trained policy: final − `before` on the same held-out tasks. `ci95` resamples
    tasks and keeps the two scores of each together (2,000 times). `over_stronger` is over the better of `before` and the policy
    that RL began from, figure by figure: a start that has seen mistakes may be the better one at greedy and best of k. {} before
    both are there."""
    if not {before, "final"} <= set(scores):
        return {}
    old, new = (solved_by_task(run, name) for name in (before, "final"))
    both = sorted(old.keys() & new.keys())
    difference = np.array([new[task] - old[task] for task in both])
    means = np.random.default_rng(0).choice(difference, (2000, len(difference))).mean(1)
    return {
        "from": before,
        "pass_at_1": scores["final"]["pass_at_1"] - scores[before]["pass_at_1"],
        "ci95": [float(x) for x in np.quantile(means, [0.025, 0.975])],
        "pass_greedy": scores["final"]["pass_greedy"] - scores[before]["pass_greedy"],
        "best_of_k": scores["final"]["best_of_k"] - scores[before]["best_of_k"],
        "over_stronger": {
            name: scores["final"][name] - max(scores[policy][name] for policy in (before, "start") if policy in scores)
            for name in ("pass_at_1", "pass_greedy", "best_of_k")
        },
    }


def solved_by_task(run: RunDir, policy: str) -> dict[str, float]:
    """Share of the sampled (not the greedy) graded attempts that solved each held-out task, from the stored attempts."""
    path = run.path / "rollouts" / f"eval_{policy}.parquet"
    try:
        rows = pq.read_table(path, columns=["task_id", "status", "passed"]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or missing ({error})") from None
    sampled = rows[: len(rows) - len({row["task_id"] for row in rows})]  # the greedy ones, one a task, come last
    shares: dict[str, list[float]] = {}
    for row in sampled:
        if row["status"] == "graded":
            shares.setdefault(row["task_id"], []).append(float(row["passed"]))
    return {task: float(np.mean(solved)) for task, solved in shares.items()}


def table(report: Mapping[str, Any]) -> Group:
    """The report for a terminal."""
    parts: list[Table | str] = []
    if scores := report.get("eval"):
        parts.append(score_table(scores))
    parts.append(_fact_table(report))
    if not report["complete"]:
        missing = [name for name in STAGES if name not in report["stages"]]
        parts.append(f"[yellow]not complete: {', '.join(missing)} still to come[/]")
    return Group(*parts)


def score_rows(scores: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Head and rows of the table of scores, as text."""
    yield ("policy", "pass@1", "95 %", "greedy", "best of k", "tasks", "calls", "tokens", "invalid", "tests", "retries")
    for name, s in scores.items():
        yield (
            name,
            f"{s['pass_at_1']:.3f}",
            "{:.3f}–{:.3f}".format(*s["ci95"]),
            f"{s['pass_greedy']:.3f}",
            f"{s['best_of_k']:.3f} (k={s['k']})",
            str(s["n_tasks"]),
            f"{s['tool_calls_per_task']:.1f}",
            f"{s['tokens_per_task']:.0f}",
            f"{s['invalid_call_rate']:.1%}",
            f"{s['runs_tests']:.0%}",
            f"{s['retries_after_failed_test']:.0%}",
        )


def fact_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What else a run found, a line each."""
    if kept := report.get("excerpt"):
        yield (
            "excerpt",
            (
                f"the numbers are those of the full run; here are rollouts of {len(kept['rollouts_of_rl_steps'])} of "
                f"{kept['of_rl_steps']} RL steps, {kept['heldout_tasks']} of {kept['of_heldout_tasks']} held-out tasks"
            ),
        )
    if gain := report.get("gain"):
        low, high = gain["ci95"]
        yield (
            f"gain over {gain['from']}",
            f"{gain['pass_at_1']:+.3f} pass@1 (95 %: {low:+.3f} to {high:+.3f}), {gain['pass_greedy']:+.3f} greedy, "
            f"{gain['best_of_k']:+.3f} best of k",
        )
        above = gain["over_stronger"]
        yield (
            "gain over the better of it and the start",
            f"{above['pass_at_1']:+.3f} pass@1, {above['pass_greedy']:+.3f} greedy, {above['best_of_k']:+.3f} best of k",
        )
    if train := report.get("train"):
        yield "RL", f"{train['steps']} steps, {train['samples']:,} rollouts, {train['sampled']:,} tokens sampled"
        yield "every token accounted for", f"{train['tokens_accounted']:.3f}"
        yield "trainer idle", f"{train['trainer_idle']:.0%} of RL's time"
        bound, most, mean = (train[f"staleness_{name}"] for name in ("bound", "max", "mean"))
        yield "staleness in batches", f"{mean:.2f} on average, {most} at most, bound {bound}"
    if reward := report.get("rewards"):
        yield "lost to the infrastructure", f"{reward['infra_errors']} attempts; {reward['flagged']} flagged"
    if replay := report.get("replay"):
        off, on = (replay[name]["logprob_gap_p99"] for name in ("off", "on"))
        yield f"mismatch ({replay.get('pair', 'bf16')}), p99 of |Δ log p|", f"{off:.4f}, {on:.4f} with routes replayed"
    if weights := report.get("weights"):
        share = weights["delta_bytes"] / weights["full_bytes"]
        yield "one weight update", f"{weights['delta_bytes']:,} of {weights['full_bytes']:,} bytes ({share:.1%})"
    yield "seconds", ", ".join(f"{name} {spent:.0f}" for name, spent in report["wall_s"].items())
    yield "seed", str(report["seed"])


def write_report(run: RunDir, figures: Mapping[str, tuple[str, bytes]] | None = None) -> dict[str, Any]:
    """Writes report.json, the figures (name -> caption, PNG) and report.html, and returns the report. Raises ValueError for
    an excerpt, which is only read."""
    if run.excerpt is not None:
        raise ValueError(f"{run.path} is an excerpt of a run and is only read; its report.json is that of the full run")
    report = build_report(run)
    write_json(run.path / "report.json", report)
    for name, (_, png) in (figures or {}).items():
        (run.path / "figures" / f"{name}.png").write_bytes(png)
    write_text(run.path / "report.html", page(report, figures or {}))
    return report


def page(report: Mapping[str, Any], figures: Mapping[str, tuple[str, bytes]]) -> str:
    """One HTML page with everything in it: no scripts, no other files, no other hosts."""
    body = [f"<h1>{html.escape(report['run'])}</h1>"]
    if not report["complete"]:
        body.append("<p class=note>This run is not complete.</p>")
    if scores := report.get("eval"):
        head, *rows = score_rows(scores)
        body += ["<h2>Held-out tasks</h2>", html_table(rows, head)]
    body += ["<h2>The run</h2>", html_table(list(fact_rows(report)))]
    body += [figure(name, caption, png) for name, (caption, png) in figures.items()]
    body += [
        f"<details><summary>{title}</summary><pre>{html.escape(json.dumps(report[key], indent=2))}</pre></details>"
        for title, key in (("Settings", "settings"), ("Provenance", "provenance"), ("Seconds by stage", "stages"))
    ]
    return document(report["run"], body)


def document(title: str, body: Sequence[str]) -> str:
    """An HTML page of parts that are HTML already."""
    return _PAGE.replace("TITLE", html.escape(title)).replace("BODY", "\n".join(body))


def figure(name: str, caption: str, png: bytes) -> str:
    """A picture with its caption, as HTML that needs no other file."""
    image = base64.b64encode(png).decode()
    return (
        f"<figure><img alt='{html.escape(name)}' src='data:image/png;base64,{image}'>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>TITLE</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid #e3e3e3; white-space: nowrap }
td { font-variant-numeric: tabular-nums } th { font-weight: 600 }
figure { margin: 2rem 0 } img { max-width: 100% } figcaption { color: #555; max-width: 45rem }
.note { background: #fff3cd; padding: .5rem 1rem } summary { cursor: pointer; margin-top: .6rem }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12.5px }
</style></head><body>
BODY
</body></html>
"""


def html_table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """A table as HTML."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(head, "th")] if head else []
    return "<table>" + "\n".join([*lines, *(row(cells, "td") for cells in rows)]) + "</table>"


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """Scores and behaviour of policies by name, for a terminal."""
    head, *rows = score_rows(scores)
    shown = Table(title="held-out tasks", title_justify="left", box=None, pad_edge=False, title_style="bold")
    for place, name in enumerate(head):
        shown.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def _fact_table(report: Mapping[str, Any]) -> Table:
    shown = Table(
        title="the run", title_justify="left", box=None, pad_edge=False, show_header=False, title_style="bold"
    )
    shown.add_column(style="dim")
    shown.add_column()
    for row in fact_rows(report):
        shown.add_row(*row)
    return shown


def _published(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rl = stages.get("rl", {})
    return {name: rl[name] for name in ("versions", "store") if name in rl}


def _stage_names(run: RunDir) -> list[str]:
    """Finished stages in the order of the recipe, then those that it does not name."""
    found = [name for (name,) in run.query("SELECT name FROM stage ORDER BY rowid")]
    return sorted(found, key=lambda name: STAGES.index(name) if name in STAGES else len(STAGES))


def _policy_order(name: str) -> tuple[int, str]:
    return (POLICIES.index(name) if name in POLICIES else len(POLICIES), name)


def _without_seconds(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"}


def _read(run: RunDir, name: str) -> dict[str, Any]:
    path = run.path / name
    return json.loads(path.read_text()) if path.is_file() else {}
