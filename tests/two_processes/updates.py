"""What processes are asked to do in these tests; the same functions give the reference in one process."""

from typing import Any

import torch
from torch import Tensor

from logra.config import LograSettings
from logra.divide import divide
from logra.optim.optimizer import LograOptimizer
from logra.parallel.processes import Processes
from logra.rl.batch import Sample, collate
from logra.rl.logprobs import CausalModel, token_logprobs
from logra.sketch.targets import is_conv1d
from tests.conftest import tiny_gpt2, tiny_llama

# Ragged: micro-batches of other sizes in other processes, and more of them in one.
SAMPLES = [
    Sample(i, i, tuple(range(3, 5 + i)), tuple((7 * i + 5 * j) % 48 for j in range(3 + 2 * i)), (), "", False)
    for i in range(7)
]
PARTS = [[6], [5, 0], [4], [3, 2], [1]]


def make(kind: str) -> Any:
    if kind == "gpt2":
        return tiny_gpt2()
    if kind == "narrow":
        return tiny_llama(hidden=40, intermediate=5)
    # 33 rows in no block divide evenly; nor do 5 of "narrow", of which a fourth process has none.
    model = tiny_llama(hidden=40, intermediate=33, tied=kind == "tied")
    return model.to(torch.bfloat16) if kind == "short" else model


def mesh_of(processes: Processes, shard: int) -> Processes:
    """The same processes with another way of dividing weights."""
    if processes.count == 1 or not shard:
        return processes
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (processes.count // shard, shard), mesh_dim_names=("replicate", "shard"))
    return Processes(processes.place, processes.count, mesh)


def train(
    processes: Processes,
    kind: str,
    changes: dict[str, Any],
    updates: int = 2,
    checkpointing: bool = False,
    shard: int = 0,
) -> dict[str, Any]:
    """A few updates; sketches and norms of the last one, and the weights after it, whole."""
    torch.manual_seed(0)
    model = make(kind)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    causal, processes = CausalModel(model), mesh_of(processes, shard)
    if processes.count > 1:
        divide(causal, processes, "bf16" if kind == "short" else "fp32")
    settings: dict[str, Any] = {"rank": 8, "step_size": "lr", "lr": 1e-3, "max_norm": 1.0, "targets": "all-linear"}
    optimizer = LograOptimizer(model, LograSettings(**(settings | changes)))
    optimizer.set_gradient_divide_factor(1.0)
    found: dict[str, Any] = {}
    for _ in range(updates):
        model.train()
        backward(causal, processes)
        proposal = optimizer.propose()
        held = {each: each.sketch for each in optimizer.sketches if each.sketch is not None}
        found["sketches"] = {each.name: each.rows.whole(sketch).clone() for each, sketch in held.items()}
        found["norms"] = (proposal.sketch_norm, proposal.norm, proposal.weight_norm, proposal.factor)
        applied = optimizer.apply()
        found["realised"] = (applied.realised_stored, applied.realised_compute)
    found["held"] = {each.name: tuple(each.rows_view.shape) for each in optimizer.sketches}
    found["weights"] = weights_of(model)
    found["bytes_in"] = 0 if optimizer.sketches.buckets is None else optimizer.sketches.buckets.bytes_in
    found["grads"] = [name for name, each in model.named_parameters() if each.grad is not None]
    return found


def weights_of(model: Any) -> dict[str, Tensor]:
    from logra.parallel.rows import whole

    return {name: whole(value).clone() for name, value in model.named_parameters()}


def backward(causal: CausalModel, processes: Processes) -> None:
    """All parts, shared out; a process that has fewer goes through one that does not count."""
    mine = processes.share(PARTS)
    rounds = -(-len(PARTS) // processes.count)
    for turn in range(rounds):
        part, counts = (mine[turn], 1.0) if turn < len(mine) else (PARTS[0], 0.0)
        logprobs = token_logprobs(causal, collate(SAMPLES, part, 0, "cpu"), 1.0).logprobs
        (-logprobs.sum() * counts / 50).backward()


def conv1d_names(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if is_conv1d(module)]
