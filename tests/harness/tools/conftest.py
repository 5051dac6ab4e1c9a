"""A session of all tools in a sandbox, and a short way to call them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.tools.session import Session
from composer_nb.harness.tools.tool_call import Reply, ToolCall
from composer_nb.harness.tools.toolset import ToolSet

SPEC = SandboxSpec(disk_bytes=32 << 20, memory_bytes=256 << 20)
Call = Callable[..., Reply]


class FixedSearch:
    """A search by meaning that answers with `answer(query)`."""

    def __init__(self, answer: Callable[[str], list[Any]]) -> None:
        self.answer = answer

    def __call__(self, query: str, directories: object, limit: int) -> list[Any]:
        return self.answer(query)

    def left_out(self, directories: object) -> dict[str, str]:
        return {}


@pytest.fixture
def box(backend: Backend) -> Iterator[Sandbox]:
    with backend.create(SPEC) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def tools() -> ToolSet:
    return ToolSet.cursor()


@pytest.fixture
def session(tools: ToolSet, box: Sandbox) -> Session:
    return tools.open(box)


@pytest.fixture
def call(tools: ToolSet, session: Session) -> Call:
    """Return a function that calls one tool and asserts that its error is of the kind `error`, if any."""

    def call_tool(name: str, *, error: str | None = None, **arguments: object) -> Reply:
        [reply] = tools.run(session, [ToolCall(name=name, arguments=arguments)])
        assert reply.error == error, reply.text
        return reply

    return call_tool
