"""LograOptimizer in foreign loops and under controllers: exactness, edge cases, state."""

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logra import LograOptimizer, LograSettings
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


@pytest.mark.parametrize("storage", ["fp32", "split", "bf16"])
@pytest.mark.parametrize("others", ["frozen", "adamw"])
def test_a_thousand_proposals_discarded_change_no_bit(storage: str, others: str, tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8, storage=storage, others=others, max_norm=0.1)
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


def test_a_step_of_size_zero_changes_nothing(tokens: Tensor) -> None:
    for storage in ("fp32", "split", "bf16"):
        model = tiny_llama(layers=1)
        optimizer = LograOptimizer(model, rank=8, storage=storage, lr=0.0)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        train(model, optimizer, tokens, 3)
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


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
    with pytest.raises(RuntimeError, match="2 processes"):
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
