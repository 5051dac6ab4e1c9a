"""Supervised training: its schedule, how batches are dealt and shared, and that ranks add up to one."""

import math
import os
import random
from dataclasses import replace
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.trainer.learning.data import CODE_ROW, TokenRow, deal, mixture, mixture_code
from composer_nb.trainer.learning.optimizer import FlatOptimizer, trapezoid
from composer_nb.trainer.learning.ranks import Ranks, set_up_process
from composer_nb.trainer.learning.supervised import cross_entropy, rows_of_rank, supervise, train_step
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows, balance_loss
from composer_nb.trainer.recipe import recipe
from composer_nb.trainer.recipe.recipe import midtrain_plan
from composer_nb.trainer.settings import MidtrainSettings, Settings, override

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_hidden_layers=2, head_dim=8, moe_intermediate_size=8, max_position_embeddings=64
)


def model() -> Model:
    torch.manual_seed(0)
    return Model(CONFIG)


def rows(count: int, seed: int = 0) -> list[TokenRow]:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 30, count)
    return [
        TokenRow(random.integers(0, 31, n).astype(np.int32), random.choice([0.0, 0.2, 1.0], n).astype(np.float32))
        for n in lengths
    ]


def by_hand(net: Model, batch: list[TokenRow]) -> tuple[torch.Tensor, float]:
    """Sum of the weighted cross-entropy, one row at a time, and the sum of weights."""
    total = torch.zeros(())
    for row in batch:
        ids = torch.from_numpy(row.token_ids).long()
        losses = F.cross_entropy(net(ids[None, :-1])[0][0], ids[1:], reduction="none")
        total = total + (losses * torch.from_numpy(row.weight[1:])).sum()
    return total, float(sum(row.weight[1:].sum() for row in batch))


# One step


def test_the_loss_is_the_weighted_mean_over_tokens_and_the_step_descends_it():
    net, batch = model(), rows(5)
    total, weight = by_hand(net, batch)
    slopes = torch.autograd.grad(total / weight, list(net.parameters()), allow_unused=True)
    optimizer = FlatOptimizer(net)
    before = optimizer.weights.clone()
    metrics = train_step(net, batch, optimizer, Ranks(), lr=1e-3, balance=0.0, clip=1e9)
    assert metrics["loss"] == pytest.approx(float(total.detach()) / weight, rel=1e-5)
    assert metrics["tokens"] == sum(len(row.token_ids) - 1 for row in batch)
    assert metrics["grad_norm"] == pytest.approx(float(optimizer.gradients.norm()), rel=1e-6)
    flat = torch.cat([g.flatten() for g in slopes])
    torch.testing.assert_close(optimizer.gradients, flat, atol=1e-6, rtol=1e-4)
    assert not torch.equal(optimizer.weights, before)
    later = [train_step(net, batch, optimizer, Ranks(), lr=1e-3, balance=0.0, clip=1.0)["loss"] for _ in range(20)]
    assert later[-1] < metrics["loss"] - 0.1


def test_the_agent_s_loss_is_the_plain_mean_over_tokens_that_weigh_one():
    net, batch = model(), rows(5)
    chosen = [TokenRow(row.token_ids, (row.weight == 1.0).astype(np.float32)) for row in batch]
    total, weight = by_hand(net, chosen)
    assert cross_entropy(net, batch, Ranks()) == pytest.approx(float(total.detach()) / weight, rel=1e-5)
    assert cross_entropy(net, batch, Ranks(), budget=1) == pytest.approx(float(total.detach()) / weight, rel=1e-5)
    metrics = train_step(net, batch, FlatOptimizer(net), Ranks(), lr=0.0, balance=0.0, clip=1.0)
    assert metrics["agent_loss"] == pytest.approx(float(total.detach()) / weight, rel=1e-5)
    context = [TokenRow(row.token_ids, np.full(len(row.weight), 0.5, np.float32)) for row in batch]
    metrics = train_step(net, context, FlatOptimizer(net), Ranks(), lr=0.0, balance=0.0, clip=1.0)
    assert math.isnan(metrics["agent_loss"])


def test_the_balance_loss_reaches_the_routers():
    net, batch = model(), rows(4)
    slopes = []
    for balance in (0.0, 0.5):
        optimizer = FlatOptimizer(net)
        train_step(net, batch, optimizer, Ranks(), lr=0.0, balance=balance, clip=1e9)
        slopes.append(optimizer.gradients.clone())
    ids_N = torch.from_numpy(np.concatenate([row.token_ids[:-1] for row in batch])).long()
    packed = PackedRows.of_lengths([len(row.token_ids) - 1 for row in batch], CONFIG)
    joined = balance_loss(net.trunk(ids_N, packed.position_N, packed.attend)[1])
    expected = torch.autograd.grad(0.5 * joined, list(net.parameters()), allow_unused=True)
    flat = torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(expected, net.parameters(), strict=True)]
    )
    assert flat.norm() > 1e-3
    torch.testing.assert_close(slopes[1] - slopes[0], flat, atol=2e-5, rtol=1e-3)


# Dealing

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def of_lengths(sizes: list[int]) -> list[TokenRow]:
    return [TokenRow(np.zeros(n, np.int32), np.ones(n, np.float32)) for n in sizes]


@settings(deadline=None)
@given(lengths, st.integers(1, 100), st.integers(0, 99))
def test_every_row_is_dealt_once_before_any_a_second_time(sizes: list[int], budget: int, seed: int):
    data = of_lengths(sizes)
    batches = list(islice(deal(data, budget, Random(seed)), 3 * len(sizes)))
    assert batches == list(islice(deal(data, budget, Random(seed)), 3 * len(sizes)))
    dealt = [number for batch in batches for number in batch]
    epochs = [dealt[at : at + len(sizes)] for at in range(0, len(dealt) - len(sizes) + 1, len(sizes))]
    assert len(epochs) >= 3 and all(sorted(epoch) == list(range(len(sizes))) for epoch in epochs)
    for batch, following in zip(batches, batches[1:], strict=False):
        cost = sum(sizes[number] for number in batch)
        assert batch and (cost <= budget or len(batch) == 1)
        assert cost + sizes[following[0]] > budget, "no batch ends before it is full"


# The mixture of mid-training, and its loop


def coded(count: int) -> list[TokenRow]:
    """Rows of code, known by their first token."""
    return [
        TokenRow(np.full(CODE_ROW, number, np.int32), np.full(CODE_ROW, 0.5, np.float32)) for number in range(count)
    ]


@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(1, 60),
    tokens=st.integers(300, 900),
    code_first=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    code_share=st.sampled_from([0.0, 0.2, 0.6]),
)
def test_a_mixture_has_code_first_and_then_its_share(steps: int, tokens: int, code_first: float, code_share: float):
    code, demonstrations = coded(mixture_code(steps, tokens, code_first, code_share)), rows(50)
    options = {"steps": steps, "tokens": tokens, "code_first": code_first, "code_share": code_share, "seed": 3}
    batches = list(mixture(code, demonstrations, **options))
    again = list(mixture(code, demonstrations, **options))
    assert all(all(map(lambda a, b: a is b, *pair)) for pair in zip(batches, again, strict=True))
    assert len(batches) == steps
    first = round(code_first * steps)
    is_code = [[len(row.token_ids) == CODE_ROW for row in batch] for batch in batches]
    assert all(all(flags) for flags in is_code[:first])
    later = sum(sum(flags) for flags in is_code[first:]) * CODE_ROW
    owed = tokens * code_share * (steps - first)
    assert owed - CODE_ROW < later <= owed, "never more code than its share, and less than a row less"
    order = [int(row.token_ids[0]) for batch in batches for row in batch if len(row.token_ids) == CODE_ROW]
    assert sorted(order) == list(range(len(order))), "none twice while there are others"
    assert first or order == sorted(order)


def test_the_loop_is_its_steps_and_its_looks_change_nothing():
    watched, batches = rows(6, 9), [rows(3, seed) for seed in range(7)]
    m = MidtrainSettings(steps=7, lr=1e-2)
    plan = midtrain_plan(m, {"watched": watched})
    by_step = model()
    optimizer, metrics = FlatOptimizer(by_step, weight_decay=m.weight_decay), []
    for step, batch in enumerate(batches):
        lr = m.lr * trapezoid(step, m.steps, m.warmup, m.constant)
        rank_batch = rows_of_rank(batch, Ranks())
        metrics.append(train_step(by_step, rank_batch, optimizer, Ranks(), lr=lr, balance=m.balance, clip=m.clip))
    for looks, expected in ((10, [1, 2, 3, 4, 5, 6, 7]), (3, [2, 4, 6, 7]), (1, [7])):
        net = model()
        loop = supervise(net, FlatOptimizer(net, weight_decay=m.weight_decay), batches, plan, Ranks(), looks=looks)
        points = dict(loop)
        assert list(points) == expected
        assert torch.equal(net.embed, by_step.embed)
        assert points[7]["watched"] == cross_entropy(by_step, watched, Ranks())
        since = metrics[(expected[-2] if len(expected) > 1 else 0) :]
        for name in ("loss", "grad_norm", "tokens", "agent_loss"):
            assert points[7][name] == pytest.approx(np.mean([point[name] for point in since]))


# Ranks


def test_two_processes_with_one_seed_draw_the_same_numbers_on_one_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    numbers, precision = [], []
    for seed in (3, 3, 2**40):
        set_up_process(seed, "bfloat16" if seed == 3 else "float32")
        precision.append(torch.get_float32_matmul_precision())
        numbers.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert numbers[0] == numbers[1] and all(a != b for a, b in zip(numbers[0], numbers[2], strict=True))
    assert precision == ["medium", "medium", "highest"]
    assert torch.get_num_threads() == 1 and os.environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.parametrize("length", [CODE_ROW, 1024])
def test_rows_of_code_have_the_length_that_is_set(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length holds in both parts of mid-training and for held-out rows, however many tokens a step has."""
    corpus = SimpleNamespace(train=[f"value_{n} = {n}\n" * 60 for n in range(200)], validation=["x = 1\n" * 4000])
    monkeypatch.setattr(recipe, "read_corpus", lambda path: corpus)
    words = train_tokenizer(corpus.train, 300)
    demonstrations = [TokenRow(np.zeros(40, np.int32), np.ones(40, np.float32))] * 50
    sizes = {"midtrain.row_tokens": length, "model.max_position_embeddings": 1024}
    chosen = override(Settings(), sizes | {"midtrain.steps": 40, "midtrain.code_share": 0.5})
    stages: Any = SimpleNamespace(
        settings=chosen, tokenizer=lambda: words, rows=lambda name: demonstrations, ranks=Ranks()
    )
    batches = list(recipe._mixture(stages, 0, chosen.midtrain, chosen.midtrain.row_tokens))
    code = [len(row.token_ids) for batch in batches for row in batch if len(row.token_ids) != 40]
    assert {*code} == {length} and len(batches) == 40
    assert len({len(row.token_ids) for row in recipe._watched(stages)["heldout_code_loss"]}) == 1
    stages.ranks = SimpleNamespace(world=16)
    assert len(recipe._held_out(stages, 12, CODE_ROW)) == 16, "a row for each rank"
    assert sum(code) == pytest.approx(768 * (2 + 0.5 * 38), rel=0.1)
    with pytest.raises(ValueError, match="must be at least 100000, the length of a row of code"):
        override(Settings(), {"midtrain.row_tokens": 100_000})


@pytest.mark.slow
def test_a_row_of_32k_tokens_trains_the_same_with_recomputed_layers() -> None:
    """The bulk phase of Composer 2 has rows of this length."""
    row = TokenRow(np.random.default_rng(0).integers(0, 31, 32_768).astype(np.int32), np.ones(32_768, np.float32))
    weights = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = Model(replace(CONFIG, max_position_embeddings=32_768))
        net.recompute = recompute
        train_step(net, [row], FlatOptimizer(net), Ranks(), lr=1e-3, balance=0.0, clip=1.0)
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.equal(*weights)
