# SPDX-License-Identifier: Apache-2.0
"""From raw scores to shaped ones, which advantages are made of. Raw scores stay as they are, for metrics."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from logra.rl.batch import Sample


def outcomes(raw: Tensor, negative: float) -> Tensor:
    """fp64 [samples], 1 at a score of 1 or more and `negative` below (paper: -0.01); nan stays nan."""
    return torch.where(raw.isnan(), raw, torch.where(raw >= 1, raw.new_tensor(1.0), raw.new_tensor(negative)))


def format_bonus(samples: Sequence[Sample], pattern: str, reward: float) -> Tensor:
    """fp64 [samples], `reward` where the pattern stands somewhere in the completion."""
    compiled = re.compile(pattern, re.DOTALL)
    found = [reward if compiled.search(sample.text) else 0.0 for sample in samples]
    return torch.tensor(found, dtype=torch.float64)


def overlong_malus(samples: Sequence[Sample], max_tokens: int, last: int, penalty: float) -> Tensor:
    """fp64 [samples], from 0 at max_tokens - last tokens linearly down to -penalty at max_tokens (DAPO, eq. 13)."""
    lengths = torch.tensor([len(sample.completion_ids) for sample in samples], dtype=torch.float64)
    return -penalty * ((lengths - (max_tokens - last)) / last).clamp(0.0, 1.0)
