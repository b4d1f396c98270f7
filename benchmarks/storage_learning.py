# SPDX-License-Identifier: Apache-2.0
"""Learning with weights stored in fp32, 24 bits and bf16: the same task and seeds, and the drift from rounding alone.

    python -m benchmarks.storage_learning

Learning: the tiny policy on two-digit sums, seeds 0 to 2, bf16 compute for all. Drift: the same 1,000 low-rank steps of
random directions and the paper's relative size (6e-5) are taken in each storage; then KL(fp32 || storage) of the next
character over 64 problems, in fp32, beside KL(start || fp32), which is what the steps themselves did. On a processor
without bf16 products these are computed in fp32 and rounded.
"""

import argparse
import copy
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from benchmarks.emulated_bf16 import EmulatedBf16
from benchmarks.record import cell, write_result
from logra import LograOptimizer
from logra.cli import make_parser
from logra.kl.measure import KlMeter
from logra.model import chosen_compute, load_policy
from logra.problems import Mixture
from logra.rl.batch import Sample, collate
from logra.rl.logprobs import CausalModel
from logra.run_settings import ModelSettings, TrainSettings
from logra.train_command import assemble

STORAGES = ("fp32", "split", "bf16")


def settings_of(storage: str, seed: int, updates: int) -> TrainSettings:
    parser = make_parser()
    built = parser.instantiate(parser.parse_args(["train", "--config", "recipes/tiny.yaml"])).train
    settings = TrainSettings(**{name: built[name] for name in TrainSettings.__dataclass_fields__})
    weights = "float32" if storage == "fp32" else "bfloat16"
    model = replace(settings.model, weights=weights, compute="bf16", device="cpu")
    method = replace(settings.method, logra=replace(settings.method.logra, storage=storage))
    run = replace(settings.run, seed=seed, updates=updates)
    return replace(settings, model=model, method=method, run=run)


def products() -> AbstractContextManager[Any]:
    return nullcontext() if chosen_compute(ModelSettings(device="cpu")) == "bf16" else EmulatedBf16()


def learn(storage: str, seed: int, updates: int) -> dict[str, Any]:
    with products():
        trainer = assemble(settings_of(storage, seed, updates)).trainer
        before = trainer.evaluate().result.pass_at_1
        shares = [trainer.train_update().line["realised_compute"] for _ in range(updates)]
        after = trainer.evaluate().result.pass_at_1
    known = [share for share in shares if share is not None]
    return {
        "storage": storage,
        "seed": seed,
        "before": before,
        "after": after,
        "share_arrived": sum(known) / len(known),
    }


def drifted(storage: str, steps: int) -> Any:
    """The tiny policy, from its weights rounded to bf16, after `steps` steps that do not depend on the storage."""
    policy = load_policy(ModelSettings(weights="bfloat16", compute="bf16", device="cpu"))
    optimizer = LograOptimizer(policy.model, rank=32, step_size="update_ratio", lr=6e-5, storage=storage)
    for update in range(steps):
        generator = torch.Generator().manual_seed(update)
        for layer in optimizer.sketches:
            layer.sketch = torch.randn(layer.out_features, layer.group.rank, generator=generator)
            layer.seen_backward = True
        optimizer.step()
    optimizer.detach()
    return policy.model.float()


def drift(steps: int) -> list[dict[str, Any]]:
    policy = load_policy(ModelSettings(device="cpu"))
    settings = settings_of("fp32", 0, 1)
    samples = []
    for row, (_, problem) in enumerate(Mixture(settings).held_out[:64]):
        prompt = policy.encode(problem, settings.task)
        answer = tuple(policy.tokenizer(problem.answer, add_special_tokens=False)["input_ids"])
        samples.append(Sample(row, row, prompt, answer, (), "", False))
    micro = collate(samples, range(len(samples)), policy.pad_id, "cpu")
    start, whole = drifted("fp32", 0), drifted("fp32", steps)
    rows = []
    for name, before, after in [("fp32", start, whole), *((s, whole, drifted(s, steps)) for s in STORAGES[1:])]:
        # The meter compares states of one model: the later weights take the place of the earlier ones.
        model = copy.deepcopy(before)
        meter = KlMeter(CausalModel(model), 1.0)
        held = meter.snapshot(micro)
        head = replace(held.head, weight=model.get_output_embeddings().weight.detach().clone())
        model.load_state_dict(after.state_dict())
        kl = float(meter.exact(replace(held, head=head)).mean())
        rows.append({"storage": name, "steps": steps, "kl": kl, "of": "the steps" if name == "fp32" else "rounding"})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are tiny
    command = ["benchmarks.storage_learning", "--updates", str(arguments.updates), "--steps", str(arguments.steps)]
    if arguments.only:
        what, seed = arguments.only
        found = {"drift": drift(arguments.steps)} if what == "drift" else learn(what, int(seed), arguments.updates)
        print(json.dumps(found))
        return
    drifts = cell("storage_learning", "drift", [*command, "--only", "drift", "0"])["drift"]
    rows = []
    for seed in range(3):
        for storage in STORAGES:
            name = f"{storage} {seed} {arguments.updates}"
            rows.append(cell("storage_learning", name, [*command, "--only", storage, str(seed)]))
            print(json.dumps(rows[-1]), flush=True)
    after = {storage: [row["after"] for row in rows if row["storage"] == storage] for storage in STORAGES}
    mean = {storage: sum(values) / len(values) for storage, values in after.items()}
    ratios = {f"{storage}_minus_fp32": mean[storage] - mean["fp32"] for storage in STORAGES[1:]}
    ratios["spread_of_seeds_fp32"] = max(after["fp32"]) - min(after["fp32"])
    settings = {"updates": arguments.updates, "steps": arguments.steps}
    print(ratios, write_result("storage_learning", rows, ratios, settings, {"drift": drifts}))


if __name__ == "__main__":
    main()
