# SPDX-License-Identifier: Apache-2.0
"""Whether drawing ahead learns like drawing with the present weights: the tiny task, lags 0, 1 and 2, three seeds.

    python -m benchmarks.ahead_learning

Recipe tiny for 40 updates, one Hugging Face engine in a process of its own; held-out pass@1 before and after. Written
to ahead_learning.json, run by run.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.record import cell, write_result

LAGS, SEEDS, UPDATES = (0, 1, 2), (0, 1, 2), 40


def run(lag: int, seed: int) -> dict[str, Any]:
    folder = Path("runs/ahead_learning") / f"run-{lag}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "logra", "train", "--config", "recipes/tiny.yaml", "--run.seed", str(seed)]
    command += ["--engines.kind", "transformers", "--engines.max_lag", str(lag), "--evaluation.every", "0"]
    command += ["--run.folder", str(folder), "--run.save_every", "0", "--run.updates", str(UPDATES)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [line["evaluation"]["pass@1"] for line in lines if "evaluation" in line]
    updates = [line for line in lines if "evaluation" not in line]
    return {
        "lag": lag,
        "seed": seed,
        "updates": len(updates),
        "before": scores[0],
        "after": scores[-1],
        "mean_lag": statistics.mean(line["lag"]["mean"] for line in updates),
        "largest_lag": max(line["lag"]["max"] for line in updates),
        "logprob_gap_absolute": statistics.mean(line["logprob_gap_absolute"] for line in updates),
        "outside_band": max(line["logprob_gap_outside"] for line in updates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, type=int, metavar=("LAG", "SEED"), help="One run alone.")
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(run(*asked.one)))
        return
    rows = []
    for seed in SEEDS:
        for lag in LAGS:
            found = cell("ahead_learning", f"{lag}-{seed}", ["benchmarks.ahead_learning", "--one", str(lag), str(seed)])
            rows.append(found)
            print(found, flush=True)
    gain = {lag: statistics.mean(row["after"] - row["before"] for row in rows if row["lag"] == lag) for lag in LAGS}
    sync = [row["after"] for row in rows if row["lag"] == 0]
    ratios = {f"gain_lag_{lag}_over_sync": gain[lag] / gain[0] for lag in LAGS[1:]}
    ratios["spread_of_seeds"] = (max(sync) - min(sync)) / gain[0]
    print(ratios, write_result("ahead_learning", rows, ratios, {"recipe": "tiny", "updates": UPDATES, "seeds": SEEDS}))


if __name__ == "__main__":
    main()
