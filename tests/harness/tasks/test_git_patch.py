"""Patches: what git makes of two trees leads from one to the other; what does not fit, or leads out, is refused."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_nb.harness.tasks.patch import apply_patch
from tests.folders import write

LINE = st.sampled_from(
    ["a", "b", "", "c d", "@@ -1 +1 @@", "--- a/x", "+++ b/y", "\\ No newline", "é\r", "diff --git a/x b/x"]
)
TEXT = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINE, max_size=12), st.sampled_from(["", "\n"]))
TREE = st.dictionaries(st.sampled_from(["x", "y", "d/z.py", "with space"]), TEXT.filter(bool), max_size=4)


def git_diff(before: dict[str, str], after: dict[str, str], *options: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for name, tree in (("one", before), ("two", after)):
            write(Path(folder, name), tree)
        command = ["git", "-c", "core.quotePath=off", "diff", "--no-index", "--no-color", *options, "one", "two"]
        process = subprocess.run(command, cwd=folder, capture_output=True, check=False)
        assert process.returncode in (0, 1), process.stderr
        return process.stdout.decode().replace("one/", "").replace("two/", "")  # in paths alone, those of renames too


@settings(max_examples=10)
@given(before=TREE, after=TREE, options=st.sampled_from([(), ("-M",), ("--no-renames",)]))
@example(before={"x": "\n"}, after={"y": "\n"}, options=())
def test_a_diff_of_git_leads_there(before: dict[str, str], after: dict[str, str], options: tuple[str, ...]) -> None:
    if before == after:
        return
    patch = git_diff(before, after, *options)
    changed = apply_patch(before, patch)
    patched = {path: text for path, text in (before | changed).items() if text is not None}
    assert patched == after


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("", "No valid patches"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-c\n+d\n", "patch failed: x:1"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n", "corrupt patch"),
        ("--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n", "no: No such file"),
        ("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "x: already exists"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "not a plain relative path"),
        ("--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "not a plain relative path"),
        ("diff --git a/x b/../y\nrename from x\nrename to ../y\n", "invalid path|inconsistent"),
        ("--- /dev/null\n+++ b/.git/config\n@@ -0,0 +1 @@\n+b\n", "invalid path"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "No valid patches"),
        ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n", "makes a link"),
    ],
)
def test_what_does_not_fit_is_refused(patch: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_patch({"x": "a\n"}, patch)
