# SPDX-License-Identifier: Apache-2.0
"""Losses of flat token tensors: who masks, who weights, what is detached.

Every loss takes `Tokens` and gives one number per token, fp32 [N], whose gradient flows through
`Tokens.trainer_logprobs` alone. The caller multiplies by `token_weights` and sums; nothing here
normalises. Masked tokens are absent, not zeroed. To add a loss, write such a function and enter it
in `KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp of it is finite and its gradient too; such a ratio is clipped by every loss anyway


@dataclass(frozen=True)
class Tokens:
    """The completion tokens of a micro-batch, sample by sample.

    Attributes:
        trainer_logprobs: fp32 [N], of the policy being trained; carries the gradient.
        old_logprobs: fp32 [N], of the trainer's policy before the first update on this batch.
        rollout_logprobs: fp32 [N], as the engine that drew the tokens computed them.
        advantages: fp32 [N], the sample's advantage at each of its tokens.
        sample_index: int64 [N], from 0, which sample of the micro-batch a token belongs to.
    """

    trainer_logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    sample_index: Tensor


@dataclass(frozen=True)
class LossSettings:
    """Numbers of the losses.

    Attributes:
        max_importance: cap of the detached weight pi_trainer / pi_rollout (paper: 2).
        clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high] (DAPO: 0.2, 0.28).
    """

    max_importance: float = 2.0
    clip_low: float = 0.2
    clip_high: float = 0.2


def importance_weights(tokens: Tokens, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap), detached: corrects for an engine that computes other probabilities."""
    return _ratio(tokens.old_logprobs, tokens.rollout_logprobs).clamp_max(cap).detach()


def policy_gradient(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-w A log pi, the paper's; w is the importance weight."""
    return -importance_weights(tokens, settings.max_importance) * tokens.advantages * tokens.trainer_logprobs


def clipped(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-w min(r A, clip(r) A), r = pi / pi_old (PPO, GRPO, DAPO)."""
    return importance_weights(tokens, settings.max_importance) * _clipped(
        _ratio(tokens.trainer_logprobs, tokens.old_logprobs), tokens.advantages, settings
    )


def sequence(tokens: Tokens, settings: LossSettings) -> Tensor:
    """As `clipped` with one ratio a sample, the geometric mean of its tokens' (GSPO, arXiv 2507.18071)."""
    difference = tokens.trainer_logprobs - tokens.old_logprobs
    count = int(tokens.sample_index.max()) + 1 if len(difference) else 0
    lengths = torch.bincount(tokens.sample_index, minlength=count)
    sums = torch.zeros(count, dtype=difference.dtype, device=difference.device)
    means = sums.index_add(0, tokens.sample_index, difference) / lengths.clamp_min(1)
    # The value is the sample's ratio at each of its tokens; the gradient reaches token by token (GSPO-token).
    own = tokens.trainer_logprobs - tokens.trainer_logprobs.detach()
    ratio = (means[tokens.sample_index].detach() + own).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return importance_weights(tokens, settings.max_importance) * _clipped(ratio, tokens.advantages, settings)


def cispo(tokens: Tokens, settings: LossSettings) -> Tensor:
    """-w clip(r) A log pi with the clipped ratio detached (CISPO, arXiv 2506.13585)."""
    ratio = _ratio(tokens.trainer_logprobs, tokens.old_logprobs)
    clipped_ratio = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high).detach()
    weights = importance_weights(tokens, settings.max_importance)
    return -weights * clipped_ratio * tokens.advantages * tokens.trainer_logprobs


KINDS: dict[str, Callable[[Tokens, LossSettings], Tensor]] = {
    "policy_gradient": policy_gradient,
    "clipped": clipped,
    "sequence": sequence,
    "cispo": cispo,
}


def reference_kl_loss(tokens: Tokens, reference_logprobs: Tensor) -> Tensor:
    """[N], r (log pi - log pi_ref)^2 / 2, r = pi / pi_old detached: its gradient is unbiased for the reverse KL.

    Its value is not the KL; `reference_kl_value` is. Differentiating that estimator instead would give a biased
    gradient; r corrects for tokens drawn before earlier updates on the same batch.
    """
    ratio = _ratio(tokens.trainer_logprobs, tokens.old_logprobs).detach()
    return 0.5 * ratio * (tokens.trainer_logprobs - reference_logprobs).square()


def reference_kl_value(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[N], exp(d) - 1 - d with d = log pi_ref - log pi: unbiased for the reverse KL, never negative. Detached."""
    difference = (reference_logprobs - trainer_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.expm1() - difference


def token_weights(lengths: Tensor, normalisation: str, max_tokens: int) -> Tensor:
    """fp32 [samples], what each token of a sample counts in the update's loss.

    Args:
        lengths: int64 [samples], completion tokens of every sample of the update, trained on or not.
        normalisation: "token" (1 / all tokens), "sequence" (each sample equally), or "constant"
            (1 / (samples x max_tokens), so that a token counts the same in every update).
        max_tokens: the token limit of a completion.
    """
    samples = max(1, len(lengths))
    if normalisation == "token":
        return torch.full((len(lengths),), 1 / max(1, int(lengths.sum())))
    if normalisation == "sequence":
        return 1 / (samples * lengths.clamp_min(1).to(torch.float32))
    assert normalisation == "constant"
    return torch.full((len(lengths),), 1 / (samples * max_tokens))


def _clipped(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
