# SPDX-License-Identifier: Apache-2.0
"""Rewards by name: "number", "text", "math", "code", or a user's function.

A user's function is named `module:function` or `file.py:function`:

    reward(prompts, completions, answers, **columns) -> list[float | None]

It is called in a process of its own, once for each group (the completions of one prompt). All arguments are lists with
one entry a sample: columns of the data set, `sample_ids` and `group_ids` are there too, so functions written for TRL
work as they are. None means no verdict. Arguments that the function does not name, and has no **kwargs for, are not
passed. What becomes of a function that fails:

| it | outcome |
| --- | --- |
| gives None | no verdict: the sample counts nowhere |
| takes too long | timed out: its group counts nowhere, its process is killed and replaced |
| runs out of memory, or ends its process | crashed: likewise |
| raises, gives too few or too many scores, NaN, or what is no number | the run stops and shows the sample |
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from logra.tasks.answers import final_answer, plain_number, score_number, score_text
from logra.tasks.code_tests import protection
from logra.tasks.math_answers import grade_math
from logra.tasks.task import Completion, Problem
from logra.tasks.verdict import CRASHED, TIMED_OUT, Verdict, graded
from logra.tasks.worker_pool import Answer, Limits, WorkerPool


class Reward(Protocol):
    """Grades completions of problems."""

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """One verdict for each completion."""
        ...


def grade_numbers(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
    """1 for the exact number."""
    return [
        graded(score_number(each.text, problem.answer), plain_number(final_answer(each.text)) is not None)
        for problem, each in zip(problems, completions, strict=True)
    ]


def grade_texts(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
    """1 for the exact text, letter case aside."""
    return [
        graded(score_text(each.text, problem.answer), bool(final_answer(each.text)))
        for problem, each in zip(problems, completions, strict=True)
    ]


def grade_mathematics(problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
    """1 for the same mathematical answer."""
    return grade_math([each.text for each in completions], [problem.answer for problem in problems])


@dataclass(frozen=True)
class RewardLimits:
    """Of a user's function: seconds for one group, memory and processes; and whether code needs namespaces."""

    seconds: float = 10.0
    memory_bytes: int = 4 << 30
    workers: int = 0
    sandbox_required: bool = False


class CodeReward:
    """1 if the completion's Python passes the tests that stand in the answer column; see `logra.tasks.code_tests`."""

    def __init__(self, limits: RewardLimits) -> None:
        self.mode = protection()  # decided here once: no process falls back on less
        if self.mode == "limits":
            what = (
                "reward 'code' runs the model's Python here with limits of time, memory, file size and processes ONLY: "
                "this system allows no namespaces, so that code can read your files and use the network"
            )
            if limits.sandbox_required:
                raise ValueError(f"{what}; task.code_sandbox is 'required', so it is refused")
            warnings.warn(f"{what}. Set task.code_sandbox to 'required' to refuse this.", stacklevel=2)
        # Each test has limits of its own; this one is for the process that starts them.
        self.pool = WorkerPool("code", Limits(wall_seconds=120.0, cpu_seconds=120, memory_bytes=0), limits.workers)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """One verdict for each completion."""
        requests = [(each.text, problem.answer, self.mode) for problem, each in zip(problems, completions, strict=True)]
        return [self._verdict(answer) for answer in self.pool.map(requests)]

    def _verdict(self, answer: Answer) -> Verdict:
        if answer.status == "raised":
            raise ValueError(f"reward 'code' could not run its tests: {answer.message}")
        if answer.status != "done":
            return TIMED_OUT if answer.status == "timed_out" else CRASHED
        outcome, _ = answer.value
        if outcome == "crashed":
            return CRASHED
        # Code that does not end is wrong: its time limit is part of the task.
        return graded(float(outcome == "right"), parsed=outcome != "unparseable")


class UserReward:
    """A user's function, called in processes that can be killed.

    Raises:
        ValueError: there is no such function; the message says what was looked for.
    """

    def __init__(self, name: str, limits: RewardLimits) -> None:
        self.name = name
        if ":" not in name:
            raise ValueError(f"reward {name!r} must be one of {sorted(BUILT_IN)}, module:function or file.py:function")
        wall = Limits(limits.seconds, max(1, math.ceil(limits.seconds)), limits.memory_bytes)
        self.pool = WorkerPool(f"reward={name}", wall, limits.workers)
        try:
            self.pool.start()
        except ValueError as error:
            raise ValueError(f"reward {name!r}: {error}") from error

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """One verdict for each completion.

        Raises:
            ValueError: the function raised, or gave another number of scores or something that is no score. The message
                shows what it was given.
        """
        groups: dict[int, list[int]] = {}
        for row, completion in enumerate(completions):
            groups.setdefault(completion.group_id, []).append(row)
        requests = [self._arguments([(problems[row], completions[row]) for row in rows]) for rows in groups.values()]
        verdicts: dict[int, Verdict] = {}
        for rows, given, answer in zip(groups.values(), requests, self.pool.map(requests), strict=True):
            verdicts |= zip(rows, self._verdicts(given, answer), strict=True)
        return [verdicts[row] for row in range(len(completions))]

    def _arguments(self, group: list[tuple[Problem, Completion]]) -> dict[str, Any]:
        names = {key for problem, _ in group for key in problem.columns}
        columns = {key: [problem.columns.get(key) for problem, _ in group] for key in names}
        return columns | {
            "prompts": [problem.prompt for problem, _ in group],
            "completions": [completion.text for _, completion in group],
            "answers": [problem.answer for problem, _ in group],
            "sample_ids": [completion.sample_id for _, completion in group],
            "group_ids": [completion.group_id for _, completion in group],
        }

    def _verdicts(self, given: dict[str, Any], answer: Answer) -> list[Verdict]:
        count = len(given["completions"])
        samples = [
            f"sample {sample}: prompt {_short(prompt)}, completion {_short(completion)}"
            for sample, prompt, completion in zip(
                given["sample_ids"], given["prompts"], given["completions"], strict=True
            )
        ]
        shown = f"first of {count} samples, {samples[0]}"
        if answer.status == "raised":
            raise ValueError(f"reward {self.name!r} raised {answer.message} ({shown})\n{answer.trace}".rstrip())
        if answer.status != "done":
            return [TIMED_OUT if answer.status == "timed_out" else CRASHED] * count
        if len(answer.value) != count:
            raise ValueError(f"reward {self.name!r} gave {len(answer.value)} scores for {count} samples ({shown})")
        for place, score in enumerate(answer.value):
            if score is not None and not math.isfinite(score):
                raise ValueError(
                    f"reward {self.name!r} gave {score!r}; a score is a finite number, or None ({samples[place]})"
                )
        return [graded(score) for score in answer.value]


BUILT_IN: dict[str, Callable[[RewardLimits], Reward]] = {
    "number": lambda limits: grade_numbers,
    "text": lambda limits: grade_texts,
    "math": lambda limits: grade_mathematics,
    "code": CodeReward,
}


def make_reward(name: str, limits: RewardLimits | None = None) -> Reward:
    """The reward that `name` names.

    Raises:
        ValueError: there is none; the message says what was looked for.
    """
    limits = limits or RewardLimits()
    return BUILT_IN[name](limits) if name in BUILT_IN else UserReward(name, limits)


def gold_trouble(name: str, gold: str) -> str | None:
    """Why a built-in reward cannot use a gold answer, or None; a user's reward is not asked."""
    if name == "code":
        try:
            compile(gold, "tests", "exec")
        except (SyntaxError, ValueError):
            return "its tests are no Python"
        return None
    if name not in BUILT_IN:
        return None
    problem = Problem("gold", "", gold)
    told = [Completion(f"\\boxed{{{gold}}}"), Completion(gold)]
    scores = [verdict.score for verdict in make_reward(name)([problem] * 2, told)]
    return None if 1.0 in scores else f"it does not score 1 by reward {name!r}"


def weighted(verdicts: Sequence[Sequence[Verdict]], weights: Sequence[float]) -> list[Verdict]:
    """Weighted sums sample by sample; no score where any reward has none."""
    sums: list[Verdict] = []
    for row in zip(*verdicts, strict=True):
        without = [verdict for verdict in row if verdict.score is None]
        if without:
            sums.append(without[0])
            continue
        total = sum(weight * (verdict.score or 0.0) for weight, verdict in zip(weights, row, strict=True))
        sums.append(graded(total, parsed=any(verdict.outcome != "unparseable" for verdict in row)))
    return sums


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
