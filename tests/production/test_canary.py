"""A new version for a share of the users first: the statistics by simulation, the rest with real processes and a tiny model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_nb.harness.policy import Completion
from composer_nb.harness.rollout import Kind
from composer_nb.labs.faults import Threads
from composer_nb.production import canary
from composer_nb.production.canary import FILE, LEAST, Canary, Known, Trial, is_early, open_canary
from composer_nb.production.record import ConversationRow, RolloutRecord, Verdict, served, user_digest
from composer_nb.production.replicas import STILLBORN
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.versions.publisher import Publisher
from tests.production import conftest as product
from tests.production import test_replicas as several
from tests.production.conftest import ASKED, Site, serving
from tests.production.test_replicas import SIZE
from tests.production.test_serve_engine import FILES, turned
from tests.waiting import wait_until

tokenizer, model, path = product.tokenizer, several.model, several.path
SHARE, VERDICTS = 0.5, LEAST


def users(*verdicts: float) -> dict[str, dict[str, float]]:
    """Return one verdict of each user."""
    return {f"u{n}": {f"r{n}": verdict} for n, verdict in enumerate(verdicts)}


def run_trial(early: float, usual: float, verdicts: int, seed: int, user_count: int = 10**9) -> tuple[str, int]:
    """Return the outcome with `user_count` users and the number of verdicts on the new version. A fifth of the users are early,
    and each accepts with a probability of his own around these means."""
    rng, trial = np.random.default_rng(seed), Trial(1, verdicts)
    acceptance: dict[str, float] = {}
    while not (outcome := trial.outcome):
        user = f"{seed} {rng.integers(user_count)}"
        mean, side = (early, trial.early) if is_early(user, 0.2) else (usual, trial.usual)
        accepts = acceptance.setdefault(user, rng.beta(4 * mean, 4 * (1 - mean)))
        judged = side.setdefault(user, {})
        judged[f"{user} {len(judged)}"] = float(rng.random() < accepts)
    return outcome, trial.counts()["early"]


@pytest.mark.parametrize("user_count", [150, 10**9])
def test_a_version_as_good_as_the_old_one_is_seldom_withdrawn_though_each_verdict_is_looked_at(user_count: int) -> None:
    """Whether each user gives one verdict or several."""
    runs = [run_trial(0.55, 0.55, 60, seed, user_count) for seed in range(15)]
    assert sum(outcome == "withdrawn" and count < 60 for outcome, count in runs) <= 1
    assert sum(outcome == "promoted" for outcome, _ in runs) >= 8  # the others lie more than MOST_LOST below by chance


def test_a_version_that_breaks_things_is_withdrawn_long_before_the_last_verdict() -> None:
    runs = [run_trial(0.05, 0.55, 500, seed) for seed in range(12)]
    assert {outcome for outcome, _ in runs} == {"withdrawn"}
    assert np.median([count for _, count in runs]) < 60


def test_nothing_is_decided_on_few_users_and_a_loss_that_chance_could_explain_is_not_promoted() -> None:
    few = {"one": {f"r{n}": 0.0 for n in range(500)}, **users(*[0.0] * (LEAST - 2))}
    trial = Trial(1, 10, few, users(*[1.0] * 500))
    assert trial.outcome == ""
    assert Trial(1, 200, users(0.0, *[1.0] * (LEAST - 1)), users(*[1.0] * 1000)).outcome == ""
    usual = users(*[1.0] * 60, *[0.0] * 40)
    worse_trial = Trial(1, 100, users(*[1.0] * 50, *[0.0] * 50), usual)
    assert worse_trial.interval()[2] > 0
    assert worse_trial.outcome == "withdrawn"
    assert Trial(1, 100, users(*[1.0] * 58, *[0.0] * 42), usual).outcome == "promoted"


@given(st.floats(-100, 100), st.integers(LEAST, 200), st.integers(LEAST, 200))
def test_equal_verdicts_are_promoted(value: float, early: int, usual: int) -> None:
    assert Trial(1, LEAST, users(*[value] * early), users(*[value] * usual)).outcome == "promoted"


def test_the_share_of_users_is_as_asked_and_a_larger_one_holds_the_smaller() -> None:
    names = [f"user {n}" for n in range(10_000)]
    for share in (0.01, 0.2, 0.5):
        assert np.mean([is_early(user, share) for user in names]) == pytest.approx(share, abs=0.02)
    assert {user for user in names if is_early(user, 0.1)} < {user for user in names if is_early(user, 0.3)}


@pytest.fixture
def front(tmp_path: Path) -> Canary:
    """Return two replicas that have not begun, the early one at a new version."""
    state = Known(store="s", trusted=3)
    replicas = Canary(cast(Any, None), [{"slots": 1}, {"slots": 1}], SHARE, VERDICTS, state, tmp_path / FILE)
    replicas.early.version = 4
    return replicas


def test_a_verdict_counts_for_its_user_and_the_versions_of_all_parts(
    front: Canary, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Also after a restart between the parts, or before the verdict."""
    for name, written_by in (("a", [3, 4]), ("b", [4]), ("c", [4])):
        for version in written_by:
            row = ConversationRow(name=name, user="ann")
            turn = Completion(rollout=0, token_ids=[5], logprobs=[0.0], policy_versions=[version])
            row.transcript.wrote(turn, [Kind.FINAL_MESSAGE])
            RolloutRecord(tmp_path, tokenizer).keep(name, [row])
        RolloutRecord(tmp_path, tokenizer, front.judged).grade(name, Verdict(reward=1.0))
    assert (front._trial.early, front._trial.usual) == ({user_digest("ann"): {"b": 1.0, "c": 1.0}}, {})


def test_the_version_is_that_of_the_early_replica_when_no_usual_one_is_left(front: Canary) -> None:
    [usual] = front.usual
    assert front.version == usual.version == -1
    usual.stillborn = STILLBORN
    assert front.version == 4


@dataclass(frozen=True)
class Trying(Site):
    canary: Canary

    def ask(self, user: str, name: str, messages: list[Any] = ASKED) -> str:
        """Return the answer of a recorded conversation."""
        body: dict[str, Any] = {"rollout": name}
        completion = self.chat(messages=messages, user=user, max_tokens=4, seed=0, extra_body=body)
        return completion.choices[0].message.content or ""

    def judge(self, name: str, reward: float) -> None:
        assert self.grade(name, reward=reward)["status"] == 200


@contextmanager
def site(path: Path, store: str, run: Path) -> Iterator[Trying]:
    with (
        pytest.MonkeyPatch.context() as patched,
        several.patched_actors(patched, Threads(), canary),
        open_canary(path, 1, share=SHARE, verdicts=VERDICTS, run=run, follow=store, **SIZE) as engine,
    ):
        options: dict[str, Any] = {"version": lambda: engine.shared.version, "health": engine.shared.health}
        with serving(engine, run, slots=4, **options) as served_site:
            yield Trying(served_site.answer, served_site.server, served_site.client, engine.shared)


def versions(run: Path, name: str) -> set[int]:
    return {int(v) for segment in served(run)[name].rollout.segments for v in segment.policy_version[segment.acted]}


@pytest.mark.whole
def test_a_bad_version_leaves_its_users_and_a_good_one_reaches_all_of_them(path: Path, tmp_path: Path) -> None:
    store, run = str(tmp_path / "store"), tmp_path / "run"
    weights = load_pretrained(path)
    names = [f"u{n}" for n in range(200)]
    early, usual = ([name for name in names if is_early(name, SHARE) == first][:LEAST] for first in (True, False))
    publisher = Publisher(store, owner="test")
    publisher.publish(3, turned(weights, 0.0), FILES)
    with site(path, store, run) as server:
        assert server.health["canary"] == {"share": SHARE, "early": 3, "trusted": 3, "withdrawn": -1}

        publisher.publish(4, turned(weights, 0.5), FILES)
        wait_until(lambda: server.canary.early.version == 4)
        first = server.ask(early[0], "open")
        for user in usual:
            server.ask(user, f"{user}-4")
            server.judge(f"{user}-4", 1.0)
        for user in early:
            server.ask(user, f"{user}-4")
            server.judge(f"{user}-4", 1.0)  # a second verdict takes the place of the first
            server.judge(f"{user}-4", 0.0)
        assert server.canary.known.withdrawn == 4
        assert (versions(run, f"{early[0]}-4"), versions(run, f"{usual[0]}-4")) == ({4}, {3})
        wait_until(lambda: server.canary.early.version == 3)
        # The conversation goes on, in the old version from its next token on.
        server.ask(early[0], "open", [*ASKED, {"role": "assistant", "content": first}, ASKED[0]])
        server.judge("open", 1.0)
        assert versions(run, "open") == {3, 4}
        assert server.health["canary"] == {"share": SHARE, "early": 3, "trusted": 3, "withdrawn": 4}

        publisher.publish(6, turned(weights, 0.25), FILES)
        wait_until(lambda: server.canary.early.version == 6)
        assert server.canary.version == 3
        for number, (new, old) in enumerate(zip(early, usual, strict=True)):
            for user in (new, old):
                server.ask(user, f"{user}-6")
                server.judge(f"{user}-6", float(number % 2))
            if number == 0:
                trial = server.health["canary"]
                assert (trial["trying"], trial["verdicts"]) == (6, {"early": 1, "usual": 1})
                server.judge(f"{old}-4", 0.0)  # from before the trial
                assert server.health["canary"]["verdicts"] == {"early": 1, "usual": 1}
        assert server.health["canary"] == {"share": SHARE, "early": 6, "trusted": 6, "withdrawn": 4}
        assert "composer_nb_canary_trusted 6" in server.metrics
        wait_until(lambda: server.canary.version == 6)

    publisher.publish(7, turned(weights, 0.1), FILES)
    with site(path, store, run) as server:
        wait_until(lambda: server.canary.early.version == 7)
        assert server.canary.version == 6
        assert server.health["canary"]["trying"] == 7
    for text, why in (
        ("{", "damaged"),
        (json.dumps({"store": "elsewhere", "trusted": 6}), "is of elsewhere and"),
        (json.dumps({"store": store, "trusted": 9}), "trusts version 9"),
    ):
        (run / FILE).write_text(text)
        with pytest.raises(ValueError, match=why), site(path, store, run):
            pass
