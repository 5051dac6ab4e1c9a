"""What `composer-nb eval` and `composer-nb tasks check` do, for programs that would rather call than parse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent import Agent, Limits
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.bench import run_eval, summarise
from composer_nb.harness.execute import CachedExecutor, Executor
from composer_nb.harness.expert import Script, ScriptedPolicy, expert
from composer_nb.harness.functions import parse_test_files
from composer_nb.harness.grade import Grade, grading
from composer_nb.harness.render import CompactRenderer
from composer_nb.harness.sandbox import BwrapSandboxes
from composer_nb.harness.task import Task, load_tasks

SCRIPTS = ("expert",)
LATER = ("openai", "vllm", "sglang")


def evaluate_policy(policy: str, tasks: Path, samples: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Scores `DIR` (a Hugging Face checkpoint with its tokenizer.json) or `scripted:expert` on the tasks in `tasks`.

    `settings` are dotted names: `limits.*`, `engine.slots` and `seed` matter here. Returns what `summarise` returns, with
    the policy's name and seed. Raises ValueError for other kinds of policy, FileNotFoundError where nothing is.
    """
    from composer_nb.config import Settings, override
    from composer_nb.trainer.ranks import set_up_process

    kind, colon, name = policy.partition(":")
    if colon and kind in LATER:
        raise ValueError(f"--policy {policy}: not supported yet; give a checkpoint directory or scripted:expert")
    chosen = override(Settings(), settings)
    set_up_process(chosen.seed)
    loaded = load_tasks(tasks)
    with BwrapSandboxes() as sandboxes:
        executor = CachedExecutor(sandboxes)
        if colon and kind == "scripted":
            sampled, greedy = _scripted(name, loaded, samples, chosen.seed, executor)
        else:
            sampled, greedy = _checkpoint(Path(policy), loaded, samples, chosen, executor)
    return {"policy": policy, "seed": chosen.seed, **summarise(sampled, greedy, chosen.seed)}


def _scripted(
    name: str, tasks: Sequence[Task], samples: int, seed: int, executor: Executor
) -> tuple[list[Attempt], list[Attempt]]:
    """A script has no tokenizer, so one is trained on the tasks at hand; nor does it run into limits on tokens."""
    from composer_nb.trainer.tokenizer import train_tokenizer

    if name not in SCRIPTS:
        raise ValueError(f"--policy scripted:{name}: no such script; there is scripted:{', scripted:'.join(SCRIPTS)}")
    texts = [f"{task.instruction}\n{text}" for task in tasks for text in task.files.values()]
    tokenizer: Tokenizer = train_tokenizer(texts, 1024)
    agent = Agent(CompactRenderer(tokenizer), limits=Limits(turn_tokens=1 << 16, tokens=1 << 20))

    def attempts(each: int) -> list[Attempt]:
        def script(rollout: int) -> Script:
            task = tasks[rollout // each]
            return expert(task, Random(f"expert {seed} {task.id} {rollout % each}"), 0.0)

        return list(run_eval(ScriptedPolicy(agent.renderer, script), agent, tasks, executor, each))

    return attempts(samples), attempts(1)


def _checkpoint(
    path: Path, tasks: Sequence[Task], samples: int, settings: Any, executor: Executor
) -> tuple[list[Attempt], list[Attempt]]:
    from composer_nb.trainer.checkpoint import load_pretrained
    from composer_nb.trainer.engine import Engine
    from composer_nb.trainer.tokenizer import load_tokenizer

    if not path.is_dir():
        raise FileNotFoundError(f"--policy {path}: no such checkpoint directory (or write scripted:expert)")
    model, renderer = load_pretrained(path), CompactRenderer(load_tokenizer(path))
    agent = Agent(renderer, limits=settings.limits)

    def attempts(each: int, temperature: float) -> list[Attempt]:
        engine = Engine(
            model,
            stop=renderer.stop,
            slots=settings.engine.slots,
            max_length=settings.limits.tokens,
            temperature=temperature,
            seed=settings.seed,
        )
        return list(run_eval(engine, agent, tasks, executor, each))

    return attempts(samples, 1.0), attempts(1, 0.0)


def check_tasks(tasks: Sequence[Task], sandboxes: Executor) -> list[dict[str, Any]]:
    """A row a task: what its solution and its start score, in two runs each of a fresh sandbox.

    `ok` when the solution scores 1, the start 0, and both tests' results were the same twice; `problem` says what is not.
    """
    rows = []
    for task in tasks:
        gold = [grade_files(task, task.files | task.solution, sandboxes) for _ in range(2)]
        none = [grade_files(task, task.files, sandboxes) for _ in range(2)]
        problem = _problem(task, gold, none)
        rows.append(
            {
                "id": task.id,
                "tests": len(parse_test_files(task.tests)),
                "gold": gold[0].passed,
                "none": none[0].passed,
                "repeatable": gold[0].tests == gold[1].tests and none[0].tests == none[1].tests,
                "ok": not problem,
                "problem": problem,
            }
        )
    return rows


def grade_files(task: Task, files: Mapping[str, str], sandboxes: Executor) -> Grade:
    """What the hidden tests say of `files`, in a fresh sandbox."""
    steps = grading(task, files)
    [outcomes] = sandboxes.run([next(steps)])
    try:
        steps.send(outcomes)
    except StopIteration as stop:
        grade: Grade = stop.value
        return grade
    raise AssertionError("grading asks for one execution")


def _problem(task: Task, gold: Sequence[Grade], none: Sequence[Grade]) -> str:
    if gold[0].tests != gold[1].tests or none[0].tests != none[1].tests:
        return "two runs gave different results"
    if not task.solution:
        return "has no solution"
    if not gold[0].passed:
        failed = [name for name, passed in gold[0].tests.items() if not passed]
        return f"the solution fails {len(failed)} tests, first {failed[0]}"
    return "passes before anything is changed" if none[0].passed else ""
