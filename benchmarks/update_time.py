# SPDX-License-Identifier: Apache-2.0
"""One training update (forward, backward, step) with AdamW, LoRA and LoGRA, in turn, as ratios.

    python -m benchmarks.update_time

All three train the same linear weights (q, k, v, o, gate, up, down) of one model on the same tokens:
blocks of a 7B Llama at rank 256 (in_features / rank is 16, and 43 for down), fewer of them, with a
vocabulary that keeps the head's share of the work about that of the whole model. Embedding, head and norms are
frozen for all. The sequences are short, as RL answers are. The arithmetic limit is
(2 + 2 rank / in_features) / 3 of AdamW's matrix work.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.record import summary, write_result
from logra import LograOptimizer
from logra.config import DEFAULT_TARGETS

# Without these, glibc gives large blocks back at every free and each product pays for fresh pages.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
METHODS = ("adamw", "lora", "logra")


def make_model(arguments: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        use_cache=False,
        attn_implementation="eager",  # the fastest of transformers' kernels here, at this length
    )
    return LlamaForCausalLM(config)


def make_method(name: str, arguments: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(arguments)
    if name == "logra":
        return model, LograOptimizer(model, rank=arguments.rank)
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=arguments.rank, lora_alpha=arguments.rank, target_modules=list(DEFAULT_TARGETS))
        model = get_peft_model(model, config)
    else:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name.split(".")[-2] in DEFAULT_TARGETS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-6, betas=(0.9, 0.95), fused=True)


def one_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, bf16: bool
) -> dict[str, float]:
    start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
        loss = model(input_ids=tokens, labels=tokens).loss
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    end = time.perf_counter()
    return {
        "forward": forward - start,
        "backward": backward - forward,
        "step": end - backward,
        "total": end - start,
    }


def measure(arguments: argparse.Namespace, bf16: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    methods = {name: make_method(name, arguments) for name in METHODS}
    tokens = torch.randint(arguments.vocabulary, (arguments.sequences, arguments.length))
    times: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    dtype = "bf16 autocast" if bf16 else "fp32"
    for turn in range(arguments.turns + 1):  # the first turn warms up
        for name, (model, optimizer) in methods.items():
            seconds = one_update(model, optimizer, tokens, bf16)
            say(f"{dtype} turn {turn} {name}: " + " ".join(f"{k} {v:.3f}" for k, v in seconds.items()))
            if turn:
                times[name].append(seconds)
    rows = []
    for name in METHODS:
        phases = {phase: summary([t[phase] for t in times[name]]) for phase in times[name][0]}
        rows.append({"method": name, "dtype": dtype, "unit": "seconds", **phases})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    arguments = parser.parse_args()
    if any(name not in os.environ for name in ALLOCATOR):
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.update_time", *sys.argv[1:]], {**os.environ, **ALLOCATOR}
        )
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for dtype in arguments.dtypes:
        measured = measure(arguments, dtype == "bf16", lambda line: print(line, flush=True))
        median = {row["method"]: row["total"]["median"] for row in measured}
        ratios |= {f"logra_over_{other}_{dtype}": median["logra"] / median[other] for other in ("adamw", "lora")}
        rows += measured
    path = write_result("update_time", rows, ratios, {**vars(arguments), "allocator": ALLOCATOR})
    print(f"{ratios}\nwritten to {path}")


if __name__ == "__main__":
    main()
