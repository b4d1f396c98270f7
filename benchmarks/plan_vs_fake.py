# SPDX-License-Identifier: Apache-2.0
"""The memory plan against PyTorch's own tracker, for the paper's models sharded with FSDP2 over four and eight GPUs.

    python -m benchmarks.plan_vs_fake

The run's own code on fake tensors and a fake process group: nothing is allocated, nothing is sent. One micro-batch of
4,096 tokens goes forward and backward under `FSDPMemTracker` with moments in place, twice, as in an update of several
micro-batches; activation checkpointing of blocks, bf16 compute, logits in chunks. The average is over the ends of
blocks, forward and backward. "port" holds what the authors' port is said to
hold: on every device all sketches, as many directions, and all projections in fp32. Written to plan_paper.json.
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.record import RESULTS, cell, write_result
from logra.config import LograSettings
from logra.divide import blocks_of, divide
from logra.memory_plan import GIB, Device, plan_method
from logra.memory_trace import Lengths, make_fake, nothing_allocated, shapes_only
from logra.model_shapes import config_of
from logra.optim.optimizer import LograOptimizer
from logra.optim.storage import SplitStorage
from logra.parallel.processes import Processes
from logra.parallel.rows import local
from logra.rl.logprobs import CausalModel, token_logprobs
from logra.run_settings import LearningSettings, MethodSettings, ModelSettings, RolloutSettings, TrainSettings
from logra.update_rules import make_rule

TOKENS, PROMPT, RANK = 4096, 512, 256
MODELS = {
    "1.5B": ("Qwen/Qwen2.5-Math-1.5B", 4),
    "7B": ("Qwen/Qwen2.5-Math-7B", 4),
    "27B on 4": ("27B", 4),
    "27B": ("27B", 8),
}
WAYS = ("adamw", "lora", "port", "logra fp32", "logra split", "logra bf16")
# What the paper reports, GiB per training GPU: averages over the run, from its table.
PAPER = {
    ("1.5B", "adamw"): 9.18,
    ("1.5B", "lora"): 13.21,
    ("1.5B", "port"): 7.18,
    ("7B", "adamw"): 31.82,
    ("7B", "port"): 17.29,
}


def config_for(name: str) -> Any:
    """A plain decoder of 27e9 parameters stands for the paper's hybrid one, whose linear attention is another kind."""
    if name != "27B":
        return config_of(name)
    from transformers import AutoConfig

    sizes = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 52, "num_attention_heads": 64}
    return AutoConfig.for_model(
        "qwen3", **sizes, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False
    )


def settings_of(way: str) -> TrainSettings:
    name, _, storage = way.partition(" ")
    sync = "update" if name == "port" else "micro_batch"
    logra = LograSettings(rank=RANK, storage=storage or "fp32", sketch_sync=sync)
    weights = "bfloat16" if storage in ("split", "bf16") or name == "lora" else "float32"
    return TrainSettings(
        model=ModelSettings(weights=weights, compute="bf16", gradient_checkpointing=True, device="cpu"),
        rollout=RolloutSettings(prompts=128, samples=1, max_tokens=TOKENS - PROMPT),
        learning=LearningSettings(advantage="running_baseline", skip_equal_groups=False, micro_batch_tokens=TOKENS),
        method=MethodSettings(name="logra" if name == "port" else name, logra=logra, lora_rank=RANK),
    )


def tracked(model_name: str, way: str, devices: int) -> dict[str, Any]:
    """Bytes by kind at the tracker's peak, and the average over the ends of blocks, forward and backward."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    processes = Processes(0, devices, init_device_mesh("cpu", (devices,)))
    settings, config = settings_of(way), config_for(model_name)
    model, trained = shapes_only(config, settings)
    with nothing_allocated():
        make_fake(model)
        causal = CausalModel(model)
        root = divide(causal, processes, "bf16")
        rule = make_rule(trained, settings.method, 0)
        beside = held_beside(rule, way)
        batch = Lengths(1, TOKENS, TOKENS - PROMPT, masked=False).fake(256)
        tracker = FSDPMemTracker(root)
        tracker.track_inputs((batch.input_ids,))
        totals: list[int] = []

        def note(*_: Any) -> None:
            totals.extend(int(device["Total"]) for device in tracker.get_tracker_snapshot("current").values())

        def after_forward(_: Any, __: Any, output: Tensor) -> None:
            note()
            if output.requires_grad:
                output.register_hook(note)

        for block in blocks_of(model):
            block.register_forward_hook(after_forward)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                totals.clear()
                token_logprobs(causal, batch, 1.0).logprobs.sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {str(kind).rpartition(".")[2]: int(count) for kind, count in peak.items() if count}
    held = sum(each.numel() * each.element_size() for each in beside)
    average = sum(totals) // len(totals) + held
    return {**kinds, "MOMENTS AND EXTRAS": held, "Total": kinds["Total"] + held, "average": average}


def held_beside(rule: Any, way: str) -> list[Tensor]:
    """What is there all the time and is not seen by the tracker: moments, low bits, projections."""
    optimizer = rule.optimizer
    if not isinstance(optimizer, LograOptimizer):
        return [torch.zeros_like(local(each)) for each in rule.trained for _ in range(2)]
    groups = [group.projection for group in optimizer.sketches.groups.values() if group.projection is not None]
    found = [optimizer._state(name)["row_second_moment"] for name in optimizer.sketches.layers]
    found += [projection.compact for projection in groups]
    found += [storage.low for storage in optimizer.storages.values() if isinstance(storage, SplitStorage)]
    if way == "port":
        found += [torch.zeros(layer.out_features, RANK) for layer in optimizer.sketches]  # directions
        found += [torch.zeros(projection.rank, projection.in_features) for projection in groups]  # in fp32
    return found


def planned(model_name: str, way: str, devices: int) -> dict[str, Any]:
    settings = settings_of(way)
    lengths = Lengths(1, TOKENS, TOKENS - PROMPT, masked=False)
    plan = plan_method(config_for(model_name), settings, settings.method.name, lengths, Device(devices))
    learning = [stage for stage in plan.stages if stage.name in ("forward", "head", "blocks", "embedding")]
    worst = max(learning, key=lambda stage: stage.total)
    return {"planned_bytes": worst.total, "planned_stage": worst.name, "planned_by_cause": worst.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    if arguments.only:
        label, way = arguments.only
        name, devices = MODELS[label]
        print(json.dumps(tracked(name, way, devices)))
        return
    rows = []
    for label, (name, devices) in MODELS.items():
        for way in WAYS:
            if label not in arguments.models:
                continue
            kinds = cell("plan_vs_fake", f"{label} {way}", ["benchmarks.plan_vs_fake", "--only", label, way])
            tracked_at, average = kinds.pop("commit"), kinds.pop("average")
            row = {
                "model": label,
                "parameters_of": name,
                "devices": devices,
                "way": way,
                "tracked_bytes": kinds["Total"],
                "average_bytes": average,
            }
            row |= {
                "tracked_by_kind": kinds,
                "tracked_at_commit": tracked_at,
                "paper_average_gib": PAPER.get((label, way)),
            }
            if way != "port":
                row |= planned(name, way, devices)
                row["error"] = row["planned_bytes"] / row["tracked_bytes"] - 1
            rows.append(row)
            shown = {key: round(value / GIB, 2) for key, value in row.items() if key.endswith("_bytes")}
            print(label, way, shown, row.get("error"), {k: round(v / GIB, 2) for k, v in kinds.items()}, flush=True)
    of = {(row["model"], row["way"]): row["tracked_bytes"] / GIB for row in rows}
    bars = {"gib_7b": "7B", "gib_1_5b": "1.5B"}
    ratios = {
        f"{name}_{storage}": of[model, f"logra {storage}"]
        for name, model in bars.items()
        for storage in ("fp32", "split", "bf16")
        if model in arguments.models
    }
    ratios["worst_error_of_plan"] = max(abs(row["error"]) for row in rows if "error" in row)
    print(ratios, write_result("plan_vs_fake", rows, ratios, {"tokens": TOKENS, "rank": RANK}))
    (RESULTS / "plan_vs_fake.json").replace(RESULTS / "plan_paper.json")


if __name__ == "__main__":
    main()
