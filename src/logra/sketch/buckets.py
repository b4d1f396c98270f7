# SPDX-License-Identifier: Apache-2.0
"""Sketches that leave a block summed over processes and divided by rows, once its backward is done.

A bucket holds the sketches of one block as they come: a buffer [holders, n] whose part for each holder has that
holder's rows of every layer. One reduce-scatter a block and micro-batch sums it into the shards; with `each_update` the
buffers stay until the step is proposed. Source: section 3 of the design.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from logra.parallel.rows import Holders
from logra.sketch.layer_sketch import LayerSketch


class Bucket:
    """The layers of one block.

    Args:
        layers: divided among the same holders.
    """

    def __init__(self, layers: list[LayerSketch]) -> None:
        self.layers = layers
        self.holders: Holders = layers[0].rows.holders
        self.buffer: Tensor | None = None

    def places(self) -> Iterable[tuple[LayerSketch, slice]]:
        """Each layer, and where its rows lie in a holder's part."""
        start = 0
        for layer in self.layers:
            size = layer.rows.each * layer.group.rank
            yield layer, slice(start, start + size)
            start += size

    def add(self, layer: LayerSketch, product: Tensor, scales: Tensor) -> None:
        """Add H^T P diag(scales), [out_features, rank], to what waits to be summed."""
        where = dict(self.places())
        if self.buffer is None:
            size = max(place.stop for place in where.values())
            self.buffer = torch.zeros(self.holders.count, size, dtype=torch.float32, device=product.device)
        for holder in range(self.holders.count):
            rows = layer.rows.part(holder)
            mine = self.buffer[holder, where[layer]][: len(rows) * layer.group.rank].view(len(rows), layer.group.rank)
            mine.addcmul_(product[rows.start : rows.stop].to(torch.float32), scales)

    def leave(self, divisor: float) -> int:
        """Sum over processes into the shards; bytes that went in."""
        assert self.buffer is not None
        summed, size = self.holders.scatter_sum(self.buffer), self.buffer.numel() * 4
        self.buffer = None
        if divisor != 1.0:
            summed /= divisor
        for layer, place in self.places():
            rank, rows = layer.group.rank, layer.rows.mine
            part = summed[place][: len(rows) * rank].view(len(rows), rank)
            layer.sketch = part if layer.sketch is None else layer.sketch.add_(part)
        return size


class Buckets:
    """All buckets of a model, and which of them backward is at.

    Args:
        layers: sketched layers by block.
        each_update: sum once when the step is proposed instead of after each micro-batch.

    Attributes:
        divisor: what sums over processes are divided by.
        bytes_in: that this process gave to reduce-scatters so far.
    """

    def __init__(self, layers: Iterable[list[LayerSketch]], each_update: bool) -> None:
        self.buckets = [Bucket(each) for each in layers]
        self.of = {layer: bucket for bucket in self.buckets for layer in bucket.layers}
        self.each_update, self.divisor, self.bytes_in = each_update, 1.0, 0
        self._open: Bucket | None = None

    def add(self, layer: LayerSketch, product: Tensor, scales: Tensor) -> None:
        """Called by the backward of each layer."""
        bucket = self.of[layer]
        if bucket is not self._open and not self.each_update:
            if self._open is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self._close()
            self._open = bucket
        bucket.add(layer, product, scales)

    def complete(self) -> None:
        """Sum what still waits, before the step is proposed."""
        for bucket in self.buckets:
            if bucket.buffer is not None:
                self.bytes_in += bucket.leave(self.divisor)

    def clear(self) -> None:
        """Drop what waits."""
        self._open = None
        for bucket in self.buckets:
            bucket.buffer = None

    def _end_of_backward(self) -> None:
        self._close()
        self._open = None

    def _close(self) -> None:
        if self._open is not None and self._open.buffer is not None:
            self.bytes_in += self._open.leave(self.divisor)
