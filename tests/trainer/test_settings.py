"""Settings: every name can be set in every way, nothing else can, and what is saved comes back."""

import json
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.terms.registry import TERMS
from composer_nb.trainer.settings import Settings, from_dict, override, to_dict, to_flat

DEFAULTS = to_flat(Settings())
NAMES = [*DEFAULTS]


def leaf(settings: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), settings)


def saved(settings: Settings) -> Any:
    return json.loads(json.dumps(to_dict(settings)))


@pytest.mark.parametrize("name", NAMES)
def test_override_takes_the_value_of_every_setting_also_as_text(name: str):
    value = DEFAULTS[name]
    assert override(Settings(), {name: value}) == Settings()
    text = json.dumps(value) if isinstance(value, tuple | dict) else str(value)
    changed = override(Settings(), {name: text})
    assert changed == Settings() and type(leaf(changed, name)) is type(value)


def test_override_sets_several_values_together_and_leaves_the_original():
    weights = {"solved": 1, "invalid_calls": -0.1}
    base = Settings()
    changed = override(base, {"rl.steps": 3, "seed": 7, "reward.effort.weight": 0.5, "reward.weights": weights})
    assert (changed.rl.steps, changed.seed, changed.reward.effort.weight) == (3, 7, 0.5) and base == Settings()
    weights["solved"] = to_dict(changed)["reward"]["weights"]["solved"] = 9
    assert changed.reward.weights["solved"] == 1, "no memory is shared"
    for order in (1, -1):
        together = [("model.num_experts", 1), ("model.num_experts_per_tok", 1)]
        assert override(base, dict(together[::order])).model.num_experts == 1


@pytest.mark.parametrize(
    ("name", "near"), [("sede", "seed"), ("rl.steps.x", "rl.steps"), ("reward.effort", "reward.effort.")]
)
def test_unknown_names_are_refused_with_the_nearest(name: str, near: str):
    with pytest.raises(ValueError, match=f"unknown setting '{name}'; did you mean '{near}"):
        override(Settings(), {name: 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rl.steps": True}, "rl.steps=True: must be a number"),
        ({"replay.level": "other"}, "replay.level='other': must be 'none', 'ids'"),
        ({"reward.weights": {"nosuch": 1.0}}, r"reward.weights names 'nosuch'; registered terms"),
        ({"model.num_experts": 1}, "model.num_experts_per_tok=2 must lie in 1..model.num_experts=1"),
        ({"data.demonstrations": 0}, "data.demonstrations=0: midtrain.steps and extend.steps must be 0 too"),
        ({"midtrain.steps": 0, "midtrain.draft_steps": 1}, "midtrain.draft_steps: needs midtrain.steps"),
        ({"sft.draft_weight": 0.1}, "draft_weight of any phase, rl.draft_steps: need midtrain.draft_steps"),
        ({"services.ahead": 3}, r"services.bound=2: must be at least services.ahead \(3\)"),
        ({"limits.tokens": 600}, r"limits.tokens=600: must be at most model.max_position_embeddings \(512\)"),
        ({"engine.numerics": "int4-experts", "model.moe_intermediate_size": 40}, "multiples of 32"),
        ({"rl.prompts": 2, "ranks": 8, "services.on": False}, "rl.prompts=2: must be at least ranks"),
        ({"model.family": "llama", "model.intermediate_size": 96, "mesh.ep": 2}, "mesh.ep=2 does not divide"),
        ({"rl.frozen_layers": 4}, r"rl.frozen_layers=4: must be below model.num_hidden_layers \(4\)"),
        ({"rl.group": 1}, "rl.group=1: needs loss.baseline=batch or none"),
        ({"rl.refill": 0.1, "loss.baseline": "none", "data.rl_tasks": 1600}, "rl.refill: needs loss.baseline=group"),
        ({"reward.effort.turns": -0.5}, r"reward\.effort\.turns=-0\.5: "),
        ({"rl.refill": 0.1, "reward.effort.by_solved": 1}, "rl.refill: needs reward.effort.by_solved=0"),
        ({"reward.judge": "math:sqrt"}, "reward.judge='math:sqrt': needs `judged` in reward.weights"),
        ({"reward.weights": {"judged": 1.0}}, "reward.judge='': needs `judged`"),
        ({"loss.baseline": "pass_at_k", "loss.pass_k": 8}, "loss.pass_k=8: must be below rl.group"),
        ({"loss.baseline": "batch", "loss.gate": "mixed"}, "loss.gate=mixed needs loss.baseline=group or pass_at_k"),
        ({"loss.centre_scores": True}, "loss.centre_scores needs loss.ratio=none, cispo, tis or icepop"),
        ({"loss.centre_scores": True, "loss.ratio": "tis"}, "loss.centre_scores: needs services.on=false"),
        (
            {"services.lockstep": True, "engine.transition": "sync"},
            "engine.transition=sync: needs services.lockstep=false",
        ),
        ({"rl.uncalibrated": True, "sft.sharpness": []}, "rl.uncalibrated: needs sft.sharpness"),
    ],
)
def test_unfit_values_are_refused_by_name(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        override(Settings(), values)


choices = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "data.code": st.text(max_size=8),
        "rl.lr": st.floats(0, 1, exclude_min=True),
        "replay.level": st.sampled_from(["none", "ids", "ids+order", "weights"]),
        "rl.max_seconds": st.floats(0, 1e9),
        "reward.weights": st.dictionaries(st.sampled_from(sorted(TERMS.keys() - {"judged"})), st.floats(-1e3, 1e3)),
        "model.num_experts": st.integers(2, 99),
        "services.changes": st.just({"7": {"reward.effort.weight": 0.05, "services.bound": 4}}),
    },
)


@settings(deadline=None)
@given(choices)
def test_saved_settings_come_back_equal(values: dict[str, Any]):
    changed = override(Settings(), values)
    assert from_dict(saved(changed)) == changed
    assert to_flat(changed) == DEFAULTS | values


def test_saved_settings_of_another_version_are_refused_by_name():
    for strange, message in (
        ({"rl": {"ghost": 1}}, "unknown setting 'rl.ghost'"),
        ({"ghost": {"a": 1}}, "unknown setting 'ghost'"),
        ({"rl": 5}, "rl=5: must be a dictionary"),
    ):
        with pytest.raises(ValueError, match=message):
            from_dict(strange)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=12) | st.sampled_from(NAMES),
        st.none() | st.integers() | st.text(max_size=4) | st.floats(),
        max_size=3,
    )
)
def test_any_values_are_taken_or_refused_in_one_line(values: dict[str, Any]):
    try:
        changed = override(Settings(), values)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    assert from_dict(saved(changed)) == changed and set(values) <= set(NAMES)
