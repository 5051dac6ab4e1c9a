"""The scripted expert: what it looks at, and edits that give the solution one by one."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.scripts import SHORT, expert
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall

LINES = st.lists(st.sampled_from(["a\n", "b\n", "  a\n", "\n", "c\n"]), max_size=12).map("".join)


def calls(before: str, after: str) -> list[ToolCall]:
    task = Task(
        id="t",
        instruction="i",
        grader="pytest",
        files={"f.py": before},
        tests={"test_f.py": "def test_0(): pass\n"},
        solution={"f.py": after},
        source_scope=("f.py",),
    )
    script, talk = expert(task), list[Said]()
    while not talk or talk[-1].calls:
        talk.append(script(talk))
    return [written.call for said in talk for written in said.calls if isinstance(written.call, ToolCall)]


@given(before=LINES, after=LINES)
def test_each_edit_is_of_one_place_and_all_give_the_solution(before: str, after: str) -> None:
    text = before
    for call in calls(before, after):
        given = call.arguments
        if call.name == "search_replace":
            assert text.count(given["old_string"]) == 1
            text = text.replace(given["old_string"], given["new_string"])
        elif call.name == "write":
            text = given["contents"]
    assert text == after


def test_in_a_long_file_the_expert_reads_the_function_that_it_changes() -> None:
    functions = [f"def f{n}(x):\n    y = x + {n}\n    return y\n" for n in range(100)]
    before = "\n\n".join(functions)
    search, read, edit, compiled = calls(before, before.replace("x + 70", "x - 70"))
    lines = before.splitlines()
    [hit] = [n for n, line in enumerate(lines, 1) if re.search(search.arguments["pattern"], line) and "(" in line]
    assert len(lines) > SHORT and (search.name, read.name, read.arguments["offset"]) == ("grep", "read_file", hit)
    assert lines[hit - 1] == "def f70(x):" and read.arguments["limit"] < SHORT
    assert edit.arguments["old_string"] == "    y = x + 70\n" and compiled.name == "run_terminal_cmd"
