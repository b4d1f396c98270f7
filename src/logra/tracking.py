# SPDX-License-Identifier: Apache-2.0
"""Metrics to services by name: TensorBoard, Weights & Biases, trackio. metrics.jsonl is written whatever they do."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from logra.run_settings import TrainSettings, as_plain


class Tracker(Protocol):
    """One service."""

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        """The numbers of an update, by flat name."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


def flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of metrics, nested names joined by "/"; what is no number is left out."""
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "update":
            numbers[f"{prefix}{name}"] = float(value)
    return numbers


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, settings: TrainSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(Path(settings.run.folder) / "tensorboard"))

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        """One point of each curve."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, update)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class WeightsAndBiases:
    """A run of the project "logra"; WANDB_MODE=offline keeps it in RUN/wandb."""

    def __init__(self, settings: TrainSettings) -> None:
        import wandb

        folder = Path(settings.run.folder)
        self.run = wandb.init(project="logra", name=folder.name, dir=str(folder), config=as_plain(settings))

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        """One step."""
        self.run.log(dict(numbers), step=update)

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


class Trackio:
    """A run of the local project "logra"."""

    def __init__(self, settings: TrainSettings) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project="logra", name=Path(settings.run.folder).name, config=as_plain(settings))

    def log(self, numbers: Mapping[str, float], update: int) -> None:
        """One step."""
        self.trackio.log(dict(numbers), step=update)

    def close(self) -> None:
        """Send what is left."""
        self.trackio.finish()


TRACKERS: dict[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}


class Trackers:
    """All services that a run asks for. One that fails is told of once and left out; the run goes on.

    Raises:
        ValueError: a service cannot be started.
    """

    def __init__(self, names: Sequence[str], settings: TrainSettings) -> None:
        self.trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self.trackers[name] = TRACKERS[name](settings)
            except ImportError as error:
                raise ValueError(
                    f"run.trackers has {name!r}, which needs pip install 'logra[track]' ({error})"
                ) from error
            except Exception as error:
                raise ValueError(f"run.trackers: {name} could not be started ({error})") from error

    def log(self, line: Mapping[str, Any]) -> list[str]:
        """Send a line of metrics; returns what to say of services that failed."""
        numbers, failed = flat(line), []
        for name, tracker in list(self.trackers.items()):
            try:
                tracker.log(numbers, line["update"])
            except Exception as error:
                del self.trackers[name]
                failed.append(f"{name} failed ({error}) and gets nothing more; metrics.jsonl goes on")
        return failed

    def close(self) -> None:
        """Send what is left; failures are told of no more."""
        for tracker in self.trackers.values():
            try:
                tracker.close()
            except Exception:
                continue
        self.trackers.clear()
