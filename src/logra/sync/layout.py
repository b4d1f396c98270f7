# SPDX-License-Identifier: Apache-2.0
"""What all messages of a run have in common, told once to every replica: names, shapes, storages, how A is drawn."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

FORMAT = 1
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class WeightLayout:
    """One selected weight.

    Attributes:
        name: stable name of its module.
        rows, columns: out_features, in_features.
        rank: of its projection.
        group: name of its input group, which keys the projection.
        storage: "fp32", "split" or "bf16".
    """

    name: str
    rows: int
    columns: int
    rank: int
    group: str
    storage: str


@dataclass(frozen=True)
class WholeLayout:
    """A tensor that travels whole: name, dtype ("bf16" or "fp32") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of its values."""
        count = 1
        for size in self.shape:
            count *= size
        return count * (2 if self.dtype == "bf16" else 4)


@dataclass(frozen=True)
class Layout:
    """Of a run.

    Attributes:
        seed: of projections, rounding and dither.
        projection: kind of A.
        bits: of a factor's integers.
        compute: "bf16" or "fp32", what replicas compute in.
        weights: those that get factors, in the order of the messages.
        whole: tensors that travel whole with every message.
        frozen: (name, digest, shape) of the tensors that never change, as they compute; a replica must have the same.
    """

    seed: int
    projection: str
    bits: int
    compute: str
    weights: tuple[WeightLayout, ...]
    whole: tuple[WholeLayout, ...] = ()
    frozen: tuple[tuple[str, int, tuple[int, ...]], ...] = ()

    @cached_property
    def digest(self) -> int:
        """64 bits that every message carries, so that it is never read with another layout."""
        return int.from_bytes(hashlib.blake2b(self.to_json().encode(), digest_size=8).digest(), "little")

    def to_json(self) -> str:
        """As text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """From text.

        Raises:
            ValueError: it is of another format.
        """
        found: dict[str, Any] = json.loads(text)
        if found.pop("format", None) != FORMAT:
            raise ValueError(f"the layout is not of format {FORMAT}; trainer and replica need one version of logra")
        weights = tuple(WeightLayout(**each) for each in found.pop("weights"))
        whole = tuple(WholeLayout(each["name"], each["dtype"], tuple(each["shape"])) for each in found.pop("whole"))
        frozen = tuple((name, int(digest), tuple(shape)) for name, digest, shape in found.pop("frozen"))
        return cls(**found, weights=weights, whole=whole, frozen=frozen)

    def computing_dtype(self, weight: WeightLayout) -> torch.dtype:
        """Of the weight that a replica computes with; short storages have no other form."""
        return torch.float32 if self.compute == "fp32" and weight.storage == "fp32" else torch.bfloat16


def near_misses(name: str, known: Sequence[str]) -> str:
    """Names that resemble one that was not found, for messages."""
    import difflib

    near = difflib.get_close_matches(name, known, 3)
    return f"; near: {', '.join(near)}" if near else ""
