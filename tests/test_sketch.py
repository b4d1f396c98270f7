"""The sketch equals dense G A^T, however the gradient is produced, and G is never there."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from logra.sketch.hooks import Sketches, attach
from logra.sketch.projection import KINDS
from tests.conftest import dense_gradients, loss_of, relative, tiny_gpt2, tiny_llama

Backward = Callable[[nn.Module], None]


def one_batch(tokens: Tensor) -> Backward:
    return lambda model: loss_of(model, tokens).backward()


def worst_error(sketches: Sketches, gradients: dict[str, Tensor]) -> float:
    errors = []
    for layer in sketches:
        assert layer.sketch is not None, layer.name
        assert layer.group.projection is not None
        wanted = gradients[layer.name].double() @ layer.group.projection.dense(torch.float64).T
        errors.append(relative(layer.sketch, wanted))
    return max(errors)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equals_the_dense_gradient_times_the_projection(kind: str, tokens: Tensor) -> None:
    model = tiny_llama()
    gradients = dense_gradients(model, one_batch(tokens))
    sketches = attach(model, "all-linear", rank=8, projection=kind)
    one_batch(tokens)(model)
    assert worst_error(sketches, gradients) < 1e-5
    assert len(sketches) == 14
    for layer in sketches:
        assert layer.sketch is not None
        assert layer.sketch.dtype == torch.float32
        assert layer.weight.grad is None


@pytest.mark.parametrize("split", [[1] * 8, [4, 4], [3, 5], [8]])
def test_any_split_into_micro_batches_with_ragged_lengths(split: list[int]) -> None:
    """The divisor is the update's token count, known before the first backward, so every split is the same sum."""
    generator = torch.Generator().manual_seed(3)
    lengths = [11, 4, 9, 2, 7, 11, 3, 5]
    sequences = [torch.randint(48, (length,), generator=generator) for length in lengths]
    divisor = sum(length - 1 for length in lengths)

    def backward(model: nn.Module, parts: list[int]) -> None:
        start = 0
        for part in parts:
            rows = sequences[start : start + part]
            start += part
            longest = max(len(row) for row in rows)
            ids = torch.stack([F.pad(row, (0, longest - len(row))) for row in rows])
            labels = torch.stack([F.pad(row, (0, longest - len(row)), value=-100) for row in rows])
            logits = model(input_ids=ids, attention_mask=(labels >= 0).long()).logits[:, :-1]
            (F.cross_entropy(logits.reshape(-1, 48), labels[:, 1:].reshape(-1), reduction="sum") / divisor).backward()

    model = tiny_llama()
    gradients = dense_gradients(model, partial(backward, parts=[8]))
    sketches = attach(model, "all-linear", rank=8)
    backward(model, split)
    assert worst_error(sketches, gradients) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_first_block_included(reentrant: bool, tokens: Tensor) -> None:
    model = tiny_llama()
    gradients = dense_gradients(model, one_batch(tokens))
    sketches = attach(model, "all-linear", rank=8)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    one_batch(tokens)(model)
    assert worst_error(sketches, gradients) < 1e-5


def test_with_everything_frozen_the_first_block_is_not_skipped(tokens: Tensor) -> None:
    model = tiny_llama()
    gradients = dense_gradients(model, one_batch(tokens))
    model.requires_grad_(False)
    sketches = attach(model, ["q_proj", "k_proj", "v_proj"], rank=8)
    one_batch(tokens)(model)
    assert worst_error(sketches, gradients) < 1e-5
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bf16_autocast_against_fp64_of_the_same_bf16_operands() -> None:
    """X and H are taken in bf16 as the layer saw them; the sum over micro-batches stays fp32."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(96, 40, bias=False)
    sketches = attach(nn.Sequential(layer), "all-linear", rank=32)
    (sketch,) = sketches
    assert sketch.group.projection is not None
    a = sketch.group.projection.dense(torch.float64)
    wanted = torch.zeros(40, 32, dtype=torch.float64)
    for _ in range(24):
        x = torch.randn(2, 65, 96, generator=generator, requires_grad=True)
        h = torch.randn(2, 65, 40, generator=generator).bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        y.backward(h)
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        wanted += h.double().reshape(-1, 40).T @ (x.detach().bfloat16().double().reshape(-1, 96) @ a.T)
    assert sketch.sketch is not None
    assert sketch.sketch.dtype == torch.float32
    assert relative(sketch.sketch, wanted) < 5e-3


def test_many_small_micro_batches_do_not_stall_in_bf16() -> None:
    """1,000 equal contributions: a bf16 sum would stop growing at 256 of them."""
    layer = nn.Linear(8, 8, bias=False)
    (sketch,) = attach(nn.Sequential(layer), "all-linear", rank=4)
    x, h = torch.ones(1, 8), torch.ones(1, 8, dtype=torch.bfloat16)
    sums = []
    for _ in range(1000):
        with torch.autocast("cpu", torch.bfloat16):
            layer(x).backward(h)
        assert sketch.sketch is not None
        sums.append(sketch.sketch.clone())
    assert relative(sums[-1], 1000 * sums[0]) < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_input_gradient_are_the_ordinary_ones(autocast: bool, tokens: Tensor) -> None:
    plain, model = tiny_llama(), tiny_llama()
    attach(model, "all-linear", rank=8)
    results = []
    for each in (plain, model):
        embedded = each.get_input_embeddings()(tokens).detach().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = each(inputs_embeds=embedded).logits
        logits.float().square().sum().backward()
        results.append((logits, embedded.grad))
    for got, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(got, wanted)


def test_conv1d_of_gpt2_with_biases(tokens: Tensor) -> None:
    model = tiny_gpt2()
    gradients = dense_gradients(model, one_batch(tokens))
    sketches = attach(model, ["c_attn", "c_proj", "c_fc"], rank=8)
    one_batch(tokens)(model)
    assert worst_error(sketches, gradients) < 1e-5
    assert all(layer.transposed for layer in sketches)
    bias = model.transformer.h[0].attn.c_attn.bias
    assert bias.grad is not None


def test_bias_gradient_is_the_ordinary_one() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 5)
    layer = copy.deepcopy(plain)
    attach(nn.Sequential(layer), "all-linear", rank=3)
    x = torch.randn(4, 7, 6)
    for each in (plain, layer):
        each(x).square().sum().backward()
    assert layer.bias.grad is not None
    assert plain.bias.grad is not None
    assert relative(layer.bias.grad, plain.bias.grad) < 1e-6


@pytest.mark.parametrize("shape", [(9, 6), (3, 4, 6), (2, 3, 2, 6), (0, 6), (6,)])
def test_inputs_of_any_dimension(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    x = torch.randn(shape)
    gradients = dense_gradients(model, lambda each: each(x).square().sum().backward())
    sketches = attach(model, "all-linear", rank=3)
    model(x).square().sum().backward()
    (layer,) = sketches
    assert layer.sketch is not None
    if x.numel():
        assert worst_error(sketches, gradients) < 1e-5
    else:
        assert not layer.sketch.any()


class TwiceUsed(nn.Module):
    """One layer used twice, and two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.first(x))))
        return self.third(torch.tanh(self.second(x)))


def test_modules_used_twice_and_shared_weights_sum_exactly() -> None:
    torch.manual_seed(0)
    model, x = TwiceUsed(), torch.randn(5, 6)
    gradients = dense_gradients(model, lambda each: each(x).square().sum().backward())
    sketches = attach(model, "all-linear", rank=6)
    assert list(sketches.layers) == ["first", "second"]
    model(x).square().sum().backward()
    assert worst_error(sketches, gradients) < 1e-5
    with pytest.raises(ValueError, match="tied to"):
        attach(TwiceUsed(), ["second"], rank=3)


class MisleadingNames(nn.Module):
    """q, k and v by name, but k and v read another tensor; and in later calls q reads a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.q_proj(x) * self.k_proj(other) + self.v_proj(x)


def test_a_layer_that_reads_another_tensor_leaves_its_group(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x, y = MisleadingNames(), torch.randn(5, 6), torch.randn(5, 6)

    def backward(each: nn.Module) -> None:
        each(x, y).square().sum().backward()
        each(y, x).square().sum().backward()

    gradients = dense_gradients(model, backward)
    sketches = attach(model, "all-linear", rank=3)
    assert set(sketches.groups) == {"q_proj|k_proj|v_proj"}
    backward(model)
    assert worst_error(sketches, gradients) < 1e-5
    assert {layer.name: layer.group.name for layer in sketches} == {
        "q_proj": "q_proj|k_proj|v_proj",
        "k_proj": "k_proj",
        "v_proj": "q_proj|k_proj|v_proj",
    }
    assert "k_proj does not read the same tensor" in caplog.text


def test_an_input_changed_in_place_between_readers_is_read_again() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            first = self.gate_proj(x)
            return first + self.up_proj(x.add_(1.0))

    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(5, 6)
    gradients = {}
    for name, read in (("gate_proj", x), ("up_proj", x + 1)):
        gradients[name] = 2 * (model.gate_proj(x) + model.up_proj(x + 1)).detach().T @ read
    sketches = attach(model, "all-linear", rank=3)
    model(x).square().sum().backward()
    assert worst_error(sketches, gradients) < 1e-5


def test_one_projection_product_per_input_group(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    sketches = attach(model, "all-linear", rank=5)
    with Shapes() as seen:
        loss = loss_of(model, tokens)
    products = [shapes for name, shapes in seen.calls if name == "aten.mm.default" and shapes[-1] == (44, 5)]
    assert len(products) == len(sketches.groups) == 4
    loss.backward()
    assert all(not group.waits_for_readers() for group in sketches.groups.values())


class Shapes(TorchDispatchMode):
    """Records every operator with the shapes of its tensor inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, Tensor)]
        self.calls.append((str(func), [tuple(each.shape) for each in tensors]))
        return out


def test_backward_never_builds_a_gradient_and_forward_never_keeps_the_input() -> None:
    layer = nn.Linear(37, 23, bias=False)
    attach(nn.Sequential(layer), "all-linear", rank=4)
    x = torch.randn(50, 37, requires_grad=True)
    saved: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        y = layer(x * 1)
    assert (50, 37) not in saved
    assert sorted(saved) == [(23, 37), (50, 4)]
    with Shapes() as seen:
        y.sum().backward()
    made = [shapes[-1] for name, shapes in seen.calls if name != "aten.detach.default" and shapes]
    assert (23, 4) in made
    assert (50, 37) in made  # the input's gradient
    assert (23, 37) not in made
    assert (37, 23) not in made


def test_no_grad_and_inference_mode_leave_no_trace(tokens: Tensor) -> None:
    plain, model = tiny_llama(), tiny_llama()
    sketches = attach(model, "all-linear", rank=8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert all(layer.sketch is None and not layer.group.waits_for_readers() for layer in sketches)


def test_eval_mode_sketches_like_train_mode(tokens: Tensor) -> None:
    model = tiny_llama()
    gradients = dense_gradients(model, one_batch(tokens))
    sketches = attach(model.eval(), "all-linear", rank=8)
    one_batch(tokens)(model)
    assert worst_error(sketches, gradients) < 1e-5


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_forward_mode_derivatives_are_those_of_the_plain_model(
    grad: bool, make: Callable[[], Any], tokens: Tensor
) -> None:
    plain, model = make(), make()
    attach(model, "all-linear", rank=8)
    results = []
    for each in (plain, model):
        each.set_attn_implementation("eager")
        embedded = each.get_input_embeddings()(tokens).detach()
        tangent = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(5))
        with torch.set_grad_enabled(grad), fwd.dual_level():
            logits = each(inputs_embeds=fwd.make_dual(embedded, tangent)).logits
            results.append(fwd.unpack_dual(logits).tangent.detach())
    assert relative(results[1], results[0]) < 1e-5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, where a graph breaks
def test_torch_compile_works_with_graph_breaks_and_is_refused_as_one_graph(tokens: Tensor) -> None:
    model = tiny_llama(layers=1)
    gradients = dense_gradients(model, one_batch(tokens))
    sketches = attach(model, "all-linear", rank=8)
    torch._dynamo.reset()
    loss_of(torch.compile(model, backend="aot_eager"), tokens).backward()
    assert worst_error(sketches, gradients) < 1e-5
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs eagerly"):
        loss_of(torch.compile(model, backend="aot_eager", fullgraph=True), tokens)


def test_checkpointing_by_hand_with_an_input_that_asks_for_gradients() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 6, requires_grad=True)
    gradients = dense_gradients(model, lambda each: each(x).square().sum().backward())
    for reentrant in (True, False):
        sketches = attach(model, "all-linear", rank=3)
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        assert worst_error(sketches, gradients) < 1e-5
        sketches.detach()


def test_state_dict_keys_stay_and_detach_restores_the_model(tokens: Tensor) -> None:
    model = tiny_llama()
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    sketches = attach(model, "all-linear", rank=8)
    assert list(model.state_dict()) == list(before)
    assert len(list(model.modules())) == len(list(tiny_llama().modules()))
    one_batch(tokens)(model)
    sketches.detach()
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    gradients = dense_gradients(model, one_batch(tokens))
    assert len(gradients) == 16


def test_a_copy_of_the_model_is_on_its_own(tokens: Tensor) -> None:
    model = tiny_llama()
    sketches = attach(model, "all-linear", rank=8)
    twin = copy.deepcopy(model)
    one_batch(tokens)(twin)
    assert all(layer.sketch is None for layer in sketches)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()
    assert not torch.equal(twin(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_double_backward_is_refused() -> None:
    layer = nn.Linear(4, 4)
    attach(nn.Sequential(layer), "all-linear", rank=2)
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
