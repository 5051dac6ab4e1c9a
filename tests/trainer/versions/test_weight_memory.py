"""Two gigabytes of weights through publish and apply, each in a process of its own that may not take a gigabyte.

What is counted is the peak resident set of the process (`ru_maxrss`): its own memory, with the libraries' 350 MB or so, and
pages of mapped files while they are mapped. Not counted is the system's page cache, which is given back when memory is wanted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, LIMIT = 64, 1 << 30
MAKE = """
import torch
from composer_nb.trainer.models.shards import index_of, write_shard
from pathlib import Path
random = torch.Generator().manual_seed(0)
for name in ("base", "target"):
    Path(name).mkdir()
    Path(name, "config.json").write_text("{}")
files = {}
for layer in range(LAYERS):
    tensor = f"layers.{layer}.w"
    w = 0.02 * torch.randn(4096, 4096, generator=random)
    u = torch.randn(4096, 4096, generator=random)
    file = f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"
    files[file] = {tensor: (torch.bfloat16, (4096, 4096))}
    for name, weights in (("base", w), ("target", w - 3e-7 * u)):
        write_shard(Path(name, file), files[file], lambda _: weights.bfloat16())
for name in ("base", "target"):
    Path(name, "model.safetensors.index.json").write_text(index_of(files))
"""
PUBLISH = """
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.models.shards import Mapped, read_shards
from pathlib import Path
publisher = Publisher("store", owner="run")
for version, name in enumerate(("base", "target")):
    manifest = publisher.publish(version, Mapped(read_shards(Path(name))), {"config.json": b"{}"})
    publisher.acknowledge(version, manifest.hash)
assert manifest.base is not None
said = {"delta": manifest.size}
"""
APPLY = """
from composer_nb.trainer.weights import encode_delta, apply_delta
encode_delta("base", "target", "delta")
said = {"hash": apply_delta("base", "delta", "again").hash}
"""


def peak(folder: Path, program: str) -> dict[str, float]:
    """What the program said, and its peak resident set in bytes."""
    usage = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    end = f"\nimport json, resource\nsaid['peak'] = {usage} * 1024\nprint(json.dumps(said))"
    text = f"LAYERS = {LAYERS}\nimport torch; torch.set_num_threads(1); said = {{}}\n{program}{end}"
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_gigabytes_pass_in_less_than_one(tmp_path: Path):
    """Two minutes on one idle core, 12 GB of disk."""
    peak(tmp_path, MAKE)
    found = {name: peak(tmp_path, text) for name, text in (("publish", PUBLISH), ("apply", APPLY))}
    print({name: f"{one['peak'] / 2**20:.0f} MiB" for name, one in found.items()}, found)
    assert max(one["peak"] for one in found.values()) < LIMIT
    for file in (tmp_path / "target").glob("*.safetensors"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    assert found["publish"]["delta"] < 0.03 * (LAYERS << 25)
