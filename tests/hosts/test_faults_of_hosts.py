"""Weight versions over hosts that are cut off, dead or an hour late, from a store that refuses: all arrive, and nothing else."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from network import Host, Link, Network, ObjectStore

pytest.importorskip("moto.server", reason="moto, a development dependency, serves S3")
# Publishes or follows the versions whose numbers it reads, and says what came of each.
WORKER = """
import json, sys, time
import torch
from composer_nb.trainer.services.inference import fetch
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Receiver
name, url = sys.argv[1:]
publisher = Publisher(url, owner=name, full_every=4) if name == "trainer" else None
receiver = Receiver(url, name=name)
print(json.dumps({"clock": time.time()}), flush=True)
for line in sys.stdin:
    version = int(line)
    if publisher is not None:
        tensors = {"w": torch.linspace(-1, 1, 40_000).bfloat16(), "norm": torch.full((3,), float(version))}
        tensors["w"][version :: 97] *= 2
        manifest = publisher.publish(version, tensors, {"config.json": b"{}"})
        report = {"hash": manifest.hash, "full": manifest.base is None}
        if version % 4 == 0:
            publisher.prune(1)
    else:
        fetched = fetch(receiver, version)
        report = {"hash": receiver.install(fetched), "bytes": fetched.read_bytes, "delta": fetched.base is not None}
        receiver.report()
    print(json.dumps(report), flush=True)
"""
LOG = """
import json, sys
from composer_nb.trainer.versions.store import log
print(json.dumps(log(sys.argv[1])))
"""
# A library that makes all clocks of a process an hour late.
LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, t);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec -= 3600;
    return result;
}
time_t time(time_t *at) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); if (at) *at = t.tv_sec; return t.tv_sec; }
int gettimeofday(struct timeval *v, void *zone) {
    struct timespec t; clock_gettime(CLOCK_REALTIME, &t); v->tv_sec = t.tv_sec; v->tv_usec = t.tv_nsec / 1000; return 0;
}
"""


class Worker:
    """A process on a host of its own that takes version numbers."""

    def __init__(self, host: Host, store: ObjectStore, *before: str) -> None:
        self.host = host
        words = (*before, "python", "-c", WORKER, host.name, f"{store.url}/run")
        self._process = host.start(*words, env=store.environment, stderr=None)
        self.clock = self.take()["clock"]

    def order(self, *versions: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{version}\n" for version in versions))
        self._process.stdin.flush()

    def take(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


@pytest.fixture(scope="module")
def store_host(network: Network) -> Host:
    return network.host("versions")


@pytest.fixture(scope="module")
def store(store_host: Host) -> ObjectStore:
    return ObjectStore(store_host, "versions")


@pytest.fixture(scope="module")
def far(network: Network, store: ObjectStore) -> Worker:
    """A region whose clock is an hour late."""
    host = network.host("far", Link(rate=100, delay=5))
    try:
        host.run("sh", "-c", 'echo "$CODE" | cc -shared -fPIC -x c - -o late.so -ldl', env={"CODE": LATE})
    except AssertionError as error:
        pytest.skip(f"no compiler for a wrong clock: {error}")
    return Worker(host, store, "env", "LD_PRELOAD=/home/late.so")


@pytest.fixture(scope="module")
def workers(network: Network, store: ObjectStore, far: Worker) -> Iterator[tuple[Worker, Worker]]:
    trainer, near = (Worker(network.host(name), store) for name in ("trainer", "near"))
    yield trainer, near


@pytest.mark.slow
def test_versions_survive_hosts_links_clocks_and_the_store(
    network: Network, store_host: Host, store: ObjectStore, far: Worker, workers: tuple[Worker, Worker]
) -> None:
    trainer, near = workers
    published: dict[int, str] = {}

    def publish(*versions: int) -> None:
        trainer.order(*versions)
        published.update((version, trainer.take()["hash"]) for version in versions)

    def follow(worker: Worker, *versions: int) -> list[dict[str, Any]]:
        worker.order(*versions)
        reports = [worker.take() for _ in versions]
        assert [report["hash"] for report in reports] == [published[version] for version in versions]
        return reports

    assert 3500 < near.clock - far.clock < 3600 + 600
    publish(1)
    full_bytes = follow(near, 1)[0]["bytes"]
    follow(far, 1)
    publish(2)
    follow(near, 2)
    assert 0 < follow(far, 2)[0]["bytes"] < full_bytes / 5
    # The far region is cut off, asks for a version meanwhile, and falls behind by two: it comes back by deltas.
    network.cut(far.host)
    far.order(4)
    for version in (3, 4):
        publish(version)
        follow(near, version)
    network.cut(far.host, down=False)
    report = far.take()
    assert report["hash"] == published[4] and report["delta"] and report["bytes"] < full_bytes / 5
    # It is cut off while what it runs is pruned: it comes back by an anchor.
    network.cut(far.host)
    for version in range(5, 13):
        publish(version)
        follow(near, version)
    network.cut(far.host, down=False)
    [caught_up] = follow(far, 12)
    assert not caught_up["delta"] and full_bytes <= caught_up["bytes"] < 2 * full_bytes
    # The store refuses everybody for a while, in the middle of publishing and fetching.
    network.cut(store_host)
    for worker in (trainer, near, far):
        worker.order(13)
    time.sleep(5)
    network.cut(store_host, down=False)
    published[13] = trainer.take()["hash"]
    assert {worker.take()["hash"] for worker in (near, far)} == {published[13]}
    # A region dies for good; another joins, from what the store has.
    near.host.kill()
    publish(14)
    follow(far, 14)
    joined = Worker(network.host("joined"), store)
    follow(joined, 14)
    publish(15)
    assert all(follow(worker, 15)[0]["delta"] for worker in (far, joined))
    rows = json.loads(joined.host.python(LOG, f"{store.url}/run", env=store.environment))
    assert {row["version"]: row["hash"] for row in rows} == published
    assert {*rows[-2]["acknowledged"]} == {"far", "joined"} and not rows[0]["there"]
