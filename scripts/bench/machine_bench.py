"""Measure this machine on the code that a run uses: `make bench`, or `python scripts/bench/machine_bench.py [--json]`.

One process, one torch thread, the tour's model at its default size with random weights. Speed does not depend on what the
weights are, but a rollout's length does: without a stop token every turn here runs into its limit, so the engine's rollouts
are the longest there are; scripted ones are as long as a good policy's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.harness.agent.chat import User
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import run_eval
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.policy import Request
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.functions import parse_test_files, request_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patch_check import plan_for
from composer_nb.labs.attacks.patch_target import TARGET
from composer_nb.tour.expert import ScriptedPolicy, expert
from composer_nb.tour.repairs import make_tasks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.ranks import set_up_process
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.settings import Settings
from scripts.bench import episode_bench, rates_bench, sandbox_bench

TASKS, EXECUTIONS, GRADES, PYTEST_GRADES = 48, 200, 100, 20


def measure(say: Callable[[str], None]) -> dict[str, Any]:
    """Every figure by name; takes a minute or two. `workspaces`: by backend, figures or why it does not work here."""
    threads = torch.get_num_threads()
    set_up_process(0)
    try:
        say("sandboxes …")
        with SandboxExecutor() as sandboxes:
            tasks = list(make_tasks("bench", TASKS, heldout=False, executor=CachedExecutor(sandboxes)))
            results: dict[str, Any] = sandbox_speed(sandboxes, tasks) | {"sandbox_mode": sandboxes.capabilities().mode}
        results["grade_cpu_ms"] = grade_cpu(tasks)
        say("harness and engine …")
        results |= engine_speed(tasks)
        say("training …")
        s = Settings()
        rates = rates_bench.measure(s.model.architecture, repeats=6, places=s.engine.slots, tokens=s.midtrain.tokens)
        results["training_tokens_per_s"] = rates.train.middle
        say("sandboxes with a workspace …")
        results["workspaces"] = dict(sandbox_bench.report())
        say("grades by pytest …")
        for name, figures in results["workspaces"].items():
            if not isinstance(figures, str):
                figures |= pytest_grades(name)
        say("episodes …")
        try:
            results["episode"] = episode_bench.measure()
        except (RuntimeError, SandboxUnavailable) as error:
            results["episode"] = str(error)
        return results | {"machine": platform.machine(), "torch": torch.__version__}
    finally:
        torch.set_num_threads(threads)


def sandbox_speed(sandboxes: Executor, tasks: list[Task]) -> dict[str, float]:
    """Milliseconds for one fresh sandbox that runs a task's hidden tests, one after another, and executions a second when
    they come all at once."""
    requests = [request_tests(task.files | task.solution, parse_test_files(task.tests)) for task in tasks]
    several = list(itertools.islice(itertools.cycle(requests), EXECUTIONS))
    sandboxes.run(several[:4])  # the first starts the fleet
    spent = []
    for request in several:
        start = time.perf_counter()
        sandboxes.run([request])
        spent.append((time.perf_counter() - start) * 1000)
    start = time.perf_counter()
    sandboxes.run(several)
    batch = time.perf_counter() - start
    p50, p95 = (float(x) for x in np.quantile(spent, [0.5, 0.95]))
    return {"sandbox_p50_ms": p50, "sandbox_p95_ms": p95, "sandbox_per_s": EXECUTIONS / batch}


def grade_cpu(tasks: list[Task]) -> float:
    """CPU milliseconds a grade, ours and the sandbox's: what a fleet used for many grades, less what one used for none."""

    def cpu(grades: int) -> float:
        start = _cpu_seconds()
        with SandboxExecutor() as sandboxes:
            for number in range(1 + grades):  # the first starts the fleet
                task = tasks[number % len(tasks)]
                grade(task, task.files | task.solution, sandboxes)
        return _cpu_seconds() - start

    return (cpu(GRADES) - cpu(0)) / GRADES * 1000


def pytest_grades(name: str) -> dict[str, float]:
    """Milliseconds that a grade by pytest (three runs of sixteen trivial tests, each in a sandbox of its own) takes beyond what
    the tests take."""
    solution = {path: text.encode() for path, text in (TARGET.files | TARGET.solution).items()}
    beyond = []
    with open_backend(name) as backend:
        plan = plan_for(TARGET, backend)
        for _ in range(1 + PYTEST_GRADES):
            result = grade_pytest(TARGET, solution, backend, plan)
            if not result.passed:
                raise RuntimeError(f"a right answer was graded {result.status} by {name}: {', '.join(result.flags)}")
            beyond.append(1e3 * (result.cost["wall_s"] - result.cost["tests_s"]))
    p50, p95 = (float(x) for x in np.quantile(beyond[1:], [0.5, 0.95]))  # the first makes what all have in common
    return {"grade_beyond_tests_ms_p50": p50, "grade_beyond_tests_ms_p95": p95}


def _cpu_seconds() -> float:
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def engine_speed(tasks: list[Task]) -> dict[str, float]:
    """Tokens a second of the engine at its default number of slots, and rollouts a second from prompt to grade, of random
    weights and of the scripted expert. Every execution is a real one here; a run remembers identical ones."""
    settings = Settings()
    corpus = [task.instruction + text for task in tasks for text in task.files.values()]
    renderer = CompactRenderer(train_tokenizer(corpus, settings.model.vocab_size))
    agent = Agent(renderer, limits=settings.limits)
    torch.manual_seed(0)
    model = Model(settings.model.architecture)

    def engine() -> Engine:
        return Engine(model, stop=frozenset(), slots=settings.engine.slots, max_length=settings.limits.tokens)

    slots, length = settings.engine.slots, 48
    texts = [renderer.read([User(text=tasks[n % TASKS].instruction)]) for n in range(slots)]
    prompts = [Request(rollout=n, token_ids=ids, max_tokens=length) for n, ids in enumerate(texts)]
    engine().generate(prompts[:2])  # compiles the attention
    with _clock() as spent:
        fast = engine()
        fast.generate(prompts)
    rates = {"engine_tokens_per_s": fast.sampled / spent[0], "engine_forwarded_per_s": fast.forwarded / spent[0]}
    with SandboxExecutor() as sandboxes:
        scripted = ScriptedPolicy(renderer, lambda n: expert(tasks[n], Random(n), 0.5), capacity=slots)
        for name, policy in (("scripted", scripted), ("engine", engine())):
            with _clock() as spent:
                attempts = list(run_eval(policy, agent, tasks[:24], sandboxes, 1))
            rates[f"{name}_rollouts_per_s"] = len(attempts) / spent[0]
    return rates


@contextmanager
def _clock() -> Iterator[list[float]]:
    spent: list[float] = []
    start = time.perf_counter()
    yield spent
    spent.append(time.perf_counter() - start)


def markdown(results: dict[str, Any]) -> str:
    """The figures as a table for a log or a README."""
    rows = [
        ("one sandbox, p50", f"{results['sandbox_p50_ms']:.1f} ms"),
        ("one sandbox, p95", f"{results['sandbox_p95_ms']:.1f} ms"),
        ("sandboxes in one batch", f"{results['sandbox_per_s']:.0f} a second"),
        ("CPU of one grade", f"{results['grade_cpu_ms']:.1f} ms"),
        ("engine, sampled", f"{results['engine_tokens_per_s']:,.0f} tokens a second"),
        ("training", f"{results['training_tokens_per_s']:,.0f} tokens a second"),
        ("rollouts of a script", f"{results['scripted_rollouts_per_s']:.1f} a second"),
        ("longest rollouts of the engine", f"{results['engine_rollouts_per_s']:.1f} a second"),
    ]
    note = f"One process, one torch thread, torch {results['torch']} on {results['machine']}, sandbox {results['sandbox_mode']}."
    for backend, figures in results["workspaces"].items():
        if isinstance(figures, str):
            rows.append((f"{backend}", f"not measured: {figures}"))
        else:
            rows += [(f"{backend}: {name}", f"{value:,.1f}") for name, value in figures.items()]
    episode = results["episode"]
    episode_text = f"episode: not measured: {episode}" if isinstance(episode, str) else episode_bench.markdown(episode)
    return "\n".join(
        ["| what | measured |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows), "", note, "", episode_text]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="measure this machine, in a minute or two")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = measure(lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(results, indent=1) if args.json else markdown(results))


if __name__ == "__main__":
    main()
