"""What happens when others change weights, dtypes, gradients or defaults under the optimizer's feet."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logra import LograOptimizer
from logra.optim.rounding import WeightBits, floor_to_bf16
from logra.random_bits import Purpose
from logra.sketch.hooks import attach
from logra.sketch.targets import coverage
from tests.conftest import loss_of, relative, tiny_llama
from tests.test_optimizer import train


def linear(rows: int = 6, columns: int = 8, layers: int = 1) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(columns, rows, bias=False) for _ in range(layers)))


# Weights changed by somebody else


def test_a_cast_model_is_refused_and_not_read_as_nonsense(tokens: Tensor) -> None:
    for storage, cast in (("split", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.float32)):
        model = tiny_llama(layers=1)
        optimizer = LograOptimizer(model, rank=4, storage=storage)
        model.to(cast)
        loss_of(model, tokens).backward()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"was cast to torch\.\w+ while it is stored as"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(TypeError, match=r"rounding needs torch\.float32"):
        floor_to_bf16(torch.zeros(2, 2, dtype=torch.bfloat16), WeightBits(0, "x"), range(2), Purpose.DITHER)


def test_a_replaced_parameter_is_refused(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=4)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    loss_of(model, tokens).backward()
    with pytest.raises(RuntimeError, match="was replaced"):
        optimizer.step()


def test_loaded_weights_reach_the_dithered_copy() -> None:
    model = linear()
    optimizer = LograOptimizer(model, targets="all-linear", rank=4, dithered_copy=True)
    model.load_state_dict({"0.weight": torch.zeros(6, 8)})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not model(torch.ones(3, 8)).any()
    del optimizer


def test_loaded_weights_are_exact_in_split_storage() -> None:
    model = linear()
    optimizer = LograOptimizer(model, targets="all-linear", rank=4, storage="split", lr=1e-2)
    other = torch.randn(6, 8).bfloat16()
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    model.load_state_dict({"0.weight": other})
    storage = optimizer.storages["0"]
    storage.follow()
    assert torch.equal(storage.read(range(6)).stored, other.float())


@pytest.mark.parametrize("model_first", [True, False])
def test_split_resumes_exactly_in_either_order_of_loading(model_first: bool, tokens: Tensor) -> None:
    def make() -> tuple[Any, LograOptimizer]:
        model = tiny_llama(layers=1)
        return model, LograOptimizer(model, rank=4, storage="split", lr=1e-4)

    model, optimizer = make()
    train(model, optimizer, tokens, 2)
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, tokens, 2)
    again, resumed = make()
    for load in (0, 1) if model_first else (1, 0):
        _ = again.load_state_dict(saved) if load == 0 else resumed.load_state_dict(state)
    train(again, resumed, tokens, 2)
    for name, storage in optimizer.storages.items():
        rows = range(storage.layer.out_features)
        assert torch.equal(storage.read(rows).stored, resumed.storages[name].read(rows).stored), name


# Two phases


@pytest.mark.parametrize("between", ["backward", "zero_grad"])
def test_a_sketch_that_changes_between_propose_and_apply_is_refused(between: str, tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=4)
    loss_of(model, tokens).backward()
    optimizer.propose()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if between == "backward":  # through the last layer alone: the others must not move either
        model.model.layers[0].mlp.down_proj(torch.ones(2, 80)).sum().backward()
    else:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"changed between propose\(\) and apply\(\)|call propose\(\)"):
        optimizer.apply()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_size_of_zero_is_not_a_sketch_of_zeros(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=4, lr=0.0)
    train(model, optimizer, tokens, 1)
    assert (optimizer.updates, optimizer.zero_updates) == (1, 0)


@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e17, 1e30])
@pytest.mark.parametrize("step_size", ["lr", "update_ratio"])
def test_the_scale_of_the_loss_does_not_matter(scale: float, step_size: str) -> None:
    moved = []
    for factor in (1.0, scale):
        model = linear(64, 48)
        before = model[0].weight.detach().clone()
        optimizer = LograOptimizer(model, targets="all-linear", rank=16, step_size=step_size, lr=1e-2)
        x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1))
        h = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
        model(x).backward(h * factor)
        optimizer.step()
        assert optimizer.zero_updates == optimizer.skipped == 0
        moved.append(model[0].weight.detach() - before)
    assert relative(moved[1], moved[0]) < 1e-3


# Rules, layer by layer


def two_layers() -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 5, bias=False), "b": nn.Linear(8, 5, bias=False)})
    return model, torch.randn(7, 8)


def test_update_ratio_keeps_each_layers_own_norm() -> None:
    """The paper's form: directions have the norms of their sketches, so layers keep their proportions."""
    model, x = two_layers()
    optimizer = LograOptimizer(model, targets="all-linear", rank=8, lr=1e-2)
    (model["a"](x).square().sum() + 1e3 * model["b"](x).square().sum()).backward()
    norms = {layer.name: float(layer.sketch.norm()) for layer in optimizer.sketches if layer.sketch is not None}
    proposal = optimizer.propose()
    directions = {}
    for entry in proposal.layers:
        assert entry.row_factors is not None
        assert entry.layer.sketch is not None
        directions[entry.layer.name] = float((entry.row_factors[:, None] * entry.layer.sketch).norm())
    assert math.isclose(directions["a"], norms["a"], rel_tol=1e-5)
    assert math.isclose(directions["b"], norms["b"], rel_tol=1e-5)


def test_sgd_and_others_are_clipped_with_the_rest() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 4))
    x = torch.randn(5, 6)
    before = model[0].bias.detach().clone()
    optimizer = LograOptimizer(
        model,
        targets="all-linear",
        rank=6,
        rule="sgd",
        step_size="lr",
        lr=1.0,
        max_norm=0.5,
        others="adamw",
        others_lr=1e-3,
    )
    (1e3 * model(x).square().sum()).backward()
    gradient = model[0].bias.grad
    assert gradient is not None
    proposal = optimizer.propose()
    assert proposal.clip < 1e-3
    assert proposal.unit_norm < 2.0  # about the clipped norm, times what the projection adds
    optimizer.apply()
    # AdamW's first step does not depend on the scale, but its second moment does.
    moment = optimizer.state[model[0].bias]["exp_avg_sq"]
    assert moment.max() < 0.05 * 0.25 + 1e-6
    assert not torch.equal(model[0].bias, before)
    assert model[0].bias.grad is None


def test_beta2_is_used_and_layers_without_a_sketch_decay() -> None:
    model, x = two_layers()
    optimizer = LograOptimizer(model, targets="all-linear", rank=8, step_size="lr", lr=0.1, weight_decay=0.5, beta2=0.5)
    (model["a"](x).square().sum() + model["b"](x).square().sum()).backward()
    optimizer.step()
    v = {layer.name: optimizer.state[layer.weight]["row_second_moment"].clone() for layer in optimizer.sketches}
    last: Any = model["b"]
    before = last.weight.detach().clone()
    model["a"](x).square().sum().backward()
    optimizer.propose()
    optimizer.apply(0.5)
    decay = float(torch.tensor(1 - 0.5 * 0.1 * 0.5, dtype=torch.float32))
    assert torch.equal(last.weight, before * decay)
    assert torch.allclose(optimizer.state[last.weight]["row_second_moment"], 0.5 * v["b"])


def test_counters_and_gradients_are_used_up_and_restored(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=4, others="adamw")
    (loss_of(model, tokens) * math.nan).backward()
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    assert all(value.grad is None for value in model.parameters())
    (loss_of(model, tokens) * 0).backward()
    optimizer.step()
    assert all(value.grad is None for value in model.parameters())
    again = LograOptimizer(tiny_llama(layers=1), rank=4, others="adamw")
    again.load_state_dict(optimizer.state_dict())
    assert (again.updates, again.skipped, again.zero_updates) == (1, 1, 1)


def test_gradients_of_others_alone_are_an_update(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=4, others="adamw", others_lr=1e-2)
    before = model.lm_head.weight.detach().clone()
    hidden = torch.randn(5, 32)
    model.lm_head(hidden).square().sum().backward()
    with pytest.warns(UserWarning, match="7 of 7 selected layers got no gradient"):
        optimizer.step()
    assert optimizer.updates == 1
    assert not torch.equal(model.lm_head.weight, before)


# Construction


def test_refusals_leave_the_model_as_it_was() -> None:
    model = linear(layers=2)
    model[1].double()
    with pytest.raises(ValueError, match="float64"):
        LograOptimizer(model, targets="all-linear", rank=4, storage="bf16")
    assert model[0].weight.dtype == torch.float32
    assert all("forward" not in module.__dict__ for module in model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="others_betas is"):
        LograOptimizer(linear(), targets="all-linear", rank=4, others="adamw", others_betas=(0.9, 1.5))
    mixed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).bfloat16())
    with pytest.raises(ValueError, match=r"trains 2 parameters that are not float32, such as 1\.weight"):
        LograOptimizer(mixed, targets="all-linear", rank=2, others="adamw")
    assert all(parameter.requires_grad for parameter in mixed.parameters())
    LograOptimizer(mixed, targets="all-linear", rank=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2.5}, "rank is 2.5"),
        ({"rank": "8"}, "rank is '8'"),
        ({"lr": math.inf}, "lr is inf"),
        ({"eps": math.nan}, "eps is nan"),
        ({"seed": None}, "seed is None"),
        ({"targets": "(q_proj"}, "no regular expression"),
    ],
)
def test_odd_values_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LograOptimizer(tiny_llama(layers=1), **change)


def test_a_state_with_another_step_size_is_refused() -> None:
    optimizer = LograOptimizer(linear(), targets="all-linear", rank=4, step_size="lr", lr=1e-3, weight_decay=0.1)
    other = LograOptimizer(linear(), targets="all-linear", rank=4)
    with pytest.raises(ValueError, match=r"step_size 'lr' \(now 'update_ratio'\)"):
        other.load_state_dict(optimizer.state_dict())


def test_names_that_meet_and_layers_without_a_name() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(3, 3), "module": nn.ModuleDict({"q_proj": nn.Linear(3, 3)})})
    with pytest.raises(ValueError, match="two layers have the name 'q_proj'"):
        attach(model, ["q_proj"], rank=2)
    alone = nn.Linear(3, 3)
    sketches = attach(alone, "all-linear", rank=2)
    assert sketches.coverage.share == 0.75
    assert coverage(alone, [""]).selected == {"weight": 9}


def test_parametrised_weights_are_refused() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"not a parameter of its own|match no layer|no linear layer"):
        attach(model, "all-linear", rank=2)


# Surroundings


def test_the_compute_dtype_of_each_reader_is_its_own() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                gate = self.gate_proj(x)
                with torch.autocast("cpu", enabled=False):
                    return gate, self.up_proj(x)

    torch.manual_seed(0)
    plain = Mixed()
    model = copy.deepcopy(plain)
    attach(model, "all-linear", rank=3)
    x = torch.randn(4, 6)
    for got, wanted in zip(model(x), plain(x), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_float16_autocast_is_refused() -> None:
    model = linear()
    attach(model, "all-linear", rank=4)
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="float16"):
        model(torch.ones(2, 8))


def test_default_dtypes_do_not_leak_in() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = linear().float()
        optimizer = LograOptimizer(model, targets="all-linear", rank=4)
        (layer,) = optimizer.sketches
        x, h = torch.randn(5, 8, dtype=torch.float32), torch.randn(5, 6, dtype=torch.float32)
        model(x).backward(h)
        assert layer.group.projection is not None
        assert layer.sketch is not None
        wanted = h.double().T @ x.double() @ layer.group.projection.dense(torch.float64).T
        assert relative(layer.sketch, wanted) < 1e-5
        optimizer.step()
        assert optimizer.updates == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_functional_forward_mode_on_a_fresh_layer_and_argument_by_name() -> None:
    model = linear()
    attach(model, "all-linear", rank=4)
    x, tangent = torch.randn(3, 8), torch.randn(3, 8)
    out = torch.func.jvp(model, (x,), (tangent,))
    assert torch.allclose(out[1], F.linear(tangent, model[0].weight))
    assert torch.equal(model[0](input=x), model[0](x))


def test_a_backward_after_detach_is_refused() -> None:
    model = linear()
    sketches = attach(model, "all-linear", rank=4)
    loss = model(torch.ones(2, 8)).sum()
    sketches.detach()
    with pytest.raises(RuntimeError, match="were detached"):
        loss.backward()


def test_an_attached_model_can_be_saved_whole(tmp_path: Any) -> None:
    model = linear()
    attach(model, "all-linear", rank=4)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 8)), model(torch.ones(2, 8)))
