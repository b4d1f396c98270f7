# SPDX-License-Identifier: Apache-2.0
"""A whole run: updates, evaluations before, between and after, checkpoints, alarms, and when to end early."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from logra.alarms import ALARMS, Alarms
from logra.collect import Batch
from logra.evaluator import Evaluation, ScoredSample
from logra.interruption import Interrupted, Interruption
from logra.phases import Phases
from logra.progress import Progress
from logra.tracking import Trackers
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
        now: the latest scores, with the update they are of.
        best: highest pass@1 after an update.
        without_better: evaluations since then.
    """

    before: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    best: float = -1.0
    without_better: int = 0


class TrainingRun:
    """Runs a trainer to its end.

    Args:
        trainer: fresh, or restored by `load`.
        record: gets metrics and samples.
        progress: shows them.
        save: writes the model under a name: "checkpoint-N" every `run.save_every` updates, and "best" after each
            evaluation that beats all earlier ones.
        trackers: services that get the metrics too.
    """

    def __init__(
        self,
        trainer: Trainer,
        record: Record,
        progress: Progress,
        save: Callable[[str], object] = lambda name: None,
        trackers: Trackers | None = None,
    ) -> None:
        self.trainer, self.settings = trainer, trainer.settings
        self.record, self.progress, self.save, self.trackers = record, progress, save, trackers
        self.alarms = Alarms(self.settings.run)
        self.standing = Standing()
        self.interruption = Interruption(trainer.processes)
        self.reached = False  # evaluation.stop_at
        self.saved_update = 0
        self.mismatch: float | None = None  # share of the tokens of a batch that was not used for it
        trainer.learn.before_step = self.interruption.defer

    def __call__(self) -> str | None:
        """All updates, or fewer; why the run ended early, or None.

        Raises:
            Interrupted: by a signal; everything is as it was after the latest whole update, saved as a checkpoint.
        """
        with self.interruption.watching():
            try:
                return self._run()
            except Interrupted as stop:
                number = stop.number  # the exception itself would keep the tensors of the update alive
            if self.trainer.update > self.saved_update:
                self.save(f"checkpoint-{self.trainer.update}")
            raise Interrupted(number)

    def _run(self) -> str | None:
        run, reason = self.settings.run, self._alarm_that_ends() or self._mismatch_that_ends()
        while True:
            if self._evaluation_is_due(reason is not None):
                self.evaluate()
            reason = reason or self._score_that_ends()
            update = self.trainer.update
            if run.save_every and update % run.save_every == 0 and update > self.saved_update:
                self.interruption.defer()
                self.save(f"checkpoint-{update}")
                self.saved_update = update
                self.interruption.allow()
            if update >= run.updates or reason is not None:
                return reason
            self.update()
            reason = self._alarm_that_ends() or self._mismatch_that_ends()

    def _evaluation_is_due(self, ending: bool) -> bool:
        update, every = self.trainer.update, self.settings.evaluation.every
        if self.standing.now.get("update") == update:
            return False
        return not update or ending or update >= self.settings.run.updates or (every > 0 and update % every == 0)

    def update(self) -> None:
        """One update, written down and shown; a signal before its first weight change undoes it."""
        before = copy.deepcopy(self.state())
        try:
            update = self.trainer.train_update()  # with several processes, a signal waits until it is over
            self.interruption.defer()
        except Interrupted:
            self.load(before)
            self.trainer.rule.optimizer.zero_grad()
            raise
        line = update.line
        names = self.alarms(line)
        if names:
            line["alarms"] = names
        self._write_down(line, training_samples(update.batch, line["update"], self.settings.run.samples_logged))
        for name in names:
            if self.alarms.in_a_row[name] == 1:
                self.progress.say(f"update {line['update']}: alarm {name}: {ALARMS[name]}.")
        for notice in self.trainer.pool.notices() if self.trainer.pool is not None else []:
            self.progress.say(f"update {line['update']}: {notice}")
        self.mismatch = line["logprob_gap_outside"] if line.get("mismatched") else None
        self.interruption.allow()

    def evaluate(self) -> Evaluation:
        """Score the policy as it is; keep it if it is the best so far."""
        phases = Phases(self.trainer.policy.device)
        with phases.phase("evaluation"):
            found = self.trainer.evaluate()
        phases = phases.merged(self.trainer.processes.gathered(phases))
        self.interruption.defer()
        scores, update, standing = found.scores(), self.trainer.update, self.standing
        line = {"update": update, "evaluation": scores, "seconds": phases.seconds, "memory": phases.memory}
        self._write_down(line, evaluation_samples(found, update, self.settings.run.samples_logged))
        standing.now = {"update": update} | scores
        if not update:
            standing.before = standing.now
            if scores["pass@1"] is None:
                raise ValueError("no sample of the first evaluation was graded; the reward gave None for all of them")
        elif scores["pass@1"] is None:
            self.progress.say(f"update {update}: no sample of the evaluation was graded; every reward gave None")
        elif scores["pass@1"] > standing.best:
            standing.best, standing.without_better = scores["pass@1"], 0
            if self.settings.run.save_every:
                self.save("best")
        else:
            standing.without_better += 1
        self.interruption.allow()
        return found

    def _write_down(self, line: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        self.record.log(line)
        self.record.log_samples(samples)
        self.progress.show(line)
        for trouble in self.trackers.log(line) if self.trackers is not None else []:
            self.progress.say(trouble)

    def state(self) -> dict[str, Any]:
        """Plain numbers from which `load` goes on, weights and optimizer aside."""
        return {"trainer": self.trainer.state(), "alarms": self.alarms.state(), "standing": asdict(self.standing)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.trainer.load(state["trainer"])
        self.alarms.load(state["alarms"])
        self.standing = Standing(**state["standing"])

    def _alarm_that_ends(self) -> str | None:
        name = self.alarms.lasting()
        if name is None:
            return None
        return f"alarm {name} in {self.settings.run.stop_after_alarms} updates in a row (run.stop_after_alarms)"

    def _mismatch_that_ends(self) -> str | None:
        if self.mismatch is None:
            return None
        learning, lag = self.settings.learning, self.settings.engines.max_lag
        remedy = f"lower engines.max_lag ({lag})" if lag else "use model.compute fp32, or one kernel on both sides"
        return (
            f"in {self.mismatch:.0%} of the tokens, rollout and trainer log-probability differ by more than "
            f"{learning.mismatch_band} nats (learning.mismatch_band; allowed: learning.mismatch_share "
            f"{learning.mismatch_share}), so the batch was not used: the engine draws from another policy than is "
            f"trained. If the engine computes as it should, {remedy}, or lower the step size"
        )

    def _score_that_ends(self) -> str | None:
        evaluation, standing = self.settings.evaluation, self.standing
        if not self.trainer.update or standing.now["update"] != self.trainer.update:
            return None
        score = standing.now["pass@1"]
        if score is None:
            return None
        if evaluation.stop_at is not None and score >= evaluation.stop_at:
            self.reached = True
            return f"pass@1 {score:.3f} reached evaluation.stop_at {evaluation.stop_at}"
        if evaluation.patience and standing.without_better >= evaluation.patience:
            return f"no better pass@1 in {evaluation.patience} evaluations (evaluation.patience)"
        return None


def training_samples(batch: Batch, update: int, count: int) -> list[dict[str, Any]]:
    """The first samples of a batch, as samples.jsonl has them."""
    shaped = iter(batch.shaped.tolist())
    graded = [
        (ScoredSample(group.task.name, group.problem, sample, verdict.score), next(shaped))
        for group in batch.groups
        for sample, verdict in zip(group.samples, group.verdicts, strict=True)
    ]
    return [
        sample_line(update, "training", scored, None if scored.score is None else value)
        for scored, value in graded[:count]
    ]


def evaluation_samples(found: Evaluation, update: int, count: int) -> list[dict[str, Any]]:
    """Right and wrong samples of an evaluation, as samples.jsonl has them."""
    return [sample_line(update, "evaluation", scored, None) for scored in found.right_and_wrong(count)]


def sample_line(update: int, phase: str, scored: ScoredSample, shaped: float | None) -> dict[str, Any]:
    """One line of samples.jsonl."""
    return {
        "update": update,
        "phase": phase,
        "task": scored.task,
        "problem": scored.problem.key,
        "prompt": scored.problem.prompt,
        "completion": scored.sample.text,
        "answer": scored.problem.answer,
        "score": scored.score,
        "shaped": shaped,
        "tokens": len(scored.sample.completion_ids),
        "truncated": scored.sample.truncated,
    }
