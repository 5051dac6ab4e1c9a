"""One rollout, token by token: the text that the agent wrote, the probability of each token, its experts.

`read` gives HTML for a notebook: turns fold, and hovering over a token shows its numbers and experts. Tokens that the agent wrote
are coloured in one of the ways of `colouring`; those that it read are grey.

Dimensions: T tokens of a rollout, L layers, K experts per token, E experts.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Kind, Segment
from composer_nb.harness.store import load_attempts
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.untrusted import as_html, beneath
from composer_nb.production.record import served as served_by
from composer_nb.trainer.learning.retrace import Recomputed, recompute
from composer_nb.trainer.models.hf_config import read_config
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.reader import stored_groups
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import style
from composer_nb.views.page import Html, box
from composer_nb.views.style import Picture, title

# Characters of a folded part that its heading shows.
PREVIEW = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A stored rollout with its origin, for headings (`name`), and what else is known of it: its advantage, reward and group
    (from 0) in RL, the values of another model at the tokens of each segment (`with_trainer`), what a loss does with these
    (`labs.losses.with_reasons`), and the `number` of the segment that is looked at, from 0."""

    attempt: Attempt
    name: str
    tokenizer: Tokenizer
    advantage: float | None = None
    reward: float | None = None
    group: int | None = None
    recomputed: tuple[Recomputed, ...] = ()
    reasons: tuple[Sequence[str], ...] = ()
    number: int = 0

    @property
    def segment(self) -> Segment:
        return self.attempt.rollout.segments[self.number]

    @property
    def trainer(self) -> Recomputed | None:
        return self.recomputed[self.number] if self.recomputed else None

    @property
    def heading(self) -> str:
        rollout, grade = self.attempt.rollout, self.attempt.grade
        outcome = "solved" if grade.passed else "not solved" if grade.known else grade.status
        gain = "" if self.advantage is None else f", advantage {self.advantage:+.2f}"
        network = f", {len(rollout.egress)} connections out" if rollout.egress else ""
        return f"{self.name}: {outcome}, {rollout.calls} calls{network}, ended by “{rollout.stop}”{gain}"


def held_out(run: RunDir, policy: str) -> dict[str, StoredRollout]:
    """Return the greedy attempt of a policy at each held-out task, with log-probabilities but without routes."""
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "heldout.jsonl")}
    attempts = load_attempts(beneath(run.path / "rollouts", f"eval_{policy}.parquet"), tasks)
    tokenizer = load_tokenizer(run.path / "data", needed=())
    # The greedy ones come last, and the last one of a task stays.
    return {attempt.task.id: StoredRollout(attempt=attempt, name=policy, tokenizer=tokenizer) for attempt in attempts}


def sampled(run: RunDir, step: int = -1) -> list[StoredRollout]:
    """Return the rollouts of RL step `step` (from 1; −1 is the last that trained on something), with advantages and routes."""
    number, groups = stored_groups(run, step)
    tokenizer, name = load_tokenizer(run.path / "data", needed=()), f"RL step {number}"
    return [
        StoredRollout(
            attempt=scored.attempt,
            name=name,
            tokenizer=tokenizer,
            advantage=scored.advantage,
            reward=scored.reward.total,
            group=at,
        )
        for at, group in enumerate(groups)
        for scored in group
    ]


def served(run: RunDir) -> list[StoredRollout]:
    """Return the rollouts that `composer-nb serve --record` stored."""
    tokenizer = load_tokenizer(run.path / "data", needed=())
    return [
        StoredRollout(attempt=attempt, name=name, tokenizer=tokenizer) for name, attempt in served_by(run.path).items()
    ]


def before_and_after(run: RunDir) -> tuple[StoredRollout, StoredRollout]:
    """Return greedy attempts before and after RL at one held-out task: the first that only the second solves, else one where they
    differ, else the first task."""
    before, after = held_out(run, "start"), held_out(run, "final")

    def telling(task: str) -> int:
        gained = after[task].attempt.grade.passed and not before[task].attempt.grade.passed
        differ = before[task].attempt.rollout.turns != after[task].attempt.rollout.turns
        return 2 * gained + differ

    best = max(before, key=telling)
    return before[best], after[best]


def with_trainer(stored: StoredRollout, model: Model) -> StoredRollout:
    """Return the rollout with the values of `model` at its tokens."""
    return replace(stored, recomputed=tuple(recompute(model, stored.attempt.rollout.segments)))


def read(stored: StoredRollout, color: ColorBy = "logprob", unfold: bool = False) -> Html:
    """Return the rollout as HTML, segment after segment, with one folding part for the prompt, each call and each observation.
    Calls are open; `unfold` opens all. Hovering over a token shows its kind, numbers, experts and gates."""
    blocks, legend, segments = list[str](), dict[str, Tint](), stored.attempt.rollout.segments
    for number, segment in enumerate(segments):
        at_segment = replace(stored, number=number)
        tints, meanings = colouring(at_segment, color)
        legend |= {text: tint for tint, text in meanings}
        if len(segments) > 1:
            origin = f"goes on from segment {segment.parent + 1}" if segment.parent >= 0 else "begins with the task"
            blocks.append(f'<div class="head">segment {number + 1}: {len(segment.token_ids)} tokens, {origin}</div>')
        blocks += _folding(at_segment, tints, unfold)
    chip_html = '<span class="chip" style="background:{}">{}</span>'
    chips = " ".join(chip_html.format(tint.over_page, html.escape(text)) for text, tint in legend.items())
    return box(
        f'<div class="head">{as_html(stored.heading)}</div>',
        f'<div class="quiet">grey: read; on colour: written ({chips}); hover a token for its numbers</div>',
        *blocks,
    )


def _folding(stored: StoredRollout, tints: Sequence[Tint | None], unfold: bool) -> Iterator[str]:
    """Yield runs of tokens of one kind as HTML."""
    texts = _texts(stored)
    spans = [_span(*token) for token in zip(texts, _notes(stored), tints, strict=True)]
    for number, run in groupby(range(len(texts)), key=lambda position: int(stored.segment.kind[position])):
        kind, positions = Kind(number), list(run)
        opened = " open" if unfold or kind not in (Kind.PROMPT, Kind.OBSERVATION) else ""
        heading = as_html(_part_heading(kind, [texts[position] for position in positions]))
        body = "".join(spans[position] for position in positions)
        yield f"<details{opened}><summary>{heading}</summary><pre>{body}</pre></details>"


def _span(text: str, note: str, tint: Tint | None) -> str:
    """Return a token as HTML: a class for tokens that the agent read, a colour for those that it wrote."""
    classes = " ".join(["read"] * (tint is None) + ["mark"] * _is_special(text))
    class_attribute = f' class="{classes}"' if classes else ""
    style_attribute = f' style="background:{tint.over_page}"' if tint else ""
    hover, text_shown = as_html(note).replace("\n", "&#10;"), text.replace("\n", "⏎\n")
    return f'<span{class_attribute}{style_attribute} title="{hover}">{as_html(text_shown)}</span>'


def _part_heading(kind: Kind, texts: Sequence[str]) -> str:
    joined = "".join(" " if _is_special(text) else text.replace("\n", " ⏎ ") for text in texts)
    text = " ".join(joined.split())
    preview = text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…"
    return f"{_name(kind)} · {len(texts)} tokens · {preview}"


def _is_special(text: str) -> bool:
    return text.startswith("<|") and text.endswith("|>")


def _name(kind: Kind) -> str:
    return kind.name.lower().replace("_", " ")


def experts(run: RunDir, step: int = -1) -> Picture:
    """Draw the share of an RL step's tokens that each expert of each layer received; even use would be K / E."""
    steps = len(run.steps("rl"))
    number = steps + step if step < 0 else step - 1
    files = sorted((run.path / "rollouts").glob(f"rl_{number:05d}_*.safetensors"))
    if not steps or not files:
        return style.empty("no rollout with routes is stored yet")
    use_LE = expert_use(files, read_config(run.path / "weights" / "start" / "config.json").model.num_experts)
    if not len(use_LE):
        return style.empty("the model has no experts")
    experts_per_token = use_LE.sum(1).round().astype(int)[0]
    picture = Picture(7.0, 0.9 + 0.42 * len(use_LE))
    ax = picture.add_subplot()
    image = ax.imshow(use_LE, cmap="cividis", vmin=0, aspect="auto")
    for layer, row in enumerate(use_LE):
        for expert, share in enumerate(row):
            ink = "white" if share < 0.6 * use_LE.max() else style.DARK
            ax.text(expert, layer, f"{share:.0%}", ha="center", va="center", fontsize=8, color=ink)
    ax.set_xticks(range(use_LE.shape[1]), [str(n) for n in range(use_LE.shape[1])], fontsize=8.5)
    ax.set_yticks(range(len(use_LE)), [f"layer {n}" for n in range(len(use_LE))], fontsize=8.5)
    even_share = experts_per_token / use_LE.shape[1]
    title(ax, f"share of tokens by expert, RL step {number + 1} (even use: {even_share:.0%})", "expert")
    picture.colorbar(image, ax=ax, format=lambda value, _: f"{value:.0%}", fraction=0.04)
    return picture


def expert_use(files: Sequence[Path], experts: int = 0) -> NDArray[np.float64]:
    """Return [L, E] the share of forwarded tokens in `files` that each expert received; rows sum to K. Of `experts`, those at the
    end that received none are in it, too."""
    tensors = [load_file(path) for path in files]
    routes_TLK = np.concatenate([t["routes"][t["route_valid"]] for t in tensors])
    size = max(experts, int(routes_TLK.max()) + 1) if routes_TLK.size else 0
    layers = range(routes_TLK.shape[1])
    used = [np.bincount(routes_TLK[:, layer].ravel(), minlength=size) for layer in layers]
    return np.array(used, float).reshape(len(layers), size) / len(routes_TLK)


def _texts(stored: StoredRollout) -> list[str]:
    decode = stored.tokenizer.decode
    return [decode([int(token)], skip_special_tokens=False) for token in stored.segment.token_ids]


def _notes(stored: StoredRollout) -> list[str]:
    """Return the hover text of each token."""
    segment, trainer = stored.segment, stored.trainer
    ratio_T = None if trainer is None else np.exp(log_ratio(segment, trainer))
    notes = []
    for position, text in enumerate(_texts(stored)):
        lines = [f"{text!r}, {_name(Kind(segment.kind[position]))}, token {position + 1}"]
        if segment.acted[position]:
            logprob, version = float(segment.logprob[position]), segment.policy_version[position]
            lines.append(f"log p {logprob:.3f}, p {np.exp(logprob):.3f}, policy version {version}")
            if trainer is not None and ratio_T is not None:
                values = trainer.logprob[position], ratio_T[position], trainer.entropy[position]
                lines.append("trainer: log p {:.3f}, ratio {:.3f}, entropy {:.2f}".format(*values))
            if stored.reasons:
                lines.append(f"in the loss: {stored.reasons[stored.number][position]}")
        notes.append("\n".join([*lines, *_route_lines(segment, position)]))
    return notes


def _route_lines(segment: Segment, position: int) -> Iterator[str]:
    trace = segment.trace
    if not len(trace.routes) or not trace.route_valid[position]:
        return
    for layer, (experts_K, gates_K) in enumerate(zip(trace.routes[position], trace.gates[position], strict=True)):
        shares = ", ".join(f"{expert} ({gate:.2f})" for expert, gate in zip(experts_K, gates_K, strict=True))
        yield f"layer {layer}: experts {shares}, margin {trace.margins[position][layer]:.2f}"


Floats = NDArray[np.float64]
ColorBy = Literal["logprob", "advantage", "ratio", "written", "entropy", "version", "reason"]
# Nats of surprise (−log p), or of entropy, with full colour.
DOUBT = 3.0
# |log ratio| with full colour; clips of 0.2 to 0.28 lie near it.
DRIFT = 0.25
# Hues of policy versions, by their order in the rollout.
VERSIONS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW)
# Opacity of a full tint over a page; text stays readable in both themes.
OPAQUE = 0.5


@dataclass(frozen=True, slots=True)
class Tint:
    """A hue (#rrggbb) and its strength from 0 to 1."""

    hue: str
    strength: float = 1.0

    @property
    def over_page(self) -> str:
        """The tint in CSS, transparent, for a light or a dark page."""
        red, green, blue = bytes.fromhex(self.hue[1:])
        return f"rgba({red},{green},{blue},{OPAQUE * self.strength:.2f})"


# What a loss does with a token (`labs.losses.REASONS`): its tint and meaning.
REASONS = {
    "trains": (Tint(style.SKY, 0.6), "trains"),
    "capped": (Tint(style.YELLOW), "trains with a weight that was cut"),
    "above": (Tint(style.VERMILION), "masked: too likely already"),
    "below": (Tint(style.PURPLE), "masked: too unlikely already"),
    "no advantage": (Tint(style.GREY, 0.6), "no advantage"),
}


def colouring(stored: StoredRollout, by: ColorBy) -> tuple[list[Tint | None], tuple[tuple[Tint, str], ...]]:
    """Return the tint of each token of the segment that is looked at (None for tokens that the agent read), and what the tints
    mean.

    Raise ValueError when `by` needs what is missing: an advantage, the values of a trainer, or the reasons of a loss."""
    segment, advantage, trainer = stored.segment, stored.advantage, stored.trainer
    low, high = Tint(style.ORANGE), Tint(style.SKY)
    if by == "reason" and not stored.reasons:
        raise ValueError("color='reason' needs what a loss does with each token; see `labs.losses.with_reasons`")
    if by == "advantage" and advantage is None:
        raise ValueError("only rollouts of RL have an advantage; color='advantage' needs one, 'logprob' does not")
    if by in ("ratio", "entropy") and trainer is None:
        raise ValueError(f"color={by!r} needs the values that a model computes here; see `rollout.with_trainer`")
    if by in ("reason", "version"):
        pairs, keys = _categories(stored, by)
        return [pairs[key][0] if acted else None for key, acted in zip(keys, segment.acted, strict=True)], (
            *pairs.values(),
        )
    values: NDArray[Any] = np.ones(len(segment.acted))
    legend: tuple[tuple[Tint, str], ...] = ((high, "written by the agent"),)
    if advantage is not None and by == "advantage":
        values, legend = (
            advantage * values,
            ((low, "worse than expected, made less likely"), (high, "better, made likelier")),
        )
    elif trainer is not None and by == "ratio":
        values = log_ratio(segment, trainer) / DRIFT
        legend = ((low, "the trainer finds it less likely"), (high, "likelier"))
    elif trainer is not None and by == "entropy":
        values, legend = -trainer.entropy / DOUBT, ((low, "many tokens were likely here"),)
    elif by == "logprob":
        values, legend = np.minimum(0.0, segment.logprob) / DOUBT, ((low, "less likely"),)
    hues = [style.SKY if value > 0 else style.ORANGE for value in values]
    tints = [Tint(hue, min(1.0, abs(value))) for hue, value in zip(hues, values.tolist(), strict=True)]
    return [tint if acted else None for tint, acted in zip(tints, segment.acted, strict=True)], legend


def _categories(stored: StoredRollout, by: ColorBy) -> tuple[Mapping[Any, tuple[Tint, str]], Sequence[Any]]:
    """Return tint and meaning by category, of those that occur in the rollout, and the category of each token."""
    segments = stored.attempt.rollout.segments
    if by == "reason":
        present = {reason for reasons in stored.reasons for reason in reasons}
        return {name: pair for name, pair in REASONS.items() if name in present}, stored.reasons[stored.number]
    versions, counts = np.unique(np.concatenate([s.policy_version[s.acted] for s in segments]), return_counts=True)
    hues = itertools.cycle(VERSIONS)
    pairs = {
        version: (Tint(hue), f"policy version {version}, {count} tokens")
        for version, count, hue in zip(versions.tolist(), counts, hues, strict=False)
    }
    return pairs, stored.segment.policy_version.tolist()


def log_ratio(segment: Segment, trainer: Recomputed) -> NDArray[np.float32]:
    """Return [T] the trainer's log p − the sampled log p; 0 for tokens that the agent read."""
    return np.where(segment.acted, trainer.logprob - segment.logprob, 0.0).astype(np.float32)
