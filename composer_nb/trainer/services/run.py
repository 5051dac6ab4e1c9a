"""The process of RL as services: `python -m composer_nb.trainer.services.run RUN`. It ends with Ray, and resumes when it is
started again."""

import os
import sys
import threading
import time
from pathlib import Path

from composer_nb.harness.sandbox.reap import FOLDER, ResourceJournal
from composer_nb.trainer.records.rundir import RunDir, full_disk
from composer_nb.trainer.services import LOST
from composer_nb.trainer.services.actors import ActorDied, RayActors
from composer_nb.trainer.services.capacity import machines_of_cluster, require_room_for_rl, require_same_code
from composer_nb.trainer.services.coordinator import Coordinator, RunStopped
from composer_nb.trainer.services.head import held
from composer_nb.trainer.settings import from_dict

# Time limit of Ray's start, which takes ten seconds, or a minute on a busy machine.
BEGINS_S = 240.0


def _end_unless_begun(begun: threading.Event) -> None:
    """End this process if Ray, which waits for its workers without a limit, does not answer: the launcher tries again."""
    if not begun.wait(BEGINS_S):
        print(f"Ray has not begun within {BEGINS_S:.0f} s", file=sys.stderr, flush=True)
        os._exit(LOST)


def _end_when_lost(actors: RayActors) -> None:
    """End this process at once if Ray is gone, whatever it waits for: the launcher starts it again, and it resumes."""
    while (lost := actors.lost()) is None:
        time.sleep(2.0)
    print(lost, file=sys.stderr, flush=True)
    os._exit(LOST)


def main(arguments: list[str]) -> None:
    """Run RL as services. Exits with LOST if the cluster is lost, and with a message if RL cannot continue."""
    [path] = arguments
    run = RunDir(Path(path))
    settings = from_dict(run.settings())
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s  {text}", flush=True)

    if run.finished("rl") is not None:
        return
    say("rl, as services …")
    journal = ResourceJournal(run.path / FOLDER, run.path.name)
    address = settings.services.address
    has_begun = threading.Event()
    threading.Thread(target=_end_unless_begun, args=(has_begun,), daemon=True).start()
    try:
        with held(address) as cluster:
            actors = RayActors(cluster, namespace=run.path.name, journal=journal)
    except ConnectionError as error:
        print(f"services.address={address}: {error}" if address else error, file=sys.stderr)
        sys.exit(1 if address else LOST)
    finally:
        has_begun.set()
    threading.Thread(target=_end_when_lost, args=(actors,), daemon=True).start()
    try:
        coordinator = Coordinator(run, settings, actors, say)
        coordinator.push()  # before nodes look for their inputs
        if address:
            is_new = not run.steps("rl")
            try:
                machines = machines_of_cluster(run.path, settings.services.store)
            except ValueError:
                if is_new:
                    raise
                machines = []  # a node that has just died may still be listed
            require_same_code(machines)
            if is_new:  # in a resumed run, dead processes may still hold memory
                require_room_for_rl(settings, machines)
        info = coordinator.go()
        seconds = time.perf_counter() - start + info.pop("seconds_before")
        run.finish("rl", seconds, info)
        coordinator.push()
        say(f"rl: done in {seconds:.0f} s")
    except ActorDied as died:  # without a replacement: the launcher starts this process again
        print(died, file=sys.stderr)
        sys.exit(LOST)
    except Exception as error:
        if message := full_disk(error, run.path):
            sys.exit(message)
        if not isinstance(error, (RunStopped, ValueError, FloatingPointError, OSError)):
            raise
        sys.exit(str(error) or repr(error))
    finally:
        actors.close()


if __name__ == "__main__":
    main(sys.argv[1:])
