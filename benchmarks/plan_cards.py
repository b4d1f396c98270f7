# SPDX-License-Identifier: Apache-2.0
"""Planned peak of training for common models on one card: AdamW, LoRA, and LoGRA in its three storages.

    python -m benchmarks.plan_cards

One micro-batch of 4,096 tokens, activation checkpointing, bf16 compute, LoGRA and LoRA of rank 64. Rollout is left out
(its key/value cache is the user's choice: `logra plan` shows it). Gemma 2 has eager attention only. A card of G GB is
taken to have 0.93 G GiB free.
"""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.plan_vs_fake import TOKENS, config_for, settings_of
from benchmarks.record import write_result
from logra.memory_plan import GIB, Device, plan_method
from logra.memory_trace import Lengths

MODELS = (
    "Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen2.5-1.5B", "Llama-3.2-3B", "Qwen3-4B", "Qwen2.5-7B", "Llama-3.1-8B",
    "gemma-2-9b", "Qwen3-14B", "27B", "Qwen3-32B", "Llama-3.1-70B",
)  # fmt: skip
WAYS = ("adamw", "lora", "logra fp32", "logra split", "logra bf16")
CARDS = (16, 24, 48, 80, 141)  # GB
RANK = 64


def peak(model: str, way: str) -> dict[str, Any]:
    settings = settings_of(way)
    if way == "logra fp32":  # what is not selected stays in bf16
        settings = replace(settings, model=replace(settings.model, weights="bfloat16"))
    if model.startswith("gemma-2"):
        settings = replace(settings, model=replace(settings.model, attention="eager"))
    lengths = Lengths(1, TOKENS, TOKENS - 512, masked=False)
    plan = plan_method(config_for(model), settings, settings.method.name, lengths, Device(), rank=RANK)
    stage = max((each for each in plan.stages if each.name != "rollout"), key=lambda each: each.total)
    card = next((card for card in CARDS if stage.total <= 0.93 * card * GIB), None)
    return {"model": model, "way": way, "peak_bytes": stage.total, "by_cause": stage.bytes, "smallest_card_gb": card}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for model in MODELS:
        for way in WAYS:
            rows.append(peak(model, way))
            print(model, way, f"{rows[-1]['peak_bytes'] / GIB:.2f} GiB", rows[-1]["smallest_card_gb"], flush=True)
    of = {(row["model"], row["way"]): row for row in rows}
    seven = of["Qwen2.5-7B", "logra bf16"]
    ratios = {
        "7b_bf16_rank_64_over_weights": seven["peak_bytes"] / seven["by_cause"]["weights"],
        "gib_7b_bf16_one_card": seven["peak_bytes"] / GIB,
        "gib_27b_bf16_one_card": of["27B", "logra bf16"]["peak_bytes"] / GIB,
    }
    print(ratios, write_result("plan_cards", rows, ratios, {"tokens": TOKENS, "rank": RANK, "cards_gb": CARDS}))


if __name__ == "__main__":
    main()
