# SPDX-License-Identifier: Apache-2.0
"""The memory plan against PyTorch's own tracker, for the paper's models sharded with FSDP2 over four and eight GPUs.

    python -m benchmarks.plan_vs_fake

Fake tensors on a fake process group: nothing is allocated, nothing is sent. One micro-batch of 4,096 tokens goes
forward and backward under `FSDPMemTracker` with moments in place, twice, as in an update of several micro-batches;
activation checkpointing of blocks, bf16 compute, logits in chunks. "port" holds what the authors' port is said to
hold: on every device all sketches, as many directions, and all projections in fp32. Written to plan_paper.json.
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.record import RESULTS, cell, write_result
from logra.config import LograSettings
from logra.memory_plan import GIB, Device, plan_method
from logra.memory_trace import Lengths
from logra.model_shapes import config_of
from logra.rl.batch import MicroBatch
from logra.rl.logprobs import CausalModel, token_logprobs
from logra.run_settings import LearningSettings, MethodSettings, ModelSettings, RolloutSettings, TrainSettings

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
    logra = LograSettings(rank=RANK, storage=storage or "fp32")
    weights = "bfloat16" if storage in ("split", "bf16") or name == "lora" else "float32"
    return TrainSettings(
        model=ModelSettings(weights=weights, compute="bf16", gradient_checkpointing=True, device="cpu"),
        rollout=RolloutSettings(prompts=128, samples=1, max_tokens=TOKENS - PROMPT),
        learning=LearningSettings(advantage="running_baseline", skip_equal_groups=False, micro_batch_tokens=TOKENS),
        method=MethodSettings(name="logra" if name == "port" else name, logra=logra, lora_rank=RANK),
    )


class ShardedSketches:
    """The sketches of a block leave it as shards: summed over devices and divided by rows once its backward is done."""

    def __init__(self, model: Any, devices: int, keep_whole: bool) -> None:
        from logra.sketch.hooks import attach

        self.sketches = attach(model, LograSettings().targets, RANK)
        self.devices, self.keep_whole = devices, keep_whole
        self.shards: dict[str, Tensor] = {}
        self.extras: list[Tensor] = []
        if keep_whole:
            for layer in self.sketches:
                self.extras.append(torch.zeros(layer.out_features, RANK))  # the direction
            for group in self.sketches.groups.values():
                self.extras.append(torch.zeros(group.rank, group.in_features))  # the projection in fp32
        for layer in self.sketches:
            rows = layer.out_features if keep_whole else -(-layer.out_features // devices)
            self.extras.append(torch.zeros(rows, dtype=torch.float64))  # row moments
        for block in model.model.layers:
            block.register_full_backward_hook(lambda block, *_: self.leave(block))

    def leave(self, block: nn.Module) -> None:
        inside = set(block.modules())
        for layer in self.sketches:
            if layer.module in inside and layer.sketch is not None and not self.keep_whole:
                rows = -(-layer.out_features // self.devices)
                shard = torch.empty(rows, RANK)
                whole = torch.cat(
                    [layer.sketch, layer.sketch.new_zeros(rows * self.devices - layer.out_features, RANK)]
                )
                dist.reduce_scatter_single(shard, whole)
                kept = self.shards.get(layer.name)
                self.shards[layer.name] = shard if kept is None else kept.add_(shard)
                layer.sketch = None


class Scorer(nn.Module):
    """The root of the sharding: embedding, last norm and a tied output layer are whole while it computes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.causal = model, CausalModel(model)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Log-probabilities of the batch's tokens, fp32 [N]."""
        return token_logprobs(self.causal, batch, 1.0).logprobs


def shard(model: Any, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    common: Any = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.model.layers:
        fully_shard(block, **common)
    if not model.config.tie_word_embeddings:
        fully_shard(model.model.embed_tokens, **common)
        fully_shard(model.lm_head, reshard_after_forward=False, **common)
    scorer = Scorer(model)
    fully_shard(scorer, **common)
    return scorer


def tracked(model_name: str, way: str, devices: int) -> dict[str, Any]:
    """Bytes by kind at the tracker's peak."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from logra.memory_trace import make_fake, nothing_allocated, shapes_only

    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    mesh = init_device_mesh("cpu", (devices,))
    settings, config = settings_of(way), config_for(model_name)
    name = way.partition(" ")[0]
    model, _ = shapes_only(config, settings)
    with nothing_allocated():
        make_fake(model)
        sharded = ShardedSketches(model, devices, name == "port") if name in ("logra", "port") else None
        if sharded is not None:
            model.requires_grad_(False)
        scorer = shard(model, mesh)
        selected = [layer.weight for layer in sharded.sketches] if sharded is not None else []
        low = [p.to_local().to(torch.uint8) for p in selected] if way == "logra split" else []  # type: ignore[attr-defined]
        trained = [p.to_local() for p in model.parameters() if p.requires_grad]
        moments = [torch.zeros_like(p) for p in trained for _ in range(2)]
        batch = Lengths(1, TOKENS, TOKENS - PROMPT, masked=False).fake(256)
        tracker = FSDPMemTracker(scorer)
        tracker.track_inputs((batch.input_ids,))
        beside = [*moments, *low]  # there all the time, and not seen by the tracker
        if sharded is not None:
            groups = sharded.sketches.groups.values()
            beside += [*sharded.extras, *(group.projection.compact for group in groups if group.projection is not None)]
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                scorer(batch).sum().backward()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    kinds = {str(kind).rpartition(".")[2]: int(count) for kind, count in peak.items() if count}
    held = sum(each.numel() * each.element_size() for each in beside)
    return {**kinds, "MOMENTS AND EXTRAS": held, "Total": kinds["Total"] + held}


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
            tracked_at = kinds.pop("commit")
            row = {
                "model": label,
                "parameters_of": name,
                "devices": devices,
                "way": way,
                "tracked_bytes": kinds["Total"],
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
