"""One rollout, token by token: what the agent wrote, how sure it was of each token, which experts it took.

`read` gives HTML for a notebook (turns fold, hover a token for its numbers and experts), `draw` the same as a static figure. Both
colour what the agent wrote, in one of the ways of `colouring`, and leave what it read grey.

Dimensions: T tokens of a rollout, L layers, K experts a token, E experts.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.rollout import Kind, Segment
from composer_nb.harness.store import load_attempts
from composer_nb.harness.task import load_tasks
from composer_nb.trainer.loss import LossSettings
from composer_nb.trainer.model import Model
from composer_nb.trainer.retrace import Recomputed, recompute
from composer_nb.trainer.rundir import RunDir
from composer_nb.trainer.tokenizer import load_tokenizer
from composer_nb.views import style
from composer_nb.views.colouring import ColorBy, Colouring, Tint, colouring, log_ratio, mask_reasons
from composer_nb.views.page import Html, box
from composer_nb.views.style import Picture, title

_KINDS = {Kind.PROMPT: "prompt", Kind.OBSERVATION: "observation", Kind.TOOL_CALL: "tool call"}
PREVIEW = 60
"""Signs of a folded part that its heading shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored rollout with what belongs to it."""

    attempt: Attempt
    name: str
    """Where it comes from, for headings."""
    tokenizer: Tokenizer
    advantage: float | None = None
    trainer: Recomputed | None = None
    """What another model computes at its tokens (`with_trainer`)."""
    loss: LossSettings = field(default_factory=LossSettings)
    """By which a token counts as masked."""

    @property
    def segment(self) -> Segment:
        [segment] = self.attempt.rollout.segments
        return segment

    @property
    def heading(self) -> str:
        done = self.attempt
        outcome = "solved" if done.grade.passed else "not solved"
        gain = "" if self.advantage is None else f", advantage {self.advantage:+.2f}"
        calls = len(done.rollout.turns)
        return f"{self.name}: {outcome}, {calls} calls, ended by “{done.rollout.stop}”{gain}"


def held_out(run: RunDir, policy: str, greedy: bool = True) -> dict[str, Stored]:
    """The greedy (or the first sampled) attempt of a policy at each held-out task. Log-probabilities, no routes."""
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "heldout.jsonl")}
    attempts = load_attempts(run.path / "rollouts" / f"eval_{policy}.parquet", tasks)
    tokenizer = load_tokenizer(run.path / "data")
    ordered = attempts if greedy else attempts[::-1]  # the greedy ones come last, and the last one of a task stays
    return {done.task.id: Stored(attempt=done, name=policy, tokenizer=tokenizer) for done in ordered}


def sampled(run: RunDir, step: int = -1) -> list[Stored]:
    """The rollouts that RL step `step` (from 1; −1 is the last) trained on, with advantages and routes."""
    steps = len(run.steps("rl"))
    number = steps + step if step < 0 else step - 1
    if not 0 <= number < steps:
        raise ValueError(f"step {step}: RL has {steps} steps that can be looked at")
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "rl.jsonl")}
    tokenizer = load_tokenizer(run.path / "data")
    found = []
    for path in sorted((run.path / "rollouts").glob(f"rl_{number:05d}_*.parquet")):
        advantages = pq.read_table(path, columns=["advantage"])["advantage"].to_pylist()
        for done, advantage in zip(load_attempts(path, tasks), advantages, strict=True):
            found.append(Stored(attempt=done, name=f"RL step {number + 1}", tokenizer=tokenizer, advantage=advantage))
    return found


def before_and_after(run: RunDir, before: str = "start", after: str = "final") -> tuple[Stored, Stored]:
    """Greedy attempts of two policies at one held-out task: the first that only the second solves; if there is none, one at
    which they did different things; else the first task."""
    old, new = held_out(run, before), held_out(run, after)

    def telling(task: str) -> int:
        gained = new[task].attempt.grade.passed and not old[task].attempt.grade.passed
        differ = old[task].attempt.rollout.turns != new[task].attempt.rollout.turns
        return 2 * gained + differ

    best = max(old, key=telling)
    return old[best], new[best]


def with_trainer(stored: Stored, model: Model, loss: LossSettings | None = None) -> Stored:
    """The rollout with what `model` computes at its tokens, for colours by ratio and entropy and for masks."""
    [seen] = recompute(model, [stored.segment])
    return replace(stored, trainer=seen, loss=loss or stored.loss)


def read(stored: Stored, color: ColorBy = "logprob", unfold: bool = False) -> Html:
    """The rollout as HTML, a part that folds for the prompt, each call and each observation. Calls are open, the others are with
    `unfold`. Hovering a token shows its kind, its numbers, and experts and gates of each layer."""
    colours = _colours(stored, color)
    texts, notes = _texts(stored), _notes(stored)
    spans = [_span(*each) for each in zip(texts, notes, colours.tints, strict=True)]
    parts = []
    for kind, places in _parts(stored.segment):
        opened = " open" if unfold or kind not in (Kind.PROMPT, Kind.OBSERVATION) else ""
        heading = html.escape(_part_heading(kind, [texts[place] for place in places]))
        body = "".join(spans[place] for place in places)
        parts.append(f"<details{opened}><summary>{heading}</summary><pre>{body}</pre></details>")
    chips = " ".join(
        f'<span class="chip" style="background:{tint.over_page}">{html.escape(text)}</span>'
        for tint, text in colours.key
    )
    return box(
        f'<div class="head">{html.escape(stored.heading)}</div>',
        f'<div class="quiet">grey: read; on colour: written ({chips}); hover a token for its numbers</div>',
        *parts,
    )


def _span(text: str, note: str, tint: Tint | None) -> str:
    """A token: what the agent read has a class, what it wrote a colour."""
    classes = [name for name, is_so in (("read", tint is None), ("mark", _is_special(text))) if is_so]
    named = f' class="{" ".join(classes)}"' if classes else ""
    look = f' style="background:{tint.over_page}"' if tint else ""
    shown = html.escape(text.replace("\n", "⏎\n"))
    hover = html.escape(note, quote=True).replace("\n", "&#10;")
    return f'<span{named}{look} title="{hover}">{shown}</span>'


def _parts(segment: Segment) -> Iterator[tuple[Kind, list[int]]]:
    """Runs of tokens of one kind."""
    for kind, places in groupby(range(len(segment.token_ids)), key=lambda place: int(segment.kind[place])):
        yield Kind(kind), list(places)


def _part_heading(kind: Kind, texts: Sequence[str]) -> str:
    text = "".join("" if _is_special(text) else text for text in texts).strip().replace("\n", " ⏎ ")
    shown = text if len(text) <= PREVIEW else text[: PREVIEW - 1] + "…"
    return f"{_name(kind)} · {len(texts)} tokens · {shown}"


def _is_special(text: str) -> bool:
    return text.startswith("<|") and text.endswith("|>")


def _name(kind: Kind) -> str:
    return _KINDS.get(kind, kind.name.lower().replace("_", " "))


def draw(stored: Stored, color: ColorBy = "logprob", width: int = 104) -> Picture:
    """The same as a figure, for paper and for where HTML does not go; `width` in characters."""
    boxes = _lay_out(_texts(stored), width)
    rows = max(row for row, _, _, _ in boxes) + 1
    picture = Picture(10.0, 0.8 + 0.2 * rows)
    ax = picture.add_subplot()
    ax.set_xlim(0, width)
    ax.set_ylim(rows + 0.1, -0.1)
    ax.axis("off")
    title(ax, stored.heading)
    colours = _colours(stored, color)
    backgrounds = [tint.on_white if tint else "" for tint in colours.tints]
    size = 10.0 * 72 / width / 0.645  # a monospaced character is 0.6 of its size wide
    for row, column, text, place in boxes:
        background = backgrounds[place]
        if background:
            ax.add_patch(
                Rectangle((column, row), len(text), 0.92, facecolor=background, edgecolor=style.PALE, linewidth=0.4)
            )
        ink = style.INK if background else style.GREY
        ax.text(column, row + 0.5, text, family="monospace", size=size, color=ink, va="center", parse_math=False)
    chips = [Patch(facecolor=tint.on_white, edgecolor=style.PALE, label=meaning) for tint, meaning in colours.key]
    picture.legend(handles=chips, loc="outside lower left", ncols=len(chips), frameon=False, fontsize=8.5)
    return picture


def doubts(pair: Sequence[Stored]) -> Picture:
    """How likely each written token was when it was drawn, one panel a rollout, in the order of writing."""
    picture = Picture(9.5, 1.7 * len(pair) + 0.4)
    for ax, stored in zip(picture.panels(len(pair), 1), pair, strict=True):
        chance = np.exp(stored.segment.logprob[stored.segment.acted])
        ax.bar(range(len(chance)), chance, width=0.85, color=np.where(chance < 0.5, style.ORANGE, style.SKY))
        ax.set_ylim(0, 1)
        title(ax, stored.heading, "", "probability")
    ax.set_xlabel("token written", fontsize=9, color=style.INK)
    return picture


def experts(run: RunDir, step: int = -1) -> Picture:
    """Share of the tokens of an RL step that each expert of each layer got; even use would be K / E everywhere."""
    steps = len(run.steps("rl"))
    number = steps + step if step < 0 else step - 1
    files = sorted((run.path / "rollouts").glob(f"rl_{number:05d}_*.safetensors"))
    if not steps or not files:
        return style.empty("no rollout with routes is stored yet")
    use_LE = expert_use(files)
    chosen = use_LE.sum(1).round().astype(int)[0]
    picture = Picture(7.0, 0.9 + 0.42 * len(use_LE))
    ax = picture.add_subplot()
    shown = ax.imshow(use_LE, cmap="cividis", vmin=0, aspect="auto")
    for layer, row in enumerate(use_LE):
        for expert, share in enumerate(row):
            ink = "white" if share < 0.6 * use_LE.max() else "black"
            ax.text(expert, layer, f"{share:.0%}", ha="center", va="center", fontsize=8, color=ink)
    ax.set_xticks(range(use_LE.shape[1]), [str(n) for n in range(use_LE.shape[1])], fontsize=8.5)
    ax.set_yticks(range(len(use_LE)), [f"layer {n + 1}" for n in range(len(use_LE))], fontsize=8.5)
    even = chosen / use_LE.shape[1]
    title(ax, f"share of tokens by expert, RL step {number + 1} (even use: {even:.0%})", "expert")
    picture.colorbar(shown, ax=ax, format=lambda value, _: f"{value:.0%}", fraction=0.04)
    return picture


def expert_use(files: Sequence[Path]) -> NDArray[np.float64]:
    """[L, E] share of the forwarded tokens in `files` that each expert got; rows sum to K."""
    tensors = [load_file(path) for path in files]
    routes_TLK = np.concatenate([t["routes"][t["route_valid"]] for t in tensors])
    size = int(routes_TLK.max()) + 1
    return np.stack(
        [np.bincount(routes_TLK[:, layer].ravel(), minlength=size) for layer in range(routes_TLK.shape[1])]
    ) / len(routes_TLK)


def _texts(stored: Stored) -> list[str]:
    decode = stored.tokenizer.decode
    return [decode([int(token)], skip_special_tokens=False) for token in stored.segment.token_ids]


def _colours(stored: Stored, color: ColorBy) -> Colouring:
    return colouring(stored.segment, color, stored.advantage, stored.trainer, stored.loss)


def _notes(stored: Stored) -> list[str]:
    """What hovering each token shows."""
    segment, seen = stored.segment, stored.trainer
    whys = [""] * len(segment.token_ids)
    if stored.advantage is not None:
        whys = mask_reasons(segment, stored.advantage, seen, stored.loss)
    ratio_T = None if seen is None else np.exp(log_ratio(segment, seen))
    notes = []
    for place, (text, why) in enumerate(zip(_texts(stored), whys, strict=True)):
        lines = [f"{text!r}, {_name(Kind(segment.kind[place]))}, token {place + 1}"]
        if segment.acted[place]:
            logprob = float(segment.logprob[place])
            lines.append(
                f"log p {logprob:.3f}, p {np.exp(logprob):.3f}, policy version {segment.policy_version[place]}"
            )
            if seen is not None and ratio_T is not None:
                lines.append(
                    f"trainer: log p {seen.logprob[place]:.3f}, ratio {ratio_T[place]:.3f}, "
                    f"entropy {seen.entropy[place]:.2f}"
                )
            lines += [why] if why else []
        notes.append("\n".join([*lines, *_route_lines(segment, place)]))
    return notes


def _route_lines(segment: Segment, place: int) -> Iterator[str]:
    trace = segment.trace
    if not len(trace.routes) or not trace.route_valid[place]:
        return
    for layer, (experts_K, gates_K) in enumerate(zip(trace.routes[place], trace.gates[place], strict=True), 1):
        shares = ", ".join(f"{expert} ({gate:.2f})" for expert, gate in zip(experts_K, gates_K, strict=True))
        yield f"layer {layer}: experts {shares}, margin {trace.margins[place][layer - 1]:.2f}"


def _lay_out(texts: Sequence[str], width: int) -> list[tuple[int, int, str, int]]:
    """(row, column, text, token) of monospaced pieces: calls and lines of code begin a row, long rows wrap."""
    boxes: list[tuple[int, int, str, int]] = []
    row = column = 0
    for place, text in enumerate(texts):
        if text == "<|call|>" and column:
            row, column = row + 1, 0
        for number, piece in enumerate(text.split("\n")):
            if number:
                row, column = row + 1, 0
            while piece:
                if column >= width or (column and column + len(piece) > width):
                    row, column = row + 1, 0
                boxes.append((row, column, piece[: width - column], place))
                piece, column = piece[width - column :], column + len(piece[: width - column])
    return boxes
