"""Losses and their gradients against loops over tokens, and against exact values on a tabular policy."""

import math

import pytest
import torch
from torch import Tensor

from logra.rl.losses import (
    KINDS,
    LossSettings,
    Tokens,
    importance_weights,
    reference_kl_loss,
    reference_kl_value,
    token_weights,
)

SETTINGS = LossSettings(max_importance=2.0, clip_low=0.2, clip_high=0.3)


def tokens(seed: int = 0, spread: float = 0.6) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    index = torch.tensor([0, 0, 0, 1, 2, 2])
    old = -torch.rand(6, generator=generator) * 3
    trainer = (old + spread * torch.randn(6, generator=generator)).requires_grad_(True)
    rollout = old + spread * torch.randn(6, generator=generator)
    return Tokens(trainer, old, rollout, torch.tensor([1.0, -0.7, 2.0])[index], index)


def reference(kind: str, data: Tokens) -> tuple[list[float], list[float]]:
    """Value of each token's loss, and the gradient of their sum by each token's log-probability."""
    trainer, old, rollout, advantages = (
        column.tolist() for column in (data.trainer_logprobs, data.old_logprobs, data.rollout_logprobs, data.advantages)
    )
    index = data.sample_index.tolist()
    values, gradients = [], []
    for i in range(len(trainer)):
        weight, a = min(math.exp(old[i] - rollout[i]), 2.0), advantages[i]
        ratio = math.exp(trainer[i] - old[i])
        if kind == "sequence":
            own = [trainer[j] - old[j] for j in range(len(trainer)) if index[j] == index[i]]
            ratio = math.exp(sum(own) / len(own))
        bounded = min(max(ratio, 0.8), 1.3)
        if kind == "policy_gradient":
            value, gradient = -weight * a * trainer[i], -weight * a
        elif kind == "cispo":
            value, gradient = -weight * bounded * a * trainer[i], -weight * bounded * a
        else:
            value = -weight * min(ratio * a, bounded * a)
            gradient = -weight * ratio * a if ratio * a <= bounded * a else 0.0
        values.append(value)
        gradients.append(gradient)
    return values, gradients


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(5))
def test_values_and_gradients_against_the_slow_reference(kind: str, seed: int) -> None:
    data = tokens(seed)
    loss = KINDS[kind](data, SETTINGS)
    (gradient,) = torch.autograd.grad(loss.sum(), data.trainer_logprobs)
    values, gradients = reference(kind, data)
    assert loss.tolist() == pytest.approx(values, rel=1e-5)
    assert gradient.tolist() == pytest.approx(gradients, rel=1e-5)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_at_the_first_update_every_loss_has_the_policy_gradient(kind: str) -> None:
    data = tokens(spread=0.0)
    (gradient,) = torch.autograd.grad(KINDS[kind](data, SETTINGS).sum(), data.trainer_logprobs)
    assert torch.allclose(gradient, -data.advantages)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("gap", [89.0, -89.0])
def test_extreme_ratios_stay_finite(kind: str, gap: float) -> None:
    trainer = torch.tensor([-2.0, -91.0], requires_grad=True)
    data = Tokens(
        trainer, trainer.detach() + gap, torch.tensor([-91.0, -2.0]), torch.tensor([1.0, -1.0]), torch.tensor([0, 1])
    )
    loss = KINDS[kind](data, SETTINGS)
    (gradient,) = torch.autograd.grad(loss.sum(), trainer)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_importance_weights_are_capped_and_detached() -> None:
    data = Tokens(
        torch.zeros(3, requires_grad=True),
        torch.tensor([0.0, -1.0, -5.0]),
        torch.tensor([-2.0, -1.0, -2.0]),
        torch.ones(3),
        torch.arange(3),
    )
    weights = importance_weights(data, 2.0)
    assert weights.tolist() == pytest.approx([2.0, 1.0, math.exp(-3)])
    assert not weights.requires_grad


def test_reference_kl_value_and_gradient_on_a_tabular_policy() -> None:
    """Exact sums over a vocabulary of 6: the value is the reverse KL, the gradient is its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference_logprobs = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)

    def exact(policy: Tensor) -> Tensor:
        return (policy.softmax(0) * (policy.log_softmax(0) - reference_logprobs)).sum()

    logprobs = logits.log_softmax(0)
    probabilities = logits.softmax(0).detach()
    value = (probabilities * reference_kl_value(logprobs, reference_logprobs)).sum()
    assert torch.allclose(value, exact(logits), rtol=1e-12)
    drawn = Tokens(logprobs, logprobs.detach(), logprobs.detach(), torch.zeros(6), torch.arange(6))
    (got,) = torch.autograd.grad((probabilities * reference_kl_loss(drawn, reference_logprobs)).sum(), logits)
    (wanted,) = torch.autograd.grad(exact(logits), logits)
    assert torch.allclose(got, wanted, rtol=1e-10)
    # Tokens drawn from an older policy: the ratio makes up for it.
    older = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    drawn = Tokens(logits.log_softmax(0), older, older, torch.zeros(6), torch.arange(6))
    (got,) = torch.autograd.grad((older.exp() * reference_kl_loss(drawn, reference_logprobs)).sum(), logits)
    assert torch.allclose(got, wanted, rtol=1e-10)
    # The control: differentiating the value's estimator gives another gradient.
    difference = reference_logprobs - logits.log_softmax(0)
    (biased,) = torch.autograd.grad((probabilities * (difference.exp() - 1 - difference)).sum(), logits)
    assert not torch.allclose(biased, wanted, rtol=0.1)


def test_token_weights() -> None:
    lengths = torch.tensor([3, 1, 6])
    assert token_weights(lengths, "token", 8).tolist() == pytest.approx([0.1] * 3)
    assert token_weights(lengths, "sequence", 8).tolist() == pytest.approx([1 / 9, 1 / 3, 1 / 18])
    assert token_weights(lengths, "constant", 8).tolist() == pytest.approx([1 / 24] * 3)
