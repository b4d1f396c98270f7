"""Chunked log-probabilities against the model's own logits; padding; peak sizes; temperature."""

from typing import Any

import pytest
import torch
from torch import Tensor

from logra.rl.batch import (
    MicroBatch,
    Sample,
    collate,
    collate_shared,
    micro_batches,
    packed_length,
    shared_batches,
)
from logra.rl.logprobs import CausalModel, chosen_logprobs, entropies, token_logprobs
from logra.sketch.hooks import attach
from tests.conftest import relative, tiny_gpt2, tiny_llama
from tests.test_sketch import Shapes


def sample(sample_id: int, prompt: int, completion: int) -> Sample:
    generator = torch.Generator().manual_seed(sample_id)
    ids = torch.randint(48, (prompt + completion,), generator=generator).tolist()
    return Sample(sample_id, sample_id, tuple(ids[:prompt]), tuple(ids[prompt:]), (0.0,) * completion, "", False)


SAMPLES = [sample(0, 3, 5), sample(1, 7, 2), sample(2, 1, 9), sample(3, 4, 1)]


def reference(model: Any, each: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """One sample at a time, whole logits, fp64."""
    ids = torch.tensor([each.prompt_ids + each.completion_ids])
    logits = model(input_ids=ids).logits[0, len(each.prompt_ids) - 1 : -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(each.completion_ids)[:, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("logit_mib", [64.0, 4 * 48 * 3 / 2**20])
def test_against_whole_logits(temperature: float, logit_mib: float) -> None:
    model = tiny_llama()
    batch = collate(SAMPLES, [2, 0, 3, 1], 0, "cpu")
    got = token_logprobs(CausalModel(model), batch, temperature, logit_mib)
    for row, index in enumerate(batch.rows):
        logprobs, entropy = reference(model, SAMPLES[index], temperature)
        assert torch.allclose(got.logprobs[batch.sample_index == row].double(), logprobs, atol=1e-5)
        assert torch.allclose(got.entropy[batch.sample_index == row].double(), entropy, atol=1e-5)


def test_gradients_are_those_of_whole_logits() -> None:
    gradients = []
    for chunked in (True, False):
        model = tiny_llama()
        if chunked:
            batch = collate(SAMPLES, range(4), 0, "cpu")
            token_logprobs(CausalModel(model), batch, 0.7, 4 * 48 * 3 / 2**20).logprobs.square().sum().backward()
        else:
            torch.stack([reference(model, each, 0.7)[0].square().sum() for each in SAMPLES]).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for got, wanted in zip(*gradients, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


def test_no_tensor_of_tokens_times_vocabulary_in_forward_or_backward() -> None:
    model, rows = tiny_llama(), 5
    batch = collate(SAMPLES, range(4), 0, "cpu")
    with Shapes() as seen:
        token_logprobs(CausalModel(model), batch, 1.0, rows * 4 * 48 / 2**20).logprobs.sum().backward()
    largest = max(
        (
            shape[0] * (shape[1] if len(shape) == 3 else 1)
            for _, shapes in seen.calls
            for shape in shapes
            if shape and shape[-1] == 48
        ),
        default=0,
    )
    assert len(batch.targets) == 17
    assert 0 < largest <= max(rows, model.config.hidden_size)  # a head gradient is [vocabulary, hidden] transposed


def test_padding_never_shows() -> None:
    model = tiny_llama()
    causal = CausalModel(model)
    alone = token_logprobs(causal, collate(SAMPLES, [0], 0, "cpu"), 1.0).logprobs
    for pads in (5, 17):
        wide = collate([SAMPLES[0], sample(9, 4 + pads, 4)], [0, 1], 0, "cpu")
        got = token_logprobs(causal, wide, 1.0)
        assert torch.allclose(got.logprobs[wide.sample_index == 0], alone, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whether_packs_work_does_not_depend_on_the_weights(dtype: torch.dtype) -> None:
    """Or a run that goes on would take another path than one that was not interrupted."""
    model = tiny_llama().to(dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
        assert CausalModel(model).can_share()


def test_masks_come_from_lengths_even_if_pad_is_an_end_token() -> None:
    end = 5
    one = Sample(0, 0, (end, 3, end), (7, end, end), (0.0,) * 3, "", False)
    batch = collate([one, sample(1, 6, 6)], [0, 1], end, "cpu")
    assert batch.targets[batch.sample_index == 0].tolist() == [7, end, end]
    assert batch.attention_mask is not None
    assert batch.attention_mask[0].sum() == 6


def test_micro_batches_hold_every_row_once_within_the_budget() -> None:
    samples = [sample(i, 1 + i % 5, 1 + (7 * i) % 11) for i in range(40)]
    parts = list(micro_batches(samples, range(40), 64))
    assert sorted(row for part in parts for row in part) == list(range(40))
    for part in parts:
        assert len(part) * max(samples[row].num_tokens for row in part) <= 64
    lengths = [samples[row].num_tokens for part in parts for row in part]
    assert lengths == sorted(lengths, reverse=True)
    assert list(micro_batches(samples, [3], 1)) == [[3]]


def test_scaled_and_capped_heads_are_followed_and_others_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.05)
    ).eval()  # fmt: skip
    CausalModel(gemma).check()
    model = tiny_llama()
    CausalModel(model).check()
    original = model.forward

    def odd(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = out.logits + torch.linspace(-1, 1, 48)
        return out

    model.forward = odd
    with pytest.raises(ValueError, match="does more to its logits"):
        CausalModel(model).check()


def test_entropy_and_logprobs_of_extreme_logits_are_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]])
    assert entropies(logits, 1.0).tolist() == pytest.approx([0.0, 1.0986123])
    assert chosen_logprobs(logits, torch.tensor([1, 2]), 1.0).tolist() == pytest.approx([-2e4, -1.0986123])


def test_bf16_gap_is_small_and_fp32_is_deterministic() -> None:
    model = tiny_llama()
    batch: MicroBatch = collate(SAMPLES, range(4), 0, "cpu")
    with torch.no_grad():
        exact = token_logprobs(CausalModel(model), batch, 1.0).logprobs
        assert torch.equal(token_logprobs(CausalModel(model), batch, 1.0).logprobs, exact)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = token_logprobs(CausalModel(model), batch, 1.0).logprobs
    assert 0 < (rounded - exact).abs().max() < 0.05


def group(prompt: int, completions: tuple[int, ...], seed: int) -> list[Sample]:
    """Samples of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(48, (prompt,), generator=generator).tolist())
    return [
        Sample(i, seed, ids, tuple(torch.randint(48, (n,), generator=generator).tolist()), (0.0,) * n, "", False)
        for i, n in enumerate(completions)
    ]


GROUPS = group(5, (4, 1, 7), 1) + group(2, (3, 3), 2) + group(9, (6,), 3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_shared_prompts_give_the_same_logprobs_and_gradients(make: Any, attention: str) -> None:
    found: list[tuple[dict[int, Tensor], list[Tensor | None]]] = []
    for shared in (False, True):
        model = make()
        model.set_attn_implementation(attention)
        causal = CausalModel(model)
        by_row: dict[int, Tensor] = {}
        assert causal.can_share()
        if shared:
            batches = [collate_shared(GROUPS, packs, 0, "cpu") for packs in shared_batches(GROUPS, range(6), 40)]
            assert len(batches) > 1
        else:
            batches = [collate(GROUPS, range(6), 0, "cpu")]
        for batch in batches:
            logprobs = token_logprobs(causal, batch, 0.7).logprobs
            weights = torch.tensor([1.0 + row for row in batch.rows])[batch.sample_index]
            (logprobs * weights).square().sum().backward()
            by_row |= {row: logprobs[batch.sample_index == place].detach() for place, row in enumerate(batch.rows)}
        found.append((by_row, [parameter.grad for parameter in model.parameters()]))
    (plain, plain_grads), (packed, packed_grads) = found
    assert sorted(packed) == list(range(6))
    for row in range(6):
        assert torch.allclose(packed[row], plain[row], atol=1e-5)
    for got, wanted in zip(packed_grads, plain_grads, strict=True):
        assert got is not None
        assert wanted is not None
        assert torch.allclose(got, wanted, atol=1e-4 * float(wanted.abs().max()) + 1e-6)


def test_sketches_of_shared_prompts_are_those_of_single_samples() -> None:
    sketches = []
    for shared in (False, True):
        model = tiny_llama()
        kept = attach(model, "all-linear", rank=8)
        batch = (
            collate_shared(GROUPS, [[0, 1, 2], [3, 4], [5]], 0, "cpu")
            if shared
            else collate(GROUPS, range(6), 0, "cpu")
        )
        weights = torch.tensor([1.0 + row for row in batch.rows])[batch.sample_index]
        (token_logprobs(CausalModel(model), batch, 1.0).logprobs * weights).sum().backward()
        sketches.append([layer.sketch for layer in kept])
    for got, wanted in zip(*sketches, strict=True):
        assert got is not None
        assert wanted is not None
        assert relative(got, wanted) < 1e-5


def test_packs_stay_within_their_budget_and_hold_every_row_once() -> None:
    samples = [
        each
        for seed in range(12)
        for each in group(3 + seed % 5, tuple(1 + (7 * i + seed) % 9 for i in range(8)), seed)
    ]
    batches = list(shared_batches(samples, range(len(samples)), 80))
    assert sorted(row for packs in batches for pack in packs for row in pack) == list(range(len(samples)))
    for packs in batches:
        assert len(packs) * max(packed_length(samples, pack) for pack in packs) <= 80
        for pack in packs:
            assert len({samples[row].prompt_ids for row in pack}) == 1
    assert len(batches) < len(list(micro_batches(samples, range(len(samples)), 80)))


def test_a_model_whose_attention_takes_no_mask_does_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    causal = CausalModel(model)
    hidden = causal.hidden

    def maskless(input_ids: Tensor, attention_mask: Tensor, **more: Any) -> Any:
        return hidden(input_ids, torch.ones_like(input_ids), **more)

    monkeypatch.setattr(causal, "hidden", maskless)
    assert not causal.can_share()
