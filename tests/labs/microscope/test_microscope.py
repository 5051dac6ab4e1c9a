"""The mismatch microscope: one fault at a time is planted into a record, and it is named; none is planted, and none is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.labs.microscope import view
from composer_nb.labs.microscope.microscope import UNEXPLAINED, examine, figures, kl_divergence, toggled
from composer_nb.labs.microscope.numerics import CAUSES, FrozenBatch, ProgramChoices, engines, observe, record
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.retrace import with_checks
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import Numerics, variant

NEVER = frozenset[int]()
BF16 = torch.bfloat16
SMALL = dict(
    num_key_value_heads=4, head_dim=16, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8
)
SMALL |= dict(v_head_dim=8, intermediate_size=32, first_k_dense_replace=1, n_shared_experts=1, num_hidden_layers=3)
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts_per_tok": 3},
    "deepseek_v3": {**SMALL, "family": "deepseek_v3", "routed_scaling_factor": 1.5, "num_experts_per_tok": 3},
}


@pytest.fixture(params=list(SHAPES))
def model(request, make_model) -> Model:
    new_model = make_model(3, **SHAPES[request.param])
    for layer in new_model.layers:
        if layer.router_bias is not None:
            layer.router_bias.copy_(torch.rand(len(layer.router_bias)) * 0.1)
    return new_model


@pytest.fixture
def batch(model, converse) -> FrozenBatch:
    """Rows that an engine wrote; recorded anew by what is taken for the engine."""
    return FrozenBatch.of(converse(Engine(model, stop=NEVER, slots=5, max_length=96), 5))


def engine_of(model: Model, **choices: Any) -> ProgramChoices:
    return ProgramChoices(model=model, **choices)


def with_trace(batch: FrozenBatch, row: int, **streams: Any) -> FrozenBatch:
    """Row `row` with other routes or gates on record, and checks that vouch for them."""
    segment = batch.rows[row]
    changed = replace(segment, trace=with_checks(replace(segment.trace, **streams), segment.token_ids))
    return replace(batch, rows=(*batch.rows[:row], changed, *batch.rows[row + 1 :]))


def taken_up(engine: ProgramChoices, batch: FrozenBatch) -> FrozenBatch:
    """Return the record of an engine that computed with the routes and gates of `batch`: only log-probabilities change."""
    recorded = record(engine, batch)
    rows = tuple(replace(new, trace=old.trace) for new, old in zip(recorded.rows, batch.rows, strict=True))
    return replace(recorded, rows=rows)


def with_another_weight(model: Model, layer: int, expert: int) -> Model:
    changed = variant(model, Numerics())
    with torch.no_grad():
        changed.layers[layer].w_out[expert, 3] += 0.5
    return changed


# What is planted: from model, honest record and a place to the record with the fault


Plant = Callable[[Model, FrozenBatch, int, int, int], FrozenBatch]


def foreign_expert(model: Model, batch: FrozenBatch, row: int, token: int, layer: int) -> FrozenBatch:
    routes = batch.rows[row].trace.routes.copy()
    used = set(routes[token, layer].tolist())
    routes[token, layer, -1] = min(set(range(model.config.num_experts)) - used)
    only = np.arange(len(routes)) == token  # later tokens are routed by the changed hidden states
    rerouted = with_trace(batch, row, routes=routes, route_valid=only)
    return record(engine_of(model, replay="ids+order"), rerouted)


def swapped_order(model: Model, batch: FrozenBatch, row: int, token: int, layer: int) -> FrozenBatch:
    routes, gates = batch.rows[row].trace.routes.copy(), batch.rows[row].trace.gates.copy()
    for x in (routes, gates):
        x[token, layer] = np.roll(x[token, layer], 1)
    return taken_up(engine_of(model, replay="weights"), with_trace(batch, row, routes=routes, gates=gates))


def dropped_route(model: Model, batch: FrozenBatch, row: int, token: int, layer: int) -> FrozenBatch:
    valid = batch.rows[row].trace.route_valid.copy()
    valid[token] = False
    return with_trace(batch, row, route_valid=valid)


PLANTED: dict[str, tuple[str, Plant]] = {
    "a dropped route": ("route ids", dropped_route),
    "a foreign expert": ("route ids", foreign_expert),
    "swapped order": ("order", swapped_order),
}


def test_nothing_is_named_where_nothing_is_planted(model, batch):
    for recorded in (batch, record(engine_of(model), batch), record(engine_of(model, layout="cache"), batch)):
        report = examine(model, recorded)
        assert report.named == () and report.left.most < report.tolerance / 3
        assert report.first is None


def test_a_weight_that_differs_is_named_with_its_tensor_and_expert(model, batch):
    layer = model.config.first_k_dense_replace
    changed = with_another_weight(model, layer, 4)
    recorded = record(engine_of(changed), batch)
    report = examine(model, recorded, engine_of(changed))
    assert report.named == ("weights",) and report.left.most == 0
    [finding] = report.findings
    assert f"model.layers.{layer}.mlp.experts.4.down_proj.weight" in finding.text and "1 tensors" in finding.text
    assert report.first is not None and report.first_in == "experts"
    assert (report.first.layer, report.first.experts) == (layer, (4,))
    routes = recorded.rows[report.first.row].trace.routes[: report.first.token + 1, 0]
    assert 4 in routes[-1] and (report.first.row > 0 or not (routes[:-1] == 4).any()), "the first token that met it"


BEFORE_THE_HEAD: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature": ("log-prob mode", {"temperature": 0.7}),
    "nucleus": ("log-prob mode", {"top_p": 0.8}),
    "positions": ("position and shift", {"jump": 2}),
    "shift": ("position and shift", {"shift": 1}),
}


@pytest.mark.parametrize("name", BEFORE_THE_HEAD)
def test_a_rung_before_the_head_is_named_and_can_be_toggled(model, batch, name: str):
    cause, choices = BEFORE_THE_HEAD[name]
    engine, trainer = engine_of(model, **choices), engine_of(model)
    recorded = record(engine, batch)
    report = examine(model, recorded, engine)
    assert report.named == (cause,) and report.left.most <= report.tolerance < report.start.most
    assert toggled(trainer, engine, recorded, [cause]).most <= report.tolerance
    assert toggled(trainer, engine, recorded, []) == report.start
    checkbox, text = view.toggles(trainer, engine, recorded).children
    before, checkbox.value = text.value, True
    assert checkbox.description == cause and f"max {report.start.most:.1e}" in before != text.value
    if name == "temperature":  # the record equals log-probabilities divided by hand
        ends = [ax.get_xlim()[1] for ax in view.waterfall(report).axes]
        assert ends == pytest.approx([1.12 * report.start.p99, 1.12 * report.start.k3]), "bars end within their panel"
        raw = observe(trainer, batch)
        token = torch.from_numpy(batch.of_written("token_ids")).long()
        by_hand = (raw.logprob_SV / 0.7).log_softmax(-1).gather(1, token[:, None])[:, 0]
        assert np.allclose(recorded.of_written("logprob"), by_hand, atol=1e-6)


def test_a_trainer_that_spells_otherwise_is_named_and_what_it_lacks_is_counted(model, batch):
    """The second token of each written stretch becomes two other tokens; the last token that was read is doubled."""
    recorded = record(engine_of(model), batch)
    spelling = {"spelling": lambda ids: np.concatenate([ids[:1], [3, 4], ids[2:]]).astype(np.int32)}
    template = {"template": lambda ids: np.append(ids, ids[-1:]).astype(np.int32)}
    for choices, names in (
        (spelling, ["tokens"]),
        (template, ["template"]),
        (spelling | template, ["tokens", "template"]),
    ):
        report = examine(engine_of(model, **choices), recorded)
        assert [*report.named] == names and report.left.most <= report.tolerance and report.start.most > 0.1
    lost = 0
    for row in recorded.rows:
        second = np.flatnonzero(np.diff(row.acted[:-1].astype(int)) == 1) + 2
        lost += int((row.acted[second] & ~np.isin(row.token_ids[second], (3, 4))).sum())
    report = examine(engine_of(model, **spelling), recorded)
    assert report.start.missing == pytest.approx(lost / len(recorded.of_written("logprob")))
    assert report.left.missing == 0 and f"{report.start.missing:.1%}" in report.findings[0].text
    with pytest.raises(ValueError, match="only a trainer"):
        record(engine_of(model, **template), batch)
    with pytest.raises(ValueError, match="tokens on record"):
        observe(engine_of(model, **template, replay="ids"), recorded)


def test_everything_at_once_is_named_and_explained(model, batch):
    changed = with_another_weight(model, 1, 2)
    engine = engine_of(changed, head=BF16, attention=BF16, numerics=Numerics(expert_bits=4), replay="weights")
    recorded = record(replace(engine, replay="none"), batch)
    for row in range(len(recorded.rows)):
        trace = recorded.rows[row].trace
        routes, gates = trace.routes.copy(), torch.from_numpy(trace.gates).to(BF16).float().numpy()
        routes[2, 1, :2], gates[2, 1, :2] = routes[2, 1, [1, 0]], gates[2, 1, [1, 0]]
        used = set(routes[4, 0].tolist())
        routes[4, 0, -1] = min(set(range(6)) - used)
        recorded = with_trace(recorded, row, routes=routes, gates=gates)
    report = examine(model, taken_up(engine, recorded), engine)
    assert report.named == tuple(cause.name for cause in CAUSES[4:])
    assert report.left.most == 0 and report.start.most > 0.1


CASE: list[tuple[Model, FrozenBatch]] = []


@pytest.fixture
def case(make_model, converse) -> tuple[Model, FrozenBatch]:
    """One model and its honest record, for all examples."""
    if not CASE:
        model = make_model(3, num_experts_per_tok=3)
        written = FrozenBatch.of(converse(Engine(model, stop=NEVER, slots=3, max_length=96), 3))
        CASE.append((model, record(engine_of(model), written)))
    return CASE[0]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wherever_a_fault_is_it_is_named_there(case, data):
    model, batch = case
    name = data.draw(st.sampled_from(sorted(PLANTED)))
    cause, plant = PLANTED[name]
    row, layer = data.draw(st.integers(0, len(batch.rows) - 1)), data.draw(st.integers(0, 1))
    token = data.draw(st.integers(0, len(batch.rows[row].token_ids) - 3))
    faulty = plant(model, batch, row, token, layer)
    report = examine(model, faulty)
    assert report.named == (cause,), [finding.text for finding in report.findings]
    assert report.left.most <= report.tolerance, "nothing is left to explain"
    for finding in report.findings:
        assert finding.where is not None and (finding.where.row, finding.where.token) == (row, token)
        if finding.where.layer is not None and name != "a dropped route":
            experts = tuple(faulty.rows[row].trace.routes[token, layer].tolist())
            assert (finding.where.layer, finding.where.experts) == (layer, experts)


@pytest.mark.parametrize("name", ["bf16", "bf16-head", "bf16-attention", "int4-experts"])
def test_all_causes_put_in_leave_nothing(model, batch, name: str):
    engine = engines(model)[name]
    report = examine(model, record(engine, batch), engine)
    assert report.left.most <= 1e-5 and report.left.kl < 1e-9
    expected = {"bf16-head": ("head dtype",), "bf16-attention": ("attention",)}
    assert report.named == expected.get(name, ("GEMM",)) or name == "bf16"
    if name == "bf16":
        assert {"head dtype", "GEMM"} <= set(report.named) <= {"head dtype", "GEMM", "attention"}
    assert (report.start.k3 > 1e-9) == bool(report.named)


def test_kl_over_the_vocabulary_is_what_samples_estimate():
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(size=(4000, 9)))
    near = logits + torch.from_numpy(random.normal(0, 0.3, logits.shape))
    engine, trainer = logits.log_softmax(-1), near.log_softmax(-1)
    samplers = [torch.distributions.Categorical(logits=logits) for logits in (engine, trainer)]
    token = samplers[0].sample()[:, None]
    gap = (trainer - engine).gather(1, token)[:, 0].numpy()
    exact = kl_divergence(engine, trainer).numpy()
    assert np.allclose(exact, torch.distributions.kl_divergence(*samplers))
    estimates = figures(gap, exact)
    assert estimates.k1 == pytest.approx(estimates.kl, rel=0.25)
    assert estimates.k3 == pytest.approx(estimates.kl, rel=0.1)


def test_what_is_left_is_told_by_policy_version(model, batch):
    """Rows of an older version were written with other weights; the newest agree."""
    layer = model.config.first_k_dense_replace
    old = record(engine_of(with_another_weight(model, layer, 4)), batch)
    new = record(engine_of(model), batch)
    rows = [replace(row, policy_version=np.where(row.acted, 6, -1).astype(np.int32)) for row in old.rows[:2]]
    rows += [replace(row, policy_version=np.where(row.acted, 7, -1).astype(np.int32)) for row in new.rows[2:]]
    report = examine(model, FrozenBatch(rows=tuple(rows)))
    assert report.named == (UNEXPLAINED,) and f"first disagree in layer {layer + 1}" in report.findings[0].text
    assert set(report.versions) == {6, 7}
    assert report.versions[7].most <= report.tolerance < report.versions[6].most
