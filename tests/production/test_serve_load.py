"""The inference service under load: users before rollouts, a thousand requests, clients that vanish, an end without a loss."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from composer_nb.harness.policy import Completion, ProviderFailure, Request, SampledToken
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.services.inference import Inference
from tests.production import conftest as product
from tests.production.test_serve_engine import ASKED, LONG, Endless, serving, wait_until
from tests.production.test_serve_engine import model as tiny

tokenizer, model = product.tokenizer, tiny


def test_a_user_goes_before_rollouts_within_two_steps_and_they_go_on(model: Model) -> None:
    """While a rollout's long prompt is read in parts."""
    engine = Engine(model, stop=frozenset(), slots=4, max_length=LONG, step_tokens=8)
    steps, told = Counter[str](), list[int]()
    step = engine.step

    def counted() -> Any:
        steps["made"] += 1
        return step()

    def heard(drawn: SampledToken) -> None:
        told.append(steps["made"])

    engine.step = counted  # type: ignore[method-assign]
    rollouts = [Request(rollout=n, token_ids=[70 + n] * (3500 if n == 3 else 5), max_tokens=400) for n in range(4)]
    with Inference(engine) as service:
        waiting = threading.Thread(target=lambda: found.extend(service.exchange("worker", rollouts)))
        found: list[Completion] = []
        waiting.start()
        wait_until(lambda: steps["made"] > 5)
        submit = engine.submit

        def noted(request: Request) -> None:
            steps["asked"] = steps["made"]
            submit(request)

        engine.submit = noted  # type: ignore[method-assign]
        [answer] = service.start(Request(rollout=9, token_ids=[70] * 9, max_tokens=30, priority=0, heard=heard))
        answer.result()
        assert told[0] - steps["asked"] <= 2 and told[0] < 3500 / 8, "the prompt is not read yet"
        service.release(9)
        while len(found) < 4:
            waiting.join()
            found += service.exchange("worker", [])
    alone = Engine(model, stop=frozenset(), slots=4, max_length=LONG).generate(rollouts)
    assert sorted(found, key=lambda done: done.rollout) == alone, "they were sampled as if no user had been there"


def test_in_lockstep_the_engine_stands_still_until_somebody_asks(model: Model) -> None:
    engine = Engine(model, stop=frozenset(), slots=3, max_length=LONG)
    with Inference(engine, lockstep=True) as service:
        first = service.exchange("w", [Request(rollout=n, token_ids=[70], max_tokens=9 - n // 2) for n in range(3)])
        made = engine.sampled
        assert [done.rollout for done in first] == [2] and made == 3 * 8
        time.sleep(0.1)
        assert service.between(lambda: engine.sampled) == made
        assert sorted(done.rollout for done in service.exchange("w", [])) == [0, 1]
        service.start(Request(rollout=7, token_ids=[70], max_tokens=9))
        service.release(7)
    with pytest.raises(ProviderFailure):
        service.exchange("w", [Request(rollout=8, token_ids=[70], max_tokens=9)])


@pytest.mark.slow
def test_a_thousand_requests_at_once_all_get_their_answers(model: Model, tokenizer: Tokenizer) -> None:
    """All in the queue together, of which none is turned away: each has the answer to its own question."""

    async def ask(url: str) -> list[tuple[int, str]]:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:

            async def one(seed: int) -> tuple[int, str]:
                body = {"messages": ASKED, "max_tokens": 3, "seed": seed % 7, "temperature": 2}
                answer = await client.post(url, json=body)
                return answer.status_code, answer.json()["choices"][0]["message"]["content"]

            return list(await asyncio.gather(*(one(seed) for seed in range(1000))))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with serving(model, tokenizer, slots=16, queue=1000) as small:
        found = asyncio.run(ask(f"{small.server.url}/chat/completions"))
        alone = {
            seed: small.chat(seed=seed, max_tokens=3, temperature=2).choices[0].message.content for seed in range(7)
        }
    assert found == [(200, alone[seed % 7]) for seed in range(1000)] and len({*alone.values()}) > 1


def test_a_server_that_ends_answers_what_is_under_way_and_nothing_new(model: Model, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, slots=1, kind=Endless) as small:
        found = list[Any]()
        threads = [threading.Thread(target=lambda: found.append(small.chat(max_tokens=60))) for _ in range(3)]
        for each in threads:
            each.start()
        wait_until(lambda: len(small.server._work) == 3)
        ends = threading.Thread(target=small.server.drain)
        ends.start()
        wait_until(lambda: small.server._draining)
        for ask in (small.chat, lambda: small.client.get("/../health", cast_to=object)):
            with pytest.raises(openai.InternalServerError):
                ask()
        for each in (ends, *threads):
            each.join()
    assert [done.usage.completion_tokens for done in found] == [60] * 3


def test_text_is_continued_whole_and_as_a_stream(model: Model, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, slots=4) as small:

        def complete(**given: Any) -> Any:
            return small.client.completions.create(
                **{"model": "model", "prompt": "def f(x):", "max_tokens": 12, **given}
            )

        whole = complete(seed=3, logprobs=2, n=2)
        first = whole.choices[0]
        assert whole.object == "text_completion" and whole.usage.prompt_tokens == 9 and len(whole.choices) == 2
        assert (
            len(first.logprobs.tokens) == len(first.logprobs.token_logprobs)
            and len(first.logprobs.top_logprobs[0]) == 2
        )
        assert "".join(part.choices[0].text for part in complete(seed=3, stream=True) if part.choices) == first.text
        assert complete(seed=3, prompt=tokenizer.encode("def f(x):").ids).choices[0].text == first.text
        assert complete(seed=3, stop=first.text[4]).choices[0].text == first.text[: first.text.index(first.text[4])]
        assert complete(seed=3, top_p=1e-6).choices[0].text == complete(temperature=0).choices[0].text
        assert complete(max_tokens=None).usage.completion_tokens == 16
        for wrong in (
            {"prompt": ""},
            {"echo": True},
            {"prompt": [999]},
            {"prompt": ["a", "b"]},
            {"suffix": "x"},
            {"best_of": 2},
        ):
            with pytest.raises(openai.BadRequestError):
                complete(**wrong)
        narrow = small.chat(seed=4, max_tokens=9, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].message.content
        assert narrow == small.chat(temperature=0, max_tokens=9).choices[0].message.content
