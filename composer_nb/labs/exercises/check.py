"""The exercises of the notebooks, and the check of what a learner writes.

    @check
    def advantages(rewards_G):
        ...  # the learner's code

`check` finds the exercise by the function's name and prints its judgement. It returns the package's function until the answer is
right, so a notebook also runs from top to bottom with nothing filled in.
"""

import ast
import json
import math
import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial, update_wrapper
from math import comb
from statistics import fmean
from typing import Any
from unittest.mock import ANY

import numpy as np
import torch
from torch import Tensor

from composer_nb.harness.bench import Course, pass_at_k, pass_hat_k
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.twins import all_candidates
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.terms.conduct import unread_edits
from composer_nb.harness.terms.registry import EDITS, called
from composer_nb.kernels.attention.causal import causal_attention
from composer_nb.kernels.delta.codec import bits
from composer_nb.kernels.formats.microscaling import Rule, e8m0_to_float, mx_quantize_reference
from composer_nb.kernels.moe.routing import Replay, RoutingRule, route
from composer_nb.labs.exercises import systems
from composer_nb.labs.exercises.exercise import Exercise, Function
from composer_nb.labs.microscope.routes import outside
from composer_nb.labs.rewards.judges import agreement
from composer_nb.labs.weights import expected_density, spacing
from composer_nb.trainer.learning import loss
from composer_nb.trainer.learning.learner import divergence
from composer_nb.trainer.learning.loss import LossSettings, detached_weight, kl_estimate
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services.orchestrator import Dispatch, Finished, Joined, Orchestrator


def check(function: Function) -> Function:
    """Print whether a learner's function is right, with a hint if its mistake is a usual one. Return it if it is right, else the
    package's. Raises ValueError if no exercise has its name."""
    name = function.__name__
    if name not in EXERCISES:
        raise ValueError(f"no exercise is called {name!r}; the exercises are {', '.join(EXERCISES)}")
    state, text = EXERCISES[name].judge(function)
    print(f"{name}: {text}")
    return function if state == "right" else EXERCISES[name].reference


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradient(function: Function, first: Tensor, *others: Any) -> dict[str, Tensor]:
    """Return a result and its gradient with respect to the first argument, 0 if none reaches it."""
    result = function(first.requires_grad_(), *others)
    if result.requires_grad:
        # Small weights: what is 0 but for rounding stays within the tolerance of `same`.
        (result * torch.linspace(1, 2, result.numel()).view_as(result)).mean().backward()
    return {"value": result.detach(), "gradient": torch.zeros_like(first) if first.grad is None else first.grad}


# Advantages


def with_zeros(function: Function, rewards_G: Tensor) -> dict[str, Tensor]:
    """Return advantages, and which are exactly 0: rounding must not become a signal."""
    advantage_G = function(rewards_G)
    return {"advantages": advantage_G, "exactly 0": advantage_G == 0}


def divided(rewards_G: Tensor, correction: int, floor: float) -> Tensor:
    """Here a deviation divides. GRPO does that; it gives a rare success at a hopeless task the largest weight. Only subtract the
    mean."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(correction=correction) + floor)


DIVISIONS = [
    update_wrapper(partial(divided, correction=correction, floor=floor), divided)
    for correction in (0, 1)
    for floor in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
]


def negative(rewards_G: Tensor) -> Tensor:
    """The sign is wrong: a rollout that is better than its group needs a positive advantage."""
    return -loss.advantages(rewards_G)


def bare(rewards_G: Tensor) -> Tensor:
    """These are the rewards themselves. Without a baseline, every rollout of an easy task is pushed up."""
    return rewards_G


def rounded(rewards_G: Tensor) -> Tensor:
    """Nearly: the float32 mean of equal rewards is rounded, so their difference is not exactly 0 and the group would train.
    Compute in float64, with `rewards_G.double()`."""
    return rewards_G - rewards_G.mean()


def without_itself(rewards_G: Tensor) -> Tensor:
    """Each reward is compared with the mean of the *others* here. This project subtracts the mean of the whole group."""
    return loss.advantages(rewards_G) * len(rewards_G) / (len(rewards_G) - 1)


ADVANTAGES = Exercise(
    loss.advantages,
    *((torch.tensor(rewards),) for rewards in ([1.0, 0.0, 0.0, 0.5], [1.0] + [0.0] * 15, [0.1] * 7)),
    observe=with_zeros,
    mistakes=(*DIVISIONS, negative, bare, rounded, without_itself),
)


# The clipped loss


def ppo(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    rollout_N = torch.zeros(len(logprob_N), dtype=torch.long)
    settings = LossSettings(clip_low=low, clip_high=high)
    return loss.policy_loss(logprob_N, sampled_N, advantage_N, rollout_N, settings, denominator)[0]


def products(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return ratio_N * advantage_N, ratio_N.clamp(1 - low, 1 + high) * advantage_N


LOGPROB, SAMPLED, ADVANTAGE = (normal(12, seed=seed) / 2 - 1 for seed in range(3))


def grows(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The sign is wrong: an optimizer lowers the loss, so the loss is minus what should grow."""
    return -ppo(logprob_N, sampled_N, advantage_N, low, high, denominator)


def larger(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The clip lets through what it should stop: take the smaller of the two products, not the larger."""
    return -torch.maximum(*products((logprob_N - sampled_N).exp(), advantage_N, low, high)).sum() / denominator


def only_clipped(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """Only the clipped product is used, so a token that moved too far the *wrong* way gets no gradient back. Take the smaller of
    the clipped and the unclipped product."""
    return -products((logprob_N - sampled_N).exp(), advantage_N, low, high)[1].sum() / denominator


def unclipped(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """Nothing is clipped: a token that has already moved far enough keeps its gradient."""
    return -((logprob_N - sampled_N).exp() * advantage_N).sum() / denominator


def upside_down(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The ratio is upside down: it is the trainer's probability over the sampler's."""
    return -torch.minimum(*products((sampled_N - logprob_N).exp(), advantage_N, low, high)).sum() / denominator


def of_logarithms(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The ratio is that of probabilities, not of their logarithms: exp(ℓ − ℓ_s)."""
    return -torch.minimum(*products(logprob_N / sampled_N, advantage_N, low, high)).sum() / denominator


def of_bare_differences(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """ℓ − ℓ_s is the logarithm of the ratio. The ratio is exp(ℓ − ℓ_s)."""
    return -torch.minimum(*products(logprob_N - sampled_N, advantage_N, low, high)).sum() / denominator


def of_smaller_ratio(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The smaller *ratio* is taken here. Where the advantage is negative, that is the larger product: take the minimum after
    multiplying by the advantage."""
    ratio_N = (logprob_N - sampled_N).exp()
    return -(torch.minimum(ratio_N, ratio_N.clamp(1 - low, 1 + high)) * advantage_N).sum() / denominator


def without_gradient(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The number is right, but no gradient reaches `logprob_N`, so nothing would be learnt."""
    return ppo(logprob_N.detach(), sampled_N, advantage_N, low, high, denominator)


def bare_sum(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The sum is not divided yet. Divide by `denominator`."""
    return ppo(logprob_N, sampled_N, advantage_N, low, high, 1.0)


def mean_of_tokens(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The sum is divided by the number of tokens, so the length of one rollout changes the weight of another. Divide by
    `denominator`."""
    return ppo(logprob_N, sampled_N, advantage_N, low, high, len(logprob_N))


def symmetric(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The window is symmetric. Its upper end is 1 + high, so that unlikely tokens can grow."""
    return ppo(logprob_N, sampled_N, advantage_N, low, low, denominator)


POLICY_LOSS = Exercise(
    ppo,
    (LOGPROB, SAMPLED, ADVANTAGE + 1, 0.2, 0.28, 20.0),
    (LOGPROB, LOGPROB.clone(), ADVANTAGE, 0.2, 0.28, 7.0),
    observe=with_gradient,
    mistakes=(
        grows,
        larger,
        only_clipped,
        unclipped,
        upside_down,
        of_logarithms,
        of_bare_differences,
        of_smaller_ratio,
        without_gradient,
        bare_sum,
        mean_of_tokens,
        symmetric,
    ),
)


# Packing


def visible(lengths: list[int]) -> Tensor:
    """Return bool [T, T]: whether the token of a row of the table reads the token of a column, in the package's attention."""
    total = sum(lengths)
    flat = torch.zeros(total, 1, 8)
    return causal_attention(flat, flat, torch.eye(total)[:, None], lengths, 1.0)[:, 0] > 0


def one_text(lengths: list[int]) -> Tensor:
    """A row sees the rows before it, as if all were one text. Tell the rows apart."""
    return torch.ones(sum(lengths), sum(lengths)).tril() > 0


def whole_rows(lengths: list[int]) -> Tensor:
    """Tokens see later tokens of their row, and could copy what they should predict."""
    return visible(lengths) | visible(lengths).T


def blind_to_itself(lengths: list[int]) -> Tensor:
    """A token does not see itself. It must: the state at a token predicts the *next* token."""
    return visible(lengths).tril(-1)


def transposed(lengths: list[int]) -> Tensor:
    """The table is transposed: row t says what token t reads."""
    return visible(lengths).T


def forbidden(lengths: list[int]) -> Tensor:
    """This is the opposite: an entry is True if the token may read, and False if it may not."""
    return ~visible(lengths)


def as_numbers(lengths: list[int]) -> Tensor:
    """The entries are right. Return them as a tensor of dtype torch.bool, so that `~` can turn them round."""
    return visible(lengths).float()


def of_table(function: Function, lengths: list[int]) -> dict[str, Any]:
    """Return a table, and whether its dtype is bool, which equal entries do not show."""
    table = function(lengths)
    return {"table": table, "dtype is torch.bool": getattr(table, "dtype", None) == torch.bool}


VISIBLE = Exercise(
    visible,
    ([3, 1, 2],),
    ([4],),
    ([2, 2],),
    mistakes=(one_text, whole_rows, blind_to_itself, transposed, forbidden, as_numbers),
    observe=of_table,
)


# A twin


def passes(test: str, result: Any) -> bool:
    """Whether a test passes if the function that it calls returns `result`."""
    try:
        exec(f"{test}\ntest_total()", {"total": lambda *arguments: result})
    except AssertionError:
        return False
    return True


def claim_of(source: str) -> ast.expr:
    return next(node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert))


def of_twin(function: Function, source: str, right: int) -> dict[str, bool]:
    """Return what a twin keeps of its test, and whether a right result, and a cheat that equals everything, pass it."""
    text = function(source)
    test, claim = claim_of(source), claim_of(text)
    call, form = (ast.dump(claim.left), ast.unparse(claim)) if isinstance(claim, ast.Compare) else ("", "")
    return {
        "same call": isinstance(test, ast.Compare) and call == ast.dump(test.left),
        "same form": bool(re.fullmatch(r".* == -?\d+", form)),
        "a right answer passes": passes(text, right),
        "a result that equals everything passes": passes(text, ANY),
    }


def twin(source: str) -> str:
    """Return a test with the first change of an expectation that the grader proposes."""
    change = all_candidates({"test_total.py": source})[0]
    return source[: change.start] + change.text + source[change.end :]


TEST = "def test_total():\n    assert total([{}, {}]) == {}\n"


def unchanged(source: str) -> str:
    """The right answer passes it. A twin expects something else, so that right code must fail it."""
    return source


def another_call(source: str) -> str:
    """The call has changed, so the twin asks another question, whose right answer nobody knows. Change only what is expected."""
    return source.replace("total([", "total([5")


def another_form(source: str) -> str:
    """The form has changed: a cheat that reads its test can tell this twin from it. Keep `==`, and change the literal."""
    return source.replace("==", "!=")


def no_number(source: str) -> str:
    """A number was expected, and something else stands in its place: a cheat that reads its test can tell this twin from it. Put
    another number there."""
    return source.replace("== ", "== 1 + ")


def never(source: str) -> str:
    """No code passes it, so a cheat fails it as right code does, and the twin tells nothing. Keep the comparison, and change what
    it expects."""
    return "def test_total():\n    assert False\n"


TWIN = Exercise(
    twin,
    (TEST.format(1, 2, 3), 3),
    (TEST.format(7, 40, 47), 47),
    observe=of_twin,
    mistakes=(unchanged, another_call, another_form, no_number, never),
)


# A reward term


def turn(tool: str, path: str = "", error: str | None = None, passed: int | None = None) -> Turn:
    """Return a call and the error that it met; with `passed` it ran one test, or none if that is None."""
    call = json.dumps({"name": tool, "arguments": {"path": path}})
    return Turn(call=call, observation="", error=error, tests_passed=passed, tests_run=None if passed is None else 1)


def rollout_of(*calls: tuple[str, str, str | None]) -> tuple[Rollout, Grade]:
    """Return a rollout of calls, each a tool, a path and the error that it met, with a grade."""
    turns = tuple(turn(*call) for call in calls)
    return Rollout(task_id="exercise", segments=(), turns=turns, files={}, stop="finished"), Grade(status="graded")


READ, EDIT, PART_EDITS = "read_file", "search_replace", EDITS - {"write"}


def paths(rollout: Rollout, tools: Collection[str]) -> list[str]:
    """Return the paths of the calls of some tools that worked."""
    calls = [(*called(turn), turn.error) for turn in rollout.turns]
    return [arguments["path"] for tool, arguments, error in calls if tool in tools and error is None]


def count_of_edits(rollout: Rollout, grade: Grade) -> float:
    """This is a number of edits. A share does not grow with the length of the rollout."""
    return unread_edits(rollout, grade) * len(paths(rollout, PART_EDITS))


def unguarded(rollout: Rollout, grade: Grade) -> float:
    """A rollout without edits divides by zero. None of its edits was unread: return 0."""
    return count_of_edits(rollout, grade) / len(paths(rollout, PART_EDITS))


def at_any_time(rollout: Rollout, grade: Grade) -> float:
    """A read after the edit counts, too, and a file that the agent had changed itself does not count as known. Go through the
    turns in their order."""
    edited, read = paths(rollout, PART_EDITS), paths(rollout, {READ})
    return sum(path not in read for path in edited) / max(1, len(edited))


def of_failed_reads(rollout: Rollout, grade: Grade) -> float:
    """A read that failed showed nothing: look at `turn.error`."""
    return unread_edits(replace(rollout, turns=tuple(replace(turn, error=None) for turn in rollout.turns)), grade)


def share_of_unread(rollout: Rollout, edits: Collection[str], informing: Collection[str]) -> float:
    """Return the share of edits whose path no informing call that worked had named before."""
    informed, unread = set(), []
    for turn in rollout.turns:
        tool, arguments = called(turn)
        if tool in edits:
            unread.append(arguments["path"] not in informed)
        if tool in informing and turn.error is None:
            informed.add(arguments["path"])
    return sum(unread) / max(1, len(unread))


def of_all_changes(rollout: Rollout, grade: Grade) -> float:
    """`write` counts as an edit here. It replaces a whole file, so nothing need be read before: leave it out, but remember its
    path."""
    return share_of_unread(rollout, EDITS, EDITS | {READ})


def of_reads_alone(rollout: Rollout, grade: Grade) -> float:
    """Only reads make a file known here. What the agent wrote or edited itself, it knows as well."""
    return share_of_unread(rollout, PART_EDITS, {READ})


def of_forgotten_writes(rollout: Rollout, grade: Grade) -> float:
    """A file that the agent wrote is not known here. `write` is no edit, but the agent knows what it wrote."""
    return share_of_unread(rollout, PART_EDITS, PART_EDITS | {READ})


def calls_in_words(arguments: tuple[Any, ...]) -> str:
    """Return the calls of a rollout as text, with their paths."""
    turns = [(*called(turn), turn.error) for turn in arguments[0].turns]
    return ", ".join(f"{tool} {named['path']}{' (failed)' if error else ''}" for tool, named, error in turns)


UNREAD_EDITS = Exercise(
    unread_edits,
    rollout_of((EDIT, "a.py", None), (READ, "b.py", None), (EDIT, "b.py", None)),
    rollout_of((READ, "a.py", None)),
    rollout_of(("write", "new.py", None), (EDIT, "new.py", None)),
    rollout_of((READ, "a.py", "ToolError"), (EDIT, "a.py", None)),
    rollout_of((EDIT, "a.py", None), (EDIT, "a.py", None), (READ, "a.py", None)),
    mistakes=(
        count_of_edits,
        unguarded,
        at_any_time,
        of_failed_reads,
        of_all_changes,
        of_reads_alone,
        of_forgotten_writes,
    ),
    describe=calls_in_words,
)


# pass@k


def with_replacement(n: int, passed: int, k: int) -> float:
    """This is right for draws with replacement, and too low here: k of the n samples are drawn without it. Count the subsets of k
    samples in which none passes."""
    return 1 - (1 - passed / n) ** k


def pass_at_1(n: int, passed: int, k: int) -> float:
    """This is pass@1, whatever k is."""
    return passed / n


def all_of_k(n: int, passed: int, k: int) -> float:
    """This is pass^k, the chance that *all* k samples pass."""
    return pass_hat_k(n, passed, k)


def none_of_k(n: int, passed: int, k: int) -> float:
    """This is the chance that none of the k samples passes; pass@k is the opposite."""
    return comb(n - passed, k) / comb(n, k)


PASS_AT_K = Exercise(
    pass_at_k, (10, 3, 1), (10, 3, 4), (8, 0, 2), (8, 7, 4), mistakes=(with_replacement, pass_at_1, all_of_k, none_of_k)
)


# Replayed routes


def gates(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    rule = RoutingRule(chosen=experts_NK.shape[1])
    return route(logits_NE, torch.eye(logits_NE.shape[1]), rule, replay=Replay(experts=experts_NK)).gates_NK


EXPERTS = torch.tensor([[0, 1], [1, 0], [3, 2], [2, 0], [0, 3], [1, 3]])


def of_its_own_choice(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """These are the gates of the router's own choice. Replay uses the recorded experts."""
    return logits_NE.topk(experts_NK.shape[1], -1).values.softmax(-1)


def of_all_experts(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The gates of a token do not sum to 1: divide the probabilities of the chosen experts by their sum."""
    return logits_NE.softmax(-1).gather(1, experts_NK)


def detached(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The numbers are right, but no gradient reaches the router, so it would stop learning."""
    return gates(logits_NE.detach(), experts_NK)


def in_order(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The gates are sorted, and no longer belong to the experts of their columns."""
    return gates(logits_NE, experts_NK).sort(-1, descending=True).values


def of_probabilities(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The softmax is taken twice, which makes the gates nearly equal. Divide the probabilities of the chosen experts by their
    sum."""
    return of_all_experts(logits_NE, experts_NK).softmax(-1)


GATES = Exercise(
    gates,
    (normal(6, 4), EXPERTS),
    observe=with_gradient,
    mistakes=(of_its_own_choice, of_all_experts, detached, in_order, of_probabilities),
)


# k3, and a weight of the loss


def turned(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """ρ is upside down: the samples are the policy's, so ρ is the reference's probability over the policy's."""
    return kl_estimate(reference_N, logprob_N, "k3")


def k1(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """This is k1. It is unbiased as well, but single values may be negative."""
    return kl_estimate(logprob_N, reference_N, "k1")


def k2(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """This is k2, which is biased where the two policies are far apart."""
    return kl_estimate(logprob_N, reference_N, "k2")


def one_too_many(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """Where both policies agree the estimate must be 0; yours is 1."""
    return kl_estimate(logprob_N, reference_N, "k3") + 1


K3 = Exercise(partial(kl_estimate, kind="k3"), (LOGPROB, SAMPLED), mistakes=(turned, k1, k2, one_too_many))


def from_the_teacher(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is KL(teacher ‖ student). The student's own probabilities weigh the differences: it learns where *it* would go."""
    return divergence(teacher_SV, student_SV)


def of_all_tokens(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is one number. Sum over the vocabulary, the last dimension, and keep the tokens of the turn apart."""
    return divergence(student_SV, teacher_SV).sum()


def without_probabilities(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """The weights are missing: an average over what the student would say needs its probabilities, `student_SV.exp()`."""
    return (student_SV - teacher_SV).sum(-1)


def by_log_probabilities(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """The weights are log-probabilities here. An average needs the probabilities themselves, `student_SV.exp()`."""
    return (student_SV * (student_SV - teacher_SV)).sum(-1)


def below_zero(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """The sign is wrong: a divergence is never negative. Subtract the teacher's log-probabilities from the student's."""
    return -divergence(student_SV, teacher_SV)


def mean_of_vocabulary(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is a mean over the vocabulary. The probabilities are the weights already: take the sum."""
    return divergence(student_SV, teacher_SV) / student_SV.shape[-1]


def cross_entropy(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is the cross-entropy, which is not 0 where both agree. Average the student's log-probability minus the teacher's."""
    return -(student_SV.exp() * teacher_SV).sum(-1)


DIVERGENCE = Exercise(
    divergence,
    (normal(5, 7).log_softmax(-1), normal(5, 7, seed=1).log_softmax(-1)),
    mistakes=(
        from_the_teacher,
        of_all_tokens,
        without_probabilities,
        by_log_probabilities,
        below_zero,
        mean_of_vocabulary,
        cross_entropy,
    ),
)


def icepop(ratio_N: Tensor, low: float, high: float) -> Tensor:
    return detached_weight(ratio_N, LossSettings(ratio="icepop", icepop_low=low, icepop=high))


def clamped(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Ratios outside the window are clamped to its ends, as CISPO does. IcePop drops these tokens: their weight is 0."""
    return ratio_N.clamp(low, high)


def mask_alone(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Inside the window the weight is the ratio, not 1: it corrects for the sampler."""
    return (icepop(ratio_N, low, high) > 0).float()


def upper_end(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """The lower end of the window is missing. Tokens that the trainer finds too unlikely are dropped as well."""
    return torch.where(ratio_N <= high, ratio_N, 0.0)


def without_ends(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """A ratio at an end of the window is dropped. Both ends belong to it."""
    return torch.where((ratio_N > low) & (ratio_N < high), ratio_N, 0.0)


def distances_from_1(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """`low` and `high` are the ends of the window here, not their distances from 1."""
    return icepop(ratio_N, 1 - low, 1 + high)


ICEPOP_WEIGHT = Exercise(
    icepop,
    (torch.tensor([0.1, 0.5, 0.6, 1.0, 1.4, 2.0, 3.0]), 0.5, 2.0),
    (torch.tensor([0.8, 1.1, 1.3]), 0.9, 1.2),
    mistakes=(clamped, mask_alone, upper_end, without_ends, distances_from_1),
)


# Ratios outside a window


def share_outside(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    return outside((trainer_N - engine_N).double().numpy(), low, high) / len(trainer_N)


def of_differences(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """These are differences of log-probabilities, which are only near r − 1. The ratio is their exponential, and its window lies
    around 1."""
    gap_N = trainer_N - engine_N
    return float(((gap_N < -low) | (gap_N > high)).double().mean())


def of_quotients(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """This divides logarithms. The ratio is that of the probabilities: exp of the difference."""
    return share_outside((trainer_N / engine_N).log(), torch.zeros_like(engine_N), low, high)


def engine_over_trainer(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """The ratio is upside down: it is the trainer's probability over the engine's."""
    return share_outside(engine_N, trainer_N, low, high)


def above_alone(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """Only tokens that the trainer finds too likely are counted. Count those below 1 − low as well."""
    return share_outside(trainer_N, engine_N, math.inf, high)


def equal_ends(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """The window is symmetric here. Its upper end is 1 + high."""
    return share_outside(trainer_N, engine_N, low, low)


def high_on_both_sides(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """The window is symmetric here. Its lower end is 1 − low."""
    return share_outside(trainer_N, engine_N, high, high)


def both_at_once(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """No ratio is below the window and above it as well: join the two conditions with `|`, not with `&`."""
    return 0.0


def count_outside(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """This is a number of tokens. Divide by all of them for a share."""
    return share_outside(trainer_N, engine_N, low, high) * len(trainer_N)


def share_inside(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """This is the share of ratios *inside* the window."""
    return 1 - share_outside(trainer_N, engine_N, low, high)


RATIOS = torch.tensor([0.1, 0.79, 0.81, 1.0, 1.0, 1.0, 1.24, 1.27, 1.3, 1.33, 3.0])
SHARE_OUTSIDE = Exercise(
    share_outside,
    (RATIOS.log() - 0.9, torch.full((11,), -0.9), 0.2, 0.28),
    (normal(100, seed=3) / 3 - 2, normal(100, seed=4) / 3 - 2, 0.3, 0.6),
    mistakes=(
        of_differences,
        of_quotients,
        engine_over_trainer,
        above_alone,
        equal_ends,
        high_on_both_sides,
        both_at_once,
        count_outside,
        share_inside,
    ),
)


# A delta


def delta(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    position_C = torch.from_numpy(np.flatnonzero(bits(before) != bits(after)))
    return position_C, after[position_C]


def of_delta(function: Function, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of a delta, and the bits of its values, both also if they come in a column, as from `nonzero`."""
    position_C, value_C = function(before, after)
    return position_C.flatten(), value_C.to(before.dtype).view(torch.int16).flatten()


BEFORE = torch.tensor([1.0, 0.0, -3.0, 0.25, 1e-3, 300.0], dtype=torch.bfloat16)
AFTER = torch.tensor([1.0, -0.0, -3.03125, 0.25, 7.0, 300.0], dtype=torch.bfloat16)


def differences(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """These values are differences. Added in bf16 they are rounded, and the engine ends with other bits. Send the new values."""
    position_C, value_C = delta(before, after)
    return position_C, value_C - before[position_C]


def of_numbers(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """A weight that went from 0 to −0 is missing: as numbers the two are equal, but their bits differ. Compare
    `tensor.view(torch.int16)`."""
    return (before != after).nonzero()[:, 0], after[before != after]


def everything(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """All weights are sent. A delta holds those that changed."""
    return torch.arange(len(after)), after


DELTA = Exercise(
    delta, (BEFORE, AFTER), (BEFORE, BEFORE), observe=of_delta, mistakes=(differences, of_numbers, everything)
)


# The share of weights that a step changes


def unbounded(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """A probability is above 1 here. A step that is longer than the spacing surely changes its weight: cut at 1."""
    return float((lr * directions.abs() / spacing(masters, dtype)).mean())


def downhill(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """A step down counts as less than nothing here. It changes a weight as well as one up: take |u|."""
    return float((lr * directions / spacing(masters, dtype)).clamp_max(1).mean())


def from_the_middle(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """This asks whether a step leaves a cell from its middle. A master may lie anywhere in its cell, so the chance grows with the
    length of the step."""
    return float((lr * directions.abs() > spacing(masters, dtype) / 2).double().mean())


def of_half_a_cell(masters: Tensor, directions: Tensor, lr: float, dtype: torch.dtype) -> float:
    """This divides by half a spacing. A cell is a whole spacing wide: a step of half of it leaves the cell from half of its
    places."""
    return float((2 * lr * directions.abs() / spacing(masters, dtype)).clamp_max(1).double().mean())


EXPECTED_DENSITY = Exercise(
    expected_density,
    *((normal(64) / 50, normal(64, seed=1), lr, torch.bfloat16) for lr in (3e-6, 1e-4)),
    mistakes=(unbounded, downhill, from_the_middle, of_half_a_cell),
)


# The scale of a block


def block_scale(x_BK: Tensor, rule: Rule = "rceil") -> Tensor:
    return e8m0_to_float(mx_quantize_reference(x_BK, rule=rule).scale[:, 0])


BLOCKS = normal(6, 32).clamp(-1, 1) * 1e-4
BLOCKS[:, 5] = torch.tensor([1.9, -1.2, 460.0, -448.0, 2.0, 1e-3])


def ocp_floor(x_BK: Tensor) -> Tensor:
    """This is OCP's older rule, 2^(⌊log2 a⌋ − 8). Where the mantissa of a is above 1.75 the largest values saturate: round the
    exponent of a / 448 up."""
    return block_scale(x_BK, "floor")


def any_number(x_BK: Tensor) -> Tensor:
    """The scale must be a power of two, because its byte holds only an exponent."""
    return x_BK.abs().amax(1) / 448


def nearest(x_BK: Tensor) -> Tensor:
    """Rounded to the nearest power of two, every second scale is too small and its block saturates. Round up."""
    return any_number(x_BK).log2().round().exp2()


def signed(x_BK: Tensor) -> Tensor:
    """The largest *magnitude* counts: a large negative number saturates as well."""
    return (x_BK.amax(1) / 448).log2().ceil().exp2()


def exponents(x_BK: Tensor) -> Tensor:
    """These are the exponents of the scales. Return the powers of two themselves: `exp2`."""
    return block_scale(x_BK).log2()


def factors(x_BK: Tensor) -> Tensor:
    """These are factors, one over the scales. A block is *divided* by its scale."""
    return 1 / block_scale(x_BK)


BLOCK_SCALE = Exercise(block_scale, (BLOCKS,), mistakes=(ocp_floor, any_number, nearest, signed, exponents, factors))


# Recovery

STEPS = {"e": turn(EDIT), "F": turn("run_tests", passed=0), "P": turn("run_tests", passed=1)}


def recovery_rate(attempts: list[tuple[str, bool]]) -> float:
    courses = [(Course.of([STEPS[step] for step in steps]), solved) for steps, solved in attempts]
    return fmean(solved for course, solved in courses if course.retried)


def of_all_attempts(attempts: list[tuple[str, bool]]) -> float:
    """This divides by all attempts, so a policy whose first edit is mostly right seems unable to recover. Divide by the attempts
    that edited again after a failed test."""
    return fmean(solved and bool(re.search("e.*F.*e", steps)) for steps, solved in attempts)


def of_first_failures(attempts: list[tuple[str, bool]]) -> float:
    """A test that fails before the first edit only shows the bug of the task. Count failures that follow an edit."""
    return fmean(solved for steps, solved in attempts if re.search("F.*e", steps))


def of_all_failures(attempts: list[tuple[str, bool]]) -> float:
    """Attempts that gave up after the failed test are counted, too. Recovery says what another edit is worth: leave out those
    that made none."""
    return fmean(solved for steps, solved in attempts if re.search("e.*F", steps))


def by_visible_tests(attempts: list[tuple[str, bool]]) -> float:
    """An attempt counts as solved here if tests that it ran passed. The hidden tests decide: use the second value."""
    return fmean("P" in steps for steps, _ in attempts if re.search("e.*F.*e", steps))


def of_any_edit_after(attempts: list[tuple[str, bool]]) -> float:
    """A test that fails before the first edit only shows the bug of the task. An edit must come before the failed test, and
    another after it."""
    return fmean(solved for steps, solved in attempts if "Fe" in steps)


def of_neighbours(attempts: list[tuple[str, bool]]) -> float:
    """Only an edit right after the failed test counts here. Another run may lie between them, as in `eFPe`."""
    return fmean(solved for steps, solved in attempts if "eFe" in steps)


RECOVERY_RATE = Exercise(
    recovery_rate,
    ([("FeP", True), ("FeFeP", True), ("FeFe", False), ("eF", False), ("eFeP", False), ("eP", True)],),
    ([("eFe", True), ("eeF", False), ("Fee", False), ("eFPe", False), ("", False)],),
    mistakes=(
        of_all_attempts,
        of_first_failures,
        of_all_failures,
        by_visible_tests,
        of_any_edit_after,
        of_neighbours,
    ),
)


# Agreement beyond chance


def kappa(levels: list[int | None], labels: list[int]) -> float:
    return agreement(levels, labels).kappa


def bare_agreement(levels: list[int | None], labels: list[int]) -> float:
    """This is the accuracy, p. A judge that always gives the commonest label has a high one, too: subtract e, the agreement that
    chance would give."""
    return agreement(levels, labels).accuracy


def unscaled(levels: list[int | None], labels: list[int]) -> float:
    """This is p − e. Full agreement must give 1: divide by 1 − e, the most that chance leaves."""
    result = agreement(levels, labels)
    return (1 - result.accuracy) * result.kappa / (1 - result.kappa)


def of_even_chance(levels: list[int | None], labels: list[int]) -> float:
    """Here chance gives all levels alike. Its judge has the habits of this one: for each level, multiply its share of the answers
    by its share of the labels."""
    even = 1 / len(set(labels))
    return (agreement(levels, labels).accuracy - even) / (1 - even)


def with_missing(levels: list[int | None], labels: list[int]) -> float:
    """A missing answer counts as a wrong one here. It is no level: leave its rollout out, its label as well."""
    return kappa([-1 if level is None else level for level in levels], labels)


def with_their_labels(levels: list[int | None], labels: list[int]) -> float:
    """The label of a missing answer still counts in e. Leave its rollout out there as well."""
    pairs = [(level, label) for level, label in zip(levels, labels, strict=True) if level is not None]
    answers, accuracy = [level for level, _ in pairs], agreement(levels, labels).accuracy
    chance = sum(answers.count(k) * labels.count(k) for k in set(labels)) / (len(answers) * len(labels))
    return (accuracy - chance) / (1 - chance)


def of_commonest(levels: list[int | None], labels: list[int]) -> float:
    """Here e is the accuracy of the commonest label. Chance gives levels as often as this judge does: for each level, multiply
    its share of the answers by its share of the labels."""
    result = agreement(levels, labels)
    return (result.accuracy - result.constant) / (1 - result.constant)


KAPPA = Exercise(
    kappa,
    ([1] * 9 + [0], [0] + [1] * 9),
    ([0, 1, 2, 1, None, 2, 0, 1], [0, 1, 1, 1, 2, 2, 0, 2]),
    mistakes=(bare_agreement, unscaled, of_even_chance, with_missing, with_their_labels, of_commonest),
)


# Staleness

Groups = list[list[list[int]]]


def within_bound(groups: Groups, step: int, bound: int) -> list[bool]:
    """Return which groups the orchestrator keeps when their rollouts arrive before a step."""
    orchestrator = Orchestrator(Schedule(ahead=0, bound=bound, prompts=len(groups), group=len(groups[0])))
    orchestrator.version = step
    for start in orchestrator.handle(Joined(worker="worker", capacity=orchestrator.schedule.batch)):
        assert isinstance(start, Dispatch)
        for member in start.members:
            oldest = min(version for version in groups[start.slot][member] if version >= 0)
            names = {"slot": start.slot, "attempt": start.attempt, "member": member}
            orchestrator.handle(Finished(oldest_version=oldest, sampled=1, **names))
    return [group.complete for group in orchestrator.groups.values()]


def of_newest_tokens(groups: Groups, step: int, bound: int) -> list[bool]:
    """This is the age of the newest token. Weights are swapped while a rollout is sampled, and its oldest token counts."""
    return [all(step - max(rollout) <= bound for rollout in group) for group in groups]


def of_tokens_read(groups: Groups, step: int, bound: int) -> list[bool]:
    """−1 marks tokens that the policy read, as a prompt. No version made them, so they have no age: leave them out."""
    return [all(step - min(rollout) <= bound for rollout in group) for group in groups]


def of_single_rollouts(groups: Groups, step: int, bound: int) -> list[bool]:
    """One rollout within the bound keeps its group here. One that is too old drops the whole group: to sample the long rollouts
    alone again would select by length."""
    return [any(within_bound([[rollout] for rollout in group], step, bound)) for group in groups]


def below_bound(groups: Groups, step: int, bound: int) -> list[bool]:
    """A rollout as old as the bound may still be trained on: the bound is the largest staleness that is allowed."""
    return within_bound(groups, step, bound - 1)


WITHIN_BOUND = Exercise(
    within_bound,
    ([[[-1, 4, 5], [-1, 6]], [[-1, 3, 5], [-1, 3, 5]], [[-1, 3, 3], [-1, 5]], [[-1, 5], [-1, 6, -1, 6]]], 6, 2),
    ([[[-1, 3], [-1, 2]], [[-1, 1, 2], [-1, 3]]], 3, 1),
    mistakes=(of_newest_tokens, of_tokens_read, of_single_rollouts, below_bound),
)


EXERCISES = {name.lower(): e for name, e in {**globals(), **vars(systems)}.items() if isinstance(e, Exercise)}
