# SPDX-License-Identifier: Apache-2.0
"""What looks wrong in a line of metrics, in words that say what to do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from logra.run_settings import RunSettings

_FIRST_UPDATES = 3

ALARMS: dict[str, str] = {
    "entropy_collapse": "entropy has fallen to a small share of its first values: the policy draws one completion "
    "again and again. Lower the step size, raise the temperature, or take harder problems",
    "logprob_gap": "rollout and trainer disagree about the probability of sampled tokens. Use model.compute fp32, or "
    "the same attention kernel on both sides",
    "all_truncated": "every completion reached rollout.max_tokens. Raise it, or give a stop string or a shorter task",
    "no_signal": "no sample had anything to teach: all scores within a group were equal. Take easier or harder "
    "problems, or set rollout.refill",
    "no_verdict": "no sample was graded; every reward gave None. Check the reward and the gold answers",
    "step_skipped": "a gradient or a prediction was not finite, or a step did not fit the KL budget, so weights "
    "were left as they were. Lower the step size if this repeats",
}


@dataclass
class Alarms:
    """Looks at one line after another.

    Attributes:
        settings: thresholds.
        entropies: of the first updates, which later ones are compared with.
        in_a_row: alarm -> updates in a row that had it.
    """

    settings: RunSettings
    entropies: list[float] = field(default_factory=list)
    in_a_row: dict[str, int] = field(default_factory=dict)

    def __call__(self, line: dict[str, Any]) -> list[str]:
        """Names of the alarms that a line of an update raises."""
        entropy, gap = line["entropy"], line["logprob_gap_p95"]
        if entropy is not None and len(self.entropies) < _FIRST_UPDATES:
            self.entropies.append(entropy)
        usual = sum(self.entropies) / max(1, len(self.entropies))
        raised: dict[str, Callable[[], bool]] = {
            "entropy_collapse": lambda: entropy is not None and entropy < self.settings.alarm_entropy * usual,
            "logprob_gap": lambda: gap is not None and gap > self.settings.alarm_gap,
            "all_truncated": lambda: line["truncated"] == 1,
            "no_signal": lambda: line["reward"] is not None and line["samples_trained"] == 0,
            "no_verdict": lambda: line["reward"] is None,
            "step_skipped": lambda: line["steps_skipped"] > 0,
        }
        names = [name for name, is_raised in raised.items() if is_raised()]
        self.in_a_row = {name: self.in_a_row.get(name, 0) + 1 for name in names}
        return names

    def lasting(self) -> str | None:
        """The alarm that has been raised `run.stop_after_alarms` updates in a row, if that ends the run."""
        limit = self.settings.stop_after_alarms
        return next((name for name, count in self.in_a_row.items() if limit and count >= limit), None)

    def state(self) -> dict[str, Any]:
        """Plain numbers that `load` takes."""
        return {"entropies": list(self.entropies), "in_a_row": dict(self.in_a_row)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.entropies, self.in_a_row = list(state["entropies"]), dict(state["in_a_row"])
