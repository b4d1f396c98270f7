# SPDX-License-Identifier: Apache-2.0
"""A weight, or a slice of one, as a replica holds it: what the model there computes with, and what is kept beside it so
that it stays the trainer's for ever.

| storage of the trainer | computes | kept beside |
| fp32, fp32 compute | fp32 | nothing |
| fp32, bf16 compute | bf16, nearest | the low 16 bits of the fp32 value (and the few places that lay on a tie) |
| split | bf16 | the low 8 bits |
| bf16 | bf16 | nothing |

The tensor that the model computes with may be a view: rows of a fused weight, or a tensor-parallel slice of rows or of
columns. Source: section 3 of the design ("exact replicas").
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logra.native import in_row_parts, native
from logra.optim.digest import digest_of, name_key
from logra.optim.merge import LayerStep, row_blocks
from logra.optim.rounding import WeightBits, dither_to_split, floor_to_bf16, read_split, round_to_split
from logra.parallel.rows import shifted
from logra.random_bits import Purpose
from logra.sync.layout import WeightLayout

_TIES = 1024


@dataclass(frozen=True)
class Slice:
    """Where in the model a weight's values are.

    Attributes:
        computing: what the model computes with, [rows, columns]; may be a view.
        rows: of the whole weight that it holds.
        columns: likewise.
        counted: whether its entries count in the digest: not where another process holds the same ones and counts them.
    """

    computing: Tensor
    rows: range
    columns: range
    counted: bool = True


class HeldWeight:
    """One slice of one weight.

    Args:
        layout: of the whole weight.
        held: where it is.
        seed: of the run.
        keep_on: device of what is kept beside it; default: that of the weight.
    """

    def __init__(self, layout: WeightLayout, held: Slice, seed: int, keep_on: str | None = None) -> None:
        self.layout, self.held = layout, held
        self.bits = WeightBits(seed, layout.name, held.columns.start)
        self.key = name_key(layout.name)
        self.keep_on = keep_on or held.computing.device.type
        self._ties: dict[int, Tensor] = {}
        if held.computing.shape != (len(held.rows), len(held.columns)):
            raise ValueError(
                f"{layout.name}: the model holds {tuple(held.computing.shape)}, its slice should be "
                f"{len(held.rows)} x {len(held.columns)}"
            )
        self.low = self._nothing_low()

    def _nothing_low(self) -> Tensor | None:
        shape, dtype = self.held.computing.shape, self.held.computing.dtype
        if self.layout.storage == "split":
            return torch.zeros(shape, dtype=torch.uint8, device=self.keep_on)
        if self.layout.storage == "fp32" and dtype == torch.bfloat16:
            return torch.zeros(shape, dtype=torch.int16, device=self.keep_on)
        return None

    def blocks(self) -> list[range]:
        """Of the rows held, numbered from 0."""
        return row_blocks(len(self.held.rows), len(self.held.columns), self.held.computing.device.type)

    def merge(self, step: LayerStep) -> int:
        """W <- decay W - scales (Q B) of this slice, in place; digest of what is computed with afterwards.

        Args:
            step: of this slice: factors and scales of its rows, B of its columns.
        """
        digest = 0
        for rows in self.blocks():
            stored = self._read(rows)
            move = step.move(rows)
            self._write(rows, torch.sub(step.decayed(stored), move, out=move), step.update)
            digest += self.digest(rows)
        return digest

    def digest(self, rows: range | None = None) -> int:
        """Of some rows held, or of all."""
        if not self.held.counted:
            return 0
        rows = range(len(self.held.rows)) if rows is None else rows
        values = self.held.computing[rows.start : rows.stop]
        return digest_of(values, self.key, self._in_whole(rows), self.held.columns, self.layout.columns)

    def load(self, values: Tensor) -> None:
        """Take the trainer's stored values of this slice, fp32 [rows, columns], exactly."""
        computing, storage = self.held.computing, self.layout.storage
        self._ties.clear()
        for rows in self.blocks():
            part = values[rows.start : rows.stop].to(computing.device, torch.float32).contiguous()
            whole = self._in_whole(rows)
            if storage == "split":
                upper, low = dither_to_split(part, self.bits, whole)
                self._enter(rows, upper, low)
            elif storage == "fp32" and computing.dtype == torch.bfloat16:
                self._enter_nearest(rows, part)
            else:
                computing[rows.start : rows.stop] = part.to(computing.dtype)

    def _read(self, rows: range) -> Tensor:
        """The stored fp32 values of some rows."""
        computing = self.held.computing[rows.start : rows.stop]
        if self.low is None:
            return computing.to(torch.float32)
        low = self.low[rows.start : rows.stop].to(computing.device)
        if self.layout.storage == "split":
            return read_split(computing.contiguous(), low, self.bits, self._in_whole(rows))
        return self._from_nearest(rows, computing, low)

    def _write(self, rows: range, target: Tensor, update: int) -> None:
        computing, whole = self.held.computing, self._in_whole(rows)
        if self.layout.storage == "split":
            self._enter(rows, *round_to_split(target, self.bits, whole, update))
        elif self.layout.storage == "bf16":
            computing[rows.start : rows.stop] = floor_to_bf16(target, self.bits, whole, Purpose.ROUNDING, update)
        elif self.low is None:
            computing[rows.start : rows.stop] = target
        else:
            self._enter_nearest(rows, target)

    def _enter(self, rows: range, upper: Tensor, low: Tensor) -> None:
        assert self.low is not None
        self.held.computing[rows.start : rows.stop] = upper
        self.low[rows.start : rows.stop] = low.to(self.low.device)

    def _enter_nearest(self, rows: range, target: Tensor) -> None:
        """bf16 nearest, and the low 16 bits as they are; entries that a tie rounded up are remembered by place."""
        computing = self.held.computing[rows.start : rows.stop]
        if self._has_native(computing) and target.is_contiguous():
            assert self.low is not None
            low, columns = self.low[rows.start : rows.stop], target.shape[1]
            ties: list[Tensor] = []

            def work(first: int, count: int) -> None:
                size = count * columns
                places = torch.empty(size // _TIES + _TIES, dtype=torch.int64)  # one of 2^17 is expected
                parts = (target[first:].data_ptr(), computing[first:].data_ptr(), low[first:].data_ptr(), size)
                found = native.nearest_write(*parts, places.data_ptr(), len(places))
                ties.append(places[:found] + first * columns if found <= len(places) else places[:0])
                overflown.append(found > len(places))

            overflown: list[bool] = []
            in_row_parts(work, len(rows), target.numel())
            if not any(overflown):
                self._ties[rows.start] = torch.cat(ties)
                return
        whole = target.view(torch.int32)
        low, upper = whole & 0xFFFF, target.to(torch.bfloat16)
        self._enter(rows, upper, low.to(torch.int16))
        raised = (upper.view(torch.int16).to(torch.int32) & 0xFFFF) != ((whole >> 16) & 0xFFFF)
        self._ties[rows.start] = ((low == 0x8000) & raised).flatten().nonzero()[:, 0]

    def _from_nearest(self, rows: range, computing: Tensor, low: Tensor) -> Tensor:
        ties = self._ties.get(rows.start)
        if self._has_native(computing):
            value = torch.empty(computing.shape, dtype=torch.float32)

            def work(first: int, count: int) -> None:
                parts = (computing[first:].data_ptr(), low[first:].data_ptr(), value[first:].data_ptr())
                native.nearest_read(*parts, count * computing.shape[1])

            in_row_parts(work, len(rows), computing.numel())
            if ties is not None and len(ties):
                value.view(torch.int32).view(-1)[ties] -= 1 << 16
            return value
        bits = low.to(torch.int32) & 0xFFFF
        upper = computing.contiguous().view(torch.int16).to(torch.int32)
        upper = upper - (bits > 0x8000).to(torch.int32)
        if ties is not None and len(ties):
            upper.view(-1)[ties] -= 1
        return ((upper << 16) | bits).view(torch.float32)

    def _has_native(self, computing: Tensor) -> bool:
        here = native is not None and computing.device.type == "cpu" and self.keep_on == "cpu"
        return here and computing.is_contiguous()

    def _in_whole(self, rows: range) -> range:
        return shifted(rows, self.held.rows.start)
