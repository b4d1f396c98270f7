# SPDX-License-Identifier: Apache-2.0
"""Share of an update that goes into making random bits: signs of the projections, and rounding bits.

    python -m benchmarks.bits_time

On the model of `benchmarks.update_time`, LoGRA updates and the making of all their bits are timed in turn, for
each storage, with the compiled helper and (`plain`) without it.
"""

import argparse
import os
import sys
import time
from typing import Any

import torch

from benchmarks.record import summary, write_result
from benchmarks.update_time import ALLOCATOR, make_model, one_update
from logra import LograOptimizer, random_bits
from logra.random_bits import Purpose
from logra.sketch.projection import KINDS

BITS = {"fp32": (), "split": ((Purpose.ROUNDING, 8), (Purpose.DITHER, 8)), "bf16": ((Purpose.ROUNDING, 16),)}


def signs_seconds(optimizer: LograOptimizer) -> float:
    """All projections of an update, from nothing."""
    start = time.perf_counter()
    for group in optimizer.sketches.groups.values():
        KINDS["rademacher"](0, group.name, 7, group.rank, group.in_features).integers()
    return time.perf_counter() - start


def rounding_seconds(optimizer: LograOptimizer, storage: str) -> float:
    """All rounding and dither bits that a merge consumes."""
    start = time.perf_counter()
    for layer in optimizer.sketches:
        for purpose, bits in BITS[storage]:
            stream = optimizer.storages[layer.name].bits.stream(purpose, 7)
            stream.lanes(range(layer.out_features), range(layer.in_features), bits)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rank", 256), ("hidden", 4096), ("intermediate", 11008), ("layers", 2), ("vocabulary", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("sequences", 32), ("length", 128), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    if any(name not in os.environ for name in ALLOCATOR):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.bits_time", *sys.argv[1:]], os.environ | ALLOCATOR)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    tokens = torch.randint(arguments.vocabulary, (arguments.sequences, arguments.length))
    native = random_bits.native
    for storage in BITS:
        model = make_model(arguments)
        if storage != "fp32":
            model.to(torch.bfloat16)
        optimizer = LograOptimizer(model, rank=arguments.rank, storage=storage)
        one_update(model, optimizer, tokens, bf16=True)
        seconds: dict[str, list[float]] = {"update": [], "native": [], "plain": []}
        for _ in range(arguments.turns):
            seconds["update"].append(one_update(model, optimizer, tokens, bf16=True)["total"])
            for kind, helper in (("native", native), ("plain", None)):
                random_bits.native = helper
                seconds[kind].append(signs_seconds(optimizer) + rounding_seconds(optimizer, storage))
            random_bits.native = native
        row = {kind: summary(values) for kind, values in seconds.items()}
        rows.append({"method": f"logra_{storage}", "dtype": "bf16 autocast", "unit": "seconds", **row})
        for kind in ("native", "plain"):
            ratios[f"{kind}_bits_over_update_{storage}"] = row[kind]["median"] / row["update"]["median"]
        print(storage, {kind: round(row[kind]["median"], 4) for kind in row}, flush=True)
    if native is None:
        raise SystemExit("the compiled helper is not installed; nothing to compare")
    path = write_result("bits_time", rows, ratios, {**vars(arguments), "allocator": ALLOCATOR})
    print(f"{ratios}\nwritten to {path}")


if __name__ == "__main__":
    main()
