# SPDX-License-Identifier: Apache-2.0
"""What a lossless sparse patch of a step would weigh: the changed bf16 values with their places, compressed.

A fair comparison for the factors: it needs no knowledge of the method, and is what a sender of dense weights could do.
Places are written as gaps of 16 bits (a longer one as several), values as they are after the step; both deflated.
"""

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_LONGEST = 0xFFFF
_SHARE = 64  # one row of so many is looked at


def sparse_patch(before: Tensor, after: Tensor) -> bytes:
    """The patch of one weight.

    Args:
        before: bf16, as a replica has it.
        after: bf16 of the same shape.
    """
    old, new = (each.detach().cpu().contiguous().flatten().view(torch.int16) for each in (before, after))
    places = (old != new).nonzero()[:, 0]
    gaps = torch.diff(places, prepend=torch.full((1,), -1))
    # A gap of 0 stands for so many unchanged entries; the one after it goes on from there.
    extra = (gaps - 1).clamp_min(0) // _LONGEST
    short = gaps - extra * _LONGEST
    counts = extra + 1
    ends = counts.cumsum(0) - 1
    written = torch.zeros(int(counts.sum()), dtype=torch.int64)
    written[ends] = short
    wide = written.to(torch.int32).to(torch.uint16)
    values = new[places]
    return zlib.compress(_bytes(wide)) + b"|" + zlib.compress(_bytes(values)) if len(places) else b""


def patched(before: Tensor, patch: bytes) -> Tensor:
    """The weight after the step, from the one before."""
    result = before.detach().clone()
    if not patch:
        return result
    inflater = zlib.decompressobj()
    written = torch.frombuffer(bytearray(inflater.decompress(patch)), dtype=torch.uint16).to(torch.int64)
    values = torch.frombuffer(bytearray(zlib.decompress(inflater.unused_data[1:])), dtype=torch.int16)
    steps = torch.where(written == 0, _LONGEST, written)
    places = steps.cumsum(0)[written != 0] - 1
    result.view(-1).view(torch.int16)[places] = values
    return result


class PatchSample:
    """What patches of all weights weigh, estimated from one row of 64 of each, a block from its middle.

    Args:
        rows: of each weight, by name; those without rows are left out.
        read: some rows of a weight as it computes now.
    """

    def __init__(self, rows: Mapping[str, int], read: Callable[[str, range], Tensor]) -> None:
        self.rows, self.read = {name: count for name, count in rows.items() if count}, read
        self._before = {name: self._sample(name) for name in self.rows}

    def since(self) -> float:
        """Bytes of a patch of everything that changed since the last call."""
        total = 0.0
        for name, before in self._before.items():
            self._before[name] = now = self._sample(name)
            total += len(sparse_patch(before, now)) * self.rows[name] / len(now)
        return total

    def _sample(self, name: str) -> Tensor:
        count = self.rows[name]
        size = -(-count // _SHARE)
        start = (count - size) // 2
        return self.read(name, range(start, start + size)).detach().to("cpu", torch.bfloat16, copy=True)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
