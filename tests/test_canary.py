"""A new version for a share of the users first: the statistics by simulation, the rest with real processes and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from composer_nb.canary import FILE, LEAST, Canary, Trial, is_early, open_canary
from composer_nb.cli import main
from composer_nb.harness.product.conversations import Conversations
from composer_nb.harness.product.record import Record, served
from composer_nb.harness.product.serve import ChatServer
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.versions.publisher import Publisher
from tests import test_replicas as several
from tests.harness.product import conftest as product
from tests.test_replicas import SIZE
from tests.test_serve_engine import ASKED, FILES, turned, wait_until

tokenizer, model, path = product.tokenizer, several.model, several.path
SHARE, VERDICTS = 0.5, 12


def run_trial(early: float, usual: float, verdicts: int, seed: int, share: float = 0.2) -> tuple[str, int]:
    """Return the outcome with users who accept with these probabilities, and the number of verdicts on the new version."""
    rng, trial = np.random.default_rng(seed), Trial(1, verdicts)
    while not trial.outcome:
        if rng.random() < share:
            trial.early.append(float(rng.random() < early))
        else:
            trial.usual.append(float(rng.random() < usual))
    return trial.outcome, len(trial.early)


def test_a_version_as_good_as_the_old_one_is_seldom_withdrawn_though_each_verdict_is_looked_at() -> None:
    found = [run_trial(0.55, 0.55, 150, seed) for seed in range(60)]
    before_the_end = sum(outcome == "withdrawn" and count < 150 for outcome, count in found)
    assert before_the_end <= 3
    assert (
        sum(outcome == "promoted" for outcome, _ in found) >= 42
    )  # the others lie more than MOST_LOST below by chance


def test_a_version_that_breaks_things_is_withdrawn_long_before_the_last_verdict() -> None:
    found = [run_trial(0.05, 0.55, 500, seed) for seed in range(40)]
    assert {outcome for outcome, _ in found} == {"withdrawn"}
    assert np.median([count for _, count in found]) < 40


def test_nothing_is_decided_on_few_verdicts_and_a_loss_that_chance_could_explain_is_not_promoted() -> None:
    few = Trial(1, 10, early=[0.0] * (LEAST - 1), usual=[1.0] * 500)
    assert few.outcome == ""
    lost = Trial(1, 100, early=[1.0] * 50 + [0.0] * 50, usual=[1.0] * 60 + [0.0] * 40)
    assert lost.interval()[2] > 0
    assert lost.outcome == "withdrawn"
    assert Trial(1, 100, early=[1.0] * 58 + [0.0] * 42, usual=lost.usual).outcome == "promoted"


def test_the_share_of_users_is_as_asked_and_a_larger_one_holds_the_smaller() -> None:
    users = [f"user {n}" for n in range(10_000)]
    for share in (0.01, 0.2, 0.5):
        assert np.mean([is_early(user, share) for user in users]) == pytest.approx(share, abs=0.02)
    assert {user for user in users if is_early(user, 0.1)} < {user for user in users if is_early(user, 0.3)}


@dataclass(frozen=True)
class Site:
    canary: Canary
    server: ChatServer
    client: openai.OpenAI

    def ask(self, user: str, name: str, messages: list[Any] = ASKED) -> str:
        """Return the answer of a recorded conversation."""
        to = self.client.with_options(base_url=self.server.url.replace("/v1", f"/rollouts/{name}/v1"))
        given: dict[str, Any] = {"model": "model", "user": user, "max_tokens": 4, "seed": 0}
        return to.chat.completions.create(messages=messages, **given).choices[0].message.content or ""

    def judge(self, name: str, reward: float) -> None:
        url = self.server.url.replace("/v1", f"/rollouts/{name}/grade")
        assert httpx.post(url, json={"reward": reward}, timeout=60).status_code == 200

    @property
    def health(self) -> Any:
        return httpx.get(self.server.url.replace("/v1", "/health"), timeout=60).json()


@contextmanager
def site(path: Path, store: str, run: Path) -> Iterator[Site]:
    with open_canary(path, 1, share=SHARE, verdicts=VERDICTS, run=run, follow=store, **SIZE) as engine:
        record = Record(run, engine.tokenizer, engine.shared.judged)
        answer = Conversations(engine.shared, engine.tokenizer, engine.format, engine.tokens, record)
        told: dict[str, Any] = {
            "version": lambda: engine.shared.version,
            "replicas": engine.shared.states,
            "canary": engine.shared.told,
            "grade": answer.grade,
        }
        with (
            ChatServer(answer, slots=4, **told) as server,
            openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        ):
            yield Site(engine.shared, server, client)


def versions(run: Path, name: str) -> set[int]:
    return {int(v) for each in served(run)[name].rollout.segments for v in each.policy_version[each.acted]}


def test_a_bad_version_leaves_its_users_and_a_good_one_reaches_all_of_them(path: Path, tmp_path: Path) -> None:
    store, run = str(tmp_path / "store"), tmp_path / "run"
    weights = load_pretrained(path)
    early = next(f"u{n}" for n in range(99) if is_early(f"u{n}", SHARE))
    usual = next(f"u{n}" for n in range(99) if not is_early(f"u{n}", SHARE))
    with closing(Publisher(store, owner="test")) as publisher:
        publisher.publish(3, turned(weights, 0.0), FILES)
        with site(path, store, run) as here:
            assert here.health["canary"] == {"share": SHARE, "trusted": 3, "withdrawn": -1}

            publisher.publish(4, turned(weights, 0.5), FILES)
            wait_until(lambda: here.canary.early.version == 4)
            first = here.ask(early, "open")
            for n in range(30):
                for user, reward in ((early, 0.0), (usual, 1.0)):
                    here.ask(user, f"{user}-4-{n}")
                    here.judge(f"{user}-4-{n}", reward)
                if here.canary.withdrawn == 4:
                    break
            assert here.canary.withdrawn == 4
            assert (versions(run, f"{early}-4-0"), versions(run, f"{usual}-4-0")) == ({4}, {3})
            wait_until(lambda: here.canary.early.version == 3)
            # The conversation goes on, in the old version from its next token on.
            here.ask(early, "open", [*ASKED, {"role": "assistant", "content": first}, ASKED[0]])
            here.judge("open", 1.0)
            assert versions(run, "open") == {3, 4}
            assert here.health["canary"] == {"share": SHARE, "trusted": 3, "withdrawn": 4}

            publisher.publish(5, turned(weights, 0.25), FILES)
            wait_until(lambda: here.canary.early.version == 5)
            assert here.canary.usual.version == 3
            for n in range(VERDICTS):
                for user in (early, usual):
                    here.ask(user, f"{user}-5-{n}")
                    here.judge(f"{user}-5-{n}", float(n % 2))
                if n == 0:
                    trial = here.health["canary"]
                    assert (trial["trying"], trial["verdicts"]) == (5, {"early": 1, "usual": 1})
            assert here.health["canary"] == {"share": SHARE, "trusted": 5, "withdrawn": 4}
            wait_until(lambda: here.canary.usual.version == 5)
        assert json.loads((run / FILE).read_text()) == {"trusted": 5, "withdrawn": 4}

        publisher.publish(6, turned(weights, 0.1), FILES)
        with site(path, store, run) as here:
            wait_until(lambda: here.canary.early.version == 6)
            assert here.canary.usual.version == 5
            assert here.health["canary"]["trying"] == 6


def test_a_store_without_a_version_is_refused(path: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="no version yet"),
        open_canary(path, 1, share=0.1, verdicts=5, run=tmp_path, follow=str(tmp_path / "store"), **SIZE),
    ):
        pass


@pytest.mark.parametrize(
    "given", [["--canary", "0.1"], ["--canary", "1.5", "--follow", "s", "--record", "r"], ["--canary", "-1"]]
)
def test_serve_says_what_a_canary_needs(given: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(path), *given]) == 2
    assert "--canary" in capsys.readouterr().err
