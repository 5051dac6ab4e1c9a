"""A short run of RL with one fault: nothing is lost, and nothing counts twice."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from composer_nb.labs.faults import Aftermath, DeliveredTwice, Fault, KilledInSwap, LostDispatch, impatient, run_with
from composer_nb.trainer.recipe.reader import example_run


def successor_is_newer(kill: KilledInSwap, record: Aftermath) -> bool:
    alive_with_it = (kill.victim, kill.version) not in {(engine, version) for engine, version, _ in record.served}
    return alive_with_it and record.starts["engine-3"] >= kill.version > record.starts[kill.victim]


def first_is_replaced(loss: LostDispatch, record: Aftermath) -> bool:
    lost, *others = map(record.trained_of, loss.dispatches)
    return lost == 0 and sum(others) == 4


def repeats_are_ignored(twice: DeliveredTwice, record: Aftermath) -> bool:
    ignored = sum(count for name, count in record.counts.items() if name.startswith("ignored"))
    return 0 < ignored <= twice.repeated and record.counts["finished"] >= 32


@pytest.mark.whole
@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        (KilledInSwap(), successor_is_newer),
        (LostDispatch(), first_is_replaced),
        (DeliveredTwice(), repeats_are_ignored),
    ],
    ids=["swap", "request", "report"],
)
def test_a_run_with_a_fault_is_whole(fault: Fault, shows: Callable[..., bool]):
    record = run_with(fault, example_run(), impatient() if isinstance(fault, LostDispatch) else {})
    assert shows(fault, record), record
    assert Counter(slot for slot, _, _ in record.trained) == dict.fromkeys(range(8), 4)
    assert record.whole and record.staleness_max <= 2 and all(same_hash for _, _, same_hash in record.served)
    broken = (
        replace(record, trained=[*record.trained, record.trained[0]]),
        replace(record, ledger=record.ledger | {"trained": record.ledger["trained"] + 1}),
        replace(record, prompts=replace(record.prompts, skipped=(3,))),
    )
    assert not any(other.whole for other in broken)
