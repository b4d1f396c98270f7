# SPDX-License-Identifier: Apache-2.0
"""`logra train` and `logra eval`: put the parts together, run, write what is left behind."""

import copy
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from logra.evaluator import Evaluator
from logra.model import Policy, load_policy
from logra.problems import Mixture
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
    trainer = Trainer(settings, policy, _engine(settings, policy), rule)

    def report(line: dict[str, Any]) -> None:
        folder.log(line)
        _say(line, settings.run.updates)

    def save(name: str) -> Path:
        model = policy.model if adapted is None else copy.deepcopy(adapted).merge_and_unload()
        return folder.save_model(name, model, policy.tokenizer)

    run_training(trainer, report, save)
    where = save("model")
    sys.stdout.write(f"model: {where}\nmetrics: {folder.path / 'metrics.jsonl'}\n")
    return 0 if trainer.update == settings.run.updates else 1


def evaluate(settings: TrainSettings) -> int:
    """Score the model on the held-out problems and print the result as JSON."""
    mixture = Mixture(settings)
    policy = load_policy(settings.model)
    result = Evaluator(settings, policy, _engine(settings, policy), mixture)()
    sys.stdout.write(json.dumps({"model": settings.model.name, **asdict(result)}) + "\n")
    return 0


def _engine(settings: TrainSettings, policy: Policy) -> TransformersEngine:
    dtype = torch.bfloat16 if settings.model.compute == "bf16" else torch.float32
    ends = (policy.end_ids, policy.pad_id)
    return TransformersEngine(policy.causal, policy.tokenizer, *ends, dtype, settings.rollout.max_rows)


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
