# SPDX-License-Identifier: Apache-2.0
"""Rounding fp32 to 24 or 16 bits by integer arithmetic on float bits, with bits anybody can rebuild.

An fp32 number is sign and magnitude, so adding to its low bits raises the magnitude by fractions of
an ulp and dropping low bits floors it; carries run into the exponent as they should. Adding random
bits and flooring is stochastic rounding; adding bits that are fixed per element is a fixed dither.

    24 bits:   value = floor(fp32 + noise / 256 ulp24)            noise: 8 bits, new each update
    split:     (upper, low) = value + u / 256 ulp16               u: 8 bits, fixed per element
    bf16:      upper = floor(fp32 + noise / 65536 ulp16)          noise: 16 bits, new each update
    dither:    upper = floor(fp32 + u / 65536 ulp16)              u: 16 bits, fixed per element

`upper`, a bf16 number, is what the model computes with. Matrices are whole rows of a weight:
[rows.stop - rows.start, in_features], contiguous. Source: section 3 of the design.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logra.native import in_row_parts, native
from logra.random_bits import BitStream, Purpose


@dataclass(frozen=True)
class WeightBits:
    """The random bits of one weight, keyed by the run's seed and the weight's stable name.

    Attributes:
        first_column: of what is held, where that is a slice of the weight's columns.
    """

    seed: int
    name: str
    first_column: int = 0

    def stream(self, purpose: Purpose, update: int) -> BitStream:
        """Bits of one purpose at one update; the dither is the same at all of them."""
        return BitStream.named(self.seed, self.name, purpose, 0 if purpose is Purpose.DITHER else update)

    def lanes(self, purpose: Purpose, update: int, rows: range, like: Tensor, bits: int) -> Tensor:
        """int32 [rows, columns of `like`], each entry below 2^bits."""
        columns = range(self.first_column, self.first_column + like.shape[1])
        lanes = self.stream(purpose, update).lanes(rows, columns, bits, like.device)
        return lanes.to(torch.int32).bitwise_and_((1 << bits) - 1)


def read_split(upper: Tensor, low: Tensor, bits: WeightBits, rows: range) -> Tensor:
    """fp32 values whose 24 bits are stored as bf16 `upper` and uint8 `low`."""
    _expect(upper, torch.bfloat16)
    _expect(low, torch.uint8)
    if _use_native(bits, upper, low):
        value = torch.empty(upper.shape, dtype=torch.float32, device="cpu")
        key = bits.stream(Purpose.DITHER, 0).key

        def work(first: int, count: int) -> None:
            addresses = (upper[first:].data_ptr(), low[first:].data_ptr(), value[first:].data_ptr())
            native.split_read(*addresses, count, upper.shape[1], rows.start + first, key, int(Purpose.DITHER))

        in_row_parts(work, len(rows), upper.numel())
        return value
    dither = bits.lanes(Purpose.DITHER, 0, rows, upper, 8)
    whole = upper.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return whole.add_((low.to(torch.int32) - dither).bitwise_left_shift_(8)).view(torch.float32)


def round_to_split(value: Tensor, bits: WeightBits, rows: range, update: int) -> tuple[Tensor, Tensor]:
    """Round fp32 `value` to 24 bits stochastically, in place, and give its stored parts: bf16 upper, uint8 low."""
    _expect(value, torch.float32)
    if _use_native(bits, value):
        upper = torch.empty(value.shape, dtype=torch.bfloat16, device="cpu")
        low = torch.empty(value.shape, dtype=torch.uint8, device="cpu")
        key = bits.stream(Purpose.ROUNDING, update).key

        def work(first: int, count: int) -> None:
            addresses = (value[first:].data_ptr(), upper[first:].data_ptr(), low[first:].data_ptr())
            row = rows.start + first
            purposes = (int(Purpose.ROUNDING), update, int(Purpose.DITHER))
            native.split_round(*addresses, count, value.shape[1], row, key, *purposes)

        in_row_parts(work, len(rows), value.numel())
        return upper, low
    whole = value.view(torch.int32)
    whole.add_(bits.lanes(Purpose.ROUNDING, update, rows, value, 8)).bitwise_and_(~0xFF)
    return dither_to_split(value, bits, rows)


def dither_to_split(value: Tensor, bits: WeightBits, rows: range) -> tuple[Tensor, Tensor]:
    """The stored parts of fp32 values that have 24 bits already: bf16 upper, uint8 low."""
    shifted = bits.lanes(Purpose.DITHER, 0, rows, value, 8).bitwise_left_shift_(8).add_(value.view(torch.int32))
    low = shifted.bitwise_right_shift(8).to(torch.uint8)
    return shifted.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16), low


def nearest_24_bits(value: Tensor) -> Tensor:
    """fp32 values rounded to 24 bits, ties to even."""
    whole = value.contiguous().view(torch.int32)
    return (whole + 0x7F + ((whole >> 8) & 1)).bitwise_and_(~0xFF).view(torch.float32)


def floor_to_bf16(value: Tensor, bits: WeightBits, rows: range, purpose: Purpose, update: int = 0) -> Tensor:
    """bf16 of fp32 `value` (left as it is) after adding `purpose`'s 16 bits: stochastic rounding, or a fixed dither."""
    _expect(value, torch.float32)
    if _use_native(bits, value):
        upper = torch.empty(value.shape, dtype=torch.bfloat16, device="cpu")
        stream = bits.stream(purpose, update)

        def work(first: int, count: int) -> None:
            addresses, row = (value[first:].data_ptr(), upper[first:].data_ptr()), rows.start + first
            native.floor(*addresses, count, value.shape[1], row, stream.key, int(purpose), stream.update)

        in_row_parts(work, len(rows), value.numel())
        return upper
    lanes = bits.lanes(purpose, update, rows, value, 16)
    shifted = lanes.add_(value.contiguous().view(torch.int32)).bitwise_right_shift_(16)
    return shifted.to(torch.int16).view(torch.bfloat16)


def _expect(tensor: Tensor, dtype: torch.dtype) -> None:
    """Bits are moved as they lie, so another dtype would be read as nonsense."""
    if tensor.dtype != dtype:
        raise TypeError(f"rounding needs {dtype}, got {tensor.dtype}")


def _use_native(bits: WeightBits, *tensors: Tensor) -> bool:
    if native is None or bits.first_column:  # the helper counts columns from the first
        return False
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
