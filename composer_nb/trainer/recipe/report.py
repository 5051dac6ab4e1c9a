"""The numbers of a run, and the differences between two runs, as dictionaries.

    report = build_report(open_run(path))       # of a live run: its numbers so far, and `complete: false`
    found = compare(first, second)              # differences of `second` from `first`

Every number is read from the run directory. `views.report` and `views.compare` show them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.bench import bootstrap
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.untrusted import beneath, json_of
from composer_nb.trainer.recipe.reader import rl_tables, solved_by_task
from composer_nb.trainer.records.rundir import RunDir, well_formed
from composer_nb.trainer.rl import FAILED
from composer_nb.trainer.settings import from_dict, to_dict

POLICIES = ("base", "midtrained", "start", "final")
STAGES = (
    *("tokenizer", "data", "midtrain", "sft", "eval_base", "eval_midtrained", "eval_start"),
    *("rl", "eval_final", "numerics"),
)
"""Stages of a complete run, in the order of the recipe."""


def stages_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stages of a complete run with these settings, which may end before RL or have a control instead of it."""
    if (until := settings.get("until", "rl")) != "rl":
        return STAGES[: STAGES.index(until) + 1]
    return (*STAGES[: STAGES.index("rl")], "control", "eval_control") if settings.get("control_steps") else STAGES


def build_report(run: RunDir) -> dict[str, Any]:
    """Return the results of a run. The results of unfinished stages are absent, and `complete` is then false. For an excerpt,
    return the stored report of its full run, in which `excerpt` describes the excerpt.

    `eval.NAME`        held-out scores and behaviour of a published policy (`harness.bench.summarise`)
    `headroom`         room for RL above its start (`headroom.headroom`)
    `gain`             final − midtrained, with a paired bootstrap over tasks; and final − the better of midtrained and start
    `midtrain`, `sft`  first and last point of the loss curves; for `sft` also the factor of the logits (`recipe.calibrate`)
    `extend`           the same for the long-context phase, with the losses on long rows before it
    `train`            see `training`
    `rewards`          mean of each reward term over RL rollouts; counts of infrastructure errors, flagged rollouts and timeouts;
                       `flagged_share`, the highest share of flagged rollouts (`monitor.*`)
    `replay`           mismatch of an engine and the trainer (`pair`), with the trainer's routes (off) and the engine's (on)
    `fidelity`         number of calls compared between the sandboxes of training and product, and their `differences`; null if
                       no task has its own sandbox; `error` if the two could not be compared
    `weights`          versions published in RL; bytes of the last one, in full and as a delta
    `ledger`           RL's sampled tokens by their use
    `changed_live`     live changes of settings, by the step from which each applied
    `wall_s`           seconds of stages. `total` sums all stages, including those not listed, without the start of processes
                       and without steps that a killed process lost

    Raises ValueError for malformed records.
    """
    with well_formed(run.path):
        return _built(run)


def _built(run: RunDir) -> dict[str, Any]:
    if run.excerpt is not None:
        stored: dict[str, Any] = json.loads((run.path / "report.json").read_text())
        return stored
    begun = (run.path / "settings.json").is_file()
    settings = run.settings() if begun else {}
    provenance = _read(run, "provenance.json")
    finished = [name for (name,) in run.query("SELECT name FROM stage ORDER BY rowid")]
    stages = {name: found for name in _in_order(finished, STAGES) if (found := run.finished(name)) is not None}
    report: dict[str, Any] = {
        "run": run.path.name,
        "complete": all(name in stages for name in stages_of(settings)),
        "seed": settings.get("seed"),
        "versions": provenance.get("versions"),
        "settings": settings,
        "provenance": provenance,
        "stages": {name: found["seconds"] for name, found in stages.items()},
        "wall_s": wall_seconds(run, stages),
    }
    for stage in ("tokenizer", "data"):
        if stage in stages:
            report[stage] = _without_seconds(stages[stage])
    report |= {stage: curve for stage in ("midtrain", "extend", "sft") if (curve := supervised(run, stage))}
    if sharpness := {name: found for name, found in stages.get("sft", {}).items() if name.startswith("sharpness")}:
        report.setdefault("sft", {}).update(sharpness)
    if "extend" in stages:
        report["extend"]["before"] = {name: stages["extend"][name] for name in ("plain", "stretched")}
    scores = {name[5:]: _without_seconds(found) for name, found in stages.items() if name.startswith("eval_")}
    if scores:
        report["eval"] = {name: scores[name] for name in _in_order(sorted(scores), POLICIES)}
    rooms = {name: room for name, score in scores.items() if (room := score.pop("headroom", None))}
    if "start" in rooms:
        report["headroom"] = rooms["start"]
    if gain := gained(run, scores):
        report["gain"] = gain
    if live := run.changed_live():
        report["changed_live"] = live
    if run.steps("rl"):
        report |= {"train": training(run, stages), "rewards": rewards(run), "ledger": run.ledger()}
    if "numerics" in stages:
        report["replay"] = stages["numerics"]["replay"]
        report["fidelity"] = stages["numerics"].get("fidelity")
        published = {name: stages["rl"][name] for name in ("versions", "store") if name in stages.get("rl", {})}
        report["weights"] = published | stages["numerics"]["weights"]
    return report


def wall_seconds(run: RunDir, stages: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of each part of the recipe. An unfinished stage counts up to its last checkpoint."""
    seconds = {name: float(spent) for name, spent in run.query("SELECT stage, seconds FROM checkpoint")}
    seconds |= {name: found["seconds"] for name, found in stages.items()}
    parts = {name: seconds[name] for name in ("midtrain", "extend", "sft", "rl") if name in seconds}
    if scored := [spent for name, spent in seconds.items() if name.startswith("eval_")]:
        parts["eval"] = sum(scored)
    return {**parts, "total": sum(seconds.values())}


def supervised(run: RunDir, stage: str) -> dict[str, Any]:
    """Return the steps and the first and last losses of a supervised stage, in nats per token; {} before its first checkpoint."""
    steps = run.steps(stage)
    if not steps:
        return {}
    losses = ("loss", "agent_loss", *(f"heldout_{part}_loss" for part in ("agent", "code", "own", "long")))

    def at(point: Mapping[str, Any]) -> dict[str, Any]:
        return {name: point[name] for name in losses if point.get(name) is not None}

    return {"steps": steps[-1]["step"], "first": at(steps[0]), "last": at(steps[-1])}


def training(run: RunDir, stages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of RL; a figure without data is None.

    `samples` counts rollouts, `tokens` the tokens read and written, and `sampled` those written. `tokens_accounted` is the sum of
    the ledger over `sampled`: 1 if every sampled token was trained on or has a reason why not. `trainer_idle` is the share of
    RL's wall-clock time that an average trainer rank spent outside optimizer steps, waiting for a batch or for processes to
    start; in the synchronous loop it also sampled, evaluated or saved. Waiting for another rank's gradients counts as training.
    `staleness` is counted in batches, for the oldest token of each rollout at training time. The synchronous loop samples every
    batch from the newest weights, so its bound is 0. A batch takes `optimizer_steps_per_batch` steps; the last is that many − 1
    steps further from the sampling weights. `mixed_versions` is the share of rollouts sampled from more than one version.
    `engine_idle` is the share of time in which an engine had no turn to decode. It is the sum of `engine_waits`: for the
    `trainer`, with no rollout admitted, and for `environments`, which held all admitted rollouts. `in_flight` and `in_queue`
    split the staleness of trained rollouts by its origin. `trend` says whether reward and solved rose (`reward_trend`).
    `last_live` is the last step that changed weights.
    """
    steps = run.steps("rl")
    settings = run.settings()
    rl_stage = stages.get("rl", {})
    sampled = rl_stage.get("sampled") or sum(step["sampled"] for step in steps)
    seconds = wall_seconds(run, stages)["rl"]
    busy = sum(step["time"]["train_s"] for step in steps)
    tail = steps[-min(10, len(steps)) :]
    services = settings.get("services", {"on": False})  # old runs have none
    return {
        "steps": len(steps),
        "samples": int(sum(step["samples"] for step in steps)),
        "tokens": int(sum(step["tokens"] for step in steps)),
        "sampled": int(sampled),
        "tokens_accounted": sum(run.ledger().values()) / sampled if sampled else None,
        "staleness_bound": services["bound"] if services["on"] else 0,
        "staleness_max": max(known(steps, "staleness_max") or known(steps, "staleness"), default=None),
        "staleness_mean": mean(known(steps, "staleness")),
        **_asynchronous(steps, rl_stage),
        "optimizer_steps_per_batch": settings["rl"]["minibatches"],
        "trainer_idle": 1.0 - busy / seconds if seconds else None,
        "solved_first": mean(known(steps[: len(tail)], "solved")),
        "solved_last": mean(known(tail, "solved")),
        "averaged_steps": len(tail),
        "trend": reward_trend(steps),
        "last_live": last_live(steps),
        "seconds_per_step": float(np.mean([step["time"]["wall_s"] for step in steps])),
        **({"stopped_early": rl_stage["stopped_early"]} if "stopped_early" in rl_stage else {}),
        **({"shuffled_rewards": True} if settings["rl"]["shuffle_rewards"] else {}),
    }


def _asynchronous(steps: Sequence[Mapping[str, Any]], rl_stage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that only services provide."""
    figures: dict[str, Any] = {}
    if "mixed_versions" in steps[-1]:
        figures["mixed_versions"] = mean(known(steps, "mixed_versions"))
    if waits := [step["time"]["engine_waits"] for step in steps if "engine_waits" in step["time"]]:
        figures["engine_waits"] = {name: float(np.mean([wait[name] for wait in waits])) for name in waits[0]}
        figures["engine_idle"] = sum(figures["engine_waits"].values())
    for name in ("in_flight", "in_queue"):
        if counts := rl_stage.get("staleness", {}).get(name):
            figures[name] = sum(age * count for age, count in counts) / sum(count for _, count in counts)
    return figures


def rewards(run: RunDir) -> dict[str, Any]:
    """Return the mean of each reward term and of the total over the stored RL rollouts, with counts of errors, flags, and
    rollouts that failed regardless of the tests."""
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
        "mean": total / count if count else None,
        "rollouts": int(count),
        "infra_errors": int(sum(step["infra_errors"] for step in steps)),
        "failed": {name: int(sum(step.get(name, 0) for step in steps)) for name in FAILED},
        "flagged": int(sum(step["flagged"] for step in steps)),
        "timeouts": int(sum(step.get("timeouts", 0) for step in steps)),
        "flagged_share": max((step.get("flagged_share") or 0.0 for step in steps), default=None),
    }


def gained(run: RunDir, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the gain of the final policy over the mid-trained one on the held-out tasks of both; {} until both are scored.

    `ci95` is a paired bootstrap over tasks. `over_stronger` is the gain over the better of that and the start of RL, per
    figure, because a start trained on mistakes may be better at greedy and best-of-k. `within_12` is the gain in tasks solved
    within 12 calls over the better policy before RL, on the held-out tasks and on those of new structures.
    """
    if not {"midtrained", "final"} <= set(scores):
        return {}
    gains = {over: _gains(run, over) for over in ("midtrained", "start") if over in scores}
    means = {over: {figure: float(values.mean()) for figure, values in each.items()} for over, each in gains.items()}
    return {
        "from": "midtrained",
        **means["midtrained"],
        "ci95": bootstrap(gains["midtrained"]["pass_at_1"], 0),
        "over_stronger": {figure: min(each[figure] for each in means.values()) for figure in means["midtrained"]},
        "within_12": {kind: found for kind in ("heldout", "structures") if (found := within_12(run, scores, kind))},
    }


def _gains(run: RunDir, over: str) -> dict[str, NDArray[np.float64]]:
    """Return, by figure, the gain of the final policy over another one for each task of both."""
    pairs = {"pass_at_1": [solved_by_task(run, name) for name in (over, "final")]}
    pairs["pass_greedy"] = [solved_by_task(run, name, greedy=True) for name in (over, "final")]
    pairs["best_of_k"] = [{task: float(share > 0) for task, share in each.items()} for each in pairs["pass_at_1"]]
    return {figure: _paired(*pair) for figure, pair in pairs.items()}


def _paired(old: Mapping[str, float], new: Mapping[str, float]) -> NDArray[np.float64]:
    return np.array([new[task] - old[task] for task in sorted(old.keys() & new.keys())])


def within_12(run: RunDir, scores: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the gain in tasks solved within 12 calls over the better policy before RL, with a paired bootstrap over the tasks of
    both; {} if the run has no such tasks."""
    suffix = "" if kind == "heldout" else f"_{kind}"
    scores_of_kind = {name: score.get(kind, {}) if suffix else score for name, score in scores.items()}
    if not all("pass_within" in score for score in scores_of_kind.values()):
        return {}
    befores = [name for name in ("midtrained", "start") if name in scores_of_kind]
    *old, new = (solved_by_task(run, name + suffix, 12) for name in (*befores, "final"))
    gains = {name: _paired(before, new) for name, before in zip(befores, old, strict=True)}
    over = min(gains, key=lambda name: gains[name].mean())
    values = gains[over]
    return {"over": over, "gain": float(values.mean()), "ci95": bootstrap(values, 0), "n_tasks": len(values)}


def known(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return one figure of all steps that have it."""
    return [step[name] for step in steps if step.get(name) is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return float(np.mean(values)) if values else None


TREND_STEPS = 8
"""Minimum number of steps for a statement about the trend."""


def reward_trend(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence that says whether reward rose over RL, and whether solved rollouts rose with it. A rise is a difference
    between the first and the last quarter of the steps of more than twice its standard error. A rise of reward alone is reward
    hacking."""
    values = [known(steps, name) for name in ("reward", "solved")]
    if min(map(len, values)) < TREND_STEPS:
        return f"{len(steps)} steps are too few to tell a trend"
    (was, now, rose), (before, after, more) = map(_rise, values)
    reward, solved = f"from {was:.2f} to {now:.2f}", f"from {before:.0%} to {after:.0%}"
    if rose and more:
        return f"reward rose {reward}, and solved rollouts with it, {solved}"
    if rose:
        return (
            f"reward rose {reward}, solved rollouts did not ({solved}): this is reward hacking. The policy learnt to collect the "
            "other terms of the reward, not to do the task"
        )
    if more:
        return f"solved rollouts rose {solved}; reward did not, {reward}"
    return f"neither reward ({reward}) nor solved rollouts ({solved}) rose beyond the noise of batches"


def _rise(values: Sequence[float]) -> tuple[float, float, bool]:
    """Return the means of the first and the last quarter, and whether the second is significantly larger."""
    count = max(2, len(values) // 4)
    first, last = np.array(values[:count], float), np.array(values[-count:], float)
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / count)
    rise = float(last.mean() - first.mean())
    return float(first.mean()), float(last.mean()), rise > max(2 * error, 1e-9)


def last_live(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the last RL step, from 1, that changed weights, which needs a group with unequal rewards; None if there is none."""
    return max((step["step"] for step in steps if step.get("live_groups")), default=None)


def _in_order(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the known names first and in their order, then the others."""
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _without_seconds(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"}


def _read(run: RunDir, name: str) -> dict[str, Any]:
    path = beneath(run.path, name)
    return json_of(path.read_text()) if path.is_file() else {}


# Two runs

DRAWS = 2000
"""Number of bootstrap resamples."""
SCORES = (
    *("pass_at_1", "ci95", "pass_greedy", "ci95_greedy", "best_of_k", "k", "n_tasks", "tool_calls_per_task"),
    *("pass_within", "recovery"),
)
TRAINING = (
    *("steps", "samples", "sampled", "tokens_accounted", "staleness_bound", "staleness_mean", "staleness_max"),
    *("trainer_idle", "engine_idle", "seconds_per_step", "solved_first", "solved_last"),
)


def compare(first: RunDir, second: RunDir) -> dict[str, Any]:
    """Return the differences between two runs. Every pair is [first, second], with None if a run has no value.

    `runs`        name, path and completeness of each
    `settings`    settings with different values, by dotted name; `changed_live.STEP.NAME` was changed while the run was live
    `provenance`  commit, package digest, machine and versions that differ, by dotted name
    `eval`        `scores` of each policy that either run scored, and `difference` if both did; pass@1 is that of the shared tasks
    `train`       figures of RL; `wall_s` seconds by part of the recipe
    """
    reports = build_report(first), build_report(second)
    scored = [report.get("eval", {}) for report in reports]
    both = set(scored[0]) & set(scored[1])
    same = shared_tasks(first, second) if both else set[str]()
    return {
        "runs": [
            {"run": report["run"], "path": str(run.path), "complete": report["complete"]}
            for report, run in zip(reports, (first, second), strict=True)
        ],
        "settings": differing(*map(_as_now, reports)),
        "provenance": differing(*(report["provenance"] for report in reports)),
        "eval": {
            name: {
                "scores": _scores((first, second), scored, name, same),
                **({"difference": difference(first, second, name, same)} if name in both else {}),
            }
            for name in [*scored[0], *(name for name in scored[1] if name not in scored[0])]
        },
        "train": {name: pair for name in TRAINING if (pair := _pair(reports, "train", name)) != [None, None]},
        "wall_s": {name: _pair(reports, "wall_s", name) for name in {**reports[0]["wall_s"], **reports[1]["wall_s"]}},
    }


def _pair(reports: Sequence[Mapping[str, Any]], part: str, name: str) -> list[Any]:
    return [report.get(part, {}).get(name) for report in reports]


def _as_now(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings with the current names, and what was changed live. A setting that an old run lacks has its default.
    Settings that this package cannot read are returned unchanged."""
    live = {"changed_live": report.get("changed_live", {})}
    try:
        return to_dict(from_dict(report["settings"])) | live
    except ValueError:
        return report["settings"] | live


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [first, second] by dotted name for every leaf that differs between two trees; None for a missing leaf."""
    leaves = _leaves(first), _leaves(second)
    names = [*leaves[0], *(name for name in leaves[1] if name not in leaves[0])]
    pairs = {name: [leaf.get(name) for leaf in leaves] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def shared_tasks(first: RunDir, second: RunDir) -> set[str]:
    """Return the names of the held-out tasks that both runs have; none if these are less than half of the smaller set. Whole
    tasks are compared, not names. Runs of different seeds leave out different tasks of one set, so most are shared."""
    tasks = (load_tasks(run.path / "data" / "heldout.jsonl") for run in (first, second))
    fewer, more = sorted(({task.id: task for task in each} for each in tasks), key=len)
    same = {name for name, task in fewer.items() if more.get(name) == task}
    return same if 2 * len(same) >= len(fewer) else set()


def difference(first: RunDir, second: RunDir, policy: str, shared: set[str]) -> dict[str, Any]:
    """Return pass@1 of `second` − `first` with a 95 % bootstrap interval over tasks.

    With `shared` tasks, the difference is paired by task, which removes the variance of their difficulty. Otherwise the tasks of
    each run are resampled independently.
    """
    old, new = (solved_by_task(run, policy) for run in (first, second))
    values = _paired({task: old[task] for task in old if task in shared}, new)
    if paired := bool(len(values)):
        gain, means = values.mean(), _resampled(values, 0)
    else:
        before, after = (np.array([solved[task] for task in sorted(solved)]) for solved in (old, new))
        gain, means = after.mean() - before.mean(), _resampled(after, 0) - _resampled(before, 1)
    counts = [len(values)] * 2 if paired else [len(old), len(new)]
    interval = np.quantile(means, [0.025, 0.975]).tolist()
    return {"pass_at_1": float(gain), "ci95": interval, "paired": paired, "n_tasks": counts}


def _scores(
    runs: tuple[RunDir, RunDir], scored: Sequence[Mapping[str, Any]], name: str, shared: set[str]
) -> list[dict[str, Any] | None]:
    """Return the scores of a policy in both runs. If only some of the tasks are `shared`, pass@1, its interval and the number of
    tasks are those of the shared tasks, as of the difference."""
    scores = [{key: s[name].get(key) for key in SCORES} if name in s else None for s in scored]
    if not shared or None in scores:
        return scores
    solved = [solved_by_task(run, name) for run in runs]
    both = sorted(solved[0].keys() & solved[1].keys() & shared)
    some = bool(both) and any(run_scores and run_scores["n_tasks"] != len(both) for run_scores in scores)
    for score, solved_tasks in zip(scores, solved, strict=True):
        if score and some:
            values = np.array([solved_tasks[task] for task in both])
            score |= {"pass_at_1": float(values.mean()), "ci95": bootstrap(values, 0), "n_tasks": len(both)}
    return scores


def _resampled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return the means of DRAWS resamples."""
    return np.asarray(np.random.default_rng(seed).choice(values, (DRAWS, len(values))).mean(1))
