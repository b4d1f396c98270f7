# SPDX-License-Identifier: Apache-2.0
"""How large a step may be: a budget of KL over updates, less what rollout and trainer already disagree.

    alpha = min(alpha_max, sqrt(effective budget / predicted)),   effective = max(budget - m, 0.5 budget)

with m the mismatch, an exponential mean of max(0, mean(rollout - trainer log-probability)). Source: section 2.5.
"""

import math
from dataclasses import dataclass
from typing import Any

from logra.config import KlSettings

MISMATCH_WEIGHT, BUDGET_FLOOR, VERIFY_TRIES, VERIFY_MARGIN = 0.3, 0.5, 6, 0.95


@dataclass
class StepControl:
    """Budgets of one run.

    Attributes:
        settings: of the section `kl`.
        mismatch: m, in nats.
    """

    settings: KlSettings
    mismatch: float = 0.0

    def budget(self, update: int) -> float:
        """Nats a step may cost at `update`, from 1."""
        settings = self.settings
        assert settings.budget is not None
        first, last = settings.budget, settings.budget if settings.budget_final is None else settings.budget_final
        span = max(1, settings.schedule_updates - 1)
        progress = min(1.0, (update - 1) / span)
        if settings.schedule == "constant":
            return first
        if settings.schedule == "linear":
            return first + (last - first) * progress
        return last + (first - last) * 0.5 * (1 + math.cos(math.pi * progress))

    def observe(self, gap: float | None) -> None:
        """Enter a batch's mean of rollout minus trainer log-probability over finished responses."""
        if gap is not None and math.isfinite(gap):
            self.mismatch += MISMATCH_WEIGHT * (max(0.0, gap) - self.mismatch)

    def effective(self, update: int) -> float:
        """The budget less the mismatch, at least half of it."""
        budget = self.budget(update)
        return max(budget - self.mismatch, BUDGET_FLOOR * budget)

    def alpha(self, predicted: float, update: int) -> float | None:
        """What the step is multiplied by; 1 where there is no direction, None where the prediction is not finite."""
        if not math.isfinite(predicted) or predicted < 0:
            return None
        if predicted == 0:
            return 1.0
        return min(self.settings.alpha_max, math.sqrt(self.effective(update) / predicted))

    def shrunk(self, alpha: float, measured: float, update: int) -> float:
        """A smaller alpha after `measured` nats at `alpha` were too many: KL grows as its square."""
        return alpha * min(0.9, VERIFY_MARGIN * math.sqrt(self.effective(update) / measured))

    def state(self) -> dict[str, Any]:
        """Plain numbers that `load` takes."""
        return {"mismatch": self.mismatch}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.mismatch = state["mismatch"]
