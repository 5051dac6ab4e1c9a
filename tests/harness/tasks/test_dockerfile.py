"""What of a Dockerfile is done without an image, and what is refused by its name."""

from __future__ import annotations

import pytest

from composer_nb.harness.tasks.dockerfile import copied

CONTEXT = {"app/a.py": b"a", "app/data/b.txt": b"b", "c.py": b"c", "d.txt": b"d"}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("FROM x\nWORKDIR /workspace\nCOPY app/ .\n", ["a.py", "data/b.txt"]),
        ("FROM x\nWORKDIR /app\nCOPY app /app/src\nCMD [\"x\"]\n", ["src/a.py", "src/data/b.txt"]),
        ("FROM x\nCOPY c.py /workspace/\n", ["c.py"]),
        ("FROM x\nCOPY app /workspace/app\nWORKDIR /workspace\n# COPY d.txt .\n", ["app/a.py", "app/data/b.txt"]),
        ("from x\nworkdir /w\ncopy c.py \\\n  d.txt lib/\n", ["lib/c.py", "lib/d.txt"]),
        ("FROM x\nWORKDIR /w\nCOPY *.py d.txt ./\n", ["c.py", "d.txt"]),
        ("FROM x\nWORKDIR /w\nCOPY [\"c.py\", \"renamed.py\"]\n", ["renamed.py"]),
        ("FROM x\nWORKDIR /w\nCOPY app .\nCOPY c.py data\n", ["a.py", "data/b.txt", "data/c.py"]),
        ("FROM x\nRUN pip install --no-cache-dir pytest==8.4.1\nWORKDIR /w\nWORKDIR sub\nCOPY c.py .\n", ["c.py"]),
    ],
)  # fmt: skip
def test_copies_are_done(text: str, paths: list[str]) -> None:
    found = copied({**CONTEXT, "Dockerfile": text.encode()}, {"c.py"}, "/workspace")
    assert found.problems == () and sorted(found.files) == paths
    assert len(found.executable) == sum("c.py" in path or path == "renamed.py" for path in paths)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("RUN apt-get install -y make", "RUN apt-get install -y make: needs an image, which docker builds"),
        ("RUN pip install pytest requests", "RUN pip install pytest requests: needs an image"),
        ("ENV A=b", "ENV A=b: needs an image"),
        ("ADD c.py .", "ADD c.py .: needs an image"),
        ("COPY --from=other c.py .", "COPY --from=other c.py .: needs an image"),
        ("COPY $FILE .", "COPY $FILE .: needs an image"),
        ("COPY c.py /etc/c.py", "COPY to /etc/c.py: outside of the working directory /w"),
        ("COPY ../c.py .", "COPY ../c.py: environment/ holds no such file"),
        ("FROM y", "FROM y: needs an image"),
    ],
)
def test_other_instructions_are_named(text: str, problem: str) -> None:
    found = copied({**CONTEXT, "Dockerfile": f"FROM x\nWORKDIR /w\n{text}\n".encode()}, set(), "/workspace")
    assert any(problem in each for each in found.problems)
