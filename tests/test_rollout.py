"""Rollout: the ids sampled are those the trainer scores, whatever the batch; ends; filters; no stale caches."""

from typing import Any

import pytest
import torch

from logra.rl.batch import collate
from logra.rl.logprobs import CausalModel, token_logprobs
from logra.rollout.engine import Prompt, Sampling
from logra.rollout.sampling import draw, filtered, uniforms
from logra.rollout.transformers_engine import TransformersEngine, acting
from logra.sketch.hooks import attach
from tests.conftest import tiny_gpt2, tiny_llama


class Letters:
    """A tokenizer that writes id i as the i-th letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + index % 26) for index in ids)


def engine(
    model: Any, end_ids: frozenset[int] = frozenset(), dtype: torch.dtype = torch.float32, rows: int = 256
) -> TransformersEngine:
    return TransformersEngine(CausalModel(model), Letters(), end_ids, 0, dtype, rows)


def prompts(samples: int = 3) -> list[Prompt]:
    generator = torch.Generator().manual_seed(4)
    lengths = [3, 9, 1, 5]
    return [
        Prompt(group, tuple(torch.randint(48, (length,), generator=generator).tolist()), group * samples, samples)
        for group, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_and_trainer_logprobs_agree_in_fp32(make: Any, temperature: float) -> None:
    model = make()
    ends = frozenset({3, 17, 40})
    drawn = engine(model, ends).generate(prompts(), Sampling(temperature=temperature, max_tokens=12), 1)
    assert [sample.sample_id for sample in drawn] == list(range(12))
    assert len({len(sample.completion_ids) for sample in drawn}) > 2
    batch = collate(drawn, range(12), 0, "cpu")
    got = token_logprobs(CausalModel(model), batch, temperature).logprobs
    wanted = torch.tensor([logprob for sample in drawn for logprob in sample.rollout_logprobs])
    assert (got - wanted).abs().max() < 1e-5


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model = tiny_llama()
    sampling = Sampling(max_tokens=10)
    whole = engine(model, frozenset({3})).generate(prompts(), sampling, 1)
    alone = [
        sample
        for prompt in reversed(prompts())
        for sample in engine(model, frozenset({3})).generate([prompt], sampling, 1)
    ]
    assert sorted((s.sample_id, s.completion_ids) for s in alone) == [(s.sample_id, s.completion_ids) for s in whole]
    few = engine(model, frozenset({3}), rows=4).generate(prompts(), sampling, 1)
    assert [s.completion_ids for s in few] == [s.completion_ids for s in whole]
    other = engine(model, frozenset({3})).generate(prompts(), sampling, 2)
    assert [s.completion_ids for s in other] != [s.completion_ids for s in whole]


def test_every_end_id_ends_and_is_kept_and_limits_truncate() -> None:
    model = tiny_llama()
    ends = frozenset({2, 11, 30})
    for sample in engine(model, ends).generate(prompts(20), Sampling(max_tokens=9), 1):
        assert not ends & set(sample.completion_ids[:-1])
        assert sample.truncated == (sample.completion_ids[-1] not in ends)
        assert len(sample.completion_ids) == 9 or not sample.truncated
        assert len(sample.rollout_logprobs) == len(sample.completion_ids)


def test_stop_strings_end_a_completion_with_the_ids_as_sampled() -> None:
    drawn = engine(tiny_llama()).generate(prompts(10), Sampling(max_tokens=30, stop=("c", "xy")), 1)
    for sample in drawn:
        whole = Letters().decode(list(sample.completion_ids))
        stops = [place for place in (whole.find("c"), whole.find("xy")) if place >= 0]
        assert bool(stops) != sample.truncated
        assert sample.text == whole[: min(stops, default=None)]
        assert "c" not in whole[:-1]
    assert any(not sample.truncated for sample in drawn)


def test_greedy_is_the_most_probable_id_each_time() -> None:
    model = tiny_llama()
    (sample, *_) = engine(model).generate(prompts(1)[:1], Sampling(temperature=0, max_tokens=5), 1)
    ids = list(sample.prompt_ids)
    for token in sample.completion_ids:
        assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1e9]]).expand(40_000, -1)
    numbers = uniforms(0, 1, torch.arange(40_000), 0)
    assert ((numbers >= 0) & (numbers < 1)).all()
    shares = torch.bincount(draw(logits, numbers), minlength=4) / 40_000
    assert (shares - logits[0].softmax(-1)).abs().max() < 0.01
    assert shares[3] == 0
    edge = draw(
        torch.tensor([[-1e9, 0.0, 0.0, -1e9]]).expand(2, -1), torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64)
    )
    assert edge.tolist() == [1, 2]


def test_filters_keep_the_smallest_set_of_the_mass() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert filtered(logits, 1.0, 0, 0.7).isfinite().tolist() == [[False, True, False, True]]
    assert filtered(logits, 1.0, 0, 0.71).isfinite().tolist() == [[False, True, True, True]]
    assert filtered(logits, 1.0, 3, 1.0).isfinite().tolist() == [[False, True, True, True]]
    assert filtered(logits, 1.0, 0, 1e-9).isfinite().tolist() == [[False, True, False, False]]
    assert torch.equal(filtered(logits, 0.5, 0, 1.0), logits / 0.5)


def test_changed_weights_are_used_at_once() -> None:
    model = tiny_llama()
    each = engine(model)
    before = each.generate(prompts(), Sampling(max_tokens=4), 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    after = each.generate(prompts(), Sampling(max_tokens=4), 1)
    fresh = engine(model).generate(prompts(), Sampling(max_tokens=4), 1)
    assert after == fresh
    assert [s.rollout_logprobs for s in after] != [s.rollout_logprobs for s in before]


@pytest.mark.parametrize("sketched", [False, True])
def test_acting_casts_once_and_restores_everything(sketched: bool) -> None:
    model = tiny_llama().train()
    model.lm_head.weight.requires_grad_(False)
    if sketched:
        attach(model, "all-linear", rank=4)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    ids = torch.arange(6)[None]
    with acting(model, torch.bfloat16):
        assert not model.training
        model(input_ids=ids)
        from tests.test_sketch import Shapes

        with Shapes() as seen:
            model(input_ids=ids)
        casts = [
            shapes
            for name, shapes in seen.calls
            if name.startswith("aten._to_copy") and shapes[-1] in ((80, 32), (48, 32))
        ]
        assert not casts
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert model.training
    with pytest.raises(RuntimeError, match="inside"), acting(model, torch.bfloat16):
        raise RuntimeError("inside")
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
