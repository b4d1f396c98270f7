# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: settings as resolved, metrics line by line, checkpoints that any tool loads."""

import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from logra.run_settings import TrainSettings, as_plain

_PACKAGES = ("logra", "torch", "transformers", "peft", "reasoning-gym")


class RunFolder:
    """Writes what a run leaves behind. Files are written whole under another name and then renamed.

    Raises:
        ValueError: the folder holds a run already and `overwrite` is off, or it cannot be written.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.path, self.keep = Path(settings.run.folder), settings.run.keep
        if (self.path / "metrics.jsonl").exists():
            if not settings.run.overwrite:
                raise ValueError(
                    f"run.folder {self.path} holds a run already; choose another folder, or set run.overwrite to true"
                )
            shutil.rmtree(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write_json("settings.json", as_plain(settings))
        except OSError as error:
            raise ValueError(f"run.folder {self.path} cannot be written ({error}); choose another folder") from error
        self._write_json("versions.json", {name: _version(name) for name in _PACKAGES})

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        self._append("metrics.jsonl", [line])

    def log_samples(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to samples.jsonl."""
        self._append("samples.jsonl", lines)

    def save_model(self, name: str, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a folder under another name, and rename it when it is complete.

        The folder that it replaces, and checkpoints beyond the last `run.keep`, go only then.
        """
        final, temporary = self.path / name, self.path / f"{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        write(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        numbered = [path for path in self.path.glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
        checkpoints = sorted(numbered, key=lambda path: int(path.name.split("-")[1]))
        for old in checkpoints[: -self.keep]:
            shutil.rmtree(old)
        return final

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _write_json(self, name: str, value: Any) -> None:
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(temporary, self.path / name)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
