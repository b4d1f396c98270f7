"""Predicted and exact KL against enumeration in fp64, estimators against each other, steps that are looked at and not
taken, and a budget that holds."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from logra import LograOptimizer
from logra.config import KlSettings
from logra.kl.controlled_step import ControlledStep
from logra.kl.displacement import DenseDisplacement, LowRankDisplacement
from logra.kl.looked_at import LookedAt
from logra.kl.measure import KlMeter, exactly
from logra.kl.step_control import StepControl
from logra.rl.batch import MicroBatch, Sample, collate
from logra.rl.logprobs import CausalModel
from logra.run_settings import MethodSettings
from logra.update_rules import DenseRule, LograRule
from tests.conftest import loss_of, tiny_gpt2, tiny_llama


def batch(lengths: tuple[tuple[int, int], ...] = ((3, 5), (6, 2), (1, 7))) -> MicroBatch:
    generator = torch.Generator().manual_seed(5)
    samples = []
    for row, (prompt, completion) in enumerate(lengths):
        ids = torch.randint(48, (prompt + completion,), generator=generator).tolist()
        samples.append(Sample(row, row, tuple(ids[:prompt]), tuple(ids[prompt:]), (0.0,) * completion, "", False))
    return collate(samples, range(len(samples)), 0, "cpu")


def enumerated(before: Any, after: Any, micro: MicroBatch, temperature: float) -> Tensor:
    """KL at every generated position: one sequence at a time, plain sums over the vocabulary, fp64."""
    found = []
    for row in range(len(micro.input_ids)):
        assert micro.attention_mask is not None
        length = int(micro.attention_mask[row].sum())
        ids = micro.input_ids[row : row + 1, :length]
        with torch.no_grad():
            logits = [model(input_ids=ids).logits[0].double() / temperature for model in (before, after)]
        p, q = (each.softmax(-1) for each in logits)
        for position in range(length - 1):
            if row * micro.input_ids.shape[1] + position in micro.source:
                found.append(
                    sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p[position], q[position], strict=True))
                )
    return torch.tensor(found, dtype=torch.float64)


def proposed(model: Any, lr: float, **changes: Any) -> tuple[LograOptimizer, LowRankDisplacement]:
    tokens = torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))
    optimizer = LograOptimizer(model, rank=8, targets="all-linear", step_size="lr", lr=lr, **changes)
    loss_of(model, tokens).backward()
    proposal = optimizer.propose()
    return optimizer, LowRankDisplacement(proposal, optimizer.storages)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
@pytest.mark.parametrize("estimator", ["jvp", "secant"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_predictions_against_enumerated_kl_of_small_steps(make: Any, estimator: str, temperature: float) -> None:
    """A stock model as loaded, sdpa attention: relative error below 1e-3 of the KL that the merged step causes."""
    model = make()
    before, micro = copy.deepcopy(model).double(), batch()
    optimizer, displacement = proposed(model, 2e-5)
    meter = KlMeter(CausalModel(model), temperature)
    held = meter.snapshot(micro, displacement)
    predicted = meter.predicted(held, displacement, estimator)
    optimizer.apply()
    optimizer.detach()
    wanted = enumerated(before, copy.deepcopy(model).double(), micro, temperature)
    assert wanted.mean() > 1e-10
    assert float(predicted.mean()) == pytest.approx(float(wanted.mean()), rel=2e-2 if estimator == "secant" else 5e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
def test_the_second_order_formula_on_a_tabular_policy(temperature: float) -> None:
    """1/(2 T^2) Var_p[z'] against the exact KL of a step h z', as h falls: the error is of third order in h."""
    from logra.kl.measure import _half_variance, _kl

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(20, 48, generator=generator, dtype=torch.float64)
    slope = torch.randn(20, 48, generator=generator, dtype=torch.float64)
    for h in (1e-2, 1e-3):
        exact = _kl(logits, logits + h * slope, temperature)
        predicted = _half_variance(logits, h * slope, temperature)
        p = (logits / temperature).softmax(-1)
        q = ((logits + h * slope) / temperature).softmax(-1)
        slow = torch.tensor(
            [
                sum(float(a) * math.log(float(a / b)) for a, b in zip(x, y, strict=True))
                for x, y in zip(p, q, strict=True)
            ]
        )
        assert torch.allclose(exact, slow.double(), rtol=1e-6)
        assert ((predicted - exact).abs() / exact).max() < 2 * h / temperature


def merged_in_double(model: Any, displacement: LowRankDisplacement) -> Any:
    """An fp64 copy of the model after the whole step, each update built as a dense matrix."""
    after = copy.deepcopy(model)
    modules = dict(after.named_modules())
    for proposed_layer in displacement.proposal.layers:
        step = displacement.proposal.step_of(proposed_layer, 1.0)
        assert step is not None
        update = step.scales.double()[:, None] * (step.factors.double() @ step.projection_integers.double())
        modules[proposed_layer.layer.name].weight.data -= update
    return after


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
@pytest.mark.parametrize("estimator", ["jvp", "secant"])
def test_estimators_of_a_low_rank_step_in_fp64_are_within_a_thousandth(estimator: str, temperature: float) -> None:
    """A model with sdpa as loaded, against enumeration; in fp64 only the truncation of the series is left."""
    model = tiny_llama()
    plain = copy.deepcopy(model).double()
    _, displacement = proposed(model, 1e-5)
    after = merged_in_double(plain, displacement)
    model.double()
    micro, meter = batch(), KlMeter(CausalModel(model), temperature)
    predicted = meter.predicted(meter.snapshot(micro, displacement), displacement, estimator)
    wanted = enumerated(plain, after, micro, temperature)
    assert wanted.mean() > 1e-11
    assert float(predicted.mean()) == pytest.approx(float(wanted.mean()), rel=1e-3)
    assert torch.allclose(predicted, wanted, rtol=1e-2, atol=1e-3 * float(wanted.mean()))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
def test_the_secant_of_a_dense_step_in_fp64_is_within_a_thousandth(temperature: float) -> None:
    """The same model in fp64, where only the truncation of the series is left."""
    model = tiny_llama().double()
    before, micro = copy.deepcopy(model), batch()
    tokens = torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))
    rule = DenseRule(model, MethodSettings(name="sgd", lr=1e-4, max_norm=1e9))
    loss_of(model, tokens).backward()
    displacement = rule.propose()
    assert displacement is not None
    meter = KlMeter(CausalModel(model), temperature)
    held = meter.snapshot(micro, displacement)
    predicted = meter.predicted(held, displacement, "secant")
    measured = meter.exact(held, displacement.at(1.0))
    rule.apply()
    wanted = enumerated(before, model, micro, temperature)
    assert float(measured.mean()) == pytest.approx(float(wanted.mean()), rel=1e-6)
    assert float(predicted.mean()) == pytest.approx(float(wanted.mean()), rel=1e-3)


def test_jvp_and_secant_agree_position_by_position() -> None:
    model = tiny_llama()
    _, displacement = proposed(model, 1e-4)
    meter = KlMeter(CausalModel(model), 1.0)
    held = meter.snapshot(batch(), displacement)
    jvp, secant = (meter.predicted(held, displacement, each) for each in ("jvp", "secant"))
    assert torch.allclose(jvp, secant, rtol=2e-2, atol=float(jvp.mean()) * 1e-2)
    tiny_chunks = KlMeter(CausalModel(model), 1.0, logit_mib=1e-3)
    assert torch.allclose(tiny_chunks.predicted(held, displacement, "jvp"), jvp, rtol=1e-9)
    one_by_one = KlMeter(CausalModel(model), 1.0, max_tokens=1)
    apart = one_by_one.snapshot(batch(), displacement)
    assert torch.allclose(apart.hidden, held.hidden, atol=1e-5)
    for estimator, wanted in (("jvp", jvp), ("secant", secant)):
        found = one_by_one.predicted(apart, displacement, estimator)
        assert torch.allclose(found, wanted, rtol=1e-2, atol=float(wanted.mean()) * 1e-2)


def noting(used: list[str], name: str, estimate: Any) -> Any:
    def noted(*given: Any) -> Any:
        used.append(name)
        return estimate(*given)

    return noted


def test_long_responses_are_predicted_by_the_secant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The math kernel, which alone has a forward-mode derivative, holds all attention scores."""
    model = tiny_llama()
    settings = MethodSettings(kl=KlSettings(budget=1e-4, verify=False))
    meter = KlMeter(CausalModel(model), 1.0)
    heads, (lines, width) = model.config.num_attention_heads, batch().input_ids.shape
    assert meter.jvp_mib(batch()) == 8 * lines * heads * width**2 / 2**20
    used: list[str] = []
    for name in ("_jvp", "_secant"):
        monkeypatch.setattr(meter, name, noting(used, name, getattr(meter, name)))
    for limit, wanted in ((512.0, "_jvp"), (1e-6, "_secant")):
        monkeypatch.setattr("logra.kl.controlled_step.LONGEST_JVP_MIB", limit)
        rule = LograRule(model, settings, 0)
        loss_of(model, torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))).backward()
        ControlledStep(rule, meter, StepControl(settings.kl))(1, LookedAt.whole(batch(), 2), "fp32", lambda: None)
        rule.optimizer.detach()
        assert used == [wanted]
        used.clear()


@pytest.mark.parametrize("storage", ["fp32", "split", "bf16"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_what_was_verified_is_what_is_realised(storage: str, decay: float) -> None:
    """Short storages are looked at with the rounded weights, bit for bit as they will be stored."""
    model = tiny_llama() if storage == "fp32" else tiny_llama().to(torch.bfloat16)
    optimizer, displacement = proposed(model, 1e-3, storage=storage, weight_decay=decay)
    meter = KlMeter(CausalModel(model), 1.0)
    held = meter.snapshot(batch(), displacement)
    verified = meter.exact(held, displacement.at(0.7, as_stored=True))
    merely_shifted = meter.exact(held, displacement.at(0.7))
    nothing = meter.exact(held)
    assert nothing.abs().max() < 1e-12
    optimizer.apply(0.7)
    realised = meter.exact(held)
    assert torch.allclose(verified, realised, rtol=1e-4 if storage == "fp32" else 1e-9)
    assert float(realised.mean()) > 1e-7
    if storage == "bf16":
        assert not torch.allclose(merely_shifted, realised, rtol=1e-2)


def test_looking_changes_no_bit_and_no_state() -> None:
    model = tiny_llama().train()
    optimizer, displacement = proposed(model, 1e-3, others="adamw", others_lr=1e-3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    with_others = LowRankDisplacement(
        displacement.proposal, optimizer.storages, DenseDisplacement(*optimizer.others_after())
    )
    meter = KlMeter(CausalModel(model), 1.0)
    held = meter.snapshot(batch(), with_others)
    for _ in range(3):
        meter.predicted(held, with_others, "secant")
        moved = meter.exact(held, with_others.at(0.5))
        meter.exact(held, with_others.at(0.5, as_stored=True))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)
    assert model.training
    optimizer.apply(0.5)
    assert torch.allclose(meter.exact(held), moved, rtol=1e-4)
    assert float(moved.mean()) > 2 * float(meter.exact(held, None).mean()) * 0.4
    with pytest.raises(NotImplementedError, match="use secant"), with_others.along(torch.ones(())):
        pass


@pytest.mark.parametrize("method", ["adamw", "sgd"])
def test_a_dense_step_is_taken_or_given_up_bit_for_bit(method: str) -> None:
    """At alpha 1 the plain optimizer's bits; skipped, everything as before; moments advance once whatever alpha."""
    tokens = torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))
    settings = MethodSettings(name=method, lr=1e-3, weight_decay=0.1, max_norm=0.5)
    model, plain = tiny_llama(), tiny_llama()
    rule, reference = DenseRule(model, settings), DenseRule(plain, settings)
    for update in range(4):
        loss_of(plain, tokens).backward()
        reference.step()
        if update % 2:
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            state = copy.deepcopy(rule.optimizer.state_dict())
            loss_of(model, tokens).backward()
            assert rule.propose() is not None
            rule.skip()
            assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
            assert str(rule.optimizer.state_dict()) == str(state)
        loss_of(model, tokens).backward()
        assert rule.propose() is not None
        assert rule.copied_bytes >= sum(p.numel() * 4 for p in model.parameters())
        rule.apply(1.0)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, tokens).backward()
    displacement = rule.propose()
    assert displacement is not None
    rule.apply(0.25)
    loss_of(plain, tokens).backward()
    reference.step()
    for start, whole, quarter in zip(before, plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(quarter - start, 0.25 * (whole - start), atol=1e-7)
    assert str(rule.optimizer.state_dict()["state"]) == str(reference.optimizer.state_dict()["state"])


def test_a_trained_head_is_remembered_as_it_was() -> None:
    model = tiny_llama(tied=True)
    tokens = torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))
    rule, before = DenseRule(model, MethodSettings(name="adamw", lr=1e-3)), copy.deepcopy(model)
    loss_of(model, tokens).backward()
    displacement = rule.propose()
    assert displacement is not None
    meter, micro = KlMeter(CausalModel(model), 1.0), batch()
    held = meter.snapshot(micro, displacement)
    rule.apply(0.5)
    wanted = enumerated(before.double(), copy.deepcopy(model).double(), micro, 1.0)
    assert torch.allclose(meter.exact(held), wanted, rtol=1e-3)


def test_short_weights_are_widened_and_given_back() -> None:
    model = tiny_llama().to(torch.bfloat16)
    wide, micro = copy.deepcopy(model).float(), batch()
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    with exactly(model):
        got = CausalModel(model).hidden(micro.input_ids, micro.attention_mask, use_cache=False).last_hidden_state
    wanted = CausalModel(wide).hidden(micro.input_ids, micro.attention_mask, use_cache=False).last_hidden_state
    assert got.dtype == torch.float32
    assert torch.allclose(got, wanted, atol=1e-6)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == places
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_padding_and_checkpointing_change_nothing() -> None:
    model = tiny_llama()
    _, displacement = proposed(model, 1e-3)
    meter = KlMeter(CausalModel(model), 1.0)
    whole = meter.exact(meter.snapshot(batch(), displacement), displacement.at(1.0))
    lengths = ((3, 5), (6, 2), (1, 7))
    generator, parts = torch.Generator().manual_seed(5), []
    for prompt, completion in lengths:
        ids = torch.randint(48, (prompt + completion,), generator=generator).tolist()
        one = collate([Sample(0, 0, tuple(ids[:prompt]), tuple(ids[prompt:]), (), "", False)], [0], 0, "cpu")
        parts.append(meter.exact(meter.snapshot(one, displacement), displacement.at(1.0)))
    assert torch.allclose(whole, torch.cat(parts), rtol=1e-4, atol=1e-12)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    assert torch.allclose(meter.exact(meter.snapshot(batch(), displacement), displacement.at(1.0)), whole, rtol=1e-6)
