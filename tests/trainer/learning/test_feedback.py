"""Textual feedback: the KL of a hinted turn against its closed form and a plain forward pass, and where hints stand."""

import copy
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.hints import hint_at, hint_for, hints_of
from composer_nb.harness.rewards import Reward
from composer_nb.harness.rollout import Hint, Turn
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner, divergence, feedback_kl, sides
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.rl import Scored, streams_of, to_streams


def test_the_divergence_and_its_gradient_have_their_closed_forms() -> None:
    torch.manual_seed(0)
    logits_SV = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    teacher_SV = torch.randn(6, 9, dtype=torch.float64).log_softmax(-1)
    student_SV = logits_SV.log_softmax(-1)
    kl_S = divergence(student_SV, teacher_SV)
    p, q = torch.distributions.Categorical(logits=student_SV), torch.distributions.Categorical(logits=teacher_SV)
    torch.testing.assert_close(kl_S, torch.distributions.kl_divergence(p, q), atol=1e-12, rtol=1e-12)
    [gradient_SV] = torch.autograd.grad(kl_S.sum(), logits_SV)
    closed_SV = student_SV.exp() * (student_SV - teacher_SV - kl_S[:, None])
    torch.testing.assert_close(gradient_SV, closed_SV.detach(), atol=1e-12, rtol=1e-12)
    assert divergence(teacher_SV, teacher_SV).abs().max() == 0 < kl_S.min()


@pytest.fixture
def stream(make_model, converse) -> Stream:
    """A rollout of three messages whose second has a hint."""
    [attempt] = converse(Engine(make_model(3), stop=frozenset[int](), slots=1, max_length=96), 1)
    [stream] = to_streams(attempt)
    positions = attempt.rollout.segments[0].messages[1]
    hint = Hint(int(positions[0]), int(positions[-1]) + 1, int(positions[0]) - 1, (5, 17, 40))
    return replace(stream, hints=(hint,))


def test_teacher_and_student_are_plain_forwards_with_and_without_the_hint(make_model, stream: Stream) -> None:
    model, [hint] = make_model(4), stream.hints
    ids = stream.token_ids.tolist()
    without = ids[: hint.stop]
    hinted = [*ids[: hint.at], *hint.token_ids, *ids[hint.at : hint.stop]]
    size = hint.stop - hint.start
    with torch.no_grad():
        logits = [model(torch.tensor([row]))[0][0, -size - 1 : -1].log_softmax(-1) for row in (without, hinted)]
    torch.testing.assert_close(feedback_kl(model, model, [stream]), divergence(*logits), atol=1e-5, rtol=1e-4)
    student, teacher = sides(stream, hint)
    for side in (teacher, student):
        assert side.token_ids[side.acted].tolist() == ids[hint.start : hint.stop]


def learner_of(model, feedback: float) -> Learner:
    reference = copy.deepcopy(model).requires_grad_(False) if feedback else None
    return Learner(model, FlatOptimizer(model), LossSettings(feedback=feedback), reference)


def learn(learner: Learner, streams: list[Stream], lr: float = 0.0) -> dict[str, float]:
    return learner.learn(
        streams, Ranks(), Random(0), minibatches=1, denominator=50.0, lr=lr, clip=1e9, microbatch_tokens=256
    )


def test_the_term_is_the_weighted_sum_over_the_denominator_and_nothing_else(make_model, stream: Stream) -> None:
    model = make_model(4)
    metrics = learn(learner := learner_of(model, 2.0), [stream])  # its advantage is 0
    gradient = learner.optimizer.gradients.clone()
    by_hand = make_model(4).requires_grad_()
    expected = torch.autograd.grad(
        2.0 * feedback_kl(by_hand, make_model(4), [stream]).sum() / 50.0, list(by_hand.parameters()), allow_unused=True
    )
    total = sum(float(part.double().pow(2).sum()) for part in expected if part is not None) ** 0.5
    assert metrics["hinted"] == stream.hints[0].stop - stream.hints[0].start and metrics["feedback_kl"] > 1e-4
    assert float(gradient.double().norm()) == pytest.approx(total, rel=1e-4) and total > 0
    off = learn(quiet := learner_of(make_model(4), 0.0), [stream])
    assert "hinted" not in off and quiet.optimizer.gradients.abs().max() == 0


def test_a_hinted_turn_comes_to_be_written_as_with_its_hint(make_model, stream: Stream) -> None:
    learner = learner_of(make_model(4), 2.0)
    divergences = [learn(learner, [stream], lr=1e-4)["feedback_kl"] for _ in range(6)]
    assert divergences == sorted(divergences, reverse=True) and 0 < divergences[-1] < divergences[0]


READ = '{"arguments": {"path": "g.py"}, "name": "read_file"}'


def test_a_hint_stands_before_the_cue_of_its_turn_and_its_rollout_trains(make_model, converse, tokenizer) -> None:
    renderer, tools = CompactRenderer(tokenizer), ToolSet.tiny()
    [attempt] = converse(Engine(make_model(3), stop=frozenset[int](), slots=1, max_length=96), 1)
    failed = Turn(call="raed", observation="error: bad call", error="InvalidArguments")
    rollout = replace(attempt.rollout, turns=(Turn(call=READ, observation=""), failed, Turn(call=READ, observation="")))
    [[hint]] = hints_of(rollout, renderer, tools)
    positions = rollout.segments[0].messages[1]
    assert (hint.start, hint.stop, hint.at) == (positions[0], positions[-1] + 1, positions[0] - 1)
    assert list(hint.token_ids) == renderer.ask(hint_for([failed], tools))[:-1] and hint == hint_at(
        hint.start, hint.stop, hint_for([failed], tools), renderer
    )
    scored = Scored(attempt=replace(attempt, rollout=rollout), reward=Reward(total=0.0), advantage=0.0)
    assert streams_of([[scored]], LossSettings()) == []
    [stream] = streams_of([[scored]], LossSettings(), lambda rollout: hints_of(rollout, renderer, tools))
    assert stream.hints == (hint,) and np.array_equal(stream.token_ids, rollout.segments[0].token_ids)
    with pytest.raises(ValueError, match="loss.feedback=-1.0: must be greater than or equal to 0"):
        LossSettings(feedback=-1.0)
