"""vLLM and SGLang as policies: one suite for both, against a server on loopback that answers in their recorded forms."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.policy import ProviderFailure, Request, TimeIsUp
from composer_nb.harness.remote import REMOTE, RemoteEngine, Timeouts

KINDS = sorted(REMOTE)
END = 9


def vllm_turn(ids: list[int], logprobs: list[float], label: str) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop", "token_ids": ids}
    spans = [{"version": label, "start": 0, "end": len(ids)}]
    return {"request_id": "r", "choices": [{**choice, "weight_versions": spans}], "prompt_logprobs": None}


def sglang_turn(ids: list[int], logprobs: list[float], label: str) -> dict[str, Any]:
    pairs = [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=True)]
    told = {"id": "r", "finish_reason": {"type": "stop", "matched": END}, "completion_tokens": len(ids)}
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {**told, "output_token_logprobs": pairs, "weight_version": label},
    }


class Server:
    """Draws 1, 2, 9 after every prompt. Holds what it was asked; `before` may answer a path in another way."""

    def __init__(self, kind: str) -> None:
        self.label, self.weights, self.paused = "default", "first", False
        self.asked: list[tuple[str, Any]] = []
        self.before: Callable[[str, Any], Any] = lambda path, body: None
        self.turn = vllm_turn if kind == "vllm" else sglang_turn

        class Handler(BaseHTTPRequestHandler):
            def log_message(handler, *what: Any) -> None:
                pass

            def do_GET(handler) -> None:
                handler.reply(None)

            def do_POST(handler) -> None:
                handler.reply(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))

            def reply(handler, body: Any) -> None:
                path = handler.path.removeprefix("/")
                self.asked.append((path, body))
                told = self.before(path, body)
                data = json.dumps(self.answer(path, body) if told is None else told).encode()
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(data)))
                handler.end_headers()
                handler.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, path: str, body: Any) -> Any:
        match path, body:
            case (("inference/v1/generate" | "generate"), _):
                assert not self.paused
                return self.turn([1, 2, END], [-0.5, -0.25, -1.0], self.label)
            case (("weight_info" | "model_info"), None):
                return {"weight_version": self.label}
            case (("pause?mode=keep" | "pause_generation"), _):
                self.paused = True
            case (("resume" | "continue_generation"), _):
                self.paused = False
            case (("weight_checker" | "weights_checker"), {"action": "checksum"}):
                return {"checksums": {"rank0.w": self.weights}}
            case "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}:
                assert self.paused
                self.weights = Path(folder).name
                return {"results": [None]}
            case "update_weight_version", {"new_version": label}:
                self.label = label
            case "update_weights_from_disk", {"model_path": folder, "weight_version": label, "keep_pause": True}:
                assert self.paused
                self.weights, self.label = Path(folder).name, label
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case _:
                raise AssertionError(f"no such call: {path} {body}")
        return {"status": "ok"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[Server]:
    made = Server(kind)
    yield made
    made.http.shutdown()
    made.http.server_close()


def opened(kind: str, server: Server, **limits: float) -> RemoteEngine:
    return REMOTE[kind](server.url, stop=frozenset({END}), timeouts=Timeouts(**limits))


def ask(rollout: int, ids: list[int], max_tokens: int = 8) -> Request:
    return Request(rollout=rollout, token_ids=ids, max_tokens=max_tokens, temperature=0.5)


def version(tmp_path: Path, number: int) -> Path:
    folder = tmp_path / f"v{number:06d}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_tokens_go_in_and_come_out(kind: str, server: Server) -> None:
    policy = opened(kind, server)
    first, other = policy.generate([ask(4, [5, 6]), ask(5, [7])])
    assert (first.rollout, first.token_ids, first.logprobs) == (4, [1, 2, END], [-0.5, -0.25, -1.0])
    assert first.policy_versions == [0, 0, 0] and other.rollout == 5
    policy.ask(ask(4, [3]))
    policy.release(4)
    policy.ask(ask(4, [8], 3))
    sent = [body for path, body in server.asked if path.endswith("generate")]
    read = [body.get("token_ids") or body["input_ids"] for body in sent]
    assert sorted(read[:2]) == [[5, 6], [7]] and read[2:] == [[5, 6, 1, 2, END, 3], [8]], (
        "what was released is forgotten"
    )
    drawn = sent[-1]["sampling_params"]
    assert drawn["temperature"] == 0.5 and drawn["stop_token_ids"] == [END] and 3 in drawn.values()


def test_an_update_is_confirmed_before_requests_go_on(kind: str, server: Server, tmp_path: Path) -> None:
    policy = opened(kind, server)
    before = policy.weight_info()
    assert before[0] == "default"
    policy.prepare_update(3, version(tmp_path, 3))
    checksum = policy.commit_update(3)
    assert policy.weight_info() == ("3", checksum) and checksum != before[1]
    assert server.weights == "v000003" and not server.paused
    assert policy.ask(ask(0, [1])).policy_versions == [3, 3, 3]
    with pytest.raises(ValueError, match="was not prepared"):
        policy.commit_update(4)
    with pytest.raises(FileNotFoundError, match="no config.json"):
        policy.prepare_update(4, tmp_path)


@pytest.mark.parametrize("wrong", ["other version", "load refused", "load hangs"])
def test_an_engine_that_has_not_confirmed_gets_no_requests(
    kind: str, server: Server, tmp_path: Path, wrong: str
) -> None:
    policy = opened(kind, server, **({"load_s": 0.3} if wrong == "load hangs" else {}))
    policy.prepare_update(1, version(tmp_path, 1))
    go_on = threading.Event()

    def answer(path: str, body: Any) -> Any:
        if wrong == "other version":
            return {"weight_version": "0"} if path in ("weight_info", "model_info") else None
        if path in ("collective_rpc", "update_weights_from_disk"):
            if wrong == "load hangs":
                go_on.wait(10)
            return {"success": False, "message": "out of memory"}
        return None

    server.before = answer
    told = {
        "other version": "not 1: it gets no requests",
        "load refused": "out of memory",
        "load hangs": "within 0.3 s",
    }
    with pytest.raises(ProviderFailure, match=told[wrong]):
        policy.commit_update(1)
    assert not server.paused, "it goes on for others"
    count = len(server.asked)
    with pytest.raises(ProviderFailure, match="has not confirmed"):
        policy.ask(ask(0, [1]))
    assert len(server.asked) == count
    go_on.set()
    server.before = lambda path, body: None
    policy.timeouts = Timeouts()
    policy.commit_update(1)
    assert policy.ask(ask(0, [1])).policy_versions == [1, 1, 1]


def test_no_turn_is_drawn_from_two_versions(kind: str, server: Server, tmp_path: Path) -> None:
    policy = opened(kind, server, drain_s=0.2)
    policy.prepare_update(1, version(tmp_path, 1))
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: str, body: Any) -> None:
        if path.endswith("generate"):
            begun.set()
            go_on.wait(10)

    server.before = slow
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(policy.ask, ask(0, [1]))
        assert begun.wait(120)
        with pytest.raises(ProviderFailure, match="timeouts.drain_s=0.2"):
            policy.commit_update(1)
        assert server.weights == "first" and not server.paused, "nothing was begun"
        go_on.set()
        assert turn.result().policy_versions == [0, 0, 0]
    policy.commit_update(1)
    assert policy.ask(ask(1, [1])).policy_versions == [1, 1, 1]


@pytest.mark.parametrize(
    ("ids", "logprobs", "label", "told"),
    [
        ([1, 2], [-1.0, -1.0], "default", "without a stop token"),
        ([1] * 9, [-1.0] * 9, "default", "9 tokens of 8"),
        ([], [], "default", "0 tokens of 8"),
        ([1, END], [-1.0, float("nan")], "default", "log-probability each"),
        ([1, END], [-1.0, 0.5], "default", "log-probability each"),
        ([-1, END], [-1.0, -1.0], "default", "log-probability each"),
        ([1, END], [-1.0, -1.0], "7", "drawn from version 7, not default"),
    ],
)
def test_what_no_engine_could_have_drawn_is_refused(
    kind: str, server: Server, ids: list[int], logprobs: list[float], label: str, told: str
) -> None:
    policy = opened(kind, server)
    server.before = lambda path, body: server.turn(ids, logprobs, label) if path.endswith("generate") else None
    with pytest.raises(ProviderFailure, match=told):
        policy.ask(ask(0, [1]))
    server.before = lambda path, body: None
    policy.ask(ask(0, [5]))
    sent = server.asked[-1][1]
    assert (sent.get("token_ids") or sent["input_ids"]) == [5], "a turn that was refused leaves no trace"


def test_time_is_bounded(kind: str, server: Server) -> None:
    policy = opened(kind, server, turn_s=0.3)
    server.before = lambda path, body: time.sleep(1.0)
    with pytest.raises(ProviderFailure, match="no turn within 0.3 s"):
        policy.ask(ask(0, [1]))
    with pytest.raises(TimeIsUp):
        policy.ask(ask(0, [1]), time.monotonic() + 0.1)
    with pytest.raises(ValueError, match="timeouts.load_s=0"):
        Timeouts(load_s=0)


def test_other_forms_and_addresses_are_one_line(kind: str, server: Server) -> None:
    policy = opened(kind, server)
    server.before = lambda path, body: {"choices": []} if path.endswith("generate") else {"hello": 1}
    with pytest.raises(ProviderFailure, match="another form"):
        policy.ask(ask(0, [1]))
    with pytest.raises(ProviderFailure, match="names no weight_version"):
        opened(kind, server)
    with pytest.raises(ValueError, match=f"give an address such as {kind}:http"):
        REMOTE[kind]("here", stop=frozenset())
