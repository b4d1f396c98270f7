"""RowAdam against a loop over rows in plain Python, and its edge cases."""

import math

import pytest
import torch

from logra.optim.row_adam import RowStatistics, next_second_moment, root_moment, row_factors

BETA2, EPS = 0.95, 1e-8


def reference(sketches: list[list[list[float]]], preserve: bool) -> list[list[float]]:
    """The direction after the last of several sketches, entry by entry, from section 2.2 of the design."""
    rows, rank = len(sketches[0]), len(sketches[0][0])
    v = [0.0] * rows
    for sketch in sketches:
        for i in range(rows):
            v[i] = BETA2 * v[i] + (1 - BETA2) * sum(entry**2 for entry in sketch[i]) / rank
    root = [math.sqrt(value / (1 - BETA2 ** len(sketches))) for value in v]
    eps = EPS * sum(root) / rows
    direction = [[entry / (root[i] + eps) if root[i] + eps else 0.0 for entry in sketches[-1][i]] for i in range(rows)]
    if preserve:
        before = math.sqrt(sum(entry**2 for row in sketches[-1] for entry in row))
        after = math.sqrt(sum(entry**2 for row in direction for entry in row))
        scale = before / after if after else 0.0
        direction = [[entry * scale for entry in row] for row in direction]
    return direction


def direction_after(sketches: list[torch.Tensor], preserve: bool) -> torch.Tensor:
    v = torch.zeros(len(sketches[0]), dtype=torch.float64)
    for sketch in sketches:
        v = next_second_moment(v, RowStatistics.of(sketch), BETA2)
    factors = row_factors([root_moment(v, len(sketches), BETA2)], EPS, [RowStatistics.of(sketches[-1])], preserve)[0]
    return factors[:, None] * sketches[-1]


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize(("rows", "rank"), [(5, 3), (1, 4), (40, 1), (2, 60)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e18])
def test_against_the_slow_reference(preserve: bool, rows: int, rank: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    sketches = [torch.randn(rows, rank, generator=generator) * scale * (1 + i) for i in range(4)]
    wanted = torch.tensor(reference([sketch.tolist() for sketch in sketches], preserve), dtype=torch.float64)
    assert torch.allclose(direction_after(sketches, preserve), wanted, rtol=1e-9, atol=0)


def test_preserved_norm_is_that_of_the_sketch() -> None:
    sketch = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 3, 20)[:, None]
    direction = direction_after([sketch], True)
    assert math.isclose(direction.norm(), sketch.norm(), rel_tol=1e-6)
    # After one update every row has the same root mean square.
    assert torch.allclose(direction.square().mean(1), direction.square().mean(), rtol=1e-4)


@pytest.mark.parametrize("preserve", [True, False])
def test_a_sketch_of_zeros_gives_zero_and_v_decays(preserve: bool) -> None:
    zeros = torch.zeros(4, 3)
    assert not direction_after([zeros], preserve).any()
    v = next_second_moment(torch.full((4,), 2.0, dtype=torch.float64), RowStatistics.of(zeros), BETA2)
    assert torch.allclose(v, torch.full((4,), 1.9, dtype=torch.float64))
    assert not (
        row_factors([root_moment(v, 7, BETA2)], EPS, [RowStatistics.of(zeros)], preserve)[0][:, None] * zeros
    ).any()


@pytest.mark.parametrize("preserve", [True, False])
def test_single_rows_of_zeros_stay_finite(preserve: bool) -> None:
    sketch = torch.zeros(4, 3)
    sketch[2] = 1e-20
    direction = direction_after([sketch], preserve)
    assert direction.isfinite().all()
    assert not direction[[0, 1, 3]].any()


def test_clipping_scales_the_moment_like_a_smaller_sketch() -> None:
    sketch = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    v = torch.ones(6, dtype=torch.float64)
    scaled = next_second_moment(v, RowStatistics.of(sketch), BETA2, 0.25)
    assert torch.allclose(scaled, next_second_moment(v, RowStatistics.of(sketch * 0.25), BETA2))
