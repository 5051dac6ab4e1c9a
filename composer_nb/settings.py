"""The tree of settings, with the same dotted names in notebooks, job files and on the command line.

    settings = override(Settings(), {"rl.steps": 20})

`override` checks names, types (pydantic) and ranges. The resolved tree is saved in the run directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import typing
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import Field, ValidationError

from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.monitors import MonitorSettings
from composer_nb.harness.plain import Count, NotNegative, Positive, Share, Some, adapter_of, checked_value
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.tasks.miniatures import Kind
from composer_nb.kernels.moe.recipes import RECIPES
from composer_nb.trainer.learning.data import CODE_ROW
from composer_nb.trainer.learning.infill import InfillSettings
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.muon import OptimizerSettings
from composer_nb.trainer.learning.optimizer import trapezoid
from composer_nb.trainer.learning.replay_settings import ReplaySettings
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.tokenizer import TokenizerSettings
from composer_nb.trainer.models.transformer import Kernels, ModelConfig
from composer_nb.trainer.models.variants import ENGINES, EngineSettings
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.prompts import CurriculumSettings
from composer_nb.trainer.schedule import Schedule

Seed = Annotated[int, Field(ge=-(2**62), le=2**62)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Tasks, demonstrations and code."""

    code: str = "stdlib"
    """Python source to train on: `stdlib`, a folder of Python files, or one that `composer-nb corpus` made."""
    level: Literal["functions", "repositories"] = "repositories"
    """Generated tasks. repositories: some modules with tests, and in most tasks no word about what the function should do
    (`miniatures.py`). functions, the easiest level: one function in one file, and a sentence that says it (`repairs.py`)."""
    kinds: tuple[Kind, ...] = ("bug",)
    """Kinds of tasks in repositories, drawn with equal chances: a `bug` to find, a `feature` to write, weak `tests` to extend, a
    `lint` to remove (`miniatures.py`). The published measurements are of the default."""
    told: Share = 0.25
    """Share of repositories with a bug whose instruction says what the function should do."""
    demonstrations: Count = 1024
    """Clean demonstrations for mid-training, one per task."""
    mistaken_demonstrations: Count = 2048
    """Demonstrations with mistakes, or in repositories by an expert who searches the answer (`expert.py`), for the policy that RL
    starts from."""
    rl_tasks: Some = 1400
    rl_turns: Count = 7
    """Turns in which RL's repositories must be mended, three tries: a reward that comes sooner says more about each try. Scored
    tasks have `limits.turns`, and RL too where this is 0."""
    heldout_tasks: Some = 460
    """Tasks that score the policies: new instances of the program structures that training shows."""
    structure_tasks: Count = 160
    """Tasks that score the policies apart from those: program structures that training never shows."""
    tune_tasks: Some = 96
    """Tasks of new structures for calibration, and for evaluation during RL."""
    mistake_rate: Share = 0.5
    """Probability of a mistake before the right edit, and of another after each mistake, up to three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(ModelConfig):
    """The model that a run begins with: a checkpoint, or random weights of these sizes."""

    start: str = ""
    """Folder of a checkpoint with its tokenizer, which also gives the sizes. Empty: random weights."""
    induction: bool = True
    """Give random weights an induction head, with which a small model copies from the start (`models/induction.py`), where its
    sizes allow it."""

    @property
    def folder(self) -> Path:
        """The folder that `start` names."""
        return Path(self.start).expanduser()

    @property
    def architecture(self) -> ModelConfig:
        """The configuration of the checkpoint, or the one given here. Raises ValueError where the checkpoint has none that is
        supported, or one that contradicts a size given here."""
        sizes = {name: getattr(self, name) for name in ModelConfig.__dataclass_fields__}
        if not self.start:
            return ModelConfig(**sizes)
        try:
            found = read_config(self.folder / "config.json").model
        except (OSError, ValueError) as error:
            raise ValueError(f"model.start={self.start!r}: {error}") from None
        for name, value in sizes.items():
            if value not in (getattr(ModelConfig(), name), getattr(found, name)):
                raise ValueError(f"model.{name}={value!r}: model.start has {getattr(found, name)!r}; leave it out")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MidtrainSettings:
    """Continued training on code, then on demonstrations with code mixed in."""

    steps: Count = 1600
    """0 leaves this stage out."""
    tokens: Some = 768
    """Tokens per step, over all ranks."""
    lr: NotNegative = 3e-3
    warmup: Share = 0.04
    """Share of the steps in which the learning rate rises."""
    constant: Share = 0.5
    """The learning rate stays up to this share of the steps, then falls linearly to 3 %."""
    weight_decay: NotNegative = 0.05
    clip: NotNegative = 1.0
    code_first: Share = 0.05
    """Share of the steps that train on code alone, at the start."""
    code_share: Share = 0.1
    """Share of code tokens in the later steps."""
    rehearsal: Share = 0.0
    """Share of the rows of code that are replaced by text which the checkpoint wrote itself, against forgetting."""
    context_weight: NotNegative = 0.2
    """Loss weight of the tokens that the agent reads; those that it writes weigh 1."""
    code_weight: NotNegative = 0.5
    infill: InfillSettings = field(default_factory=InfillSettings)
    balance: NotNegative = 1e-3
    """Weight of the load-balancing loss."""
    draft_steps: Count = 0
    """Steps that train a head on the frozen model, which drafts tokens for `serve`; 0: no head."""
    draft_weight: NotNegative = 0.0
    """Weight of the head's loss beside the model's. With it the head begins where the learning rate begins to fall, and learns
    jointly with the model from there; 0: it begins after mid-training, and the model never learns from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendSettings:
    """Long-context phase between mid-training and fine-tuning; YaRN stretches the positions, and rows use all of them."""

    steps: Count = 0
    """Steps of this phase; 0 leaves it out."""
    factor: Annotated[float, Field(ge=1)] = 4.0
    """Positions after this phase, as a multiple of `model.max_position_embeddings`."""
    tokens: Some = 4096
    """Tokens per step, over all ranks."""
    code_share: Share = 0.8
    """Share of tokens in long rows of code; the rest are demonstrations."""
    lr: NotNegative = 5e-4
    clip: NotNegative = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Fine-tuning on demonstrations with mistakes: the policy that RL starts from."""

    steps: Count = 300
    """0 leaves this stage out."""
    tokens: Some = 2048
    lr: NotNegative = 1e-3
    clip: NotNegative = 1.0
    sharpness: tuple[Positive, ...] = (1.0, 1.4, 2.0)
    """Factors of all logits to choose from on the tuning tasks, after fine-tuning; none: they stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings:
    """Reinforcement learning with groups of fixed size and one epoch."""

    steps: Some = 160
    prompts: Some = 8
    """Tasks per step."""
    group: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task, at least two: an advantage compares a rollout with the others of its group."""
    minibatches: Some = 1
    """Optimizer steps per batch."""
    lr: NotNegative = 2.5e-4
    """Peak learning rate. It rises over `warmup` steps and falls linearly to a twentieth at the last step, or over the second
    half of `max_seconds` if that gives less."""
    warmup: Count = 6
    clip: NotNegative = 1.0
    refill: NotNegative = 0.0
    """Most groups, as a share of those that are trained, that are replaced because all their rewards are equal. Needs
    services.on=true, and tasks for them in `data.rl_tasks`."""
    checkpoint_every: Some = 20
    evaluate_every: Count = 0
    """Steps between evaluations on the tuning tasks; 0: none. The last step has none, because the held-out tasks follow."""
    microbatch_tokens: Some = 4096
    recompute: bool = False
    """Recompute layers in the backward pass: less memory, about a third more time."""
    tokens_per_rollout: Some = 64
    """Constant of the loss denominator, prompts × group × this, so that the length of a batch does not enter its gradient."""
    gate: bool = True
    """Refuse RL where the start's attempts at each held-out task earn the same reward (`composer-nb headroom`)."""
    shuffle_rewards: bool = False
    """Control: permute rewards at random within the batch, so that nothing can be learned."""
    max_seconds: NotNegative = 330.0
    """Time limit of RL in seconds; 0: none. No step begins later, and the report says so. The learning rate then falls with time,
    because a policy that is cut off at a high rate scores lower; such a run is not reproducible."""

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """Return the learning rate of a step that begins after `seconds` of RL."""
        share = self.warmup / self.steps
        factor = trapezoid(step, self.steps, share, share, 0.05)
        if self.max_seconds:
            factor = min(factor, trapezoid(min(seconds, self.max_seconds) - 1, self.max_seconds, 0.0, 0.5, 0.05))
        return self.lr * factor

    def denominator(self, loss: LossSettings) -> float:
        """Return the number that divides the summed loss of a batch."""
        return float(self.prompts * self.group * (1 if loss.length_norm else self.tokens_per_rollout))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesSettings:
    """Asynchronous RL as services on Ray; with `on` false, one synchronous loop."""

    on: bool = True
    address: str = ""
    """Address of a Ray cluster, or folder of a head (`composer-nb up`); empty: a cluster is started for the run and ends with
    it."""
    engines: Some = 1
    """Number of inference engines; each has its own environment worker."""
    ahead: Count = 1
    """Batches that may be in flight beyond the one that is due (O); 0: on policy."""
    bound: Count = 2
    """Highest staleness of the oldest token of a rollout when it is trained, in batches."""
    window: Share = 1.0
    """A batch is taken from the oldest max(P, window · (O + 1) · P) groups."""
    order: Literal["window", "fifo", "discard"] = "window"
    retries: Count = 3
    """Times that one rollout is dispatched again after an infrastructure fault."""
    deaths: Count = 20
    """Times that one group may lose its worker, or one batch its trainer."""
    hang_s: Positive = 120.0
    """Seconds of silence after which a worker is ended as hung."""
    lockstep: bool = False
    """Step engines only while an environment worker waits for them. Bit-reproducible with ahead=0 and one engine."""
    full_every: Some = 25
    """Interval of full weight versions; those between are deltas."""
    serve: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on the loopback at which users speak to the policy while it trains, as with `composer-nb serve`: their requests go
    before rollouts. 0: none."""
    store: str = ""
    """URL (fsspec) of the store of weight versions; each run has its own folder. Empty: the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    samples: Some = 4
    """Rollouts per task at temperature 1, the k of best-of-k; one more is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a run."""

    seed: Seed = 0
    rl_seed: Seed = 0
    """Additional seed of RL, so that several RL runs can share one mid-training."""
    until: Literal["midtrain", "sft", "rl"] = "rl"
    """Stage after which the run ends. The first two are not followed by an evaluation."""
    control_steps: Count = 0
    """Control: steps of supervised training on all demonstrations, in place of RL."""
    ranks: Some = 2
    """Number of training processes; each has one thread."""
    matmul: Literal["float32", "bfloat16"] = "float32"
    """Operands of float32 matrix products. bfloat16 rounds them where the processor has units for it (AMX); sums are float32."""
    mesh: MeshSettings = field(default_factory=MeshSettings)
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    env: EnvSettings = field(default_factory=EnvSettings)
    limits: Limits = field(default_factory=Limits)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    midtrain: MidtrainSettings = field(default_factory=MidtrainSettings)
    extend: ExtendSettings = field(default_factory=ExtendSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    rl: RlSettings = field(default_factory=RlSettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    kernels: Kernels = field(default_factory=Kernels)
    reward: RewardSettings = field(default_factory=RewardSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    services: ServicesSettings = field(default_factory=ServicesSettings)

    def __post_init__(self) -> None:
        """Raise ValueError where settings of two groups contradict each other."""
        if not self.model.start or self.model.folder.is_dir():  # a finished run is read without its checkpoint
            self._check_model(self.model.architecture)
        if self.services.on:
            self.schedule()
        elif self.meshed:
            raise ValueError("mesh.* needs the trainer service: set services.on=true, or leave mesh.* at its defaults")
        elif self.rl.prompts < self.ranks:
            raise ValueError(f"rl.prompts={self.rl.prompts}: must be at least ranks ({self.ranks}) unless services.on")
        if self.loss.feedback and self.meshed:
            raise ValueError("loss.feedback: its teacher's rows are not split over ranks; leave mesh.* at its defaults")
        data, clean = self.data, self.midtrain.steps + self.extend.steps
        if clean and not data.demonstrations:
            raise ValueError("data.demonstrations=0: midtrain.steps and extend.steps must be 0 too, they train on them")
        if self.midtrain.draft_steps and not self.midtrain.steps:
            raise ValueError("midtrain.draft_steps: needs midtrain.steps above 0, whose end it is")
        if self.midtrain.draft_weight and not self.midtrain.draft_steps:
            raise ValueError("midtrain.draft_weight: needs midtrain.draft_steps above 0, which begin the head")
        if self.midtrain.rehearsal and not self.model.start:
            raise ValueError("midtrain.rehearsal: needs model.start, because random weights have nothing to forget")
        if not data.kinds:
            raise ValueError("data.kinds=[]: at least one kind is needed")
        if data.kinds != ("bug",) and data.level == "functions":
            raise ValueError(f"data.kinds={list(data.kinds)}: tasks of data.level='functions' have bugs alone")
        if self.sft.steps and not data.mistaken_demonstrations:
            raise ValueError("data.mistaken_demonstrations=0: sft.steps must be 0 too, it trains on them")
        if self.rl.refill and not self.services.on:
            raise ValueError(f"rl.refill={self.rl.refill:g}: needs services.on=true")
        if not self.env.path and self.data.rl_tasks < (needed := self.prompts_needed):
            raise ValueError(
                f"data.rl_tasks={self.data.rl_tasks}: must be at least rl.steps × rl.prompts × (1 + rl.refill) "
                f"({needed}): each task is taken once"
            )

    def _check_model(self, model: ModelConfig) -> None:
        Mesh.of(self.mesh, self.ranks).require_experts(model.num_experts if model.moe_layers else 1)
        numerics, narrow = ENGINES[self.engine.numerics], (model.hidden_size, model.moe_intermediate_size)
        for bits, group, widths in ((numerics.expert_bits, 32, narrow), (numerics.router_bits, 64, narrow[:1])):
            if bits and any(width % min(group, width) for width in widths):
                raise ValueError(
                    f"engine.numerics={self.engine.numerics!r}: model.hidden_size and model.moe_intermediate_size must be "
                    f"multiples of {group}, its quantization group"
                )
        multiple = RECIPES[self.kernels.recipe].multiple
        if any(width % multiple for width in narrow):
            raise ValueError(
                f"kernels.recipe={self.kernels.recipe!r}: model.hidden_size and model.moe_intermediate_size must be multiples "
                f"of {multiple}, its block size"
            )
        if (self.midtrain.steps or self.extend.steps) and model.max_position_embeddings < CODE_ROW:
            raise ValueError(
                f"model.max_position_embeddings={model.max_position_embeddings}: must be at least {CODE_ROW}, "
                "the length of a row of code"
            )
        if self.limits.tokens > (most := self.agent_model.max_position_embeddings):
            raise ValueError(
                f"limits.tokens={self.limits.tokens}: must be at most model.max_position_embeddings ({most}"
                f"{', of model.start' if self.model.start else ''}), times extend.factor if extend.steps is above 0"
            )
        if self.extend.steps and self.extend.tokens * self.extend.code_share < most:
            raise ValueError(
                f"extend.tokens={self.extend.tokens}: times extend.code_share ({self.extend.code_share:g}) it must give at "
                f"least one row of {most} tokens, the positions after stretching"
            )

    @property
    def agent_model(self) -> ModelConfig:
        """Model configuration of the agent, after the long-context phase if there is one. Raises like `architecture`."""
        model = self.model.architecture
        return model.stretched(self.extend.factor) if self.extend.steps else model

    @property
    def searched(self) -> bool:
        """The expert of the demonstrations searches its answer."""
        return self.env.path is None and self.data.level == "repositories"

    @property
    def prompts_needed(self) -> int:
        """Tasks that RL takes at most, each once."""
        return math.ceil(self.rl.steps * self.rl.prompts * (1 + self.rl.refill))

    @property
    def sampling_seed(self) -> int:
        """Seed of everything that RL samples; the rollouts' numbers tell them apart."""
        return self.seed * 10_007 + self.rl_seed

    @property
    def slots(self) -> int:
        """Rollouts at a time, of each engine."""
        return min(self.engine.slots, self.env.sandboxes) if self.env.boxed else self.engine.slots

    @property
    def trainers(self) -> int:
        """Number of processes of the trainer service: `ranks` with a mesh, else one."""
        return self.ranks if self.meshed else 1

    @property
    def meshed(self) -> bool:
        """The trainer service consists of ranks of a mesh."""
        return self.mesh != MeshSettings()

    def schedule(self) -> Schedule:
        """Return the schedule of the orchestrator. Raises ValueError that names the setting that does not fit."""
        v = self.services
        return Schedule(
            **{name: getattr(self.rl, name) for name in ("prompts", "group", "steps")},
            **{name: getattr(v, name) for name in ("ahead", "bound", "window", "order", "retries", "deaths", "hang_s")},
            refill=round(self.rl.refill * self.rl.steps * self.rl.prompts),
        )


Tree = TypeVar("Tree")


def override(settings: Tree, values: Mapping[str, Any]) -> Tree:
    """Return a copy of a tree of dataclasses with dotted names replaced; all values are set together.

    An int may stand for a float. Text may stand for a number, a truth value or a dictionary, as it comes from a command line.
    Raises ValueError for an unknown name, a wrong type or a value out of range; it names the setting.
    """
    known = _types(settings)
    typed = {}
    for name, value in values.items():
        if name in known:
            typed[name] = _typed(value, known[name], name)
        elif inner := [each for each in known if each.startswith(f"{name}.")]:
            raise ValueError(f"{name} is a group of settings; name one of {', '.join(inner)}")
        else:
            near = [each for each in difflib.get_close_matches(name, known) if _reads(known[each], value)]
            raise ValueError(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return _replaced(settings, typed)


def names(settings: Any) -> list[str]:
    """Return all dotted names of a tree."""
    return list(_types(settings))


def to_dict(settings: Any) -> dict[str, Any]:
    """Return the tree as nested dictionaries, ready for JSON."""
    return dataclasses.asdict(settings)


def from_dict(saved: Mapping[str, Any]) -> Settings:
    """Return the settings that `to_dict` saved. Raises ValueError as `override` does."""
    return override(Settings(), _flat(saved, "", Settings()))


def _flat(tree: Mapping[str, Any], prefix: str, node: Any) -> dict[str, Any]:
    """Return the leaves of a saved tree by dotted name; a dictionary of unknown settings is a leaf."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = getattr(node, key, None)
        nested = isinstance(value, Mapping) and dataclasses.is_dataclass(inner)
        found |= _flat(value, f"{prefix}{key}.", inner) if nested else {prefix + key: value}
    return found


def _types(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every setting of a tree by dotted name, with its range."""
    found: dict[str, Any] = {}
    for name, wanted in typing.get_type_hints(type(settings), include_extras=True).items():
        value, full = getattr(settings, name), prefix + name
        found |= _types(value, f"{full}.") if dataclasses.is_dataclass(value) else {full: wanted}
    return found


def _reads(wanted: Any, value: Any) -> bool:
    """Return whether a setting can have `value`, if it is text: else it is a setting of another kind that was meant."""
    with suppress(ValueError):
        if isinstance(value, str):
            _typed(value, wanted, "")
        return True
    return False


def _typed(value: Any, wanted: Any, name: str) -> Any:
    """Return `value` as its annotation wants it; text is tried as it is, then as a literal."""
    adapter = adapter_of(wanted)
    if isinstance(value, str):
        with suppress(ValidationError):
            return adapter.validate_python(value)
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = literal_eval(value.capitalize() if value.lower() in ("true", "false") else value)
    bare = get_args(wanted)[0] if get_origin(wanted) is Annotated else wanted
    if get_origin(bare) is tuple and isinstance(value, str):  # [bug,lint], as a shell leaves it
        value = re.findall(r"[\w.-]+", value)
    if get_origin(bare) is tuple and isinstance(value, list):  # JSON has no tuples
        value = tuple(value)
    return checked_value(adapter, value, name)


def _replaced(node: Any, values: Mapping[str, Any]) -> Any:
    changes: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for group in {name.partition(".")[0] for name in values} - changes.keys():
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{group}.")}
        changes[group] = _replaced(getattr(node, group), inner)
    return dataclasses.replace(node, **changes)
