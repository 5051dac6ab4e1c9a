"""The command mcp: results of runs, and the product's tools, for agents that speak the Model Context Protocol on stdio.

    composer-nb mcp                                 report, watch, compare, … of runs here, read-only
    composer-nb mcp --allow-writes                  also eval and set
    composer-nb mcp --workspace PATH                also the product's tools, in a sandbox with a copy of PATH

Each command runs in its own process, with `--json`. The tools of a workspace change only the copy; `show_changes` returns the
diff. Source: the specification of 2025-06-18 (modelcontextprotocol.io), through its Python SDK.
"""

import argparse
import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from composer_nb.operations import COMMANDS, Argument, arg, command

READS = (
    *("report", "watch", "runs", "rollouts", "compare", "headroom", "plan", "doctor"),
    *("jobs status", "weights log", "weights verify"),
)
WRITES = ("eval", "set")
# Arguments that are hidden from read-only commands: they write files, or execute what agents and tasks hold.
WRITERS = {"--json", "--html", "--port", "--png", "--out", "--write", "--ray-cluster", "--atif", "--tests"}
# Limits of a command's time and of its output.
LIMIT_S, LIMIT_BYTES = 600.0, 1 << 20
_TYPES = {int: "integer", float: "number"}


def schema(arguments: Sequence[Argument], without: frozenset[str] | set[str] = frozenset({"--json"})) -> dict[str, Any]:
    """Return the JSON schema of a command's arguments."""
    properties, required = dict[str, Any](), list[str]()
    for (name, *_), options in arguments:
        if name in without:
            continue
        kind = "boolean" if options.get("action") == "store_true" else _TYPES.get(options.get("type", str), "string")
        parameter: dict[str, Any] = {"type": kind, "description": options.get("help", "")}
        if options.get("action") == "append" or options.get("nargs") == "+":
            parameter = {"type": "array", "items": {"type": kind}, "description": parameter["description"]}
        if "choices" in options:
            parameter["enum"] = list(options["choices"])
        properties[_key(name)] = parameter
        if options.get("required") or not (name.startswith("-") or options.get("nargs") == "?"):
            required.append(_key(name))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def line(name: str, arguments: Sequence[Argument], args: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line, with options first, so that no value is taken for an option. Raises ValueError for an
    argument that the command does not have."""
    options, positional, remaining = list[str](), list[str](), dict(args)
    for (argument, *_), _ in arguments:
        if (value := remaining.pop(_key(argument), None)) is None or value is False:
            continue
        values = value if isinstance(value, list) else [value]
        if argument.startswith("-"):
            options += [argument] if value is True else [f"{argument}={item}" for item in values]
        else:
            positional += map(str, values)
    if remaining:
        raise ValueError(f"{name} has no argument {', '.join(map(repr, remaining))}")
    has_json = any(argument == "--json" for (argument, *_), _ in arguments)
    return [*name.split(), *options, *["--json"] * has_json, *["--", *positional] * bool(positional)]


def require_inside(name: str, arguments: Sequence[Argument], values: Mapping[str, Any], root: Path) -> None:
    """Raise ValueError for a URL, and for a path that leads out of `root`: what only reads must not fetch anything else."""
    for (argument, *_), options in arguments:
        value = values.get(_key(argument))
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            is_path = not argument.startswith("-") or options.get("type") is Path
            if "://" in text or "::" in text or (is_path and re.match(r"[\w+.-]+:", text)):
                raise ValueError(f"{name}: {text!r} is no path; this server reads the runs below {root}")
            outside = not (root / text).resolve().is_relative_to(root)
            if outside and (is_path or "/" in text):
                raise ValueError(f"{name}: {text!r} lies outside of {root}, whose runs this server reads")


def _key(argument: str) -> str:
    return argument.lstrip("-").replace("-", "_")


async def run(words: Sequence[str]) -> tuple[str, bool]:
    """Run a command. Return its output, or its error, and whether it failed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "composer_nb.cli", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, error = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        return f"not within {LIMIT_S:g} s", True
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    failed = process.returncode != 0
    text = (printed or error if failed else printed)[:LIMIT_BYTES]
    return text.decode("utf-8", "replace"), failed


# Executes a tool call by name and arguments. Returns its observation, and whether it failed.
ToolCaller = Callable[[str, Mapping[str, Any]], tuple[str, bool]]


@contextmanager
def open_workspace(root: Path, backend: str) -> Iterator[tuple[dict[str, dict[str, Any]], ToolCaller]]:
    """Open the product's tools in a sandbox with a copy of a repository: their schemas by name, and what calls them. Raises like
    `run_agent`."""
    from composer_nb.harness.carry import carry_back
    from composer_nb.harness.sandbox import open_backend
    from composer_nb.harness.tools.tool_call import ToolCall
    from composer_nb.production.checkout import changed, read_checkout
    from composer_nb.production.diff import patch, require_git
    from composer_nb.production.work import open_session, tools_for

    require_git()
    source, tools, one_at_a_time = read_checkout(root), tools_for("cursor"), threading.Lock()
    schemas = {schema["function"]["name"]: schema["function"] for schema in tools.schemas}
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    description = "Show the diff of all changes in the workspace."
    schemas["show_changes"] = {"name": "show_changes", "description": description, "parameters": empty}
    with open_backend(backend) as sandboxes, open_session(source, tools, sandboxes) as (session, _):

        def call(name: str, args: Mapping[str, Any]) -> tuple[str, bool]:
            with one_at_a_time:  # clients may send several: two edits of a file would undo one another
                if name == "show_changes":
                    changes, _ = changed(source, *carry_back(session.sandbox))
                    before = {path: blob for path in source.files if (blob := source.blob(path))}
                    return patch(before, changes).decode("utf-8", "replace") or "nothing was changed", False
                [reply] = tools.run(session, [ToolCall(name=name, arguments=dict(args))])
                return reply.text, bool(reply.error)

        yield schemas, call


@command(
    "mcp",
    arg("--workspace PATH", "offer the product's tools too, on a copy of this repository", type=Path),
    arg("--backend NAME", "sandbox of the workspace", "bwrap"),
    arg("--allow-writes", "offer eval and set too"),
)
def mcp(args: argparse.Namespace) -> int:
    """Serve runs, and a workspace's tools, to an agent over MCP on stdio."""
    try:
        from mcp import stdio_server, types
        from mcp.server.lowlevel import Server
    except ImportError:
        raise ValueError("mcp: the SDK is not installed; pip install -e '.[mcp]' brings it") from None

    names = {name.replace(" ", "_"): name for name in (*READS, *WRITES[: 2 * args.allow_writes])}
    hidden = {name: WRITERS if name in READS else {"--json"} for name in names.values()}
    workspace: AbstractContextManager[Any] = nullcontext(({}, None))
    if args.workspace:
        workspace = open_workspace(args.workspace, args.backend)
    with workspace as (workspace_tools, call):

        async def listed(context: Any, params: Any) -> Any:
            tools = [
                types.Tool(
                    name=tool,
                    description=COMMANDS[name].help,
                    input_schema=schema(COMMANDS[name].arguments, hidden[name]),
                    annotations=types.ToolAnnotations(read_only_hint=name in READS),
                )
                for tool, name in names.items()
            ]
            tools += [
                types.Tool(name=tool, description=tool_schema["description"], input_schema=tool_schema["parameters"])
                for tool, tool_schema in workspace_tools.items()
            ]
            return types.ListToolsResult(tools=tools)

        async def called(context: Any, params: Any) -> Any:
            values = params.arguments or {}
            try:
                if call and params.name in workspace_tools:
                    text, failed = await asyncio.to_thread(call, params.name, values)
                elif name := names.get(params.name):
                    flags = hidden[name] - {"--json"}
                    arguments = [argument for argument in COMMANDS[name].arguments if argument[0][0] not in flags]
                    if name in READS:
                        require_inside(name, arguments, values, Path.cwd().resolve())
                    text, failed = await run(line(name, arguments, values))
                else:
                    text, failed = f"no tool {params.name!r}; there are {', '.join([*names, *workspace_tools])}", True
            except ValueError as error:
                text, failed = str(error), True
            return types.CallToolResult(content=[types.TextContent(text=text)], is_error=failed)

        async def serve() -> None:
            server = Server("composer_nb", on_list_tools=listed, on_call_tool=called)
            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())

        asyncio.run(serve())
    return 0
