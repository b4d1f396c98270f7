# SPDX-License-Identifier: Apache-2.0
"""From scores to advantages, one number per sample.

Signature of every kind: (scores fp64 [samples], groups: int64 [samples]) -> fp64 [samples]. Scores are
shaped rewards of the whole update; samples of one prompt share a group. Nothing is masked or normalised
afterwards: token weights are the loss's business. To add a kind, write such a function and enter it in
`KINDS`; `running_baseline` keeps a state and is a class.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4  # beside a standard deviation, as in TRL


def group_mean(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of its group (Dr. GRPO, arXiv 2503.20783)."""
    return scores - _group_means(scores, groups)


def group_normalised(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of its group, over its standard deviation (GRPO, arXiv 2402.03300)."""
    centred = group_mean(scores, groups)
    _, inverse, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    squares = torch.zeros(len(counts), dtype=scores.dtype).index_add_(0, inverse, centred.square())
    deviation = (squares / (counts - 1).clamp_min(1)).sqrt()
    return centred / (deviation[inverse] + EPSILON)


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the others in its group (RLOO, arXiv 2402.14740); 0 in a group of one."""
    _, inverse, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    size = counts[inverse].to(scores.dtype)
    return torch.where(size > 1, (scores - _group_means(scores, groups)) * size / (size - 1).clamp_min(1), 0.0)


def batch_normalised(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the update, over its standard deviation (REINFORCE++, arXiv 2501.03262)."""
    deviation = scores.std() if len(scores) > 1 else torch.zeros((), dtype=scores.dtype)
    return (scores - scores.mean()) / (deviation + EPSILON)


@dataclass
class RunningBaseline:
    """Score minus an exponential mean of earlier updates' mean scores (the paper's): starts at 0, weight 0.1."""

    weight: float = 0.1
    value: float = 0.0

    def __call__(self, scores: Tensor, groups: Tensor) -> Tensor:
        """Advantages with the baseline of earlier updates; then this update's mean enters it."""
        advantages = scores - self.value
        self.value += self.weight * (float(scores.mean()) - self.value)
        return advantages


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": group_mean,
    "group_normalised": group_normalised,
    "leave_one_out": leave_one_out,
    "batch_normalised": batch_normalised,
}


def groups_with_signal(scores: Tensor, groups: Tensor) -> Tensor:
    """Whether the scores of a sample's group differ, bool [samples]. Call it with raw scores."""
    _, inverse = torch.unique(groups, return_inverse=True)
    count = int(inverse.max()) + 1 if len(inverse) else 0
    low = torch.full((count,), torch.inf, dtype=scores.dtype).scatter_reduce_(0, inverse, scores, "amin")
    high = torch.full((count,), -torch.inf, dtype=scores.dtype).scatter_reduce_(0, inverse, scores, "amax")
    return (high > low)[inverse]


def _group_means(scores: Tensor, groups: Tensor) -> Tensor:
    _, inverse, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=scores.dtype).index_add_(0, inverse, scores)
    return (sums / counts)[inverse]
