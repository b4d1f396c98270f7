# SPDX-License-Identifier: Apache-2.0
"""The line of an update, and what every number in metrics.jsonl means."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from logra.collect import Batch
from logra.phases import Phases
from logra.problems import Mixture
from logra.rl.batch import Sample
from logra.tasks.verdict import OUTCOMES

METRICS: dict[str, tuple[str, str]] = {
    "update": ("count", "updates done"),
    "reward": ("score", "mean raw score of all graded samples drawn"),
    "pass_rate": ("share", "of graded samples drawn with a raw score of 1 or more: pass@1 on training problems"),
    "shaped_reward": ("score", "mean of what advantages are made of"),
    "ungraded": ("samples", "drawn, without a verdict"),
    "outcomes": (
        "samples",
        "drawn, by what grading gave: right, wrong, unparseable (wrong, no answer could be read), "
        "timed_out, crashed, no_verdict",
    ),
    "samples": ("samples", "in the batch"),
    "samples_trained": ("samples", "of the batch that the loss has"),
    "groups_replaced": ("groups", "drawn, but replaced because their scores were all equal (rollout.refill)"),
    "completion_tokens": ("tokens", "in the batch"),
    "tokens_trained": ("tokens", "that the loss had, in one pass"),
    "length": ("tokens", "mean of a completion"),
    "truncated": ("share", "completions that the token limit cut"),
    "entropy": ("nats", "of the next-token distribution, mean over trained tokens"),
    "logprob_gap": ("nats", "rollout minus trainer log-probability, mean over trained tokens"),
    "logprob_gap_absolute": ("nats", "its mean size"),
    "logprob_gap_p95": ("nats", "the 95th percentile of its size"),
    "logprob_gap_max": ("nats", "the largest"),
    "logprob_gap_outside": ("share", "of trained tokens whose gap is larger than learning.mismatch_band"),
    "mismatched": ("flag", "there if that share was above learning.mismatch_share, and the batch was not learned from"),
    "reference_kl": ("nats", "KL divergence from the model at start, estimated (learning.reference_kl)"),
    "kl_budget": ("nats", "what a step may cost by the schedule (method.kl)"),
    "kl_budget_effective": ("nats", "less the mismatch, at least half"),
    "mismatch": ("nats", "exponential mean of the positive log-prob gap over finished responses"),
    "predicted_kl": ("nats", "second-order KL of the step as proposed, at alpha 1, mean over probed positions"),
    "predicted_kl_of_step": ("nats", "the same at the alpha that was taken"),
    "verified_kl": ("nats", "KL at that alpha, measured before the step was taken (method.kl.verify)"),
    "alpha": ("factor", "what the proposed step was multiplied by"),
    "realised_kl": ("nats", "KL of the step that was taken, on the probed positions"),
    "realised_kl_p95": ("nats", "its 95th percentile over positions"),
    "realised_kl_others": ("nats", "the same on other responses of the batch"),
    "kl_compute": ("nats", "floor of bf16 compute: KL between the policy in fp32 and as bf16 computes it"),
    "kl_seconds": ("s", "spent on prediction, verification and measurement"),
    "grad_norm": ("norm", "of all gradients or sketches before clipping, last step"),
    "steps": ("count", "weight changes"),
    "steps_skipped": ("count", "steps left out: not finite, or beyond the KL budget"),
    "realised_stored": ("share", "of the step that arrived in the stored weights (logra)"),
    "realised_compute": ("share", "of the step that arrived in the weights that bf16 computes with (logra)"),
    "lag": ("updates", "by which the weights that drew the batch were older than those it trains: mean, max"),
    "sync": (
        "bytes, s",
        "since the last line: message_bytes sent to each engine, beside weights_bytes (all that may change, in bf16) "
        "and patch_bytes (a lossless sparse patch, estimated from 1/64 of the rows); full_states given and their "
        "bytes; merge_seconds of the slowest engine",
    ),
    "engines": ("count, share", "live; utilisation, the share of the time that they drew; queue, parts that wait"),
    "levels": ("number", "level of each task with a curriculum, from 0"),
    "seconds": ("s", "by phase: rollout, reward, learning, evaluation; with engines sync, and waiting if asynchronous"),
    "memory": ("bytes", "by phase: peak_bytes and average_bytes; of the GPU, or resident memory on a CPU"),
    "tokens_per_second": ("1/s", "completion tokens in rollout, trained tokens in learning"),
    "alarms": ("names", "what looks wrong; see docs/training.md"),
    "evaluation": ("share", "pass@1, unbiased pass@k, majority, greedy, and pass@1 of each task (by_task)"),
}


def lags(samples: Sequence[Sample], update: int) -> dict[str, Any]:
    """By how many updates the weights that drew a batch were older than those it trains."""
    found = [update - 1 - each.policy_update for each in samples if each.policy_update is not None]
    return {"lag": {"mean": sum(found) / len(found), "max": max(found)}} if found else {}


def update_line(update: int, batch: Batch, learned: dict[str, Any], phases: Phases, mixture: Mixture) -> dict[str, Any]:
    """All metrics of one update."""
    lengths = [len(sample.completion_ids) for sample in batch.samples]
    known = [verdict.score for verdict in batch.drawn if verdict.score is not None]
    outcomes = Counter(verdict.outcome for verdict in batch.drawn)
    shaped = batch.shaped[~batch.shaped.isnan()]
    line: dict[str, Any] = {
        "update": update,
        "reward": sum(known) / len(known) if known else None,
        "pass_rate": sum(score >= 1 for score in known) / len(known) if known else None,
        "shaped_reward": float(shaped.mean()) if len(shaped) else None,
        "ungraded": len(batch.drawn) - len(known),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "samples": len(batch.samples),
        "groups_replaced": batch.replaced,
        "completion_tokens": sum(lengths),
        "length": sum(lengths) / len(lengths),
        "truncated": sum(sample.truncated for sample in batch.samples) / len(lengths),
    }
    if mixture.ladders:
        line["levels"] = {name: ladder.level for name, ladder in mixture.ladders.items()}
    seconds = phases.seconds
    drawn_tokens = sum(lengths) * len(batch.drawn) / len(batch.samples)
    rates = {"rollout": drawn_tokens / max(1e-9, seconds["rollout"])}
    rates["learning"] = learned["tokens_trained"] / max(1e-9, seconds["learning"])
    return line | learned | {"seconds": dict(seconds), "memory": phases.memory, "tokens_per_second": rates}
