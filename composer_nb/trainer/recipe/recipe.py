"""The recipe, from random weights or a checkpoint to a policy that repairs code: a sequence of resumable stages.

    tokenizer → data → midtrain (→ extend) → sft → evaluate (base, midtrained, start) → rl → evaluate (final) → mismatch

Every rank runs this program. A finished stage is recorded in `run.db` and skipped the next time. Mid-training, fine-tuning and RL
also resume from their last checkpoint, with the same numbers as an uninterrupted run. A stage of no steps is left out: its
initial weights are published under its name as well.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.harness.agent.chat import User
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent, Rater
from composer_nb.harness.bench import run_eval
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.judge import rater_of
from composer_nb.harness.policy import Policy, Request
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.task import Task
from composer_nb.production.fidelity import differences
from composer_nb.trainer.drafts import HeadTrainer, load_draft, new_head, rows_of, save_draft
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
    unmarked,
    with_gaps,
)
from composer_nb.trainer.learning.optimizer import trapezoid
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import release_memory
from composer_nb.trainer.learning.supervised import StagePlan, cross_entropy, supervise
from composer_nb.trainer.models.companions import for_format
from composer_nb.trainer.models.induction import can_plant, plant_induction
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import PAIRS, TOUR, as_engine, variant
from composer_nb.trainer.prompts import Order, prompt_order
from composer_nb.trainer.recipe.evaluate import calibrate, evaluate, evaluate_model
from composer_nb.trainer.recipe.finish import finish
from composer_nb.trainer.recipe.mismatch import measure_mismatch
from composer_nb.trainer.recipe.prepare import make_data, make_tokenizer
from composer_nb.trainer.recipe.stages import Stages, stage
from composer_nb.trainer.records.batches import batch_file, save_batch
from composer_nb.trainer.rl import Batch, Scored, reinforce, scores_line, time_is_up, tuning_scores
from composer_nb.trainer.services.services import hinter_of, learn_batch, make_learner, rehearsal_of
from composer_nb.trainer.settings import ExtendSettings, MidtrainSettings
from composer_nb.trainer.weights import delta_sizes


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
    if s.settings.rl.start_weight or s.settings.rl.sharpness != (1.0,):
        finish(s)
    evaluate(s, "final")
    if s.settings.midtrain.draft_steps:
        draft(s)
    compare_numerics(s)


def _train(s: Stages, model: Model, plan: StagePlan, batches: Iterator[list[TokenRow]], info: dict[str, Any]) -> None:
    """Run a supervised stage from its last checkpoint on, with a new checkpoint at every look."""
    model.recompute = s.settings.midtrain.recompute
    optimizer, start = s.optimizer(model, plan.weight_decay), time.perf_counter()
    begin, before = s.resume(plan, optimizer)
    for step, point in supervise(model, optimizer, batches, plan, s.ranks, begin):
        if s.ranks.first:
            s.run.log(plan.stage, step, point)
            figures = ", ".join(f"{k} {v:.3f}" for k, v in point.items() if v is not None and k != "tokens")
            s.say(f"{plan.stage} {step}/{plan.steps}: {figures}")
        s.commit(plan, optimizer, step, point, before + time.perf_counter() - start)
    info["seconds_before"] = before


@stage("midtrain")
def midtrain(s: Stages, info: dict[str, Any]) -> None:
    """Train a checkpoint or random weights on code first, then on clean demonstrations with code mixed in."""
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
    watch, own_rows = _watched(s), _own_text(s)
    if own_rows:
        watch["heldout_own_loss"] = own_rows[:HELD]
        info["own_loss_before"] = cross_entropy(model, own_rows[:HELD], s.ranks)
    begin = min(round(m.constant * m.steps), m.steps - 1)
    head = _head(s, model, "base", rows=_shown(s), steps=m.draft_steps, weight=m.draft_weight, begin=begin)
    plan = replace(midtrain_plan(m, watch), beside=head if m.draft_weight else None)
    _train(s, model, plan, _mixture(s, s.settings.seed, m, m.row_tokens, own_rows[HELD:]), info)
    s.publish(model, "midtrained")
    _save_head(s, head, model, "midtrained", info)


def _head(s: Stages, model: Model, before: str, **options: Any) -> HeadTrainer | None:
    """Return a trainer of the head of the weights `before`, else of an earlier phase, and of a new one for the base; None if the
    run has no drafts. Raises ValueError if a phase has no head to begin with."""
    if not s.settings.midtrain.draft_steps:
        return None
    heads = (load_draft(s.weights(name), model) for name in (before, "extended", "midtrained"))
    head = new_head(model, s.settings.seed) if before == "base" else next((head for head in heads if head), None)
    if head is None:
        raise ValueError(f"{s.run.path}: no phase has left a draft head: begin a new run with midtrain.draft_steps")
    return HeadTrainer(model, head, s.ranks, seed=s.settings.seed, **options)


def _save_head(s: Stages, trainer: HeadTrainer | None, model: Model, name: str, info: dict[str, Any]) -> None:
    """Write a head beside `model`, published as `name`, after its training on this model if it has not trained jointly. Record
    how often it guesses the model's most probable token on held-out demonstrations."""
    if trainer is None:
        return
    trainer.model = model
    if trainer.steps and not trainer.weight:
        trainer.distil()
    info["draft_same"] = trainer.agreement(s.rows("tune")[:64])
    if s.ranks.first:
        save_draft(trainer.head, s.weights(name))


@stage("draft")
def draft(s: Stages, info: dict[str, Any]) -> None:
    """Give the final policy the head that RL began with, after `rl.draft_steps` steps on the rollouts of RL."""
    model, steps = s.trained(s.weights("final")), s.settings.rl.draft_steps
    rows = rows_of(s.run.path, "rl_*.parquet") if steps else []
    _save_head(s, _head(s, model, "start", rows=rows, steps=steps), model, "final", info)


# Numbers of rows sampled from the checkpoint: at most this many to train on, and this many to measure a loss on.
REHEARSED, HELD = 256, 32


def _own_text(s: Stages) -> list[TokenRow]:
    """Return rows sampled from the initial checkpoint, each after the token that begins a conversation; none without
    rehearsal. Each rank samples its part, once."""
    m, path = s.settings.midtrain, s.run.path / "data" / f"own-{s.ranks.rank:02d}.npz"
    if not m.rehearsal:
        return []
    if not path.is_file():
        row_count = m.rehearsal * mixture_code(m.steps, m.tokens, m.code_first, m.code_share, m.row_tokens)
        numbers = range(HELD + min(REHEARSED, math.ceil(row_count)))[s.ranks.rank :: s.ranks.world]
        begin = s.agent().renderer.read([User(text="")])[:1]
        slots = min(s.settings.engine.slots, len(numbers))
        engine = Engine(s.load("base"), stop=frozenset(), slots=slots, max_length=m.row_tokens, seed=s.settings.seed)
        rows = list[TokenRow]()
        for at in range(0, len(numbers), slots):
            requests = [
                Request(rollout=n, token_ids=begin, max_tokens=m.row_tokens - 1) for n in numbers[at : at + slots]
            ]
            for completion in engine.generate(requests):
                ids = np.array([*begin, *completion.token_ids], np.int32)
                rows.append(TokenRow(ids, np.ones(m.row_tokens, np.float32)))
                engine.release(completion.rollout)
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
    length = s.settings.midtrain.row_tokens
    code = _held_out(s, 48 * CODE_ROW // length, length)
    return {"heldout_agent_loss": s.rows("tune")[:64], "heldout_code_loss": code}


def _held_out(s: Stages, count: int, length: int) -> list[TokenRow]:
    """Return about `count` rows of held-out code, at least one for each rank. Raises ValueError if there is too little code."""
    limit, code = max(s.ranks.world, count), read_corpus(s.settings.data.code).validation
    rows = code_rows(code, s.tokenizer(), 1.0, limit=limit, length=length)
    if len(rows) < s.ranks.world:
        raise ValueError(f"data.code={s.settings.data.code!r}: too little is held out for rows of {length} tokens")
    return rows


def _mixture(
    stages: Stages,
    seed: int,
    phase: MidtrainSettings | ExtendSettings,
    length: int,
    rehearsal_rows: Sequence[TokenRow] = (),
) -> Iterator[list[TokenRow]]:
    """Yield the batches of a phase: demonstrations mixed with rows of code of `length` tokens. The share `midtrain.rehearsal` of
    the code rows gets the tokens of `rehearsal_rows`, repeated as needed, and keeps its loss weights."""
    steps, step_tokens, code_share = phase.steps, phase.tokens, phase.code_share
    code_first = phase.code_first if isinstance(phase, MidtrainSettings) else 0.0
    texts = list(read_corpus(stages.settings.data.code).train)
    Random(f"code {seed}").shuffle(texts)
    row_count = mixture_code(steps, step_tokens, code_first, code_share, length)
    code_weight = unmarked(stages.settings.midtrain.code_weight)
    rows = code_rows(texts, stages.tokenizer(), code_weight, limit=row_count, length=length)
    rows = with_gaps(rows, stages.tokenizer(), stages.settings.midtrain.infill, seed)
    for index in range(round(len(rows) * stages.settings.midtrain.rehearsal) if rehearsal_rows else 0):
        rows[index] = replace(rows[index], token_ids=rehearsal_rows[index % len(rehearsal_rows)].token_ids)
    Random(f"code rows {seed}").shuffle(rows)  # neighbours come from one file; a long table would fill many batches
    return mixture(
        rows, _shown(stages), steps=steps, tokens=step_tokens, code_first=code_first, code_share=code_share, seed=seed
    )


def _shown(s: Stages) -> list[TokenRow]:
    """Return the demonstrations of mid-training. Those with search are included, because fine-tuning is too short to learn it."""
    return s.rows("clean") + (s.rows("mistaken") if s.settings.searched else [])


@stage("extend")
def extend(s: Stages, info: dict[str, Any]) -> None:
    """Run the long-context phase (Composer 2, arXiv 2603.24477 §3.1; YaRN, arXiv 2309.00071 §3.4): train the mid-trained weights
    on stretched positions and rows of code that fill them. Record the loss on held-out rows of that length before training, in
    nats per token: `plain`, with positions simply continued, and `stretched`."""
    e, trained = s.settings.extend, s.load("midtrained")
    config = trained.config.stretched(e.factor)
    length = config.max_position_embeddings
    heldout = _held_out(s, 12, length)
    continued = replace(trained.config, max_position_embeddings=length)
    info["plain"] = cross_entropy(trained.on_positions(continued), heldout, s.ranks)
    model = s.divided(trained.on_positions(config))
    del trained  # a whole copy
    info["stretched"] = cross_entropy(model, heldout, s.ranks)
    head = _head(s, model, "midtrained", weight=e.draft_weight)
    plan = StagePlan(
        stage="extend",
        steps=e.steps,
        lr=lambda step: e.lr * trapezoid(step, e.steps, 0.05, 0.5, 0.1),
        balance=s.settings.midtrain.balance,
        clip=e.clip,
        watch={**_watched(s), "heldout_long_loss": heldout},
        beside=head if e.draft_weight else None,
    )
    _train(s, model, plan, _mixture(s, s.settings.seed + 1, e, length), info)
    s.publish(model, "extended")
    _save_head(s, head, model, "extended", info)


@stage("sft")
def fine_tune(s: Stages, info: dict[str, Any]) -> None:
    """Fine-tune on demonstrations of an expert that makes mistakes. RL starts from the result."""
    if not s.settings.sft.steps:
        s.publish_again(_taught(s), "start")
        return
    _supervise_agent(s, "sft", s.rows("mistaken"), s.settings.sft.steps, info, "start")


@stage("control")
def control(s: Stages, info: dict[str, Any]) -> None:
    """Train the control that RL is compared with: on all demonstrations, from the end of mid-training."""
    rows = [*s.rows("clean"), *s.rows("mistaken")]
    _supervise_agent(s, "control", rows, s.settings.control_steps, info, "control")


def _taught(s: Stages) -> str:
    return "extended" if s.settings.extend.steps else "midtrained"


def _supervise_agent(s: Stages, stage: str, rows: list[TokenRow], steps: int, info: dict[str, Any], name: str) -> None:
    """Train the policy of the mid-training or long-context phase on the tokens that the agent wrote in `rows`. Publish it as
    `name`, calibrated."""
    t = s.settings.sft
    model = s.trained(s.weights(_taught(s)))
    written = [TokenRow(row.token_ids, np.where(row.weight == 1.0, row.weight, 0.0)) for row in rows]
    dealt = deal(written, t.tokens, Random(f"{stage} {s.settings.seed}"))
    head = _head(s, model, _taught(s), weight=t.draft_weight)
    plan = StagePlan(
        stage=stage,
        steps=steps,
        lr=lambda step: t.lr * trapezoid(step, steps, 0.05, 0.05, 0.1),
        clip=t.clip,
        watch={"heldout_agent_loss": s.rows("tune")[:64]},
        beside=head if t.draft_weight else None,
    )
    _train(s, model, plan, ([written[number] for number in numbers] for numbers in dealt), info)
    if s.settings.sft.sharpness and s.settings.meshed:  # engines need it whole
        s.publish(model, name)
        model = s.load(name)
    calibrate(s, model, s.settings.sft.sharpness, info)
    s.publish(model, name)
    _save_head(s, head, model, name, info)


@stage("numerics")
def compare_numerics(s: Stages, info: dict[str, Any]) -> None:
    """Measure on the final weights how engines with other numerics than the trainer's change log-probabilities, and how much of
    this the replay of their routes removes. The pairs of `variants` are dealt over the ranks; the tour's own comes first in the
    report. Also measure the size of a lossless delta between versions, and compare the sandboxes of training and product."""
    sparse = s.load("final").config.moe_layers > 0
    pairs = list(PAIRS) if sparse else ["bf16"]  # the others differ in experts and routers
    mine = {name: compare_pair(s, name) for name in pairs[s.ranks.rank :: s.ranks.world]}
    results = {name: result for part in s.ranks.gather(mine) for name, result in part.items()}
    if s.ranks.first:
        main_pair = TOUR if sparse else "bf16"
        info["replay"] = {**results.pop(main_pair), "pair": main_pair, "others": results}
        info["weights"] = delta_sizes(s.weights("before_final"), s.run.trained_weights)
        info["fidelity"] = compare_places(s)


def compare_places(s: Stages) -> dict[str, Any] | None:
    """Compare an agent's prompts and tool results in training with those in the product, byte by byte, on the first held-out task
    with its own sandbox; None if no task has one."""
    agent, tasks = s.agent(), s.tasks("heldout")
    task = next((task for task in tasks if task.grader != "functions" and not task.image), None)
    if agent.backend is None or task is None:
        return None
    try:
        calls, differing = differences(task, agent)
    except (SandboxFailure, SandboxDied, OSError, ValueError) as error:
        return {"task": task.id, "error": str(error)}
    names = dict.fromkeys(difference.what for difference in differing)
    s.say(f"training and product: differences in {calls} calls: {', '.join(names) or 'none'}")
    return {"task": task.id, "calls": calls, "differences": [difference.excerpt() for difference in differing]}


def compare_pair(s: Stages, name: str) -> dict[str, Any]:
    """Return the mismatch of one pair on the final weights, over two rollouts of each of the first 48 tuning tasks."""
    pair, model = PAIRS[name], s.load("final")
    engine = s.engine(variant(model, pair.engine), seed=s.settings.seed + 29)
    attempts = list(run_eval(engine, s.agent(), s.tasks("tune")[:48], s.sandboxes, 2))
    return measure_mismatch(variant(model, pair.trainer), attempts)


# RL without services: the loop of `rl.py` on the ranks, with each batch sampled from the newest weights


@stage("rl")
def reinforcement(s: Stages, info: dict[str, Any]) -> None:
    """Run reinforcement learning from `start`. Publish `final` and the version before it."""
    work = InProcess(s)
    reinforce(work)
    work.save(work.step)
    info |= {"seconds_before": work.before, "versions": work.version, "stopped_early": work.stopped_early}
    s.publish(work.learner.model, "final")


class InProcess:
    """The `Services` of one process, or of ranks that each sample a share of the batch and learn together."""

    def __init__(self, s: Stages) -> None:
        self.stages, self.settings, self.ranks, self.say = s, s.settings, s.ranks, s.say
        resumed = make_learner(s.weights("start"), s.settings, s.run.sharpness, s.run.checkpoint("rl"))
        self.learner, self.step, self.before = resumed
        self.hinter, self.rehearsal = hinter_of(s.run, s.settings), rehearsal_of(s.run, s.settings)
        self.rater = rater_of(s.settings.env, s.settings.reward, s.settings.limits.seconds)
        self.tasks = prompt_order(s.run.path, Order.of(s.settings))
        self._points: list[tuple[int, dict[str, Any]]] = []
        self._ledgers: list[tuple[int, dict[str, int]]] = []
        self._start = self._begin = time.perf_counter()
        self._lr = 0.0
        self.stopped_early = False

    @property
    def version(self) -> int:
        """Number of optimizer steps so far."""
        return self.step * self.settings.rl.minibatches

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._start

    def past(self) -> list[dict[str, Any]]:
        return self.stages.run.steps("rl")

    def next_batch(self) -> Batch | None:
        """Sample this rank's share of the next batch. Every rank stops at the same step."""
        s, rl = self.stages, self.settings.rl
        seconds = max(self.ranks.gather(self.seconds))
        if self.step < rl.steps and rl.max_seconds and seconds > rl.max_seconds:
            self.stopped_early = True
            self.say(time_is_up(rl.max_seconds, self.step, rl.steps))
        if self.step >= rl.steps or self.stopped_early:
            return None
        self._begin, self._lr = time.perf_counter(), rl.rate(self.step, seconds)
        release_memory()  # of the step before, which a large model has no room for beside an engine
        slots = range(self.step * rl.prompts, (self.step + 1) * rl.prompts)[self.ranks.rank :: self.ranks.world]
        sampler = as_engine(self.learner.model, self.settings.engine.numerics)
        engine = s.engine(sampler, seed=self.settings.sampling_seed, version=self.version)
        tasks = {slot: self.tasks[slot] for slot in slots}
        groups, lost = sample_groups(engine, s.agent(), tasks, rl.group, s.sandboxes, self.rater)
        return Batch(step=self.step, groups=groups, lost=lost)

    def store_batch(self, batch: Batch, groups: list[list[Scored]]) -> None:
        save_batch(batch_file(self.stages.run.path, batch.step, self.ranks.rank), groups)

    def learn(self, batch: Batch, streams: list[Stream]) -> dict[str, Any]:
        """Learn from the streams of all ranks. Return metrics, with the seconds of sampling, waiting and training."""
        sampled_s = time.perf_counter()
        streams = [stream for part in self.ranks.gather(streams) for stream in part]
        waited_s = time.perf_counter()
        release_memory()
        if streams or self.step == self.stages.run.forked_at_step:
            self.stages.publish(self.learner.model, "before_final")
        rehearsed = self.rehearsal(self.step)
        train_metrics = learn_batch(self.learner, streams, self.ranks, self.settings, self.step, self._lr, rehearsed)
        self.step += 1
        trained_s = time.perf_counter()
        clock = {"sample_s": sampled_s - self._begin, "wait_s": waited_s - sampled_s, "train_s": trained_s - waited_s}
        mean_times = {name: total / self.ranks.world for name, total in self.ranks.sums(clock).items()}
        return {**train_metrics, "version": self.version, "time": {"wall_s": trained_s - self._begin, **mean_times}}

    def evaluate(self, batch: Batch, metrics: dict[str, Any]) -> dict[str, float]:
        tasks, samples = self.stages.tasks("tune"), self.settings.eval.samples
        scores = tuning_scores(evaluate_model(self.stages, self.learner.model, tasks, samples, 1.0))
        self.say(scores_line(batch.step + 1, scores))
        return scores

    def record(self, batch: Batch, point: dict[str, Any], tokens: dict[str, int]) -> None:
        """Log the metrics; they become durable with the next checkpoint."""
        self._points.append((self.step, point))
        self._ledgers.append((self.step, tokens))
        if self.ranks.first:
            self.stages.run.log("rl", self.step, point)

    def save(self, step: int) -> None:
        if self.ranks.first and self._points:
            state = self.learner.optimizer.state()
            self.stages.run.commit("rl", step, state, self._points, self._ledgers, self.seconds)
        self._points, self._ledgers = [], []


# How often an attempt is dispatched before its loss to infrastructure faults stops the run.
TRIES = 3


def sample_groups(
    policy: Policy, agent: Agent, tasks: Mapping[int, Task], group: int, executor: Executor, rater: Rater | None = None
) -> tuple[Sequence[Sequence[Attempt]], int]:
    """Return `group` attempts at each task, and the number of attempts lost to infrastructure faults.

    `tasks` are keyed by their place in the order of the run's prompts, which numbers the rollouts and thus determines their
    draws. A lost attempt is dispatched again, up to `TRIES` times in all. Raises SandboxFailure after that, because a batch
    without the attempt would be biased.
    """
    order = [(slot * group + sample, task) for slot, task in tasks.items() for sample in range(group)]
    attempts: dict[int, Attempt] = {}
    lost = 0
    for _ in range(TRIES):
        missing = [number for number in range(len(order)) if number not in attempts]
        runs = (agent.attempt(order[number][1], order[number][0], rater=rater) for number in missing)
        results = [(missing[index], result) for index, result in drive(runs, policy, executor)]
        attempts |= {number: result for number, result in results if result.grade.known}
        faults = [result.grade.output or result.grade.status for _, result in results if not result.grade.known]
        lost += len(faults)
        if len(attempts) == len(order):
            return [[attempts[i] for i in range(at, at + group)] for at in range(0, len(order), group)], lost
    raise SandboxFailure(
        f"{len(order) - len(attempts)} attempts got no grade in {TRIES} tries, the last {faults[-1]!r}; run `composer-nb doctor`"
    )
