# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from logra.rl.batch import Sample


@dataclass(frozen=True)
class Prompt:
    """One prompt to be completed `samples` times.

    Attributes:
        group_id: of its samples, unique in the update.
        ids: the tokenised prompt, chat template applied.
        first_sample_id: its samples are numbered from here.
        samples: how many completions.
    """

    group_id: int
    ids: tuple[int, ...]
    first_sample_id: int
    samples: int


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most probable id.
        top_k, top_p: keep the k most probable ids (0: all), the smallest set of this mass (1: all).
        max_tokens: of a completion, an end token included.
        stop: strings that end a completion once they stand in its text.
        seed: of the run. purpose: keeps training and evaluation apart.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int = 0
    purpose: str = "rollout"


class RolloutEngine(Protocol):
    """Draws completions with the policy's present weights."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """All samples of all prompts, ordered by sample id."""
        ...
