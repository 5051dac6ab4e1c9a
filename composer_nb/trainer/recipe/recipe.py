"""The recipe, from random weights or a checkpoint to a policy that repairs code: a sequence of resumable stages.

    tokenizer → data → midtrain (→ extend) → sft → evaluate (base, midtrained, start) → rl → evaluate (final) → mismatch

Every rank runs this program. A finished stage is recorded in `run.db` and skipped the next time. Mid-training, fine-tuning and RL
also resume from their last checkpoint, with the same numbers as an uninterrupted run. A stage of no steps is left out: its
initial weights are published under its name as well.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.harness.agent.chat import User
from composer_nb.harness.bench import bootstrap
from composer_nb.harness.policy import Request
from composer_nb.trainer.drafts import FILE, Joint, add_draft
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.headroom import refusal
from composer_nb.trainer.learning.data import (
    CODE_ROW,
    TokenRow,
    code_rows,
    deal,
    mixture,
    mixture_code,
    read_corpus,
    save_rows,
)
from composer_nb.trainer.learning.infill import with_gaps
from composer_nb.trainer.learning.optimizer import trapezoid
from composer_nb.trainer.learning.supervised import StagePlan, cross_entropy, supervise
from composer_nb.trainer.models.companions import for_format
from composer_nb.trainer.models.induction import can_plant, plant_induction
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.evaluate import compare_numerics, evaluate, evaluate_model
from composer_nb.trainer.recipe.prepare import make_data, make_tokenizer
from composer_nb.trainer.recipe.reinforce import reinforcement
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.settings import ExtendSettings, MidtrainSettings


def run_recipe(s: Stages) -> None:
    """Run all stages in order."""
    make_tokenizer(s)
    make_data(s)
    midtrain(s)
    if s.settings.until == "midtrain":
        return
    if s.settings.extend.steps:
        extend(s)
    fine_tune(s)
    if s.settings.until == "sft":
        return
    for name in ("base", "midtrained", "start"):
        evaluate(s, name)
    if s.settings.control_steps:
        control(s)
        evaluate(s, "control")
        return
    if s.settings.rl.gate and s.ranks.gather(refusal(s.run) if s.ranks.first else "")[0]:
        return  # the launcher says why
    if s.settings.services.on and s.run.finished("rl") is None:
        return  # the services run RL; then the ranks start again for the rest
    reinforcement(s)
    evaluate(s, "final")
    compare_numerics(s)
    if s.settings.midtrain.draft_steps and s.ranks.first:  # a head of other weights drafts, too: drafts are checked
        shutil.copytree(s.weights("midtrained") / FILE.parent, s.weights("final") / FILE.parent, dirs_exist_ok=True)


def _train(s: Stages, model: Model, plan: StagePlan, batches: Iterator[list[TokenRow]], info: dict[str, Any]) -> None:
    """Run a supervised stage from its last checkpoint on, with a new checkpoint at every look."""
    optimizer, start = s.optimizer(model, plan.weight_decay), time.perf_counter()
    begin, before = s.resume(plan, optimizer)
    for step, point in supervise(model, optimizer, batches, plan, s.ranks, begin):
        if s.ranks.first:
            s.run.log(plan.stage, step, point)
            shown = ", ".join(f"{k} {v:.3f}" for k, v in point.items() if v is not None and k != "tokens")
            s.say(f"{plan.stage} {step}/{plan.steps}: {shown}")
        s.commit(plan, optimizer, step, point, before + time.perf_counter() - start)
    info["seconds_before"] = before


def midtrain(s: Stages) -> None:
    """Train a checkpoint or random weights on code first, then on clean demonstrations with code mixed in."""
    with s.stage("midtrain") as info:
        if info is None:
            return
        m = s.settings.midtrain
        torch.manual_seed(s.settings.seed)
        if s.settings.model.start:
            model = s.trained(s.settings.model.folder)
        else:
            model = Model(replace(s.settings.model.architecture, vocab_size=s.tokenizer().get_vocab_size()))
            info["induction"] = s.settings.model.induction and can_plant(model.config)
            if info["induction"]:
                plant_induction(model, s.settings.seed)
            model = s.divided(model.to(s.settings.mesh.device))
            model.kernels = s.settings.kernels
        model.companions = for_format(model.companions, s.tokenizer(), s.settings.env.renderer)
        s.publish(model, "base")
        if not m.steps:
            s.publish_again("base", "midtrained")
            return
        watch, own = _watched(s), _own_text(s)
        if own:
            watch["heldout_own_loss"] = own[:HELD]
            info["own_loss_before"] = cross_entropy(model, own[:HELD], s.ranks)
        plan, ids = midtrain_plan(m, watch), [row.token_ids.tolist() for row in _shown(s)]
        if m.draft_weight:
            how: dict[str, Any] = {"steps": m.draft_steps, "weight": m.draft_weight, "seed": s.settings.seed}
            begin = min(round(m.constant * m.steps), m.steps - 1)
            plan = replace(plan, beside=Joint(model, ids, s.ranks, begin=begin, **how))
        _train(s, model, plan, _mixture(s, s.settings.seed, m, own=own[HELD:]), info)
        s.publish(model, "midtrained")
        if m.draft_steps and s.ranks.first:
            head = plan.beside.head if isinstance(plan.beside, Joint) else None
            seed, folder = s.settings.seed, s.weights("midtrained")
            model = s.load("midtrained") if s.settings.meshed else model
            info["draft_same"], _ = add_draft(model, ids, m.draft_steps, folder, seed=seed, head=head)


REHEARSED, HELD = 256, 32
"""Numbers of rows sampled from the checkpoint: at most this many to train on, and this many to measure a loss on."""


def _own_text(s: Stages) -> list[TokenRow]:
    """Return rows sampled from the initial checkpoint, each after the token that begins a conversation; none without
    rehearsal. Each rank samples its part, once."""
    m, path = s.settings.midtrain, s.run.path / "data" / f"own-{s.ranks.rank:02d}.npz"
    if not m.rehearsal:
        return []
    if not path.is_file():
        wanted = m.rehearsal * mixture_code(m.steps, m.tokens, m.code_first, m.code_share)
        numbers = range(HELD + min(REHEARSED, math.ceil(wanted)))[s.ranks.rank :: s.ranks.world]
        begin = s.agent().renderer.read([User(text="")])[:1]
        slots = min(s.settings.engine.slots, len(numbers))
        engine = Engine(s.load("base"), stop=frozenset(), slots=slots, max_length=CODE_ROW, seed=s.settings.seed)
        rows = list[TokenRow]()
        for at in range(0, len(numbers), slots):
            asked = [Request(rollout=n, token_ids=begin, max_tokens=CODE_ROW - 1) for n in numbers[at : at + slots]]
            for one in engine.generate(asked):
                rows.append(TokenRow(np.array([*begin, *one.token_ids], np.int32), np.ones(CODE_ROW, np.float32)))
                engine.release(one.rollout)
        save_rows(rows, path)
    s.ranks.barrier()
    return s.rows("own")


def midtrain_plan(m: MidtrainSettings, watch: Mapping[str, Sequence[TokenRow]]) -> StagePlan:
    """Return the schedule of mid-training. `watch` maps the name of each reported loss to its rows."""
    return StagePlan(
        stage="midtrain",
        steps=m.steps,
        lr=lambda step: m.lr * trapezoid(step, m.steps, m.warmup, m.constant),
        balance=m.balance,
        clip=m.clip,
        weight_decay=m.weight_decay,
        watch=watch,
    )


def _watched(s: Stages) -> dict[str, list[TokenRow]]:
    corpus = read_corpus(s.settings.data.code)
    code = code_rows(corpus.validation, s.tokenizer(), 1.0, limit=48)
    return {"heldout_agent_loss": s.rows("tune")[:64], "heldout_code_loss": code}


def _mixture(
    s: Stages, seed: int, part: MidtrainSettings | ExtendSettings, length: int = CODE_ROW, own: Sequence[TokenRow] = ()
) -> Iterator[list[TokenRow]]:
    steps, tokens, code_share = part.steps, part.tokens, part.code_share
    code_first = part.code_first if isinstance(part, MidtrainSettings) else 0.0
    texts = list(read_corpus(s.settings.data.code).train)
    Random(f"code {seed}").shuffle(texts)
    wanted = mixture_code(steps, tokens, code_first, code_share, length)
    code = code_rows(texts, s.tokenizer(), s.settings.midtrain.code_weight, limit=wanted, length=length)
    code = with_gaps(code, s.tokenizer(), s.settings.midtrain.infill, seed)
    for place in range(round(len(code) * s.settings.midtrain.rehearsal) if own else 0):
        code[place] = replace(code[place], token_ids=own[place % len(own)].token_ids)
    Random(f"code rows {seed}").shuffle(code)  # neighbours come from one file; a long table would fill many batches
    return mixture(code, _shown(s), steps=steps, tokens=tokens, code_first=code_first, code_share=code_share, seed=seed)


def _shown(s: Stages) -> list[TokenRow]:
    """Return the demonstrations of mid-training. Those with search are included, because fine-tuning is too short to learn it."""
    return s.rows("clean") + (s.rows("mistaken") if s.settings.searched else [])


def extend(s: Stages) -> None:
    """Run the long-context phase (Composer 2, arXiv 2603.24477 §3.1; YaRN, arXiv 2309.00071 §3.4): train the mid-trained weights
    on stretched positions and rows of code that fill them. Record the loss on held-out rows of that length before training, in
    nats per token: `plain`, with positions simply continued, and `stretched`."""
    with s.stage("extend") as info:
        if info is None:
            return
        e, trained = s.settings.extend, s.load("midtrained")
        config = trained.config.stretched(e.factor)
        length = config.max_position_embeddings
        heldout = code_rows(read_corpus(s.settings.data.code).validation, s.tokenizer(), 1.0, limit=12, length=length)
        if len(heldout) < s.ranks.world:
            raise ValueError(f"data.code={s.settings.data.code!r}: too little is held out for rows of {length} tokens")
        continued = replace(trained.config, max_position_embeddings=length)
        info["plain"] = cross_entropy(trained.on_positions(continued), heldout, s.ranks)
        model = s.divided(trained.on_positions(config))
        del trained  # a whole copy
        info["stretched"] = cross_entropy(model, heldout, s.ranks)
        plan = StagePlan(
            stage="extend",
            steps=e.steps,
            lr=lambda step: e.lr * trapezoid(step, e.steps, 0.05, 0.5, 0.1),
            balance=s.settings.midtrain.balance,
            clip=e.clip,
            watch={**_watched(s), "heldout_long_loss": heldout},
        )
        _train(s, model, plan, _mixture(s, s.settings.seed + 1, e, length), info)
        s.publish(model, "extended")


def fine_tune(s: Stages) -> None:
    """Fine-tune on demonstrations of an expert that makes mistakes. RL starts from the result."""
    with s.stage("sft") as info:
        if info is None:
            return
        if not s.settings.sft.steps:
            s.publish_again(_taught(s), "start")
            return
        _supervise_agent(s, "sft", s.rows("mistaken"), s.settings.sft.steps, info, "start")


def control(s: Stages) -> None:
    """Train the control that RL is compared with: on all demonstrations, from the end of mid-training."""
    with s.stage("control") as info:
        if info is not None:
            rows = [*s.rows("clean"), *s.rows("mistaken")]
            _supervise_agent(s, "control", rows, s.settings.control_steps, info, "control")


TRIES = 2
"""Attempts per tuning task when a factor of the logits is judged."""


def calibrate(s: Stages, model: Model, info: dict[str, Any]) -> None:
    """Multiply the logits of a policy by the factor in `sft.sharpness` with which sampling solves the most tuning tasks.

    A policy that imitates an expert who tries at random is as unsure as the expert. So RL and its control both start at their
    best, as far as the intervals (`sharpness_ci95`, over tasks) distinguish the factors."""
    if not s.settings.sft.sharpness:
        return
    tasks, gain = s.tasks("tune"), model.final_norm
    solved: dict[float, float] = {}
    info["sharpness_ci95"] = interval = dict[str, list[float]]()
    before = gain.detach().clone()
    for factor in s.settings.sft.sharpness:
        with torch.no_grad():
            gain.copy_(before * factor)
        passed = [one.grade.passed for one in evaluate_model(s, model, tasks, TRIES, 1.0)]
        by_task = np.array(passed, float).reshape(len(tasks), TRIES).mean(1)
        solved[factor], interval[str(factor)] = float(by_task.mean()), bootstrap(by_task, 0)
    best = max(solved, key=lambda factor: (solved[factor], -factor))
    with torch.no_grad():
        gain.copy_(before * best)
    info |= {"sharpness": best, "sharpness_solved": {str(factor): share for factor, share in solved.items()}}
    if s.ranks.first:
        found = ((factor, share, *interval[str(factor)]) for factor, share in solved.items())
        shown = [f"{factor:g} solves {share:.3f} ({low:.2f} to {high:.2f})" for factor, share, low, high in found]
        s.say(f"sharpness {best:g}: " + ", ".join(shown))


def _taught(s: Stages) -> str:
    return "extended" if s.settings.extend.steps else "midtrained"


def _supervise_agent(s: Stages, stage: str, rows: list[TokenRow], steps: int, info: dict[str, Any], name: str) -> None:
    """Train the policy of the mid-training or long-context phase on the tokens that the agent wrote in `rows`. Publish it as
    `name`, calibrated."""
    t = s.settings.sft
    model = s.trained(s.weights(_taught(s)))
    written = [TokenRow(row.token_ids, np.where(row.weight == 1.0, row.weight, 0.0)) for row in rows]
    dealt = deal(written, t.tokens, Random(f"{stage} {s.settings.seed}"))
    plan = StagePlan(
        stage=stage,
        steps=steps,
        lr=lambda step: t.lr * trapezoid(step, steps, 0.05, 0.05, 0.1),
        clip=t.clip,
        watch={"heldout_agent_loss": s.rows("tune")[:64]},
    )
    _train(s, model, plan, ([written[number] for number in numbers] for numbers in dealt), info)
    if s.settings.sft.sharpness and s.settings.meshed:  # engines need it whole
        s.publish(model, name)
        model = s.load(name)
    calibrate(s, model, info)
    s.publish(model, name)
