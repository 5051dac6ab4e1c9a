"""The recipe, from nothing to a policy that repairs code, as a sequence of stages that each resume.

    tokenizer → data → midtrain → sft → evaluate (base, midtrained, start) → rl → evaluate (final) → mismatch

Every rank runs this same program. A finished stage is noted in `run.db` and skipped the next time; mid-training, fine-tuning
and RL also resume from their last checkpoint, to the same numbers as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.trainer.data import Row, code_rows, deal, read_corpus
from composer_nb.trainer.evaluate import compare_numerics, evaluate
from composer_nb.trainer.model import Model
from composer_nb.trainer.optimizer import FlatAdamW, trapezoid
from composer_nb.trainer.prepare import make_data, make_tokenizer
from composer_nb.trainer.reinforce import reinforce
from composer_nb.trainer.stages import Stages
from composer_nb.trainer.supervised import cross_entropy, share, train_step


def run_recipe(s: Stages) -> None:
    """All stages, in order."""
    make_tokenizer(s)
    make_data(s)
    midtrain(s)
    fine_tune(s)
    for name in ("base", "midtrained", "start"):
        evaluate(s, name)
    if s.settings.control_steps:
        control(s)
        evaluate(s, "control")
        return
    if s.settings.services.on and s.run.finished("rl") is None:
        return  # the services take over, and the ranks come back for the rest
    reinforce(s)
    evaluate(s, "final")
    compare_numerics(s)


@dataclass(slots=True)
class _Supervised:
    """What differs between mid-training and fine-tuning."""

    stage: str
    steps: int
    lr: Callable[[int], float]
    batches: Iterator[list[Row]]
    balance: float
    clip: float
    weight_decay: float
    watch: dict[str, list[Row]]


def _train(s: Stages, model: Model, plan: _Supervised, info: dict[str, Any]) -> None:
    """The supervised loop, with ten looks and as many checkpoints. `plan.batches` yields whole batches, of which this rank
    takes its part."""
    optimizer = FlatAdamW(model, weight_decay=plan.weight_decay)
    begin = 0
    start, before = time.perf_counter(), 0.0
    if found := s.run.checkpoint(plan.stage):
        begin, state, before = found
        optimizer.load(state)
    watch_every = max(1, plan.steps // 10)
    recent: list[dict[str, float]] = []
    for step, rows in enumerate(plan.batches):
        if step == plan.steps:
            break
        if step < begin:
            continue
        mine = share(rows, range(len(rows)), s.ranks)
        metrics = train_step(model, mine, optimizer, s.ranks, lr=plan.lr(step), balance=plan.balance, clip=plan.clip)
        recent.append(metrics)
        last = step + 1 == plan.steps
        if (step + 1) % watch_every == 0 or last:
            point: dict[str, float | None] = {
                name: float(np.nanmean([m[name] for m in recent])) for name in ("loss", "grad_norm", "tokens")
            }
            agent_losses = [m["agent_loss"] for m in recent if m["agent_loss"] == m["agent_loss"]]
            point["agent_loss"] = float(np.mean(agent_losses)) if agent_losses else None
            point |= {name: cross_entropy(model, rows, s.ranks) for name, rows in plan.watch.items()}
            recent = []
            if s.ranks.first:
                s.run.log(plan.stage, step + 1, point)
                shown = ", ".join(f"{k} {v:.3f}" for k, v in point.items() if v is not None and k != "tokens")
                s.say(f"{plan.stage} {step + 1}/{plan.steps}: {shown}")
                seconds = before + time.perf_counter() - start
                s.run.commit(plan.stage, step + 1, optimizer.state(), [(step + 1, point)], seconds=seconds)
    info["seconds_before"] = before


def midtrain(s: Stages) -> None:
    """Continued training from random weights: code first, then clean demonstrations with code mixed in."""
    with s.stage("midtrain") as info:
        if info is None:
            return
        m = s.settings.midtrain
        torch.manual_seed(s.settings.seed)
        model = Model(replace(s.settings.model, vocab_size=s.tokenizer().get_vocab_size()))
        s.publish(model, "base")
        plan = _Supervised(
            stage="midtrain",
            steps=m.steps,
            lr=lambda step: m.lr * trapezoid(step, m.steps, m.warmup, m.constant),
            batches=_midtrain_batches(s),
            balance=m.balance,
            clip=m.clip,
            weight_decay=m.weight_decay,
            watch=_watched(s),
        )
        _train(s, model, plan, info)
        s.publish(model, "midtrained")


def _watched(s: Stages) -> dict[str, list[Row]]:
    corpus = read_corpus(s.settings.data.code)
    code = code_rows(corpus.validation, s.tokenizer(), 1.0, limit=48)
    return {"heldout_agent_loss": s.rows("tune")[:64], "heldout_code_loss": code}


def _midtrain_batches(s: Stages) -> Iterator[list[Row]]:
    m, seed = s.settings.midtrain, s.settings.seed
    texts = list(read_corpus(s.settings.data.code).train)
    Random(f"code {seed}").shuffle(texts)
    first = round(m.code_first * m.steps)
    wanted = m.tokens * (first + m.code_share * (m.steps - first)) / 256
    code = code_rows(texts, s.tokenizer(), m.code_weight, limit=int(wanted) + 8)
    Random(f"code rows {seed}").shuffle(code)  # neighbours are of one file; a long table would fill many batches
    demonstrations = s.rows("clean")
    only_code = deal(code, m.tokens, Random(f"rows {seed}"))
    mixed = deal(demonstrations, round(m.tokens * (1 - m.code_share)), Random(f"demonstrations {seed}"))
    used, debt = 0, 0.0
    for step in range(m.steps):
        if step < first:
            numbers = next(only_code)
            used += len(numbers)
            yield [code[number] for number in numbers]
            continue
        rows = [demonstrations[number] for number in next(mixed)]
        debt += m.tokens * m.code_share
        while debt >= 256:
            rows.append(code[used % len(code)])
            used, debt = used + 1, debt - 256
        yield rows


def fine_tune(s: Stages) -> None:
    """Fine-tuning on demonstrations of an expert that makes mistakes: what RL starts from."""
    with s.stage("sft") as info:
        if info is not None:
            _supervise_agent(s, "sft", s.rows("mistaken"), s.settings.sft.steps, info)
            s.publish(info.pop("model"), "start")


def control(s: Stages) -> None:
    """What RL is compared with: the same start as mid-training's end, more of the demonstrations instead of RL."""
    with s.stage("control") as info:
        if info is not None:
            rows = [*s.rows("clean"), *s.rows("mistaken")]
            _supervise_agent(s, "control", rows, s.settings.control_steps, info)
            s.publish(info.pop("model"), "control")


def _supervise_agent(s: Stages, stage: str, rows: list[Row], steps: int, info: dict[str, Any]) -> None:
    """Trains the mid-trained policy on what the agent wrote in `rows`; the model is left in `info`."""
    t = s.settings.sft
    model = s.load("midtrained")
    written = [Row(row.token_ids, np.where(row.weight == 1.0, row.weight, 0.0)) for row in rows]
    dealt = deal(written, t.tokens, Random(f"{stage} {s.settings.seed}"))
    plan = _Supervised(
        stage=stage,
        steps=steps,
        lr=lambda step: t.lr * trapezoid(step, steps, 0.05, 0.05, 0.1),
        batches=([written[number] for number in numbers] for numbers in dealt),
        balance=0.0,
        clip=t.clip,
        weight_decay=0.0,
        watch={"heldout_agent_loss": s.rows("tune")[:64]},
    )
    _train(s, model, plan, info)
    info["model"] = model
