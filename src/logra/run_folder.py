# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: settings as resolved, metrics and samples line by line, checkpoints that any tool loads."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from logra.durable import damage, recover, temporary_of, write_folder, write_json
from logra.run_settings import TrainSettings, as_plain

STATE = "trainer_state"
LOGS = ("metrics.jsonl", "samples.jsonl")
_PACKAGES = ("logra", "torch", "transformers", "peft", "reasoning-gym", "math-verify", "datasets")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class RunFolder:
    """Writes what a run leaves behind.

    Args:
        settings: of the run.
        resume: go on in the folder of an earlier run instead of beginning one.

    Raises:
        ValueError: the folder holds a run already, holds none to resume, or cannot be written.
    """

    def __init__(self, settings: TrainSettings, resume: bool = False) -> None:
        self.path, self.keep = Path(settings.run.folder), settings.run.keep
        self._replaced: Path | None = None
        holds_a_run = _holds_a_run(self.path)
        if resume and not holds_a_run:
            raise ValueError(f"{self.path} holds no run to resume: there is no settings.json of one in it")
        if not resume and self.path.exists() and any(self.path.iterdir()):
            if not holds_a_run:
                raise ValueError(f"run.folder {self.path} is not empty and holds no run; choose another folder")
            if not settings.run.overwrite:
                raise ValueError(
                    f"run.folder {self.path} holds a run already; go on with `logra train --resume {self.path}`, "
                    f"choose another folder, or set run.overwrite to true"
                )
        try:
            if not resume and holds_a_run:
                self._replaced = self.path.with_name(f"{self.path.name}.replaced")
                shutil.rmtree(self._replaced, ignore_errors=True)
                os.replace(self.path, self._replaced)
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "settings.json", as_plain(settings))
            write_json(self.path / "versions.json", {name: _version(name) for name in _PACKAGES})
        except OSError as error:
            raise ValueError(f"run.folder {self.path} cannot be written ({error}); choose another folder") from error
        self._resumed = resume
        for name in ("model", "best"):
            recover(self.path / name)
        for left in self.path.glob("*.tmp"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def started(self) -> None:
        """The run could begin: the one that it replaces goes for good."""
        if self._replaced is not None:
            shutil.rmtree(self._replaced, ignore_errors=True)
            self._replaced = None

    def give_up(self) -> None:
        """The run could not begin: leave the place as it was found."""
        if self._resumed:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if self._replaced is not None:
            os.replace(self._replaced, self.path)

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        self._append("metrics.jsonl", [line])

    def log_samples(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to samples.jsonl."""
        self._append("samples.jsonl", lines)

    def save_model(self, name: str, write: Callable[[Path], None]) -> Path:
        """A folder that is there whole or not at all; checkpoints beyond the last `run.keep` go only then.

        Raises:
            ValueError: it could not be written; everything earlier is as it was.
        """
        final = self.path / name
        try:
            write_folder(final, write)
        except (OSError, RuntimeError) as error:
            raise ValueError(self._not_saved(name, error)) from error
        except Exception as error:
            # safetensors has an exception of its own for a disk that is full.
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(self._not_saved(name, error)) from error
        for _, old in self.checkpoints()[: -self.keep]:
            if old != final:
                shutil.rmtree(old)
        return final

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Numbered checkpoints, oldest first."""
        found = [(_CHECKPOINT.fullmatch(path.name), path) for path in self.path.iterdir() if path.is_dir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def latest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The latest checkpoint that is whole and can be gone on from, and what is wrong with later ones."""
        wrong: list[str] = []
        for _, path in reversed(self.checkpoints()):
            trouble = damage(path)
            if trouble is None and (path / STATE).exists():
                return path, wrong
            wrong.append(f"{path}: {trouble or f'there is no {STATE} in it'}")
        return None, wrong

    def forget_after(self, update: int, evaluated: bool) -> None:
        """Drop lines of updates after `update`, of its evaluation unless `evaluated`, and a line cut short.

        Later checkpoints, which cannot be used, are renamed: they must not count among those kept.
        """
        for number, path in self.checkpoints():
            if number > update:
                damaged = path.with_name(f"{path.name}.damaged")
                shutil.rmtree(damaged, ignore_errors=True)
                os.replace(path, damaged)
        for name in LOGS:
            path = self.path / name
            if not path.exists():
                continue
            kept = [line for line in path.read_text().splitlines(keepends=True) if _stays(line, update, evaluated)]
            temporary = path.with_name(f"{name}.tmp")
            temporary.write_text("".join(kept))
            os.replace(temporary, path)

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        try:
            with (self.path / name).open("a") as file:
                file.write("".join(json.dumps(_finite(line)) + "\n" for line in lines))
        except OSError as error:
            raise ValueError(f"{self.path / name} cannot be written ({error}); {self._how_to_go_on()}") from error

    def _not_saved(self, name: str, error: Exception) -> str:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{self.path / name} could not be saved ({what}); {self._how_to_go_on()}"

    def _how_to_go_on(self) -> str:
        path, _ = self.latest_checkpoint()
        since = "the beginning" if path is None else path.name
        return (
            f"everything saved before is intact. Free some space or make the folder writable, then go on from {since} "
            f"with `logra train --resume {self.path}`"
        )


class FollowedFolder:
    """The folder of a run that the first process keeps, for the others: they add their parts and write nothing else."""

    def __init__(self, settings: TrainSettings) -> None:
        self.path = Path(settings.run.folder)

    def save_model(self, name: str, write: Callable[[Path], None]) -> Path:
        """Add this process's part to the folder that the first one makes."""
        write(temporary_of(self.path / name))
        return self.path / name

    def started(self) -> None:
        """The first process sees to it."""

    def give_up(self) -> None:
        """The first process sees to it."""

    def log(self, line: dict[str, Any]) -> None:
        """The first process does."""

    def log_samples(self, lines: list[dict[str, Any]]) -> None:
        """The first process does."""

    def latest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The first process looks."""
        return None, []

    def forget_after(self, update: int, evaluated: bool) -> None:
        """The first process does."""


def _holds_a_run(path: Path) -> bool:
    """Whether the folder has settings of ours."""
    try:
        settings = json.loads((path / "settings.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and {"model", "task", "rollout", "learning", "method", "run"} <= set(settings)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stays(line: str, update: int, evaluated: bool) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    is_evaluation = "evaluation" in entry or entry.get("phase") == "evaluation"
    return entry["update"] < update or (entry["update"] == update and (evaluated or not is_evaluation))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
