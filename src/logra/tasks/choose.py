# SPDX-License-Identifier: Apache-2.0
"""From a task's name to the task."""

from dataclasses import fields
from typing import Any

from logra.run_settings import TaskSettings
from logra.tasks.dataset import DatasetTask, Source
from logra.tasks.generated import PLAIN, SCORERS, generated_task
from logra.tasks.known_sets import KNOWN_SETS
from logra.tasks.rewards import RewardLimits
from logra.tasks.task import Task


def is_from_data(name: str, settings: TaskSettings) -> bool:
    """Whether the task's problems are the rows of a set."""
    return name in settings.sources or name in KNOWN_SETS


def make_task(name: str, settings: TaskSettings, seed: int, knobs: dict[str, Any] | None = None) -> Task:
    """The task of that name: from a source if settings describe one, a known set, else generated from `seed`.

    Args:
        name: of the task.
        settings: with its source or knobs.
        seed: of generated problems.
        knobs: instead of those of the settings.

    Raises:
        ValueError: name, source or knobs lead nowhere; the message says what is allowed.
    """
    if not is_from_data(name, settings):
        if name not in PLAIN and name not in SCORERS:
            raise ValueError(
                f"task {name!r} is not known; generated tasks are {sorted([*SCORERS, *PLAIN])}, known sets "
                f"{sorted(KNOWN_SETS)}; others need an entry in task.sources"
            )
        return generated_task(name, seed, settings.knobs.get(name) if knobs is None else knobs)
    described = KNOWN_SETS.get(name, {}) | settings.sources.get(name, {})
    known = [spec.name for spec in fields(Source)]
    unknown = sorted(set(described) - set(known))
    if unknown or "path" not in described:
        raise ValueError(f"source of task {name!r} has {sorted(described)}; it needs path and may have {known[1:]}")
    limits = RewardLimits(
        settings.reward_seconds,
        int(settings.reward_memory_gib * 2**30),
        settings.reward_workers,
        settings.code_sandbox == "required",
    )
    return DatasetTask(name, Source(**described), limits)
