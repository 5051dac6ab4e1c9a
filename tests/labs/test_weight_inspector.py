"""The delta inspector: predicted density against a count of roundings, and a store's versions against what was published."""

from pathlib import Path

import pytest
import torch

from composer_nb.labs.weights import chain, expected_density, version_densities
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.store import folder, log


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_the_predicted_density_is_that_of_counted_roundings(dtype: torch.dtype, lr: float) -> None:
    random = torch.Generator().manual_seed(0)
    masters, directions = (scale * torch.randn(400_000, generator=random) for scale in (0.05, 0.5))
    moved = masters.double() - lr * directions.double()
    counted = float((moved.to(dtype).float() != masters.double().to(dtype).float()).double().mean())
    predicted = expected_density(masters, directions, lr, dtype)
    assert predicted == pytest.approx(counted, rel=0.03, abs=4 * (counted / 400_000) ** 0.5)


def test_densities_and_chain_of_a_store_are_those_of_what_was_published(tmp_path: Path) -> None:
    publisher, weights = Publisher(tmp_path / "store", owner="run", full_every=2), torch.ones(1000)
    for version, count in enumerate((0, 10, 0, 250, 3)):
        weights[:count] += 1
        manifest = publisher.publish(version, {"w": weights.bfloat16()}, {"config.json": b"{}"})
        publisher.acknowledge(version, manifest.hash, "engine")
    store = tmp_path / "store"
    shares = version_densities(store)
    assert shares == {1: 0.01, 2: 0.0, 3: 0.25, 4: 0.003}
    assert not (store / "refused").exists(), "looking asks for nothing"
    links, _, changed = chain(log(store), shares).axes
    assert len(links.texts) == 4 and [*changed.lines[0].get_ydata()] == [*shares.values()]
    (store / folder(3) / "delta.safetensors").unlink()
    with pytest.raises(ValueError, match="v000003"):
        version_densities(store)
