"""Requests end in time, whatever their server does."""

from __future__ import annotations

import time

import pytest

from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from tests.harness.stubborn import WAYS, said, stubborn


@pytest.mark.parametrize("way", WAYS)
def test_no_server_outlasts_a_request(way: str) -> None:
    with stubborn(way) as server:
        endpoint = Endpoint(url=server.url, model="m")
        with pytest.raises((TimeIsUp, ProviderFailure)):  # a request that goes on never gets here
            endpoint.complete([{"role": "user", "content": "x"}], [], 10, until=time.monotonic() + 0.4)
        while server.open:  # likewise, where the connection stays open
            time.sleep(0.05)


def test_an_answer_in_time_is_one_and_the_connection_is_used_again() -> None:
    with stubborn("silent", said("one"), said("two")) as server:
        endpoint = Endpoint(url=server.url, model="m")
        for text in ("one", "two"):
            done = endpoint.complete([], [], 10, until=time.monotonic() + 3600)
            assert done.message["content"] == text and server.open == 1
        time.sleep(0.3)
        assert server.open == 1
