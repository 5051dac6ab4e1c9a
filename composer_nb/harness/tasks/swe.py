"""Make tasks from rows of SWE-bench and SWE-smith.

A row has patches and test names, but not the repository. With the repository's files, a row becomes a task of the grader
`pytest`. Without them, it becomes a task of the grader `script` in the benchmark's published image, for `docker` and for
evaluation only. In SWE-smith's rows, `patch` *introduces* the bug.

The sandbox never has the history, because later commits contain the answer (SWE-bench #465). Only projects whose tests are named
by pytest's node ids are supported.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_nb.harness.tasks.harbor import PRISTINE, ForeignFiles
from composer_nb.harness.tasks.patch import apply_patch
from composer_nb.harness.tasks.task import Task

Row = Mapping[str, Any]
IDS = "pytest.ids"  # See `grading.validate`.
TOML = (
    'schema_version = "1.4"\n\n[verifier]\ntimeout_sec = 1800.0\n\n[environment]\nmemory_mb = 4096\nstorage_mb = 1024\n'
)
_TEST = """\
#!/bin/bash
[ -f /opt/miniconda3/bin/activate ] && source /opt/miniconda3/bin/activate testbed
while read -r file; do [ -f {pristine}/"$file" ] && cp {pristine}/"$file" "$file"; done < /tests/modules.txt
if [ -f /tests/test.patch ]; then git apply /tests/test.patch || exit 1; fi
if xargs -d '\\n' -a /tests/ids.txt python -m pytest -q -p no:cacheprovider; then said=1; else said=0; fi
echo $said > /logs/verifier/reward.txt
"""
_HISTORY = (
    "rm -rf .git && git init -q && git add -A && git -c user.name=task -c user.email=task@example.org commit -qm task"
)


def from_swebench(row: Row, files: Mapping[str, str] | None = None) -> Task:
    """Return the task of a SWE-bench row. `files`: the repository's text files at `base_commit`.

    Raises ValueError, which names the missing or unfit part of the row.
    """
    if files is None:
        name, patch, tests = _text(row, "instance_id"), _text(row, "patch"), _text(row, "test_patch")
        image = f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_').lower()}:latest"
        solution = {"solve.sh": "#!/bin/bash\ngit apply /solution/gold.patch\n", "gold.patch": patch}
        return _in_image(row, image, "", {"test.patch": tests}, solution, {})
    gold, tested = _applied(row, "patch", files), _applied(row, "test_patch", files)
    remaining = {path: text for path, text in files.items() if path not in tested or tested[path] is not None}
    hidden = {path: text for path, text in tested.items() if text is not None}
    return _from_files(row, remaining, gold, remaining | hidden, set(hidden))


def from_swesmith(row: Row, files: Mapping[str, str] | None = None) -> Task:
    """Return the task of a SWE-smith row. `files`: the repository's text files without the bug; then the modules with tests that
    the bug breaks are hidden. Raises ValueError like `from_swebench`."""
    if files is None:
        patch = _text(row, "patch")
        bug = "COPY bug.patch /tmp/bug.patch\nRUN git apply /tmp/bug.patch && rm /tmp/bug.patch\n"
        solution = {"solve.sh": "#!/bin/bash\ngit apply -R /solution/bug.patch\n", "bug.patch": patch}
        return _in_image(row, _text(row, "image_name"), bug, {}, solution, {"environment/bug.patch": patch.encode()})
    broken = _applied(row, "patch", files)
    hidden = {_module(name) for name in _names(row, "FAIL_TO_PASS")}
    buggy = {path: text for path, text in files.items() if path not in broken} | broken
    visible = {path: text for path, text in buggy.items() if text is not None and path not in hidden}
    return _from_files(row, visible, {path: files.get(path) for path in broken}, dict(files), hidden)


def read_rows(path: Path, form: str, files: Mapping[str, str] | None = None) -> Iterator[tuple[str, Task | ValueError]]:
    """Yield the place of each row of a file, with its task or its error.

    The file is JSON Lines or one JSON list. `form` is `swebench` or `swesmith`. Raises OSError, and ValueError for a file without
    rows.
    """
    from_row = {"swebench": from_swebench, "swesmith": from_swesmith}[form]
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: neither JSON Lines nor a JSON list, encoded as UTF-8: {error}") from None
    if not text.strip() or rows == []:
        raise ValueError(f"{path}: holds no row")
    lines = text.split("\n") if rows is None else rows
    for number, line in enumerate(lines, 1):
        if rows is None and not line.strip():
            continue
        try:
            row = json.loads(line) if rows is None else line
            if not isinstance(row, dict):
                raise ValueError("not an object with the keys of a row")
            yield f"{path}:{number}", from_row(row, files)
        except (ValueError, RecursionError) as error:
            yield f"{path}:{number}", ValueError(f"{path}:{number}: {error}")


def _from_files(
    row: Row, files: dict[str, str], gold: Mapping[str, str | None], tested: Mapping[str, str], hidden: set[str]
) -> Task:
    """Return a task with the workspace `files`, the solution's changes `gold`, and hidden tests from `tested`."""
    common, names = _common(row)
    hidden = hidden | {_module(name) for name in names}
    if missing := sorted(hidden - set(tested)):
        raise _unfit(row, f"tests name {missing[0]!r}, which is not among the files")
    if gone := sorted(path for path, text in gold.items() if text is None):
        raise _unfit(row, f"its solution deletes {gone[0]!r}, which a task cannot ask for")
    solution = {path: text for path, text in gold.items() if text is not None and path not in hidden}
    return Task(
        **common | {"metadata": {IDS: json.dumps(names)} | common["metadata"]},
        files=files,
        tests={path: tested[path] for path in sorted(hidden)},
        solution=solution,
        source_scope=("**", *sorted(solution)),
        grader="pytest",
    )


def _in_image(
    row: Row, image: str, prepare: str, tests: Mapping[str, str], solution: dict[str, str], rest: Mapping[str, bytes]
) -> Task:
    if any(sign.isspace() for sign in image):
        raise _unfit(row, f"image_name: {image!r} is no image's name")
    common, names = _common(row)
    return Task(
        **common,
        files={},
        tests={
            "test.sh": _TEST.format(pristine=shlex.quote(PRISTINE)),
            "ids.txt": "".join(f"{name}\n" for name in names),
            "modules.txt": "".join(f"{name}\n" for name in sorted(set(map(_module, names)))),
            **tests,
        },
        solution=solution,
        source_scope=("**",),
        grader="script",
        kept=ForeignFiles(
            name=common["id"],
            toml=TOML,
            rest={
                "environment/Dockerfile": f"FROM {image}\nWORKDIR /testbed\n{prepare}RUN {_HISTORY}\n".encode(),
                **rest,
            },
            executable=("solution/solve.sh", "tests/test.sh"),
        ),
    )


def _common(row: Row) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a row gives any task, and the tests that count."""
    origin = {key: str(row[key]) for key in ("repo", "base_commit", "version") if row.get(key)}
    fields = {"id": _text(row, "instance_id"), "instruction": _text(row, "problem_statement"), "metadata": origin}
    return fields, _names(row, "FAIL_TO_PASS") + _names(row, "PASS_TO_PASS")


def _unfit(row: Row, why: str) -> ValueError:
    return ValueError(f"{row.get('instance_id', 'row')}: {why}")


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise _unfit(row, f"{key} is missing or no text")
    return value


def _names(row: Row, key: str) -> list[str]:
    """Return a list of node ids, which some editions of the data store as JSON."""
    value = row.get(key, [])
    try:
        names = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _unfit(row, f"{key} is no list of tests")
    if key == "FAIL_TO_PASS" and not names:
        raise _unfit(row, "FAIL_TO_PASS is empty: nothing would tell a right answer")
    for name in names:  # not an option, or a file of them
        if not _module(name).endswith(".py") or "\n" in name or name.startswith(("-", "@")):
            raise _unfit(row, f"{key}: {name[:80]!r} is no node id of pytest")
    return names


def _module(name: str) -> str:
    return name.partition("::")[0]


def _applied(row: Row, key: str, files: Mapping[str, str]) -> dict[str, str | None]:
    """Return the files that a patch of a row changes."""
    patch = _text(row, key)
    try:
        return apply_patch(files, patch)
    except ValueError as error:
        raise _unfit(row, f"{key}: {error}") from None
