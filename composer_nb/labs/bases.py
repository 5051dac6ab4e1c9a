"""Choose a base to train by the three evaluations by which Composer 2 chose its own (arXiv 2603.24477, appendix B).

    fresh knowledge   questions about code that its makers wrote lately; share answered right
    state tracking    a file after many diffs (as LoCoDiff); mean edits between the answer and the file, in characters
    codebase          its files one after another; summed negative log-likelihood, each token read in a rolling window

Scores of a coding agent are left out on purpose: RL changes them most. There, questions came from what earlier models had to look
up; here they ask for the parameters of a function, among those of others, and `earlier` drops what an earlier model knows.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from composer_nb.harness.policy import Request
from composer_nb.labs.scaling import bits_per_byte
from composer_nb.trainer.corpus.build import parsed
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import cross_entropy
from composer_nb.trainer.models.convert import read_model
from composer_nb.trainer.models.transformer import Model

# Most characters of a line, on average: a history must fit the positions of a small model.
WIDTH = 40
# The line after which an answer is over.
END = "# end\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCandidate:
    """A model that could be trained, with its tokenizer."""

    name: str
    model: Model
    tokenizer: Tokenizer

    @classmethod
    def open(cls, address: str, seed: int = 0) -> BaseCandidate:
        """Read a checkpoint folder or a GGUF file, in float32; `random:DIR` has random weights, its sizes and its tokenizer."""
        path = Path(address.removeprefix("random:")).expanduser()
        model, tokenizer = read_model(path)
        name = path.resolve().name
        if address.startswith("random:"):
            torch.manual_seed(seed)
            name, model = f"random {name}", Model(model.config)
        return cls(name=name, model=model, tokenizer=tokenizer)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text in which nothing is a special token."""
        token_ids: list[int] = self.tokenizer.encode(text.replace("<|", "< |"), add_special_tokens=False).ids
        return token_ids

    @property
    def first(self) -> int:
        """The token before a text: the one that begins a row of code, else a newline."""
        begin = self.tokenizer.token_to_id("<|bos|>")
        return self.ids("\n")[0] if begin is None else int(begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A function, and the question which parameters it has."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A file, changes to it as unified diffs, and what it is after the last."""

    start: str
    diffs: tuple[str, ...]
    end: str

    @property
    def prompt(self) -> str:
        """The text that the model reads."""
        changes = "".join(f"# change {number}\n{diff}" for number, diff in enumerate(self.diffs, 1))
        return f"# first version\n{self.start}{END}{changes}# last version\n"


def rolling_loss(base: BaseCandidate, text: str, window: int, stride: int) -> float:
    """Return the summed negative log-likelihood of a text in nats. Each token is predicted once; windows of `window` tokens move
    on by `stride`, so at least window − stride tokens before it are seen, if the text has them."""
    most = base.model.config.max_position_embeddings
    if not 0 < stride < window <= most:
        raise ValueError(f"window={window}, stride={stride}: 0 < stride < window ≤ {most} is needed")
    stream = np.array([base.first, *base.ids(text)], np.int32)
    rows = []
    for begin in range(0, len(stream) - 1, stride):
        end = min(len(stream), begin + 1 + stride)
        low = max(0, end - window)
        rows.append(TokenRow(stream[low:end], (np.arange(low, end) > begin).astype(np.float32)))
    return cross_entropy(base.model, rows, Ranks()) * (len(stream) - 1)


def make_questions(texts: Sequence[str], count: int, choices: int, seed: int) -> list[Question]:
    """Return at most `count` questions about functions with two parameters or more, each asked once, in an order that the seed
    decides. The wrong choices are parameters of other functions. Raises ValueError where too few differ."""
    parameters: dict[str, str] = {}
    for text in texts:
        for node in ast.walk(parsed(text) or ast.Module([], [])):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                parameter_names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
                if len(parameter_names) >= 2:
                    parameters.setdefault(node.name, ", ".join(parameter_names) + ")")
    answers = sorted(set(parameters.values()))
    if len(answers) < choices:
        raise ValueError(f"questions: {len(answers)} functions differ in their parameters, and {choices} are needed")
    random = Random(f"questions {seed}")
    questions = []
    for name in random.sample(sorted(parameters), min(count, len(parameters))):
        wrong_choices = random.sample([choice for choice in answers if choice != parameters[name]], choices - 1)
        answer_index = random.randrange(choices)
        options = (*wrong_choices[:answer_index], parameters[name], *wrong_choices[answer_index:])
        questions.append(Question(prompt=f"def {name}(", choices=options, answer=answer_index))
    return questions


def chosen(base: BaseCandidate, question: Question) -> int:
    """Return the choice with the smallest loss per byte of text after the prompt."""
    prompt_ids = [base.first, *base.ids(question.prompt)]
    losses = []
    for choice in question.choices:
        choice_ids = base.ids(choice)
        token_weights = np.repeat(np.array([0.0, 1.0], np.float32), [len(prompt_ids), len(choice_ids)])
        row = TokenRow(np.array([*prompt_ids, *choice_ids], np.int32), token_weights)
        losses.append(cross_entropy(base.model, [row], Ranks()) * len(choice_ids) / len(choice.encode()))
    return int(np.argmin(losses))


def make_histories(texts: Sequence[str], count: int, lines: int, edits: int, seed: int) -> list[History]:
    """Return histories of pieces of `lines` lines, which have at most `WIDTH` characters on average.

    Each edit deletes a line, repeats one elsewhere, or puts one in the place of another. Raises ValueError where there is no
    such piece."""
    lines_by_text = [text.replace("\r", "").splitlines(keepends=True) for text in texts]
    pieces = [file_lines[at : at + lines] for file_lines in lines_by_text for at in range(len(file_lines) - lines)]
    short_pieces = [piece for piece in pieces if len("".join(piece)) <= WIDTH * lines]
    if not short_pieces:
        raise ValueError(f"lines={lines}: no text has so many lines of {WIDTH} characters on average; lower it")
    random = Random(f"histories {seed}")
    histories = []
    for _ in range(count):
        current = start_lines = random.choice(short_pieces)
        diffs = []
        for _ in range(edits):
            edited = list(current)
            row, line = random.randrange(len(edited)), random.choice(current)
            kind = random.choice(["delete", "repeat", "replace"])
            edited[row : row + (kind != "repeat")] = [] if kind == "delete" and len(edited) > 1 else [line]
            diffs.append("".join(islice(unified_diff(current, edited, n=1), 2, None)))
            current = edited
        histories.append(History(start="".join(start_lines), diffs=tuple(diffs), end="".join(current)))
    return histories


def distance(text: str, other: str) -> int:
    """Return the Levenshtein distance in characters: insertions, deletions and replacements.

    Raises ValueError without ukkonen."""
    try:
        from ukkonen import distance as bounded
    except ImportError:
        raise ValueError("edit distances need ukkonen: pip install -e '.[corpus]'") from None
    return int(bounded(text, other, max(len(text), len(other), 1)))


SLOTS = 16  # histories that are continued at a time


def rebuilt(base: BaseCandidate, histories: Sequence[History]) -> list[str]:
    """Return what the model writes for the last version of each file, greedily, up to the line that ends it."""
    requests = [[base.first, *base.ids(history.prompt)] for history in histories]
    max_tokens = [len(base.ids(history.end + END)) + 16 for history in histories]
    positions = max(len(ids) + room for ids, room in zip(requests, max_tokens, strict=True))
    if positions > base.model.config.max_position_embeddings:
        raise ValueError(f"lines, edits: a history needs {positions} positions, more than {base.name} has; lower them")
    engine = Engine(base.model, stop=frozenset(), slots=SLOTS, max_length=positions, temperature=0.0)
    texts = []
    for first in range(0, len(requests), SLOTS):
        part = range(first, min(len(requests), first + SLOTS))
        batch = [Request(rollout=n, token_ids=requests[n], max_tokens=max_tokens[n]) for n in part]
        for request in engine.generate(batch):
            texts.append(base.tokenizer.decode(request.token_ids).partition(END)[0])
            engine.release(request.rollout)
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The size of each evaluation.

    Attributes:
        bytes: Of the codebase, at most.
    """

    bytes: int = 40_000
    window: int = 256
    stride: int = 128
    questions: int = 64
    choices: int = 4
    histories: int = 16
    lines: int = 6
    edits: int = 3
    seed: int = 0


def compare_bases(
    bases: Sequence[BaseCandidate], texts: Sequence[str], sizes: Measures, earlier: BaseCandidate | None = None
) -> list[dict[str, Any]]:
    """Return a row for each base, after one that needs no model: guessing, the first version as the answer, and 8 bits a byte.

    Keys of a row: `base` (name), `weights` (number of parameters), `fresh_knowledge` (share of questions answered right, NaN
    without questions), `state_distance` (mean edits in characters), `codebase_nats` (sum), `bits_per_byte`, and `questions`
    (number asked). `texts`: the files of the codebase, in order. `earlier`: questions that this model answers right are dropped.

    Raises ValueError if `texts` hold too few different functions or no piece of `sizes.lines` lines, if the window or a history
    does not fit a base's positions, and without ukkonen.
    """
    questions = make_questions(texts, sizes.questions, sizes.choices, sizes.seed)
    if earlier:
        questions = [question for question in questions if chosen(earlier, question) != question.answer]
    histories = make_histories(texts, sizes.histories, sizes.lines, sizes.edits, sizes.seed)
    code = "\n".join(texts).encode()[: sizes.bytes].decode(errors="ignore")
    code_bytes = len(code.encode())
    start_distances = [distance(history.start, history.end) for history in histories]

    def row(base: str, weights: int, right: Sequence[float], distances: Sequence[int], nats: float) -> dict[str, Any]:
        share = float(np.mean(right)) if right else float("nan")
        scores = {"fresh_knowledge": share, "state_distance": float(np.mean(distances))}
        loss = {"codebase_nats": float(nats), "bits_per_byte": float(bits_per_byte(nats, code_bytes))}
        return {"base": base, "weights": weights, **scores, **loss, "questions": len(questions)}

    rows = [row("no model", 0, [1 / sizes.choices], start_distances, code_bytes * np.log(256))]
    for base in bases:
        right = [chosen(base, question) == question.answer for question in questions]
        rebuilt_files = zip(rebuilt(base, histories), histories, strict=True)
        distances = [distance(rebuilt_file, history.end) for rebuilt_file, history in rebuilt_files]
        nats = rolling_loss(base, code, sizes.window, sizes.stride)
        weights = sum(parameter.numel() for parameter in base.model.parameters())
        rows.append(row(base.name, weights, right, distances, nats))
    return rows
