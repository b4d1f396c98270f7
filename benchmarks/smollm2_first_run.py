# SPDX-License-Identifier: Apache-2.0
"""The main job on a real model: recipes/smollm2-arithmetic.yaml with LoGRA, AdamW (three rates) and LoRA.

    python scripts/fetch_smollm2.py
    python -m benchmarks.smollm2_first_run [--cells logra adamw_3e-5 ...]

Each cell is a run in runs/first_run; finished ones are kept, so the command can be stopped and given again. Greedy
and sampled pass@1 are of 200 held-out problems. The saved model is loaded anew with plain transformers and must give
the score and the log-probabilities that the trainer had at the end.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import summary, write_result
from logra.cli import make_parser
from logra.evaluator import Evaluator
from logra.model import load_policy
from logra.problems import Mixture
from logra.rl.batch import collate
from logra.rl.logprobs import token_logprobs
from logra.rollout.transformers_engine import TransformersEngine
from logra.run_folder import RunFolder
from logra.run_settings import TrainSettings
from logra.trainer import Trainer, run_training
from logra.update_rules import add_adapters, make_rule

CELLS = {
    "logra": ["--method.name", "logra"],
    "adamw_1e-5": ["--method.name", "adamw", "--method.lr", "1e-5"],
    "adamw_3e-5": ["--method.name", "adamw", "--method.lr", "3e-5"],
    "adamw_1e-4": ["--method.name", "adamw", "--method.lr", "1e-4"],
    "lora": ["--method.name", "lora", "--method.lr", "1e-4"],
}
FOLDER = Path("runs/first_run")


def settings_of(cell: str, evaluation_temperature: float) -> TrainSettings:
    parser = make_parser()
    arguments = ["train", "--config", "recipes/smollm2-arithmetic.yaml", *CELLS[cell]]
    arguments += ["--run.folder", str(FOLDER / cell), "--run.overwrite", "true"]
    arguments += ["--evaluation.temperature", str(evaluation_temperature)]
    built = parser.instantiate(parser.parse_args(arguments)).train
    return TrainSettings(**{name: built[name] for name in TrainSettings.__dataclass_fields__})


def run_cell(cell: str) -> dict[str, Any]:
    """Train one cell; greedy scores come from the run's own evaluations."""
    settings = settings_of(cell, 0.0)
    folder = RunFolder(settings)
    torch.manual_seed(0)
    policy = load_policy(settings.model)
    adapted = add_adapters(policy.model, settings.method) if settings.method.name == "lora" else None
    rule = make_rule(policy.model if adapted is None else adapted, settings.method, settings.run.seed)
    engine = TransformersEngine(policy.causal, policy.tokenizer, policy.end_ids, policy.pad_id, torch.bfloat16)
    sampled = Evaluator(settings_of(cell, 1.0), policy, engine, Mixture(settings))
    trainer = Trainer(settings, policy, engine, rule)
    lines: list[dict[str, Any]] = []

    def report(line: dict[str, Any]) -> None:
        folder.log(line)
        lines.append(line)
        shown = {key: line[key] for key in ("update", "reward", "evaluation") if key in line}
        print(cell, shown, flush=True)

    before = sampled().pass_at_1
    run_training(trainer, report)
    after = sampled().pass_at_1
    greedy = [line["evaluation"]["pass@1"] for line in lines if "evaluation" in line]
    updates = [line for line in lines if "evaluation" not in line]
    model = policy.model if adapted is None else adapted.merge_and_unload()
    saved = folder.save_model("model", model, policy.tokenizer)
    phases = updates[0]["seconds"]
    return {
        "method": cell,
        "dtype": "bf16 autocast",
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "sampled_before": before,
        "sampled_after": after,
        "curve": [[line["update"], line["pass_rate"]] for line in updates],
        "greedy_curve": [[line["update"], line["evaluation"]["pass@1"]] for line in lines if "evaluation" in line],
        "seconds": {phase: summary([line["seconds"][phase] for line in updates]) for phase in phases},
        "checkpoint": check(saved, settings, policy, engine, greedy[-1]),
    }


def check(
    saved: Path, settings: TrainSettings, policy: Any, engine: TransformersEngine, score: float
) -> dict[str, Any]:
    """What the saved model gives when plain transformers loads it, beside what the trainer has."""
    from dataclasses import replace

    mixture = Mixture(settings)
    loaded = load_policy(replace(settings.model, name=str(saved)))
    again = TransformersEngine(loaded.causal, loaded.tokenizer, loaded.end_ids, loaded.pad_id, torch.bfloat16)
    evaluator = Evaluator(settings, policy, engine, mixture)
    samples = engine.generate(evaluator.prompts[:16], evaluator.sampling, 0)
    batch = collate(samples, range(len(samples)), policy.pad_id, "cpu")
    logprobs = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for causal in (policy.causal, loaded.causal):
            causal.model.eval()
            logprobs.append(token_logprobs(causal, batch, 1.0).logprobs)
    return {
        "largest_logprob_difference": float((logprobs[0] - logprobs[1]).abs().max()),
        "trainer_score": score,
        "loaded_score": Evaluator(settings, loaded, again, mixture)().pass_at_1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for cell in arguments.cells:
        done = FOLDER / f"{cell}.json"
        if not done.exists():
            done.write_text(json.dumps(run_cell(cell)))
        rows = [
            json.loads((FOLDER / f"{each}.json").read_text()) for each in CELLS if (FOLDER / f"{each}.json").exists()
        ]
        keys = ("greedy_before", "greedy_after", "sampled_before", "sampled_after")
        first = next((row for row in rows if row["method"] == "logra"), rows[0])
        print(
            write_result(
                "smollm2_first_run", rows, {key: first[key] for key in keys}, {"cells": [r["method"] for r in rows]}
            )
        )


if __name__ == "__main__":
    main()
