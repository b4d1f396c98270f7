# SPDX-License-Identifier: Apache-2.0
"""Measured peak of learning for a random model of Qwen2.5-0.5B's shape, each method in a process of its own.

    python -m benchmarks.train_peak

AdamW (fp32 weights, bf16 autocast), LoRA of rank 256 and 32 (bf16 weights, fp32 adapters), and LoGRA with fp32, split
and bf16 storage at rank 64 and 256. For all of them: activation checkpointing of blocks, logits in chunks, two
micro-batches of one response, the second of two updates. Peak: of the storages that torch operations make
(`logra.live_bytes`); bf16 products are computed in fp32 and rounded, which changes none of those.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.plan_accuracy import MIB, batch, measured, settings_of
from benchmarks.record import cell, write_result
from logra.memory_plan import Device, plan_method
from logra.memory_trace import Lengths
from logra.model_shapes import config_of

MODEL = "Qwen/Qwen2.5-0.5B"
# method, stored weights, LoGRA's storage, rank
WAYS: dict[str, tuple[str, str, str, int]] = {
    "adamw": ("adamw", "float32", "auto", 0),
    "lora_256": ("lora", "bfloat16", "auto", 256),
    "lora_32": ("lora", "bfloat16", "auto", 32),
    "logra_fp32_64": ("logra", "bfloat16", "fp32", 64),
    "logra_split_64": ("logra", "bfloat16", "split", 64),
    "logra_bf16_64": ("logra", "bfloat16", "bf16", 64),
    "logra_fp32_256": ("logra", "bfloat16", "fp32", 256),
    "logra_split_256": ("logra", "bfloat16", "split", 256),
    "logra_bf16_256": ("logra", "bfloat16", "bf16", 256),
}


def measure(way: str, prompt: int, completion: int) -> dict[str, Any]:
    method, weights, storage, rank = WAYS[way]
    settings = settings_of(method, weights, storage, "bf16", True)
    if rank:
        logra = replace(settings.method.logra, rank=rank)
        settings = replace(settings, method=replace(settings.method, logra=logra, lora_rank=rank))
    settings = replace(settings, learning=replace(settings.learning, micro_batch_tokens=prompt + completion))
    config = config_of(MODEL)
    lengths = Lengths(1, prompt + completion, completion, masked=False)
    plan = plan_method(config, settings, method, lengths, Device(kind="cpu"))
    stages = [stage for stage in plan.stages if stage.name != "rollout"]
    stage = max(stages, key=lambda each: each.total)
    peak = measured(config, settings, batch(2, prompt, completion))
    return {"way": way, "peak_bytes": peak, "planned_bytes": stage.total, "planned_by_cause": stage.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.prompt, arguments.completion)))
        return
    rows = []
    for way in WAYS:
        rows.append(cell("train_peak", way, ["benchmarks.train_peak", *sys.argv[1:], "--only", way]))
        print(way, *(f"{key} {rows[-1][key] / MIB:.1f} MiB" for key in ("peak_bytes", "planned_bytes")), flush=True)
    of = {row["way"]: row["peak_bytes"] for row in rows}
    ratios = {
        "logra_bf16_over_adamw": of["logra_bf16_64"] / of["adamw"],
        "logra_bf16_over_lora_256": of["logra_bf16_64"] / of["lora_256"],
        "logra_split_over_adamw": of["logra_split_64"] / of["adamw"],
        "logra_fp32_over_adamw": of["logra_fp32_64"] / of["adamw"],
        "worst_error_of_plan": max(abs(row["planned_bytes"] / row["peak_bytes"] - 1) for row in rows),
    }
    settings = {"model": MODEL, "prompt": arguments.prompt, "completion": arguments.completion}
    print(ratios, write_result("train_peak", rows, ratios, settings))


if __name__ == "__main__":
    main()
