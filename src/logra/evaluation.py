# SPDX-License-Identifier: Apache-2.0
"""Scores on held-out problems: pass@1 as the mean over samples, unbiased pass@k, majority vote."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from logra.rl.batch import Sample
from logra.tasks.answers import final_answer


@dataclass(frozen=True)
class EvaluationResult:
    """Means over problems.

    Attributes:
        pass_at_1: mean share of right samples; None if no sample has a verdict.
        pass_at_k: k -> unbiased chance that at least one of k samples is right, for k = 2, 4, ..., of problems with at
            least k verdicts.
        majority: share of problems whose most frequent final answer is right; None with one sample.
        problems: how many have a verdict.
        ungraded: samples without a verdict, left out everywhere.
    """

    pass_at_1: float | None
    pass_at_k: dict[int, float]
    majority: float | None
    problems: int
    ungraded: int


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate from `right` of `samples` (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}; it must be from 1 to the number of samples, {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def evaluate(samples: Sequence[Sample], scores: Sequence[float | None]) -> EvaluationResult:
    """Summarise scored samples; a sample is right at a score of 1 or more."""
    verdicts: dict[int, list[bool]] = defaultdict(list)
    answers: dict[int, list[tuple[str, bool]]] = defaultdict(list)
    for sample, score in zip(samples, scores, strict=True):
        if score is not None:
            verdicts[sample.group_id].append(score >= 1)
            answers[sample.group_id].append((final_answer(sample.text), score >= 1))
    ungraded = sum(score is None for score in scores)
    if not verdicts:
        return EvaluationResult(None, {}, None, 0, ungraded)
    most = max(map(len, verdicts.values()))
    sizes = [2**power for power in range(1, 20) if 2**power <= most]
    mean = sum(sum(each) / len(each) for each in verdicts.values()) / len(verdicts)
    curve = {k: _mean([pass_at_k(len(v), sum(v), k) for v in verdicts.values() if len(v) >= k]) for k in sizes}
    several = [each for each in answers.values() if len(each) > 1]
    majority = _mean([_majority_is_right(each) for each in several]) if several else None
    return EvaluationResult(mean, curve, majority, len(verdicts), ungraded)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _majority_is_right(answers: list[tuple[str, bool]]) -> bool:
    """Whether the most frequent answer (the first of equals) is right."""
    counts = Counter(answer for answer, _ in answers)
    winner = max(counts, key=lambda answer: counts[answer])
    return dict(answers)[winner]
