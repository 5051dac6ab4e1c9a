"""The cache of compiled functions, which all processes share."""

import shutil
import subprocess
import sys
from pathlib import Path

from composer_nb.kernels import compiled

IMPORT = "from kernels.compiled import compiled\n"
CALLEE = IMPORT + "\n\n@compiled\ndef callee():\n    return {}\n"
CALLER = "from kernels.callee import callee\n" + IMPORT + "\n\n@compiled\ndef caller():\n    return callee() + 1\n"
COMMAND = [sys.executable, "-c", "from kernels.caller import caller; print(caller())"]


def test_a_function_is_compiled_again_when_one_that_it_calls_has_changed(tmp_path: Path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    shutil.copy(compiled.__file__, folder)
    (folder / "caller.py").write_text(CALLER)
    for number in (1, 10):
        (folder / "callee.py").write_text(CALLEE.format(number))
        result = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True)
        assert result.stdout == f"{number + 1}\n", result.stderr
