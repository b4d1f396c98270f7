"""Rounding against exact rational arithmetic, and storages that take steps below their own grid."""

import math

import pytest
import torch
from torch import Tensor, nn

from logra.optim import merge as merge_module
from logra.optim import rounding
from logra.optim.factors import exact_products
from logra.optim.merge import LayerStep, RealisedShare, merge
from logra.optim.rounding import WeightBits, dither_to_split, floor_to_bf16, nearest_24_bits, read_split, round_to_split
from logra.optim.storage import WeightStorage, make_storages
from logra.random_bits import Purpose
from logra.sketch.hooks import attach

BITS = WeightBits(0, "layer")
KINDS = ["fp32", "fp32 dithered", "split", "bf16"]


@pytest.fixture(params=["plain"] if rounding.native is None else ["native", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(rounding, "native", None)
    return request.param


def values(rows: int = 17, columns: int = 93) -> Tensor:
    """Both signs, many magnitudes, exact powers of two and their neighbours."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(rows, columns, generator=generator) * torch.logspace(-8, 4, columns)
    out[0, :8] = torch.tensor([1.0, -1.0, 0.0, 2.0**-20, 1 - 2**-24, -(1 - 2**-24), 3.0, 1.9999999])
    return out


def make(kind: str, weight: Tensor, transposed: bool = False) -> WeightStorage:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.clone())
    (sketch,) = attach(nn.Sequential(layer), "all-linear", rank=4)
    return make_storages([sketch], kind.split()[0], 0, "dithered" in kind)[sketch.name]


def ulp16(value: Tensor) -> Tensor:
    """The spacing of bf16 at `value`, in fp64."""
    exponent = torch.frexp(value.double().abs().clamp_min(2.0**-126))[1] - 1
    return 2.0 ** (exponent - 7).double()


@pytest.mark.parametrize("purpose", [Purpose.DITHER, Purpose.ROUNDING])
def test_floor_to_bf16_against_exact_arithmetic(path: str, purpose: Purpose) -> None:
    value = values()
    rows = range(3, 20)
    kept = value.clone()
    got = floor_to_bf16(value, BITS, rows, purpose, 9)
    assert torch.equal(value, kept)
    u = BITS.lanes(purpose, 9, rows, value, 16).double() / 65536
    spacing = ulp16(value)
    magnitude = torch.floor((value.double().abs() / spacing) + u) * spacing
    assert torch.equal(got.double(), torch.copysign(magnitude, value.double()))


def test_split_rounds_to_24_bits_and_reads_back(path: str) -> None:
    value = values()
    rows = range(5, 22)
    exact = value.double().clone()
    noise = BITS.lanes(Purpose.ROUNDING, 4, rows, value, 8).double() / 256
    dither = BITS.lanes(Purpose.DITHER, 0, rows, value, 8).double() / 256
    upper, low = round_to_split(value, BITS, rows, 4)
    spacing = ulp16(exact) / 256
    kept = torch.copysign(torch.floor(exact.abs() / spacing + noise) * spacing, exact)
    assert torch.equal(value.double(), kept)
    assert torch.equal(read_split(upper, low, BITS, rows), value)
    again = ulp16(kept)
    assert torch.equal(upper.double(), torch.copysign(torch.floor(kept.abs() / again + dither) * again, exact))


def test_native_and_plain_rounding_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for native in (rounding.native, None):
        monkeypatch.setattr(rounding, "native", native)
        value = values(700, 101)
        upper, low = round_to_split(value, BITS, range(700), 2)
        floored = floor_to_bf16(values(700, 101), BITS, range(700), Purpose.ROUNDING, 2)
        results.append((value, upper, low, read_split(upper, low, BITS, range(700)), floored))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nearest_24_bits_is_nearest_with_ties_to_even() -> None:
    value = values()
    spacing = ulp16(value) / 256
    assert torch.equal(nearest_24_bits(value).double(), torch.round(value.double() / spacing) * spacing)


def test_a_bf16_checkpoint_is_left_untouched_and_dither_stays_within_an_ulp() -> None:
    checkpoint = values().bfloat16()
    for kind in ("split", "bf16"):
        assert torch.equal(make(kind, checkpoint).layer.weight, checkpoint)
    upcast = make("fp32 dithered", checkpoint.float())
    assert upcast.layer.compute_copy is not None
    assert torch.equal(upcast.layer.compute_copy, checkpoint)
    whole = range(17)
    block = make("split", values()).read(whole)
    assert ((block.computing().double() - block.stored.double()).abs() <= ulp16(block.stored)).all()
    upper, low = dither_to_split(nearest_24_bits(values()), BITS, whole)
    assert torch.equal(read_split(upper, low, BITS, whole), nearest_24_bits(values()))


@pytest.mark.parametrize("kind", ["split", "bf16"])
def test_stochastic_rounding_is_unbiased(kind: str) -> None:
    """The mean of many roundings of one number is that number."""
    weight = torch.full((64, 512), 0.0203)
    storage = make(kind, weight.bfloat16())
    spacing = float(ulp16(weight)[0, 0]) / (256 if kind == "split" else 1)
    target = storage.read(range(64)).stored.clone() + 0.3 * spacing
    after = storage.rounded(range(64), target.clone(), 1).stored
    share = float((after - storage.read(range(64)).stored).double().mean()) / spacing
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / weight.numel())


def low_rank_step(rows: int, columns: int, rms: float, seed: int, update: int) -> LayerStep:
    """One random step of the given root mean square per entry."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (rows, 8), generator=generator, dtype=torch.int8)
    b = (torch.randint(0, 2, (8, columns), generator=generator) * 2 - 1).to(torch.int8)
    unit = float((q.float() @ b.float()).square().mean().sqrt())
    return LayerStep(q, b, torch.full((rows,), rms / unit), 1.0, update)


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_equal_tiny_steps_arrive(kind: str) -> None:
    """Steps of rms 1e-6 on weights of sd 0.02, a thousandth of the grid of bf16 there."""
    torch.manual_seed(0)
    start = (torch.randn(64, 256) * 0.02).bfloat16()
    storage = make(kind, start.float() if kind.startswith("fp32") else start)
    before = storage.read(range(64))
    first, first_computing = before.stored.double().clone(), before.computing().double()
    with exact_products():
        for update in range(1, 201):
            merge(storage, low_rank_step(64, 256, 1e-6, 0, update))
        intended = -200 * low_rank_step(64, 256, 1e-6, 0, 1).move(range(64)).double()
    after = storage.read(range(64))

    def share(change: Tensor) -> float:
        return float((change * intended).sum() / intended.square().sum())

    assert abs(share(after.stored.double() - first) - 1) < 0.1
    if kind != "fp32":
        assert abs(share(after.computing().double() - first_computing) - 1) < 0.1
    noise = (after.stored.double() - first - intended).norm() / intended.norm()
    if kind == "split":
        assert noise < 0.1
    elif kind.startswith("fp32"):
        assert noise < 1e-3


def test_plain_nearest_rounding_fails_the_same_steps() -> None:
    """The control of the test above: without stochastic rounding almost nothing arrives."""
    torch.manual_seed(0)
    weight = (torch.randn(64, 256) * 0.02).bfloat16()
    first = weight.double()
    with exact_products():
        move = low_rank_step(64, 256, 1e-6, 0, 1).move(range(64))
    for _ in range(200):
        weight = (weight.float() - move).bfloat16()
    intended = -200 * move.double()
    assert float(((weight.double() - first) * intended).sum() / intended.square().sum()) < 0.5


def test_first_step_from_a_bf16_checkpoint_realises_all_of_itself_only_with_dither() -> None:
    torch.manual_seed(1)
    checkpoint = (torch.randn(256, 512) * 0.02).bfloat16()
    shares = {}
    for kind in ("fp32", "fp32 dithered", "split"):
        storage = make(kind, checkpoint if kind == "split" else checkpoint.float())
        share = RealisedShare.zero(torch.device("cpu"))
        with exact_products():
            merge(storage, low_rank_step(256, 512, 0.02 * 2e-5, 0, 1), share)
        shares[kind] = float(share.compute / share.intended)
    assert abs(shares["split"] - 1) < 0.15
    assert abs(shares["fp32 dithered"] - 1) < 0.15
    assert shares["fp32"] < 0.75


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [1.0, 0.999])
def test_two_holders_with_other_blocks_shards_and_threads_stay_equal_bit_for_bit(
    kind: str, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    start = torch.randn(50, 130) * 0.02
    start = start if kind.startswith("fp32") else start.bfloat16()
    holders = [make(kind, start) for _ in range(3)]
    for update in range(1, 6):
        step = low_rank_step(50, 130, 1e-4, update, update)
        step = LayerStep(step.factors, step.projection_integers, step.scales, decay, update)
        with exact_products():
            for holder, block, threads in zip(holders, (1 << 19, 130 * 7, 1), (2, 1, 3), strict=True):
                torch.set_num_threads(threads)
                monkeypatch.setitem(merge_module.BLOCK_ELEMENTS, "cpu", block)
                merge(holder, step, RealisedShare.zero(torch.device("cpu")) if block == 1 else None)
    torch.set_num_threads(2)
    blocks = [holder.read(range(50)) for holder in holders]
    for other in blocks[1:]:
        assert torch.equal(other.stored, blocks[0].stored)
        assert torch.equal(other.computing(), blocks[0].computing())
    assert not torch.equal(blocks[0].stored, start.float())


def test_decay_comes_first_as_one_rounded_product() -> None:
    storage = make("fp32", values())
    step = low_rank_step(17, 93, 1e-3, 0, 1)
    decay = float(torch.tensor(0.9873, dtype=torch.float32))
    before = storage.read(range(17)).stored.clone()
    with exact_products():
        merge(storage, LayerStep(step.factors, step.projection_integers, step.scales, decay, 1))
        move = step.move(range(17))
    assert torch.equal(storage.read(range(17)).stored, before * decay - move)


def test_transposed_weights_take_the_same_step() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    weight = torch.randn(12, 20) * 0.02
    for kind in KINDS:
        plain = make(kind, weight if kind.startswith("fp32") else weight.bfloat16())
        conv = Conv1D(12, 20)
        conv.weight = nn.Parameter(plain.layer.weight.detach().T.contiguous())
        (sketch,) = attach(nn.Sequential(conv), "all-linear", rank=4)
        turned = make_storages([sketch], kind.split()[0], 0, "dithered" in kind)[sketch.name]
        with exact_products():
            for storage in (plain, turned):
                merge(storage, low_rank_step(12, 20, 1e-4, 0, 1))
        assert torch.equal(turned.layer.weight.T, plain.layer.weight)
        assert turned.layer.weight.is_contiguous()
        assert torch.equal(turned.read(range(12)).computing(), plain.read(range(12)).computing())
