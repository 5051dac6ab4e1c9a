"""How long each tool of `ToolSet.cursor` takes on a tree of 5,000 files, one call at a time, as a table in Markdown. With
`--repository`: how long turns of several reads take in a copy of that folder.

python scripts/bench/tool_latency.py [--backend bwrap|docker] [--calls N] [--repository FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

from composer_nb.harness.sandbox import BACKENDS, open_backend
from composer_nb.harness.sandbox.contract import SandboxSpec
from composer_nb.harness.tools.session import Session
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet

FILES = 5000
BODY = "".join(f"def f{n}(x):\n    return x + {n}\n\n\n" for n in range(20))
CALLS: dict[str, dict[str, object]] = {
    "read_file": {"target_file": "p1/m1.py"},
    "search_replace": {"file_path": "p2/m2.py", "old_string": "x + 7", "new_string": "x + 7"},
    "write": {"file_path": "new.py", "contents": BODY},
    "delete_file": {"target_file": "new.py"},
    "list_dir": {"target_directory": "p1"},
    "glob_file_search": {"glob_pattern": "m12*.py"},
    "grep": {"pattern": r"return x \+ 1999", "output_mode": "content"},
    "run_terminal_cmd": {"command": "true", "is_background": False},
    "read_lints": {"paths": ["p1/m1.py"]},
    "todo_write": {"merge": False, "todos": [{"id": "1", "content": "x", "status": "pending"}]},
    "apply_patch": {
        "patch": "*** Begin Patch\n*** Update File: p3/m3.py\n@@\n-    return x + 7\n+    return x + 77\n*** End Patch\n"
    },
}


def calls(tool: str, number: int) -> list[ToolCall]:
    """Return one turn: the call, and what must come before it."""
    arguments = dict(CALLS[tool])
    if tool == "search_replace":  # to and fro, so that each changes something
        words = ["x + 7\n", "x + 77\n"]
        arguments |= {"old_string": words[number % 2], "new_string": words[1 - number % 2]}
    if tool == "apply_patch" and number % 2:  # to and fro
        lines = str(arguments["patch"]).split("\n")
        lines[3], lines[4] = lines[4].replace("+", "-", 1), lines[3].replace("-", "+", 1)
        arguments["patch"] = "\n".join(lines)
    preparation = [ToolCall(name="write", arguments=CALLS["write"])] if tool == "delete_file" else []
    return [*preparation, ToolCall(name=tool, arguments=arguments)]


def turns(tools: ToolSet, session: Session, files: dict[str, bytes], repeats: int) -> None:
    """Print the median time of turns with 1, 2, 4 and 8 calls that only read."""
    longest = max((path for path in files if path.endswith(".py")), key=lambda path: len(files[path]))
    reads = {
        "read_file": {"target_file": longest},
        "grep": {"pattern": r"def \w+iter\w*\("},
        "glob_file_search": {"glob_pattern": "test_*.py"},
        "read_lints": {"paths": [longest]},
    }
    print("| reads in a turn | 1 | 2 | 4 | 8 |\n|---|---|---|---|---|")
    for names in (["read_file"], ["grep"], [*reads]):
        times: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
        for _, (size, seconds) in itertools.product(range(repeats), times.items()):
            turn = [
                ToolCall(name=name, arguments=reads[name]) for name in itertools.islice(itertools.cycle(names), size)
            ]
            began = time.perf_counter()
            replies = tools.run(session, turn)
            seconds.append(time.perf_counter() - began)
            assert not any(reply.error for reply in replies), replies
        cells = " | ".join(f"{1000 * statistics.median(seconds):.1f}" for seconds in times.values())
        print(f"| {', '.join(f'`{name}`' for name in names)} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="bwrap")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--repository", type=Path)
    args = parser.parse_args()
    tools: ToolSet = ToolSet.cursor()
    with open_backend(args.backend) as backend, backend.create(SandboxSpec()) as box:
        files = {f"p{n % 50}/m{n}.py": BODY.encode() for n in range(FILES)}
        if args.repository:
            paths = [path for path in args.repository.rglob("*") if path.is_file()]
            files = {str(path.relative_to(args.repository)): path.read_bytes() for path in paths}
        box.upload(files)
        session = tools.open(box)
        print(
            f"backend {args.backend}, {args.calls} calls each, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
        )
        if args.repository:
            return turns(tools, session, files, args.calls)
        print("| tool | median ms | 95th percentile ms |\n|---|---|---|")
        for tool in CALLS:
            replies = [tools.run(session, calls(tool, number))[-1] for number in range(args.calls)]
            if wrong := [reply for reply in replies if reply.error]:
                raise SystemExit(f"{tool}: {wrong[0].text}")
            times = sorted(1000 * reply.seconds for reply in replies)
            print(f"| `{tool}` | {statistics.median(times):.1f} | {times[int(0.95 * len(times))]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
