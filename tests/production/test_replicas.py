"""Several engines behind one front, on threads in place of Ray's actors, with a tiny random model; and once on Ray."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
from tokenizers import Tokenizer

from composer_nb.harness.policy import ProviderFailure, Request
from composer_nb.labs.faults import Threads
from composer_nb.production import replicas
from composer_nb.production.policies import open_engine
from composer_nb.production.replicas import Replicas, open_replicas
from composer_nb.trainer.drafts import DraftHead, save_draft
from composer_nb.trainer.models.checkpoint import load_pretrained, published, save_pretrained
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.versions.publisher import Publisher
from tests.production import conftest as product
from tests.production import test_serve_engine as single
from tests.production.conftest import ASKED, Site, serving
from tests.production.test_serve_engine import FILES, LONG, tool
from tests.waiting import wait_until

tokenizer = product.tokenizer
model = single.model
SIZE: dict[str, Any] = {"slots": 8, "tokens": LONG, "step_tokens": 64}


@dataclass(frozen=True)
class Pair(Site):
    path: Path
    """The checkpoint."""
    publisher: Publisher
    actors: Threads
    service: Replicas

    @property
    def states(self) -> list[dict[str, int]]:
        return self.service.health()["replicas"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, model: Model, tokenizer: Tokenizer) -> Path:
    """Return a checkpoint with a head that drafts badly."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "t.json"))
    save_pretrained(model, folder / "m", dtype=torch.bfloat16, tokenizer=folder / "t.json")
    torch.manual_seed(0)
    save_draft(DraftHead(model.config.hidden_size), folder / "m")
    return folder / "m"


@contextmanager
def patched_actors(monkeypatch: pytest.MonkeyPatch, actors: Threads, module: Any = replicas) -> Iterator[None]:
    """Have `open_actors` give actors on threads."""
    monkeypatch.setattr(module, "open_actors", lambda address: nullcontext(actors))
    yield
    actors.close()


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[Pair]:
    store = path.parent / "store"
    publisher = Publisher(store, owner="test")
    publisher.publish(3, published(load_pretrained(path)), FILES)
    actors = Threads()
    with (
        pytest.MonkeyPatch.context() as patched,
        patched_actors(patched, actors),
        open_replicas(path, 2, **SIZE, follow=str(store), numerics="int8") as engine,
    ):
        options: dict[str, Any] = {"version": lambda: engine.shared.version, "health": engine.shared.health}
        with serving(engine, slots=4, **options) as site:
            yield Pair(site.answer, site.server, site.client, path, publisher, actors, engine.shared)


def token_logprobs(choice: Any) -> list[tuple[str, float]]:
    return [(token.token, token.logprob) for token in choice.logprobs.content]


def test_two_replicas_write_what_one_engine_writes_with_eight_bits_and_drafts(pair: Pair) -> None:
    """Whole answers, several choices, a second turn of each conversation, and calls that are held to their schema."""
    forced = {"tools": [tool("look", strict=True, all="boolean", deep="boolean")], "tool_choice": "required"}

    def talk(client: Any, seed: int) -> list[Any]:
        def ask(**options: Any) -> Any:
            options = {"model": "model", "seed": seed, "logprobs": True, **options}
            return client.chat.completions.create(**options).choices

        first = ask(messages=ASKED, max_tokens=20 + seed, n=1 + seed % 2)
        more = [*ASKED, {"role": "assistant", "content": first[0].message.content}, ASKED[0]]
        [second] = ask(messages=more, max_tokens=30)
        [with_calls] = ask(messages=ASKED, max_tokens=400, **forced)
        assert json.loads(with_calls.message.tool_calls[0].function.arguments).keys() == {"all", "deep"}
        return [token_logprobs(choice) for choice in (*first, second, with_calls)]

    with ThreadPoolExecutor(2) as clients:  # each holds three at most: none is forgotten
        answers = [*clients.map(lambda seed: talk(pair.client, seed), range(8))]
    with open_engine(pair.path, **SIZE, numerics="int8") as engine, serving(engine) as site:
        assert answers == [talk(site.client, seed) for seed in range(8)]
    assert all(state["held"] for state in pair.states), "both worked"


def test_a_conversation_stays_where_its_cache_is_while_that_is_idle(pair: Pair) -> None:
    moved = [state["moved_total"] for state in pair.states]
    messages: list[Any] = [*ASKED]
    for _ in range(5):
        text = pair.chat(messages=messages, seed=77, max_tokens=8).choices[0].message.content
        messages += [{"role": "assistant", "content": text}, ASKED[0]]
    assert [state["moved_total"] for state in pair.states] == moved


def test_replicas_records_survive_a_move(pair: Pair) -> None:
    """A conversation whose replica has no slot free goes on elsewhere, with the tokens and records that it would have had."""
    request = Request(rollout=-(1 << 40), token_ids=[40, 41, 42], max_tokens=20)
    followup = replace(request, token_ids=[43, 44])
    with open_engine(pair.path, **SIZE, numerics="int8") as engine:
        expected = [engine.shared.ask(turn_request) for turn_request in (request, followup)]
        records = engine.shared.release(request.rollout)
    completions = [pair.service.start(request)[0].result(60)]
    home = pair.service._conversations[request.rollout].home
    assert home is not None
    home.ready = False  # as if it were full
    completions += [pair.service.start(followup)[0].result(60)]
    home.ready = True
    moved = pair.service.release(request.rollout)
    for actual, reference in zip(completions, expected, strict=True):
        assert (actual.token_ids, actual.logprobs) == (reference.token_ids, reference.logprobs)
    for name in ("route_valid", "routes", "checks"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(records, name))


def test_what_a_killed_replica_had_under_way_goes_on_elsewhere_with_the_same_tokens(pair: Pair) -> None:
    with ThreadPoolExecutor(4) as clients:
        choices = clients.map(lambda seed: pair.chat(seed=seed, max_tokens=400, logprobs=True).choices[0], range(24))
        expected = [token_logprobs(choice) for choice in choices]

    def streamed(seed: int) -> list[tuple[str, float]]:
        options = {"seed": seed, "max_tokens": 400, "logprobs": True, "stream": True}
        parts = [part.choices[0] for part in pair.chat(**options)]
        return [pair for part in parts if part.logprobs for pair in token_logprobs(part)]

    with ThreadPoolExecutor(4) as clients:
        futures = [clients.submit(streamed, seed) for seed in range(24)]
        wait_until(lambda: pair.states[0]["running"] > 0)
        pair.actors.made["replica-0"].kill()
        assert [future.result(120) for future in futures] == expected
    wait_until(lambda: pair.states[0]["restarts_total"] == 1)
    health, version = pair.health, pair.service.version
    assert health["policy_version"] == version and [state["restarts_total"] for state in health["replicas"]] == [1, 0]
    # It loads torch again, maybe beside much else.
    wait_until(lambda: all(state["ready"] for state in pair.states), 300)
    lines = pair.metrics.splitlines()
    assert 'composer_nb_replica_restarts_total{replica="0"} 1' in lines
    assert "# TYPE composer_nb_replica_restarts_total counter" in lines
    assert f'composer_nb_replica_policy_version{{replica="1"}} {version}' in lines
    with ThreadPoolExecutor(4) as clients:
        answered = [*clients.map(lambda seed: pair.chat(seed=seed, max_tokens=20, logprobs=True), range(4))]
    drawn = [token_logprobs(completion.choices[0]) for completion in answered]
    assert drawn == [tokens[:20] for tokens in expected[:4]]


def test_replicas_raise_what_an_actor_cannot_open(pair: Pair) -> None:
    options = {"path": pair.path, **SIZE, "numerics": "int9"}
    with pytest.raises(ValueError, match="--numerics int9: there are float32"), Replicas(Threads(), [options]):  # type: ignore[arg-type]
        pass


@pytest.mark.slow
def test_replicas_on_ray(path: Path) -> None:
    """A killed actor's turns go on elsewhere, and the end of the server answers what is under way and leaves no process. The
    signal reaches all its processes at once, as from a terminal or a supervisor."""
    words = ["-m", "composer_nb.cli", "serve", "--model", str(path), "--replicas", "2", "--port", "0"]
    front = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert front.stdout is not None
        url = front.stdout.readline().strip()
        processes = psutil.Process(front.pid).children(recursive=True)

        def states() -> list[dict[str, int]]:
            with urllib.request.urlopen(url.removesuffix("/v1") + "/health") as reply:
                return list(json.load(reply)["replicas"])

        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client, ThreadPoolExecutor(8) as clients:

            def ask(seed: int) -> list[str]:
                options: dict[str, Any] = {"model": "m", "messages": ASKED, "max_tokens": 3000, "temperature": 2.0}
                choices = client.chat.completions.create(**options, n=4, seed=seed, stop="no such text").choices
                return [choice.message.content for choice in choices]

            answers_before = [*clients.map(ask, range(8))]
            repeats = clients.map(ask, range(8))
            wait_until(lambda: states()[0]["running"] > 0)
            os.kill(states()[0]["pid"], signal.SIGKILL)
            assert [*repeats] == answers_before
            last = [clients.submit(ask, seed) for seed in range(8)]
            wait_until(lambda: any(state["running"] for state in states()))
            os.killpg(front.pid, signal.SIGTERM)
            answers = [answer.result() for answer in last if answer.exception(60) is None]  # others came too late
            assert answers and all(answer in answers_before for answer in answers)
        assert front.wait(120) == 130
        assert not psutil.wait_procs(processes, 10)[1]
    finally:
        front.kill()
        front.wait()


def test_a_closed_service_refuses(pair: Pair) -> None:
    pair.service.__exit__(None, None, None)
    with pytest.raises(ProviderFailure, match="were closed"):
        pair.service.start(Request(rollout=0, token_ids=[5], max_tokens=2))
    assert pair.service.release(0).route_valid.size == 0
