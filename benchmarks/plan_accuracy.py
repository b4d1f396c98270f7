# SPDX-License-Identifier: Apache-2.0
"""The memory plan against the measured peak of learning, for small models: every method, two sizes, checkpointing on
and off, every storage.

    python -m benchmarks.plan_accuracy

Measured is the learner itself, in its second update (moments exist) of three micro-batches, by following every storage
that a torch operation makes (`logra.live_bytes`). Planned is `logra plan`'s peak of learning for the same micro-batch.
bf16 products are computed in fp32 and rounded, which changes none of the followed storages.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.emulated_bf16 import EmulatedBf16
from benchmarks.record import write_result
from logra.collect import Batch
from logra.config import LograSettings
from logra.learner import Learner
from logra.live_bytes import LiveBytes
from logra.memory_plan import Device, plan_method
from logra.memory_trace import Lengths
from logra.model import Policy, prepare
from logra.rl.batch import Sample
from logra.rl.logprobs import CausalModel
from logra.run_settings import LearningSettings, MethodSettings, ModelSettings, RolloutSettings, TrainSettings
from logra.update_rules import add_adapters, make_rule

MIB = 2**20
SIZES: dict[str, dict[str, Any]] = {
    "18M": {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 49152,
    },
    "62M": {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 49152,
    },
}  # fmt: skip
PROMPT, COMPLETION, LINES = 64, 64, 4
# size, method, stored weights, LoGRA's storage, compute, checkpointing
CASES = (
    ("18M", "logra", "float32", "fp32", "bf16", False),
    ("18M", "logra", "float32", "fp32", "bf16", True),
    ("18M", "logra", "bfloat16", "split", "bf16", False),
    ("18M", "logra", "bfloat16", "bf16", "bf16", True),
    ("18M", "adamw", "float32", "auto", "bf16", False),
    ("18M", "adamw", "float32", "auto", "bf16", True),
    ("18M", "lora", "float32", "auto", "bf16", False),
    ("18M", "lora", "bfloat16", "auto", "bf16", True),
    ("62M", "logra", "float32", "fp32", "fp32", False),
    ("62M", "logra", "bfloat16", "split", "bf16", True),
    ("62M", "logra", "bfloat16", "bf16", "bf16", False),
    ("62M", "adamw", "float32", "auto", "fp32", True),
    ("62M", "adamw", "float32", "auto", "bf16", False),
    ("62M", "lora", "bfloat16", "auto", "bf16", False),
)


def settings_of(method: str, weights: str, storage: str, compute: str, checkpointing: bool) -> TrainSettings:
    logra = LograSettings(rank=64, step_size="lr", lr=1e-5, storage=storage)
    return TrainSettings(
        model=ModelSettings(weights=weights, compute=compute, gradient_checkpointing=checkpointing),
        rollout=RolloutSettings(prompts=3 * LINES, samples=1, max_tokens=COMPLETION),
        learning=LearningSettings(
            advantage="running_baseline",
            skip_equal_groups=False,
            micro_batch_tokens=LINES * (PROMPT + COMPLETION),
            mismatch_share=1.0,  # the responses are made up
        ),
        method=MethodSettings(name=method, logra=logra, lora_rank=64),
    )


def batch(count: int = 3 * LINES, prompt_tokens: int = PROMPT, completion_tokens: int = COMPLETION) -> Batch:
    """Responses of equal length but for every fourth, which is shorter, so that there is padding."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for row in range(count):
        width = prompt_tokens + completion_tokens - (row % LINES == 1)
        ids = torch.randint(49152, (width,), generator=generator).tolist()
        prompt, completion = tuple(ids[:prompt_tokens]), tuple(ids[prompt_tokens:])
        samples.append(Sample(row, row, prompt, completion, (-10.0,) * len(completion), "", False))
    scores = torch.tensor([float(row % 2) for row in range(len(samples))], dtype=torch.float64)
    return Batch([], samples, scores, scores, torch.arange(len(samples)), [], 0)


def measured(config: Any, settings: TrainSettings, learned_from: Batch | None = None) -> int:
    """Bytes at the peak of the second update."""
    learned_from = batch() if learned_from is None else learned_from
    torch.manual_seed(0)
    with EmulatedBf16(), LiveBytes() as live:
        dtype = getattr(torch, settings.model.weights)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        live.hold("weights", [*model.parameters(), *model.buffers()])
        prepare(model, settings.model)
        trained = add_adapters(model, settings.method) if settings.method.name == "lora" else model
        live.hold("weights", model.parameters())
        policy = Policy(model, None, CausalModel(model), frozenset({0}), 0)
        learner = Learner(settings, policy, make_rule(trained, settings.method, 0))
        learner(learned_from, 1)
        live.start_peak()
        learner(learned_from, 2)
        return live.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, help="one case by number")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for number, (size, *case) in enumerate(CASES):
        if arguments.only is not None and number != arguments.only:
            continue
        config = AutoConfig.for_model("llama", **SIZES[size], tie_word_embeddings=True)
        settings = settings_of(*case)  # type: ignore[arg-type]
        lengths = Lengths(LINES, PROMPT + COMPLETION, COMPLETION, masked=True)
        plan = plan_method(config, settings, settings.method.name, lengths, Device(kind="cpu"))
        learning = [stage for stage in plan.stages if stage.name not in ("rollout", "KL probe")]
        stage = max(learning, key=lambda each: each.total)
        found = measured(config, replace(settings))
        names = ("method", "weights", "storage", "compute", "checkpointing")
        error = stage.total / found - 1
        rows.append(
            {"size": size, **dict(zip(names, case, strict=True)), "planned_bytes": stage.total, "measured_bytes": found,
             "stage": stage.name, "by_cause": stage.bytes, "error": error}
        )  # fmt: skip
        print(size, *case, f"{stage.total / MIB:.1f} planned, {found / MIB:.1f} measured MiB, {error:+.3f}", flush=True)
    ratios = {"worst_error": max(abs(row["error"]) for row in rows)}
    if arguments.only is None:
        print(ratios, write_result("plan_accuracy", rows, ratios, {"prompt": PROMPT, "completion": COMPLETION}))


if __name__ == "__main__":
    main()
