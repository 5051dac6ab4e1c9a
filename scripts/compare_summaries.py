#!/usr/bin/env python3
"""compare_summaries.py [--seeds N]: what a model's own summaries lose, after RL, against other ways to end a segment.

A tiny policy learns from a script to try five repairs, one of which is right, and only a test says which. Where a segment ends it
writes a summary of its own after a short query, or follows a long instruction; the script demonstrates both. Then RL with its own
summaries at the first trigger. Each way is scored before and after RL on tasks that nothing trained on. One thread; medians with
the least and the most of the seeds.
"""

from __future__ import annotations

import argparse
import re
import time
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from compare_behaviour import NONE, TOKENIZER, Arm, table, taught, trained

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.agent.summary import PROMPTED, SummarySettings
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.policy import Request
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.labs.horizons.seeker import Seeker
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import Row
from composer_nb.trainer.models.transformer import Model

PLACES = range(1, 6)
"""The numbers that are subtracted; one of them should be added."""
TRIGGERS = (110, 70)
TURNS = len(PLACES) + 1
"""Each place once, and the end: a place that is tried twice is one too many where the last place is right."""
TITLES = re.findall(r"^\d+\. [\w ]+", PROMPTED, re.M)
SOLVED: Arm = ({"solved": 1.0}, 0.0, NONE)


def lock(number: int) -> Task:
    """Return a task whose request does not say which sign is wrong, and whose tests say only yes or no."""
    right = Random(f"place {number}").choice(PLACES)
    terms = "".join(f" - {n}" for n in PLACES)
    line = f"def f(x):\n    return x{terms} == {2 - sum(PLACES) + 2 * right}\n"

    def tests(*values: int) -> str:
        return render_tests("f", "f", [((x,), x == 2) for x in values])

    return Task(
        id=f"lock-{number}",
        instruction="fix f.py: one sign",
        files={"f.py": line, "test_f.py": tests(2, 5)},
        tests={"test_hidden.py": tests(2, 11)},
        solution={"f.py": line.replace(f" - {right}", f" + {right}")},
        source_scope=("f.py",),
    )


class Trier(Seeker):
    """The script: tries places in an order of its own, and knows of earlier tries only what its context says."""

    def written(self, request: Request) -> list[int]:
        read = self._contexts.setdefault(request.rollout, [])
        read += request.token_ids
        context = self.renderer.tokenizer.decode(read, skip_special_tokens=False)
        kind = next((kind for kind, query in self._queries.items() if read[-len(query) :] == query), "")
        said = self.renderer.encoded([summary(context, kind), self.renderer.end]) if kind else None
        ids = (said or self.renderer.turn(next_try(context, request.rollout)))[: request.max_tokens]
        read += ids
        return ids


def tried(context: str) -> list[int]:
    """Return the places that a context says were tried, in calls or in a summary."""
    told = [int(n) for line in re.findall(r"tried ([\d ]+)", context) for n in line.split()]
    return list(dict.fromkeys([*told, *(int(n) for n in re.findall(r"<\|to\|>- (\d)<\|to\|>", context))]))


def next_try(context: str, rollout: int) -> Said:
    test, undo, finish = (ToolCall(name=name, arguments={}) for name in ("run_tests", "undo", "finish"))
    seen = re.findall(r"<\|out\|>(.*?)<\|end\|>", context, re.S)
    if (seen and seen[-1].startswith("pass")) or "\ndone" in context:
        return turn([finish])
    known, order = tried(context), list(PLACES)
    Random(rollout % 1_000_000).shuffle(order)  # the same in all segments of a rollout
    left = [n for n in order if n not in known]
    if not left:
        return turn([finish])
    sub = ToolCall(name="substitute", arguments={"path": "f.py", "old": f"- {left[0]}", "new": f"+ {left[0]}"})
    return turn([*([undo] if known else []), sub, test])


def summary(context: str, kind: str) -> str:
    """Return what was tried, or `done` if the tests pass; with all titles if the long instruction asked."""
    seen = re.findall(r"<\|out\|>(.*?)<\|end\|>", context, re.S)
    text = "done" if seen and seen[-1].startswith("pass") else "tried " + " ".join(map(str, tried(context)))
    if kind != "prompted":
        return text
    return "\n".join(f"{title}\n{text if n == 8 else 'none'}" for n, title in enumerate(TITLES, 1))


def agent_of(sandboxes: Sandboxes, **values: Any) -> Agent:
    settings = EnvSettings(summary=SummarySettings(tokens=200, **values))
    return make_agent(settings, TOKENIZER, Limits(turns=TURNS, turn_tokens=64, tokens=1800), sandboxes)


def ways(sandboxes: Sandboxes) -> dict[str, Agent]:
    found = {"one segment": agent_of(sandboxes)}
    for trigger in TRIGGERS:
        for kind in ("self", "prompted", "truncate"):
            found[f"{kind}, trigger {trigger}"] = agent_of(sandboxes, kind=kind, trigger=trigger)
    return found


def shown(agents: dict[str, Agent], sandboxes: Sandboxes, rng: Random, count: int = 60) -> list[Row]:
    """Return demonstrations of all ways but the cut, each segment a row."""
    rows = []
    for name, agent in agents.items():
        if name.startswith("truncate"):
            continue
        numbers = [rng.randrange(10**6) for _ in range(count)]
        jobs = [agent.attempt(lock(n), place) for place, n in enumerate(numbers)]
        for done in dict(drive(jobs, Trier(agent.renderer), sandboxes.functions)).values():
            assert done.grade.passed, f"{name}: the script fails"
            for segment in done.rollout.segments:
                rows.append(Row(segment.token_ids, np.where(segment.acted, 1.0, 0.02).astype(np.float32)))
    return rows


def figures(model: Model, agent: Agent, sandboxes: Sandboxes, seed: int, count: int = 96) -> dict[str, float]:
    engine = Engine(model, stop=agent.renderer.stop, slots=32, max_length=agent.limits.tokens, seed=999 + seed)
    jobs = [agent.attempt(lock(10**7 + n), n) for n in range(count)]
    done = list(dict(drive(jobs, engine, sandboxes.functions)).values())
    segments = [[segment for segment in each.rollout.segments] for each in done]
    return {
        "solved": float(np.mean([each.grade.passed for each in done])),
        "summary tokens": float(np.mean([sum(int((s.kind == Kind.SUMMARY).sum()) for s in each) for each in segments])),
        "reused": float(np.mean([sum(segment.reused for segment in each) for each in segments])),
        "segments": float(np.mean([len(each) for each in segments])),
    }


def compare(seeds: list[int], taught_steps: int = 300, steps: int = 40) -> str:
    found: dict[str, list[dict[str, float]]] = {}
    with Sandboxes() as sandboxes:
        agents = ways(sandboxes)
        for seed in seeds:
            start = taught(seed, taught_steps, partial(shown, agents, sandboxes), positions=2048)
            own = agents[f"self, trigger {TRIGGERS[0]}"]
            model, _ = trained(start, own, sandboxes, seed, SOLVED, steps, lock)
            for when, each in (("before RL", start), ("after RL", model)):
                whole = 0.0
                for name, agent in agents.items():
                    one = figures(each, agent, sandboxes, seed)
                    whole = one["solved"] if name == "one segment" else whole
                    one["error"] = whole - one["solved"]
                    found.setdefault(f"{when}: {name}", []).append(one)
                    print(f"seed {seed}, {when}: {name}: {one}", flush=True)
    return table(found, ("solved", "error", "summary tokens", "reused", "segments"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    print(compare(given.seeds))
    print(f"{time.process_time() - begun:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
