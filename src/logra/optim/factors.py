# SPDX-License-Identifier: Apache-2.0
"""Directions as integers, and the product that merges them exactly.

A direction D = diag(row_factors) S is stored as integers Q per row and one fp32 scale per row, and
A = diag(row_scales) B with integers B (`logra.sketch.projection`). The scales of A are folded into
S before rounding, so that

    D A  ~  diag(scales) (Q B),   Q B a sum of `rank` products of integers.

While rank x max|Q| x max|B| <= 2^24 that sum is exact in fp32 in any order: for every blocking,
shard, thread count and device. What follows it, M.mul_(scale) and W.sub_(M), are separate roundings
of single elements; fused forms (addmm, addcmul, sub(alpha=)) contract them and give other bits.
Source: section 3 of the design.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

EXACT_LIMIT = 2**24


def max_integer(bits: int) -> int:
    """Largest magnitude of a factor of `bits` bits."""
    return 2 ** (bits - 1) - 1


def check_exact(bits: int, rank: int, max_entry: int) -> None:
    """Refuse factors whose product with A could round in fp32.

    Raises:
        ValueError: rank x max|Q| x max|B| exceeds 2^24; the message gives the largest rank that fits.
    """
    largest = max_integer(bits) * max_entry
    if rank * largest > EXACT_LIMIT:
        raise ValueError(
            f"rank {rank} with factor_bits {bits} and a projection of integers up to {max_entry} cannot be merged "
            f"exactly: {rank} x {max_integer(bits)} x {max_entry} exceeds 2^24. Use rank <= {EXACT_LIMIT // largest}, "
            f"fewer factor_bits (8), or projection 'rademacher'."
        )


def row_steps(sketch: Tensor, projection_scales: Tensor, bits: int) -> Tensor:
    """What one unit of each row's integers stands for: fp32 [out_features], 0 for a row without direction.

    Args:
        sketch: S, [out_features, rank].
        projection_scales: row scales of A, [rank], folded into S before rounding.
        bits: 8, 12 or 16.
    """
    folded = sketch.to(torch.float32) * projection_scales
    steps = torch.linalg.vector_norm(folded, ord=float("inf"), dim=1) / max_integer(bits)
    # The inverse of a subnormal would be infinite; such a row is as good as zero.
    return torch.where(steps > torch.finfo(torch.float32).tiny, steps, 0.0)


def quantise_rows(sketch: Tensor, projection_scales: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Q, int8 or int16 [out_features, rank], with Q x steps[:, None] ~ S diag(projection_scales).

    Args:
        sketch: S, [out_features, rank].
        projection_scales: row scales of A, [rank].
        steps: what `row_steps` gave for the same S.
        bits: 8, 12 or 16.
    """
    inverse = torch.where(steps > 0, 1 / steps, 0.0)
    folded = (sketch.to(torch.float32) * projection_scales).mul_(inverse[:, None])
    folded.round_().clamp_(-max_integer(bits), max_integer(bits))
    return folded.to(torch.int8 if bits == 8 else torch.int16)


@contextmanager
def exact_products(device_type: str = "cpu") -> Iterator[None]:
    """fp32 matrix products that round only their result: autocast, TF32 and bf16 fast paths off."""
    backends: tuple[Any, ...] = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    inherited = torch.backends.fp32_precision  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = "none" if precision == inherited else precision


def product_operand(projection_integers: Tensor, factors: Tensor) -> Tensor:
    """B [rank, in_features] as `integer_product` multiplies `factors` by it: int8 where that is fast, else fp32."""
    if factors.dtype == torch.int8 and factors.device.type == "cpu" and _fast_integer_products():
        return projection_integers
    return projection_integers.to(torch.float32)


def integer_product(factors: Tensor, operand: Tensor) -> Tensor:
    """Q B in fp32, exact: [rows, in_features] from Q [rows, rank] and what `product_operand` gave for B.

    Call it inside `exact_products`. The int32 sums of the integer product are the same numbers as
    those of the fp32 product.
    """
    if operand.dtype == torch.int8:
        return torch._int_mm(factors, operand).to(torch.float32)
    return factors.to(torch.float32) @ operand


def _fast_integer_products() -> bool:
    """Whether the processor multiplies 8-bit integers natively; elsewhere torch falls back to a slow loop."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def update_square_norm(factors: Tensor, scales: Tensor, projection_gram: Tensor) -> Tensor:
    """||diag(scales) Q B||_F^2 = <(E G), E> with E = diag(scales) Q and G = B B^T: no dense matrix. fp64.

    Args:
        factors: Q, [out_features, rank].
        scales: fp64 [out_features].
        projection_gram: G, fp32 [rank, rank].
    """
    if not len(scales):
        return scales.new_zeros(())
    largest = scales.abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
    scaled = factors.to(torch.float32) * (scales / largest).to(torch.float32)[:, None]
    return ((scaled @ projection_gram) * scaled).sum(dtype=torch.float64) * largest.square()


def gram(projection_integers: Tensor) -> Tensor:
    """B B^T, fp32 [rank, rank]. Exact for signs up to 2^24 columns, fp32-rounded beyond."""
    wide = projection_integers.to(torch.float32)
    return wide @ wide.T
