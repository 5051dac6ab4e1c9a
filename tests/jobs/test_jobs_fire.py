"""The runner under fire: real processes, real kills, a disk that is really full. Nothing corrupt, nothing left, no lie."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import yaml
from test_jobs import notebook

from composer_nb.harness.sandbox.reap import owned_directory
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.jobs.notebook import JobFailed, run_notebook

ROOT = Path(__file__).resolve().parents[2]
STATES = {"pending", "running", "completed", "failed", "interrupted", "timed_out", "lost"}
FINAL = STATES - {"pending", "running"}


class Bench:
    """A folder to run job files in, with a package that nobody edits meanwhile. It finds every process that was started
    from it by a variable of its own, and so knows nothing of how the runner does that."""

    def __init__(self, folder: Path, like: "Bench | None" = None) -> None:
        self.folder = folder
        self.package, self.tag = (like.package, like.tag) if like else (folder / "package", uuid.uuid4().hex)
        if like is None:
            shutil.copytree(
                ROOT / "composer_nb", self.package / "composer_nb", ignore=shutil.ignore_patterns("__pycache__")
            )
        self.runs = folder / "runs"
        inherited = like.environment if like else os.environ
        self.environment = inherited | {"PYTHONPATH": str(self.package), "BENCH": self.tag, "OMP_NUM_THREADS": "1"}

    def job(self, nodes: dict[str, Any], *, parallel: int = 1) -> Path:
        path = self.folder / "job.yml"
        path.write_text(yaml.safe_dump({"name": "job", "parallel": parallel, "nodes": nodes}, sort_keys=False))
        return path

    def notebook(self, name: str, *cells: str, parameters: str = "steps: int = 3") -> str:
        notebook(self.folder / f"{name}.ipynb", *cells, parameters=parameters)
        return f"{name}.ipynb"

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "composer_nb.cli", "jobs"]
        command += [words[0], "--runs", str(self.runs), *words[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=self.environment, cwd=self.folder, **pipes, **more)

    def run(self, *words: str, **more: Any) -> tuple[int, str]:
        process = self.start(*words, **more)
        output, _ = process.communicate(timeout=patience(600))
        print(output)
        return process.returncode, output

    def status(self) -> dict[str, Any]:
        code, output = self.run("status", "--json")
        assert code == 0
        return json.loads(output)

    def states(self) -> dict[str, str]:
        return {name: node["state"] for name, node in self.status()["nodes"].items()}

    def attempts(self) -> dict[str, int]:
        return {name: node["attempt"] for name, node in self.status()["nodes"].items()}

    def attempt(self, node: str, number: int = 1) -> Path:
        return self.runs / "job" / "nodes" / node / str(number)

    def record(self, node: str, number: int = 1) -> dict[str, Any]:
        return json.loads((self.attempt(node, number) / "run.json").read_text())

    def cells(self, node: str, number: int = 1) -> list[str]:
        (path,) = self.attempt(node, number).glob("*.ipynb")
        return [c.metadata.papermill["status"] for c in nbformat.read(path, 4).cells if c.cell_type == "code"]

    def alive(self) -> list[psutil.Process]:
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("BENCH") == self.tag and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except (psutil.Error, OSError):
                continue
        return processes

    def wait(self, until: Callable[[], Any], seconds: float = 90) -> None:
        deadline = time.monotonic() + patience(seconds)
        while not until():
            assert time.monotonic() < deadline, [(p, p.cmdline()) for p in self.alive()]
            time.sleep(0.1)

    def nothing_is_left(self, seconds: float = 0) -> None:
        self.wait(lambda: not self.alive(), seconds)

    def everything_is_whole(self) -> None:
        """Each file can be read, none is half written, and each state is one that a file may end with."""
        for path in self.runs.rglob("*"):
            assert path.suffix != ".part" and path.name != ".reserve", path
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".ipynb":
                nbformat.validate(nbformat.read(path, 4))
        for path in self.runs.glob("job/nodes/*/*/run.json"):
            assert json.loads(path.read_text())["state"] in FINAL, path
        assert "running" not in self.states().values()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    rig = Bench(tmp_path)
    yield rig
    for process in rig.alive():
        process.kill()


SLEEP = "import time\nopen(flag, 'w')\nprint('asleep', flush=True)\nif wait: time.sleep(600)"
DETACHED = "import subprocess\nsubprocess.run(['setsid', 'sh', '-c', 'sleep 600 & sleep 600 &'])"
LEASED = """
import os, subprocess
mine = {**os.environ, 'COMPOSER_NB_DIRECTORY': os.environ['COMPOSER_NB_RUN']}
server = subprocess.Popen(['sleep', '600'], env=mine, start_new_session=True).pid
"""
WAITING = "flag: str = ''\nwait: bool = True"


@pytest.mark.slow
def test_ten_at_once_each_with_a_fate_of_its_own(bench: Bench, tmp_path: Path):
    on_first_run = "from pathlib import Path\nfirst = not Path(flag).exists()\nPath(flag).touch()\nimport os\n"
    flag = "flag: str = ''"
    kill_kernel, kill_parent = ("if first: os.kill(os.getpid(), 9)", "if first: os.kill(os.getppid(), 9)")
    nodes = {
        "good": {"notebook": bench.notebook("good", "total = steps * 2\nword = 'many'"), "parameters": {"steps": 4}}
        | {"outputs": {"total": "total", "word": "word"}},
        "raises": {"notebook": bench.notebook("raises", "assert steps > 3", "'never'"), "retries": 2},
        "cell": {"notebook": bench.notebook("cell", "import time; time.sleep(600)", "1"), "cell_timeout_s": 1},
        "slow": {"notebook": bench.notebook("slow", "import time; time.sleep(600)", "1"), "timeout_s": 20},
        "dies": {"notebook": bench.notebook("dies", "1", "import os; os.kill(os.getpid(), 9)", "2"), "retries": 1},
        "dies_once": {"notebook": bench.notebook("once", on_first_run + kill_kernel, parameters=flag)},
        "shot_once": {
            "notebook": bench.notebook(
                "shot", on_first_run + kill_parent, "import time; time.sleep(2)", parameters=flag
            )
        },
        "orphans": {"notebook": bench.notebook("orphans", DETACHED)},
        "leased": {"notebook": bench.notebook("leased", LEASED), "outputs": {"pid": "server"}},
        "tenth": {"notebook": "good.ipynb", "outputs": {"total": "total"}},
        "heir": {"notebook": bench.notebook("heir", "import os; os.kill(steps, 0)")}
        | {"parameters": {"steps": "${leased.pid}"}},
        "blocked": {"notebook": "good.ipynb", "after": ["raises"]},
        "mistyped": {"notebook": "good.ipynb", "parameters": {"steps": "${good.word}"}},
        "typed": {"notebook": "good.ipynb", "parameters": {"steps": "${good.total}"}, "outputs": {"total": "total"}},
    }
    for name in ("dies_once", "shot_once"):
        nodes[name]["parameters"] = {"flag": str(tmp_path / name)}
    job = bench.job(nodes, parallel=10)
    code, _ = bench.run("run", str(job))
    bench.nothing_is_left()
    bench.everything_is_whole()
    assert code == 1
    assert bench.states() == {
        **dict.fromkeys(nodes, "completed"),
        **{"raises": "failed", "mistyped": "failed", "cell": "timed_out", "slow": "timed_out", "dies": "lost"},
        "blocked": "pending",
    }
    not_once = {"dies": 2, "dies_once": 2, "shot_once": 2, "blocked": 0, "mistyped": 0}
    assert bench.attempts() == {**dict.fromkeys(nodes, 1), **not_once}
    assert bench.record("raises")["error"].startswith("AssertionError")
    assert bench.cells("raises")[-2:] == ["failed", "pending"]
    assert bench.cells("cell")[-2:] == ["timed_out", "pending"]
    assert bench.cells("slow")[-1] == "pending" and "timeout_s" in bench.record("slow")["error"]
    assert bench.cells("dies", 2)[-3:] == ["completed", "lost", "pending"]
    assert "signal 9" in bench.record("dies")["error"]
    assert bench.record("shot_once")["state"] == "lost" and "lost" in bench.cells("shot_once")
    assert [ended["name"] for ended in bench.record("orphans")["ended_processes"]] == ["sleep", "sleep"]
    leased = bench.record("leased")
    assert [process["name"] for process in leased["leased_processes"]] == ["sleep"]
    assert not leased["ended_processes"] and not psutil.pid_exists(leased["outputs"]["pid"])
    status = bench.status()["nodes"]
    assert "steps='many' must be of type int" in status["mistyped"]["error"]
    assert status["blocked"]["error"] == "waits for raises"
    assert status["typed"]["outputs"] == {"total": 16}

    before = bench.attempts()
    code, _ = bench.run("run", str(job), "--resume", "--set", "raises:steps=4", "--set", "mistyped:steps=1")
    bench.nothing_is_left()
    completed = {name for name, state in bench.states().items() if state == "completed"}
    assert completed == set(nodes) - {"cell", "slow", "dies"} and code == 124
    assert bench.attempts() == {**before, **{"raises": 2, "cell": 2, "slow": 2, "dies": 4, "blocked": 1, "mistyped": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("all_processes", [False, True], ids=["the runner", "runner and notebooks"])
def test_sigkill_leaves_nothing_running_and_resume_repeats_what_was_cut_off(
    bench: Bench, tmp_path, all_processes: bool
):
    flag = tmp_path / "flag"
    waiting = {"notebook": bench.notebook("waits", DETACHED, SLEEP, "1", parameters=WAITING)}
    nodes = {
        "done": {"notebook": bench.notebook("done", "total = steps"), "outputs": {"total": "total"}},
        "cut": {**waiting, "parameters": {"flag": str(flag)}, "after": ["done"]},
        "later": {"notebook": "done.ipynb", "after": ["cut"]},
    }
    job = bench.job(nodes)
    runner = bench.start("run", str(job), "--set", "done:steps=5")  # which --resume goes on with
    bench.wait(flag.exists)
    time.sleep(3)  # output is saved every second
    shot = [p for p in bench.alive() if all_processes and "composer_nb.jobs.notebook" in p.cmdline()]
    assert len(shot) == all_processes
    for process in (psutil.Process(runner.pid), *shot):
        process.kill()
    runner.wait()
    bench.nothing_is_left(60)
    end_state = "lost" if all_processes else "interrupted"
    status = bench.status()
    assert (status["state"], status["alive"]) == ("lost", False)
    assert bench.states() == {"done": "completed", "cut": end_state, "later": "pending"}

    code, output = bench.run("run", str(job), "--resume", "--set", "cut:wait=false")
    assert code == 0 and "done: kept" in output
    bench.nothing_is_left()
    bench.everything_is_whole()
    assert bench.attempts() == {"done": 1, "cut": 2, "later": 1}
    assert bench.record("cut")["state"] == end_state and bench.cells("cut")[-2:] == [end_state, "pending"]
    assert "asleep\n" in (bench.attempt("cut") / "log.txt").read_text()


def test_processes_without_a_mark_end_with_the_run(tmp_path: Path):
    """A program that cleared its environment; one that lives for something else is spared."""
    bare = "env -i sleep 600 & echo $!; COMPOSER_NB_DIRECTORY=other sleep 600 & echo $!; wait"
    record: dict[str, Any] = {}
    with owned_directory(tmp_path, record):
        attempt = subprocess.Popen(["sh", "-c", bare], stdout=subprocess.PIPE, text=True)
        assert attempt.stdout is not None
        stray_process, service_process = (psutil.Process(int(attempt.stdout.readline())) for _ in range(2))
        attempt.kill()
        attempt.wait()
    try:
        assert not stray_process.is_running() and service_process.is_running()
        assert [process["pid"] for process in record["leased_processes"]] == [service_process.pid]
    finally:
        service_process.kill()
        service_process.wait()


@pytest.mark.slow
def test_a_file_that_may_not_grow(bench: Bench):
    """A notebook outgrows its limit: nothing is corrupt, and everything is reported."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    grows = {
        "notebook": bench.notebook("grows", "'small'", *["print('x' * steps)"] * 2),
        "parameters": {"steps": 700_000},
    }
    job = bench.job({"grows": grows, "later": {"notebook": "grows.ipynb", "after": ["grows"]}})
    code, output = bench.run("run", str(job), preexec_fn=limit)
    bench.nothing_is_left()
    assert code == 1 and "--resume" in output
    assert bench.states() == {"grows": "failed", "later": "pending"}
    bench.everything_is_whole()
    record = bench.record("grows")
    assert record["state"] == "failed" and "OSError" in record["error"]
    assert "completed" in bench.cells("grows")


@pytest.mark.slow
def test_what_was_damaged_or_changed_is_repeated_and_nothing_else(bench: Bench):
    book = bench.notebook("n", "total = steps")
    nodes = {
        "a": {"notebook": book, "outputs": {"total": "total"}},
        "b": {"notebook": book, "parameters": {"steps": "${a.total}"}},
        "c": {"notebook": book},
        "d": {"notebook": book, "parameters": {"steps": 5}},
    }
    job = bench.job(nodes, parallel=2)
    assert bench.run("run", str(job))[0] == 0
    (path,) = bench.attempt("a").glob("*.ipynb")
    path.write_bytes(path.read_bytes()[:-20])  # as a bad disk would
    (bench.attempt("c") / "run.json").write_text("{")
    (copy,) = (bench.runs / "job" / "notebooks").rglob("n.ipynb")
    copy.write_text("")
    code, output = bench.run("run", str(job), "--resume")
    assert code == 0 and "a: attempt 1 is damaged" in output
    assert bench.attempts() == {"a": 2, "b": 2, "c": 2, "d": 1}
    assert bench.record("a")["state"] == bench.record("c")["state"] == "lost"

    (bench.runs / "job" / "run.json").write_text("")  # only a summary
    assert set(bench.states().values()) == {"completed"}
    bench.notebook("n", "total = steps  # a comment is a change too")
    assert bench.run("run", str(job), "--resume", "--set", "d:steps=6")[0] == 0
    assert bench.attempts() == {"a": 3, "b": 3, "c": 3, "d": 2}
    with (bench.package / "composer_nb" / "__init__.py").open("a") as module:
        module.write("# changed\n")
    assert bench.run("run", str(job), "--resume", "--set", "d:steps=6")[0] == 0
    assert bench.attempts() == {"a": 4, "b": 4, "c": 4, "d": 3}
    bench.nothing_is_left()


@pytest.mark.slow
def test_a_second_runner_and_the_end_of_a_cell_that_does_not_heed_an_interrupt(bench: Bench, tmp_path: Path):
    flag = tmp_path / "flag"
    stubborn = (
        "import time\nfrom pathlib import Path\nprint('asleep', flush=True)\nPath(flag).touch()\nwhile True:\n"
        "    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        pass"
    )
    book = bench.notebook("waits", DETACHED, stubborn, "1", parameters=WAITING)
    node = {"notebook": book, "parameters": {"flag": str(flag)}}
    job = bench.job({"waits": node, "later": {"notebook": "waits.ipynb", "after": ["waits"]}})
    runner = bench.start("run", str(job))
    bench.wait(flag.exists)
    code, output = bench.run("run", str(job), "--resume")
    assert code == 2 and "is being run already" in output
    assert bench.states() == {"waits": "running", "later": "pending"} and bench.status()["alive"]
    assert "asleep\n" in bench.run("log", "job", "waits")[1]
    code, output = bench.run("cancel", "job")
    assert code == 0 and "interrupted" in output
    assert runner.wait(timeout=patience(60)) == 130
    bench.nothing_is_left()
    bench.everything_is_whole()
    assert bench.states() == {"waits": "interrupted", "later": "pending"}
    assert bench.cells("waits")[-2:] == ["interrupted", "pending"]


def test_files_of_the_users_folder_do_not_stand_in_for_modules(bench: Bench):
    """The run is started from a folder with a random.py, which a notebook beside it may import all the same."""
    (bench.folder / "random.py").write_text("def rows(count):\n    return list(range(count))\n")
    (bench.folder / "ours.py").write_text("ROWS = 3\n")
    code, output = bench.run("run", str(bench.job({"a": {"notebook": bench.notebook("n", "import ours; ours.ROWS")}})))
    assert code == 0 and bench.states() == {"a": "completed"}, output


def test_a_process_that_never_began_has_failed_with_its_last_words(bench: Bench):
    """It would end so each time, so it is not `lost`, which schedulers repeat."""
    (bench.package / "composer_nb" / "jobs" / "notebook.py").write_text("raise ImportError('no half of it')\n")
    code, output = bench.run("run", str(bench.job({"a": {"notebook": bench.notebook("n", "1")}})))
    assert code == 1 and bench.states() == {"a": "failed"} and bench.attempts() == {"a": 1}
    assert "its process ended before the notebook began: " in output and "no half of it (" in output
    assert bench.record("a")["state"] == "failed" and "jobs log" in output and "--resume" in output


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0, which ends the notebook before its last cell, in cell [2]"),
        ("import os; os._exit(0)", "the kernel died (exit status 0)"),
        ("total = steps\nassert total == 4", "AssertionError: `assert total == 4` does not hold, in cell [2], line 2"),
        (
            "def f():\n    raise ValueError('odd')\n\nf()",
            "ValueError: odd, in cell [2], line 2: `raise ValueError('odd')`",
        ),
        ("a b", "SyntaxError: invalid syntax"),
        ("import time; time.sleep(600)", "a cell took longer than 1 s (cell_timeout_s)"),
    ],
)
def test_a_notebook_that_did_not_run_to_its_end_is_not_completed_and_says_where(tmp_path: Path, cell: str, error: str):
    source, output = notebook(tmp_path / "n.ipynb", cell, "print('after')"), tmp_path / "out" / "o.ipynb"
    with pytest.raises(JobFailed) as caught:
        run_notebook(source, output, cell_timeout_s=1 if "sleep" in cell else None)
    assert str(caught.value).startswith(error) and str(output) in str(caught.value)
    result = json.loads(output.with_name("run.json").read_text())
    assert result["state"] in ("failed", "lost", "timed_out") and (result["cells"], result["cells_run"]) == (3, 2)
    assert result["cell_states"] == {"completed": 1, result["state"]: 1, "pending": 1}
