# SPDX-License-Identifier: Apache-2.0
"""From sketches to a proposed step: clipping, row factors, one factor f for all layers. Changes nothing.

    ||f D A||_all / ||W||_all = update_ratio        step_size "update_ratio" (paper, section 2.3)
    f = lr                                          step_size "lr"

A `Proposal` fixes the integers of every layer's step; probe, check and merge make the same ones from it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from logra.config import LograSettings
from logra.optim.factors import gram, quantise_rows, row_steps, update_square_norm
from logra.optim.merge import LayerStep
from logra.optim.row_adam import RowStatistics, next_second_moment, root_moment, row_factors
from logra.parallel.rows import Holders
from logra.sketch.hooks import Sketches
from logra.sketch.layer_sketch import LayerSketch


@dataclass(frozen=True)
class LayerProposal:
    """What one layer would do.

    Attributes:
        layer: the layer; its sketch is read again when the integers are made.
        next_second_moment: v after the update, fp64 [rows held].
        row_factors: D = row_factors S, clipping included, fp64 [rows held]; None without a sketch.
        row_steps: what one unit of a row's integers stands for, fp32 [rows held]; None without a sketch.
        sketch_version: of the sketch that the above were made of.
    """

    layer: LayerSketch
    next_second_moment: Tensor
    row_factors: Tensor | None = None
    row_steps: Tensor | None = None
    sketch_version: int = -1

    def integers(self, bits: int) -> tuple[Tensor, Tensor]:
        """Q [rows held, rank] and, in fp64 [rows held], the scale of each row at alpha = f = 1.

        Raises:
            RuntimeError: the sketch is no longer the one that was proposed from.
        """
        self.check_current()
        projection, sketch = self.layer.group.projection, self.layer.sketch
        assert self.row_factors is not None and self.row_steps is not None
        assert sketch is not None and projection is not None
        factors = quantise_rows(sketch, projection.row_scales(), self.row_steps, bits)
        return factors, self.row_steps * self.row_factors

    def check_current(self) -> None:
        """Refuse a proposal whose sketch has changed since.

        Raises:
            RuntimeError: a backward or zero_grad() came in between.
        """
        sketch = self.layer.sketch
        if self.sketch_version != (-1 if sketch is None else sketch._version):
            raise RuntimeError(
                f"the sketch of {self.layer.name} changed between propose() and apply(): a backward, or zero_grad(), "
                f"came in between. Call propose() again after the last backward."
            )


@dataclass(frozen=True)
class Proposal:
    """A step that has been sized but not taken.

    Attributes:
        update: number of the update it would be, from 1.
        layers: what each layer would do, in the model's order.
        factor: f, common to all layers.
        unit_norm: ||D A|| over all layers.
        weight_norm: ||W|| over all layers (0 unless step_size is "update_ratio").
        sketch_norm: norm of all gradients together before clipping, in its dense meaning.
        clip: what the gradients were scaled by, at most 1.
        weight_decay_step: lr x decay; at alpha, weights are first multiplied by 1 - alpha x this.
        bits: bits of the integers.
        skip_reason: why this proposal must not be applied, or None.
    """

    update: int
    layers: tuple[LayerProposal, ...]
    factor: float
    unit_norm: float
    weight_norm: float
    sketch_norm: float
    clip: float
    weight_decay_step: float
    bits: int
    skip_reason: str | None = None

    @property
    def norm(self) -> float:
        """||f D A|| over all layers, at alpha = 1."""
        return self.factor * self.unit_norm

    @property
    def is_zero(self) -> bool:
        """Whether there is no direction at all: every sketch is zero."""
        return self.skip_reason is None and self.unit_norm == 0

    def step_of(self, proposed: LayerProposal, alpha: float) -> LayerStep | None:
        """The final numbers of one layer's step at `alpha`; None where nothing would change."""
        decay_factor = float(torch.tensor(1.0 - alpha * self.weight_decay_step, dtype=torch.float32))
        projection = proposed.layer.group.projection
        assert projection is not None
        if proposed.row_factors is None:
            if decay_factor == 1.0:
                return None
            rows, device = len(proposed.layer.rows.mine), proposed.layer.weight.device
            factors = torch.zeros(rows, projection.rank, dtype=torch.int8, device=device)
            scales = torch.zeros(rows, device=device, dtype=torch.float32)
        else:
            factors, unit_steps = proposed.integers(self.bits)
            scales = (unit_steps * (alpha * self.factor)).to(torch.float32)
        return LayerStep(factors, projection.integers(), scales, decay_factor, self.update)


@dataclass(frozen=True)
class AppliedUpdate:
    """What a step did.

    Attributes:
        update: its number, from 1.
        norm: ||alpha f D A|| over all selected weights.
        sketch_norm: norm of all gradients together before clipping.
        realised_stored: share of the step that arrived in the stored weights (projection on the intended step).
        realised_compute: the same for the weights that bf16 compute uses.
        skip_reason: why nothing was changed, or None.
    """

    update: int
    norm: float
    sketch_norm: float
    realised_stored: float | None = None
    realised_compute: float | None = None
    skip_reason: str | None = None


def make_proposal(
    sketches: Sketches,
    second_moments: dict[str, Tensor],
    count: int,
    step_size: tuple[float, float],
    others_square_norm: Tensor | None,
    settings: LograSettings,
) -> Proposal:
    """Size the step that the present sketches ask for; nothing is changed.

    Args:
        sketches: with the sums of all micro-batches; every process that holds a part of the weights calls this.
        second_moments: v of each layer by name, fp64 [rows held].
        count: updates that v has seen so far.
        step_size: lr (in the unit of settings.step_size) and weight decay.
        others_square_norm: square norm of what this process holds of the other parameters' gradients, which the clip
            counts too.
        settings: of the optimizer.
    """
    statistics = {layer.name: RowStatistics.of(layer.sketch) for layer in sketches if layer.sketch is not None}
    holders = next(iter(sketches)).rows.holders
    squares = [each.square_norms.sum(dtype=torch.float64) for each in statistics.values()]
    total = _sum(squares if others_square_norm is None else [*squares, others_square_norm], holders)
    sketch_norm = math.sqrt(total) if total >= 0 else math.nan
    lr, decay = step_size
    nothing = not statistics and others_square_norm is None
    if nothing or not math.isfinite(sketch_norm):
        reason = "no backward since the last update" if nothing else "non-finite gradient"
        return Proposal(count + 1, (), 0.0, 0.0, 0.0, sketch_norm, 1.0, 0.0, settings.factor_bits, reason)
    clip = 1.0
    if settings.max_norm is not None and sketch_norm > settings.max_norm:
        clip = settings.max_norm / sketch_norm
    layers = _propose_layers(sketches, second_moments, statistics, (count, clip), settings)
    unit_norm = math.sqrt(_unit_square_norm(sketches, layers, settings.factor_bits))
    weight_norm, factor = 0.0, lr
    if settings.step_size == "update_ratio":
        weight_norm = math.sqrt(_sum([_square_norm(layer.rows_view) for layer in sketches], holders))
        factor = lr * weight_norm / unit_norm if unit_norm > 0 else 0.0
    not_finite = None if math.isfinite(factor * unit_norm) else "non-finite step"
    return Proposal(
        count + 1,
        layers,
        factor,
        unit_norm,
        weight_norm,
        sketch_norm,
        clip,
        lr * decay,
        settings.factor_bits,
        not_finite,
    )


def _propose_layers(
    sketches: Sketches,
    moments: dict[str, Tensor],
    statistics: dict[str, RowStatistics],
    count_and_clip: tuple[int, float],
    settings: LograSettings,
) -> tuple[LayerProposal, ...]:
    (count, clip), sgd = count_and_clip, settings.rule == "sgd"
    after = {
        name: v if sgd else next_second_moment(v, statistics.get(name), settings.beta2, clip)
        for name, v in moments.items()
    }
    factors: dict[str, Tensor] = {name: torch.full_like(after[name], clip) for name in statistics}
    if not sgd and statistics:
        roots = [root_moment(after[name], count + 1, settings.beta2) for name in statistics]
        preserve = settings.step_size == "update_ratio"
        summed = next(iter(sketches)).rows.holders.summed
        found = row_factors(roots, settings.eps, list(statistics.values()), preserve, summed)
        factors = {name: each * clip for name, each in zip(statistics, found, strict=True)}
    return tuple(_propose_layer(layer, after[layer.name], factors.get(layer.name), settings) for layer in sketches)


def _propose_layer(layer: LayerSketch, v: Tensor, factors: Tensor | None, settings: LograSettings) -> LayerProposal:
    projection, sketch = layer.group.projection, layer.sketch
    if factors is None or sketch is None:
        return LayerProposal(layer, v)
    assert projection is not None
    steps = row_steps(sketch, projection.row_scales(), settings.factor_bits)
    return LayerProposal(layer, v, factors, steps, sketch._version)


def _unit_square_norm(sketches: Sketches, layers: tuple[LayerProposal, ...], bits: int) -> float:
    """||D A||^2 over all layers, of the integers that would be merged."""
    proposed = {entry.layer.name: entry for entry in layers}
    parts: list[Tensor] = []
    for group in sketches.groups.values():
        active = [proposed[layer.name] for layer in group.layers if proposed[layer.name].row_factors is not None]
        if active and group.projection is not None:
            projection_gram = gram(group.projection.integers())
            parts += [update_square_norm(*entry.integers(bits), projection_gram) for entry in active]
    return _sum(parts, next(iter(sketches)).rows.holders)


def _sum(scalars: list[Tensor], holders: Holders) -> float:
    """In fp64, over all rows, waiting for the device once."""
    if not scalars:
        return 0.0
    here = torch.stack([scalar.to(scalars[0].device, torch.float64) for scalar in scalars]).sum()
    return float(holders.summed(here))


def _square_norm(weight: Tensor) -> Tensor:
    return torch.linalg.vector_norm(weight.detach(), dtype=torch.float32).to(torch.float64).square()
