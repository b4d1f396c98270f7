# SPDX-License-Identifier: Apache-2.0
"""RowAdam: an Adam whose second moment is one number per output row. Pure functions of tensors.

    v  <- beta2 v + (1 - beta2) mean_columns(S^2)          row_second_moment [out_features]
    D   = S / (sqrt(v_hat) + eps'),  eps' = eps x mean over rows of sqrt(v_hat)
    D   = D x ||S||_F / ||D||_F                            when the layer's norm is preserved

The projection changes every update but rows do not, so v carries over and a first moment does not.
Since D is S times one factor per row, only the factors are returned and no direction is stored.
Source: section 2.2 of the design; arXiv 2610.06647.
"""

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


def next_second_moment(v: Tensor, statistics: RowStatistics, beta2: float, scale: float = 1.0) -> Tensor:
    """A new v, fp64 [out_features], after one more update whose sketch is `scale` x S (clipping)."""
    mean_square = statistics.square_norms * (scale * scale / statistics.rank)
    return beta2 * v + (1 - beta2) * mean_square


def row_factors(
    v: Tensor, count: int, beta2: float, eps: float, statistics: RowStatistics, preserve_layer_norm: bool
) -> Tensor:
    """What each row of S is multiplied by, fp64 [out_features]: D = row_factors[:, None] * S.

    Args:
        v: the second moment after this update, fp64 [out_features].
        count: updates that v has seen, this one included, from 1.
        beta2: its decay, for the bias correction.
        eps: relative to the mean row scale, so the result does not depend on the scale of the loss.
        statistics: of the S that D is made of.
        preserve_layer_norm: rescale so that ||D||_F = ||S||_F (the paper's form).

    A sketch of zeros gives D = 0: rows that never had a gradient get the factor 0, never a NaN.
    """
    root = (v / (1 - beta2**count)).sqrt()
    denominator = root + eps * root.mean()
    factors = torch.where(denominator > 0, 1 / denominator, 0.0)
    if not preserve_layer_norm:
        return factors
    before = statistics.square_norms.sum().sqrt()
    after = (factors.square() * statistics.square_norms).sum().sqrt()
    return torch.where(after > 0, factors * (before / after), 0.0)
