"""Frames between the host and a box: requests out, answers in, none of which is believed beyond its form."""

from __future__ import annotations

import json

from composer_nb.harness import box
from composer_nb.harness.calls import CallOutcome, CallRequest, Limits, Status


class NoAnswer(Exception):
    """The box ended, stalled or sent something that is no answer: nothing is known about the code."""


def encode(request: CallRequest) -> bytes:
    body = json.dumps(
        {
            "files": dict(request.files),
            "module": request.module,
            "function": request.function,
            "arguments": list(request.arguments),
        }
    ).encode()
    return len(body).to_bytes(4, "big") + body


def take_frame(pending: bytearray, answer_bytes: int) -> bytes | None:
    """Remove one whole frame from `pending`. Raises NoAnswer for an impossible length."""
    if len(pending) < 4:
        return None
    size = int.from_bytes(pending[:4], "big")
    if size > answer_bytes + 1000:
        raise NoAnswer("an answer of impossible length")
    if len(pending) < 4 + size:
        return None
    body = bytes(pending[4 : 4 + size])
    del pending[: 4 + size]
    return body


def decode(body: bytes, count: int, limits: Limits) -> tuple[CallOutcome, ...]:
    """Outcomes of `count` arguments. The header is the zygote's, all after it is the hostile worker's.

    Raises NoAnswer when the sandbox was not made, or when the machine gave the program too little of its time to tell
    anything about it.
    """
    head, _, report = body.partition(b"\n")
    try:
        end = json.loads(head)["end"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer("an answer without a header") from error
    first, _, report = report.partition(b"\n")
    if not first.startswith(b"ready "):
        raise NoAnswer(f"{end}: {first[:300].decode('utf-8', 'replace')}")
    if end == "starved":
        raise NoAnswer(
            f"a program waited for this machine for {box.PATIENCE * limits.wall_s:g} s and got less than the "
            f"{limits.cpu_s:g} s of CPU it may use: run less beside it, or raise Limits.wall_s"
        )
    nonce = first[len(b"ready ") :] + b" "
    lines = report.split(b"\n")
    outcomes: list[CallOutcome] = []
    for line in lines[:-1]:  # the last has no newline: it is empty or was cut off
        outcome = _outcome(line, nonce, limits) if len(outcomes) < count else None
        if outcome is None:  # forged or garbled: from here on nothing it says is believed
            outcomes = [*outcomes[: count - 1], CallOutcome(status="unreadable")]
            return _pad(outcomes, count)
        outcomes.append(outcome)
    if len(outcomes) < count:
        outcomes.append(CallOutcome(status=_ENDINGS.get(end, "died")))
    return _pad(outcomes, count)


_ENDINGS: dict[str, Status] = {"cpu": "timeout", "asleep": "timeout", "flood": "unreadable"}


def _pad(outcomes: list[CallOutcome], count: int) -> tuple[CallOutcome, ...]:
    return tuple(outcomes + [CallOutcome(status="not_run")] * (count - len(outcomes)))


def _outcome(line: bytes, nonce: bytes, limits: Limits) -> CallOutcome | None:
    """One reported line, or None if it is not exactly what an honest worker writes."""
    if not line.startswith(nonce):
        return None
    try:
        fields = json.loads(line[len(nonce) :])
    except (ValueError, RecursionError):
        return None
    if type(fields) is not list or len(fields) != 2 or not all(type(f) is str for f in fields):
        return None
    status, text = fields
    honest = {"returned": text.isprintable() and text != "", "raised": text.isidentifier()}
    honest["unreadable"] = text == ""
    if len(text) > limits.output_bytes or not honest.get(status, False):
        return None
    return CallOutcome(status=status, text=text)
