# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, gradients and optimizer state, and the measured peak of an update, method by method.

    python -m benchmarks.state_memory

Each method runs in a process of its own on one Llama-shaped model in which every selected weight has
in_features / rank = 14. Bytes are counted over the selected weights, on live tensors, when both
gradients (or sketches) and optimizer state exist. The peak is the resident memory of the process during
its second update, less what it held before the model was built; it includes activations and the frozen rest.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import write_result
from logra import LograOptimizer
from logra.config import DEFAULT_TARGETS

METHODS = ("adamw_fp32", "adamw_bf16", "lora_fp32", "lora_bf16", "logra_fp32", "logra_split", "logra_bf16")
MIB = 2**20
# Every large block is mapped by itself and given back when freed: resident memory follows live tensors.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def make_model(arguments: argparse.Namespace, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = 14 * arguments.rank
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=14,
        num_key_value_heads=14,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def is_selected(name: str) -> bool:
    return any(f".{target}." in name for target in DEFAULT_TARGETS)


def make_method(method: str, arguments: argparse.Namespace) -> tuple[Any, torch.optim.Optimizer]:
    name, storage = method.split("_")
    model = make_model(arguments, torch.float32 if storage == "fp32" else torch.bfloat16)
    if name == "logra":
        return model, LograOptimizer(model, rank=arguments.rank, storage=storage)
    if name == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=arguments.rank, lora_alpha=arguments.rank, target_modules=list(DEFAULT_TARGETS))
        model = get_peft_model(model, config)  # peft keeps adapters in fp32 whatever the base is
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_selected(name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-6, betas=(0.9, 0.95), fused=True)


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_by_kind(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Live bytes of the selected weights (and adapters), after a backward."""
    selected = [parameter for name, parameter in model.named_parameters() if is_selected(name)]
    weights, grads = size(selected), size(p.grad for p in selected if p.grad is not None)
    if isinstance(optimizer, LograOptimizer):
        held = optimizer.state_bytes()
        return {
            "weights": weights + held.pop("storage_extras"),
            "gradients": held.pop("sketches"),
            "state": sum(held.values()),
        }
    state = size(t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor) and t.ndim)
    return {"weights": weights, "gradients": grads, "state": state}


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def start_peak() -> None:
    """Give freed heap back to the system and let the peak start anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = torch.randint(arguments.vocabulary, (arguments.sequences, arguments.length))
    (torch.ones(256, 256) @ torch.ones(256, 256)).sum()  # threads and kernels exist before the base is read
    base = resident("VmRSS")
    model, optimizer = make_method(method, arguments)
    counted: dict[str, int] = {}
    for update in range(2):
        if update:
            start_peak()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if update:
            counted = bytes_by_kind(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    total = sum(counted.values())
    dtype = method.split("_")[1]
    peak = resident("VmHWM") - base
    return {"method": method, "dtype": dtype, "unit": "bytes", **counted, "total": total, "measured_peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    rows = []
    for method in METHODS:
        command = [sys.executable, "-m", "benchmarks.state_memory", *sys.argv[1:], "--only", method]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ALLOCATOR)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        numbers = {key: f"{value / MIB:.1f} MiB" for key, value in rows[-1].items() if isinstance(value, int)}
        print(method, numbers, flush=True)
    totals = {row["method"]: row["total"] for row in rows}
    peaks = {row["method"]: row["measured_peak"] for row in rows}
    ratios = {f"{method}_over_adamw_fp32": totals[method] / totals["adamw_fp32"] for method in METHODS[1:]}
    ratios |= {f"peak_{method}_over_adamw_fp32": peaks[method] / peaks["adamw_fp32"] for method in METHODS[1:]}
    settings = {key: value for key, value in vars(arguments).items() if key != "only"} | {"allocator": ALLOCATOR}
    print(f"{ratios}\nwritten to {write_result('state_memory', rows, ratios, settings)}")


if __name__ == "__main__":
    main()
