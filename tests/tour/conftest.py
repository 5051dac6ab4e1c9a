"""Fixtures of the harness, which the tour's tests share."""

from tests.harness.conftest import agent, boxes, renderer, task, typist

__all__ = ["agent", "boxes", "renderer", "task", "typist"]
