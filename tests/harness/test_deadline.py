"""Requests end in time, whatever their server does."""

from __future__ import annotations

import time

import pytest

from composer_nb.harness.deadline import TimeIsUp, exchange, open_pool
from composer_nb.harness.openai_policy import Endpoint, OpenAIPolicy
from composer_nb.harness.policy import ProviderFailure, Request
from composer_nb.harness.render import CompactRenderer
from tests.harness.stubborn import WAYS, said, stubborn

SLACK_S = 2.0
"""For a busy machine."""


@pytest.mark.parametrize("way", WAYS)
def test_no_server_outlasts_a_request(way: str) -> None:
    with stubborn(way) as server:
        endpoint = Endpoint(url=server.url, model="m")
        began = time.monotonic()
        with pytest.raises((TimeIsUp, ProviderFailure)):
            endpoint.complete([{"role": "user", "content": "x"}], [], 10, until=began + 0.4)
        assert time.monotonic() - began < 0.4 + SLACK_S
        while server.open and time.monotonic() - began < 10:
            time.sleep(0.05)
        assert not server.open, "the connection stays open"


def test_an_answer_in_time_is_one_and_the_connection_is_used_again() -> None:
    with stubborn("silent", said("one"), said("two")) as server:
        endpoint = Endpoint(url=server.url, model="m")
        for text in ("one", "two"):
            done = endpoint.complete([], [], 10, until=time.monotonic() + 20)
            assert done.message["content"] == text and server.open == 1
        time.sleep(0.3)
        assert server.open == 1


def test_an_answer_that_is_cut_short_is_asked_for_again() -> None:
    [full] = said("whole")
    with stubborn("silent", [full[:-5], b""], said("whole")) as server:
        endpoint = Endpoint(url=server.url, model="m", wait_s=0.01)
        assert endpoint.complete([], [], 10, until=time.monotonic() + 20).message["content"] == "whole"


def test_nothing_is_asked_when_the_time_is_over() -> None:
    with pytest.raises(TimeIsUp):
        exchange(open_pool(), "GET", "http://127.0.0.1:9/", until=time.monotonic() - 1, silence_s=1, most=1)


def test_a_failure_is_told_instead_of_a_wait_that_is_too_long() -> None:
    busy = [b"HTTP/1.1 503 Busy\r\nRetry-After: 30\r\nContent-Length: 4\r\n\r\nbusy"]
    with stubborn("silent", busy) as server:
        began = time.monotonic()
        with pytest.raises(ProviderFailure, match="status 503: busy"):
            Endpoint(url=server.url, model="m").complete([], [], 10, until=began + 5)
        assert time.monotonic() - began < SLACK_S


def test_a_list_of_models_is_not_waited_for_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with stubborn("silent") as server:
        monkeypatch.setattr("tests.harness.stubborn.whole", lambda message: [b"HTTP/1.1 200 OK\r\nX:"])
        with pytest.raises(ProviderFailure, match=r"models: no answer within 0\.3 s"):
            Endpoint(url=server.url).models(within_s=0.3)


def test_a_rollout_of_a_policy_ends_in_time(renderer: CompactRenderer) -> None:
    with (
        stubborn("slow head") as server,
        OpenAIPolicy(Endpoint(url=server.url, model="m"), renderer, [], seconds=0.4) as policy,
    ):
        began = time.monotonic()
        policy.submit(Request(rollout=3, token_ids=renderer.prompt("go"), max_tokens=10))
        [failed] = policy.step()
        assert isinstance(failed, ProviderFailure) and failed.rollout == 3 and "within the 0.4 s" in str(failed)
    assert time.monotonic() - began < 0.4 + SLACK_S
