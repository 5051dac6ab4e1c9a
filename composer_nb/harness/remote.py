"""Policies in external engines: vLLM and SGLang over HTTP. Requests have token ids; answers have ids and log-probabilities.

    prepare_update   names the folder of a version, on a disk that the engine reads
    commit_update    no requests ── turns under way end ── pause ── load ── resume ── which version runs? ── requests

An engine that has not confirmed a version gets no requests for it, and no turn is drawn from two versions. References: the
sources of vLLM 0.32 (`VLLM_SERVER_DEV_MODE=1 vllm serve DIR --logprobs-mode processed_logprobs`) and of SGLang 0.5.23.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.plain import Positive, require_ranges
from composer_nb.harness.policy import Completion, ProviderFailure, Request, TimeIsUp, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits in seconds. Raises ValueError for a limit that is not positive and finite."""

    turn_s: Positive = 600.0
    """Limit of a turn, including its wait in the engine's queue."""
    drain_s: Positive = 600.0
    """Limit until the turns under way have ended, before an update."""
    pause_s: Positive = 30.0
    """Limit of pausing, of resuming, and of reporting the running version."""
    load_s: Positive = 900.0
    """Limit of loading a version from disk."""

    def __post_init__(self) -> None:
        require_ranges(self, "timeouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReply:
    """A turn as an engine returned it."""

    token_ids: list[int]
    logprobs: list[float]
    versions: Sequence[Any]
    """Versions that the reply names; empty if it names none."""


class RemoteEngine(ABC):
    """An engine behind HTTP, for requests from several threads. It keeps each rollout's tokens and sends them with every turn,
    for the engine's prefix cache. It records no routes."""

    kind = ""
    pauses = resumes = tells = generates = checks = ""
    """Paths of its calls."""
    pausing: Mapping[str, Any] = {}
    """Body of the call that pauses."""

    def __init__(
        self, url: str, *, stop: frozenset[int], temperature: float = 1.0, timeouts: Timeouts | None = None
    ) -> None:
        """`stop`: tokens that end a turn. Raises ValueError for a wrong address, and ProviderFailure without an answer."""
        self.stop, self.temperature, self.timeouts = stop, temperature, timeouts or Timeouts()
        try:
            self._endpoint = Endpoint(url=url, timeout_s=self.timeouts.turn_s)
        except ValueError:
            raise ValueError(f"{self.kind}:{url}: give an address such as {self.kind}:http://127.0.0.1:8000") from None
        self._held: dict[int, list[int]] = {}
        self._prepared: dict[int, Path] = {}
        self._gate = threading.Condition()
        self._under_way = 0
        self._label = self._tell()
        self._version: int | None = int(self._label) if self._label.isdecimal() else 0
        """The version that the engine has confirmed; None if it has confirmed none."""

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Draw a turn. `until`: a time of `time.monotonic`. Raises TimeIsUp after that time, and ProviderFailure."""
        with self._gate:
            version, label = self._version, self._label
            if version is None:
                raise ProviderFailure(f"{self._where} has not confirmed its weights: it gets no requests")
            self._under_way += 1
        try:
            ids = [*self._held.get(request.rollout, ()), *request.token_ids]
            body = self._body(ids, request, self._drawn(request), label)
            limit = time.monotonic() + self.timeouts.turn_s
            found = self._call(self.generates, body, self.timeouts.turn_s, min(until, limit))
            reply = self._read(found)
        except TimeIsUp:
            if time.monotonic() >= until:
                raise
            raise ProviderFailure(f"{self._where}: no turn within {self.timeouts.turn_s:g} s") from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProviderFailure(f"{self._where}: an answer in another form: {error!r}") from None
        finally:
            with self._gate:
                self._under_way -= 1
                self._gate.notify_all()
        self._check(reply, request, label)
        drawn = reply.token_ids
        self._held[request.rollout] = ids + drawn
        versions = [version] * len(drawn)
        return Completion(rollout=request.rollout, token_ids=drawn, logprobs=reply.logprobs, policy_versions=versions)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Draw turns in parallel. Raises like `ask`."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max(len(requests), 1)) as pool:
            return list(pool.map(self.ask, requests))

    def release(self, rollout: int) -> Trace:
        self._held.pop(rollout, None)
        return Trace()

    def pause(self) -> None:
        self._call(self.pauses, self.pausing, self.timeouts.pause_s)

    def resume(self) -> None:
        self._call(self.resumes, {}, self.timeouts.pause_s)

    def weight_info(self) -> tuple[str, str]:
        """Return the running version as the engine reports it, and a checksum, equal for equal weights."""
        sums = self._call(self.checks, {"action": "checksum"}, self.timeouts.load_s)
        return self._tell(), hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()

    def prepare_update(self, version: int, folder: Path) -> None:
        """Name the folder of a version. Raises FileNotFoundError if it does not exist."""
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder}: version {version} is not here: no config.json")
        self._prepared[version] = folder.resolve()

    def commit_update(self, version: int) -> str:
        """Have the engine run a prepared version, and return the checksum of its weights. Raises ValueError for a version that
        was not prepared, and ProviderFailure. After one during or after the load, no requests are sent until an update
        succeeds."""
        if version not in self._prepared:
            raise ValueError(f"version {version} was not prepared: call prepare_update first")
        with self._gate:
            before, self._version = self._version, None
            if not self._gate.wait_for(lambda: not self._under_way, self.timeouts.drain_s):
                self._version = before
                raise ProviderFailure(
                    f"{self._where}: turns did not end within timeouts.drain_s={self.timeouts.drain_s:g}"
                )
        self.pause()
        try:
            self._load(self._prepared[version], str(version))
        finally:
            self.resume()
        label, checksum = self.weight_info()
        if label != str(version):
            raise ProviderFailure(f"{self._where} runs version {label!r}, not {version}: it gets no requests")
        with self._gate:
            self._version, self._label = version, label
        self._prepared = {number: path for number, path in self._prepared.items() if number > version}
        return checksum

    @property
    def _where(self) -> str:
        return f"{self.kind}:{self._endpoint.url}"

    def _call(self, path: str, body: Mapping[str, Any] | None, within_s: float, until: float | None = None) -> Any:
        """Return the answer to a request; a GET if `body` is None. Raises TimeIsUp only if `until` is given."""
        method, endpoint = ("GET" if body is None else "POST"), replace(self._endpoint, timeout_s=within_s)
        try:
            found = endpoint.ask(method, path, time.monotonic() + within_s if until is None else until, body)
        except TimeIsUp:
            if until is not None:
                raise
            raise ProviderFailure(f"{self._where}/{path}: no answer within {within_s:g} s") from None
        if isinstance(found, dict) and found.get("success") is False:
            raise ProviderFailure(f"{self._where}/{path}: refused: {str(found.get('message'))[:300]}")
        return found

    def _tell(self) -> str:
        found = self._call(self.tells, None, self.timeouts.pause_s)
        if not isinstance(found, dict) or found.get("weight_version") is None:
            raise ProviderFailure(f"{self._where}/{self.tells}: names no weight_version: {str(found)[:200]}")
        return str(found["weight_version"])

    def _drawn(self, request: Request) -> dict[str, Any]:
        """Return the parameters with the same names in both engines. Raises ValueError for a turn with a grammar."""
        if request.allowed:
            raise ValueError(f"{self._where}: a turn that is held to a grammar needs this project's own engine")
        temperature = self.temperature if request.temperature is None else request.temperature
        drawn = {"temperature": temperature, "top_p": request.top_p, "min_p": request.min_p}
        return drawn | ({"top_k": request.top_k} if request.top_k else {}) | {"stop_token_ids": sorted(self.stop)}

    def _check(self, reply: EngineReply, request: Request, label: str) -> None:
        """Raise ProviderFailure for a turn that no engine of this version could have drawn."""
        ids, count = reply.token_ids, len(reply.token_ids)
        whole = all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids)
        finite = all(isinstance(x, float | int) and -math.inf < x <= 1e-6 for x in reply.logprobs)
        if not (whole and finite and len(reply.logprobs) == count):
            raise ProviderFailure(f"{self._where}: not one token id with its log-probability each")
        if not 0 < count <= request.max_tokens or (count < request.max_tokens and ids[-1] not in self.stop):
            raise ProviderFailure(
                f"{self._where}: {count} tokens of {request.max_tokens}, without a stop token at the end"
            )
        if other := {str(each) for each in reply.versions} - {label}:
            raise ProviderFailure(f"{self._where}: drawn from version {', '.join(sorted(other))}, not {label}")

    @abstractmethod
    def _load(self, folder: Path, label: str) -> None: ...

    @abstractmethod
    def _body(self, ids: list[int], request: Request, drawn: dict[str, Any], label: str) -> Mapping[str, Any]: ...

    @abstractmethod
    def _read(self, found: Any) -> EngineReply: ...


class VLLM(RemoteEngine):
    """`vllm serve`, which reloads from disk on all its workers."""

    kind = "vllm"
    pauses, resumes, tells, checks = "pause?mode=keep", "resume", "weight_info", "weight_checker"
    generates = "inference/v1/generate"

    def _load(self, folder: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("collective_rpc", body, self.timeouts.load_s)
        self._call("update_weight_version", {"new_version": label}, self.timeouts.pause_s)

    def _body(self, ids: list[int], request: Request, drawn: dict[str, Any], label: str) -> Mapping[str, Any]:
        sampling = {**drawn, "max_tokens": request.max_tokens, "logprobs": 0}
        # Its prefix cache outlives an update; the salt separates the entries of different versions.
        return {"token_ids": ids, "sampling_params": sampling, "stream": False, "cache_salt": f"version-{label}"}

    def _read(self, found: Any) -> EngineReply:
        choice = found["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        versions = [span["version"] for span in choice.get("weight_versions") or ()]
        return EngineReply(token_ids=choice["token_ids"], logprobs=logprobs, versions=versions)


class SGLang(RemoteEngine):
    """`sglang.launch_server`, which flushes its cache when it loads."""

    kind = "sglang"
    pauses, resumes, tells, checks = "pause_generation", "continue_generation", "model_info", "weights_checker"
    generates, pausing = "generate", {"mode": "retract"}

    def _load(self, folder: Path, label: str) -> None:
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": True, "keep_pause": True}
        self._call("update_weights_from_disk", body, self.timeouts.load_s)

    def _body(self, ids: list[int], request: Request, drawn: dict[str, Any], label: str) -> Mapping[str, Any]:
        sampling = {**drawn, "max_new_tokens": request.max_tokens}
        return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}

    def _read(self, found: Any) -> EngineReply:
        told = found["meta_info"]
        pairs = [(token, logprob) for logprob, token, *_ in told["output_token_logprobs"]]
        named = [told["weight_version"]] if told.get("weight_version") is not None else []
        return EngineReply(
            token_ids=[token for token, _ in pairs], logprobs=[each for _, each in pairs], versions=named
        )


REMOTE: dict[str, type[RemoteEngine]] = {each.kind: each for each in (VLLM, SGLang)}
