"""Projections: golden digests, the promised second moment, rebuilding any part, what is kept."""

import hashlib
import logging
import math

import pytest
import torch

from logra.sketch.projection import KINDS, Gaussian, Orthonormal, Rademacher, usable_rank

GROUP = "model.layers.3.self_attn.q_proj|k_proj|v_proj"


@pytest.mark.parametrize(
    ("kind", "digest"),
    [("rademacher", "bff7e8e007eec8eb"), ("gaussian", "07c2388ac9cdd981"), ("orthonormal", "daec46d19c6ae199")],
)
def test_golden_digest(kind: str, digest: str) -> None:
    integers = KINDS[kind](11, GROUP, 5, 24, 203).integers()
    assert hashlib.sha256(integers.contiguous().numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_expected_gram_is_the_identity(kind: str) -> None:
    in_features, rank, draws = 40, 8, 3000
    total = torch.zeros(in_features, in_features, dtype=torch.float64)
    for update in range(draws):
        dense = KINDS[kind](0, "group", update, rank, in_features).dense(torch.float64)
        total += dense.T @ dense
    error = total / draws - torch.eye(in_features)
    # The entries of one draw have a standard deviation of at most about sqrt(3 / rank).
    assert error.abs().max() < 5 * math.sqrt(3 / rank / draws)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("rank", "in_features"), [(1, 1), (1, 9), (7, 7), (16, 129)])
def test_shapes_and_limits(kind: str, rank: int, in_features: int) -> None:
    projection = KINDS[kind](0, "group", 1, rank, in_features)
    integers = projection.integers()
    assert integers.shape == (rank, in_features)
    assert integers.dtype == torch.int8
    assert integers.to(torch.int32).abs().max() <= projection.max_entry
    assert projection.row_scales().shape == (rank,)
    assert projection.row_scales().dtype == torch.float32


def test_any_block_is_rebuilt_without_the_rest() -> None:
    for kind in (Rademacher, Gaussian):
        projection = kind(0, "group", 2, 20, 300)
        whole = projection.integers()
        block = kind.block(projection.stream, range(3, 11), range(16, 255))
        assert torch.equal(block, whole[3:11, 16:255])


def test_orthonormal_rows_are_orthogonal_to_eight_bits() -> None:
    rank, in_features = 24, 160
    dense = Orthonormal(0, "group", 1, rank, in_features).dense(torch.float64)
    gram = dense @ dense.T * (rank / in_features)
    # A rounding error of at most half a step of max/127 per entry, summed over independent entries.
    assert (gram - torch.eye(rank)).abs().max() < 0.01


def test_gaussian_entries_have_the_moments_of_a_normal() -> None:
    integers = Gaussian(0, "group", 1, 64, 4096).integers().double()
    assert abs(integers.mean()) < 0.02
    assert abs(integers.var() - 8) < 0.1
    assert abs((integers**4).mean() / integers.var() ** 2 - 3) < 0.1


def test_signs_are_kept_as_bits_and_nothing_before_use() -> None:
    projection = Rademacher(0, "group", 1, 64, 1000)
    assert projection.kept_bytes() == 0
    projection.integers()
    assert projection.kept_bytes() == 64 * 125


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_seed_group_and_update_each_change_it(kind: str) -> None:
    make = KINDS[kind]
    base = make(0, "group", 1, 16, 128).integers()
    assert torch.equal(base, make(0, "group", 1, 16, 128).integers())
    for other in (make(1, "group", 1, 16, 128), make(0, "other", 1, 16, 128), make(0, "group", 2, 16, 128)):
        assert not torch.equal(base, other.integers())


def test_rank_above_in_features_becomes_in_features_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert usable_rank(256, 96, "mlp.down_proj") == 96
    assert "mlp.down_proj" in caplog.text
    assert "96" in caplog.text
    assert usable_rank(96, 96, "x") == 96
