# SPDX-License-Identifier: Apache-2.0
"""The main job on a real model: recipes/smollm2-arithmetic.yaml with LoGRA, AdamW (three rates) and LoRA.

    python scripts/fetch_smollm2.py
    python -m benchmarks.smollm2_first_run [--cells logra adamw_3e-5 ...]

Each cell is a run of its own process in runs/first_run; finished parts are kept, so the command can be stopped and
given again. Greedy and sampled pass@1 are of 200 held-out problems. Memory is the resident memory of another process
while learning, peak and average over two updates. Seconds of an update are of the three methods taking turns in one
process. The saved model is loaded anew with plain transformers and must give the score and the log-probabilities that
the trainer had at the end.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import commit, summary, write_result
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
COMPARED = ("logra", "adamw_3e-5", "lora")  # in memory and seconds
FOLDER = Path("runs/first_run")
# Large blocks go back to the system when they are freed, so that resident memory is what is in use.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536"}


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
    return {
        "method": cell,
        "commit": commit(),
        "dtype": "bf16 autocast",
        "greedy_before": greedy[0][1],
        "greedy_after": greedy[-1][1],
        "sampled_before": before,
        "sampled_after": after,
        "curve": [[line["update"], line["pass_rate"]] for line in updates],
        "greedy_curve": greedy,
        "seconds": {phase: summary([line["seconds"][phase] for line in updates]) for phase in updates[0]["seconds"]},
        "checkpoint": check(saved, parts, greedy[-1][1]),
    }


def all_trained(cell: str) -> TrainSettings:
    """Every group is trained on, so that no update is cheap for want of signal."""
    settings = settings_of(cell, 0.0)
    return replace(settings, learning=replace(settings.learning, skip_equal_groups=False))


def memory_of(cell: str) -> dict[str, int]:
    """Resident memory while learning, over three updates, in a process that gives freed blocks back at once."""
    trainer = assemble(all_trained(cell)).trainer
    found = [trainer.train_update().line["memory"]["learning"] for _ in range(2)]
    return {
        "peak_bytes": max(each["peak_bytes"] for each in found),
        "average_bytes": sum(each["average_bytes"] for each in found) // len(found),
    }


def turns(updates: int) -> dict[str, dict[str, Any]]:
    """Seconds by phase of the three methods, taking turns in this one process; the first turn is not counted."""
    trainers = {cell: assemble(all_trained(cell)).trainer for cell in COMPARED}
    seconds: dict[str, list[dict[str, float]]] = {cell: [] for cell in trainers}
    for turn in range(updates + 1):
        for cell, trainer in trainers.items():
            line = trainer.train_update().line
            print(turn, cell, line["seconds"], flush=True)
            if turn:
                seconds[cell].append(line["seconds"])
    return {
        cell: {phase: summary([each[phase] for each in values]) for phase in values[0]}
        for cell, values in seconds.items()
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
    parser.add_argument("--turns", type=int, default=6, help="counted updates of each method for the seconds")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.only:
        kind, cell = arguments.only
        found: Any = (
            run_cell(cell) if kind == "run" else memory_of(cell) if kind == "memory" else turns(arguments.turns)
        )
        (FOLDER / f"{kind}-{cell}.json").write_text(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for cell in arguments.cells:
        rows.append(part("run", cell))
        if cell in COMPARED:
            rows[-1]["training_memory"] = part("memory", cell, RETURNING)
        keys = ("greedy_before", "greedy_after", "sampled_before", "sampled_after", "curve")
        first = next((row for row in rows if row["method"] == "logra"), rows[0])
        more = {key: first[key] for key in keys}
        if cell == arguments.cells[-1]:
            more["seconds_in_turn"] = part("turns", "all", {}, arguments.turns)
        print(write_result("smollm2_first_run", rows, {}, {"cells": [r["method"] for r in rows]}, more))


def part(kind: str, cell: str, environment: Mapping[str, str] | None = None, turns: int = 0) -> Any:
    """The result of a part, from its file if it is there, else from a process of its own."""
    path = FOLDER / f"{kind}-{cell}.json"
    if not path.exists():
        command = [sys.executable, "-m", "benchmarks.smollm2_first_run", "--turns", str(turns), "--only", kind, cell]
        subprocess.run(command, check=True, env={**os.environ, **(environment or {})})
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
