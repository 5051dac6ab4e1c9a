"""The numbers of a run, and the differences between two runs, as dictionaries.

    report = build_report(open_run(path))       # of a live run: its numbers so far, and `complete: false`
    found = compare(first, second)              # differences of `second` from `first`

Every number is read from the run directory. `views.report` and `views.compare` show them.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from filecmp import cmp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.bench import bootstrap, resampled
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.tool_errors import tool_errors
from composer_nb.harness.untrusted import beneath, json_of
from composer_nb.trainer.recipe.launch import STAGES, stages_of
from composer_nb.trainer.recipe.reader import read_status, rl_tables, solved_by_task
from composer_nb.trainer.records.rundir import RunDir, well_formed
from composer_nb.trainer.rl import FAILED
from composer_nb.trainer.settings import from_dict, to_dict

POLICIES = ("base", "midtrained", "start", "final")


def build_report(run: RunDir) -> dict[str, Any]:
    """Return the results of a run. The results of unfinished stages are absent, and `complete` is then false. For an excerpt,
    return the stored report of its full run, in which `excerpt` describes the excerpt.

    `eval.NAME`        held-out scores and behaviour of a published policy (`harness.bench.summarise`)
    `headroom`         room for RL above its start (`headroom.headroom`)
    `gain`             final − midtrained, with a paired bootstrap over tasks; and final − the better of midtrained and start
    `midtrain`, `sft`  first and last point of the loss curves; for `sft` also the factor of the logits (`evaluate.calibrate`)
    `finish`           the factor of the final policy's logits
    `extend`           the same for the long-context phase, with the losses on long rows before it
    `train`            see `training`
    `rewards`          mean of each reward term over RL rollouts; counts of infrastructure errors, flagged rollouts and timeouts;
                       `flagged_share`, the highest share of flagged rollouts (`monitor.*`)
    `errors`           calls of RL rollouts by tool, and errors by tool and kind (`harness/tool_errors.py`)
    `replay`           mismatch of an engine and the trainer (`pair`), with the trainer's routes (off) and the engine's (on)
    `fidelity`         number of calls compared between the sandboxes of training and product, and their `differences`; null if
                       no task has its own sandbox; `error` if the two could not be compared
    `weights`          versions published in RL; bytes of the last one, in full and as a delta
    `ledger`           RL's sampled tokens by their use
    `hosts`            services of asynchronous RL by the name of their host: graded `rollouts` and sampled `tokens` of an
                       environment; new `versions` that an engine took, and `bytes` that it read for them
    `changed_live`     live changes of settings, by the step from which each applied
    `wall_s`           seconds of stages. `total` sums all stages, including those not listed, without the start of processes
                       and without steps that a killed process lost

    Raises ValueError for malformed records.
    """
    with well_formed(run.path):
        return _built(run)


def _built(run: RunDir) -> dict[str, Any]:
    """Return the report that `build_report` describes."""
    if run.excerpt is not None:
        stored: dict[str, Any] = json.loads((run.path / "report.json").read_text())
        return stored
    status = read_status(run.path)
    settings, infos = status.settings, {name: dict(status.infos[name]) for name in _in_order(status.infos, STAGES)}
    provenance_file = beneath(run.path, "provenance.json")
    provenance = json_of(provenance_file.read_text()) if provenance_file.is_file() else {}
    spent_s = {**{name: seconds for name, (_, seconds) in status.checkpoints.items()}, **status.stages}
    wall_s: dict[str, float] = {name: spent_s[name] for name in ("midtrain", "extend", "sft", "rl") if name in spent_s}
    if eval_seconds := [seconds for name, seconds in spent_s.items() if name.startswith("eval_")]:
        wall_s["eval"] = sum(eval_seconds)
    wall_s["total"] = sum(spent_s.values())
    report: dict[str, Any] = {
        "run": run.path.name,
        "complete": all(name in infos for name in stages_of(settings)),
        "seed": settings.get("seed"),
        "versions": provenance.get("versions"),
        "settings": settings,
        "provenance": provenance,
        "stages": {name: status.stages[name] for name in infos},
        "wall_s": wall_s,
        **{name: infos[name] for name in ("tokenizer", "data") if name in infos},
    }
    report |= {
        name: _ends(status.supervised[name]) for name in ("midtrain", "extend", "sft") if name in status.supervised
    }
    for name in ("sft", "finish"):
        if sharpness := {key: value for key, value in infos.get(name, {}).items() if key.startswith("sharpness")}:
            report.setdefault(name, {}).update(sharpness)
    if "extend" in infos:
        report["extend"]["before"] = {name: infos["extend"][name] for name in ("plain", "stretched")}
    scores = {name: dict(score) for name, score in status.scores.items()}
    headrooms = {name: room for name, score in scores.items() if (room := score.pop("headroom", None))}
    if scores:
        report["eval"] = {name: scores[name] for name in _in_order(sorted(scores), POLICIES)}
    if "start" in headrooms:
        report["headroom"] = headrooms["start"]
    if gain := gained(run, scores):
        report["gain"] = gain
    if live_changes := run.changed_live():
        report["changed_live"] = live_changes
    if steps := run.steps("rl"):  # the durable ones
        ledger = run.ledger()
        report["train"] = training(steps, settings, infos.get("rl", {}), ledger, wall_s["rl"])
        errors = tool_errors(step.get("errors", {}) for step in steps)  # old runs have none
        report |= {"rewards": rewards(run, steps), "ledger": ledger, "errors": errors}
        if services := hosts(run):
            report["hosts"] = services
    if numerics := infos.get("numerics"):
        report["replay"], report["fidelity"] = numerics["replay"], numerics.get("fidelity")
        published = {name: value for name, value in infos.get("rl", {}).items() if name in ("versions", "store")}
        report["weights"] = published | numerics["weights"]
    return report


def hosts(run: RunDir) -> dict[str, dict[str, dict[str, int]]]:
    """Return what each service of asynchronous RL did, by host and name; nothing for runs without such a record."""
    if not run.query("SELECT 1 FROM sqlite_master WHERE name = 'service'"):
        return {}
    names = {"environment": ("rollouts", "tokens"), "engine": ("versions", "bytes")}
    services: dict[str, dict[str, dict[str, int]]] = {}
    for host, name, *work in run.query("SELECT host, name, results, volume FROM service ORDER BY host, name"):
        figures = dict(zip(names.get(name.partition("-")[0], ()), work, strict=False))  # a trainer has none
        services.setdefault(host, {})[name] = figures
    return services


def _in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return the names in `order` first, then the others."""
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def _ends(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of steps and the first and last losses of a supervised stage, in nats per token."""
    losses = ("loss", "agent_loss", *(f"heldout_{part}_loss" for part in ("agent", "code", "own", "long")))
    first, last = ({name: steps[at][name] for name in losses if steps[at].get(name) is not None} for at in (0, -1))
    return {"steps": steps[-1]["step"], "first": first, "last": last}


def training(
    steps: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    rl_info: Mapping[str, Any],
    ledger: Mapping[str, int],
    seconds: float,
) -> dict[str, Any]:
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
    sampled = rl_info.get("sampled") or sum(step["sampled"] for step in steps)
    train_s = sum(step["time"]["train_s"] for step in steps)
    last_steps = steps[-min(10, len(steps)) :]
    services = settings.get("services", {"on": False})  # old runs have none
    figures: dict[str, Any] = {
        "steps": len(steps),
        "samples": int(sum(step["samples"] for step in steps)),
        "tokens": int(sum(step["tokens"] for step in steps)),
        "sampled": int(sampled),
        "tokens_accounted": sum(ledger.values()) / sampled if sampled else None,
        "staleness_bound": services["bound"] if services["on"] else 0,
        "staleness_max": max(known(steps, "staleness_max") or known(steps, "staleness"), default=None),
        "staleness_mean": mean(known(steps, "staleness")),
    }
    if "mixed_versions" in steps[-1]:
        figures["mixed_versions"] = mean(known(steps, "mixed_versions"))
    if waits := [step["time"]["engine_waits"] for step in steps if "engine_waits" in step["time"]]:
        figures["engine_waits"] = {name: float(np.mean([wait[name] for wait in waits])) for name in waits[0]}
        figures["engine_idle"] = sum(figures["engine_waits"].values())
    for name in ("in_flight", "in_queue"):
        if counts := rl_info.get("staleness", {}).get(name):
            figures[name] = sum(age * count for age, count in counts) / sum(count for _, count in counts)
    return {
        **figures,
        "optimizer_steps_per_batch": settings["rl"]["minibatches"],
        "trainer_idle": 1.0 - train_s / seconds if seconds else None,
        "solved_first": mean(known(steps[: len(last_steps)], "solved")),
        "solved_last": mean(known(last_steps, "solved")),
        "averaged_steps": len(last_steps),
        "trend": reward_trend(steps),
        "last_live": last_live(steps),
        "seconds_per_step": float(np.mean([step["time"]["wall_s"] for step in steps])),
        **({"stopped_early": rl_info["stopped_early"]} if "stopped_early" in rl_info else {}),
        **({"shuffled_rewards": True} if settings["rl"]["shuffle_rewards"] else {}),
    }


def rewards(run: RunDir, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each reward term and of the total over the stored RL rollouts, with counts of errors, flags, and
    rollouts that failed regardless of the tests."""
    sums: Counter[str] = Counter()
    totals: list[float] = []
    for _, table in rl_tables(run, ("terms", "reward")):
        totals += table["reward"].to_pylist()
        for text in table["terms"].to_pylist():
            for name, value in json.loads(text).items():
                sums[name] += value
    counts = {name: int(sum(step.get(name, 0) for step in steps)) for name in ("infra_errors", "flagged", "timeouts")}
    return {
        "terms": {name: value / len(totals) for name, value in sums.items()},
        "mean": sum(totals) / len(totals) if totals else None,
        "rollouts": len(totals),
        **counts,
        "failed": {name: int(sum(step.get(name, 0) for step in steps)) for name in FAILED},
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
    gains = {}
    for over in [name for name in ("midtrained", "start") if name in scores]:
        before, after = (solved_by_task(run, name) for name in (over, "final"))
        best = [{task: float(share > 0) for task, share in shares.items()} for shares in (before, after)]
        greedy = [solved_by_task(run, name, greedy=True) for name in (over, "final")]
        sampled = _paired(before, after)
        gains[over] = {"pass_at_1": sampled, "pass_greedy": _paired(*greedy), "best_of_k": _paired(*best)}
    means = {over: {figure: float(by_task.mean()) for figure, by_task in gain.items()} for over, gain in gains.items()}
    return {
        "from": "midtrained",
        **means["midtrained"],
        "ci95": bootstrap(gains["midtrained"]["pass_at_1"], 0),
        "over_stronger": {figure: min(gain[figure] for gain in means.values()) for figure in means["midtrained"]},
        "over_stronger_ci95": bootstrap(min((gain["pass_at_1"] for gain in gains.values()), key=np.mean), 0),
        "within_12": {kind: gain for kind in ("heldout", "structures") if (gain := within_12(run, scores, kind))},
    }


def _paired(old: Mapping[str, float], new: Mapping[str, float]) -> NDArray[np.float64]:
    return np.array([new[task] - old[task] for task in sorted(old.keys() & new.keys())])


def within_12(run: RunDir, scores: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the gain in tasks solved within 12 calls over the better policy before RL, with a paired bootstrap over the tasks of
    both; {} if the run has no such tasks."""
    suffix = "" if kind == "heldout" else f"_{kind}"
    scores_of_kind = {name: score.get(kind, {}) if suffix else score for name, score in scores.items()}
    if not all("pass_within" in score for score in scores_of_kind.values()):
        return {}
    baselines = [name for name in ("start", "midtrained") if name in scores_of_kind]  # of equal ones the first
    *befores, after = (solved_by_task(run, name + suffix, 12) for name in (*baselines, "final"))
    gains = {name: _paired(before, after) for name, before in zip(baselines, befores, strict=True)}
    over = min(gains, key=lambda name: gains[name].mean())
    gain = gains[over]
    return {"over": over, "gain": float(gain.mean()), "ci95": bootstrap(gain, 0), "n_tasks": len(gain)}


def known(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return one figure of all steps that have it."""
    return [step[name] for step in steps if step.get(name) is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return float(np.mean(values)) if values else None


# Minimum number of steps for a statement about the trend.
TREND_STEPS = 8


def reward_trend(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence that says whether reward rose over RL, and whether solved rollouts rose with it. A rise is a difference
    between the first and the last quarter of the steps of more than twice its standard error. A rise of reward alone is reward
    hacking."""
    values = [known(steps, name) for name in ("reward", "solved")]
    if min(map(len, values)) < TREND_STEPS:
        return f"{len(steps)} steps are too few to tell a trend"
    (reward_first, reward_last, reward_rose), (solved_first, solved_last, solved_rose) = map(_rise, values)
    reward, solved = f"from {reward_first:.2f} to {reward_last:.2f}", f"from {solved_first:.0%} to {solved_last:.0%}"
    if reward_rose and solved_rose:
        return f"reward rose {reward}, and solved rollouts with it, {solved}"
    if reward_rose:
        return (
            f"reward rose {reward}, solved rollouts did not ({solved}): this is reward hacking. The policy learnt to collect the "
            "other terms of the reward, not to do the task"
        )
    if solved_rose:
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


# Two runs

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
    `eval`        `scores` of each policy that either run scored, and if both did `difference`, and `within_12`, that of the share
                  solved in 12 calls; pass@1 is that of the shared tasks
    `train`       figures of RL; `wall_s` seconds by part of the recipe
    `same_final`  whether both have final weights, and the same ones
    """
    reports = build_report(first), build_report(second)
    scored = [report.get("eval", {}) for report in reports]
    policies = set(scored[0]) & set(scored[1])
    same = shared_tasks(first, second) if policies else set[str]()
    return {
        "runs": [
            {"run": report["run"], "path": str(run.path), "complete": report["complete"]}
            for report, run in zip(reports, (first, second), strict=True)
        ],
        "settings": differing(*(current(r["settings"]) | {"changed_live": r.get("changed_live", {})} for r in reports)),
        "provenance": differing(*(report["provenance"] for report in reports)),
        "eval": {
            name: {
                "scores": _scores((first, second), scored, name, same),
                **{
                    key: difference(first, second, name, same, within)
                    for key, within in (("difference", None), ("within_12", 12))
                    if name in policies
                },
            }
            for name in [*scored[0], *(name for name in scored[1] if name not in scored[0])]
        },
        "train": {name: pair for name in TRAINING if (pair := _pair(reports, "train", name)) != [None, None]},
        "wall_s": {name: _pair(reports, "wall_s", name) for name in {**reports[0]["wall_s"], **reports[1]["wall_s"]}},
        "same_final": _same_final(first, second),
    }


def _same_final(first: RunDir, second: RunDir) -> bool:
    files = [sorted((run.path / "weights" / "final").glob("*.safetensors")) for run in (first, second)]
    names = [[file.name for file in run_files] for run_files in files]
    return (
        bool(names[0]) and names[0] == names[1] and all(cmp(a, b, shallow=False) for a, b in zip(*files, strict=True))
    )


def _pair(reports: Sequence[Mapping[str, Any]], part: str, name: str) -> list[Any]:
    return [report.get(part, {}).get(name) for report in reports]


def current(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings with the current names; one that an old run lacks has its default. Settings that this package
    cannot read are returned unchanged."""
    with suppress(ValueError, TypeError):
        return to_dict(from_dict(settings))
    return dict(settings)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return leaves


def differing(*trees: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the leaves that differ between trees, by dotted name; None for a missing leaf."""
    leaves = [flat(tree) for tree in trees]
    pairs = {name: [tree.get(name) for tree in leaves] for tree in leaves for name in tree}
    return {name: values for name, values in pairs.items() if any(value != values[0] for value in values)}


def shared_tasks(first: RunDir, second: RunDir) -> set[str]:
    """Return the names of the held-out tasks that both runs have; none if these are less than half of the smaller set. Whole
    tasks are compared, not names. Runs of different seeds leave out different tasks of one set, so most are shared."""
    files = (run.path / "data" / "heldout.jsonl" for run in (first, second))
    fewer, more = sorted(({task.id: task for task in load_tasks(file)} for file in files), key=len)
    shared = {name for name, task in fewer.items() if more.get(name) == task}
    return shared if 2 * len(shared) >= len(fewer) else set()


def difference(
    first: RunDir, second: RunDir, policy: str, shared: set[str], within: int | None = None
) -> dict[str, Any]:
    """Return pass@1 of `second` − `first`, or the share solved `within` so many calls, with a 95 % bootstrap interval over tasks.

    With `shared` tasks, the difference is paired by task, which removes the variance of their difficulty. Otherwise the tasks of
    each run are resampled independently.
    """
    old, new = (solved_by_task(run, policy, within) for run in (first, second))
    gain_by_task = _paired({task: old[task] for task in old if task in shared}, new)
    if paired := bool(len(gain_by_task)):
        gain, means = gain_by_task.mean(), resampled(gain_by_task, 0)
    else:
        before, after = (np.array([solved[task] for task in sorted(solved)]) for solved in (old, new))
        gain, means = after.mean() - before.mean(), resampled(after, 0) - resampled(before, 1)
    counts = [len(gain_by_task)] * 2 if paired else [len(old), len(new)]
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
    task_ids = sorted(solved[0].keys() & solved[1].keys() & shared)
    if task_ids and any(score and score["n_tasks"] != len(task_ids) for score in scores):
        for score, shares in zip(scores, solved, strict=True):
            by_task = np.array([shares[task] for task in task_ids])
            assert score is not None
            score |= {"pass_at_1": float(by_task.mean()), "ci95": bootstrap(by_task, 0), "n_tasks": len(task_ids)}
    return scores
