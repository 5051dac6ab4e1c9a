"""Global packing: nothing lost or twice, limits kept, close to the best there is, and far better than first-fit."""

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from composer_nb.trainer.learning.balance import Cost, Packing, deal_out, first_fit, pack
from composer_nb.trainer.learning.packing import Stream, families
from composer_nb.trainer.models.transformer import ModelConfig, weight_counts
from tests.trainer.learning.test_packing import stream
from tests.trainer.learning.trees import tree_tokens

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
QUADRATIC = Cost(linear=1.0, quadratic=0.1)


def costs(lengths: list[int], cost: Cost = QUADRATIC) -> list[float]:
    return [cost.row(length) for length in lengths]


def check(packing: Packing, lengths: list[int], ranks: int, limit: int) -> None:
    dealt = [item for row in packing.items for part in row for item in part]
    assert sorted(dealt) == list(range(len(lengths))), "nothing lost, nothing twice"
    assert {len(row) for row in packing.items} == {ranks}, "as many micro-batches on each rank"
    for row, load_R in zip(packing.items, packing.load_MR, strict=True):
        assert any(row), "no micro-batch is empty on all ranks"
        for part, load in zip(row, load_R, strict=True):
            assert len(part) == 1 or sum(lengths[item] for item in part) <= limit
            assert load == pytest.approx(sum(QUADRATIC.row(lengths[item]) for item in part))
    assert packing.imbalance >= -1e-9


@example([2, 4, 5, 5, 5, 5, 8, 12, 24], 1, 5)  # of which a micro-batch was left without items
@given(LENGTHS, st.integers(1, 5), st.integers(5, 90))
def test_every_item_is_dealt_once_within_the_limit_and_never_slower_than_first_fit(lengths, ranks: int, limit: int):
    packing, plain = pack(lengths, costs(lengths), ranks, limit), first_fit(lengths, costs(lengths), ranks, limit)
    check(packing, lengths, ranks, limit)
    check(plain, lengths, ranks, limit)
    assert packing.step <= plain.step * (1.01 + 1e-9)
    assert packing.items == pack(lengths, costs(lengths), ranks, limit).items, "every rank finds the same"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
def test_one_micro_batch_is_within_graham_s_bound_of_the_best(lengths: list[int], ranks: int):
    weight = costs(lengths)
    best = min(
        max(sum(w for w, rank in zip(weight, dealt, strict=True) if rank == r) for r in range(ranks))
        for dealt in product(range(ranks), repeat=len(lengths))
    )
    step_cost = pack(lengths, weight, ranks, sum(lengths)).step
    assert best - 1e-9 <= step_cost <= best * (4 / 3 - 1 / (3 * ranks)) * 1.01 + 1e-9


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=25), min_size=1, max_size=12),
    st.integers(2, 4),
    st.integers(8, 60),
)
def test_streams_are_dealt_once_and_the_tree_of_each_micro_batch_keeps_the_limit(rows, ranks: int, limit: int):
    streams = [stream(row) for row in rows]
    parts, packing = deal_out(streams, families(streams), ranks, limit, QUADRATIC)
    everyone = [id(s) for part in parts for batch in part for s in batch]
    assert sorted(everyone) == sorted(map(id, streams))
    assert {len(part) for part in parts} == {len(packing.items)} and len(parts) == ranks
    for batch in (batch for part in parts for batch in part):
        assert len(batch) <= 1 or tree_tokens(batch) <= limit


def test_a_group_stays_together_until_ranks_would_wait_for_it():
    def group(token: int) -> list[Stream]:
        return [stream([token] * 20 + [number, number]) for number in range(4)]

    streams = [*group(7), *group(8)]
    parts, _ = deal_out(streams, families(streams), 2, 1000, Cost(linear=1.0, quadratic=0.0))
    assert [{int(s.token_ids[0]) for s in part[0]} for part in parts] in ([{7}, {8}], [{8}, {7}])
    parts, _ = deal_out(streams[:4], families(streams[:4]), 4, 1000, Cost(linear=1.0, quadratic=0.0))
    assert [len(part[0]) for part in parts] == [1, 1, 1, 1], "four ranks would rather not wait"


def test_costs_are_those_of_the_model_s_products():
    c = ModelConfig(tie_word_embeddings=False)
    counts, cost = weight_counts(c), Cost.of(c)
    assert cost.linear == 6 * (counts["active"] - counts["embedding"])
    # 4 layers of 4 heads of width 32: a score and a weighted value are 2 · 32 operations each, backward costs twice forward.
    assert cost.quadratic == 3 * 4 * 4 * (2 * 32 + 2 * 32)
    assert cost.row(10) == pytest.approx(10 * cost.linear + 55 * cost.quadratic)
