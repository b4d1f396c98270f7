# SPDX-License-Identifier: Apache-2.0
"""Steps a hundred times too large, with and without a KL budget, on the tiny policy.

    python -m benchmarks.kl_robustness

Two-digit sums, seeds 1 to 3: learning rate x 100 (step size "lr") and update ratio x 100 (step size "update_ratio"),
each with a budget and without. Under the budget a run must learn, and the KL of every update stay within 1.5 x budget;
what happens without is measured in the same way, with a budget too large to bind.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

from benchmarks.record import write_result
from logra.cli import make_parser
from logra.config import KlSettings, LograSettings
from logra.run_settings import TrainSettings
from logra.train_command import assemble

PROPOSALS = {
    "learning rate x 100": LograSettings(rank=32, step_size="lr", lr=1e-2, max_norm=1.0),
    "update ratio x 100": LograSettings(rank=32, step_size="update_ratio", lr=6e-2),
}
LOOSE = 1e9  # nats: measured, never binding


def run(proposal: LograSettings, budget: float, updates: int, seed: int) -> dict[str, Any]:
    parser = make_parser()
    built = parser.instantiate(parser.parse_args(["train", "--config", "recipes/tiny.yaml"])).train
    settings = TrainSettings(**{name: built[name] for name in TrainSettings.__dataclass_fields__})
    kl = KlSettings(budget=budget, alpha_max=3.0 if budget < LOOSE else 1.0, verify=budget < LOOSE)
    method = replace(settings.method, logra=proposal, kl=kl)
    settings = replace(settings, method=method, run=replace(settings.run, seed=seed))
    trainer = assemble(settings).trainer
    before = trainer.evaluate().result.pass_at_1
    lines = [trainer.train_update().line for _ in range(updates)]
    realised = [line["realised_kl"] for line in lines if line.get("realised_kl") is not None]
    limits = [line["kl_budget_effective"] for line in lines if line.get("realised_kl") is not None]
    return {
        "seed": seed,
        "before": before,
        "after": trainer.evaluate().result.pass_at_1,
        "worst_kl": max(realised),
        "worst_kl_over_budget": max(k / limit for k, limit in zip(realised, limits, strict=True)),
        "steps_skipped": sum(line["steps_skipped"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--budget", type=float, default=2e-3)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, proposal in PROPOSALS.items():
        for seed in (1, 2, 3):
            for controlled in (True, False):
                budget = arguments.budget if controlled else LOOSE
                found = run(proposal, budget, arguments.updates, seed)
                rows.append({"proposal": name, "controlled": controlled, **found})
                print(json.dumps(rows[-1]), flush=True)
    held = [row for row in rows if row["controlled"]]
    ratios = {
        "worst_controlled_kl_over_budget": max(row["worst_kl_over_budget"] for row in held),
        "least_controlled_gain": min(row["after"] - row["before"] for row in held),
        "largest_uncontrolled_gain": max(row["after"] - row["before"] for row in rows if not row["controlled"]),
    }
    print(ratios, write_result("kl_robustness", rows, ratios, vars(arguments)))


if __name__ == "__main__":
    main()
