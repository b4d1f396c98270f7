# SPDX-License-Identifier: Apache-2.0
"""The responses of a batch that a step is looked at on, and which part of them each process takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logra.parallel.processes import Processes
from logra.rl.batch import MicroBatch, Sample, collate


@dataclass(frozen=True)
class LookedAt:
    """This process's share of them, one line each.

    Every process has as many lines of one width, since their forwards are made together; what it lacks is filled with
    lines that do not count.

    Attributes:
        batch: the probe, whose responses size a step, and others, on which its KL is measured as well.
        probe: lines of the probe, fillers included.
        counted: of these, and of the others, how many are no fillers; the fillers are last.
    """

    batch: MicroBatch
    probe: int
    counted: tuple[int, int]

    @classmethod
    def whole(cls, batch: MicroBatch, responses: int) -> "LookedAt":
        """All of a batch, of which the first `responses` are the probe."""
        lines = len(batch.rows)
        probe = min(responses, lines)
        return cls(batch, probe, (probe, lines - probe))

    def of_probe(self, values: Tensor) -> Tensor:
        """Of values at the batch's positions, or at the probe's, those of the probe that count."""
        return values[self.batch.sample_index[: len(values)] < self.counted[0]]

    def of_others(self, values: Tensor) -> Tensor:
        """Of values at the batch's positions, those of others that count."""
        index = self.batch.sample_index
        return values[(index >= self.probe) & (index < self.probe + self.counted[1])]


def choose(
    samples: Sequence[Sample],
    rows: Sequence[int],
    responses: int,
    place: tuple[int, torch.device | str],
    processes: Processes,
) -> LookedAt:
    """Of `rows`, the first `responses` as the probe and half as many others.

    Args:
        samples: of the update.
        rows: in the order in which they are taken.
        responses: of the probe.
        place: pad id and device.
        processes: that share them.
    """
    probe, others = rows[:responses], rows[responses : responses + max(1, responses // 2)]
    width = max(samples[row].num_tokens for row in (*probe, *others))
    lines: list[int] = []
    counted = []
    for part in (probe, others):
        mine = processes.share(part)
        counted.append(len(mine))
        lines += [*mine, *[rows[0]] * (-(-len(part) // processes.count) - len(mine))]
    batch = collate(samples, lines, *place, width)
    return LookedAt(batch, -(-len(probe) // processes.count), (counted[0], counted[1]))
