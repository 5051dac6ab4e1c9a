"""Loss against the amount of training: bits a byte, and the two straight lines that are drawn through such points.

    log-linear   loss = a + b · ln(tokens)            a straight line over a logarithmic axis of tokens
    power        ln(loss) = a + b · ln(tokens)        a straight line where the loss is logarithmic, too

Composer 2's technical report (§3.1) finds the evaluation loss of continued training log-linear in compute. Over any one range the
two are hard to tell apart; what tells them apart is the prediction of points that they were not fitted to.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Tokenizer

from composer_nb.trainer.learning.data import TokenRow

Shape = Literal["log-linear", "power"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFit:
    """A line through points of (tokens, loss).

    Attributes:
        slope: Log-linear: what e times the tokens add to the loss. Power: the exponent.
    """

    shape: Shape
    intercept: float
    slope: float

    def predict(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the loss after so many tokens."""
        line = self.intercept + self.slope * np.log(np.asarray(tokens, np.float64))
        return np.exp(line) if self.shape == "power" else line


def fit_loss(tokens: Sequence[float], loss: Sequence[float], shape: Shape = "log-linear") -> LossFit:
    """Fit a line by least squares. Raises ValueError for fewer than two different amounts of tokens, or for values that have no
    logarithm."""
    x, y = np.asarray(tokens, np.float64), np.asarray(loss, np.float64)
    if x.shape != y.shape or len(np.unique(x)) < 2:
        raise ValueError(f"{len(x)} amounts of tokens, {len(y)} losses: a line needs two different points")
    if (x <= 0).any() or not np.isfinite(y).all() or (shape == "power" and (y <= 0).any()):
        raise ValueError(f"a {shape} line needs tokens above 0 and finite losses, those of a power above 0")
    slope, intercept = np.polyfit(np.log(x), np.log(y) if shape == "power" else y, 1)
    return LossFit(shape=shape, intercept=float(intercept), slope=float(slope))


def predictions(tokens: Sequence[float], loss: Sequence[float]) -> dict[str, tuple[LossFit, float]]:
    """Return both laws, fitted to the first half of the points, each with its error at the last: predicted minus measured."""
    half = (len(tokens) + 1) // 2
    fits = {shape: fit_loss(tokens[:half], loss[:half], shape) for shape in get_args(Shape)}
    return {shape: (fit, float(fit.predict(tokens[-1])) - loss[-1]) for shape, fit in fits.items()}


def bits_per_byte(nats: ArrayLike, bytes_per_token: float) -> NDArray[np.float64]:
    """Convert cross-entropy in nats per token to bits per byte of text, which compares across tokenizers."""
    return np.asarray(nats, np.float64) / (math.log(2) * bytes_per_token)


def bytes_per_token(rows: Iterable[TokenRow], tokenizer: Tokenizer) -> float:
    """Return the mean bytes of text per predicted token of `rows` (all but each row's first).

    Special tokens stand for no text, and count as none."""
    special = tokenizer.get_added_tokens_decoder()
    tokens = text = 0
    for row in rows:
        written = row.token_ids[1:].tolist()
        # A byte-level alphabet has one sign a byte, whatever the byte is.
        text += sum(len(tokenizer.id_to_token(token) or "") for token in written if token not in special)
        tokens += len(written)
    if not tokens:
        raise ValueError("there is nothing to predict in these rows")
    return text / tokens
