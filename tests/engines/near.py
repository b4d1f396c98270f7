"""Engines in threads of this process, behind real sockets, with what can go wrong built in."""

import copy
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from logra.config import LograSettings
from logra.engines.host import Host
from logra.engines.pool import EnginePool
from logra.optim.optimizer import LograOptimizer
from logra.rl.logprobs import CausalModel
from logra.rollout.engine import Prompt, Sampling
from logra.rollout.transformers_engine import TransformersEngine
from logra.scale_settings import EngineSettings
from logra.sync.replica import ToldReplica, replica_of
from logra.sync.source import FactorSource
from logra.sync.wire import SocketLink, serve
from tests.conftest import loss_of, tiny_llama


class Words:
    """A tokenizer that says ids."""

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


class NearEngine:
    """A place whose engine is a thread; `faults` are called with each message, in order, before it is answered.

    Args:
        model: that it starts with.
        faults: by number of the message since the start.
        computing: what the engine draws with, if not the weights that the replica changes.
    """

    def __init__(self, model: Any, faults: dict[int, Callable[[], None]] | None = None, computing: Any = None) -> None:
        self.model, self.faults, self.computing = model, dict(faults or {}), computing
        self.starts, self.asked, self.port = 0, 0, 0

    def connect(self, seconds: float) -> socket.socket:
        if not self.port:
            self.starts += 1
            own = copy.deepcopy(self.model)
            engine = TransformersEngine(CausalModel(self.computing or own), Words(), frozenset({0}), 0, torch.float32)
            host = Host(engine, ToldReplica(lambda layout: replica_of(layout, own)))
            listener = socket.create_server(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
            threading.Thread(target=serve, args=(listener, lambda data: self.answer(host, data)), daemon=True).start()
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def answer(self, host: Host, data: bytes) -> bytes:
        self.asked += 1
        fault = self.faults.pop(self.asked, None)
        if fault is not None:
            fault()
        return host(data)

    def renew(self) -> None:
        self.port = 0

    def end(self) -> None:
        self.port = 0


class Trainer:
    """A model, its optimizer and a pool."""

    def __init__(self, engines: list[NearEngine] | None = None, count: int = 2, **changes: Any) -> None:
        self.model = tiny_llama()
        self.engines = engines or [NearEngine(copy.deepcopy(self.model)) for _ in range(count)]
        self.optimizer = LograOptimizer(self.model, LograSettings(rank=8, step_size="lr", lr=1e-2))
        self.source = FactorSource(self.optimizer, self.model, "fp32")
        settings: dict[str, Any] = {"kind": "transformers", "sync_timeout": 20.0, "rollout_timeout": 20.0}
        links = [(SocketLink(str(number), each.connect), each) for number, each in enumerate(self.engines)]
        self.pool = EnginePool(self.source, links, EngineSettings(**(settings | changes)))
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        ids = torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(self.updates))
        loss_of(self.model, ids).backward()
        self.optimizer.step()
        self.pool.stepped()
        self.pool.publish()

    def alone(self, sampling: Sampling, update: int) -> list[Any]:
        """What the trainer's own weights draw."""
        engine = TransformersEngine(CausalModel(self.model), Words(), frozenset({0}), 0, torch.float32)
        return engine.generate(PROMPTS, sampling, update)


PROMPTS = [Prompt(group, (5, 7 + group, 9), 3 * group, 3) for group in range(5)]
SAMPLING = Sampling(max_tokens=6)


def fall_silent(seconds: float = 3600.0) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def gate_before_next(engine: NearEngine) -> "queue.Queue[None]":
    """What holds the engine's next answer up until something is put into it."""
    gate: queue.Queue[None] = queue.Queue()
    engine.faults[engine.asked + 1] = lambda: gate.get()
    return gate
