# SPDX-License-Identifier: Apache-2.0
"""Scoring a policy on the held-out problems, always the same ones with the same random numbers."""

import math

from logra.evaluation import EvaluationResult, evaluate
from logra.model import Policy
from logra.problems import Mixture, score_by_task
from logra.rollout.engine import Prompt, RolloutEngine, Sampling
from logra.run_settings import TrainSettings


class Evaluator:
    """Draws completions of the held-out problems and summarises their scores."""

    def __init__(self, settings: TrainSettings, policy: Policy, engine: RolloutEngine, mixture: Mixture) -> None:
        self.engine, self.held_out = engine, mixture.held_out
        chosen, rollout = settings.evaluation, settings.rollout
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

    def __call__(self) -> EvaluationResult:
        """The policy's scores as it is now."""
        samples = self.engine.generate(self.prompts, self.sampling, 0)
        tasks, problems = zip(*(self.held_out[sample.group_id] for sample in samples), strict=True)
        scores = score_by_task(tasks, problems, samples)
        return evaluate(samples, [None if math.isnan(score) else score for score in scores])
