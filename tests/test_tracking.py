"""Trackers by name: real TensorBoard and offline Weights & Biases; a service that fails does not stop a run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logra.cli import main
from logra.run_settings import TrainSettings
from logra.tracking import TRACKERS, Trackers, flat
from tests.test_training import QUICK

pytestmark = pytest.mark.filterwarnings("ignore")  # of the services' own


def test_lines_become_flat_numbers() -> None:
    line = {"update": 3, "reward": 0.5, "entropy": None, "alarms": ["x"], "seconds": {"rollout": 2, "learning": 1.5}}
    assert flat(line) == {"reward": 0.5, "seconds/rollout": 2.0, "seconds/learning": 1.5}


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    assert main(["train", *QUICK, "--run.folder", str(folder), "--run.trackers", '["tensorboard"]']) == 0
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2]
    assert [event.step for event in events.Scalars("evaluation/pass@1")] == [0, 2]
    assert "memory/learning/peak_bytes" in events.Tags()["scalars"]


def test_weights_and_biases_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    assert main(["train", *QUICK, "--run.folder", str(folder), "--run.trackers", '["wandb"]']) == 0
    (kept,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    assert b"pass_rate" in content
    assert b"evaluation/pass@1" in content


def test_trackio_keeps_a_local_project(tmp_path: Path) -> None:
    """In a process of its own: trackio reads its folder when it is imported."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "logra", "train", *QUICK, "--run.folder", str(folder)]
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [*command, "--run.trackers", '["trackio"]'], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    content = b"".join(path.read_bytes() for path in (tmp_path / "trackio").iterdir() if path.is_file())
    assert b"pass_rate" in content
    assert b"evaluation/pass@1" in content


class Failing:
    """A service that breaks at its second line."""

    def __init__(self, settings: Any) -> None:
        self.lines = 0

    def log(self, numbers: Any, update: int) -> None:
        self.lines += 1
        if self.lines > 1:
            raise ConnectionError("gone")

    def close(self) -> None:
        raise ConnectionError("still gone")


def test_a_service_that_fails_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TRACKERS, "trackio", Failing)
    folder = tmp_path / "run"
    assert main(["train", *QUICK, "--run.folder", str(folder), "--run.trackers", '["trackio"]']) == 0
    assert capsys.readouterr().out.count("trackio failed (gone) and gets nothing more") == 1
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4


def test_services_that_cannot_start_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def absent(settings: Any) -> None:
        raise ImportError("No module named 'trackio'")

    monkeypatch.setitem(TRACKERS, "trackio", absent)
    with pytest.raises(ValueError, match=r"needs pip install 'logra\[track\]'"):
        Trackers(["trackio"], TrainSettings())
    assert main(["train", "--run.trackers", '["tensorbord"]']) == 2
    assert "Did you mean 'tensorboard'?" in capsys.readouterr().err
