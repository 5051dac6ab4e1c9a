"""Test that an agent sees the same in training as in the product.

Two comparisons, for tasks whose workspace is also given to the product as if it were a user's repository. Both places are opened
by the functions that open them for agents: in training that of the attempts of RL, in the product that of `composer-nb agent`.

* *byte by byte*: the system texts and the descriptions of the tools are compared; every tool is called in the same ways in both
  sandboxes, also with mistakes, a terminal is asked about its surroundings, and the replies are compared;
* *two samples*: a script holds conversations in both, and a classifier is trained to tell the two kinds apart by the answers of
  the tools. It is scored on held-out conversations; chance is an area under the curve of 0.5.

A model learns whatever distinguishes the place where it is graded from the place where it is used (D. Lopez-Paz, M. Oquab,
"Revisiting Classifier Two-Sample Tests", ICLR 2017, is the test).
"""

import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.loop import converse
from composer_nb.harness.agent.turns import Script, ScriptTurnPolicy
from composer_nb.harness.attempt import Agent, open_session
from composer_nb.harness.tasks.runtime import packages_of
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.session import Session
from composer_nb.harness.tools.tool_call import ToolCall, call
from composer_nb.harness.tools.toolset import TINY_NAMES, ToolSet
from composer_nb.harness.tools.web import web_search
from composer_nb.harness.untrusted import beneath
from composer_nb.production import work
from composer_nb.production.checkout import read_checkout

PLACES = ("training", "product")
_WIDTH = 4096
_RIDGE = 1.0
_FOLDS = 5


# A session, its tools, and what an agent is told: the system text, and the description of every tool by its name.
SessionSide = tuple[Session, ToolSet, dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A call that was answered differently, or a text that an agent is told (`call` is None).

    Attributes:
        what: Name of the tool or text.
    """

    what: str
    call: ToolCall | None
    training: str
    product: str

    def excerpt(self, most: int = 400) -> dict[str, Any]:
        """Return it as JSON, with `most` characters of each text around their first difference."""
        both = enumerate(zip(self.training, self.product, strict=False))
        first = next((n for n, (left, right) in both if left != right), min(len(self.training), len(self.product)))
        at = max(0, first - most // 8)
        parts = {side: getattr(self, side)[at : at + most] for side in PLACES}
        return {"what": self.what, "call": self.call and self.call.json, **parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSamples:
    """Result of a classifier that tells conversations of two kinds apart.

    Attributes:
        auc: Area under the curve over the observations of held-out conversations.
        chance: Share of shuffled labellings whose area is as large; small if the two can be told apart.
    """

    auc: float
    chance: float
    observations: int


@contextmanager
def open_in(side: str, task: Task, agent: Agent) -> Iterator[SessionSide]:
    """Open the workspace of a task as in `training`, for an agent of it, or as in the `product` for an agent of its chat format.
    Raises ValueError for a task that cannot be opened, and SandboxFailure."""
    if side == "training":
        with open_session(task, agent.environment()) as session:
            yield session, agent.tools, _texts(agent.system, agent.renderer.tools)
        return
    if agent.backend is None or task.image:
        raise ValueError(f"task {task.id}: a user's repository has a sandbox of its own, and no image of its task")
    tools = work.tools_for(_name(agent.tools)).with_web(agent.tools.web)
    with tempfile.TemporaryDirectory() as folder:
        for path, text in task.files.items():
            target = beneath(Path(folder), path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode())
        source = read_checkout(Path(folder))
    dependencies = task.metadata.get("image", ""), packages_of(task)
    answered = agent.user is not None
    with work.open_session(source, tools, agent.backend, *dependencies, answered) as (session, system):
        yield session, tools, _texts(system, tools.schemas)


def _texts(system: str, schemas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    named = {f"description of {schema['function']['name']}": json.dumps(schema) for schema in schemas}
    return {"system text": system, **named}


def _name(tools: ToolSet) -> str:
    """Return the name of a tool set, under which a checkpoint that was trained with it asks the product for tools."""
    if "finish" in tools.tools and not {*tools.tools} < {*TINY_NAMES}:
        return "tiny"
    names = [name for name, tool in tools.tools.items() if tool is not web_search]
    return ",".join(names) if "finish" in tools.tools or not tools.described else "cursor"


def probes(files: Mapping[str, str]) -> Iterator[ToolCall]:
    """Yield valid and invalid calls of every tool for a workspace with these files, in the order to make them."""

    def shell(command: str, **more: object) -> ToolCall:
        return call("run_terminal_cmd", **{"command": command, "is_background": False, **more})

    for path in sorted(files)[:5]:
        yield call("read_file", target_file=path)
        yield call("read_file", target_file=path, offset=2, limit=3)
    yield call("read_file", target_file="no/such/file")
    yield call("read_file", target_file="../outside")
    yield call("read_file", file=1)
    yield call("list_dir", target_directory=".")
    yield call("glob_file_search", glob_pattern="*.py")
    yield call("grep", pattern="def |class ", head_limit=50)
    yield call("grep", pattern="(")
    yield call("codebase_search", query="where is text parsed", target_directories=[])
    yield call("web_search", search_term="how is text parsed")
    yield call("write", file_path="probe/new.py", contents="import os\n\nvalue = 1\n")
    yield call("search_replace", file_path="probe/new.py", old_string="value = 1", new_string="value = 2")
    yield call("search_replace", file_path="probe/new.py", old_string="nothing", new_string="x")
    yield call("read_lints", paths=["probe/new.py"])
    yield call(
        "apply_patch", patch="*** Begin Patch\n*** Update File: probe/new.py\n@@\n-value = 2\n+value = 3\n*** End Patch"
    )
    yield call("codebase_search", query="value of the probe", target_directories=["probe"])
    yield call("delete_file", target_file="probe/new.py")
    yield call("todo_write", merge=False, todos=[{"id": "1", "content": "look", "status": "in_progress"}])
    yield shell("pwd; id; umask; uname -sm; env | sort; python -V; nproc; ulimit -a")
    yield shell(
        "find . -path ./.composer_nb -prune -o -path ./.git/objects -prune -o -printf '%M %u %s %p\\n' | sort -k4 | head -200"
    )
    yield shell("ls -la --time-style=+; ls / /tmp /home 2>&1; git log --stat; git status; cat /etc/passwd")
    yield shell("sleep 5", timeout_ms=200)
    yield shell("exit 3")
    yield shell("seq 1 20000")
    yield call("unknown_tool")


def tiny_probes(files: Mapping[str, str]) -> Iterator[ToolCall]:
    """Yield valid and invalid calls of the tools of tiny models, in the order to make them."""

    paths = sorted(files)[:5]
    yield call("run_tests")
    for pattern in ("def ", "no such text", ""):
        yield call("grep", pattern=pattern)
    for path in (*paths, "no/such/file", "../outside"):
        yield call("read_file", path=path)
    for path, line in ((paths[0], 1), (paths[0], 10**5), (paths[0], 0), ("no/such/file", 1)):
        yield call("edit_line", path=path, line=line, text="(probe")
    for old in ("(probe", "no such text"):
        yield call("substitute", path=paths[0], old=old, new="probe)")
    yield call("read_file", path=paths[0])
    yield call("read_file", file=1)
    yield call("run_tests")
    yield call("read_lints")
    yield call("undo")
    yield call("undo")
    yield call("unknown_tool")
    yield call("finish")


def differences(task: Task, agent: Agent) -> tuple[int, list[Difference]]:
    """Return the number of calls made in each place, and what differs. Raises what `open_in` does."""
    make_probes = tiny_probes if "finish" in agent.tools.tools else probes
    calls = [call for call in make_probes(task.files) if call.name in {*agent.tools.tools, "unknown_tool"}]
    texts: list[dict[str, str]] = []
    replies: list[list[str]] = []
    for side_name in PLACES:
        with open_in(side_name, task, agent) as (session, tools, described):
            texts.append(described)
            replies.append([tools.observation(tools.run(session, [call])[0]) for call in calls])
    rows: Iterable[tuple[str, ToolCall | None, str, str]] = [
        *((name, None, texts[0].get(name, ""), texts[1].get(name, "")) for name in {**texts[0], **texts[1]}),
        *((call.name, call, *both) for call, *both in zip(calls, *replies, strict=True)),
    ]
    unlike = [row for row in rows if row[2] != row[3]]
    return len(calls), [Difference(what=w, call=call, training=t, product=p) for w, call, t, p in unlike]


def observations(side_name: str, task: Task, agent: Agent, script: Script) -> list[str]:
    """Return the answers of the tools in a conversation of a script."""
    with open_in(side_name, task, agent) as (session, tools, _):
        conversation = converse(task.instruction, ScriptTurnPolicy(script), tools, session)
    return [turn.observation for turn in conversation.turns if turn.call]


def two_samples(
    first: Sequence[Sequence[str]], second: Sequence[Sequence[str]], seed: int = 0, shuffles: int = 200
) -> TwoSamples:
    """Train a ridge classifier on counts of letter triples to tell the observations of two sets of conversations apart.

    Conversations of the same place are a pair, as when both are about the same task. Whole pairs are held out, in five folds,
    and labels are shuffled by swapping them within pairs. Raises ValueError for sets of different sizes, or fewer than five
    conversations each.
    """
    pairs = len(first)
    if pairs < _FOLDS or len(second) != pairs:
        raise ValueError(f"two_samples: {pairs} and {len(second)} conversations; give at least {_FOLDS} pairs")
    texts = [text for talk in (*first, *second) for text in talk]
    owner = np.array([n for n, talk in enumerate((*first, *second)) for _ in talk])
    label = np.repeat([1.0, -1.0], pairs)
    fold = np.tile(np.arange(pairs), 2) % _FOLDS
    kernel, random = _kernel(texts), np.random.default_rng(seed)
    auc = _area(kernel, label[owner], fold[owner])
    swaps = (np.tile(random.choice([-1.0, 1.0], pairs), 2) for _ in range(shuffles))
    by_chance = [_area(kernel, (label * swap)[owner], fold[owner]) for swap in swaps]
    share = (1 + sum(area >= auc for area in by_chance)) / (1 + shuffles)
    return TwoSamples(auc=auc, chance=share, observations=len(texts))


def _kernel(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return inner products of texts as unit vectors of hashed counts of letter triples, and of their lengths."""
    rows = np.zeros((len(texts), _WIDTH))
    for row, text in zip(rows, texts, strict=True):
        data = text.encode("utf-8", "surrogateescape")
        places = [zlib.crc32(data[n : n + 3]) % (_WIDTH - 1) for n in range(max(1, len(data) - 2))]
        row[: _WIDTH - 1] = np.sqrt(np.bincount(places, minlength=_WIDTH - 1))
        row /= np.linalg.norm(row)
        row[-1] = np.log1p(len(data)) / 10
    return rows @ rows.T


def _area(kernel: NDArray[np.float64], label: NDArray[np.float64], fold: NDArray[np.int64]) -> float:
    """Return the area under the curve of each fold against the others, averaged; folds with one label are skipped."""
    areas = []
    for number in range(_FOLDS):
        test, train = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        if len(set(label[test])) < 2 or len(set(label[train])) < 2:
            continue
        inner = kernel[np.ix_(train, train)] + _RIDGE * np.eye(len(train))
        scores = kernel[np.ix_(test, train)] @ np.linalg.solve(inner, label[train] - label[train].mean())
        areas.append(_rank_area(scores, label[test] > 0))
    return float(np.mean(areas)) if areas else 0.5


def _rank_area(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Return the share of pairs whose positive member scores higher; ties, to nine digits, count half."""
    scores = np.round(scores, 9)
    above = scores[positive][:, None] - scores[~positive][None, :]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))
