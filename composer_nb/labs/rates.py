"""The measured speed of a machine, what a step of RL then costs, and a Ray cluster of such machines.

scripts/bench/rates_bench.py → MachineRates ⇄ JSON → plan --measured FILE: schedules at the middle, lower and upper rates
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from getpass import getuser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from composer_nb.labs.planning import Durations, SimulatedLoad, simulate
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services.cluster import ROLE, ROLES

# Probability with which the interval of a median covers it, at least.
COVERAGE = 0.95
PORT = 6379
# Where Ray reads the token without which it refuses a connection.
TOKEN = "~/.ray/auth_token"


class Rate(NamedTuple):
    """A median with the bounds of its interval."""

    middle: float
    lower: float
    upper: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Rate:
        """Return the median and the narrowest pair of order statistics that covers it with COVERAGE, whatever the distribution:
        the k-th from below and from above miss it with 2 · P(Binomial(n, ½) < k). Raises ValueError for too few samples."""
        ordered = sorted(samples)
        count, missed, k = len(ordered), 0.0, 0
        while (missed := missed + 2 * math.comb(count, k) / 2**count) <= 1 - COVERAGE:
            k += 1
        if not k:
            raise ValueError(f"--repeats {count}: an interval of {COVERAGE:.0%} needs at least 6")
        return cls(float(np.median(ordered)), ordered[k - 1], ordered[-k])


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What one process of a run does on this machine: one torch thread, or one GPU.

    Attributes:
        places: Rollouts that the engine decoded at a time.
        decode: Sampled tokens a second, over all places.
        train: Tokens a second of a training step, with its optimizer.
        matmul: Floating-point operations a second of a large product in the trainer's precision.
        mfu: Model FLOPs utilisation: the operations of `train` as a share of `matmul`, round by round.
    """

    chip: str
    torch: str
    date: str
    weights: int
    places: int
    decode: Rate
    train: Rate
    matmul: Rate
    mfu: Rate

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> MachineRates:
        """Read what `write` wrote. Raises ValueError that names the option for anything else."""
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            values |= {name: Rate(*map(float, values[name])) for name in ("decode", "train", "matmul", "mfu")}
            if not all(rate > 0 for name in ("decode", "train") for rate in values[name]):
                raise ValueError("a rate of 0")
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"--measured {path}: {error!r}; scripts/bench/rates_bench.py writes such a file") from None

    def loads(
        self, durations: Durations, batch: int, *, workers: int, ranks: int, rollout_tokens: int, publish_s: float
    ) -> list[SimulatedLoad]:
        """Return the load of so many engines and trainers at the middle, lower and upper rates. A place decodes its share of the
        engine's tokens, and time in tools is not counted. A trained rollout has `rollout_tokens`; 0: as many as sampled."""
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: must be at least 1")
        tokens = batch * (rollout_tokens or float(durations.tokens.mean()))
        return [
            SimulatedLoad(
                durations=replace(
                    durations, seconds=np.multiply(durations.tokens, self.places / decode, dtype=np.float64)
                ),
                workers=workers,
                capacity=self.places,
                train_s=tokens / (ranks * train),
                publish_s=publish_s,
            )
            for decode, train in zip(self.decode, self.train, strict=True)
        ]

    def table(self) -> str:
        """Return the rates in Markdown."""
        lines = [f"| {self.chip}, {self.weights:,} weights | median | interval |", "|---|---|---|"]
        for name, label in (("decode", "decoded tokens / s"), ("train", "trained tokens / s"), ("matmul", "GFLOP / s")):
            middle, *bounds = (x / (1e9 if name == "matmul" else 1) for x in getattr(self, name))
            lines.append(f"| {label} | {middle:,.0f} | {bounds[0]:,.0f} to {bounds[1]:,.0f} |")
        return "\n".join([*lines, "| MFU | {:.1%} | {:.1%} to {:.1%} |".format(*self.mfu)])


def step_cost(schedule: Schedule, loads: Sequence[SimulatedLoad], hourly: float) -> dict[str, Any]:
    """Simulate a schedule at the middle, lower and upper rates. Return samples a second, seconds and dollars of a step, each with
    its bounds, and the staleness at the middle rates. `hourly`: price of all machines."""
    results = [simulate(schedule, load) for load in loads]
    samples_s = [result["samples_s"] for result in results]
    step_s = [result["seconds"] / schedule.steps for result in results]
    dollars = [hourly / 3600 * seconds for seconds in step_s]
    named = {"samples_s": samples_s, "step_s": step_s, "dollars_step": dollars}
    spans = {name: Rate(values[0], min(values), max(values)) for name, values in named.items()}
    return spans | {name: results[0][name] for name in ("of_optimum", "staleness_total", "staleness_max")}


def ray_cluster(hosts: Sequence[str], ranks: int) -> dict[str, Any]:
    """Return a configuration for `ray up`: trainers on the first `ranks` hosts, of which the first is the head, and engines with
    their environments on the others. All need the token of the machine that starts them. Raises ValueError for hosts that are not
    different IPv4 addresses."""
    for host in hosts:
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise ValueError(f"--hosts: {host!r} is not an IPv4 address, by which a host knows its role") from None
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"--hosts {','.join(hosts)}: give each host once")
    trainer, engine = (json.dumps(dict.fromkeys(roles, ROLE)) for roles in (ROLES[:1], ROLES[1:]))
    trainers = "|".join(f'*" {host} "*' for host in hosts[:ranks])
    roles = f"case \" $(hostname -I) \" in {trainers}) roles='{trainer}';; *) roles='{engine}';; esac"
    start = f'{roles}; RAY_AUTH_MODE=token ray start --resources="$roles"'
    return {
        "cluster_name": "composer-nb",
        "max_workers": len(hosts) - 1,
        "provider": {"type": "local", "head_ip": hosts[0], "worker_ips": list(hosts[1:])},
        "auth": {"ssh_user": getuser()},
        "file_mounts": {TOKEN: TOKEN},
        "head_start_ray_commands": [
            "ray stop",
            f"{start} --head --port={PORT} --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": ["ray stop", f"{start} --address=$RAY_HEAD_IP:{PORT}"],
    }
