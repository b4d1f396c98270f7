# SPDX-License-Identifier: Apache-2.0
"""Settings of runs that outgrow one process: trainers that share the weights, engines beside them."""

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from logra.config import check_section, setting

_ADDRESS, _URL = r".+:\d+", r"https?://[^/\s]+(/\S*)?"


@dataclass(frozen=True)
class ParallelSettings:
    """Several processes, started by `logra train --processes N` or torchrun."""

    shard: int = setting(
        0, "Processes among which weights are divided, each such group a replica of the others; 0: all.", least=0
    )
    timeout: float = setting(
        1800.0, "Seconds that one process waits for another before the run ends and names it.", least=1.0
    )

    def __post_init__(self) -> None:
        check_section(self)


@dataclass(frozen=True)
class EngineSettings:
    """Engines for rollout in processes of their own, kept equal to the trainer by messages of factors."""

    kind: str = setting(
        "inside",
        "inside: the trainer's own model and weights; transformers, vllm: processes of `logra engine`; http: vLLM's "
        "servers.",
        ("inside", "transformers", "vllm", "http"),
    )
    count: int = setting(1, "Engines that are started; not with addresses.", least=1)
    addresses: list[str] = setting(
        [], "Engines that run already: HOST:PORT of `logra engine`, or for http the servers' URLs."
    )
    devices: list[str] = setting(
        [], "GPUs of each engine, such as '4' or '4,5'; none: those behind the trainer's (the paper's four and four)."
    )
    threads: int = setting(
        0,
        "Processor threads of an engine started here, on a machine without GPUs; 0: all, or a share if max_lag is set.",
        least=0,
    )
    tensor_parallel: int = setting(1, "GPUs that hold one vLLM engine together.", least=1)
    options: dict[str, Any] = setting({}, "Arguments of vLLM's engine, such as gpu_memory_utilization.")
    max_lag: int = setting(
        0, "Updates by which the weights that draw a batch may be older than those it trains; 0: synchronous.", least=0
    )
    full_every: int = setting(0, "Versions after which engines get all weights anyway; 0: when needed.", least=0)
    sync_timeout: float = setting(300.0, "Seconds to wait for an engine to merge a message.", least=0.1)
    rollout_timeout: float = setting(3600.0, "Seconds to wait for an engine's completions.", least=0.1)
    start_timeout: float = setting(900.0, "Seconds to wait for an engine to start.", least=0.1)
    restarts: int = setting(3, "Failures in a row after which an engine is left out.", least=0)
    retire_below: float = setting(
        0.0, "Leave out an engine that draws at less than this share of the others' median speed; 0: never.", least=0.0
    )
    probe: bool = setting(True, "At start, change all weights once to see that each engine's log-probs move.")
    placement: str = setting(
        "local", "Where engines are started: on this machine, or by Ray (set by --ray).", ("local", "ray")
    )

    def __post_init__(self) -> None:
        check_section(self)
        if self.kind == "inside":
            plain = {spec.name: _default(spec) for spec in fields(self)}
            changed = [name for name, value in plain.items() if getattr(self, name) != value and name != "placement"]
            if changed:
                raise ValueError(
                    f"engines.{', engines.'.join(changed)} would have no effect: engines.kind is 'inside'; choose "
                    f"'transformers', 'vllm' or 'http'"
                )
        if self.kind == "http" and not self.addresses:
            raise ValueError("engines.kind is 'http', but engines.addresses is empty; give the servers' URLs")
        kind, form = ("URL", _URL) if self.kind == "http" else ("HOST:PORT", _ADDRESS)
        for address in self.addresses:
            if not re.fullmatch(form, address):
                raise ValueError(
                    f"engines.addresses has {address!r}; for kind {self.kind!r} each is a {kind}, such as "
                    f"{'http://10.0.0.2:8000' if kind == 'URL' else '10.0.0.2:8200'}"
                )
        if self.addresses and (self.count != 1 or self.devices):
            raise ValueError("engines.addresses names engines that run already; leave out engines.count and devices")
        if self.devices and len(self.devices) != self.count:
            raise ValueError(f"engines.devices has {len(self.devices)} entries for {self.count} engines; give one each")
        if self.kind != "vllm" and (self.options or self.tensor_parallel != 1):
            raise ValueError(
                f"engines.options and tensor_parallel are for vLLM engines that are started here, but engines.kind is "
                f"{self.kind!r}"
            )
        if self.retire_below >= 1:
            raise ValueError(f"retire_below is {self.retire_below}; it is a share, below 1")


def _default(spec: Any) -> Any:
    return spec.default_factory() if spec.default is MISSING else spec.default
