"""The registry of chat formats. A format is a module with a `ChatRenderer`: tokens, turns, grammar, unfinished calls."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from composer_nb.harness.agent.chat import ChatRenderer
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer

FORMATS: Mapping[str, type[ChatRenderer]] = {"compact": CompactRenderer, "qwen": QwenRenderer, "kimi": KimiRenderer}


def _registered(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"must be one of {', '.join(FORMATS)}")
    return name


FormatName = Annotated[str, AfterValidator(_registered)]
