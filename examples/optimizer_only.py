# SPDX-License-Identifier: Apache-2.0
"""LograOptimizer in a plain loop: a small Llama learns to write Python from the standard library's own sources.

Bytes are the tokens. Runs on a CPU in about two minutes and downloads nothing.
"""

import math
import pathlib
import sysconfig

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from logra import LograOptimizer

UPDATES, BATCH, LENGTH, MIB = 150, 32, 128, 2**20


def main() -> None:
    """Train, and print what was learned and what was saved."""
    torch.manual_seed(0)
    sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    held_out, data = data[-200_000:], data[:-200_000]
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    optimizer = LograOptimizer(model, rank=32, step_size="lr", lr=1e-3, max_norm=1.0, others="adamw", others_lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: math.cos(math.pi / 2 * done / UPDATES))

    def bits_a_byte(source: torch.Tensor, seed: int) -> torch.Tensor:
        starts = torch.randint(len(source) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(seed))
        tokens = torch.stack([source[start : start + LENGTH] for start in starts]).long()
        return model(input_ids=tokens, labels=tokens).loss / math.log(2)

    @torch.no_grad()
    def held_out_bits() -> float:
        return sum(float(bits_a_byte(held_out, 10_000 + batch)) for batch in range(8)) / 8

    print(f"{optimizer.sketches.coverage}\nbefore: {held_out_bits():.2f} bits a byte of held-out code")
    for update in range(1, UPDATES + 1):
        loss = bits_a_byte(data, update)
        loss.backward()
        held = optimizer.state_bytes()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if update % 25 == 0:
            print(f"update {update}/{UPDATES}: {loss.item():.2f} bits a byte of training code", flush=True)
    weights = sum(layer.weight.numel() for layer in optimizer.sketches)
    ours = held["sketches"] + held["row_second_moments"] + held["projections"]
    print(f"after: {held_out_bits():.2f} bits a byte of held-out code")
    print(f"gradient and state of {weights:,} weights: {ours / MIB:.2f} MiB, AdamW's {12 * weights / MIB:.2f} MiB")


if __name__ == "__main__":
    main()
