"""HTML that a notebook shows, in colours that follow the page: those of JupyterLab's theme, else of the reader's setting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Html:
    """Text that a notebook shows as HTML."""

    text: str

    def __repr__(self) -> str:
        return f"<Html of {len(self.text):,} characters>"

    def _repr_html_(self) -> str:
        return self.text


_RULES = """
.cnb { --cnb-back: var(--jp-layout-color0, BACK); --cnb-ink: var(--jp-content-font-color1, INK);
  --cnb-quiet: var(--jp-content-font-color2, QUIET); --cnb-line: var(--jp-border-color2, LINE) }
"""
_LIGHT = {"BACK": "#fff", "INK": "#222", "QUIET": "#666", "LINE": "#ddd"}
_DARK = {"BACK": "#181818", "INK": "#e6e6e6", "QUIET": "#a8a8a8", "LINE": "#444"}


def _rules(colors: dict[str, str]) -> str:
    text = _RULES
    for name, color in colors.items():
        text = text.replace(name, color)
    return text.strip()


STYLE = f"""<style>
{_rules(_LIGHT)}
@media (prefers-color-scheme: dark) {{ {_rules(_DARK)} }}
.cnb {{ background: var(--cnb-back); color: var(--cnb-ink); padding: .6em; border: 1px solid var(--cnb-line);
  border-radius: 4px; overflow-x: auto; font: 13px/1.5 system-ui, sans-serif }}
.cnb .head {{ font-weight: 600 }}
.cnb .quiet, .cnb summary {{ font-size: 12px; color: var(--cnb-quiet) }}
.cnb summary {{ cursor: pointer }}
.cnb details {{ border-top: 1px solid var(--cnb-line); padding: .1em 0 }}
.cnb pre {{ white-space: pre-wrap; font: 12.5px/1.55 ui-monospace, monospace; background: none; color: var(--cnb-ink);
  margin: .1em 0 .3em 1.1em; padding: 0 }}
.cnb .read {{ color: var(--cnb-quiet) }}
.cnb .mark {{ font-size: 75%; color: var(--cnb-quiet) }}
.cnb .chip {{ padding: 0 .4em; border-radius: 2px }}
</style>"""
"""Jupyter's variables are set in both of its themes and win; elsewhere the reader's setting chooses."""


def box(*parts: str) -> Html:
    """Parts in one frame that looks right in light and in dark."""
    return Html(f'{STYLE}<div class="cnb">{"".join(parts)}</div>')
