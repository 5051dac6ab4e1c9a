"""Machines that can not carry a run are refused before anything starts, with a setting that would do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from composer_nb.config import Settings, override
from composer_nb.trainer import room
from composer_nb.trainer.launch import start_or_resume
from composer_nb.trainer.room import Machine, require_room, this_machine

GIB = 1 << 30


def settings(**changed: object) -> Settings:
    return override(Settings(), {name.replace("__", "."): value for name, value in changed.items()})


def test_this_machine_has_memory_and_says_what_runs_on_it():
    found = this_machine()
    assert 1 << 28 < found.memory < 1 << 50 and found.name
    assert found.code.keys() >= {"python", "torch", "composer_nb"} and found == replace(
        this_machine(), memory=found.memory
    )


def test_the_defaults_fit_a_laptop_and_not_a_watch():
    require_room(Settings(), [Machine(name="laptop", memory=4 * GIB)])
    with pytest.raises(ValueError, match=r"a rank needs .* GiB; rl\.recompute=true .*would"):
        require_room(Settings(), [Machine(name="watch", memory=200 << 20)])


def test_what_the_refusal_names_fits():
    small = Machine(name="small", memory=600 << 20)
    with pytest.raises(ValueError, match="would") as refused:
        require_room(settings(rl__microbatch_tokens=32768), [small])
    named = str(refused.value).partition("; ")[2].partition(" would")[0]
    require_room(override(Settings(), dict(pair.split("=") for pair in named.split())), [small])


def test_two_machines_share_the_ranks_and_the_smaller_one_decides():
    wanted = settings(ranks=4, rl__prompts=8, data__rl_tasks=20000)
    each = Machine(name="a", memory=GIB)
    require_room(wanted, [each, each])
    with pytest.raises(ValueError, match="a rank needs"):
        require_room(wanted, [each, replace(each, memory=GIB // 8)])


def test_nodes_that_run_something_else_are_refused_by_name():
    one, other = (
        Machine(name=name, memory=GIB * 8, code={"torch": "2.13", "composer_nb": name}) for name in ("a", "b")
    )
    with pytest.raises(ValueError, match=r"services\.address: a has composer_nb a, b has b; install the same"):
        require_room(Settings(), [one, other])
    require_room(Settings(), [one, replace(other, code=one.code)])


def test_ranks_on_gpus_need_one_each():
    wanted = override(Settings(), {"services.on": True, "ranks": 8, "mesh.device": "cuda", "mesh.shard": 8})
    machine = Machine(name="node", memory=GIB, gpus=4)
    require_room(wanted, [machine, machine])
    with pytest.raises(ValueError, match="ranks=4 would fit"):
        require_room(wanted, [machine])
    with pytest.raises(ValueError, match=r"mesh\.device='cuda': no machine has a GPU; 'cpu' would run"):
        require_room(wanted, [replace(machine, gpus=0)])


def test_a_run_that_has_no_room_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "available_memory", lambda: 100 << 20)
    with pytest.raises(ValueError, match="a rank needs"):
        start_or_resume(runs=tmp_path / "runs")
    assert not list(tmp_path.iterdir())
