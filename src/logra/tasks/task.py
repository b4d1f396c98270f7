# SPDX-License-Identifier: Apache-2.0
"""A task is problems and a way to score completions of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from logra.tasks.verdict import Verdict


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        key: unique in its task; the same key is always the same problem.
        prompt: text, or chat messages [{"role": ..., "content": ...}, ...].
        answer: the gold answer, as text.
        columns: whatever else the source holds, passed to the user's reward.
    """

    key: str
    prompt: str | list[dict[str, str]]
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What is graded: a completion's text, and whose it is."""

    text: str
    sample_id: int = 0
    group_id: int = 0


class Task(Protocol):
    """Where problems come from. Problem i is the same in every run and on every machine."""

    name: str
    finite: bool  # rows of a set, each drawn once before any comes again; else generated without end

    def __len__(self) -> int:
        """How many problems there are; a generated task may say a very large number."""
        ...

    def problem(self, index: int) -> Problem:
        """Problem `index`, from 0."""
        ...

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """One verdict for each completion; the completions of a group stand together."""
        ...
