"""`composer-nb weights` on two sharded checkpoints and on a store."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer_nb import cli
from composer_nb.trainer.models.shards import index_of, write_shard
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.versions.publisher import Publisher

FILES = {"config.json": b"{}"}


def checkpoint(path: Path, change: float, *, shape: tuple[int, int] = (64, 64)) -> Path:
    """Write a checkpoint of two shards with one bfloat16 tensor each."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    files = {}
    for number, name in enumerate("ab", 1):
        w = (torch.linspace(-1, 1, shape[0] * shape[1]) + change * number).bfloat16().reshape(shape)
        file = f"model-{number:05d}-of-00002.safetensors"
        files[file] = {name: (torch.bfloat16, shape)}
        write_shard(path / file, files[file], lambda _, w=w: w)
    (path / "model.safetensors.index.json").write_text(index_of(files))
    return path


def test_a_delta_between_sharded_checkpoints_gives_back_the_files(tmp_path: Path, capsys):
    base, reshaped = checkpoint(tmp_path / "one", 0.0), checkpoint(tmp_path / "other", 0.0, shape=(32, 128))
    assert cli.main(["weights", "diff", str(base), str(reshaped), "--out", str(tmp_path / "delta")]) == 2
    assert "not versions of one model: a is" in capsys.readouterr().err
    assert not (tmp_path / "delta").exists() and not list(tmp_path.glob("*.part"))
    base, target = checkpoint(tmp_path / "base", 0.0), checkpoint(tmp_path / "target", 0.001)
    assert cli.main(["weights", "diff", str(base), str(target), "--out", str(tmp_path / "delta"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["full_bytes"] == 4 * 4096 and 0 < summary["changed_fraction"] < 1
    assert cli.main(["weights", "verify", str(tmp_path / "delta")]) == 0
    assert cli.main(["weights", "apply", str(base), str(tmp_path / "delta"), str(tmp_path / "out")]) == 0
    for file in target.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_the_log_says_who_ran_what(tmp_path: Path, capsys):
    store = tmp_path / "store"
    publisher = Publisher(store, owner="run", full_every=1)
    for version in range(3):
        manifest = publisher.publish(version, {"w": torch.full((5000,), float(version))}, FILES)
        publisher.acknowledge(version, manifest.hash, "engine")
    for action in ("verify", "log"):
        assert cli.main(["weights", action, str(tmp_path)]) == 2 and str(tmp_path) in capsys.readouterr().err
    assert cli.main(["weights", "log", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "full" in lines[0] and "on v000001" in lines[2]
    assert "anchor of" in lines[1] and lines[2].endswith("run by engine")
    (tmp_path / "run" / "weights").mkdir(parents=True)
    (tmp_path / "run" / "weights" / "versions").symlink_to(store)
    for source, version in ((store, 2), (tmp_path / "run", 1)):
        assert cli.main(["weights", "fetch", str(source), str(version), str(tmp_path / f"v{version}")]) == 0
        assert f"version {version}" in capsys.readouterr().out
        fetched = load_file(tmp_path / f"v{version}" / "model.safetensors")
        assert torch.equal(fetched["w"], torch.full((5000,), float(version)))
    assert cli.main(["weights", "fetch", str(store), "7", str(tmp_path / "v7")]) == 2
    assert "7" in capsys.readouterr().err and not (tmp_path / "v7").exists()


@pytest.mark.whole
def test_the_example_is_a_run_for_all_commands_that_read_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = example_run().path
    assert cli.main(["weights", "log", str(stored)]) == 0
    assert "final  a checkpoint     3,827,168 bytes" in capsys.readouterr().out
    assert cli.main(["weights", "log", str(stored), "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["before_final", "final", "start"]
    assert cli.main(["plan", "--run", str(stored), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["measured_s"] > 0
    assert cli.main(["plan", "--run", str(stored), "--write", str(tmp_path / "table.csv")]) == 2
    assert "the table needs their sizes" in capsys.readouterr().err and not (tmp_path / "table.csv").exists()
