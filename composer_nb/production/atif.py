"""Rollouts as trajectories in Harbor's Agent Trajectory Interchange Format (ATIF, its RFC 0001).

A message of the model is a step, with its calls, their results, and in `metrics` the tokens that it read and wrote. The request
and a user's answers are steps of the user. After a summary, a step of the system says that it replaces the conversation. What
ATIF has no field for, such as the grade, is in `extra`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from composer_nb import __version__
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Kind, Segment, Turn
from composer_nb.harness.terms.registry import called

# Newer versions of ATIF accept it; v1.8 adds audio alone.
VERSION = "ATIF-v1.7"
_COMPACTION = {
    "source": "system",
    "message": "The summary replaces the conversation.",
    "extra": {"context_management": {"type": "compaction", "boundary": "replace"}},
}


def trajectory(attempt: Attempt, tokenizer: Tokenizer, session_id: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rollout as a trajectory, with `facts` beside its grade."""
    rollout, grade = attempt.rollout, attempt.grade
    messages, call_numbers = iter(rollout.turns_by_message), count(1)
    steps: list[dict[str, Any]] = [{"source": "user", "message": attempt.task.instruction}]
    for segment in rollout.segments:
        for positions in segment.messages:
            is_summary = bool(segment.kind[positions[-1]] == Kind.SUMMARY)
            turns = [] if is_summary else next(messages, [])
            text = tokenizer.decode(segment.token_ids[positions].tolist())  # of a summary, or cut off
            step, *answer = _steps(turns or [Turn(call="", observation="", said=text)], call_numbers)
            steps += [step | _tokens(segment, positions, tokenizer), *answer, *[_COMPACTION] * is_summary]
    for turns in messages:  # an endpoint's have no tokens
        steps += _steps(turns, call_numbers)
    read = sum(step["metrics"]["prompt_tokens"] for step in steps if "metrics" in step) or rollout.counted[0]
    counts = {"total_prompt_tokens": read, "total_completion_tokens": rollout.sampled, "total_steps": len(steps)}
    return {
        "schema_version": VERSION,
        "session_id": session_id,
        "agent": {"name": "composer_nb", "version": __version__},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": counts,
        "extra": {**facts, "status": grade.status, "tests": dict(grade.tests)},
    }


def _steps(turns: Sequence[Turn], call_numbers: Iterator[int]) -> list[dict[str, Any]]:
    """Return the step of a message, and that of a user who answered it."""
    first, calls, results = turns[0], list[dict[str, Any]](), list[dict[str, Any]]()
    if first.error == "ProviderError":
        return [{"source": "system", "message": first.observation}]
    step: dict[str, Any] = {"source": "agent", "message": first.said, "llm_call_count": 1}
    if not (first.call or first.error):
        return [step, *[{"source": "user", "message": first.observation}] * bool(first.observation)]
    for turn in turns:
        name, arguments = called(turn)
        results.append({"content": turn.observation})
        if name:
            results[-1]["source_call_id"] = call_id = f"call_{next(call_numbers)}"
            calls.append({"tool_call_id": call_id, "function_name": name, "arguments": arguments})
        if turn.error:
            results[-1]["extra"] = {"error": turn.error, "call": turn.call}
    return [step | ({"tool_calls": calls} if calls else {}) | {"observation": {"results": results}}]


def _tokens(segment: Segment, positions: NDArray[np.int64], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokens of a message, and its thinking as text."""
    start, written = int(positions[0]), segment.token_ids[positions].tolist()
    thinking = segment.token_ids[positions[segment.kind[positions] == Kind.THINKING]].tolist()
    metrics = {
        "prompt_tokens": start,
        "completion_tokens": len(written),
        "prompt_token_ids": segment.token_ids[:start].tolist(),
        "completion_token_ids": written,
        "logprobs": segment.logprob[positions].tolist(),
        "extra": {"policy_versions": segment.policy_version[positions].tolist()},
    }
    return {"metrics": metrics} | ({"reasoning_content": tokenizer.decode(thinking)} if thinking else {})
