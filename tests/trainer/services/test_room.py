"""Machines that cannot carry a run are refused before anything starts, with a setting that would do."""

from dataclasses import replace
from pathlib import Path

import pytest

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe import launch
from composer_nb.trainer.recipe.launch import start_or_resume
from composer_nb.trainer.records.rundir import create
from composer_nb.trainer.services import capacity as room
from composer_nb.trainer.services.capacity import (
    MachineCapacity,
    planned_engines,
    require_room,
    require_room_for_rl,
    require_same_code,
)
from composer_nb.trainer.settings import Settings, override, to_dict

GIB = 1 << 30


def settings(**changed: object) -> Settings:
    return override(Settings(), {name.replace("__", "."): value for name, value in changed.items()})


def test_the_defaults_fit_a_laptop_and_not_a_watch():
    laptop, watch = MachineCapacity(name="laptop", memory=4 * GIB), MachineCapacity(name="watch", memory=150 << 20)
    require_room(Settings(), laptop)
    require_room_for_rl(Settings(), [laptop])
    with pytest.raises(ValueError, match=r"ranks=2: each needs .* GiB; ranks=1 would fit"):
        require_room(Settings(), watch)
    require_room(settings(ranks=1), watch)
    require_room(Settings(), replace(watch, memory=230 << 20))  # each of two ranks has part of a batch
    with pytest.raises(ValueError, match="a smaller model"):
        require_room(Settings(), replace(watch, memory=10 << 20))


def test_what_the_refusal_names_fits_and_can_be_set():
    run_settings = settings(ranks=1, rl__microbatch_tokens=32768)
    refusals = {1 << 30: r"^a rank needs .*; rl\.recompute=true .*would", 30 << 20: "no micro-batch is small enough"}
    for memory, why in refusals.items():
        with pytest.raises(ValueError, match=why):
            require_room_for_rl(run_settings, [MachineCapacity(name="small", memory=memory)])
    with pytest.raises(ValueError, match="would") as refused:
        require_room_for_rl(run_settings, [MachineCapacity(name="small", memory=300 << 20)])
    named = dict(pair.split("=") for pair in str(refused.value).partition("; ")[2].partition(" would")[0].split())
    require_room_for_rl(override(run_settings, named), [MachineCapacity(name="small", memory=300 << 20)])


def test_nodes_that_run_something_else_are_refused_by_name():
    first, second = (
        MachineCapacity(name=name, memory=GIB * 8, code={"torch": "2.13", "composer_nb": name}) for name in ("a", "b")
    )
    with pytest.raises(ValueError, match=r"services\.address: a has composer_nb a, b has b; install the same"):
        require_same_code([first, second])
    require_same_code([first, replace(second, code=first.code)])


def test_ranks_on_gpus_need_one_each():
    run_settings = override(Settings(), {"services.on": True, "ranks": 8, "mesh.device": "cuda", "mesh.shard": 8})
    machine = MachineCapacity(name="node", memory=GIB, gpus=4)
    require_room_for_rl(run_settings, [machine, machine, replace(machine, gpus=1)])
    with pytest.raises(ValueError, match="8 trainer rank.* and 1 engine.* need a GPU each, and there are 8"):
        require_room_for_rl(run_settings, [machine, machine])
    with pytest.raises(ValueError, match="ranks=4 would fit"):
        require_room_for_rl(run_settings, [machine])
    alone = override(Settings(), {"services.on": False, "ranks": 2, "mesh.device": "cuda"})
    assert not alone.meshed, "where models are is no division of work"
    require_room_for_rl(alone, [replace(machine, gpus=1)])  # without services, the ranks share the GPU
    require_room(alone, replace(machine, gpus=1))
    for run in (run_settings, alone):
        for check in (
            lambda capacity, run=run: require_room_for_rl(run, [capacity]),
            lambda capacity, run=run: require_room(run, capacity),
        ):
            with pytest.raises(ValueError, match=r"mesh\.device='cuda': no GPU on node; 'cpu' would run"):
                check(replace(machine, gpus=0))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 10 << 20)
    monkeypatch.setattr(launch, "_run_ranks", lambda run, world, say: pytest.fail("it began"))


def test_engines_follow_the_load():
    """Four that wait for half of the time do the work of two."""

    def planned(engines: int, trainer_wait: float, engine_wait: float) -> int:
        return planned_engines(settings(services__max_engines=4).services, engines, trainer_wait, engine_wait)

    assert (planned(2, 0.5, 0.0), planned(4, 0.5, 0.0)) == (3, 4), "the trainer waits for them"
    assert planned(2, 0.5, 0.2) == planned(2, 0.05, 0.05) == 2, "both wait, or nobody"
    assert (planned(4, 0.0, 0.5), planned(4, 0.0, 0.3), planned(1, 0.0, 0.9)) == (3, 4, 1)


def test_no_stage_of_a_run_begins_without_room(tmp_path: Path, small: None):
    with pytest.raises(ValueError, match="each needs"):
        start_or_resume(runs=tmp_path)
    (run,) = tmp_path.glob("tour-*")
    with pytest.raises(ValueError, match="each needs"):
        start_or_resume(run)


def test_a_run_that_only_has_to_be_scored_is_not_asked(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "_run_ranks", lambda run, world, say: run.finish("numerics", 0.0, {}))
    run = create(tmp_path, "tour")
    write_json(run.path / "settings.json", to_dict(override(Settings(), {"services.on": False})))
    for stage in ("sft", "rl"):
        run.finish(stage, 0.0, {})
    assert start_or_resume(run.path, say=lambda line: None).path == run.path
