"""A scripted expert that repairs tasks in the real harness, with mistakes at a given rate, and the policy that plays scripts.

Scripts know the solution, and their rollouts become demonstrations. They act only through tools, so that a demonstration looks
token for token like the rollout of a model.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from shlex import quote

from composer_nb.harness.agent.chat import ChatRenderer, Message, Said
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.agent.turns import Script as ChatScript
from composer_nb.harness.policy import Completion, Request, Trace, first_segment
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall, call
from composer_nb.harness.tools.toolset import SEARCH
from composer_nb.tour.miniatures import ENUMERABLE
from composer_nb.tour.repairs import bugs, home_of, neighbours, split_at

# Yields turns, and is sent the text of the last observation of each.
Script = Generator[Said, str, None]


def one(tool_call: ToolCall) -> Said:
    """Return a turn of one call."""
    return turn([tool_call])


_TEST_CALL, _UNDO, _LINT = call("run_tests"), call("undo"), call("read_lints")
_TEST = one(_TEST_CALL)


def expert(task: Task, rng: Random, mistake_rate: float) -> Script:
    """Read, edit, test (in 7 of 10 tasks), finish; or, at the given rate, a mistake first.

    Two of three mistakes are of place: the expert rewrites a correct line, the tool says that nothing changed, and it looks
    elsewhere. The others are of substance: a random change of the program, or a wrong fix of the right line. The tests find
    these, and then the expert gives up one time in four. After a mistake there may be another, up to three; then the expert
    fixes the program and tests it. Raises ValueError for a task that is not solved by changing lines of one file.
    """
    path = min(task.solution, default="")
    now, right = task.files.get(path, "").rstrip("\n"), task.solution.get(path, "").rstrip("\n")
    if not changes_lines(task):
        raise ValueError(f"task {task.id}: the expert changes lines of one file; the solution changes something else")
    yield one(call("read_file", path=path))
    tried: list[int] = []
    passed = gives_up = False
    while not passed and not gives_up and len(tried) < 3 and rng.random() < mistake_rate:
        edit, now = _mistake(path, now, right, rng, tried)
        tried.append(edit.arguments["line"] - 1)
        if (yield one(edit)) == "same":
            continue
        passed = (yield _TEST).startswith("pass")
        gives_up = not passed and rng.random() < 0.25
    if not passed and not gives_up:
        while now != right:
            lines = list(zip(now.split("\n"), right.split("\n"), strict=True))
            at = next(at for at, (line, target) in enumerate(lines) if line != target)
            edit, now = _edit(path, now, at, lines[at][1])
            yield one(edit)
        if tried or rng.random() < 0.7:
            yield _TEST
    yield TINY.finish


# Edits that a searcher tries, at most.
TRIES = 6


@dataclass(frozen=True, slots=True)
class Verbs:
    """What a searcher does, as calls of a set of tools.

    Attributes:
        find: By the name of a function.
        read: By path.
        change: By path, old text and new text.
        undo: By path. Without it an edit is taken back by another one.
    """

    test: ToolCall
    find: Callable[[str], ToolCall]
    read: Callable[[str], ToolCall]
    change: Callable[[str, str, str], ToolCall]
    finish: Said
    undo: Callable[[str], ToolCall] | None = None


TINY = Verbs(
    test=_TEST_CALL,
    find=lambda name: call("grep", pattern=f"def {name}"),
    read=lambda path: call("read_file", path=path),
    change=lambda path, old, new: call("substitute", path=path, old=old, new=new),
    undo=lambda path: _UNDO,
    finish=one(call("finish")),
)


def _in_terminal(command: str) -> ToolCall:
    return call("run_terminal_cmd", command=command, is_background=False)


PRODUCT = Verbs(
    test=_in_terminal("timeout 10 python -m pytest -q -x --tb=short -rN"),  # a try may loop without end
    find=TINY.find,
    read=lambda path: call("read_file", target_file=path),
    change=lambda path, old, new: call("search_replace", file_path=path, old_string=old, new_string=new),
    undo=lambda path: _in_terminal(f"git checkout -q -- {quote(path)}"),
    finish=turn([], "I made the tests pass."),
)


def searches(tools: Collection[str]) -> Verbs | None:
    """Return how a searcher works with the tools of these names; None where it cannot."""
    if "finish" in tools:
        return TINY if "undo" in tools else replace(TINY, undo=None)
    return PRODUCT if {"run_terminal_cmd", "grep", "read_file", "search_replace"} <= {*tools} else None


def searcher(task: Task, rng: Random, verbs: Verbs = TINY) -> Script:
    """Test, search the function that failed, read its module; then try single changes of it, each with a test in the same turn,
    undone if the test fails, until one passes.

    The right change comes at a random place between the first and the last try, as if it were not known and the changes were
    drawn without repeats. Every try is one to learn from. Where the instruction says what the function should do, the first is
    right.

    A gap is filled, a lint removed and a function renamed at the first try, with the tools of tiny models. Raises ValueError for
    a bug that is undone by no single change."""
    if "kind" in task.metadata:
        yield from {"tests": _write_test, "rename": _rename}.get(task.metadata["kind"], _mend)(task)
        return
    [right] = task.solution.values()
    if (looked := (yield from _look(task, verbs))) is None:
        yield verbs.finish
        return
    path, texts = looked
    if (answer := right.rstrip("\n")) not in texts:
        raise ValueError(f"task {task.id}: its solution is no single change of the function whose test fails")
    count = 0 if ":" in task.instruction else rng.randrange(TRIES)
    wrong = [text for text in rng.sample(texts, len(texts)) if text != answer]
    yield from _try(path, task.files[path], [*wrong[:count], answer], verbs)


def seeker(task: Task, tools: Collection[str]) -> Script:
    """Find the function that a request paraphrases: by meaning if the product's tools include `codebase_search`, else by a grep
    for its words. Read the modules of the answer, best first, then all others, up to the one with the number that the request
    spells, and change that."""
    [(path, right)] = task.solution.items()
    words = task.instruction.split('"')[1]
    if SEARCH in tools:
        answer = yield one(call(SEARCH, query=words, target_directories=[]))
    else:
        answer = yield one(call("grep", pattern=words))
    modules = re.findall(r"^(\w+\.py):\d", answer, re.M)
    if path not in modules:
        modules += (yield one(call("list_dir", target_directory="."))).split()
    for module in dict.fromkeys(modules[: modules.index(path) + 1]):
        yield one(PRODUCT.read(module))
    yield one(PRODUCT.change(path, *(text.split()[-1] for text in (task.files[path], right))))
    yield turn([], "I fixed it.")


def _mend(task: Task) -> Script:
    """Look at what fails or is found, read the module of the function, write the lines that differ and check them."""
    [(path, right)] = task.solution.items()
    check = _LINT if task.metadata["kind"] == "lint" else _TEST_CALL
    yield one(check)
    yield one(TINY.find(task.metadata["function"]))
    yield one(TINY.read(path))
    yield turn([_replace(path, task.files[path], right), check, *[_TEST_CALL] * (check == _LINT)])
    yield TINY.finish


def _write_test(task: Task) -> Script:
    """Read the function and its tests, add one that wants what another wants, and write what the function gave instead."""
    [(path, right)] = task.solution.items()
    name, now = task.metadata["function"], task.files[path]
    yield one(TINY.find(name))
    yield turn([TINY.read(module) for module in (home_of(name, task.files), path)])
    guess = re.sub(" == .*", now[now.rindex(" == ") :].rstrip("\n"), right, count=1)
    yield turn([_replace(path, now, guess), _TEST_CALL])
    if guess != right:
        yield turn([_replace(path, guess, right), _TEST_CALL])
    yield TINY.finish


def _rename(task: Task) -> Script:
    """Search the name, change each line that has it, and test."""
    yield one(call("grep", pattern=task.metadata["function"]))
    pairs = [(path, task.files[path].split("\n"), task.solution[path].split("\n")) for path in sorted(task.solution)]
    lines = [(path, *line) for path, old, new in pairs for line in zip(old, new, strict=True) if line[0] != line[1]]
    yield turn([*(TINY.change(*line) for line in lines), _TEST_CALL])
    yield TINY.finish


def _replace(path: str, now: str, right: str) -> ToolCall:
    """Return the call that writes the lines of a file that differ, with as many others as make them unique."""
    old, new = now.split("\n"), right.split("\n")
    shorter, after = min(len(old), len(new)), 0
    first = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    while after < shorter - first and old[-1 - after] == new[-1 - after]:
        after += 1
    if first in (len(old) - after, len(new) - after):  # lines that come or go are named with the one after them
        after -= 1
    while now.count("\n".join(old[first : len(old) - after])) > 1:
        first -= 1
    before, text = ("\n".join(lines[first : len(lines) - after]) for lines in (old, new))
    return TINY.change(path, before, text)


def blind(task: Task, rng: Random) -> Script:
    """Do as `searcher` does without knowing the answer: try every single change of the function that failed, in a random order,
    until the tests pass or the rollout is over. What a policy finds beyond this it has learnt."""
    if looked := (yield from _look(task, TINY)):
        path, texts = looked
        yield from _try(path, task.files[path], rng.sample(texts, len(texts)), TINY)


def _look(task: Task, verbs: Verbs) -> Generator[Said, str, tuple[str, list[str]] | None]:
    """Test, search the function that failed, and read its module. Returns the module's path, and its texts with the function
    changed in one place; None if no failed test names a function, as pytest takes True for 1, and hidden tests do not."""
    failed = yield one(verbs.test)
    if (called := re.search(r"(?::|assert) (\w+)\(", failed)) is None:
        return None
    yield one(verbs.find(called[1]))
    path = home_of(called[1], task.files)
    yield one(verbs.read(path))
    start, code, end = split_at(task.files[path].rstrip("\n"), called[1])
    return path, list(dict.fromkeys(start + text + end for _, text in neighbours(code, ENUMERABLE)))


def _try(path: str, now: str, texts: Sequence[str], verbs: Verbs) -> Script:
    """Try texts of a module, each with a test in the same turn, undone if the test fails, until one passes; then finish."""
    now, back = now.rstrip("\n"), list[ToolCall]()
    for text in texts:
        output = yield turn([*back, verbs.change(path, *substitution(now, text)), verbs.test])
        if "pass" in output and "fail" not in output:
            break
        back = [verbs.undo(path) if verbs.undo else verbs.change(path, *substitution(text, now))]
    yield verbs.finish


_PARTS = re.compile(r"\n| ?\w+| ?[^\w\s]+|\s")


def substitution(now: str, right: str) -> tuple[str, str]:
    """Return the texts whose exchange makes `right` of `now`, which differ in one place: the operator that changes, with the
    words on both sides of it, and as many parts before them as make it unique in the file. A model finds its place by copying the
    words."""
    old, new = _PARTS.findall(now), _PARTS.findall(right)
    changed = next(n for n, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
    first = next((n for n in range(changed - 1, -1, -1) if _ends_side(old[n])), changed)
    last = next((n for n in range(changed + 1, len(old)) if _ends_side(old[n])), changed)
    while first and now.count("".join(old[first : last + 1])) > 1:
        first -= 1
    return "".join(old[first : last + 1]), "".join(new[first : last + 1])


def _ends_side(part: str) -> bool:
    """Return whether the side of an operator ends with this part: with a word."""
    return part.strip().isidentifier() or part.strip().isdigit()


def step_by_step(script: ChatScript) -> Script:
    """Play a script of conversations with one call a turn."""
    talk: list[Message] = []
    while not talk or (isinstance(talk[-1], Said) and talk[-1].calls):
        message = script(talk)
        talk.append(message)
        for step in [Said(calls=(written,)) for written in message.calls] or [message]:  # noqa: UP028
            yield step  # `yield from` would send the answers to the list


def changes_lines(task: Task) -> bool:
    """Return whether the solution only changes lines of one file, without their indentation."""
    [path, *more] = task.solution or [""]
    if more or path not in task.files:
        return False
    now, right = task.files[path], task.solution[path]
    return _indents(now.rstrip("\n")) == _indents(right.rstrip("\n"))


def _indents(text: str) -> list[str]:
    """Return the indentation of each line, which the tool keeps."""
    return [line[: len(line) - len(line.lstrip())] for line in text.split("\n")]


def _mistake(path: str, now: str, right_text: str, rng: Random, tried: list[int]) -> tuple[ToolCall, str]:
    """Return an edit that does not fix the program, and the program after it. A mistake of place is not made twice."""
    lines, right = now.split("\n"), right_text.split("\n")
    sound = [line for line in range(1, len(lines)) if lines[line] == right[line] and line not in tried]
    if sound and rng.random() < 2 / 3:
        line = rng.choice(sound)
        return _edit(path, now, line, lines[line])
    for _ in range(100):  # about every third draw is usable
        planted = bugs(now if rng.random() < 0.5 else right_text, rng)
        if planted is None or planted[1] == right_text:
            continue
        wrong = planted[1].split("\n")
        places = [line for line in range(len(lines)) if lines[line] != wrong[line]]
        if len(places) == 1:
            return _edit(path, now, places[0], wrong[places[0]])
    raise ValueError(f"{path}: found no mistake to make; the expert's mistakes are those of `repairs.bugs`")


def _edit(path: str, now: str, at: int, line: str) -> tuple[ToolCall, str]:
    """Return the call that writes `line` at `at` (from 0), and the program after it."""
    lines = now.split("\n")
    after = "\n".join([*lines[:at], line, *lines[at + 1 :]])
    return call("edit_line", path=path, line=at + 1, text=line.strip()), after


def digest(log: Sequence[tuple[Said, str]]) -> str:
    """Return a summary of turns and of what answered each: what fails, what was tried and how that failed, and what is left."""
    failing, lines, left = "", list[str](), "test"
    for message, output in log:
        calls = [written.call for written in message.calls]
        edits = [tool_call for tool_call in calls if isinstance(tool_call, ToolCall) and tool_call.name in _EDITS]
        if not edits and output.startswith("fail"):
            failing = output
        for edit in edits:
            lines.append(f"tried {' > '.join(str(edit.arguments[name]) for name in _EDITS[edit.name])}: {output[:40]}")
            left = "finish" if output.startswith("pass") else "undo, then change something else"
    return "\n".join([*([failing] if failing else []), *lines, f"left: {left}"])


_EDITS = {"edit_line": ("line", "text"), "substitute": ("old", "new")}


@dataclass(slots=True)
class _Play:
    """A script under way.

    Attributes:
        message: Its last message.
        output: The observations that answered it.
        reads: Whether the policy reads a file of its own accord, so that the answer is not for the script.
    """

    script: Script
    message: Said
    output: str = ""
    log: list[tuple[Said, str]] = field(default_factory=list)
    reads: bool = False


class WithoutModel:
    """A policy that writes by rule what a model would sample. A rollout is answered at once and leaves no trace."""

    def __init__(self, renderer: ChatRenderer, capacity: int = 256) -> None:
        self.renderer, self.capacity = renderer, capacity
        self._requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def step(self) -> list[Completion]:
        requests, self._requests = self._requests, []
        return [self._answer(request) for request in sorted(requests, key=lambda request: request.rollout)]

    def release(self, rollout: int) -> Trace:
        self._requests = [request for request in self._requests if request.rollout != rollout]
        return Trace()

    def written(self, request: Request) -> list[int]:
        """Return the turn that answers a request, which may be longer than it allows."""
        raise NotImplementedError

    def _answer(self, request: Request) -> Completion:
        return unsampled(request.rollout, self.written(request)[: request.max_tokens])


def unsampled(rollout: int, token_ids: Sequence[int]) -> Completion:
    """Return a completion that no model wrote."""
    size = len(token_ids)
    return Completion(rollout=rollout, token_ids=list(token_ids), logprobs=[0.0] * size, policy_versions=[-1] * size)


class ScriptedPolicy(WithoutModel):
    """Plays one script a rollout. Deterministic, for tests and demonstrations without a model.

    Where it is asked for a summary it writes a `digest`, and reads the file again that it read last. Raises ValueError when a
    script ends before its agent does.
    """

    def __init__(
        self, renderer: ChatRenderer, script: Callable[[int], Script], capacity: int = 256, chained: bool = False
    ) -> None:
        """`chained`: rollouts may have several segments, so a script is kept when a segment ends."""
        super().__init__(renderer, capacity)
        self.script, self.chained = script, chained
        self._plays: dict[int, _Play] = {}
        self._live: set[int] = set()
        self._queries = [renderer.ask(text) for text in renderer.queries.values()]

    def release(self, rollout: int) -> Trace:
        self._live.discard(rollout)
        if not self.chained and (play := self._plays.pop(rollout, None)):
            play.script.close()
        return super().release(rollout)

    def written(self, request: Request) -> list[int]:
        root = first_segment(request.rollout)
        begins = request.rollout not in self._live
        self._live.add(request.rollout)
        if begins and request.rollout == root:
            script = self.script(root)
            self._plays[root] = _Play(script, next(script))
            return self.renderer.turn(self._plays[root].message)
        play = self._plays[root]
        if (output := self._observed(request)) is not None and not play.reads:
            play.output = output
            play.log.append((play.message, output))
        play.reads = False
        if any(list(request.token_ids[-len(query) :]) == query for query in self._queries):
            return self.renderer.encoded([digest(play.log), self.renderer.end])
        calls = [written.call for message, _ in play.log for written in message.calls]
        reads = [call for call in calls if isinstance(call, ToolCall) and call.name == "read_file"]
        if begins and output is None and reads:  # a summary leaves out what it showed
            play.reads = True
            return self.renderer.turn(one(reads[-1]))
        try:
            play.message = play.script.send(play.output)
        except StopIteration:
            raise ValueError(f"the script of rollout {root} ended before its agent") from None
        return self.renderer.turn(play.message)

    def _observed(self, request: Request) -> str | None:
        """Return the last observation among the tokens of a request, if there is one."""
        out, end = (self.renderer.ids[token] for token in self.renderer.around)
        read = list(request.token_ids)
        if out not in read:
            return None
        last = len(read) - read[::-1].index(out)
        return str(self.renderer.tokenizer.decode(read[last : read.index(end, last)], skip_special_tokens=False))


def lazy(task: Task, rng: Random) -> Script:
    """Finish at once."""
    yield TINY.finish


# Policies without a model at tasks of the grader `functions`. `blind` and `lazy` do not know the answer.
TINY_SCRIPTS: Mapping[str, Callable[[Task, Random], Script]] = {
    "expert": lambda task, random: expert(task, random, 0.0),
    "lazy": lazy,
    "searcher": searcher,
    "blind": blind,
}
# Those that need the tool `grep`.
GREPPING = ("searcher", "blind")
