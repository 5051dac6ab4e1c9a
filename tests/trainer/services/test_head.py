"""A head's life: up, attach, renew, lease, down, SIGKILL and reap. What it carries here is a process and a folder, not Ray;
`test_services_ray.py` has a real one."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from composer_nb.harness.sandbox.reap import reap, started
from composer_nb.trainer.services import head
from composer_nb.trainer.services.cluster import ClusterNode, make_token
from composer_nb.trainer.services.head import HeadGone, down, find, held, holder, up
from tests.waiting import wait_until

STAND_IN = """
import subprocess, sys, tempfile
from pathlib import Path
from composer_nb.trainer.services import head

class Cluster:
    address = "127.0.0.1:4711"
    def __init__(self, address, namespace, journal, machine):
        self.folder = Path(tempfile.mkdtemp(prefix="head-", dir=sys.argv[4]))
        self.process = subprocess.Popen(["sleep", "600"])
        self.noted = [journal.made("directory", self.folder), journal.made("process", self.process.pid)]
        self.journal = journal
        (self.folder / "pid").write_text(str(self.process.pid))
    def lost(self):
        return None if self.process.poll() is None else "it is gone"
    def close(self):
        self.process.kill()
        self.process.wait()
        (self.folder / "pid").unlink()
        (self.folder / ".composer_nb-journal").unlink()
        self.folder.rmdir()
        for resource in self.noted:
            self.journal.gone(resource)

if sys.argv[4] == "refused":
    sys.exit("no room for a head")
head.Cluster = Cluster
head.main(sys.argv[1:4])
"""


def stand_in(folder: str) -> Callable[[tuple[str, ...], Path], subprocess.Popen[bytes]]:
    """Return a launcher of heads that carry a process and keep its files in `folder`."""

    def detach(words: tuple[str, ...], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            command = [sys.executable, "-c", STAND_IN, *words[1:], folder]
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        threading.Thread(target=process.wait, daemon=True).start()
        return process

    return detach


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of what heads carry: a process that is as light as can be."""
    carried_folder = tmp_path / "carried"
    carried_folder.mkdir()
    monkeypatch.setattr(head, "detach", stand_in(str(carried_folder)))
    yield carried_folder
    for folder in tmp_path.glob("*/head.json"):
        down(folder.parent)


def below(carried: Path) -> tuple[int, int]:
    """(pid, clock tick of its start) of what the head carries."""
    pid = int(next(carried.glob("*/pid")).read_text())
    tick = started(pid)
    assert tick is not None
    return pid, tick


def test_up_attach_renew_down(carried: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    with pytest.raises(HeadGone, match=f"composer-nb up {folder}"), held(str(folder)):
        pass
    first = up(folder, 100.0)
    assert first.address == "127.0.0.1:4711" and first.until == first.started + 100.0 and find(folder) == first
    assert os.getsid(first.pid) == first.pid, "it is in no session of ours"
    pid, tick = below(carried)
    renewed = up(folder, 500.0)
    assert renewed.pid == first.pid and renewed.until > first.until + 390
    assert up(folder, 1.0).until == renewed.until, "a lease is never shortened"
    with pytest.raises(ValueError, match="with other options lives here"):
        up(folder, machine=ClusterNode(host="127.0.0.1", roles=("engine",)))
    for address, expected in ((str(folder), first.address), ("10.0.0.1:6379", "10.0.0.1:6379"), ("", "")):
        with held(address) as resolved:
            assert resolved == expected
    assert down(folder) and not down(folder)
    assert find(folder) is None and started(first.pid) is None and started(pid) != tick
    assert not list(carried.iterdir()) and not list((folder / "journal").iterdir())
    assert "it was asked to" in (folder / "head.log").read_text()
    with pytest.raises(HeadGone), held(str(folder)):
        pass


def test_a_node_is_its_region_s_relay_and_tells_its_services(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        node = ClusterNode(host="127.0.0.1", relay=f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ValueError, match=rf"--relay {node.relay}: .*in use"):
            up(tmp_path / "head", machine=node)
    up(tmp_path / "head", machine=node)
    assert up(tmp_path / "head", machine=node).pid == up(tmp_path / "head").pid, "the same options again"
    assert f"COMPOSER_NB_RELAY={node.relay}\0" in Path(f"/proc/{below(carried)[0]}/environ").read_text()
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"http://{node.relay}/", timeout=20)
    with pytest.raises(ValueError, match="--relay 8700: give HOST:PORT"):
        ClusterNode(relay="8700")


@pytest.mark.parametrize("roles", [("pilot",), ("trainer=0",), ("trainer=x",), ("engine", "engine=2")])
def test_roles_that_a_node_cannot_have_are_refused(roles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--roles"):
        ClusterNode(roles=roles)


def test_who_holds_it_and_is_killed_holds_it_no_more(carried: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    up(folder, 1.0)
    code = "import sys, time; from composer_nb.trainer.services.head import held\n" + (
        "with held(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    user = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    if user.stdout.readline() == "held\n":  # else it came too late
        time.sleep(1.5)
        assert find(folder) is not None
    user.kill()
    user.wait()
    user.stdout.close()
    wait_until(lambda: find(folder) is None)


def test_reap_ends_what_a_killed_head_left(carried: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    killed = up(folder)
    pid, tick = below(carried)
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: holder(folder / "head.lock") is None)
    assert find(folder) is None and started(pid) == tick, "what it carried lives on"
    reaped = reap(tmp_path)
    assert reaped.processes == (str(pid),) and len(reaped.directories) == 1 and not reaped.failed
    assert started(pid) != tick and not list(carried.iterdir())
    renewed = up(folder)
    assert renewed.pid != killed.pid and find(folder) == renewed


def test_it_ends_when_what_it_carries_dies(carried: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    up(folder)
    os.kill(below(carried)[0], signal.SIGKILL)
    wait_until(lambda: holder(folder / "head.lock") is None)
    assert "ended: it is gone" in (folder / "head.log").read_text() and not list(carried.iterdir())


def test_one_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "detach", stand_in("refused"))
    with pytest.raises(ValueError, match="ended with 1: no room for a head"):
        up(tmp_path / "head")
    with pytest.raises(ValueError, match="lease_s=0"):
        up(tmp_path / "head", 0.0)


def test_a_token_is_never_read_in_part(tmp_path: Path) -> None:
    """Several starters at once: each reads one and the same token of 64 characters, which its owner alone may read."""
    file = tmp_path / "ray" / "auth_token"

    def token(_: int) -> str:
        make_token(file)
        return file.read_text()

    with ThreadPoolExecutor(8) as starters:
        [value] = set(starters.map(token, range(64)))
    assert len(value) == 64 and file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_lock_that_is_removed_while_it_is_read_still_has_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "launch.lock"
    lock.write_text("4711\n")

    def flock(file: object, operation: int) -> None:
        lock.unlink()
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    assert holder(lock) == 4711 and holder(lock) is None
