# SPDX-License-Identifier: Apache-2.0
"""One step under a KL budget: propose, predict, size, verify, apply, measure."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from logra.kl.displacement import Displacement
from logra.kl.looked_at import LookedAt
from logra.kl.measure import KlMeter, Snapshot
from logra.kl.step_control import VERIFY_TRIES, StepControl
from logra.parallel.processes import Processes

LONGEST_JVP_MIB = 512.0  # of attention scores; for longer responses "auto" takes the secant


class TwoPhaseRule(Protocol):
    """An update rule whose step can be looked at before it is taken."""

    def propose(self) -> Displacement | None:
        """The step, or None if it must not be taken."""
        ...

    def apply(self, alpha: float = 1.0) -> Any:
        """Take it."""
        ...

    def skip(self) -> Any:
        """Give it up."""
        ...


@dataclass(frozen=True)
class Sizing:
    """What was found out about a step before it was taken.

    Attributes:
        alpha: what it is multiplied by; None if it must be skipped.
        predicted: second-order KL of the proposed step, nats.
        verified: KL at `alpha` through the hook, nats; None without `verify`.
    """

    alpha: float | None
    predicted: float
    verified: float | None


class ControlledStep:
    """Takes steps of a rule under a budget.

    Args:
        rule: proposes and applies.
        meter: measures on the policy.
        control: budgets.
        processes: each measures on its share of the responses; all of them decide alike, from sums over all.
    """

    def __init__(
        self, rule: TwoPhaseRule, meter: KlMeter, control: StepControl, processes: Processes | None = None
    ) -> None:
        self.rule, self.meter, self.control = rule, meter, control
        self.processes = processes or Processes()
        self._estimator = control.settings.estimator

    def __call__(
        self, update: int, looked_at: LookedAt, compute: str, before_apply: Callable[[], None]
    ) -> tuple[Any, dict[str, Any]]:
        """One step; what the rule reports, and metrics.

        Args:
            update: number of the update, from 1, for the schedule.
            looked_at: responses of the batch.
            compute: "bf16" if the run computes under autocast; then its floor is measured too.
            before_apply: called before weights or moments change.
        """
        before_apply()
        displacement = self.rule.propose()
        budget = {"kl_budget": self.control.budget(update), "kl_budget_effective": self.control.effective(update)}
        metrics: dict[str, Any] = {**budget, "mismatch": self.control.mismatch}
        if displacement is None:
            return self.rule.skip(), metrics
        start = time.perf_counter()
        before = self.meter.snapshot(looked_at.batch, displacement)
        probe = before.first(looked_at.probe)
        sizing = self._size(update, probe, displacement, looked_at)
        metrics |= {"predicted_kl": sizing.predicted, "alpha": sizing.alpha, "verified_kl": sizing.verified}
        seconds = time.perf_counter() - start
        if sizing.alpha is None:
            return self.rule.skip(), metrics | {"kl_seconds": seconds}
        report = self.rule.apply(sizing.alpha)
        start = time.perf_counter()
        now = self.meter.snapshot(looked_at.batch)
        realised = self.meter.between(before, now)
        metrics["predicted_kl_of_step"] = sizing.predicted * sizing.alpha**2
        on_probe = looked_at.of_probe(realised)
        metrics |= {"realised_kl": self._mean(on_probe), "realised_kl_p95": self._p95(on_probe)}
        metrics["realised_kl_others"] = self._mean(looked_at.of_others(realised))
        if compute == "bf16":
            floor = self.meter.floor_of_compute(now.first(looked_at.probe))
            metrics["kl_compute"] = self._mean(looked_at.of_probe(floor))
        return report, metrics | {"kl_seconds": seconds + time.perf_counter() - start}

    def _size(self, update: int, before: Snapshot, displacement: Displacement, looked_at: LookedAt) -> Sizing:
        predicted = self._mean(looked_at.of_probe(self._predict(before, displacement)))
        assert predicted is not None
        alpha = self.control.alpha(predicted, update)
        if alpha is None or not self.control.settings.verify or predicted == 0:
            return Sizing(alpha, predicted, None)
        limit = self.control.effective(update)
        for _ in range(VERIFY_TRIES):
            found = self.meter.exact(before, displacement.at(alpha, as_stored=True))
            measured = self._mean(looked_at.of_probe(found))
            assert measured is not None
            if not math.isfinite(measured):
                alpha *= 0.1
            elif measured <= limit:
                return Sizing(alpha, predicted, measured)
            else:
                alpha = self.control.shrunk(alpha, measured, update)
        return Sizing(None, predicted, measured)

    def _predict(self, before: Snapshot, displacement: Displacement) -> Tensor:
        if self._estimator != "auto":
            return self.meter.predicted(before, displacement, self._estimator)
        if not self._wants_jvp(before, displacement):
            return self.meter.predicted(before, displacement, "secant")
        try:
            found = self.meter.predicted(before, displacement, "jvp")
        except (NotImplementedError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            what = (str(error).splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"kl.estimator auto: forward-mode AD does not run on this model ({what}); using secant", stacklevel=2
            )
            self._estimator = "secant"
            return self.meter.predicted(before, displacement, "secant")
        self._estimator = "jvp"
        return found

    def _wants_jvp(self, before: Snapshot, displacement: Displacement) -> bool:
        """The derivative costs three forwards, the secant one; where the KL is verified as well, that is enough."""
        exact = not self.control.settings.verify and displacement.differentiable and self.processes.count == 1
        return exact and self.meter.jvp_mib(before.batch) <= LONGEST_JVP_MIB

    def _mean(self, values: Tensor) -> float | None:
        """Over the positions of all processes; None if there are none."""
        total, count = self.processes.summed(
            torch.stack([values.sum(), values.new_tensor(float(len(values)))])
        ).tolist()
        return total / count if count else None

    def _p95(self, values: Tensor) -> float:
        everywhere = torch.cat([each.cpu() for each in self.processes.gathered(values.cpu())])
        return float(everywhere.sort().values[int(0.95 * (len(everywhere) - 1))])
