"""Commands for tasks and their sandboxes: tasks install, tasks make, tasks mine, tasks bugs, tasks check, tasks from, audit,
sandbox check."""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from composer_nb.harness.untrusted import visible_lines
from composer_nb.operations import JSON, arg, command, emit, pick
from composer_nb.views.page import text_table

BACKEND = arg("--backend NAME", "sandbox in which tests run; tasks with an image need docker", "bwrap")
GUARDS = ["calls", "twins", "none"]
REQUIRE = arg("--require", "weakest guard of a task: calls, twins of tests run alone, or none", "none", choices=GUARDS)
LINE_S = 30.0  # Seconds between lines where there is no terminal.
log = logging.getLogger(__name__)


@command(
    "tasks install",
    arg("path PATH", "a folder or checkout whose tests do not run yet", type=Path),
    arg("--out DIR", "new folder for the checkout and its packages", required=True, type=Path),
    arg("--packages FOLDER", "installed packages that may be brought; by default those of this Python", type=Path),
    arg("--policy POLICY", "have an agent do it, as in composer-nb agent, and no script", ""),
    arg("--seconds S", "time limit of a try of the agent", 600.0),
    BACKEND,
    JSON,
)
def install(args: argparse.Namespace) -> int:
    """Make the commands of a repository work that should, in at most five tries."""
    from composer_nb.harness.sandbox import open_backend
    from composer_nb.production.install import ScriptedInstaller, agent_installer, install

    if args.packages and (args.policy or not args.packages.is_dir()):
        raise ValueError(f"--packages {args.packages}: give a folder of installed packages, and no --policy")
    agent = agent_installer(args.policy, args.backend, args.seconds) if args.policy else None
    with open_backend(args.backend) as backend, _progress() as report:
        summary = install(args.path, args.out, backend, agent or ScriptedInstaller(args.packages), report)
    lines = [f"try {number}: {', '.join(tried['changes'])}" for number, tried in enumerate(summary["tries"], 1)]
    lines.append(
        f"{summary['repository']}: {summary['verdict']}; of {summary['goals']} goals {summary['passed_before']} worked before, "
        f"{summary['passed_after']} work now; outputs: {args.out}/install.json"
    )
    if summary["verdict"] == "kept":
        packages = f" --packages {args.out}/packages" if any((args.out / "packages").iterdir()) else ""
        lines.append(f"go on with composer-nb tasks make {args.out}/repository{packages} --out DIR")
    return emit(args, summary, lambda: "\n".join(map(visible_lines, lines)), int(summary["verdict"] != "kept"))


@command(
    "tasks make",
    arg("path PATH", "a folder or checkout", type=Path),
    arg("--out DIR", "folder for tasks; the same folder resumes", required=True, type=Path),
    arg("--limit N", "maximum number of tasks", 60),
    arg("--seed SEED", "the same seed gives the same tasks", "0"),
    arg(
        "--kinds KIND,…",
        "of feature, bug, combined, features, tests, lint, rename, move, extract, git, question, long",
        "feature,bug,combined",
    ),
    arg("--pytest-args ARGS", "-m, -k, --deselect … of pytest, in one word", ""),
    arg("--suite-seconds S", "time limit of a whole suite", 400.0),
    arg("--test-seconds S", "time limit of a test; slower tests do not count", 1.0),
    arg("--packages FOLDER", "installed packages that the tests need, from pip install --target", type=Path),
    arg("--image NAME", "Docker image in which the tests run, with --backend docker", ""),
    REQUIRE,
    BACKEND,
    JSON,
)
def make(args: argparse.Namespace) -> int:
    """Make tasks from a repository with tests."""
    if find_spec("libcst") is None:
        raise ValueError("tasks make needs libcst: pip install -e '.[tasks]'")
    from composer_nb.harness.sandbox import open_backend
    from composer_nb.harness.tasks.making.make import make
    from composer_nb.harness.tasks.making.options import RunOptions

    time_limits = {"suite_s": args.suite_seconds, "test_s": args.test_seconds}
    run_options = RunOptions(**pick(args, "pytest_args", "packages", "image"), **time_limits)
    with open_backend(args.backend) as backend, _progress() as report:
        options = pick(args, "limit", "seed", "require") | {"kinds": args.kinds.split(",")}
        summary = make(args.path, args.out, backend, running=run_options, report=report, **options)
    return emit(args, summary, lambda: _made(summary), int(not summary["tasks"]))


@contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    """Yield a function that shows what is being done: in one line on a terminal, else as a line now and then."""
    console, last, when = Console(stderr=True), "", -LINE_S
    with console.status("reading") if console.is_terminal else nullcontext() as status:

        def show(doing: str, counts: str) -> None:
            nonlocal last, when
            line = f"{doing}: {counts}" if counts else doing
            if status is not None:
                status.update(escape(line))
            elif doing != last or time.monotonic() - when >= LINE_S:
                last, when = doing, time.monotonic()
                console.print(line, highlight=False, markup=False)

        yield show


def _made(summary: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what `tasks make` made: kinds of changes, those with most tasks first, tests, guards, and sources without tasks."""
    from composer_nb.harness.grading.recorded import guards_line

    rows = []
    for kind in sorted(summary["kinds"], key=lambda kind: -kind["kept"]):
        tried, tasks = kind["tried"], kind["kept"]
        cost = f"{kind['seconds'] / tasks:.1f}" if tasks else "-"
        rows.append((kind["kind"], str(tried), str(tasks), f"{tasks / tried:.0%}", cost, _reasons(kind["verdicts"])))
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(summary["left_out"].items())) or "none"
    lines = [
        f"{summary['repository']}: {summary['tasks']} tasks, of {sum(kind['kept'] for kind in summary['kinds'])} changes kept, "
        f"in {summary['wall_s']:.0f} s. {summary['tests']} tests count ({summary['coverage']:.0%} with a twin), "
        f"{summary['suite_s']:.1f} s a run; left out: {left_out}",
        guards_line(Counter(guard["by"] for guard in summary["guards"].values())),
    ]
    lines += [f"left out, below the required guard: {guards_line(summary['below'])}"] if summary["below"] else []
    reasons = summary["files_left_out"] | summary["no_bugs_in"]
    unused = {path: why for path, why in reasons.items() if path.endswith(".py")}
    lines += [f"{path}: {reason}, so no task is made of it" for path, reason in list(unused.items())[:10]]
    table = text_table(rows, ("kind", "tried", "kept", "yield", "s a task", "why not"))
    return (table, *lines)


@command(
    "tasks mine",
    arg("paths PATH", "a checkout, or folders of releases, the oldest first", nargs="+", type=Path),
    arg("--out DIR", "folder for tasks; the same folder resumes", required=True, type=Path),
    arg("--limit N", "maximum number of tasks", 30),
    arg("--commits N", "look at this many commits, the newest first", 200),
    arg("--most-lines N", "leave out changes of more source lines", 400),
    arg("--requests FOLDER", "accepted work of `composer-nb agent`, or a folder of such", nargs="+", type=Path),
    arg("--pytest-args ARGS", "-m, -k, --deselect … of pytest, in one word", ""),
    arg("--suite-seconds S", "time limit of one run of the tests", 60.0),
    arg("--packages FOLDER", "installed packages that the tests need, from pip install --target", type=Path),
    arg("--image NAME", "Docker image in which the tests run, with --backend docker", ""),
    BACKEND,
    JSON,
)
def mine(args: argparse.Namespace) -> int:
    """Make tasks from the commits of a checkout, or from consecutive releases."""
    if find_spec("libcst") is None or find_spec("dulwich") is None:
        raise ValueError("tasks mine needs dulwich and libcst: pip install -e '.[tasks]'")
    from composer_nb.harness.sandbox import open_backend
    from composer_nb.harness.tasks.making.mine import UNFETCHED, mine
    from composer_nb.harness.tasks.making.options import RunOptions
    from composer_nb.production.requests import accepted_requests, request_behind

    if args.requests and len(args.paths) > 1:
        raise ValueError("--requests: only commits hold the changes of agents, so give one checkout and no releases")
    find_request = partial(request_behind, accepted_requests(args.requests)) if args.requests else None
    run_options = RunOptions(**pick(args, "pytest_args", "packages", "image"), suite_s=args.suite_seconds)
    with open_backend(args.backend) as backend, _progress() as report:
        options = pick(args, "limit", "most_lines") | {"max_commits": args.commits, "request_behind": find_request}
        summary = mine(args.paths, args.out, backend, running=run_options, report=report, **options)
    rows = [(str(count), verdict) for verdict, count in summary["verdicts"].most_common()]
    line = f"{summary['tasks']} tasks of {summary['tried']} changes in {summary['wall_s']:.0f} s"
    line += f", {summary['from_logs']} with the request of a log" if args.requests else ""
    line += f"; {summary['slow']} tests take too long to count" if summary["slow"] else ""
    unfetched = [row["why"] for row in summary["candidates"] if row["verdict"] == UNFETCHED]
    line += f"; {UNFETCHED}: {unfetched[0]}" if unfetched else ""
    line += f"; reasons: {args.out}/summary.json"
    return emit(args, summary, lambda: (text_table(rows, ("changes", "")), line), int(not summary["tasks"]))


@command(
    "tasks bugs",
    arg("projects PROJECT", "projects of tests4py, such as thefuck; all by default", nargs="*"),
    arg("--out DIR", "folder for tasks, wheels and packages; the same folder resumes", required=True, type=Path),
    BACKEND,
    JSON,
)
def bugs(args: argparse.Namespace) -> int:
    """Make tasks from real bugs of published projects, which pip downloads."""
    if find_spec("libcst") is None or find_spec("dulwich") is None:
        raise ValueError("tasks bugs needs dulwich and libcst: pip install -e '.[tasks]'")
    from composer_nb.harness.sandbox import open_backend
    from composer_nb.harness.tasks.making.bugs import make_bugs, read_recipe

    recipe = read_recipe()
    if foreign := set(args.projects) - recipe.keys():
        raise ValueError(f"{min(foreign)}: no project of the recipe, which has {', '.join(recipe)}")
    chosen = {name: project for name, project in recipe.items() if name in (args.projects or recipe)}
    with open_backend(args.backend) as backend, _progress() as report:
        summary = make_bugs(args.out, backend, chosen, report)
    columns = ("project", "bugs", "tasks", "s", "")
    rows = [
        (name, str(row["tried"]), str(row["tasks"]), f"{row['wall_s']:.0f}", _reasons(row["verdicts"]))
        for name, row in summary["projects"].items()
    ]
    line = f"{summary['tasks']} tasks in {args.out}; reasons: {args.out}/PROJECT/summary.json"
    return emit(args, summary, lambda: (text_table(rows, columns), line), int(not summary["tasks"]))


def _reasons(verdicts: Mapping[str, int]) -> str:
    """Return the counts of verdicts other than `kept`."""
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()) if verdict != "kept")


@command(
    "tasks check",
    arg("path PATH", "a .jsonl file or task directories", type=Path),
    REQUIRE,
    arg("--egress HOST:PORT,…", "hosts that tasks which need a network may reach, as the setting env.egress", ""),
    BACKEND,
    JSON,
)
def check(args: argparse.Namespace) -> int:
    """Check that every solution scores 1, every start scores 0, and repeats agree."""
    from composer_nb.harness.grading.check import check_tasks
    from composer_nb.harness.grading.recorded import guards_line
    from composer_nb.harness.tasks.task import read_tasks

    checks = check_tasks(read_tasks(args.path), args.backend, args.require, args.egress)
    if not checks:
        raise ValueError(f"{args.path}: holds no task")
    unfit = [(row["id"], row["problem"]) for row in checks if not row["ok"]]
    guards = Counter(row["guard"]["by"] for row in checks)
    fit_count = len(checks) - len(unfit)
    line = f"{fit_count} of {len(checks)} tasks are fit; {guards_line(guards)}"
    return emit(
        args,
        {"tasks": checks, "fit": fit_count, "unfit": len(unfit), "guards": guards},
        lambda: (*([text_table(unfit, ("task", "problem"))] if unfit else []), line),
        int(bool(unfit)),
    )


@command(
    "tasks from",
    arg("path PATH", "rows, as JSON Lines or a JSON list", type=Path),
    arg("--out DIR", "folder for tasks", required=True, type=Path),
    arg("--format", choices=["swebench", "swesmith"], required=True, help="format of the rows"),
    arg("--repository PATH", "files of the repository, so that no image is needed", type=Path),
    JSON,
)
def convert(args: argparse.Namespace) -> int:
    """Convert rows of a benchmark to tasks."""
    from composer_nb.harness.tasks.making.repository import read_repository
    from composer_nb.harness.tasks.swe import read_rows

    files = read_repository(args.repository).files if args.repository else None
    written, problems = 0, []
    for where, task in read_rows(args.path, args.format, files):
        try:
            if isinstance(task, ValueError):
                raise task
            task.to_harbor(args.out / task.id.replace("/", "__"))
            written += 1
        except ValueError as error:
            problems.append(str(error))
        except FileExistsError as error:
            problems.append(f"{where}: {error.filename} is there already")
    for problem in problems:
        print(visible_lines(problem), file=sys.stderr)
    line = f"{written} tasks in {args.out}, {len(problems)} rows left out"
    return emit(args, {"tasks": written, "problems": problems}, lambda: line, int(bool(problems)))


@command("tasks humaneval", arg("--out DIR", "folder for tasks", required=True, type=Path), JSON)
def humaneval(args: argparse.Namespace) -> int:
    """Write HumanEval's problems as tasks for an agent: the file of the prompt, to be completed."""
    from composer_nb.harness.tasks.task import save_tasks
    from composer_nb.labs.humaneval import read_problems, task_of

    tasks = [task_of(problem) for problem in read_problems()]
    save_tasks(tasks, args.out / "tasks.jsonl")
    return emit(args, {"tasks": len(tasks)}, lambda: f"{len(tasks)} tasks in {args.out}")


@command(
    "audit",
    arg("path PATH|MODULE:CLASS", "tasks, an environment of your own, verifiers:NAME or openenv:MODULE:ENV:ACTION"),
    arg("--seconds S", "begin no further task after this time; tasks come in a random order", 55.0),
    arg("--seed SEED", "decides the order", 0),
    BACKEND,
    JSON,
)
def audit(args: argparse.Namespace) -> int:
    """Try tasks with workspaces that they must accept or refuse, before training on them."""
    if args.path.startswith(("verifiers:", "openenv:")):
        return _audit_foreign(args)
    if find_spec("libcst") is None:
        raise ValueError("audit plants bugs with libcst: pip install -e '.[tasks]'")
    from composer_nb.harness.environment import EnvSettings, tasks_of
    from composer_nb.harness.tasks.task import read_tasks
    from composer_nb.labs.audit.audit import audit as run

    environment = EnvSettings(tasks=args.path).own
    own_tasks = ((task.id, task) for task in tasks_of(args.path, environment)) if environment else None
    tasks = own_tasks or read_tasks(Path(args.path))
    options = {"seconds": args.seconds, "seed": args.seed, "pays": getattr(environment, "reward", None)}
    report = run(tasks, args.backend, **options)
    if not report["read"]:
        raise ValueError(f"{args.path}: holds no task")
    rates = [(name, str(row["tried"]), str(row["wrong"])) for name, row in report["probes"].items()]
    problems = [(row["id"], kind, text) for row in report["tasks"] for kind, text in row["problems"]]
    slips, planted = (sum(row["slips"][index] for row in report["tasks"]) for index in (0, 1))
    line = f"{report['sound']} of {report['audited']} tasks are sound; {report['read'] - report['audited']} were not reached"
    line += f"; {slips} of {planted} planted bugs found; {report['seconds']:.0f} s"
    tables = [text_table(rates, ("workspace", "tried", "wrongly graded"))]
    tables += [text_table(problems, ("task", "problem", ""))] if problems else []
    return emit(args, report, lambda: (*tables, line), int(bool(problems)))


def _audit_foreign(args: argparse.Namespace) -> int:
    """Audit the grader of a foreign environment."""
    from composer_nb.production.foreign import audit_openenv, audit_verifiers

    kind, _, name = args.path.partition(":")
    report = audit_verifiers(name) if kind == "verifiers" else audit_openenv(name, **pick(args, "seconds", "seed"))
    rates = [
        (probe, str(row["tried"]), str(row["wrong"]), "fault" if probe in report["faults"] else "")
        for probe, row in report["probes"].items()
    ]
    table = text_table(rates, ("answer" if kind == "verifiers" else "probe", "tried", "wrong", ""))
    return emit(args, report, lambda: (table, *report.get("errors", ())), int(bool(report["faults"])))


@command("sandbox check", arg("--backend NAME", "backend", "bwrap"), JSON)
def attack(args: argparse.Namespace) -> int:
    """Run every attack against a sandbox backend."""
    from composer_nb.labs.attacks.sandbox_check import run_checks

    report = run_checks(args.backend, lambda case: log.info(f"{case['kind'] or '':>2}  {case['title']}"))
    cases, kinds = report["cases"], report["kinds"]
    table = [("ok" if c["blocked"] else "NOT BLOCKED", str(c["kind"] or ""), c["title"], c["detail"]) for c in cases]
    blocked, right = (sum(row["blocked"] for row in rows) for rows in (kinds, cases))
    line = f"{blocked} of {len(kinds)} kinds of attack blocked on {args.backend}; {right} of {len(cases)} cases in all"
    status = int(blocked < len(kinds) or right < len(cases))
    return emit(args, report, lambda: (text_table(table, ("", "kind", "attempt", "observed")), line), status)


@command(
    "sandbox fleet",
    arg("--alive N", "idle sandboxes to make here", 2000),
    arg("--gib N", "memory of this machine that they may take", 6.0),
    arg("--simulate", "instead, start 100,000 environments on a cluster in virtual time, by the same scheduler"),
    JSON,
)
def fleet(args: argparse.Namespace) -> int:
    """Measure how many sandboxes live here at the same time, or simulate a cluster of them."""
    from composer_nb.labs.fleets import GIB, ClusterLoad, SpreadScheduler, live_at_once, simulate_fleet

    if args.simulate:
        from composer_nb.harness.sandbox.fleet import FleetScheduler

        columns = {
            "fullest host first, 1,024 ahead": simulate_fleet(ClusterLoad(), FleetScheduler, 1024),
            "emptiest host first, none ahead": simulate_fleet(ClusterLoad(), SpreadScheduler, 0),
        }
    else:
        columns = {"here": live_at_once(args.alive, args.gib * GIB, lambda alive: log.info(f"{alive} are alive"))}
    names = next(iter(columns.values()))
    rows = [
        (name, *(value if isinstance(value := figures[name], str) else f"{value:,.4g}" for figures in columns.values()))
        for name in names
    ]
    return emit(args, columns, lambda: text_table(rows, ("", *columns), numbers=True))
