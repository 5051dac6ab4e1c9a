"""The start of every process of a run: `python -m composer_nb.trainer.recipe.child PARENT MODULE ARGUMENT …`.

The process binds its life to its parent's, and only then imports MODULE, which may take seconds. So a launcher that is killed
meanwhile leaves no process behind. This module has no slow imports.
"""

import ctypes
import os
import runpy
import signal
import sys


def die_with(parent: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent, `parent`, ends, however that ends, so that a killed notebook
    leaves no ranks behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


if __name__ == "__main__":
    _, parent, module, *arguments = sys.argv
    die_with(int(parent), signal.SIGKILL)
    sys.argv = [module, *arguments]
    sys.path.append(os.getcwd())  # last, so that modules of a user are found and stand in for none of others
    runpy.run_module(module, run_name="__main__", alter_sys=True)
