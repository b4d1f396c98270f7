# SPDX-License-Identifier: Apache-2.0
"""Whole RL updates (rollout, reward, learning) on SmolLM2-135M: LoGRA, AdamW and LoRA here, and TRL's GRPOTrainer.

    python scripts/fetch_smollm2.py
    pip install trl
    python -m benchmarks.rl_update

64 samples (8 prompts, 8 each) of at most 16 tokens, GRPO advantages, no reference model. Ours computes in bf16, on fp32
weights. TRL generates with transformers, its one engine on a CPU without a server; each of the ways to run it in
`TRL_WAYS` is tried first, and the fastest takes part. The methods take turns in rounds; each round's first update warms
up and is not counted. Everything runs with the allocator settings of `benchmarks.update_time`, which help TRL more.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import summary, write_result
from benchmarks.update_time import ALLOCATOR
from logra.model import load_policy
from logra.problems import Mixture
from logra.rollout.transformers_engine import TransformersEngine
from logra.run_settings import (
    EvaluationSettings,
    LearningSettings,
    MethodSettings,
    ModelSettings,
    RolloutSettings,
    TaskSettings,
    TrainSettings,
)
from logra.trainer import Trainer
from logra.update_rules import add_adapters, make_rule

OURS = ("logra", "adamw", "lora")
KNOBS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def settings_for(method: str, model: str) -> TrainSettings:
    return TrainSettings(
        model=ModelSettings(name=model, compute="bf16"),
        task=TaskSettings(names={"chain_sum": 1.0}, knobs=KNOBS),
        rollout=RolloutSettings(prompts=8, samples=8, max_tokens=16),
        # Every group is trained on, so that no update is cheap for want of signal.
        learning=LearningSettings(advantage="group_normalised", skip_equal_groups=False),
        method=MethodSettings(name=method, lr=1e-6),
        evaluation=EvaluationSettings(problems=1),
    )


def our_trainer(method: str, model: str) -> Trainer:
    settings = settings_for(method, model)
    policy = load_policy(settings.model)
    model_to_train = add_adapters(policy.model, settings.method) if method == "lora" else policy.model
    rule = make_rule(model_to_train, settings.method, 0)
    engine = TransformersEngine(policy.causal, policy.tokenizer, policy.end_ids, policy.pad_id, torch.bfloat16)
    return Trainer(settings, policy, engine, rule)


# Weights, autocast, samples at once.
TRL_WAYS: dict[str, tuple[str, bool, int]] = {
    "bf16 weights": ("bfloat16", False, 64),
    "bf16 autocast": ("float32", True, 64),
    "fp32": ("float32", False, 64),
    "bf16 weights, 16 at once": ("bfloat16", False, 16),
}


def trl_round(model: str, updates: int, rows: list[dict[str, Any]], way: str) -> list[float]:
    """Seconds of each GRPO step, the first one left out."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from logra.tasks.answers import score_number

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [score_number(text, gold) for text, gold in zip(texts, answer, strict=True)]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.start, self.seconds = 0.0, list[float]()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    clock = Clock()
    dtype, autocast, at_once = TRL_WAYS[way]
    arguments = GRPOConfig(
        output_dir="runs/trl",
        max_steps=updates + 1,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=64 // at_once,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-6,
        beta=0.0,
        bf16=autocast,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1000,
        disable_tqdm=True,
        model_init_kwargs={"dtype": dtype},
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[clock]
    )
    trainer.train()
    return clock.seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/smollm2")
    parser.add_argument("--way", choices=TRL_WAYS, help="of running TRL; default: the fastest of all")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=3, help="counted updates of each method in a round")
    arguments = parser.parse_args()
    mixture = Mixture(settings_for("adamw", arguments.model))
    problems = [mixture.next_problem()[1] for _ in range(64)]
    rows = [{"prompt": [{"role": "user", "content": p.prompt}], "answer": p.answer} for p in problems]
    ways = TRL_WAYS if arguments.way is None else [arguments.way]
    tried = {way: min(trl_round(arguments.model, 2, rows, way)) for way in ways}
    way = min(tried, key=lambda each: tried[each])
    print(tried, flush=True)
    ours = {method: our_trainer(method, arguments.model) for method in OURS}
    seconds: dict[str, list[float]] = {"trl": [], **{method: [] for method in OURS}}
    phases: dict[str, list[dict[str, float]]] = {method: [] for method in OURS}
    for turn in range(arguments.rounds):
        seconds["trl"] += trl_round(arguments.model, arguments.updates, rows, way)
        for method, trainer in ours.items():
            for update in range(arguments.updates + 1):
                start = time.perf_counter()
                line = trainer.train_update().line
                if update:
                    seconds[method].append(time.perf_counter() - start)
                    phases[method].append(line["seconds"])
        print(turn, {method: summary(values) for method, values in seconds.items()}, flush=True)
    table = []
    for method, values in seconds.items():
        row: dict[str, Any] = {"method": method, "unit": "seconds", "total": summary(values)}
        for phase in ("rollout", "reward", "learning") if method in phases else ():
            row[phase] = summary([each[phase] for each in phases[method]])
        table.append(row)
    middle = {method: summary(values)["median"] for method, values in seconds.items()}
    ratios = {f"{method}_over_trl": middle[method] / middle["trl"] for method in OURS}
    settings = {**vars(arguments), "trl": _trl_version(), "trl_way": way, "trl_ways_tried": tried, **ALLOCATOR}
    print(json.dumps(ratios), write_result("rl_update", table, ratios, settings))


def _trl_version() -> str:
    import trl

    return str(trl.__version__)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "benchmarks.rl_update", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=os.environ | ALLOCATOR, check=False).returncode)
    Path("runs").mkdir(exist_ok=True)
    main()
