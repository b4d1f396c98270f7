# SPDX-License-Identifier: Apache-2.0
"""The main job on a real model: recipes/smollm2-arithmetic.yaml with LoGRA, AdamW (three rates) and LoRA.

    python scripts/fetch_smollm2.py
    python -m benchmarks.smollm2_first_run [--cells logra adamw_3e-5 ...]

Each cell is a run of its own process in runs/first_run; finished ones are kept, so the command can be stopped and given
again. Greedy and sampled pass@1 are of 200 held-out problems. Memory is the resident memory of the process while
learning, peak and average. The saved model is loaded anew with plain transformers and must give the score and the
log-probabilities that the trainer had at the end.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import summary, write_result
from logra.cli import make_parser
from logra.evaluator import Evaluator
from logra.model import load_policy
from logra.problems import Mixture
from logra.progress import PlainLines
from logra.rl.batch import collate
from logra.rl.logprobs import token_logprobs
from logra.run_folder import RunFolder
from logra.run_settings import TrainSettings
from logra.train_command import Parts, assemble, make_engine
from logra.training_run import TrainingRun

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
    parts = assemble(settings)
    engine = make_engine(settings, parts.policy)
    sampled = Evaluator(settings_of(cell, 1.0), parts.policy, engine, Mixture(settings))
    before = sampled().result.pass_at_1
    TrainingRun(parts.trainer, folder, PlainLines(settings.run.updates, sys.stdout))()
    after = sampled().result.pass_at_1
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    greedy = [[line["update"], line["evaluation"]["pass@1"]] for line in lines if "evaluation" in line]
    updates = [line for line in lines if "evaluation" not in line]
    saved = folder.save_model("model", lambda path: parts.write(path, None))
    memory = [line["memory"]["learning"] for line in updates]
    return {
        "method": cell,
        "dtype": "bf16 autocast",
        "greedy_before": greedy[0][1],
        "greedy_after": greedy[-1][1],
        "sampled_before": before,
        "sampled_after": after,
        "curve": [[line["update"], line["pass_rate"]] for line in updates],
        "greedy_curve": greedy,
        "seconds": {phase: summary([line["seconds"][phase] for line in updates]) for phase in updates[0]["seconds"]},
        "peak_training_bytes": max(each["peak_bytes"] for each in memory),
        "average_training_bytes": sum(each["average_bytes"] for each in memory) // len(memory),
        "checkpoint": check(saved, parts, greedy[-1][1]),
    }


def check(saved: Path, parts: Parts, score: float) -> dict[str, Any]:
    """What the saved model gives when plain transformers loads it, beside what the trainer has."""
    settings, policy = parts.trainer.settings, parts.policy
    mixture = Mixture(settings)
    loaded = load_policy(replace(settings.model, name=str(saved)))
    evaluator = Evaluator(settings, policy, make_engine(settings, policy), mixture)
    samples = evaluator.engine.generate(evaluator.prompts[:16], evaluator.sampling, 0)
    batch = collate(samples, range(len(samples)), policy.pad_id, "cpu")
    logprobs = []
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for causal in (policy.causal, loaded.causal):
            causal.model.eval()
            logprobs.append(token_logprobs(causal, batch, 1.0).logprobs)
    again = Evaluator(settings, loaded, make_engine(settings, loaded), mixture)
    return {
        "largest_logprob_difference": float((logprobs[0] - logprobs[1]).abs().max()),
        "trainer_score": score,
        "loaded_score": again().result.pass_at_1,
        "bytes": (saved / "model.safetensors").stat().st_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--only", choices=CELLS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.only:
        (FOLDER / f"{arguments.only}.json").write_text(json.dumps(run_cell(arguments.only)))
        return
    for cell in arguments.cells:
        if not (FOLDER / f"{cell}.json").exists():
            subprocess.run([sys.executable, "-m", "benchmarks.smollm2_first_run", "--only", cell], check=True)
        found = [FOLDER / f"{each}.json" for each in CELLS if (FOLDER / f"{each}.json").exists()]
        rows = [json.loads(path.read_text()) for path in found]
        keys = ("greedy_before", "greedy_after", "sampled_before", "sampled_after", "curve")
        first = next((row for row in rows if row["method"] == "logra"), rows[0])
        more = {key: first[key] for key in keys}
        print(write_result("smollm2_first_run", rows, {}, {"cells": [r["method"] for r in rows]}, more))


if __name__ == "__main__":
    main()
