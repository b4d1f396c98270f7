# SPDX-License-Identifier: Apache-2.0
"""Random bits that anybody can rebuild anywhere: Philox4x32-10 keyed by seed, name and update.

Every random number of the method (projections, rounding, dither) is a function of

    (seed, name) -> 64-bit key        (column block, row, update, purpose) -> 128-bit counter

so any rectangle of any stream can be made without making the rest, and the bits do not depend on
device, thread count, chunk or shard. Words are laid out little-endian: the four words of the block
at column block b, row i stand at columns 4b .. 4b+3 of row i, and narrower lanes subdivide words
from their low end. Source of the generator: Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from logra.native import in_row_parts, native

_MASK = 0xFFFFFFFF
_PLAIN_CHUNK_WORDS = 1 << 20


class Purpose(IntEnum):
    """What a stream is for; part of the counter, so streams of one key never overlap."""

    PROJECTION = 1
    ROUNDING = 2
    DITHER = 3
    SAMPLING = 4


@dataclass(frozen=True)
class BitStream:
    """One infinite matrix of random bits.

    >>> stream = BitStream.named(seed=0, name="model.layers.0.mlp.up_proj", purpose=Purpose.ROUNDING, update=1)
    >>> whole = stream.lanes(range(0, 4), range(0, 64), bits=8)
    >>> bool((stream.lanes(range(2, 3), range(5, 9), bits=8) == whole[2:3, 5:9]).all())
    True
    """

    key: int
    purpose: int
    update: int

    @classmethod
    def named(cls, seed: int, name: str, purpose: Purpose, update: int = 0) -> "BitStream":
        """The stream of `name` (an input group or a weight) under `seed`, at `update`."""
        digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little"), int(purpose), update)

    def words(self, rows: range, words: range, device: torch.device | str = "cpu") -> Tensor:
        """int32 [len(rows), len(words)]: 32 random bits per entry."""
        first_block, last_block = words.start // 4, -(-words.stop // 4)
        filled = self._blocks(rows, range(first_block, last_block), torch.device(device))
        start = words.start - 4 * first_block
        return filled[:, start : start + len(words)]

    def lanes(self, rows: range, columns: range, bits: int, device: torch.device | str = "cpu") -> Tensor:
        """[len(rows), len(columns)] of `bits` random bits per entry: uint8 for 8, int16 for 16 (two's complement)."""
        dtype = {8: torch.uint8, 16: torch.int16}[bits]
        lanes_per_block = 128 // bits
        first_block, last_block = columns.start // lanes_per_block, -(-columns.stop // lanes_per_block)
        filled = self._blocks(rows, range(first_block, last_block), torch.device(device)).view(dtype)
        start = columns.start - lanes_per_block * first_block
        return filled[:, start : start + len(columns)]

    def packed(self, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
        """uint8 [len(rows), ceil(len(columns) / 8)]: one random bit per entry; `columns` starts at a multiple of 8.

        Entry (i, j) is bit j % 8 of byte j // 8. Bits past the last column are random too.
        """
        assert columns.start % 8 == 0
        return self.lanes(rows, range(columns.start // 8, -(-columns.stop // 8)), 8, device)

    def _blocks(self, rows: range, blocks: range, device: torch.device) -> Tensor:
        """int32 [len(rows), 4 * len(blocks)], contiguous."""
        if device.type == "cpu" and native is not None:
            return self._native_blocks(rows, blocks)
        rows_per_chunk = max(1, _PLAIN_CHUNK_WORDS // max(1, 4 * len(blocks)))
        if len(rows) <= rows_per_chunk:
            return self._plain_blocks(rows, blocks, device)
        starts = range(rows.start, rows.stop, rows_per_chunk)
        return torch.cat(
            [self._plain_blocks(range(r, min(r + rows_per_chunk, rows.stop)), blocks, device) for r in starts]
        )

    def _plain_blocks(self, rows: range, blocks: range, device: torch.device) -> Tensor:
        c0 = torch.arange(blocks.start, blocks.stop, device=device).expand(len(rows), -1)
        c1 = torch.arange(rows.start, rows.stop, device=device)[:, None].expand(-1, len(blocks))
        c2, c3 = torch.full_like(c0, self.update & _MASK), torch.full_like(c0, self.purpose)
        k0, k1 = self.key & _MASK, self.key >> 32
        for _ in range(10):
            # The low 64 bits of a wrapped int64 product are those of the unsigned one.
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1, c2, c3 = (
                ((p1 >> 32) & _MASK) ^ c1 ^ k0,
                p1 & _MASK,
                ((p0 >> 32) & _MASK) ^ c3 ^ k1,
                p0 & _MASK,
            )
            k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
        return torch.stack((c0, c1, c2, c3), dim=-1).to(torch.int32).reshape(len(rows), 4 * len(blocks))

    def _native_blocks(self, rows: range, blocks: range) -> Tensor:
        out = torch.empty(len(rows), 4 * len(blocks), dtype=torch.int32, device="cpu")
        if type(out) is not Tensor:
            return out  # a fake tensor has a size and nothing to fill

        def fill(first: int, count: int) -> None:
            address, row = out[first:].data_ptr(), rows.start + first
            native.fill(address, count, len(blocks), row, blocks.start, self.key, self.purpose, self.update)

        in_row_parts(fill, len(rows), out.numel())
        return out
