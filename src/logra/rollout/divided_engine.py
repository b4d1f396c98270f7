# SPDX-License-Identifier: Apache-2.0
"""Rollout by several processes, each for its share of the prompts; all of them get all samples."""

from collections.abc import Sequence

from logra.divide import RolloutCopy
from logra.parallel.processes import Processes
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, RolloutEngine, Sampling


class DividedEngine:
    """Groups are never split; what a sample draws depends on its id and not on the process that draws it.

    Args:
        engine: draws with the copy's weights.
        copy: of the model that is trained.
        processes: that share the prompts.
    """

    def __init__(self, engine: RolloutEngine, copy: RolloutCopy, processes: Processes) -> None:
        self.engine, self.copy, self.processes = engine, copy, processes

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """All samples of all prompts, ordered by sample id."""
        with self.copy.filled():

            def draw(part: list[Prompt]) -> list[list[Sample]]:
                drawn: dict[int, list[Sample]] = {prompt.group_id: [] for prompt in part}
                for sample in self.engine.generate(part, sampling, update):
                    drawn[sample.group_id].append(sample)
                return [drawn[prompt.group_id] for prompt in part]

            groups = self.processes.shared_out(prompts, draw)
        return sorted((sample for group in groups for sample in group), key=lambda sample: sample.sample_id)
