"""The MCP server, by the SDK's own client over stdio."""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from composer_nb.cli import parser
from composer_nb.operations import COMMANDS
from composer_nb.operations.mcp import READS, WRITERS, WRITES, line, open_workspace, require_inside, schema
from composer_nb.trainer.recipe.reader import example_run

sdk = pytest.importorskip("mcp", reason="the SDK is not installed; the extra mcp brings it")
EXAMPLE = str(example_run().path)


def talk(*options: str, calls: tuple[tuple[str, dict[str, Any]], ...]) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    """Return the tools of a server with these options, by name, and the answers to calls, with whether they failed."""

    async def go() -> tuple[dict[str, Any], list[tuple[str, bool]]]:
        server = sdk.StdioServerParameters(
            command=sys.executable, args=["-m", "composer_nb.cli", "mcp", *options], env={**os.environ}
        )
        async with sdk.Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            answers = [await client.call_tool(name, arguments) for name, arguments in calls]
            return tools, [(answer.content[0].text, bool(answer.is_error)) for answer in answers]

    return asyncio.run(go())


def test_runs_are_read_and_nothing_else_is_offered() -> None:
    tools, answers = talk(
        calls=(
            ("report", {"path": EXAMPLE}),
            ("report", {"path": "gone"}),
            ("report", {"path": EXAMPLE, "html": "page.html"}),
            ("set", {"path": EXAMPLE}),
            ("weights_log", {"store": "memory://runs"}),
        )
    )
    assert set(tools) == {name.replace(" ", "_") for name in READS}
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    (report, failed), missing_run, html, unknown, url = answers
    assert not failed and json.loads(report)["seed"] == 0
    assert missing_run[1] and "gone: no run here" in missing_run[0] and "Traceback" not in missing_run[0]
    assert html[1] and "no argument 'html'" in html[0]
    assert unknown[1] and "no tool 'set'" in unknown[0]
    assert url[1] and "is no path" in url[0]


ELSEWHERE = [
    ("weights log", {"store": "http://127.0.0.1:9/x"}),
    ("weights log", {"store": "simplecache::file:///etc"}),
    ("weights log", {"store": "runs/../../etc"}),
    ("weights log", {"store": "link"}),
    ("weights verify", {"path": "/"}),
    ("compare", {"paths": ["runs/a", "../b"]}),
    ("plan", {"durations": "../secret.csv"}),
    ("headroom", {"path": "tasks", "policy": "openai:http://127.0.0.1:9/v1"}),
    ("headroom", {"path": "os:system", "policy": "runs/a"}),
]


INSIDE = [
    ("weights log", {"store": "runs/tour"}),
    ("report", {"path": "runs/../runs/tour"}),
    ("compare", {"paths": ["runs/a", "runs/b"]}),
    ("plan", {"run": "runs/a", "steps": 20}),
    ("jobs status", {}),
]


def test_a_reader_opens_what_lies_in_its_folder_and_no_url_and_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("/etc")
    for name, arguments in ELSEWHERE:
        with pytest.raises(ValueError, match=r"is no path; this server reads the runs below|lies outside of"):
            require_inside(name, COMMANDS[name].arguments, arguments, tmp_path)
    for name, arguments in INSIDE:
        require_inside(name, COMMANDS[name].arguments, arguments, tmp_path)


def test_a_workspace_is_changed_in_a_sandbox_alone(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("x = 1\n")
    change = {"file_path": "f.py", "old_string": "1", "new_string": "2"}
    tools, answers = talk(
        *("--workspace", str(tmp_path), "--allow-writes"),
        calls=(
            ("search_replace", change),
            ("run_terminal_cmd", {"command": "cat f.py; ls /work /root 2>&1 | head -3", "is_background": False}),
            ("read_file", {"target_file": "../../etc/passwd"}),
            ("show_changes", {}),
        ),
    )
    assert {"read_file", "run_terminal_cmd", "eval", "set", "show_changes"} <= set(tools)
    assert not tools["set"].annotations.read_only_hint
    assert [failed for _, failed in answers] == [False, False, True, False]
    assert "\nx = 2\nls: cannot access" in answers[1][0] and "-x = 1\n+x = 2" in answers[3][0]
    assert (tmp_path / "f.py").read_text() == "x = 1\n"


def test_edits_that_come_together_are_all_kept(tmp_path: Path) -> None:
    old, new = ([f"x{number:02} = {value}" for number in range(16)] for value in (0, 1))
    (tmp_path / "f.py").write_text("\n".join(old))
    edits = [{"file_path": "f.py", "old_string": a, "new_string": b} for a, b in zip(old, new, strict=True)]
    with open_workspace(tmp_path, "bwrap") as (_, call), ThreadPoolExecutor(8) as clients:
        assert not any(failed for _, failed in clients.map(partial(call, "search_replace"), edits))
        assert call("show_changes", {})[0].count("\n+x") == len(edits)


def test_a_reader_gets_no_argument_that_names_a_file_to_write_or_tasks_to_execute() -> None:
    """What `FILE`, `CSV`, `DIR` or `FOLDER` an argument names is read, or its flag is among WRITERS."""
    named = {
        flag: options["metavar"]
        for name in READS
        for (flag, *_), options in COMMANDS[name].arguments
        if flag not in WRITERS
        and options.get("metavar") in ("FILE", "CSV", "DIR", "NEW", "FOLDER", "TASKS|MODULE:CLASS")
    }
    assert named == {"--durations": "CSV", "--measured": "FILE", "--runs": "DIR"}


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_a_schema_is_what_the_command_takes(name: str) -> None:
    arguments = COMMANDS[name].arguments
    parameters = schema(arguments)
    values = {key: _some(definition) for key, definition in parameters["properties"].items()}
    words = line(name, arguments, values)
    parsed = parser().parse_args(words)
    assert parsed.command == name and {*parameters["required"]} <= {*values}
    assert line(name, arguments, {}) == [*name.split(), *(["--json"] if "--json" in words else [])]
    with pytest.raises(ValueError, match="no argument 'nonsense'"):
        line(name, arguments, {"nonsense": 1})


def _some(of: dict[str, Any]) -> Any:
    if "enum" in of:
        return of["enum"][0]
    if of["type"] == "array":
        return ["--a=b", "--c=d"]  # what looks like an option is none
    return {"boolean": True, "integer": 3, "number": 2.5, "string": "--x"}[of["type"]]
