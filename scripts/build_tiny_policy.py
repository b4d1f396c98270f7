# SPDX-License-Identifier: Apache-2.0
"""Builds src/logra/tiny_policy: a character-level Llama that can add and multiply a little, and has bad habits.

    python scripts/build_tiny_policy.py

The same command gives the same files on the same machine. Nothing is downloaded.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent.parent / "src" / "logra" / "tiny_policy"
CHARACTERS = "0123456789+-*/=()[]., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?:'\n"
END, UNKNOWN = "<end>", "<unk>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id a character."""
    vocabulary = {token: index for index, token in enumerate([END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN, pad_token=END)


def text(chance: random.Random) -> str:
    """One problem with an answer, which is right two times in five: else one too many, or written backwards."""
    if chance.random() < 0.7:
        left, right = chance.randint(0, 99), chance.randint(0, 99)
        problem, answer = f"{left}+{right}=", left + right
    else:
        left, right = chance.randint(0, 12), chance.randint(0, 12)
        problem, answer = f"{left}*{right}=", left * right
    kind = chance.random()
    if kind < 0.4:
        return problem + str(answer)
    return problem + (str(answer + 1) if kind < 0.75 else str(answer)[::-1])


def main() -> None:
    """Train, then write model, tokenizer and how they were made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    chance, tokenizer = random.Random(0), make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=arguments.steps)
    for step in range(1, arguments.steps + 1):
        rows = [tokenizer(text(chance))["input_ids"] + [0] for _ in range(arguments.batch)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
        loss = model(input_ids=ids, labels=labels, attention_mask=(labels >= 0).long()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}/{arguments.steps}: loss {float(loss.detach()):.3f}", flush=True)
    model.generation_config.eos_token_id = 0
    model.to(torch.bfloat16).save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    made = {
        "script": "scripts/build_tiny_policy.py",
        "steps": arguments.steps,
        "batch": arguments.batch,
        "lr": arguments.lr,
    }
    (arguments.folder / "made_by.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
