# SPDX-License-Identifier: Apache-2.0
"""Drawing one id from a distribution with a random number of its own.

The number is keyed by (run seed, update, sample, position), so what a sample draws depends on its
probabilities alone: not on the batch it sits in, nor on what was drawn before in another one.
"""

import torch
from torch import Tensor

from logra.random_bits import BitStream, Purpose


def uniforms(seed: int, update: int, samples: Tensor, position: int, purpose: str = "rollout") -> Tensor:
    """fp64 [samples] in [0, 1), 32 random bits each: one number for each sample at `position`.

    Args:
        seed: of the run.
        update: number of the update.
        samples: int64 [samples], sample ids.
        position: of the token in its completion, from 0.
        purpose: keeps training and evaluation apart.
    """
    stream = BitStream.named(seed, purpose, Purpose.SAMPLING, update)
    first, last = int(samples.min()), int(samples.max())
    words = stream.words(range(first, last + 1), range(position, position + 1))[:, 0]
    return (words[samples.cpu() - first].to(torch.int64) & 0xFFFFFFFF).to(torch.float64) / 2**32


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """fp32 logits / temperature [rows, vocabulary], -inf outside the top-k and the smallest set of mass top_p."""
    scaled = logits.to(torch.float32) / temperature
    if 0 < top_k < scaled.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ordered, order = scaled.softmax(-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return scaled


def draw(scaled: Tensor, numbers: Tensor) -> Tensor:
    """int64 [rows]: the first id whose cumulative probability exceeds the row's number.

    Args:
        scaled: fp32 [rows, vocabulary], logits after temperature and filters.
        numbers: fp64 [rows] in [0, 1).
    """
    cumulative = scaled.softmax(-1).to(torch.float64).cumsum(-1)
    # The total differs from 1 by rounding; what is compared is the share of it.
    drawn = torch.searchsorted(cumulative, (numbers.to(scaled.device) * cumulative[:, -1])[:, None], right=True)[:, 0]
    return drawn.clamp_max_(scaled.shape[-1] - 1)
