"""What a killed run left is ended, and nothing else: real owners, really killed."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.sandbox import reap as reaping
from composer_nb.harness.sandbox.engine import MARK, remove_container
from composer_nb.harness.sandbox.image import host_image
from composer_nb.harness.sandbox.reap import Reaped, ResourceJournal, is_dead, reap, started, this_process
from composer_nb.harness.sandbox.system.cgroups import Cgroups

OWNER = """
import json, os, subprocess, sys, time
from pathlib import Path
import psutil
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.reap import ResourceJournal
journal = ResourceJournal(Path(sys.argv[1]) / "journal", "run-1")
for kind, name in json.loads(sys.argv[2]):
    if kind == "process":
        child = subprocess.Popen(["sh", "-c", "sleep 300 & sleep 300"], start_new_session=True, stdout=subprocess.DEVNULL)
        name = child.pid
        while len(psutil.Process(child.pid).children()) < 2:
            time.sleep(0.01)
    elif kind == "directory":
        os.makedirs(name + "/deep/er")
        Path(name, "deep", "file").write_text("x")
    elif kind == "cgroup":
        os.makedirs(name + "/inner")
        child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
        Path(name, "inner", "cgroup.procs").write_text(str(child.pid))
    assert journal.made(kind, name, "mark-1" if kind == "container" else None) is not None
    print(name, flush=True)
sys.stdin.read()
"""


class Owner:
    """A process that holds resources and can be killed outright."""

    def __init__(self, run: Path, resources: list[tuple[str, str]]) -> None:
        command = [sys.executable, "-c", OWNER, str(run), json.dumps(resources)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.names = [self.process.stdout.readline().strip() for _ in resources]
        assert all(self.names)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[..., Owner]]:
    """Return `owner(*kinds)`, which makes one resource of each kind for the run directory `tmp_path/runs/one`."""
    owners: list[Owner] = []
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)

    def make(*kinds: str, **paths: str) -> Owner:
        owners.append(Owner(run, [(kind, paths.get(kind, str(tmp_path / f"{kind}{len(owners)}"))) for kind in kinds]))
        return owners[-1]

    yield make
    for instance in owners:
        if instance.process.poll() is None:
            instance.kill()
    reap(tmp_path / "runs")


def journal_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "runs").glob("*/journal/*"))


def test_what_an_owner_holds_is_left_alone_while_it_lives_and_ended_once_it_is_killed(
    owner: Callable[..., Owner], tmp_path: Path
) -> None:
    alive, dead = owner("process", "directory"), owner("directory")
    dead.kill()
    assert reap(tmp_path / "runs") == Reaped(directories=tuple(dead.names), left_alone=2)
    assert started(int(alive.names[0])) and Path(alive.names[1]).is_dir()
    assert len(journal_files(tmp_path)) == 1
    pid, folder = alive.names
    family = {int(pid), *(child for child, _ in reaping.below(int(pid)))}
    alive.kill()
    assert len(family) == 3 and all(map(started, family)) and Path(folder).is_dir()
    assert reap(tmp_path / "runs") == Reaped(processes=(pid,), directories=(folder,))
    assert not any(map(started, family)) and not Path(folder).exists()
    assert reap(tmp_path / "runs") == Reaped() and journal_files(tmp_path) == []


def test_whoever_has_the_name_now_is_spared(owner: Callable[..., Owner], tmp_path: Path) -> None:
    """A number that was given out again, a folder that somebody else made: other marks."""
    holder = owner("process", "directory")
    holder.kill()
    pid, folder = holder.names
    [file] = journal_files(tmp_path)
    text = file.read_text()
    entries = map(json.loads, text.splitlines())
    file.write_text("".join(json.dumps(entry | {"mark": entry["mark"] + "1"}) + "\n" for entry in entries))
    assert reap(tmp_path / "runs") == Reaped()
    assert started(int(pid)) and Path(folder).is_dir() and journal_files(tmp_path) == []
    file.write_text(text)
    assert reap(tmp_path / "runs") == Reaped(processes=(pid,), directories=(folder,))


def test_who_counts_as_dead() -> None:
    """Whose pid is another's now, and who lived before this machine started anew. Nothing is known of another container, or of
    another machine with which the folder is shared."""
    dead: list[dict[str, Any]] = [{"started": 1}, {"boot": "b"}, {"boot": "b", "namespace": "pid:[1]"}]
    unknown: list[dict[str, Any]] = [{"namespace": "pid:[1]", "started": 1}, {"boot": "b", "host": "another"}]
    for change in (*dead, *unknown, {}):
        assert is_dead(replace(this_process(), **change)) is (change in dead), change


@pytest.mark.parametrize("kind", ["a link to it", "a folder"])
def test_what_stands_in_place_of_a_directory_is_spared(owner: Callable[..., Owner], tmp_path: Path, kind: str) -> None:
    """Even with the same inode: file systems give those out again at once."""
    holder = owner("directory")
    folder = Path(holder.names[0])
    holder.kill()
    if kind == "a link to it":
        folder.rename(tmp_path / "other")
        folder.symlink_to(tmp_path / "other")
    else:
        shutil.rmtree(folder)
        (folder / "deep").mkdir(parents=True)
    assert reap(tmp_path / "runs") == Reaped()
    assert (folder / "deep").is_dir()


def test_a_line_that_was_cut_off_and_rubbish(owner: Callable[..., Owner], tmp_path: Path) -> None:
    holder = owner("directory")
    holder.kill()
    [file] = journal_files(tmp_path)
    with file.open("a") as journal_file:
        journal_file.write('{"event": "made", "kind": "proc')
    (file.parent / "rubbish.jsonl").write_text("rubbish\n")
    reaped = reap(tmp_path / "runs")
    assert reaped.directories == tuple(holder.names)
    [failure] = reaped.failed
    assert "rubbish.jsonl:1: no line of a journal" in failure
    assert not file.exists()
    with pytest.raises(FileNotFoundError, match="no such folder of runs"):
        reap(tmp_path / "nowhere")


CAN_MOUNT = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not CAN_MOUNT, reason="only root can mount")
def test_a_directory_in_which_somebody_mounted_something_is_not_emptied(owner: Callable[..., Owner], tmp_path: Path):
    holder = owner("directory", "process")
    folder, pid = holder.names
    holder.kill()
    foreign = Path(folder, "foreign")
    foreign.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(foreign)], check=True)
    try:
        (foreign / "file").write_text("x")
        failed = (f"directory {folder}: {foreign} is mounted in it",)
        assert reap(tmp_path / "runs") == Reaped(processes=(pid,), failed=failed)
        assert reap(tmp_path / "runs") == Reaped(failed=failed)
        assert (foreign / "file").exists()
    finally:
        subprocess.run(["umount", str(foreign)], check=True)
    assert reap(tmp_path / "runs").directories == (folder,)  # it was not forgotten


def test_a_cgroup_goes_with_what_runs_in_it(owner: Callable[..., Owner], tmp_path: Path) -> None:
    if isinstance(groups := Cgroups.find(), str):
        pytest.skip(groups)
    group = groups.folders(f"composer_nb-test-{os.getpid()}")[0]
    holder = owner("cgroup", cgroup=str(group))
    holder.kill()
    [member_pid] = [int(pid) for pid in (group / "inner" / "cgroup.procs").read_text().split()]
    assert started(member_pid)
    assert reap(tmp_path / "runs") == Reaped(cgroups=(str(group),))
    assert not group.exists() and not started(member_pid)


def test_what_lives_for_a_directory_ends_before_it_and_can_not_make_it_anew(owner: Callable[..., Owner], tmp_path):
    """Orphans of a killed parent, as Ray's workers are while they start."""
    holder = owner("directory")
    [folder] = map(Path, holder.names)
    mark = (folder / reaping.LABEL).read_text()
    anew = f"sleep 300 & echo $!; while :; do mkdir -p {folder}/logs; sleep 0.01; done"
    writer, bystander = (
        subprocess.Popen(["sh", "-c", text], env=os.environ | {reaping.WRITER: word}, stdout=subprocess.PIPE, text=True)
        for text, word in ((anew, mark), ("echo; exec sleep 300", mark[::-1]))
    )
    with writer, bystander:
        assert writer.stdout is not None and bystander.stdout is not None
        below = int(writer.stdout.readline())
        bystander.stdout.readline()
        holder.kill()
        assert reap(tmp_path / "runs").directories == (str(folder),)
        time.sleep(0.2)
        assert not folder.exists() and started(writer.pid) is None and started(below) is None
        assert bystander.poll() is None
        bystander.kill()


def test_a_container_stays_in_the_journal_while_no_engine_answers(owner: Callable[..., Owner], tmp_path, monkeypatch):
    holder = owner("container", "directory", container="composer_nb-1")
    holder.kill()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    reaped = reap(tmp_path / "runs")
    assert reaped.directories == (holder.names[1],) and not reaped.containers
    [failure] = reaped.failed
    assert failure.startswith("container composer_nb-1: no Docker Engine answers at")
    assert len(journal_files(tmp_path)) == 1 and reap(tmp_path / "runs").failed == (failure,)


@pytest.mark.docker
def test_only_the_container_that_was_noted_is_removed(owner: Callable[..., Owner], tmp_path: Path, docker_client: Any):
    """Even by name; and one that was noted and never made is gone."""
    names = [f"composer_nb-test-{tmp_path.name}-{number}" for number in range(3)]
    image = host_image(docker_client)
    for name, mark in zip(names, ("mark-1", "mark-2"), strict=False):
        docker_client.containers.create(image, ["true"], name=name, labels={MARK: mark}, network_mode="none")
    try:
        for name in names:
            owner("container", container=name).kill()
        assert reap(tmp_path / "runs") == Reaped(containers=(names[0],)) and journal_files(tmp_path) == []
        [remaining] = docker_client.containers.list(all=True, filters={"name": f"composer_nb-test-{tmp_path.name}"})
        assert remaining.name == names[1]
    finally:
        for name in names:
            remove_container(docker_client, name)


def test_a_note_that_a_full_disk_cuts_off_is_an_error_and_is_not_there(tmp_path: Path) -> None:
    journal = ResourceJournal(tmp_path, "r")
    journal.made("cgroup", "/sys/fs/cgroup/composer_nb-first", "m")
    before = journal.file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))  # a write beyond it is cut off
    try:
        with pytest.raises(OSError, match=r"journal: No space left on device.*\.jsonl"):
            journal.made("cgroup", "/sys/fs/cgroup/composer_nb-second", "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert journal.file.read_bytes() == before
