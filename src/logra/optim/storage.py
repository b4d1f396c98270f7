# SPDX-License-Identifier: Apache-2.0
"""How a selected weight is stored, and how it takes a step smaller than its own grid.

| storage | bytes | stored value                     | computing weight in bf16                  |
| fp32    | 4     | fp32                             | nearest, or a dithered copy (2 bytes more) |
| split   | 3     | 24 bits, rounded stochastically  | its upper 16 bits: floor after a fixed dither |
| bf16    | 2     | bf16, rounded stochastically     | itself                                    |

With the fixed dither a bf16 checkpoint is left untouched, a step arrives whole from the first update
on, and the computing weight stays within one ulp of the stored one for ever. The arithmetic is in
`logra.optim.rounding`; a second holder of the weights makes the same bits for any block of rows.

Each class forms new blocks with `rounded` and stores them with `write`, so that the outcome of a
step can be looked at before it is taken. Source: section 3 of the design.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from logra.optim.rounding import (
    WeightBits,
    dither_to_split,
    floor_to_bf16,
    nearest_24_bits,
    read_split,
    round_to_split,
)
from logra.parallel.rows import shifted, version
from logra.random_bits import Purpose
from logra.sketch.layer_sketch import LayerSketch


@dataclass(frozen=True)
class Block:
    """Some rows of a weight, [rows, in_features] each.

    Attributes:
        stored: fp32, the exact stored value.
        compute: bf16, what bf16 compute uses; None where that is `stored` rounded to nearest.
        low: uint8, the low bits of `split`; None elsewhere.
    """

    stored: Tensor
    compute: Tensor | None = None
    low: Tensor | None = None

    def computing(self) -> Tensor:
        """What bf16 compute uses, in fp32."""
        return (self.stored.to(torch.bfloat16) if self.compute is None else self.compute).to(torch.float32)


class WeightStorage(ABC):
    """One selected weight. `layer.weight` holds what the model computes with (fp32: what is stored)."""

    kind: ClassVar[str]
    dtype: ClassVar[torch.dtype]

    def __init__(self, layer: LayerSketch, seed: int) -> None:
        self.layer, self.bits = layer, WeightBits(seed, layer.name)

    def mark(self) -> None:
        """Remember the weight as it is now, so that a change by somebody else is noticed."""
        self._parameter, self._version = self.layer.weight, version(self.layer.weight)

    def follow(self) -> None:
        """Adopt values that were loaded into the weight since `mark`.

        Raises:
            RuntimeError: the parameter was replaced, or cast to another dtype.
        """
        weight = self.layer.weight
        if weight is not self._parameter:
            raise RuntimeError(
                f"the parameter {self.layer.name}.weight was replaced (by load_state_dict(assign=True), for example); "
                f"load values in place, or make the optimizer after replacing parameters"
            )
        if weight.dtype != self.dtype:
            raise RuntimeError(
                f"{self.layer.name}.weight was cast to {weight.dtype} while it is stored as {self.kind!r} "
                f"({self.dtype}); cast the model before making the optimizer"
            )
        if version(weight) != self._version:
            self.adopt()
            self.mark()

    def adopt(self) -> None:
        """Bring what is kept beside the weight in line with its new values."""
        return

    @abstractmethod
    def read(self, rows: range) -> Block:
        """The present values of some of the rows held here, numbered from 0."""

    @abstractmethod
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        """What would be stored for the contiguous fp32 values `target` at `update`; `target` may be overwritten."""

    @abstractmethod
    def write(self, rows: range, block: Block) -> None:
        """Make `block` the values of those rows."""

    def extra_state(self) -> dict[str, Tensor]:
        """Tensors beside the weight that a checkpoint needs."""
        return {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `extra_state` gave, before or after the weight itself."""
        return

    def extra_bytes(self) -> int:
        """Bytes held beside the weight."""
        return 0

    def _slice(self, rows: range) -> Tensor:
        return self.layer.rows_view[rows.start : rows.stop]

    def _held(self) -> range:
        """All rows held here."""
        return range(len(self.layer.rows.mine))

    def _in_whole(self, rows: range) -> range:
        """Where rows held here are in the whole weight: random bits belong to a row, whoever holds it."""
        return shifted(rows, self.layer.rows.mine.start)


class Fp32Storage(WeightStorage):
    """fp32 weights, and optionally a dithered bf16 copy that bf16 compute uses."""

    kind = "fp32"
    dtype = torch.float32

    def __init__(self, layer: LayerSketch, seed: int, dithered_copy: bool = False) -> None:
        super().__init__(layer, seed)
        _convert(layer, torch.float32)
        self.dithered_copy = dithered_copy
        self.adopt()
        self.mark()
        layer.refresh = self.follow if dithered_copy else None

    @override
    def adopt(self) -> None:
        if self.dithered_copy:
            held = self._held()
            self.layer.compute_copy = floor_to_bf16(self._slice(held), self.bits, self._in_whole(held), Purpose.DITHER)

    @override
    def read(self, rows: range) -> Block:
        stored = self._slice(rows)
        copy = self.layer.compute_copy
        return Block(stored, None if copy is None else copy[rows.start : rows.stop])

    @override
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        if self.dithered_copy:
            return Block(target, floor_to_bf16(target, self.bits, self._in_whole(rows), Purpose.DITHER))
        return Block(target)

    @override
    def write(self, rows: range, block: Block) -> None:
        self._slice(rows).copy_(block.stored)
        if self.layer.compute_copy is not None and block.compute is not None:
            self.layer.compute_copy[rows.start : rows.stop] = block.compute

    @override
    def extra_bytes(self) -> int:
        return 2 * self.layer.weight.numel() if self.dithered_copy else 0


class SplitStorage(WeightStorage):
    """The bf16 computing weight in the model, 8 low bits beside it."""

    kind = "split"
    dtype = torch.bfloat16

    def __init__(self, layer: LayerSketch, seed: int) -> None:
        super().__init__(layer, seed)
        values = nearest_24_bits(layer.rows_view.to(torch.float32))
        compute, self.low = dither_to_split(values, self.bits, self._in_whole(self._held()))
        if layer.weight.dtype != torch.bfloat16:  # of bf16 values, `compute` is what is there
            _convert(layer, torch.bfloat16, compute.T.contiguous() if layer.transposed else compute)
        self._belongs_to: int | None = None
        self.mark()

    @override
    def adopt(self) -> None:
        """Low bits of a checkpoint wait for its weights; any other new values are taken as exact."""
        expected, self._belongs_to = self._belongs_to, None
        if expected is None or expected != self._digest():
            values = self.layer.rows_view.to(torch.float32)
            self.low = dither_to_split(values, self.bits, self._in_whole(self._held()))[1]

    def _digest(self) -> int:
        """A number that two different weights hardly share."""
        rows, held = self.layer.rows, self.layer.rows_view
        sums = held.contiguous().view(torch.int16).sum(dim=1, dtype=torch.int64)
        index = torch.arange(rows.mine.start, rows.mine.stop, device=sums.device)
        return int(rows.holders.summed((sums * (index * 0x9E3779B97F4A7C1 + 1)).sum()))

    @override
    def read(self, rows: range) -> Block:
        compute, low = self._slice(rows), self.low[rows.start : rows.stop]
        return Block(read_split(compute, low, self.bits, self._in_whole(rows)), compute, low)

    @override
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        compute, low = round_to_split(target, self.bits, self._in_whole(rows), update)
        return Block(target, compute, low)

    @override
    def write(self, rows: range, block: Block) -> None:
        assert block.compute is not None and block.low is not None
        self._slice(rows).copy_(block.compute)
        self.low[rows.start : rows.stop] = block.low

    @override
    def extra_state(self) -> dict[str, Tensor]:
        self.follow()
        return {"low_bits": self.layer.rows.as_dtensor(self.low), "belongs_to": torch.tensor(self._digest())}

    @override
    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.low.copy_(self.layer.rows.part_of(state["low_bits"]))
        self._belongs_to, self._version = int(state["belongs_to"]), (-1, -1)

    @override
    def extra_bytes(self) -> int:
        return self.low.numel()


class Bf16Storage(WeightStorage):
    """bf16 weights alone; every step is rounded stochastically."""

    kind = "bf16"
    dtype = torch.bfloat16

    def __init__(self, layer: LayerSketch, seed: int) -> None:
        super().__init__(layer, seed)
        _convert(layer, torch.bfloat16)
        self.mark()

    @override
    def read(self, rows: range) -> Block:
        compute = self._slice(rows)
        return Block(compute.to(torch.float32), compute)

    @override
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        compute = floor_to_bf16(target, self.bits, self._in_whole(rows), Purpose.ROUNDING, update)
        return Block(compute.to(torch.float32), compute)

    @override
    def write(self, rows: range, block: Block) -> None:
        assert block.compute is not None
        self._slice(rows).copy_(block.compute)


def _convert(layer: LayerSketch, dtype: torch.dtype, values: Tensor | None = None) -> None:
    if layer.weight.dtype != dtype:
        layer.weight.data = layer.weight.data.to(dtype) if values is None else values


def storage_kind(layer: LayerSketch, kind: str, dithered_copy: bool) -> str:
    """The storage that `kind` means for one layer.

    Raises:
        ValueError: its dtype does not allow it.
    """
    dtype = layer.weight.dtype
    if dtype == torch.float64:
        raise ValueError(f"{layer.name}.weight is float64, which no storage holds; convert the model to float32")
    if kind == "auto":
        kind = "split" if dtype == torch.bfloat16 else "fp32"
    if dithered_copy and kind != "fp32":
        raise ValueError(
            f"dithered_copy is for fp32 storage, but {layer.name}.weight is {dtype} and is stored as {kind!r}; "
            f"leave it off, or set storage='fp32'"
        )
    if layer.rows.holders.mesh is not None:
        _check_in_parts(layer, kind, dithered_copy)
    return kind


def _check_in_parts(layer: LayerSketch, kind: str, dithered_copy: bool) -> None:
    """What processes hold in parts keeps the dtype that it was divided in."""
    needed = torch.float32 if kind == "fp32" else torch.bfloat16
    if layer.weight.dtype != needed:
        raise ValueError(
            f"storage {kind!r} needs {layer.name}.weight in {needed}, but processes hold it in {layer.weight.dtype}; "
            f"load the model in {needed} (model.weights {str(needed).removeprefix('torch.')}) before it is divided"
        )
    if dithered_copy:
        raise ValueError(
            "dithered_copy is for one process; with several, load the model in bfloat16 and use storage 'split', which "
            "computes with the same dithered weights"
        )


def make_storages(layers: Iterable[LayerSketch], kind: str, seed: int, dithered_copy: bool) -> dict[str, WeightStorage]:
    """The storage of every layer by name; nothing is converted unless all of them can be.

    Raises:
        ValueError: a weight's dtype does not allow it.
    """
    kinds = [(layer, storage_kind(layer, kind, dithered_copy)) for layer in layers]
    made: dict[str, WeightStorage] = {}
    for layer, chosen in kinds:
        if chosen == "fp32":
            made[layer.name] = Fp32Storage(layer, seed, dithered_copy)
        else:
            made[layer.name] = SplitStorage(layer, seed) if chosen == "split" else Bf16Storage(layer, seed)
    return made
