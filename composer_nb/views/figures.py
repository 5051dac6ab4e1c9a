"""The figures of a run's report, each with a sentence that says what to look at."""

from __future__ import annotations

from composer_nb.trainer.report import build_report
from composer_nb.trainer.rundir import RunDir
from composer_nb.views import curves, rollout, scores


def pictures(run: RunDir) -> dict[str, tuple[str, bytes]]:
    """Name -> (caption, PNG) of everything that the run has got to."""
    report = build_report(run)
    found = {}
    if "eval" in report:
        found["policies"] = (scores.policies(report), "Bars: share of held-out tasks solved; lines: 95 % over tasks.")
        found["families"] = (scores.families(report), "The same by family of program.")
        found["behaviour"] = (scores.behaviour(report), "What the policies do, in sampled attempts.")
    if "midtrain" in report:
        found["losses"] = (curves.supervised(run), "Cross-entropy of the supervised stages.")
    if "train" in report:
        found["rl"] = (curves.reinforcement(run), f"RL. Bold: mean of the last {curves.WINDOW} steps.")
        if "mixed_versions" in report["train"]:
            found["staleness"] = (
                curves.staleness(run, report),
                "By how many batches the oldest token of a rollout was behind when it was trained.",
            )
        found["experts"] = (rollout.experts(run), "Which experts the tokens of the last RL step took.")
    if "replay" in report:
        found["mismatch"] = (scores.mismatch(report), "How far engine and trainer are apart on the same tokens.")
    if report["stages"]:
        found["time"] = (curves.time_split(run, report), "Where the time went.")
    return {name: (caption, picture.png()) for name, (picture, caption) in found.items()}
