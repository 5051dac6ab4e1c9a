"""Targeted textual feedback: a turn's hint makes the policy its own teacher.

A hint is inserted into the context before a chosen turn. The policy that RL started from, π₀, is the teacher with the hint; the
policy without the hint is the student. Over the tokens t of these turns alone, the objective has the term

    loss.feedback · Σ_t KL(π(· | context_t) ‖ π₀(· | context with hint_t)) / denominator

over the whole vocabulary, beside the policy gradient of the whole rollout. So a wrong turn gets a signal for every token, which
one reward for hundreds of turns cannot give. References: Cursor, *Composer 2.5* (2026); the form of the KL is SDPO's (arXiv
2601.20802). Neither states a weight. SDPO's code, too, slows its teacher down or ties it to the initial weights. With a teacher
that moves with the policy, one seed of five came apart (docs/log.md).

Dimensions: S tokens of hinted turns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from composer_nb.harness.rollout import Hint
from composer_nb.kernels.linear import linear
from composer_nb.trainer.learning.packing import FlatBatch, Stream, flatten, moved
from composer_nb.trainer.models.transformer import Model


def feedback_kl(model: Model, teacher: Model, streams: Sequence[Stream]) -> Tensor:
    """Return the KL [S] of each token of the hinted turns, with a gradient through the student only. Both sides use their own
    routes, since none are recorded for the teacher's context. A hint that exceeds the model's positions is left out."""
    room = model.config.max_position_embeddings
    fitting = [(stream, hint) for stream in streams for hint in stream.hints if hint.stop + len(hint.token_ids) <= room]
    pairs = [sides(stream, hint) for stream, hint in fitting]
    if not pairs:
        return model.embed.new_zeros(0)
    with torch.no_grad():
        teacher_SV = distributions(teacher, [hinted for _, hinted in pairs])
    return divergence(distributions(model, [student for student, _ in pairs]), teacher_SV)


def divergence(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """Return KL(student ‖ teacher) [S] of log-probabilities. The gradient in logits is p ⊙ (log p − log q − KL)."""
    return (student_SV.exp() * (student_SV - teacher_SV)).sum(-1)


def sides(stream: Stream, hint: Hint) -> tuple[Stream, Stream]:
    """Return a stream up to the end of a hinted turn, without and with the hint. `acted` marks the turn's tokens."""
    ids, size = stream.token_ids, hint.stop - hint.start
    hinted = np.concatenate([ids[: hint.at], np.array(hint.token_ids, np.int32), ids[hint.at : hint.stop]])

    def side(token_ids: np.ndarray) -> Stream:
        none = np.zeros(len(token_ids), np.float32)
        acted = np.arange(len(token_ids)) >= len(token_ids) - size
        return Stream(token_ids=token_ids, acted=acted, logprob=none, advantage=none, routes=stream.routes[:0])

    return side(ids[: hint.stop]), side(hinted)


def distributions(model: Model, streams: Sequence[Stream]) -> Tensor:
    """Return the log-probabilities [S, V] at each acted token, stream by stream."""
    batch: FlatBatch = moved(flatten(streams), model.embed.device)
    hidden_ND, _ = model.trunk(batch.inputs_N, batch.position_N, batch.attend)
    logits_SV = linear(hidden_ND.index_select(0, batch.place_U[batch.from_S]), model.output_weight)
    return logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32)).log_softmax(-1)


def with_hints(streams: Sequence[Stream], hints: Sequence[Sequence[Hint]]) -> list[Stream]:
    """Return the streams of a rollout's segments with the hints of each segment."""
    return [replace(stream, hints=tuple(found)) for stream, found in zip(streams, hints, strict=True)]
