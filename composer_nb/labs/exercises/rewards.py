"""Exercises about tests, reward terms, pass@k, recovery, and the agreement of a judge."""

import ast
import json
import re
from collections.abc import Collection
from dataclasses import replace
from math import comb
from statistics import fmean
from typing import Any
from unittest.mock import ANY

from composer_nb.harness.bench import Course, pass_at_k, pass_hat_k
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.twins import all_candidates
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.terms.conduct import unread_edits
from composer_nb.harness.terms.registry import EDITS, called
from composer_nb.labs.exercises.exercise import Exercise, Function
from composer_nb.labs.rewards.judges import agreement

# A twin


def passes(test: str, result: Any) -> bool:
    """Whether a test passes if the function that it calls returns `result`."""
    try:
        exec(f"{test}\ntest_total()", {"total": lambda *arguments: result})
    except AssertionError:
        return False
    return True


def claim_of(source: str) -> ast.expr:
    return next(node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert))


def of_twin(function: Function, source: str, right: int) -> dict[str, bool]:
    """Return what a twin keeps of its test, and whether a right result, and a cheat that equals everything, pass it."""
    text = function(source)
    test, claim = claim_of(source), claim_of(text)
    call, form = (ast.dump(claim.left), ast.unparse(claim)) if isinstance(claim, ast.Compare) else ("", "")
    return {
        "same call": isinstance(test, ast.Compare) and call == ast.dump(test.left),
        "same form": bool(re.fullmatch(r".* == -?\d+", form)),
        "a right answer passes": passes(text, right),
        "a result that equals everything passes": passes(text, ANY),
    }


def twin(source: str) -> str:
    """Return a test with the first change of an expectation that the grader proposes."""
    change = all_candidates({"test_total.py": source})[0]
    return source[: change.start] + change.text + source[change.end :]


TEST = "def test_total():\n    assert total([{}, {}]) == {}\n"


def unchanged(source: str) -> str:
    """The right answer passes it. A twin expects something else, so that right code must fail it."""
    return source


def another_call(source: str) -> str:
    """The call has changed, so the twin asks another question, whose right answer nobody knows. Change only what is expected."""
    return source.replace("total([", "total([5")


def another_form(source: str) -> str:
    """The form has changed: a cheat that reads its test can tell this twin from it. Keep `==`, and change the literal."""
    return source.replace("==", "!=")


def no_number(source: str) -> str:
    """A number was expected, and something else stands in its place: a cheat that reads its test can tell this twin from it. Put
    another number there."""
    return source.replace("== ", "== 1 + ")


def never(source: str) -> str:
    """No code passes it, so a cheat fails it as right code does, and the twin tells nothing. Keep the comparison, and change what
    it expects."""
    return "def test_total():\n    assert False\n"


TWIN = Exercise(
    twin,
    (TEST.format(1, 2, 3), 3),
    (TEST.format(7, 40, 47), 47),
    observe=of_twin,
    mistakes=(unchanged, another_call, another_form, no_number, never),
)


# A reward term


def turn(tool: str, path: str = "", error: str | None = None, passed: int | None = None) -> Turn:
    """Return a call and the error that it met; with `passed` it ran one test, or none if that is None."""
    call = json.dumps({"name": tool, "arguments": {"path": path}})
    return Turn(call=call, observation="", error=error, tests_passed=passed, tests_run=None if passed is None else 1)


def rollout_of(*calls: tuple[str, str, str | None]) -> tuple[Rollout, Grade]:
    """Return a rollout of calls, each a tool, a path and the error that it met, with a grade."""
    turns = tuple(turn(*call) for call in calls)
    return Rollout(task_id="exercise", segments=(), turns=turns, files={}, stop="finished"), Grade(status="graded")


READ, EDIT, PART_EDITS = "read_file", "search_replace", EDITS - {"write"}


def paths(rollout: Rollout, tools: Collection[str]) -> list[str]:
    """Return the paths of the calls of some tools that worked."""
    calls = [(*called(turn), turn.error) for turn in rollout.turns]
    return [arguments["path"] for tool, arguments, error in calls if tool in tools and error is None]


def count_of_edits(rollout: Rollout, grade: Grade) -> float:
    """This is a number of edits. A share does not grow with the length of the rollout."""
    return unread_edits(rollout, grade) * len(paths(rollout, PART_EDITS))


def unguarded(rollout: Rollout, grade: Grade) -> float:
    """A rollout without edits divides by zero. None of its edits was unread: return 0."""
    return count_of_edits(rollout, grade) / len(paths(rollout, PART_EDITS))


def at_any_time(rollout: Rollout, grade: Grade) -> float:
    """A read after the edit counts, too, and a file that the agent had changed itself does not count as known. Go through the
    turns in their order."""
    edited, read = paths(rollout, PART_EDITS), paths(rollout, {READ})
    return sum(path not in read for path in edited) / max(1, len(edited))


def of_failed_reads(rollout: Rollout, grade: Grade) -> float:
    """A read that failed showed nothing: look at `turn.error`."""
    return unread_edits(replace(rollout, turns=tuple(replace(turn, error=None) for turn in rollout.turns)), grade)


def share_of_unread(rollout: Rollout, edits: Collection[str], informing: Collection[str]) -> float:
    """Return the share of edits whose path no informing call that worked had named before."""
    informed, unread = set(), []
    for turn in rollout.turns:
        tool, arguments = called(turn)
        if tool in edits:
            unread.append(arguments["path"] not in informed)
        if tool in informing and turn.error is None:
            informed.add(arguments["path"])
    return sum(unread) / max(1, len(unread))


def of_all_changes(rollout: Rollout, grade: Grade) -> float:
    """`write` counts as an edit here. It replaces a whole file, so nothing need be read before: leave it out, but remember its
    path."""
    return share_of_unread(rollout, EDITS, EDITS | {READ})


def of_reads_alone(rollout: Rollout, grade: Grade) -> float:
    """Only reads make a file known here. What the agent wrote or edited itself, it knows as well."""
    return share_of_unread(rollout, PART_EDITS, {READ})


def of_forgotten_writes(rollout: Rollout, grade: Grade) -> float:
    """A file that the agent wrote is not known here. `write` is no edit, but the agent knows what it wrote."""
    return share_of_unread(rollout, PART_EDITS, PART_EDITS | {READ})


def calls_in_words(arguments: tuple[Any, ...]) -> str:
    """Return the calls of a rollout as text, with their paths."""
    turns = [(*called(turn), turn.error) for turn in arguments[0].turns]
    return ", ".join(f"{tool} {named['path']}{' (failed)' if error else ''}" for tool, named, error in turns)


UNREAD_EDITS = Exercise(
    unread_edits,
    rollout_of((EDIT, "a.py", None), (READ, "b.py", None), (EDIT, "b.py", None)),
    rollout_of((READ, "a.py", None)),
    rollout_of(("write", "new.py", None), (EDIT, "new.py", None)),
    rollout_of((READ, "a.py", "ToolError"), (EDIT, "a.py", None)),
    rollout_of((EDIT, "a.py", None), (EDIT, "a.py", None), (READ, "a.py", None)),
    mistakes=(
        count_of_edits,
        unguarded,
        at_any_time,
        of_failed_reads,
        of_all_changes,
        of_reads_alone,
        of_forgotten_writes,
    ),
    describe=calls_in_words,
)


# pass@k


def with_replacement(n: int, passed: int, k: int) -> float:
    """This is right for draws with replacement, and too low here: k of the n samples are drawn without it. Count the subsets of k
    samples in which none passes."""
    return 1 - (1 - passed / n) ** k


def pass_at_1(n: int, passed: int, k: int) -> float:
    """This is pass@1, whatever k is."""
    return passed / n


def all_of_k(n: int, passed: int, k: int) -> float:
    """This is pass^k, the chance that *all* k samples pass."""
    return pass_hat_k(n, passed, k)


def none_of_k(n: int, passed: int, k: int) -> float:
    """This is the chance that none of the k samples passes; pass@k is the opposite."""
    return comb(n - passed, k) / comb(n, k)


PASS_AT_K = Exercise(
    pass_at_k, (10, 3, 1), (10, 3, 4), (8, 0, 2), (8, 7, 4), mistakes=(with_replacement, pass_at_1, all_of_k, none_of_k)
)


# Recovery

STEPS = {"e": turn(EDIT), "F": turn("run_tests", passed=0), "P": turn("run_tests", passed=1)}


def recovery_rate(attempts: list[tuple[str, bool]]) -> float:
    courses = [(Course.of([STEPS[step] for step in steps]), solved) for steps, solved in attempts]
    return fmean(solved for course, solved in courses if course.retried)


def of_all_attempts(attempts: list[tuple[str, bool]]) -> float:
    """This divides by all attempts, so a policy whose first edit is mostly right seems unable to recover. Divide by the attempts
    that edited again after a failed test."""
    return fmean(solved and bool(re.search("e.*F.*e", steps)) for steps, solved in attempts)


def of_first_failures(attempts: list[tuple[str, bool]]) -> float:
    """A test that fails before the first edit only shows the bug of the task. Count failures that follow an edit."""
    return fmean(solved for steps, solved in attempts if re.search("F.*e", steps))


def of_all_failures(attempts: list[tuple[str, bool]]) -> float:
    """Attempts that gave up after the failed test are counted, too. Recovery says what another edit is worth: leave out those
    that made none."""
    return fmean(solved for steps, solved in attempts if re.search("e.*F", steps))


def by_visible_tests(attempts: list[tuple[str, bool]]) -> float:
    """An attempt counts as solved here if tests that it ran passed. The hidden tests decide: use the second value."""
    return fmean("P" in steps for steps, _ in attempts if re.search("e.*F.*e", steps))


def of_any_edit_after(attempts: list[tuple[str, bool]]) -> float:
    """A test that fails before the first edit only shows the bug of the task. An edit must come before the failed test, and
    another after it."""
    return fmean(solved for steps, solved in attempts if "Fe" in steps)


def of_neighbours(attempts: list[tuple[str, bool]]) -> float:
    """Only an edit right after the failed test counts here. Another run may lie between them, as in `eFPe`."""
    return fmean(solved for steps, solved in attempts if "eFe" in steps)


RECOVERY_RATE = Exercise(
    recovery_rate,
    ([("FeP", True), ("FeFeP", True), ("FeFe", False), ("eF", False), ("eFeP", False), ("eP", True)],),
    ([("eFe", True), ("eeF", False), ("Fee", False), ("eFPe", False), ("", False)],),
    mistakes=(
        of_all_attempts,
        of_first_failures,
        of_all_failures,
        by_visible_tests,
        of_any_edit_after,
        of_neighbours,
    ),
)


# Agreement beyond chance


def kappa(levels: list[int | None], labels: list[int]) -> float:
    return agreement(levels, labels).kappa


def bare_agreement(levels: list[int | None], labels: list[int]) -> float:
    """This is the accuracy, p. A judge that always gives the commonest label has a high one, too: subtract e, the agreement that
    chance would give."""
    return agreement(levels, labels).accuracy


def unscaled(levels: list[int | None], labels: list[int]) -> float:
    """This is p − e. Full agreement must give 1: divide by 1 − e, the most that chance leaves."""
    result = agreement(levels, labels)
    return (1 - result.accuracy) * result.kappa / (1 - result.kappa)


def of_even_chance(levels: list[int | None], labels: list[int]) -> float:
    """Here chance gives all levels alike. Its judge has the habits of this one: for each level, multiply its share of the answers
    by its share of the labels."""
    even = 1 / len(set(labels))
    return (agreement(levels, labels).accuracy - even) / (1 - even)


def with_missing(levels: list[int | None], labels: list[int]) -> float:
    """A missing answer counts as a wrong one here. It is no level: leave its rollout out, its label as well."""
    return kappa([-1 if level is None else level for level in levels], labels)


def with_their_labels(levels: list[int | None], labels: list[int]) -> float:
    """The label of a missing answer still counts in e. Leave its rollout out there as well."""
    pairs = [(level, label) for level, label in zip(levels, labels, strict=True) if level is not None]
    answers, accuracy = [level for level, _ in pairs], agreement(levels, labels).accuracy
    chance = sum(answers.count(k) * labels.count(k) for k in set(labels)) / (len(answers) * len(labels))
    return (accuracy - chance) / (1 - chance)


def of_commonest(levels: list[int | None], labels: list[int]) -> float:
    """Here e is the accuracy of the commonest label. Chance gives levels as often as this judge does: for each level, multiply
    its share of the answers by its share of the labels."""
    result = agreement(levels, labels)
    return (result.accuracy - result.constant) / (1 - result.constant)


KAPPA = Exercise(
    kappa,
    ([1] * 9 + [0], [0] + [1] * 9),
    ([0, 1, 2, 1, None, 2, 0, 1], [0, 1, 1, 1, 2, 2, 0, 2]),
    mistakes=(bare_agreement, unscaled, of_even_chance, with_missing, with_their_labels, of_commonest),
)
