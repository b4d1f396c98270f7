# SPDX-License-Identifier: Apache-2.0
"""What KL control costs: its share of an update's time, at 128 responses an update.

    python scripts/fetch_smollm2.py
    python -m benchmarks.kl_cost

SmolLM2-135M with the default settings of rollout (16 prompts, 8 responses each, at most 64 tokens) and of `method.kl`,
every group trained on; and with responses of at most 10 tokens, where the prompts of the probe are most of the work.
"""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.kl_calibration import settings_of
from benchmarks.record import summary, write_result
from logra.config import KlSettings
from logra.train_command import assemble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3, help="counted, after one that is not")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for max_tokens in (64, 10):
        settings = settings_of(KlSettings(budget=2e-4, budget_final=2e-5))
        settings = replace(settings, rollout=replace(settings.rollout, max_tokens=max_tokens))
        trainer = assemble(settings).trainer
        lines = [trainer.train_update().line for _ in range(arguments.updates + 1)][1:]
        whole = [sum(line["seconds"].values()) for line in lines]
        shares = [line["kl_seconds"] / seconds for line, seconds in zip(lines, whole, strict=True)]
        row = {"max_tokens": max_tokens, "tokens_trained": [line["tokens_trained"] for line in lines]}
        rows.append(row | {"update_seconds": summary(whole), "share": summary(shares)})
        print(rows[-1], flush=True)
    ratios = {f"share_at_{row['max_tokens']}_tokens": row["share"]["median"] for row in rows}
    print(ratios, write_result("kl_cost", rows, ratios, vars(arguments)))


if __name__ == "__main__":
    main()
