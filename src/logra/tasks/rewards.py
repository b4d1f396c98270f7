# SPDX-License-Identifier: Apache-2.0
"""A user's reward: one Python function, named `module:function` or `file.py:function`.

    reward(prompts, completions, answers, **columns) -> list[float | None]

All arguments are lists with one entry a sample, columns of the data set included, so functions written
for TRL work as they are. None means no verdict. Arguments that the function does not name, and has no
**kwargs for, are not passed.
"""

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logra.tasks.answers import score_number, score_text
from logra.tasks.math_answers import score_math
from logra.tasks.task import Problem

Reward = Callable[..., Any]
BUILT_IN: dict[str, Callable[[str, str], float | None]] = {
    "number": score_number,
    "text": score_text,
    "math": score_math,
}


def load_reward(name: str) -> Reward:
    """The function that `name` names: "number", "text", "math", "module:function" or "file.py:function".

    Raises:
        ValueError: it is not there, or is no function; the message says what was looked for.
    """
    if name in BUILT_IN:
        score = BUILT_IN[name]
        return lambda completions, answers: [score(c, a) for c, a in zip(completions, answers, strict=True)]
    place, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"reward {name!r} must be one of {sorted(BUILT_IN)}, module:function or file.py:function")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise ValueError(f"reward {name!r}: {place} could not be imported ({error})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"reward {name!r}: {place} has no function {attribute!r}; it has {found}")
    return function


def gold_fails(name: str, gold: str) -> bool:
    """Whether a built-in reward would not pay the gold answer itself; a user's reward is not asked."""
    return name in BUILT_IN and all(BUILT_IN[name](told, gold) != 1.0 for told in (f"\\boxed{{{gold}}}", gold))


def call_reward(
    name: str, reward: Reward, problems: Sequence[Problem], completions: Sequence[str]
) -> list[float | None]:
    """Scores of `completions`, one each, checked.

    Raises:
        ValueError: the function raised, or gave another number of scores or something that is no score. The message
            shows what it was given.
    """
    columns = (
        {key: [problem.columns.get(key) for problem in problems] for key in problems[0].columns} if problems else {}
    )
    given = columns | {
        "prompts": [problem.prompt for problem in problems],
        "completions": list(completions),
        "answers": [problem.answer for problem in problems],
    }
    parameters = inspect.signature(reward).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {key: value for key, value in given.items() if key in parameters}
    shown = (
        f"first of {len(problems)} samples: prompt {_short(problems[0].prompt)}, completion {_short(completions[0])}"
    )
    try:
        scores = list(reward(**given))
    except Exception as error:
        raise ValueError(f"reward {name!r} raised {type(error).__name__}: {error} ({shown})") from error
    if len(scores) != len(completions):
        raise ValueError(f"reward {name!r} gave {len(scores)} scores for {len(completions)} samples ({shown})")
    checked: list[float | None] = []
    for score in scores:
        if score is not None and (not isinstance(score, (int, float)) or not math.isfinite(score)):
            raise ValueError(f"reward {name!r} gave {score!r}; a score is a finite number, or None ({shown})")
        checked.append(None if score is None else float(score))
    return checked


def weighted(scores: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Weighted sums sample by sample; None where any reward gave no verdict."""
    sums: list[float | None] = []
    for row in zip(*scores, strict=True):
        known = [score for score in row if score is not None]
        sums.append(sum(w * s for w, s in zip(weights, known, strict=True)) if len(known) == len(row) else None)
    return sums


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
