"""Very many calls, most of them nearly right, in a workspace full of traps: each gets a structured reply, none finds a fault of
ours."""

import random
import typing
from collections import Counter

from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.tools.arguments import parameters
from composer_nb.harness.tools.session import SHOWN, Session
from composer_nb.harness.tools.tool_call import ErrorKind, Reply, ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from tests.harness.tools.conftest import FixedSearch

KINDS = {None, *typing.get_args(ErrorKind)}
HOSTILE = [
    "", " ", "\0", "a\0b", "\ud800", "\udcff", "</parameter>", "</tool_call>", "<|im_end|>", "\n", "\r\n", "\u2028",
    "\x1b[2J", "é" * 300, "../" * 50 + "etc/passwd", "/etc/passwd", "~", "$(id)", "`id`", "; rm -rf /", "-rf", "--", "-e",
    "*", "**/*", "[", "{", "a" * 5000, "x" * (1 << 20), "{}", "null", "[1, 2", "(" * 500, "(a*)*b", "\\", "%s%n", "C:\\x",
    "a//b/./c/", ".", "/", "//", "\ufeff", "٣",
]  # fmt: skip
PATHS = [
    "a.py", "./a.py", "d/b.py", "d", ".", "crlf", "bad-utf8", "wide", "loop", "dangling", "out", "out/passwd", "sparse",
    "pipe", "closed", "deep", "empty", "binary", "large", "a.py/x", "none", "d/../a.py", "new/file", "-rf",
    "with\nnewline", ".git", ".composer_nb", ".composer_nb/outputs/1-grep.txt",
]  # fmt: skip
OLD = ["return 1", "def f(a):\n    return 1", "  return 1", "one\ntwo", "x", "\n", "import os", "a = 1\r\n"]
COMMANDS = [
    "true", "exit 3", "printf '\\xff\\0\\r'", "cat a.py", "kill -9 $$", "exec true", "cd d", "cd /", "cd ..",
    "export A=$'\\xff\\n='", "unset PATH HOME", "set -e; false", "trap - EXIT", "exec 3>&-", "exec >&-", "ulimit -n 3; ls",
    "yes | head -c 300000", "if", "rm -rf ./d; mkdir d", "sleep 9", "(sleep 99 &)", "while :; do :; done",
    "rm -rf .composer_nb; ln -s /etc .composer_nb", "rm -rf .composer_nb",
    "dd if=/dev/zero of=full bs=1M count=99; rm full", "chmod 000 d", "chmod 755 d",
    "mkdir -p 1/2/3; cd 1/2/3; rm -rf ../../../1", "declare -x 'B=1'; f() { :; }; export -f f",
    "exec 2>/proc/self/fd/1 1>&2",
]  # fmt: skip
PATCHES = [
    "*** Begin Patch\n*** Update File: a.py\n@@\n-    return 1\n+    return 2\n*** End Patch",
    "*** Begin Patch\n*** Add File: n.py\n+x\n*** Delete File: d/b.py\n*** End Patch",
    "*** Begin Patch\n*** Update File: crlf\n*** Move to: moved\n one\n-two\n+2\n*** End Patch",
]  # fmt: skip
NAMED = {
    "old_string": OLD, "new_string": OLD, "contents": OLD, "command": COMMANDS, "patch": PATCHES,
    "glob_pattern": ["*.py", "d/**", "*"], "pattern": ["return", "f.a", "^$", "(", "\\d+", "one.two", "a\nb"],
    "glob": ["*.py", "!d"], "type": ["py", "none"], "query": ["where is f"],
}  # fmt: skip
TRAPS = r"""
ln -s loop loop; ln -s nowhere dangling; ln -s /etc out; mkfifo pipe
truncate -s 30M sparse; touch $'\xff\xfe' $'with\nnewline' -- -rf
mkdir closed deep; touch closed/x; chmod 000 closed; (cd deep; for n in $(seq 200); do mkdir d; cd d; done)
"""


def trapped(backend: Backend, spec: SandboxSpec) -> Sandbox:
    box = backend.create(spec)
    box.upload({
        "a.py": b"def f(a):\n    return 1\n", "d/b.py": b"import os\nx = 1\n", "crlf": b"one\r\ntwo\r\n",
        "bad-utf8": b"\xff\xfe x \x80\n" * 50, "wide": b"x" * (1 << 20), "empty": b"", "binary": bytes(range(256)),
        "large": b"line\n" * 600_000,
    })  # fmt: skip
    assert box.exec(["bash", "-c", TRAPS]).exit_code == 0
    return box


class Monkey:
    """Writes calls with a tool's own arguments, each valid or not."""

    def __init__(self, tools: ToolSet, seed: int) -> None:
        self.lot = random.Random(seed)
        self.schemas = {name: parameters(tool.arguments) for name, tool in tools.tools.items()}
        # What starts a program takes a hundred times as long, and what it is given is checked in the same place.
        slow = {"run_terminal_cmd", "grep", "glob_file_search", "read_lints"}
        self.weights = [1 if name in slow else 12 for name in self.schemas]

    def call(self) -> ToolCall:
        lot = self.lot
        if lot.random() < 0.02:
            return ToolCall(name=lot.choice(HOSTILE), arguments={})
        [name] = lot.choices(list(self.schemas), self.weights)
        schema = self.schemas[name]
        chance = dict.fromkeys(schema["properties"], 0.2) | dict.fromkeys(schema.get("required", ()), 0.97)
        fields = {key: part for key, part in schema["properties"].items() if lot.random() < chance[key]}
        arguments: typing.Any = {key: self.value(key, part) for key, part in fields.items()}
        if lot.random() < 0.05:
            arguments[lot.choice(["path", "cmd", "\udcff", "x" * 9999, "", "self", "__class__"])] = lot.choice(HOSTILE)
        if lot.random() < 0.01:
            arguments = lot.choice([None, [], "x", 3, {3: 4}, [("target_file", "a.py")]])
        if name == "run_terminal_cmd" and isinstance(arguments, dict):
            arguments.setdefault("timeout_ms", lot.choice([50, 150]))
        return ToolCall(name=name, arguments=arguments)

    def value(self, key: str, schema: dict[str, typing.Any]) -> object:
        lot, kind = self.lot, schema.get("type")
        if lot.random() < 0.06:
            values = [None, True, 0, -1, 10**30, 1.5, float("nan"), [], {}, [[[]]], {"a": None}, b"x"]
            return lot.choice([*values, *HOSTILE])
        if "enum" in schema:
            return lot.choice([*schema["enum"], "other"])
        if kind == "array":
            key = "path" if "dir" in key or key == "paths" else key
            return [self.value(key, schema["items"]) for _ in range(lot.choice([0, 1, 1, 2]))]
        if kind == "object":
            return {name: self.value(name, part) for name, part in schema["properties"].items()}
        if kind in ("integer", "boolean"):
            return lot.choice([1, 2, 7, 1000, "5", 5.0] if kind == "integer" else [True, False, False, False, False])
        is_path = key.endswith(("path", "file", "directory"))
        return lot.choice(HOSTILE if lot.random() < 0.1 else PATHS if is_path else NAMED.get(key, ["1", "2", "x"]))


def well_formed(reply: Reply, call: ToolCall) -> None:
    assert reply.call is call
    assert reply.error in KINDS, str(call)[:500]
    reply.text.encode()  # no lone surrogates
    assert reply.text and len(reply.text) < SHOWN + 2500 and "\0" not in reply.text, (len(reply.text), str(call)[:300])
    assert reply.error != "InvalidArguments" or "\n" not in reply.text, reply.text


def test_two_thousand_calls(backend: Backend) -> None:
    """Calls are made in turns of one to six, in a fresh workspace from time to time."""
    counts: Counter[tuple[str, str]] = Counter()
    lot, calls = random.Random(1), 0  # with 0, no call of the sixteen of `glob_file_search` is invalid
    while calls < 2000:
        tools = ToolSet.cursor(search=lambda session: FixedSearch(lambda query: []))
        monkey = Monkey(tools, lot.randrange(1 << 30))
        with trapped(backend, SandboxSpec(disk_bytes=48 << 20, processes=64)) as box:
            session: Session = tools.open(box)
            for _ in range(500 // 3):
                turn = [monkey.call() for _ in range(lot.choice([1, 2, 6]))]
                replies = tools.run(session, turn)
                assert len(replies) == len(turn)
                for reply, call in zip(replies, turn, strict=True):
                    well_formed(reply, call)
                    counts[call.name if call.name in tools.tools else "unknown", reply.error or "ok"] += 1
                calls += len(turn)
    fared = {tool: {kind for name, kind in counts if name == tool} for tool, _ in counts}
    assert all({"ok", "InvalidArguments"} <= kinds for tool, kinds in fared.items() if tool != "unknown"), fared
