"""Learn from production: conversations that users judged make one large update, and a gate lets it pass or stops it.

    composer-nb serve --model DIR --follow STORE --record RUN     people use it; their verdicts come by POST
    composer-nb improve RUN --model DIR --gate TASKS --out NEW --store STORE

The update is on policy: a rollout that other weights sampled is counted and left out, as is one with a turn that its request had
drawn from another distribution (a temperature other than 1, top-p, top-k, min-p, schemas). A user's request has one rollout, so
the baseline of its reward is the mean of all such, and large batches make up for its noise. Rollouts whose verdicts name one task
are a group, as in RL. A broken call stays in its rollout as a negative example: Composer learnt to break calls at hard requests
while such rollouts were dropped. It also learnt to ask instead of to edit, so the gate looks at edits too
(https://cursor.com/blog/real-time-rl-for-composer).
"""

import copy
import hashlib
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.harness.agent.loop import LIMITS
from composer_nb.harness.bench import Course, behaviour, run_eval, scores
from composer_nb.harness.environment import Carried, EnvSettings, Sandboxes, make_agent
from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.production.bench import difference
from composer_nb.production.policies import trained_with
from composer_nb.production.record import served
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import NO_REPLAY, ReplaySettings, flatten, score
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.checkpoint import load_pretrained, published, save_pretrained, side_files
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.rl import Scored, score_groups, streams_of, to_streams
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver

LOG = logging.getLogger(__name__)
# Nats. A rollout whose log-probabilities differ by more, on average over its tokens, was sampled from other weights.
STALE = 0.05
# Loss of pass@1 on the gate's tasks that stops an update although chance could explain it.
MOST_LOST = 0.05
# Fall of the share of attempts that edit anything that stops an update.
FEWER_EDITS = 0.1
# Share of `rl.lr` at the last step of an update. The rate falls linearly, as in RL: weights that people use should not hold the
# noise of a high rate.
FALL = 0.05
OWNER, REPORT = "improve", "improve.json"


def improve(
    records: Sequence[Path],
    start: Path,
    out: Path,
    gate: Path,
    settings: Settings,
    *,
    store: str = "",
    samples: int = 2,
) -> dict[str, Any]:
    """Make one update of the checkpoint `start` from the judged rollouts of `records`, write it to `out/candidate`, and score
    both on the tasks of `gate`. If the gate lets it pass, publish it to `store`, if one is given, and point `out/weights` at it.

    Returns what `out/improve.json` holds: `rollouts` (`judged`, `stale`, `drawn_otherwise`, `trained`), `reward`, `train`, `gate`
    (`before`, `after`, `gain` with its 95 % interval over tasks, `stopped`: why, `tasks`, a hash of the gate's, and `first`, the
    figures of the checkpoint that a chain of updates with this gate began with), `version`.

    Raises FileNotFoundError and ValueError before anything is learnt for records without verdicts or of other weights only, for
    tasks that cannot be read, and for an `out` that is there; StoreError for a store that cannot be read.
    """
    if out.exists():
        raise ValueError(f"--out {out}: is there already; each update has a folder of its own")
    began, tasks, training = time.monotonic(), load_tasks(gate), trained_with(start)
    gate_digest = hashlib.sha256(repr([task.model_dump_json() for task in tasks]).encode()).hexdigest()
    first_figures = first_of(start, gate_digest)
    judged = [session for run in records for session in conversations(run) if session[1].grade.known]
    if len(judged) < 2:
        raise ValueError(f"{', '.join(map(str, records))}: {len(judged)} rollouts with a verdict; an update needs two")
    if store:  # better known now than after the update
        Publisher(store, owner=OWNER)
    model = load_pretrained(start)
    replay = settings.replay if model.config.moe_layers else NO_REPLAY
    plain = [session for session in judged if not any(turn.sampling for turn in session[1].rollout.turns)]
    fresh = [session for session in plain if gap(model, session[1], replay) <= STALE]
    if len(fresh) < 2:
        fit = f"{len(fresh)} of {len(plain)} have its log-probabilities"
        samplings = {turn.sampling for _, attempt in judged for turn in attempt.rollout.turns if turn.sampling}
        others = "; ".join(sorted(samplings)[:3])
        left = f"; {len(judged) - len(plain)} were drawn otherwise ({others})" if samplings else ""
        raise ValueError(f"--model {start}: did not sample these rollouts at temperature 1; {fit}{left}")
    groups = score_groups(grouped(fresh), settings.reward, settings.loss)
    LOG.info(f"scoring {start} on {len(tasks)} tasks")
    before = attempts_of(model, training, start, tasks, samples, settings)
    train_metrics = learn(model, groups, settings, replay)
    save_pretrained(model, out / "candidate", dtype=torch.bfloat16)
    LOG.info(f"scoring {out / 'candidate'}")
    after = attempts_of(model, training, start, tasks, samples, settings)
    gate_result = {"tasks": gate_digest, **judge(before, after, first_figures)}
    report: dict[str, Any] = {
        "rollouts": {"judged": len(judged), "stale": len(plain) - len(fresh), "trained": len(fresh)}
        | {"drawn_otherwise": len(judged) - len(plain)},
        "reward": float(np.mean([float(scored.reward.total or 0.0) for group in groups for scored in group])),
        "invalid_call_rate": behaviour([attempt for _, attempt in fresh])["invalid_call_rate"],
        "train": train_metrics,
        "gate": gate_result,
        "version": None,
        "seconds": time.monotonic() - began,
    }
    write_json(out / REPORT, report)  # before users get the update: the next gate needs it
    if store and not gate_result["stopped"]:
        report["version"] = publish(store, model)
        write_json(out / REPORT, report)
    if not gate_result["stopped"]:
        (out / "weights").symlink_to("candidate")
    return report


def gap(model: Model, attempt: Attempt, replay: ReplaySettings) -> float:
    """Return the mean difference between the recorded log-probabilities of a rollout's sampled tokens and the model's; infinite
    without tokens."""
    parts = []
    for stream in to_streams(attempt):
        batch = flatten([stream], replay)
        with torch.no_grad():
            logprob_S, _ = score(model, batch, batch.recorded)
        parts.append((logprob_S - batch.sampled_S).abs())
    gaps = torch.cat(parts) if parts else torch.zeros(0)
    return float(gaps.mean()) if len(gaps) else float("inf")


def conversations(run: Path) -> list[tuple[str, Attempt]]:
    """Return the served rollouts of a run, each with the name of its conversation, which may have been stored in several parts. A
    conversation whose verdict named no task is a task of its own, also beside other runs."""
    rollouts = []
    for stored, attempt in served(run).items():
        name = re.sub(r"\+\d+$", "", stored)
        run_name = f"{run.resolve()}/{name}"
        if attempt.task.id in (name, stored):
            attempt = replace(attempt, task=attempt.task.model_copy(update={"id": run_name}))
        rollouts.append((run_name, attempt))
    return rollouts


def grouped(judged: Sequence[tuple[str, Attempt]]) -> list[list[Attempt]]:
    """Return the rollouts of each task that several conversations had, and all others together."""
    by_task: dict[str, list[tuple[str, Attempt]]] = {}
    for name, attempt in judged:
        by_task.setdefault(attempt.task.id, []).append((name, attempt))
    several = [len({name for name, _ in members}) > 1 for members in by_task.values()]
    groups = [[attempt for _, attempt in members] for members in by_task.values()]
    alone = [attempt for group, many in zip(groups, several, strict=True) if not many for attempt in group]
    return [*(group for group, many in zip(groups, several, strict=True) if many), *([alone] if alone else ())]


def learn(model: Model, groups: list[list[Scored]], settings: Settings, replay: ReplaySettings) -> dict[str, float]:
    """Learn from scored rollouts in `rl.minibatches` steps, at a rate that falls from `rl.lr`. Return the learner's metrics."""
    rl = settings.rl
    optimizer = FlatOptimizer(model, settings.optimizer, published=torch.bfloat16)
    reference = copy.deepcopy(model) if settings.loss.beta else None
    return Learner(model, optimizer, settings.loss, reference, replay).learn(
        streams_of(groups, settings.loss),
        Ranks(),
        Random(f"improve {settings.seed}"),
        minibatches=rl.minibatches,
        denominator=float(sum(map(len, groups)) * (1 if settings.loss.length_norm else rl.tokens_per_rollout)),
        lr=rl.lr,
        clip=rl.clip,
        microbatch_tokens=rl.microbatch_tokens,
        final_lr_share=FALL,
    )


def attempts_of(
    model: Model, setup: Carried, path: Path, tasks: Sequence[Task], samples: int, settings: Settings
) -> list[Attempt]:
    """Return attempts at the tasks, in the environment that the checkpoint in `path` was trained in, drawn by the seed."""
    env = EnvSettings(tools=setup.tools, renderer=setup.renderer, summary=setup.summary, backend=settings.env.backend)
    with Sandboxes(env) as sandboxes:
        agent = make_agent(env, load_tokenizer(path, needed=()), setup.limits or LIMITS, sandboxes)
        stop, length = agent.renderer.stop, agent.limits.tokens
        engine = Engine(model, stop=stop, slots=settings.slots, max_length=length, seed=settings.seed)
        return list(run_eval(engine, agent, tasks, sandboxes, samples))


def first_of(start: Path, gate: str) -> dict[str, Any]:
    """Return the gate's figures of the checkpoint with which the updates that led to `start` began; empty if it is no update, or
    passed a gate of other tasks. Raises ValueError for a damaged report."""
    report_file = start.resolve().parent / REPORT
    try:
        gate_result: dict[str, Any] = json.loads(report_file.read_text())["gate"] if report_file.is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{report_file}: no report of an update ({error!r:.200}); move it or the weights") from None
    return gate_result.get("first") or {} if gate_result.get("tasks") == gate else {}


def judge(before: Sequence[Attempt], after: Sequence[Attempt], first: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compare attempts at the same tasks. `stopped` is the reason to keep the old weights; empty if there is none.

    `first`: figures of the checkpoint with which a chain of updates began. Losses that pass one by one are stopped when they add
    up."""
    gain_interval = difference(after, before)
    if not gain_interval:
        stopped = "no task of the gate has a grade before and after"
        return {"first": first, "before": None, "after": None, "gain": None, "ci95": None, "stopped": stopped}
    gain, low, high = gain_interval
    old, new = (_figures([attempt for attempt in attempts if attempt.grade.known]) for attempts in (before, after))
    stopped = ""
    if high < 0 or gain < -MOST_LOST:
        stopped = f"pass@1 falls by {-gain:.3f} ({-high:.3f} to {-low:.3f})"
    elif first and first["pass_at_1"] - new["pass_at_1"] > MOST_LOST:
        stopped = f"pass@1 is {new['pass_at_1']:.3f}, and was {first['pass_at_1']:.3f} before these updates"
    elif (most := max(old["edits"], (first or old)["edits"])) - new["edits"] > FEWER_EDITS:
        stopped = f"{new['edits']:.0%} of attempts edit something, {most:.0%} before"
    return {"first": first or old, "before": old, "after": new, "gain": gain, "ci95": [low, high], "stopped": stopped}


def _figures(attempts: Sequence[Attempt]) -> dict[str, Any]:
    rates = behaviour(attempts)
    by_task = scores(attempts, lambda attempt: attempt.task.id).values()
    return {
        "pass_at_1": float(np.mean([np.mean(rewards) for rewards in by_task])),
        "edits": float(np.mean([Course.of(attempt.rollout.turns).edited for attempt in attempts])),
        **{name: rates[name] for name in ("invalid_call_rate", "sampled_per_task")},
    }


def publish(store: str, model: Model) -> int:
    """Publish the weights as the store's next version, and return its number."""
    publisher = Publisher(store, owner=OWNER)
    publisher.publish(publisher.last + 1, published(model), side_files(model))
    return publisher.last


def revert(store: str, version: int) -> int:
    """Publish the weights of an earlier version again, as the newest, and return its number: whoever follows the store takes them
    at its next look. Raises WeightFault, StoreError."""
    fetched = Receiver(store, name=OWNER).fetch(version)
    publisher = Publisher(store, owner=OWNER)
    publisher.publish(publisher.last + 1, fetched.tensors, fetched.files)
    return publisher.last
