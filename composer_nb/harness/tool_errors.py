"""Errors of tools, as tables: by tool, the number of its `calls` and of its errors of each kind."""

from collections import Counter
from collections.abc import Iterable, Mapping

from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.terms.registry import called

# Tools in a table of errors, and the longest name: a model can call tools that do not exist.
MOST_TOOLS, LONGEST_NAME = 40, 64


def tool_errors(tables: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the sum of such tables: by tool, the most used first, the number of `calls` and of errors of each kind."""
    sums: dict[str, Counter[str]] = {}
    for table in tables:
        for name, counts in table.items():
            sums.setdefault(name, Counter()).update(counts)
    ranked = sorted(sums, key=lambda name: (-sums[name]["calls"], name))[:MOST_TOOLS]
    return {name: dict(sums[name]) for name in ranked}


def errors_of(rollouts: Iterable[Rollout]) -> dict[str, dict[str, int]]:
    """Return the table of errors of some rollouts (`tool_errors`). Calls that cannot be read, and names that no tool can have,
    are those of the tool `unreadable`. A failure of the policy's own provider is no call."""

    def table(turn: Turn) -> dict[str, dict[str, int]]:
        name = called(turn)[0]
        name = name if name.isidentifier() and len(name) <= LONGEST_NAME else "unreadable"
        return {name: {"calls": 1} | ({turn.error: 1} if turn.error else {})}

    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return tool_errors(table(turn) for turn in turns if turn.call or turn.error not in (None, "ProviderError"))


def errors_line(tables: Mapping[str, Mapping[str, int]]) -> str:
    """Return the tools with errors in one line: of how many calls each kind came."""
    failed = {name: {kind: n for kind, n in counts.items() if kind != "calls"} for name, counts in tables.items()}
    parts = [
        f"{name} {', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))} of {tables[name]['calls']:,}"
        for name, kinds in failed.items()
        if kinds
    ]
    return "; ".join(parts) or "none"
