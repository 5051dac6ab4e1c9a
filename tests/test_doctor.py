"""The doctor: what it finds on this machine, and what it says of machines that lack something."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from composer_nb import doctor
from composer_nb.doctor import CheckResult, TorchFacts

NAMES = (
    "python platform cores memory disk torch gpu threads triton bubblewrap sandbox agent-tools jupyter-kernel git ray"
).split()
CPU_TORCH = TorchFacts("2.13.0+cpu", None, (), 1)
CUDA_TORCH = TorchFacts("2.13.0", "12.8", ("H100",), 8)
BLIND_TORCH = TorchFacts("2.13.0", "12.8", (), 8)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def rendered(findings: list[CheckResult]) -> str:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(doctor.as_table(findings))
    return console.export_text()


def test_everything_is_looked_at_and_all_that_is_missing_has_a_cost_and_a_cure():
    findings = doctor.diagnose()
    assert [finding.name.replace(" ", "-") for finding in findings] == NAMES
    for finding in findings:
        assert finding.value, finding
        assert finding.ok or (finding.cost and finding.mend and "\n" not in finding.mend), finding
    markup = CheckResult("markup", "[/red] cannot [bold]start[/bold]", False, "c", "m")
    text = rendered([*findings, markup])
    assert all(finding.name in text for finding in findings) and markup.value in text


def test_a_machine_that_lacks_everything_is_told_what_each_costs(programs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    monkeypatch.setattr(doctor, "probe_torch", lambda: CUDA_TORCH)
    monkeypatch.setattr(doctor, "available_cores", lambda: 0.5)
    monkeypatch.setattr(doctor, "available_memory", lambda: 2**20)
    monkeypatch.setattr(doctor, "LEAST_DISK_GIB", 2.0**30)
    results = {finding.name: finding for finding in doctor.diagnose()}
    for name in ("cores", "memory", "disk", "triton", "bubblewrap", "sandbox", "git", "ray"):
        assert not results[name].ok, name
    assert results["bubblewrap"].mend == results["sandbox"].mend == "scripts/system_packages"
    assert "scripts/system_packages git" in results["git"].mend
    assert not doctor.healthy([results["bubblewrap"]])
    assert doctor.healthy([results["git"]]), "git is missed, not required"
    assert "BROKEN" in rendered([results["bubblewrap"]]) and "without" in rendered([results["git"]])


def test_a_bubblewrap_that_cannot_start_is_no_sandbox(programs: Path):
    program(programs, "bwrap", '[ "$1" = --version ] && echo "bubblewrap 9.9" && exit 0\nexit 1')
    sandbox = doctor.check_sandbox()
    assert not sandbox.ok and sandbox.required
    assert "bubblewrap" in sandbox.value


def test_a_gpu_that_torch_cannot_use_is_warned_of(programs: Path, monkeypatch: pytest.MonkeyPatch):
    assert doctor.driver_gpus() == ()
    program(programs, "nvidia-smi", "exit 9")
    assert doctor.driver_gpus() == (), "a driver that does not answer has no GPUs"
    program(programs, "nvidia-smi", "echo 'H100 80GB'; echo 'H100 80GB'")
    driver = doctor.driver_gpus()
    assert driver == ("H100 80GB", "H100 80GB")
    monkeypatch.setattr(doctor, "probe_torch", lambda: CPU_TORCH)
    first, warning = doctor.device_line().splitlines()
    assert first == "torch 2.13.0+cpu on CPU"
    assert "H100 80GB" in warning and "build without CUDA" in warning and "torch==2.13.0" in warning
    assert "2.13.0+cpu" not in doctor.check_gpu(CPU_TORCH, driver).mend, "the same build would come again"
    for torch, gpus, ok, expected in (
        (BLIND_TORCH, driver, False, "CUDA 12.8"),
        (None, driver, False, "cannot be imported"),
        (CUDA_TORCH, driver, True, "H100"),
        (CPU_TORCH, (), False, "none"),
    ):
        check = doctor.check_gpu(torch, gpus)
        assert check.ok == ok and expected in check.value and not check.required


def test_a_broken_torch_and_too_many_threads_are_findings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    threads = doctor.check_threads(CUDA_TORCH, cores=2.0)
    assert not threads.ok and threads.mend == "export OMP_NUM_THREADS=2"
    assert doctor.check_threads(CUDA_TORCH, cores=8.0).ok and doctor.check_threads(CPU_TORCH, cores=0.5).ok
    monkeypatch.setitem(sys.modules, "torch", None)
    reason = doctor.probe_torch()
    assert isinstance(reason, str) and reason in doctor.device_line()
    finding = next(finding for finding in doctor.diagnose() if finding.name == "torch")
    assert reason in finding.value and not doctor.healthy([finding])


@pytest.mark.parametrize("argv0, same", [("python", True), (sys.executable, True), ("/elsewhere/bin/python", False)])
def test_a_kernel_of_another_interpreter_is_found(argv0: str, same: bool, tmp_path: Path, monkeypatch):
    kernel = tmp_path / "kernels/python3/kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = f'["{argv0}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    kernel.write_text(f'{{"argv": {argv}, "display_name": "x", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    finding = doctor.check_kernel()
    assert finding.ok is same
    assert same or finding.value == argv0
