# SPDX-License-Identifier: Apache-2.0
"""A model divided among processes by FSDP2: blocks one by one, an untied embedding, and the rest with the output layer.

Each part is gathered in the compute dtype while it computes; with bf16 compute everything computes in bf16, embeddings
and norms too. Gradients and sketches are sums over processes, since the loss is divided by the counts of all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from logra.parallel.processes import Processes
from logra.rl.logprobs import CausalModel


def divide(causal: CausalModel, processes: Processes, compute: str) -> "Within":
    """Divide the model in place, and let `causal.within` gather what a forward needs; the root of what is divided.

    Args:
        causal: whole in every process.
        processes: that share it.
        compute: "bf16" or "fp32".

    Raises:
        ValueError: a weight cannot be divided.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    model = causal.model
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if compute == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    common: dict[str, Any] = {
        "mesh": processes.mesh,
        "mp_policy": precision,
        "shard_placement_fn": _placement_of(model, processes),
    }
    for block in blocks_of(model):
        fully_shard(block, **common)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        fully_shard(embedding, **common)
    within = Within(model)
    fully_shard(within, **common)
    for module in within.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def gathered(call: Callable[..., Any], *arguments: Any) -> Any:
        result = within(call, *arguments)
        if not torch.is_grad_enabled():
            within.reshard()  # type: ignore[operator]  # else backward does
        return result

    causal.within = gathered
    return within


class Within(nn.Module):
    """Calls a function of the model; what `fully_shard` does around a forward is done around that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What `call` gives: a tensor or a tuple of tensors."""
        return call(*arguments)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: the longest list of modules of one class.

    Raises:
        ValueError: there is none.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len({type(m) for m in each}) == 1]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks to divide among processes; run one process")
    return list(max(lists, key=lambda each: sum(_size(block) for block in each)))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _placement_of(model: nn.Module, processes: Processes) -> Callable[[nn.Parameter], Any]:
    """Rows of the output for every weight: of GPT-2's Conv1D, these are columns of what is stored."""
    from torch.distributed.tensor import Shard

    from logra.sketch.targets import is_conv1d

    transposed = {id(module.weight): name for name, module in model.named_modules() if is_conv1d(module)}
    holders = processes.mesh.size(-1)

    def placement(parameter: nn.Parameter) -> Any:
        name = transposed.get(id(parameter))
        if name is None:
            return Shard(0)
        if parameter.shape[1] % holders:
            raise ValueError(
                f"{name}.weight has {parameter.shape[1]} outputs along its second dimension, which {holders} "
                f"processes cannot divide evenly; use a number of processes that divides it (parallel.shard)"
            )
        return Shard(1)

    return placement


class RolloutCopy:
    """A plain copy of the model that acts: empty until it is filled from the parts, and emptied again.

    Make it before sketches are attached and before the model is divided.

    Args:
        model: whole.
        compute: "bf16" or "fp32"; the copy is in that dtype.
        device: where it acts.
    """

    def __init__(self, model: Any, compute: str, device: str = "cpu") -> None:
        import copy

        self.source = model
        self.dtype = torch.bfloat16 if compute == "bf16" else torch.float32
        empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
        self.model = copy.deepcopy(model, dict(empty)).eval()
        for module in self.model.modules():
            module._buffers.update(
                {name: each.to(device) for name, each in module._buffers.items() if each is not None}
            )
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        owners: dict[int, str] = {}
        for name, module in self.model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                first = owners.setdefault(id(parameter), f"{name}.{leaf}" if name else leaf)
                self._places.setdefault(first, []).append((module, leaf))
        self._empty = {name: getattr(*places[0]) for name, places in self._places.items()}

    @contextmanager
    def filled(self) -> Iterator[Any]:
        """The copy with the present weights, gathered from all processes."""
        from logra.parallel.rows import whole

        try:
            for name, places in self._places.items():
                value = nn.Parameter(whole(self.source.get_parameter(name), self.dtype), requires_grad=False)
                for module, leaf in places:
                    module._parameters[leaf] = value
            yield self.model
        finally:
            for name, places in self._places.items():
                for module, leaf in places:
                    module._parameters[leaf] = self._empty[name]
