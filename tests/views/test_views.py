"""Figures and readings of a run."""

import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pixels import drawn
from safetensors.numpy import save_file

from composer_nb.harness.rollout import Kind
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.untrusted import visible_lines
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.recipe.reader import read_status
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views import curves, rollout, scores, style, task
from composer_nb.views.page import box
from composer_nb.views.report import pictures


def pixels(png: bytes) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(png))


def test_a_run_has_all_its_figures_and_each_shows_something(tiny_run: RunDir):
    found = pictures(tiny_run)
    assert set(found) == {
        "policies",
        "families",
        "behaviour",
        "losses",
        "rl",
        "experts",
        "mismatch",
        "staleness",
        "time",
    }
    for name, (caption, png) in found.items():
        image = pixels(png)
        assert image.shape[0] > 200 and image.shape[1] > 600, name
        assert drawn(png) > 0.005, f"{name} is blank"
        assert caption.endswith(".")


DRAWN: dict[str, Callable[[RunDir, dict[str, Any]], style.Picture]] = {
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
    [text] = [text.get_text() for ax in picture.axes for text in ax.texts]
    assert re.search(r"\b(yet|not)\b", text)
    assert pixels(picture.png()).size


def test_the_bars_are_the_scores(tiny_run: RunDir):
    report = build_report(tiny_run)
    report["eval"]["final"]["pass_at_1"], report["eval"]["final"]["ci95"] = 0.5, [0.4, 0.6]
    [ax] = scores.policies(report).axes
    heights = {container.get_label(): [bar.get_height() for bar in container] for container in ax.containers}
    assert list(heights) == ["base", "midtrained", "start", "final"]
    final = report["eval"]["final"]
    within = [score["pass_within"]["12"] for score in (final, final["structures"])]
    assert heights["final"] == [0.5, final["pass_greedy"], final["best_of_k"], *within]
    lines = [sorted(line.get_ydata()) for line in ax.lines]
    assert [0.4, 0.6] in lines
    report["eval"]["base"]["n_tasks"] = 3
    [ax] = scores.policies(report).axes
    assert f"{final['n_tasks']} held-out tasks (base 3)" in ax.get_title(loc="left")
    gain = report["gain"]["within_12"]["heldout"]
    assert f"{100 * gain['gain']:+.1f} (" in ax.get_xticklabels()[3].get_text()
    for score in report["eval"].values():
        del score["structures"]
    [ax] = scores.policies(report).axes
    assert [label.get_text() for label in ax.get_xticklabels()][-1].startswith("in 12 calls")


def test_curves_hold_every_durable_step(tiny_run: RunDir):
    steps = tiny_run.steps("rl")
    solved, entropy, calls, _ = curves.reinforcement(read_status(tiny_run.path)).axes
    raw = [line for line in calls.lines if line.get_alpha() == 0.3]
    assert list(raw[0].get_ydata()) == [step["turns"] for step in steps]
    dots = {line.get_label(): list(line.get_ydata()) for line in solved.lines}
    assert dots["tuning tasks, greedy"] == [step["tune_greedy"] for step in steps if "tune_greedy" in step]
    assert entropy.lines, "this run trains on something, so it has an entropy"


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30), st.integers(1, 10))
def test_smoothing_averages_the_past_alone(values: list[float], window: int):
    expected = [np.mean(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))]
    assert np.allclose(style.smooth(values, window), expected, atol=1e-6)


def visible_text(page: str) -> str:
    """What stands in the folding parts, headings aside."""
    return html.unescape(re.sub(r"<[^>]+>", "", "".join(re.findall(r"<pre>(.*?)</pre>", page, re.S))))


def test_a_reading_shows_every_token_and_its_numbers(tiny_run: RunDir):
    stored = rollout.sampled(tiny_run)[0]
    page = rollout.read(stored)._repr_html_()
    texts = rollout._texts(stored)
    shown = visible_lines("".join(texts)).replace("\n", "")
    assert visible_text(page).replace("⏎", "").replace("\n", "") == shown
    notes = [html.unescape(note) for note in re.findall(r'title="([^"]*)"', page)]
    assert len(notes) == len(texts)
    place = int(stored.segment.acted.argmax())
    assert f"log p {stored.segment.logprob[place]:.3f}" in notes[place]
    experts = stored.segment.trace.routes[place]
    layers = [line for line in notes[place].split("\n") if line.startswith("layer")]
    assert len(layers) == len(experts)
    for line, chosen in zip(layers, experts, strict=True):
        assert [int(n) for n in re.findall(r"(\d+) \(", line)] == list(chosen)
    assert "log p" not in notes[0], "the prompt was not sampled"
    assert "layer" not in notes[-1], "the last token was never forwarded"


def test_text_of_a_rollout_is_no_markup(tiny_run: RunDir):
    stored = rollout.sampled(tiny_run)[0]
    page = rollout.read(stored).text
    assert "<|" not in page and "&lt;|call|&gt;" in page
    assert set(re.findall(r"<(\w+)", page)) == {"style", "div", "details", "summary", "pre", "span"}


def colours_of(stored: rollout.StoredRollout, by: rollout.ColorBy) -> rollout.Colouring:
    return rollout.colouring(stored.segment, by, stored.token_advantages, stored.trainer)


@pytest.fixture
def followed(tiny_run: RunDir) -> rollout.StoredRollout:
    """The rollout with the largest advantage, and what another policy than the one that sampled it computes at its tokens."""
    stored = max(rollout.sampled(tiny_run), key=lambda one: abs(one.advantage or 0))
    return rollout.with_trainer(stored, load_pretrained(tiny_run.path / "weights" / "midtrained"))


@pytest.mark.parametrize("color", get_args(rollout.ColorBy))
def test_every_colouring_explains_itself(followed: rollout.StoredRollout, color: rollout.ColorBy):
    page, colours = rollout.read(followed, color).text, colours_of(followed, color)
    assert colours.key and all(html.escape(meaning) in page for _, meaning in colours.key)
    for tint, acted in zip(colours.tints, followed.segment.acted, strict=True):
        assert (tint is not None) == acted
        assert tint is None or (0 <= tint.strength <= 1 and f"background:{tint.over_page}" in page)


def test_ratios_are_the_trainers(followed: rollout.StoredRollout):
    assert followed.trainer is not None
    segment, acted = followed.segment, followed.segment.acted
    moved = rollout.log_ratio(segment, followed.trainer)
    assert np.allclose(moved[acted], (followed.trainer.logprob - segment.logprob)[acted]) and not moved[~acted].any()
    assert np.abs(moved).max() > 0.05, "another policy"
    tints = colours_of(followed, "ratio").tints
    for tint, value in zip(tints, moved.tolist(), strict=True):
        if tint is not None:
            assert tint.strength == pytest.approx(min(1.0, abs(value) / rollout.DRIFT))
            assert value == 0 or (tint.hue == style.SKY) == (value > 0)
    place = int(np.argmax(np.abs(moved)))
    notes = [html.unescape(note) for note in re.findall(r'title="([^"]*)"', rollout.read(followed).text)]
    assert f"ratio {np.exp(moved[place]):.3f}, entropy {followed.trainer.entropy[place]:.2f}" in notes[place]


def test_a_colour_without_its_numbers_is_refused(tiny_run: RunDir):
    stored = rollout.sampled(tiny_run)[0]
    with pytest.raises(ValueError, match="color='ratio' needs the values that a model computes"):
        rollout.read(stored, "ratio")


def test_calls_are_open_and_what_was_read_is_folded(tiny_run: RunDir):
    stored = max(rollout.sampled(tiny_run), key=lambda one: len(one.attempt.rollout.turns))
    page = rollout.read(stored).text
    parts = re.findall(r"<details( open)?><summary>(.*?)</summary>", page)
    names = [heading.split(" · ")[0] for _, heading in parts]
    assert names[0] == "prompt" and names.count("tool call") == stored.attempt.rollout.messages
    assert all(bool(is_open) == (name == "tool call") for (is_open, _), name in zip(parts, names, strict=True))
    written = [heading.split(" · ", 2)[2] for _, heading in parts if heading.startswith("tool call")]
    assert all(re.fullmatch(r"\S+( \S+)*", each) or not each for each in written)
    special = rollout._part_heading(Kind.TOOL_CALL, ["grep", "<|to|>", "def ", "mark", "<|end|>"])
    assert special == "tool call · 5 tokens · grep def mark", "words on both sides of a special token stay apart"
    counts = [int(heading.split(" · ")[1].split()[0]) for _, heading in parts]
    assert sum(counts) == len(stored.segment.token_ids)
    assert rollout.read(stored, unfold=True).text.count("<details open>") == len(parts)
    assert rollout.read(stored, unfold=True).text.replace("<details open>", "") == page.replace(
        "<details open>", ""
    ).replace("<details>", "")


def test_a_page_follows_the_theme_and_text_stays_readable():
    page = box("<p>x</p>").text
    assert "color-scheme: light dark" in page and "var(--jp-layout-color0, light-dark(#fff, #181818))" in page

    def luminance(rgb: tuple[float, ...]) -> float:
        """WCAG 2.1, relative luminance."""
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    hues = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW, style.BLUE, style.VERMILION)
    for back, ink in (((1.0,) * 3, (0x22 / 255,) * 3), ((0x18 / 255,) * 3, (0xE6 / 255,) * 3)):
        for hue in hues:
            red, green, blue, alpha = (float(x) for x in re.findall(r"[\d.]+", rollout.Tint(hue).over_page))
            under = tuple(alpha * c / 255 + (1 - alpha) * b for c, b in zip((red, green, blue), back, strict=True))
            dark, bright = sorted((luminance(under), luminance(ink)))
            assert (bright + 0.05) / (dark + 0.05) > 3, (hue, back)


def test_only_what_was_trained_on_has_an_advantage(tiny_run: RunDir):
    stored = next(iter(rollout.held_out(tiny_run, "final").values()))
    with pytest.raises(ValueError, match="only rollouts that RL trained on"):
        rollout.read(stored, "advantage")


def test_a_step_that_is_not_there_is_refused(tiny_run: RunDir):
    assert rollout.sampled(tiny_run, 1)[0].name == "RL step 1"
    for step in (0, 4, -4):
        with pytest.raises(ValueError, match="RL has 3 steps"):
            rollout.sampled(tiny_run, step)


def test_before_and_after_are_greedy_attempts_at_one_task(tiny_run: RunDir):
    before, after = rollout.before_and_after(tiny_run)
    assert before.attempt.task == after.attempt.task
    assert (before.name, after.name) == ("start", "final")
    held = {one.id for one in load_tasks(tiny_run.path / "data" / "heldout.jsonl")}
    assert set(rollout.held_out(tiny_run, "final")) == held
    assert len(rollout.doubts([before, after]).axes) == 2


def test_expert_use_is_counted_over_forwarded_tokens(tiny_run: RunDir):
    files = sorted((tiny_run.path / "rollouts").glob("rl_00002_*.safetensors"))
    use_LE = rollout.expert_use(files)
    config = tiny_run.finished("rl") and build_report(tiny_run)["settings"]["model"]
    assert use_LE.shape == (config["num_hidden_layers"], config["num_experts"])
    assert np.allclose(use_LE.sum(1), config["num_experts_per_tok"])


def test_a_model_without_experts_uses_none(tmp_path: Path):
    routes = {"routes": np.zeros((5, 0, 2), np.uint8), "route_valid": np.array([True] * 4 + [False])}
    save_file(routes, tmp_path / "rl.safetensors")
    assert rollout.expert_use([tmp_path / "rl.safetensors"]).shape == (0, 0)


def test_a_task_card_marks_the_wrong_line(tiny_run: RunDir):
    one = load_tasks(tiny_run.path / "data" / "heldout.jsonl")[0]
    text = task.card(one).text
    assert html.escape(one.instruction) in text and text.count("←") == 1
    [(path, right)] = one.solution.items()
    [wrong] = set(one.files[path].split("\n")) - set(right.split("\n"))
    assert f'<span style="background:{task.MARK}">{html.escape(wrong)}</span>' in text


def test_calls_are_shown_as_calls_and_what_is_none_as_written(tiny_run: RunDir):
    attempts = [stored.attempt for stored in rollout.sampled(tiny_run)]
    turns = [(one, turn) for one in attempts for turn in one.rollout.turns]
    good = next(one for one, turn in turns if turn.error is None)
    bad, wrong = next((one, turn) for one, turn in turns if turn.error == "InvalidArguments")
    first = next(turn for turn in good.rollout.turns if turn.error is None)
    assert html.escape(f"{json.loads(first.call)['name']}(") in task.turns(good).text
    assert "#D55E00" in task.turns(bad).text and html.escape(wrong.observation) in task.turns(bad).text
    assert task.turns(bad).text.count("<tr>") == len(bad.rollout.turns)
    numbers = re.findall(r'<tr><td class="quiet">(\d*)</td>', task.turns(good).text)
    assert [number for number in numbers if number] == [str(n) for n in range(1, good.rollout.messages + 1)]
    assert task._call('{"name": "edit_line", "arguments": {"line": 2}}') == "edit_line(line=2)"
    assert task._call("edit f.py 2 2 <b>") == "edit f.py 2 2 <b>"


def test_what_a_policy_did_not_show_is_a_dash(tiny_run: RunDir):
    report = build_report(tiny_run)
    report["eval"]["base"] |= {"retries_after_failed_test": None, "invalid_call_rate": None, "pass_greedy": None}
    names = ["pass_at_1", "pass_greedy", "retries_after_failed_test"]
    assert list(scores.table(report, names).loc["base"][1:]) == ["–", "–"]
    panels = {ax.get_title(loc="left"): ax for ax in scores.behaviour(report).axes}
    for heading in ("invalid calls", "edits again after a failed test"):
        ax = panels[heading]
        assert ax.texts[0].get_text() == "–" and all(round(bar.get_x() + bar.get_width() / 2) for bar in ax.patches)
    assert [text.get_text() for text in scores.policies(report).axes[0].texts].count("–") == 1
    report["replay"]["on"] = {"logprob_gap_p50": 0.0, "logprob_gap_p99": None, "k3": None}
    [ax] = scores.mismatch(report).axes
    assert [text.get_text() for text in ax.texts][3:] == ["0.0e+00", "–", "–"]
    assert pixels(scores.mismatch(report).png()).size
