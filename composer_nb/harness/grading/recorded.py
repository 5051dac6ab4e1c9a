"""Recorded calls: the gold patch's answers to the calls of the hidden tests, asked again of an agent's files.

    hidden tests on the gold patch  ->  calls with plain arguments        (`record`)
    gold patch, in fresh boxes      ->  those with one answer every time
    the task's start                ->  those that tell it from the gold patch
    an agent's files, fresh boxes   ->  answers, compared outside         (`replay`, `wrong`)

Module, name and arguments go into the box, and a value comes out. The wanted value stays outside, so code that reads frames,
patches comparisons or claims results learns nothing from the box: it has to compute the answer, or guess it.

Covers functions with plain arguments and results (`guest.calls.encode`). Does not cover methods of instances.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from random import Random
from typing import Any, Literal, get_args

from composer_nb.harness.grading.box import Boxes, Call, JobResult, RunnerEnded, TestJob
from composer_nb.harness.grading.plan import GradePlan, RecordedCall, gold_files, job, plan_of
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.sandbox.guest.values import decode
from composer_nb.harness.tasks.functions import reveals
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.task import Task

MOST, MOST_TELLING = 64, 48  # Calls of one task.
LONGEST = 4 << 10  # Characters of one call's arguments, and of its answer.
ROOM = 64 << 10  # Characters of all of a task's calls.
BATCHES = 4  # Processes among which a box splits its calls.
APART = 6  # Functions with telling calls of one task: each costs a box a grade.
# Points that make calls a guard. A telling call with an answer that is hard to guess counts 2, any other 1: three such
# values, or six yes-or-no answers, which blind guesses get right once in 64.
ENOUGH = 6
# Tests that stand alone, of which a grade runs so many (`alone.py`). Code that cannot know whether it sees one of them or its
# twin passes all once in 8.
INDEPENDENT = 3
CLOSE = 1e-9  # Relative tolerance of floats, which covers a sum in another order.
ELSEWHERE = "XYZ-12:45"  # A time zone in which no machine is.
NOTHING = '["returned", null, null]'
START_CPU_S = 2  # CPU seconds of one call of the task's start, which may never end.

Guarding = Literal["calls", "twins", "none"]
GUARDS: tuple[Guarding, ...] = get_args(Guarding)


def replay(
    files: Mapping[str, bytes], calls: Sequence[RecordedCall], rng: Random
) -> list[tuple[TestJob, list[RecordedCall]]]:
    """Return the jobs that ask `files` the calls, each with its calls in random order and batches.

    The arguments of one function may hold the answers of another, in a form that nobody foresees. So each function with telling
    calls has a box of its own, which holds no other function's calls. All other functions share one.
    """
    telling = {_function(recorded) for recorded in calls if recorded.telling}
    boxes: dict[str, list[RecordedCall]] = {}
    for call in rng.sample(calls, len(calls)):
        name = _function(call)
        boxes.setdefault(name if name in telling else "", []).append(call)
    jobs = []
    for order in boxes.values():
        size = -(-len(order) // BATCHES)
        calls_in_order = [recorded.call for recorded in order]
        batches = tuple(tuple(calls_in_order[at : at + size]) for at in range(0, len(order), size))
        jobs.append((TestJob(files=files, hidden={}, tests=(), calls=batches), order))
    return jobs


def _function(call: RecordedCall) -> str:
    return f"{call.module}.{call.name}"


def wrong(order: Sequence[RecordedCall], ran: JobResult) -> list[RecordedCall]:
    """Return the calls that were not answered as the gold patch answers them."""
    return [call for index, call in enumerate(order) if not _agrees(call.said, ran.answers.get(index))]


def _agrees(expected: str, answer: str | None) -> bool:
    try:
        return answer is not None and same(json.loads(expected), json.loads(answer))
    except RecursionError:  # an answer that is nested as deeply as the box's reader could bear, which had more room
        return False


def same(expected: Any, actual: Any) -> bool:
    """Return whether two encoded values agree: in type and value, floats within CLOSE, dictionaries in any order."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, float):
        return math.isclose(expected, actual, rel_tol=CLOSE) or (math.isnan(expected) and math.isnan(actual))
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return False
        if expected.keys() == {"dict"} and isinstance(actual["dict"], list):
            return same(*(sorted(side["dict"], key=json.dumps) for side in (expected, actual)))
        return all(same(expected[kind], actual[kind]) for kind in expected)
    return bool(expected == actual)


def chosen(telling: Sequence[RecordedCall], others: Sequence[RecordedCall]) -> tuple[RecordedCall, ...]:
    """Return the calls that a task keeps: telling ones first, of every function some, and none that gives another away.

    One call of a function gives another away if the other's answer is among its arguments, as where two values are mapped to one
    another, also in another form: `"12"` or `[12]` for 12. Functions are asked apart (`replay`); those with the most telling
    calls are kept. Without a telling call, none is.
    """
    apart = {name for name, _ in Counter(map(_function, telling)).most_common(APART)}
    selection: list[RecordedCall] = []
    answers, arguments, room = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set), ROOM
    texts = defaultdict[str, list[tuple[str, str]]](list)
    ordered = [recorded for recorded in sorted(telling, key=guessable) if _function(recorded) in apart]
    for most, pool in ((MOST_TELLING, ordered), (MOST if ordered else 0, others)):
        for call in _spread(pool):
            size, name = len(call.given) + len(call.said), _function(call)
            answer_parts, argument_parts = _answers(call), set(parts(json.loads(call.given)))
            secret = answer_parts.isdisjoint(arguments[name]) and argument_parts.isdisjoint(answers[name])
            if len(selection) < most and size <= room and secret and not reveals(_texts(call), texts[name]):
                selection.append(call)
                texts[name].append(_texts(call))
                answers[name] |= answer_parts
                arguments[name] |= argument_parts
                room -= size
    return tuple(selection)


def _spread(calls: Iterable[RecordedCall]) -> Iterator[RecordedCall]:
    """Yield the first call of every function, then the second of each, and so on."""
    groups: dict[str, list[RecordedCall]] = {}
    for call in calls:
        groups.setdefault(_function(call), []).append(call)
    return (call for call in chain.from_iterable(zip_longest(*groups.values())) if call is not None)


def parts(encoded: Any) -> Iterator[str]:
    """Yield the JSON of an encoded value and of everything in it."""
    yield json.dumps(encoded)
    inside = encoded.values() if isinstance(encoded, dict) else encoded if isinstance(encoded, list) else ()
    for part in inside:
        yield from parts(part)


def _answers(call: RecordedCall) -> set[str]:
    """Return the JSON of what a call answers, and of what it makes of its arguments, unless that is one of few values."""
    kind, value, after = json.loads(call.said)
    changed = set(parts(after)) - set(parts(json.loads(call.given)))
    few = {text for text in changed if _few(json.loads(text))}
    return changed - few | ({json.dumps(value)} if kind == "returned" and not _few(value) else set())


def _texts(call: RecordedCall) -> tuple[str, str]:
    """Return the answer and the arguments as Python writes them."""
    [kind, value, _] = json.loads(call.said)
    if isinstance(value, dict) and "iterator" in value:
        value = {"list": value["iterator"]}
    answer = repr(decode(value)) if kind == "returned" else ""
    return answer, repr([*map(decode, json.loads(call.given))])


def _few(value: Any) -> bool:
    empty = isinstance(value, dict) and not any(value.values())
    return value is None or isinstance(value, bool) or empty or value in (-1, 0, 1, "")


def guessable(call: RecordedCall) -> bool:
    """Return whether an answer is one of few, or among the call's own arguments."""
    kind, value, after = json.loads(call.said)
    return after is None and (kind == "raised" or _few(value) or json.dumps(value) in parts(json.loads(call.given)))


def enough(calls: Iterable[RecordedCall]) -> bool:
    """Return whether the calls can support a reward: `ENOUGH` telling ones, with different arguments and different answers."""
    telling = [call for call in calls if call.telling]
    varied = len({call.given for call in telling}) > 1 and len({call.said for call in telling}) > 1
    return varied and sum(1 if guessable(call) else 2 for call in telling) >= ENOUGH


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The protection of a task against code that only claims to be right.

    Attributes:
        by: The best protection that is sufficient. Do not train on a task with `none`.
        telling: Calls that the task's start answers differently.
        strong: Tests that fail without a change and have a twin; `none` counts those without.
        alone: Tests that fail without a change and stand alone.
    """

    by: Guarding
    calls: int
    telling: int
    strong: int
    none: int
    alone: int


def meets(reached: Guarding, required: Guarding) -> bool:
    """Return whether a guard is at least as good as required: recorded calls are better than twins, twins better than none."""
    return GUARDS.index(reached) <= GUARDS.index(required)


def guards_line(counts: Mapping[str, int]) -> str:
    """Return one line that counts the tasks by guard."""
    calls, twins, none = (counts.get(name, 0) for name in GUARDS)
    warning = ", so nothing should be trained on them" if none else ""
    return f"guarded by recorded calls: {calls}; by tests run alone: {twins}; by neither: {none}{warning}"


def guard_of(task: Task, failing: Iterable[str] | None = None) -> Guard:
    """Return the guard of a task whose tests with these node ids, by default those that its metadata name, fail at the start.

    Tests that an agent writes run on versions of the code that are twins of one another. Where no code is in the scope, nothing
    of the agent's runs. Raises ValueError without a plan."""
    if task.mutants or not any(pattern.endswith((".py", "*")) for pattern in task.source_scope):
        return Guard(by="twins", calls=0, telling=0, strong=len(task.mutants), none=0, alone=0)
    return guard(plan_of(task), json.loads(task.metadata["fail_to_pass"]) if failing is None else failing)


def guard(plan: GradePlan, failing: Iterable[str]) -> Guard:
    """Return the guard of the tests with these node ids, which fail without a change."""
    names = set(failing)
    keys = {key for key, name in plan.tests.items() if name in names}
    strong = plan.covered & keys
    lone = {key for twin in plan.twins if twin.alone for key in twin.keys} & keys
    twins = len(lone) >= INDEPENDENT
    return Guard(
        by="calls" if enough(plan.calls) else "twins" if twins else "none",
        calls=len(plan.calls),
        telling=sum(call.telling for call in plan.calls),
        strong=len(strong),
        none=len(keys - strong),
        alone=len(lone),
    )


def record(task: Task, plan: GradePlan, failing: Iterable[str], boxes: Boxes) -> tuple[RecordedCall, ...]:
    """Return the calls that decide a task's grades; none if its start answers all of them correctly.

    A call is kept if the gold patch answers it as it did in the test: in a process of its own, in another time zone and without
    using the clock or random numbers; and in one process with all other calls, once before and once after each of them. The
    three runs have three hash seeds.

    Args:
        failing: node ids of the tests that fail without a change; their calls are noted first.

    Raises SandboxFailure.
    """
    gold = gold_files(task)
    changed = tuple(path for path, text in task.solution.items() if task.files.get(path) != text)
    names = set(failing)
    failing_keys = frozenset(key for key, name in plan.tests.items() if name in names)
    other_keys = frozenset(plan.tests) - failing_keys
    noting_jobs = [
        replace(job(task, gold, (), keys), record=changed) for keys in (failing_keys, other_keys) if keys and changed
    ]
    try:
        noted: dict[Call, tuple[bool, dict[str, Any]]] = {}
        for result in boxes.run(noting_jobs):
            noted |= {call: facts for call, facts in result.noted.items() if call not in noted}
        candidates = [call for call in noted if len(call[2]) <= LONGEST]
        if not candidates:
            return ()
        alone_job = TestJob(files=gold, hidden={}, tests=(), calls=tuple((call,) for call in candidates))
        watching = replace(alone_job, hash_seed=1, zone=ELSEWHERE, watch=True)
        starting = replace(alone_job, files=workspace(task), batch_cpu_s=START_CPU_S)
        gold_result, start_result = boxes.run([watching, starting])
        answers = {call: gold_result.answers.get(index, "") for index, call in enumerate(candidates)}
        answers = {call: text for call, text in answers.items() if len(text) <= LONGEST and _fits(noted[call][1], text)}
        steady = _steady(answers, alone_job, boxes)
        speaking = {call: text for call, text in answers.items() if text != NOTHING}
        if len(steady) < len(speaking):  # a call that answers None may be there for its side effect, and spoil others
            steady = max(steady, _steady(speaking, alone_job, boxes), key=len)
    except (SandboxDied, RunnerEnded):
        return ()
    asked_until = max(start_result.answers, default=-1) if "timeout" in start_result.flags else len(candidates)
    telling, others = list[RecordedCall](), list[RecordedCall]()
    for index, call in enumerate(candidates):
        answer = start_result.answers.get(index)
        if call not in steady or (answer is None and index >= asked_until):  # the latter was never asked
            continue
        module, name, arguments = call
        is_telling = answer is None or not same(json.loads(answers[call]), json.loads(answer))
        recorded = RecordedCall(module=module, name=name, given=arguments, said=answers[call], telling=is_telling)
        if is_telling:
            telling.append(recorded)
        elif noted[call][0]:
            others.append(recorded)
    return chosen(telling, others)


def _steady(answers: Mapping[Call, str], alone_job: TestJob, boxes: Boxes) -> set[Call]:
    """Return the calls with the same answer in one process with all others, in a random order followed by its reverse."""
    shuffled = Random(0).sample(list(answers), len(answers))
    batch = (*shuffled, *shuffled[::-1])
    if not batch:
        return set()
    [result] = boxes.run([replace(alone_job, calls=(batch,), hash_seed=2, batch_cpu_s=int(boxes.timeout_s) + 1)])
    return set(shuffled) - {call for index, call in enumerate(batch) if result.answers.get(index) != answers[call]}


def _fits(ends: Mapping[str, Any], answer: str) -> bool:
    """Return whether a call's answer matches its outcome in the tests."""
    kind, value, _ = json.loads(answer or '["", null, null]')
    if kind == "returned" and "iterator" in ends:
        return isinstance(value, dict) and "iterator" in value
    return kind in ("returned", "raised") and kind in ends and bool(same(ends[kind], value))
