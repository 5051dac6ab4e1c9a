"""The final policy: what RL trained, its mean with the start, and its sharpness."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from composer_nb.trainer.learning.packing import Stream, flatten, microbatches, moved, score
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.prompts import tasks_by_id
from composer_nb.trainer.recipe.evaluate import calibrate
from composer_nb.trainer.recipe.stages import Stages, stage
from composer_nb.trainer.records.batches import batch_file, load_batch
from composer_nb.trainer.rl import to_streams


@stage("finish")
def finish(s: Stages, info: dict[str, Any]) -> None:
    """Average the policy that RL trained with its start, set its sharpness, and publish it as `final`. As RL left it, it stays as
    `trained`."""
    r = s.settings.rl
    if not s.ranks.gather(s.weights("trained").exists())[0]:  # a resumed stage begins from the same weights
        s.publish(s.load("final"), "trained")
    model, start = s.load("trained"), s.load("start")
    if r.uncalibrated:
        start.final_norm.data.div_(s.run.sharpness)
    average(model, start, r.start_weight)
    calibrate(s, model, r.sharpness, info)
    live_steps = [step["step"] for step in s.run.steps("rl") if step["live_groups"]]
    if not r.sharpness and live_steps:
        groups = load_batch(batch_file(s.run.path, live_steps[-1] - 1), tasks_by_id(s.run.path))
        streams = [stream for group in groups for scored in group for stream in to_streams(scored.attempt)]
        info["sharpness"] = match_entropy(model, start, microbatches(streams, r.microbatch_tokens))
        s.say(f"sharpness {info['sharpness']:.2f}: as unsure as the start on the tokens of RL's last batch")
    s.publish(model, "final")


@torch.no_grad()
def average(model: Model, start: Model, weight: float) -> None:
    """Replace the weights θ of `model` by (1 − w) θ + w θ₀, with the weights θ₀ of `start` (WiSE-FT: arXiv 2109.01903, eq. 1; for
    best of k: arXiv 2504.10478)."""
    for parameter, before in zip(model.parameters(), start.parameters(), strict=True):
        parameter.lerp_(before, weight)


# Bisections of a factor between ½ and 2: it is right to 1 %.
HALVINGS = 6


@torch.no_grad()
def match_entropy(model: Model, start: Model, microbatches: Sequence[Sequence[Stream]]) -> float:
    """Multiply the logits of `model` by the factor with which its mean entropy over the sampled tokens is that of `start`, and
    return it, at least ½ and at most 2. Entropy falls with the factor, because its derivative is −factor · Var(logits).

    RL pays for reward with entropy (arXiv 2505.22617, eq. 1). A policy surer than its start solves fewer tasks in several
    attempts."""
    batches = [moved(flatten(streams), model.embed.device) for streams in microbatches]

    def entropy(policy: Model) -> float:
        return float(torch.cat([score(policy, batch)[1] for batch in batches]).mean())

    goal, gain, low, high = entropy(start), model.final_norm.detach().clone(), math.log(0.5), math.log(2.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        model.final_norm.copy_(gain * math.exp(middle))
        low, high = (middle, high) if entropy(model) > goal else (low, middle)
    factor = math.exp((low + high) / 2)
    model.final_norm.copy_(gain * factor)
    return factor
