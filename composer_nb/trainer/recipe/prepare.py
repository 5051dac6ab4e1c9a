"""The first stages, which make the tokenizer, the tasks and the demonstrations of a run.

Tasks are generated, or custom (`env.tasks`) and then dealt into held-out, tuning and RL tasks (`deal_tasks`).
"""

import hashlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

from composer_nb.harness.agent.compact import SPECIALS
from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.attempt import Agent, tools_of
from composer_nb.harness.blocking import CallTimeout
from composer_nb.harness.environment import TO_CONVERT, EnvSettings, Sandboxes, make_agent, tasks_of
from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.grading.plan import PLAN, plan_of
from composer_nb.harness.grading.recorded import guard_of
from composer_nb.harness.policy import Completion, Trace
from composer_nb.harness.rewards import own_reward
from composer_nb.harness.rollout import Kind, Rollout, Transcript, Turn
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.tasks.functions import parse_test_files
from composer_nb.harness.tasks.runtime import PACKAGES, PACKAGES_DIGEST, needs_network, start_sandbox
from composer_nb.harness.tasks.task import LOWERED, Task, load_tasks, save_tasks
from composer_nb.harness.tools.tool_call import call
from composer_nb.trainer.learning.data import GAP_TOKENS, demonstration_rows, gap_tokens, read_corpus, save_rows
from composer_nb.trainer.models.checkpoint import CheckpointSource
from composer_nb.trainer.models.tokenizer import load_tokenizer, train_tokenizer
from composer_nb.trainer.recipe.stages import Stages, stage
from composer_nb.trainer.settings import DataSettings, Settings, override

# Kinds of tasks that no policy trains on.
SCORED = ("heldout", "structures", "tune")
# Families of all demonstrations after the first chunk; the first chunk has a few of every family.
DEMONSTRATED = frozenset({"loop", "comp", "fn2", "slice"})
# Number of times that the tokenizer sees each conversation.
OFTEN = 20
# Number of tasks per chunk, the unit of work and of resumption in data generation.
CHUNK = 256


def check_inputs(settings: Settings) -> None:
    """Check the code, checkpoint, reward and tasks of a run before it starts. Raises ValueError, which names the setting, if one
    is unfit."""
    if settings.data.code != "stdlib":
        read_corpus(settings.data.code)
    settings.reward.tried()
    reduce(override, settings.services.changes.values(), settings).require_used()
    model, renderer = settings.model, settings.env.renderer
    if not model.start and renderer != "compact":
        raise ValueError(f"env.renderer={renderer!r}: only a checkpoint's tokenizer can have it; set model.start")
    if model.start and not model.folder.is_dir():
        raise ValueError(f"model.start={model.start!r}: {TO_CONVERT if model.folder.is_file() else 'no such folder'}")
    if model.start:
        settings.resolve()
        try:
            tokenizer = load_tokenizer(model.folder, FORMATS[renderer].tokens)
            source = CheckpointSource.open(model.folder)
            if tokenizer.get_vocab_size() > source.config.vocab_size:
                raise ValueError(f"its tokenizer has more than {source.config.vocab_size} tokens")
            if settings.midtrain.infill.share:
                gap_tokens(tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"model.start={model.start!r} with env.renderer={renderer!r}: {error}") from None
    if settings.env.path:
        deal_tasks(tasks := own_tasks(settings.env), settings.data)
        try_reward(settings, tasks[0])
        if model.start:
            agent = make_agent(settings.env, tokenizer, settings.limits)
            for task in tasks:
                agent.begin(task)
        try_sandboxes(tasks, settings.env)


@stage("tokenizer")
def make_tokenizer(s: Stages, info: dict[str, Any]) -> None:
    """Train the tokenizer on half of the code and on an expert's conversations about separate tasks (`_conversations`), or copy
    the checkpoint's."""
    if not s.ranks.first:
        return
    if s.settings.model.start:
        shutil.copyfile(s.settings.model.folder / "tokenizer.json", s.run.path / "data" / "tokenizer.json")
        return
    corpus = read_corpus(s.settings.data.code)
    texts = _conversations(s) * OFTEN
    infill_tokens = GAP_TOKENS[0] if s.settings.midtrain.infill.share else ()
    tokenizer = train_tokenizer([*corpus.train[::2], *texts], s.settings.tokenizer.vocab_size, infill_tokens)
    tokenizer.save(str(s.run.path / "data" / "tokenizer.json"))
    write_json(s.run.path / "data" / "corpus.json", {"digest": corpus.digest, "files": corpus.names})
    info |= {"files": len(corpus.names), "corpus_digest": corpus.digest}


def _conversations(s: Stages) -> list[str]:
    """Return the texts between special tokens of demonstrations that are used nowhere else."""
    settings = s.settings
    task_count = min(128, settings.data.mistaken_demonstrations)
    if settings.env.path or not task_count:
        return []
    byte_tokenizer = train_tokenizer([], len(SPECIALS) + 256)  # one token per byte: there is no other tokenizer yet
    limits = replace(settings.limits, tokens=16 * settings.limits.tokens, turn_tokens=16 * settings.limits.turn_tokens)
    agent = make_agent(settings.env, byte_tokenizer, limits, s.sandboxes)
    tasks = list(_generated(s, f"{settings.seed} tokenizer", Chunk("mistaken", 0, task_count)))
    demonstrations = settings.env.generator.demonstrations(
        tasks, agent, s.sandboxes, settings.seed, settings.data.mistake_rate
    )
    segments = (segment for d in demonstrations for segment in d.rollout.segments)
    texts = (byte_tokenizer.decode(segment.token_ids.tolist(), skip_special_tokens=False) for segment in segments)
    special_tokens = re.compile("|".join(map(re.escape, SPECIALS)))
    return [part for text in texts for part in special_tokens.split(text) if part]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the data: `count` tasks of a kind, with its own seed. `own_tasks` are custom tasks; without them, tasks are
    generated."""

    kind: str
    number: int
    count: int
    heldout: bool = False
    mistake_rate: float | None = None
    own_tasks: tuple[Task, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number:03d}"


def chunks(settings: Settings, dealt: Mapping[str, Sequence[Task]] | None = None) -> list[Chunk]:
    """Return all chunks of data of a run. For `dealt` custom tasks these are demonstrations only, at most one per task."""
    d, result = settings.data, list[Chunk]()
    for kind, max_count, heldout, mistake_rate in (
        ("heldout", d.heldout_tasks, False, None),
        ("structures", d.structure_tasks, True, None),
        ("tune", d.tune_tasks, True, 0.0 if d.demonstrations or d.mistaken_demonstrations else None),
        ("rl", d.rl_tasks, False, None),
        ("mistaken", d.mistaken_demonstrations, False, d.mistake_rate),
        ("clean", d.demonstrations, False, 0.0),
    ):
        custom = () if dealt is None else tuple(dealt["tune" if kind == "tune" else "rl"][:max_count])
        count = max_count if dealt is None else len(custom) * (mistake_rate is not None)
        for number, start_index in enumerate(range(0, count, CHUNK)):
            tasks = custom[start_index : start_index + CHUNK]
            result.append(Chunk(kind, number, min(CHUNK, count - start_index), heldout, mistake_rate, tasks))
    return result


@stage("data")
def make_data(s: Stages, info: dict[str, Any]) -> None:
    """Make tasks and demonstrations, dealt over ranks by chunk, and check that no held-out task leaks into training."""
    agent, folder = s.agent(), s.run.path / "data"
    dealt = deal_tasks(own_tasks(s.settings.env), s.settings.data) if s.settings.env.path else None
    rank_chunks = chunks(s.settings, dealt)[s.ranks.rank :: s.ranks.world]
    for index, chunk in enumerate(rank_chunks):
        if not (folder / f"{chunk.name}.prints.json").is_file():
            _make_chunk(s, agent, chunk, folder)
        if index % 4 == 3:
            progress = (index + 1) / len(rank_chunks)
            s.say(f"data: {progress:.0%} of {s.settings.data.demonstrations} demonstrations and more")
    s.ranks.barrier()
    if s.ranks.first:
        if ids := unguarded((dealt or {}).get("rl", [])):
            s.say(
                f"data: env.tasks={s.settings.env.tasks}: code that only claims to be right can pass {len(ids)} of RL's "
                f"tasks, so RL may teach it; take out: {', '.join(ids[:5])}{', …' * (len(ids) > 5)}"
            )
        for kind, tasks in (dealt or {}).items():
            save_tasks(tasks, folder / f"{kind}.jsonl")
            info.setdefault("tasks", {})[kind] = len(tasks)
        info |= _drop_leaks(s, folder) if dealt is None else {"dropped": {}}


def _make_chunk(s: Stages, agent: Agent, chunk: Chunk, folder: Path) -> None:
    """Write a chunk's tasks, the expert's demonstrations of them, and last the prints that mark it as done, to `folder`. Raises
    ValueError if demonstrations are due and the expert solves none of the tasks."""
    seed, generator = f"{s.settings.seed} {chunk.name}", s.settings.env.generator
    if chunk.kind in SCORED:
        seed = chunk.name  # the same questions for every seed, so that scores compare
    tasks = list(chunk.own_tasks) or list(_generated(s, seed, chunk))
    if chunk.mistake_rate is not None:
        solvable = [task for task in tasks if generator.shows(task, s.settings.env.toolset)]
        demonstrations = generator.demonstrations(solvable, agent, s.sandboxes, s.settings.seed, chunk.mistake_rate)
        to_learn = [d.rollout for d in demonstrations if d.grade.passed or not (chunk.own_tasks or s.settings.searched)]
        if not to_learn:
            raise ValueError(
                f"data: the expert solves none of {len(tasks)} tasks ({chunk.kind}) with env.tools={s.settings.env.tools} and "
                f"limits.tokens={s.settings.limits.tokens}; raise limits.*, or leave out midtrain and sft"
            )
        context_weight = s.settings.midtrain.context_weight
        rows = [row for rollout in to_learn for row in demonstration_rows(rollout, context_weight)]
        save_rows(rows, folder / f"{chunk.name}.npz")
    if chunk.kind in (*SCORED, "rl"):
        save_tasks(tasks, folder / f"{chunk.name}.jsonl")
    prints = set[str]() if chunk.own_tasks else generator.prints(tasks)
    write_json(folder / f"{chunk.name}.prints.json", sorted(prints))


def _generated(s: Stages, seed: str, chunk: Chunk) -> Iterator[Task]:
    """Return generated tasks for a chunk: of single functions at that `data.level` or for clean demonstrations; those of RL with
    their limit of turns."""
    data, generate = s.settings.data, s.settings.env.generator.generate
    options: dict[str, Any] = {"heldout": chunk.heldout, "executor": s.sandboxes.functions}
    if data.level == "functions" or chunk.kind == "clean":
        return generate(seed, chunk.count, level="functions", **options)
    families = DEMONSTRATED if chunk.kind == "mistaken" and chunk.number else frozenset[str]()
    tasks = generate(seed, chunk.count, described=data.told, families=families, kinds=data.kinds, **options)
    turn_limit = {LOWERED["turns"]: str(data.rl_turns)} if chunk.kind == "rl" and data.rl_turns else {}
    return (task.model_copy(update={"metadata": task.metadata | turn_limit}) for task in tasks)


def _drop_leaks(s: Stages, folder: Path) -> dict[str, Any]:
    """Join the chunks of tasks. Drop held-out tasks that occur in training, tasks of new structures whose structure does, and
    repeated tasks. Raises ValueError if too few remain."""
    generator = s.settings.env.generator
    prints_files = [path for path in folder.glob("*.prints.json") if not path.name.startswith(SCORED)]
    training_prints = {print_ for path in prints_files for print_ in json.loads(path.read_text())}
    tasks_by_kind: dict[str, list[Task]] = {}
    keys: set[tuple[str, str]] = set()
    dropped: Counter[str] = Counter()
    for kind in (*SCORED, "rl"):
        candidates = [task for path in sorted(folder.glob(f"{kind}-*.jsonl")) for task in load_tasks(path)]
        tasks_by_kind[kind] = []
        for task in candidates:
            key = generator.key(task)
            is_leaked = kind != "rl" and generator.leaks(task, training_prints, structure=kind != "heldout")
            is_new = key not in keys
            keys.add(key)
            if is_new and not is_leaked:
                tasks_by_kind[kind].append(task)
        dropped[kind] = len(candidates) - len(tasks_by_kind[kind])
        if tasks_by_kind[kind]:
            save_tasks(tasks_by_kind[kind], folder / f"{kind}.jsonl")
        elif kind != "structures" or s.settings.data.structure_tasks:
            raise ValueError(f"no {kind} task is left; raise data.{kind.removesuffix('s')}_tasks")
    needed = s.settings.prompts_needed
    if len(tasks_by_kind["rl"]) < needed:
        raise ValueError(
            f"rl.steps × rl.prompts × (1 + rl.refill) = {needed} tasks are needed, no task is trained on twice, and only "
            f"{len(tasks_by_kind['rl'])} are there; raise data.rl_tasks or lower rl.steps"
        )
    return {"tasks": {kind: len(tasks) for kind, tasks in tasks_by_kind.items()}, "dropped": dict(dropped)}


# Custom tasks


def own_tasks(env: EnvSettings) -> list[Task]:
    """Return the tasks of `env.tasks`. Raises ValueError for tasks unfit for training with `env.tools`."""
    tasks = tasks_of(env.tasks, env.own) if env.own else load_tasks(env.path or Path())
    for task in tasks:
        tools_of(task, env.toolset)
        try:
            if task.grader == "script":
                raise ValueError("has the grader `script`, which is for evaluation alone")
            if task.grader == "pytest" and PLAN not in task.metadata:
                raise ValueError("has no plan of its tests; composer-nb tasks make makes one")
            if task.grader == "pytest":
                plan_of(task)
        except ValueError as error:
            raise ValueError(f"env.tasks: task {task.id}: {error}") from None
    return tasks


def try_reward(settings: Settings, task: Task) -> None:
    """Score two made-up attempts at a task with the reward of a custom environment, if it has one: one that solves the task in
    one turn, and one that does nothing. In a terminal, the reward may stop in a debugger and has no time limit. Raises ValueError
    if it fails, or takes `limits.seconds`."""
    timed_reward = settings.env.reward_function(settings.limits.seconds)
    if timed_reward is None:
        return
    in_terminal = sys.stdin is not None and sys.stdin.isatty()
    reward_function = cast(Any, settings.env.own).reward if in_terminal else timed_reward
    transcript = Transcript()
    transcript.read([0, 1], Kind.PROMPT)
    transcript.wrote(Completion(rollout=0, token_ids=[2], logprobs=[-1.0], policy_versions=[0]), [Kind.TOOL_CALL])
    turns = (Turn(call=call("finish").json, observation=""),)
    rollout_fields: dict[str, Any] = {"task_id": task.id, "segments": (transcript.segment(Trace()),), "turns": turns}
    test_ids = [test.id for test in parse_test_files(task.tests)] if task.grader == "functions" else [*task.tests]
    for files, is_solved in ((task.files | task.solution, True), (task.files, False)):
        rollout = Rollout(files=files, before=task.files, stop="finished", seconds=1.0, **rollout_fields)
        grade = Grade(status="graded", tests=dict.fromkeys(test_ids, is_solved))
        try:
            own_reward(reward_function, Attempt(task=task, rollout=rollout, grade=grade))
        except (ValueError, CallTimeout) as error:
            raise ValueError(f"{error} (on a made-up attempt, before the run)") from None


def try_sandboxes(tasks: Iterable[Task], env: EnvSettings) -> None:
    """Open, for one task of each kind (grader, image, folder of packages), what it runs in: the executor of functions, a sandbox,
    or both. Raises ValueError if the executor or `env.backend` cannot provide it."""
    in_plain_files = not env.toolset.needs_sandbox
    metadata_keys = ("image", PACKAGES, PACKAGES_DIGEST)
    task_by_kind = {(task.grader, needs_network(task), *map(task.metadata.get, metadata_keys)): task for task in tasks}
    with Sandboxes(env) as sandboxes:
        for task in task_by_kind.values():
            try:
                if task.grader == "functions":
                    _ = sandboxes.functions
                if task.grader != "functions" or not in_plain_files:
                    start_sandbox(task, sandboxes.backend).destroy()
            except (ValueError, SandboxUnavailable, SandboxFailure) as error:
                raise ValueError(f"env.tasks with env.backend={env.backend}: {error}") from None


def unguarded(tasks: Iterable[Task]) -> list[str]:
    """Return the ids of tasks from `tasks make` for which it found no guard."""
    return [task.id for task in tasks if {PLAN, "fail_to_pass"} <= {*task.metadata} and guard_of(task).by == "none"]


def deal_tasks(tasks: Sequence[Task], data: DataSettings) -> dict[str, list[Task]]:
    """Deal tasks into `heldout`, `tune` and `rl`, in the order of the hashes of their ids.

    Tasks that share an instruction, a place or a changed function stay in one group, on one side. At most a fifth is held out and
    a tenth is for tuning, but at least the smallest group. Raises ValueError if there are fewer than three groups.
    """
    groups: list[tuple[set[str], list[Task]]] = []
    for task in sorted(tasks, key=lambda task: hashlib.sha256(task.id.encode()).digest()):
        marks, group_tasks = set(_marks(task)), [task]
        for overlapping in [group for group in groups if not marks.isdisjoint(group[0])]:
            groups.remove(overlapping)
            marks, group_tasks = marks | overlapping[0], overlapping[1] + group_tasks
        groups.append((marks, group_tasks))
    if len(groups) < 3:
        raise ValueError(f"env.tasks: at least 3 tasks must share no instruction or place; {len(groups)} do")
    undealt = [group for _, group in groups]
    tasks_by_kind: dict[str, list[Task]] = {}
    for kind, max_tasks, reserved_groups in (("heldout", data.heldout_tasks, 2), ("tune", data.tune_tasks, 1)):
        room = min(max_tasks, len(tasks) // (5 if kind == "heldout" else 10))
        tasks_by_kind[kind] = []
        while len(undealt) > reserved_groups and (len(min(undealt, key=len)) <= room or not tasks_by_kind[kind]):
            group = next((group for group in undealt if len(group) <= room), min(undealt, key=len))
            undealt.remove(group)
            tasks_by_kind[kind] += group
            room -= len(group)
    return {**tasks_by_kind, "rl": [task for group in undealt for task in group]}


def _marks(task: Task) -> Iterator[str]:
    """Yield marks that tasks on two sides must not share. One is the structure of a generated task, or the instruction of
    another. Others are the places of a made task, or else the parts, from one `def` to the next, that the solution writes."""
    structure = task.metadata.get("structure")
    yield f"structure {structure}" if structure else f"instruction {task.instruction}"
    places = re.findall(r'"([^"]+)"', task.metadata.get("places", ""))
    yield from (f"place {task.metadata.get('repository')} {location}" for location in places)
    for path, text in () if places else task.solution.items():
        functions = [function.strip() for function in re.split(r"\n(?=[ \t]*(?:async )?def )", text)]
        yield from [function for function in functions if function not in task.files.get(path, "")] or [text]
