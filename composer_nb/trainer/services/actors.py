"""Processes for services: Ray actors, whose calls return futures. (Tests run services on threads.)"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from composer_nb.harness.sandbox.reap import ResourceJournal
from composer_nb.trainer.services.cluster import Cluster
from composer_nb.trainer.services.run_copy import NotSeen

# CPUs that a service occupies in Ray's accounting.
RANK_CPU = 0.1
PLACE_S = 60.0


class ActorDied(RuntimeError):
    """The process of a service is gone. Its last call may or may not have taken effect."""


class StartFailed(ActorDied):
    """The process of a service is gone because the service itself raised an error as it was made."""


class RemoteService(Protocol):
    """A service in another process."""

    def call(self, method: str, *values: Any) -> Future[Any]:
        """Start a call. The future raises the method's exception, or ActorDied."""

    def kill(self) -> None:
        """End the service at once."""


class RayRemote:
    """A Ray actor."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name

    def call(self, method: str, *values: Any) -> Future[Any]:
        reply: Future[Any] = Future()

        def settle(ended: Future[Any]) -> None:
            if (error := ended.exception()) is None:
                reply.set_result(ended.result())
            else:
                reply.set_exception(_meaning(error, self._name))

        getattr(self._handle, method).remote(*values).future().add_done_callback(settle)
        return reply

    def kill(self) -> None:
        import ray

        ray.kill(self._handle)


def _meaning(error: BaseException, name: str) -> BaseException:
    """Return the error of the method, ActorDied if the process is gone, or NotSeen if it ended because of that."""
    from ray.exceptions import RayActorError, RayError, RayTaskError

    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, Exception) else error
    if not isinstance(error, RayError):
        return error
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
    _, refused, why = rest[-1].partition(f"{NotSeen.__name__}: ") if rest else ("", "", "")
    if refused:
        return NotSeen(why)
    kind = StartFailed if isinstance(error, RayActorError) and error.actor_init_failed else ActorDied
    return kind(f"{name} died ({' … '.join([first, *rest[-1:]])})")


def _role(name: str) -> dict[str, float]:
    """Return what the service `engine-1` asks of its node: the role `engine`, if nodes have it."""
    import ray

    role = name.partition("-")[0]
    return {role: 1.0} if role in ray.cluster_resources() else {}


class RayActors:
    """Actors on the Ray cluster at `address`, or on a new cluster of this process."""

    def __init__(self, address: str, namespace: str, journal: ResourceJournal) -> None:
        """Raise ConnectionError if no cluster answers at `address`, or none can be started."""
        self._cluster = Cluster(address, namespace, journal)
        self._made: list[RayRemote] = []
        self._places: dict[str, Any] = {}

    def make(
        self, kind: Callable[..., Any], *values: Any, name: str, threads: int = 1, gpus: int = 0, where: Any = "SPREAD"
    ) -> RayRemote:
        """Return a new service `kind(*values)` with so many GPUs, by default on the next of the cluster's nodes. Up to `threads`
        calls run at a time; others wait."""
        import ray

        needs = {"num_cpus": RANK_CPU, "num_gpus": gpus, "resources": _role(name), "scheduling_strategy": where}
        actor = ray.remote(kind).options(max_concurrency=threads, max_restarts=0, **needs)
        remote = RayRemote(actor.remote(*values), name)
        self._made.append(remote)
        return remote

    def share(self, value: Any) -> Any:
        """Return a reference to a value, which any number of calls may take in its place."""
        import ray

        return ray.put(value)

    def make_ranks(
        self, kind: Callable[..., Any], count: int, *values: Any, name: str, threads: int, gpus: int = 0
    ) -> list[RayRemote]:
        """Return `count` services `kind(rank, *values)`, with `gpus` each, which are placed together or not at all. Raises
        ValueError if the cluster has no room for all of them."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._release(name)
        group = self._places[name] = placement_group(
            [{"CPU": RANK_CPU, "GPU": gpus} | _role(name)] * count, strategy="PACK"
        )
        if not group.wait(PLACE_S):
            self._release(name)
            role = f" and 1 of the role {name} (up --roles)" if _role(name) else ""
            needs = f"{RANK_CPU} CPU{f' and {gpus} GPU' if gpus else ''}{role}"
            fewer = f"lower ranks={count}, " if count > 1 else ""
            raise ValueError(
                f"services.address: the cluster had no room for {count} trainer rank(s) of {needs} each within {PLACE_S:g} s; "
                f"{fewer}end what else runs there, or add nodes"
            )
        remotes = []
        for rank in range(count):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            args: dict[str, Any] = {"name": f"{name}-{rank}", "threads": threads, "gpus": gpus, "where": where}
            remotes.append(self.make(kind, rank, *values, **args))
        return remotes

    def _release(self, name: str) -> None:
        """Release the placement of earlier ranks."""
        from ray.util.placement_group import remove_placement_group

        if (group := self._places.pop(name, None)) is not None:
            remove_placement_group(group)

    def lost(self) -> str | None:
        """Name the part of the cluster that does not answer; None if all do."""
        return self._cluster.lost()

    def close(self) -> None:
        """End all services and leave the cluster."""
        for remote in self._made:
            remote.kill()
        for name in list(self._places):
            self._release(name)
        self._cluster.close()
