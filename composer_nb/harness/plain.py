"""Plain values: portable JSON, and types and ranges of settings."""

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def require_ranges(settings: Any, group: str) -> None:
    """Raise ValueError, in one line that names the field, if a field of a dataclass violates its annotation."""
    kind: type = type(settings)
    for name, adapter in _adapters(kind).items():
        try:
            adapter.validate_python(getattr(settings, name))
        except ValidationError as error:
            first = error.errors()[0]
            item = "".join(f"[{part!r}]" for part in first["loc"])
            message = f"{group}.{name}{item}={first['input']!r}: {first['msg'].replace('Input should', 'must')}"
            raise ValueError(message) from None


@lru_cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Return a validator of each field that is no dataclass: its type, without conversion, and its range."""
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: TypeAdapter(hint, config=strict) for name, hint in hints.items() if not is_dataclass(hint)}


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON. Numbers that are not finite become null, since JSON has none."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
