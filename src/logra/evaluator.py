# SPDX-License-Identifier: Apache-2.0
"""Scoring a policy on the held-out problems, always the same ones with the same random numbers."""

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from logra.evaluation import EvaluationResult, evaluate
from logra.model import Policy
from logra.parallel.processes import Processes
from logra.problems import Mixture, grade_groups
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, RolloutEngine, Sampling
from logra.run_settings import TrainSettings
from logra.tasks.task import Problem


@dataclass(frozen=True)
class ScoredSample:
    """One completion with its task, problem and raw score; None without a verdict."""

    task: str
    problem: Problem
    sample: Sample
    score: float | None


@dataclass(frozen=True)
class Evaluation:
    """Scores on the held-out problems.

    Attributes:
        result: over all of them.
        by_task: pass@1 of each task; empty if there is one task.
        greedy: pass@1 of greedy completions, if asked for.
        samples: everything that was scored, greedy completions aside.
    """

    result: EvaluationResult
    by_task: dict[str, float]
    greedy: float | None
    samples: list[ScoredSample]

    def scores(self) -> dict[str, Any]:
        """The numbers by name, as metrics.jsonl has them."""
        result = self.result
        scores: dict[str, Any] = {"pass@1": result.pass_at_1}
        scores |= {f"pass@{k}": value for k, value in result.pass_at_k.items()}
        scores |= {} if result.majority is None else {"majority": result.majority}
        scores |= {} if self.greedy is None else {"greedy": self.greedy}
        scores |= {"by_task": self.by_task} if self.by_task else {}
        return scores | {"problems": result.problems, "ungraded": result.ungraded}

    def right_and_wrong(self, count: int) -> list[ScoredSample]:
        """Up to `count` right samples and as many wrong ones."""
        right = [each for each in self.samples if each.score is not None and each.score >= 1]
        wrong = [each for each in self.samples if each.score is not None and each.score < 1]
        return right[:count] + wrong[:count]


class Evaluator:
    """Draws completions of the held-out problems and summarises their scores."""

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        engine: RolloutEngine,
        mixture: Mixture,
        processes: Processes | None = None,
    ) -> None:
        self.engine, self.held_out, self.processes = engine, mixture.held_out, processes or Processes()
        chosen, rollout = settings.evaluation, settings.rollout
        self.also_greedy = chosen.also_greedy
        self.prompts = [
            Prompt(group, policy.encode(problem, settings.task), group * chosen.samples, chosen.samples)
            for group, (_, problem) in enumerate(self.held_out)
        ]
        self.sampling = Sampling(
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            max_tokens=rollout.max_tokens,
            stop=tuple(rollout.stop),
            seed=settings.run.seed,
            purpose="evaluation",
        )

    def __call__(self) -> Evaluation:
        """The policy's scores as it is now."""
        self.processes.notes("evaluation")
        scored = self._scored(self.prompts, self.sampling)
        by_task: dict[str, list[ScoredSample]] = defaultdict(list)
        for each in scored:
            by_task[each.task].append(each)
        means = {name: _summary(part).pass_at_1 for name, part in by_task.items() if len(by_task) > 1}
        shares = {name: mean for name, mean in means.items() if mean is not None}
        greedy = None
        if self.also_greedy:
            once = [replace(prompt, first_sample_id=prompt.group_id, samples=1) for prompt in self.prompts]
            greedy = _summary(self._scored(once, replace(self.sampling, temperature=0.0))).pass_at_1
        return Evaluation(_summary(scored), shares, greedy, scored)

    def _scored(self, prompts: list[Prompt], sampling: Sampling) -> list[ScoredSample]:
        samples = self.engine.generate(prompts, sampling, 0)
        by_group = groupby(samples, key=lambda each: each.group_id)
        groups = [(*self.held_out[group_id], list(members)) for group_id, members in by_group]
        verdicts = self.processes.shared_out(groups, grade_groups)
        return [
            ScoredSample(task.name, problem, sample, verdict.score)
            for (task, problem, members), found in zip(groups, verdicts, strict=True)
            for sample, verdict in zip(members, found, strict=True)
        ]


def _summary(scored: list[ScoredSample]) -> EvaluationResult:
    return evaluate([each.sample for each in scored], [each.score for each in scored])
