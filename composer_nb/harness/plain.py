"""Plain values: portable JSON, and types and ranges of settings."""

from __future__ import annotations

import json
import math
import re
import typing
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0)]
Some = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def adapter_of(wanted: Any) -> TypeAdapter[Any]:
    """Return a validator of a setting's annotation: its type, without conversion, and its range."""
    return TypeAdapter(wanted, config=_STRICT)


def checked_value(adapter: TypeAdapter[Any], value: Any, name: str) -> Any:
    """Return the value of the setting `name`. Raises ValueError, in one line that names it, for a wrong type or range."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part!r}]" for part in first["loc"])
        raise ValueError(f"{name}{place}={first['input']!r}: {first['msg'].replace('Input should', 'must')}") from None


def require_ranges(settings: Any, group: str) -> None:
    """Raise ValueError, which names the field, if a field of a dataclass violates its annotation."""
    kind: type = type(settings)
    for name, adapter in _adapters(kind).items():
        checked_value(adapter, getattr(settings, name), f"{group}.{name}")


@lru_cache
def _adapters(kind: type) -> dict[str, TypeAdapter[Any]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: adapter_of(wanted) for name, wanted in hints.items()}


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON. Numbers that are not finite become null, since JSON has none."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def reads(wanted: Any, value: Any) -> bool:
    """Return whether a setting accepts `value`. A value that is not text is always accepted."""
    with suppress(ValueError):
        if isinstance(value, str):
            typed(value, wanted, "")
        return True
    return False


def typed(value: Any, wanted: Any, name: str) -> Any:
    """Return `value` as the annotation `wanted` requires. Text is tried as it is, then as a literal."""
    adapter = adapter_of(wanted)
    if isinstance(value, str):
        with suppress(ValidationError):
            return adapter.validate_python(value)
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = literal_eval(value.capitalize() if value.lower() in ("true", "false") else value)
    bare = get_args(wanted)[0] if get_origin(wanted) is Annotated else wanted
    # JSON has no tuples; a shell leaves [bug,lint] as text, and a command line may give one number.
    if get_origin(bare) is tuple:
        value = re.findall(r"[\w.-]+", value) if isinstance(value, str) else value
        value = (value,) if isinstance(value, int | float) else tuple(value) if isinstance(value, list) else value
    return checked_value(adapter, value, name)
