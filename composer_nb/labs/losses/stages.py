"""Stages of the loss bench, each a trainer beside a frozen batch: the weights that drew it, later ones, engines of other
numerics.

    own weights       a trainer that is the sampler, to the last bit
    as trained        the log-probabilities on record: what the run's own staleness came to
    n versions later  the sampler as above, the trainer n optimiser steps on, learnt from other stored batches
    RL step s         the oldest batch that is stored instead, drawn by the run so many versions before these weights
    bf16, int4-…      an engine of other numerics beside the trainer (`variants.PAIRS`), with its own numbers for these tokens

Nothing is sampled: an engine of other numerics would have drawn other tokens. The exact gradient knows who did draw them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from composer_nb.labs.losses.bench import Bench, bench, with_logprobs
from composer_nb.labs.retrace import retrace
from composer_nb.labs.rewards.rescore import StoredBatch, model_before, stored_batch
from composer_nb.settings import RlSettings
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings, advantages
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.replay_settings import FULL, NO_REPLAY, ReplaySettings
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import PAIRS, variant
from composer_nb.trainer.recipe.reader import stored_steps
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Scored, to_stream

Groups = list[list[Stream]]
VERSIONS = (1, 4, 16)
OWN, TRAINED = "own weights", "as trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A trainer beside a frozen batch."""

    name: str
    model: Model
    groups: Groups
    """Streams with the log-probabilities that the losses take for the sampler's."""
    drawn: Groups
    """Streams with those of the policy that drew them."""
    reference: Model
    """Reference of the KL rows."""
    replay: ReplaySettings = NO_REPLAY

    def bench(self, count: int = 2000) -> Bench:
        """Compare all published losses on it."""
        return bench(
            self.model, self.groups, drawn=self.drawn, reference=self.reference, replay=self.replay, count=count
        )


def stages(run: RunDir, step: int = -1, versions: Sequence[int] = VERSIONS) -> Iterator[Stage]:
    """Yield the batch of RL step `step` (from 1; −1 is the last) in each of the ways above. The KL's reference is the policy
    that RL began from, where the run keeps it, otherwise the weights themselves. Raises ValueError for a step whose rollouts or
    weights are not kept, and for `versions` without another stored batch to learn them from."""
    batch = stored_batch(run, step)
    model = model_before(run, batch.step)
    start = run.path / "weights" / "start"
    reference = model
    if start.is_dir():
        reference = load_pretrained(start)
        reference.kernels = model.kernels
    recorded = raw_streams(batch.groups)
    own = with_logprobs(model, recorded)

    yield Stage(name=OWN, model=model, groups=own, drawn=own, reference=reference)
    yield Stage(name=TRAINED, model=model, groups=recorded, drawn=recorded, reference=reference)
    others = sorted((s for s in stored_steps(run) if s != batch.step), key=lambda s: (abs(s - batch.step), s))
    if versions and not others:
        raise ValueError(f"{run.path.name} has the rollouts of one RL step only: no later versions can be learnt")
    nearest = [raw_streams(stored_batch(run, number).groups) for number in others[: max(versions, default=0)]]
    lessons = [with_logprobs(model, groups) for groups in nearest]
    for count in versions:
        aged = later(model, lessons, batch, count)
        name = f"{count} version{'s' if count > 1 else ''} later"
        yield Stage(name=name, model=aged, groups=own, drawn=own, reference=reference)
    oldest = min(others, default=batch.step)
    if oldest < batch.step:
        old = raw_streams(stored_batch(run, oldest).groups)
        yield Stage(name=f"RL step {oldest}", model=model, groups=old, drawn=old, reference=reference)
    for pair, (engine, trainer) in PAIRS.items():
        found = [retrace(variant(model, engine), [scored.attempt for scored in group]) for group in batch.groups]
        seen = raw_streams(
            [
                [replace(scored, attempt=done) for scored, done in zip(group, attempts, strict=True)]
                for group, attempts in zip(batch.groups, found, strict=True)
            ]
        )
        for replay in (NO_REPLAY, FULL):
            name = f"{pair}, replayed" if replay.on else pair
            made = variant(model, trainer)
            yield Stage(name=name, model=made, groups=seen, drawn=own, reference=reference, replay=replay)


def raw_streams(groups: Sequence[Sequence[Scored]]) -> Groups:
    """Return streams with A = R − mean(R), whatever the run divided that by."""
    made = []
    for group in groups:
        values = torch.tensor([scored.reward.total for scored in group], dtype=torch.float32)
        shares = advantages(values).tolist()
        made.append([to_stream(replace(scored, advantage=a)) for scored, a in zip(group, shares, strict=True)])
    return made


def later(model: Model, lessons: Sequence[Groups], batch: StoredBatch, versions: int) -> Model:
    """Return the weights after so many optimiser steps, each on the next of `lessons`, with the run's settings and the learning
    rates of its first steps (the optimiser's averages are new, as they were then)."""
    made = copy.deepcopy(model).requires_grad_()
    rl = batch.settings.rl
    learner = Learner(made, FlatOptimizer(made, published=torch.bfloat16), LossSettings())
    for step in range(versions):
        streams = [stream for group in lessons[step % len(lessons)] for stream in group]
        learn_once(learner, streams, rl, rl.rate(step), step)
    return made


def learn_once(learner: Learner, streams: Sequence[Stream], rl: RlSettings, lr: float, seed: int) -> None:
    """Take one optimiser step on a whole batch, with the run's settings."""
    learner.learn(
        streams,
        Ranks(),
        Random(seed),
        minibatches=1,
        denominator=rl.denominator(LossSettings()),
        lr=lr,
        clip=rl.clip,
        budget=rl.microbatch_tokens,
    )


def markdown(name: str, found: Bench) -> str:
    """Return a stage's rows as a table; shares in per cent."""
    lines = [
        f"### {name}",
        "",
        f"|Δ log p| p50 {found.gap['logprob_gap_p50']:.1e}, p99 {found.gap['logprob_gap_p99']:.1e}, k3 {found.gap['k3']:.1e}; "
        f"{found.tokens:,} tokens, {found.live} of {found.groups} groups teach",
        "",
        "| loss | masked | capped | ESS | norm | cosine to ours | to the exact | noise / signal | noise's share, less ours' |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found.rows:
        cells = (
            row.loss,
            f"{row.masked:.2%}",
            f"{row.reasons['capped']:.2%}",
            f"{row.ess:.1%}",
            f"{row.norm:.3g}",
            f"{row.cosine:+.3f}",
            f"{row.cosine_exact:+.3f}",
            f"{row.noise:.2g} ({_span(row.noise_interval, '.2g')})",
            f"{row.excess:+.2f} ({_span(row.excess_interval, '+.2f')})",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _span(ends: tuple[float, float], form: str) -> str:
    return " to ".join("∞" if math.isinf(end) else format(end, form) for end in ends)
