"""LograOptimizer looked at, saved and restored: no bit is lost, and what does not fit is refused."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logra import LograOptimizer
from tests.conftest import loss_of, tiny_llama
from tests.test_optimizer import assert_same, snapshot, train


@pytest.mark.parametrize(("storage", "others"), [("fp32", "adamw"), ("split", "frozen"), ("bf16", "adamw")])
def test_a_thousand_proposals_discarded_change_no_bit(storage: str, others: str, tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    targets = ("q_proj", "down_proj")
    optimizer = LograOptimizer(model, rank=8, targets=targets, storage=storage, others=others, max_norm=0.1)
    train(model, optimizer, tokens, 2)
    loss_of(model, tokens).backward()
    before = snapshot(model, optimizer)
    first = optimizer.propose()
    for _ in range(999):
        optimizer.discard()
        assert optimizer.propose().norm == first.norm
    optimizer.discard()
    assert_same(snapshot(model, optimizer), before)
    with pytest.raises(RuntimeError, match=r"call propose\(\)"):
        optimizer.apply()


def test_a_discarded_proposal_leaves_the_same_next_step(tokens: Tensor) -> None:
    results = []
    for reject in (False, True):
        model = tiny_llama(layers=1)
        optimizer = LograOptimizer(model, rank=8, storage="split")
        loss_of(model, tokens).backward()
        if reject:
            optimizer.propose()
            optimizer.discard()
        optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_same(*results)


@pytest.mark.parametrize("storage", ["fp32", "fp32 dithered", "split", "bf16"])
@pytest.mark.parametrize("others", ["frozen", "adamw"])
def test_three_updates_saved_and_loaded_plus_three_are_six(storage: str, others: str, tokens: Tensor) -> None:
    def make() -> tuple[nn.Module, LograOptimizer]:
        model = tiny_llama(layers=1)
        kind = storage.split()[0]
        copy_kept = "dithered" in storage
        return model, LograOptimizer(
            model, rank=8, storage=kind, dithered_copy=copy_kept, others=others, others_lr=1e-3, lr=1e-3
        )

    model, optimizer = make()
    train(model, optimizer, tokens, 3, autocast=True)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, tokens, 3, autocast=True)
    wanted = snapshot(model, optimizer)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = make()
    train(model, optimizer, tokens.flip(0), 2, autocast=True)  # a past that must not show
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.updates == 3
    train(model, optimizer, tokens, 3, autocast=True)
    assert_same(snapshot(model, optimizer), wanted)

    cold_model, cold = make()
    cold_model.load_state_dict(saved["model"])
    train(cold_model, cold, tokens, 3, autocast=True)
    assert not torch.equal(next(iter(cold.sketches)).weight, next(iter(optimizer.sketches)).weight)


def test_state_is_plain_tensors_and_numbers_and_moments_keep_their_dtype(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8, storage="bf16", others="adamw")
    train(model, optimizer, tokens, 1)

    def kinds(value: Any) -> set[type]:
        if isinstance(value, dict):
            return set().union(*map(kinds, value.values()))
        if isinstance(value, (list, tuple)):
            return set().union(*map(kinds, value))
        return {type(value)}

    state = optimizer.state_dict()
    assert kinds(state) <= {Tensor, int, float, str, bool, type(None)}
    again = LograOptimizer(tiny_llama(layers=1), rank=8, storage="bf16", others="adamw")
    again.load_state_dict(state)
    for layer in again.sketches:
        assert again.state[layer.weight]["row_second_moment"].dtype == torch.float64
        assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, r"rank 8 \(now 4\)"),
        ({"seed": 1}, r"seed 0 \(now 1\)"),
        ({"projection": "gaussian"}, r"projection 'rademacher' \(now 'gaussian'\)"),
        ({"storage": "split"}, r"down_proj: fp32 then, split now"),
        ({"targets": ["q_proj"]}, r"absent now"),
    ],
)
def test_a_state_of_other_settings_is_refused(change: dict[str, Any], message: str, tokens: Tensor) -> None:
    optimizer = LograOptimizer(tiny_llama(layers=1), rank=8)
    other = LograOptimizer(tiny_llama(layers=1), **({"rank": 8} | change))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="not a state of LograOptimizer"):
        optimizer.load_state_dict(torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict())


def test_restored_groups_draw_the_same_projections() -> None:
    """A layer that left its group in the first forward is outside it after loading, before any forward."""

    class OtherInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q_proj(x) + self.k_proj(x + 1) + self.v_proj(x)

    torch.manual_seed(0)
    first, second = OtherInputs(), OtherInputs()
    optimizer = LograOptimizer(first, rank=3)
    first(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    again = LograOptimizer(second, rank=3)
    again.load_state_dict(optimizer.state_dict())
    assert set(again.sketches.groups) == {"q_proj|k_proj|v_proj", "k_proj"}
    for name, layer in optimizer.sketches.layers.items():
        twin = again.sketches.layers[name]
        assert layer.group.projection is not None
        assert twin.group.projection is not None
        assert torch.equal(layer.group.projection.integers(), twin.group.projection.integers())


def test_only_sketches_and_row_numbers_are_held(tokens: Tensor) -> None:
    model = tiny_llama()
    optimizer = LograOptimizer(model, rank=8)
    loss_of(model, tokens).backward()
    rows = sum(layer.out_features for layer in optimizer.sketches)
    held = optimizer.state_bytes()
    assert held["sketches"] == 4 * 8 * rows
    assert held["row_second_moments"] == 8 * rows
    bits = sum(group.rank * -(-group.in_features // 8) for group in optimizer.sketches.groups.values())
    assert held["projections"] == bits
    assert held["storage_extras"] == held["others"] == 0
    optimizer.step()
    assert optimizer.state_bytes()["sketches"] == 0
    split = LograOptimizer(tiny_llama(), rank=8, storage="split")
    assert split.state_bytes()["storage_extras"] == sum(layer.weight.numel() for layer in split.sketches)


def test_saved_and_loaded_model_behaves_as_trained(tokens: Tensor, tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    optimizer = LograOptimizer(model, rank=8, storage="split", lr=1e-3)
    train(model, optimizer, tokens, 2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    del optimizer
