# SPDX-License-Identifier: Apache-2.0
"""A run killed by SIGKILL at random moments and resumed each time, beside the same run left alone.

    python -m benchmarks.kill_resume [--kills 5]

Real processes of `logra train` on the tiny policy. Each kill comes a random time after the process began to train; the
last resume runs to the end. Weights, optimizer state, metrics and samples must be the same, bit for bit.
"""

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_result
from logra.parallel.processes import Processes
from logra.trainer_state import load_state

FOLDER = Path("runs/kill_resume")
TIMES = ("seconds", "memory", "tokens_per_second")
ARGUMENTS = [
    "--config", "recipes/tiny.yaml", "--rollout.prompts", "16", "--evaluation.problems", "50",
    "--evaluation.every", "7",
    "--run.save_every", "3", "--method.logra.storage", "split", "--model.weights", "bfloat16",
]  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "logra", "train", *arguments]


def last_update(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return -1
    found = -1
    for line in lines:
        try:
            found = json.loads(line)["update"]
        except ValueError:
            break
    return found


def killed(folder: Path, arguments: list[str], wait: float) -> dict[str, Any]:
    """Start a process, kill it `wait` seconds after its first new line of metrics."""
    before = last_update(folder)
    running = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while last_update(folder) == before and running.poll() is None:
        time.sleep(0.02)
    time.sleep(wait)
    running.kill()
    code = running.wait()
    partial = sorted(path.name for path in folder.glob("*.tmp")) + sorted(path.name for path in folder.glob("*.old"))
    return {"seconds": wait, "exit_code": code, "updates_logged": last_update(folder), "half_written": partial}


def contents(folder: Path) -> dict[str, str]:
    """Digests of everything that must be equal."""
    found = {"weights": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()}
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = load_state(last / "trainer_state", Processes())
    digest = hashlib.sha256()
    enter(state, digest)
    found["state"] = digest.hexdigest()
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
        found[name] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    return found


def enter(value: Any, digest: Any) -> None:
    """Every number and tensor of a state, in order."""
    if isinstance(value, torch.Tensor):
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, each in value.items():
            digest.update(repr(key).encode())
            enter(each, digest)
    elif isinstance(value, (list, tuple)):
        for each in value:
            enter(each, digest)
    else:
        digest.update(repr(value).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    chance = random.Random(arguments.seed)
    wanted = ["--run.updates", str(arguments.updates)]
    whole, parted = FOLDER / "whole", FOLDER / "parted"
    start = time.perf_counter()
    subprocess.run(command(*ARGUMENTS, *wanted, "--run.folder", str(whole)), check=True, stdout=subprocess.DEVNULL)
    alone = time.perf_counter() - start
    kills = []
    for kill in range(arguments.kills):
        given = ["--resume", str(parted)] if kill else [*ARGUMENTS, *wanted, "--run.folder", str(parted)]
        kills.append(killed(parted, command(*given), chance.uniform(0.0, 2.5)))
        print(kills[-1], flush=True)
    subprocess.run(command("--resume", str(parted)), check=True, stdout=subprocess.DEVNULL)
    one, other = contents(whole), contents(parted)
    equal = {name: one[name] == other[name] for name in one}
    result = {"kills": sum(each["exit_code"] == -9 for each in kills), "equal": all(equal.values())}
    print(result, equal)
    settings = vars(arguments) | {"seconds_alone": alone, "equal_by_part": equal, "digests": one}
    print(write_result("kill_resume", kills, {}, settings, result))


if __name__ == "__main__":
    main()
