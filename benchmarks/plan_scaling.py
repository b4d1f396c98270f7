# SPDX-License-Identifier: Apache-2.0
"""Planned memory and traffic of trainers and engines for common models, by `logra plan`'s own functions.

    python -m benchmarks.plan_scaling

LoGRA in storage bf16 of rank 64 and 8-bit factors, one micro-batch of 4,096 tokens on each trainer GPU, activation
checkpointing, rollout by engines elsewhere. An engine needs its weights and what the card has beyond them for its
key/value cache: counted for 64 sequences of 4,096 tokens.
"""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.plan_vs_fake import TOKENS, config_for, settings_of
from benchmarks.record import write_result
from logra.memory_plan import GIB, Device, model_size, plan_method
from logra.memory_trace import Lengths
from logra.scale_settings import EngineSettings

MODELS = (("Qwen2.5-1.5B", 1), ("Qwen2.5-7B", 1), ("Qwen2.5-7B", 4), ("27B", 4), ("27B", 8), ("Llama-3.1-70B", 8))
RANK, SEQUENCES = 64, 64


def plan(model: str, trainers: int) -> dict[str, Any]:
    settings = replace(settings_of("logra bf16"), engines=EngineSettings(kind="vllm"))
    config, lengths = config_for(model), Lengths(1, TOKENS, TOKENS - 512, masked=False)
    found = plan_method(config, settings, "logra", lengths, Device(trainers), rank=RANK)
    size = model_size(config, settings.method.logra.targets)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = 4 * text.num_hidden_layers * text.num_key_value_heads * head_dim * SEQUENCES * TOKENS
    return {
        "model": model,
        "trainer_gpus": trainers,
        "trainer_peak_bytes": found.peak.total,
        "engine_weights_bytes": 2 * size.total,
        "engine_cache_bytes": cache,
        "message_bytes": found.sync_bytes,
        "selected_weights_bytes": 2 * size.selected,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [plan(*each) for each in MODELS]
    seven = next(row for row in rows if row["model"] == "Qwen2.5-7B")
    ratios = {
        "7b_message_over_weights": seven["message_bytes"] / seven["selected_weights_bytes"],
        "gib_7b_trainer_of_four": rows[2]["trainer_peak_bytes"] / GIB,
    }
    print(ratios, write_result("plan_scaling", rows, ratios, {"tokens": TOKENS, "rank": RANK, "sequences": SEQUENCES}))


if __name__ == "__main__":
    main()
