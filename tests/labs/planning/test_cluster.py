"""What the pictures of a mesh say, read back from them."""

from __future__ import annotations

import pytest

from composer_nb.labs.planning import GIB, grids, needs
from composer_nb.trainer.models.transformer import ModelConfig
from composer_nb.trainer.parallel.memory import RankLoad, estimate
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings


def test_every_rank_stands_at_its_place_in_both_grids() -> None:
    mesh = Mesh.of(MeshSettings(shard=4, cp=2, ep=8), 8)
    picture = grids(mesh, experts=16)
    for ax, axes in zip(
        picture.axes, (("replicate", "shard", "cp"), ("expert_replicate", "expert_shard", "ep")), strict=True
    ):
        assert [label.get_text() for label in ax.get_yticklabels()] == list(axes)
        found = {
            (round(text.get_position()[0]), round(text.get_position()[1])): int(text.get_text()) for text in ax.texts
        }
        assert found == {(rank, row): mesh.place(rank)[name] for rank in range(8) for row, name in enumerate(axes)}
    assert [label.get_text() for label in picture.axes[1].get_xticklabels()][3] == "3\n6–7"
    assert picture.png().startswith(b"\x89PNG")


def test_bars_add_up_to_the_peak() -> None:
    config = ModelConfig()
    estimates = {
        str(ranks): estimate(config, Mesh.of(MeshSettings(shard=ranks), ranks), RankLoad(tokens=512))
        for ranks in (1, 4)
    }
    [ax] = needs(estimates, 2**28).axes
    widths = [sum(bar.get_width() for bar in bars) for bars in zip(*ax.containers, strict=True)]
    assert widths == pytest.approx([need.peak / GIB for need in estimates.values()])
    assert list(ax.lines[0].get_xdata()) == [0.25, 0.25]
