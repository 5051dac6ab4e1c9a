"""A cluster that has no room for the trainer is refused in one line."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from composer_nb.trainer.services.actors import RayActors


@pytest.mark.parametrize(("count", "lower"), [(1, False), (2, True)])
def test_a_cluster_without_room_for_the_trainer_is_refused(monkeypatch: pytest.MonkeyPatch, count: int, lower: bool):
    places = import_module("ray.util.placement_group")  # a function of this name hides it
    monkeypatch.setattr(places, "placement_group", lambda *_, **__: SimpleNamespace(wait=lambda seconds: False))
    monkeypatch.setattr(places, "remove_placement_group", lambda group: None)
    actors = RayActors.__new__(RayActors)
    actors._places = {}
    with pytest.raises(ValueError, match=r"^services\.address: .*end what else runs there") as refused:
        actors.make_ranks(object, count, name="trainer", threads=1, gpus=1)
    assert ("lower ranks" in str(refused.value)) == lower and not actors._places
