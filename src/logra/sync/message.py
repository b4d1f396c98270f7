# SPDX-License-Identifier: Apache-2.0
"""The message of one update: a header, a decay and the row scales of each weight, packed integers, whole tensors, a
checksum. Its size is known from the layout alone; nothing in it is executed when it is read.

    header    magic "LoGRAmsg", format, layout digest, version, base version, update      little-endian, 48 bytes
    decays    for each weight: fp32 decay factor, uint32 whether it changes
    scales    for each weight: fp32 [rows]
    factors   for each weight: integers [rows, rank], 8, 12 or 16 bits each, rows of 12 bits two to three bytes
    whole     tensors in the layout's order
    checksum  blake2b of all before, 32 bytes
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logra.sync.layout import DTYPES, Layout

MAGIC, FORMAT = b"LoGRAmsg", 1
_HEADER = struct.Struct("<8sHHIQQQQ")
_DECAY = struct.Struct("<fI")
_CHECKSUM = 32


class DamagedMessage(ValueError):
    """A message that is not what was sent, or not for this replica."""


@dataclass(frozen=True)
class Factors:
    """The step of one weight: integers [rows, rank], fp32 scales [rows], decay factor."""

    integers: Tensor
    scales: Tensor
    decay_factor: float


@dataclass(frozen=True)
class SyncMessage:
    """One update.

    Attributes:
        version: that a replica has after it. base: that it must have before.
        update: of the trainer; keys projections and rounding.
        steps: by weight name; a weight that does not change has none.
        whole: tensors by name.
    """

    version: int
    base: int
    update: int
    steps: Mapping[str, Factors]
    whole: Mapping[str, Tensor]


def message_bytes(layout: Layout) -> int:
    """Size of every message of a layout."""
    size = _HEADER.size + _CHECKSUM
    for weight in layout.weights:
        size += _DECAY.size + 4 * weight.rows + packed_bytes(weight.rows * weight.rank, layout.bits)
    return size + sum(each.bytes for each in layout.whole)


def packed_bytes(count: int, bits: int) -> int:
    """Of `count` integers."""
    return -(-count * bits // 8)


def encode(layout: Layout, message: SyncMessage) -> bytes:
    """The bytes that travel.

    Raises:
        ValueError: the message does not fit the layout.
    """
    numbers = (message.version, message.base, message.update)
    parts = [_HEADER.pack(MAGIC, FORMAT, 0, 0, layout.digest, *numbers)]
    decays, scales, factors = [], [], []
    for weight in layout.weights:
        step = message.steps.get(weight.name)
        decays.append(_DECAY.pack(1.0 if step is None else step.decay_factor, step is not None))
        if step is None:
            scales.append(bytes(4 * weight.rows))
            factors.append(bytes(packed_bytes(weight.rows * weight.rank, layout.bits)))
            continue
        if step.integers.shape != (weight.rows, weight.rank):
            raise ValueError(f"{weight.name}: factors are {tuple(step.integers.shape)}, not {weight.rows, weight.rank}")
        scales.append(_bytes(step.scales.to(torch.float32)))
        factors.append(_bytes(_packed(step.integers, layout.bits)))
    whole = [_bytes(message.whole[each.name].to(DTYPES[each.dtype])) for each in layout.whole]
    body = b"".join([*parts, *decays, *scales, *factors, *whole])
    return body + hashlib.blake2b(body, digest_size=_CHECKSUM).digest()


def decode(layout: Layout, data: bytes) -> SyncMessage:
    """What was encoded.

    Raises:
        DamagedMessage: size, checksum, format or layout are others.
    """
    wanted = message_bytes(layout)
    if len(data) != wanted:
        raise DamagedMessage(f"the message has {len(data)} bytes, {wanted} were expected")
    body, checksum = data[:-_CHECKSUM], data[-_CHECKSUM:]
    if hashlib.blake2b(body, digest_size=_CHECKSUM).digest() != checksum:
        raise DamagedMessage("the message's checksum is wrong")
    magic, version_of_format, _, _, digest, version, base, update = _HEADER.unpack_from(body)
    if (magic, version_of_format) != (MAGIC, FORMAT):
        raise DamagedMessage(f"the message is {magic!r} of format {version_of_format}, not {MAGIC!r} of {FORMAT}")
    if digest != layout.digest:
        raise DamagedMessage("the message was written for other weights or settings than this replica was told of")
    pieces = _pieces(memoryview(body)[_HEADER.size :], layout)
    decays = [_DECAY.unpack(next(pieces)) for _ in layout.weights]
    scales = [_tensor(next(pieces), torch.float32) for _ in layout.weights]
    packed = [next(pieces) for _ in layout.weights]
    steps = {}
    for weight, (decay, changes), scale, piece in zip(layout.weights, decays, scales, packed, strict=True):
        if changes:
            integers = _unpacked(piece, weight.rows * weight.rank, layout.bits).view(weight.rows, weight.rank)
            steps[weight.name] = Factors(integers, scale, decay)
    whole = {each.name: _tensor(next(pieces), DTYPES[each.dtype]).view(each.shape) for each in layout.whole}
    return SyncMessage(version, base, update, steps, whole)


def _pieces(body: memoryview, layout: Layout) -> Iterator[memoryview]:
    sizes = [_DECAY.size] * len(layout.weights)
    sizes += [4 * weight.rows for weight in layout.weights]
    sizes += [packed_bytes(weight.rows * weight.rank, layout.bits) for weight in layout.weights]
    sizes += [each.bytes for each in layout.whole]
    start = 0
    for size in sizes:
        yield body[start : start + size]
        start += size


def _packed(integers: Tensor, bits: int) -> Tensor:
    """uint8 of the integers, `bits` each."""
    flat = integers.to("cpu", torch.int8 if bits == 8 else torch.int16).contiguous().flatten()
    if bits != 12:
        return flat.view(torch.uint8)
    wide = torch.zeros(flat.numel() + flat.numel() % 2, dtype=torch.int32)
    wide[: flat.numel()] = flat
    low, high = (wide & 0xFFF).view(-1, 2).unbind(1)
    three = torch.stack([low & 0xFF, (low >> 8) | ((high & 0xF) << 4), high >> 4], dim=1)
    return three.to(torch.uint8).flatten()[: packed_bytes(flat.numel(), 12)]


def _unpacked(piece: memoryview, count: int, bits: int) -> Tensor:
    if bits == 8:
        return _tensor(piece, torch.int8)
    if bits == 16:
        return _tensor(piece, torch.int16)
    padded = torch.zeros(3 * (-(-count // 2)), dtype=torch.uint8)
    padded[: len(piece)] = _tensor(piece, torch.uint8)
    first, second, third = padded.to(torch.int32).view(-1, 3).unbind(1)
    pairs = torch.stack([first | ((second & 0xF) << 8), (second >> 4) | (third << 4)], dim=1).flatten()[:count]
    return (pairs - ((pairs & 0x800) << 1)).to(torch.int16)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _tensor(piece: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(piece), dtype=dtype) if len(piece) else torch.empty(0, dtype=dtype)
