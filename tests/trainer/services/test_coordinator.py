"""Asynchronous RL on threads of one process: what it promises of batches, versions, faults and resuming."""

import json
import shutil
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.terms.registry import TERMS
from composer_nb.labs.faults import Fault, ThreadRemote, Threads, no_fault
from composer_nb.labs.rewards.rescore import settings_at
from composer_nb.trainer import rl
from composer_nb.trainer.models.checkpoint import load_pretrained, published
from composer_nb.trainer.prompts import Order, prompt_order
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.reader import prompts
from composer_nb.trainer.recipe.replay import branch, other_origins, replay
from composer_nb.trainer.recipe.report import hosts
from composer_nb.trainer.records.provenance import CAPSULE, capsule
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services import inference
from composer_nb.trainer.services.coordinator import Coordinator, RunStopped
from composer_nb.trainer.services.finished import FinishedRollouts
from composer_nb.trainer.services.inference import Updates
from composer_nb.trainer.services.journal import REFUSED, request_change
from composer_nb.trainer.services.orchestrator import Orchestrator, Train
from composer_nb.trainer.services.run_copy import restore
from composer_nb.trainer.services.services import store_url
from composer_nb.trainer.settings import Settings, from_dict, override, to_dict
from composer_nb.trainer.versions.manifest import DamagedVersion, state_hash
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.store import VersionStore, folder
from tests.conftest import MICRO as WHOLE

pytestmark = pytest.mark.whole
MICRO: dict[str, Any] = WHOLE | {
    **{"ranks": 1, "services.engines": 2, "rl.minibatches": 2, "rl.checkpoint_every": 2, "rl.evaluate_every": 0},
}
IN_STEP = {"services.ahead": 0, "services.bound": 0, "services.engines": 1, "services.lockstep": True}


@pytest.fixture(scope="module")
def loop(micro_run: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of the plain loop."""
    run = fork(micro_run, override(Settings(), MICRO), runs=tmp_path_factory.mktemp("loop"))
    return start_or_resume(run.path, say=lambda line: None)


@pytest.fixture(scope="module")
def begun(loop: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[RunDir, Settings]]:
    """`begun(name, settings)`: a fork of the run, about to begin RL."""

    def make(name: str, changes: dict[str, Any]) -> tuple[RunDir, Settings]:
        settings = override(Settings(), MICRO | {"services.on": True} | changes)
        return fork(loop, settings, runs=tmp_path_factory.mktemp("runs"), name=name), settings

    return make


def go(run: RunDir, settings: Settings, fault: Fault = no_fault, lines: list[str] | None = None) -> dict[str, Any]:
    """Run RL to its end with a fault, and return its results; `lines` gets what it says."""
    with closing(Threads(fault)) as actors:
        return Coordinator(run, settings, actors, (list[str]() if lines is None else lines).append).go()


class Gone(Exception):
    """In place of a SIGKILL."""


def cut_off(run: RunDir, settings: Settings, after: int, method: str = "_carry_out") -> list[str]:
    """Continue the run until the coordinator has called `method` `after` times, and return its lines."""
    lines, calls = list[str](), count()
    with closing(Threads()) as actors:
        coordinator = Coordinator(run, settings, actors, lines.append)
        original = getattr(coordinator, method)

        def stop(*values: Any) -> Any:
            if next(calls) >= after:
                raise Gone
            return original(*values)

        setattr(coordinator, method, stop)
        with pytest.raises(Gone):
            coordinator.go()
        coordinator.journal.close()
    return lines


def points(run: RunDir) -> list[dict[str, Any]]:
    """Metrics of RL's steps that do not tell of time or of services."""
    apart = {"time", "staleness", "staleness_max", "mixed_versions", "in_flight", "infra_errors"}
    return [{name: value for name, value in step.items() if name not in apart} for step in run.steps("rl")]


def trained(run: RunDir) -> list[tuple[int, list[str]]]:
    """(step, task ids) of every stored batch."""
    files = sorted((run.path / "rollouts").glob("rl_*.parquet"))
    return [(int(f.name[3:8]), pq.read_table(f, columns=["task_id"])["task_id"].to_pylist()) for f in files]


def weights(run: RunDir, name: str = "") -> str:
    """Return the digest of published weights; without a name, of those that RL's last step left."""
    published_at = run.path / "weights" / name if name else run.trained_weights
    return sha256((published_at / "model.safetensors").read_bytes()).hexdigest()


def versions(run: RunDir) -> dict[int, str]:
    return dict(run.query("SELECT version, hash FROM version"))


def assert_whole(run: RunDir, info: dict[str, Any], steps: int = 6) -> None:
    """Assert that every prompt was trained once, and that the ledger adds up."""
    ids = [task for _, tasks in trained(run) for task in tasks]
    assert len(set(ids)) == steps * 2 and all(ids.count(task) == 4 for task in set(ids)), (
        "no prompt skipped, none twice"
    )
    assert sum(run.ledger().values()) == info["sampled"] > 0


def test_in_step_it_is_the_plain_loop_bit_for_bit(loop: RunDir, begun):
    run, settings = begun("services", IN_STEP)
    info = go(run, settings)
    assert points(run) == points(loop)
    assert len(set(versions(run).values())) > 1, "equal, and not because nothing was learnt"
    assert weights(run) == weights(loop) and weights(run, "before_final") == weights(loop, "before_final")
    columns = ["task_id", "token_ids", "logprob", "policy_version", "reward", "advantage"]
    for step in range(4):
        name = f"rollouts/rl_{step:05d}_0.parquet"
        ours, theirs = (pq.read_table(r.path / name, columns=columns).to_pylist() for r in (run, loop))
        assert ours == theirs
    assert info["staleness"]["total"] == [(0, 4 * 2 * 4)] and info["versions"] == 8
    assert run.ledger() == {**loop.ledger(), "unused_at_the_end": 0}
    assert all(step["time"]["engine_waits"]["trainer"] > 0 for step in run.steps("rl")[1:]), "none is admitted then"


def test_a_curriculum_is_the_same_after_a_kill_and_in_the_plain_loop(begun):
    """Its prompts are chosen by what was trained before, and no prompt comes twice."""
    changes = IN_STEP | {"curriculum.harder": 1.0, "curriculum.start": 0.25}
    (run, settings), (killed, _), (plain, _) = (begun(n, changes) for n in ("whole", "killed", "plain"))
    go(run, settings)
    cut_off(killed, settings, after=9)
    assert len(killed.steps("rl")) < 4
    go(killed, settings)
    write_json(plain.path / "settings.json", to_dict(override(settings, {"services.on": False})))
    start_or_resume(plain.path, say=lambda line: None)
    chosen = [(run.path / "rollouts" / f"prompts_{step:05d}.json").read_text() for step in range(4)]
    for twin in (killed, plain):
        assert [(twin.path / "rollouts" / f"prompts_{step:05d}.json").read_text() for step in range(4)] == chosen
        assert trained(twin) == trained(run) and points(twin) == points(run) and weights(twin) == weights(run)
    names = [name for text in chosen for name in json.loads(text)]
    in_order = [prompt_order(run.path, Order(seed="0 0"))[slot].id for slot in range(8)]
    assert len(set(names)) == 8 and names[:2] == in_order[:2] and names != in_order
    assert all(step.same for step in replay(killed, settings, 4))
    assert {name for _, tasks in trained(run) for name in tasks} == set(names)


def test_asynchronous_every_prompt_is_trained_once_and_every_token_accounted_for(begun):
    """The log of batches also replays to the same versions."""
    run, settings = begun("async", {"services.ahead": 2, "services.bound": 2, "rl.steps": 8})
    info = go(run, settings)
    batches = trained(run)
    assert [step for step, _ in batches] == list(range(8))
    assert_whole(run, info, 8)
    steps = run.steps("rl")
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert max(step["staleness_max"] for step in steps) <= settings.services.bound
    assert any(step["staleness"] > 0 for step in steps), "it did run ahead"
    assert all(slot >= 16 for slot, *_ in FinishedRollouts(run.path).names()), "trained rollouts are in their files"
    hashes, served = versions(run), run.query("SELECT version, hash FROM served")
    assert sorted(hashes) == [2 * (step + 1) for step in range(8)]
    assert served and all(hashes[version] == hash for version, hash in served), "engines run what was published"
    [(host, services)] = hosts(run).items()
    assert host == socket.gethostname() and {"trainer-0", "engine-1", "environment-1"} <= {*services}
    assert sum(work.get("rollouts", 0) for work in services.values()) >= len(run.steps("rl")) * 8
    assert sum(work.get("versions", 0) for work in services.values()) == len([v for v, _ in served if v])
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if "run.db" not in path.name}
    replayed = list(replay(run, settings, 8))
    assert [r.step for r in replayed] == list(range(1, 9)) and all(r.same for r in replayed)
    assert {r.version: r.now for r in replayed} == hashes and len(set(hashes.values())) > 1
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if "run.db" not in path.name}
    with pytest.raises(ValueError, match="--step 9 is not there yet"):
        list(replay(run, settings, 9))
    write_json(run.path / CAPSULE, capsule(run.path, settings.env))
    assert other_origins(run, settings) == []
    (run.path / "data" / "more.txt").write_text("x")
    assert other_origins(run, override(settings, {"env.tools": "cursor"})) == ["data", "tools"]
    store = VersionStore(store_url(run.path, settings))
    line = next(line for line in store.ledger() if line.version == 4)
    tensor = sorted(name for name in line.files if name.startswith("model."))[3]
    forged = line.model_copy(update={"files": line.files | {tensor: "0"}})
    store.write(f"ledger/{folder(4)}.json", forged.dump())
    with closing(run.connect()) as db, db:
        db.execute("UPDATE version SET hash = 'other' WHERE version = 4")
    assert [(step.same, step.first) for step in replay(run, settings, 2)] == [(True, ""), (False, tensor)]


class Deaths:
    """Services that die: `dies[method]` holds the numbers of the calls of `method` that find their service dead."""

    def __init__(self, **dies: set[int]) -> None:
        self.dies, self.calls = dies, dict.fromkeys(dies, 0)

    def __call__(self, remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        if method in self.dies:
            self.calls[method] += 1
            remote.dead |= self.calls[method] in self.dies[method]
            remote.require_alive()
        return no_fault(remote, method, values)


@pytest.mark.parametrize("deaths", [Deaths(work={4}, exchange={40}, update={3}), Deaths(learn={2, 5}, state={1})])
def test_whoever_dies_the_surviving_lineage_is_whole(begun, deaths: Deaths):
    run, settings = begun("flaky", {"services.ahead": 1, "services.bound": 2, "rl.steps": 6})
    info = go(run, settings, deaths)
    assert all(deaths.calls[method] >= min(numbers) for method, numbers in deaths.dies.items()), "they did die"
    assert_whole(run, info)
    assert sorted(versions(run)) == [2, 4, 6, 8, 10, 12]


def test_a_trainer_that_died_with_its_engines_between_two_batches_is_made_again(begun, monkeypatch: pytest.MonkeyPatch):
    """Its last version was not published yet, so no engine could begin, and no batch would call the trainer."""
    run, settings = begun("host", {"services.ahead": 0, "services.bound": 0, "rl.steps": 6})
    publish, unwritten, dead, lines = Publisher.publish, threading.Event(), threading.Event(), list[str]()

    def not_yet_written(publisher: Publisher, version: int, *values: Any) -> Any:
        if version == 4 and not unwritten.is_set():
            return unwritten.set()
        return publish(publisher, version, *values)

    def host_dies(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        if method == "update" and values[0] == 4 and not dead.is_set():
            unwritten.wait()
            dead.set()
            for name, service in actors.made.items():
                service.dead |= name.startswith(("trainer", "engine"))
            remote.require_alive()
        return no_fault(remote, method, values)

    monkeypatch.setattr(Publisher, "publish", not_yet_written)
    monkeypatch.setattr(inference, "APPEARS_S", patience(3.0))
    with closing(Threads(host_dies)) as actors:
        info = Coordinator(run, settings, actors, lines.append).go()
    assert dead.is_set() and any("resuming from step" in line for line in lines), lines
    assert_whole(run, info)


def test_an_engine_that_begins_with_other_weights_than_the_trainer_made_ends_the_run(begun):
    deaths = Deaths(update={1})

    def impostor(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        reply = deaths(remote, method, values)
        return "0" * 64 if method == "first_hash" and remote.values[2] > 0 else reply

    run, settings = begun("impostor", {"services.ahead": 1, "services.bound": 2})
    with pytest.raises(RunStopped, match=r"runs 000000000000 as version \d+, .*services.store"):
        go(run, settings, impostor)


@pytest.mark.parametrize(("method", "after"), [("record", 2), ("learn", 4)])
def test_a_lost_machine_s_run_goes_on_elsewhere_though_its_store_lists_nothing(
    begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, after: int
):
    """The cut comes when others know a batch that the store's copy does not yet count as trained, or before that copy is made."""
    store = f"{tmp_path}/store"
    changes = {"services.store": store, "services.ahead": 1, "services.bound": 2, "rl.steps": 6}
    run, settings = begun("lost", changes)
    cut_off(run, settings, after, method)
    published = {line.version: line.hash for line in VersionStore(store_url(run.path, settings)).ledger()}
    shutil.rmtree(run.path)
    elsewhere = RunDir(restore(f"{store}/{run.path.name}", tmp_path / "runs"))
    assert (tmp_path / "runs" / "lost").resolve() == elsewhere.path and elsewhere.checkpoint("rl") is not None
    with monkeypatch.context() as patch:
        patch.setattr(FinishedRollouts, "names", lambda self: set())
        info = go(elsewhere, settings)
    assert_whole(elsewhere, info)
    hashes, served = versions(elsewhere), elsewhere.query("SELECT version, hash FROM served")
    assert sorted(hashes) == [2, 4, 6, 8, 10, 12] and all(hashes[version] == hash for version, hash in served)
    assert len(published) >= 2 * after and all(published[v] == hashes[v] for v in published.keys() & hashes.keys())
    assert all(step.same for step in replay(elsewhere, settings, 6))


def test_users_are_answered_while_it_trains_and_an_engine_dies_and_the_run_still_replays(begun):
    """Each request gets an answer of a published version, or an error. A new engine replaces the dead one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changes = {"services.serve": port, "services.engines": 1, "services.ahead": 1, "services.bound": 2, "rl.steps": 6}
    run, settings = begun("users", changes)
    over, answers, errors = threading.Event(), list[int](), list[str]()

    def user() -> None:
        request = {"messages": [{"role": "user", "content": "fix f.py"}], "max_tokens": 8}
        while not over.is_set():
            try:
                response = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=request, timeout=60)
            except httpx.TransportError as error:
                errors.append(repr(error))
            else:
                body = response.json()
                if response.status_code == 200:
                    answers.append(body["choices"][0]["policy_version"])
                else:
                    errors.append(body["error"]["message"])
            time.sleep(0.05)

    users = [threading.Thread(target=user) for _ in range(3)]
    for thread in users:
        thread.start()
    deaths, lines = Deaths(exchange={30}), list[str]()
    try:
        info = go(run, settings, deaths, lines)
    finally:
        over.set()
        for thread in users:
            thread.join()
    assert deaths.calls["exchange"] > 30 and sum(line.endswith(" joins") for line in lines) == 2
    published_versions = {0, *versions(run)}
    assert len({*answers}) >= 3 and {*answers} <= published_versions, errors[-1]
    assert all(errors), "each that was not answered was told why"
    assert sum(run.ledger().values()) == info["sampled"]
    steps = list(replay(run, settings, 6))
    assert all(step.same for step in steps) and {r.version: r.now for r in steps} == versions(run)


def test_groups_without_a_signal_are_replaced_and_a_resumed_run_replaces_the_same(begun, monkeypatch):
    def signal(rollout: Rollout, grade: Grade) -> float:
        """A number of the sampled tokens, whatever the policy writes; nothing for a third of the tasks."""
        tokens = b"".join(segment.token_ids[segment.acted].tobytes() for segment in rollout.segments)
        return zlib.crc32(tokens) / 2**32 if zlib.crc32(rollout.task_id.encode()) % 3 else 0.0

    monkeypatch.setitem(TERMS, "signal", signal)
    changes = IN_STEP | {"rl.refill": 1.0, "reward.weights": {"signal": 1.0}}
    runs, infos = [], []
    for name, interrupted in (("whole", ()), ("cut", (5, 9))):
        run, settings = begun(name, changes)
        for after in interrupted:
            cut_off(run, settings, after)
        infos.append(go(run, settings))
        runs.append(run)
    whole, cut = runs
    assert points(cut) == points(whole) and weights(cut) == weights(whole)
    refilled = infos[0]["counts"]["refilled"]
    assert 0 < refilled < 8 and refilled == whole.steps("rl")[-1]["refilled"]
    assert all(step["live_groups"] == 1.0 for step in whole.steps("rl"))
    ids = [task for _, tasks in trained(whole) for task in tasks]
    assert len(set(ids)) == 8 and all(ids.count(task) == 4 for task in set(ids))
    assert sum(whole.ledger().values()) == infos[0]["sampled"]
    assert not FinishedRollouts(whole.path).names()


def test_a_term_that_fails_on_rollouts_is_refused_by_a_live_run_and_ends_one_that_has_seen_none(begun, monkeypatch):
    monkeypatch.setitem(TERMS, "late", lambda rollout, grade: 0.0 if not rollout.turns else float("nan"))
    new, good = {"solved": 1.0, "late": 1.0}, {"solved": 1.0, "unfinished": -0.5}
    run, settings = begun("late", IN_STEP | {"rl.steps": 3})
    store, lines = Coordinator.store_batch, list[str]()

    def store_and_change(*args: Any) -> None:
        store(*args)
        request_change(run, "reward.weights", new)

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "store_batch", store_and_change)
        go(run, settings, lines=lines)
    assert len(run.steps("rl")) == 3 and not run.changed_live()
    assert any(line.startswith("refused: reward.weights: late fails on a rollout of task ") for line in lines)

    run, settings = begun("soon", IN_STEP | {"rl.steps": 3})
    request_change(run, "reward.weights", new)
    with pytest.raises(ValueError, match=r"late fails on a rollout of task .* mend it, or leave it out"):
        go(run, settings)
    request_change(run, "reward.weights", good)
    updated = threading.Event()

    def late(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        """Hold an environment back until its engine has the version that the stored batch makes."""
        assert method != "work" or updated.wait(patience(60))
        result = no_fault(remote, method, values)
        if method == "update":
            updated.set()
        return result

    go(run, settings, late)
    assert len(run.steps("rl")) == 3
    changes = run.query("SELECT value FROM change WHERE step >= 0 ORDER BY number")
    assert [json.loads(value) for (value,) in changes] == [new, good]


def test_a_run_with_the_changes_of_a_live_one_in_its_settings_ends_with_the_same_weights(begun, monkeypatch):
    """A run that is killed and resumed requests no change twice."""
    terms = iter([{"unfinished": -0.25}, {"unfinished": -0.5, "invalid_calls": -1.0}])
    run, settings = begun("by_hand", IN_STEP | {"rl.steps": 4})
    request_change(run, "model.hidden_size", 8)
    learn, lines = Coordinator.learn, list[str]()

    def learn_and_ask(coordinator: Coordinator, batch: Any, streams: Any) -> Any:
        if batch.step in (0, 2):
            request_change(run, "reward.weights", next(terms))
        return learn(coordinator, batch, streams)

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "learn", learn_and_ask)
        go(run, settings, lines=lines)
    live = run.changed_live()
    assert list(live) == ["2", "4"] and any("model.hidden_size cannot be changed" in line for line in lines)
    assert run.query("SELECT step FROM change ORDER BY number") == [(REFUSED,), (1,), (3,)]

    planned_run, planned = begun("planned", IN_STEP | {"rl.steps": 4, "services.changes": live})
    cut_off(planned_run, planned, 2, "_on_train_step")
    go(planned_run, planned)
    assert planned_run.changed_live() == live and weights(planned_run) == weights(run)
    assert planned_run.query("SELECT COUNT(*) FROM change") == [(2,)]
    assert settings_at(planned_run, 3).reward.weights == live["2"]["reward.weights"]
    plain, unchanged = begun("unchanged", IN_STEP | {"rl.steps": 4})
    go(plain, unchanged)
    assert weights(plain) != weights(run)


def test_a_batch_of_groups_of_two_sizes_is_divided_by_slot(tmp_path: Path):
    """As after a live change of `rl.group`: groups under way keep their size."""
    rollouts = [(slot, 1, member) for slot, size in ((3, 4), (4, 2), (6, 2)) for member in range(size)]
    coordinator = SimpleNamespace(
        due=Train(step=0, slots=(3, 4, 6), rollouts=tuple(rollouts)),
        **{"ended": False, "lost": 0, "pairs": {}, "tasks": range(9), "settings": Settings()},
        orchestrator=Orchestrator(Schedule()),
        run=SimpleNamespace(path=tmp_path),
        finished=SimpleNamespace(load=lambda name, task: (*name, task)),
    )
    batch: Any = Coordinator.next_batch(coordinator)  # type: ignore[arg-type]
    assert batch.groups == [
        [(slot, 1, member, slot) for member in range(size)] for slot, size in ((3, 4), (4, 2), (6, 2))
    ]


def test_versions_that_a_resumed_trainer_makes_again_are_not_pruned(begun):
    sparse = {"services.full_every": 1, "rl.checkpoint_every": 20, "rl.minibatches": 2, "rl.steps": 5}
    run, settings = begun("pruned", {"services.ahead": 1, "services.bound": 2} | sparse)
    cut_off(run, settings, 4, "_on_train_step")
    go(run, settings)
    assert len(run.steps("rl")) == 5


def test_a_run_goes_on_from_a_step_of_another(loop: RunDir, begun, tmp_path: Path):
    """With the same settings, a fork ends with the same weights; with other settings, it differs from that step on."""
    source, settings = begun("source", IN_STEP | {"rl.steps": 4})
    go(source, settings)
    same = branch(source, 3, {}, tmp_path, "same")  # the checkpoint is of step 4
    go(same, from_dict(same.settings()))
    assert weights(same) == weights(source) and versions(same) == versions(source) and points(same) == points(source)
    assert trained(same) == trained(source) and prompts(same.path) == prompts(source.path)
    assert sum(same.ledger().values()) == sum(source.ledger().values())
    changed = branch(source, 2, {"rl.lr": 1e-3, "reward.weights": {"unfinished": -1.0}}, tmp_path, "other")
    go(changed, from_dict(changed.settings()))
    assert points(changed)[:2] == points(source)[:2] and points(changed)[2:] != points(source)[2:]
    provenance = json.loads((changed.path / "provenance.json").read_text())
    assert (provenance["forked_from"], provenance["forked_at_step"]) == (source.path.name, 2)
    plain = branch(loop, 4, {"rl.steps": 5}, tmp_path, "plain")
    start_or_resume(plain.path, say=lambda line: None)
    assert points(plain)[:4] == points(loop) and len(points(plain)) == 5
    for step, changes, why in [
        (5, {}, "has trained 4 steps"),
        (4, {}, "nothing is left after step 4"),
        (2, {"rl.prompts": 4}, "rl.prompts: cannot change at a step"),
        (2, {"limits.tokens": 100}, "a fork cannot change limits"),
    ]:
        with pytest.raises(ValueError, match=why):
            branch(source, step, changes, tmp_path, "refused")
    assert branch(source, 0, {"rl_seed": 1}, tmp_path, "seeded").settings()["rl_seed"] == 1
    with pytest.raises(ValueError, match=r"only its checkpoint is kept: --step 0 or 4"):
        branch(loop, 2, {}, tmp_path, "refused")
    assert not (tmp_path / "refused").exists()


def out_of_order() -> None:
    raise RuntimeError("out of order")


def never_works(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
    """Break each engine as soon as it has a turn to sample."""
    if method == "exchange" and values[1]:
        remote.service.policy.step = out_of_order
    return no_fault(remote, method, values)


@pytest.mark.parametrize(
    ("fault", "deaths", "message"),
    [
        (Deaths(work={*range(99)}), 2, "so did 2 before it: .*services.deaths"),
        (Deaths(learn={*range(99)}), 2, "died 3 times at one batch: .*services.deaths"),
        (never_works, 20, r"out of order.*; so ended 4 engines without a finished rollout in between"),
    ],
)
def test_services_that_die_again_and_again_end_the_run(begun, fault: Any, deaths: int, message: str):
    run, settings = begun("dying", {"services.ahead": 1, "services.bound": 2, "services.deaths": deaths})
    with pytest.raises(RunStopped, match=message):
        go(run, settings, fault)


def test_an_engine_that_fails_is_replaced_and_an_evaluation_that_fails_is_left_out(begun):
    """The engine's thread ends by an error, as of its GPU, while its process lives."""
    run, settings = begun("failing", {"services.ahead": 1, "services.bound": 2, "rl.steps": 6, "rl.evaluate_every": 2})
    lines, failed = list[str](), list[str]()

    def fail(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        if method == "look":
            raise DamagedVersion("a bit is wrong")
        if method == "exchange" and values[1] and not failed:
            failed.append(remote.name)
            remote.service.policy.step = out_of_order
        return no_fault(remote, method, values)

    info = go(run, settings, fail, lines)
    assert any("out of order" in line and line.endswith("made again") for line in lines), lines
    assert "evaluation: a bit is wrong" in lines
    assert_whole(run, info)


def test_an_engine_whose_version_does_not_come_drains_while_others_run_it(begun):
    waiting = threading.Event()

    def slow_link(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        if method == "update" and remote.name == "engine-2":
            waiting.wait(patience(120.0))
        return no_fault(remote, method, values)

    changes = {"services.ahead": 1, "services.bound": 2, "rl.steps": 6, "services.hang_s": patience(3.0)}
    run, settings = begun("slow", changes)
    lines = list[str]()
    with closing(Threads(slow_link)) as actors:
        try:
            info = Coordinator(run, settings, actors, lines.append).go()
        finally:
            waiting.set()
    assert any(line.startswith("engine-2 drains: no version after 0 within") for line in lines), lines
    assert_whole(run, info)


def test_time_that_is_up_ends_rl_at_a_whole_step(begun):
    run, settings = begun("short", {"rl.max_seconds": 0.01, "rl.steps": 6})
    lines = list[str]()
    info = go(run, settings, lines=lines)
    assert info["stopped_early"] and len(run.steps("rl")) == 1
    assert "rl: stopped by rl.max_seconds=0.01 after 1 of 6 steps" in lines
    assert any(line.startswith("rl 1/6: ") for line in lines)
    assert (run.path / "weights" / "final" / "config.json").is_file()


def test_a_learning_rate_that_fell_with_time_is_the_same_when_a_batch_is_trained_again(begun, monkeypatch):
    clock = count(8000)
    monkeypatch.setattr(Coordinator, "seconds", property(lambda self: min(next(clock) / 1e4, 0.99)))
    run, settings = begun("late", {"services.ahead": 1, "services.bound": 2, "rl.steps": 6, "rl.max_seconds": 1.0})
    go(run, settings, Deaths(learn={3, 5}))
    rates = [step["lr"] for step in run.steps("rl")]
    assert any(rate < settings.rl.rate(step) for step, rate in enumerate(rates)), "time was short"
    assert all(r.same for r in replay(run, settings, len(rates)))


def test_engines_join_stand_by_and_drain_without_a_rollout_lost(begun, monkeypatch: pytest.MonkeyPatch):
    """The load adds one engine and a user adds another; a user replaces one, and one that gets no version drains itself."""
    changes = {"services.engines": 1, "services.standby": 1, "services.ahead": 1, "services.bound": 3, "rl.steps": 12}
    run, settings = begun("elastic", changes | {"rl.max_seconds": 0.0})
    lines, loads = list[str](), list[tuple[float, ...]]()
    orders = {3: ("services.engines", 3), 5: ("services.drain", "engine-1"), 7: ("services.drain", "nobody")}
    learn, update = Coordinator.learn, Updates.update

    def more_engines(services: Any, engines: int, *waits: float) -> int:
        loads.append(waits)
        return max(engines, 2)

    def learn_and_ask(coordinator: Coordinator, batch: Any, streams: Any) -> Any:
        if batch.step in orders:
            request_change(run, *orders[batch.step])
        return learn(coordinator, batch, streams)

    def never_appears(updates: Updates, engine: Any, version: int, *values: Any) -> Any:
        if updates.receiver._name == "engine-2" and version > 16:
            raise TimeoutError(f"version {version} did not appear")
        return update(updates, engine, version, *values)

    monkeypatch.setattr(Coordinator, "learn", learn_and_ask)
    monkeypatch.setattr(Updates, "update", never_appears)
    monkeypatch.setattr("composer_nb.trainer.services.coordinator.planned_engines", more_engines)
    info = go(run, settings, lines=lines)
    drained = [line.partition(" drains: ")[::2] for line in lines if " drains: " in line]
    assert [name for name, _ in drained] == ["engine-1", "engine-2"], lines
    assert drained[0][1] == "services.drain" and drained[1][1].endswith("did not appear")
    assert {"engine-1 has left", "engine-2 has left"} <= {*lines}
    assert any("refused: services.drain: no engine 'nobody'; there are engine-" in line for line in lines)
    assert len([line for line in lines if line.endswith(" joins")]) == 5, lines
    assert loads and all(0 <= share <= 1 for waits in loads for share in waits)
    assert_whole(run, info, 12)
    assert not {"faulted", "left", "cancelled", "restored"} & run.ledger().keys(), run.ledger()
    assert "died" not in "".join(lines) and max(step["staleness_max"] for step in run.steps("rl")) <= 3
    assert all(step.same for step in replay(run, settings, 12))


def test_damaged_versions_are_never_served(begun, monkeypatch: pytest.MonkeyPatch):
    """Every second delta is damaged on its way. Engines then ask the trainer, and run the right weights."""
    run, settings = begun("damaged", {"services.ahead": 1, "services.bound": 3, "rl.steps": 6})
    learnt = Coordinator._on_train_step

    def spoil(coordinator: Coordinator, step: int, metrics: dict[str, Any]) -> Any:
        if step % 2:
            folder = run.path / "weights" / "versions" / f"v{metrics['version']:06d}"
            for _ in range(500):
                if (folder / "manifest.json").is_file():
                    break
                time.sleep(0.01)
            for file in folder.glob("*.safetensors"):
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                part = file.with_suffix(".part")  # a reader that has opened the old file keeps its content
                part.write_bytes(data)
                part.replace(file)
        return learnt(coordinator, step, metrics)

    monkeypatch.setattr(Coordinator, "_on_train_step", spoil)
    go(run, settings)
    hashes, served = versions(run), run.query("SELECT version, hash, bytes FROM served")
    assert all(hashes[version] == hash for version, hash, _ in served if version in hashes)
    assert any(size == 0 for *_, size in served), "some came from the trainer itself"


def test_weights_before_the_end_are_those_before_the_last_batch_that_taught_something(begun, monkeypatch):
    """A batch without a signal makes versions that change nothing, so the last update is an earlier one."""
    run, settings = begun("dead", IN_STEP | {"services.full_every": 1})
    streams, calls, live = rl.streams_of, count(1), 2

    def live_streams(*args: Any) -> Any:
        return streams(*args) if next(calls) <= live else []

    monkeypatch.setattr(rl, "streams_of", live_streams)
    go(run, settings)
    before = state_hash(published(load_pretrained(run.path / "weights" / "before_final")))
    hashes, per_step = versions(run), settings.rl.minibatches
    assert hashes[live * per_step] == hashes[settings.rl.steps * per_step], "nothing changed after the last live batch"
    assert before == hashes[(live - 1) * per_step]
