# SPDX-License-Identifier: Apache-2.0
"""From a task's name to the task."""

from dataclasses import fields

from logra.run_settings import TaskSettings
from logra.tasks.dataset import DatasetTask, Source
from logra.tasks.generated import generated_task
from logra.tasks.task import Task


def make_task(name: str, settings: TaskSettings, seed: int) -> Task:
    """The task of that name: from a source if settings describe one, else generated from `seed`.

    Raises:
        ValueError: name, source or knobs lead nowhere; the message says what is allowed.
    """
    if name not in settings.sources:
        return generated_task(name, seed, settings.knobs.get(name))
    described = settings.sources[name]
    known = [spec.name for spec in fields(Source)]
    unknown = sorted(set(described) - set(known))
    if unknown or "path" not in described:
        raise ValueError(f"source of task {name!r} has {sorted(described)}; it needs path and may have {known[1:]}")
    return DatasetTask(name, Source(**described))
