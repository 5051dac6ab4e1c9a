"""The RL step: what becomes of attempts, that learning sums what it says, and that nothing depends on how work is cut."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.attempt import Agent
from composer_nb.harness.rewards import Effort, RewardSettings
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.kernels.moe.routing import Replay
from composer_nb.tour.expert import ScriptedPolicy, one
from composer_nb.trainer import rl
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning import learner as learning
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL, NO_REPLAY, ReplaySettings, Stream, flatten, microbatches, score
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import stream_of
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.recipe import sample_groups
from composer_nb.trainer.rl import Scored, ledger, score_groups, shuffle_rewards
from tests.harness.conftest import Boxes
from tests.tiny_models import streams_of

NEVER = frozenset[int]()
LEARN: dict[str, Any] = {"minibatches": 1, "denominator": 50.0, "lr": 0.0, "clip": 1e9, "microbatch_tokens": 64}


class Part(Ranks):
    """One of several ranks, by itself: its sums are its own."""

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.fixture
def sampled(make_model, converse):
    """`sampled(model)`: streams that `model` itself sampled, with an advantage each."""

    def make(model: Model, count: int = 7) -> list[Stream]:
        attempts = converse(Engine(model, stop=frozenset({7, 8, 9}), slots=count, max_length=96), count)
        return streams_of(attempts, *np.random.default_rng(1).normal(size=count))

    return make


def by_hand(model: Model, stream: Stream, replay: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token that the agent wrote, one row through the whole model."""
    ids = torch.from_numpy(stream.token_ids).long()[None]
    routes = torch.from_numpy(stream.routes[:-1]).long()[None] if replay else None
    scores = model(ids[:, :-1], routes)[0][0].log_softmax(-1)
    acted = torch.from_numpy(stream.acted[1:])
    return scores.gather(1, ids[0, 1:, None])[acted, 0], -(scores.exp() * scores).sum(-1)[acted]


def slopes_by_hand(model: Model, streams: Sequence[Stream], replay: bool = False) -> tuple[Tensor, ...]:
    """The gradient of plain REINFORCE."""
    terms = [by_hand(model, s, replay)[0] * torch.from_numpy(s.advantage[1:][s.acted[1:]]) for s in streams]
    return torch.autograd.grad(-torch.cat(terms).sum() / 50.0, list(model.parameters()))


@pytest.mark.parametrize("replay", [False, True])
def test_tokens_are_scored_as_in_a_forward_pass_of_their_own(make_model, sampled, replay: bool):
    streams = sampled(make_model(3))
    model = make_model(4)  # another one, whose own routes differ
    with torch.no_grad():
        batch = flatten(streams, FULL if replay else NO_REPLAY)
        logprob, entropy = score(model, batch, batch.recorded)
        expected = [by_hand(model, stream, replay) for stream in streams]
    torch.testing.assert_close(logprob, torch.cat([w[0] for w in expected]), atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(entropy, torch.cat([w[1] for w in expected]), atol=3e-5, rtol=1e-4)


def gradient(model: Model, streams: Sequence[Stream], **changes: Any) -> tuple[Tensor, dict[str, float]]:
    learner = Learner(model, FlatOptimizer(model), changes.pop("settings", LossSettings()))
    learner.replay, learner.sampler = changes.pop("replay", NO_REPLAY), changes.pop("sampler", None)
    metrics = learner.learn(streams, changes.pop("ranks", Ranks()), Random(0), **LEARN | changes)
    return learner.optimizer.gradients.clone(), metrics


def test_the_gradient_is_the_sum_over_all_tokens_however_they_are_cut(make_model, sampled):
    model = make_model(3)
    streams = sampled(model)
    expected = torch.cat([slope.flatten() for slope in slopes_by_hand(model, streams)])
    assert expected.norm() > 1e-3
    for budget in (1, 64, 10_000):
        actual, metrics = gradient(model, streams, microbatch_tokens=budget)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-3)
        assert metrics["masked"] == metrics["ratio_off_20"] == 0 and abs(metrics["k3"]) < 1e-8, "on policy"
    alone = [gradient(model, [stream])[1]["grad_norm"] for stream in streams]
    split = gradient(model, streams, minibatches=len(streams))[1]["grad_norm"]
    assert split == pytest.approx(len(streams) * np.mean(alone), rel=1e-4), "a minibatch weighs as much as the batch"
    parts = [gradient(model, streams, ranks=Part(rank, 3))[0] for rank in range(3)]
    torch.testing.assert_close(sum(parts), expected, atol=2e-5, rtol=1e-3)
    assert all(part.norm() > 1e-4 for part in parts), "each rank has its share"
    learner = Learner(model, FlatOptimizer(model), LossSettings())
    assert learner._loss(flatten([]), 50.0)[0] == 0, "that of ranks that wait for others"


@pytest.mark.parametrize("replay", [NO_REPLAY, FULL])
def test_demonstrations_are_rehearsed_by_what_the_agent_wrote(make_model, sampled, replay: ReplaySettings) -> None:
    """Their gradient is added, with and without replay, on one rank and on several; length norm divides it like a rollout's."""
    model = make_model(3)
    streams, shown = (
        sampled(model),
        [replace(s, advantage=np.full_like(s.advantage, 0.25)) for s in sampled(make_model(4))],
    )
    rows = [TokenRow(stream.token_ids, np.where(stream.acted, 1.0, 0.2).astype(np.float32)) for stream in shown]
    changes = {"rehearsed": [stream_of(row, min_weight=1.0, scale=0.25) for row in rows]}
    expected = torch.cat([slope.flatten() for slope in slopes_by_hand(model, shown)])
    alone, figures = gradient(model, streams, replay=replay)
    both, metrics = gradient(model, streams, replay=replay, **changes)
    torch.testing.assert_close(both - alone, expected, atol=2e-5, rtol=1e-3)
    assert metrics | {"grad_norm": 0.0} == figures | {"grad_norm": 0.0}, "metrics are of the policy's own tokens"
    parts = [gradient(model, streams, ranks=Part(rank, 3), **changes)[0] for rank in range(3)]
    torch.testing.assert_close(sum(parts), alone + expected, atol=2e-5, rtol=1e-3)
    normed = LossSettings(length_norm=True)
    by_length = gradient(model, streams, settings=normed, **changes)[0] - gradient(model, streams, settings=normed)[0]
    shares = [replace(s, advantage=s.advantage / s.acted[1:].sum()) for s in shown]
    expected = torch.cat([slope.flatten() for slope in slopes_by_hand(model, shares)])
    torch.testing.assert_close(by_length, expected, atol=2e-5, rtol=1e-3)
    learner = Learner(model, FlatOptimizer(model), LossSettings())
    before = learner.optimizer.weights.clone()
    learner.learn([], Ranks(), Random(0), **LEARN | {"lr": 0.1} | changes)
    assert torch.equal(learner.optimizer.weights, before), "a batch without a signal takes no step"


@pytest.mark.parametrize("changes", [{"length_norm": True}, {"ratio": "gspo"}, {"ratio": "cispo", "length_norm": True}])
def test_no_choice_of_loss_depends_on_microbatches(make_model, sampled, changes: dict[str, Any]):
    model, sampler = make_model(3), make_model(3)
    streams = sampled(sampler)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02)
    loss = LossSettings(**changes)
    gradients = [gradient(model, streams, settings=loss, microbatch_tokens=budget)[0] for budget in (1, 10_000)]
    torch.testing.assert_close(*gradients, atol=2e-5, rtol=1e-3)


def test_the_gradient_with_replay_is_that_of_the_recorded_experts_with_live_gates(make_model, sampled):
    model = make_model(4)
    streams = sampled(make_model(3))  # by a model with other routers
    replayed, metrics = gradient(model, streams, settings=LossSettings(ratio="none"), replay=FULL)
    slopes = slopes_by_hand(model, streams, replay=True)
    expected = torch.cat([slope.flatten() for slope in slopes])
    assert expected.norm() > 1e-3
    torch.testing.assert_close(replayed, expected, atol=2e-5, rtol=1e-3)
    routers = [slope for (name, _), slope in zip(model.named_parameters(), slopes, strict=True) if "router" in name]
    assert len(routers) == 2 and all(slope.norm() > 1e-4 for slope in routers), "the routers learn"
    live, _ = gradient(model, streams, settings=LossSettings(ratio="none"))
    assert not torch.allclose(live, expected, atol=1e-3), "and it is another gradient than that of the own experts"
    assert 0.1 < metrics["replay_overlap"] < 0.9


@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_every_row_of_routes_is_used_once_in_a_pass(make_model, sampled, monkeypatch, budget: int):
    model = make_model(3)
    streams = sampled(model)
    used, forwarded = [], []
    flat, trunk = learning.flatten, model.trunk

    def flattened(chunk: Sequence[Stream], *args: Any) -> Any:
        used.extend(chunk)
        return flat(chunk, *args)

    def forward(ids: Tensor, position: Tensor, attend: Any, replayed: Replay | None = None, *args: Any) -> Any:
        assert replayed is not None
        rows = zip(ids.tolist(), position.tolist(), replayed.experts.flatten(1).tolist(), strict=True)
        forwarded.extend((token, index, tuple(row)) for token, index, row in rows)
        return trunk(ids, position, attend, replayed, *args)

    monkeypatch.setattr(learning, "flatten", flattened)
    monkeypatch.setattr(model, "trunk", forward)
    gradient(model, streams, replay=FULL, microbatch_tokens=budget, minibatches=2)
    assert sorted(map(id, used)) == sorted(map(id, streams))
    recorded = [
        (int(token), index, tuple(row.flatten().tolist()))
        for stream in streams
        for index, (token, row) in enumerate(zip(stream.token_ids[:-1], stream.routes[:-1], strict=True))
    ]
    assert sorted(forwarded) == sorted(recorded), "six prompts that share nothing: each row is forwarded once"


def test_a_pass_that_loses_a_stream_is_noticed(make_model, sampled, monkeypatch):
    model = make_model(3)
    chunks = learning.microbatches
    monkeypatch.setattr(learning, "microbatches", lambda *args: chunks(*args)[1:])
    with pytest.raises(AssertionError, match="each row of routes is used exactly once"):
        gradient(model, sampled(model), replay=FULL, microbatch_tokens=1)


# Attempts in groups


def local_boxes(loses: Callable[[int], bool] = lambda number: False) -> Boxes:
    """Return boxes that run code in this process, and lose the requests that `loses` picks by their number."""
    number = count(1)

    def answer(request: CallRequest) -> tuple[CallOutcome, ...]:
        if loses(next(number)):
            raise SandboxFailure("gone")
        scope: dict[str, Any] = {}
        exec(request.files["f.py"], scope)
        values = [scope[request.function](*eval(text)) for text in request.arguments]
        return tuple(CallOutcome(status="returned", text=repr(value)) for value in values)

    return Boxes(answer)


def edit(text: str) -> ToolCall:
    return ToolCall(name="edit_line", arguments={"path": "f.py", "line": 2, "text": text})


@pytest.fixture
def agent(tokenizer: Tokenizer) -> Agent:
    return Agent(CompactRenderer(tokenizer))


@pytest.fixture
def policy(agent: Agent) -> ScriptedPolicy:
    """Every second attempt is right."""

    def script(rollout: int):
        yield one(edit("return x + 1" if rollout % 2 else "return x - 1"))
        yield one(ToolCall(name="finish", arguments={}))

    return ScriptedPolicy(agent.renderer, script, capacity=3)


def test_groups_come_in_order_and_are_scored_against_their_own_mean(agent, policy, task: Task):
    tasks = [task, task.model_copy(update={"id": "u"})]
    groups, lost = sample_groups(policy, agent, dict(enumerate(tasks)), 3, local_boxes())
    assert [[attempt.task.id for attempt in group] for group in groups] == [["t"] * 3, ["u"] * 3] and lost == 0
    assert [[attempt.grade.passed for attempt in group] for group in groups] == [
        [False, True, False],
        [True, False, True],
    ]
    only_solved = RewardSettings(weights={"solved": 1.0})
    scored = score_groups(groups, only_solved, LossSettings())
    assert [[s.reward.total for s in group] for group in scored] == [[0, 1, 0], [1, 0, 1]]
    assert [s.advantage for s in scored[0]] == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    imitation = LossSettings(baseline="none")
    imitated = score_groups(groups, only_solved, imitation)
    assert [[s.advantage for s in group] for group in imitated] == [[0, 1, 0], [1, 0, 1]]
    assert ledger(imitated, imitation).keys() == {"zero_advantage", "trained"}, "what failed trains nothing"

    groups[0][1] = replace(groups[0][1], rollout=replace(groups[0][1].rollout, stop="tokens"))
    unmasked, masked = (score_groups(groups, only_solved, LossSettings(mask_overlong=mask)) for mask in (False, True))
    assert unmasked[0][1].advantage > 0 == masked[0][1].advantage, "it counts in the mean"
    assert [s.advantage for s in masked[0][::2]] == [s.advantage for s in unmasked[0][::2]] and masked[1] == unmasked[1]
    with_kl = LossSettings(mask_overlong=True, beta=0.1)
    assert len(rl.streams_of(masked, with_kl)) == 5 and ledger(masked, with_kl)["zero_advantage"] > 0, "nor by the KL"

    centred = score_groups(groups, only_solved, LossSettings(baseline="batch"))
    assert [[s.advantage for s in group] for group in centred] == [[-0.5, 0.5, -0.5], [0.5, -0.5, 0.5]]
    halves = Part(0, 2)
    halves.gather = lambda value: [value, [[1.0, 1.0, 0.0]]]  # type: ignore[method-assign]
    [half] = score_groups(groups[:1], only_solved, LossSettings(baseline="batch"), ranks=halves)
    assert [s.advantage for s in half] == [-0.5, 0.5, -0.5], "the mean is that of all ranks"

    written = [sum(s.attempt.rollout.sampled for s in group) for group in scored]
    assert ledger(scored, LossSettings()) == {"trained": sum(written)}
    flat = [[Scored(attempt=s.attempt, reward=s.reward, advantage=0.0) for s in scored[0]], scored[1]]
    assert ledger(flat, LossSettings()) == {"zero_advantage": written[0], "trained": written[1]}
    assert len(rl.streams_of(flat, LossSettings())) == 3
    assert rl.measured(flat, rl.Batch(step=0), 1, Ranks())["live_groups"] == 0.5
    assert ledger(flat, LossSettings(beta=0.1)) == {"trained": sum(written)}, "the KL weight trains on every token"


def test_effort_costs_less_where_few_of_a_group_succeed(agent, policy, task: Task):
    """λ · s² a message: a third of the first group is solved, and two thirds of the second are."""
    groups, _ = sample_groups(policy, agent, dict.fromkeys(range(2), task), 3, local_boxes())
    tokens = dict.fromkeys(("thinking_tokens", "tool_call_tokens", "final_message_tokens"), 0.0)
    effort = Effort(weight=0.3, q=0.0, turns=1.0, by_solved=2.0, **tokens)
    scored = score_groups(groups, RewardSettings(weights={"solved": 1.0}, effort=effort), LossSettings())
    for group, price in zip(scored, (0.3 / 9, 0.3 * 4 / 9), strict=True):
        effort_terms = [s.reward.terms["effort"] for s in group]
        assert effort_terms == pytest.approx([-price * s.attempt.rollout.messages for s in group])


def test_what_the_infrastructure_lost_is_tried_again_and_nothing_else(agent, policy, task: Task):
    groups, lost = sample_groups(policy, agent, {0: task}, 4, local_boxes(lambda number: number in (1, 2)))
    # The first call is for all agents together. It is repeated for each agent alone, and the second of these calls fails too.
    assert lost == 1 and [attempt.grade.passed for attempt in groups[0]] == [False, True, False, True]
    with pytest.raises(SandboxFailure, match=r"2 attempts got no grade in 3 tries, the last 'gone'; run"):
        sample_groups(policy, agent, {0: task}, 2, local_boxes(lambda number: True))


def test_the_control_deals_the_same_rewards_out_anew(agent, policy, task: Task):
    tasks = [task.model_copy(update={"id": f"t{n}"}) for n in range(6)]
    groups, _ = sample_groups(policy, agent, dict(enumerate(tasks)), 4, local_boxes())
    scored = score_groups(groups, RewardSettings(weights={"solved": 1.0}), LossSettings())
    dealt = shuffle_rewards(scored, LossSettings(), Random(3))
    assert dealt == shuffle_rewards(scored, LossSettings(), Random(3)) != scored
    assert sum(s.reward.total for group in dealt for s in group) == sum(s.reward.total for g in scored for s in g) == 12
    for before, after in zip(scored, dealt, strict=True):
        assert [s.attempt for s in before] == [s.attempt for s in after]
        mean = np.mean([s.reward.total for s in after])
        assert [s.advantage for s in after] == pytest.approx([s.reward.total - mean for s in after])
    assert shuffle_rewards(scored, LossSettings(gate="ties"), Random(3)) == dealt, "outcomes go with their rewards"


def test_a_batch_without_a_signal_has_no_figures_a_token_and_moves_nothing(make_model, sampled):
    """Not even by the momentum of the batch before it."""
    model = make_model()
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=FULL)
    learner.learn(sampled(model), Ranks(), Random(0), **LEARN | {"lr": 0.1})
    before = learner.optimizer.weights.clone()
    metrics = learner.learn([], Ranks(), Random(0), **LEARN | {"lr": 0.1})
    for name in ("entropy", "k3", "masked", "ratio_off_20", "ratio_cut", "grad_norm", "replay_overlap"):
        assert np.isnan(metrics[name]), name
    assert torch.equal(learner.optimizer.weights, before)


@pytest.mark.parametrize("replay", [NO_REPLAY, FULL])
def test_centred_scores_take_the_drift_from_another_sampler_out_of_the_gradient(make_model, sampled, replay) -> None:
    """The formula is Σ A Σ_v q_v log p_v, here over whole rows. It vanishes where the sampler is the trainer."""
    model, sampler, drift = make_model(3), make_model(4), torch.zeros(())
    streams, centred = sampled(model), LossSettings(ratio="none", centre_scores=True)
    for stream in streams:
        ids, acted = torch.from_numpy(stream.token_ids).long()[None, :-1], torch.from_numpy(stream.acted[1:])
        routes = torch.from_numpy(stream.routes[:-1]).long()[None] if replay.on else None
        p, q = (net(ids, routes)[0][0].log_softmax(-1)[acted] for net in (model, sampler))
        drift = drift + stream.advantage[stream.acted][0] * (q.exp().detach() * p).sum() / 50.0
    plain, metrics = gradient(model, streams, settings=LossSettings(ratio="none"), replay=replay)
    expected = torch.cat([slope.flatten() for slope in torch.autograd.grad(drift, list(model.parameters()))])
    centred_gradient, same = gradient(model, streams, settings=centred, replay=replay, sampler=sampler)
    assert expected.norm() > 1e-3 and same["entropy"] == pytest.approx(metrics["entropy"], rel=1e-4)
    torch.testing.assert_close(centred_gradient - plain, expected, atol=2e-5, rtol=1e-3)
    on_policy, _ = gradient(model, streams, settings=centred, replay=replay, sampler=copy.deepcopy(model))
    torch.testing.assert_close(on_policy, plain, atol=2e-6, rtol=1e-4)


# Steps and rates


@pytest.mark.parametrize(
    ("minibatches", "fall", "expected"),
    [(1, 0.1, [0.4]), (3, 1.0, [0.4, 0.4, 0.4]), (3, 0.0, [0.4, 0.2, 0.0]), (4, 0.25, [0.4, 0.3, 0.2, 0.1])],
)
def test_tasks_in_the_same_words_are_learnt_in_several_steps_at_a_falling_rate(
    make_model, converse, monkeypatch: pytest.MonkeyPatch, minibatches: int, fall: float, expected
) -> None:
    rates, step = list[float](), FlatOptimizer.step

    def noted(self: FlatOptimizer, lr: float, clip: float) -> float:
        rates.append(lr)
        return step(self, lr, clip)

    monkeypatch.setattr(FlatOptimizer, "step", noted)
    model = make_model(3)
    [attempt] = converse(Engine(model, stop=frozenset({7, 8, 9}), slots=4, max_length=96), 1)
    tasks = [attempt.task.model_copy(update={"id": f"request {number}"}) for number in range(4)]  # in the same words
    streams = streams_of([replace(attempt, task=task) for task in tasks], 1.0)
    options = LEARN | {"minibatches": minibatches, "lr": 0.4, "final_lr_share": fall}
    Learner(model, FlatOptimizer(model), LossSettings(), None, FULL).learn(streams, Ranks(), Random(0), **options)
    assert rates == pytest.approx(expected)


# With a learning rate of 0 what does not learn must not move. A step goes through everything: scoring, loss, backward pass,
# clipping, AdamW, rounding to the published dtype. Where a bit moves the trainer itself drifts, and no engine is to blame


@pytest.mark.parametrize("lr", [0.0, 1e-2])
@pytest.mark.parametrize("replay", [NO_REPLAY, FULL])
def test_without_a_learning_rate_nothing_moves(make_model, converse, replay, lr: float):
    model = make_model(3).bfloat16().float()  # as published
    streams = streams_of(converse(Engine(model, stop=frozenset(), slots=6, max_length=96), 6), 1.0, -1.0)
    optimizer = FlatOptimizer(model, weight_decay=0.1, published=torch.bfloat16)
    learner, before = Learner(model, optimizer, LossSettings(), replay=replay), optimizer.weights.clone()
    batches = [flatten(chunk, replay) for chunk in microbatches(streams, 100)]

    @torch.no_grad()
    def scores() -> torch.Tensor:
        return torch.cat([score(model, batch, batch.recorded)[0] for batch in batches])

    first = scores()
    recorded = torch.cat([batch.sampled_S for batch in batches])
    assert 0 < (first - recorded).abs().max() < 1e-4, "the engine's compiled kernel rounds otherwise"
    options = LEARN | {"lr": lr, "clip": 1.0, "microbatch_tokens": 100}
    for _ in range(3):
        metrics = learner.learn(streams, Ranks(), Random(0), **options)
        assert metrics["grad_norm"] > 0 and (lr > 0 or metrics["k3"] < 1e-8)
    assert torch.equal(optimizer.weights, before) == torch.equal(scores(), first) == (lr == 0)
