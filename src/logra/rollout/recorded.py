# SPDX-License-Identifier: Apache-2.0
"""Batches of completions written down, and read again instead of being drawn.

One file an update, JSON lines, a sample each; log-probabilities keep all their digits. Evaluations are never recorded.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from logra.parallel.processes import Processes
from logra.rl.batch import Sample, sample_of
from logra.rollout.engine import Prompt, RolloutEngine, Sampling
from logra.run_settings import TrainSettings


def batch_file(folder: Path, update: int) -> Path:
    """Where the samples of an update are."""
    return folder / f"update-{update:06d}.jsonl"


class RecordingEngine:
    """Draws with another engine and writes the samples down."""

    def __init__(self, engine: RolloutEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """As the other engine; a second call in one update (refilled groups) adds to its file."""
        samples = self.engine.generate(prompts, sampling, update)
        if sampling.purpose == "rollout":
            self.folder.mkdir(parents=True, exist_ok=True)
            path = batch_file(self.folder, update)
            first = samples[0].sample_id == 0
            earlier = "" if first or not path.exists() else path.read_text()
            temporary = path.with_suffix(".tmp")
            temporary.write_text(earlier + "".join(json.dumps(asdict(sample)) + "\n" for sample in samples))
            os.replace(temporary, path)
        return samples


def recorded(engine: RolloutEngine, settings: TrainSettings, processes: Processes) -> RolloutEngine:
    """The engine, with its batches written down or read instead, as the settings say."""
    rollout = settings.rollout
    if rollout.replay is not None:
        return ReplayEngine(engine, Path(rollout.replay))
    if rollout.record and processes.first:
        return RecordingEngine(engine, Path(settings.run.folder) / "batches")
    return engine


class ReplayEngine:
    """Gives the samples that were written down, if they answer the prompts that are asked; evaluations are drawn.

    Args:
        engine: draws evaluations.
        folder: of a `RecordingEngine`.
    """

    def __init__(self, engine: RolloutEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """The samples of an update.

        Raises:
            ValueError: they are not there, or were drawn for other prompts.
        """
        if sampling.purpose != "rollout":
            return self.engine.generate(prompts, sampling, update)
        path = batch_file(self.folder, update)
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ValueError(f"update {update} cannot be replayed: {path} cannot be read ({error})") from error
        recorded = {sample.sample_id: sample for sample in map(_sample, lines)}
        samples = []
        for prompt in prompts:
            for sample_id in range(prompt.first_sample_id, prompt.first_sample_id + prompt.samples):
                sample = recorded.get(sample_id)
                if sample is None or sample.prompt_ids != prompt.ids:
                    found = "is missing" if sample is None else "answers another prompt"
                    raise ValueError(
                        f"update {update} cannot be replayed: sample {sample_id} of {path} {found}; replay with the "
                        f"task, prompts, samples and seed that it was recorded with"
                    )
                samples.append(sample)
        return sorted(samples, key=lambda sample: sample.sample_id)


def _sample(line: str) -> Sample:
    return sample_of(json.loads(line))
