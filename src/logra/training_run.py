# SPDX-License-Identifier: Apache-2.0
"""A whole run: updates, evaluations before, between and after, checkpoints, alarms, and when to end early."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from logra.alarms import ALARMS, Alarms
from logra.collect import Batch
from logra.evaluator import Evaluation
from logra.phases import Phases
from logra.progress import Progress
from logra.trainer import Trainer


class Record(Protocol):
    """Where a run is written down."""

    def log(self, line: dict[str, Any]) -> None:
        """Append a line of metrics."""
        ...

    def log_samples(self, lines: list[dict[str, Any]]) -> None:
        """Append samples."""
        ...


@dataclass
class Standing:
    """How the evaluations have gone so far.

    Attributes:
        before: scores before the first update.
        now: the latest scores.
        best: highest pass@1 after an update.
        without_better: evaluations since then.
    """

    before: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    best: float = float("-inf")
    without_better: int = 0


class TrainingRun:
    """Runs a trainer to its end.

    Args:
        trainer: fresh.
        record: gets metrics and samples.
        progress: shows them.
        save: writes the model under a name: "checkpoint-N" every `run.save_every` updates, and "best" after each
            evaluation that beats all earlier ones.
    """

    def __init__(
        self, trainer: Trainer, record: Record, progress: Progress, save: Callable[[str], object] = lambda name: None
    ) -> None:
        self.trainer, self.settings = trainer, trainer.settings
        self.record, self.progress, self.save = record, progress, save
        self.alarms = Alarms(self.settings.run)
        self.standing = Standing()
        self.reached = False  # evaluation.stop_at

    def __call__(self) -> str | None:
        """All updates, or fewer; why the run ended early, or None."""
        run, every = self.settings.run, self.settings.evaluation.every
        self.evaluate()
        reason = None
        while self.trainer.update < run.updates and reason is None:
            self.update()
            reason = self._alarm_that_ends()
            if run.save_every and self.trainer.update % run.save_every == 0:
                self.save(f"checkpoint-{self.trainer.update}")
            if every and self.trainer.update % every == 0 and self.trainer.update < run.updates and reason is None:
                self.evaluate()
                reason = self._score_that_ends()
        if self.trainer.update and self.standing.now.get("update") != self.trainer.update:
            self.evaluate()
        return reason

    def update(self) -> None:
        """One update, written down and shown."""
        update = self.trainer.train_update()
        line = update.line
        names = self.alarms(line)
        if names:
            line["alarms"] = names
        self.record.log(line)
        self.record.log_samples(training_samples(update.batch, line["update"], self.settings.run.samples_logged))
        self.progress.show(line)
        for name in names:
            if self.alarms.in_a_row[name] == 1:
                self.progress.say(f"update {line['update']}: alarm {name}: {ALARMS[name]}.")

    def evaluate(self) -> Evaluation:
        """Score the policy as it is; keep it if it is the best so far."""
        phases = Phases(self.trainer.policy.device)
        with phases.phase("evaluation"):
            found = self.trainer.evaluate()
        scores, update, standing = found.scores(), self.trainer.update, self.standing
        line = {"update": update, "evaluation": scores, "seconds": phases.seconds, "memory": phases.memory}
        self.record.log(line)
        self.record.log_samples(evaluation_samples(found, update, self.settings.run.samples_logged))
        self.progress.show(line)
        standing.now = {"update": update} | scores
        if not update:
            standing.before = standing.now
        elif scores["pass@1"] > standing.best:
            standing.best, standing.without_better = scores["pass@1"], 0
            if self.settings.run.save_every:
                self.save("best")
        else:
            standing.without_better += 1
        return found

    def _alarm_that_ends(self) -> str | None:
        name = self.alarms.lasting()
        if name is None:
            return None
        return f"alarm {name} in {self.settings.run.stop_after_alarms} updates in a row (run.stop_after_alarms)"

    def _score_that_ends(self) -> str | None:
        evaluation, score = self.settings.evaluation, self.standing.now["pass@1"]
        if evaluation.stop_at is not None and score >= evaluation.stop_at:
            self.reached = True
            return f"pass@1 {score:.3f} reached evaluation.stop_at {evaluation.stop_at}"
        if evaluation.patience and self.standing.without_better >= evaluation.patience:
            return f"no better pass@1 in {evaluation.patience} evaluations (evaluation.patience)"
        return None


def training_samples(batch: Batch, update: int, count: int) -> list[dict[str, Any]]:
    """The first samples of a batch, as samples.jsonl has them."""
    owners = [group for group in batch.groups for _ in group.samples]
    lines: list[dict[str, Any]] = []
    for group, sample, raw, shaped in zip(
        owners, batch.samples, batch.raw.tolist(), batch.shaped.tolist(), strict=True
    ):
        if len(lines) == count:
            break
        known = raw == raw
        lines.append(
            {
                "update": update,
                "phase": "training",
                "task": group.task.name,
                "problem": group.problem.key,
                "prompt": group.problem.prompt,
                "completion": sample.text,
                "answer": group.problem.answer,
                "score": raw if known else None,
                "shaped": shaped if known else None,
                "tokens": len(sample.completion_ids),
                "truncated": sample.truncated,
            }
        )
    return lines


def evaluation_samples(found: Evaluation, update: int, count: int) -> list[dict[str, Any]]:
    """Right and wrong samples of an evaluation, as samples.jsonl has them."""
    return [
        {
            "update": update,
            "phase": "evaluation",
            "task": each.task,
            "problem": each.problem.key,
            "prompt": each.problem.prompt,
            "completion": each.sample.text,
            "answer": each.problem.answer,
            "score": each.score,
            "shaped": None,
            "tokens": len(each.sample.completion_ids),
            "truncated": each.sample.truncated,
        }
        for each in found.right_and_wrong(count)
    ]
