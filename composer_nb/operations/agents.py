"""Commands for policies at work: eval, agent, verdict, serve."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from composer_nb.operations import JSON, SET, arg, command, console, emit, overrides, pick
from composer_nb.production import SLOTS
from composer_nb.views.page import text_table

if TYPE_CHECKING:
    from composer_nb.harness.grading.grade import Attempt
    from composer_nb.harness.tasks.task import Task
    from composer_nb.production.planner import TaskPlan
    from composer_nb.production.policies import OpenEngine
    from composer_nb.production.serve import ChatServer

KEY = "An endpoint gets the key in the environment variable OPENAI_API_KEY, if there is one."


@command(
    "eval",
    arg("--policy DIR|scripted:NAME|openai:URL[#MODEL]", "policy to score", required=True),
    arg("--tasks PATH|MODULE:CLASS", "tasks, your environment, verifiers:NAME or openenv:MODULE:ENV:ACTION", type=Path),
    arg("--suite NAME[:COUNT]", "side suite: ambiguous, instructions, must-not-edit, interruption or impossible", ""),
    arg("--samples K", "rollouts per task at temperature 1", 4),
    arg("--arms NAMES", "tools: all, bash, no-search, no-descriptions, every", "all"),
    arg("--out DIR", "folder for rollouts; the same folder resumes (runs/eval-…)", type=Path),
    arg("--backend NAME", "sandbox of tasks with the product's tools", "bwrap"),
    arg("--workers N", "rollouts at a time (0: 16, or 2 with sandboxes of their own)", 0),
    arg("--greedy", "also one rollout per task at temperature 0"),
    arg("--price READ,WRITTEN", "dollars per million tokens, for the cost of a task", ""),
    arg("--planner POLICY", "a policy that writes plans, for one more arm, `planned`", ""),
    arg("--planner-price READ,WRITTEN", "dollars per million tokens of the planner", ""),
    arg("--user scripted|openai:URL[#MODEL]", "who answers an agent that asks, by the facts of a task", ""),
    arg("--judge POLICY", "reviews passed changes beside the human's with tools; an endpoint also by rubrics", ""),
    SET,
    JSON,
    epilog=f"{KEY} --set limits.turns=12, temperature=0.5 or seed=1, and the like.",
)
def evaluate(args: argparse.Namespace) -> int:
    """Score a policy on tasks."""
    from composer_nb.harness.bench import reward_figures
    from composer_nb.harness.environment import load_environment
    from composer_nb.harness.files import write_json
    from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
    from composer_nb.labs.rewards.judges import RubricJudge, rubric_levels
    from composer_nb.labs.rewards.review import open_reviewer, review_evaluation
    from composer_nb.labs.suites import judged, make_suite
    from composer_nb.production.agents import new_folder
    from composer_nb.production.bench import bench_settings, evaluate, require_attempts
    from composer_nb.production.policies import open_endpoint
    from composer_nb.production.show import bench_progress, bench_table
    from composer_nb.views.agent import quality_table

    if args.samples < 1 or args.workers < 0:
        raise ValueError(f"--samples {args.samples} --workers {args.workers}: at least 1 and 0 are needed")
    if bool(args.tasks) == bool(args.suite):
        raise ValueError("eval: give either --tasks PATH or --suite NAME")
    environment = None
    if args.suite:
        with SandboxExecutor() as executor:
            tasks = make_suite(args.suite, CachedExecutor(executor))
    else:
        tasks, environment = load_environment(str(args.tasks))
    user = args.user or ("scripted" if args.suite.partition(":")[0] == "ambiguous" else "")
    settings = bench_settings(args.policy, tasks, {"user": user, **overrides(args.set)})
    out = args.out or new_folder(Path("runs"), "eval")
    progress = bench_progress(len(tasks) * (args.samples + args.greedy), Console(stderr=True))
    attempts_by_arm: dict[str, list[Attempt]] = {}

    def on_attempt(arm: str, attempt: Attempt) -> None:
        progress(arm, attempt)
        attempts_by_arm.setdefault(arm, []).append(attempt)

    options = pick(args, "samples", "greedy", "arms", "backend", "workers", "planner")
    options |= {"price": _price(args.price), "planner_price": _price(args.planner_price, "--planner-price")}
    options["tools"] = getattr(environment, "tools", None)
    with open_reviewer(args.judge, args.backend) if args.judge else nullcontext() as reviewer:
        report = evaluate(args.policy, tasks, out, settings=settings, on_attempt=on_attempt, **options)
        if reviewer:
            review_evaluation(reviewer, out, report["arms"], tasks)
    suite_lines, tables = "", [quality_table(report)] if any(row["quality"] for row in report["arms"].values()) else []
    if args.suite:
        for arm, attempts in attempts_by_arm.items():
            report["arms"][arm]["suite"] = row = judged(attempts, settings.seed)
            suite_lines += f"\n{args.suite}, {arm}: {row['passed']} passed {row['ci95']}"
            suite_lines += f"; {row['became']}, {row['lost']} lost"
    if args.judge.startswith("openai:"):
        endpoint = open_endpoint(args.judge.removeprefix("openai:"), 0.0)
        for arm, attempts in attempts_by_arm.items():
            rubrics = RubricJudge(endpoint=endpoint, folder=out / "judged", within_s=300.0, answer_tokens=4096)
            sampled_attempts = attempts[: len(tasks) * args.samples]  # greedy ones come last
            report["arms"][arm]["rubrics"] = rubric_levels(rubrics, sampled_attempts)
        tables.append(_rubric_table(report["arms"]))
    if reward := getattr(environment, "reward", None):
        for arm, attempts in attempts_by_arm.items():
            report["arms"][arm] |= (row := reward_figures(attempts[: len(tasks) * args.samples], reward, settings.seed))
            suite_lines += "".join(f"\n{arm}, {name}: {value}" for name, value in row.items())
    if args.suite or args.judge or reward:
        write_json(out / "report.json", report)
    _write_pictures(report, tasks, out)
    emit(args, report, lambda: (bench_table(report), *tables, f"{suite_lines}\nkept: {out}"))
    require_attempts(report, out)
    return 0


def _write_pictures(report: Mapping[str, Any], tasks: Sequence[Task], out: Path) -> None:
    """Write score against cost, the sizes of the tasks, and what plans are worth if there are any, into `out`."""
    from composer_nb.harness.files import write_atomic
    from composer_nb.views.agent import pareto, plan_worth, sizes

    write_atomic(out / "pareto.png", pareto({report["policy"]: report}).png())
    write_atomic(out / "sizes.png", sizes(tasks).png())
    if "planned" in report["arms"]:
        write_atomic(out / "plan.png", plan_worth(report).png())


@command(
    "humaneval",
    arg("--policy DIR|openai:URL[#MODEL]", "policy to score", required=True),
    arg("--form", "raw: it continues the prompt; chat: it writes the whole function", "raw", choices=["raw", "chat"]),
    arg("--samples K", "answers per problem", 1),
    arg("--temperature T", "sampling temperature; 0 takes the most probable token", 0.0),
    arg("--tokens N", "maximum tokens of an answer", 512),
    arg("--out DIR", "folder for answers; the same folder resumes (runs/humaneval-…)", type=Path),
    arg("--backend NAME", "sandbox in which answers are graded", "bwrap"),
    arg("--workers N", "answers at a time", 16),
    arg("--seed N", "seed of the samples", 0),
    JSON,
    epilog=f"{KEY} `composer-nb tasks humaneval` writes the same problems as tasks for an agent.",
)
def humaneval(args: argparse.Namespace) -> int:
    """Score a policy on HumanEval by plain completion: pass@k, comparable with published scores."""
    from rich.progress import Progress

    from composer_nb.harness.sandbox import open_backend
    from composer_nb.labs.humaneval import evaluate_humaneval, read_problems
    from composer_nb.production.agents import new_folder

    if min(args.samples, args.tokens, args.workers) < 1 or not 0 <= args.temperature < float("inf"):
        raise ValueError("--samples, --tokens and --workers must be at least 1, --temperature at least 0")
    problems, out = read_problems(), args.out or new_folder(Path("runs"), "humaneval")
    options = pick(args, "form", "samples", "temperature", "tokens", "workers", "seed")
    with open_backend(args.backend) as backend, Progress(console=console()) as progress:
        task = progress.add_task("answers", total=len(problems) * args.samples)
        options["on_answer"] = partial(progress.advance, task)
        report = evaluate_humaneval(args.policy, problems, out, backend, **options)
    scores = [name for name in report if name.startswith("pass_at_")]
    intervals = ["({:.3f} to {:.3f})".format(*report[name.replace("pass", "ci95")]) for name in scores]
    lines = [f"pass@{name[8:]} {report[name]:.3f} {text}" for name, text in zip(scores, intervals, strict=True)]
    how = f"HumanEval, {args.form}, temperature {args.temperature:g}, {args.samples} answers per problem"
    lost = f", {report['lost']} answers lost" if report["lost"] else ""
    scores_line = ", ".join(lines) or "no score"
    return emit(args, report, lambda: f"{how}: {scores_line}{lost}\nkept: {out}", int(bool(report["lost"])))


def _rubric_table(arms: Mapping[str, Any]) -> Table:
    """Return a table of the mean levels, beside the share solved, and the number of verdicts that are missing."""
    rows, names = list[tuple[str, ...]](), next(iter(arms.values()))["rubrics"]
    for arm, row in arms.items():
        judged = list(row["rubrics"].values())
        levels = [(row.get("pass_at_1"), row["n_tasks"]), *((rubric["level"], rubric["n"]) for rubric in judged)]
        cells = ("–" if level is None else f"{level:.3f} (n={n})" for level, n in levels)
        rows.append((arm, *cells, str(sum(rubric["failed"] for rubric in judged))))
    return text_table(rows, ("tools", "pass@1", *names, "no verdict"))


def _price(text: str, option: str = "--price") -> tuple[float, float] | None:
    """Return two prices. Raises ValueError."""
    try:
        read_price, written_price = map(float, text.split(",")) if text else (0.0, 0.0)
    except ValueError:
        read_price = written_price = -1.0
    if not (read_price >= 0 and written_price >= 0):
        raise ValueError(f"{option} {text}: give dollars per million tokens read and written, as 0.5,2.5")
    return (read_price, written_price) if text else None


@command(
    "agent",
    arg("path PATH", "the repository", type=Path),
    arg("instruction", 'as "fix the failing date parser"'),
    arg("--policy DIR|openai:URL[#MODEL]|scripted:FILE.json", "the policy to use", required=True),
    arg("--backend NAME", "sandbox to work in", "bwrap"),
    arg("--image NAME", "Docker image with the repository's dependencies (--backend docker)", ""),
    arg("--packages FOLDER", "installed packages that the repository needs, from pip install --target", type=Path),
    arg("--out DIR", "new folder for the result (runs/agent-…)", type=Path),
    arg("--verdict", "later: see composer-nb verdict", "ask", choices=["ask", "accept", "reject", "later"]),
    arg("--seconds S", "time limit", 1800.0),
    arg("--temperature T", "sampling temperature", 1.0),
    arg("--planner POLICY", "a policy that writes a plan first, which you may edit before the work starts", ""),
    arg("--planner-price READ,WRITTEN", "dollars per million tokens of the planner", ""),
    arg("--plan FILE", "a plan to work by, as one that --planner wrote and you edited", type=Path),
    arg("--plan-only", "stop after the plan"),
    arg("--answer", "answer the agent's questions on the terminal"),
    epilog=KEY,
)
def agent(args: argparse.Namespace) -> int:
    """Let an agent work on a copy of your repository; you accept or reject the result."""
    from composer_nb.production.agents import new_folder, run_agent
    from composer_nb.production.policies import equipment
    from composer_nb.production.show import answerer, decide, teller
    from composer_nb.production.work import read_plan

    screen = console()
    inside = Path.cwd().resolve().is_relative_to(args.path.resolve())  # the result is no part of the repository
    out = args.out or new_folder(args.path / ".composer_nb" if inside else Path("runs"), "agent")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature:g}: must be 0 or more")
    limits = replace(equipment(args.policy)[1], seconds=args.seconds)
    options = pick(args, "backend", "image", "packages", "temperature")
    options |= {"user": answerer(screen)} if args.answer else {}
    if (args.planner and args.plan) or ((args.plan_only or args.planner_price) and not args.planner):
        raise ValueError("agent: use either --planner or --plan FILE; --plan-only and --planner-price with --planner")
    plan = read_plan(args.plan) if args.plan else None
    if args.planner and (plan := _plan(args, out, screen)) is None:
        return int(not args.plan_only)
    work = run_agent(
        args.path, args.instruction, args.policy, out, limits=limits, on_event=teller(screen), plan=plan, **options
    )
    return decide(work, args.verdict, screen)


def _plan(args: argparse.Namespace, out: Path, screen: Console) -> TaskPlan | None:
    """Have the planner write a plan and the user review it. Return None if no work is to start now."""
    from composer_nb.production.agents import write_plan
    from composer_nb.production.show import review
    from composer_nb.production.work import PLAN, read_plan

    price = _price(args.planner_price, "--planner-price")
    options: dict[str, Any] = {"price": price, **pick(args, "temperature", "seconds")}
    plan = write_plan(args.path, args.instruction, args.planner, out, **options)
    cost = "" if plan.dollars is None else f", ${plan.dollars:.4f}"
    read = f"{len(plan.files)} of {len(plan.files) + plan.left_out} files"
    say = partial(screen.print, markup=False, soft_wrap=True)
    say(f"plan of {args.planner}, which saw {read}: {plan.read} tokens read, {plan.written} written{cost}", style="dim")
    if plan.flawed:
        say("it was cut off, or has calls of tools, which are not carried out", style="red")
    say(f"kept: {out / PLAN}; go on with the same command and --plan {out / PLAN} in place of --planner", style="dim")
    starts = review(out / PLAN, screen, ask=sys.stdin.isatty() and not args.plan_only)
    return read_plan(out / PLAN) if starts and not args.plan_only else None


@command(
    "verdict",
    arg("path FOLDER", "folder of the result, as runs/agent-…", type=Path),
    arg("verdict", choices=["accept", "reject"]),
    arg("--repository PATH", "the repository to change, if it is not the current folder", type=Path),
    JSON,
)
def verdict(args: argparse.Namespace) -> int:
    """Accept or reject the result of an agent later."""
    from composer_nb.production.work import give_verdict

    verdict: Literal["accepted", "rejected"] = "accepted" if args.verdict == "accept" else "rejected"
    root, count = give_verdict(args.path, verdict, args.repository)
    line = f"accepted: {count} files changed in {root}" if count else "rejected: nothing was changed"
    return emit(args, {"changed_files": count, "folder": str(root)}, lambda: line)


@command(
    "serve",
    arg("--model DIR", "checkpoint to serve", type=Path),
    arg("--policy scripted:FILE.json", "script to serve"),
    arg("--follow STORE", "store of weight versions of this model; the newest answers", ""),
    arg("--record RUN", "folder that keeps every conversation as a rollout", type=Path),
    arg("--canary SHARE", "share of users who get a new version first; their verdicts decide whether all do", 0.0),
    arg("--verdicts N", "verdicts on a new version at which --canary decides at the latest", 200),
    arg("--slots N", "conversations held at a time", SLOTS),
    arg("--replicas N", "Ray actors that share them, each with the model in its own memory", 1),
    arg("--ray ADDRESS", "cluster of the replicas: a head's folder (composer-nb up) or HOST:PORT; else one here", ""),
    arg("--tokens N", "maximum tokens of one conversation", 32_768),
    arg("--step-tokens N", "maximum tokens of a step, at least --slots; a lower one lets others decode sooner", 512),
    arg("--numerics NAME", "arithmetic: float32, or int8, which reads a quarter of the memory", "float32"),
    arg("--queue N", "waiting requests; more get status 429", 64),
    arg("--temperature T", "temperature of requests that give none", 1.0),
    arg("--host NAME", "address to listen on", "127.0.0.1"),
    arg("--port N", "port to listen on; 0: any free port", 8000),
)
def serve(args: argparse.Namespace) -> int:
    """Serve a checkpoint or a script as an OpenAI-compatible server on this machine's loopback."""
    from composer_nb.harness.agent.scripts import read_script
    from composer_nb.production.canary import LEAST, open_canary
    from composer_nb.production.conversations import Conversations
    from composer_nb.production.policies import open_engine
    from composer_nb.production.record import RolloutRecord
    from composer_nb.production.replicas import open_replicas
    from composer_nb.production.serve import ChatServer, ScriptServer

    if (args.model is None) == (args.policy is None):
        raise ValueError("serve: give either --model DIR or --policy scripted:FILE.json")
    if (args.follow or args.record or args.replicas > 1 or args.ray) and not args.model:
        raise ValueError(
            "--follow, --record, --replicas and --ray need --model DIR, for the model's sizes and its tokenizer"
        )
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature:g}: must be 0 or more")
    if min(args.slots, args.tokens) < 1 or args.queue < 0 or args.step_tokens < args.slots:
        raise ValueError("--slots and --tokens must be above 0, --queue not below it, --step-tokens at least --slots")
    if not 1 <= args.replicas <= args.slots:
        raise ValueError(f"--replicas {args.replicas}: from 1 to --slots {args.slots}")
    if args.canary and not (0 < args.canary < 1 and args.verdicts >= LEAST and args.follow and args.record):
        needed = f"above 0 and below 1, with --follow STORE, --record RUN and --verdicts of at least {LEAST}"
        raise ValueError(f"--canary {args.canary:g}: {needed}")
    options_of_server = {**pick(args, "host", "slots", "queue"), "key": os.environ.get("COMPOSER_NB_KEY", "")}
    if args.policy:
        kind, _, name = args.policy.partition(":")
        if kind != "scripted" or not name.endswith(".json"):
            raise ValueError(f"--policy {args.policy}: give scripted:FILE.json, or a checkpoint as --model DIR")
        return _listen(ScriptServer(read_script(Path(name)), args.port, **options_of_server))
    options = pick(args, "slots", "tokens", "temperature", "follow", "step_tokens", "numerics")
    engine_context: AbstractContextManager[OpenEngine[Any]]
    if args.canary:
        canary_options = {"share": args.canary, "verdicts": args.verdicts, "run": args.record, "ray": args.ray}
        engine_context = open_canary(args.model, args.replicas, **canary_options, **options)
    elif args.replicas > 1 or args.ray:
        engine_context = open_replicas(args.model, args.replicas, ray=args.ray, **options)
    else:
        engine_context = open_engine(args.model, **options)
    with engine_context as engine:
        service, judged = engine.shared, getattr(engine.shared, "judged", None)
        record = RolloutRecord(args.record, engine.tokenizer, judged) if args.record else None
        conversations = Conversations(service, engine.tokenizer, engine.format, engine.tokens, record, args.temperature)
        options_of_server |= {
            "version": lambda: service.version,
            "grade": conversations.grade,
            "health": getattr(service, "health", dict),
        }
        options_of_server |= {"trained": engine.training, "context": engine.tokens}
        try:
            return _listen(ChatServer(conversations, args.port, args.model.resolve().name, **options_of_server))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what was recorded is stored in any case
                signal.signal(number, signal.SIG_IGN)
            conversations.close()


def _listen(server: ChatServer) -> int:
    """Serve until Ctrl-C or another signal to end, then answer what is under way."""
    with server:
        print(server.url, flush=True)
        if server.key:
            print(f"its key, also as COMPOSER_NB_KEY: {server.key}", file=sys.stderr, flush=True)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
                signal.signal(number, signal.default_int_handler)
        try:
            server.wait()
        except KeyboardInterrupt:
            server.drain()
            raise
    return 0
