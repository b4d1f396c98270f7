"""Advantages against loops over groups in plain Python."""

import math
import statistics

import pytest
import torch

from logra.rl.advantages import EPSILON, KINDS, RunningBaseline, groups_with_signal

SCORES = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.3, -0.2, 5.0]
GROUPS = [7, 7, 7, 2, 2, 2, 0, 0, 9]


def reference(kind: str) -> list[float]:
    out = []
    for i, (score, group) in enumerate(zip(SCORES, GROUPS, strict=True)):
        own = [s for s, g in zip(SCORES, GROUPS, strict=True) if g == group]
        others = [s for j, (s, g) in enumerate(zip(SCORES, GROUPS, strict=True)) if g == group and j != i]
        deviation = statistics.stdev(own) if len(own) > 1 else 0.0
        out.append(
            {
                "group_mean": score - statistics.mean(own),
                "group_normalised": (score - statistics.mean(own)) / (deviation + EPSILON),
                "leave_one_out": score - statistics.mean(others) if others else 0.0,
                "batch_normalised": (score - statistics.mean(SCORES)) / (statistics.stdev(SCORES) + EPSILON),
            }[kind]
        )
    return out


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_against_the_slow_reference(kind: str) -> None:
    got = KINDS[kind](torch.tensor(SCORES, dtype=torch.float64), torch.tensor(GROUPS))
    assert got.tolist() == pytest.approx(reference(kind), abs=1e-12)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equal_scores_give_no_advantage_and_no_nan(kind: str) -> None:
    for count in (1, 4):
        got = KINDS[kind](torch.full((count,), 0.7, dtype=torch.float64), torch.zeros(count, dtype=torch.int64))
        assert got.tolist() == pytest.approx([0.0] * count, abs=1e-9)


def test_running_baseline_uses_earlier_updates_only() -> None:
    baseline = RunningBaseline()
    first = torch.tensor([1.0, -0.01], dtype=torch.float64)
    assert baseline(first, torch.zeros(2)).tolist() == [1.0, -0.01]
    assert math.isclose(baseline.value, 0.1 * 0.495)
    second = torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert baseline(second, torch.zeros(2)).tolist() == pytest.approx([1 - 0.0495] * 2)
    assert math.isclose(baseline.value, 0.0495 + 0.1 * (1 - 0.0495))


def test_groups_without_signal_are_found_on_raw_scores() -> None:
    got = groups_with_signal(torch.tensor(SCORES, dtype=torch.float64), torch.tensor(GROUPS))
    assert got.tolist() == [True, True, True, False, False, False, True, True, False]
