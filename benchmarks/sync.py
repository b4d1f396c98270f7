# SPDX-License-Identifier: Apache-2.0
"""Bytes and seconds of a sync with vLLM, beside whole weights and a sparse patch; and a run of 20 updates under Ray.

    python scripts/fetch_smollm2.py
    python -m benchmarks.sync          in the environment of `make test-replicas`

"run": `logra train --ray` on SmolLM2 with vLLM in fp32; after every sync, the largest gap between the engine's and the
trainer's log-probabilities. "seconds": two vLLM processes in bf16, in turn: one takes factors, the other the same
weights whole (export, transfer, load, re-pack), each until it has answered with the trainer's digest. "patch_bytes"
there is of a lossless sparse patch of all weights. Written to sync.json.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import cell, summary, write_result
from logra.config import LograSettings
from logra.engines.build import engine_command
from logra.engines.places import Local
from logra.model import load_policy
from logra.optim.optimizer import LograOptimizer
from logra.run_settings import ModelSettings, RunSettings, TrainSettings
from logra.scale_settings import EngineSettings
from logra.sync.sender import Sender
from logra.sync.source import FactorSource, WholeSource
from logra.sync.sparse_patch import sparse_patch
from logra.sync.wire import SocketLink

MODEL, FOLDER, RANK = "runs/smollm2", Path("runs/sync"), 64
SECONDS = 600.0


def run(updates: int) -> list[dict[str, Any]]:
    """Of each update: gap and sync."""
    folder = FOLDER / "run"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "logra", "train", "--config", "recipes/smollm2-arithmetic.yaml", "--ray"]
    command += ["--model.compute", "fp32", "--engines.kind", "vllm", "--evaluation.every", "0"]
    command += ["--run.updates", str(updates), "--run.folder", str(folder), "--run.save_every", "0"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows, scores = [], []
    for line in lines:
        if "evaluation" in line:
            scores.append(line["evaluation"]["pass@1"])
            continue
        row = {"part": "run", "update": line["update"], "gap_max": line["logprob_gap_max"]} | line["sync"]
        rows.append(row | {"seconds": line["seconds"], "lag_max": line["lag"]["max"]})
    return [*rows, {"part": "run", "greedy_before": scores[0], "greedy_after": scores[-1]}]


class Pair:
    """A vLLM process of its own for each way of sending."""

    def __init__(self) -> None:
        settings = TrainSettings(
            model=ModelSettings(name=MODEL, compute="bf16", device="cpu"),
            engines=EngineSettings(kind="vllm"),
            run=RunSettings(folder=str(FOLDER)),
        )
        command = [*engine_command(settings, FOLDER / "engines"), "--listen", "127.0.0.1:0"]
        self.places = {way: Local(command, FOLDER / "engines" / f"{way}.log") for way in ("factors", "whole")}
        self.links = {way: SocketLink(way, place.connect) for way, place in self.places.items()}
        for link in self.links.values():
            link.reach(SECONDS)

    def end(self) -> None:
        for place in self.places.values():
            place.end()


def seconds(pair: Pair, storage: str, updates: int) -> list[dict[str, Any]]:
    """Of each update, both ways, in turn."""
    weights = "float32" if storage == "fp32" else "bfloat16"
    policy = load_policy(ModelSettings(name=MODEL, weights=weights, device="cpu"))
    optimizer = LograOptimizer(policy.model, LograSettings(rank=RANK, storage=storage, step_size="lr", lr=3e-5))
    selected = {f"{each.name}.weight" for each in optimizer.sketches}
    sources: dict[str, Any] = {
        "factors": FactorSource(optimizer, policy.model, "bf16"),
        "whole": WholeSource(lambda: dict(policy.model.named_parameters()), "bf16", selected),
    }
    senders = {way: Sender(source, [pair.links[way]], SECONDS) for way, source in sources.items()}
    for sender in senders.values():
        sender.anchor()
    rows: list[dict[str, Any]] = []
    ids = torch.arange(100, 108)[None]
    for update in range(updates):
        before = {name: policy.model.get_parameter(name).to(torch.bfloat16, copy=True) for name in selected}
        (-policy.model(ids + update, labels=ids + update).loss).backward()
        optimizer.step()
        row: dict[str, Any] = {"part": "seconds", "storage": storage, "update": update + 1}
        for way, sender in senders.items():
            start = time.perf_counter()
            report = sender.sync()
            row[f"{way}_seconds"], row[f"{way}_bytes"] = time.perf_counter() - start, report.bytes
            assert not report.full, report.full
        row["patch_bytes"] = sum(
            len(sparse_patch(value, policy.model.get_parameter(name).to(torch.bfloat16)))
            for name, value in before.items()
        )
        rows.append(row | {"weights_bytes": sources["factors"].weights_bytes})
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    return rows


def both(updates: int) -> list[dict[str, Any]]:
    """For both storages."""
    pair = Pair()
    try:
        return [row for storage in ("fp32", "bf16") for row in seconds(pair, storage, updates)]
    finally:
        pair.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--syncs", type=int, default=7)
    parser.add_argument("--part", choices=("run", "seconds"), help="Measure one part alone, and print it.")
    asked = parser.parse_args()
    if asked.part is not None:
        part_rows = run(asked.updates) if asked.part == "run" else both(asked.syncs)
        sys.stdout.write(json.dumps({"rows": part_rows}) + "\n")
        return
    numbers = ["--updates", str(asked.updates), "--syncs", str(asked.syncs)]
    rows: list[dict[str, Any]] = []
    for part in ("run", "seconds"):
        rows += cell("sync", part, ["benchmarks.sync", "--part", part, *numbers])["rows"]
    ratios: dict[str, float] = {}
    more: dict[str, Any] = {}
    measured = [row for row in rows if row["part"] == "seconds"]
    for storage in ("fp32", "bf16"):
        mine = [row for row in measured if row["storage"] == storage and row["update"] > 1]  # the first warms up
        found = {way: summary([row[f"{way}_seconds"] for row in mine]) for way in ("factors", "whole")}
        more[f"seconds_{storage}"] = found
        ratios[f"seconds_over_full_{storage}"] = found["factors"]["median"] / found["whole"]["median"]
    ratios["seconds_over_full"] = max(ratios.values())
    ratios["bytes_over_full"] = max(row["factors_bytes"] / row["weights_bytes"] for row in measured)
    ratios["bytes_over_patch"] = max(row["factors_bytes"] / row["patch_bytes"] for row in measured)
    ratios["gap_max"] = max(row["gap_max"] for row in rows if "gap_max" in row)
    settings = {"model": "SmolLM2-135M-Instruct", "rank": RANK, "factor_bits": 8, "updates": asked.updates}
    path = write_result("sync", rows, ratios, settings, more)
    sys.stdout.write(f"{path}\n{json.dumps(ratios, indent=1)}\n")


if __name__ == "__main__":
    main()
