"""Exercises about comparisons of runs, paths and processes of a sandbox, verdicts, segments, staleness, and schedules."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.summary import SummarySettings
from composer_nb.harness.bench import bootstrap
from composer_nb.harness.sandbox.contract import WORKSPACE
from composer_nb.harness.sandbox.reap import is_dead, this_process
from composer_nb.harness.tools.session import Session
from composer_nb.harness.tools.tool_call import ToolError
from composer_nb.labs.exercises.exercise import Exercise
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services.orchestrator import Dispatch, Finished, Joined, Orchestrator

Array = NDArray[Any]


# The interval of a paired difference

SCORES_2T = np.random.default_rng(1).integers(0, 5, (2, 12)) / 4
DRAWS_DT = np.random.default_rng(0).choice(12, (2000, 12))


def paired_interval(first_T: Array, second_T: Array, draw_DT: Array) -> list[float]:
    """Return the package's interval, which draws its own resamples: those of DRAWS_DT where there are twelve tasks."""
    return bootstrap(second_T - first_T, seed=0)


def ends(means_D: Array, outside: float = 0.05) -> Array:
    """Return the ends of an interval that leaves out a share of the means."""
    return np.quantile(means_D, [outside / 2, 1 - outside / 2])


def of_single_tasks(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """This is the spread of single tasks. The interval is one of their mean, which varies less: take the mean of each resample,
    along axis 1."""
    return ends((second_T - first_T)[draw_DT])


def of_each_run(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """Both runs have an interval here, and the ends are subtracted. But a resample with easy tasks raises both scores: subtract
    within each resample, and take the quantiles last."""
    return ends(second_T[draw_DT].mean(1)) - ends(first_T[draw_DT].mean(1))


def first_less_second(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """The sign is wrong: a second run that solves more has a positive difference."""
    return ends((first_T - second_T)[draw_DT].mean(1))


def of_nine_tenths(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """This interval holds 90 % of the means. One of 95 % leaves out 2.5 % at each end."""
    return ends((second_T - first_T)[draw_DT].mean(1), outside=0.1)


def of_a_formula(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """This interval comes from a standard error, and is close. Here the draws make it: take the middle 95 % of their means."""
    gap_T = second_T - first_T
    return gap_T.mean() + np.array([-1.96, 1.96]) * gap_T.std(ddof=1) / np.sqrt(len(gap_T))


def of_fractions(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """`np.percentile` counts from 0 to 100, so its ends are 2.5 and 97.5. `np.quantile` takes 0.025 and 0.975."""
    return np.percentile((second_T - first_T)[draw_DT].mean(1), [0.025, 0.975])


def of_columns(first_T: Array, second_T: Array, draw_DT: Array) -> Array:
    """Each mean is over all draws of one place here. A draw is a row: take the mean along axis 1."""
    return ends((second_T - first_T)[draw_DT].mean(0))


PAIRED_INTERVAL = Exercise(
    paired_interval,
    (*SCORES_2T, DRAWS_DT),
    mistakes=(
        of_single_tasks,
        of_each_run,
        first_less_second,
        of_nine_tenths,
        of_a_formula,
        of_fractions,
        of_columns,
    ),
)


# The paths that an agent names


def workspace_path(root: str, path: str) -> str:
    """Return what the tools make of a path. Raises ValueError for one that leads out of the workspace."""
    nowhere: Any = None  # a path is judged before anything is opened
    try:
        return Session(sandbox=nowhere, root=root).path(path)
    except ToolError as error:
        raise ValueError(str(error)) from None


def unresolved(root: str, path: str) -> str:
    """`..` inside a path leads out as well, as in `docs/../../notes`. Resolve it before you compare: `posixpath.normpath`."""
    whole = posixpath.join(root, path)
    if not whole.startswith(root):
        raise ValueError
    return posixpath.relpath(whole, root)


def by_letters(root: str, path: str) -> str:
    """The folder `/workspace-old` begins with the letters of `/workspace`, but does not lie in it. Inside, a `/` follows."""
    return unresolved(root, posixpath.normpath(posixpath.join(root, path)))


def without_dots(root: str, path: str) -> str:
    """This refuses every `..`, but `docs/../README.md` stays inside. Judge where a path ends."""
    return workspace_path(root, "/" if ".." in path else path)


def always_below(root: str, path: str) -> str:
    """An absolute path is read as if it were relative, so another file is opened than the agent names, and its error is hidden
    from it. `posixpath.join` keeps an absolute path."""
    return workspace_path(root, f"{root}/{path}")


PATHS = "days.py docs/../README.md . /workspace/docs ../notes docs/../../notes ../workspace-old/.env /etc/passwd"
WORKSPACE_PATH = Exercise(
    workspace_path,
    *((WORKSPACE, path) for path in PATHS.split()),
    mistakes=(unresolved, by_letters, without_dots, always_below),
)


# A policy that learns when to say nothing

CHOICE = np.random.default_rng(2)
IS_SHOWN_BK = CHOICE.random((32, 4)) < (0.2, 0.5, 0.8, 1.0)
VERDICT_BK = np.where(IS_SHOWN_BK, CHOICE.choice((-0.25, 0.75), (32, 4)), 0.0)


def logit_gradient(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """Return the policy gradient of the logits of showing, with the mean reward of a kind as its baseline."""
    return without_baseline(reward_BK - reward_BK.mean(0), is_shown_BK, share_K)


def without_baseline(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """These are rewards without a baseline: right on average, but noisier. Subtract the mean reward of the kind."""
    return (reward_BK * (is_shown_BK - share_K)).mean(0)


def of_all_kinds(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """This baseline is one mean over all kinds. Each kind has its own: take the mean along axis 0."""
    return without_baseline(reward_BK - reward_BK.mean(), is_shown_BK, share_K)


def without_silence(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """Only chances at which the kind was shown count here. Silence is a choice as well; its derivative is −s."""
    return ((reward_BK - reward_BK.mean(0)) * is_shown_BK * (1 - share_K)).mean(0)


def with_wrong_silence(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """The derivative of silence has the wrong sign here: it is −s."""
    return ((reward_BK - reward_BK.mean(0)) * np.where(is_shown_BK, 1 - share_K, share_K)).mean(0)


def of_shown_alone(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """This baseline is the mean over the chances at which the kind was shown. Silence is a choice as well, with reward 0: take
    the mean over all chances."""
    count_K = np.maximum(is_shown_BK.sum(0), 1)
    return without_baseline(reward_BK - (reward_BK * is_shown_BK).sum(0) / count_K, is_shown_BK, share_K)


def downhill(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """The sign is that of a loss. The result is added to the logits, so it must lead to higher rewards."""
    return -logit_gradient(reward_BK, is_shown_BK, share_K)


def summed(reward_BK: Array, is_shown_BK: Array, share_K: Array) -> Array:
    """This is a sum, which grows with the number of chances. Take the mean over them."""
    return len(reward_BK) * logit_gradient(reward_BK, is_shown_BK, share_K)


LOGIT_GRADIENT = Exercise(
    logit_gradient,
    (VERDICT_BK, IS_SHOWN_BK, np.array([0.2, 0.5, 0.8, 0.9])),
    mistakes=(
        without_baseline,
        of_all_kinds,
        without_silence,
        with_wrong_silence,
        of_shown_alone,
        downhill,
        summed,
    ),
)


# The turns of each segment


def divided(tokens_T: Sequence[int], start: int, ends: Callable[[int, int, int], bool]) -> list[int]:
    """Return the turns of each segment if one ends where `ends` of its tokens, its turns and the next turn's tokens holds."""
    turns_S, segment_tokens = [0], start
    for turn_tokens in tokens_T:
        if ends(segment_tokens, turns_S[-1], turn_tokens):
            turns_S, segment_tokens = [*turns_S, 0], start
        turns_S[-1], segment_tokens = turns_S[-1] + 1, segment_tokens + turn_tokens
    return turns_S


def segment_turns(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    summary = SummarySettings(trigger=trigger)
    return divided(tokens_T, start, lambda tokens, turns, _: summary.reached(tokens, turns))


def before_it_is_crossed(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """A segment ends here before the turn that would cross the trigger. Nobody knows how long a turn will be: compare the tokens
    that are there."""
    return divided(tokens_T, start, lambda tokens, turns, following: tokens + following >= trigger and turns >= 2)


def after_one_turn(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """A segment has a single turn here. If its first turn is long, it would end where it began: two turns are the least."""
    return divided(tokens_T, start, lambda tokens, turns, _: tokens >= trigger and turns >= 1)


def beyond_the_trigger(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """A segment of exactly `trigger` tokens goes on here. It has reached the trigger."""
    return segment_turns(tokens_T, start, trigger + 1)


def without_its_start(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """Only the turns are counted here. The task and the summary before them are tokens of the segment, too."""
    return segment_turns(tokens_T, 0, trigger)


def without_later_starts(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """Only the first segment begins with `start` tokens here. Each of them does."""
    first = segment_turns(tokens_T, start, trigger)[0]
    return [first, *(segment_turns(tokens_T[first:], 0, trigger) if tokens_T[first:] else ())]


def after_the_last_turn(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """The last segment has no turn. The trigger is compared before a turn, and none follows the last one."""
    *before, last = segment_turns([*tokens_T, 0], start, trigger)
    return [*before, last - 1]


def without_the_last(tokens_T: Sequence[int], start: int, trigger: int) -> list[int]:
    """The last segment is missing. The rollout ends it, whether or not it has reached the trigger."""
    return segment_turns(tokens_T, start, trigger)[:-1]


SEGMENT_TURNS = Exercise(
    segment_turns,
    ([30, 40, 20, 150, 10, 10, 90], 20, 110),
    ([40, 40, 40, 40, 40, 10], 50, 120),
    mistakes=(
        before_it_is_crossed,
        after_one_turn,
        beyond_the_trigger,
        without_its_start,
        without_later_starts,
        after_the_last_turn,
        without_the_last,
    ),
)


# Processes that a killed harness left

Notes = Sequence[tuple[int, int, int, int]]


def reapable(notes: Notes, start_by_pid: Mapping[int, int]) -> list[int]:
    return [pid for pid, start, *owner in notes if start_by_pid.get(pid) == start and ended(owner, start_by_pid)]


def ended(owner: Sequence[int], start_by_pid: Mapping[int, int]) -> bool:
    return is_dead(replace(this_process(), pid=owner[0], started=owner[1]), start_by_pid.get)


def of_unused_pids(notes: Notes, start_by_pid: Mapping[int, int]) -> list[int]:
    """An owner counts as alive here if anything has its pid. Another process may have it now: compare the starts."""
    return [note[0] for note in notes if note[2] not in start_by_pid and start_by_pid.get(note[0]) == note[1]]


def by_pid(notes: Notes, start_by_pid: Mapping[int, int]) -> list[int]:
    """This ends whatever has a pid of the journal. It may be another process by now, and innocent: compare its start as well."""
    return [pid for pid, _, *owner in notes if pid in start_by_pid and ended(owner, start_by_pid)]


def by_pids_alone(notes: Notes, start_by_pid: Mapping[int, int]) -> list[int]:
    """Only pids are compared here. Another process may have a note's pid by now, or its owner's: compare the starts."""
    return [note[0] for note in notes if note[0] in start_by_pid and note[2] not in start_by_pid]


def of_ended_owners(notes: Notes, start_by_pid: Mapping[int, int]) -> list[int]:
    """Processes that have ended are in this list. Their pids may be those of others now: leave them out."""
    return [pid for pid, _, *owner in notes if ended(owner, start_by_pid)]


def of_any_owner(notes: Notes, start_by_pid: Mapping[int, int]) -> list[int]:
    """This takes processes from harnesses that still run. Only those of an owner that has ended are left over."""
    return [pid for pid, start, *_ in notes if start_by_pid.get(pid) == start]


REAPABLE = Exercise(
    reapable,
    ([(20, 5, 10, 1), (21, 5, 11, 2), (22, 6, 12, 3), (23, 6, 12, 3), (24, 7, 12, 3)],
     {10: 1, 11: 9, 20: 5, 21: 5, 22: 6, 23: 8}),
    mistakes=(of_unused_pids, by_pid, by_pids_alone, of_ended_owners, of_any_owner),
)  # fmt: skip


# The seconds of a step


def step_seconds(sample_s: float, train_s: float, publish_s: float, ahead: int) -> float:
    """Return the seconds of a step of the orchestrator in virtual time, when the first steps are over."""
    from composer_nb.labs.planning import Durations, SimulatedLoad, simulate

    durations = Durations(seconds=np.full((1, 1), sample_s), tokens=np.ones((1, 1), np.int64))
    load = SimulatedLoad(durations=durations, workers=1, capacity=1, train_s=train_s, publish_s=publish_s)
    schedule = partial(Schedule, prompts=1, group=1, ahead=ahead, bound=ahead, hang_s=1e9)
    count = 8 * (ahead + 1)
    half, whole = (simulate(schedule(steps=steps), load)["seconds"] for steps in (count, 2 * count))
    return float(whole - half) / count


def one_after_another(sample_s: float, train_s: float, publish_s: float, ahead: int) -> float:
    """Nothing overlaps here. With batches ahead, engines sample the next one while the trainer learns from this one."""
    return sample_s + train_s + publish_s


def all_hidden(sample_s: float, train_s: float, publish_s: float, ahead: int) -> float:
    """This holds if enough batches run ahead. But only `ahead` + 1 of them are under way, and each takes the whole round: sample,
    train, publish."""
    return max(sample_s, train_s) if ahead else sample_s + train_s + publish_s


def without_floor(sample_s: float, train_s: float, publish_s: float, ahead: int) -> float:
    """However many batches run ahead, engines sample one at a time and the trainer learns from one at a time. The slower of the
    two limits a step."""
    return (sample_s + train_s + publish_s) / (ahead + 1)


def one_too_few(sample_s: float, train_s: float, publish_s: float, ahead: int) -> float:
    """`ahead` counts the batches beyond the one that is due, so one more is under way."""
    return max(sample_s, train_s, without_floor(sample_s, train_s, publish_s, max(0, ahead - 1)))


def trainer_waits(sample_s: float, train_s: float, publish_s: float, ahead: int) -> float:
    """The trainer waits for its weights to be published here. It goes on with the next batch if one is ready; engines sample with
    the old weights meanwhile."""
    return max(sample_s, train_s + publish_s) if ahead else sample_s + train_s + publish_s


STEP_SECONDS = Exercise(
    step_seconds,
    *((6.0, 4.0, 2.0, 0), (6.0, 4.0, 7.0, 1), (3.0, 8.0, 1.0, 1), (6.0, 4.0, 30.0, 3), (6.0, 4.0, 2.0, 4)),
    mistakes=(one_after_another, all_hidden, without_floor, one_too_few, trainer_waits),
)


# Staleness

Groups = list[list[list[int]]]


def within_bound(groups: Groups, step: int, bound: int) -> list[bool]:
    """Return which groups the orchestrator keeps when their rollouts arrive before a step."""
    orchestrator = Orchestrator(Schedule(ahead=0, bound=bound, prompts=len(groups), group=len(groups[0])))
    orchestrator.version = step
    for start in orchestrator.handle(Joined(worker="worker", capacity=orchestrator.schedule.batch)):
        assert isinstance(start, Dispatch)
        for member in start.members:
            oldest = min(version for version in groups[start.slot][member] if version >= 0)
            names = {"slot": start.slot, "attempt": start.attempt, "member": member}
            orchestrator.handle(Finished(oldest_version=oldest, sampled=1, **names))
    return [group.complete for group in orchestrator.groups.values()]


def of_newest_tokens(groups: Groups, step: int, bound: int) -> list[bool]:
    """This is the age of the newest token. Weights are swapped while a rollout is sampled, and its oldest token counts."""
    return [all(step - max(rollout) <= bound for rollout in group) for group in groups]


def of_tokens_read(groups: Groups, step: int, bound: int) -> list[bool]:
    """−1 marks tokens that the policy read, as a prompt. No version made them, so they have no age: leave them out."""
    return [all(step - min(rollout) <= bound for rollout in group) for group in groups]


def of_single_rollouts(groups: Groups, step: int, bound: int) -> list[bool]:
    """One rollout within the bound keeps its group here. One that is too old drops the whole group: to sample the long rollouts
    alone again would select by length."""
    return [any(within_bound([[rollout] for rollout in group], step, bound)) for group in groups]


def below_bound(groups: Groups, step: int, bound: int) -> list[bool]:
    """A rollout as old as the bound may still be trained on: the bound is the largest staleness that is allowed."""
    return within_bound(groups, step, bound - 1)


WITHIN_BOUND = Exercise(
    within_bound,
    ([[[-1, 4, 5], [-1, 6]], [[-1, 3, 5], [-1, 3, 5]], [[-1, 3, 3], [-1, 5]], [[-1, 5], [-1, 6, -1, 6]]], 6, 2),
    ([[[-1, 3], [-1, 2]], [[-1, 1, 2], [-1, 3]]], 3, 1),
    mistakes=(of_newest_tokens, of_tokens_read, of_single_rollouts, below_bound),
)
