"""One attempt at a node of a job file, in a process of its own: python -m composer_nb.jobs attempt.json"""

from __future__ import annotations

import json
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from composer_nb.jobs import processes
from composer_nb.jobs.notebook import JobFailed, run_notebook
from composer_nb.jobs.records import ENDED, read_json


def main(path: Path) -> int:
    """Run the attempt that `path` describes; return the exit status of its state."""
    attempt = json.loads(path.read_text(encoding="utf-8"))  # the arguments of run_notebook
    attempt |= {name: Path(attempt[name]) for name in ("source", "output", "folder")}
    try:
        with processes.terminate_as_interrupt():
            processes.follow_parent()
            run_notebook(**attempt, say=_print)
    except KeyboardInterrupt:
        _print("interrupted")
    except (JobFailed, ValueError, OSError) as error:
        _print(str(error))
        return getattr(error, "exit_status", 1)
    except Exception:  # a bug of ours: the log keeps its traceback, the job its record
        _print(traceback.format_exc())
        return 1
    return ENDED[(read_json(attempt["output"].with_name("run.json")) or {}).get("state", "interrupted")]


def _print(line: str) -> None:
    """Print a line. Where the log cannot grow (a full disk) the notebook still has it."""
    with suppress(OSError):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
