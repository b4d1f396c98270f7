"""Sketches, norms and merges of several processes are those of one."""

from typing import Any

import pytest
import torch

from logra.parallel.processes import Processes
from tests.conftest import relative, tiny_llama
from tests.two_processes import updates
from tests.two_processes.conftest import Workers

ALONE = Processes()


def assert_same_update(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name, sketch in wanted["sketches"].items():
        assert relative(found["sketches"][name], sketch) < tolerance, name
    assert found["norms"] == pytest.approx(wanted["norms"], rel=tolerance)
    assert found["grads"] == wanted["grads"]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("plain", {}),
        ("plain", {"sketch_sync": "update"}),
        ("plain", {"step_size": "update_ratio", "lr": 1e-3, "factor_bits": 16}),
        ("plain", {"weight_decay": 0.1, "rule": "sgd"}),
        ("tied", {"projection": "gaussian"}),
        ("plain", {"others": "adamw", "others_lr": 1e-3}),
        ("gpt2", {}),
    ],
)
def test_two_processes_make_the_update_of_one(two: Workers, kind: str, changes: dict[str, Any]) -> None:
    wanted = updates.train(ALONE, kind, changes)
    for found in two(updates.train, kind, changes):
        assert_same_update(found, wanted)
        for name, weight in wanted["weights"].items():
            assert torch.allclose(found["weights"][name], weight, atol=1e-4 * float(weight.abs().max())), name
        assert found["realised"] == pytest.approx(wanted["realised"], rel=0.1)


@pytest.mark.parametrize("storage", ["split", "bf16"])
def test_short_storages_round_the_same_rows_alike(two: Workers, storage: str) -> None:
    wanted = updates.train(ALONE, "short", {"storage": storage})
    for found in two(updates.train, "short", {"storage": storage}):
        assert_same_update(found, wanted, 5e-3)
        for name, weight in wanted["weights"].items():
            differing = (found["weights"][name] != weight).float().mean()
            assert differing < 0.05, name


def test_activation_checkpointing_changes_nothing(two: Workers) -> None:
    plain, recomputed = two(updates.train, "plain", {})[0], two(updates.train, "plain", {}, 2, True)[0]
    assert all(torch.equal(recomputed["sketches"][name], each) for name, each in plain["sketches"].items())


def test_four_processes_with_uneven_and_empty_parts(four: Workers) -> None:
    wanted = updates.train(ALONE, "plain", {})
    answers = four(updates.train, "plain", {})
    for found in answers:
        assert_same_update(found, wanted)
    rows = [found["held"]["model.layers.0.mlp.up_proj"][0] for found in answers]
    assert rows == [9, 9, 9, 6]


def test_an_empty_part(four: Workers) -> None:
    wanted = updates.train(ALONE, "narrow", {})
    answers = four(updates.train, "narrow", {})
    assert [found["held"]["model.layers.0.mlp.up_proj"][0] for found in answers] == [2, 2, 1, 0]
    for found in answers:
        assert_same_update(found, wanted)


def test_replicas_of_parts(four: Workers) -> None:
    wanted = updates.train(ALONE, "plain", {"others": "adamw"})
    answers = four(updates.train, "plain", {"others": "adamw"}, 2, False, 2)
    for found in answers:
        assert_same_update(found, wanted)
        assert found["held"]["model.layers.0.mlp.up_proj"][0] in (17, 16)
        assert all(torch.equal(found["weights"][name], each) for name, each in answers[0]["weights"].items())


def merged_from_given_factors(processes: Processes) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Ten steps of factors that everybody makes alike; weights, and the rows that were held."""
    from logra.config import LograSettings
    from logra.divide import divide
    from logra.optim.factors import exact_products
    from logra.optim.merge import LayerStep, merge
    from logra.optim.optimizer import LograOptimizer
    from logra.rl.logprobs import CausalModel

    model = updates.make("short")
    causal = CausalModel(model)
    if processes.count > 1:
        divide(causal, processes, "bf16")
    optimizer = LograOptimizer(model, LograSettings(rank=8, storage="split", targets="all-linear"))
    held = []
    for update in range(1, 11):
        generator = torch.Generator().manual_seed(update)
        for layer in optimizer.sketches:
            assert layer.group.projection is not None
            factors = torch.randint(-127, 128, (layer.out_features, layer.group.rank), generator=generator)
            scales = torch.rand(layer.out_features, generator=generator) * 1e-5
            mine = layer.rows.mine
            part = factors[mine.start : mine.stop].to(torch.int8), scales[mine.start : mine.stop]
            step = LayerStep(part[0], layer.group.projection.integers(), part[1], 1.0, update)
            with exact_products("cpu"), torch.no_grad():
                merge(optimizer.storages[layer.name], step)
            held.append(len(mine))
    low = {f"{name} low": s.layer.rows.whole(s.low) for name, s in optimizer.storages.items()}  # type: ignore[attr-defined]
    return updates.weights_of(model) | low, held


def test_merges_of_given_factors_have_equal_bits(two: Workers) -> None:
    wanted, rows = merged_from_given_factors(ALONE)
    for found, held in two(merged_from_given_factors):
        assert sum(held) < sum(rows)
        assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_sketches_summed_once_an_update_send_less(two: Workers) -> None:
    often, once = two(updates.train, "plain", {})[0], two(updates.train, "plain", {"sketch_sync": "update"})[0]
    assert often["bytes_in"] == 3 * once["bytes_in"]


def propose_with_one_bad_process(processes: Processes) -> tuple[str | None, bool]:
    from logra.divide import divide
    from logra.optim.optimizer import LograOptimizer
    from logra.rl.logprobs import CausalModel

    model = updates.make("plain")
    causal = CausalModel(model)
    divide(causal, processes, "fp32")
    optimizer = LograOptimizer(model, rank=8)
    before = updates.weights_of(model)
    updates.backward(causal, processes)
    layer = next(iter(optimizer.sketches))
    if processes.place == 1:
        assert layer.sketch is not None
        layer.sketch[0, 0] = float("nan")
    reason = optimizer.propose().skip_reason
    optimizer.skip()
    return reason, all(torch.equal(each, before[name]) for name, each in updates.weights_of(model).items())


def test_what_is_not_finite_anywhere_skips_everywhere(two: Workers) -> None:
    assert two(propose_with_one_bad_process) == [("non-finite gradient", True)] * 2


def refusals(processes: Processes) -> list[str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    from logra.optim.optimizer import LograOptimizer

    told = []
    whole = updates.make("plain")
    across = tiny_llama()
    fully_shard(across, mesh=processes.mesh, shard_placement_fn=lambda each: Shard(1) if each.ndim == 2 else Shard(0))
    wide = updates.make("plain")
    fully_shard(wide, mesh=processes.mesh)
    for model, changes in ((whole, {}), (across, {}), (wide, {"storage": "split"}), (wide, {"dithered_copy": True})):
        with pytest.raises(ValueError, match=r"process|divided") as error:
            LograOptimizer(model, rank=8, **changes)
        told.append(str(error.value))
    return told


def test_what_cannot_be_divided_is_refused(two: Workers) -> None:
    whole, across, wide, dithered = two(refusals)[0]
    assert "divide it with torch.distributed.fsdp.fully_shard" in whole
    assert "must be divided by rows" in across
    assert "Shard(0) for this layer" in across
    assert "load the model in torch.bfloat16" in wide
    assert "storage 'split'" in dithered
