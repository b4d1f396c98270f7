# SPDX-License-Identifier: Apache-2.0
"""What grading a completion gave: a score or none, and why."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["right", "wrong", "unparseable", "timed_out", "crashed", "no_verdict"]
OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "unparseable", "timed_out", "crashed", "no_verdict")


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion.

    Attributes:
        score: None means that the completion counts nowhere.
        outcome: "right" (a score of 1 or more), "wrong", "unparseable" (wrong, and without an answer that could be
            read), or why there is no score: "timed_out", "crashed", "no_verdict".
    """

    score: float | None
    outcome: Outcome


def graded(score: float | None, parsed: bool = True) -> Verdict:
    """The verdict that a score means; `parsed` says whether the completion had an answer that could be read."""
    if score is None:
        return Verdict(None, "no_verdict")
    if score >= 1:
        return Verdict(score, "right")
    return Verdict(score, "wrong" if parsed else "unparseable")


TIMED_OUT, CRASHED = Verdict(None, "timed_out"), Verdict(None, "crashed")
