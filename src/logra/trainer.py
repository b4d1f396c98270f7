# SPDX-License-Identifier: Apache-2.0
"""The main job, as a table of contents: prompts, rollout, rewards, advantages, backward, step, metrics."""

from dataclasses import dataclass
from typing import Any

from logra.collect import Batch, Collector
from logra.collect_ahead import AheadCollector, AheadEngine
from logra.engines.pool import EnginePool
from logra.evaluator import Evaluator
from logra.learner import Learner
from logra.metrics import lags, update_line
from logra.model import Policy, on_this_machine
from logra.parallel.processes import Processes
from logra.phases import Phases
from logra.problems import Mixture
from logra.rl.logprobs import CausalModel
from logra.rollout.engine import RolloutEngine
from logra.rollout.recorded import recorded
from logra.run_settings import TrainSettings
from logra.update_rules import UpdateRule


@dataclass(frozen=True)
class Update:
    """What one update was: its line of metrics, and the batch that it learned from."""

    line: dict[str, Any]
    batch: Batch


class Trainer:
    """One policy, one engine, one update rule, and the tasks they learn.

    Args:
        settings: of the run.
        policy: the model and its tokenizer.
        engine: draws completions with the policy's weights; a pool of engines in other processes gets every update.
        rule: changes the weights.
        reference: the model at start, if `learning.reference_kl` is above 0.
        mixture: of the same settings, if it has been made already.
        processes: that share the work; all of them call everything here, in the same order.
    """

    def __init__(
        self,
        settings: TrainSettings,
        policy: Policy,
        engine: RolloutEngine,
        rule: UpdateRule,
        reference: CausalModel | None = None,
        mixture: Mixture | None = None,
        processes: Processes | None = None,
    ) -> None:
        settings = on_this_machine(settings)
        self.settings, self.policy, self.rule = settings, policy, rule
        self.processes = processes or Processes()
        self.mixture = mixture or Mixture(settings)
        self.evaluate = Evaluator(settings, policy, engine, self.mixture, self.processes)
        self.pool = engine if isinstance(engine, EnginePool) else None
        self.collect: Collector | AheadCollector
        if self.pool is not None and settings.engines.max_lag:
            ahead = recorded(AheadEngine(self.pool), settings, self.processes)
            alone = Collector(settings, policy, ahead, self.mixture)
            self.collect = AheadCollector(alone, self.pool, settings.run.updates, self.processes)
        else:
            drawing = recorded(engine, settings, self.processes)
            self.collect = Collector(settings, policy, drawing, self.mixture, self.processes)
        self.learn = Learner(settings, policy, rule, reference, self.processes)
        if self.pool is not None:
            self.learn.after_step = self.pool.stepped
        self.update = 0

    def start_engines(self) -> None:
        """Start engines in other processes, and bring them to the present weights."""
        if self.pool is not None:
            self.processes.notes("starting engines")
            self.pool.start(self.update, self.evaluate.prompts[0].ids)

    def train_update(self) -> Update:
        """Draw one batch and learn from it."""
        self.update += 1
        phases = Phases(self.policy.device)
        batch = self.collect(self.update, phases)
        self.processes.notes(f"learning of update {self.update}")
        with phases.phase("learning"):
            learned = self.learn(batch, self.update)
        if self.pool is not None:
            self.processes.notes(f"sync after update {self.update}")
            with phases.phase("sync"):
                self.pool.publish()
            learned |= self.pool.metrics() | lags(batch.samples, self.update)
        phases = phases.merged(self.processes.gathered(phases))
        return Update(update_line(self.update, batch, learned, phases, self.mixture), batch)

    def state(self) -> dict[str, Any]:
        """Plain numbers from which `load` goes on, weights and optimizer aside."""
        control = None if self.learn.controlled is None else self.learn.controlled.control.state()
        mixture = self.collect.state()
        numbers = {"update": self.update, "mixture": mixture, "baseline": self.learn.baseline.value}
        return numbers | {"control": control}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.update, self.learn.baseline.value = state["update"], state["baseline"]
        self.collect.load(state["mixture"])
        if self.learn.controlled is not None:
            self.learn.controlled.control.load(state["control"])
