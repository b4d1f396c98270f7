# SPDX-License-Identifier: Apache-2.0
"""A number that two holders of a weight compare: a sum mod 2^64 of a mix of each entry's bits, its place and the name.

    entry:   h = key(name) + place x C1 + bits x C2,   h ^= h >> 32,  h *= C3,  h ^= h >> 29        (mod 2^64)

It does not depend on order, block, shard or slice, so every holder adds up what it has, block by block, and the sums of
the parts are added. Source: section 4 of the design.
"""

import hashlib

import torch
from torch import Tensor

from logra.native import in_row_parts, native

MASK = (1 << 64) - 1
_C1, _C2, _C3 = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_PLAIN_ENTRIES = 1 << 20


def name_key(name: str) -> int:
    """Of a weight, 64 bits."""
    return int.from_bytes(hashlib.blake2b(f"digest\0{name}".encode(), digest_size=8).digest(), "little")


def digest_of(values: Tensor, key: int, rows: range, columns: range, total_columns: int) -> int:
    """Of a rectangle of a weight.

    Args:
        values: bf16 or fp32 [len(rows), len(columns)].
        key: `name_key` of the weight.
        rows: of the whole weight in which the values lie.
        columns: likewise.
        total_columns: of the whole weight.
    """
    if not values.numel():
        return 0
    values = values.detach().contiguous()
    place = rows.start * total_columns + columns.start
    if native is not None and values.device.type == "cpu":
        parts: list[int] = []

        def work(first: int, count: int) -> None:
            start = (key + (place + first * total_columns) * _C1) & MASK
            where = (values[first:].data_ptr(), count, len(columns), total_columns)
            parts.append(native.digest(*where, values.element_size(), start))

        in_row_parts(work, len(rows), values.numel())
        return sum(parts) & MASK
    step = max(1, _PLAIN_ENTRIES // len(columns))
    total = 0
    for first in range(0, len(rows), step):
        start = (key + (place + first * total_columns) * _C1) & MASK
        total += _plain(values[first : first + step], total_columns, start)
    return total & MASK


def _plain(values: Tensor, total_columns: int, start: int) -> int:
    rows, columns = values.shape
    width = 0xFFFF if values.element_size() == 2 else 0xFFFFFFFF
    bits = values.view(_BITS[values.dtype]).to(torch.int64) & width
    row = torch.arange(rows, device=values.device)[:, None] * total_columns
    place = row + torch.arange(columns, device=values.device)
    # The low 64 bits of wrapped int64 products are those of unsigned ones.
    mixed = place * _signed(_C1) + bits * _signed(_C2) + _signed(start)
    mixed ^= (mixed >> 32) & 0xFFFFFFFF
    mixed *= _signed(_C3)
    mixed ^= (mixed >> 29) & 0x7FFFFFFFF
    return int(mixed.sum()) & MASK


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
