"""Engines beside trainers: pairs that compute differently from the same published weights, as real ones do.

By default both sides here run the same arithmetic on the same numbers, and there is nothing to mend. Real ones differ:

bf16                       the engine in bf16 throughout, the trainer in float32. What bf16 rounds (most of all the logits of the
                           output layer) stays when routes are replayed.
int4-experts               experts in int4 on both sides: the trainer's forward is quantisation-aware, as Kimi K2's is, or
                           Composer's, which runs NVFP4 in the trainer "to match inference" (Composer 2 technical report, §6.1).
                           With numbers and kernels matched, what is left is the router: the engine's product in bf16, as vLLM
                           has it for the DeepSeek family, to which Kimi K2 belongs, the trainer's in float32 (Megatron's
                           --moe-router-dtype fp32); prime-rl's pull request 2952 documents this very pair. The difference
                           is small and smooth but for the experts that it flips, which is what replay is for.
int4-experts-int8-router   the same with the engine's router stored in int8, groups of 64, as MLX quantises Qwen3-MoE (its
                           `quant_predicate`), and multiplied in float32.

What replay cannot mend is an engine whose experts are int4 beside a trainer whose are not: those are other weights.
`Numerics` can say that, too: `VariantPair(Numerics(expert_bits=4), Numerics())`.
"""

import copy
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field

from composer_nb.kernels.formats.groupwise import rounded
from composer_nb.kernels.tiles import column_scale
from composer_nb.trainer.models.transformer import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """The arithmetic of one side.

    Attributes:
        dtype: Dtype of weights and activations.
        expert_bits: Experts go through integers of so many bits, groups of 32; 0: as published.
        router_bits: Routers likewise, groups of 64.
        matrices: All matrices go through int8 with a power of two as the scale of each output.
        router_dtype: Dtype of the router's product; None: that of the model's family.
    """

    dtype: torch.dtype = torch.float32
    expert_bits: int = 0
    router_bits: int = 0
    matrices: bool = False
    router_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        """Name the dtype, and what departs from it: `float32, experts in 4 bits`."""
        dtype, router = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.router_dtype))
        departures = {
            f"experts in {self.expert_bits} bits": self.expert_bits,
            f"routers in {self.router_bits} bits": self.router_bits,
            "all matrices in int8": self.matrices,
            f"the router's product in {router}": self.router_dtype,
        }
        return ", ".join([dtype, *(name for name, holds in departures.items() if holds)])


class VariantPair(NamedTuple):
    engine: Numerics
    trainer: Numerics


PAIRS: dict[str, VariantPair] = {
    "bf16": VariantPair(Numerics(dtype=torch.bfloat16), Numerics()),
    "int4-experts": VariantPair(Numerics(expert_bits=4, router_dtype=torch.bfloat16), Numerics(expert_bits=4)),
    "int4-experts-int8-router": VariantPair(Numerics(expert_bits=4, router_bits=8), Numerics(expert_bits=4)),
}

EngineName = Literal["float32", "bf16", "int8", "int8-experts", "int4-experts", "int4-experts-int8-router"]
# Engines that RL can sample from, by the names of `engine.numerics`.
ENGINES: dict[EngineName, Numerics] = {
    "float32": Numerics(),
    "bf16": PAIRS["bf16"].engine,
    "int8": Numerics(matrices=True),
    "int8-experts": Numerics(expert_bits=8),
    "int4-experts": PAIRS["int4-experts"].engine,
    "int4-experts-int8-router": PAIRS["int4-experts-int8-router"].engine,
}

# Fireworks' `reset_prompt_cache` and its transitions of a hot load.
CacheReset = Literal["all", "none", "new_session"]
Transition = Literal["async", "sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    slots: Annotated[int, Field(ge=1)] = 128
    reset_cache: CacheReset = "new_session"
    """Caches under older weights, after a swap: conversations keep theirs and new ones begin anew (new_session); new ones take
    over beginnings from them, too (none); all are computed again (all)."""
    transition: Transition = "async"
    """Turns under way at a swap go on with the new weights (async), or end with the old ones while others wait (sync)."""
    step_tokens: Annotated[int, Field(ge=1)] = 4096
    """Maximum of tokens that a step forwards: a long prompt takes several, between which others decode."""
    numerics: EngineName = "float32"
    """Arithmetic of the engine that samples for RL. The trainer always computes in float32, so any other value makes a mismatch
    on purpose."""


# The pair that the tour's report shows: the one closest to what serves and trains Composer.
TOUR = "int4-experts"


@torch.no_grad()
def variant(model: Model, numerics: Numerics) -> Model:
    """A copy of a float32 model that computes as `numerics` say; it is for looking, not for training."""
    changed = copy.deepcopy(model).requires_grad_(False)
    for layer in changed.layers:
        if numerics.expert_bits and not layer.dense:
            for weight in (layer.w_in, layer.w_out):  # [E, in, out]
                weight.copy_(rounded(weight, bits=numerics.expert_bits, group=32, dim=1))
        if numerics.router_bits and not layer.dense:
            layer.router.copy_(rounded(layer.router, bits=numerics.router_bits, group=64))
    for name, weight in changed.named_parameters() if numerics.matrices else ():
        if weight.ndim > 1 and (weight is not changed.embed or weight is changed.output_weight):
            # Dense layers and shared experts are [in, out], routed experts [E, in, out], all others [out, in].
            inputs = 0 if weight.ndim == 2 and name.endswith(("_in", "_out")) else 1
            scale = torch.from_numpy(column_scale(weight.abs().amax(inputs, keepdim=True).cpu().numpy()))
            weight.copy_((weight / scale.to(weight.device)).round() * scale.to(weight.device))
    changed.router_dtype = numerics.router_dtype or changed.router_dtype
    return changed.to(numerics.dtype)


def as_engine(model: Model, name: EngineName) -> Model:
    """Return the model that an engine of that name makes of the published weights; float32 takes the model as it is."""
    return model if name == "float32" else variant(model, ENGINES[name])
