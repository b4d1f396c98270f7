# SPDX-License-Identifier: Apache-2.0
"""The text of a completion, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any


def stop_place(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins; None if none is there."""
    found = [text.find(each) for each in stop]
    return min((place for place in found if place >= 0), default=None)


def text_of(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> str:
    """Without special tokens, up to the stop string."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text[: stop_place(text, stop)]
