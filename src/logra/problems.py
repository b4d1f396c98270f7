# SPDX-License-Identifier: Apache-2.0
"""Which problem comes when: a mixture of tasks, and held-out problems that are never trained on.

The k-th problem of a task depends on the run's seed, the task's level and k alone. Rows of a set come in an order of
their own, each once before any comes again; generated problems are drawn without end.
"""

import random
from collections.abc import Sequence
from typing import Any

from logra.curriculum import Ladder
from logra.rl.batch import Sample
from logra.run_settings import TaskSettings, TrainSettings
from logra.tasks.choose import make_task
from logra.tasks.task import Completion, Problem, Task
from logra.tasks.verdict import Verdict

TRAINING_SEED, EVALUATION_SEED = 0, 1_000_003  # of generated problems
_ATTEMPTS = 1000


class Mixture:
    """The tasks of a run, drawn by their shares.

    Attributes:
        held_out: the problems of every evaluation, with their tasks.
        ladders: the tasks that have levels.

    Raises:
        ValueError: a task is not known or cannot be read, or the held-out problems leave nothing to train on.
    """

    def __init__(self, settings: TrainSettings) -> None:
        task, self.seed = settings.task, settings.run.seed
        self.shares = task.names
        self.levels = {name: _levels(name, task, TRAINING_SEED) for name in self.shares}
        self.ladders = {
            name: Ladder(len(self.levels[name]), task.promote_at, task.promote_samples) for name in task.levels
        }
        self.held_out = self._held_out(settings)
        self._held_out_prompts = {str(problem.prompt) for _, problem in self.held_out}
        self._rows = {name: self._training_rows(name) for name in self.shares if self.levels[name][0].finite}
        self.drawn = dict.fromkeys(self.shares, 0)
        self._epochs: dict[str, tuple[int, list[int]]] = {}

    def next_problem(self) -> tuple[Task, Problem]:
        """The next problem of the run; a draw that is held out is replaced by another.

        Raises:
            ValueError: hardly any problem is left to train on.
        """
        chance = random.Random(f"{self.seed} {sum(self.drawn.values())}")
        name = chance.choices(list(self.shares), weights=list(self.shares.values()))[0]
        count = self.drawn[name]
        self.drawn[name] += 1
        level = self.ladders[name].level if name in self.ladders else 0
        task = self.levels[name][level]
        if name in self._rows:
            return task, task.problem(self._row(name, count))
        for attempt in range(_ATTEMPTS):
            problem = task.problem(random.Random(f"{self.seed} {name} {level} {count} {attempt}").randrange(len(task)))
            if str(problem.prompt) not in self._held_out_prompts:
                return task, problem
        raise ValueError(
            f"{len(self._held_out_prompts)} held-out problems leave almost none of task {name!r} to train on; lower "
            f"evaluation.problems or widen the task's knobs"
        )

    def _row(self, name: str, count: int) -> int:
        """The row of a set that is drawn after `count` others."""
        epoch, place = divmod(count, len(self._rows[name]))
        if self._epochs.get(name, (-1, []))[0] != epoch:
            self._epochs[name] = (epoch, _shuffled(self._rows[name], f"{self.seed} {name} {epoch}"))
        return self._epochs[name][1][place]

    def record(self, task: Task, right: Sequence[bool]) -> bool:
        """Enter graded samples of a task in its curriculum; whether that promoted it."""
        ladder = self.ladders.get(task.name)
        return ladder is not None and task is self.levels[task.name][ladder.level] and ladder.record(right)

    def state(self) -> dict[str, Any]:
        """Plain numbers from which `load` goes on."""
        return {"drawn": dict(self.drawn), "ladders": {name: ladder.state() for name, ladder in self.ladders.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.drawn = dict(state["drawn"])
        for name, ladder in self.ladders.items():
            ladder.load(state["ladders"][name])

    def _held_out(self, settings: TrainSettings) -> list[tuple[Task, Problem]]:
        """Problems by the shares of the evaluation's tasks; a set that is too short gives all its rows."""
        shares = settings.evaluation.names or self.shares
        chosen: list[tuple[Task, Problem]] = []
        for name, share in shares.items():
            count = max(1, round(settings.evaluation.problems * share / sum(shares.values())))
            trained = self.levels.get(name)
            # Rows of a set are held out by their prompts; generated problems come from another seed as well.
            levels = trained if trained and trained[0].finite else _levels(name, settings.task, EVALUATION_SEED)
            order = _shuffled(range(len(levels[0])), f"{self.seed} held out {name}") if levels[0].finite else []
            for index in range(count):
                task = levels[index % len(levels)]
                if not task.finite:
                    place = random.Random(f"{self.seed} held out {name} {index}").randrange(len(task))
                elif index < len(task):
                    place = order[index]
                else:
                    break
                chosen.append((task, task.problem(place)))
        return chosen

    def _training_rows(self, name: str) -> list[int]:
        task = self.levels[name][0]
        rows = [row for row in range(len(task)) if str(task.problem(row).prompt) not in self._held_out_prompts]
        if not rows:
            raise ValueError(
                f"task {name!r}: all {len(task)} rows are held out for evaluation; lower evaluation.problems, or name "
                f"other tasks in evaluation.names"
            )
        return rows


def _shuffled(rows: Sequence[int], key: str) -> list[int]:
    """The rows in an order that depends on `key`."""
    return random.Random(key).sample(list(rows), len(rows))


def _levels(name: str, settings: TaskSettings, seed: int) -> list[Task]:
    if name not in settings.levels:
        return [make_task(name, settings, seed)]
    return [make_task(name, settings, seed, knobs) for knobs in settings.levels[name]]


def grade_groups(groups: Sequence[tuple[Task, Problem, list[Sample]]]) -> list[list[Verdict]]:
    """A verdict for each sample of each group."""
    flat = [(task, problem, sample) for task, problem, samples in groups for sample in samples]
    tasks, problems, samples = zip(*flat, strict=True)
    verdicts = iter(grade_by_task(tasks, problems, samples))
    return [[next(verdicts) for _ in members] for _, _, members in groups]


def grade_by_task(tasks: Sequence[Task], problems: Sequence[Problem], samples: Sequence[Sample]) -> list[Verdict]:
    """One verdict a sample; each task sees all its samples of the batch at once, whole groups together."""
    verdicts: dict[int, Verdict] = {}
    for task in {id(task): task for task in tasks}.values():
        rows = [row for row, each in enumerate(tasks) if each is task]
        completions = [Completion(samples[row].text, samples[row].sample_id, samples[row].group_id) for row in rows]
        verdicts |= zip(rows, task.grade([problems[row] for row in rows], completions), strict=True)
    return [verdicts[row] for row in range(len(samples))]
