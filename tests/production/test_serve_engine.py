"""The server over a real engine with a tiny random model, asked by OpenAI's own client: what is drawn, versions, and load."""

import json
import time
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import User
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.environment import Carried
from composer_nb.harness.policy import Request
from composer_nb.production.policies import OpenEngine, open_engine
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.checkpoint import load_pretrained, published
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.services import inference
from composer_nb.trainer.services.inference import Inference, Updates, following
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.store import VersionStore
from tests.production import conftest
from tests.production.conftest import ASKED, Site
from tests.tiny_models import SIZES
from tests.waiting import wait_until

tokenizer = conftest.tokenizer
LONG = 4000
FILES = {"config.json": b"{}"}


@dataclass(frozen=True)
class Served(Site):
    engine: Engine

    def post(self, path: str, body: Any) -> Any:
        return self.client.post(path, body=body, cast_to=dict[str, Any])


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Model:
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": LONG}
    model = Model(ModelConfig(**sizes))
    with torch.no_grad():
        model.final_norm.mul_(0.15)
    return model


class Slow(Engine):
    def _forward(self, slots: Any) -> Any:
        time.sleep(0.002)
        return super()._forward(slots)


class Endless(Slow):
    """Writes letters only, so that no turn ends."""

    def _forward(self, slots: Any) -> Any:
        logits = super()._forward(slots)
        letters = logits[:, 70:80].clone()
        return logits.fill_(-float("inf")).index_copy_(1, torch.arange(70, 80), letters)


@contextmanager
def serving(
    model: Model,
    tokenizer: Tokenizer,
    slots: int = 4,
    kind: type[Engine] = Engine,
    store: Path | None = None,
    version: int = 0,
    **options: Any,
) -> Iterator[Served]:
    engine = kind(model, stop=QwenRenderer(tokenizer).stop, slots=slots, max_length=LONG, version=version)
    updates = Updates(store, "served", model.config) if store else None
    with Inference(engine, updates) as shared, following(shared) if store else nullcontext():
        trained = Carried(renderer="qwen", tools="tiny")
        served_engine = OpenEngine(
            shared=shared, tokenizer=tokenizer, format=QwenRenderer, tokens=LONG, training=trained
        )
        with conftest.serving(served_engine, version=lambda: engine.version, **options) as site:
            yield Served(site.answer, site.server, site.client, engine)


@pytest.fixture(scope="module")
def served(model: Model, tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(model, tokenizer) as site:
        yield site


# Many at once


def test_many_requests_at_once_are_all_answered_and_share_the_steps_of_the_engine(served: Served) -> None:
    assert served.engine.capacity < 8, "there are more threads that answer than conversations that fit"
    widths, step = list[int](), served.engine.step

    def counted_step() -> Any:
        widths.append(sum(not slot.waiting for slot in served.engine._live.values()))
        return step()

    served.engine.step = counted_step  # type: ignore[method-assign]
    with ThreadPoolExecutor(20) as clients:
        completions = [*clients.map(lambda seed: served.chat(seed=seed, max_tokens=9), range(20))]
    served.engine.step = step  # type: ignore[method-assign]
    assert all(completion.usage.completion_tokens for completion in completions)
    assert max(widths) == served.engine.capacity
    assert completions[3].choices[0].message == served.chat(seed=3, max_tokens=9).choices[0].message


# Streams


def test_a_stream_comes_while_it_is_written_and_says_what_the_whole_answer_says(served: Served) -> None:
    completion = served.chat(seed=5, max_tokens=200, logprobs=True)
    served.chat()  # in the slot
    options = {"include_usage": True}
    parts = [*served.chat(seed=5, max_tokens=200, logprobs=True, stream=True, stream_options=options)]
    [choice] = completion.choices
    choices = [part.choices[0] for part in parts if part.choices]
    assert "".join(part.delta.content or "" for part in choices) == choice.message.content
    tokens = [token for part in choices if part.logprobs for token in part.logprobs.content]
    assert [token.logprob for token in tokens] == [token.logprob for token in choice.logprobs.content]
    assert [part.delta.role for part in choices if part.delta.role] == ["assistant"]
    assert [part.finish_reason for part in choices if part.finish_reason] == [choice.finish_reason]
    assert parts[-1].usage == completion.usage and not any(part.usage for part in parts[:-1])
    assert len({part.id for part in parts}) == 1


# What is drawn


def test_several_choices_are_drawn_side_by_side_and_a_seed_names_them_all(served: Served) -> None:
    forwarded = served.engine.forwarded
    several = served.chat(seed=3, n=4, max_tokens=30)
    texts = [choice.message.content for choice in several.choices]
    assert len({*texts}) == 4 and [choice.index for choice in several.choices] == [0, 1, 2, 3]
    prompt_tokens, completion_tokens = several.usage.prompt_tokens, several.usage.completion_tokens
    assert served.engine.forwarded - forwarded < prompt_tokens + completion_tokens, "the prompt is read once"
    assert served.chat(seed=3, max_tokens=30).choices[0].message.content == texts[0]
    parts = [part.choices[0] for part in served.chat(seed=3, n=4, max_tokens=30, stream=True)]
    for number, text in enumerate(texts):
        assert "".join(part.delta.content or "" for part in parts if part.index == number) == text
    more = [*ASKED, {"role": "assistant", "content": texts[2]}, ASKED[0]]
    forwarded = served.engine.forwarded
    assert served.chat(messages=more, seed=3, max_tokens=1).usage.prompt_tokens > served.engine.forwarded - forwarded


def test_the_most_probable_tokens_are_those_of_the_distribution_that_is_drawn_from(served: Served) -> None:
    options: dict[str, Any] = {"seed": 2, "max_tokens": 12, "logprobs": True, "top_logprobs": 5}
    tokens = served.chat(**options).choices[0].logprobs.content
    for token in tokens:
        values = [entry.logprob for entry in token.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert all(entry.logprob == token.logprob for entry in token.top_logprobs if entry.bytes == token.bytes != None)  # noqa: E711
    greedy = served.chat(**options, temperature=0).choices[0].logprobs.content
    assert all(token.top_logprobs[0].logprob == pytest.approx(token.logprob) for token in greedy)
    narrow = served.chat(**options, top_p=1e-6).choices[0].logprobs.content
    assert all([entry.logprob for entry in token.top_logprobs] == [0.0] == [token.logprob] for token in narrow)


# Versions


def turned(model: Model, by: float) -> dict[str, torch.Tensor]:
    return {name: tensor + (by if name == "model.norm.weight" else 0) for name, tensor in published(model).items()}


def test_new_versions_are_taken_in_the_middle_of_an_answer_and_every_answer_names_its_own(
    model: Model,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(inference, "LOOK_S", 0.02)
    publisher = Publisher(tmp_path / "store", owner="test")
    with serving(model, tokenizer, slots=2, kind=Endless, store=tmp_path / "store", version=-1) as small:
        bare = small.chat(max_tokens=3)
        assert bare.system_fingerprint is None and bare.choices[0].policy_version == -1, "the store is empty"
        publisher.publish(3, published(model), FILES)
        wait_until(lambda: [report.version for report in VersionStore(tmp_path / "store").reports()] == [3])
        assert small.chat(max_tokens=3).system_fingerprint == "v3"
        publisher.publish(4, turned(model, 0.25), FILES)  # a delta: the receiver has reported version 3
        wait_until(lambda: small.engine.version == 4)
        with small.chat(stream=True, seed=1, max_tokens=1500) as stream:
            parts = [next(iter(stream))]
            publisher.publish(5, turned(model, 0.5), FILES)
            parts += stream
        assert parts[-1].system_fingerprint == "v5" and parts[-1].choices[0].policy_version == 5
        old, new = parts[-1].choices[0].weight_versions
        assert (old["version"], old["start"], new["version"]) == (4, 0, 5) and old["end"] == new["start"] > 0
        spoiled = turned(model, float("nan"))
        with monkeypatch.context() as careless:  # as by another program: ours refuses numbers that are not finite
            careless.setattr("composer_nb.trainer.versions.publisher.require_finite", lambda *names: None)
            publisher.publish(6, spoiled, FILES)
        wait_until(lambda: "6 is left out" in caplog.text)
        publisher.publish(7, turned(model, 1.0), FILES)
        wait_until(lambda: small.engine.version == 7)
        torch.testing.assert_close(published(small.engine.model), turned(model, 1.0), rtol=0, atol=0)
        assert small.chat(max_tokens=3).system_fingerprint == "v7"


def test_a_checkpoint_is_served_with_the_newest_version_of_a_store(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "data/example/weights"
    with open_engine(example / "final", slots=1, tokens=300) as plain:
        assert plain.shared.version == 0
    start, publisher = published(load_pretrained(example / "start")), Publisher(tmp_path / "store", owner="test")
    publisher.publish(12, start, FILES)
    follow: dict[str, Any] = {"slots": 1, "tokens": 300, "follow": str(tmp_path / "store")}
    for damaged in (False, True):
        with open_engine(example / "final", **follow) as engine:
            assert engine.shared.version == 12
            torch.testing.assert_close(published(engine.shared.policy.model), start, rtol=0, atol=0)
        if not damaged:
            publisher.publish(13, published(load_pretrained(example / "final")), FILES)
            [file] = (tmp_path / "store" / "v000013").glob("*.safetensors")
            file.write_bytes(file.read_bytes()[:-1])


# Tokens


def test_tokens_in_and_out(served: Served, model: Model, tokenizer: Tokenizer) -> None:
    prompt = QwenRenderer(tokenizer).render([User(text="fix f")])
    sampling = {"n": 2, "max_tokens": 20, "seed": 3, "logprobs": 2}
    body = {"prompt_token_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}
    answer = served.post("/generate", body)
    engine = Engine(model, stop=QwenRenderer(tokenizer).stop, slots=1, max_length=LONG)
    [turn] = engine.generate([Request(rollout=3, token_ids=prompt, max_tokens=20)])
    first, second = answer["choices"]
    assert first["token_ids"] == turn.token_ids != second["token_ids"]
    assert first["policy_versions"] == [0] * len(turn.token_ids)
    tokens = first["logprobs"]["content"]
    assert [token["logprob"] for token in tokens] == pytest.approx(turn.logprobs, abs=1e-5)
    assert [token["token"] for token in tokens] == [f"token_id:{token}" for token in turn.token_ids]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens) and answer["system_fingerprint"] == "v0"
    routes = np.load(BytesIO(b64decode(first["routed_experts"])))
    np.testing.assert_array_equal(routes, engine.release(3).routes[:-1])
    assert routes.shape == (len(prompt) + len(turn.token_ids) - 1, 2, 2)
    assert first["finish_reason"] == ("length" if len(turn.token_ids) == 20 else "stop")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    text = served.chat(seed=3, max_tokens=20).choices[0].message.content
    assert text in tokenizer.decode(turn.token_ids, skip_special_tokens=False)


def test_what_cannot_be_continued_is_refused(served: Served) -> None:
    five, prompts = [5], [{"prompt_token_ids": []}, {"prompt_token_ids": [262]}, {"prompt_token_ids": [5] * LONG}]
    refused: list[Any] = [(body, "prompt_token_ids") for body in prompts]
    refused.append(({"prompt_token_ids": five, "sampling_params": {"n": 5}}, "n"))
    refused.append(({"prompt_token_ids": five, "priority": 1}, "priority"))
    for body, param in refused:
        with pytest.raises(openai.BadRequestError) as error:
            served.post("/generate", body)
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError) as error:  # before a stream begins
        served.chat(stream=True, messages=[*ASKED, {"role": "assistant", "content": "y"}])
    assert error.value.param == "messages" and served.post("/generate", {"prompt_token_ids": five})["choices"]


def test_a_stream_begins_at_once_and_health_and_metrics_say_what_goes_on(model: Model, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, slots=1, kind=Endless, version=7) as small:
        with ThreadPoolExecutor(3) as clients:
            futures = [clients.submit(small.chat, max_tokens=400) for _ in range(3)]
            wait_until(lambda: "\ncomposer_nb_requests_running 1\n" in small.metrics)
            [future.result() for future in futures]
        with pytest.raises(openai.BadRequestError):
            small.chat(n=0)
        text = small.metrics
        chat = 'composer_nb_requests_total{path="/v1/chat/completions",status='
        for line in (f'{chat}"200"}} 3', f'{chat}"400"}} 1', "composer_nb_tokens_written_total 1200"):
            assert f"\n{line}\n" in text
        assert "\ncomposer_nb_policy_version 7\n" in text and "\ncomposer_nb_requests_running 0\n" in text
        assert "# TYPE composer_nb_requests_total counter\ncomposer_nb_requests_total{" in text
        assert small.health == {"status": "ok", "policy_version": 7}
        with small.chat(stream=True, seed=1, max_tokens=1500) as stream:
            for _ in range(5):
                assert next(iter(stream)).choices[0].finish_reason is None
            assert small.engine.busy
        wait_until(lambda: not small.engine.busy)  # its client went away
        assert small.engine.sampled < LONG - 100


# Turns that must call a tool


def tool(name: str, *, strict: bool = False, **kinds: str) -> Any:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": [*kinds], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


LOOK, PUT = tool("look", at="integer"), tool("put", all="boolean")


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"look", "put"}), ({"type": "function", "function": {"name": "put"}}, {"put"})]
)
def test_a_turn_that_must_call_a_tool_does_so(served: Served, choice: Any, names: set[str]) -> None:
    completion = served.chat(tools=[LOOK, PUT], tool_choice=choice, n=4, seed=1, logprobs=True, top_logprobs=20)
    for sample in completion.choices:
        assert sample.finish_reason == "tool_calls" and not sample.message.content
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in sample.message.tool_calls]
        assert {name for name, _ in calls} <= names and (choice == "required" or len(calls) == 1)
        assert all(arguments.keys() == ({"at"} if name == "look" else {"all"}) for name, arguments in calls)
        for token in sample.logprobs.content:  # the distribution that was drawn from
            assert token.logprob <= 0 and sum(np.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-5
        assert any(len(written.top_logprobs) == 1 for written in sample.logprobs.content), "some tokens have no choice"
    single = served.chat(tools=[LOOK, PUT], tool_choice="required", parallel_tool_calls=False, seed=1)
    assert len(single.choices[0].message.tool_calls) == 1
    streamed = served.chat(tools=[LOOK, PUT], tool_choice=choice, seed=1, stream=True)
    parts = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or ()]
    first = "".join(part.function.arguments for part in parts if part.index == 0)
    assert first == completion.choices[0].message.tool_calls[0].function.arguments


def test_anthropics_client_can_ask_for_a_call(served: Served) -> None:
    functions = [definition["function"] for definition in (LOOK, PUT)]
    tools = [{"name": function["name"], "input_schema": function["parameters"]} for function in functions]
    options: dict[str, Any] = {"model": "model", "messages": ASKED, "max_tokens": 900, "tools": tools}
    with anthropic.Anthropic(base_url=served.server.url[:-3], api_key="none", max_retries=0) as client:
        message = client.messages.create(**options, tool_choice={"type": "tool", "name": "look"})
        assert message.stop_reason == "tool_use"
        assert {block.name for block in message.content if block.type == "tool_use"} == {"look"}
        with pytest.raises(anthropic.BadRequestError, match="tool_choice: .*a name belongs to the type tool"):
            client.messages.create(**options, tool_choice={"type": "tool"})


def test_a_server_that_ends_answers_what_is_under_way_and_nothing_new(model: Model, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, slots=1, kind=Endless) as small, ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(small.chat, max_tokens=60) for _ in range(3)]
        wait_until(lambda: len(small.server._work) == 3)
        end = pool.submit(small.server.drain)
        wait_until(lambda: small.server._draining)
        for ask in (small.chat, lambda: small.client.get("/../health", cast_to=object)):
            with pytest.raises(openai.InternalServerError):
                ask()
        end.result()
        assert [future.result().usage.completion_tokens for future in futures] == [60] * 3


def test_text_is_continued_whole_and_as_a_stream(served: Served, tokenizer: Tokenizer) -> None:
    def complete(**options: Any) -> Any:
        usual = {"model": "model", "prompt": "def f(x):", "max_tokens": 12}
        return served.client.completions.create(**usual | options)

    completion = complete(seed=3, logprobs=2, n=2)
    first = completion.choices[0]
    assert completion.object == "text_completion" and len(completion.choices) == 2
    assert completion.usage.prompt_tokens == 9
    assert len(first.logprobs.tokens) == len(first.logprobs.token_logprobs)
    assert len(first.logprobs.top_logprobs[0]) == 2
    assert "".join(part.choices[0].text for part in complete(seed=3, stream=True) if part.choices) == first.text
    assert complete(seed=3, prompt=tokenizer.encode("def f(x):").ids).choices[0].text == first.text
    assert complete(seed=3, stop=first.text[4]).choices[0].text == first.text[: first.text.index(first.text[4])]
    assert complete(seed=3, top_p=1e-6).choices[0].text == complete(temperature=0).choices[0].text
    assert complete(max_tokens=None).usage.completion_tokens == 16
    prompts: list[Any] = ["", [999], ["a", "b"]]
    for wrong in (*({"prompt": prompt} for prompt in prompts), {"echo": True}, {"suffix": "x"}, {"best_of": 2}):
        with pytest.raises(openai.BadRequestError):
            complete(**wrong)
    narrow = served.chat(seed=4, max_tokens=9, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].message.content
    assert narrow == served.chat(temperature=0, max_tokens=9).choices[0].message.content
