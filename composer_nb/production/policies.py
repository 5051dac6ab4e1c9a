"""Policies by their names on the command line."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer
from composer_nb.harness.agent.endpoint import LISTED_S, Endpoint, EndpointTurnPolicy, context_of
from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.agent.loop import LIMITS
from composer_nb.harness.agent.scripts import SCRIPTS, read_script
from composer_nb.harness.agent.summary import NO_SUMMARIES, SummarySettings
from composer_nb.harness.agent.turns import Limits, ScriptTurnPolicy, TokenTurnPolicy, TurnPolicy
from composer_nb.harness.environment import TO_CONVERT, Carried, carried, read_carried
from composer_nb.harness.policy import ProviderFailure
from composer_nb.harness.remote import REMOTE
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.production.planner import planner
from composer_nb.production.work import tools_for

if TYPE_CHECKING:
    from composer_nb.trainer.services.inference import Inference
    from composer_nb.trainer.versions.receiver import VersionRule

LOG = logging.getLogger(__name__)
KINDS = "DIR, openai:URL[#MODEL], vllm:URL#DIR, sglang:URL#DIR, scripted:NAME or scripted:FILE.json"
# Makes the turn policy of a conversation from its task, if it has one, and the number of the rollout.
Cast = Callable[[Task | None, int], TurnPolicy]


def parse_policy(name: str) -> tuple[str, str]:
    """Return the kind of a policy (`checkpoint`, `openai`, `vllm`, `sglang` or `scripted`) and the rest of its name. Raises
    ValueError."""
    kind, colon, rest = name.partition(":")
    if kind in REMOTE and not all(rest.rpartition("#")[::2]):
        raise ValueError(f"--policy {name}: write {kind}:URL#DIR, with the folder of its checkpoint")
    if colon and kind in ("openai", "scripted", *REMOTE):
        return kind, rest
    if colon and not Path(name).exists():
        raise ValueError(f"--policy {name}: no such kind; give {KINDS}")
    return "checkpoint", name


def trained_with(path: Path) -> Carried:
    """Return what the checkpoint in `path` was trained with (`carried`). Raises FileNotFoundError, ValueError."""
    from composer_nb.trainer.models.tokenizer import format_of

    if path.is_file():
        raise FileNotFoundError(f"{path}: {TO_CONVERT}")
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint directory (or give {KINDS})")
    return carried(path, format_of(path))


def known_training(policy: str) -> Carried | None:
    """Return what the checkpoint of a policy was trained with, also behind `composer-nb serve`; None for a script or an endpoint
    that does not tell. Raises like `trained_with` and `open_endpoint`."""
    kind, rest = parse_policy(policy)
    if kind == "openai":
        return served_with(rest)
    return None if kind == "scripted" else trained_with(Path(rest.rpartition("#")[2] if kind in REMOTE else rest))


def equipment(policy: str) -> tuple[ToolSet, Limits]:
    """Return the tools and limits of a policy in the product: those that its checkpoint was trained with (`known_training`), else
    the product's."""
    training = known_training(policy)
    return tools_for(training.tools if training else "cursor"), (training and training.limits) or LIMITS


@contextmanager
def open_policy(
    name: str,
    system: str,
    schemas: list[dict[str, Any]],
    *,
    limits: Limits = LIMITS,
    temperature: float = 1.0,
    seed: int = 0,
    slots: int = 8,
    summary: SummarySettings = NO_SUMMARIES,
) -> Iterator[Cast]:
    """Open a policy for conversations with these tools. A checkpoint summarises as it did in training, or as `summary` says.

    Raises ValueError for a wrong name, FileNotFoundError, and ProviderFailure for an endpoint that does not answer."""
    kind, rest = parse_policy(name)
    if kind == "scripted":
        yield _scripted(rest)
    elif kind == "openai":
        endpoint, served = open_endpoint(rest, temperature, min(LISTED_S, limits.seconds)), served_with(rest)
        if served and served.summary.trigger:
            LOG.warning("--policy %s: was trained to summarise, which it does from its folder alone", name)
        # The seed of a conversation is the number of its rollout, with which an engine of the same seed draws as from the folder.
        yield lambda task, rollout: EndpointTurnPolicy(
            endpoint, system, schemas, limits, seed=rollout + (seed << 24) if served else None
        )
    elif kind in REMOTE:
        from composer_nb.trainer.models.tokenizer import load_tokenizer

        url, _, folder = rest.rpartition("#")
        training = trained_with(Path(folder))
        chat = FORMATS[training.renderer](load_tokenizer(Path(folder), needed=()), schemas)
        there = REMOTE[kind](url, stop=chat.stop, temperature=temperature)
        with suppress(ProviderFailure, ValueError):  # a server need not list its model
            context = context_of(_listed(f"{url.rstrip('/')}/v1")[1])
            limits = replace(limits, tokens=min(limits.tokens, context or limits.tokens))
        summaries = summary if summary.trigger else training.summary
        yield lambda task, rollout: TokenTurnPolicy(chat, rollout, limits, there.ask, there.release, system, summaries)
    else:
        with open_engine(Path(name), slots=slots, tokens=limits.tokens, temperature=temperature, seed=seed) as engine:
            renderer, model_limits = engine.format(engine.tokenizer, schemas), replace(limits, tokens=engine.tokens)
            chosen = summary if summary.trigger else trained_with(Path(name)).summary
            yield lambda task, rollout: TokenTurnPolicy(
                renderer, rollout, model_limits, engine.shared.ask, engine.shared.release, system, chosen
            )


def identity(name: str) -> str:
    """Return a text that differs between policies of the same name: the hash of a script, the first model of an endpoint, sizes
    and times of a checkpoint's files. Raises like `open_policy`."""
    kind, rest = parse_policy(name)
    if kind == "openai":
        return open_endpoint(rest).model
    if kind in REMOTE:
        return rest
    if kind == "scripted":
        return hashlib.sha256(Path(rest).read_bytes()).hexdigest() if rest.endswith(".json") else rest
    files = sorted(Path(name).glob("*")) if Path(name).is_dir() else []
    return json.dumps([[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files])


def open_endpoint(name: str, temperature: float = 1.0, within_s: float = LISTED_S) -> Endpoint:
    """Open `URL[#MODEL]`; without a model, the first that the server lists. Raises ValueError, ProviderFailure."""
    model, entry = _listed(name, within_s)
    return Endpoint(url=name.partition("#")[0], model=model, temperature=temperature, context=context_of(entry))


def served_with(name: str) -> Carried | None:
    """Return what the model behind `URL[#MODEL]` was trained with, if its server says so, as ours does. Raises like
    `open_endpoint`."""
    training = _listed(name)[1].get("trained_with")
    try:
        return read_carried(json.dumps(training)) if training else None
    except ValueError as error:
        raise ValueError(f"--policy openai:{name}: what its server says of its training is damaged ({error})") from None


def _listed(name: str, within_s: float = LISTED_S) -> tuple[str, Mapping[str, Any]]:
    """Return the model of `URL[#MODEL]` and its entry in the server's list, which is empty if a model is named that the server
    does not list."""
    url, _, model = name.partition("#")
    try:
        listed = (Endpoint(url=url, retries=0) if model else Endpoint(url=url)).models(within_s)
    except ProviderFailure:
        if model:
            return model, {}
        raise
    if not (model := model or next(iter(listed), "")):
        raise ValueError(f"--policy openai:{url}: it lists no model; write openai:{url}#MODEL")
    return model, listed.get(model, {})


def _scripted(name: str) -> Cast:
    if name.endswith(".json"):
        script = read_script(Path(name))
        return lambda task, rollout: ScriptTurnPolicy(script)
    scripts = SCRIPTS | {"planner": planner}
    if name not in scripts:
        raise ValueError(f"--policy scripted:{name}: give scripted:{', scripted:'.join(scripts)}, scripted:FILE.json")

    def cast(task: Task | None, rollout: int) -> TurnPolicy:
        if task is None:
            raise ValueError(f"--policy scripted:{name}: plays the solution of a task; give scripted:FILE.json")
        return ScriptTurnPolicy(scripts[name](task))

    return cast


Service = TypeVar("Service")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngine(Generic[Service]):
    """A running checkpoint and its chat format.

    Attributes:
        format: Makes the renderer from the tokenizer and tools. The compact format has the tools of training where none are
            given.
        tokens: Maximum tokens of one conversation.
        training: What it was trained with.
    """

    shared: Service
    tokenizer: Tokenizer
    format: Callable[..., ChatRenderer]
    tokens: int
    training: Carried


def chat_of(path: Path) -> tuple[Carried, Tokenizer, Callable[..., ChatRenderer]]:
    """Return what a checkpoint was trained with, its tokenizer, and what makes its renderer. Raises like `trained_with`."""
    from composer_nb.trainer.models.tokenizer import load_tokenizer

    training = trained_with(path)

    def form(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None) -> ChatRenderer:
        if tools is None:
            tools = tools_for(training.tools).schemas if training.renderer == "compact" else []
        return FORMATS[training.renderer](tokenizer, tools)

    return training, load_tokenizer(path, needed=()), form


@contextmanager
def open_engine(
    path: Path,
    *,
    slots: int,
    tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    follow: str = "",
    rule: VersionRule | None = None,
    step_tokens: int = 4096,
    numerics: str = "float32",
) -> Iterator[OpenEngine[Inference]]:
    """Run a checkpoint. `tokens`: maximum of one conversation; less if the model reads less. `follow`: a store of weight versions
    of this model, whose newest undamaged one runs at any time, or the one that `rule` gives; as long as there is none, the
    checkpoint runs as version -1, else as 0.
    `step_tokens`: as in `Engine`. `numerics`: as `engine.numerics`. A head beside the checkpoint drafts (`drafts.py`), which
    changes nothing but the speed.

    Raises FileNotFoundError for a missing checkpoint, ValueError for one without a format for several tools or for versions of
    another model, WeightFault and StoreError for a store that cannot be used."""
    from composer_nb.trainer.drafts import DraftingEngine, load_draft
    from composer_nb.trainer.engine import Engine
    from composer_nb.trainer.models.checkpoint import load_pretrained
    from composer_nb.trainer.models.variants import ENGINES, as_engine
    from composer_nb.trainer.services.inference import Inference, Updates, following
    from composer_nb.trainer.versions.manifest import WeightFault

    name = next((engine_name for engine_name in ENGINES if engine_name == numerics), None)
    if name is None:
        raise ValueError(f"--numerics {numerics}: there are {', '.join(ENGINES)}")
    training, tokenizer, form = chat_of(path)
    stop, model = form(tokenizer, []).stop, as_engine(load_pretrained(path), name)
    most = min(tokens, model.config.max_position_embeddings)
    updates, version = None, 0
    if follow:
        updates = Updates(follow, f"serve-{socket.gethostname()}-{os.getpid()}", model.config, numerics=name)
        updates.rule = rule or updates.rule
        newest, version = updates.wanted(), -1
        while newest is not None and version < 0:
            try:
                model, version = updates.first(newest), newest
            except WeightFault as fault:  # an older one may do
                LOG.warning("%s is left out: %s", newest, fault)
                updates.left_out.add(newest)
                if (newest := updates.wanted()) is None:
                    raise
    size = {"slots": slots, "max_length": most, "step_tokens": step_tokens}
    options: dict[str, Any] = {"stop": stop, "temperature": temperature, "seed": seed, "version": version, **size}
    head = load_draft(path, model)
    engine = Engine(model, **options) if head is None else DraftingEngine(model, head, **options)
    with Inference(engine, updates) as service, following(service) if updates else nullcontext():
        yield OpenEngine(shared=service, tokenizer=tokenizer, format=form, tokens=most, training=training)
