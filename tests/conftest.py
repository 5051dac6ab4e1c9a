"""What tests all over share: one tiny run of the whole recipe, made once a session; sandboxes; devices; a Docker Engine; how
hypothesis works."""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes examples slow, not wrong.
settings.register_profile("composer_nb", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("composer_nb")

ROOT = Path(__file__).resolve().parents[1]
# Ranks and kernels are processes of their own; they find the package whether or not it is installed.
# A thread each: several processes share the machine, and sums of floats depend on how they are split.
os.environ["OMP_NUM_THREADS"] = "1"
# Kernels in Triton run in its interpreter, which is decided for a process before it imports Triton. Tests on a GPU: 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

TINY: dict[str, Any] = {
    **{"data.demonstrations": 128, "data.mistaken_demonstrations": 48, "data.rl_tasks": 64, "data.heldout_tasks": 16},
    **{"data.structure_tasks": 4, "data.tune_tasks": 8, "eval.samples": 2, "limits.tokens": 384},
    **{"midtrain.steps": 30, "midtrain.tokens": 512, "sft.steps": 6, "sft.tokens": 1024},
    **{"rl.steps": 3, "rl.prompts": 4, "rl.group": 4, "rl.checkpoint_every": 2, "rl.evaluate_every": 2},
    "services.on": False,
    "rl.rehearsal": 0.0,  # the gradient that is logged is of the rollouts alone
    # So small a model solves nothing. Other terms make its rewards differ, so that there is something to train on.
    "rl.gate": False,
    "reward.weights": {"solved": 1.0, "invalid_calls": -0.5, "unfinished": -0.3},
}
"""Settings of a run that learns next to nothing and goes through everything."""
MICRO: dict[str, Any] = {
    "data.code": str(ROOT / "composer_nb" / "harness"),  # read sooner than the standard library
    "data.level": "functions", "data.rl_tasks": 40, "data.heldout_tasks": 12, "data.structure_tasks": 4,
    "data.tune_tasks": 8, "data.demonstrations": 32, "data.mistaken_demonstrations": 16,
    "midtrain.steps": 10, "midtrain.tokens": 256, "sft.steps": 2, "sft.tokens": 256, "services.on": False,
    "rl.steps": 4, "rl.prompts": 2, "rl.group": 4, "rl.checkpoint_every": 1, "rl.evaluate_every": 3,
    "eval.samples": 1, "limits.tokens": 144, "limits.turn_tokens": 24, "model.num_hidden_layers": 2,
    "reward.weights": {"solved": 1.0, "invalid_calls": -0.5, "unfinished": -0.3},
}  # fmt: skip
"""Settings of a shorter one, on two ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with whole runs come first, then those with many tests: several processes take a file at a time, and a long one at
    the end would leave all but one of them without work."""
    whole_runs = Counter(item.path for item in items if item.get_closest_marker("whole"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-whole_runs[item.path], -tests[item.path], item.path))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Return each device that a test runs on: a CPU everywhere, and a GPU where there is one."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU; the same test ran on the CPU")
    return str(request.param)


def shared_run(factory: pytest.TempPathFactory, worker_id: str, name: str, values: dict[str, Any]) -> Any:
    """Return a finished run that parallel test processes share: the first one that asks makes it."""
    from composer_nb.trainer.recipe.launch import start_or_resume
    from composer_nb.trainer.records.rundir import open_run
    from composer_nb.trainer.settings import Settings, override

    shared = factory.getbasetemp() if worker_id == "master" else factory.getbasetemp().parent
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path := shared / f"{name}-runs" / name).exists():
            if (run := open_run(path)).finished("numerics") is not None:
                return run  # a launcher would write its log, while other processes compare what is there
            return start_or_resume(path, say=lambda line: None)
        settings = override(Settings(), values)
        return start_or_resume(None, settings, runs=shared / f"{name}-runs", name=name, say=lambda line: None)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Any:
    """Return a finished run to be read only; `copy_of` gives one to change."""
    return shared_run(tmp_path_factory, worker_id, "tiny", TINY)


@pytest.fixture(scope="session")
def micro_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Any:
    """Return a finished run that nobody disturbed, to be read only or forked."""
    return shared_run(tmp_path_factory, worker_id, "micro", MICRO)


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[Any]:
    """Return an executor, which calls functions in sandboxes."""
    from composer_nb.harness.sandbox.calls import SandboxExecutor

    with SandboxExecutor() as executor:
        yield executor


@pytest.fixture(scope="session")
def backend() -> Iterator[Any]:
    """Return a backend of sandboxes with a workspace: bubblewrap."""
    from composer_nb.harness.sandbox.bwrap import BwrapBackend

    with BwrapBackend() as bwrap:
        yield bwrap


@pytest.fixture(scope="session")
def docker_client() -> Iterator[Any]:
    """Connect to the Docker Engine. Without one, tests are skipped on a laptop and fail in CI, which starts one."""
    from composer_nb.harness.sandbox.engine import connect
    from composer_nb.harness.sandbox.errors import SandboxUnavailable

    try:
        client = connect()
    except SandboxUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{error} (make test starts no Docker Engine)")
    yield client
    client.close()


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Any], Any]:
    """Return a function that copies a run to `runs/tour` in a temporary directory."""
    from composer_nb.trainer.records.rundir import RunDir

    def copy_file(source: str, target: str) -> None:
        # Nobody changes weights in place, so they need not be copied.
        (os.link if source.endswith("model.safetensors") or "/checkpoints/" in source else shutil.copy2)(source, target)

    def copy(run: Any) -> RunDir:
        runs = tmp_path / "runs"
        # All is in run.db itself; what lies beside it comes and goes with the other workers' readers.
        beside = shutil.ignore_patterns("run.db-*")
        shutil.copytree(run.path, runs / "tour-copy", copy_function=copy_file, ignore=beside)
        (runs / "tour").symlink_to("tour-copy")
        return RunDir(runs / "tour-copy")

    return copy
