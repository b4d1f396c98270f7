# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a message: what each merge was, and the digest that a replica must come to."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from logra.optim.digest import MASK, digest_of, name_key
from logra.optim.merge import LayerStep
from logra.optim.optimizer import LograOptimizer
from logra.optim.storage import Block
from logra.parallel.rows import shifted, whole
from logra.sketch.layer_sketch import LayerSketch
from logra.sketch.targets import stable_name
from logra.sync.full import full_pieces
from logra.sync.layout import DTYPES, Layout, WeightLayout, WholeLayout
from logra.sync.message import Factors, SyncMessage, encode
from logra.sync.replica import as_rows, whole_digest
from logra.sync.sparse_patch import PatchSample


class FactorSource:
    """Watches a `LograOptimizer`: each applied update becomes a message.

    Where processes hold the weights in parts, all of them make one together, and each gets the whole message.

    Args:
        optimizer: of the run; its `watcher` is set.
        model: whose trained other parameters travel whole.
        compute: "bf16" or "fp32", what replicas compute in.

    Attributes:
        layout: for the replicas.
        version: of the present weights; 0 at start.

    Raises:
        ValueError: the optimizer computes with weights that no replica can have.
    """

    def __init__(self, optimizer: LograOptimizer, model: Any, compute: str) -> None:
        if optimizer.settings.dithered_copy:
            raise ValueError("dithered_copy computes with weights that no replica has; use storage 'split' instead")
        self.optimizer, self.version, self.compute = optimizer, 0, compute
        trained = {id(each) for each in optimizer.trained_others}
        selected = {id(each.weight) for each in optimizer.sketches}
        named = {stable_name(name): each for name, each in model.named_parameters()}
        self._whole = {name: each for name, each in named.items() if id(each) in trained}
        dtype = DTYPES[compute]
        self._frozen = tuple(
            (name, whole_digest(name, whole(each, dtype)), tuple(each.shape))
            for name, each in named.items()
            if id(each) not in trained | selected
        )
        self.layout = self._layout()
        self._of = {each.name: each for each in self.layout.weights}
        self._steps: dict[str, Factors] = {}
        self._digest, self._update = 0, 0
        self._patch = PatchSample({each.name: len(each.rows.mine) for each in optimizer.sketches}, self._computing)
        optimizer.watcher = self

    def _layout(self) -> Layout:
        optimizer, settings = self.optimizer, self.optimizer.settings
        weights = tuple(
            WeightLayout(
                each.name,
                each.out_features,
                each.in_features,
                each.group.rank,
                each.group.name,
                optimizer.storages[each.name].kind,
            )
            for each in optimizer.sketches
        )
        others = tuple(WholeLayout(name, self.compute, tuple(each.shape)) for name, each in self._whole.items())
        drawn = (settings.seed, settings.projection, settings.factor_bits, self.compute)
        return Layout(*drawn, weights, others, self._frozen)

    @property
    def weights_bytes(self) -> int:
        """Of what changes, in bf16: what a sender of whole weights would send."""
        selected = sum(2 * each.rows * each.columns for each in self.layout.weights)
        return selected + sum(2 * math.prod(each.shape) for each in self.layout.whole)

    # Called by the optimizer

    def begin(self, update: int) -> None:
        """An update is about to be merged; if layers were regrouped since, replicas are told the new layout."""
        if any(self._of[each.name].group != each.group.name for each in self.optimizer.sketches):
            self.layout = self._layout()
            self._of = {each.name: each for each in self.layout.weights}
        self._steps, self._digest, self._update = {}, 0, update

    def block(self, layer: LayerSketch, rows: range, after: Block) -> None:
        """Some rows held here were written."""
        self._digest += self._digest_of(layer, rows, after)

    def layer(self, layer: LayerSketch, step: LayerStep | None) -> None:
        """All rows of a layer held here were written, or nothing changed."""
        if step is None:
            self._digest += self._digest_at_rest(layer)
            return
        integers, scales = layer.rows.whole(step.factors), layer.rows.whole(step.scales)
        if step.decay_factor != 1 or bool(scales.any()):
            self._steps[layer.name] = Factors(integers.cpu(), scales.cpu(), step.decay_factor)

    # For the sender

    def message(self) -> tuple[bytes, int] | None:
        """Of the latest applied update, once: the bytes, and the digest that must come of them; None if no weight
        changed.
        """
        if not self._steps and not self._whole:
            return None
        others = {name: whole(each) for name, each in self._whole.items()}
        self.version += 1
        data = encode(self.layout, SyncMessage(self.version, self.version - 1, self._update, self._steps, others))
        self._steps = {}
        return data, self._everywhere(self._digest)

    def digest(self) -> int:
        """Of the weights as they are."""
        return self._everywhere(sum(self._digest_at_rest(layer) for layer in self.optimizer.sketches))

    def forced(self) -> bytes:
        """A message that changes every selected weight by about a third of its usual size, to see that it arrives."""
        steps = {}
        for each in self.layout.weights:
            draw = torch.Generator().manual_seed(name_key(each.name) >> 1)
            integers = torch.randint(-100, 101, (each.rows, each.rank), generator=draw)
            scales = torch.full((each.rows,), 0.01 / (58 * each.rank**0.5))  # 58: rms of the integers
            steps[each.name] = Factors(integers, scales, 1.0)
        others = {name: whole(each) for name, each in self._whole.items()}
        return encode(self.layout, SyncMessage(self.version + 1, self.version, 0, steps, others))

    def patch_bytes(self) -> int:
        """Of a lossless sparse patch of what changed since the last call, estimated from some rows of each weight."""
        holders = next(iter(self.optimizer.sketches)).rows.holders
        return int(holders.summed(torch.tensor([self._patch.since()], dtype=torch.float64)).sum())

    def pieces(self) -> Iterator[bytes]:
        """The weights as they are, for a replica that needs all of them."""
        return full_pieces(self.layout, self.version, self._values)

    def _values(self, name: str) -> Tensor:
        layer = self.optimizer.sketches.layers.get(name)
        if layer is None:
            return whole(self._whole[name])
        stored = self.optimizer.storages[name].read(range(len(layer.rows.mine))).stored
        return layer.rows.whole(stored)

    def _digest_at_rest(self, layer: LayerSketch) -> int:
        rows = range(len(layer.rows.mine))
        return self._digest_of(layer, rows, self.optimizer.storages[layer.name].read(rows))

    def _digest_of(self, layer: LayerSketch, rows: range, block: Block) -> int:
        place, columns = shifted(rows, layer.rows.mine.start), range(layer.in_features)
        return digest_of(self._computed(layer, block), name_key(layer.name), place, columns, layer.in_features)

    def _computed(self, layer: LayerSketch, block: Block) -> Tensor:
        if self.layout.computing_dtype(self._of[layer.name]) != torch.bfloat16:
            return block.stored
        return block.stored.to(torch.bfloat16) if block.compute is None else block.compute

    def _computing(self, name: str, rows: range) -> Tensor:
        return self._computed(self.optimizer.sketches.layers[name], self.optimizer.storages[name].read(rows))

    def _everywhere(self, here: int) -> int:
        """With the rows of other processes, and the tensors that travel whole."""
        holders = next(iter(self.optimizer.sketches)).rows.holders
        return (int(holders.summed(torch.tensor(_signed(here & MASK)))) + self._digest_of_whole()) & MASK

    def _digest_of_whole(self) -> int:
        dtype = DTYPES[self.layout.compute]
        return sum(whole_digest(each.name, whole(self._whole[each.name], dtype)) for each in self.layout.whole)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class WholeSource:
    """For methods whose steps are dense: every message is the weights that compute, with the same versions and digests.

    Args:
        tensors: by name, as they are; called for each message (adapters merged, for example).
        compute: "bf16" or "fp32".
        changing: names of those that ever change; default: all.
    """

    def __init__(self, tensors: Any, compute: str, changing: Collection[str] | None = None) -> None:
        self._tensors, self.version = tensors, 0
        dtype, layouts, frozen = DTYPES[compute], list[WholeLayout](), list[tuple[str, int, tuple[int, ...]]]()
        for name, each in tensors().items():
            if not each.is_floating_point():
                continue
            if changing is None or name in changing:
                layouts.append(WholeLayout(name, compute, tuple(each.shape)))
            else:
                frozen.append((name, whole_digest(name, whole(each, dtype)), tuple(each.shape)))
        self.layout = Layout(0, "rademacher", 8, compute, (), tuple(layouts), tuple(frozen))
        self._latest = self._present()  # until its patch is measured
        self._sent = self._digest_of(self._latest)
        self._patch = PatchSample({each.name: as_rows(each.shape)[0] for each in layouts}, self._rows)
        self._latest = {}

    @property
    def weights_bytes(self) -> int:
        """Of what changes, in bf16."""
        return sum(2 * math.prod(each.shape) for each in self.layout.whole)

    def message(self) -> tuple[bytes, int] | None:
        """Of the weights after an update; None if they are as they were."""
        present = self._present()
        digest = self._digest_of(present)
        if digest == self._sent:
            return None
        self.version, self._latest, self._sent = self.version + 1, present, digest
        data = encode(self.layout, SyncMessage(self.version, self.version - 1, self.version, {}, present))
        return data, digest

    def forced(self) -> bytes:
        """A message that changes every weight by a third, to see that it arrives."""
        moved = {name: value * 1.33 for name, value in self._present().items()}
        return encode(self.layout, SyncMessage(self.version + 1, self.version, 0, {}, moved))

    def patch_bytes(self) -> int:
        """Of a lossless sparse patch of what changed since the last call, estimated from some rows of each weight."""
        found, self._latest = int(self._patch.since()) if self._latest else 0, {}
        return found

    def _rows(self, name: str, rows: range) -> Tensor:
        value = self._latest[name]
        return value.view(as_rows(value.shape))[rows.start : rows.stop]

    def digest(self) -> int:
        """Of the weights as they are."""
        return self._digest_of(self._present())

    def pieces(self) -> Iterator[bytes]:
        """The weights as they are."""
        return full_pieces(self.layout, self.version, self._present().__getitem__)

    def _present(self) -> dict[str, Tensor]:
        dtype = DTYPES[self.layout.compute]
        present = self._tensors()
        return {each.name: whole(present[each.name], dtype) for each in self.layout.whole}

    def _digest_of(self, present: dict[str, Tensor]) -> int:
        return sum(whole_digest(name, value) for name, value in present.items()) & MASK
