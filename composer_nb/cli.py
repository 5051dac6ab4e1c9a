"""The command line `composer-nb`. Its subcommands are in `composer_nb.operations`.

An error that the user can fix is one line on standard error and exit status 2; an interrupted run ends with 130, one whose
output nobody reads any more with 141, as by SIGPIPE; anything else is a bug and keeps its traceback.
"""

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from composer_nb.operations import COMMANDS
from composer_nb.operations.logs import print_lines

# Commands with actions.
GROUPS = {
    "jobs": "run notebooks headless: a graph of them, here or on a Ray cluster",
    "sandbox": "test what a sandbox withstands",
    "tasks": "make tasks from a repository, check them, or convert them from a benchmark",
    "weights": "compare, apply, verify and list weight versions",
}
# Names of errors that the user can fix; comparing names spares importing torch.
FIXABLE = {
    *("ValueError", "FileNotFoundError", "FileExistsError", "SandboxUnavailable", "SandboxFailure", "ProviderFailure"),
    *("RunFailed", "JobFailed"),
}
FIXABLE_ERRNO = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS),
    *(errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
}
for module in ("runs", "agents", "tasks", "studies", "jobs", "models", "plans", "mcp"):  # in the order of the help
    import_module(f"composer_nb.operations.{module}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    from composer_nb.harness.untrusted import visible_lines

    args = parser().parse_args(arguments)
    # A record may quote a foreign run.
    print_lines("stdout" if args.lines and not getattr(args, "json", False) else "stderr", render=visible_lines)
    try:
        return int(COMMANDS[args.command].run(args))
    except KeyboardInterrupt as interrupt:  # with a hint of how to go on, if the command knows one
        print("; ".join(["interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        sys.stderr.close()
        return 128 + signal.SIGPIPE
    except Exception as error:
        system = isinstance(error, OSError) and error.errno in FIXABLE_ERRNO
        if not system and not FIXABLE & {kind.__name__ for kind in type(error).__mro__}:
            raise
        print(f"composer-nb: {visible_lines(str(error))}", file=sys.stderr)
        return getattr(error, "exit_status", 2)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, in the order in which they are declared."""
    top_parser = argparse.ArgumentParser(
        prog="composer-nb", description="An open laboratory for training coding agents."
    )
    top = top_parser.add_subparsers(required=True, metavar="COMMAND")
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {"": top}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            parent = top.add_parser(group, help=GROUPS[group], description=GROUPS[group])
            groups[group] = parent.add_subparsers(required=True, metavar="ACTION")
        subparser = groups[group].add_parser(last, help=command.help, description=command.help, epilog=command.epilog)
        subparser.set_defaults(command=name, lines=command.lines)
        for names, options in command.arguments:
            subparser.add_argument(*names, **options)
    return top_parser


if __name__ == "__main__":
    sys.exit(main())
