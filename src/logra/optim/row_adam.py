# SPDX-License-Identifier: Apache-2.0
"""RowAdam: an Adam whose second moment is one number per output row. Pure functions of tensors.

    v  <- beta2 v + (1 - beta2) mean_columns(S^2)          row_second_moment [out_features]
    D   = S / (sqrt(v_hat) + eps'),  eps' = eps x mean over rows of sqrt(v_hat)
    D   = D x ||S||_F / ||D||_F                            when the layer's norm is preserved

The projection changes every update but rows do not, so v carries over and a first moment does not.
Since D is S times one factor per row, only the factors are returned and no direction is stored. Where processes hold
the rows of a layer in parts, only sums over rows travel.
Source: section 2.2 of the design; arXiv 2610.06647.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowStatistics:
    """What an update rule needs of one sketch S [out_features, rank].

    Attributes:
        square_norms: fp64 [out_features], sum of squares of each row of S. In fp64, as all numbers
            per row are, so that no scale of the loss that fp32 can hold is too small or too large.
        rank: columns of S.
    """

    square_norms: Tensor
    rank: int

    @classmethod
    def of(cls, sketch: Tensor) -> "RowStatistics":
        """One pass over S, without a temporary of its size."""
        return cls(torch.linalg.vector_norm(sketch, dim=1, dtype=torch.float64).square(), sketch.shape[1])


def next_second_moment(v: Tensor, statistics: RowStatistics | None, beta2: float, scale: float = 1.0) -> Tensor:
    """A new v, fp64 [rows], after one more update whose sketch is `scale` x S (clipping); without one, S is 0."""
    if statistics is None:
        return beta2 * v
    mean_square = statistics.square_norms * (scale * scale / statistics.rank)
    return beta2 * v + (1 - beta2) * mean_square


def row_factors(
    roots: Sequence[Tensor],
    eps: float,
    statistics: Sequence[RowStatistics],
    preserve_layer_norm: bool,
    summed: Callable[[Tensor], Tensor] = lambda values: values,
) -> list[Tensor]:
    """What each row of S is multiplied by, fp64 [rows], layer by layer: D = row_factors[:, None] * S.

    Args:
        roots: of each layer's second moment after this update (`root_moment`), fp64 [rows].
        eps: relative to the mean row scale, so the result does not depend on the scale of the loss.
        statistics: of the S that each D is made of.
        preserve_layer_norm: rescale so that ||D||_F = ||S||_F (the paper's form).
        summed: adds up what other processes have of their rows, [layers, ...].

    A sketch of zeros gives D = 0: rows that never had a gradient get the factor 0, never a NaN.
    """
    sums = summed(torch.stack([torch.stack([root.sum(), root.new_tensor(float(len(root)))]) for root in roots]))
    denominators = [root + eps * (total / count) for root, (total, count) in zip(roots, sums, strict=True)]
    factors = [torch.where(each > 0, 1 / each, 0.0) for each in denominators]
    if not preserve_layer_norm:
        return factors
    pairs = [
        torch.stack([each.square_norms.sum(), (factor.square() * each.square_norms).sum()])
        for factor, each in zip(factors, statistics, strict=True)
    ]
    before, after = summed(torch.stack(pairs)).sqrt().unbind(1)
    scales = torch.where(after > 0, before / after, 0.0)
    return [factor * scale for factor, scale in zip(factors, scales, strict=True)]


def root_moment(v: Tensor, count: int, beta2: float) -> Tensor:
    """The bias-corrected square root of v after `count` updates, from 1."""
    return (v / (1 - beta2**count)).sqrt()
