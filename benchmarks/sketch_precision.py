# SPDX-License-Identifier: Apache-2.0
"""Error of sketches under bf16 autocast on a real model, against fp64 on the same bf16 inputs and output gradients.

    python -m benchmarks.sketch_precision --model FOLDER_OR_NAME

The gradient is that of a policy-gradient loss on completions that the model draws itself. Beside it stands the error of
the dense gradient H^T X that bf16 compute would give from the same operands.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import summary, write_result
from logra.rl.batch import collate
from logra.rl.logprobs import CausalModel, token_logprobs
from logra.rollout.engine import Prompt, Sampling
from logra.rollout.transformers_engine import TransformersEngine
from logra.sketch.hooks import attach
from logra.sketch.layer_sketch import InputGroup, LayerSketch

QUESTIONS = (
    "What is 7 * 8? Answer with the number only.",
    "Write one sentence about the sea.",
    "Name three prime numbers.",
    "How many letters are in the word banana?",
)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    causal = CausalModel(model)
    engine = TransformersEngine(causal, tokenizer, frozenset({tokenizer.eos_token_id}), 0, torch.bfloat16)
    prompts = []
    for group, question in enumerate(QUESTIONS):
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(group, ids, group * arguments.samples, arguments.samples))
    samples = engine.generate(prompts, Sampling(max_tokens=arguments.tokens), 1)
    batch = collate(samples, range(len(samples)), 0, "cpu")
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(0))[batch.sample_index]
    rows: list[dict[str, Any]] = []
    for rank in arguments.ranks:
        sketched, dense = measure(causal, batch, advantages, rank)
        for name, errors in (("sketch", sketched), ("dense gradient", dense)):
            rows.append({"method": name, "rank": rank, "dtype": "bf16 autocast", "relative_error": summary(errors)})
            print(rank, name, summary(errors), flush=True)
    worst = max(row["relative_error"]["max"] for row in rows if row["method"] == "sketch")
    settings = {**vars(arguments), "layers": "all linear", "tokens_in_backward": len(batch.targets)}
    print(write_result("sketch_precision", rows, {"worst_sketch_error": worst}, settings))


def measure(causal: CausalModel, batch: Any, advantages: Tensor, rank: int) -> tuple[list[float], list[float]]:
    """Relative errors, layer by layer, of sketches and of dense bf16 gradients."""
    inputs: dict[int, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    dense: list[float] = []
    read, add = InputGroup.read, LayerSketch.add

    def reading(group: InputGroup, source: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        computed, projected = read(group, source, dtype)
        inputs[projected.data_ptr()] = computed
        return computed, projected

    def adding(layer: LayerSketch, output_grads: Tensor, projected: Tensor) -> None:
        x = inputs[projected.data_ptr()].reshape(-1, layer.in_features)
        assert layer.group.projection is not None
        exact = output_grads.double().T @ x.double()
        wanted[layer.name] = exact @ layer.group.projection.dense(torch.float64).T
        dense.append(error(output_grads.T @ x, exact))
        add(layer, output_grads, projected)

    sketches = attach(causal.model, "all-linear", rank)
    InputGroup.read, LayerSketch.add = reading, adding  # type: ignore[method-assign, assignment]
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logprobs = token_logprobs(causal, batch, 1.0).logprobs
        (logprobs * advantages).mean().backward()
        errors = [error(layer.sketch, wanted[layer.name]) for layer in sketches if layer.sketch is not None]
    finally:
        InputGroup.read, LayerSketch.add = read, add  # type: ignore[method-assign]
        sketches.detach()
    return errors, dense


if __name__ == "__main__":
    main()
