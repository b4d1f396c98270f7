# SPDX-License-Identifier: Apache-2.0
"""Reading run folders: settings, metrics, samples; a line that was cut short is left out."""

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from logra.run_settings import TrainSettings, as_plain


@dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        name: of its folder.
        settings: as resolved, by section.
        versions: of packages.
        updates: one line an update.
        evaluations: one line an evaluation.
        samples: lines of samples.jsonl.
    """

    name: str
    settings: dict[str, Any]
    versions: dict[str, str | None]
    updates: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def method(self) -> str:
        """The update rule's name."""
        return str(self.settings["method"]["name"])

    def scores(self) -> tuple[float | None, float | None, float | None]:
        """pass@1 before the first update, after the last, and the best after an update."""
        scored = [(line["update"], line["evaluation"]["pass@1"]) for line in self.evaluations]
        scored = [(update, score) for update, score in scored if score is not None]
        before = next((score for update, score in scored if update == 0), None)
        later = [score for update, score in scored if update > 0]
        return before, later[-1] if later else None, max(later) if later else None

    def seconds(self) -> float:
        """Of all phases of all lines."""
        return sum(sum(line["seconds"].values()) for line in (*self.updates, *self.evaluations))


def read_run(folder: Path) -> Run:
    """Read a folder.

    Raises:
        ValueError: it holds no run.
    """
    try:
        settings = json.loads((folder / "settings.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no run: settings.json cannot be read ({error})") from error
    versions = folder / "versions.json"
    lines = _lines(folder / "metrics.jsonl")
    return Run(
        folder.resolve().name,
        settings,
        json.loads(versions.read_text()) if versions.exists() else {},
        [line for line in lines if "evaluation" not in line],
        [line for line in lines if "evaluation" in line],
        _lines(folder / "samples.jsonl"),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """By dotted name, what differs from the defaults."""
    return _changed(settings, as_plain(TrainSettings()), "")


def _changed(values: dict[str, Any], defaults: Any, prefix: str) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name) if isinstance(defaults, dict) else None
        if isinstance(value, dict) and isinstance(default, dict) and _is_section(f"{prefix}{name}"):
            changed |= _changed(value, default, f"{prefix}{name}.")
        elif value != default:
            changed[f"{prefix}{name}"] = value
    return changed


def _is_section(name: str) -> bool:
    """Whether a dotted name is a section of settings, not a setting whose value is a mapping."""
    part: Any = TrainSettings()
    for each in name.split("."):
        if not is_dataclass(part) or each not in {spec.name for spec in fields(part)}:
            return False
        part = getattr(part, each)
    return is_dataclass(part)
