"""Target selection, names, input groups, coverage."""

from typing import Any

import pytest
import torch
from torch import nn

from logra.sketch.hooks import attach
from logra.sketch.targets import coverage, find_targets, input_groups, stable_name
from tests.conftest import tiny_gpt2, tiny_llama

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_leaf_names_regular_expressions_and_all_linear() -> None:
    model = tiny_llama()
    assert len(find_targets(model, LLAMA)) == 14
    assert list(find_targets(model, ["layers.1.self_attn.q_proj"])) == ["model.layers.1.self_attn.q_proj"]
    assert list(find_targets(model, r".*layers\.0\.mlp\.(up|down)_proj")) == [
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert find_targets(model, r"up_proj|.*layers\.0\.mlp\.up_proj").keys() == {"model.layers.0.mlp.up_proj"}
    everything = find_targets(model, "all-linear")
    assert len(everything) == 14
    assert "lm_head" not in everything
    assert len(find_targets(tiny_gpt2(), "all-linear")) == 8


def test_no_match_names_near_misses() -> None:
    with pytest.raises(ValueError, match=r"q_porj.*match no layer.*Did you mean \['.*q_proj.*'\]"):
        find_targets(tiny_llama(), ["q_porj"])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        find_targets(tiny_llama(), "q_proj")  # a regular expression must match the whole name
    with pytest.raises(ValueError, match="has no linear layer"):
        find_targets(nn.Sequential(nn.LayerNorm(3)), ["q_proj"])


def test_a_target_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ValueError, match=r"embed_tokens' is of type Embedding"):
        find_targets(tiny_llama(), ["embed_tokens"])

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    with pytest.raises(ValueError, match="is of type Doubled"):
        find_targets(nn.Sequential(Doubled(3, 3)), ["0"])


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_names_are_free_of_wrappers(wrapper: str) -> None:
    assert stable_name(f"{wrapper}.model.layers.0.{wrapper}.self_attn.q_proj") == "model.layers.0.self_attn.q_proj"
    wrapped = nn.Module()
    wrapped.add_module(wrapper, tiny_llama())
    assert find_targets(wrapped, LLAMA).keys() == find_targets(tiny_llama(), LLAMA).keys()


def test_input_groups_are_siblings_with_equal_inputs() -> None:
    layers = {
        name: nn.Linear(size, 3)
        for name, size in {
            "a.q_proj": 4, "a.k_proj": 4, "a.v_proj": 4, "a.o_proj": 4, "a.gate_proj": 4, "a.up_proj": 5,
            "cross_attn.q_proj": 4, "cross_attn.k_proj": 4, "b.k_proj": 4,
        }.items()
    }  # fmt: skip
    groups = input_groups(dict(layers), {name: layer.in_features for name, layer in layers.items()})
    assert groups == {
        "a.q_proj|k_proj|v_proj": ["a.q_proj", "a.k_proj", "a.v_proj"],
        "a.o_proj": ["a.o_proj"],
        "a.gate_proj": ["a.gate_proj"],
        "a.up_proj": ["a.up_proj"],
        "cross_attn.q_proj": ["cross_attn.q_proj"],
        "cross_attn.k_proj": ["cross_attn.k_proj"],
        "b.k_proj": ["b.k_proj"],
    }


def test_coverage_counts_every_parameter_once_by_kind() -> None:
    model = tiny_llama()
    report = coverage(model, find_targets(model, ["q_proj", "down_proj"]))
    assert report.total == sum(parameter.numel() for parameter in model.parameters())
    assert report.selected == {"q_proj": 2 * 32 * 32, "down_proj": 2 * 80 * 32}
    assert sum(report.selected.values()) + sum(report.left_out.values()) == report.total
    assert report.left_out["embeddings"] == 48 * 32
    assert report.left_out["output head"] == 48 * 32
    assert report.left_out["other matrices (up_proj.weight)"] == 2 * 80 * 32
    assert f"{report.share:.1%}" in str(report)


def test_coverage_names_fused_experts_and_linear_attention() -> None:
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 6))
    model.linear_attn = nn.ModuleDict({"in_proj_qkvz": nn.Linear(6, 12, bias=False)})
    model.self_attn = nn.ModuleDict({"q_proj": nn.Linear(6, 6)})
    report = coverage(model, find_targets(model, LLAMA))
    assert report.left_out == {
        "fused expert weights (experts.gate_up_proj)": 192,
        "linear attention (in_proj_qkvz.weight)": 72,
        "biases": 6,
    }


def test_tied_head_is_refused_and_untied_is_not() -> None:
    tied = tiny_llama(tied=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied to \['model\.embed_tokens\.weight'\]"):
        attach(tied, ["lm_head", "q_proj"], rank=4)
    assert "forward" not in tied.lm_head.__dict__
    attach(tied, "all-linear", rank=4)
    attach(tiny_llama(), ["lm_head"], rank=4)


def test_unusable_models_are_refused_before_anything_changes() -> None:
    for dtype in (torch.float16, torch.int8):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(model[1].weight.detach().to(dtype), requires_grad=False)
        with pytest.raises(ValueError, match=rf"1\.weight is {dtype}.*float32 or bfloat16"):
            attach(model, "all-linear", rank=2)
        assert all("forward" not in module.__dict__ for module in model)
    model = nn.Sequential(nn.Linear(4, 4))
    attach(model, "all-linear", rank=2)
    with pytest.raises(ValueError, match="already has a replaced forward"):
        attach(model, "all-linear", rank=2)
    cases: list[dict[str, Any]] = [{"rank": 0}, {"rank": 2, "projection": "rademacer"}]
    for bad in cases:
        with pytest.raises(ValueError, match=r"rank is 0|projection is 'rademacer'"):
            attach(nn.Sequential(nn.Linear(4, 4)), "all-linear", **bad)
