# SPDX-License-Identifier: Apache-2.0
"""`logra train`: put the parts together, run, write what is left behind."""

import copy
import sys
from typing import Any

import torch

from logra.model import load_policy
from logra.rollout.transformers_engine import TransformersEngine
from logra.run_folder import RunFolder
from logra.run_settings import TrainSettings
from logra.trainer import Trainer, run_training
from logra.update_rules import add_adapters, make_rule


def train(settings: TrainSettings) -> int:
    """Train, and save the model; 0 if all updates asked for were done."""
    folder = RunFolder(settings)
    torch.manual_seed(settings.run.seed)  # LoRA's first weights; nothing else draws from it
    policy = load_policy(settings.model)
    adapted = add_adapters(policy.model, settings.method) if settings.method.name == "lora" else None
    rule = make_rule(policy.model if adapted is None else adapted, settings.method, settings.run.seed)
    dtype = torch.bfloat16 if settings.model.compute == "bf16" else torch.float32
    engine = TransformersEngine(
        policy.causal, policy.tokenizer, policy.end_ids, policy.pad_id, dtype, settings.rollout.max_rows
    )
    trainer = Trainer(settings, policy, engine, rule)

    def report(line: dict[str, Any]) -> None:
        folder.log(line)
        _say(line, settings.run.updates)

    run_training(trainer, report)
    model = policy.model if adapted is None else copy.deepcopy(adapted).merge_and_unload()
    where = folder.save_model("model", model, policy.tokenizer)
    sys.stdout.write(f"model: {where}\nmetrics: {folder.path / 'metrics.jsonl'}\n")
    return 0 if trainer.update == settings.run.updates else 1


def _say(line: dict[str, Any], updates: int) -> None:
    if "evaluation" in line:
        scores = ", ".join(f"{name} {value:.3f}" for name, value in line["evaluation"].items() if value is not None)
        sys.stdout.write(f"update {line['update']}/{updates}: held-out {scores}\n")
    else:
        reward = "no verdict" if line["reward"] is None else f"reward {line['reward']:.3f}"
        seconds = sum(line["seconds"].values())
        sys.stdout.write(
            f"update {line['update']}/{updates}: {reward}, entropy {line['entropy']:.3f}, length {line['length']:.1f}, "
            f"log-prob gap {line['logprob_gap_absolute']:.1e}, {seconds:.1f} s\n"
        )
    sys.stdout.flush()
