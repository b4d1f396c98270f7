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
from logra.kl.measure import KlMeter, Snapshot
from logra.kl.step_control import VERIFY_TRIES, StepControl
from logra.rl.batch import MicroBatch

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
    """

    def __init__(self, rule: TwoPhaseRule, meter: KlMeter, control: StepControl) -> None:
        self.rule, self.meter, self.control = rule, meter, control
        self._estimator = control.settings.estimator

    def __call__(
        self, update: int, looked_at: MicroBatch, compute: str, before_apply: Callable[[], None]
    ) -> tuple[Any, dict[str, Any]]:
        """One step; what the rule reports, and metrics.

        Args:
            update: number of the update, from 1, for the schedule.
            looked_at: responses of the batch; the first `kl.responses` of them, the probe, size the step, and its KL
                is measured on the others as well.
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
        before = self.meter.snapshot(looked_at, displacement)
        probe = before.first(self.control.settings.responses)
        sizing = self._size(update, probe, displacement)
        metrics |= {"predicted_kl": sizing.predicted, "alpha": sizing.alpha, "verified_kl": sizing.verified}
        seconds = time.perf_counter() - start
        if sizing.alpha is None:
            return self.rule.skip(), metrics | {"kl_seconds": seconds}
        report = self.rule.apply(sizing.alpha)
        start = time.perf_counter()
        now, positions = self.meter.snapshot(looked_at), len(probe.hidden)
        realised = self.meter.between(before, now)
        metrics["predicted_kl_of_step"] = sizing.predicted * sizing.alpha**2
        metrics |= {"realised_kl": float(realised[:positions].mean()), "realised_kl_p95": _p95(realised[:positions])}
        metrics["realised_kl_others"] = float(realised[positions:].mean()) if len(realised) > positions else None
        if compute == "bf16":
            metrics["kl_compute"] = float(self.meter.floor_of_compute(now.first(len(probe.batch.rows))).mean())
        return report, metrics | {"kl_seconds": seconds + time.perf_counter() - start}

    def _size(self, update: int, before: Snapshot, displacement: Displacement) -> Sizing:
        predicted = float(self._predict(before, displacement).mean())
        alpha = self.control.alpha(predicted, update)
        if alpha is None or not self.control.settings.verify or predicted == 0:
            return Sizing(alpha, predicted, None)
        limit = self.control.effective(update)
        for _ in range(VERIFY_TRIES):
            measured = float(self.meter.exact(before, displacement.at(alpha, as_stored=True)).mean())
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
        exact = not self.control.settings.verify and displacement.differentiable
        return exact and self.meter.jvp_mib(before.batch) <= LONGEST_JVP_MIB


def _p95(values: Tensor) -> float:
    return float(values.sort().values[int(0.95 * (len(values) - 1))])
