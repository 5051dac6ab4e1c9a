"""Grade tests that an agent wrote, on versions of the code that it never sees: right ones, which they must pass, and mutants.

    the agent's test module  ->  the code as it is, RUNS times          all pass, those of the start among them
                             ->  the same code in other words           all pass
                             ->  each mutant                            one fails, or they do not end

Each version has a fresh sandbox, and nothing in it says which version it is. Tests that compare the code's text or bytecode with
what they know also refuse the equivalent versions. They may use nothing that reads code (`READS_CODE`, names of the code's files)
which the solution does not use. References: mutation testing (DeMillo, Lipton and Sayward, 1978).
"""

import ast
import json
import random
import re
import time
from dataclasses import replace
from operator import itemgetter

from composer_nb.harness.grading.box import Boxes, JobResult, RunnerEnded
from composer_nb.harness.grading.diff import Changes
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import GradePlan, job
from composer_nb.harness.grading.structure import names_of
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.syntax import parse
from composer_nb.harness.tasks.task import Task

LEFT_OUT = "left_out"  # Metadata key of the ids of tests that do not count, as a JSON list.
# Names with which a test reads code in place of running it.
READS_CODE = frozenset(
    "inspect dis ast tokenize linecache marshal pkgutil py_compile find_spec get_source get_data getsource getsourcelines "
    "settrace setprofile monitoring _getframe f_code tb_frame __code__ __file__ __path__ __loader__ __spec__ __cached__ "
    # Names of files and modules can be put together.
    "open fileinput read_text read_bytes subprocess popen system __import__ import_module getattr vars globals __dict__ "
    "__getattribute__ builtins __builtins__ exec eval".split()
)
# Runs on the code as it is: a test that passes by luck seldom passes them all and fails on each mutant.
RUNS = 3
FORGED = {"forged_events", "forged_report"}


def grade_written(task: Task, edits: Changes, plan: GradePlan, boxes: Boxes) -> Grade:
    """Return the grade of the test module in a task's scope. `plan`: the tests that must still be there."""
    began, [path] = time.monotonic(), task.source_scope
    equivalents, mutants = task.equivalents, task.mutants
    names = ["passes as it is", *(f"passes equivalent {number}" for number in range(len(equivalents)))]
    names += [f"refuses mutant {number}" for number in range(len(mutants))]
    names.append("runs the code and does not read it")
    flags, results = {*edits.flags}, dict.fromkeys(names, False)
    try:
        module = edits.files.get(path, b"").decode()
        runs_code = _reads(task, module) <= _reads(task, task.solution.get(path, ""))
        written = task.model_copy(update={"tests": {**task.tests, path: module}})
        changes = (*[{}] * RUNS, *equivalents, *mutants)
        versions = [{name: text.encode() for name, text in change.items()} for change in changes]
        order = random.SystemRandom().sample(range(len(changes)), len(changes))  # or the clock would tell a mutant
        jobs = [replace(job(written, {**edits.files, **versions[number]}), tests=(path,)) for number in order]
        ran = [run for _, run in sorted(zip(order, boxes.run(jobs), strict=True), key=itemgetter(0))]
    except (SyntaxError, ValueError, RecursionError):  # no module
        ran = []
    except SandboxFailure as error:
        return Grade(status="infra_error", flags=edits.flags, output=str(error))
    except (SandboxDied, RunnerEnded):
        early = tuple(sorted({*flags, "ended_early"}))
        return Grade(status="agent_failed", tests=results, flags=early, cost={"wall_s": time.monotonic() - began})
    if ran:
        left_out = set(json.loads(task.metadata.get(LEFT_OUT, "[]")))
        for run in ran:
            run.results = {key: result for key, result in run.results.items() if result.id not in left_out}
        passing = {key for key, result in ran[0].results.items() if result.passed}
        right, wrong = ran[: RUNS + len(equivalents)], ran[RUNS + len(equivalents) :]
        passes = [passing.issuperset(plan.tests) and _passes(run, passing) for run in right]
        outcomes = [all(passes[:RUNS]), *passes[RUNS:]]
        refusals = [not _passes(run, passing) for run in wrong]
        results = dict(zip(names, [*outcomes, *refusals, runs_code], strict=True))
        flags |= {flag for run in right for flag in run.flags} | {flag for run in wrong for flag in run.flags & FORGED}
    return Grade(
        status="tampered" if flags & FORGED else "graded",
        tests=results,
        flags=tuple(sorted(flags)),
        timeouts=sum("timeout" in run.flags for run in ran),
        cost={"wall_s": time.monotonic() - began, "tests_s": sum(run.seconds for run in ran)},
    )


def _reads(task: Task, text: str) -> set[str]:
    """Return the names in a test module that read code, and those of the code's files. Raises what `parse` does."""
    tree, files = parse(text), {path.rpartition("/")[2] for path in task.files if path.endswith(".py")}
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    words = (word for value in strings if isinstance(value, str) for word in re.findall(r"[\w*]+\.py\b", value))
    return {*READS_CODE}.intersection(names_of(tree)) | {word for word in words if word in files or "*" in word}


def _passes(run: JobResult, keys: set[str]) -> bool:
    """Return whether these tests pass, of which there are some, and no other test fails."""
    broken = run.flags & {"timeout", "ended_early"} or "failed" in {result.outcome for result in run.results.values()}
    return bool(keys) and not broken and all(run.result(key).passed for key in keys)
