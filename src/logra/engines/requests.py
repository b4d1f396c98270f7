# SPDX-License-Identifier: Apache-2.0
"""What an engine in another process is asked, and what it answers, as bytes: JSON, nothing that is executed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from logra.rl.batch import Sample, sample_of
from logra.rollout.engine import Prompt, Sampling

MAGIC = b"LoGRAgen"


class EngineError(ValueError):
    """An engine that is well cannot do what it was asked."""


@dataclass(frozen=True)
class Request:
    """Prompts to be completed, and how."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    update: int

    def to_bytes(self) -> bytes:
        """As it travels."""
        return MAGIC + json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Request":
        """As it came."""
        found: dict[str, Any] = json.loads(data[len(MAGIC) :])
        prompts = tuple(Prompt(**(each | {"ids": tuple(each["ids"])})) for each in found["prompts"])
        sampling = Sampling(**(found["sampling"] | {"stop": tuple(found["sampling"]["stop"])}))
        return cls(prompts, sampling, found["update"])


def is_request(data: bytes) -> bool:
    """Whether this is one."""
    return data[: len(MAGIC)] == MAGIC


@dataclass(frozen=True)
class Completions:
    """What an engine drew.

    Attributes:
        version: of the weights that drew it.
        samples: of all prompts.
        error: why there are none, or None.
    """

    version: int | None
    samples: Sequence[Sample] = ()
    error: str | None = None

    def to_bytes(self) -> bytes:
        """As it travels; log-probabilities keep all their digits."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Completions":
        """As it came."""
        found: dict[str, Any] = json.loads(data)
        return cls(found["version"], [sample_of(each) for each in found["samples"]], found["error"])
