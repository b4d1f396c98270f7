# SPDX-License-Identifier: Apache-2.0
"""Tasks whose problems are generated: reasoning-gym's generators with exact scorers of our own.

reasoning-gym's own scorers are never used: several of them execute the answer as Python, and one
pays any text. Two small tasks in plain notation, `sums` and `times`, need no package.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from logra.tasks.answers import (
    expression_of,
    final_answer,
    number_list,
    plain_number,
    score_expression,
    score_number,
    score_number_list,
    score_text,
)
from logra.tasks.task import Completion, Problem
from logra.tasks.verdict import Verdict, graded

_SIZE = 1_000_000


@dataclass(frozen=True)
class Scorer:
    """How a task's completions are graded: `score` exactly, and whether there is an answer to read at all."""

    score: Callable[[str, Problem], float]
    parses: Callable[[str], bool]


def _is_number(completion: str) -> bool:
    return plain_number(final_answer(completion)) is not None


NUMBER = Scorer(lambda completion, problem: score_number(completion, problem.answer), _is_number)
TEXT = Scorer(lambda completion, problem: score_text(completion, problem.answer), lambda c: bool(final_answer(c)))
SCORERS: dict[str, Scorer] = {
    "products": NUMBER,
    "chain_sum": NUMBER,
    "gcd": NUMBER,
    "count_bits": NUMBER,
    "simple_equations": NUMBER,
    "letter_counting": NUMBER,
    "base_conversion": TEXT,
    "spell_backward": TEXT,
    "number_sorting": Scorer(
        lambda completion, problem: score_number_list(completion, problem.answer),
        lambda completion: number_list(final_answer(completion)) is not None,
    ),
    "countdown": Scorer(
        lambda completion, problem: score_expression(completion, problem.columns["numbers"], problem.columns["target"]),
        lambda completion: expression_of(completion) is not None,
    ),
}


def _grade(scorer: Scorer, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
    return [
        graded(scorer.score(each.text, problem), scorer.parses(each.text))
        for problem, each in zip(problems, completions, strict=True)
    ]


class ReasoningGymTask:
    """One of reasoning-gym's generators.

    Args:
        name: a key of `SCORERS`.
        seed: of the problems; problem i under one seed is always the same.
        knobs: the generator's difficulty settings, such as {"max_digits": 2}.

    Raises:
        ValueError: name or knobs are unknown.
        ImportError: the package reasoning-gym is missing; the message says how to install it.
    """

    finite = False

    def __init__(self, name: str, seed: int = 0, knobs: dict[str, Any] | None = None) -> None:
        if name not in SCORERS:
            raise ValueError(f"task {name!r} is not known; generated tasks are {sorted([*SCORERS, *PLAIN])}")
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(f"task {name!r} needs reasoning-gym: pip install 'logra[tasks]'") from error
        self.name, self.knobs = name, dict(knobs or {})
        try:
            self._items = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **self.knobs)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"knobs {self.knobs} do not fit task {name!r}: {error}") from error

    def __len__(self) -> int:
        return _SIZE

    def problem(self, index: int) -> Problem:
        """Problem `index`, from 0."""
        item = self._items[index]
        return Problem(f"{self.name}-{index}", item["question"].strip(), str(item["answer"]), dict(item["metadata"]))

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """1 for the exact answer, else 0."""
        return _grade(SCORERS[self.name], problems, completions)


class PlainArithmetic:
    """`sums` ("7+5=") or `times` ("7*5=") of numbers up to `max_value`: what the embedded tiny policy trains on."""

    finite = False

    def __init__(self, name: str, seed: int = 0, knobs: dict[str, Any] | None = None) -> None:
        knobs = dict(knobs or {})
        self.name, self.seed, self.max_value = name, seed, int(knobs.pop("max_value", 9))
        if knobs or self.max_value < 1:
            raise ValueError(
                f"knobs of task {name!r}: max_value, an integer of at least 1; got {knobs or self.max_value}"
            )

    def __len__(self) -> int:
        return _SIZE

    def problem(self, index: int) -> Problem:
        """Problem `index`, from 0."""
        numbers = random.Random(f"{self.seed}-{self.name}-{index}")
        left, right = numbers.randint(0, self.max_value), numbers.randint(0, self.max_value)
        prompt, answer = (
            (f"{left}+{right}=", left + right) if self.name == "sums" else (f"{left}*{right}=", left * right)
        )
        return Problem(f"{self.name}-{index}", prompt, str(answer))

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """1 for the exact number, else 0."""
        return _grade(NUMBER, problems, completions)


PLAIN = ("sums", "times")


def generated_task(name: str, seed: int, knobs: dict[str, Any] | None = None) -> ReasoningGymTask | PlainArithmetic:
    """The generated task of that name."""
    return PlainArithmetic(name, seed, knobs) if name in PLAIN else ReasoningGymTask(name, seed, knobs)
