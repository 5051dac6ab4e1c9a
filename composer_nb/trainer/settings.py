"""The tree of settings, with the same dotted names in notebooks, job files and on the command line.

    settings = override(Settings(), {"rl.steps": 20})

`override` checks names, types (pydantic) and ranges. The resolved tree is saved in the run directory.
"""

import dataclasses
import difflib
import math
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import FOREIGN, EnvSettings
from composer_nb.harness.monitors import MonitorSettings
from composer_nb.harness.plain import Count, NotNegative, Positive, Share, Some
from composer_nb.harness.rewards import JUDGED, RewardSettings
from composer_nb.kernels.moe.recipes import RECIPES
from composer_nb.trainer.learning.data import CODE_ROW, InfillSettings
from composer_nb.trainer.learning.loss import GROUPED, UNGROUPED, LossSettings
from composer_nb.trainer.learning.optimizer import OptimizerSettings, trapezoid
from composer_nb.trainer.learning.packing import ReplaySettings
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.tokenizer import TokenizerSettings
from composer_nb.trainer.models.transformer import Kernels, ModelConfig
from composer_nb.trainer.models.variants import ENGINES, EngineSettings
from composer_nb.trainer.parallel.mesh import Mesh, MeshSettings
from composer_nb.trainer.prompts import CurriculumSettings
from composer_nb.trainer.schedule import SamplingLimits, Schedule, ServicesSettings, require_live

Seed = Annotated[int, Field(ge=-(2**62), le=2**62)]
Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Settings of tasks, demonstrations and code."""

    code: str = "stdlib"
    """Python source to train on: `stdlib`, a folder of Python files, or a corpus made by `composer-nb corpus`."""
    level: Literal["functions", "repositories"] = "repositories"
    """Level of the generated tasks. repositories: a few modules with tests, where most instructions do not specify the function
    (`miniatures.py`). functions, the easiest level: one function in one file, specified in a sentence (`repairs.py`)."""
    kinds: tuple[Literal["bug", "feature", "tests", "lint", "rename", "paraphrase"], ...] = ("bug",)
    """Kinds of tasks in repositories, drawn with equal probability: a `bug` to find, a `feature` to write, weak `tests` to
    extend, a `lint` to remove, a function to `rename`, or a number to change that a `paraphrase` names, for the product's tools
    (`miniatures.py`). The published measurements use the default."""
    told: Share = 0.25
    """Share of the bug tasks in repositories whose instruction specifies the function, and of the `paraphrase` tasks whose
    instruction has the code's own words."""
    demonstrations: Count = 1024
    """Clean demonstrations for mid-training, one per task."""
    mistaken_demonstrations: Count = 2048
    """Demonstrations for the policy that RL starts from. They contain mistakes or, in repositories, come from an expert that
    searches for the answer (`expert.py`)."""
    rl_tasks: Some = 1400
    rl_turns: Count = 7
    """Maximum turns of a rollout in RL on repositories, enough for three tries: an earlier reward says more about each try. 0:
    `limits.turns`, which always applies to scored tasks."""
    heldout_tasks: Some = 460
    """Tasks that score the policies: new instances of program structures that occur in training."""
    structure_tasks: Count = 160
    """Further tasks that score the policies, reported separately: program structures that never occur in training."""
    tune_tasks: Some = 96
    """Tasks with new structures, for calibration and for evaluation during RL."""
    mistake_rate: Share = 0.5
    """Probability of a mistake before the correct edit, and of another after each mistake, up to three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(ModelConfig):
    """The initial model of a run: a checkpoint, or random weights of these sizes."""

    start: str = ""
    """Folder of a checkpoint and its tokenizer; the checkpoint determines the sizes. Empty: random weights."""
    induction: bool = True
    """Initialize random weights with an induction head where the sizes allow it, so that a small model can copy from the start
    (`models/induction.py`)."""

    @property
    def folder(self) -> Path:
        """The folder that `start` names."""
        return Path(self.start).expanduser()

    @property
    def architecture(self) -> ModelConfig:
        """The configuration of the checkpoint, or the one given here. Raises ValueError if the checkpoint's is not supported or
        contradicts a size given here."""
        sizes = {name: getattr(self, name) for name in ModelConfig.__dataclass_fields__}
        if not self.start:
            return ModelConfig(**sizes)
        try:
            config = read_config(self.folder / "config.json").model
        except (OSError, ValueError) as error:
            raise ValueError(f"model.start={self.start!r}: {error}") from None
        for name, value in sizes.items():
            if value not in (getattr(ModelConfig(), name), getattr(config, name)):
                raise ValueError(f"model.{name}={value!r}: model.start has {getattr(config, name)!r}; leave it out")
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class MidtrainSettings:
    """Continued training on code, then on demonstrations with code mixed in."""

    steps: Count = 1600
    """Steps of this stage; 0 leaves it out."""
    tokens: Some = 768
    """Tokens per step, over all ranks."""
    row_tokens: Annotated[int, Field(ge=16)] = CODE_ROW
    """Tokens of a row of code, such as the 32,768 of Composer's bulk phase; long rows fit with `midtrain.recompute`."""
    lr: NotNegative = 3e-3
    warmup: Share = 0.04
    """Share of the steps during which the learning rate rises."""
    constant: Share = 0.5
    """The learning rate is constant up to this share of the steps, then falls linearly to 3 %."""
    weight_decay: NotNegative = 0.05
    clip: NotNegative = 1.0
    code_first: Share = 0.05
    """Share of the steps, at the start, that train on code alone."""
    code_share: Share = 0.1
    """Share of code tokens in the later steps."""
    rehearsal: Share = 0.0
    """Share of the rows of code that are replaced by text sampled from the initial checkpoint, to reduce forgetting."""
    context_weight: NotNegative = 0.2
    """Loss weight of the tokens that the agent reads; the tokens that it writes have weight 1."""
    code_weight: NotNegative = 0.5
    infill: InfillSettings = field(default_factory=InfillSettings)
    balance: NotNegative = 1e-3
    """Weight of the load-balancing loss."""
    recompute: bool = False
    """Recompute layers in the backward pass of every supervised stage, as `rl.recompute` does in RL."""
    draft_steps: Count = 0
    """Steps that train a draft head on the frozen model, for speculative decoding in `serve`; 0: no head."""
    draft_weight: NotNegative = 0.0
    """Weight of the head's loss relative to the model's. Above 0, head and model train jointly from the step where the learning
    rate begins to fall. At 0, the head trains only after mid-training and does not affect the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendSettings:
    """Long-context phase between mid-training and fine-tuning. YaRN extends the positions, and rows use all of them."""

    steps: Count = 0
    """Steps of this phase; 0 leaves it out."""
    factor: Annotated[float, Field(ge=1)] = 4.0
    """Positions after this phase, as a multiple of `model.max_position_embeddings`."""
    tokens: Some = 4096
    """Tokens per step, over all ranks."""
    code_share: Share = 0.8
    """Share of tokens from long rows of code; the rest are demonstrations."""
    lr: NotNegative = 5e-4
    clip: NotNegative = 1.0
    draft_weight: NotNegative = 0.0
    """As `midtrain.draft_weight`, over the whole phase. At 0, the head stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Fine-tuning on demonstrations with mistakes: the policy that RL starts from."""

    steps: Count = 600
    """Steps of this stage; 0 leaves it out."""
    tokens: Some = 2048
    lr: NotNegative = 1e-3
    clip: NotNegative = 1.0
    draft_weight: NotNegative = 0.0
    """As `extend.draft_weight`."""
    sharpness: tuple[Positive, ...] = (1.0, 1.4, 2.0)
    """Candidate factors for all logits; the best on the tuning tasks is applied after fine-tuning. Empty: none is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSettings:
    """Reinforcement learning with groups of fixed size, for one epoch."""

    steps: Some = 160
    prompts: Some = 8
    """Tasks per step."""
    group: Some = 8
    """Rollouts per task. The advantage compares a rollout with the rest of its group: 1 needs loss.baseline=batch or none."""
    minibatches: Some = 1
    """Optimizer steps per batch."""
    lr: NotNegative = 2.5e-4
    """Peak learning rate. The rate rises over `warmup` steps, then falls linearly to a twentieth at the last step, or over the
    second half of `max_seconds` if that is lower."""
    warmup: Count = 6
    clip: NotNegative = 1.0
    refill: NotNegative = 0.0
    """Maximum number of groups that are replaced because all their rewards are equal, as a share of the trained groups. Needs
    services.on=true, a baseline that compares a group, and enough tasks in `data.rl_tasks`."""
    checkpoint_every: Some = 20
    evaluate_every: Count = 0
    """Steps between evaluations on the tuning tasks, with `eval.samples` attempts at each; 0: none. The last step has none: the
    held-out tasks follow instead."""
    microbatch_tokens: Some = 4096
    rehearsal: NotNegative = 0.5
    """Weight of demonstrations in RL's loss: in each step, `sft.tokens` tokens of those of fine-tuning get this advantage, which
    keeps solutions that RL alone would lose. 0, or no fine-tuning: none."""
    frozen_layers: Count = 0
    """Lowest layers that RL does not train, nor the embedding then (and an output layer that is tied to it). Their gradients are
    not computed, which saves time and memory and leaves those of the other layers as they are."""
    recompute: bool = False
    """Recompute layers in the backward pass. This saves memory and takes about a third more time."""
    tokens_per_rollout: Some = 64
    """Constant in the loss denominator, prompts × group × this, so that the gradient does not depend on a batch's length."""
    gate: bool = True
    """Refuse RL if the initial policy's attempts solve no held-out task, or earn equal rewards within each (`composer-nb
    headroom`). A refused run may be resumed with `false`."""
    shuffle_rewards: bool = False
    """Control: permute the rewards of each batch at random, so that nothing can be learned."""
    uncalibrated: bool = False
    """Sample and train the policy as it was before `sft.sharpness` was set: RL starts less sharp. Its `sharpness` is set
    after RL, from several factors."""
    draft_steps: Count = 0
    """Steps that train the draft head on the frozen final policy, on the rollouts of RL; 0: it stays as RL began with it."""
    start_weight: Share = 0.3
    """Weight w of the start in the final policy, which is (1 − w) times the trained weights plus w times those of the start. It
    keeps solutions that RL alone would lose. The default was chosen on the tour's model. 0: the trained weights."""
    sharpness: tuple[Positive, ...] = ()
    """Factor of the final policy's logits, after the mean with the start. RL leaves a policy too sure, which loses solutions.
    Empty: the factor with which the policy is as unsure as the start, on the tokens of RL's last batch. Of several factors the
    one is taken with which sampling solves the most tuning tasks, as in `sft.sharpness`. 1: none."""
    max_seconds: NotNegative = 330.0
    """Time limit of RL in seconds, from the first rollout; 0: none. No step begins after it, as the report says. A limit lowers
    the learning rate with time, because a policy that is cut off at a high rate scores lower. Such a run is not reproducible."""

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
class EvalSettings:
    samples: Some = 4
    """Rollouts per task at temperature 1, which is k in best-of-k. One greedy rollout is added."""
    harness: str = ""
    """Digest, or its beginning, of the only harness that may evaluate (`eval.NAME.harness` of a report); empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a run."""

    seed: Seed = 0
    rl_seed: Seed = 0
    """Additional seed for RL, so that several RL runs can share one mid-training."""
    until: Literal["midtrain", "sft", "rl"] = "rl"
    """Stage after which the run ends. No evaluation follows `midtrain` and `sft`."""
    control_steps: Count = 0
    """Control: steps of supervised training on all demonstrations, instead of RL."""
    ranks: Some = 2
    """Number of training processes; each has one thread."""
    matmul: Literal["float32", "bfloat16"] = "float32"
    """Precision of the operands of float32 matrix products. bfloat16 rounds them if the processor has AMX; sums are float32."""
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
        """Raise ValueError if settings of two groups contradict each other."""
        if not self.model.start:  # no file is read here: a finished run is looked at without its checkpoint
            self.resolve()
        if self.services.on:
            self.schedule()
        elif self.meshed and self.until == "rl" and not self.control_steps:
            raise ValueError("mesh.*: RL on a mesh needs services.on=true; else leave mesh.* at its defaults")
        elif self.rl.prompts < self.ranks:
            raise ValueError(f"rl.prompts={self.rl.prompts}: must be at least ranks ({self.ranks}) unless services.on")
        data, m, on = self.data, self.midtrain, self.services.on
        clean, sft = m.steps + self.extend.steps, self.sft.steps
        kinds = f"data.kinds={list(data.kinds)}"
        drafts = any((m.draft_weight, self.extend.draft_weight, self.sft.draft_weight, self.rl.draft_steps))
        for message, wrong in {
            "loss.feedback: needs mesh.* at its defaults, it is not split": self.loss.feedback and self.meshed,
            "loss.centre_scores: needs services.on=false, whose sampler is the trainer": self.loss.centre_scores and on,
            "rl.uncalibrated: needs sft.sharpness, several factors in rl.sharpness, and mesh.* at its defaults": (
                self.rl.uncalibrated
                and (self.meshed or not self.sft.sharpness or len(self.rl.sharpness) < 2 or not sft)
            ),
            "rl.group=1: needs loss.baseline=batch or none": self.rl.group == 1 and self.loss.baseline in GROUPED,
            f"loss.pass_k={self.loss.pass_k}: must be below rl.group": self.loss.baseline == "pass_at_k"
            and self.loss.pass_k >= self.rl.group,
            "data.demonstrations=0: midtrain.steps and extend.steps must be 0 too": clean and not data.demonstrations,
            "data.mistaken_demonstrations=0: sft.steps must be 0 too": sft and not data.mistaken_demonstrations,
            "midtrain.draft_steps: needs midtrain.steps above 0, whose end it is": m.draft_steps and not m.steps,
            "extend.draft_weight: needs extend.steps above 0": self.extend.draft_weight and not self.extend.steps,
            "sft.draft_weight: needs sft.steps above 0": self.sft.draft_weight and not (sft or self.control_steps),
            "draft_weight of any phase, rl.draft_steps: need midtrain.draft_steps above 0": drafts
            and not m.draft_steps,
            "midtrain.rehearsal: needs model.start": m.rehearsal and not self.model.start,
            f"{kinds}: at least one kind is needed": not data.kinds,
            f"{kinds}: tasks of data.level='functions' are bugs": data.level == "functions" and data.kinds != ("bug",),
            "rl.refill: needs services.on=true": self.rl.refill and not on,
            "rl.refill: needs loss.baseline=group or pass_at_k; with others, equal rewards teach": self.rl.refill
            and self.loss.baseline in UNGROUPED,
            "rl.refill: needs reward.effort.by_solved=0 and no reward.judge; it scores parts of groups": self.rl.refill
            and (self.reward.effort.by_solved or self.reward.judge),
            f"reward.judge={self.reward.judge!r}: needs `judged` in reward.weights, which needs a judge": bool(
                self.reward.judge
            )
            != bool(self.reward.weights.get(JUDGED)),
            "rl.frozen_layers: needs mesh.* at its defaults": self.rl.frozen_layers and self.meshed,
            "services.changes: needs services.on=true": self.services.changes and not on,
            "engine.transition=sync: needs services.lockstep=false, as turns under way wait for the swap": on
            and self.services.lockstep
            and self.engine.transition == "sync",
        }.items():
            if wrong:
                raise ValueError(message)
        if changes := self.services.changes:
            for name in {name for values in changes.values() for name in values}:
                require_live(name)
            reduce(override, changes.values(), replace(self, services=replace(self.services, changes={})))
        if not self.env.path and self.data.rl_tasks < (needed := self.prompts_needed):
            raise ValueError(
                f"data.rl_tasks={self.data.rl_tasks}: must be at least rl.steps × rl.prompts × (1 + rl.refill) "
                f"({needed}): each task is taken once"
            )

    def resolve(self) -> None:
        """Check the settings against the sizes of the model, which are read from its checkpoint if there is one. Raises
        ValueError, which names the setting, if one does not fit."""
        model = self.model.architecture
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
        if self.rl.frozen_layers >= model.num_hidden_layers:
            raise ValueError(
                f"rl.frozen_layers={self.rl.frozen_layers}: must be below model.num_hidden_layers ({model.num_hidden_layers})"
            )
        row = self.midtrain.row_tokens
        if (self.midtrain.steps or self.extend.steps) and model.max_position_embeddings < row:
            raise ValueError(
                f"model.max_position_embeddings={model.max_position_embeddings}: must be at least {row}, the length of a row "
                "of code (midtrain.row_tokens)"
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

    def require_used(self) -> None:
        """Raise ValueError for a changed setting that a class in `env.tasks` replaces, so that it would have no effect."""
        environment, names = self.env.own, list[str]()
        if hasattr(environment, "reward"):
            names += [f"reward.{name}" for name in changed(RewardSettings(), self.reward)]
        if hasattr(environment, "tools") and self.env.tools != EnvSettings().tools:
            names.append("env.tools")
        if names:
            part = "tools" if names[0] == "env.tools" else "a reward"
            why = f"has no effect, because env.tasks={self.env.tasks!r} has {part} of its own"
            raise ValueError(f"{names[0]}: {why}; leave it out, or change the class")

    @property
    def agent_model(self) -> ModelConfig:
        """Model configuration of the agent, after the long-context phase if there is one. Raises like `architecture`."""
        model = self.model.architecture
        return model.stretched(self.extend.factor) if self.extend.steps else model

    @property
    def user_code(self) -> list[str]:
        """The user's classes and functions, as `MODULE:NAME`, that the environment, the reward and the advantages are."""
        names = [self.reward.judge, self.loss.baseline, *self.reward.weights]
        if self.env.own is not None and not self.env.tasks.startswith(FOREIGN):
            names.append(self.env.tasks)
        return [name for name in names if ":" in name]

    @property
    def searched(self) -> bool:
        """Whether the expert of the demonstrations searches for its answer."""
        return self.env.path is None and self.data.level == "repositories"

    @property
    def supervised(self) -> bool:
        """Whether a supervised stage has steps."""
        return any((self.midtrain.steps, self.extend.steps, self.sft.steps, self.control_steps))

    @property
    def prompts_needed(self) -> int:
        """Maximum number of tasks that RL uses, each once."""
        return math.ceil(self.rl.steps * self.rl.prompts * (1 + self.rl.refill))

    @property
    def sampling_seed(self) -> int:
        """Seed of everything that RL samples; rollouts differ by their numbers."""
        return self.seed * 10_007 + self.rl_seed

    @property
    def slots(self) -> int:
        """Concurrent rollouts per engine."""
        return min(self.engine.slots, self.env.sandboxes) if self.env.boxed else self.engine.slots

    @property
    def trainers(self) -> int:
        """Number of processes of the trainer service: `ranks` with a mesh, else one."""
        return self.ranks if self.meshed else 1

    @property
    def meshed(self) -> bool:
        """Whether ranks share one model on a mesh: in supervised stages and in the trainer service."""
        return replace(self.mesh, device="cpu") != MeshSettings()

    def schedule(self) -> Schedule:
        """Return the schedule of the orchestrator. Raises ValueError, which names the setting, if one does not fit."""
        limits = {item.name: getattr(self.services, item.name) for item in dataclasses.fields(SamplingLimits)}
        limits["hang_s"] += self.limits.seconds  # longer than any turn or call of a rollout
        return Schedule(
            **limits,
            **{name: getattr(self.rl, name) for name in ("prompts", "group", "steps")},
            refill=round(self.rl.refill * self.rl.steps * self.rl.prompts),
        )


def override(settings: Tree, values: Mapping[str, Any]) -> Tree:
    """Return a copy of a tree of dataclasses with dotted names replaced; all values are set together.

    Text from a command line may stand for any value, as YAML; one value may stand for a list. Raises ValueError, which names the
    settings, for unknown names, wrong types and values out of range.
    """
    flat, tree, problems = to_flat(settings), to_dict(settings), list[str]()
    for name, value in values.items():
        if name not in flat:
            near = [other for other in flat if other.startswith(f"{name}.")] or difflib.get_close_matches(name, flat)
            problems.append(f"unknown setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            continue
        if isinstance(flat[name], tuple | dict) and isinstance(value, str):
            with suppress(yaml.YAMLError):
                value = yaml.safe_load(value)
        if isinstance(flat[name], tuple) and not isinstance(value, list | tuple):
            value = [value]
        if isinstance(value, bool) and type(flat[name]) in (int, float):  # pydantic would take it for 0 or 1
            problems.append(f"{name}={value!r}: must be a number")
        *groups, last = name.split(".")
        reduce(getitem, groups, tree)[last] = value
    return _validated(type(settings), tree, problems)


def _validated(kind: type[Tree], tree: Mapping[str, Any], problems: Iterable[str] = ()) -> Tree:
    """Return settings of type `kind` from a tree. Raises ValueError, which lists `problems` and all that validation finds."""
    problems = [*problems]
    try:
        settings = _model_of(cast(Hashable, kind)).model_validate({"tree": tree})
    except ValidationError as error:
        for problem in error.errors():
            name, text = ".".join(map(str, problem["loc"][1:])), problem["msg"].replace("Input should", "must")
            if problem["type"] == "unexpected_keyword_argument":
                problems.append(f"unknown setting {name!r}")
            else:  # the checks of the dataclasses name the setting themselves
                message = text.removeprefix("Value error, ")
                problems.append(message if message != text else f"{name}={problem['input']!r}: {text}")
    if problems:
        raise ValueError(". ".join(problems))
    return cast(Tree, settings.tree)  # type: ignore[attr-defined]


@lru_cache
def _model_of(kind: Hashable) -> type[BaseModel]:
    """Return a pydantic model that makes a tree of dataclasses from dictionaries; its configuration applies to all of it."""
    return create_model("Checked", __config__=ConfigDict(allow_inf_nan=False, extra="forbid"), tree=(kind, ...))  # type: ignore[arg-type]


def changed(first: Tree, second: Tree) -> dict[str, Any]:
    """Return by dotted name the values of `second` that differ from those of `first`, as `override` takes them."""
    old = to_flat(first)
    differ = {name: value for name, value in to_flat(second).items() if value != old[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in differ.items()}


def to_dict(settings: Any) -> dict[str, Any]:
    """Return the tree as nested dictionaries, ready for JSON."""
    return dataclasses.asdict(settings)


def from_dict(saved: Mapping[str, Any]) -> Settings:
    """Return the settings that `to_dict` saved. Raises ValueError as `override` does."""
    return _validated(Settings, saved)


def to_flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of the tree by dotted name."""
    flat: dict[str, Any] = {}
    for field_ in dataclasses.fields(settings):
        name, value = prefix + field_.name, getattr(settings, field_.name)
        flat |= to_flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return flat
