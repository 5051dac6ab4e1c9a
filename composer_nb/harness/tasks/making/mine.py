"""Tasks from what developers did: the commits of a checkout, or consecutive releases of a library.

The workspace is the state before. The request is the commit's message, or what the release adds to the changelog; for a commit
that holds an agent's accepted change, it is what the user had asked (`production/requests.py`). The hidden tests are the test
modules that the change touches, as they are afterwards. Visible tests of these modules that pass before and fail afterwards are
removed. A task is kept if some hidden tests fail before, all that count pass afterwards, and repeats agree. dulwich reads the
history and runs nothing, so a hostile checkout cannot name programs.

What a request does not name, but its tests need, is added as a list of names, as in SWE-bench Pro (arXiv 2509.16941).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.box import Boxes, RunnerEnded
from composer_nb.harness.grading.plan import gold_files, job, with_plan
from composer_nb.harness.grading.pytest_grader import SECONDS
from composer_nb.harness.grading.source import Function
from composer_nb.harness.grading.validate import IDS, validate_task
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.syntax import nodes_of
from composer_nb.harness.tasks.functions import parse_module
from composer_nb.harness.tasks.making.instructions import passing_modules
from composer_nb.harness.tasks.making.make import RECORD, SUMMARY, TASKS, Report, prepared, writing
from composer_nb.harness.tasks.making.options import RunOptions, read_options
from composer_nb.harness.tasks.making.repository import (
    Repository,
    RepositoryTooLarge,
    of_files,
    read_repository,
    supports_tests,
    unreadable,
    unwanted,
)
from composer_nb.harness.tasks.making.trial import NoTask, TaskStore, TrialOutcome, needed
from composer_nb.harness.tasks.runtime import limits_spec, workspace
from composer_nb.harness.tasks.scope import in_scope, is_conftest, is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import changed_lines, opcodes

if TYPE_CHECKING:
    from dulwich.repo import Repo

MIN_WORDS = 4  # Words of a message that asks for something.
MAX_REQUEST = 4000  # Characters of a request.
MAX_MESSAGE = 4 * MAX_REQUEST  # Characters of a message or a changelog that are read for one.
UNFETCHED = "not fetched"  # Verdict on commits of which a shallow or partial clone lacks a part.
UNSEEN = "all tests pass without a change"  # See `validate_task`.
SLOW = 6  # A test may take one part in six of the time limit of a run.
TRAILER = re.compile(
    r"^([\w-]+-by|Change-Id|Refs?|See|Link|BREAKING CHANGE|PiperOrigin-RevId)\b.*:|^https?://\S+$", re.I
)
NUMBER = re.compile(r"\s*\((?:GH-|gh-|#)\d+\)|\b(?:fixes|closes|resolves)\s+#\d+\.?", re.I)
CHORE = re.compile(
    r"^(merge|bump|release|revert|version|v?\d+(\.\d+)+|wip|typo|lint|format|pre-commit|chore|docs?|ci)\b", re.I
)
CHANGELOG = re.compile(
    r"(^|/)(changes|changelog|history|news|release[_-]?notes|versions)[^/]*\.(rst|md|txt)$|^(changes|changelog|news)$",
    re.I,
)


# Returns the request behind the change from one state of a repository's files to another; empty if none is known.
RequestBehind = Callable[[dict[str, str], dict[str, str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Two states of a repository, and what was asked between them. `unfit`: why there are no such states.

    Attributes:
        logged: Whether the request is from an agent's log.
    """

    id: str
    before: Repository | None = None
    after: Repository | None = None
    request: str = ""
    unfit: str = ""
    logged: bool = False

    @property
    def key(self) -> str:
        """The id, and the request where it is from a log: more conversations may be accepted later."""
        return f"{self.id} {hashlib.sha256(self.request.encode()).hexdigest()}" if self.logged else self.id


def mine(
    paths: Sequence[Path],
    out: Path,
    backend: Backend,
    *,
    limit: int = 30,
    max_commits: int = 200,
    most_lines: int = 400,
    request_behind: RequestBehind | None = None,
    running: RunOptions | None = None,
    report: Report = lambda doing, counts: None,
) -> dict[str, Any]:
    """Make up to `limit` tasks and write them into `out`. The same call continues where it was interrupted.

    Returns `tasks`, `tried`, `verdicts` with their counts, `candidates` with a verdict each, `files_left_out` with why, `slow`
    (tests that take too long to count), `from_logs` (tasks with a request from a log), and `wall_s`.

    Args:
        paths: a checkout, or folders of releases, the oldest first.
        max_commits: looks at this many, the newest first.
        most_lines: leaves out changes of more source lines, added and removed.
        request_behind: what a user asked for in the conversations that a commit holds; empty if there is none.

    Raises FileNotFoundError and ValueError for paths that hold no repository, and SandboxFailure.
    """
    running = running or RunOptions()
    candidates = releases(paths) if len(paths) > 1 else history(paths[0], max_commits, request_behind)
    origin = repr([[str(path.resolve()) for path in paths], most_lines, running])
    name = paths[-1].resolve().name
    return try_candidates(name, candidates, origin, out, backend, running, limit, most_lines, report)


def try_candidates(
    repository: str,
    candidates: Iterable[Candidate],
    origin: str,
    out: Path,
    backend: Backend,
    running: RunOptions,
    limit: int,
    most_lines: int,
    report: Report,
) -> dict[str, Any]:
    """Write up to `limit` tasks of these candidates into `out`. A record of candidates of another `origin` is refused.

    Returns and raises what `mine` does.
    """
    began, left_out = time.monotonic(), dict[str, str]()
    tasks: list[Task] = []
    with TaskStore(out / RECORD) as store:
        rows: list[dict[str, Any]] = []
        with writing(lambda: tasks, out / TASKS):
            for candidate in candidates:
                if len(tasks) == limit:
                    break
                report(candidate.id, f"{len(tasks)} of {limit} tasks, {len(rows)} tried")
                left_out |= candidate.after.left_out if candidate.after else {}
                if not rows:  # once its history could be read
                    store.claim("mined from", origin)
                if (earlier := store.outcomes.get(candidate.key)) is None or earlier.verdict == UNFETCHED:
                    outcome, slow = try_candidate(candidate, backend, running, most_lines)
                    store.keep_fact(f"slow {candidate.key}", str(slow))
                    store.keep(outcome)
                outcome, slow = store.outcomes[candidate.key], int(store.facts.get(f"slow {candidate.key}", 0))
                row = {"id": candidate.id, "logged": candidate.logged, "slow": slow}
                rows.append(row | {"verdict": outcome.verdict, "why": outcome.kind})
                if outcome.task is not None:
                    tasks.append(outcome.task)
    summary = {
        "repository": repository,
        "tasks": len(tasks),
        "tried": len(rows),
        "verdicts": Counter(row["verdict"] for row in rows),
        "candidates": rows,
        "files_left_out": left_out,
        "slow": sum(row["slow"] for row in rows),
        "from_logs": sum(row["logged"] and row["verdict"] == "kept" for row in rows),
        "wall_s": round(time.monotonic() - began, 1),
    }
    write_json(out / SUMMARY, summary)
    return summary


def history(path: Path, max_commits: int, request_behind: RequestBehind | None = None) -> Iterator[Candidate]:
    """Yield a candidate for each of the newest `max_commits` commits of a checkout, the newest first.

    One that cannot become a task has no states, and `unfit` says why. `request_behind` replaces the request in the commit's
    message where it knows one. Raises ValueError if `path` is no checkout, or its history cannot be read.
    """
    from dulwich import errors
    from dulwich.object_store import iter_tree_contents
    from dulwich.objects import Commit, ObjectID
    from dulwich.repo import Repo

    blobs: dict[bytes, bytes | str] = {}  # or why one is left out: those may be large, and many

    def state(tree_id: ObjectID) -> Repository:
        def entries() -> Iterator[tuple[str, bytes | str]]:
            for entry in iter_tree_contents(repo.object_store, tree_id):
                file_path = entry.path.decode("utf-8", "surrogateescape")
                reason = unwanted(file_path) or ("" if stat.S_ISREG(entry.mode) else "a link or a submodule")
                if not reason and entry.sha not in blobs:
                    data = repo[entry.sha].as_raw_string()
                    blobs[entry.sha] = unreadable(data) or data
                yield file_path, reason or blobs[entry.sha]

        return of_files(path.resolve().name, entries(), path)

    try:
        repo = Repo(str(path))
    except errors.NotGitRepository:
        raise ValueError(f"{path}: no git checkout; for releases give two folders or more, the oldest first") from None
    with repo:
        try:
            fetch_command = _fetch(repo)
            for walk_entry in repo.get_walker(max_entries=max_commits):
                commit = walk_entry.commit
                candidate_id = f"{path.resolve().name}-{commit.id.decode()[:12]}"
                request_in_message = request_of(commit.message.decode("utf-8", "replace"))
                if len(commit.parents) != 1:
                    yield Candidate(id=candidate_id, unfit="merge" if commit.parents else "first")
                elif not (request_in_message or request_behind):
                    yield Candidate(id=candidate_id)
                else:
                    try:
                        parent = repo[commit.parents[0]]
                        assert isinstance(parent, Commit)
                        before, after = state(parent.tree), state(commit.tree)
                    except ValueError as error:
                        yield Candidate(id=candidate_id, unfit=_unfit(error))
                    except KeyError as error:
                        if not fetch_command:
                            raise
                        missing = error.args[0][:12].decode("ascii", "replace")
                        unfit = f"{UNFETCHED}: object {missing}; `{fetch_command}` brings it"
                        yield Candidate(id=candidate_id, unfit=unfit)
                    else:
                        logged_request = request_behind(before.files, after.files) if request_behind else ""
                        request, logged = logged_request[:MAX_REQUEST] or request_in_message, bool(logged_request)
                        yield Candidate(id=candidate_id, before=before, after=after, request=request, logged=logged)
        except (KeyError, OSError, ValueError, zlib.error, errors.MissingCommitError, errors.ObjectMissing) as error:
            raise ValueError(f"{path}: its history cannot be read: {error!r}") from None


def _unfit(error: ValueError) -> str:
    """Return the verdict on a state that cannot be read."""
    return f"unfit: {error}" if isinstance(error, RepositoryTooLarge) else "no suite"


def _fetch(repo: Repo) -> str:
    """Return the command that completes a clone; empty for a whole one."""
    if repo.get_shallow():
        return "git fetch --unshallow"
    config = repo.get_config()
    partial = any(b"promisor" in dict(config.items(section)) for section in config.sections())
    return "git fetch --refetch --no-filter" if partial else ""


def releases(paths: Sequence[Path]) -> Iterator[Candidate]:
    """Yield the steps between folders of releases."""
    for old, new in pairwise(paths):
        candidate_id = new.resolve().name
        try:
            before, after = read_repository(old), read_repository(new)
        except ValueError as error:
            yield Candidate(id=candidate_id, unfit=_unfit(error))
            continue
        yield Candidate(id=candidate_id, before=before, after=after, request=changelog(before, after))


def request_of(message: str) -> str:
    """Return what a commit's message asks for, without trailers, links and issue numbers; empty if it is a chore or too terse."""
    lines = message.strip()[:MAX_MESSAGE].splitlines()
    lines = [NUMBER.sub("", line).rstrip() for line in lines if not TRAILER.match(line.strip())]
    text = "\n".join(lines).strip()[:MAX_REQUEST]
    return text if len(text.split()) >= MIN_WORDS and not CHORE.match(text) else ""


def changelog(before: Repository, after: Repository) -> str:
    """Return the lines that a release adds to its changelog; empty if there are none."""
    added_lines: list[str] = []
    for path, text in after.files.items():
        if CHANGELOG.search(path) and text != before.files.get(path):
            new_lines = text.splitlines()
            blocks = opcodes(before.files.get(path, "").splitlines(), new_lines)
            added = chain.from_iterable(new_lines[a:b] for kind, _, _, a, b in blocks if kind != "equal")
            added_lines += [NUMBER.sub("", line[:MAX_MESSAGE]) for line in added]
    text = "\n".join(added_lines).strip()[:MAX_REQUEST]
    return text if len(text.split()) >= MIN_WORDS else ""


def draft(candidate: Candidate, most_lines: int, running: RunOptions) -> Task:
    """Return the task of a candidate before it has run. Raises NoTask."""
    before, after = candidate.before, candidate.after
    if before is None or after is None or not candidate.request:
        raise NoTask(*(candidate.unfit or "no request").split(": ", 1))
    try:
        with_packages, options = prepared(after, running)
    except ValueError as error:
        raise NoTask("unfit", str(error)[:200]) from None
    changed = {path for path, text in after.files.items() if before.files.get(path) != text}
    modules = sorted(path for path in options.chosen(changed) if is_test_module(path))
    support = {path for path in changed if supports_tests(path) and not is_test_module(path)}
    hidden = {path: after.files[path] for path in {*needed(after.hidden, modules), *support}} if modules else {}
    scope = tuple(sorted({*before.scope, *after.scope}))
    paths = [path for path in changed - hidden.keys() if in_scope(path, scope)]
    solution = {path: after.files[path] for path in paths if not supports_tests(path)}
    line_count = sum(changed_lines(before.files.get(path, ""), text) for path, text in solution.items())
    if not any(path in after.sources for path in solution):
        raise NoTask("no source")
    if not modules:
        raise NoTask("no tests")
    if line_count > most_lines:
        raise NoTask("too much")
    names = unnamed(before, after, hidden, candidate.request)
    request = candidate.request + (f"\n\nIt has to provide: {', '.join(names)}." if names else "")
    facts = {"kind": "history", "repository": after.name, "lines": str(line_count), SECONDS: f"{running.suite_s:g}"}
    try:
        _ = [parse_module(path, text) for path, text in before.files.items() if is_conftest(path)]
        return Task(
            id=candidate.id,
            instruction=request,
            files=before.files,
            tests=hidden,
            solution=solution,
            source_scope=scope,
            grader="pytest",
            metadata=with_packages.settings | facts,
        )
    except ValueError as error:
        raise NoTask("unfit", str(error)[:200]) from None


def try_candidate(
    candidate: Candidate, backend: Backend, running: RunOptions, most_lines: int
) -> tuple[TrialOutcome, int]:
    """Try a candidate. Return its outcome, and how many tests are too slow to count. Raises SandboxFailure."""
    began, slow, verdict, why = time.monotonic(), 0, "kept", ""
    task: Task | None = None
    try:
        task = draft(candidate, most_lines, running)
        boxes = Boxes(backend=backend, spec=limits_spec(task), timeout_s=running.suite_s)
        select = read_options(task.files, running.pytest_args).select
        after = replace(job(task, gold_files(task)), select=select, test_s=running.suite_s / SLOW)
        try:
            [ran] = boxes.run([after])
        except (SandboxDied, RunnerEnded) as error:
            raise NoTask("ungraded", f"the gold patch ends its sandbox: {error}"[:290]) from None
        # Others fail for want of a file or a package, as a rule, or are slow.
        counted = {key: result.id for key, result in ran.results.items() if result.passed}
        slow = sum(result.why == "Endless" for result in ran.results.values())
        if not counted:
            raise NoTask("ungraded", f"the gold patch passes no test {sorted(ran.flags) or ''}".strip())
        with suppress(SandboxDied, RunnerEnded):
            [before] = boxes.run([job(task, workspace(task), keys=frozenset(counted))])
            if all(before.result(key).passed for key in counted):
                raise NoTask("unseen", UNSEEN)
        ids = {IDS: json.dumps(sorted(counted.values()))}
        files = task.files | current(task, candidate, boxes)
        task = task.model_copy(update={"files": files, "metadata": task.metadata | ids})
        validation = validate_task(task, backend, timeout_s=running.suite_s, keys=frozenset(counted))
        if not validation.valid or validation.plan is None:
            problem = (validation.problems or ("no test counts",))[0][:300]
            raise NoTask("unseen" if problem == UNSEEN else "ungraded", problem)
        task = with_plan(task, validation.plan)
    except NoTask as no_task:
        task, verdict, why = None, no_task.verdict, no_task.why
    seconds = time.monotonic() - began
    return TrialOutcome(key=candidate.key, kind=why, verdict=verdict, seconds=seconds, task=task), slow


def current(task: Task, candidate: Candidate, boxes: Boxes) -> dict[str, str]:
    """Return the visible test modules that the change touches, without the tests that pass before and fail afterwards.

    Such tests hold what the request changes, so they would mislead an agent. Raises SandboxFailure.
    """
    later = candidate.after.files if candidate.after else {}
    touched = {path: text for path, text in task.files.items() if is_test_module(path) and later.get(path) != text}
    touched = {path: text for path, text in touched.items() if nodes_of(text)}  # in others, no test passed
    if not touched:
        return {}
    twin = task.model_copy(update={"tests": touched})
    jobs = [replace(job(twin, files), test_s=boxes.timeout_s / SLOW) for files in (workspace(task), gold_files(task))]
    try:
        before, after = boxes.run(jobs)
    except (SandboxDied, RunnerEnded):
        return {}
    gone = [key for key, result in before.results.items() if result.passed and not after.result(key).passed]
    return passing_modules(touched, gone)


def unnamed(before: Repository, after: Repository, tests: dict[str, str], request: str) -> list[str]:
    """Return the names of new modules, functions, classes, attributes, parameters and variables that tests use and the request
    does not mention."""
    changed = {p: before.files.get(p, "") for p in after.sources if before.files.get(p) != after.files[p]}
    definitions, variables = (
        set[str]().union(*(names(path, after.files[path]) - names(path, text) for path, text in changed.items()))
        for names in (defined, declared)
    )
    sources = "\n".join(before.files[path] for path in before.sources)
    signs = dict.fromkeys(variables, r"\b") | dict.fromkeys(definitions, r"(\b(def|class) |\.)")
    return sorted(
        name
        for name in signs.keys() & used(tests)
        if not re.search(rf"\b{re.escape(name)}\b", request)
        and not re.search(rf"{signs[name]}{re.escape(name)}\b", sources)
    )


def used(tests: Mapping[str, str]) -> set[str]:
    """Return the names that tests import, look up, give as keywords, or take from an `import *`."""
    nodes = [node for path, text in tests.items() if path.endswith(".py") for node in nodes_of(text)]
    loaded, stored = (
        {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
        for kind in (ast.Load, ast.Store)
    )
    rest = [node for node in nodes if isinstance(node, ast.ImportFrom | ast.alias | ast.Attribute | ast.keyword)]
    names = {getattr(node, kind, None) or "" for node in rest for kind in ("module", "name", "attr", "arg")}
    return (loaded - stored).union(*(name.split(".") for name in names))


def defined(path: str, text: str) -> set[str]:
    """Return the name of a module, those of its functions and classes, and of the attributes that it sets; none if it is empty or
    cannot be parsed."""
    nodes = nodes_of(text)
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    module_name = {path.rpartition("/")[2].removesuffix(".py")} if text and nodes else set()
    return module_name | attributes | {node.name for node in nodes if isinstance(node, Function | ast.ClassDef)}


def declared(path: str, text: str) -> set[str]:
    """Return the names of the parameters of a module's functions, and of the variables of the module and its classes."""
    nodes = nodes_of(text)
    bodies = [statement for node in nodes if isinstance(node, ast.Module | ast.ClassDef) for statement in node.body]
    assigned = [name for node in bodies if isinstance(node, ast.Assign | ast.AnnAssign) for name in ast.walk(node)]
    names = {name.id for name in assigned if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}
