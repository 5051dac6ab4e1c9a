"""Regions in virtual time, with the real publisher, receivers and files of relays."""

import json
from dataclasses import replace

import pytest

from composer_nb.cli import main
from composer_nb.labs.regions import GIB, Region, RegionCourse, RegionPlan, outage_study, region_figures, staleness


def test_a_lost_region_costs_a_full_version_and_nobody_else_anything(capsys: pytest.CaptureFixture[str]):
    command = ["weights", "regions", "--versions", "16", "--minutes", "40", "--json"]
    assert main(command) == 0
    calm, cut, lost = json.loads(capsys.readouterr().out).values()
    for name in ("near", "continent", "thin"):
        assert calm[name] == cut[name] == lost[name], "they do not wait for each other"
    calm, cut, lost = (figures["overseas"] for figures in (calm, cut, lost))
    assert cut["gib"] == pytest.approx(calm["gib"], rel=1e-3), "every delta is read after the line is back"
    assert lost["gib"] - calm["gib"] == pytest.approx(1024 + 8 * 8.8, abs=2), "a full version, and deltas again"
    assert calm["behind_max"] <= 1 and calm["unusable"] == 0 and cut["behind_max"] == 5
    # 40 minutes without a line: two versions of ten minutes may still be sampled from. Without the region: all of it, and a copy.
    span = 16 * 600 - 1024 * GIB / 1.25e9
    assert cut["unusable"] == pytest.approx((40 * 60 - 2 * 600) / span, rel=0.2)
    assert lost["unusable"] == pytest.approx((40 * 60 + 1024 * GIB / 1.25e9) / span, rel=0.1)
    assert calm["of_full"] == pytest.approx((1024 + 15 * 8.7) / (16 * 1024), rel=0.05)


def test_lag_is_what_upload_line_and_swap_take():
    regions = (Region(name="a", latency_s=1.0, bytes_s=1e9, receivers=1),)
    plan = RegionPlan(regions=regions, versions=8, full_bytes=1e11, upload_bytes_s=1e9, poll_s=0.5)
    events = RegionCourse(plan).run()
    figures = region_figures(plan, events)["a"]
    delta_bytes = (figures["gib"] * GIB - plan.full_bytes) / 7
    assert events == RegionCourse(plan).run(), "one plan has one course"
    # The upload; a manifest and a file, each a second of latency; the payload; the swap. The configuration is there already.
    sent_s = delta_bytes / plan.upload_bytes_s + delta_bytes / 1e9
    assert 30 + sent_s + 2 <= figures["lag_s"] < 30 + sent_s + 3
    spans = staleness(events, "a", 8 * plan.step_s)
    assert {versions for _, _, versions in spans[3:]} == {0, 1} and spans[-1][1] == 8 * plan.step_s
    assert all(end == begin for (_, end, _), (begin, _, _) in zip(spans, spans[1:], strict=False))
    with pytest.raises(ValueError, match="different names"):
        outage_study(RegionPlan(regions=plan.regions * 2), "a", 0, 0)
    for versions in (0, 1):
        with pytest.raises(ValueError, match=f"--versions {versions}: a has not come to its second"):
            outage_study(replace(plan, versions=versions), "a", 0, 0)
