"""composer-nb: one subcommand a question.

What a user can mend is one line on stderr and exit status 2; an interrupted run ends with 130; anything else is a bug and
keeps its traceback. Heavy imports stand inside the subcommands, so that `composer-nb doctor` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_nb import operations

NOTEBOOK = "00_tour.ipynb"
PLACES = (errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""What the system says of a path that can not be what it was meant to be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 0
    except Exception as error:
        if not of_the_user(error):
            raise
        print(f"composer-nb: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 2)


def of_the_user(error: Exception) -> bool:
    """Whether an error says what the user can change. Its kind is compared by name, which spares importing torch."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, *PLACES):
        return True
    return bool(
        names
        & {
            "ValueError",
            "FileNotFoundError",
            "SandboxUnavailable",
            "SandboxFailure",
            "ProviderFailure",
            "RunFailed",
            "JobFailed",
        }
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="composer-nb", description="An open laboratory for training coding agents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    tour = add("tour", _tour, "train a small coding agent from nothing, as a notebook that is run and kept")
    _settings_option(tour)
    tour.add_argument("--resume", action="store_true", help="go on with the newest run")
    tour.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept (runs)")
    tour.add_argument("--plain", action="store_true", help="the recipe alone, without the notebook")
    tour.add_argument("--detach", action="store_true", help="the recipe alone, left running: composer-nb follow, stop")

    report = add("report", _report, "what a run did")
    report.add_argument("path", type=Path, metavar="RUN", help="a run directory, as runs/tour")
    _json_option(report)

    watched = add("watch", _watch, "where a run stands now, live or over, whoever started it")
    watched.add_argument("path", type=Path, metavar="RUN", help="a run directory, as runs/tour")
    watched.add_argument("--html", type=Path, metavar="FILE", help="write the board, with its figures, as a page")
    _json_option(watched)

    compared = add("compare", _compare, "two runs side by side: settings, scores with intervals, times")
    compared.add_argument(
        "paths", nargs=2, type=Path, metavar="RUN", help="run directories; the second against the first"
    )
    compared.add_argument("--html", type=Path, metavar="FILE", help="write a page with figures")
    _json_option(compared)

    looked = add(
        "microscope", _microscope, "why an engine and the trainer give a run's tokens different log-probabilities"
    )
    looked.add_argument("path", type=Path, metavar="RUN", help="a run directory, as runs/tour or data/example")
    looked.add_argument(
        "--engine", default="recorded", metavar="NAME", help="recorded, or one that reads its tokens: bf16, …"
    )
    looked.add_argument("--step", type=int, default=-1, metavar="N", help="RL step, from 1 (the last)")
    looked.add_argument("--rollouts", type=int, default=16, metavar="N", help="how many of it (16)")
    looked.add_argument("--html", type=Path, metavar="FILE", help="write a page with figures")
    _json_option(looked)

    scored = add("eval", _eval, "score a policy on tasks")
    scored.add_argument("--policy", required=True, metavar="DIR|scripted:NAME|openai:URL[#MODEL]", help="what to score")
    scored.add_argument("--tasks", required=True, type=Path, metavar="PATH", help="a .jsonl file or task directories")
    scored.add_argument("--samples", type=int, default=4, metavar="K", help="rollouts a task at temperature 1 (4)")
    scored.add_argument(
        "--arms", default="all", metavar="NAMES", help="tools: all, bash, no-search, no-descriptions, every (all)"
    )
    scored.add_argument(
        "--out", type=Path, metavar="DIR", help="where rollouts are kept; the same goes on with it (runs/eval-…)"
    )
    scored.add_argument("--backend", default="bwrap", help="where tasks with the product's tools run (bwrap)")
    scored.add_argument("--workers", type=int, default=2, metavar="N", help="rollouts at a time (2)")
    _settings_option(scored)
    _json_option(scored)

    agent = add("agent", _agent, "let an agent work on a copy of your repository; you accept or reject what it did")
    agent.add_argument("path", type=Path, metavar="PATH", help="the repository")
    agent.add_argument("instruction", help='as "fix the failing date parser"')
    agent.add_argument(
        "--policy", required=True, metavar="DIR|openai:URL[#MODEL]|scripted:FILE.json", help="who does the work"
    )
    agent.add_argument("--backend", default="bwrap", help="where it works (bwrap)")
    agent.add_argument(
        "--image", default="", metavar="NAME", help="with --backend docker: one with what the repository needs"
    )
    agent.add_argument("--out", type=Path, metavar="DIR", help="a new folder for what it did (runs/agent-…)")
    agent.add_argument("--verdict", choices=["ask", "accept", "reject", "later"], default="ask", help="(ask)")
    agent.add_argument("--seconds", type=float, default=1800.0, metavar="S", help="at most (1800)")

    served = add("serve", _serve, "a checkpoint or a script as an OpenAI-compatible server on this machine's loopback")
    what = served.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint that answers")
    what.add_argument("--policy", metavar="scripted:FILE.json", help="a script that answers")
    served.add_argument("--slots", type=int, default=4, metavar="N", help="conversations that are held at a time (4)")
    served.add_argument("--tokens", type=int, default=32_768, metavar="N", help="of one conversation, at most (32768)")
    served.add_argument("--temperature", type=float, default=1.0, metavar="T", help="whatever a request says (1.0)")
    served.add_argument("--port", type=int, default=8000, metavar="N", help="(8000; 0: any that is free)")

    _json_option(add("doctor", _doctor, "what this machine has, and what it lacks"))

    sandbox = add("sandbox", _sandbox, "what the sandbox withstands")
    sandbox.add_argument("action", choices=["check"])
    sandbox.add_argument("--backend", default="bwrap")
    _json_option(sandbox)

    tasks = add("tasks", _tasks, "make: tasks from a repository with tests; check: solution 1, start 0, twice the same")
    tasks.add_argument("action", choices=["check", "make"])
    tasks.add_argument("path", type=Path, metavar="PATH", help="tasks; for make a folder, checkout or source archive")
    tasks.add_argument("--out", type=Path, metavar="DIR", help="make: where tasks are kept; the same goes on with it")
    tasks.add_argument("--limit", type=int, default=60, metavar="N", help="make: how many tasks at most (60)")
    tasks.add_argument("--seed", default="0", help="make: the same seed gives the same tasks (0)")
    tasks.add_argument("--backend", default="bwrap", help="where tests run; tasks with an image need docker (bwrap)")
    _json_option(tasks)

    _jobs_options(add("jobs", _jobs, "notebooks headless: a graph of them, here or on a Ray cluster"))
    _json_option(add("bench", _bench, "measure this machine, in a minute or two"))
    operations.add_commands(add)
    return parser


def _jobs_options(jobs: argparse.ArgumentParser) -> None:
    jobs.set_defaults(json=False)
    actions = jobs.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(action: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(action, help=text, description=text)
        runs = Path("runs/jobs")
        added.add_argument(
            "--runs", type=Path, default=runs, metavar="DIR", help=f"where runs of job files are ({runs})"
        )
        return added

    run = add("run", "run the notebooks of a job file")
    run.add_argument("file", type=Path, metavar="FILE", help="a job file, as papermill_jobs/tour.yml")
    _settings_option(
        run, "PARAMETER=VALUE, NODE:PARAMETER=VALUE, or a dotted setting for `overrides`; may be given again"
    )
    run.add_argument("--ray", metavar="ADDRESS", help="run on this Ray cluster, as 127.0.0.1:6379 or auto")
    run.add_argument("--resume", action="store_true", help="go on with the newest run of that name, if there is one")
    rendered = add("render", "run notebooks and write what they became as pages, with an index")
    rendered.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="all that ship, without")
    rendered.add_argument("--out", type=Path, default=Path("build/render"), metavar="DIR", help="(build/render)")
    _settings_option(rendered, "PARAMETER=VALUE or NOTEBOOK:PARAMETER=VALUE; may be given again")
    name = "a run's directory, or a job's name for its newest run; the newest of all without"
    for action, text in (("status", "what became of a run"), ("cancel", "end a run, or what is left of one")):
        one = add(action, text)
        one.add_argument("path", nargs="?", metavar="RUN", help=name)
        _json_option(one)
    log = add("log", "what a run, or one of its notebooks, printed")
    log.add_argument("path", nargs="?", metavar="RUN", help=name)
    log.add_argument("node", nargs="?", metavar="NODE", help="one of its nodes")
    log.add_argument("--follow", "-f", action="store_true", help="go on until it ends")
    add("sweep", "end what killed runs left running, and make their records true")


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _settings_option(
    parser: argparse.ArgumentParser,
    text: str = "change a setting by its dotted name, as rl.steps=20; may be given again",
) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def overrides(pairs: Sequence[str]) -> dict[str, str]:
    """`["rl.steps=20"]` as a dictionary. Raises ValueError for one without `=`."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {pair!r}: write --set name=value, as --set rl.steps=20")
        values[name] = value
    return values


def _console() -> Console:
    """A terminal's width where there is one; wide enough for the tables where output is a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=130)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _tour(given: argparse.Namespace) -> int:
    from composer_nb import jobs
    from composer_nb.harness.sandbox import BwrapSandboxes
    from composer_nb.trainer.detached import start_detached
    from composer_nb.trainer.launch import start_or_resume
    from composer_nb.trainer.report import table

    BwrapSandboxes().close()  # where none can be made, that is said now and not after minutes
    console = _console()
    run = _resumed(given) if given.resume else _started(given)
    console.print(f"[dim]{run.path}[/]", soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)
        sys.stdout.flush()

    if given.detach:
        start_detached(run.path)
        console.print(f"it runs; composer-nb follow {run.path}", soft_wrap=True)
        return 0
    try:
        with jobs.terminate_as_interrupt():
            if given.plain:
                start_or_resume(run.path, say=say)
            else:
                jobs.run_notebook(_notebook(), run.path / NOTEBOOK, {"run_dir": str(run.path)}, say=say)
    except KeyboardInterrupt:
        again = f" --runs {given.runs}" if given.runs != Path("runs") else ""
        print(f"interrupted; go on with: composer-nb tour --resume{again}", file=sys.stderr)
        return 130
    found = _write(run)
    console.print(table(found))
    console.print("\nkept:")
    for name in (*([] if given.plain else [NOTEBOOK]), "report.html", "report.json"):
        console.print(f"  {given.runs / 'tour' / name}", soft_wrap=True)
    return 0


def _started(given: argparse.Namespace) -> Any:
    """A new run directory that holds its settings from the start, so that it can be resumed whenever it is cut off."""
    from composer_nb.config import Settings, override, to_dict
    from composer_nb.trainer.rundir import create, provenance, write_json

    settings = override(Settings(), overrides(given.set))
    run = create(given.runs, "tour")
    write_json(run.path / "settings.json", to_dict(settings))
    write_json(run.path / "provenance.json", provenance())
    return run


def _resumed(given: argparse.Namespace) -> Any:
    from composer_nb.trainer.report import open_run

    if given.set:
        raise ValueError("--resume goes on with the settings of the run; leave out --set, or start a new run")
    return open_run(given.runs / "tour")


def _notebook() -> Path:
    path = Path(__file__).parents[1] / "notebooks" / NOTEBOOK
    if not path.is_file():
        raise FileNotFoundError(f"{path}: the notebooks come with a checkout; without one use composer-nb tour --plain")
    return path


def _write(run: Any) -> dict[str, Any]:
    from composer_nb.trainer.report import write_report
    from composer_nb.views.figures import pictures

    return write_report(run, pictures(run))


def _report(given: argparse.Namespace) -> int:
    from composer_nb.trainer.report import build_report, open_run, table

    found = build_report(open_run(given.path))
    if given.json:
        _print_json(found)
    else:
        _console().print(table(found))
    return 0


def _watch(given: argparse.Namespace) -> int:
    from composer_nb.trainer.look import look
    from composer_nb.trainer.report import document
    from composer_nb.trainer.rundir import write_text
    from composer_nb.views import dashboard

    seen = look(given.path)
    if given.html:
        write_text(given.html, document(seen.path.name, [dashboard.board(seen).text]))
    if given.json:
        _print_json(dashboard.plain(seen))
    else:
        print(dashboard.headline(seen))
        _rows(list(dashboard.facts(seen)), ("", ""))
    return 0


def _compare(given: argparse.Namespace) -> int:
    from composer_nb.trainer.compare import compare, page, table
    from composer_nb.trainer.look import ReadOnly
    from composer_nb.trainer.rundir import write_text
    from composer_nb.views.compare import figures

    first, second = (ReadOnly(path) for path in given.paths)
    found = compare(first, second)
    if given.html:
        write_text(given.html, page(found, figures(found, first, second)))
    if given.json:
        _print_json(found)
    else:
        _console().print(table(found))
    return 0


def _microscope(given: argparse.Namespace) -> int:
    from composer_nb.trainer.microscope import examine_run
    from composer_nb.trainer.report import document, figure, open_run
    from composer_nb.trainer.rundir import write_text
    from composer_nb.views import microscope as view

    report = examine_run(open_run(given.path), given.engine, step=given.step, rollouts=given.rollouts)
    if given.html:
        body = [view.read(report).text, figure("ladder", "What each rung takes away.", view.ladder(report).png())]
        body.append(figure("apart", "Where inside the model they part.", view.apart(report).png()))
        write_text(given.html, document("mismatch microscope", body))
    if given.json:
        _print_json(report.to_dict())
    else:
        print(view.headline(report))
        _rows(list(view.rows(report)), view.HEAD)
        _rows(list(view.causes(report)), ("cause", "", "first"))
    return 0


def _eval(given: argparse.Namespace) -> int:
    from composer_nb.commands import evaluate_policy
    from composer_nb.harness.task import load_tasks
    from composer_nb.trainer.report import score_table

    for name in ("samples", "workers"):
        if getattr(given, name) < 1:
            raise ValueError(f"--{name} {getattr(given, name)}: at least 1 is needed")
    tasks = load_tasks(given.tasks)
    if any(task.grader != "functions" for task in tasks):
        return _eval_arms(given, tasks)
    found = evaluate_policy(given.policy, given.tasks, given.samples, overrides(given.set))
    if given.json:
        _print_json(found)
    else:
        _console().print(score_table({given.policy: found}))
    return 0


def _eval_arms(given: argparse.Namespace, tasks: Sequence[Any]) -> int:
    from composer_nb.agents import BenchSettings, evaluate_arms, new_folder
    from composer_nb.config import override
    from composer_nb.harness.product.show import bench_progress, bench_table

    settings = override(BenchSettings(), overrides(given.set))
    out = given.out or new_folder(Path("runs"), "eval")
    with bench_progress(len(tasks) * given.samples, Console(stderr=True)) as told:
        found = evaluate_arms(
            given.policy,
            tasks,
            out,
            samples=given.samples,
            arms=given.arms,
            backend=given.backend,
            workers=given.workers,
            settings=settings,
            told=told,
        )
    if given.json:
        _print_json(found)
    else:
        _console().print(bench_table(found))
        print(f"\nkept: {out}")
    return 0


def _agent(given: argparse.Namespace) -> int:
    from composer_nb.agents import new_folder, run_agent
    from composer_nb.harness.product.loop import LIMITS
    from composer_nb.harness.product.show import decide, teller

    console = _console()
    inside = Path.cwd().resolve().is_relative_to(given.path.resolve())  # what is kept is no part of the repository
    out = given.out or new_folder(given.path / ".composer_nb" if inside else Path("runs"), "agent")
    limits = replace(LIMITS, seconds=given.seconds)
    work = run_agent(
        given.path,
        given.instruction,
        given.policy,
        out,
        backend=given.backend,
        image=given.image,
        limits=limits,
        told=teller(console),
    )
    return decide(work, given.verdict, console)


def _serve(given: argparse.Namespace) -> int:
    from composer_nb.harness.product.conversations import Conversations
    from composer_nb.harness.product.scripts import read_script
    from composer_nb.harness.product.serve import ChatServer, ScriptServer
    from composer_nb.policies import open_engine

    def serve(server: ChatServer) -> int:
        with server:
            print(server.url, flush=True)
            server.wait()
        return 0

    if given.model:
        if min(given.slots, given.tokens) < 1:
            raise ValueError("--slots and --tokens must be above 0")
        with open_engine(given.model, slots=given.slots, tokens=given.tokens, temperature=given.temperature) as engine:
            answer = Conversations(engine.shared, engine.tokenizer, engine.format, engine.tokens)
            return serve(ChatServer(answer, given.port, given.model.resolve().name))
    kind, _, name = given.policy.partition(":")
    if kind != "scripted" or not name.endswith(".json"):
        raise ValueError(f"--policy {given.policy}: give scripted:FILE.json, or a checkpoint as --model DIR")
    return serve(ScriptServer(read_script(Path(name)), given.port))


def _doctor(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    from composer_nb import doctor

    findings = doctor.diagnose()
    if given.json:
        _print_json([asdict(finding) for finding in findings])
    else:
        _console().print(doctor.as_table(findings))
    return 0 if doctor.healthy(findings) else 1


def _sandbox(given: argparse.Namespace) -> int:
    from composer_nb.harness.sandbox_check import run_checks

    def tell(case: dict[str, Any]) -> None:
        print(f"{case['kind'] or '':>2}  {case['title']}", file=sys.stderr, flush=True)

    found = run_checks(given.backend, tell)
    cases, kinds = found["cases"], found["kinds"]
    if given.json:
        _print_json(found)
    else:
        rows = [
            ("ok" if case["blocked"] else "NOT BLOCKED", str(case["kind"] or ""), case["title"], case["detail"])
            for case in cases
        ]
        _rows(rows, ("", "kind", "what was tried", "what was seen"))
        blocked, right = sum(kind["blocked"] for kind in kinds), sum(case["blocked"] for case in cases)
        print(
            f"{blocked} of {len(kinds)} kinds of attack blocked on {given.backend}; {right} of {len(cases)} cases in all"
        )
    return 0 if all(row["blocked"] for row in (*cases, *kinds)) else 1


def _tasks(given: argparse.Namespace) -> int:
    from composer_nb.harness.grading.check import check_tasks
    from composer_nb.harness.task import load_tasks

    if given.action == "make":
        return _make(given)
    found = check_tasks(load_tasks(given.path), given.backend)
    unfit = [row for row in found if not row["ok"]]
    if given.json:
        _print_json({"tasks": found, "fit": len(found) - len(unfit), "unfit": len(unfit)})
    else:
        if unfit:
            _rows([(row["id"], row["problem"]) for row in unfit], ("task", "what is wrong"))
        print(f"{len(found) - len(unfit)} of {len(found)} tasks are fit")
    return 1 if unfit else 0


def _make(given: argparse.Namespace) -> int:
    if given.out is None:
        raise ValueError("tasks make: --out DIR is needed, where the tasks are kept")
    if find_spec("libcst") is None:
        raise ValueError("tasks make needs libcst: pip install 'composer_nb[tasks]'")
    from composer_nb.harness.making.make import make
    from composer_nb.harness.making.show import progress, table
    from composer_nb.harness.sandboxes import open_backend

    with open_backend(given.backend) as backend, progress(Console(stderr=True)) as told:
        made = make(given.path, given.out, backend, limit=given.limit, seed=given.seed, told=told)
    if given.json:
        print(made.to_json())
    else:
        _console().print(table(made))
    return 0 if made.tasks else 1


def _jobs(given: argparse.Namespace) -> int:
    from composer_nb.jobs.commands import act

    return act(given, overrides(getattr(given, "set", [])))


def _bench(given: argparse.Namespace) -> int:
    from composer_nb.measure import markdown, measure

    found = measure(say=lambda line: print(line, file=sys.stderr, flush=True))
    if given.json:
        _print_json(found)
    else:
        print(markdown(found))
    return 0


def _rows(rows: Sequence[Sequence[str]], head: Sequence[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    _console().print(table)


if __name__ == "__main__":
    sys.exit(main())
