"""The report of a run for a terminal, as figures and as an HTML page.

report = build_report(open_run(path))
console.print(table(report))                # begins with the verdict
write_report(run, pictures(run))            # report.json, and report.html that needs no other file and can be printed
"""

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rich.console import Group
from rich.text import Text

from composer_nb.harness.files import write_atomic, write_json
from composer_nb.harness.tool_errors import errors_line
from composer_nb.trainer.recipe.launch import stages_of
from composer_nb.trainer.recipe.reader import read_status
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import curves, rollout, scores
from composer_nb.views.charts import WINDOW, Figure
from composer_nb.views.page import document, figure, html_table, shown, text_table
from composer_nb.views.scores import by_policy

# What the verdict watches, by name: of the first kind less is worse, of the second more.
FALLS = {"best of k": "best_of_k", "recovery": "recovery", "testing": "runs_tests", "calls a turn": "calls_per_turn"}
RISES = {"invalid calls": "invalid_call_rate"}


def pictures(run: RunDir) -> dict[str, tuple[str, Any]]:
    """Return (caption, figure) by name of every figure that the run has data for."""
    report, status = build_report(run), read_status(run.path)
    has_versions = "mixed_versions" in (train := report.get("train", {}))
    staleness_caption = "By how many batches the oldest token of a rollout was behind when it was trained."
    bars_caption = "Bars: share of held-out tasks solved; lines: 95 % over tasks."
    drawings: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...], str]] = {
        "policies": ("eval" in report, scores.policies, (report,), bars_caption),
        "families": ("eval" in report, scores.families, (report,), "The same by family of program."),
        "behaviour": ("eval" in report, scores.behaviour, (report,), "What the policies do, in sampled attempts."),
        "losses": ("midtrain" in report, curves.supervised, (status,), "Cross-entropy of the supervised stages."),
        "rl": (train, curves.reinforcement, (status,), f"RL. Bold: mean of the last {WINDOW} steps."),
        "staleness": (has_versions, curves.staleness, (status, train), staleness_caption),
        "experts": (train, rollout.experts, (run,), "Which experts the tokens of the last RL step took."),
        "mismatch": ("replay" in report, scores.mismatch, (report,), "How far engine and trainer are apart."),
        "time": (status.stages, curves.time_split, (status,), "Where the time went."),
    }
    return {name: (caption, draw(*args)) for name, (has_data, draw, args, caption) in drawings.items() if has_data}


def write_report(run: RunDir, figures: Mapping[str, tuple[str, Any]] | None = None) -> dict[str, Any]:
    """Write report.json, report.html and the figures ((caption, figure) by name; their data beside them as CSV), and return the
    report. Raises ValueError for an excerpt, which is read-only."""
    if run.excerpt is not None:
        raise ValueError(f"{run.path} is an excerpt of a run and is only read; its report.json is that of the full run")
    report = build_report(run)
    write_json(run.path / "report.json", report)
    for name, (_, drawing) in (figures or {}).items():
        kinds = {"svg": drawing.svg, "csv": drawing.csv} if isinstance(drawing, Figure) else {"png": drawing.png}
        for kind, content in kinds.items():
            write_atomic(run.path / "figures" / f"{name}.{kind}", content())
    write_atomic(run.path / "report.html", page(run, report, figures or {}))
    return report


def page(run: RunDir, report: Mapping[str, Any], figures: Mapping[str, tuple[str, Any]]) -> str:
    """Return one HTML page without scripts, other files or other hosts: the verdict, the first figure, the numbers, the other
    figures, and a rollout to read."""
    first, *others = [figure(name, caption, drawing) for name, (caption, drawing) in figures.items()] or [""]
    body = [f"<h1>{html.escape(report['run'])}</h1><p class=verdict>{html.escape(verdict(report))}</p>", first]
    for heading, (head, *rows) in tables(report):
        body += [f"<h2>{heading.capitalize()}</h2>", html_table(rows, head)]
    body += others
    with suppress(ValueError, FileNotFoundError):  # none is stored yet
        is_scored = {"start", "final"} <= report.get("eval", {}).keys()
        stored = rollout.before_and_after(run)[1] if is_scored else rollout.sampled(run)[0]
        body.append(f"<h2>A rollout to read</h2>{rollout.read(stored).text}")
    body += [
        f"<details><summary>{title}</summary><pre>{html.escape(json.dumps(report[key], indent=2))}</pre></details>"
        for title, key in (("Settings", "settings"), ("Provenance", "provenance"), ("Seconds by stage", "stages"))
    ]
    return document(report["run"], body)


def table(report: Mapping[str, Any]) -> Group:
    """Return the report for a terminal."""
    parts = (text_table(rows, head, heading, numbers=bool(head)) for heading, (head, *rows) in tables(report))
    return Group(Text(verdict(report)), *parts)


def tables(report: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[tuple[str, ...]]]]:
    """Yield heading, and head and rows, of the tables of a report."""
    if scores := report.get("eval"):
        yield "held-out tasks", by_policy(scores)
    yield "the run", [(), *fact_rows(report)]


def verdict(report: Mapping[str, Any]) -> str:
    """Return in plain words what RL gained over the stronger policy before it, with intervals, and what became worse; or what is
    known so far."""
    parts = [*_gain_sentences(report)] or [*_partial_sentences(report)]
    if not report["complete"]:
        missing = [name for name in stages_of(report["settings"]) if name not in report["stages"]]
        parts.append(f"Not complete: {', '.join(missing)} still to come.")
    return " ".join(parts)


def _gain_sentences(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the gains in 12 calls, each with the word whether chance explains it, and what became worse."""
    if not (gains := report.get("gain", {}).get("within_12")):
        return
    train, before = report.get("train", {}), gains["heldout"]["over"]
    after = "After RL" + " on shuffled rewards" * bool(train.get("shuffled_rewards"))
    for kind, gain in gains.items():
        points, low, high = (100 * value for value in (gain["gain"], *gain["ci95"]))
        tasks, chance = gain["n_tasks"], "within" if low <= 0 <= high else "beyond"
        if kind == "heldout":
            yield (
                f"{after} the policy solves {abs(points):.1f} points {'fewer' if points < 0 else 'more'} of {tasks} held-out "
                f"tasks in 12 calls than “{before}”, the stronger policy before it (95 % over tasks: {low:+.1f} to {high:+.1f}): "
                f"{chance} chance."
            )
        else:
            over = f"over “{gain['over']}” ({low:+.1f} to {high:+.1f})"
            yield f"On {tasks} tasks of new {kind}: {points:+.1f} {over}, {chance} chance."
    old, new = (report["eval"][name] for name in (before, "final"))
    pairs = [(name, old.get(figure), new.get(figure)) for name, figure in (FALLS | RISES).items()]
    moved = [(n, a, b) for n, a, b in pairs if None not in (a, b) and round(a, 2) != round(b, 2)]
    worse = [f"{n} {a:.2f} → {b:.2f}" for n, a, b in moved if (b > a) == (n in RISES)]
    yield f"Worse than before RL, without intervals: {', '.join(worse) or 'none of ' + ', '.join(FALLS | RISES)}."
    if "hacking" in (trend := train.get("trend", "")):
        yield f"{trend.capitalize()}."


def _partial_sentences(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a run without a gain says: how far RL is, and which policy solves most."""
    yield "What RL gains is not known" + (": this run does not score it." if report["complete"] else " yet.")
    if train := report.get("train"):
        yield f"{train['steps']} steps of RL are done: {train['trend']}."
    if scores := report.get("eval"):
        name, best = max(scores.items(), key=lambda pair: pair[1]["pass_at_1"])
        low, high = best["ci95"]
        yield f"So far “{name}” solves most: pass@1 {best['pass_at_1']:.3f} (95 %: {low:.3f} to {high:.3f})."


def fact_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the other results."""
    if excerpt := report.get("excerpt"):
        steps = f"{len(excerpt['rollouts_of_rl_steps'])} of {excerpt['of_rl_steps']} RL steps"
        tasks = f"{excerpt['heldout_tasks']} of {excerpt['of_heldout_tasks']} held-out tasks"
        yield "excerpt", f"the numbers are those of the full run; here are rollouts of {steps}, {tasks}"
    for name, score in report.get("eval", {}).items():
        if len(kinds := score.get("by_kind", {})) > 1:
            yield f"solved by kind, {name}", ", ".join(f"{kind} {share:.3f}" for kind, share in kinds.items())
    if gain := report.get("gain"):
        scored = "{pass_at_1:+.3f} pass@1{}, {pass_greedy:+.3f} greedy, {best_of_k:+.3f} best of k"
        interval = " (95 %: {:+.3f} to {:+.3f})"
        yield f"gain over {gain['from']}", scored.format(interval.format(*gain["ci95"]), **gain)
        span = interval.format(*ends) if (ends := gain.get("over_stronger_ci95")) else ""
        yield "gain over the better of it and the start", scored.format(span, **gain["over_stronger"])
    for step, values in report.get("changed_live", {}).items():
        yield f"changed live, from step {step}", ", ".join(f"{name} = {value}" for name, value in values.items())
    if train := report.get("train"):
        yield from _rl_rows(report, train)
    if reward := report.get("rewards"):
        failed = "".join(f"; {count} {name}" for name, count in reward.get("failed", {}).items() if count)
        late = f"; {reward['timeouts']} with tests that timed out" if reward.get("timeouts") else ""
        lost = f"{reward['infra_errors']} attempts; {reward['flagged']} flagged{failed}{late}"
        yield "lost to the infrastructure", lost
        if (share := reward.get("flagged_share")) is not None:
            yield "flagged by monitors", f"{share:.1%} of the newest rollouts at most"
    if len({score.get("harness") for score in report.get("eval", {}).values()}) > 1:
        yield "harness", "policies were scored by different harnesses, so their differences do not count"
    if errors := report.get("errors"):
        yield "errors of tools in RL", errors_line(errors)
    if len(hosts := report.get("hosts", {})) > 1:
        for host, services in hosts.items():
            figures = {name: ", ".join(f"{n:,} {what}" for what, n in work.items()) for name, work in services.items()}
            yield f"host {host}", "; ".join(f"{name} {text}".rstrip() for name, text in figures.items())
    for name, score in report.get("eval", {}).items():
        if "same_as" not in score and (errors := score.get("errors")):
            yield f"errors of tools, {name}", errors_line(errors)
    if replay := report.get("replay"):
        off, on = (shown(replay[name]["logprob_gap_p99"], ".4f") for name in ("off", "on"))
        yield f"mismatch ({replay.get('pair', 'bf16')}), p99 of |Δ log p|", f"{off}, {on} with routes replayed"
    if compared := report.get("fidelity"):
        yield "training and the product", fidelity_line(compared)
    if weights := report.get("weights"):
        yield "one weight update", last_update(weights)
    yield "seconds", ", ".join(f"{name} {spent:.0f}" for name, spent in report["wall_s"].items())
    yield "seed", str(report["seed"])


def _rl_rows(report: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the facts about RL."""
    steps = report["settings"].get("rl", {}).get("steps", train["steps"])
    cut_off = f" of {steps}, ended by rl.max_seconds" if report["complete"] and train["steps"] < steps else ""
    yield "RL", f"{train['steps']} steps{cut_off}, {train['samples']:,} rollouts, {train['sampled']:,} tokens sampled"
    if "trend" in train:
        yield "reward", train["trend"]
    yield "every token accounted for", shown(train["tokens_accounted"], ".3f")
    yield "trainer idle", f"{shown(train['trainer_idle'], '.0%')} of RL's time"
    if waits := train.get("engine_waits"):
        idle = ", ".join(f"{share:.0%} for the {name}" for name, share in waits.items())
        yield "engine idle", f"{idle}, of the time"
    bound, maximum, average = (train[f"staleness_{name}"] for name in ("bound", "max", "mean"))
    yield "staleness in batches", f"{shown(average, '.2f')} on average, {shown(maximum)} at most, bound {bound}"


def fidelity_line(compared: Mapping[str, Any]) -> str:
    """Return a sentence about the differences between the sandboxes of training and of the product."""
    if "error" in compared:
        return f"could not be compared: {compared['error']}"
    names = dict.fromkeys(difference["what"] for difference in compared["differences"])
    count = len(compared["differences"])
    differences = f"{count} difference{'s' * (count > 1)} ({', '.join(names)})" if names else "no difference"
    return f"{differences} in {compared['calls']} calls, byte by byte"


def last_update(weights: Mapping[str, Any]) -> str:
    """Return a sentence about the size of RL's last weight update."""
    full = f"{weights['full_bytes']:,}"
    if weights["changed_fraction"]:
        share = weights["delta_bytes"] / weights["full_bytes"]
        changed = f"{weights['changed_fraction']:.1%} of the weights changed"
        return f"{weights['delta_bytes']:,} of {full} bytes ({share:.1%}); {changed}"
    text = f"the last batch had no group that teaches, so none of {full} bytes changed"
    if (store := weights.get("store")) and store.get("delta"):
        text += f"; the {store['delta']} deltas that were published had {store['delta_bytes']:,.0f} bytes on average"
    return text
