"""Tiny models and rollouts that tests of the trainer and of the labs share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Request, Trace
from composer_nb.harness.rollout import Kind, Rollout, Segment
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.rl import to_streams

MakeModel = Callable[..., Model]
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"max_position_embeddings": 96, "rope_theta": 700.0},
}
LATENT: dict[str, Any] = {
    "family": "deepseek_v3", "num_key_value_heads": 4, "head_dim": 24, "q_lora_rank": 16, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "intermediate_size": 48, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
"""With `SIZES`: a small DeepSeek-V3."""
NEVER = frozenset[int]()
Played = dict[int, tuple[list[int], list[float], Trace]]
"""Rollouts by number: tokens, log-probabilities and what the engine recorded."""
TESTS = "from f import f\n\n\ndef test_0():\n    assert f(1) == 2\n"


def ask(rollout: int, ids: Sequence[int], most: int = 6, **options: Any) -> Request:
    return Request(rollout=rollout, token_ids=list(ids), max_tokens=most, **options)


def prompt(size: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 60, size)]


def same(actual: Played, expected: Played) -> None:
    """Assert that rollouts are equal to the last bit."""
    assert actual.keys() == expected.keys()
    for number, (ids, logprobs, trace) in actual.items():
        assert (ids, logprobs) == expected[number][:2]
        for field in fields(Trace):
            np.testing.assert_array_equal(
                getattr(trace, field.name), getattr(expected[number][2], field.name), field.name
            )


@pytest.fixture
def make_model() -> MakeModel:
    """Return `make_model(seed, **sizes)`, which makes a tiny model with norms other than 1 and decided routers."""

    def make(seed: int = 0, **sizes: Any) -> Model:
        torch.manual_seed(seed)
        model = Model(ModelConfig(**SIZES | sizes))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.copy_(0.5 + torch.rand_like(weight))
                if name == "final_norm":  # a distribution with some entropy, not one certain token
                    weight.mul_(0.15)
                if name.endswith("router"):
                    weight.mul_(2)
                if name in ("embed", "head"):
                    weight.copy_(torch.randn_like(weight))
        return model

    return make


@pytest.fixture
def task() -> Task:
    return Task(
        id="t",
        instruction="add one",
        files={"f.py": "def f(x):\n    return x\n", "test_f.py": TESTS},
        tests={"hidden.py": TESTS},
        source_scope=("f.py",),
    )


@pytest.fixture
def converse(task: Task) -> Callable[..., list[Attempt]]:
    """Return `converse(engine, count, seed)`, which samples `count` rollouts of three turns with random observations."""

    def run(engine: Engine, count: int, seed: int = 0, turns: int = 3, max_tokens: int = 9) -> list[Attempt]:
        random = np.random.default_rng(seed)
        vocabulary = engine.model.config.vocab_size
        streams: list[tuple[list[int], list[int], list[float]]] = [([], [], []) for _ in range(count)]
        for _ in range(turns):
            requests = []
            for rollout, (ids, kinds, logprobs) in enumerate(streams):
                news = random.integers(0, vocabulary, random.integers(1, 8)).tolist()
                requests.append(Request(rollout=rollout, token_ids=news, max_tokens=max_tokens))
                ids += news
                kinds += [int(Kind.OBSERVATION)] * len(news)
                logprobs += [0.0] * len(news)
            for completion, (ids, kinds, logprobs) in zip(engine.generate(requests), streams, strict=True):
                ids += completion.token_ids
                kinds += [int(Kind.TOOL_CALL)] * len(completion.token_ids)
                logprobs += completion.logprobs
        return [_attempt(task, stream, engine, rollout) for rollout, stream in enumerate(streams)]

    return run


def streams_of(attempts: Iterable[Attempt], *advantages: float) -> list[Stream]:
    """Return the streams of attempts with these advantages, in turn."""
    pairs = zip(attempts, cycle(advantages or (0.0,)), strict=False)
    return [stream for attempt, advantage in pairs for stream in to_streams(attempt, advantage)]


def chained(attempts: list[Attempt], last: Kind = Kind.SUMMARY) -> Attempt:
    """Return one attempt with the segments of these, of which each but the last ends with a message of the kind `last`."""
    segments = []
    for number, attempt in enumerate(attempts):
        [segment] = attempt.rollout.segments
        kind = segment.kind.copy()
        if number + 1 < len(attempts):
            kind[segment.messages[-1]] = last
        segments.append(replace(segment, kind=kind, parent=number - 1))
    return replace(attempts[0], rollout=replace(attempts[0].rollout, segments=tuple(segments)))


def _attempt(task: Task, stream: tuple[list[int], list[int], list[float]], engine: Engine, rollout: int) -> Attempt:
    ids, kinds, logprobs = stream
    segment = Segment(
        token_ids=np.array(ids, np.int32),
        kind=np.array(kinds, np.uint8),
        logprob=np.array(logprobs, np.float32),
        policy_version=np.where(np.array(kinds) == Kind.TOOL_CALL, engine.version, -1).astype(np.int32),
        trace=engine.release(rollout),
    )
    rolled = Rollout(task_id=task.id, segments=(segment,), turns=(), files=dict(task.files), stop="turns")
    return Attempt(task=task, rollout=rolled, grade=Grade(status="graded", tests={"hidden.py::test_0": False}))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return a small tokenizer with merges."""
    text = "def f(xs):\n    return sum(x for x in xs if x > 3)\nfix f.py: sum of the items that are more than 3\n"
    return train_tokenizer([text] * 4, 420)
