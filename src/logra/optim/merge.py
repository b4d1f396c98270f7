# SPDX-License-Identifier: Apache-2.0
"""W <- decay W - scales (Q B), row block by row block, with the share of the step that arrived."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from logra.optim.factors import integer_product, product_operand
from logra.optim.storage import Block, WeightStorage
from logra.parallel.rows import Holders

BLOCK_ELEMENTS = {"cpu": 1 << 19}  # of a block: what stays in a processor's cache
OTHER_BLOCK_ELEMENTS = 1 << 24  # elsewhere: few large kernels
SHARE_PERIOD = 8


@dataclass(frozen=True)
class LayerStep:
    """The step of one weight, as trainer and replica both hold it; every number is final.

    Attributes:
        factors: Q, int8 or int16 [rows held, rank].
        projection_integers: B, int8 [rank, in_features].
        scales: fp32 [rows held]: alpha, f, row factor, integer step and clipping in one, made once.
        decay_factor: what W is multiplied by first, an fp32 number; 1 for none.
        update: number of the update, which keys the rounding bits.
    """

    factors: Tensor
    projection_integers: Tensor
    scales: Tensor
    decay_factor: float
    update: int

    @cached_property
    def operand(self) -> Tensor:
        """B as the product takes it, made once for all blocks."""
        return product_operand(self.projection_integers, self.factors)

    def move(self, rows: range) -> Tensor:
        """M, fp32 [len(rows), in_features]: what is subtracted from those rows."""
        part = slice(rows.start, rows.stop)
        return integer_product(self.factors[part], self.operand).mul_(self.scales[part, None])

    def decayed(self, values: Tensor) -> Tensor:
        """`values` after the decoupled decay, one rounded fp32 product; the same tensor when there is none."""
        return values if self.decay_factor == 1.0 else values * self.decay_factor


@dataclass
class RealisedShare:
    """Projections of a change on the intended one, summed over blocks and layers; as tensors, so nothing waits.
    Each process counts the rows it holds; `summed` adds those of the others.

    Of a weight with many blocks every eighth is measured, others at each update.
    """

    intended: Tensor
    stored: Tensor
    compute: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> "RealisedShare":
        """Nothing counted yet."""
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)))

    def summed(self, holders: Holders) -> "RealisedShare":
        """Over all rows."""
        return RealisedShare(*holders.summed(torch.stack([self.intended, self.stored, self.compute])).unbind())

    def add(self, before: Block, intended: Tensor, after: Block) -> None:
        """Count one block: how much of `intended` arrived in the stored and in the computing weight."""
        intended = intended.flatten()
        self.intended += torch.dot(intended, intended).to(self.intended.device)
        self.stored += torch.dot(intended, (after.stored - before.stored).flatten()).to(self.stored.device)
        change = after.computing() - before.computing()
        self.compute += torch.dot(intended, change.flatten()).to(self.compute.device)


def row_blocks(rows: int, columns: int, device_type: str) -> list[range]:
    """Row ranges of about as many entries as suit the device."""
    size = max(1, BLOCK_ELEMENTS.get(device_type, OTHER_BLOCK_ELEMENTS) // max(1, columns))
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def formed(storage: WeightStorage, step: LayerStep) -> Tensor:
    """Rows held here of the weight that computes after the step, [rows held, in_features], as `merge` leaves them."""
    blocks = row_blocks(len(storage.layer.rows.mine), storage.layer.in_features, step.factors.device.type)
    parts = []
    for rows in blocks:
        move = step.move(rows)
        after = storage.rounded(rows, torch.sub(step.decayed(storage.read(rows).stored), move, out=move), step.update)
        parts.append(after.stored if after.compute is None else after.compute)
    return torch.cat(parts) if parts else storage.layer.rows_view


def merge(
    storage: WeightStorage,
    step: LayerStep,
    share: RealisedShare | None = None,
    watch: Callable[[range, Block], None] | None = None,
) -> None:
    """Apply one step in place. Call it inside `exact_products`; the bits do not depend on the blocking.

    Args:
        storage: of the weight.
        step: to take.
        share: counts what arrives.
        watch: is shown each block of rows held here once it is written.
    """
    blocks = row_blocks(len(storage.layer.rows.mine), storage.layer.in_features, step.factors.device.type)
    period = min(SHARE_PERIOD, len(blocks))
    for index, rows in enumerate(blocks):
        before = storage.read(rows)
        move, start = step.move(rows), step.decayed(before.stored)
        if share is None or (index + step.update) % period:
            after = storage.rounded(rows, torch.sub(start, move, out=move), step.update)
        else:
            after = storage.rounded(rows, start - move, step.update)
            intended = move.neg_() if start is before.stored else (start - before.stored).sub_(move)
            share.add(before, intended, after)
        storage.write(rows, after)
        if watch is not None:
            watch(rows, after)
    storage.mark()
