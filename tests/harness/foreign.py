"""Harbor tasks as other people write them: directories by hand, from the schema's words, each with another of its options."""

from pathlib import Path

from tests.folders import write

CHECK = "#!/bin/bash\nsaid=0\nif {check}; then said=1; fi\necho $said > /logs/verifier/reward.txt\n"
HELLO = {
    "tests/test.sh": CHECK.format(check='[ "$(cat hello.txt)" = hello ]'),
    "solution/solve.sh": "#!/bin/bash\necho hello > hello.txt\n",
}
START = "environment/workspace/"

FOREIGN: dict[str, tuple[str, dict[str, str | bytes]]] = {
    "plain": ("", HELLO),
    "full_header": (
        'schema_version = "1.4"\nsource = "somewhere"\n\n[task]\nname = "org/hello"\nversion = "2"\nkeywords = ["a"]\n'
        '[[task.authors]]\nname = "A"\nemail = "a@example.org"\n',
        HELLO,
    ),
    "limits": ("[environment]\ncpus = 1\nmemory_mb = 256\nstorage_mb = 64\ngpus = 0\nbuild_timeout_sec = 5.5\n", HELLO),
    "timeouts": ("[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 30.0\n", HELLO),
    "separate": ('artifacts = ["/workspace", {source = "/workspace/out", exclude = ["*.log"]}]\n'
        '[verifier]\nenvironment_mode = "separate"\n', HELLO),
    "said_twice": (
        '[environment]\nnetwork_mode = "no-network"\nworkdir = "/workspace"\nos = "Linux"\n'
        '[agent]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "shared"\n',
        HELLO,
    ),
    "variables": (
        '[environment]\nenv = {WORD = "${WORD_OF_NOBODY:-hello}"}\n'
        '[verifier]\nenv = {FILE = "hello.txt"}\n[solution]\nenv = {TO = "hello.txt"}\n',
        {
            "tests/test.sh": CHECK.format(check='[ "$(cat "$FILE")" = "$WORD" ] && [ "$WORD" = hello ]'),
            "solution/solve.sh": '#!/bin/bash\necho "$WORD" > "$TO"\n',
        },
    ),
    "python_script_with_json": (
        "",
        {
            "tests/test.sh": "#!/usr/bin/env python3\nimport json\nfrom pathlib import Path\n"
            "n, logs = Path('n'), Path('/logs/verifier')\n"
            "right = float(n.exists() and int(n.read_text()) == 42)\n"
            "(logs / 'reward.json').write_text(json.dumps({'correct': right, 'style': 1.0}))\n"
            "(logs / 'reward.txt').write_text(str(right))\n",
            "solution/solve.sh": "#!/usr/bin/env python3\nopen('n', 'w').write('42')\n",
        },
    ),
    "helpers": (
        "",
        {
            "tests/test.sh": CHECK.format(check='cd "$(dirname "$0")" && python3 check_it.py && diff data/wanted /workspace/out'),
            "tests/check_it.py": "import sys\nsys.path.insert(0, '/workspace')\n"
            "import f\nassert f.add(2, 2) == 4\nopen('/workspace/out', 'wb').write(f.data())\n",
            "tests/data/wanted": b"\xff\x00\xfe",
            START + "f.py": "def add(a, b):\n    return a - b\n",
            "solution/solve.sh": "#!/bin/bash\ncp /solution/right/f.py f.py\n",
            "solution/right/f.py": "def add(a, b):\n    return a + b\ndef data():\n    return b'\\xff\\x00\\xfe'\n",
        },
    ),
    "kinds_of_files": (
        "",
        {
            START + "old.txt": "old",
            START + "kept/a": "a",
            START + "notes": "one",
            "tests/test.sh": CHECK.format(
                check='[ "$(./run now)" = "ran now" ] && [ ! -e old.txt ] && [ -f kept/a ] && [ -f notes/one ]'
            ),
            "solution/solve.sh": "#!/bin/bash\nprintf '#!/bin/sh\\necho ran $1\\n' > run\nchmod +x run\n"
            "rm old.txt notes; mkdir notes; echo > notes/one; echo > pyproject.toml\n",
        },
    ),
    "host_python_with_dockerfile": (
        '[metadata]\ncategory = "x"\n\n[metadata.composer_nb]\nruntime = "host-python"\n',
        HELLO | {"environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /workspace\n"},
    ),
    "scoped": (
        '[metadata.composer_nb]\ngrader = "script"\nsource_scope = ["*.txt"]\n[metadata.composer_nb.facts]\nfamily = "files"\n',
        HELLO | {START + "guard.py": "x = 1\n"},
    ),
    "windows_lines_and_more": (
        "# a comment\r\n[unknown.table]\r\nkey = 1979-05-27T07:32:00Z\r\n[[unknown.list]]\r\nx = 'raw \\ string'\r\n",
        HELLO
        | {
            "instruction.md": "Say hello.\r\nNo newline at the end",
            "README.md": "about\n",
            "trajectory.json": "{}",
            "environment/data.bin": b"\x00\xff",
            "solution/notes.bin": b"\xff\xff",
            ".gitignore": "*.pyc\n",
        },
    ),
}  # fmt: skip


def lay(name: str, folder: Path, scripts_executable: bool = True) -> Path:
    """Write the task `name` as a directory in `folder` and return its path."""
    toml, files = FOREIGN[name]
    files = {"task.toml": toml, "instruction.md": "Say hello.\n", **files}
    path = write(folder / name, files)
    (path / "environment").mkdir(exist_ok=True)
    for relative in files:
        (path / relative).chmod(0o755 if scripts_executable and relative.endswith(".sh") else 0o644)
    return path
