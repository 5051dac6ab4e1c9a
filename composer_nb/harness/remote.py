"""Policies in external engines: vLLM and SGLang over HTTP. Requests have token ids; answers have ids and log-probabilities.

No turn is accepted from weights other than those that the engine reported at the start. References: the sources of vLLM 0.32
(`VLLM_SERVER_DEV_MODE=1 vllm serve DIR --logprobs-mode processed_logprobs`) and of SGLang 0.5.23.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.policy import Completion, ProviderFailure, Request, TimeIsUp, Trace

# Time limit of a turn, including its wait in the engine's queue.
TURN_S = 600.0
# Time limit of reporting the running version.
INFO_S = 30.0
# Token ids of a turn, their log-probabilities, and the versions that the reply names, if any.
EngineReply = tuple[list[int], list[float], Sequence[Any]]


class RemoteEngine(ABC):
    """An engine behind HTTP, for requests from several threads. It keeps each rollout's tokens and sends them with every turn,
    for the engine's prefix cache. It records no routes.

    Attributes:
        info: Paths of its calls: which version runs, and a turn.
    """

    kind = ""
    info = turns = ""

    def __init__(self, url: str, *, stop: frozenset[int], temperature: float = 1.0) -> None:
        """`stop`: tokens that end a turn. Raises ValueError for a wrong address, and ProviderFailure without an answer."""
        self.stop, self.temperature = stop, temperature
        try:
            self._endpoint = Endpoint(url=url, timeout_s=TURN_S)
        except ValueError:
            raise ValueError(f"{self.kind}:{url}: give an address such as {self.kind}:http://127.0.0.1:8000") from None
        self._where = f"{self.kind}:{url}"
        self._token_ids: dict[int, list[int]] = {}
        try:
            answer = replace(self._endpoint, timeout_s=INFO_S).ask("GET", self.info, time.monotonic() + INFO_S)
        except TimeIsUp:
            raise ProviderFailure(f"{self._where}/{self.info}: no answer within {INFO_S:g} s") from None
        if not isinstance(answer, dict) or answer.get("weight_version") is None:
            raise ProviderFailure(f"{self._where}/{self.info}: names no weight_version: {str(answer)[:200]}")
        self._label = str(answer["weight_version"])

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Draw a turn. `until`: a time of `time.monotonic`. Raises TimeIsUp after that time, ProviderFailure, and ValueError for
        a turn with a grammar."""
        if request.allowed:
            raise ValueError(f"{self._where}: a turn that is held to a grammar needs this project's own engine")
        prompt = [*self._token_ids.get(request.rollout, ()), *request.token_ids]
        temperature = self.temperature if request.temperature is None else request.temperature
        sampling = {"temperature": temperature, "top_p": request.top_p, "min_p": request.min_p}
        sampling |= {"top_k": request.top_k} if request.top_k else {}
        body = self._body(prompt, request.max_tokens, {**sampling, "stop_token_ids": sorted(self.stop)})
        try:
            answer = self._endpoint.ask("POST", self.turns, min(until, time.monotonic() + TURN_S), body)
            token_ids, logprobs, versions = self._read(answer)
        except TimeIsUp:
            if time.monotonic() >= until:
                raise
            raise ProviderFailure(f"{self._where}: no turn within {TURN_S:g} s") from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProviderFailure(f"{self._where}: an answer in another form: {error!r}") from None
        if problem := self._problem(token_ids, logprobs, versions, request.max_tokens):
            raise ProviderFailure(f"{self._where}: {problem}")
        self._token_ids[request.rollout] = prompt + token_ids
        numbers = [int(self._label) if self._label.isdecimal() else 0] * len(token_ids)
        return Completion(rollout=request.rollout, token_ids=token_ids, logprobs=logprobs, policy_versions=numbers)

    def release(self, rollout: int) -> Trace:
        self._token_ids.pop(rollout, None)
        return Trace()

    def _problem(self, ids: list[int], logprobs: list[float], versions: Sequence[Any], most: int) -> str:
        """Return why no engine of this version could have drawn a turn; empty if it could."""
        whole = all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids)
        finite = all(isinstance(x, float | int) and -math.inf < x <= 1e-6 for x in logprobs)
        if not (whole and finite and len(logprobs) == len(ids)):
            return "not one token id with its log-probability each"
        if not 0 < len(ids) <= most or (len(ids) < most and ids[-1] not in self.stop):
            return f"{len(ids)} tokens of {most}, without a stop token at the end"
        others = {str(version) for version in versions} - {self._label}
        return f"drawn from version {', '.join(sorted(others))}, not {self._label}" if others else ""

    @abstractmethod
    def _body(self, prompt: list[int], most: int, sampling: dict[str, Any]) -> Mapping[str, Any]: ...

    @abstractmethod
    def _read(self, answer: Any) -> EngineReply: ...


class VLLM(RemoteEngine):
    """`vllm serve`."""

    kind, info, turns = "vllm", "weight_info", "inference/v1/generate"

    def _body(self, prompt: list[int], most: int, sampling: dict[str, Any]) -> Mapping[str, Any]:
        sampling |= {"max_tokens": most, "logprobs": 0}
        # Its prefix cache outlives an update; the salt separates the entries of different versions.
        return {
            "token_ids": prompt,
            "sampling_params": sampling,
            "stream": False,
            "cache_salt": f"version-{self._label}",
        }

    def _read(self, answer: Any) -> EngineReply:
        choice = answer["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return choice["token_ids"], logprobs, [span["version"] for span in choice.get("weight_versions") or ()]


class SGLang(RemoteEngine):
    """`sglang.launch_server`."""

    kind, info, turns = "sglang", "model_info", "generate"

    def _body(self, prompt: list[int], most: int, sampling: dict[str, Any]) -> Mapping[str, Any]:
        return {"input_ids": prompt, "sampling_params": sampling | {"max_new_tokens": most}, "return_logprob": True}

    def _read(self, answer: Any) -> EngineReply:
        meta = answer["meta_info"]
        pairs = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
        versions = [meta["weight_version"]] if meta.get("weight_version") is not None else []
        return [token for token, _ in pairs], [logprob for _, logprob in pairs], versions


REMOTE: dict[str, type[RemoteEngine]] = {engine.kind: engine for engine in (VLLM, SGLang)}
