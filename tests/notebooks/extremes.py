"""Stored runs that went to an extreme, made from a run that is there, and notebooks run on them without a kernel."""

import ast
import io
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat

from composer_nb.harness.bench import summarise
from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.store import load_attempts, save_attempts
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.trainer.headroom import headroom
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.recipe.report import POLICIES
from composer_nb.trainer.records.batches import load_batch, save_batch
from composer_nb.trainer.records.rundir import RunDir, to_json
from composer_nb.trainer.rl import Batch, Scored, ledger, measured, score_groups
from composer_nb.trainer.settings import from_dict

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOT_LEARNT = {
    "infra_errors", "version", "staleness", "staleness_max", "mixed_versions", "time", "lr", "tune_pass_at_1",
    "tune_best_of_k"
}  # fmt: skip
"""Metrics that a step without anything to learn has all the same, beside those of its rollouts."""

CHECKS = {
    "01_tour": (
        "report['complete'] and set(report['eval']) >= {'base', 'midtrained', 'start', 'final'}",
        "logits.shape == (1, len(ids), model.config.vocab_size)",
        "all(0 <= score['pass_at_1'] <= score['best_of_k'] + 1e-9 for score in report['eval'].values())",
        "0 <= (headroom['live'] or 0) <= 1",
        "all(each['ci95'][0] <= each['gain'] <= each['ci95'][1] for each in gain['within_12'].values())",
        "all(0 <= share <= 1 for share in report['eval']['final']['by_family'].values())",
        "before_rl.attempt.task == after_rl.attempt.task",
        "(before_rl.segment.logprob <= 0).all() and (after_rl.segment.logprob <= 0).all()",
        "len(strongest.segment.trace.routes) == len(strongest.segment.token_ids)",
        "abs(report['wall_s']['total'] - sum(report['stages'].values())) < 1e-6",
    ),
    "04_reward_design": (
        "set(verdict.revived) == set(revived) and np.array_equal(verdict.scores.advantage_R, penalised.advantage_R)",
        "stored.solved_R.all() or not winner.grade.passed",
    ),
    "04b_judges_and_reruns": (
        "trust.n + trust.failed == len(new_grades) == len(batch.attempts)",
        "all(share is None or 0 <= share <= 1 for share in shares)",
    ),
    "06_compare_runs": (
        "not (same_run and (comparison['settings'] or comparison['provenance']))",
        "len(rows) == len(comparison['eval']) and comparison['wall_s']['total'][0] > 0",
    ),
    "07_long_horizon": (
        "all(figures_by_summary['truncate', t]['summary tokens'] == 0 for t in triggers)",
        "all(figures_by_summary['self', t]['forgotten'] == 0 for t in triggers)",
    ),
    "07b_forks_and_hints": (
        "len(advised.kl) == len(advised.tokens) and min(advised.kl) > -1e-5 and sum(control.kl) > -1e-5",
        "len(by_model.kl) == len(turn_positions)",
    ),
    "10_router_replay": (
        "all(one.segment.trace.route_valid[:-1].all() for one in stored)",
        "trace.routes.shape == (len(texts), model.config.num_hidden_layers, model.config.num_experts_per_tok)",
        "(margins >= 0).all() and (margins <= 1).all() and len(trace.gates) == len(texts)",
        "((table >= 0) & (table <= 1)).all(axis=None)",
        "len(unlike.on_S) == len(unlike.off_S)",
    ),
    "11_mismatch": (
        "(table['k3'] >= 0).all()",
        "np.isclose(gap, np.abs(compared[pair].off_S).max(), atol=1e-3)",
        "all(np.isnan(cos) or abs(cos) <= 1 + 1e-6 for bars in gradient_cosines.values() for cos in bars.values())",
    ),
    "11b_losses": ("np.allclose(np.diag(np.nan_to_num(compared_fresh.cosines, nan=1.0)), 1.0)",),
}
"""What holds at the end of a notebook whatever a run found, in the notebook's names. A reader need not see it."""


def solves(run: RunDir, passed: bool) -> None:
    """Make every rollout and every held-out attempt of a run pass its tests, or fail them."""
    info = {name: run.finished(f"eval_{name}") for name in POLICIES}
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "heldout.jsonl")}
    for name, record in info.items():
        file = run.path / "rollouts" / f"eval_{name}.parquet"
        attempts = [graded(attempt, passed) for attempt in load_attempts(file, tasks)]
        save_attempts(file, attempts)
        greedy = len({attempt.task.id for attempt in attempts})
        assert record is not None
        scores = summarise(attempts[:-greedy], attempts[-greedy:])
        room = headroom(attempts[:-greedy], attempts[-greedy:], RewardSettings())
        run.finish(f"eval_{name}", record["seconds"], scores | {"headroom": room})
    rescored(run, lambda attempt: graded(attempt, passed))


def has_no_new_structures(run: RunDir) -> None:
    """Leave a run as `data.structure_tasks=0` makes it."""
    for file in [run.path / "data" / "structures.jsonl", *(run.path / "rollouts").glob("eval_*_structures.*")]:
        file.unlink()
    for stage in ("data", *(f"eval_{name}" for name in POLICIES)):
        info = run.finished(stage) or {}
        info |= {"tasks": info["tasks"] | {"structures": 0}} if stage == "data" else {}
        run.finish(stage, info.pop("seconds"), {key: value for key, value in info.items() if key != "structures"})


def graded(attempt: Attempt, passed: bool) -> Attempt:
    """Return the attempt with every test passed, or failed."""
    tests = dict.fromkeys(attempt.grade.tests or {"test_hidden": passed}, passed)
    return replace(attempt, grade=replace(attempt.grade, status="graded", tests=tests))


def pays_for_nothing(run: RunDir) -> None:
    """Give every rollout the reward 0, so that no group teaches, no batch trains and no weight changes."""
    settings = run.settings()
    settings["reward"]["weights"] = {}
    write_json(run.path / "settings.json", settings)
    rescored(run, lambda attempt: attempt)
    for name in ("before_final", "final"):
        shutil.rmtree(run.path / "weights" / name)
        shutil.copytree(run.path / "weights" / "start", run.path / "weights" / name)
    numerics = run.finished("numerics")
    assert numerics is not None
    numerics["weights"] |= {"delta_bytes": 0, "changed_fraction": 0.0}
    run.finish("numerics", numerics.pop("seconds"), numerics)


def rescored(run: RunDir, change: Callable[[Attempt], Attempt]) -> None:
    """Change the rollouts of every RL step, and with them rewards, advantages, metrics and ledger."""
    settings = from_dict(run.settings())
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "rl.jsonl")}
    for point in run.steps("rl"):
        number, tokens = point.pop("step"), Counter[str]()
        step_groups: list[list[Scored]] = []
        for file in sorted((run.path / "rollouts").glob(f"rl_{number - 1:05d}_*.parquet")):
            attempts = [[change(scored.attempt) for scored in group] for group in load_batch(file, tasks)]
            groups = score_groups(attempts, settings.reward, settings.loss)
            save_batch(file, groups)
            step_groups += groups
            tokens.update(ledger(groups, settings.loss))
        metrics = measured(step_groups, Batch(step=number - 1), settings.rl.minibatches, Ranks())
        metrics = {name: value for name, value in metrics.items() if name not in NOT_LEARNT}
        point |= metrics
        if not metrics["live_groups"]:
            point |= dict.fromkeys(point.keys() - metrics.keys() - NOT_LEARNT)
        with closing(run.connect()) as db, db:
            db.execute("UPDATE step SET metrics = ? WHERE stage = 'rl' AND step = ?", (to_json(point), number))
            db.execute("DELETE FROM ledger WHERE stage = 'rl' AND step = ?", (number,))
            db.executemany("INSERT INTO ledger VALUES ('rl', ?, ?, ?)", [(number, *pair) for pair in tokens.items()])


def cut_off(run: RunDir, steps: int = 2) -> None:
    """Leave a run as it is when it is killed after so many RL steps. The weights before the next one are published already."""
    shorten(run, steps)
    for name in ("rollouts/eval_final.parquet", "rollouts/eval_final.safetensors", "said.log"):
        (run.path / name).unlink()
    shutil.rmtree(run.path / "weights" / "final")
    with closing(run.connect()) as db, db:
        db.execute("DELETE FROM stage WHERE name IN ('rl', 'eval_final', 'numerics')")


def ran_out_of_time(run: RunDir, steps: int = 2) -> None:
    """Leave a run as it is when RL ends after so many steps because its time is over, and all the rest is done."""
    shorten(run, steps)
    for file in (run.path / "rollouts").glob("rl_00002_*"):
        file.unlink()
    info = run.finished("rl")
    assert info is not None
    run.finish("rl", info.pop("seconds"), info | {"stopped_early": True, "sampled": sum(run.ledger().values())})


def shorten(run: RunDir, steps: int) -> None:
    with closing(run.connect()) as db, db:
        db.execute("DELETE FROM step WHERE stage = 'rl' AND step > ?", (steps,))
        db.execute("DELETE FROM ledger WHERE stage = 'rl' AND step > ?", (steps,))
        db.execute("UPDATE checkpoint SET step = ? WHERE stage = 'rl'", (steps,))
    run.clean()


def execute(name: str, parameters: dict[str, Any]) -> str:
    """Run a notebook's code in this process, show what its cells end with, and return the text that it put out. Raises what a
    cell raises, and a numeric warning as an error, since a reader would see it."""
    book = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    space: dict[str, Any] = {"__name__": f"notebook_{name}"}
    stdout = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(stdout):
        warnings.simplefilter("error", RuntimeWarning)
        for number, cell in enumerate(cell for cell in book.cells if cell.cell_type == "code"):
            *body, last = ast.parse(cell.source).body
            ends = [last.value] if isinstance(last, ast.Expr) else []
            for part in (ast.Module([*body, *([] if ends else [last])], []), *map(ast.Expression, ends)):
                code = compile(part, f"{name}, code cell {number}", "exec" if isinstance(part, ast.Module) else "eval")
                if (result := eval(code, space)) is not None:
                    print(*as_text(result))
            if "parameters" in cell.metadata.get("tags", []):
                space |= parameters
    assert [check for check in CHECKS.get(name, ()) if not eval(check, space)] == []
    return stdout.getvalue()


def as_text(result: Any) -> Sequence[str]:
    """Return the texts that JupyterLab shows of an object that a cell ends with."""
    if hasattr(result, "_repr_mimebundle_") and (bundle := result._repr_mimebundle_()):
        return [json.dumps(bundle, default=str)]
    methods = ("_repr_png_", "_repr_html_")
    representations = [getattr(result, method)() for method in methods if hasattr(result, method)]
    return [repr(result), *(text for text in representations if isinstance(text, str))]
