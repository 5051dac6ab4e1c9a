from pathlib import Path

import pytest

from composer_nb.trainer.services import machine


def test_limits_of_the_groups_above_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    (tmp_path / "fs/outer/inner").mkdir(parents=True)
    (tmp_path / "fs/outer/inner/cpu.max").write_text("max 100000\n")
    (tmp_path / "fs/outer/cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "MEMBERSHIP", membership)
    limits = machine.cgroup_limits("cpu.max")
    assert limits == ["max 100000", "50000 100000"]
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "absent")
    assert machine.cgroup_limits("cpu.max") == []

    monkeypatch.setattr(machine, "cgroup_limits", lambda name: limits)
    assert machine.available_cores() == 0.5
    monkeypatch.setattr(machine, "cgroup_limits", lambda name: ["max", str(2**20)])
    assert machine.available_memory() == 2**20
