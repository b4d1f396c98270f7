# SPDX-License-Identifier: Apache-2.0
"""Which rows of a weight this process holds, how rows are summed into their holders, and how a whole is put together.

FSDP2 divides a weight of `total` rows into parts of ceil(total / holders) rows; the last parts may be shorter or empty.
With hybrid sharding every group of holders is a replica of the others.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Renamed in torch 2.13.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Holders:
    """The processes among which weights are divided.

    Attributes:
        group: those that hold one weight together; None for one process.
        replicas: those that hold the same rows in other groups; None without hybrid sharding.
        mesh: of both, as DTensor has it; None for one process.
    """

    group: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    mesh: Any = None

    @classmethod
    def of(cls, parameter: Tensor) -> "Holders":
        """Of a parameter that `fully_shard` divided; of a plain one, this process alone."""
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            return cls()
        if mesh.ndim == 1:
            return cls(mesh.get_group(), None, mesh)
        return cls(mesh.get_group(1), mesh.get_group(0), mesh)

    @property
    def count(self) -> int:
        """How many."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def place(self) -> int:
        """Of this process among them, from 0."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def all_count(self) -> int:
        """Processes of all replicas together: what a sum of gradients is over."""
        return self.count * (1 if self.replicas is None else dist.get_world_size(self.replicas))

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the holders of what each has of its rows; replicas have the same."""
        if self.group is None:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        if self.replicas is not None:  # a sum in another order would let replicas drift apart
            dist.broadcast(total, group=self.replicas, group_src=0)
        return total

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """From [holders, n] of every process, the sum over all processes of this one's part, [n]."""
        if self.group is None:
            return parts[0]
        mine = torch.empty_like(parts[0])
        _reduce_scatter(mine, parts.flatten(), group=self.group)
        if self.replicas is not None:
            dist.all_reduce(mine, group=self.replicas)
        return mine


@dataclass(frozen=True)
class Rows:
    """The rows of one weight that this process holds.

    Attributes:
        total: rows of the weight.
        holders: who holds it.
    """

    total: int
    holders: Holders

    @property
    def each(self) -> int:
        """Rows of a full part."""
        return -(-self.total // self.holders.count)

    @property
    def mine(self) -> range:
        """Rows held here."""
        first = min(self.total, self.each * self.holders.place)
        return range(first, min(self.total, first + self.each))

    def part(self, place: int) -> range:
        """Rows that another holder has."""
        first = min(self.total, self.each * place)
        return range(first, min(self.total, first + self.each))

    def whole(self, part: Tensor) -> Tensor:
        """[total, ...] from the rows that each holder has, [rows held, ...]."""
        if self.holders.group is None:
            return part
        padded = part
        if len(part) < self.each:
            padded = part.new_zeros(self.each, *part.shape[1:])
            padded[: len(part)] = part
        full = part.new_empty(self.each * self.holders.count, *part.shape[1:])
        # As bytes: gloo has no 16-bit integers.
        places = (full.view(-1).view(torch.uint8), padded.contiguous().view(-1).view(torch.uint8))
        _all_gather(*places, group=self.holders.group)
        return full[: self.total]

    def as_dtensor(self, part: Tensor) -> Tensor:
        """The rows held here as part of a whole, for checkpoints; of one process, themselves."""
        if self.holders.mesh is None:
            return part
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate(), Shard(0)] if self.holders.replicas is not None else [Shard(0)]
        shape = torch.Size((self.total, *part.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        found: Tensor = DTensor.from_local(
            part, self.holders.mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return found

    def part_of(self, value: Tensor) -> Tensor:
        """The rows held here, of a whole or of what `as_dtensor` gave."""
        if hasattr(value, "device_mesh"):
            local: Tensor = value.to_local()  # type: ignore[attr-defined]
            return local
        return value[self.mine.start : self.mine.stop]


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its storage."""
    if not hasattr(tensor, "device_mesh"):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part.detach()


def version(tensor: Tensor) -> tuple[int, int]:
    """Changes whenever values are written in place, through the tensor or through `local` of it."""
    return tensor._version, local(tensor)._version


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of a tensor, gathered in `dtype` if it is held in parts. Every holder must call it."""
    part = local(tensor)
    if dtype is not None and part.is_floating_point():
        part = part.to(dtype)
    if not hasattr(tensor, "device_mesh"):
        return part
    found: Tensor = with_part(tensor, part).full_tensor()  # type: ignore[attr-defined]
    return found


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor held in parts as `tensor` is, of which this process holds `part`; the part, if it holds all."""
    if not hasattr(tensor, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    found: Tensor = DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return found


def shifted(rows: range, first: int) -> range:
    """Where rows that are numbered from 0 lie in a whole, of which they begin at `first`."""
    return range(first + rows.start, first + rows.stop)


def refuse_undivided(model: nn.Module) -> None:
    """Refuse a model that every process holds whole.

    Raises:
        ValueError: there are several processes, and nothing would sum their sketches.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    from torch._subclasses.fake_tensor import FakeTensor

    # Fake tensors have no values: a plan of memory is made of them.
    if any(hasattr(each, "device_mesh") or isinstance(each, FakeTensor) for each in model.parameters()):
        return
    raise ValueError(
        f"torch.distributed runs {dist.get_world_size()} processes, but every one of them holds the whole model, so "
        f"nothing sums their sketches; divide it with torch.distributed.fsdp.fully_shard before making the optimizer"
    )


@torch.no_grad()
def exchanged(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Give a parameter other values, and return those it had; a part of a divided one is written in place."""
    if not hasattr(parameter, "device_mesh"):
        before, parameter.data = parameter.data, value
        return before
    held = local(parameter)
    before = held.clone()
    held.copy_(value)
    return before
