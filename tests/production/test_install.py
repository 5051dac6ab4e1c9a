"""Commands that should work in a checkout: goals, tries of a script and of an agent, and the check from the start."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from composer_nb.cli import main
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.making.repository import read_repository
from composer_nb.production.install import GOALS, TRIES, GoalResult, ScriptedInstaller, goals, install
from tests.folders import write

# A library that does not run as it is: its version is written by a build, it looks up its own metadata, and it needs a package
# and a plugin of pytest.
BROKEN = {
    "pyproject.toml": '[project]\nname = "lib-date"\nversion = "1.2"\n',
    ".gitignore": "_version.py\n",
    "src/lib/__init__.py": "from lib._version import version\nfrom importlib.metadata import version as installed\n"
    "import helper\nNAME = f\"{version} {installed('lib-date')} {helper.WORD}\"\n",
    "tests/test_name.py": "import lib\n\ndef test_name():\n    assert lib.NAME == '1.2 1.2 here'\n",
    "tests/test_fixture.py": "def test_fixture(word):\n    assert word == 'given by a plugin'\n",
}
AVAILABLE = {
    "helper.py": "import needed\nWORD = needed.WORD\n",
    "helper-3.dist-info/METADATA": "Metadata-Version: 2.1\nName: helper\nVersion: 3\nRequires-Dist: needed\n",
    "helper-3.dist-info/RECORD": "helper.py,,\nhelper-3.dist-info/METADATA,,\nhelper-3.dist-info/RECORD,,\n",
    "needed.py": "WORD = 'here'\n",
    "needed-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: needed\nVersion: 1\n",
    "needed-1.dist-info/RECORD": "needed.py,,\nneeded-1.dist-info/METADATA,,\n",
    "words.py": "import pytest\n\n@pytest.fixture\ndef word():\n    return 'given by a plugin'\n",
    "words-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: words\nVersion: 1\n",
    "words-1.dist-info/entry_points.txt": "[pytest11]\nwords = words\n",
    "words-1.dist-info/RECORD": "words.py,,\nwords-1.dist-info/METADATA,,\nwords-1.dist-info/entry_points.txt,,\n",
}


def quiet(doing: str, counts: str) -> None:
    pass


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return write(tmp_path / "lib-date", BROKEN)


def test_the_script_brings_and_writes_what_a_library_lacks(library: Path, tmp_path: Path, backend: Backend) -> None:
    out = tmp_path / "out"
    script = ScriptedInstaller(write(tmp_path / "available", AVAILABLE))
    summary = install(library, out, backend, script, quiet)
    changes = [change for tried in summary["tries"] for change in tried["changes"]]
    assert sorted(changes) == [
        *("brought helper 3", "brought needed 1", "brought words 1"),
        *("wrote lib_date-1.2.dist-info", "wrote src/lib/_version.py"),
    ]
    assert summary["verdict"] == "kept" and (summary["passed_before"], summary["passed_after"]) == (0, summary["goals"])
    assert summary == json.loads((out / "install.json").read_text())
    assert read_repository(out / "repository").tests == read_repository(library).tests
    with pytest.raises(FileExistsError, match="give --out a new folder"):
        install(library, out, backend, script, quiet)


def test_a_repository_of_which_nothing_is_known_is_discarded(library: Path, tmp_path: Path, backend: Backend) -> None:
    summary = install(library, tmp_path / "out", backend, lambda out, failed: [], quiet)
    assert summary["verdict"] == "discarded" and not summary["tries"] and not summary["passed_after"]


def test_tries_of_an_interrupted_call_count(library: Path, tmp_path: Path, backend: Backend) -> None:
    (library / "tests" / "test_name.py").chmod(0o755)
    calls: list[int] = []

    def installer(out: Path, failed: Sequence[GoalResult]) -> list[str]:
        calls.append(len(failed))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ["something"]

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        install(library, out, backend, installer, quiet)
    summary = install(library, out, backend, installer, quiet)
    assert summary["verdict"] == "discarded" and len(summary["tries"]) == TRIES and len(calls) == TRIES + 1
    assert (out / "repository" / "tests" / "test_name.py").stat().st_mode & 0o777 == 0o755


def test_an_installer_cannot_make_tests_easier(library: Path, tmp_path: Path, backend: Backend) -> None:
    """It rewrites a test, and has pytest skip another one."""

    def cheat(out: Path, failed: Sequence[GoalResult]) -> list[str]:
        write(out / "repository", {"tests/test_name.py": "def test_name():\n    pass\n"})
        skip = "import pytest\n\n@pytest.fixture\ndef word():\n    pytest.skip()\n"
        write(out / "repository", {"conftest.py": skip})
        return ["cheated"]

    summary = install(library, tmp_path / "out", backend, cheat, quiet)
    assert summary["verdict"] == "discarded"
    assert {result["command"].rpartition("/")[2] for result in summary["after"] if result["passed"]} == set()


def test_goals_are_few_and_from_all_tests(tmp_path: Path) -> None:
    many = {f"tests/test_{number:02}.py": "def test():\n    pass\n" for number in range(40)}
    commands = goals(read_repository(write(tmp_path / "lib", BROKEN | many)))
    assert commands[0] == "python3 -c 'import lib'" and commands[1].endswith("--collect-only")
    modules = [command.rpartition("_")[2] for command in commands[2:]]
    assert 6 <= len(modules) <= GOALS - 2 and modules[0] == "00.py" and modules[-1] > "30"


HOSTILE = """
No module named 'lib.no.version'; 'lib.no' is not a package
No module named 'lib....version'
No module named 'outside'
No package metadata was found for ../../outside
No package metadata was found for somebody
"""


def test_outputs_and_packages_of_others_write_nothing_outside(tmp_path: Path) -> None:
    secret = write(tmp_path, {"secret.py": "SECRET = 1\n"}) / "secret.py"
    records = {
        "outside.py": "",
        "outside-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: outside\nVersion: 1\nRequires-Dist: old (>1 <2\n",
        "outside-1.dist-info/RECORD": f"outside.py,,\n{secret},,\n../up.py,,\nlink.py,,\ngone.py,,\n",
        "unnamed-1.dist-info/METADATA": "Metadata-Version: 2.1\n",
    }
    available = write(tmp_path / "available", records)
    (available / "link.py").symlink_to(secret)
    out = tmp_path / "out"
    write(out / "repository", BROKEN)
    (out / "packages").mkdir()
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    result = GoalResult(command="a command", passed=False, output=HOSTILE)
    assert ScriptedInstaller(available)(out, [result]) == ["brought outside 1"]
    after = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    assert [str(path) for path in after if path not in before] == ["out/packages/outside.py"]


def test_an_ignored_test_a_script_and_a_repository_around_the_result(tmp_path: Path, backend: Backend) -> None:
    around = write(tmp_path / "around", {".gitignore": "*\n", ".git/HEAD": ""})
    script = "import subprocess\n\ndef test():\n    subprocess.run(['./run.sh'], check=True)\n    import lib.made\n"
    files = {
        ".gitignore": "test_ignored.py\n",
        "run.sh": "#!/bin/sh\n",
        "lib/__init__.py": "",
        "test_script.py": script,
    }
    library = write(tmp_path / "lib", files | {"test_ignored.py": "def test():\n    pass\n"})
    (library / "run.sh").chmod(0o755)

    def build(out: Path, failed: Sequence[GoalResult]) -> list[str]:
        (out / "repository" / "test_script.py").unlink()
        write(out / "repository", {"lib/made.py": "", "test_script.py/in_its_place": ""})
        return ["built"]

    summary = install(library, around / "out", backend, build, quiet)
    assert summary["verdict"] == "kept" and summary["goals"] == summary["passed_after"] == 3


def test_an_agent_writes_what_is_missing(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "src/lib/_version.py": "version = '1.2'\n",
        "src/helper.py": "WORD = 'here'\n",
        "src/lib_date-1.2.dist-info/METADATA": "Name: lib-date\nVersion: 1.2\n",
        "conftest.py": AVAILABLE["words.py"],
        "tests/test_name.py": "",
    }
    calls = [{"name": "write", "arguments": {"file_path": path, "contents": text}} for path, text in files.items()]
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"calls": calls}, {"text": "Done."}]))
    words = ["tasks", "install", str(library), "--out", str(tmp_path / "out"), "--policy", f"scripted:{script}"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "try 1: wrote conftest.py" in output and "kept; of 4 goals 0 worked before, 4 work now" in output
    kept_test = tmp_path / "out" / "repository" / "tests" / "test_name.py"
    assert kept_test.read_text() == BROKEN["tests/test_name.py"], "changes to tests are undone"
