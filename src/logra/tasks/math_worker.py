# SPDX-License-Identifier: Apache-2.0
"""math-verify, for the grading process alone: what it is given has passed the guards of `logra.tasks.math_answers`."""

from functools import cache
from typing import Any


@cache
def _configs() -> list[Any]:
    import logging
    import warnings

    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return [LatexExtractionConfig(), ExprExtractionConfig()]


def _parsed(text: str) -> Any:
    from math_verify import parse

    return parse(f"$${text}$$", _configs(), parsing_timeout=None) or parse(text, _configs(), parsing_timeout=None)


def same_answer(request: tuple[str, str]) -> tuple[bool, bool]:
    """Whether gold and answer are the same, and whether the answer could be read at all."""
    from math_verify import verify

    gold, answer = request
    read = _parsed(answer)
    if not read:
        return False, False
    return bool(verify(_parsed(gold), read, float_rounding=15, timeout_seconds=None)), True


def warm_up() -> None:
    """Import everything and use it once, so that the first request is not charged for it."""
    for gold, answer in (("1", "2"), ("x^2+2x+1", "(x+1)^2"), ("\\frac{\\sqrt{3}}{2}", "\\{1,2\\}")):
        same_answer((gold, answer))
