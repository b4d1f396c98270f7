# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 trained by two processes, LoGRA beside AdamW under FSDP2: seconds by phase, bytes of each collective, peaks.

    python scripts/fetch_smollm2.py
    python -m benchmarks.two_processes [--updates 6]

Two gloo processes of one thread each on this machine, the recipe smollm2-arithmetic. "learned": the recipe end to end
for some updates, with the score before and after. "measured": one later update of fixed responses, in several
micro-batches, with every tensor's bytes and every collective's bytes followed in each process; both methods reduce fp32
and as often, after each micro-batch. Written to two_processes.json.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.emulated_bf16 import EmulatedBf16
from benchmarks.plan_accuracy import batch
from benchmarks.record import commit, write_result
from logra.live_bytes import LiveBytes
from logra.memory_plan import Device, plan_method
from logra.memory_trace import Lengths
from logra.model_shapes import config_of
from logra.parallel.launch import launch
from logra.parallel.processes import join, leave
from logra.parallel.rows import local
from logra.run_settings import (
    EvaluationSettings,
    LearningSettings,
    MethodSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    TrainSettings,
)

MODEL, FOLDER, COUNT = "runs/smollm2", Path("runs/two_processes"), 2
PROMPT, COMPLETION, LINES, PARTS = 64, 64, 4, 4
METHODS = ("logra", "adamw")


class CollectiveBytes(TorchDispatchMode):
    """Bytes that this process gives to each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what goes into an operation of c10d."""
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            given = args[1] if "reduce_scatter" in name or "allgather" in name else args[0]
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.bytes[name] += sum(each.numel() * each.element_size() for each in tensors)
        return func(*args, **(kwargs or {}))


def settings_of(method: str, compute: str = "fp32") -> TrainSettings:
    tokens = LINES * (PROMPT + COMPLETION)
    return TrainSettings(
        model=ModelSettings(name=MODEL, compute=compute, gradient_checkpointing=True, device="cpu"),
        rollout=RolloutSettings(prompts=PARTS * LINES, samples=1, max_tokens=COMPLETION),
        learning=LearningSettings(
            advantage="running_baseline",
            skip_equal_groups=False,
            micro_batch_tokens=tokens,
            share_prompts=False,
            mismatch_share=1.0,  # the responses are made up
        ),
        method=replace(MethodSettings(), name=method, lr=1e-5),
        evaluation=EvaluationSettings(problems=1, every=0),
        run=RunSettings(folder=str(FOLDER / "unused")),
    )


def measure(method: str, compute: str) -> None:
    """One process's part of the second update, written to a file."""
    from logra.train_command import assemble

    processes = join("cpu", 600)
    torch.set_num_threads(1)
    settings, learned_from = settings_of(method, compute), batch(PARTS * LINES, PROMPT, COMPLETION)
    with EmulatedBf16(), LiveBytes() as live:
        parts = assemble(settings, processes=processes)
        model, learner = parts.policy.model, parts.trainer.learn
        live.hold("weights", [local(each) for each in model.parameters()])
        learner(learned_from, 1)
        collectives = CollectiveBytes()
        live.start_peak()
        with collectives:
            learner(learned_from, 2)
        peak = live.peak
    found = {"peak_bytes": peak, "at_peak": dict(live.at_peak), "collective_bytes": dict(collectives.bytes)}
    (FOLDER / f"{method}-{compute}-{processes.place}.json").write_text(json.dumps(found))
    leave(processes)


def measured(method: str, compute: str) -> dict[str, Any]:
    inside = (sys.executable, "-m", "benchmarks.two_processes", "--inside", method, compute)
    if launch(COUNT, [], inside) != 0:
        raise RuntimeError(f"the processes of {method} failed")
    each = [json.loads((FOLDER / f"{method}-{compute}-{place}.json").read_text()) for place in range(COUNT)]
    lengths = Lengths(LINES, PROMPT + COMPLETION, COMPLETION, masked=True)
    plan = plan_method(config_of(MODEL), settings_of(method, compute), method, lengths, Device(COUNT, kind="cpu"))
    learning = [stage for stage in plan.stages if stage.name not in ("rollout", "KL probe")]
    stage = max(learning, key=lambda stage: stage.total)
    peak = max(one["peak_bytes"] for one in each)
    return {
        "method": method,
        "compute": compute,
        "peak_bytes": [one["peak_bytes"] for one in each],
        "planned_bytes": stage.total,
        "planned_stage": stage.name,
        "planned_by_cause": stage.bytes,
        "peak_over_plan": peak / stage.total,
        "collective_bytes": each[0]["collective_bytes"],
    }


def learned(method: str, updates: int) -> dict[str, Any]:
    """The recipe end to end."""
    folder = FOLDER / method
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["train", "--config", "recipes/smollm2-arithmetic.yaml", "--run.folder", str(folder)]
    arguments += ["--run.updates", str(updates), "--method.name", method, "--method.lr", "1e-5"]
    arguments += ["--evaluation.every", "0", "--evaluation.problems", "100", "--run.save_every", str(updates)]
    arguments += ["--learning.micro_batch_tokens", "1024"]
    if launch(COUNT, arguments) != 0:
        raise RuntimeError(f"the run of {method} failed")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [line["evaluation"]["pass@1"] for line in lines if "evaluation" in line]
    of_updates = [line for line in lines if "evaluation" not in line][1:]  # the first one warms up
    return {
        "method": method,
        "updates": updates,
        "before": scores[0],
        "after": scores[-1],
        "seconds": {
            name: statistics.median(line["seconds"][name] for line in of_updates) for name in of_updates[0]["seconds"]
        },
        "resident_peak_bytes": max(memory["peak_bytes"] for line in lines for memory in line["memory"].values()),
    }


def alone_and_together(compute: str, seed: int) -> dict[str, Any]:
    """The tiny policy by one process and by two: share of equal ids in the first update, and scores at the end."""
    scores, drawn = [], []
    for count in (1, COUNT):
        folder = FOLDER / f"tiny-{compute}-{seed}-{count}"
        shutil.rmtree(folder, ignore_errors=True)
        arguments = ["train", "--config", "recipes/tiny.yaml", "--run.folder", str(folder), "--run.updates", "40"]
        arguments += ["--model.compute", compute, "--run.seed", str(seed), "--rollout.record", "true"]
        arguments += ["--evaluation.every", "0", "--run.save_every", "0"]
        if launch(count, arguments) != 0:
            raise RuntimeError(f"the tiny run by {count} processes failed")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        scores.append([line["evaluation"]["pass@1"] for line in lines if "evaluation" in line])
        first = (folder / "batches" / "update-000001.jsonl").read_text().splitlines()
        drawn.append([json.loads(line)["completion_ids"] for line in first])
    same = [a == b for one, two in zip(*drawn, strict=True) for a, b in zip(one, two, strict=False)]
    longest = sum(max(len(one), len(two)) for one, two in zip(*drawn, strict=True))
    return {
        "tiny": compute,
        "seed": seed,
        "share_of_equal_ids": sum(same) / longest,
        "before": scores[0][0],
        "after_alone": scores[0][-1],
        "after_together": scores[1][-1],
    }


def kept(name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row that is there already, or is made now: an interrupted benchmark goes on."""
    path = FOLDER / f"{name}.row.json"
    if not path.exists():
        row = make() | {"commit": commit()}
        path.write_text(json.dumps(row))
    found: dict[str, Any] = json.loads(path.read_text())
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(*arguments.inside)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = [kept(f"{m}-{c}", partial(measured, m, c)) for m in METHODS for c in ("fp32", "bf16")]
    # bf16 products are emulated on some machines, and slow: one seed.
    pairs = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("bf16", 0)]
    rows += [kept(f"tiny-{compute}-{seed}", partial(alone_and_together, compute, seed)) for compute, seed in pairs]
    rows += [kept(f"{method}-learned", partial(learned, method, arguments.updates)) for method in METHODS]
    reduced = {(row["method"], row["compute"]): _reduced(row) for row in rows if "compute" in row}
    of = {row["method"]: row for row in rows if "seconds" in row}
    config = config_of(MODEL)
    tiny = [row for row in rows if "tiny" in row]
    ratios = {
        "reduced_bytes_over_adamw": reduced["logra", "fp32"] / reduced["adamw", "fp32"],
        "peak_over_plan": max(row["peak_over_plan"] for row in rows if "compute" in row),
        "logra_learning_over_adamw": of["logra"]["seconds"]["learning"] / of["adamw"]["seconds"]["learning"],
        "equal_ids_fp32": min(row["share_of_equal_ids"] for row in tiny if row["tiny"] == "fp32"),
        "equal_ids_bf16": min(row["share_of_equal_ids"] for row in tiny if row["tiny"] == "bf16"),
        "logra_peak_over_adamw": max(rows[0]["peak_bytes"]) / max(rows[2]["peak_bytes"]),
    }
    rank = settings_of("logra").method.logra.rank
    shape = {"in_features_over_rank": config.hidden_size / rank, "rank": rank, "processes": COUNT}
    print(ratios, write_result("two_processes", rows, ratios, shape))


def _reduced(row: dict[str, Any]) -> int:
    return sum(count for name, count in row["collective_bytes"].items() if "reduce_scatter" in name)


if __name__ == "__main__":
    main()
