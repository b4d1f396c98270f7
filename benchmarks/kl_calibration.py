# SPDX-License-Identifier: Apache-2.0
"""KL budgets on SmolLM2-135M: predicted, verified and realised KL of every update, and what the measurements cost.

    python scripts/fetch_smollm2.py
    python -m benchmarks.kl_calibration [--updates 30]

The run of recipes/smollm2-arithmetic.yaml under a budget, every group trained on. The time of prediction, verification
and measurement is taken inside each update.
"""

import argparse
import json
import math
from dataclasses import replace
from typing import Any

from benchmarks.record import summary, write_result
from logra.cli import make_parser
from logra.config import KlSettings
from logra.run_settings import TrainSettings
from logra.train_command import assemble

KEYS = (
    "update", "kl_budget", "kl_budget_effective", "mismatch", "predicted_kl", "alpha", "predicted_kl_of_step",
    "verified_kl", "realised_kl", "realised_kl_others", "kl_compute", "kl_seconds", "pass_rate",
)  # fmt: skip


def settings_of(kl: KlSettings, seed: int = 0) -> TrainSettings:
    parser = make_parser()
    built = parser.instantiate(parser.parse_args(["train", "--config", "recipes/smollm2-arithmetic.yaml"])).train
    settings = TrainSettings(**{name: built[name] for name in TrainSettings.__dataclass_fields__})
    learning = replace(settings.learning, skip_equal_groups=False)
    method, run = replace(settings.method, kl=kl), replace(settings.run, seed=seed)
    return replace(settings, learning=learning, method=method, run=run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--budget", type=float, default=2e-2)
    parser.add_argument("--budget-final", type=float, default=5e-3)
    arguments = parser.parse_args()
    kl = KlSettings(budget=arguments.budget, budget_final=arguments.budget_final, schedule_updates=arguments.updates)
    trainer = assemble(settings_of(kl)).trainer
    before = trainer.evaluate().result.pass_at_1
    rows: list[dict[str, Any]] = []
    shares: list[float] = []
    for _ in range(arguments.updates):
        line = trainer.train_update().line
        rows.append({key: line.get(key) for key in KEYS})
        shares.append(line["kl_seconds"] / sum(line["seconds"].values()))
        print(json.dumps(rows[-1]), f"{shares[-1]:.3f}", flush=True)
    after = trainer.evaluate().result.pass_at_1
    taken = [row for row in rows if row["realised_kl"] is not None]
    errors = [abs(math.log(row["realised_kl"] / row["predicted_kl_of_step"])) for row in taken if row["realised_kl"]]
    ratios = {
        "worst_realised_over_budget": max(row["realised_kl"] / row["kl_budget_effective"] for row in taken),
        "worst_others_over_budget": max(row["realised_kl_others"] / row["kl_budget_effective"] for row in taken),
        "median_log_error": summary(errors)["median"],
        "worst_log_error": max(errors),
        "share_of_update": summary(shares)["median"],
    }
    more = {"greedy_before": before, "greedy_after": after, "share_of_update": summary(shares)}
    print(ratios, more, write_result("kl_calibration", rows, ratios, vars(arguments), more))


if __name__ == "__main__":
    main()
