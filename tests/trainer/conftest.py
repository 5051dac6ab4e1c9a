"""Fixtures of `tiny_models`."""

from tiny_models import converse, make_model, task, tokenizer  # noqa: F401
