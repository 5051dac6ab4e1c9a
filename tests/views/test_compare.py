"""Figures of two runs side by side."""

import copy
from collections.abc import Callable

from pixels import inked_share

from composer_nb.trainer.recipe.report import compare
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import compare as views


def test_figures_of_two_runs_show_what_was_found(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    with run.connect() as db:
        db.execute("DELETE FROM step WHERE stage = 'rl' AND step = 3")
    comparison = compare(tiny_run, run)
    figures = views.figures(comparison, tiny_run, run)
    assert set(figures) == {"scores", "curves", "time"}
    assert all(inked_share(figure.png()) > 0.005 and caption.endswith(".") for caption, figure in figures.values())
    [solved] = [chart for chart in views.curves(comparison, tiny_run, run).charts if chart.title.startswith("solved")]
    lines: dict[str, list[float]] = {}
    for row in solved.rows:
        lines.setdefault(row["line"], []).append(row["value"])
    assert list(lines.values()) == [[p["solved"] for p in r.steps("rl")] for r in (tiny_run, run)]

    comparison = copy.deepcopy(compare(tiny_run, tiny_run))
    final = comparison["eval"]["final"]
    final["scores"][1].update(pass_at_1=0.5, ci95=[0.4, 0.6])
    final["difference"].update(pass_at_1=0.25, ci95=[0.1, 0.4])
    bars, gaps = views.scores(comparison).charts
    values = [row["value"] for row in bars.rows if row["name"] == "final"]
    assert values == [final["scores"][0]["pass_at_1"], 0.5]
    assert {"name": "final", "value": 25.0, "low": 10.0, "high": 40.0} in gaps.rows
