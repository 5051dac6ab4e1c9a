"""A backend with sandboxes, a small repair task with its plan, a tokenizer with a chat format, and a policy of given turns."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from composer_nb.harness.agent.chat import ChatRenderer
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.environment import Carried
from composer_nb.harness.grading.plan import with_plan
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.policy import Completion, Request, SampledToken, Trace
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.production.conversations import Conversations
from composer_nb.production.policies import OpenEngine
from composer_nb.production.record import RolloutRecord
from composer_nb.production.serve import ChatServer
from tests.folders import write

TEST = 'from dates import parse\n\ndef test_parse():\n    assert parse("1-2-3") == (1, 2, 3)\n'
DATES = 'def parse(text):\n    year, month, day = text.split("-")\n    return int(year), int({}), int({})\n'


@pytest.fixture(scope="session")
def task(backend: Backend) -> Task:
    task = Task(
        id="dates",
        instruction="parse mixes something up",
        grader="pytest",
        files={"dates.py": DATES.format("day", "month"), "README": "dates\n", "old.py": "x = 1\n"},
        tests={"tests/test_dates.py": TEST},
        solution={"dates.py": DATES.format("month", "day")},
        source_scope=("*.py",),
    )
    validation = validate_task(task, backend)
    assert validation.plan is not None and validation.valid, validation.problems
    return with_plan(task, validation.plan)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a user's folder with a faulty function and its test."""
    test = "from f import double\n\ndef test_double():\n    assert double(2) == 4\n"
    return write(tmp_path / "repository", {"f.py": "def double(x):\n    return x + x + 1\n", "test_f.py": test})


def byte_tokenizer(special: Sequence[str], plain: Sequence[str] = ()) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes and the tokens of Qwen's format."""
    return byte_tokenizer(QwenRenderer.tokens[:2], QwenRenderer.tokens[2:])


ASKED: list[Any] = [{"role": "user", "content": "fix f"}]


@dataclass(frozen=True)
class Site:
    """A server of an engine, as OpenAI's client sees it."""

    answer: Conversations
    server: ChatServer
    client: openai.OpenAI

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def health(self) -> Any:
        return httpx.get(self.url.replace("/v1", "/health"), timeout=60).json()

    @property
    def metrics(self) -> str:
        return httpx.get(self.url.replace("/v1", "/metrics"), timeout=60).text

    def chat(self, **options: Any) -> Any:
        return self.client.chat.completions.create(**{"model": "model", "messages": ASKED, **options})

    def rollout(self, name: str, path: str = "/v1") -> str:
        """Return the address of a rollout that is recorded."""
        return self.url.replace("/v1", f"/rollouts/{name}{path}")

    def grade(self, name: str, **verdict: Any) -> Any:
        answer = httpx.post(self.rollout(name, "/grade"), json=verdict, timeout=120)
        return answer.json() | {"status": answer.status_code}


@contextmanager
def serving(engine: OpenEngine[Any], run: Path | None = None, **options: Any) -> Iterator[Site]:
    """Serve an engine, with a record in the folder `run`."""
    record = RolloutRecord(run, engine.tokenizer, getattr(engine.shared, "judged", None)) if run else None
    answer = Conversations(engine.shared, engine.tokenizer, engine.format, engine.tokens, record)
    options |= {"grade": answer.grade} if run else {}
    with (
        ChatServer(answer, **options) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield Site(answer, server, client)
    answer.close()


LOOK = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": LOOK}}


class Turns:
    """A policy that writes these turns, and records its requests and the rollouts that it releases."""

    capacity = 2
    version = 0
    pause_s = 0.0

    def __init__(self, *turns: list[int]) -> None:
        self.turns, self.requests, self.released = list(turns), list[Request](), list[int]()
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        waiting, self._waiting = self._waiting, []
        return [self._turn(request, self.turns.pop(0)[: request.max_tokens]) for request in waiting]

    def _turn(self, request: Request, token_ids: list[int]) -> Completion:
        logprobs, versions = [-0.5] * len(token_ids), [self.version] * len(token_ids)
        for token in map(SampledToken, token_ids, logprobs, versions):
            if request.on_token:
                request.on_token(token)
                time.sleep(self.pause_s)
        return Completion(rollout=request.rollout, token_ids=token_ids, logprobs=logprobs, policy_versions=versions)

    def release(self, rollout: int) -> Trace:
        self.released.append(rollout)
        return Trace()


@contextmanager
def playing(form: type[ChatRenderer], tokenizer: Tokenizer, *turns: list[int]) -> Iterator[tuple[Site, Turns]]:
    """Serve a policy that writes these turns."""
    policy, trained = Turns(*turns), Carried(renderer="qwen", tools="tiny")
    with Shared(policy) as shared:
        engine = OpenEngine(shared=shared, tokenizer=tokenizer, format=form, tokens=3000, training=trained)
        with serving(engine, slots=policy.capacity) as site:
            yield site, policy
