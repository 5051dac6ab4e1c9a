"""What the studies start with: tasks that can be made, and runs that are theirs."""

from pathlib import Path

import pytest

from composer_nb.harness.files import read_json, write_json
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.tour.miniatures import make_miniatures
from composer_nb.trainer.records.batches import batch_file
from composer_nb.trainer.records.rundir import create
from composer_nb.trainer.settings import Settings, override, to_dict
from scripts.studies.measure_search import SETS
from scripts.studies.measure_tour import run, take_rl


def test_the_study_of_search_has_requests_in_the_code_s_words_and_in_others(sandboxes: SandboxExecutor) -> None:
    for name, options in SETS.items():
        few = options | {"count": 2, "executor": CachedExecutor(sandboxes), "kinds": ("paraphrase",)}
        for task in make_miniatures("a study", **few):
            assert (task.metadata["function"] in task.instruction) == (name == "the code's own words")


def test_a_complete_run_of_other_settings_is_not_reported_again(tmp_path: Path) -> None:
    settings, stored = override(Settings(), {"until": "midtrain"}), create(tmp_path, "seed0")
    write_json(stored.path / "settings.json", to_dict(settings))
    for stage in ("tokenizer", "data", "midtrain", "sft"):
        stored.finish(stage, 1.0, {})
    assert run(tmp_path, "seed0", settings).path == stored.path
    with pytest.raises(ValueError, match=r"other settings .*midtrain\.steps"):
        run(tmp_path, "seed0", override(settings, {"midtrain.steps": 7}))


def test_what_follows_rl_again_sees_the_batch_that_its_sharpness_is_set_on(tmp_path: Path) -> None:
    trained, again = create(tmp_path, "trained"), create(tmp_path, "again")
    for name in ("before_final", "trained", "final"):
        (trained.path / "weights" / name).mkdir(parents=True)
        write_json(trained.path / "weights" / name / "name.json", {"name": name})
    write_json(batch_file(trained.path, 7), [])
    trained.take_steps("rl", [{"step": 8, "live_groups": 1}])
    trained.finish("rl", 2.0, {"versions": 8})
    take_rl(again, trained)
    assert again.steps("rl") == trained.steps("rl") and again.finished("rl") == trained.finished("rl")
    assert batch_file(again.path, 7).is_file() and read_json(again.path / "weights" / "final" / "name.json") == {
        "name": "trained"
    }
