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
from dataclasses import dataclass

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

    kind: str

    def __init__(self, layer: LayerSketch, seed: int) -> None:
        self.layer, self.bits = layer, WeightBits(seed, layer.name)

    @abstractmethod
    def read(self, rows: range) -> Block:
        """The present values of some rows."""

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
        """Restore what `extra_state` gave, after the weight itself."""
        return

    def extra_bytes(self) -> int:
        """Bytes held beside the weight."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.extra_state().values())

    def _slice(self, rows: range) -> Tensor:
        return self.layer.rows_view[rows.start : rows.stop]


class Fp32Storage(WeightStorage):
    """fp32 weights, and optionally a dithered bf16 copy that bf16 compute uses."""

    kind = "fp32"

    def __init__(self, layer: LayerSketch, seed: int, dithered_copy: bool = False) -> None:
        super().__init__(layer, seed)
        layer.weight.data = layer.weight.data.to(torch.float32)
        self.dithered_copy = dithered_copy
        self.refresh_copy()

    def refresh_copy(self) -> None:
        """Make the dithered copy anew from the weights."""
        if self.dithered_copy:
            whole = range(self.layer.out_features)
            self.layer.compute_copy = floor_to_bf16(self._slice(whole), self.bits, whole, Purpose.DITHER)

    @override
    def read(self, rows: range) -> Block:
        stored = self._slice(rows)
        copy = self.layer.compute_copy
        return Block(stored, None if copy is None else copy[rows.start : rows.stop])

    @override
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        if self.dithered_copy:
            return Block(target, floor_to_bf16(target, self.bits, rows, Purpose.DITHER))
        return Block(target)

    @override
    def write(self, rows: range, block: Block) -> None:
        self._slice(rows).copy_(block.stored)
        if self.layer.compute_copy is not None and block.compute is not None:
            self.layer.compute_copy[rows.start : rows.stop] = block.compute

    @override
    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.refresh_copy()

    @override
    def extra_bytes(self) -> int:
        return 2 * self.layer.weight.numel() if self.dithered_copy else 0


class SplitStorage(WeightStorage):
    """The bf16 computing weight in the model, 8 low bits beside it."""

    kind = "split"

    def __init__(self, layer: LayerSketch, seed: int) -> None:
        super().__init__(layer, seed)
        values = nearest_24_bits(layer.rows_view.to(torch.float32))
        compute, self.low = dither_to_split(values, self.bits, range(layer.out_features))
        layer.weight.data = compute.T.contiguous() if layer.transposed else compute

    @override
    def read(self, rows: range) -> Block:
        compute, low = self._slice(rows), self.low[rows.start : rows.stop]
        return Block(read_split(compute, low, self.bits, rows), compute, low)

    @override
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        compute, low = round_to_split(target, self.bits, rows, update)
        return Block(target, compute, low)

    @override
    def write(self, rows: range, block: Block) -> None:
        assert block.compute is not None and block.low is not None
        self._slice(rows).copy_(block.compute)
        self.low[rows.start : rows.stop] = block.low

    @override
    def extra_state(self) -> dict[str, Tensor]:
        return {"low_bits": self.low}

    @override
    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        self.low.copy_(state["low_bits"])


class Bf16Storage(WeightStorage):
    """bf16 weights alone; every step is rounded stochastically."""

    kind = "bf16"

    def __init__(self, layer: LayerSketch, seed: int) -> None:
        super().__init__(layer, seed)
        layer.weight.data = layer.weight.data.to(torch.bfloat16)

    @override
    def read(self, rows: range) -> Block:
        compute = self._slice(rows)
        return Block(compute.to(torch.float32), compute)

    @override
    def rounded(self, rows: range, target: Tensor, update: int) -> Block:
        compute = floor_to_bf16(target, self.bits, rows, Purpose.ROUNDING, update)
        return Block(compute.to(torch.float32), compute)

    @override
    def write(self, rows: range, block: Block) -> None:
        assert block.compute is not None
        self._slice(rows).copy_(block.compute)


def make_storage(layer: LayerSketch, kind: str, seed: int, dithered_copy: bool) -> WeightStorage:
    """The storage of one layer, converting its weight where `kind` asks for another dtype.

    Raises:
        ValueError: the weight's dtype does not allow it.
    """
    dtype = layer.weight.dtype
    if kind == "auto":
        kind = "split" if dtype == torch.bfloat16 else "fp32"
    if dtype == torch.float64:
        raise ValueError(f"{layer.name}.weight is float64, which no storage holds; convert the model to float32")
    if kind == "fp32":
        return Fp32Storage(layer, seed, dithered_copy)
    if dithered_copy:
        raise ValueError(
            f"dithered_copy is for fp32 storage, but {layer.name}.weight is {dtype} and is stored as {kind!r}; "
            f"leave it off, or set storage='fp32'"
        )
    return SplitStorage(layer, seed) if kind == "split" else Bf16Storage(layer, seed)
