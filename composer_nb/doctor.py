"""`composer-nb doctor`: what this machine has, what being without the rest costs, the one line that mends it.

Covers: interpreter, machine, torch and its device, the sandbox (one is really started), optional programs.
Does not cover: speed (`composer-nb bench`) and what a sandbox withstands (`composer-nb sandbox check`).

torch and the harness are imported where they are asked about, so that a broken installation is a finding too.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from composer_nb.machine import available_cores, available_memory

GIB = 2**30
LEAST_MEMORY_GIB = 4.0  # a trainer, a notebook kernel and a few sandboxes side by side
LEAST_DISK_GIB = 5.0  # a few runs with their checkpoints and rollouts
INSTALL = "make setup"
PIP = ".venv/bin/python -m pip"
NO_GPU = "none"
MEND_BUBBLEWRAP = "scripts/system_packages"
# Kernel settings: name, the value that forbids unprivileged sandboxes, one that allows them.
USER_NAMESPACES = (
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("user.max_user_namespaces", "0", "15000"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    `found` is what is there. Where `ok` is false, `cost` says what does not work or is slower, and `mend` is
    the one line that changes it. `required`: the tour cannot run without it; the rest is merely missed.
    """

    name: str
    found: str
    ok: bool
    cost: str = ""
    mend: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What the installed torch says of itself; `cuda_build` is the CUDA version it was built for, if any."""

    version: str
    cuda_build: str | None
    gpus: tuple[str, ...]
    threads: int


def diagnose() -> list[Finding]:
    """Look at everything; takes a few seconds, most of them for importing torch."""
    cores, torch, driver = available_cores(), probe_torch(), driver_gpus()
    facts = torch if isinstance(torch, TorchFacts) else None
    return [
        check_python(sys.version_info[:3]),
        check_platform(platform.system()),
        check_cores(cores),
        check_memory(available_memory()),
        check_disk(Path.cwd()),
        check_torch(torch),
        check_gpu(facts, driver),
        check_threads(facts, cores),
        check_triton(facts),
        check_bubblewrap(),
        check_sandbox(),
        check_tools(),
        check_kernel(),
        check_git(),
        check_ray(),
    ]


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether everything that is required was found in order."""
    return all(finding.ok for finding in findings if finding.required)


def as_table(findings: Sequence[Finding]) -> Table:
    """The findings as a table: ok, `without` for what is merely missed, `BROKEN` for what is required."""
    table = Table(title="composer_nb doctor", title_justify="left")
    for heading in ("", "what", "found", "what that costs, and what mends it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("without", "yellow")
        if finding.required and not finding.ok:
            mark, style = "BROKEN", "bold red"
        advice = "" if finding.ok else f"{finding.cost}\n-> {finding.mend}"
        # Text from the machine may hold square brackets, which rich would read as markup.
        table.add_row(f"[{style}]{mark}[/]", *map(escape, (finding.name, finding.found, advice)))
    return table


def device_line() -> str:
    """What torch will run on; a second line warns where the driver sees a GPU that torch cannot use."""
    torch = probe_torch()
    if isinstance(torch, str):
        return f"torch cannot be imported: {torch}"
    gpu, line = check_gpu(torch, driver_gpus()), f"torch {device_of(torch)}"
    warning = f"\nwarning: {gpu.found}; {gpu.cost}; to mend: {gpu.mend}"
    return line if gpu.ok or gpu.found == NO_GPU else line + warning


def probe_torch() -> TorchFacts | str:
    """What the installed torch says, or why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        return str(error)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return TorchFacts(
        version=torch.__version__,
        cuda_build=torch.version.cuda,
        gpus=tuple(torch.cuda.get_device_name(index) for index in gpus),
        threads=torch.get_num_threads(),
    )


def driver_gpus() -> tuple[str, ...]:
    """The GPUs that the NVIDIA driver lists, without asking torch; empty where there is no working driver."""
    listing = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return tuple(line.strip() for line in (listing or "").splitlines() if line.strip())


def output_of(*command: str) -> str | None:
    """What a program prints, or None where it is missing, fails or takes over ten seconds."""
    try:
        return subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def check_python(version: tuple[int, ...]) -> Finding:
    return Finding(
        name="python",
        found=f"{'.'.join(map(str, version))} at {sys.executable}",
        ok=version >= (3, 11),
        cost="nothing runs: Python 3.11 or newer is needed",
        mend="make clean setup PYTHON=python3.11",
        required=True,
    )


def check_platform(system: str) -> Finding:
    return Finding(
        name="platform",
        found=f"{system} {platform.release()} {platform.machine()}",
        ok=system == "Linux",
        cost="no sandbox can be made here, so no agent can work and nothing is graded",
        mend="run it on Linux, a container or a virtual machine included",
    )


def check_cores(cores: float) -> Finding:
    return Finding(
        name="cores",
        found=f"{cores:g}",
        ok=cores >= 2,
        cost="sandboxes and training take turns: about twice the time",
        mend="give the machine or the container two cores",
    )


def check_memory(available: int) -> Finding:
    return Finding(
        name="memory",
        found=f"{available / GIB:.1f} GiB available",
        ok=available >= LEAST_MEMORY_GIB * GIB,
        cost="training beside a notebook kernel and sandboxes may be killed for memory",
        mend=f"free memory, or give the container at least {LEAST_MEMORY_GIB:g} GiB",
    )


def check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    return Finding(
        name="disk",
        found=f"{free / GIB:.1f} GiB free",
        ok=free >= LEAST_DISK_GIB * GIB,
        cost="checkpoints and rollouts of a few runs may not fit",
        mend="remove old directories under runs/",
    )


def check_torch(torch: TorchFacts | str) -> Finding:
    return Finding(
        name="torch",
        found=f"cannot be imported: {torch}" if isinstance(torch, str) else device_of(torch),
        ok=not isinstance(torch, str),
        cost="nothing can be trained or sampled; only the harness works",
        mend=INSTALL,
        required=True,
    )


def device_of(torch: TorchFacts) -> str:
    """The version and the device that work will run on."""
    return f"{torch.version} on {', '.join(torch.gpus) or 'CPU'}"


def check_gpu(torch: TorchFacts | None, driver: tuple[str, ...]) -> Finding:
    """Three ways to be without a GPU: there is none, torch is a CPU build, or its CUDA does not start."""
    if torch and torch.gpus:
        return Finding(name="gpu", found=f"{', '.join(torch.gpus)} (CUDA {torch.cuda_build})", ok=True)
    seen, cost = f"the driver sees {', '.join(driver)}", "everything runs on the CPU"
    if not driver:
        found, cost = NO_GPU, "small models only, on the CPU; the code path is the same"
        mend = "nothing to mend, unless there is one: then install the NVIDIA driver"
    elif torch is None:
        found, mend = f"{seen}, but torch cannot be imported", INSTALL
    elif torch.cuda_build:
        found = f"{seen}, but torch cannot start CUDA {torch.cuda_build}"
        mend = f"unset CUDA_VISIBLE_DEVICES, or update the driver to one for CUDA {torch.cuda_build}"
    else:
        # --isolated: without the machine's own pip settings, which offered the build that has no CUDA.
        found, pin = f"{seen}, but torch is a build without CUDA", torch.version.partition("+")[0]
        mend = f"{PIP} --isolated install --force-reinstall -c constraints.txt torch=={pin}"
    return Finding(name="gpu", found=found, ok=False, cost=cost, mend=mend)


def check_threads(torch: TorchFacts | None, cores: float) -> Finding:
    """More threads than cores make each of them wait for the others, many times over inside a container."""
    setting, threads = os.environ.get("OMP_NUM_THREADS"), torch.threads if torch else None
    return Finding(
        name="threads",
        found=f"torch uses {threads or 'no'}; OMP_NUM_THREADS is {setting or 'not set'}",
        ok=threads is None or threads <= max(1.0, cores),
        cost=f"threads wait for one another: {threads} of them on {cores:g} cores",
        mend=f"export OMP_NUM_THREADS={max(1, int(cores))}",
    )


def check_triton(torch: TorchFacts | None) -> Finding:
    """Triton matters on a GPU alone: elsewhere the torch references run anyway."""
    version = installed("triton")
    return Finding(
        name="triton",
        found=version or "not installed",
        ok=version is not None or not (torch and torch.gpus),
        cost="on this GPU the kernels' plain torch references run instead, more slowly",
        mend=f"{PIP} install -c constraints.txt triton",
    )


def check_bubblewrap() -> Finding:
    program = shutil.which("bwrap")
    version = output_of(program, "--version") if program else None
    return Finding(
        name="bubblewrap",
        found=f"{version} at {program}" if version else "not found",
        ok=version is not None,
        cost="no sandbox can be made, so no agent can work and nothing is graded",
        mend=MEND_BUBBLEWRAP,
        required=True,
    )


def check_sandbox() -> Finding:
    """Start one sandbox and run one call in it: a program that is installed may still not be allowed to."""
    from composer_nb.harness.sandbox import BwrapSandboxes, CallRequest, SandboxFailure, SandboxUnavailable

    source = "def add(a, b):\n    return a + b\n"
    request = CallRequest(files={"f.py": source}, module="f", function="add", arguments=("(19, 23)",))
    start = time.perf_counter()
    try:
        with BwrapSandboxes(run_id="doctor") as sandboxes:
            outcome = sandboxes.run([request])[0][0]
            capabilities = sandboxes.capabilities
        ok = (outcome.status, outcome.text) == ("returned", "42")
        seconds = time.perf_counter() - start
        found = f"works, {seconds:.1f} s to start; {enforced(capabilities)}" if ok else f"answered {outcome}"
    except (SandboxUnavailable, SandboxFailure) as error:
        ok, found = False, str(error)
    return Finding(
        name="sandbox",
        found=found,
        ok=ok,
        cost="no agent can work and nothing is graded",
        mend=mend_sandbox(),
        required=True,
    )


def enforced(capabilities: Mapping[str, Any]) -> str:
    """Which limits a backend cannot enforce here, in words."""
    missing = [name for name, holds in capabilities["limits"].items() if not holds]
    return f"not enforced: {', '.join(missing)}" if missing else "every limit enforced"


def mend_sandbox(settings: Path = Path("/proc/sys")) -> str:
    """The line that most likely lets bubblewrap start, from kernel settings that are known to forbid it."""
    if shutil.which("bwrap") is None:
        return MEND_BUBBLEWRAP
    for name, forbidding, allowing in USER_NAMESPACES:
        file = settings / name.replace(".", "/")
        if file.is_file() and file.read_text().strip() == forbidding:
            return f"sudo sysctl -w {name}={allowing}"
    return "in a container: start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"


def check_tools() -> Finding:
    """The programs that the product's tools run in a sandbox, and pytest, which agents and grades have from here."""
    from composer_nb.harness.sandboxes.programs import PACKAGES, host_programs

    there = set(host_programs()) | ({"pytest"} if installed("pytest") else set())
    missing = sorted({*PACKAGES, "pytest"} - there)
    return Finding(
        name="agent tools",
        found=", ".join(sorted(there)) or "none",
        ok=not missing,
        cost=f"no {' and no '.join(missing)} in sandboxes, so agents lack tools, or have no tests to run",
        mend="pip install 'composer_nb[agent]'",
    )


def check_kernel() -> Finding:
    """Whether a notebook's `python3` kernel is this interpreter, and not one that was installed elsewhere."""
    if importlib.util.find_spec("jupyter_client") is None:
        command = "not installed"
    else:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

        try:
            command = str(KernelSpecManager().get_kernel_spec("python3").argv[0])
        except NoSuchKernel:
            command = "no kernel named python3"
    # Jupyter runs a bare `python` of a kernel as the interpreter that it runs on itself.
    bare = {"python", "python3", f"python3.{sys.version_info.minor}"}
    same = command in bare or Path(command).parent == Path(sys.executable).parent
    return Finding(
        name="jupyter kernel",
        found="this interpreter" if same else command,
        ok=same,
        cost="notebooks, and so `make demo`, run in another interpreter or not at all",
        mend=f"{sys.executable} -m ipykernel install --sys-prefix",
        required=True,
    )


def check_git() -> Finding:
    version = output_of("git", "--version")
    return Finding(
        name="git",
        found=version or "not found",
        ok=version is not None,
        cost="runs do not record the commit they were made from",
        mend="scripts/system_packages git",
    )


def check_ray() -> Finding:
    version = installed("ray")
    return Finding(
        name="ray",
        found=version or "not installed",
        ok=version is not None,
        cost="one machine and one process; the tour and every notebook run without it",
        mend=f"{PIP} install ray",
    )


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
