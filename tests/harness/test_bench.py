"""The bench: figures against hand computation, and behaviour on rollouts made by hand."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness import bench
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Kind, Rollout, Segment, Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tool_errors import errors_line, errors_of, tool_errors
from composer_nb.harness.tools.tool_call import call

EDIT = Turn(call=call("edit_line", path="f.py").json, observation="ok")
BAD_EDIT = Turn(call=EDIT.call, observation="error: no line", error="InvalidArguments")
INVALID = Turn(call='garbage "edit_line"', observation="error: bad call", error="InvalidArguments")
FAIL = Turn(call=call("run_tests").json, observation="fail", tests_passed=1, tests_run=4)
PASS = Turn(call=FAIL.call, observation="pass 4", tests_passed=4, tests_run=4)
NO_TESTS = Turn(call=FAIL.call, observation="error: no tests here", error="UnexpectedEnvironment")
FINISH = Turn(call=call("finish").json, observation="")


def make_attempt(
    name: str,
    passed: bool | None,
    turns: tuple[Turn, ...] = (FINISH,),
    family: str = "loop",
    read: int = 4,
    wrote: int = 2,
    stop: str = "finished",
) -> Attempt:
    """Return an attempt; `passed=None` means that it was lost to the infrastructure."""
    kind = np.array([Kind.PROMPT] * read + [Kind.TOOL_CALL] * wrote, np.uint8)
    blank = np.zeros(read + wrote, np.int32)
    segment = Segment(token_ids=blank, kind=kind, logprob=blank.astype(np.float32), policy_version=blank)
    source = "from f import f\n\n\ndef test_0():\n    assert f(1) == 1\n"
    about = {"tests": {"t.py": source}, "source_scope": ("f.py",), "metadata": {"family": family}}
    task = Task(id=name, instruction="x", files={}, **about)
    grade = Grade(status="infra_error") if passed is None else Grade(status="graded", tests={"t.py::test_0": passed})
    rollout = Rollout(task_id=name, segments=(segment,), turns=turns, files={}, stop=stop)
    return Attempt(task=task, rollout=rollout, grade=grade)


def test_figures_are_those_computed_by_hand() -> None:
    sampled = [
        *(make_attempt("a", passed) for passed in (True, True, False, False)),
        *(make_attempt("b", passed, family="comp") for passed in (False, False, False, True)),
        *(make_attempt("c", passed, family="comp") for passed in (False, False, False, False)),
    ]
    greedy = [make_attempt("a", True), make_attempt("b", False), make_attempt("c", False), make_attempt("d", True)]
    summary = bench.summarise(sampled, greedy)
    assert summary["pass_at_1"] == pytest.approx((0.5 + 0.25 + 0.0) / 3)
    assert summary["best_of_k"] == pytest.approx(2 / 3)
    assert summary["pass_greedy"] == 0.5
    assert (summary["k"], summary["n_tasks"], summary["infra_errors"]) == (4, 3, 0)
    assert summary["by_family"] == {"comp": 1 / 8, "loop": 0.5}


def test_what_the_infrastructure_lost_counts_as_neither_solved_nor_tried() -> None:
    lost_attempt = make_attempt("b", None, turns=(), family="comp", read=100, wrote=0, stop="infrastructure")
    sampled = [make_attempt("a", True), make_attempt("a", None), lost_attempt, lost_attempt]
    sampled.append(make_attempt("c", False, family="comp"))
    greedy = [make_attempt("a", True), make_attempt("b", None), make_attempt("c", False)]
    summary = bench.summarise(sampled, greedy)
    assert (summary["pass_at_1"], summary["best_of_k"], summary["pass_greedy"]) == (0.5, 0.5, 0.5)
    assert (summary["k"], summary["n_tasks"], summary["infra_errors"]) == (1, 2, 4)
    assert summary["by_family"] == {"comp": 0.0, "loop": 1.0}
    assert (summary["tokens_per_task"], summary["finishes"], summary["tool_calls_per_task"]) == (6.0, 1.0, 1.0)


@settings(max_examples=40)
@given(
    solved=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=12), seed=st.integers(0, 9)
)
def test_an_interval_holds_the_mean(solved: list[list[bool]], seed: int) -> None:
    sampled = [make_attempt(f"t{n}", passed) for n, outcomes in enumerate(solved) for passed in outcomes]
    greedy = [make_attempt(f"t{n}", outcomes[0]) for n, outcomes in enumerate(solved)]
    summary = bench.summarise(sampled, greedy, seed)
    for mean, interval in (("pass_at_1", "ci95"), ("pass_greedy", "ci95_greedy")):
        low, high = summary[interval]
        assert -1e-9 <= low <= summary[mean] + 1e-9 and summary[mean] - 1e-9 <= high <= 1 + 1e-9
    assert summary["best_of_k"] >= summary["pass_at_1"] - 1e-9
    assert summary == bench.summarise(sampled, greedy, seed)


@pytest.mark.parametrize(("n", "passed", "k"), [(5, 0, 1), (5, 2, 1), (5, 2, 3), (6, 5, 2), (4, 4, 4)])
def test_estimates_are_shares_of_draws_of_k(n: int, passed: int, k: int) -> None:
    draws = list(combinations([True] * passed + [False] * (n - passed), k))
    assert bench.pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert bench.pass_hat_k(n, passed, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_behaviour_is_what_was_done() -> None:
    attempts = [
        make_attempt("a", True, (FAIL, EDIT, PASS, FINISH), wrote=10),
        make_attempt("b", False, (INVALID, BAD_EDIT, INVALID), read=2, wrote=3, stop="turns"),
        make_attempt("c", False, (), read=5, wrote=0, stop="tokens"),
        make_attempt("d", False, (NO_TESTS, FINISH)),
    ]
    figures = bench.behaviour(attempts)
    assert figures["tokens_per_task"] == (14 + 5 + 5 + 6) / 4
    assert figures["sampled_per_task"] == (10 + 3 + 0 + 2) / 4
    assert figures["tool_calls_per_task"] == 9 / 4
    assert figures["invalid_call_rate"] == pytest.approx(3 / 9)
    assert figures["runs_tests"] == 1 / 4
    assert figures["finishes"] == 1 / 2
    assert sum(counts["calls"] for counts in figures["errors"].values()) == 9


def test_errors_are_counted_by_tool_and_kind() -> None:
    def turn(name: str, error: str | None = None) -> Turn:
        return Turn(call=call(name).json if name else "{broken", observation="", error=error)

    turns = (turn("grep"), turn("grep", "Timeout"), turn("grep", "InvalidArguments"), turn("", "InvalidArguments"))
    lost_turn = Turn(call="", observation="no provider", error="ProviderError")
    table = errors_of([make_attempt("a", True, (*turns, lost_turn)).rollout])
    assert table == {
        "grep": {"calls": 3, "Timeout": 1, "InvalidArguments": 1},
        "unreadable": {"calls": 1, "InvalidArguments": 1},
    }
    assert tool_errors([table, table])["grep"]["calls"] == 6
    assert errors_line(table) == "grep 1 InvalidArguments, 1 Timeout of 3; unreadable 1 InvalidArguments of 1"
    many = tuple(turn(f"tool{n}", "InvalidArguments") for n in range(1000))
    flood = errors_of([make_attempt("a", True, many).rollout])
    assert len(flood) <= 40  # names that a model makes up


UNDO = Turn(call=call("undo").json, observation="ok")
READ = Turn(call=call("read_file", path="f.py").json, observation="1x")
RETRY = (READ, EDIT, FAIL, UNDO, EDIT, PASS, FINISH)


def test_recovery_counts_who_tried_again_after_a_failed_test() -> None:
    attempts = [
        make_attempt("a", True, RETRY),
        make_attempt("a", False, RETRY),
        make_attempt("b", False, (EDIT, FAIL, FINISH)),
        make_attempt("b", True, (READ, READ, EDIT, PASS, FINISH)),
        make_attempt("c", False, (FAIL, EDIT, FINISH)),
    ]
    figures = bench.behaviour(attempts)
    assert (figures["recovery"], figures["recovery_n"]) == (0.5, 2)
    assert figures["tests_after_wrong_edit"] == 3 / 4  # a, a, b tested; c did not
    assert figures["reads_before_edit"] == (1 + 1 + 0 + 2 + 0) / 5
    assert figures["pass_within"] == {"4": 0.0, "8": 2 / 5, "12": 2 / 5, "20": 2 / 5}
    assert figures["calls_per_turn"] == 1.0
    idle = bench.behaviour([make_attempt("a", False)])
    assert idle["recovery"] is None and idle["recovery_n"] == 0 and idle["tests_after_wrong_edit"] is None


def test_filtered_best_of_takes_the_first_attempt_that_passes_what_the_agent_sees() -> None:
    accepted_wrong, accepted_right = make_attempt("a", False, (EDIT, PASS)), make_attempt("a", True, (EDIT, PASS))
    refused = make_attempt("a", False, (EDIT, FAIL))
    edited_after = make_attempt("a", True, (EDIT, PASS, EDIT))
    tries = [refused, accepted_right, accepted_wrong, edited_after]
    assert bench.filtered_best_of(tries, 1) == 1 / 4  # an attempt that is not accepted is never taken
    assert bench.filtered_best_of(tries, 2) == np.mean([True, True, False, False])
    assert bench.filtered_best_of(tries, 4) == np.mean([True, True, False, True])
    assert bench.filtered_best_of(tries, 8) is None


@given(right=st.integers(0, 40), wrong=st.integers(0, 40))
def test_wilsons_ends_are_where_the_score_test_turns(right: int, wrong: int) -> None:
    if n := right + wrong:
        for end in bench.wilson(right / n, n):
            if 0 < end < 1:
                half_width = 1.959964 * np.sqrt(end * (1 - end) / n)
                assert abs(right / n - end) == pytest.approx(half_width, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("tasks", "samples", "spread"), [(50, 4, 0.0), (200, 2, 0.0), (100, 16, 0.2)])
def test_the_difference_that_shows_does_so_four_times_in_five(tasks: int, samples: int, spread: float) -> None:
    """The test is over tasks, as the bench's interval is; attempts are coins, whose differences vary most at a half, and gains
    differ from task to task."""
    rng, gain = np.random.default_rng(0), bench.detectable(tasks, samples, spread)
    gains = gain + spread * rng.choice([-1, 1], (4000, tasks))
    first, second = (rng.binomial(samples, 0.5 + side * gains / 2) / samples for side in (1, -1))
    gains = first - second
    significant = np.abs(gains.mean(1)) > 1.96 * gains.std(1, ddof=1) / np.sqrt(tasks)
    assert significant.mean() == pytest.approx(0.8, abs=0.03)
