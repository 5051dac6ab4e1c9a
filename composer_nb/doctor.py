"""`composer-nb doctor`: what this machine has, what a missing part costs, and the command that fixes it.

Covers: interpreter, machine, torch and its device, the sandbox (one is started), optional programs.
Does not cover: speed (`make bench`) and the strength of a sandbox (`composer-nb sandbox check`).

torch and the harness are imported inside the checks, so that a broken installation is a finding too.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from composer_nb.trainer.services.machine import available_cores, available_memory

GIB = 2**30
LEAST_MEMORY_GIB = 4.0  # a trainer, a notebook kernel and a few sandboxes side by side
LEAST_DISK_GIB = 5.0  # a few runs with their checkpoints and rollouts
INSTALL = "make setup"
PIP = ".venv/bin/python -m pip"
MEND_BUBBLEWRAP = "scripts/system_packages"
# Kernel settings: name, the value that forbids unprivileged sandboxes, one that allows them.
USER_NAMESPACES = (
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "15000"),
)
# Options of `docker run` for the seccomp filter, the AppArmor profile and the masks on /proc that forbid bubblewrap to work.
IN_CONTAINER = " ".join(f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
REQUIRED = {"python", "torch", "bubblewrap", "sandbox", "jupyter kernel"}
NO_SANDBOX = "no sandbox can be made, so no agent can work and nothing is graded"
# Cost of a missing part, and the command that fixes it.
ADVICE = {
    "python": ("nothing runs: Python 3.11 or newer is needed", "make clean setup PYTHON=python3.11"),
    "platform": (NO_SANDBOX, "run it on Linux, also in a container or a virtual machine"),
    "cores": ("sandboxes and training take turns: about twice the time", "give the machine or the container two cores"),
    "memory": (
        "training beside a notebook kernel and sandboxes may be killed for lack of memory",
        f"free memory, or give the container at least {LEAST_MEMORY_GIB:g} GiB",
    ),
    "disk": ("checkpoints and rollouts of a few runs may not fit", "remove old directories under runs/"),
    "torch": ("nothing can be trained or sampled; only the harness works", INSTALL),
    "triton": ("the slower torch references run instead of kernels", f"{PIP} install -c constraints.txt triton"),
    "bubblewrap": (NO_SANDBOX, MEND_BUBBLEWRAP),
    "jupyter kernel": (
        "notebooks, and so `make demo`, run in another interpreter or not at all",
        f"{sys.executable} -m ipykernel install --sys-prefix",
    ),
    "git": ("runs do not record their commit", "scripts/system_packages git"),
    "ray": ("one machine and one process; the tour and all notebooks run without it", f"{PIP} install ray"),
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    `value` is what is there. If `ok` is false, `cost` says what does not work or is slower, and `mend` is the command that
    fixes it. `required`: the tour cannot run without it.
    """

    name: str
    value: str
    ok: bool
    cost: str = ""
    mend: str = ""
    required: bool = False


class TorchFacts(NamedTuple):
    """Facts about the installed torch; `cuda_build` is the CUDA version of its build, if any."""

    version: str
    cuda_build: str | None
    gpus: tuple[str, ...]
    threads: int

    @property
    def device(self) -> str:
        return f"{self.version} on {', '.join(self.gpus) or 'CPU'}"


def diagnose() -> list[CheckResult]:
    """Run all checks; takes a few seconds, most of them to import torch."""
    cores, torch, driver = available_cores(), probe_torch(), driver_gpus()
    facts = None if isinstance(torch, str) else torch
    memory, disk = available_memory() / GIB, shutil.disk_usage(Path.cwd()).free / GIB
    triton, ray = installed("triton"), installed("ray")
    bubblewrap, git = output_of("bwrap", "--version"), output_of("git", "--version")
    return [
        result("python", f"{platform.python_version()} at {sys.executable}", sys.version_info >= (3, 11)),
        result("platform", f"{platform.system()} {platform.release()} {platform.machine()}", sys.platform == "linux"),
        result("cores", f"{cores:g}", cores >= 2),
        result("memory", f"{memory:.1f} GiB available", memory >= LEAST_MEMORY_GIB),
        result("disk", f"{disk:.1f} GiB free", disk >= LEAST_DISK_GIB),
        result("torch", facts.device if facts else f"cannot be imported: {torch}", facts is not None),
        check_gpu(facts, driver),
        check_threads(facts, cores),
        result("triton", triton or "not installed", triton is not None or not (facts and facts.gpus)),
        result("bubblewrap", f"{bubblewrap or 'not found'} at {shutil.which('bwrap')}", bubblewrap is not None),
        check_sandbox(),
        check_tools(),
        check_kernel(),
        result("git", git or "not found", git is not None),
        result("ray", ray or "not installed", ray is not None),
    ]


def result(name: str, value: str, ok: bool, cost: str = "", mend: str = "") -> CheckResult:
    """Return a result with its cost and command, those of ADVICE unless given."""
    if not cost:
        cost, mend = ADVICE.get(name, ("", ""))
    return CheckResult(name, value, ok, cost, mend, required=name in REQUIRED)


def healthy(results: Iterable[CheckResult]) -> bool:
    """Return whether all required checks passed."""
    return all(check.ok for check in results if check.required)


def as_table(results: Sequence[CheckResult]) -> Table:
    """Return the results as a table: ok, `without` for optional parts, `BROKEN` for required ones."""
    table = Table(title="composer_nb doctor", title_justify="left")
    for heading in ("", "what", "found", "what that costs, and what mends it"):
        table.add_column(heading, overflow="fold")
    for check in results:
        mark = "[green]ok" if check.ok else "[bold red]BROKEN" if check.required else "[yellow]without"
        advice = "" if check.ok else f"{check.cost}\n-> {check.mend}"
        # Text from the machine may hold square brackets, which rich would read as markup.
        table.add_row(f"{mark}[/]", *map(escape, (check.name, check.value, advice)))
    return table


def device_line() -> str:
    """Return the device that torch will use, with a second line if the driver sees a GPU that torch cannot use."""
    torch, driver = probe_torch(), driver_gpus()
    if isinstance(torch, str):
        return f"torch cannot be imported: {torch}"
    gpu, line = check_gpu(torch, driver), f"torch {torch.device}"
    return line if gpu.ok or not driver else f"{line}\nwarning: {gpu.value}; {gpu.cost}; to mend: {gpu.mend}"


def probe_torch() -> TorchFacts | str:
    """Return facts about torch, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        return str(error)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(map(torch.cuda.get_device_name, range(count)))
    return TorchFacts(torch.__version__, torch.version.cuda, gpus, torch.get_num_threads())


def driver_gpus() -> tuple[str, ...]:
    """Return the GPUs that the NVIDIA driver lists; empty without a working driver."""
    listing = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or ""
    return tuple(line.strip() for line in listing.splitlines() if line.strip())


def output_of(*command: str) -> str | None:
    """Return the output of a program; None if it is missing, fails or takes over ten seconds."""
    try:
        process = subprocess.run(command, stdin=DEVNULL, capture_output=True, check=True, text=True, timeout=10)
        return process.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def check_gpu(torch: TorchFacts | None, driver: tuple[str, ...]) -> CheckResult:
    """Distinguish three ways to lack a GPU: none, a CPU build of torch, or CUDA that does not start."""
    if torch and torch.gpus:
        return result("gpu", f"{', '.join(torch.gpus)} (CUDA {torch.cuda_build})", True)
    if not driver:
        cost = "small models only, on the CPU; the code path is the same"
        return result("gpu", "none", False, cost, "nothing to mend, unless there is one: then install its driver")
    if torch is None:
        fault, mend = "torch cannot be imported", INSTALL
    elif torch.cuda_build:
        fault = f"torch cannot start CUDA {torch.cuda_build}"
        mend = f"unset CUDA_VISIBLE_DEVICES, or update the driver to one for CUDA {torch.cuda_build}"
    else:
        # --isolated: without the machine's own pip settings, which offered the build that has no CUDA.
        fault, pin = "torch is a build without CUDA", torch.version.partition("+")[0]
        mend = f"{PIP} --isolated install --force-reinstall -c constraints.txt torch=={pin}"
    finding = f"the driver sees {', '.join(driver)}, but {fault}"
    return result("gpu", finding, False, "everything runs on the CPU", mend)


def check_threads(torch: TorchFacts | None, cores: float) -> CheckResult:
    """Check the number of threads: more threads than cores wait for each other."""
    threads = torch.threads if torch else 0
    finding = f"torch uses {threads or 'no'}; OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    cost = f"threads wait for each other: {threads} of them on {cores:g} cores"
    return result("threads", finding, threads <= max(1, cores), cost, f"export OMP_NUM_THREADS={max(1, int(cores))}")


def check_sandbox() -> CheckResult:
    """Start one sandbox and run one call in it; an installed program may still lack permission."""
    from composer_nb.harness.sandbox.calls import SandboxExecutor
    from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
    from composer_nb.harness.sandbox.requests import CallRequest

    source = "def add(a, b):\n    return a + b\n"
    request = CallRequest(files={"f.py": source}, module="f", function="add", arguments=("(19, 23)",))
    start, ok = time.perf_counter(), False
    try:
        with SandboxExecutor(run_id="doctor") as sandboxes:
            outcome = sandboxes.run([request])[0][0]
            missing = [name for name, enforced in sandboxes.capabilities().enforced.items() if not enforced]
        ok = (outcome.status, outcome.text) == ("returned", "42")
        limits = f"not enforced: {', '.join(missing)}" if missing else "every limit enforced"
        finding = f"works, {time.perf_counter() - start:.1f} s to start; {limits}" if ok else f"answered {outcome}"
    except (SandboxUnavailable, SandboxFailure) as error:
        finding = str(error)
    return result("sandbox", finding, ok, "no agent can work and nothing is graded", mend_sandbox())


def mend_sandbox() -> str:
    """Return the command most likely to let bubblewrap start, from kernel settings known to forbid it."""
    if shutil.which("bwrap") is None:
        return MEND_BUBBLEWRAP
    for name, forbidding, allowing in USER_NAMESPACES:
        file = Path("/proc/sys", name.replace(".", "/"))
        if file.is_file() and file.read_text().strip() == forbidding:
            return f"sudo sysctl -w {name}={allowing}"
    return f"in a container: start it with {IN_CONTAINER}"


def check_tools() -> CheckResult:
    """Check the programs that the product's tools run in a sandbox, and pytest for agents and grading."""
    from composer_nb.harness.sandbox.toolchain import PACKAGES, host_programs

    present = set(host_programs()) | ({"pytest"} if installed("pytest") else set())
    missing = sorted({*PACKAGES, "pytest"} - present)
    cost = f"no {' and no '.join(missing)} in sandboxes, so agents lack tools or cannot run tests"
    finding = ", ".join(sorted(present)) or "none"
    return result("agent tools", finding, not missing, cost, "pip install -e '.[agent]'")


def check_kernel() -> CheckResult:
    """Check that a notebook's `python3` kernel is this interpreter."""
    command = "not installed"
    if importlib.util.find_spec("jupyter_client") is not None:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

        try:
            command = str(KernelSpecManager().get_kernel_spec("python3").argv[0])
        except NoSuchKernel:
            command = "no kernel named python3"
    # Jupyter runs a bare `python` of a kernel as the interpreter that it runs on itself.
    bare = {"python", "python3", f"python3.{sys.version_info.minor}"}
    same = command in bare or Path(command).parent == Path(sys.executable).parent
    return result("jupyter kernel", "this interpreter" if same else command, same)


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
