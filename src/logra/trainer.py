# SPDX-License-Identifier: Apache-2.0
"""The main job, as a table of contents: prompts, rollout, rewards, advantages, backward, step, metrics."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logra.evaluator import Evaluator
from logra.model import Policy
from logra.problems import Mixture, score_by_task
from logra.rl import advantages as advantage_kinds
from logra.rl import losses
from logra.rl.advantages import RunningBaseline, groups_with_signal
from logra.rl.batch import Sample, collate, micro_batches
from logra.rl.logprobs import token_logprobs
from logra.rollout.engine import Prompt, RolloutEngine, Sampling
from logra.run_settings import TrainSettings
from logra.tasks.task import Problem, Task
from logra.update_rules import UpdateRule, step_size_factor


@dataclass(frozen=True)
class Scored:
    """The samples of an update with their problems and scores.

    Attributes:
        samples: ordered by sample id.
        problems: of each sample.
        raw: fp64 [samples], what the task gave; nan where there was no verdict.
        shaped: fp64 [samples], what advantages are made of.
    """

    samples: list[Sample]
    problems: list[Problem]
    raw: Tensor
    shaped: Tensor


@dataclass
class Tally:
    """Sums over the tokens of an update."""

    tokens: int = 0
    entropy: float = 0.0
    gap: float = 0.0
    absolute_gap: float = 0.0


class Trainer:
    """One policy, one engine, one update rule, and the tasks they learn.

    Args:
        settings: of the run.
        policy: the model and its tokenizer.
        engine: draws completions with the policy's weights.
        rule: changes the weights.
    """

    def __init__(self, settings: TrainSettings, policy: Policy, engine: RolloutEngine, rule: UpdateRule) -> None:
        self.settings, self.policy, self.engine, self.rule = settings, policy, engine, rule
        self.mixture = Mixture(settings)
        self.evaluate = Evaluator(settings, policy, engine, self.mixture)
        self.baseline = RunningBaseline()
        self.update = 0
        self.base_rates = [group["lr"] for group in rule.optimizer.param_groups]
        self.seconds: dict[str, float] = {}

    def train_update(self) -> dict[str, Any]:
        """One batch of completions and what is learned from it; returns its metrics."""
        self.update += 1
        self.seconds = {}
        with self._phase("rollout"):
            scored_prompts = self._prompts()
            samples = self.engine.generate([prompt for prompt, _, _ in scored_prompts], self._sampling(), self.update)
        with self._phase("reward"):
            scored = self._score(samples, scored_prompts)
        with self._phase("learning"):
            advantages, rows = self._advantages(scored)
            learned = self._learn(scored, advantages, rows)
        return self._metrics(scored, rows) | learned

    # Prompts and scores

    def _prompts(self) -> list[tuple[Prompt, Problem, Task]]:
        rollout = self.settings.rollout
        chosen = []
        for group in range(rollout.prompts):
            task, problem = self.mixture.training_problem((self.update - 1) * rollout.prompts + group)
            ids = self.policy.encode(problem, self.settings.task)
            chosen.append((Prompt(group, ids, group * rollout.samples, rollout.samples), problem, task))
        return chosen

    def _sampling(self) -> Sampling:
        rollout = self.settings.rollout
        return Sampling(
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            stop=tuple(rollout.stop),
            seed=self.settings.run.seed,
        )

    def _score(self, samples: list[Sample], prompts: list[tuple[Prompt, Problem, Task]]) -> Scored:
        by_group = {prompt.group_id: (problem, task) for prompt, problem, task in prompts}
        problems = [by_group[sample.group_id][0] for sample in samples]
        raw = score_by_task([by_group[sample.group_id][1] for sample in samples], problems, samples)
        scores = torch.tensor(raw, dtype=torch.float64)
        negative = self.settings.learning.negative_outcome
        shaped = scores if negative is None else torch.where(scores >= 1, 1.0, negative).to(torch.float64)
        return Scored(samples, problems, scores, torch.where(scores.isnan(), torch.nan, shaped))

    # Learning

    def _advantages(self, scored: Scored) -> tuple[Tensor, list[int]]:
        """fp64 [samples], 0 where there is no verdict, and the rows that are trained on."""
        learning = self.settings.learning
        groups = torch.tensor([sample.group_id for sample in scored.samples])
        known = ~scored.raw.isnan()
        kind = self.baseline if learning.advantage == "running_baseline" else advantage_kinds.KINDS[learning.advantage]
        advantages = torch.zeros(len(groups), dtype=torch.float64)
        use = known.clone()
        if known.any():
            advantages[known] = kind(scored.shaped[known], groups[known])
            if learning.skip_equal_groups:
                use[known] &= groups_with_signal(scored.raw[known], groups[known])
        if not learning.train_truncated:
            use &= ~torch.tensor([sample.truncated for sample in scored.samples])
        return advantages, use.nonzero()[:, 0].tolist()

    def _learn(self, scored: Scored, advantages: Tensor, rows: list[int]) -> dict[str, Any]:
        learning = self.settings.learning
        samples = scored.samples
        several = learning.updates_per_batch * learning.minibatches > 1
        old = self._old_logprobs(samples, rows) if several else {}
        tally, reports = Tally(), []
        for _ in range(learning.updates_per_batch):
            for part in self._minibatches(samples, rows):
                self._set_step_size()
                self._backward(samples, part, advantages, old, tally)
                if part:
                    reports.append(self.rule.step())
        tokens = max(1, tally.tokens)
        metrics: dict[str, Any] = {
            "entropy": tally.entropy / tokens,
            "logprob_gap": tally.gap / tokens,
            "logprob_gap_absolute": tally.absolute_gap / tokens,
            "steps": sum(report.applied for report in reports),
            "steps_skipped": sum(not report.applied for report in reports),
        }
        if reports:
            last = reports[-1]
            metrics |= {"grad_norm": last.grad_norm, "realised_stored": last.realised_stored}
            metrics |= {"realised_compute": last.realised_compute}
        return metrics

    def _minibatches(self, samples: Sequence[Sample], rows: list[int]) -> Iterator[list[int]]:
        """Rows of each minibatch; groups stay whole."""
        count = self.settings.learning.minibatches
        for part in range(count):
            yield [row for row in rows if samples[row].group_id % count == part]

    def _backward(
        self, samples: list[Sample], rows: list[int], advantages: Tensor, old: dict[int, Tensor], tally: Tally
    ) -> None:
        """Add the gradient of one step's loss, micro-batch by micro-batch."""
        learning = self.settings.learning
        numbers = losses.LossSettings(learning.max_importance, learning.clip_low, learning.clip_high)
        # The divisor counts every completion of the update, those that were skipped included.
        lengths = torch.tensor([len(sample.completion_ids) for sample in samples])
        weights = losses.token_weights(lengths, learning.normalisation, self.settings.rollout.max_tokens)
        weights *= learning.minibatches
        self.policy.model.train()
        for part in micro_batches(samples, rows, learning.micro_batch_tokens):
            batch = collate(samples, part, self.policy.pad_id, "cpu")
            with self._compute():
                scores = token_logprobs(self.policy.causal, batch, self.settings.rollout.temperature)
            mine = scores.logprobs.detach()
            rollout = torch.cat([torch.tensor(samples[row].rollout_logprobs) for row in part])
            tokens = losses.Tokens(
                scores.logprobs,
                torch.cat([old[row] for row in part]) if old else mine,
                rollout,
                advantages[part].to(torch.float32)[batch.sample_index],
                batch.sample_index,
            )
            per_token = losses.KINDS[learning.loss](tokens, numbers)
            (per_token * weights[part][batch.sample_index]).sum().backward()
            tally.tokens += len(mine)
            tally.entropy += float(scores.entropy.sum())
            tally.gap += float((rollout - mine).sum())
            tally.absolute_gap += float((rollout - mine).abs().sum())

    @torch.no_grad()
    def _old_logprobs(self, samples: list[Sample], rows: list[int]) -> dict[int, Tensor]:
        """The trainer's own log-probabilities before the first update on a batch, by row."""
        found: dict[int, Tensor] = {}
        for part in micro_batches(samples, rows, self.settings.learning.micro_batch_tokens):
            batch = collate(samples, part, self.policy.pad_id, "cpu")
            with self._compute():
                logprobs = token_logprobs(self.policy.causal, batch, self.settings.rollout.temperature).logprobs
            found |= {row: logprobs[batch.sample_index == index] for index, row in enumerate(part)}
        return found

    def _compute(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.model.compute == "bf16")

    def _set_step_size(self) -> None:
        factor = step_size_factor(self.settings.method, self.update, self.settings.run.updates)
        for group, rate in zip(self.rule.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    # Metrics

    def _metrics(self, scored: Scored, rows: list[int]) -> dict[str, Any]:
        lengths = [len(sample.completion_ids) for sample in scored.samples]
        known = scored.raw[~scored.raw.isnan()]
        tokens = sum(lengths)
        return {
            "update": self.update,
            "reward": float(known.mean()) if len(known) else None,
            "pass_rate": float((known >= 1).double().mean()) if len(known) else None,
            "ungraded": int(scored.raw.isnan().sum()),
            "samples": len(scored.samples),
            "samples_trained": len(rows),
            "completion_tokens": tokens,
            "length": tokens / len(lengths),
            "truncated": sum(sample.truncated for sample in scored.samples) / len(lengths),
            "seconds": dict(self.seconds),
            "rollout_tokens_per_second": tokens / max(1e-9, self.seconds["rollout"]),
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def run_training(
    trainer: Trainer, report: Callable[[dict[str, Any]], None], save: Callable[[str], object] = lambda name: None
) -> None:
    """All updates of a run, with evaluations before, between and after.

    Args:
        trainer: fresh.
        report: gets each line of metrics.
        save: writes the model under a name: "checkpoint-N" every `run.save_every` updates, and "best" after each
            evaluation that beats all earlier ones.
    """
    settings = trainer.settings
    every, save_every = settings.evaluation.every, settings.run.save_every
    best = float("-inf")

    def evaluated() -> None:
        nonlocal best
        start = time.perf_counter()
        result = trainer.evaluate()
        scores = {"pass@1": result.pass_at_1, **{f"pass@{k}": value for k, value in result.pass_at_k.items()}}
        scores |= {} if result.majority is None else {"majority": result.majority}
        seconds = {"evaluation": time.perf_counter() - start}
        report({"update": trainer.update, "evaluation": scores, "seconds": seconds})
        if trainer.update and result.pass_at_1 > best and save_every:
            save("best")
        best = max(best, result.pass_at_1)

    evaluated()
    while trainer.update < settings.run.updates:
        report(trainer.train_update())
        if save_every and trainer.update % save_every == 0:
            save(f"checkpoint-{trainer.update}")
        if every and trainer.update % every == 0 and trainer.update < settings.run.updates:
            evaluated()
    if settings.run.updates:
        evaluated()
