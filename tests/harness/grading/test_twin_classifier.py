"""A classifier that reads a module with all that can be measured in it hardly tells twins from tests."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.grading import twins

SCRIPT = Path(__file__).parents[3] / "scripts/studies/twin_classifier.py"
KNOWN = 0.06
"""How much above chance it is known to be; docs/grading.md says so too."""


@pytest.fixture(scope="module")
def classifier() -> Any:
    spec = importlib.util.spec_from_file_location("twin_classifier", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(classifier: Any) -> tuple[float, float]:
    """Its accuracy on suites that it was not trained on, and the accuracy above which it is more than luck."""
    found = classifier.examples(json.loads(classifier.CORPUS.read_text()), seed=7)
    assert len(found) > 500 and len({suite for suite, _, _, _ in found}) >= 10
    return classifier.accuracy(found)[0], 0.5 + KNOWN + 3 * math.sqrt(0.25 / len(found))


def test_twins_look_like_tests(classifier: Any) -> None:
    share, bound = measured(classifier)
    assert share < bound


def test_twins_with_a_tell_are_found(classifier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small as they are: a letter that is rare, a number that is a little larger."""

    def tell_tale(value: Any, *_: object, **__: object) -> list[str]:
        match value:
            case str() if value:
                return [repr(value[:-1] + "q")]
            case int() | float():
                return [repr(value + 10)]
        return []

    monkeypatch.setattr(twins, "others", tell_tale)
    share, bound = measured(classifier)
    assert share > bound
