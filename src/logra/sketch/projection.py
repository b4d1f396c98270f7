# SPDX-License-Identifier: Apache-2.0
"""The projection A [rank, in_features]: integers and one scale per row, rebuilt from a seed.

A = diag(row_scales) @ integers, with |integers| <= max_entry and E[A^T A] = I. Integers make the
merge exact (see `logra.optim.factors`); a projection never exists in fp32 longer than one product.
Rademacher signs are kept as bits, the other kinds as int8.

To add a kind, subclass `Projection`, set `max_entry`, fill `_make_compact` (and `_unpack` when the
kept form is not the integers themselves), and add the class to `KINDS`.
"""

import logging
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from logra.random_bits import BitStream, Purpose

log = logging.getLogger(__name__)


class Projection(ABC):
    """One drawn A, the function of (seed, group, update, rank, in_features) alone.

    Args:
        seed: seed of the run.
        group: stable name of the input group; see `logra.sketch.targets.stable_name`.
        update: number of the update that will consume the sketches, from 1.
        rank: rows of A.
        in_features: columns of A.
        device: where integers and scales are made.
    """

    max_entry: ClassVar[int]

    def __init__(
        self, seed: int, group: str, update: int, rank: int, in_features: int, device: torch.device | str = "cpu"
    ) -> None:
        self.rank, self.in_features, self.device = rank, in_features, torch.device(device)
        self.stream = BitStream.named(seed, group, Purpose.PROJECTION, update)
        self._compact: Tensor | None = None

    @abstractmethod
    def _make_compact(self) -> Tensor:
        """The form that is kept for the length of an update."""

    def _unpack(self, compact: Tensor) -> Tensor:
        return compact

    @abstractmethod
    def row_scales(self) -> Tensor:
        """fp32 [rank]: what each row of integers is multiplied by."""

    @property
    def compact(self) -> Tensor:
        """The form that is kept, made at first use."""
        if self._compact is None:
            self._compact = self._make_compact()
        return self._compact

    def integers(self) -> Tensor:
        """int8 [rank, in_features]."""
        return self._unpack(self.compact)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A itself [rank, in_features], for tests and references; the library never keeps it."""
        return self.integers().to(dtype) * self.row_scales().to(dtype)[:, None]

    def kept_bytes(self) -> int:
        """Bytes held between uses."""
        return 0 if self._compact is None else self._compact.numel() * self._compact.element_size()


class Rademacher(Projection):
    """Entries +-1/sqrt(rank), one bit each."""

    max_entry = 1

    @override
    def _make_compact(self) -> Tensor:
        return self.stream.packed(range(self.rank), range(self.in_features), self.device)

    @override
    def _unpack(self, compact: Tensor) -> Tensor:
        signs = _signs_of_byte(compact.device).index_select(0, compact.reshape(-1).to(torch.int32))
        return signs.view(self.rank, -1)[:, : self.in_features]

    @override
    def row_scales(self) -> Tensor:
        return torch.full((self.rank,), 1 / math.sqrt(self.rank), device=self.device, dtype=torch.float32)

    @staticmethod
    def block(stream: BitStream, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
        """int8 signs of any rectangle, without the rest of A; `columns` starts at a multiple of 8."""
        packed = stream.packed(rows, columns, device)
        signs = _signs_of_byte(packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
        return signs.view(len(rows), -1)[:, : len(columns)]


class Gaussian(Projection):
    """Nearly normal integers: the popcount of 32 random bits minus 16 (variance 8)."""

    max_entry = 16

    @override
    def _make_compact(self) -> Tensor:
        return self.block(self.stream, range(self.rank), range(self.in_features), self.device)

    @override
    def row_scales(self) -> Tensor:
        return torch.full((self.rank,), 1 / math.sqrt(8 * self.rank), device=self.device, dtype=torch.float32)

    @staticmethod
    def block(stream: BitStream, rows: range, columns: range, device: torch.device | str = "cpu") -> Tensor:
        """int8 integers of any rectangle, without the rest of A."""
        return (_popcount(stream.words(rows, columns, device)) - 16).to(torch.int8)


class Orthonormal(Projection):
    """Rows of a random orthonormal basis times sqrt(in_features / rank), rounded to 8 bits per row.

    Built whole, in fp64 on the CPU, from the integers of `Gaussian`. Two machines with different
    LAPACKs differ by about 1e-15 before rounding, so their integers agree but for entries that lie
    that close to a rounding boundary; a replica's digest would show one that does not.
    """

    max_entry = 127

    def _basis(self) -> Tensor:
        integers = Gaussian.block(self.stream, range(self.rank), range(self.in_features)).to(torch.float64)
        q, r = torch.linalg.qr(integers.T)
        q *= torch.sign(torch.sign(torch.diagonal(r)) + 0.5)  # a unique factor, whatever signs LAPACK chose
        return q.T * math.sqrt(self.in_features / self.rank)

    @override
    def _make_compact(self) -> Tensor:
        basis = self._basis()
        scales = basis.abs().amax(dim=1) / self.max_entry
        self._scales = scales.to(torch.float32).to(self.device)
        return torch.round(basis / scales[:, None]).to(torch.int8).to(self.device)

    @override
    def row_scales(self) -> Tensor:
        self.integers()
        return self._scales


KINDS: dict[str, type[Projection]] = {"rademacher": Rademacher, "gaussian": Gaussian, "orthonormal": Orthonormal}


def usable_rank(rank: int, in_features: int, group: str) -> int:
    """`rank`, or `in_features` with a note when that is smaller: more rows would add nothing."""
    if rank <= in_features:
        return rank
    log.warning(
        "rank %d is larger than in_features %d of %s: using rank %d there", rank, in_features, group, in_features
    )
    return in_features


_sign_tables: dict[torch.device, Tensor] = {}


def _signs_of_byte(device: torch.device) -> Tensor:
    """int8 [256, 8]: for each byte, +1 where its bit (low bit first) is set and -1 elsewhere."""
    if device not in _sign_tables:
        byte = torch.arange(256, device=device)[:, None]
        bit = torch.arange(8, device=device)[None, :]
        table = (((byte >> bit) & 1) * 2 - 1).to(torch.int8)
        if type(table) is not Tensor:
            return table  # a fake one, of no use to later callers
        _sign_tables[device] = table
    return _sign_tables[device]


def _popcount(words: Tensor) -> Tensor:
    """Set bits of each int32, as int32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24) & 0xFF
