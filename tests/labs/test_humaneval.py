"""HumanEval: its problems accept their solutions and nothing wrong, scores are the published estimate, runs resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from composer_nb import cli
from composer_nb.harness.agent.endpoint import ContextExceeded
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.labs import humaneval
from composer_nb.labs.humaneval import Problem, completed, evaluate_humaneval, extracted, read_problems, task_of
from composer_nb.production import policies

PROBLEMS = read_problems()


def answers(problem: Problem) -> tuple[str, str]:
    """A right and a wrong completion."""
    body = problem.canonical_solution
    return body, f"    return [None, {problem.entry_point}.__name__]\n"


def graded(programs: list[tuple[Problem, str]], backend: Backend) -> list[bool]:
    return [grade(task_of(p), {"solution.py": text}, backend).passed for p, text in programs]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_canonical_solutions_pass_and_wrong_ones_fail(every: int, backend: Backend) -> None:
    assert len(PROBLEMS) == 164
    right, wrong = ([(p, completed(p, f"\n{answers(p)[n]}")) for p in PROBLEMS[::every]] for n in (0, 1))
    assert all(graded(right, backend)) and not any(graded(wrong, backend))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("\n    return 1\n\n\ndef g():\n    pass\n", "\n    return 1\n\n\n"),
        ("\n    return 1\n# Test\n", "\n    return 1\n"),
        ("\n    return 1\nprint(f())\nif x:\n", "\n    return 1\n"),
        ("\n    if a:\n        return 1\n", "\n    if a:\n        return 1\n\n"),
    ],
)
def test_a_completion_ends_before_the_next_statement_at_the_margin(text: str, program: str) -> None:
    problem = PROBLEMS[0].model_copy(update={"prompt": "def f():\n    '''x'''\n", "entry_point": "f"})
    assert completed(problem, text) == f"def f():\n    '''x'''{program}"


@pytest.mark.parametrize(
    "text",
    [
        "Sure!\n```python\ndef f(x):\n    return x\n```\nIt returns x.",
        "```python\nf(1)\n```\nthat was a use, here it is:\n```py\ndef f(x):\n    return x\n```",
        "def f(x):\n    return x",
        "```\ndef f(x):\n    return x",
        "1. Write it:\n\n   ``` python title=f\n   def f(x):\n       return x\n   ```\n2. Use it.",
    ],
)
def test_the_block_that_defines_the_function_is_the_answer(text: str) -> None:
    problem = PROBLEMS[0].model_copy(update={"prompt": "import math\n\n\ndef f(x):\n    '''x'''\n", "entry_point": "f"})
    assert extracted(problem, text) == "import math\n\n\ndef f(x):\n    return x\n"


class StandIn:
    """An endpoint that solves every second problem, and records its requests."""

    url, model, temperature = "http://127.0.0.1:1/v1", "m", 0.0

    def __init__(self, fail_after: int = 1 << 30) -> None:
        self.requests, self.fail_after = list[dict[str, Any]](), fail_after

    def ask(self, method: str, path: str, until: float, body: dict[str, Any]) -> Any:
        if len(self.requests) >= self.fail_after:
            raise KeyboardInterrupt
        self.requests.append(body)
        prompt = body["prompt"] if path == "completions" else body["messages"][0]["content"]
        number, problem = next((n, p) for n, p in enumerate(PROBLEMS) if p.prompt.strip() in prompt)
        text = answers(problem)[number % 2]
        if path == "completions":
            return {"choices": [{"text": f"\n{text}"}]}
        return {"choices": [{"message": {"content": f"Here:\n```python\n{problem.prompt}{text}```"}}]}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    endpoint = StandIn()
    for module in (humaneval, policies):
        monkeypatch.setattr(module, "open_endpoint", lambda name, temperature=0.0: endpoint)
    return endpoint


@pytest.mark.parametrize("form", ["raw", "chat"])
def test_an_endpoint_is_scored_and_a_killed_run_goes_on_where_it_was(
    stand_in: StandIn, form: humaneval.Form, monkeypatch: pytest.MonkeyPatch, backend: Backend, tmp_path: Path
) -> None:
    options = {"form": form, "samples": 2, "workers": 1}
    stand_in.fail_after = 5
    with pytest.raises(KeyboardInterrupt):
        evaluate_humaneval("openai:http://x/v1", PROBLEMS[:4], tmp_path, backend, **options)
    assert len(list((tmp_path / "answers").iterdir())) == 5
    (tmp_path / "answers" / "HumanEval-1-1.json").write_text('{"task": "Human')
    stand_in.fail_after = 1 << 30
    report = evaluate_humaneval("openai:http://x/v1", PROBLEMS[:4], tmp_path, backend, **options)
    with pytest.raises(ValueError, match="another policy, backend, harness or settings"):
        evaluate_humaneval("openai:http://x/v1", PROBLEMS[:4], tmp_path, backend, **options, tokens=9)
    monkeypatch.setattr(stand_in, "model", "another that the server has now")
    with pytest.raises(ValueError, match="another policy"):
        evaluate_humaneval("openai:http://x/v1", PROBLEMS[:4], tmp_path, backend, **options)
    assert len(stand_in.requests) == 8 and len({body["seed"] for body in stand_in.requests}) == 8
    assert report["pass_at_1"] == 0.5 and report["n_tasks"] == 4 and report["lost"] == 0
    assert json.loads((tmp_path / "report.json").read_text())["pass_at_1"] == 0.5


def test_an_answer_that_the_sandbox_lost_is_no_failure_and_is_asked_for_again(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, backend: Backend, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"workers": 1}
    with monkeypatch.context() as broken:
        broken.setattr(humaneval, "grade", lambda *_: Grade(status="infra_error"))
        report = evaluate_humaneval("openai:http://x/v1", PROBLEMS[:1], tmp_path, backend, **options)
    assert report["lost"] == 1 and "pass_at_1" not in report
    report = evaluate_humaneval("openai:http://x/v1", PROBLEMS[:1], tmp_path, backend, **options)
    assert (report["lost"], report["pass_at_1"], len(stand_in.requests)) == (0, 1.0, 2)


def test_a_problem_beyond_the_context_is_failed_and_does_not_end_the_run(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, backend: Backend, tmp_path: Path
) -> None:
    def too_long(*_: Any) -> Any:
        raise ContextExceeded("status 400: maximum context length is 512 tokens")

    monkeypatch.setattr(stand_in, "ask", too_long)
    report = evaluate_humaneval("openai:http://x/v1", PROBLEMS[:1], tmp_path, backend, workers=1)
    assert (report["lost"], report["pass_at_1"]) == (0, 0.0)


def test_the_problems_are_written_as_tasks(tmp_path: Path) -> None:
    assert cli.main(["tasks", "humaneval", "--out", str(tmp_path)]) == 0
    assert [task.id for task in load_tasks(tmp_path)] == [f"HumanEval-{n}" for n in range(164)]
