"""The trainer as ranks: what it publishes and goes on from, and how the failure of one rank is told."""

import inspect
import multiprocessing
import os
import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.parallel.team import interface_of, meeting_place
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services import coordinator, environments, shards, trainer_ranks
from composer_nb.trainer.services.cluster import NODE
from composer_nb.trainer.services.environments import EnvironmentService
from composer_nb.trainer.services.run_copy import RunCopy
from composer_nb.trainer.services.services import EngineService, EvaluationService, store_url
from composer_nb.trainer.services.trainer_ranks import TrainerRank, together
from composer_nb.trainer.settings import Settings, override
from composer_nb.trainer.versions.manifest import state_hash
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
from composer_nb.trainer.versions.store import VersionStore
from tests.trainer.forked import on_ranks
from tests.trainer.parallel.test_sharding import GQA, seeded_model, streams

SIZES = {f"model.{name}": value for name, value in GQA.to_dict().items() if name != "yarn"}
RL = {"rl.minibatches": 2, "rl.prompts": 2, "rl.steps": 8, "rl.microbatch_tokens": 48, "loss.ratio": "none"}
SETTINGS = override(Settings(), SIZES | RL | {"model.max_position_embeddings": 256, "limits.tokens": 64, "ranks": 2})
CUT = override(SETTINGS, {"mesh.cp": 2, "mesh.ep": 2})


def run_at(path: Path) -> RunDir:
    """Return a run with a policy and nothing else."""
    run = RunDir(path)
    save_pretrained(seeded_model(GQA, torch.float32, False), run.path / "weights" / "start", dtype=torch.bfloat16)
    return run


def batch(step: int) -> tuple[Any, ...]:
    return step, 1e-3, streams(GQA, 6, seed=step), []


def _learns(folder: Path, run_path: Path, settings: Settings, checkpoint: Any, results: Any) -> None:
    """Learn a batch as a group of two, from a checkpoint, and write one. `run_path`: where ranks see the run, if at all."""
    rank = torch.distributed.get_rank()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # the service joins one of its own
    os.environ[NODE] = str(folder.parent / f"node{rank}")
    service = TrainerRank(rank, run_path, settings)
    address = folder / "address"
    if rank == 0:
        address.with_suffix(".part").write_text(service.meet())
        address.with_suffix(".part").rename(address)
    while not address.exists():
        time.sleep(0.01)
    service.begin(address.read_text(), 1.0, checkpoint)
    metrics = service.learn(*batch(service.at()))
    step, name = service.state()
    files = service.saved()
    assert not list(Path(os.environ[NODE]).rglob("*.distcp")), "what is in the store is not kept"
    results.put((rank, metrics, step, name, service.tensors()[0], files))
    service.close()


@pytest.mark.parametrize("far", [False, True], ids=["one folder", "a store"])
def test_ranks_publish_what_one_process_does_and_go_on_from_their_checkpoint(tmp_path: Path, far: bool) -> None:
    results, run = multiprocessing.get_context("fork").Queue(), run_at(tmp_path / "many")
    settings = override(CUT, {"services.store": str(tmp_path / "store")} if far else {})
    store, run_path = VersionStore(store_url(run.path, settings)), Path("/nowhere/many") if far else run.path
    if far:
        RunCopy(run.path, settings.services.store).push()
    learned, checkpoint, stored = [], None, []
    for step in range(3):
        (run.path / "address").unlink(missing_ok=True)
        on_ranks(2, {"learns": _learns}, tmp_path / f"meet{step}", run.path, run_path, settings, checkpoint, results)
        ranks = sorted(results.get(timeout=patience(10)) for _ in range(2))
        _, metrics, reached, name, version, _ = ranks[0]
        files = {file: entry for *_, part in ranks for file, entry in part.items()}
        assert sorted(files) == ([".metadata", "__0_0.distcp", "__1_0.distcp"] if far else [])
        if far:
            shards.record(run, name, files)
        run.commit("rl", reached, name, [])
        stored.append(len(store.names("checkpoints")))
        shards.prune(run, store)
        checkpoint = reached, name, shards.read(run.path / "checkpoints" / name)
        learned.append((metrics, reached, version))
    assert stored == ([3, 6, 6] if far else [0, 0, 0]), "the newest checkpoint, and the one before it until then"
    alone = TrainerRank(0, run_at(tmp_path / "one").path, SETTINGS)
    alone.begin()
    for step, (metrics, reached, version) in enumerate(learned):
        expected = alone.learn(*batch(step))
        for name in ("grad_norm", "k3", "entropy", "version"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
        assert (reached, version) == (step + 1, 2 * (step + 1))
    alone.close()
    theirs, ours = Receiver(store_url(tmp_path / "one", SETTINGS), name="test"), Receiver(store.url, name="test")
    for version in range(7):
        expected_tensors, tensors = theirs.fetch(version).tensors, ours.fetch(version).tensors
        assert expected_tensors.keys() == tensors.keys()
        for name, tensor in expected_tensors.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=2**-7, atol=1e-5)


def test_a_single_rank_does_not_wait_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, goes_on = TrainerRank(0, run_at(tmp_path).path, SETTINGS), threading.Event()
    service.begin()
    publish = Publisher.publish

    def slow(*args: Any) -> Any:
        assert goes_on.wait(patience(60)), "nobody waits for this"
        return publish(*args)

    monkeypatch.setattr(Publisher, "publish", slow)
    metrics = service.learn(*batch(0))
    goes_on.set()
    service.close()
    stored = Receiver(store_url(tmp_path, SETTINGS), name="test").fetch(metrics["version"])
    assert state_hash(stored.tensors) == metrics["hash"]


def test_a_failure_of_one_rank_is_raised_though_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Future[Any] = Future()
    monkeypatch.setattr(trainer_ranks, "HEARD_S", 0.05)
    failed.set_exception(ValueError("its own"))
    with pytest.raises(ValueError, match="its own"):
        together([failed, Future()])


def test_ray_sees_every_method_that_is_called() -> None:
    """Ray takes functions of a class alone. Threads, which stand in for its actors elsewhere, take anything."""
    ray = pytest.importorskip("ray")
    kinds = (TrainerRank, EngineService, EvaluationService, EnvironmentService)
    methods = [set(ray.remote(kind).__ray_metadata__.method_meta.methods) for kind in kinds]
    sources = [inspect.getsource(module) for module in (coordinator, trainer_ranks, environments)]
    called = {name for source in sources for name in re.findall(r'(?:\.call|_everywhere)\("(\w+)"', source)}
    assert {"host", "learn", "update", "work"} <= called <= set.union(*methods)
    assert all("host" in of_kind for of_kind in (methods[0], methods[1], methods[3]))


def test_ranks_meet_at_one_address_alone() -> None:
    meeting = meeting_place("127.0.0.1")
    listeners = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listeners if address.port == meeting.port] == ["127.0.0.1"]
    assert interface_of("127.0.0.1").startswith("lo") and interface_of("192.0.2.1") == ""


def test_a_file_that_a_killed_rank_left_is_fetched_anew(tmp_path: Path) -> None:
    store, folder = VersionStore(tmp_path / "store"), tmp_path / "node"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"whole")
    (folder / ".metadata").write_bytes(b"metadata")
    files = shards.put_shards(store, folder, 0)
    assert {*files} == {".metadata", "__0_0.distcp"} and list(folder.iterdir()) == []
    (folder / "__0_0.distcp").write_bytes(b"torn")
    shards.fetch_shard(store, files, folder, "__0_0.distcp")
    assert (folder / "__0_0.distcp").read_bytes() == b"whole"
