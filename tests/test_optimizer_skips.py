"""LograOptimizer where there is nothing to do, or something that must not be done."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logra import LograOptimizer, LograSettings
from tests.conftest import loss_of, tiny_llama
from tests.test_optimizer import assert_same, snapshot, train


def test_all_equal_rewards_give_no_step_and_no_nan(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8)
    train(model, optimizer, tokens, 1)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    moments = {layer.name: optimizer.state[layer.weight]["row_second_moment"].clone() for layer in optimizer.sketches}
    (loss_of(model, tokens) * 0.0).backward()
    optimizer.step()
    assert (optimizer.updates, optimizer.zero_updates, optimizer.skipped) == (2, 1, 0)
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
    for layer in optimizer.sketches:
        assert torch.allclose(optimizer.state[layer.weight]["row_second_moment"], 0.95 * moments[layer.name])
    train(model, optimizer, tokens, 1)
    assert all(value.isfinite().all() for value in model.parameters())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("others", ["frozen", "adamw"])
def test_a_non_finite_micro_batch_skips_the_update_and_changes_nothing(bad: float, others: str, tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8, storage="split", others=others, others_lr=1e-3)
    train(model, optimizer, tokens, 2)
    before = snapshot(model, optimizer)
    loss_of(model, tokens).backward()
    (loss_of(model, tokens) * bad).backward()
    loss_of(model, tokens).backward()
    with pytest.warns(UserWarning, match="update 3 skipped: non-finite gradient"):
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped == 1
    assert optimizer.last is not None
    assert optimizer.last.skip_reason == "non-finite gradient"
    optimizer.skipped = 0
    assert_same(snapshot(model, optimizer), before)
    train(model, optimizer, tokens, 1)
    assert optimizer.updates == 3


def test_a_non_finite_gradient_of_another_parameter_skips_everything(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8, others="adamw")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss_of(model, tokens).backward()
    model.model.norm.weight.grad.fill_(math.nan)
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_step_without_a_backward_is_reported() -> None:
    optimizer = LograOptimizer(tiny_llama(layers=1), rank=8)
    with pytest.warns(UserWarning, match="no backward since the last update"):
        optimizer.step()
    assert (optimizer.updates, optimizer.skipped) == (0, 1)


def test_a_step_of_size_zero_changes_nothing(tokens: Tensor) -> None:
    for storage in ("fp32", "split", "bf16"):
        model = tiny_llama(layers=1)
        optimizer = LograOptimizer(model, rank=8, storage=storage, lr=0.0)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        train(model, optimizer, tokens, 3)
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_layers_that_no_gradient_reaches_are_named() -> None:
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.bypassed = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.used(x), self.bypassed.weight)

    model = Bypass()
    optimizer = LograOptimizer(model, targets="all-linear", rank=2)
    model(torch.randn(3, 4)).sum().backward()
    with pytest.warns(UserWarning, match=r"1 of 2 selected layers got no gradient.*bypassed"):
        optimizer.step()


def test_several_processes_are_refused_rather_than_left_to_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(layers=1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="2 processes, but every one of them holds the whole model"):
        LograOptimizer(model, rank=8)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf])
def test_an_alpha_that_is_no_step_is_refused(alpha: float, tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8)
    loss_of(model, tokens).backward()
    optimizer.propose()
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="alpha is"):
        optimizer.apply(alpha)
    assert_same(snapshot(model, optimizer), before)


def test_settings_are_validated_at_construction() -> None:
    model = tiny_llama(layers=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rnak": 4}, r"'rnak' is not a setting.*Did you mean 'rank'"),
        ({"storage": "spilt"}, r"storage is 'spilt'.*Did you mean 'split'"),
        ({"weight_decay": 0.1}, "no meaning"),
        ({"factor_bits": 16, "rank": 1024}, "rank <= 512"),
        ({"factor_bits": 12, "projection": "orthonormal", "rank": 256}, "rank <= 64"),
        ({"dithered_copy": True, "storage": "bf16"}, "dithered_copy is for fp32"),
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be above 0"),
        ({"beta2": 1.0}, r"beta2 is 1.0; it must be in \[0, 1\)"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            LograOptimizer(model, **change)
        assert all("forward" not in module.__dict__ for module in model.modules())
    with pytest.raises(ValueError, match="float64, which no storage holds"):
        LograOptimizer(tiny_llama(layers=1).double(), rank=4)
    with pytest.raises(ValueError, match=r"dithered_copy is for fp32 storage, but .*bfloat16"):
        LograOptimizer(tiny_llama(layers=1).bfloat16(), rank=4, dithered_copy=True)
    assert LograSettings(rank=8).with_changes(lr=1e-3) == LograSettings(rank=8, lr=1e-3)
