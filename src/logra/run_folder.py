# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: settings as resolved, metrics and samples line by line, checkpoints that any tool loads."""

import json
import os
import re
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from logra.durable import damage, recover, write_folder, write_json
from logra.run_settings import TrainSettings, as_plain

STATE = "trainer_state.pt"
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
        holds_a_run = (self.path / "settings.json").exists()
        if resume and not holds_a_run:
            raise ValueError(f"{self.path} holds no run to resume: there is no settings.json in it")
        if holds_a_run and not resume:
            if not settings.run.overwrite:
                raise ValueError(
                    f"run.folder {self.path} holds a run already; go on with `logra train --resume {self.path}`, "
                    f"choose another folder, or set run.overwrite to true"
                )
            shutil.rmtree(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "settings.json", as_plain(settings))
            write_json(self.path / "versions.json", {name: _version(name) for name in _PACKAGES})
        except OSError as error:
            raise ValueError(f"run.folder {self.path} cannot be written ({error}); choose another folder") from error
        for name in ("model", "best"):
            recover(self.path / name)

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
        """Drop lines of updates after `update`, of its evaluation unless `evaluated`, and a line cut short."""
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
                file.write("".join(json.dumps(line) + "\n" for line in lines))
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
