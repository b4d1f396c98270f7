# SPDX-License-Identifier: Apache-2.0
"""All weights, piece by piece: what a replica gets when it joins, when it missed something, or when digests differ.

piece     magic "LoGRAful", format, layout digest, version, index, count      little-endian, 40 bytes
values    a selected weight as it is stored, fp32 or (storage bf16) bf16; or a tensor that travels whole
checksum  blake2b of all before, 32 bytes
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from logra.sync.layout import DTYPES, Layout
from logra.sync.message import DamagedMessage

MAGIC, FORMAT = b"LoGRAful", 1
_HEADER = struct.Struct("<8sHHIQQII")
_CHECKSUM = 32


@dataclass(frozen=True)
class Piece:
    """One tensor of a full state.

    Attributes:
        version: of the whole state.
        index: of the tensor: selected weights in the layout's order, then those that travel whole.
        last: whether the state is complete with it.
        values: of the tensor.
    """

    version: int
    index: int
    last: bool
    values: Tensor


def full_pieces(layout: Layout, version: int, values: Callable[[str], Tensor]) -> Iterator[bytes]:
    """The pieces of a state, one at a time.

    Args:
        layout: of the run.
        version: of the state.
        values: by name of a selected weight (as stored) or of a tensor that travels whole.
    """
    names = [*(each.name for each in layout.weights), *(each.name for each in layout.whole)]
    for index, name in enumerate(names):
        dtype, shape = shape_of(layout, index)
        tensor = values(name).detach().to(dtype)
        assert tuple(tensor.shape) == shape, name
        header = _HEADER.pack(MAGIC, FORMAT, 0, 0, layout.digest, version, index, len(names))
        body = header + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        yield body + hashlib.blake2b(body, digest_size=_CHECKSUM).digest()


def shape_of(layout: Layout, index: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a piece."""
    if index < len(layout.weights):
        weight = layout.weights[index]
        return torch.bfloat16 if weight.storage == "bf16" else torch.float32, (weight.rows, weight.columns)
    whole = layout.whole[index - len(layout.weights)]
    return DTYPES[whole.dtype], whole.shape


def is_piece(data: bytes) -> bool:
    """Whether this is one, and not a message of an update."""
    return data[: len(MAGIC)] == MAGIC


def decode_piece(layout: Layout, data: bytes) -> Piece:
    """What was encoded.

    Raises:
        DamagedMessage: size, checksum, format or layout are others.
    """
    body, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if len(body) < _HEADER.size or hashlib.blake2b(body, digest_size=_CHECKSUM).digest() != checksum:
        raise DamagedMessage("the piece's checksum is wrong")
    _, version_of_format, _, _, digest, version, index, count = _HEADER.unpack_from(body)
    if version_of_format != FORMAT or digest != layout.digest or count != len(layout.weights) + len(layout.whole):
        raise DamagedMessage("the piece was written for other weights or settings than this replica was told of")
    dtype, shape = shape_of(layout, index)
    values = torch.frombuffer(bytearray(body[_HEADER.size :]), dtype=dtype) if len(body) > _HEADER.size else None
    values = torch.empty(0, dtype=dtype) if values is None else values
    return Piece(version, index, index + 1 == count, values.view(shape))
