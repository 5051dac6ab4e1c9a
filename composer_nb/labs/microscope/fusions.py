"""What each fused kernel of the trainer changes: the same rollouts scored with that kernel alone, and with none.

The gap without any fused kernel is that of torch's single operations to the engine's record, and what each switch adds is of
rounding alone. Fireworks passes a fusion below k3 = 0.001, and recommends a switch for each ("Numerics parity", 2026).
"""

from collections.abc import Sequence

from composer_nb.harness.grading.grade import Attempt
from composer_nb.kernels.triton_runtime import FUSIONS, Fusion, without
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.mismatch import compare, gap_figures

# Kernels of the trainer: `decode` is the engine's.
TRAINED: tuple[Fusion, ...] = tuple(name for name in FUSIONS if name != "decode")


def fusion_gaps(model: Model, attempts: Sequence[Attempt]) -> dict[str, dict[str, float]]:
    """Return p50 and p99 of |Δ log p|, and k3, of each kernel alone and of `all` against none, and of `none` against the engine's
    record."""
    with without(*FUSIONS):
        plain_S = compare(model, attempts).off_S
    gaps = {"none": gap_figures(plain_S)}
    alone: list[tuple[str, tuple[Fusion, ...]]] = [(name, (name,)) for name in TRAINED]
    for name, on in (*alone, ("all", TRAINED)):
        with without(*(other for other in FUSIONS if other not in on)):
            gaps[name] = gap_figures(compare(model, attempts).off_S - plain_S)
    return gaps
