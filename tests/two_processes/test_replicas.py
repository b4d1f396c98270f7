"""A replica in a process of its own, over a socket: equal digests for hundreds of updates, and after every fault."""

import copy
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from logra.config import LograSettings
from logra.divide import divide
from logra.optim.optimizer import LograOptimizer
from logra.parallel.processes import Processes
from logra.rl.logprobs import CausalModel
from logra.sync.replica import replica_of
from logra.sync.sender import Sender, SyncLost
from logra.sync.source import FactorSource
from logra.sync.wire import SocketLink
from tests.conftest import latest
from tests.two_processes.conftest import Workers
from tests.two_processes.updates import backward, make


class Process:
    """Starts a replica, and starts it again when it is gone."""

    def __init__(self, compute: str, parts: int, threads: int) -> None:
        self.arguments, self.port = [compute, str(parts), str(threads)], 0
        self.running: Any = None
        self.environment: dict[str, str] = {}
        self.link = SocketLink("one", self.connect)
        self.starts = 0

    def connect(self, seconds: float) -> socket.socket:
        if self.running is None or self.running.poll() is not None:
            self.starts += 1
            command = [sys.executable, str(Path(__file__).parent / "replica_process.py"), *self.arguments]
            environment = os.environ | (self.environment if self.starts == 1 else {})
            self.running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            with self.running.stdout:
                self.port = int(self.running.stdout.readline())
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)

    def end(self) -> None:
        self.link.close()
        if self.running is not None:
            self.running.kill()
            self.running.wait()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for each in made:
        each.end()


def trainer(storage: str, compute: str) -> tuple[nn.Module, LograOptimizer, FactorSource]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64, bias=False), nn.ReLU(), nn.Linear(64, 30, bias=False))
    if storage != "fp32":
        model = model.to(torch.bfloat16)
    settings = LograSettings(rank=8, targets="all-linear", storage=storage, step_size="lr", lr=1e-3, weight_decay=0.1)
    optimizer = LograOptimizer(model, settings)
    return model, optimizer, FactorSource(optimizer, model, compute)


def update(model: nn.Module, optimizer: LograOptimizer, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(inputs).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("storage", "compute", "parts", "threads", "updates"),
    [("fp32", "fp32", 1, 2, 20), ("fp32", "bf16", 2, 1, 200), ("split", "bf16", 2, 2, 20), ("bf16", "bf16", 2, 1, 200)],
)
def test_two_hundred_updates(
    storage: str, compute: str, parts: int, threads: int, updates: int, processes: list[Process]
) -> None:
    processes.append(Process(compute, parts, threads))
    model, optimizer, source = trainer(storage, compute)
    sender = Sender(source, [processes[0].link], seconds=120)
    sender.anchor()
    for seed in range(updates):
        update(model, optimizer, seed)
        assert sender.sync().full == {}, seed
    assert source.version == updates


def test_a_replica_killed_while_it_merges_is_started_again(processes: list[Process]) -> None:
    processes.append(Process("bf16", 2, 1))
    processes[0].environment = {"DIES_AT": "3"}
    model, optimizer, source = trainer("split", "bf16")
    sender = Sender(source, [processes[0].link], seconds=120)
    sender.anchor()
    reports = []
    for seed in range(6):
        update(model, optimizer, seed)
        reports.append(sender.sync())
    assert [bool(report.full) for report in reports] == [False, False, False, True, False, False]
    assert "no answer" in reports[3].full["one"]
    assert processes[0].starts == 2


def test_a_replica_paused_past_the_time_out_comes_back(processes: list[Process]) -> None:
    processes.append(Process("bf16", 1, 1))
    model, optimizer, source = trainer("fp32", "bf16")
    sender = Sender(source, [processes[0].link], seconds=6.0)
    sender.anchor()
    update(model, optimizer, 0)
    assert sender.sync().full == {}
    os.kill(processes[0].running.pid, signal.SIGSTOP)
    update(model, optimizer, 1)
    with pytest.raises(SyncLost, match=r"replica one does not come to version 2 .*no answer within 6 s"):
        sender.sync()
    os.kill(processes[0].running.pid, signal.SIGCONT)
    assert sender.anchor("it is back").full == {"one": "it is back"}
    for seed in range(2, 5):
        update(model, optimizer, seed)
        assert sender.sync().full == {}


def test_a_lost_answer_is_not_taken_for_another(processes: list[Process]) -> None:
    """Paused for less than all tries: the late message is merged, and the full state that follows settles it."""
    processes.append(Process("bf16", 1, 1))
    model, optimizer, source = trainer("bf16", "bf16")
    link = processes[0].link
    sender = Sender(source, [link], seconds=120)
    sender.anchor()
    update(model, optimizer, 0)
    data, _ = latest(source)
    os.kill(processes[0].running.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        link.ask(data, 0.5)
    os.kill(processes[0].running.pid, signal.SIGCONT)
    update(model, optimizer, 1)
    assert sender.sync().full in ({}, {"one": "no answer (the connection was closed)"})
    update(model, optimizer, 2)
    assert sender.sync().full == {}


def trained_and_followed(group: Processes) -> tuple[list[int], list[bool], bytes]:
    """Three updates by processes that hold the weights in parts; a replica beside each of them follows."""
    torch.manual_seed(0)
    model = make("plain")
    own = copy.deepcopy(model).to(torch.bfloat16)
    causal = CausalModel(model)
    if group.count > 1:
        divide(causal, group, "fp32")
    settings = LograSettings(rank=8, step_size="lr", lr=1e-3, factor_bits=16, others="adamw", others_lr=1e-3)
    optimizer = LograOptimizer(model, settings)
    optimizer.set_gradient_divide_factor(1.0)
    source = FactorSource(optimizer, model, "bf16")
    replica = replica_of(source.layout, own)
    for piece in source.pieces():
        replica.handle(piece)
    digests, equal, data = [], [], b""
    for _ in range(3):
        backward(causal, group)
        optimizer.step()
        data, digest = latest(source)
        digests.append(digest)
        equal.append(replica.handle(data).digest == digest == source.digest())
    return digests, equal, data


def test_a_divided_trainer_sends_what_one_process_would(two: Workers) -> None:
    alone = trained_and_followed(Processes())
    first, second = two(trained_and_followed)
    assert all(all(each[1]) for each in (alone, first, second))
    assert first == second
    assert len(first[2]) == len(alone[2])
