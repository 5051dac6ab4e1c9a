"""An exercise in which a learner writes a function that the package has as well.

It is data: inputs, the package's function, which is the judge, and usual mistakes, each a function whose docstring is its hint.
An answer is right if it agrees with the package on all inputs. If it agrees with a mistake on all inputs, it gets that hint.
"""

import copy
from collections.abc import Callable, Sequence
from operator import call
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Function = Callable[..., Any]


class Judgement(NamedTuple):
    """The judgement of a learner's function."""

    state: Literal["right", "unfinished", "wrong"]
    text: str


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an array; None for another value."""
    return tuple(value.shape) if isinstance(value, Tensor | np.ndarray | np.generic) else None


def brief(value: Any) -> str:
    """Return a value as text, large arrays by their shape."""
    if isinstance(value, tuple):
        return f"({', '.join(map(brief, value))})"
    shape = shape_of(value)
    return f"an array of shape {shape}" if shape and np.prod(shape) > 16 else repr(value)


class Exercise:
    """A function to write."""

    def __init__(
        self,
        reference: Function,
        *inputs: tuple[Any, ...],
        mistakes: Sequence[Function],
        observe: Function = call,
        describe: Callable[[Any], str] = brief,
    ) -> None:
        """Judge by `reference`, the package's function, on `inputs`, the arguments of each call. The docstring of each of
        `mistakes` is its hint. `observe` calls a function with arguments and returns what is compared, and `describe` turns
        arguments into the text that a learner reads, by default `brief`."""
        self.reference, self.inputs, self.mistakes = reference, inputs, mistakes
        self.observe, self.describe = observe, describe

    def outcomes(self, function: Function) -> list[Any]:
        """Return what is compared for each input, or the error that its call raised."""
        return [self._outcome(function, arguments) for arguments in self.inputs]

    def _outcome(self, function: Function, arguments: tuple[Any, ...]) -> Any:
        def finished(*copied: Any) -> Any:
            result = function(*copied)
            if result is None or result is ...:
                raise NotImplementedError
            return result

        try:
            return self.observe(finished, *copy.deepcopy(arguments))
        except Exception as error:  # whatever the learner's code raises
            return error

    def judge(self, function: Function) -> Judgement:
        """Compare a function with the package's, and with the usual mistakes."""
        outcomes, expected = self.outcomes(function), self.outcomes(self.reference)
        if any(isinstance(outcome, NotImplementedError) for outcome in outcomes):
            return Judgement("unfinished", "not finished yet. Until it is, this notebook uses the package's function.")
        if same(outcomes, expected):
            return Judgement("right", "right: it agrees with the package's function.")
        for mistake in self.mistakes:
            if same(outcomes, self.outcomes(mistake)):
                return Judgement("wrong", f"not right yet. {' '.join((mistake.__doc__ or '').split())}")
        rows = zip(self.inputs, outcomes, expected, strict=True)
        arguments, outcome, right = next(row for row in rows if not same(row[1], row[2]))
        result = f"it raises {outcome!r}" if isinstance(outcome, Exception) else f"the result is {outcome}"
        instead = repr(right) if isinstance(right, Exception) else right
        shape, right_shape = shape_of(outcome), shape_of(right)
        if shape is not None and right_shape is not None and shape != right_shape:
            result, instead = f"the result has shape {shape}", right_shape
        work = f"{self.describe(arguments):.400}"
        return Judgement("wrong", f"not right yet. For {work}\n{result}\ninstead of {instead}.")


def same(left: Any, right: Any) -> bool:
    """Whether two results are equal, floats up to rounding."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Exception) or isinstance(right, Exception):
        return type(left) is type(right)
    try:
        a, b = (x.detach().double().numpy() if isinstance(x, Tensor) else np.float64(x) for x in (left, right))
    except (TypeError, ValueError):
        return bool(left == right)
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True)


# Inputs and observations


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradient(function: Function, first: Tensor, *others: Any) -> dict[str, Tensor]:
    """Return a result and its gradient with respect to the first argument, 0 if none reaches it."""
    result = function(first.requires_grad_(), *others)
    if result.requires_grad:
        # Small weights: what is 0 but for rounding stays within the tolerance of `same`.
        (result * torch.linspace(1, 2, result.numel()).view_as(result)).mean().backward()
    return {"value": result.detach(), "gradient": torch.zeros_like(first) if first.grad is None else first.grad}
