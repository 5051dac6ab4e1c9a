"""pytest's own modules as texts, for sandboxes, which see no installed packages.

pygments, which pytest imports to colour what it prints, is replaced by a stand-in of a few lines.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from composer_nb.harness.sandbox.contract import SandboxUnavailable

PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging")
WHERE_NEEDED = ("exceptiongroup", "tomli")
"""By pytest on Python 3.10 and older: taken along if they are installed here."""
STAND_INS = {
    "pygments": "from pygments import util\ndef highlight(code, lexer, formatter):\n    return code\n",
    "pygments.util": "class ClassNotFound(ValueError):\n    pass\nclass OptionError(Exception):\n    pass\n",
    "pygments.formatters": "",
    "pygments.formatters.terminal": "class TerminalFormatter:\n    pass\n",
    "pygments.lexer": "class Lexer:\n    pass\n",
    "pygments.lexers": "",
    "pygments.lexers.diff": "class DiffLexer:\n    pass\n",
    "pygments.lexers.python": "class PythonLexer:\n    pass\n",
}


def pytest_modules() -> dict[str, tuple[str, bool, str]]:
    """Module name -> (path to show, whether it is a package, text). Raises SandboxUnavailable without pytest."""
    found: dict[str, tuple[str, bool, str]] = {}
    for name, text in STAND_INS.items():
        package = any(other.startswith(name + ".") for other in STAND_INS)
        found[name] = (f"/kit/{name.replace('.', '/')}{'/__init__' if package else ''}.py", package, text)
    for needed in (*PACKAGES, *WHERE_NEEDED):
        try:
            listed = distribution(needed)
        except PackageNotFoundError:
            if needed in WHERE_NEEDED:
                continue
            raise SandboxUnavailable(f"{needed} is not installed on this side: pip install pytest") from None
        for file in listed.files or ():
            if file.suffix == ".py" and ".." not in file.parts:
                parts = file.with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                text = Path(str(listed.locate_file(file))).read_text(encoding="utf-8")
                found[name] = (f"/kit/{file.as_posix()}", parts[-1] == "__init__", text)
    return found
