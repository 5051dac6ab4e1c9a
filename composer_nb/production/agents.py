"""The functions behind `composer-nb agent`, for programs that call rather than parse."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from composer_nb.harness.agent.loop import Told, converse, silent
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.agent.user import Answers, nobody
from composer_nb.harness.carry import Blob, carry_back
from composer_nb.harness.policy import TimeIsUp
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.search.chunks import unfit
from composer_nb.harness.tasks.making.options import given_packages
from composer_nb.harness.tools.session import shown
from composer_nb.production import checkout
from composer_nb.production.diff import require_git
from composer_nb.production.planner import TaskPlan, make_plan
from composer_nb.production.policies import equipment, open_policy
from composer_nb.production.work import Work, holds_plan_alone, keep, keep_plan, open_session


def new_folder(under: Path, name: str) -> Path:
    """Return a path below `under`, with the time in its name, that does not exist yet."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (f"{name}-{stamp}{end}" for end in ("", *(f"-{number}" for number in range(2, 1000))))
    return next(under / folder for folder in names if not (under / folder).exists())


def run_agent(
    root: Path,
    instruction: str,
    policy: str,
    out: Path,
    *,
    backend: str = "bwrap",
    image: str = "",
    packages: Path | None = None,
    limits: Limits | None = None,
    on_event: Told = silent,
    temperature: float = 1.0,
    plan: TaskPlan | None = None,
    user: Answers = nobody,
) -> Work:
    """Let an agent work on a copy of a user's repository, in a sandbox, and keep the result in the new folder `out`: `rollout`
    (Parquet and safetensors), `changes.diff` and `verdict.json`, which is `open` until the user decides.

    A checkpoint gets the tools and limits that it was trained with (`environment.carried`), other policies those of the product.

    `image`: Docker image with the dependencies of the repository, for the backend `docker`. `packages`: a folder of such packages
    that pip installed, for any backend. `plan`: follows the request in the first message; `out` may be the folder in which
    `write_plan` kept it. `user`: answers questions of the agent. The repository itself is not touched.

    Raises ValueError for an instruction that is empty or not Unicode, a repository that is empty or too large, an unknown policy;
    SandboxUnavailable; ProviderFailure for an endpoint that does not answer at all.
    """
    require_request(instruction)
    if image and backend != "docker":
        raise ValueError(f"--image {image}: the backend {backend} has no images; use --backend docker")
    require_git()
    source, extras = checkout.read_checkout(root), given_packages(packages)
    if out.exists() and not holds_plan_alone(out):
        raise FileExistsError(f"{out}: exists already; give --out a new folder")
    tools, usual = equipment(policy)
    limits = limits or usual
    answered = user is not nobody
    with (
        open_backend(backend) as opened,
        open_session(source, tools, opened, image, extras, answered) as (session, system),
    ):
        with open_policy(policy, system, tools.schemas, limits=limits, temperature=temperature, slots=1) as cast:
            turn_policy = cast(None, 0)
            try:
                request = plan.after(instruction) if plan else instruction
                conversation = converse(request, turn_policy, tools, session, limits, on_event, user=user)
            finally:
                segments = turn_policy.close()
        changes, others, lost = dict[str, Blob | None](), frozenset[str](), ""
        try:
            changes, others = checkout.changed(source, *carry_back(session.sandbox))
        except (SandboxDied, SandboxFailure, OSError) as error:  # the conversation is kept all the same
            lost = str(error)
    work = Work(path=out, source=source, conversation=conversation, changes=changes, others=others, lost=lost)
    keep(work, instruction, segments, policy)
    if plan:
        keep_plan(out, source.root, plan)
    return work


def write_plan(
    root: Path,
    instruction: str,
    planner: str,
    out: Path,
    *,
    price: tuple[float, float] | None = None,
    temperature: float = 1.0,
    seconds: float = 1800.0,
) -> TaskPlan:
    """Have a policy write a plan for a request on a user's repository, and keep it in the new folder `out`: `plan.md`, to edit,
    and `plan.json`, with its tokens and, at `price` (of a million tokens read, and written), its dollars.

    Raises ValueError for an empty plan and otherwise like `run_agent`; FileExistsError."""
    require_request(instruction)
    if out.exists():
        raise FileExistsError(f"{out}: exists already; give --out a new folder")
    source = checkout.read_checkout(root)
    texts = {shown(path): data.decode("utf-8", "replace") for path, data in source.files.items() if not unfit(data)}
    limits = replace(equipment(planner)[1], seconds=seconds)
    with open_policy(planner, "", [], limits=limits, temperature=temperature, slots=1) as cast:
        try:
            plan = make_plan(instruction, texts, cast(None, 0), seconds)
        except TimeIsUp:
            raise ValueError(f"--planner {planner}: no plan within {seconds:g} s") from None
    if not plan.text:
        why = "its plan is empty, or its context has no room for one"
        raise ValueError(f"--planner {planner}: {why}; name another planner, or write a plan for --plan FILE")
    dollars = (plan.read * price[0] + plan.written * price[1]) / 1e6 if price else None
    unread = len(source.files) - len(plan.files)
    plan = plan.model_copy(update={"policy": planner, "left_out": unread, "dollars": dollars})
    keep_plan(out, source.root, plan)
    return plan


def require_request(instruction: str) -> None:
    """Raise ValueError for a request that is empty or not Unicode."""
    if not instruction.strip():
        raise ValueError("agent: the instruction is empty; say what to do")
    if any("\ud800" <= letter <= "\udfff" for letter in instruction):
        raise ValueError("agent: the instruction is not UTF-8")
