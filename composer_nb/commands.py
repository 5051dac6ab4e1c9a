"""What `composer-nb eval` does, for programs that would rather call than parse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.expert import Script, ScriptedPolicy, expert
from composer_nb.harness.agent.loop import complete
from composer_nb.harness.agent.tiny import Agent, Limits, play
from composer_nb.harness.attempt import Attempt, graded
from composer_nb.harness.bench import run_eval, summarise
from composer_nb.harness.sandbox.calls import CachedExecutor, Executor, SandboxExecutor
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.harness.tools.toolset import ToolSet

SCRIPTS = ("expert",)
LATER = ("vllm", "sglang")
ENDPOINT_ROLLOUTS = 8
"""Rollouts at a time against an endpoint."""


def evaluate_policy(policy: str, tasks: Path, samples: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Scores `DIR` (a Hugging Face checkpoint with its tokenizer.json), `scripted:expert` or `openai:URL[#MODEL]` on the tasks in
    `tasks`.

    `settings` are dotted names: `limits.*`, `engine.slots` and `seed` matter here. Returns what `summarise` returns, with
    the policy's name and seed. Raises ValueError for other kinds of policy, FileNotFoundError where nothing is.
    """
    from composer_nb.settings import Settings, override
    from composer_nb.trainer.learning.ranks import set_up_process

    kind, colon, name = policy.partition(":")
    if colon and kind in LATER:
        raise ValueError(
            f"--policy {policy}: not supported yet; give a checkpoint directory, scripted:expert or openai:URL"
        )
    chosen = override(Settings(), settings)
    set_up_process(chosen.seed)
    loaded = load_tasks(tasks)
    with SandboxExecutor() as sandboxes:
        executor = CachedExecutor(sandboxes)
        if colon and kind == "scripted":
            sampled, greedy = _scripted(name, loaded, samples, chosen.seed, executor)
        elif colon and kind == "openai":
            sampled, greedy = _endpoint(name, loaded, samples, executor)
        else:
            sampled, greedy = _checkpoint(Path(policy), loaded, samples, chosen, executor)
    return {"policy": policy, "seed": chosen.seed, **summarise(sampled, greedy, chosen.seed)}


def _scripted(
    name: str, tasks: Sequence[Task], samples: int, seed: int, executor: Executor
) -> tuple[list[Attempt], list[Attempt]]:
    if name not in SCRIPTS:
        raise ValueError(f"--policy scripted:{name}: no such script; there is scripted:{', scripted:'.join(SCRIPTS)}")
    agent = _textual(tasks)

    def attempts(each: int) -> list[Attempt]:
        def script(rollout: int) -> Script:
            task = tasks[rollout // each]
            return expert(task, Random(f"expert {seed} {task.id} {rollout % each}"), 0.0)

        return list(run_eval(ScriptedPolicy(agent.renderer, script), agent, tasks, executor, each))

    return attempts(samples), attempts(1)


def _textual(tasks: Sequence[Task]) -> Agent:
    """For what has no tokenizer: one is trained on the tasks at hand. Its tokens are counted, but no limit is set on them."""
    from composer_nb.trainer.models.tokenizer import train_tokenizer

    texts = [f"{task.instruction}\n{text}" for task in tasks for text in task.files.values()]
    tokenizer: Tokenizer = train_tokenizer(texts, 1024)
    return Agent(CompactRenderer(tokenizer), limits=Limits(turn_tokens=1 << 12, tokens=1 << 20))


def _endpoint(
    name: str, tasks: Sequence[Task], samples: int, executor: Executor
) -> tuple[list[Attempt], list[Attempt]]:
    from composer_nb.harness.agent.endpoint import EndpointSpeaker
    from composer_nb.policies import open_endpoint

    limits, tools = Limits(turn_tokens=1 << 12, tokens=1 << 20), ToolSet.tiny()

    def attempts(each: int, temperature: float) -> list[Attempt]:
        endpoint = open_endpoint(name, temperature)

        def one(task: Task) -> Attempt:
            speaker = EndpointSpeaker(endpoint, "", tools.schemas, limits, parallel=False)
            return complete(graded(task, play(task, speaker, tools, limits)), executor)

        with ThreadPoolExecutor(ENDPOINT_ROLLOUTS, thread_name_prefix="endpoint") as pool:
            return list(pool.map(one, [task for task in tasks for _ in range(each)]))

    return attempts(samples, 1.0), attempts(1, 0.0)


def _checkpoint(
    path: Path, tasks: Sequence[Task], samples: int, settings: Any, executor: Executor
) -> tuple[list[Attempt], list[Attempt]]:
    from composer_nb.trainer.engine import Engine
    from composer_nb.trainer.models.checkpoint import load_pretrained
    from composer_nb.trainer.models.tokenizer import load_tokenizer

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
