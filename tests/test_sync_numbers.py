"""The numbers that travel and are compared: messages, digests, slices, low halves, sparse patches."""

import pytest
import torch

from logra.native import native
from logra.optim.digest import MASK, digest_of, name_key
from logra.sync import held as held_module
from logra.sync.full import full_pieces
from logra.sync.held import HeldWeight, Slice
from logra.sync.layout import Layout, WeightLayout
from logra.sync.message import DamagedMessage, Factors, SyncMessage, decode, encode, message_bytes
from logra.sync.replica import Replica
from logra.sync.sparse_patch import patched, sparse_patch


def test_a_message_keeps_every_number() -> None:
    weight = WeightLayout("a.b", 5, 9, 3, "a", "fp32")
    for bits in (8, 12, 16):
        layout = Layout(7, "rademacher", bits, "fp32", (weight, WeightLayout("c", 2, 2, 1, "c", "bf16")))
        top = 2 ** (bits - 1) - 1
        integers = torch.tensor([[top, -top, 0], [1, -1, 2], [-2, 3, -3], [top, top, -top], [0, 0, 1]])
        given = SyncMessage(4, 3, 9, {"a.b": Factors(integers, torch.rand(5), 0.5)}, {})
        data = encode(layout, given)
        assert len(data) == message_bytes(layout)
        found = decode(layout, data)
        assert (found.version, found.base, found.update) == (4, 3, 9)
        assert set(found.steps) == {"a.b"}
        assert torch.equal(found.steps["a.b"].integers.to(torch.int64), integers)
        assert torch.equal(found.steps["a.b"].scales, given.steps["a.b"].scales)
        assert found.steps["a.b"].decay_factor == 0.5
        for place in range(0, len(data), 7):
            broken = bytearray(data)
            broken[place] ^= 16
            with pytest.raises(DamagedMessage):
                decode(layout, bytes(broken))
        for cut in (data[:-1], data[:10], b"", data + b"x"):
            with pytest.raises(DamagedMessage, match="bytes"):
                decode(layout, cut)
        other = Layout(8, "rademacher", bits, "fp32", layout.weights)
        with pytest.raises(DamagedMessage, match="other weights or settings"):
            decode(other, data)


def test_slices_of_a_weight_come_to_the_same_bits_and_digest() -> None:
    """Rows inside a fused tensor, and two tensor-parallel parts by rows and by columns, with other blocks."""
    generator = torch.Generator().manual_seed(0)
    for storage, dtype in (
        ("fp32", torch.float32),
        ("fp32", torch.bfloat16),
        ("split", torch.bfloat16),
        ("bf16", torch.bfloat16),
    ):
        compute = "fp32" if dtype == torch.float32 else "bf16"
        layout = Layout(3, "rademacher", 8, compute, (WeightLayout("w", 24, 40, 8, "w", storage),))
        start = torch.randn(24, 40, generator=generator).to(torch.bfloat16).to(torch.float32)
        fused = torch.zeros(60, 40, dtype=dtype)
        parts = {
            "whole": [Slice(torch.zeros(24, 40, dtype=dtype), range(24), range(40))],
            "fused": [Slice(fused[10:34], range(24), range(40))],
            "rows": [Slice(torch.zeros(12, 40, dtype=dtype), range(k, k + 12), range(40)) for k in (0, 12)],
            "columns": [Slice(torch.zeros(24, 20, dtype=dtype), range(24), range(k, k + 20)) for k in (0, 20)],
            "uneven": [
                Slice(torch.zeros(24, n, dtype=dtype), range(24), range(k, k + n)) for k, n in ((0, 13), (13, 27))
            ],
        }
        replicas = {name: [Replica(layout, {"w": [one]}, {}) for one in each] for name, each in parts.items()}
        for piece in full_pieces(layout, 0, {"w": start}.__getitem__):
            for each in replicas.values():
                for replica in each:
                    replica.handle(piece)
        for version in range(1, 9):
            integers = torch.randint(-127, 128, (24, 8), generator=generator)
            step = Factors(integers, torch.rand(24, generator=generator) * 1e-4, 0.999)
            data = encode(layout, SyncMessage(version, version - 1, version, {"w": step}, {}))
            digests = {}
            for name, each in replicas.items():
                answers = [replica.handle(data) for replica in each]
                assert all(answer.refusal is None for answer in answers)
                digests[name] = sum(answer.digest or 0 for answer in answers) & MASK
            assert len(set(digests.values())) == 1, digests
        whole = parts["whole"][0].computing
        assert torch.equal(fused[10:34], whole)
        assert not fused[:10].any()
        assert not fused[34:].any()
        assert torch.equal(torch.cat([each.computing for each in parts["rows"]]), whole)
        assert torch.equal(torch.cat([each.computing for each in parts["uneven"]], 1), whole)


def test_the_kept_low_half_gives_every_fp32_value_back() -> None:
    bits = torch.arange(0x3F800000 - 0x18000, 0x3F800000 + 0x28000, dtype=torch.int32)
    values = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)]).view(8, -1)
    held = HeldWeight(
        WeightLayout("w", 8, values.shape[1], 1, "w", "fp32"),
        Slice(torch.zeros_like(values, dtype=torch.bfloat16), range(8), range(values.shape[1])),
        0,
    )
    held.load(values)
    assert torch.equal(held.held.computing, values.to(torch.bfloat16))
    got = torch.cat([held._read(rows) for rows in held.blocks()])
    assert torch.equal(got.view(torch.int32), values.view(torch.int32))


def test_the_digest_is_that_of_a_slow_sum() -> None:
    values = torch.randn(3, 5).to(torch.bfloat16)
    key, total = name_key("layer"), 0
    for place, bits in enumerate((values.view(torch.int16).to(torch.int64) & 0xFFFF).flatten().tolist()):
        mixed = (key + place * 0x9E3779B97F4A7C15 + bits * 0xC2B2AE3D27D4EB4F) & MASK
        mixed ^= mixed >> 32
        mixed = (mixed * 0xD6E8FEB86659FD93) & MASK
        total += mixed ^ (mixed >> 29)
    whole = digest_of(values, key, range(3), range(5), 5)
    assert whole == total & MASK
    parts = [
        digest_of(values[:, c].contiguous(), key, range(3), range(c.start, c.stop), 5)
        for c in (slice(0, 2), slice(2, 5))
    ]
    assert sum(parts) & MASK == whole
    assert digest_of(values.flip(1), key, range(3), range(5), 5) != whole
    assert digest_of(values, name_key("other"), range(3), range(5), 5) != whole


def test_the_plain_digest_is_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import logra.optim.digest as module

    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(70, 130).to(dtype)
        arguments = (values, name_key("w"), range(5, 75), range(3, 133), 150)
        compiled = digest_of(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(module, "native", None)
            patch.setattr(module, "_PLAIN_ENTRIES", 1000)
            assert digest_of(*arguments) == compiled


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 1.0])
def test_a_sparse_patch_loses_nothing(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(700, 400, generator=generator).to(torch.bfloat16)
    changes = torch.rand(700, 400, generator=generator) < share
    after = torch.where(changes, before * 1.5 + 1, before)
    if share:
        after.view(-1)[[0, -1]] = 7.0
    patch = sparse_patch(before, after)
    assert torch.equal(patched(before, patch), after)
    assert len(patch) <= 3.5 * int((before != after).sum()) + 200


@pytest.mark.skipif(native is None, reason="the compiled helper was not built")
def test_the_compiled_helper_keeps_the_same_low_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random values, all of a range, and far more ties than are expected; written by one way, read by the other."""
    generator = torch.Generator().manual_seed(0)
    ties = torch.full((64, 4096), 0x3F818000, dtype=torch.int32).view(torch.float32)
    some = torch.randn(64, 4096, generator=generator)
    every = torch.arange(0x3F800000, 0x3F800000 + 64 * 4096, dtype=torch.int32).view(torch.float32).view(64, 4096)
    for values in (some, every, -every, ties):
        held = {}
        for way, compiled in (("native", native), ("plain", None)):
            monkeypatch.setattr(held_module, "native", compiled)
            computing = torch.zeros(64, 4096, dtype=torch.bfloat16)
            one = HeldWeight(WeightLayout("w", 64, 4096, 1, "w", "fp32"), Slice(computing, range(64), range(4096)), 0)
            one.load(values)
            held[way] = one
        low = {way: one.low for way, one in held.items()}
        assert low["native"] is not None
        assert low["plain"] is not None
        assert torch.equal(low["native"], low["plain"])
        assert torch.equal(held["native"].held.computing, held["plain"].held.computing)
        for rows in held["plain"].blocks():
            mine, theirs = (held[way]._ties.get(rows.start, torch.zeros(0)) for way in ("native", "plain"))
            assert mine.sort().values.tolist() == theirs.tolist()
        for reader, compiled in (("plain", native), ("native", None)):
            monkeypatch.setattr(held_module, "native", compiled)
            got = torch.cat([held[reader]._read(rows) for rows in held[reader].blocks()])
            assert torch.equal(got.view(torch.int32), values.view(torch.int32))
