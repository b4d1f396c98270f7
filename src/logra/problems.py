# SPDX-License-Identifier: Apache-2.0
"""Which problem comes when: a mixture of tasks, and held-out problems that are never trained on.

Problem i of a run depends on the run's seed and i alone.
"""

import random
from collections.abc import Sequence
from math import nan

from logra.rl.batch import Sample
from logra.run_settings import TrainSettings
from logra.tasks.choose import make_task
from logra.tasks.task import Problem, Task

TRAINING_SEED, EVALUATION_SEED = 0, 1_000_003  # of generated problems
_ATTEMPTS = 1000


class Mixture:
    """The tasks of a run, drawn by their shares.

    Attributes:
        held_out: the problems of every evaluation, with their tasks.
    """

    def __init__(self, settings: TrainSettings) -> None:
        task = settings.task
        self.shares, self.seed = task.names, settings.run.seed
        self.tasks: dict[str, Task] = {name: make_task(name, task, TRAINING_SEED) for name in self.shares}
        # Rows of a data set are held out by their prompts; generated problems come from another seed as well.
        apart = {
            name: self.tasks[name] if name in task.sources else make_task(name, task, EVALUATION_SEED)
            for name in self.shares
        }
        self.held_out = [self._draw(apart, f"held out {i}") for i in range(settings.evaluation.problems)]
        self._held_out_prompts = {str(problem.prompt) for _, problem in self.held_out}

    def training_problem(self, index: int) -> tuple[Task, Problem]:
        """Problem `index` of the run; a draw that is held out is replaced by another.

        Raises:
            ValueError: hardly any problem is left to train on.
        """
        for attempt in range(_ATTEMPTS):
            task, problem = self._draw(self.tasks, f"{index} {attempt}")
            if str(problem.prompt) not in self._held_out_prompts:
                return task, problem
        raise ValueError(
            f"{len(self._held_out_prompts)} held-out problems leave almost none to train on; lower evaluation.problems "
            f"or widen the tasks' knobs"
        )

    def _draw(self, tasks: dict[str, Task], key: str) -> tuple[Task, Problem]:
        chance = random.Random(f"{self.seed} {key}")
        task = tasks[chance.choices(list(self.shares), weights=list(self.shares.values()))[0]]
        return task, task.problem(chance.randrange(len(task)))


def score_by_task(tasks: Sequence[Task], problems: Sequence[Problem], samples: Sequence[Sample]) -> list[float]:
    """Raw scores, nan for no verdict; each task sees all its samples of the batch at once, whole groups together."""
    scores = [nan] * len(samples)
    for task in {id(task): task for task in tasks}.values():
        rows = [row for row, each in enumerate(tasks) if each is task]
        given = task.score([problems[row] for row in rows], [samples[row].text for row in rows])
        for row, score in zip(rows, given, strict=True):
            scores[row] = nan if score is None else score
    return scores
