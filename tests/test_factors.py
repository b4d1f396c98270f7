"""Integers per row, limits of exactness, and products that are exact in any order."""

import pytest
import torch

from logra.optim import factors as factors_module
from logra.optim.factors import (
    check_exact,
    exact_products,
    gram,
    integer_product,
    max_integer,
    product_operand,
    quantise_rows,
    row_steps,
    update_square_norm,
)
from logra.sketch.projection import KINDS


def product(q: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return integer_product(q, product_operand(b, q))


def quantised(sketch: torch.Tensor, scales: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = row_steps(sketch, scales, bits)
    return quantise_rows(sketch, scales, steps, bits), steps


@pytest.mark.parametrize(("bits", "error"), [(8, 1e-2), (12, 6e-4), (16, 4e-5)])
def test_relative_error_of_the_integers(bits: int, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(64, 128, generator=generator) * torch.logspace(-12, 12, 64)[:, None]
    scales = torch.rand(128, generator=generator) + 0.5
    integers, steps = quantised(sketch, scales, bits)
    assert integers.dtype == (torch.int8 if bits == 8 else torch.int16)
    assert int(integers.to(torch.int32).abs().max()) == max_integer(bits)
    back = integers.double() * steps[:, None].double()
    wanted = sketch.double() * scales.double()
    assert float(((back - wanted).norm(dim=1) / wanted.norm(dim=1)).mean()) < error


def test_rows_without_direction_are_zero() -> None:
    sketch = torch.zeros(3, 4)
    sketch[1] = 1e-44  # subnormal: its inverse would be infinite
    sketch[2, 0] = 1.0
    integers, steps = quantised(sketch, torch.ones(4), 8)
    assert steps[:2].tolist() == [0.0, 0.0]
    assert integers.tolist() == [[0] * 4, [0] * 4, [127, 0, 0, 0]]


def test_limits_of_exactness_are_refused_with_the_largest_rank() -> None:
    check_exact(16, 512, 1)
    with pytest.raises(ValueError, match=r"rank 513 .*rank <= 512"):
        check_exact(16, 513, 1)
    check_exact(8, 256, 127)
    with pytest.raises(ValueError, match=r"127 exceeds 2\^24.*rank <= 64"):
        check_exact(12, 256, 127)


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_products_are_exact_in_any_order_blocking_and_thread_count(bits: int, kind: str) -> None:
    rank = min(96, 2**24 // (max_integer(bits) * KINDS[kind].max_entry))
    generator = torch.Generator().manual_seed(1)
    largest = max_integer(bits)
    q = torch.randint(-largest, largest + 1, (37, rank), generator=generator, dtype=torch.int16)
    q[0] = largest  # one row at the very limit
    q = q.to(torch.int8) if bits == 8 else q
    b = KINDS[kind](0, "group", 1, rank, 301).integers()
    wanted = (q.to(torch.int64) @ b.to(torch.int64)).double()
    with exact_products():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(product(q, b).double(), wanted)
            order = torch.randperm(rank, generator=generator)
            assert torch.equal(product(q[:, order].contiguous(), b[order].contiguous()).double(), wanted)
            parts = [product(q[:5], b), product(q[5:6], b), product(q[6:], b)]
            assert torch.equal(torch.cat(parts).double(), wanted)
    torch.set_num_threads(2)


def test_plain_fp32_factors_would_depend_on_the_order() -> None:
    """Why integers: the same product of rounded floats changes bits when its sum is reordered."""
    generator = torch.Generator().manual_seed(2)
    d, a = torch.randn(64, 96, generator=generator), torch.randn(96, 300, generator=generator)
    order = torch.randperm(96, generator=generator)
    assert not torch.equal(d @ a, d[:, order] @ a[order])


def test_exact_products_turns_fast_paths_off_and_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        q = torch.full((64, 64), 32767, dtype=torch.int16)
        b = torch.ones(64, 64, dtype=torch.int8)
        with torch.autocast("cpu", torch.bfloat16), exact_products():
            result = product(q, b)
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert result.dtype == torch.float32
        assert (result == 32767 * 64).all()
        assert torch.get_float32_matmul_precision() == "medium"
        with torch.autocast("cpu", torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_norm_of_the_update_without_building_it(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    projection = KINDS[kind](0, "group", 1, 12, 70)
    q = torch.randint(-127, 128, (33, 12), generator=generator, dtype=torch.int8)
    scales = torch.rand(33, generator=generator, dtype=torch.float64) * 1e-30
    dense = scales[:, None] * (q.double() @ projection.integers().double())
    got = update_square_norm(q, scales, gram(projection.integers()))
    assert abs(float(got) / float(dense.square().sum()) - 1) < 1e-6


def test_both_product_paths_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randint(-127, 128, (19, 7), dtype=torch.int8)
    b = KINDS["orthonormal"](0, "group", 1, 7, 45).integers()
    results = []
    for fast in (True, False):
        monkeypatch.setattr(factors_module, "_fast_integer_products", lambda fast=fast: fast)
        assert product_operand(b, q).dtype == (torch.int8 if fast else torch.float32)
        results.append(product(q, b))
    assert torch.equal(*results)


def test_exact_products_leaves_inherited_precision_inherited() -> None:
    backends = torch.backends
    before = backends.fp32_precision  # type: ignore[attr-defined]
    try:
        backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        with exact_products():
            assert backends.cuda.matmul.fp32_precision == "ieee"
        backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
        assert backends.cuda.matmul.fp32_precision == "ieee"
        assert backends.mkldnn.matmul.fp32_precision == "ieee"  # type: ignore[attr-defined]
    finally:
        backends.fp32_precision = before  # type: ignore[attr-defined]
