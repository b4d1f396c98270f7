# SPDX-License-Identifier: Apache-2.0
"""A ladder of difficulty: a task goes on to its next level once the latest samples are right often enough."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ladder:
    """Where one task stands.

    Attributes:
        levels: how many there are.
        promote_at: pass rate that promotes.
        window: latest graded samples of the present level that it is of.
        level: the present one, from 0.
        recent: whether each of those samples was right.
    """

    levels: int
    promote_at: float
    window: int
    level: int = 0
    recent: deque[bool] = field(default_factory=deque)

    def record(self, right: Iterable[bool]) -> bool:
        """Enter graded samples of the present level; whether that promoted the task."""
        self.recent.extend(right)
        while len(self.recent) > self.window:
            self.recent.popleft()
        enough = len(self.recent) == self.window and sum(self.recent) >= self.promote_at * self.window
        if not enough or self.level + 1 == self.levels:
            return False
        self.level += 1
        self.recent.clear()
        return True

    def state(self) -> dict[str, object]:
        """Plain numbers that `load` takes."""
        return {"level": self.level, "recent": [int(each) for each in self.recent]}

    def load(self, state: dict[str, object]) -> None:
        """Go on from `state`."""
        level, recent = state["level"], state["recent"]
        assert isinstance(level, int) and isinstance(recent, list)
        self.level, self.recent = level, deque(map(bool, recent))
