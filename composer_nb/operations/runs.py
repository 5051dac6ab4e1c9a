"""Commands for runs: tour, rl, report, watch, compare, follow, stop, set, replay, up, reap."""

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from composer_nb.harness.untrusted import json_of, visible
from composer_nb.operations import HTML, JSON, RUN, SET, arg, command, console, emit, overrides, pick, save
from composer_nb.views.page import document, shown, text_table

NOTEBOOK = "01_tour.ipynb"
TRACK = arg("--track NAMES", "send figures to tensorboard, wandb, trackio, mlflow (commas between)", "tensorboard")
WHERE = arg("--where QUERY", "as `advantage < -.5 and edited a test`, /a pattern/ or `rl.lr = 3e-5` (docs/rl.md)", "")
TOUR = arg("path RUN", "a run directory", Path("runs/tour"), nargs="?")
SAME_COMMAND = "resume with the same command"
log = logging.getLogger(__name__)


@command(
    "tour",
    SET,
    arg("--resume", "resume the newest run"),
    arg("--runs DIR", "folder of runs", Path("runs")),
    arg("--plain", "run the recipe without the notebook, as for a run that ends before RL"),
    arg("--detach", "run the recipe in the background; see composer-nb follow and stop"),
    TRACK,
    lines=True,
)
def tour(args: argparse.Namespace) -> int:
    """Train a small coding agent from nothing, in a notebook that is run and kept."""
    from composer_nb.harness.environment import require_sandboxes
    from composer_nb.operations.live import LivePage
    from composer_nb.operations.track import parse, tracking
    from composer_nb.trainer.recipe.detached import start_detached
    from composer_nb.trainer.recipe.launch import begin_run, start_or_resume
    from composer_nb.trainer.settings import Settings, from_dict, override

    trackers, settings = parse(args.track), override(Settings(), overrides(args.set))
    resumed = _resumed(args) if args.resume else None
    settings = from_dict(resumed.settings()) if resumed else settings
    require_sandboxes(settings.env)  # now, not after minutes
    is_plain = args.plain or settings.until != "rl" or settings.control_steps > 0  # the notebook shows RL
    run = resumed or begin_run(settings, args.runs, "tour")
    print(run.path, flush=True)
    if args.detach:
        start_detached(run.path)
        print(f"the run continues in the background; see composer-nb follow {run.path}")
        return 0
    options = " --plain" * args.plain + (f" --runs {args.runs}" if args.runs != Path("runs") else "")
    with (
        _interruptible(f"resume with: composer-nb tour --resume{options}"),
        LivePage(run.path) as live_page,
        tracking(run.path, trackers),
    ):
        print(f"watch it: {live_page.url}", flush=True)
        if is_plain:
            start_or_resume(run.path, say=log.info)
        else:
            from composer_nb.jobs.notebook import run_notebook

            run_notebook(tour_notebook(), run.path / NOTEBOOK, {"run_dir": str(run.path)}, say=log.info)
    return _reported(run, args.runs / "tour", *([] if is_plain else [NOTEBOOK]))


@contextmanager
def _interruptible(hint: str) -> Iterator[None]:
    """Turn SIGTERM into an interrupt, which says how to go on."""
    from composer_nb.jobs.processes import terminate_as_interrupt

    with terminate_as_interrupt():
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(hint) from None


def _reported(run: Any, newest: Path, *files: str) -> int:
    from composer_nb.views.report import pictures, table, write_report

    console().print(table(write_report(run, pictures(run))))
    print("\nkept:", *(f"  {newest / name}" for name in (*files, "report.html", "report.json")), sep="\n")
    return 0


@command(
    "rl",
    arg("--model DIR", "a checkpoint with its tokenizer", type=Path, required=True),
    arg("--tasks PATH|MODULE:CLASS", "tasks, as for composer-nb eval, or your own environment", required=True),
    arg("--out RUN", "the run", Path("runs/rl")),
    TRACK,
    SET,
    lines=True,
)
def rl(args: argparse.Namespace) -> int:
    """Train a checkpoint by RL alone, on tasks of yours; the same command resumes.

    A fifth of the tasks is held out for the scores before and after. rl.max_seconds limits the time.
    """
    from composer_nb.harness.agent.loop import LIMITS
    from composer_nb.harness.environment import EnvSettings, require_sandboxes
    from composer_nb.operations.track import parse, tracking
    from composer_nb.trainer.models.tokenizer import format_of
    from composer_nb.trainer.recipe.launch import begin_run, start_or_resume
    from composer_nb.trainer.settings import Settings, override

    trackers = parse(args.track)
    changes: dict[str, Any] = {"model.start": str(args.model.resolve()), "env.tasks": args.tasks}
    changes |= dict.fromkeys(("midtrain.steps", "sft.steps", "data.demonstrations", "data.mistaken_demonstrations"), 0)
    changes |= overrides(args.set)
    if "env.renderer" not in changes and args.model.is_dir():  # the recipe refuses any other
        changes["env.renderer"] = format_of(args.model)
    has_own_tools = hasattr(EnvSettings(tasks=changes["env.tasks"]).own, "tools")
    if changes.get("env.renderer", "compact") != "compact" and not has_own_tools:
        changes = {"env.tools": "cursor"} | changes
    settings = override(Settings(), changes)
    is_product = settings.env.tools == "cursor" or (has_own_tools and settings.env.renderer != "compact")
    if is_product and not any(name.startswith("limits.") for name in changes):
        max_tokens = min(LIMITS.tokens, settings.agent_model.max_position_embeddings)
        settings = replace(settings, limits=replace(LIMITS, tokens=max_tokens))
    require_sandboxes(settings.env)  # now, not after minutes
    with _interruptible(SAME_COMMAND):
        run = begin_run(settings, args.out.parent, args.out.name, resume=True, say=log.info)
        with tracking(run.path, trackers):
            start_or_resume(run.path, say=log.info)
    return _reported(run, args.out)


@command(
    "fork",
    RUN,
    arg("--step N", "the new run begins after so many RL steps; 0: at the start of RL (its checkpoint)", type=int),
    arg("--out NEW", "the new run", type=Path, required=True),
    SET,
    lines=True,
)
def fork(args: argparse.Namespace) -> int:
    """Go on from a step of a run with other settings, as a new run; the same command resumes.

    Steps before its checkpoint are made again from the stored rollouts.
    """
    from composer_nb.trainer.recipe.launch import start_or_resume
    from composer_nb.trainer.recipe.replay import branch, settings_after
    from composer_nb.trainer.records.rundir import open_run
    from composer_nb.trainer.settings import from_dict, override

    source, changes = open_run(args.path.resolve()), overrides(args.set)
    step = (source.pointer("rl") or (0,))[0] if args.step is None else args.step
    provenance_file = args.out.resolve() / "provenance.json"
    origin = json_of(provenance_file.read_text()) if provenance_file.is_file() else {}
    is_begun = origin.get("forked_from") == source.path.name and origin["forked_at_step"] == step
    run = open_run(provenance_file.parent) if is_begun else None
    if run is None or from_dict(run.settings()) != override(settings_after(source, step), changes):
        run = branch(source, step, changes, args.out.parent, args.out.name)
        change_list = ", ".join(f"{name}={value}" for name, value in changes.items()) or "the same settings"
        print(f"{run.path} goes on after step {step} of {source.path} with {change_list}", flush=True)
    with _interruptible(SAME_COMMAND):
        start_or_resume(run.path, say=log.info)
    return _reported(run, args.out)


def _resumed(args: argparse.Namespace) -> Any:
    from composer_nb.trainer.recipe.launch import settle
    from composer_nb.trainer.recipe.reader import open_run
    from composer_nb.trainer.settings import from_dict, override

    changes = overrides(args.set)
    if changes.keys() - {"rl.gate"}:
        raise ValueError("--resume keeps the settings of the run but rl.gate; leave out --set, or start a new run")
    run = open_run(args.runs / "tour")
    settle(run, override(from_dict(run.settings()), changes))
    return run


def tour_notebook() -> Path:
    """Return the path of the tour. Raises FileNotFoundError where the package was installed without its notebooks."""
    notebook = Path(__file__).parents[2] / "notebooks" / NOTEBOOK
    if not notebook.is_file():
        raise FileNotFoundError(f"{notebook}: notebooks come with a checkout; without one use composer-nb tour --plain")
    return notebook


@command("report", RUN, HTML, JSON)
def report(args: argparse.Namespace) -> int:
    """Summarize a run, with its verdict first."""
    from composer_nb.trainer.recipe.reader import ReadOnly
    from composer_nb.trainer.recipe.report import build_report
    from composer_nb.views.report import page, pictures, table, verdict

    run = ReadOnly(args.path)
    summary = build_report(run)
    save(args.html, lambda: page(run, summary, pictures(run)))
    scores = summary.get("eval", {})
    if "sharpness" in summary.get("sft", {}) and "start" in scores:  # RL starts from the calibrated policy
        scores = {**scores, "start_calibrated": scores["start"]}
    result = {"verdict": verdict(summary), **summary} | ({"eval": scores} if scores else {})
    return emit(args, result, lambda: table(summary))


@command(
    "headroom",
    arg("path RUN|TASKS|MODULE:CLASS", "a run directory, or tasks (with --policy)", type=Path),
    arg("--policy NAME", "a policy of the run (start), or one that eval takes"),
    arg("--samples K", "rollouts per task at temperature 1, for tasks", 8),
    SET,
    JSON,
)
def headroom(args: argparse.Namespace) -> int:
    """Say what RL could find, before it starts."""
    from composer_nb.harness.environment import load_environment
    from composer_nb.harness.store import load_attempts
    from composer_nb.production.bench import bench_settings, evaluate, require_attempts
    from composer_nb.trainer import headroom as room
    from composer_nb.trainer.recipe.reader import ReadOnly
    from composer_nb.trainer.settings import Settings, override

    if (args.path / "run.db").is_file():
        report = room.run_headroom(ReadOnly(args.path), args.policy or "start")
    elif not args.policy:
        raise ValueError(f"{args.path}: no run; for tasks give --policy too")
    else:
        changes = overrides(args.set)
        bench_changes = {name: changes.pop(name) for name in [*changes] if name.startswith("limits.") or name == "seed"}
        rewards = override(Settings(), changes).reward
        if args.samples < 2:
            raise ValueError(
                f"--samples {args.samples}: at least 2, since one attempt at a task cannot tell what RL could find"
            )
        task_list, environment = load_environment(str(args.path))
        tasks = {task.id: task for task in task_list}
        settings = bench_settings(args.policy, task_list, bench_changes)
        options = {"samples": args.samples, "greedy": True, "tools": getattr(environment, "tools", None)}
        with TemporaryDirectory() as out:
            require_attempts(evaluate(args.policy, task_list, Path(out), settings=settings, **options))
            sampled, greedy = (load_attempts(Path(out, "all", f"{n}.parquet"), tasks) for n in ("rollouts", "greedy"))
        report = room.headroom(sampled, greedy, rewards, getattr(environment, "reward", None))
    return emit(args, report, lambda: text_table([(name, str(value)) for name, value in report.items()], ("", "")))


@command("watch", RUN, HTML, JSON, arg("--port N", "serve a page that follows the run here, until Ctrl-C", 0))
def watch(args: argparse.Namespace) -> int:
    """Show the state of a run, live or finished."""
    from composer_nb.operations.live import LivePage
    from composer_nb.trainer.recipe.reader import read_status
    from composer_nb.views import dashboard

    status = read_status(args.path)
    if args.port:
        with LivePage(status.path, args.port) as live_page:
            print(live_page.url, flush=True)
            live_page.wait()
    save(args.html, lambda: document(status.path.name, [dashboard.board(status).text]))
    if not args.json:
        print(visible(dashboard.headline(status)))
    return emit(args, dashboard.plain(status), lambda: text_table(list(dashboard.facts(status)), ("", "")))


@command("runs", arg("folder RUNS", "a folder of runs", Path("runs"), nargs="?"), WHERE, JSON)
def runs(args: argparse.Namespace) -> int:
    """List runs: the settings that differ, and scores with intervals."""
    from composer_nb.views.runs import POLICIES, run_rows, runs_below

    if not args.folder.is_dir():
        raise FileNotFoundError(f"{args.folder}: no such folder; give one that holds runs")
    rows = run_rows(runs_below(args.folder), args.where)

    def scored(row: dict[str, Any], name: str) -> str:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return shown(row[name], ".3f") + (f" ({low:.3f}–{high:.3f})" if low is not None else "")

    names = ("run", "state", "steps", "solved", "pass@1 at the start", "at the end", "what differs")
    cells = []
    for row in rows:
        figures = (str(row["steps"]), shown(row["solved"], ".3f"), *(scored(row, policy) for policy in POLICIES))
        cells.append((row["run"], row["state"], *figures, row["name"]))
    return emit(args, rows, lambda: text_table(cells, names))


@command(
    "rollouts",
    RUN,
    arg("--of SOURCE", 'as "step 12", "all steps" or final; default: the last step that trained on something', ""),
    WHERE,
    arg("--read N", "print the rollout of that number in the list", -1),
    arg("--atif FOLDER", "also write them to a new folder, as trajectories in Harbor's format ATIF", type=Path),
    arg("--tests TASKS|MODULE:CLASS", "grade them again by the hidden tests of these tasks; list what changes", ""),
    JSON,
)
def rollouts(args: argparse.Namespace) -> int:
    """List, read or export the stored rollouts of a run that fit a search, or grade them again."""
    from composer_nb.harness.files import write_atomic
    from composer_nb.harness.plain import to_json
    from composer_nb.production.atif import trajectory
    from composer_nb.trainer.recipe.reader import ReadOnly
    from composer_nb.views import rollouts as stored

    run = ReadOnly(args.path)
    fitting = stored.search(run, args.of, args.where)
    if args.read >= len(fitting):
        raise ValueError(f"--read {args.read}: the list has {len(fitting)} rollouts")
    if args.read >= 0:
        fitting = fitting[args.read : args.read + 1]
    rows = stored.rows(fitting)
    if args.atif:
        args.atif.mkdir(parents=True)
        for row, rollout in zip(rows, fitting, strict=True):
            exported = trajectory(rollout.attempt, rollout.tokenizer, f"{run.path.name} {row['rollout']}", row)
            write_atomic(args.atif / f"{row['rollout']:05}.json", to_json(exported))
    if args.tests:
        return _graded_again(args, run, fitting)
    if args.read >= 0:
        text = f"{fitting[0].heading}\n\n{stored.text(fitting[0])}"
        return emit(args, rows[0] | {"text": text}, lambda: text)
    return emit(args, rows, lambda: _table(rows) if rows else "no rollout fits")


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    cells = [[shown(v, ".3f") if isinstance(v, float) else shown(v) for v in row.values()] for row in rows]
    return text_table(cells, [*rows[0]] if rows else ())


def _graded_again(args: argparse.Namespace, run: Any, fitting: Sequence[Any]) -> int:
    """Grade rollouts by the hidden tests of `args.tests`, and list those that change. Return 1 if a grade is unknown."""
    from composer_nb.harness.environment import EnvSettings, Sandboxes, load_environment
    from composer_nb.labs.rewards.rescore import graded_again
    from composer_nb.trainer.recipe.reader import settings_at
    from composer_nb.trainer.rl import reward_of
    from composer_nb.views.rollouts import row

    tasks, settings = {task.id: task for task in load_environment(args.tests)[0]}, settings_at(run)
    before = {number: old for number, old in enumerate(fitting) if old.attempt.task.id in tasks}
    attempts = [replace(old.attempt, task=tasks[old.attempt.task.id]) for old in before.values()]
    if not attempts:
        raise ValueError(f"--tests {args.tests}: has none of the tasks of these {len(fitting)} rollouts")
    for old, attempt in zip(before.values(), attempts, strict=True):
        if old.attempt.task.files != attempt.task.files:
            raise ValueError(f"--tests {args.tests}: {attempt.task.id} begins with other files than in the run")
    with Sandboxes(EnvSettings(backend=settings.env.backend)) as sandboxes:
        grades = graded_again(attempts, sandboxes)
    custom, rows = settings.env.reward_function(settings.limits.seconds), []
    for (number, old), attempt, grade in zip(before.items(), attempts, grades, strict=True):
        line: dict[str, Any] = {"rollout": number, "task": attempt.task.id}
        for when, stored in (("before", old), ("now", replace(old, attempt=replace(attempt, grade=grade)))):
            line[when] = row(number, stored)["solved"]
            line[f"reward {when}"] = reward_of(stored.attempt, settings.reward, custom).total
        rows.append(line | {"failed now": ", ".join(grade.failed)})
    changed = [r for r in rows if (r["before"], r["reward before"]) != (r["now"], r["reward now"])]
    worse, better = (sum(r["before"] == a and r["now"] == b for r in rows) for a, b in (("yes", "no"), ("no", "yes")))
    summary = f"{len(rows)} of {len(fitting)} rollouts graded again: {worse} passed and fail now, {better} failed and pass now"
    return emit(args, rows, lambda: (summary, _table(changed)), int(not all(grade.known for grade in grades)))


@command(
    "compare",
    arg(
        "paths RUN|EVAL",
        "two runs, or more by arm and seed; or folders of eval, of which --html draws several",
        nargs="+",
        type=Path,
    ),
    HTML,
    JSON,
)
def compare(args: argparse.Namespace) -> int:
    """Compare two runs: settings, scores with intervals, times; or two evaluations, paired by task.

    Of more runs, those that differ in their seeds alone are an arm, and each arm is compared with the first over seeds."""
    from composer_nb.harness.files import read_json
    from composer_nb.production.bench import compare_evals
    from composer_nb.trainer.recipe.arms import compare_arms
    from composer_nb.trainer.recipe.reader import ReadOnly
    from composer_nb.trainer.recipe.report import compare
    from composer_nb.views.agent import pareto
    from composer_nb.views.compare import arms_page, arms_table, figures, page, table

    runs = any((path / "run.db").is_file() for path in args.paths)
    if len(args.paths) < 2 or (len(args.paths) > 2 and not runs and not args.html):
        names = " ".join(map(str, args.paths))
        raise ValueError(
            f"compare {names}: give two runs or more, or two folders of eval; or with --html, which draws all, several"
        )
    if len(args.paths) > 2 and runs:
        arms = compare_arms([ReadOnly(path) for path in args.paths])
        save(args.html, lambda: arms_page(arms))
        return emit(args, arms, lambda: arms_table(arms))
    pictures: dict[str, tuple[str, Any]] = {}
    if runs:
        first, second = map(ReadOnly, args.paths)
        comparison = compare(first, second)
        pictures = figures(comparison, first, second) if args.html else {}
    else:
        comparison = compare_evals(*args.paths[:2])
        reports = {str(path): report for path in args.paths if (report := read_json(path / "report.json"))}
        caption = "Score against cost: a point for each arm of each evaluation. No other point beats those on the line."
        if unfinished := [str(path) for path in args.paths if str(path) not in reports]:
            caption += f" Not drawn, because it has no report.json: {visible(', '.join(unfinished))}."
        pictures = {"pareto": (caption, pareto(reports))} if args.html else {}
    save(args.html, lambda: page(comparison, pictures))
    return emit(args, comparison, lambda: table(comparison))


@command(
    "track", RUN, arg("--to NAMES", "tensorboard, wandb, trackio, mlflow (commas between)", required=True), lines=True
)
def track(args: argparse.Namespace) -> int:
    """Send the figures of a run, live or finished, to trackers; the same command goes on where it ended."""
    from composer_nb.operations.track import follow, parse
    from composer_nb.trainer.recipe.reader import read_status

    path, names = read_status(args.path).path, parse(args.to)
    with ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(follow, path, name, lambda: read_status(path).state != "live") for name in names}
    for name, future in futures.items():
        future.result()
        print(f"{name} has all steps of {visible(path.name)}")
    return 0


@command("follow", TOUR, lines=True)
def follow(args: argparse.Namespace) -> int:
    """Print what a run logs until it ends; Ctrl-C leaves the run alone.

    Return 0 when the run is complete, 1 when it ended before that.
    """
    from composer_nb.trainer.recipe.detached import follow

    return int(follow(args.path.resolve(), log.info) != "complete")


@command(
    "restore",
    arg("run STORE/NAME", "a run's name below its services.store, as s3://bucket/runs/tour-20260101-120000"),
    arg("--runs DIR", "folder of runs", Path("runs")),
    JSON,
)
def restore(args: argparse.Namespace) -> int:
    """Bring a run back whose machine is lost, from services.store, as of the last batch that it learned; then resume it."""
    from composer_nb.trainer.services.run_copy import restore

    path = restore(args.run, args.runs)
    return emit(args, {"run": str(path)}, lambda: str(path))


@command("stop", TOUR, JSON, lines=True)
def stop(args: argparse.Namespace) -> int:
    """End a live run, wherever it was started; it can be resumed. It is killed if it has not ended after a minute."""
    from composer_nb.trainer.recipe.detached import stop

    stopped = stop(args.path.resolve(), log.info)
    return emit(args, {"stopped": stopped}, lambda: "stopped" if stopped else "it is not live")


@command("set", RUN, arg("pairs NAME=VALUE", "as services.bound=4", nargs="+"), JSON)
def change(args: argparse.Namespace) -> int:
    """Change a setting of a live run; the run records from which step on.

    Names and types are checked before the run sees them.
    """
    from composer_nb.trainer.recipe.reader import open_run, settings_at
    from composer_nb.trainer.services.journal import change_live, request_change

    run, changes = open_run(args.path.resolve()), dict[str, Any]()
    current = settings_at(run)
    for name, text in overrides(args.pairs).items():
        current = change_live(current, name, text)
        changes[name] = reduce(getattr, name.split("."), current)
    if run.finished("rl") is not None:
        raise ValueError(f"{run.path.name}: its RL is over; nothing is left to change")
    for name, value in changes.items():
        request_change(run, name, value)
    return emit(args, changes, lambda: "\n".join(f"asked: {name} = {value!r}" for name, value in changes.items()))


@command("replay", RUN, arg("--step N", "last step to repeat (all)", type=int), JSON, lines=True)
def replay(args: argparse.Namespace) -> int:
    """Repeat the RL steps of a run from what it stored, and compare every weight version.

    Return 0 when every version came out the same, else 1.
    """
    from composer_nb.trainer.recipe.reader import open_run
    from composer_nb.trainer.recipe.replay import other_origins, replay
    from composer_nb.trainer.records.provenance import CAPSULE
    from composer_nb.trainer.settings import from_dict

    run = open_run(args.path.resolve())
    last_step = args.step if args.step is not None else len(run.steps("rl"))
    if last_step < 1:
        raise ValueError(f"--step {last_step}: the first step is 1")
    rows, settings = [], from_dict(run.settings())
    if others := other_origins(run, settings):
        log.info(f"not what the run began with ({CAPSULE}): {', '.join(others)}")
    for replayed in replay(run, settings, last_step):
        rows.append({name: getattr(replayed, name) for name in ("step", "version", "was", "now", "first", "same")})
        verdict = "same" if replayed.same else f"DIFFERS, first in {replayed.first or 'a tensor that no ledger has'}"
        log.info(f"step {replayed.step:>5}  version {replayed.version:>6}  {replayed.now[:16]}  {verdict}")
    different = sum(not row["same"] for row in rows)
    return emit(args, rows, lambda: f"{len(rows)} steps, {different} differ", int(different > 0))


@command(
    "up",
    arg("path FOLDER", "folder of the head", Path("runs/head"), nargs="?"),
    arg("--lease S", "seconds until an unused head ends", 3600.0),
    arg("--down", "end the head, even if it is in use"),
    arg("--host ADDRESS", "this machine's address for other machines; else none can join", ""),
    arg("--join HOST:PORT", "join the head at this address as a node; wants --host, and the head's token", ""),
    arg(
        "--roles NAMES",
        "services that run on nodes of that role alone: trainer, engine, environment, evaluation; =N: at most N here",
        "",
    ),
    arg(
        "--relay HOST:PORT",
        "fetch weight versions through this region's relay, which runs on the node of that --host",
        "",
    ),
    JSON,
)
def up(args: argparse.Namespace) -> int:
    """Start a Ray head that outlives notebooks and runs; --ray FOLDER and services.address=FOLDER use it."""
    from composer_nb.trainer.services import head
    from composer_nb.trainer.services.cluster import ClusterNode

    if args.down:
        ended = head.down(args.path)
        return emit(args, {"ended": ended}, lambda: "ended" if ended else f"no head lives in {args.path}")
    roles = tuple(filter(None, args.roles.split(",")))
    machine = ClusterNode(roles=roles, **pick(args, "host", "join", "relay"))
    lease = head.up(args.path, args.lease, machine)
    line = f"node of {lease.address}, process {lease.pid}, until its head ends"
    if not args.join:
        line = (
            f"{lease.address}, process {lease.pid}, for {lease.until - time.time():.0f} s and as long as it is used\n"
        )
        line += f"notebooks run on it with --ray {lease.folder}, a run's services with --set services.address={lease.folder}"
    return emit(args, asdict(lease), lambda: line)


@command("reap", arg("path RUNS", "folder of runs", Path("runs"), nargs="?"), JSON)
def reap(args: argparse.Namespace) -> int:
    """End what killed runs left on this machine.

    Return 0 when nothing is left, 1 when something could not be ended.
    """
    from composer_nb.harness.sandbox.reap import reap

    report = asdict(reap(args.path))
    kinds = ("containers", "processes", "cgroups", "directories")
    ended = ", ".join(f"{len(report[kind])} {kind}" for kind in kinds if report[kind])
    lines = [f"ended: {ended or 'nothing'}; left alone, because their owners live: {report['left_alone']}"]
    lines += [f"failed: {line}" for line in report["failed"]]
    return emit(args, report, lambda: "\n".join(lines), int(bool(report["failed"])))
