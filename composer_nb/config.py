"""One tree of settings: the same dotted names in a notebook, in a job file and on the command line.

`override(Settings(), {"rl.steps": 20})` is the only way in from outside: unknown names and wrong types are errors that name
the nearest setting. The resolved tree is saved in the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from composer_nb.harness.agent import Limits
from composer_nb.harness.reward import RewardSettings
from composer_nb.kernels.recipes import RECIPES
from composer_nb.trainer.data import CODE_ROW
from composer_nb.trainer.loss import LossSettings
from composer_nb.trainer.mesh import Mesh, MeshSettings
from composer_nb.trainer.model import Kernels, ModelConfig
from composer_nb.trainer.muon import OptimizerSettings
from composer_nb.trainer.optimizer import trapezoid
from composer_nb.trainer.replay_settings import ReplaySettings
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.variants import ENGINES, EngineName


class Within(NamedTuple):
    """What values a setting may have, both ends among them."""

    least: float
    most: float = math.inf


Count = Annotated[int, Within(0)]
Some = Annotated[int, Within(1)]
NotNegative = Annotated[float, Within(0)]
Share = Annotated[float, Within(0, 1)]
Seed = Annotated[int, Within(-(2**62), 2**62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Tasks, demonstrations and code."""

    code: str = "stdlib"
    """Python source to train on: `stdlib`, or a folder."""
    demonstrations: Some = 1024
    """Clean demonstrations for mid-training, each on a task of its own."""
    mistaken_demonstrations: Some = 1024
    """Demonstrations with mistakes for the policy that RL starts from."""
    rl_tasks: Some = 2048
    heldout_tasks: Some = 440
    tune_tasks: Some = 96
    """Held-out tasks that RL is watched on; apart from the ones that are scored at the end."""
    mistake_rate: Share = 0.5
    """Probability of a mistake before the right edit, and of another one after each, up to three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    vocab_size: Annotated[int, Within(264)] = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MidtrainSettings:
    """Continued training from random weights on code, then on demonstrations with code mixed in."""

    steps: Some = 2000
    tokens: Some = 768
    """Tokens a step, over all ranks."""
    lr: NotNegative = 3e-3
    warmup: Share = 0.04
    """Share of the steps with a rising learning rate."""
    constant: Share = 0.5
    """The learning rate stays up to this share of the steps, then falls linearly to 3 %."""
    weight_decay: NotNegative = 0.05
    clip: NotNegative = 1.0
    code_first: Share = 0.1
    """Share of the steps on code alone."""
    code_share: Share = 0.2
    """Share of code tokens after that."""
    context_weight: NotNegative = 0.2
    """Loss weight of what the agent reads; what it writes weighs 1."""
    code_weight: NotNegative = 0.5
    balance: NotNegative = 1e-3
    """Weight of the load-balancing loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendSettings:
    """The long-context phase between mid-training and fine-tuning: rows as long as all positions, stretched by YaRN."""

    steps: Count = 0
    """0: there is no such phase."""
    factor: Annotated[float, Within(1)] = 4.0
    """How many times as many positions there are then as `model.max_position_embeddings`."""
    tokens: Some = 4096
    """Tokens a step, over all ranks."""
    code_share: Share = 0.8
    """Share of tokens in long rows of code; the others are demonstrations as before."""
    lr: NotNegative = 5e-4
    clip: NotNegative = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Fine-tuning on demonstrations with mistakes: the policy that RL starts from."""

    steps: Some = 200
    tokens: Some = 2048
    lr: NotNegative = 4e-4
    clip: NotNegative = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings:
    """Reinforcement learning: fixed groups, one epoch."""

    steps: Some = 200
    prompts: Some = 8
    """Tasks a step."""
    group: Annotated[int, Within(2)] = 8
    """Rollouts a task. One alone has nothing to be compared with, and would teach nothing."""
    minibatches: Some = 1
    """Optimiser steps a batch."""
    lr: NotNegative = 5e-4
    """Rises over `warmup` steps, then falls linearly to a twentieth at the last step; or, if that is less, over the second half
    of `max_seconds`."""
    scale_rate: Annotated[float, Within(0, 1000)] = 40.0
    """How many times as fast as a weight the scale of all logits learns, a number of its own (`trainer/sharpness.py`); 0: it has
    none."""
    warmup: Count = 6
    clip: NotNegative = 1.0
    checkpoint_every: Some = 20
    evaluate_every: Count = 50
    """Steps between looks at the tuning tasks; 0 for none. After the last step there is none: the held-out tasks follow."""
    microbatch_tokens: Some = 4096
    recompute: bool = False
    """Layers are computed again in the backward pass instead of being kept: less memory, about a third more time."""
    tokens_per_rollout: Some = 64
    """The constant in the loss's denominator, prompts × group × this: no batch's length enters its gradient."""
    shuffle_rewards: bool = False
    """Control: rewards are dealt out at random within the batch, so nothing should be learnt."""
    max_seconds: NotNegative = 310.0
    """RL ends before a step that would begin later; the report says when that happened. Not reproducible then: on a slow machine
    the learning rate falls with time, because a policy that is cut off at a high rate scores less than it could."""

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """The learning rate of a step that begins when RL has taken so many seconds."""
        share = self.warmup / self.steps
        factor = trapezoid(step, self.steps, share, share, 0.05)
        if self.max_seconds:
            factor = min(factor, trapezoid(min(seconds, self.max_seconds) - 1, self.max_seconds, 0.0, 0.5, 0.05))
        return self.lr * factor

    def denominator(self, loss: LossSettings) -> float:
        """What a batch's summed loss is divided by."""
        return float(self.prompts * self.group * (1 if loss.length_norm else self.tokens_per_rollout))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesSettings:
    """RL as services on Ray that never wait for each other. Off: the plain loop, one batch after the other."""

    on: bool = True
    address: str = ""
    """Of a Ray cluster to attach to, or the folder of a head (`composer-nb up`); empty: one is started for the run, and ends
    with it."""
    engines: Some = 1
    """Inference engines, each with an environment worker of its own."""
    ahead: Count = 1
    """O: batches that may be under way beyond the one that is due; 0 = on policy."""
    bound: Count = 2
    """Batches by which the oldest token of a rollout may be behind when it is trained."""
    window: Share = 1.0
    """A batch is taken from the oldest max(P, window · (O + 1) · P) groups."""
    order: Literal["window", "fifo", "discard"] = "window"
    retries: Count = 3
    """Times that one rollout is dispatched again after a fault of the infrastructure."""
    deaths: Count = 20
    """Times that a group may lose its worker, or a batch its trainer."""
    hang_s: float = 120.0
    """A worker that says nothing for so long is taken for hung, and ended."""
    lockstep: bool = False
    """Engines step only while an environment worker waits for them. With ahead=0 and one engine: reproducible, bit for bit."""
    full_every: Some = 25
    """Weight versions between two full ones."""
    store: str = ""
    """Of weight versions, any fsspec URL; each run has a folder in it. Empty: in the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    samples: Some = 4
    """Rollouts a task at temperature 1, the k of best-of-k; one more is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    slots: Some = 128
    numerics: EngineName = "float32"
    """How the engine computes from the published weights when RL samples (`trainer/variants.py`). The trainer computes in float32
    whatever this is, so anything else is a mismatch made on purpose."""
    batch_invariant: bool = False
    """What RL samples does not depend, to the last bit, on what else is decoded beside it. The compiled float32 engine of small
    models is so anyhow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a run depends on."""

    seed: Seed = 0
    rl_seed: Seed = 0
    """Seed of RL alone, so that several RL runs can share one mid-training."""
    control_steps: Count = 0
    """Control: instead of RL, so many steps on all demonstrations from the mid-trained policy."""
    ranks: Some = 2
    """Processes, one thread each."""
    mesh: MeshSettings = field(default_factory=MeshSettings)
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    limits: Limits = field(default_factory=Limits)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    midtrain: MidtrainSettings = field(default_factory=MidtrainSettings)
    extend: ExtendSettings = field(default_factory=ExtendSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    rl: RlSettings = field(default_factory=RlSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    kernels: Kernels = field(default_factory=Kernels)
    reward: RewardSettings = field(default_factory=RewardSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    services: ServicesSettings = field(default_factory=ServicesSettings)

    def __post_init__(self) -> None:
        """Raises ValueError where settings of two groups do not fit together."""
        Mesh.of(self.mesh, self.ranks).require_experts(self.model.num_experts)
        if self.services.on:
            self.schedule()
        elif self.meshed:
            raise ValueError("mesh.* is of the trainer service: set services.on to true, or leave mesh.* as it is")
        elif self.rl.prompts < self.ranks:
            raise ValueError(
                f"rl.prompts={self.rl.prompts}: must be at least ranks ({self.ranks}), or services.on be true"
            )
        if self.data.rl_tasks < (needed := self.rl.steps * self.rl.prompts):
            raise ValueError(
                f"data.rl_tasks={self.data.rl_tasks}: must be at least rl.steps × rl.prompts ({needed}), as no task is "
                "trained on twice"
            )
        numerics, narrow = ENGINES[self.engine.numerics], (self.model.hidden_size, self.model.moe_intermediate_size)
        for bits, group, widths in ((numerics.expert_bits, 32, narrow), (numerics.router_bits, 64, narrow[:1])):
            if bits and any(width % min(group, width) for width in widths):
                raise ValueError(
                    f"engine.numerics={self.engine.numerics!r}: model.hidden_size and model.moe_intermediate_size must be "
                    f"multiples of {group}, the group of its integers"
                )
        multiple = RECIPES[self.kernels.recipe].multiple
        if any(width % multiple for width in narrow):
            raise ValueError(
                f"kernels.recipe={self.kernels.recipe!r}: model.hidden_size and model.moe_intermediate_size must be multiples "
                f"of {multiple}, for the blocks of its formats"
            )
        if self.model.max_position_embeddings < CODE_ROW:
            raise ValueError(
                f"model.max_position_embeddings={self.model.max_position_embeddings}: must be at least {CODE_ROW}, a row of code"
            )
        if self.limits.tokens > (most := self.agent_model.max_position_embeddings):
            raise ValueError(
                f"limits.tokens={self.limits.tokens}: must be at most model.max_position_embeddings ({most}), times "
                "extend.factor if extend.steps is above 0"
            )
        if self.extend.steps and self.extend.tokens * self.extend.code_share < most:
            raise ValueError(
                f"extend.tokens={self.extend.tokens}: extend.code_share of it ({self.extend.code_share:g}) must be at least "
                f"one row of {most} tokens, all positions that there are then"
            )

    @property
    def agent_model(self) -> ModelConfig:
        """The model that the agent runs on: after the long-context phase, if there is one."""
        return self.model.stretched(self.extend.factor) if self.extend.steps else self.model

    @property
    def trainers(self) -> int:
        """Processes of the trainer service: one, which holds everything, unless `mesh` says how ranks share the weights."""
        return self.ranks if self.meshed else 1

    @property
    def meshed(self) -> bool:
        """Whether the trainer service is ranks of a mesh, be it one alone."""
        return self.mesh != MeshSettings()

    def schedule(self) -> Schedule:
        """What the services' orchestrator goes by. Raises ValueError that names the setting that does not fit."""
        v = self.services
        return Schedule(
            prompts=self.rl.prompts,
            group=self.rl.group,
            ahead=v.ahead,
            bound=v.bound,
            window=v.window,
            order=v.order,
            retries=v.retries,
            deaths=v.deaths,
            hang_s=v.hang_s,
            steps=self.rl.steps,
        )


Tree = TypeVar("Tree")


def override(settings: Tree, values: Mapping[str, Any]) -> Tree:
    """A copy of `settings` with dotted names replaced. Raises ValueError for an unknown name, a wrong type, or out of range.

    An int is taken where a float is wanted; text is read as a number, truth value or JSON where one is wanted (command lines).
    Values of one group may depend on one another; they are set together.
    """
    changes = [(name.split("."), name, value) for name, value in values.items()]
    return _replace(settings, changes, names(settings))


def names(settings: Any, prefix: str = "") -> list[str]:
    """All dotted names of a tree."""
    found = []
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        inner = names(value, f"{prefix}{entry.name}.") if dataclasses.is_dataclass(value) else [prefix + entry.name]
        found += inner
    return found


def to_dict(settings: Any) -> dict[str, Any]:
    """The tree as nested dictionaries, ready for JSON."""
    return dataclasses.asdict(settings)


def from_dict(saved: Mapping[str, Any]) -> Settings:
    """The inverse of `to_dict`. Raises ValueError like `override`."""

    def flat(tree: Mapping[str, Any], prefix: str, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            inner = getattr(node, key, None)
            nested = isinstance(value, Mapping) and dataclasses.is_dataclass(inner)
            found |= flat(value, f"{prefix}{key}.", inner) if nested else {prefix + key: value}
        return found

    if isinstance(rl := saved.get("rl"), Mapping) and "replay" in rl:  # of a run from before replay had levels
        others = {name: value for name, value in rl.items() if name != "replay"}
        saved = {**saved, "rl": others, "replay": {"level": "ids+order" if rl["replay"] else "none"}}
    if isinstance(rl := saved.get("rl"), Mapping) and "scale_rate" not in rl:  # of a run from before it could learn
        saved = {**saved, "rl": {**rl, "scale_rate": 0.0}}
    return override(Settings(), flat(saved, "", Settings()))


def _replace(node: Tree, changes: list[tuple[list[str], str, Any]], known: list[str]) -> Tree:
    """`node` with (path below it, full name, value) changed."""
    fields = {entry.name: getattr(node, entry.name) for entry in dataclasses.fields(node)}  # type: ignore[arg-type]
    types_of = typing.get_type_hints(type(node), include_extras=True)
    replaced: dict[str, Any] = {}
    deeper: dict[str, list[tuple[list[str], str, Any]]] = {}
    for (head, *rest), full, value in changes:
        group = dataclasses.is_dataclass(fields.get(head))
        if head not in fields or (rest and not group):
            near = difflib.get_close_matches(full, known, n=1, cutoff=0.0)
            raise ValueError(f"unknown setting {full!r}; did you mean {near[0]!r}?")
        if rest:
            deeper.setdefault(head, []).append((rest, full, value))
        elif group:
            raise ValueError(f"{full} is a group of settings; name one of {', '.join(names(fields[head], full + '.'))}")
        else:
            replaced[head] = _typed(value, types_of[head], full)
    for head, inner in deeper.items():
        replaced[head] = _replace(fields[head], inner, known)
    return dataclasses.replace(node, **replaced)  # type: ignore[type-var]


def _typed(value: Any, wanted: Any, full: str) -> Any:
    """`value` as what a field is annotated with."""
    origin, inside = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        value, (_, within) = _typed(value, inside[0], full), inside
        if not within.least <= value <= within.most:
            upper = "" if within.most == math.inf else f" and at most {within.most:g}"
            raise ValueError(f"{full}={value!r}: must be at least {within.least:g}{upper}")
        return value
    if origin is typing.Literal:
        if value not in inside:
            raise ValueError(f"{full}={value!r}: must be one of {', '.join(map(repr, inside))}")
        return value
    if isinstance(wanted, types.UnionType):
        if value is None and type(None) in inside:
            return None
        return _typed(value, next(choice for choice in inside if choice is not type(None)), full)
    if origin is dict and isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise ValueError(f"{full}={value!r}: write it as JSON, as in " + '{"solved": 1.0}')
    if origin is dict and isinstance(value, Mapping):
        return {_typed(k, inside[0], full): _typed(v, inside[1], f"{full}[{k!r}]") for k, v in value.items()}
    wanted = origin or wanted
    if (isinstance(value, str) and wanted in (int, float)) or (type(value) is int and wanted is float):
        with contextlib.suppress(ValueError, OverflowError):
            value = wanted(value)
    if isinstance(value, str) and wanted is bool:
        value = {"true": True, "false": False}.get(value.lower(), value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ValueError(f"{full}={value!r}: must be of type {wanted.__name__}")
    if wanted is float and not math.isfinite(value):
        raise ValueError(f"{full}={value!r}: must be finite")
    return value
