"""An attempt: an agent's rollout and its grade. Training, evaluation and the bench share this code.

The grader `functions` calls the code of a task in shared sandboxes, which takes milliseconds. With the tiny tools, the agent of
such a task edits files in memory. With the product's tools, the agent has a sandbox of its own. Any other grader needs one for
the agent and another for the grade.
"""

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from composer_nb.harness.agent.chat import ChatRenderer, User
from composer_nb.harness.agent.driver import Job, Seat
from composer_nb.harness.agent.loop import LIMITS, Conversation, Told, converse, silent
from composer_nb.harness.agent.summary import NO_SUMMARIES, SummarySettings
from composer_nb.harness.agent.turns import Limits, TokenTurnPolicy, TurnPolicy
from composer_nb.harness.agent.user import UserOf, nobody
from composer_nb.harness.blocking import CallTimeout
from composer_nb.harness.carry import Blob, add_history, carry_back, commits_left
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.sandbox.contract import Backend, Sandbox
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.functions import is_test
from composer_nb.harness.tasks.history import GIT_REPORT, import_stream
from composer_nb.harness.tasks.runtime import artifacts_left, start_sandbox, workspace
from composer_nb.harness.tasks.task import LOWERED, Task
from composer_nb.harness.tools.session import FOLDER, Session
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.harness.tools.workspace import Workspace

# Maximum size of the changed files that are kept with a rollout.
MAX_KEPT_BYTES = 16 << 20
# What rates a graded attempt: entries of its grade's `rewards`.
Rater = Callable[[Attempt], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The tools, limits and sandboxes of attempts.

    Attributes:
        functions: Calls functions, for tasks of the grader `functions`.
        backend: Makes the sandboxes of all other tasks.
        clock: Clock in seconds by which `limits.seconds` counts.
        opened: Called with the session of the tools, which another thread may abort.
        user: Makes the user of a task's conversation; None: nobody answers.
    """

    tools: ToolSet
    limits: Limits = LIMITS
    functions: Executor | None = None
    backend: Backend | None = None
    clock: Callable[[], float] = time.monotonic
    opened: Callable[[Session], None] = lambda session: None
    user: UserOf | None = None


@dataclass(frozen=True, slots=True)
class Agent:
    """The chat format, tools and limits of a policy in its attempts. Raises ValueError if the limits leave no room for the
    request for a summary."""

    renderer: ChatRenderer
    tools: ToolSet = field(default_factory=ToolSet.tiny)
    limits: Limits = field(default_factory=Limits)
    backend: Backend | None = None
    system: str = ""
    summary: SummarySettings = NO_SUMMARIES
    user: UserOf | None = None

    def __post_init__(self) -> None:
        if self.summary.trigger and self.summary.kind != "truncate":
            least = self.summary.trigger + len(self.renderer.ask(self.renderer.queries[self.summary.kind]))
            if least >= self.limits.tokens:
                raise ValueError(
                    f"env.summary.trigger={self.summary.trigger} and the call for a summary come to {least} tokens, and "
                    f"limits.tokens={self.limits.tokens}: raise one or lower the other"
                )

    def environment(self, functions: Executor | None = None) -> Environment:
        """Return the tools, limits and sandboxes of the agent's attempts."""
        return Environment(
            functions=functions, tools=self.tools, limits=self.limits, backend=self.backend, user=self.user
        )

    def begin(self, task: Task) -> tuple[Limits, ChatRenderer]:
        """Return the limits and the chat format for a task. Raises ValueError if its prompt leaves no room to answer."""
        limits, offered = limits_of(task, self.limits), tools_of(task, self.tools)
        renderer = self.renderer if offered is self.tools else self.renderer.offering(offered.schemas)
        if (size := len(renderer.read([User(text=task.instruction)], self.system))) >= (most := limits.tokens):
            setting = "limits.tokens" if most == self.limits.tokens else "the task's max_tokens"
            raise ValueError(f"task {task.id}: its prompt has {size} tokens, and limits.tokens={most}; raise {setting}")
        return limits, renderer

    def attempt(
        self,
        task: Task,
        rollout: int,
        speaks: Callable[..., TokenTurnPolicy] = TokenTurnPolicy,
        *,
        graded: bool = True,
        rater: Rater | None = None,
    ) -> Job[Attempt]:
        """Return the job of an attempt by a policy that continues tokens. `rollout` is the attempt's number at the policy and
        determines its random draws; `speaks` makes the turn policy; `rater` as for `rated`. Without `graded`, the job ends
        with the conversation (`play`). The job raises ValueError if the task cannot run here, or if its prompt leaves no room to
        answer."""

        def job(seat: Seat[Any]) -> Attempt:
            limits, renderer = self.begin(task)
            turn_policy = speaks(renderer, rollout, limits, seat.ask, seat.release, self.system, self.summary)
            env = self.environment(seat)
            env = replace(env, clock=seat.clock, opened=lambda opened: seat.at_drop.append(opened.abort))
            return rated(attempt(task, env, turn_policy), rater) if graded else play(task, env, turn_policy)

        return job


def rated(result: Attempt, rater: Rater | None) -> Attempt:
    """Return an attempt with the rating of `rater`, if there is one, in its grade. If the rater blocks, nothing is known of the
    attempt: its status is `infra_error`. Raises ValueError if the rater fails."""
    if rater is None or not result.grade.known:
        return result
    try:
        rewards = {**result.grade.rewards, **rater(result)}
    except CallTimeout as late:
        return replace(result, grade=Grade(status="infra_error", output=str(late)))
    return replace(result, grade=replace(result.grade, rewards=rewards))


def limits_of(task: Task, limits: Limits) -> Limits:
    """Return the limits of an attempt. A task's own limits can lower those of the run but never raise them."""
    lowered = {name: int(task.metadata[key]) for name, key in LOWERED.items() if key in task.metadata}
    return replace(limits, **{name: min(most, getattr(limits, name)) for name, most in lowered.items()})


def tools_of(task: Task, tools: ToolSet) -> ToolSet:
    """Return the tools of an attempt: the task's selection from the run's tools. Raises ValueError for a tool not among them."""
    try:
        return tools.only(task.tools)
    except ValueError as error:
        raise ValueError(f"task {task.id}: tools: {error}") from None


def attempt(task: Task, env: Environment, turn_policy: TurnPolicy, report: Told = silent) -> Attempt:
    """Run one rollout and grade it.

    The status of the grade is `infra_error` after an infrastructure failure. It is `agent_failed` if the agent broke its sandbox
    or made its workspace too large to keep. Raises ValueError for a task that cannot run here."""
    return graded(play(task, env, turn_policy, report), env)


def play(task: Task, env: Environment, turn_policy: TurnPolicy, report: Told = silent) -> Attempt:
    """Run one rollout. The status of the grade is `ungraded` if a grade is due, else as `attempt` says. Raises like `attempt`."""
    env = replace(env, limits=limits_of(task, env.limits), tools=tools_of(task, env.tools))
    if task.grader == "functions" and env.functions is None:
        raise ValueError(f"task {task.id}: its grader `functions` needs something that calls functions")
    if task.grader != "functions" or env.tools.needs_sandbox:
        return _play_in_sandbox(task, env, turn_policy, report)
    assert env.functions is not None
    own_tests = frozenset(filter(is_test, task.source_scope))
    work = Workspace(
        files=dict(task.files),
        visible_tests=task.visible_tests,
        sandboxes=env.functions,
        own_tests=own_tests,
        limits=task.call_limits,
    )
    env.opened(work)
    try:
        outcome = _converse(task, env, turn_policy, work, report)
    finally:  # also if the driver drops the agent: the policy must not keep a rollout that will not continue
        segments = turn_policy.close()
    counted = (0, 0) if any(len(segment.token_ids) for segment in segments) else (outcome.read, outcome.written)
    files = dict(work.files)  # a custom tool that was given up may still write
    rollout = replace(outcome.rollout(task.id, segments, files, task.files), counted=counted, seconds=0.0)
    gradable = outcome.stop not in ("infrastructure", "interrupted")
    return Attempt(task=task, rollout=rollout, grade=Grade(status="ungraded" if gradable else "infra_error"))


def _converse(task: Task, env: Environment, turn_policy: TurnPolicy, session: Session, report: Told) -> Conversation:
    user = env.user(task) if env.user else nobody
    try:
        return converse(task.instruction, turn_policy, env.tools, session, env.limits, report, env.clock, user)
    finally:
        session.close()


def graded(ended: Attempt, env: Environment) -> Attempt:
    """Return an attempt that has ended with its grade, if one is due."""
    task, files = ended.task, ended.rollout.files
    if ended.grade.status != "ungraded":
        return ended
    if task.grader == "functions" and not tools_of(task, env.tools).needs_sandbox:
        return replace(ended, grade=grade(task, files, env.functions))
    contents = {path: text.encode("utf-8", "surrogateescape") for path, text in files.items()}
    runner = env.functions if task.grader == "functions" else env.backend
    return replace(ended, grade=grade(task, contents, runner))


@contextmanager
def open_session(task: Task, env: Environment) -> Iterator[Session]:
    """Open an agent's session in a new sandbox with a task's workspace. Raises ValueError for a task that cannot run here."""
    if env.backend is None:
        raise ValueError(f"task {task.id}: its grader {task.grader!r}, or its tools, need a backend of sandboxes")
    with start_sandbox(task, env.backend) as box:
        if not task.image:  # a task's image has a history of its own
            add_history(box, import_stream(task))
        yield env.tools.open(box)


def _play_in_sandbox(task: Task, env: Environment, turn_policy: TurnPolicy, report: Told) -> Attempt:
    """Play an attempt in a sandbox of its task; its grade is `ungraded`, or says what ended it."""
    outcome = Conversation(turns=(), stop="infrastructure")
    left: dict[str, bytes] | None = None
    grade_, egress = Grade(status="infra_error"), tuple[str, ...]()
    try:
        with open_session(task, env) as session:
            env.opened(session)
            try:
                outcome = _converse(task, env, turn_policy, session, report)
                if outcome.stop not in ("infrastructure", "interrupted"):
                    left = _carried(task, session.sandbox)
                    grade_ = Grade(status="ungraded" if left is not None else "agent_failed")
            except SandboxDied:
                grade_ = Grade(status="agent_failed")
            finally:
                egress = session.sandbox.egress_log
    except (SandboxDied, SandboxFailure):
        pass
    finally:
        segments = turn_policy.close()
    files = {path: data.decode("utf-8", "surrogateescape") for path, data in (left or {}).items()}
    # Unchanged texts remain the same objects; bytes that are not UTF-8 become lone surrogates.
    files = {path: task.files[path] if task.files.get(path) == text else text for path, text in files.items()}
    files = task.files if left is None else files
    rollout = replace(outcome.rollout(task.id, segments, files, task.files), egress=egress)
    return Attempt(task=task, rollout=rollout, grade=grade_)


def _carried(task: Task, box: Sandbox) -> dict[str, bytes] | None:
    """Return what an agent left for its grade; None if it left more than can be carried out or kept."""
    try:
        left = _left(task, carry_back(box)[0]) | artifacts_left(task, box)
        return left | ({GIT_REPORT: commits_left(box).encode()} if GIT_REPORT in task.solution else {})
    except OSError:
        return None


def _left(task: Task, files: Mapping[str, Blob]) -> dict[str, bytes]:
    """Return the files of a workspace without the harness's own. Raises OSError if the changes are too large to keep."""
    ours = (f"{FOLDER}/",) if task.image else (f"{FOLDER}/", ".git/")
    kept_files = {path: blob.data for path, blob in files.items() if not path.startswith(ours)}
    if not task.image:
        before = workspace(task)
        size = sum(len(data) for path, data in kept_files.items() if before.get(path) != data)
        if size > MAX_KEPT_BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes of changes")
    return kept_files
