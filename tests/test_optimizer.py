"""LograOptimizer in foreign loops and under controllers: exactness of the step."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logra import LograOptimizer
from logra.sketch.projection import KINDS, Projection
from tests.conftest import loss_of, relative, tiny_gpt2, tiny_llama


class Identity(Projection):
    """A = I, to compare with dense rules. Needs rank = in_features."""

    max_entry = 1

    def _make_compact(self) -> Tensor:
        return torch.eye(self.rank, self.in_features, dtype=torch.int8)

    def row_scales(self) -> Tensor:
        return torch.ones(self.rank)


def with_identity(optimizer: LograOptimizer, monkeypatch: pytest.MonkeyPatch) -> LograOptimizer:
    monkeypatch.setitem(KINDS, "identity", Identity)
    optimizer.sketches.kind = "identity"
    optimizer.sketches.draw(1)
    return optimizer


def snapshot(model: nn.Module, optimizer: LograOptimizer) -> dict[str, Tensor]:
    """Every bit that a step could change."""
    out = {f"weight {name}": value.detach().clone() for name, value in model.named_parameters()}
    for layer in optimizer.sketches:
        if layer.sketch is not None:
            out[f"sketch {layer.name}"] = layer.sketch.clone()
        if layer.compute_copy is not None:
            out[f"copy {layer.name}"] = layer.compute_copy.clone()
        for key, value in optimizer.storages[layer.name].extra_state().items():
            out[f"{key} {layer.name}"] = value.clone()
    for index, state in enumerate(optimizer.state.values()):
        out |= {f"state {index} {key}": torch.as_tensor(value).clone() for key, value in state.items()}
    counters = (optimizer.updates, optimizer.skipped, optimizer.zero_updates, optimizer.sketches.update)
    return out | {"counters": torch.tensor(counters)}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key], second[key])]
    assert not different


def train(model: nn.Module, optimizer: LograOptimizer, tokens: Tensor, updates: int, autocast: bool = False) -> None:
    for _ in range(updates):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_identity_projection_equals_row_wise_adam(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain form with A = I against a reference written out: decay first, then lr x G / (sqrt(v_hat) + eps')."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(7, 5, bias=False))
    lr = 1e-2
    weight = model[0].weight.detach().clone().double()
    optimizer = LograOptimizer(
        model, targets="all-linear", rank=7, step_size="lr", lr=lr, weight_decay=decay, factor_bits=16
    )
    with_identity(optimizer, monkeypatch)
    v = torch.zeros(5, 1, dtype=torch.float64)
    for update in range(1, 8):
        x, h = torch.randn(11, 7), torch.randn(11, 5)
        model(x).backward(h)
        gradient = h.double().T @ x.double()
        v = 0.95 * v + 0.05 * gradient.square().mean(1, keepdim=True)
        root = (v / (1 - 0.95**update)).sqrt()
        weight = weight * (1 - lr * decay) - lr * gradient / (root + 1e-8 * root.mean())
        optimizer.step()
        assert (model[0].weight.double() - weight).abs().max() < 1e-6
    assert optimizer.updates == 7


def test_sgd_rule_is_sgd_through_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4, bias=False))
    weight = model[0].weight.detach().clone()
    optimizer = LograOptimizer(model, targets="all-linear", rank=6, rule="sgd", step_size="lr", lr=0.1, factor_bits=16)
    with_identity(optimizer, monkeypatch)
    x, h = torch.randn(9, 6), torch.randn(9, 4)
    model(x).backward(h)
    optimizer.step()
    assert (model[0].weight - (weight - 0.1 * h.T @ x)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "orthonormal"])
def test_update_ratio_is_the_norm_of_the_update_over_that_of_the_weights(kind: str, tokens: Tensor) -> None:
    model = tiny_llama()
    before = {name: value.detach().clone().double() for name, value in model.named_parameters()}
    optimizer = LograOptimizer(model, rank=8, lr=1e-2, projection=kind)
    loss_of(model, tokens).backward()
    proposal = optimizer.propose()
    applied = optimizer.apply()
    names = [f"{layer.name}.weight" for layer in optimizer.sketches]
    after = dict(model.named_parameters())
    moved = math.sqrt(sum(float((after[name].double() - before[name]).square().sum()) for name in names))
    whole = math.sqrt(sum(float(before[name].square().sum()) for name in names))
    assert math.isclose(moved / whole, 1e-2, rel_tol=1e-4)
    assert math.isclose(proposal.norm, moved, rel_tol=1e-4)
    assert math.isclose(applied.norm, proposal.norm)
    assert all(torch.equal(after[name].double(), before[name]) for name in before if name not in names)


def test_the_step_follows_the_reconstructed_gradient(tokens: Tensor) -> None:
    """One layer, first update: the change is -alpha f diag(factors) S A, to the error of 8 bits."""
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=16, targets=["down_proj"], lr=1e-2)
    (layer,) = optimizer.sketches
    loss_of(model, tokens).backward()
    assert layer.sketch is not None
    assert layer.group.projection is not None
    sketch, dense = layer.sketch.double().clone(), layer.group.projection.dense(torch.float64)
    before = layer.weight.detach().double().clone()
    optimizer.propose()
    optimizer.apply(0.5)
    direction = sketch / sketch.square().mean(1, keepdim=True).sqrt()
    wanted = -direction @ dense
    wanted *= 0.5 * 1e-2 * before.norm() / wanted.norm()
    assert relative(layer.weight.detach().double() - before, wanted) < 1.2e-2


def test_the_clip_is_global() -> None:
    """One huge gradient scales the moments of every layer by the same factor."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"small": nn.Linear(6, 4, bias=False), "huge": nn.Linear(6, 4, bias=False)})
    optimizer = LograOptimizer(model, targets="all-linear", rank=6, max_norm=1.0, step_size="lr")
    x = torch.randn(5, 6)
    (model["small"](x).sum() + 1e4 * model["huge"](x).sum()).backward()
    sketches = {layer.name: layer.sketch.clone() for layer in optimizer.sketches if layer.sketch is not None}
    norm = math.sqrt(sum(float(sketch.double().square().sum()) for sketch in sketches.values()))
    proposal = optimizer.propose()
    assert math.isclose(proposal.sketch_norm, norm, rel_tol=1e-6)
    assert math.isclose(proposal.clip, 1 / norm, rel_tol=1e-6)
    for entry in proposal.layers:
        wanted = 0.05 * (sketches[entry.layer.name].double() / norm).square().mean(1)
        assert torch.allclose(entry.next_second_moment, wanted, rtol=1e-6)
        root = (sketches[entry.layer.name].double() / norm).square().mean(1).sqrt()
        factors = 1 / norm / (root + 1e-8 * root.mean())
        assert entry.row_factors is not None
        assert torch.allclose(entry.row_factors, factors, rtol=1e-6)


def test_sketch_norm_estimates_the_dense_gradient_norm(tokens: Tensor) -> None:
    """So that max_norm keeps its dense meaning: E||S||^2 = ||G||^2."""
    model = tiny_llama()
    twin = copy.deepcopy(model)
    loss_of(twin, tokens).backward()
    optimizer = LograOptimizer(model, rank=8)
    dense = sum(float(twin.get_submodule(layer.name).weight.grad.square().sum()) for layer in optimizer.sketches)
    squares = []
    for draw in range(1, 201):
        optimizer.sketches.draw(draw)
        loss_of(model, tokens).backward()
        squares.append(optimizer.propose().sketch_norm ** 2)
        optimizer.discard()
    assert abs(sum(squares) / len(squares) / dense - 1) < 0.05


def test_one_count_per_update_whatever_the_micro_batches(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8)
    for _ in range(2):
        for row in tokens:
            loss_of(model, row[None]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.updates == 2
    assert optimizer.sketches.update == 3


def test_torch_schedulers_act_on_the_step(tokens: Tensor) -> None:
    for step_size in ("lr", "update_ratio"):
        model = tiny_llama(layers=1)
        optimizer = LograOptimizer(model, rank=8, step_size=step_size, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: [1.0, 0.5, 0.0, 0.0][epoch])
        norms = []
        for _ in range(3):
            loss_of(model, tokens).backward()
            optimizer.step()
            scheduler.step()
            assert optimizer.last is not None
            norms.append(optimizer.last.norm)
        assert norms[0] > 0
        assert norms[2] == 0
        if step_size == "update_ratio":
            assert math.isclose(norms[1], 0.5 * norms[0], rel_tol=1e-3)


def test_alpha_scales_everything_that_is_proposed(tokens: Tensor) -> None:
    moved = {}
    for alpha in (0.5, 1.0):
        model = tiny_llama(layers=1)
        optimizer = LograOptimizer(model, rank=8, lr=1e-2, others="adamw", others_lr=1e-3, others_weight_decay=0.1)
        before = {name: value.detach().clone().double() for name, value in model.named_parameters()}
        loss_of(model, tokens).backward()
        optimizer.propose()
        optimizer.apply(alpha)
        moved[alpha] = {name: value.detach().double() - before[name] for name, value in model.named_parameters()}
        assert optimizer.param_groups[1]["lr"] == 1e-3
    for name, whole in moved[1.0].items():
        assert whole.any(), name
        assert relative(moved[0.5][name], 0.5 * whole) < 2e-2, name


def test_others_train_like_plain_adamw(tokens: Tensor) -> None:
    """Embeddings, norms and head take the very steps that torch.optim.AdamW would take."""
    model = tiny_llama(layers=1)
    twin = copy.deepcopy(model)
    optimizer = LograOptimizer(model, rank=8, lr=0.0, others="adamw", others_lr=1e-3, others_weight_decay=0.1)
    selected = {f"{layer.name}.weight" for layer in optimizer.sketches}
    rest = [value for name, value in twin.named_parameters() if name not in selected]
    plain = torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        loss_of(twin, tokens).backward()
        plain.step()
        twin.zero_grad()
    train(model, optimizer, tokens, 3)
    for (name, value), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(value, other, atol=1e-7), name


def test_frozen_others_stay_and_trainability_is_restored(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    model.model.norm.weight.requires_grad_(False)
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    optimizer = LograOptimizer(model, rank=8, others="frozen")
    assert not any(value.requires_grad for value in model.parameters())
    train(model, optimizer, tokens, 2)
    optimizer.detach()
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    adamw = LograOptimizer(model, rank=8, others="adamw")
    assert not model.model.norm.weight.requires_grad  # what the user froze stays frozen
    assert len(adamw.param_groups[1]["params"]) == sum(flags.values()) - len(adamw.sketches)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (300, 4), (4, 300), (1, 1)])
@pytest.mark.parametrize("rank", [1, 4, 64])
def test_one_row_tall_wide_and_rank_above_in_features(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    out_features, in_features = shape
    for storage in ("fp32", "split", "bf16"):
        model = nn.Sequential(nn.Linear(in_features, out_features))
        optimizer = LograOptimizer(model, targets="all-linear", rank=rank, storage=storage, lr=1e-2)
        (layer,) = optimizer.sketches
        before = layer.weight.detach().float().clone()
        for _ in range(3):
            model(torch.randn(5, in_features)).square().sum().backward()
            assert layer.sketch is not None
            assert layer.sketch.shape == (out_features, min(rank, in_features))
            optimizer.step()
        assert layer.weight.isfinite().all()
        assert not torch.equal(layer.weight.float(), before)


@pytest.mark.parametrize("storage", ["fp32", "split", "bf16"])
def test_it_learns_a_tiny_language_model(storage: str, tokens: Tensor) -> None:
    model = tiny_llama()
    model.lm_head.weight.data.mul_(20)  # a frozen head of small random weights cannot be sure of anything
    optimizer = LograOptimizer(model, rank=8, storage=storage, step_size="lr", lr=1e-2)
    before = float(loss_of(model, tokens).detach())
    train(model, optimizer, tokens, 60, autocast=True)
    assert float(loss_of(model, tokens).detach()) < 0.7 * before
    assert optimizer.last is not None
    assert optimizer.last.realised_stored is not None
    assert abs(optimizer.last.realised_stored - 1) < 0.05


def test_it_trains_gpt2(tokens: Tensor) -> None:
    model = tiny_gpt2()
    optimizer = LograOptimizer(
        model, targets="all-linear", rank=8, step_size="lr", lr=2e-3, others="adamw", others_lr=1e-2
    )
    before = float(loss_of(model, tokens).detach())
    train(model, optimizer, tokens, 30)
    assert float(loss_of(model, tokens).detach()) < 0.8 * before


def test_dithered_copy_is_what_bf16_compute_uses(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8, dithered_copy=True)
    train(model, optimizer, tokens, 1, autocast=True)
    (layer, *_) = optimizer.sketches
    assert layer.compute_copy is not None
    x = torch.randn(3, layer.in_features)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = layer.module(x)
    assert torch.equal(got, F.linear(x.bfloat16(), layer.compute_copy))
    with torch.no_grad():
        assert torch.equal(layer.module(x), F.linear(x, layer.weight))


def test_closures_and_parameter_groups() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    optimizer = LograOptimizer(model, targets="all-linear", rank=2)

    def closure() -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) > 0
    assert optimizer.updates == 1
    with pytest.raises(ValueError, match="takes its parameters from the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert isinstance(optimizer, torch.optim.Optimizer)
