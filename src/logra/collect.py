# SPDX-License-Identifier: Apache-2.0
"""One batch: prompts, completions, raw and shaped scores; groups without signal may be replaced."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logra.model import Policy
from logra.parallel.processes import Processes
from logra.phases import Phases
from logra.problems import Mixture, grade_groups
from logra.rl.batch import Sample
from logra.rl.shaping import format_bonus, outcomes, overlong_malus
from logra.rollout.engine import Prompt, RolloutEngine, Sampling
from logra.run_settings import TrainSettings
from logra.tasks.task import Problem, Task
from logra.tasks.verdict import Verdict


@dataclass(frozen=True)
class Group:
    """The completions of one prompt, with a verdict each."""

    task: Task
    problem: Problem
    samples: list[Sample]
    verdicts: list[Verdict]

    @property
    def raw(self) -> list[float]:
        """A score each, nan for none."""
        return [math.nan if verdict.score is None else verdict.score for verdict in self.verdicts]

    @property
    def has_signal(self) -> bool:
        """Whether graded samples of it differ in raw score."""
        return len({verdict.score for verdict in self.verdicts} - {None}) > 1


@dataclass(frozen=True)
class Batch:
    """What an update learns from.

    Attributes:
        groups: as many as `rollout.prompts`.
        samples: of all groups, in order.
        raw: fp64 [samples], what the task gave; nan where there was no verdict.
        shaped: fp64 [samples], what advantages are made of.
        group_index: int64 [samples], position of the sample's group.
        drawn: verdicts of all samples drawn, those of replaced groups included.
        replaced: groups that were replaced for want of signal.
    """

    groups: list[Group]
    samples: list[Sample]
    raw: Tensor
    shaped: Tensor
    group_index: Tensor
    drawn: list[Verdict]
    replaced: int


class Collector:
    """Draws batches.

    Args:
        settings: of the run.
        policy: encodes prompts.
        engine: draws completions with the policy's weights.
        mixture: gives the problems.
        processes: each grades its share of the groups.
    """

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        engine: RolloutEngine,
        mixture: Mixture,
        processes: Processes | None = None,
    ) -> None:
        self.settings, self.policy, self.engine, self.mixture = settings, policy, engine, mixture
        self.processes = processes or Processes()
        rollout = settings.rollout
        self.sampling = Sampling(
            temperature=rollout.temperature,
            max_tokens=rollout.max_tokens,
            stop=tuple(rollout.stop),
            seed=settings.run.seed,
        )

    def __call__(self, update: int, phases: Phases) -> Batch:
        """The batch of one update."""
        rollout = self.settings.rollout
        with_signal: list[Group] = []
        without: list[Group] = []
        for _ in range(1 + rollout.refill):
            wanted = rollout.prompts - len(with_signal)
            if not wanted:
                break
            for group in self._draw(update, wanted, len(with_signal) + len(without), phases):
                (with_signal if group.has_signal else without).append(group)
        missing = rollout.prompts - len(with_signal)
        chosen = with_signal + without[len(without) - missing :]
        return self._batch(sorted(chosen, key=lambda group: group.samples[0].group_id), with_signal + without)

    def state(self) -> dict[str, Any]:
        """Of the problems, plain numbers."""
        return self.mixture.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.mixture.load(state)

    def _draw(self, update: int, count: int, first: int, phases: Phases) -> list[Group]:
        """`count` new groups, numbered from `first`."""
        size = self.settings.rollout.samples
        self.processes.notes(f"rollout of update {update}")
        with phases.phase("rollout"):
            asked = [self.mixture.next_problem() for _ in range(count)]
            prompts = [
                Prompt(group, self.policy.encode(problem, self.settings.task), group * size, size)
                for group, (_, problem) in enumerate(asked, first)
            ]
            samples = self.engine.generate(prompts, self.sampling, update)
        self.processes.notes(f"reward of update {update}")
        with phases.phase("reward"):
            drawn = [
                (task, problem, samples[place : place + size])
                for place, (task, problem) in zip(range(0, count * size, size), asked, strict=True)
            ]
            verdicts = self.processes.shared_out(drawn, grade_groups)
            groups = [Group(*each, found) for each, found in zip(drawn, verdicts, strict=True)]
            for group in groups:
                scores = [verdict.score for verdict in group.verdicts if verdict.score is not None]
                self.mixture.record(group.task, [score >= 1 for score in scores])
        return groups

    def _batch(self, chosen: list[Group], drawn: Sequence[Group]) -> Batch:
        samples = [sample for group in chosen for sample in group.samples]
        raw = torch.tensor([score for group in chosen for score in group.raw], dtype=torch.float64)
        index = torch.tensor([place for place, group in enumerate(chosen) for _ in group.samples])
        everything = [verdict for group in drawn for verdict in group.verdicts]
        return Batch(chosen, samples, raw, self._shape(raw, samples), index, everything, len(drawn) - len(chosen))

    def _shape(self, raw: Tensor, samples: list[Sample]) -> Tensor:
        learning = self.settings.learning
        shaped = raw if learning.negative_outcome is None else outcomes(raw, learning.negative_outcome)
        if learning.format_pattern is not None:
            shaped = shaped + format_bonus(samples, learning.format_pattern, learning.format_reward)
        if learning.overlong_tokens:
            limits = (self.settings.rollout.max_tokens, learning.overlong_tokens, learning.overlong_penalty)
            shaped = shaped + overlong_malus(samples, *limits)
        return shaped
