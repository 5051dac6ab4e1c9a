"""Meshes: both grids cover the ranks, places are what a grid of numbers says, and what does not fit is refused by name."""

import math
import re
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.trainer.parallel.mesh import Axis, Mesh, MeshSettings

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    dense = draw(st.tuples(SIZES, SIZES, st.sampled_from([1, 2])))
    world = math.prod(dense)
    ep = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    cut = draw(st.sampled_from([n for n in range(1, world // ep + 1) if world // ep % n == 0]))
    replicate, shard, cp = dense
    return Mesh(replicate=replicate, shard=shard, cp=cp, expert_replicate=world // (ep * cut), expert_shard=cut, ep=ep)


def rows(grid: np.ndarray, *axes: int) -> list[list[int]]:
    """Return the groups along `axes` of a grid of ranks, by NumPy alone."""
    other_axes = [axis for axis in range(grid.ndim) if axis not in axes]
    return grid.transpose(*other_axes, *axes).reshape(-1, math.prod(grid.shape[axis] for axis in axes)).tolist()


@given(meshes())
def test_groups_are_those_of_two_grids_of_ranks(mesh: Mesh):
    dense = np.arange(mesh.world).reshape(mesh.dense_shape)
    experts = np.arange(mesh.world).reshape(mesh.expert_shape)
    expected = {
        "replicate": rows(dense, 0), "shard": rows(dense, 1), "cp": rows(dense, 2), "fsdp": rows(dense, 1, 2),
        "data": rows(dense, 0, 1), "world": rows(dense, 0, 1, 2), "expert_replicate": rows(experts, 0),
        "expert_shard": rows(experts, 1), "ep": rows(experts, 2),
    }  # fmt: skip
    assert set(expected) == set(get_args(Axis))
    for axis, groups in expected.items():
        for group in groups:
            assert len(group) == getattr(mesh, axis)
            assert [mesh.place(rank)[axis] for rank in group] == list(range(len(group)))  # type: ignore[index]


@given(meshes(), st.integers(1, 4))
def test_an_expert_group_holds_every_expert_once(mesh: Mesh, experts_per_rank: int):
    experts = experts_per_rank * mesh.ep
    mesh.require_experts(experts)
    for group in rows(np.arange(mesh.world).reshape(mesh.expert_shape), 2):
        assert [expert for rank in group for expert in mesh.experts(rank, experts)] == list(range(experts))


@pytest.mark.parametrize(
    ("ranks", "settings", "named"),
    [
        (8, {"cp": 3}, "mesh.cp"),
        (8, {"cp": 2, "shard": 8}, "mesh.shard"),
        (6, {"ep": 4}, "mesh.ep"),
        (2, {"ep": 8}, "mesh.ep"),
        (8, {"ep": 2, "expert_shard": 3}, "mesh.expert_shard"),
    ],
)
def test_what_does_not_divide_is_refused_with_a_value_that_works(ranks: int, settings: dict, named: str):
    with pytest.raises(ValueError, match=f"{named}={settings[named[5:]]} does not divide") as refusal:
        Mesh.of(MeshSettings(**settings), ranks)
    [(name, value)] = re.findall(r"mesh\.(\w+)=(\d+) would", str(refusal.value))
    assert Mesh.of(MeshSettings(**{**settings, name: int(value)}), ranks).world == ranks
    mesh = Mesh.of(MeshSettings(cp=4), 8)
    mesh.require_devices([4, 4])
    for devices, message in (([4, 2], r"6 device\(s\).*ranks=6"), ([6, 6], r"mesh\.cp=4 .*mesh\.cp=2 would")):
        with pytest.raises(ValueError, match=message):
            mesh.require_devices(devices)
