"""vLLM and SGLang as policies: one suite for both, against a server on loopback that answers in their recorded forms."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from composer_nb.harness import remote
from composer_nb.harness.policy import ProviderFailure, Request, TimeIsUp
from composer_nb.harness.remote import REMOTE, RemoteEngine
from tests.harness.json_server import JsonServer

END = 9


def vllm_turn(ids: list[int], logprobs: list[float], label: str) -> dict[str, Any]:
    pairs = zip(ids, logprobs, strict=True)
    content = [{"token": f"token_id:{n}", "logprob": p, "bytes": None, "top_logprobs": []} for n, p in pairs]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "token_ids": ids}
    spans = [{"version": label, "start": 0, "end": len(ids)}]
    return {"request_id": "r", "choices": [{**choice, "weight_versions": spans}], "prompt_logprobs": None}


def sglang_turn(ids: list[int], logprobs: list[float], label: str) -> dict[str, Any]:
    pairs = [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)]
    meta = {"id": "r", "finish_reason": {"type": "stop", "matched": END}, "completion_tokens": len(ids)}
    meta |= {"output_token_logprobs": pairs, "weight_version": label}
    return {"text": "", "output_ids": ids, "meta_info": meta}


class Server(JsonServer):
    """Draws 1, 2, 9 after every prompt; `before` may answer a path differently."""

    def __init__(self, kind: str) -> None:
        self.before: Callable[[str], Any] = lambda path: None
        self.turn = vllm_turn if kind == "vllm" else sglang_turn
        super().__init__(self._reply)

    def _reply(self, path: str, body: Any) -> Any:
        turn = self.turn([1, 2, END], [-0.5, -0.25, -1.0], "default")
        usual = turn if path.endswith("generate") else {"weight_version": "default"}
        return self.before(path) or usual


@pytest.fixture(params=sorted(REMOTE))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[Server]:
    with Server(kind) as server:
        yield server


@pytest.fixture
def engine(kind: str, server: Server) -> RemoteEngine:
    return REMOTE[kind](server.url, stop=frozenset({END}))


def ask(rollout: int, ids: list[int], max_tokens: int = 8) -> Request:
    return Request(rollout=rollout, token_ids=ids, max_tokens=max_tokens, temperature=0.5)


def test_tokens_go_in_and_come_out(engine: RemoteEngine, server: Server) -> None:
    first = engine.ask(ask(4, [5, 6]))
    assert (first.rollout, first.token_ids, first.logprobs) == (4, [1, 2, END], [-0.5, -0.25, -1.0])
    assert first.policy_versions == [0, 0, 0]
    engine.ask(ask(4, [3]))
    engine.release(4)
    engine.ask(ask(4, [8], 3))
    bodies = [body for path, body in server.requests if path.endswith("generate")]
    prompts = [body.get("token_ids") or body["input_ids"] for body in bodies]
    assert prompts == [[5, 6], [5, 6, 1, 2, END, 3], [8]], "a released rollout is forgotten"
    sampling = bodies[-1]["sampling_params"]
    assert sampling["temperature"] == 0.5 and sampling["stop_token_ids"] == [END] and 3 in sampling.values()


@pytest.mark.parametrize(
    ("ids", "logprobs", "label", "message"),
    [
        ([1, 2], [-1.0, -1.0], "default", "without a stop token"),
        ([1] * 9, [-1.0] * 9, "default", "9 tokens of 8"),
        ([1, END], [-1.0, float("nan")], "default", "log-probability each"),
        ([-1, END], [-1.0, -1.0], "default", "log-probability each"),
        ([1, END], [-1.0, -1.0], "7", "drawn from version 7, not default"),
    ],
)
def test_impossible_turns_are_refused(
    engine: RemoteEngine, server: Server, ids: list[int], logprobs: list[float], label: str, message: str
) -> None:
    server.before = lambda path: server.turn(ids, logprobs, label)
    with pytest.raises(ProviderFailure, match=message):
        engine.ask(ask(0, [1]))
    server.before = lambda path: None
    engine.ask(ask(0, [5]))
    body = server.requests[-1][1]
    assert (body.get("token_ids") or body["input_ids"]) == [5], "a refused turn leaves no trace"


def test_time_is_bounded(engine: RemoteEngine, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "TURN_S", 0.2)
    server.before = lambda path: time.sleep(0.5)
    with pytest.raises(ProviderFailure, match="no turn within 0.2 s"):
        engine.ask(ask(0, [1]))
    with pytest.raises(TimeIsUp):
        engine.ask(ask(0, [1]), time.monotonic() + 0.1)


def test_other_forms_and_addresses_are_one_line(kind: str, engine: RemoteEngine, server: Server) -> None:
    server.before = lambda path: {"choices": []} if path.endswith("generate") else {"hello": 1}
    with pytest.raises(ProviderFailure, match="another form"):
        engine.ask(ask(0, [1]))
    with pytest.raises(ProviderFailure, match="names no weight_version"):
        REMOTE[kind](server.url, stop=frozenset({END}))
    with pytest.raises(ValueError, match=f"give an address such as {kind}:http"):
        REMOTE[kind]("here", stop=frozenset())
