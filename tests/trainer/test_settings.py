"""Settings: every name can be set in every way, nothing else can, and what is saved comes back."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.terms.registry import TERMS
from composer_nb.trainer.settings import RlSettings, Settings, from_dict, override, to_dict, types_of


def leaf(settings: Any, name: str) -> Any:
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


def kind(name: str) -> Any:
    *path, last = name.split(".")
    return typing.get_type_hints(type(leaf(Settings(), ".".join(path)) if path else Settings()))[last]


NAMES = [*types_of(Settings())]
BESIDE: dict[str, dict[str, Any]] = {
    "trainer": {"replay.level": "ids"},
    **{dense: {"model.intermediate_size": 64} for dense in ("llama", "qwen2", "qwen3")},
    "deepseek_v3": {
        "model.num_key_value_heads": 4,
        "model.kv_lora_rank": 16,
        "model.qk_nope_head_dim": 24,
        "model.qk_rope_head_dim": 8,
        "model.v_head_dim": 16,
    },
}
"""Settings that a choice needs beside it."""
CHOICE = [name for name in NAMES if typing.get_origin(kind(name)) is Literal]


def test_every_setting_is_of_a_kind_that_these_tests_know():
    assert {name for name in NAMES if kind(name) not in SAYS and name not in CHOICE} == {
        "data.kinds",
        "reward.weights",
        "services.changes",
        "model.mlp_only_layers",
        "sft.sharpness",
    }
    assert len(NAMES) == len(set(NAMES)) > 50 and {"rl.steps", "seed", "reward.effort.k"} <= set(NAMES)


def test_settings_are_read_as_they_were_saved() -> None:
    assert from_dict(json.loads(json.dumps(to_dict(Settings())))) == Settings()
    live = override(Settings(), {"services.changes": {"7": {"reward.effort.weight": 0.05, "services.bound": 4}}})
    assert from_dict(json.loads(json.dumps(to_dict(live)))) == live


# What can be set


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_takes_its_own_value_and_nothing_else_changes(name: str):
    value = leaf(Settings(), name)
    assert override(Settings(), {name: value}) == Settings()


SAME: dict[Any, Callable[[Any], list[Any]]] = {
    int: lambda now: [str(now)],
    float: lambda now: [str(now), *([int(now)] if now == int(now) else [])],
    bool: lambda now: [str(now), str(now).lower(), str(now).upper()],
    str: lambda now: [],
}
"""Other ways to write a value of each type."""
WRONG: dict[Any, Callable[[Any], list[Any]]] = {
    int: lambda now: [float(now), now + 0.5, f"{now}.5", True, None, "many", [now]],
    float: lambda now: [True, None, "high", {}, math.nan, math.inf, "nan", "-inf", 10**400, "1e999"],
    bool: lambda now: [1, 0, "yes", "1", "", None],
    str: lambda now: [5, None],
}
SAYS = {int: "valid integer", float: "valid number|finite number", bool: "valid boolean", str: "valid string"}


@pytest.mark.parametrize("name", [name for name in NAMES if kind(name) in SAYS])
def test_numbers_and_truth_values_also_come_as_text_and_nothing_else_is_taken(name: str):
    now, wanted = leaf(Settings(), name), kind(name)
    for same in SAME[wanted](now):
        changed = override(Settings(), {name: same})
        assert changed == Settings() and type(leaf(changed, name)) is wanted
    for wrong in WRONG[wanted](now):
        with pytest.raises(ValueError, match=f"{name}=.*: must be a ({SAYS[wanted]})"):
            override(Settings(), {name: wrong})


@pytest.mark.parametrize("name", CHOICE)
def test_choices_are_those_listed(name: str):
    choices = typing.get_args(kind(name))
    for choice in choices:
        assert leaf(override(Settings(), {name: choice, **BESIDE.get(choice, {})}), name) == choice
    for wrong in ("other", None, 1, choices, [choices[0]]):
        with pytest.raises(ValueError, match=f"{name}=.*: must be {choices[0]!r}"):
            override(Settings(), {name: wrong})


def test_a_mapping_of_weights_is_a_setting_of_its_own():
    weights = {"solved": 1, "invalid_calls": -0.1}
    changed = override(Settings(), {"reward.weights": weights})
    assert changed.reward.weights == weights
    weights["solved"] = 9
    assert changed.reward.weights["solved"] == 1, "what the caller does to its own mapping later changes nothing"
    for wrong in (5, "solved", [("solved", 1)], {"solved": "much"}, {"solved": None}, {3: 1.0}, {"solved": math.nan}):
        with pytest.raises(ValueError, match=r"reward\.weights"):
            override(Settings(), {"reward.weights": wrong})


def test_a_list_may_be_one_value():
    one = override(Settings(), {"sft.sharpness": "1.5", "data.kinds": "lint"})
    assert (one.sft.sharpness, one.data.kinds) == ((1.5,), ("lint",))


def test_several_settings_at_once_and_the_original_stays():
    base = Settings()
    changed = override(base, {"rl.steps": 3, "seed": 7, "reward.effort.weight": 0.5, "rl.lr": 1})
    assert (changed.rl.steps, changed.seed, changed.reward.effort.weight, changed.rl.lr) == (3, 7, 0.5, 1.0)
    assert base == Settings() and override(base, {}) is not None
    back = override(changed, {name: leaf(base, name) for name in ("rl.steps", "seed", "reward.effort.weight", "rl.lr")})
    assert back == base


@pytest.mark.parametrize("order", [1, -1])
def test_values_that_only_fit_together_may_come_in_any_order(order: int):
    together = [("model.num_experts", 1), ("model.num_experts_per_tok", 1)]
    assert override(Settings(), dict(together[::order])).model.num_experts == 1
    with pytest.raises(ValueError, match=r"model\.num_experts_per_tok=2 must lie in 1\.\.model\.num_experts=1"):
        override(Settings(), {"model.num_experts": 1})


# What cannot


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rl.step", "rl.steps"),
        ("rl.group_size", "rl.group"),
        ("midtrain.learning_rate", "midtrain."),
        ("sede", "seed"),
        ("rl.steps.x", "rl.steps"),
        ("reward.weights.solved", "reward.weights"),
        ("rl..steps", "rl.steps"),
        ("data.cod", "data.code"),
        ("loss.ratios", "loss.ratio"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name: str, near: str):
    with pytest.raises(ValueError) as error:
        override(Settings(), {name: 1})
    assert f"unknown setting {name!r}; did you mean '{near}" in str(error.value)
    assert str(error.value).split("'")[-2] in NAMES


def test_a_setting_of_another_kind_is_not_suggested():
    with pytest.raises(ValueError, match="unknown setting 'rl.step'$"):
        override(Settings(), {"rl.step": "/checkpoint"})


@pytest.mark.parametrize("name", ["rl", "reward.effort", "model"])
def test_a_group_cannot_be_set_as_a_whole(name: str):
    inner = next(other for other in NAMES if other.startswith(name + "."))
    for value in (5, {"steps": 3}, leaf(Settings(), name)):
        with pytest.raises(ValueError, match=f"{name} is a group of settings; name one of {inner}, "):
            override(Settings(), {name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss.beta": -1.0}, "loss.beta"),
        ({"loss.clip_low": 2.0}, "loss.clip_low"),
        ({"model.hidden_size": 30}, "model.hidden_size=30"),
        ({"limits.turns": 0}, "limits.turns"),
        ({"rl.steps": 0}, "rl.steps=0: must be greater than or equal to 1"),
        ({"rl.minibatches": "0"}, "rl.minibatches=0: must be greater than or equal to 1"),
        ({"rl.lr": -1}, "rl.lr=-1: must be greater than or equal to 0"),
        ({"sft.sharpness": "[1.5, 0]"}, r"sft.sharpness\[1\]=0: must be greater than 0"),
        ({"data.mistake_rate": 7}, "data.mistake_rate=7: must be less than or equal to 1"),
        ({"data.demonstrations": 0}, "data.demonstrations=0: midtrain.steps and extend.steps must be 0 too"),
        ({"data.mistaken_demonstrations": 0}, "data.mistaken_demonstrations=0: sft.steps must be 0 too"),
        ({"midtrain.steps": -1}, "midtrain.steps=-1: must be greater than or equal to 0"),
        ({"midtrain.steps": 0, "midtrain.draft_steps": 1}, "midtrain.draft_steps: needs midtrain.steps"),
        ({"services.ahead": 3}, r"services.bound=2: must be at least services.ahead \(3\)"),
        ({"limits.tokens": 600}, r"limits.tokens=600: must be at most model.max_position_embeddings \(512\)"),
        ({"reward.weights": {"nosuch": 1.0}}, r"reward.weights names 'nosuch'; registered terms"),
        ({"replay.source": "trainer"}, "replay.level is none"),
        ({"replay.plausible": 0.5}, "replay.level is none"),
        (
            {"replay.level": "ids", "replay.source": "trainer", "replay.missing": 0.5},
            "replay.missing is of routes on record",
        ),
        ({"engine.numerics": "int4-experts", "model.moe_intermediate_size": 40}, "multiples of 32"),
        ({"engine.numerics": "int4-experts-int8-router", "model.hidden_size": 96}, "multiples of 64"),
    ],
)
def test_what_cannot_work_is_refused_and_the_setting_named(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        override(Settings(), values)


@dataclass(frozen=True, kw_only=True)
class Inner:
    maybe: float | None = None
    table: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Other:
    """Not our tree: `override` works on any."""

    inner: Inner = field(default_factory=Inner)
    size: Literal[1, 2] = 1


def test_any_tree_of_dataclasses_can_be_overridden():
    assert override(Other(), {"inner.maybe": 3}).inner.maybe == 3.0
    assert override(Other(inner=Inner(maybe=1.0)), {"inner.maybe": None}).inner.maybe is None
    assert override(Other(), {"size": 2}).size == 2
    with pytest.raises(ValueError, match="did you mean 'inner.maybe'"):
        override(Other(), {"inner.may": 1})
    with pytest.raises(ValueError, match=r"inner\.maybe='x': must be a valid number"):
        override(Other(), {"inner.maybe": "x"})
    assert override(RlSettings(), {"steps": "4"}).steps == 4


def test_a_plain_loop_needs_a_prompt_a_rank():
    assert override(Settings(), {"rl.prompts": 2, "ranks": 8}).ranks == 8
    with pytest.raises(ValueError, match="rl.prompts=2: must be at least ranks"):
        override(Settings(), {"rl.prompts": 2, "ranks": 8, "services.on": False})


def test_a_mapping_also_comes_as_json():
    assert override(Settings(), {"reward.weights": '{"solved": 2}'}).reward.weights == {"solved": 2.0}


# Saved and read

values = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**40),
        "ranks": st.integers(1, 64),
        "data.code": st.text(max_size=8),
        "rl.lr": st.floats(0, 1, exclude_min=True),
        "replay.level": st.sampled_from(["none", "ids", "ids+order", "weights"]),
        "rl.max_seconds": st.floats(0, 1e9),
        "loss.ratio": st.sampled_from(["ppo", "gspo", "dppo"]),
        "loss.beta": st.floats(0, 2),
        "reward.weights": st.dictionaries(st.sampled_from(sorted(TERMS)), st.floats(-1e3, 1e3)),
        "reward.effort.q": st.floats(0, 2),
        "model.num_experts": st.integers(2, 99),
        "midtrain.steps": st.integers(1, 10**6),
    },
)


@settings(deadline=None)
@given(values)
def test_what_is_saved_as_json_comes_back_equal(chosen: dict[str, Any]):
    settings = override(Settings(), chosen)
    saved = json.loads(json.dumps(to_dict(settings)))
    assert from_dict(saved) == settings
    for name, value in chosen.items():
        assert leaf(settings, name) == value
    for name in set(NAMES) - set(chosen):
        assert leaf(settings, name) == leaf(Settings(), name)


def test_saved_settings_do_not_share_memory_with_the_tree():
    settings = Settings()
    to_dict(settings)["reward"]["weights"]["solved"] = 5
    assert settings == Settings() and settings.reward.weights["solved"] != 5


def test_saved_settings_that_this_version_does_not_know_are_refused():
    saved = to_dict(Settings())
    saved["rl"]["ghost"] = 1
    with pytest.raises(ValueError, match=r"unknown setting 'rl\.ghost'"):
        from_dict(saved)
    with pytest.raises(ValueError, match="unknown setting 'ghost'"):
        from_dict({"ghost": {"a": 1}})
    with pytest.raises(ValueError, match="rl is a group"):
        from_dict({"rl": 5})


anything_at_all = st.none() | st.integers() | st.text(max_size=4) | st.floats()


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=12) | st.sampled_from(NAMES), anything_at_all, max_size=3))
def test_whatever_comes_in_is_taken_or_refused_with_a_value_error(anything: dict[str, Any]):
    try:
        changed = override(Settings(), anything)
    except ValueError as error:
        assert "\n" not in str(error), "one line, whatever was given"
        return
    assert from_dict(json.loads(json.dumps(to_dict(changed)))) == changed
    assert all(name in NAMES for name in anything)


def test_a_model_without_experts_is_not_dealt_over_ranks_of_experts() -> None:
    dense = {"model.family": "llama", "model.intermediate_size": 96}
    assert override(Settings(), dense).model.moe_layers == 0
    with pytest.raises(ValueError, match=r"mesh\.ep=2 does not divide model\.num_experts=1"):
        override(Settings(), dense | {"mesh.ep": 2})
