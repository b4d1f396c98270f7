# SPDX-License-Identifier: Apache-2.0
"""From a scored batch to a step: advantages, log-probabilities, loss, backward micro-batch by micro-batch."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from logra.collect import Batch
from logra.kl.controlled_step import ControlledStep
from logra.kl.looked_at import choose
from logra.kl.measure import KlMeter
from logra.kl.step_control import StepControl
from logra.model import Policy
from logra.parallel.processes import Processes
from logra.rl import advantages as advantage_kinds
from logra.rl import losses
from logra.rl.advantages import RunningBaseline, groups_with_signal
from logra.rl.batch import MicroBatch, Sample, collate, collate_shared, micro_batches, shared_batches
from logra.rl.logprobs import CausalModel, TokenLogprobs, token_logprobs
from logra.run_settings import TrainSettings
from logra.update_rules import StepReport, UpdateRule, step_size_factor

T = TypeVar("T")


@dataclass
class Tally:
    """Over the tokens that an update was trained on, in the first pass; of this process until `everywhere`."""

    tokens: int = 0
    entropy: float = 0.0
    reference_kl: float = 0.0
    gaps: list[Tensor] = field(default_factory=list)
    finished: list[Tensor] = field(default_factory=list)

    def everywhere(self, processes: Processes) -> "Tally":
        """Of all processes together."""
        total = Tally()
        for part in processes.gathered(self):
            total = total.joined(part)
        return total

    def joined(self, other: "Tally") -> "Tally":
        """Of both."""
        return Tally(
            self.tokens + other.tokens,
            self.entropy + other.entropy,
            self.reference_kl + other.reference_kl,
            self.gaps + other.gaps,
            self.finished + other.finished,
        )

    def finished_gap(self) -> float | None:
        """Mean of rollout minus trainer log-probability over tokens of responses that ended by themselves."""
        if not self.gaps:
            return None
        gaps, finished = torch.cat(self.gaps), torch.cat(self.finished)
        return float(gaps[finished].mean()) if finished.any() else None

    def outside(self, band: float) -> float | None:
        """Share of the tokens whose gap is larger than `band` nats; None where no token was trained on."""
        return float((torch.cat(self.gaps).abs() > band).double().mean()) if self.gaps else None

    def metrics(self, band: float) -> dict[str, Any]:
        """Means, in nats; None where no token was trained on."""
        gaps = torch.cat(self.gaps) if self.gaps else torch.zeros(0)
        known = len(gaps) > 0
        return {
            "tokens_trained": self.tokens,
            "entropy": self.entropy / self.tokens if self.tokens else None,
            "logprob_gap": float(gaps.mean()) if known else None,
            "logprob_gap_absolute": float(gaps.abs().mean()) if known else None,
            "logprob_gap_p95": float(gaps.abs().sort().values[int(0.95 * (len(gaps) - 1))]) if known else None,
            "logprob_gap_max": float(gaps.abs().max()) if known else None,
            "logprob_gap_outside": self.outside(band),
        }


class Learner:
    """Changes the policy by one batch after another.

    Args:
        settings: of the run.
        policy: the model being trained.
        rule: takes the steps.
        reference: the model at start, if `learning.reference_kl` is above 0.
        processes: that share each update's micro-batches.

    Attributes:
        before_step: called before weights change.
        after_step: called after each change.
    """

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        rule: UpdateRule,
        reference: CausalModel | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.settings, self.policy, self.rule, self.reference = settings, policy, rule, reference
        self.processes = processes or Processes()
        self.baseline = RunningBaseline()
        self.before_step: Callable[[], None] = lambda: None
        self.after_step: Callable[[], None] = lambda: None
        several = settings.rollout.samples > 1 and settings.learning.share_prompts
        self.shares_prompts = several and policy.causal.can_share()
        self.controlled: ControlledStep | None = None
        if settings.method.kl.budget is not None:
            # fp32, and in the forward-mode pass a tangent beside each value: a quarter of a micro-batch's tokens.
            tokens = settings.learning.micro_batch_tokens // 4
            meter = KlMeter(policy.causal, settings.rollout.temperature, max_tokens=tokens)
            self.controlled = ControlledStep(rule, meter, StepControl(settings.method.kl), self.processes)
        self.base_rates = [group["lr"] for group in rule.optimizer.param_groups]
        if settings.learning.reference_kl > 0 and reference is None:
            raise ValueError("learning.reference_kl is above 0, but no reference model was given")

    def __call__(self, batch: Batch, update: int) -> dict[str, Any]:
        """All steps of one batch; returns their metrics."""
        learning = self.settings.learning
        advantages, rows = self.advantages(batch)
        several = learning.updates_per_batch * learning.minibatches > 1
        old = self._old_logprobs(batch, rows) if several else {}
        tally, reports, measured = Tally(), list[StepReport](), dict[str, Any]()
        if several and self._mismatched(self._gaps(batch, old)):
            return self._unused(len(rows), Tally(gaps=[self._gaps(batch, old)]))
        for turn in range(learning.updates_per_batch):
            for part in self._minibatches(batch, rows):
                self._set_step_size(update)
                trained = self._backward(batch, part, advantages, old)
                tally = tally.joined(trained.everywhere(self.processes)) if turn == 0 else tally
                if not part:
                    continue
                if not several and self._mismatched(torch.cat(tally.gaps)):
                    return self._unused(len(rows), tally)
                reports.append(self._step(batch, part, update, tally, measured))
                if reports[-1].applied:
                    self.after_step()
        metrics = {"samples_trained": len(rows)} | tally.metrics(learning.mismatch_band) | measured
        if self.reference is not None:
            metrics["reference_kl"] = tally.reference_kl / max(1, tally.tokens)
        metrics["steps"] = sum(report.applied for report in reports)
        metrics["steps_skipped"] = len(reports) - metrics["steps"]
        if reports:
            last = reports[-1]
            metrics |= {"grad_norm": last.grad_norm, "realised_stored": last.realised_stored}
            metrics["realised_compute"] = last.realised_compute
        return metrics

    def _mismatched(self, gaps: Tensor) -> bool:
        """Whether the engine drew from another policy than is trained, so that nothing should be learned from it."""
        if self.settings.rollout.replay is not None or not len(gaps):
            return False
        outside = gaps.abs() > self.settings.learning.mismatch_band
        return float(outside.double().mean()) > self.settings.learning.mismatch_share

    def _gaps(self, batch: Batch, old: dict[int, Tensor]) -> Tensor:
        """Rollout minus trainer log-probability of all tokens that are trained on."""
        parts = [torch.tensor(batch.samples[row].rollout_logprobs) - value.cpu() for row, value in old.items()]
        return torch.cat(parts) if parts else torch.zeros(0)

    def _unused(self, trained: int, tally: Tally) -> dict[str, Any]:
        """The metrics of a batch that nothing is learned from."""
        report = self.rule.skip()
        metrics = {"samples_trained": trained} | tally.metrics(self.settings.learning.mismatch_band)
        metrics |= {"mismatched": True, "steps": 0, "steps_skipped": 1, "grad_norm": report.grad_norm}
        return metrics | {"realised_stored": None, "realised_compute": None}

    def _step(self, batch: Batch, rows: list[int], update: int, tally: Tally, measured: dict[str, Any]) -> StepReport:
        """One step of the rule, under the KL budget if there is one; `measured` gets the latest step's KL metrics."""
        if self.controlled is None:
            self.before_step()
            return self.rule.step()
        if not measured:
            self.controlled.control.observe(tally.finished_gap())
        count, order = self.controlled.control.settings.responses, list(rows)
        random.Random(f"{self.settings.run.seed} probe {update}").shuffle(order)
        place = (self.policy.pad_id, self.policy.device)
        looked_at = choose(batch.samples, order, count, place, self.processes)
        report, metrics = self.controlled(update, looked_at, self.settings.model.compute, self.before_step)
        assert isinstance(report, StepReport)
        measured |= metrics
        return report

    def advantages(self, batch: Batch) -> tuple[Tensor, list[int]]:
        """fp64 [samples], 0 where there is no verdict, and the rows that are trained on."""
        learning, groups = self.settings.learning, batch.group_index
        known = ~batch.raw.isnan()
        kind = self.baseline if learning.advantage == "running_baseline" else advantage_kinds.KINDS[learning.advantage]
        advantages = torch.zeros(len(groups), dtype=torch.float64)
        use = known.clone()
        if known.any():
            advantages[known] = kind(batch.shaped[known], groups[known])
            if learning.skip_equal_groups:
                use[known] &= groups_with_signal(batch.raw[known], groups[known])
        if not learning.train_truncated:
            use &= ~torch.tensor([sample.truncated for sample in batch.samples])
        return advantages, use.nonzero()[:, 0].tolist()

    def _minibatches(self, batch: Batch, rows: list[int]) -> Iterator[list[int]]:
        """Rows of each minibatch; groups stay whole."""
        count = self.settings.learning.minibatches
        for part in range(count):
            yield [row for row in rows if int(batch.group_index[row]) % count == part]

    def _backward(self, batch: Batch, rows: list[int], advantages: Tensor, old: dict[int, Tensor]) -> Tally:
        """Add the gradient of one step's loss, micro-batch by micro-batch; what this process was given of them."""
        learning, samples, tally = self.settings.learning, batch.samples, Tally()
        numbers = losses.LossSettings(learning.max_importance, learning.clip_low, learning.clip_high)
        # The divisor counts every completion of the update, those that were skipped included.
        lengths = torch.tensor([len(sample.completion_ids) for sample in samples])
        weights = losses.token_weights(lengths, learning.normalisation, self.settings.rollout.max_tokens)
        weights *= learning.minibatches
        self.policy.model.train()
        for micro, counts in self._micro_batches(samples, rows):
            part, index = list(micro.rows), micro.sample_index
            scores = self.logprobs(self.policy.causal, micro)
            if not counts:
                self._of_reference(micro)
                (scores.logprobs.sum() * 0.0).backward()
                continue
            mine = scores.logprobs.detach()
            rollout = torch.cat([torch.tensor(samples[row].rollout_logprobs) for row in part]).to(mine.device)
            tokens = losses.Tokens(
                scores.logprobs,
                torch.cat([old[row] for row in part]) if old else mine,
                rollout,
                advantages[part].to(mine.device, torch.float32)[index],
                index,
            )
            per_token = losses.KINDS[learning.loss](tokens, numbers)
            reference = self._of_reference(micro)
            if reference is not None:
                per_token = per_token + learning.reference_kl * losses.reference_kl_loss(tokens, reference)
                tally.reference_kl += float(losses.reference_kl_value(mine, reference).sum())
            (per_token * weights[part].to(mine.device)[index]).sum().backward()
            tally.tokens += len(mine)
            tally.entropy += float(scores.entropy.sum())
            tally.gaps.append((rollout - tokens.old_logprobs).cpu())  # the engine's doing, not that of earlier steps
            finished = torch.tensor([not samples[row].truncated for row in part])
            tally.finished.append(finished[index.cpu()])
        return tally

    @torch.no_grad()
    def _of_reference(self, micro: MicroBatch) -> Tensor | None:
        return None if self.reference is None else self.logprobs(self.reference, micro).logprobs

    @torch.no_grad()
    def _old_logprobs(self, batch: Batch, rows: list[int]) -> dict[int, Tensor]:
        """The trainer's own log-probabilities before the first update on a batch, by row."""
        found: dict[int, Tensor] = {}
        for micro, _ in self._micro_batches(batch.samples, rows):
            logprobs = self.logprobs(self.policy.causal, micro).logprobs
            found |= {row: logprobs[micro.sample_index == index].cpu() for index, row in enumerate(micro.rows)}
        everywhere = self.processes.gathered(found)
        return {row: value.to(self.policy.device) for part in everywhere for row, value in part.items()}

    def _micro_batches(self, samples: list[Sample], rows: list[int]) -> Iterator[tuple[MicroBatch, bool]]:
        """The rows in micro-batches of `learning.micro_batch_tokens`, prompts shared where that works, dealt out to
        processes; whether each counts: all processes go through as many, so that a last one may be a filler.
        """
        place, limit = (self.policy.pad_id, self.policy.device), self.settings.learning.micro_batch_tokens
        if self.shares_prompts:
            packs = list(shared_batches(samples, rows, limit))
            yield from ((collate_shared(samples, each, *place), counts) for each, counts in self._dealt(packs))
        else:
            parts = list(micro_batches(samples, rows, limit))
            yield from ((collate(samples, each, *place), counts) for each, counts in self._dealt(parts))

    def _dealt(self, parts: list[T]) -> Iterator[tuple[T, bool]]:
        """Longest first, so that what is computed at one time is of about one length."""
        mine = self.processes.share(parts)
        yield from ((part, True) for part in mine)
        if parts and len(mine) < -(-len(parts) // self.processes.count):
            yield parts[-1], False

    def logprobs(self, causal: CausalModel, micro: MicroBatch) -> TokenLogprobs:
        """As the run computes them: at its temperature, in its compute dtype."""
        autocast = self.settings.model.compute == "bf16"
        with torch.autocast(self.policy.device, dtype=torch.bfloat16, enabled=autocast):
            return token_logprobs(causal, micro, self.settings.rollout.temperature)

    def _set_step_size(self, update: int) -> None:
        factor = step_size_factor(self.settings.method, update, self.settings.run.updates)
        for group, rate in zip(self.rule.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor
