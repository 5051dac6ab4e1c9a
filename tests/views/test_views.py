"""Figures and readings of a run: they show what is stored, and are readable on any page."""

import html
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import matplotlib.image
import numpy as np
import pytest
from pixels import PAGES, contrasts, inked_share, luminance
from safetensors.numpy import load_file, save_file

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Kind, Turn
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.untrusted import visible_lines
from composer_nb.labs import formats, weights
from composer_nb.labs.losses import REASONS, with_reasons
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.recipe.reader import read_status
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import curves, rollout, scores, style, task
from composer_nb.views.charts import MIME, Figure
from composer_nb.views.page import box
from composer_nb.views.report import pictures


def pixels(png: bytes) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(png))


def test_a_run_has_all_its_figures_and_each_shows_something(tiny_run: RunDir):
    figures = pictures(tiny_run)
    names = "policies families behaviour losses rl experts mismatch staleness time"
    assert set(figures) == set(names.split())
    for name, (caption, figure) in figures.items():
        image = pixels(figure.png())
        assert image.shape[0] > 100 and image.shape[1] > 500, name
        assert inked_share(figure.png()) > 0.005, f"{name} is blank"
        assert caption.endswith(".")
        if isinstance(figure, Figure):
            assert figure.svg().startswith("<svg") and len(figure.csv().splitlines()) > 1
            assert {MIME, "image/png"} <= set(figure._repr_mimebundle_())


DRAWN: dict[str, Callable[[RunDir, dict[str, Any]], Any]] = {
    "supervised": lambda run, report: curves.supervised(read_status(run.path)),
    "reinforcement": lambda run, report: curves.reinforcement(read_status(run.path)),
    "time": lambda run, report: curves.time_split(read_status(run.path)),
    "policies": lambda run, report: scores.policies(report),
    "families": lambda run, report: scores.families(report),
    "behaviour": lambda run, report: scores.behaviour(report),
    "mismatch": lambda run, report: scores.mismatch(report),
    "experts": lambda run, report: rollout.experts(run),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_a_run_that_has_just_begun_says_why_there_is_nothing(tmp_path: Path, draw: Any):
    run = RunDir(tmp_path)
    picture = draw(run, build_report(run))
    text = picture.note if isinstance(picture, Figure) else picture.axes[0].texts[0].get_text()
    assert re.search(r"\b(yet|not)\b", text)
    assert pixels(picture.png()).size


def test_the_bars_are_the_scores_and_what_is_missing_is_a_dash(tiny_run: RunDir):
    report = build_report(tiny_run)
    final = report["eval"]["final"]
    final |= {"pass_at_1": 0.5, "ci95": [0.4, 0.6]}
    absent = ("retries_after_failed_test", "invalid_call_rate", "pass_greedy")
    report["eval"]["base"] |= dict.fromkeys(absent) | {"n_tasks": 3}
    for part, over in {"heldout": "midtrained", "structures": "start"}.items():
        report["gain"]["within_12"][part]["over"] = over
    chart, gains = scores.policies(report).charts
    bars = {(row["name"], row["series"]): row for row in chart.rows}
    within = [score["pass_within"]["12"] for score in (final, final["structures"])]
    heights = [row["value"] for (_, policy), row in bars.items() if policy == "final"]
    assert heights == [0.5, final["pass_greedy"], final["best_of_k"], *within]
    assert (bars["pass@1", "final"]["low"], bars["pass@1", "final"]["high"]) == (0.4, 0.6)
    assert bars["greedy", "base"]["value"] is None and bars["greedy", "base"]["low"] is None
    assert f"{final['n_tasks']} held-out tasks (base 3)" in chart.title
    assert gains.rows[0]["value"] == 100 * report["gain"]["within_12"]["heldout"]["gain"]
    assert [row["name"] for row in gains.rows] == ["heldout over midtrained", "structures over start"]
    names = ["pass_at_1", "pass_greedy", "retries_after_failed_test"]
    assert list(scores.table(report, names).loc["base"][1:]) == ["–", "–"]
    assert "–" in scores.policies(report).svg()
    panels = {chart.title: chart.rows for chart in scores.behaviour(report).charts}
    assert panels["invalid calls"][0] == {"name": "base", "value": None}
    ends = {c.title: c.spec["layer"][0]["encoding"]["x"]["scale"]["domainMax"] for c in scores.behaviour(report).charts}
    assert ends["invalid calls"] == 1.12, "a share has no tick beyond 100 %"
    report["replay"]["on"] = {"logprob_gap_p50": 0.0, "logprob_gap_p99": None, "k3": None}
    assert scores.mismatch(report).svg().count(">–<") == 2


def test_experts_without_a_token_are_drawn_and_count(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    for file in (run.path / "rollouts").glob("rl_*.safetensors"):
        tensors = load_file(file)
        first_two = np.arange(2, dtype=tensors["routes"].dtype)
        save_file({**tensors, "routes": tensors["routes"] * 0 + first_two}, file)
    ax = rollout.experts(run).axes[0]
    assert "(even use: 25%)" in ax.get_title(loc="left") and len(ax.get_xticks()) == 8


def test_a_reading_shows_every_token_and_its_numbers_and_lets_no_markup_through(tiny_run: RunDir):
    stored = max(rollout.sampled(tiny_run), key=lambda sample: len(sample.attempt.rollout.turns))
    page = rollout.read(stored)._repr_html_()
    tags = {"style", "div", "details", "summary", "pre", "span"}
    assert set(re.findall(r"<(\w+)", page)) == tags and "&lt;|call|&gt;" in page
    texts = rollout._texts(stored)
    visible = html.unescape(re.sub(r"<[^>]+>", "", "".join(re.findall(r"<pre>(.*?)</pre>", page, re.S))))
    assert visible.replace("⏎", "").replace("\n", "") == visible_lines("".join(texts)).replace("\n", "")
    notes = [html.unescape(note) for note in re.findall(r'title="([^"]*)"', page)]
    position = int(stored.segment.acted.argmax())
    assert len(notes) == len(texts) and f"log p {stored.segment.logprob[position]:.3f}" in notes[position]
    layers = [line for line in notes[position].split("\n") if line.startswith("layer")]
    for line, chosen in zip(layers, stored.segment.trace.routes[position], strict=True):
        assert [int(n) for n in re.findall(r"(\d+) \(", line)] == list(chosen)
    assert "log p" not in notes[0], "the prompt was not sampled"
    assert "layer" not in notes[-1], "the last token was not forwarded"

    parts = re.findall(r"<details( open)?><summary>(.*?)</summary>", page)
    names = [heading.split(" · ")[0] for _, heading in parts]
    assert names[0] == "prompt" and names.count("tool call") == stored.attempt.rollout.messages
    assert all(bool(is_open) == (name == "tool call") for (is_open, _), name in zip(parts, names, strict=True))
    assert sum(int(heading.split(" · ")[1].split()[0]) for _, heading in parts) == len(stored.segment.token_ids)
    assert rollout.read(stored, unfold=True).text.count("<details open>") == len(parts)
    special = rollout._part_heading(Kind.TOOL_CALL, ["grep", "<|to|>", "def ", "mark", "<|end|>"])
    assert special == "tool call · 5 tokens · grep def mark", "words on both sides of a special token stay apart"

    whole, last = stored.attempt.rollout, Turn(call="", observation="", said="Done")
    talked = replace(whole, turns=(*whole.turns, last))
    lost = replace(stored, attempt=replace(stored.attempt, rollout=talked, grade=Grade(status="infra_error")))
    assert f": infra_error, {whole.calls} calls, ended" in lost.heading, "a last word is no call"


@pytest.mark.parametrize("color", get_args(rollout.ColorBy))
def test_every_colouring_explains_itself(tiny_run: RunDir, color: rollout.ColorBy):
    """The rollout has the largest advantage, and the recomputed values are of another policy than its own."""
    stored = max(rollout.sampled(tiny_run), key=lambda sample: abs(sample.advantage or 0))
    stored = rollout.with_trainer(stored, load_pretrained(tiny_run.path / "weights" / "midtrained"))
    segment, trainer = stored.segment, stored.trainer
    halves = np.where(np.cumsum(segment.acted) * 2 > segment.acted.sum(), 7, 6)
    segment = replace(segment, policy_version=np.where(segment.acted, halves, -1).astype(np.int32))
    attempt = replace(stored.attempt, rollout=replace(stored.attempt.rollout, segments=(segment,)))
    stored = with_reasons(replace(stored, attempt=attempt), LossSettings())
    page = rollout.read(stored, color).text
    tints, meanings = rollout.colouring(stored, color)
    assert meanings and all(html.escape(meaning) in page for _, meaning in meanings)
    assert trainer is not None
    moved = rollout.log_ratio(segment, trainer)
    assert np.allclose(moved, np.where(segment.acted, trainer.logprob - segment.logprob, 0))
    for tint, acted, value in zip(tints, segment.acted, moved.tolist(), strict=True):
        assert (tint is not None) == acted
        assert tint is None or (0 <= tint.strength <= 1 and f"background:{tint.over_page}" in page)
        if tint is not None and color == "ratio":
            assert tint.strength == pytest.approx(min(1.0, abs(value) / rollout.DRIFT))
            assert value == 0 or (tint.hue == style.SKY) == (value > 0)
    for position in np.flatnonzero(segment.acted).tolist():
        up, ratio = stored.advantage > 0, np.exp(moved[position])
        stopped = "above" if up and ratio > 1.28 else "below" if not up and ratio < 0.8 else "trains"
        assert stored.reasons[0][position] == stopped
        if color == "reason":
            assert tints[position] == rollout.REASONS[stopped][0]
        elif color == "version":
            assert tints[position].hue == (style.SKY if halves[position] == 6 else style.ORANGE)
        elif color == "entropy":
            assert tints[position].strength == pytest.approx(min(1.0, trainer.entropy[position] / 3))
    assert set(rollout.REASONS) == set(REASONS) and len(meanings) == (2 if color == "version" else len(meanings))
    position = int(np.argmax(np.abs(moved)))
    assert abs(moved[position]) > 0.05, "another policy"
    notes = [html.unescape(note) for note in re.findall(r'title="([^"]*)"', page)]
    assert f"ratio {np.exp(moved[position]):.3f}, entropy {trainer.entropy[position]:.2f}" in notes[position]


def test_a_page_follows_the_theme_and_text_stays_readable():
    page = box("<p>x</p>").text
    assert "color-scheme: light dark" in page and "var(--jp-layout-color0, light-dark(#fff, #181818))" in page

    hues = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW, style.BLUE, style.VERMILION)
    for back, ink in (((1.0,) * 3, (0x22 / 255,) * 3), ((0x18 / 255,) * 3, (0xE6 / 255,) * 3)):
        for hue in hues:
            red, green, blue, alpha = (float(x) for x in re.findall(r"[\d.]+", rollout.Tint(hue).over_page))
            under = tuple(alpha * c / 255 + (1 - alpha) * b for c, b in zip((red, green, blue), back, strict=True))
            dark, bright = sorted((luminance(np.array(under)), luminance(np.array(ink))))
            assert (bright + 0.05) / (dark + 0.05) > 3, (hue, back)


def test_a_task_card_marks_the_wrong_line_and_calls_are_shown_as_calls(tiny_run: RunDir):
    heldout_task = load_tasks(tiny_run.path / "data" / "heldout.jsonl")[0]
    text = task.card(heldout_task).text
    assert html.escape(heldout_task.instruction) in text and text.count("←") == 1
    [(path, solution)] = heldout_task.solution.items()
    [wrong] = set(heldout_task.files[path].split("\n")) - set(solution.split("\n"))
    assert f'<span style="background:{task.MARK}">{html.escape(wrong)}</span>' in text
    attempts = [stored.attempt for stored in rollout.sampled(tiny_run)]
    bad, fault = next((a, turn) for a in attempts for turn in a.rollout.turns if turn.error == "InvalidArguments")
    text = task.turns(bad).text
    assert "#D55E00" in text and html.escape(fault.observation) in text and text.count("<tr>") == len(bad.rollout.turns)
    numbers = [number for number in re.findall(r'<tr><td class="quiet">(\d*)</td>', text) if number]
    assert numbers == [str(n) for n in range(1, bad.rollout.messages + 1)]
    for call, line in (
        ('{"name": "edit_line", "arguments": {"line": 2}}', "edit_line(line=2)"),
        ("edit f.py <b>",) * 2,
    ):
        assert task._call(Turn(call=call, observation="")) == line


FIGURES = {
    "experts": lambda run, report: rollout.experts(run),
    "nothing": lambda run, report: style.empty("there is nothing to draw yet"),
    "bits": lambda run, report: formats.bits({"bf16": [0x3F80, 0x0001], "E8M0": [127]}, {"bf16": [1, 0]}),
    "codecs": lambda run, report: weights.sizes({"raw": [800.0, 90.0]}, ["1e-6", "1e-5"]),
}


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_text_is_readable_on_any_page(tiny_run: RunDir, draw: Any) -> None:
    picture = draw(tiny_run, build_report(tiny_run))
    corner = pixels(picture.png())[0, 0]
    assert corner[3] == 0, "the page shows through"
    for page in PAGES:
        contrast_of = contrasts(picture, page)
        assert contrast_of and {text: value for text, value in contrast_of.items() if value < 2.5} == {}, page
