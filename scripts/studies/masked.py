"""Two controls by masks: tests that say nothing, and demonstrations whose failed tries are not trained on.

    env.tasks=scripts.studies.masked:Masked

is the tour's environment, but the tests of an edit say nothing, which shows whether RL uses what they say. Before the first edit,
and after `undo`, tests answer as always: what fails is all that most requests tell of the task.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.arguments import tool
from composer_nb.harness.tools.session import Observation, Session
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.trainer.learning.data import TokenRow


@tool()
def run_tests(session: Session) -> Observation:
    """Run the visible tests."""
    observation = session.run_visible_tests()
    # A text that failed is not recorded as refused: the answer `tried` would reveal it.
    return replace(observation, text="ran") if session.edits.now else observation


class Masked:
    """An environment (`Own`) for forks, which have their tasks already."""

    tools = replace(ToolSet.tiny(), tools={**ToolSet.tiny().tools, "run_tests": run_tests})

    def tasks(self) -> Iterable[Task]:
        raise ValueError(
            "env.tasks=scripts.studies.masked:Masked: only a fork of a run can have it, with that run's tasks"
        )


def without_tries(row: TokenRow, tokenizer: Tokenizer) -> TokenRow:
    """Return a demonstration in the compact format, with a loss weight of 0 on each substitution whose tests failed."""
    call, end = tokenizer.token_to_id("<|call|>"), tokenizer.token_to_id("<|end|>")
    ids, weight = row.token_ids, row.weight.copy()
    turns = [*np.flatnonzero((weight[1:] == 1.0) & (weight[:-1] != 1.0)) + 1, len(ids)]
    for begin, stop in pairwise(turns):
        close = begin + ids[begin:stop].tolist().index(end) + 1 if end in ids[begin:stop] else stop
        if "fail" not in tokenizer.decode(ids[close:stop].tolist()):
            continue
        calls = [begin, *begin + np.flatnonzero(ids[begin:close] == call) + 1, close]
        for first, last in pairwise(calls):
            if tokenizer.decode(ids[first:last].tolist()).startswith("sub "):
                weight[first : last - 1] = 0.0  # what ends it is learnt: a test follows
    return TokenRow(ids, weight)
