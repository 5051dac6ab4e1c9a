"""Further reward terms: importing this package registers them (`rewards.term_named` does, when a weight names one)."""

from __future__ import annotations

from composer_nb.harness.terms import conduct, style

__all__ = ["conduct", "style"]
