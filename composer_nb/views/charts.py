"""Charts: tidy rows and a Vega-Lite description, drawn by Vega in JupyterLab, on the page of a run, and into files.

    lines("reward", rows, "mean of a batch")      rows {step, value, line}
    bars("solved", rows)                          rows {name, value, series, low, high}
    stack("seconds of a step", rows)              rows {at, value, part}
    Figure([chart, ...])                          shows itself in a notebook; .svg(), .png(), .csv()

Text and axes are of a grey that is readable on light and dark pages; the page sets its own ink. Vega comes with the package
`vl-convert-python`, so nothing is fetched.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from composer_nb.views.style import COLORS, DARK, GREY, INK, PALE, VERMILION

# JupyterLab brings Vega-Lite 5, which draws these descriptions too.
VERSION = "6.4"
MIME = "application/vnd.vegalite.v5+json"
# Steps that a bold line averages.
WINDOW = 8
_TEXT = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
CONFIG: Mapping[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {**_TEXT, "gridColor": PALE, "domainColor": GREY, "tickColor": GREY, "labelLimit": 150, "tickCount": 5},
    "legend": {**_TEXT, "orient": "bottom", "title": None, "columns": 2, "labelLimit": 200, "symbolOpacity": 1},
    "title": {"anchor": "start", "color": INK, "fontSize": 13, "fontWeight": "normal"},
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel: its title, its rows, and how Vega-Lite draws them, without the data."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    spec: Mapping[str, Any]

    def inline(self, number: int, width: int) -> dict[str, Any]:
        """Return the panel with its data, for a figure in which its names carry `number`."""
        text = json.dumps(self.spec).replace('"hover"', f'"hover{number}"').replace('"zoom"', f'"zoom{number}"', 1)
        return {"title": self.title, "width": width, **json.loads(text), "data": {"values": list(self.rows)}}


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels side by side, each `width` pixels wide; a `note` in place of a figure without data."""

    charts: Sequence[Chart]
    columns: int = 2
    width: int = 380
    note: str = ""

    @property
    def spec(self) -> dict[str, Any]:
        panels = [chart.inline(number, self.width) for number, chart in enumerate(self.charts)]
        if not panels:
            text = {"type": "text", "align": "left", "fontSize": 13, "color": INK, "text": self.note}
            panels = [
                {"width": 600, "height": 30, "data": {"values": [{}]}, "mark": text, "encoding": {"x": {"value": 0}}}
            ]
        schema = "https://vega.github.io/schema/vega-lite/v5.json"
        apart = {"scale": {"color": "independent"}, "legend": {"color": "independent"}}
        grid = {"concat": panels, "columns": self.columns, "resolve": apart, "spacing": {"row": 30, "column": 40}}
        return {"$schema": schema, "config": CONFIG, **grid}

    def svg(self) -> str:
        """Return the figure as an SVG file."""
        import vl_convert

        return str(vl_convert.vegalite_to_svg(self.spec, vl_version=VERSION))

    def png(self) -> bytes:
        """Return the figure as a PNG file."""
        import vl_convert

        return bytes(vl_convert.vegalite_to_png(self.spec, vl_version=VERSION, scale=1.4))

    def csv(self) -> str:
        """Return the rows of all panels, each with the title of its panel."""
        rows = [{"panel": chart.title, **row} for chart in self.charts for row in chart.rows]
        file = io.StringIO()
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            MIME: self.spec,
            "image/png": self.png(),
            "text/plain": "\n".join(c.title for c in self.charts) or self.note,
        }


@cache
def script() -> str:
    """Return Vega, Vega-Lite and their embedding as one script, which sets `window.vegaEmbed`."""
    import vl_convert

    return str(vl_convert.javascript_bundle(vl_version=VERSION))  # type: ignore[call-arg]


def color(names: Sequence[str], colors: Mapping[str, str] | None = None, field: str = "line") -> dict[str, Any]:
    """Return the colours of `names`, in this order; no legend for one name."""
    labels = list(dict.fromkeys(names))
    ink = [(colors or {}).get(name, COLORS[at % len(COLORS)]) for at, name in enumerate(labels)]
    hidden = {} if len(labels) > 1 else {"legend": None}
    return {"field": field, "type": "nominal", "scale": {"domain": labels, "range": ink}, **hidden}


def _number(field: str, heading: str, form: str = "", **options: Any) -> dict[str, Any]:
    axis = {"title": heading or None, **({"format": form} if form else {})}
    return {"field": field, "type": "quantitative", "axis": axis, **options}


def lines(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    unit: str = "",
    colors: Mapping[str, str] | None = None,
    *,
    x: str = "RL step",
    zero: bool = True,
    window: int = WINDOW,
) -> Chart:
    """Draw one line per `line` over `step`: the mean of the last `window` values bold, each `value` faintly if there is one line
    only, and from `low` to `high` a band. A row with `event` is a mark on the axis, one with `bound` a level, one with `point` a
    point of its `line`. Hovering tells the values of a step; Shift and the wheel zoom, dragging moves, a double click shows
    all."""
    share = {"scale": {"domainMax": 1.02, "domainMin": 0}} if unit == "share" else {"scale": {"zero": zero}}
    at = _number("step", x, "d", scale={"nice": False})
    smooth = {
        "window": [{"op": "mean", "field": "value", "as": "mean"}],
        "frame": [1 - window, 0],
        "groupby": ["line"],
        "sort": [{"field": "step"}],
    }
    level = _number("mean", unit if unit != "share" else "", "%" if unit == "share" else "", **share)
    is_value, pointer = {"filter": "isValid(datum.value)"}, {"type": "point", "fields": ["step"], "nearest": True}
    hover = {"name": "hover", "select": {**pointer, "on": "pointerover", "clear": "pointerout"}}
    drag = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}
    by_line = {"color": color([row["line"] for row in rows if "line" in row], colors), "y": level}
    mark = {"type": "line", "clip": True}
    number_of_steps = len({row.get("step") for row in rows})
    fields = {name for row in rows for name in row}
    several = len({row["line"] for row in rows if "value" in row}) > 1  # whose faint lines would be one tangle
    layers = [
        {"mark": {**mark, "strokeOpacity": 0.3, "strokeWidth": 1}, "transform": [is_value],
         "encoding": {**by_line, "y": {**level, "field": "value"}}},
        {"mark": {**mark, "point": number_of_steps < 12}, "encoding": by_line, "transform": [is_value],
         "params": [{"name": "zoom", "select": drag, "bind": "scales"}]},
    ][several:]  # fmt: skip
    extra = {
        "low": {"mark": {"type": "area", "clip": True, "fillOpacity": 0.15},
                "encoding": {**by_line, "y": {**level, "field": "low"}, "y2": {"field": "high"}}},
        "point": {"mark": {**mark, "strokeDash": [1, 4], "point": {"size": 50}},
                  "encoding": {**by_line, "y": {**level, "field": "point"}}},
        "bound": {"mark": {"type": "rule", "strokeDash": [2, 3], "color": INK},
                  "encoding": {"y": {**level, "field": "bound"}, "x": None}},
        "event": {"mark": {"type": "rule", "strokeDash": [5, 3], "color": VERMILION, "strokeWidth": 1.5, "clip": True},
                  "encoding": {"tooltip": {"field": "event", "title": "event"}}},
    }  # fmt: skip
    layers += [
        {**layer, "transform": [{"filter": f"isValid(datum.{name})"}]}
        for name, layer in extra.items()
        if name in fields
    ]
    layers.insert(2 - several, {
        "transform": [is_value, {"pivot": "line", "value": "value", "groupby": ["step"]}], "params": [hover],
        "mark": {"type": "rule", "tooltip": {"content": "data"}, "color": GREY, "strokeWidth": 2, "clip": True},
        "encoding": {"opacity": {"condition": {"value": 0.6, "param": "hover", "empty": False}, "value": 0}},
    })  # fmt: skip
    return Chart(title, rows, {"height": 170, "transform": [smooth], "encoding": {"x": at}, "layer": layers})


def scored(name: str, value: float | None, span: Sequence[float] | None, **more: Any) -> dict[str, Any]:
    """Return a row of `bars` with the ends of its interval, which are None without one."""
    low, high = span if span and value is not None else (None, None)
    return {"name": name, **more, "value": value, "low": low, "high": high}


def bars(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    colors: Mapping[str, str] | None = None,
    *,
    unit: str = "",
    form: str = "",
    mark: str = "bar",
    least: float = 0.0,
) -> Chart:
    """Draw one bar (or `mark`) per `name` and `series`, with the interval from `low` to `high` and the number in `form` behind
    it; “–” for a missing value. `least` above 0 is the foot of a logarithmic axis."""
    series = list(dict.fromkeys(str(row.get("series", "")) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    most = max((row.get("high") or row["value"] or 0.0 for row in rows), default=0.0)
    scale: dict[str, Any] = {"type": "log", "domainMin": least} if least else {"zero": mark == "bar"}
    if mark == "bar":  # with room for the numbers
        scale["domainMax"] = 1.12 if unit == "share" else (50 if least else 1.25) * most or 1.0
    length = _number("value", "" if unit == "share" else unit, form, scale=scale)
    length["axis"]["tickCount"] = 4
    side: dict[str, Any] = {
        "y": {"field": "name", "type": "nominal", "sort": names, "axis": {"title": None, "ticks": False}}
    }
    if len(series) > 1 and mark == "bar":
        side["yOffset"] = {"field": "series", "type": "nominal", "sort": series}
    tint = color(series if len(series) > 1 else names, colors, "series" if len(series) > 1 else "name")
    if len(series) < 2:
        tint["legend"] = None
    text = f"isValid(datum.value) ? format(datum.value, '{form}') : '–'"
    behind = {"calculate": f"max({least}, datum.high || datum.value || 0)", "as": "end"}
    hint: dict[str, Any] = {"tooltip": {"content": "data"}}
    intervals: list[dict[str, Any]] = [  # which stand out from any bar and any page
        {"mark": {"type": "rule", "color": ink, "strokeWidth": size, **hint},
         "transform": [{"filter": "isValid(datum.low)"}],
         "encoding": {**side, "x": {**length, "field": "low"}, "x2": {"field": "high"}}}
        for ink, size in (("white", 3), (DARK, 1.5))
    ]  # fmt: skip
    shape = {"type": mark, **hint} | ({"filled": True, "opacity": 1, "size": 90} if mark == "point" else {})
    main: dict[str, Any] = {"mark": shape, "encoding": {**side, "x": length, "color": tint}}
    if least:
        main["encoding"]["x2"] = {"datum": least}
    layers = [main, *intervals] if mark == "bar" else [*intervals, main]
    if form.startswith("+"):  # differences
        zero = {"type": "rule", "color": GREY, "strokeDash": [2, 3]}
        layers.insert(0, {"mark": zero, "encoding": {"x": {"datum": 0}}})
    if form and mark == "bar":
        label = {"type": "text", "align": "left", "dx": 4, "color": INK, "fontSize": 11}
        end: dict[str, Any] = {**side, "x": {**length, "field": "end"}, "text": {"field": "label"}}
        layers.append({"mark": label, "transform": [behind, {"calculate": text, "as": "label"}], "encoding": end})
    height: Any = (6 + 14 * len(series)) * len(names) if "yOffset" in side else {"step": 22}
    return Chart(title, rows, {"height": height, "layer": layers})


def stack(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    colors: Mapping[str, str],
    *,
    x: str,
    unit: str = "",
    mark: str = "area",
    top: float | None = None,
) -> Chart:
    """Draw the `value` of each `part`, one above the other, over steps (`area`) or names (`bar`) `at`; `top` ends the axis."""
    kind: dict[str, Any] = {"type": "ordinal"}
    shape: dict[str, Any] = {"type": mark, "clip": True, "tooltip": {"content": "data"}}
    if mark == "area":
        kind = {"type": "quantitative", "scale": {"nice": False}}
        shape["interpolate"] = "step"
    scale = {"domainMax": top} if top else {}
    encoding = {
        "x": {"field": "at", "axis": {"title": x, "labelAngle": 0, "labelOverlap": True}, **kind},
        "y": _number("value", unit, aggregate="sum", scale=scale),
        "color": color([row["part"] for row in rows], colors, "part"),
        "order": {"field": "order"},
    }
    return Chart(title, rows, {"height": 170, "mark": shape, "encoding": encoding})
