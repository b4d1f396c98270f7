"""Messages and replicas: equal bits after every update, nothing silent when something goes wrong."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from logra.config import LograSettings
from logra.optim.digest import MASK, digest_of, name_key
from logra.optim.optimizer import LograOptimizer
from logra.sync.full import full_pieces
from logra.sync.fused import fused_slices
from logra.sync.held import HeldWeight, Slice
from logra.sync.layout import Layout, WeightLayout
from logra.sync.message import DamagedMessage, Factors, SyncMessage, decode, encode, message_bytes
from logra.sync.replica import Answer, Replica, slices_of, tensors_of
from logra.sync.sender import Sender, SyncLost
from logra.sync.source import FactorSource, WholeSource
from logra.sync.sparse_patch import patched, sparse_patch
from tests.conftest import loss_of, tiny_gpt2, tiny_llama


class Near:
    """A replica in this process, with faults between: `faults` maps the number of an ask to a function of the bytes."""

    name = "near"

    def __init__(self, make: Any) -> None:
        self.make, self.replica, self.asks = make, make(), 0
        self.faults: dict[int, Any] = {}

    def ask(self, data: bytes, seconds: float) -> bytes:
        self.asks += 1
        fault = self.faults.get(self.asks)
        if fault is not None:
            data = fault(data)
        return self.replica.handle(data).to_bytes()

    def open(self, layout: str, seconds: float) -> None:
        self.replica = self.make()


def pair(
    compute: str, make: Any = tiny_llama, **changes: Any
) -> tuple[Any, LograOptimizer, FactorSource, Near, list[Any]]:
    model = make()
    if changes.get("storage") in ("split", "bf16"):
        model = model.to(torch.bfloat16)
    models: list[Any] = []
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    start = copy.deepcopy(model)
    settings: dict[str, Any] = {"rank": 8, "step_size": "lr", "lr": 3e-3, "targets": "all-linear"}
    optimizer = LograOptimizer(model, LograSettings(**(settings | changes)))
    source = FactorSource(optimizer, model, compute)

    def replica() -> Replica:
        models.append(copy.deepcopy(start).to(dtype))
        layout = Layout.from_json(source.layout.to_json())
        tensors = tensors_of(models[-1])
        return Replica(layout, slices_of(models[-1]), tensors, frozen=tensors)

    return model, optimizer, source, Near(replica), models


def assert_equal(model: Any, replica: Any, optimizer: LograOptimizer, compute: str) -> None:
    """The replica computes with what the trainer computes with."""
    for name, value in model.named_parameters():
        wanted = value.to(torch.bfloat16) if compute == "bf16" else value
        assert torch.equal(replica.get_parameter(name).to(wanted.dtype), wanted), name


CASES = [
    ("bf16", tiny_llama, {"storage": "fp32"}),
    ("fp32", tiny_llama, {"storage": "fp32", "factor_bits": 12}),
    ("bf16", tiny_llama, {"storage": "split", "projection": "gaussian"}),
    ("bf16", tiny_llama, {"storage": "bf16", "factor_bits": 16}),
    ("fp32", tiny_gpt2, {"storage": "fp32", "weight_decay": 0.1}),
    ("fp32", tiny_llama, {"storage": "fp32", "others": "adamw", "others_lr": 1e-3}),
]


@pytest.mark.parametrize(("compute", "make", "changes"), CASES)
def test_a_replica_has_the_trainers_bits_after_every_update(
    compute: str, make: Any, changes: dict[str, Any], tokens: Tensor
) -> None:
    model, optimizer, source, link, models = pair(compute, make, **changes)
    sender = Sender(source, [link])
    assert sender.anchor().full == {"near": "start"}
    for _ in range(12):
        loss_of(model, tokens).backward()
        optimizer.step()
        report = sender.sync()
        assert not report.full
        assert report.bytes == message_bytes(source.layout)
        assert link.replica.digest == source.digest()
    assert_equal(model, models[-1], optimizer, compute)


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


def raises(error: BaseException) -> Any:
    def fault(data: bytes) -> bytes:
        raise error

    return fault


def flipped(data: bytes) -> bytes:
    broken = bytearray(data)
    broken[len(broken) // 2] ^= 1
    return bytes(broken)


FAULTS = {
    "lost": (raises(TimeoutError()), "no answer within"),
    "truncated": (lambda data: data[:100], "bytes"),
    "flipped": (flipped, "checksum"),
    "gone": (raises(ConnectionResetError("closed")), "no answer"),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_ends_with_equal_bits(fault: str, tokens: Tensor) -> None:
    model, optimizer, source, link, models = pair("bf16")
    sender = Sender(source, [link])
    sender.anchor()
    break_it, told = FAULTS[fault]
    for update in range(1, 6):
        loss_of(model, tokens).backward()
        optimizer.step()
        if update == 3:
            link.faults[link.asks + 1] = break_it
        report = sender.sync()
        assert bool(report.full) == (update == 3)
        if update == 3:
            assert told in report.full["near"]
        assert link.replica.digest == source.digest()
        assert link.replica.version == source.version
    assert_equal(model, models[-1], optimizer, "bf16")


def test_a_repeated_message_changes_nothing_and_a_gap_is_refused(tokens: Tensor) -> None:
    model, optimizer, source, link, _ = pair("bf16")
    Sender(source, [link]).anchor()
    messages = []
    for _ in range(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        messages.append(source.message()[0])
    first = link.replica.handle(messages[0])
    assert first.refusal is None
    again = link.replica.handle(messages[0])
    assert again == Answer(1, first.digest, "the message follows version 0, this replica has 1")
    assert "follows version 2, this replica has 1" in (link.replica.handle(messages[2]).refusal or "")
    assert link.replica.handle(messages[1]).version == 2
    fresh = link.make()
    assert "no whole state" in (fresh.handle(messages[2]).refusal or "")


def test_weights_changed_behind_the_replica_are_found(tokens: Tensor) -> None:
    model, optimizer, source, link, models = pair("bf16")
    sender = Sender(source, [link])
    sender.anchor()
    with torch.no_grad():
        models[-1].model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    loss_of(model, tokens).backward()
    optimizer.step()
    assert "its weights differ at version 1" in sender.sync().full["near"]
    assert_equal(model, models[-1], optimizer, "bf16")


def test_a_replica_that_never_comes_right_is_given_up(tokens: Tensor) -> None:
    model, optimizer, source, link, _ = pair("bf16")
    sender = Sender(source, [link], seconds=0.1)
    sender.anchor()
    loss_of(model, tokens).backward()
    optimizer.step()
    link.faults = {ask: raises(TimeoutError()) for ask in range(link.asks + 1, link.asks + 999)}
    with pytest.raises(SyncLost, match=r"near does not come to version 1 after 3 full states .*within 0.1 s"):
        sender.sync()


def test_a_model_without_the_trainers_weights_is_refused() -> None:
    _, _, source, _, _ = pair("bf16")
    other = tiny_llama(layers=1)
    with pytest.raises(ValueError, match=r"7 of 14 weights .* such as 'model.layers.1.self_attn.q_proj'; near: "):
        Replica(source.layout, slices_of(other), tensors_of(other))


def test_full_state_comes_again_when_due_and_dense_methods_use_the_same_way(tokens: Tensor) -> None:
    model = tiny_llama(tied=True)
    source = WholeSource(lambda: dict(model.named_parameters()), "bf16")
    replica_model = copy.deepcopy(model).to(torch.bfloat16)
    link = Near(lambda: Replica(source.layout, {}, tensors_of(replica_model)))
    sender = Sender(source, [link], full_every=2)
    sender.anchor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for update in range(1, 5):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bool(sender.sync().full) == (update % 2 == 0)
        assert link.replica.digest == source.digest()
    for name, value in model.named_parameters():
        assert torch.equal(replica_model.get_parameter(name), value.to(torch.bfloat16))
    assert replica_model.lm_head.weight is replica_model.model.embed_tokens.weight


def test_steps_of_size_zero_leave_the_replica_as_it_is(tokens: Tensor) -> None:
    model, optimizer, source, link, models = pair("bf16", lr=0.0)
    sender = Sender(source, [link])
    sender.anchor()
    before = copy.deepcopy(models[-1].state_dict())
    for _ in range(20):
        loss_of(model, tokens).backward()
        optimizer.step()
        assert not sender.sync().full
    assert all(torch.equal(value, before[name]) for name, value in models[-1].state_dict().items())


def test_what_could_never_be_equal_is_refused_at_once() -> None:
    model, _, source, _, _ = pair("bf16", others="adamw")
    short = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"q_proj is torch.float32 in this model, the trainer's is torch.bfloat16"):
        Replica(source.layout, slices_of(model), tensors_of(short))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is torch.float32 \(48, 32\) in this model"):
        Replica(source.layout, slices_of(short), tensors_of(model))
    frozen, _, source, _, _ = pair("bf16")
    other = copy.deepcopy(frozen).to(torch.bfloat16)
    with torch.no_grad():
        other.model.norm.weight[0] += 1.0
    with pytest.raises(ValueError, match=r"1 tensors .* have other values here, such as model.norm.weight"):
        Replica(source.layout, slices_of(other), tensors_of(other), frozen=tensors_of(other))
    with pytest.raises(ValueError, match="dithered_copy"):
        pair("bf16", dithered_copy=True)


def test_layers_that_are_regrouped_lead_to_a_new_layout(tokens: Tensor) -> None:
    model, optimizer, source, link, models = pair("bf16")
    link.make = lambda: Replica(Layout.from_json(source.layout.to_json()), slices_of(models[0]), tensors_of(models[0]))
    sender = Sender(source, [link])
    sender.anchor()
    layer = optimizer.sketches.layers["model.layers.0.mlp.up_proj"]
    optimizer.sketches.separate(layer)
    loss_of(model, tokens).backward()
    optimizer.step()
    assert "other weights or settings" in sender.sync().full["near"]
    loss_of(model, tokens).backward()
    optimizer.step()
    assert sender.sync().full == {}


def test_caches_go_whenever_weights_changed(tokens: Tensor) -> None:
    model, optimizer, source, _, _ = pair("bf16")
    other = copy.deepcopy(model).to(torch.bfloat16)
    calls: list[int] = []
    replica = Replica(source.layout, slices_of(other), {}, changed=lambda: calls.append(1))
    pieces = list(source.pieces())
    replica.handle(pieces[0])
    assert len(calls) == 1
    for piece in pieces[1:]:
        replica.handle(piece)
    assert len(calls) == 2
    loss_of(model, tokens).backward()
    optimizer.step()
    replica.held["model.layers.1.mlp.down_proj"][0].merge = lambda _: 1 // 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        replica.handle(source.message()[0])
    assert len(calls) == 3
    assert (replica.version, replica.digest) == (None, None)


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


def engine_parameters(layout: Layout, parts: int, head: int) -> list[dict[str, Tensor]]:
    """Zeros as an engine of so many tensor-parallel processes holds a Llama: fused and divided."""
    made: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    rows = {each.name: each.rows for each in layout.weights}
    columns = {each.name: each.columns for each in layout.weights}
    for name in rows:
        parent, _, leaf = name.rpartition(".")
        for parameters in made:
            if leaf == "q_proj":
                keys = max(head, rows[f"{parent}.k_proj"] // parts)
                height = rows[name] // parts + 2 * keys
                parameters[f"{parent}.qkv_proj.weight"] = torch.zeros(height, columns[name], dtype=torch.bfloat16)
            elif leaf == "gate_proj":
                height = 2 * rows[name] // parts
                parameters[f"{parent}.gate_up_proj.weight"] = torch.zeros(height, columns[name], dtype=torch.bfloat16)
            elif leaf in ("o_proj", "down_proj"):
                width = columns[name] // parts
                parameters[f"{name}.weight"] = torch.zeros(rows[name], width, dtype=torch.bfloat16)
    return made


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_an_engine_that_fuses_and_divides_follows_exactly(parts: int, tokens: Tensor) -> None:
    """With four parts and two key/value heads, pairs of processes hold the same head."""
    model, optimizer, source, _, _ = pair("bf16")
    layout = source.layout
    engines = engine_parameters(layout, parts, head=8)
    replicas = [Replica(layout, fused_slices(layout, each, i, parts), {}) for i, each in enumerate(engines)]
    for piece in source.pieces():
        assert all(replica.handle(piece).refusal is None for replica in replicas)
    for _ in range(3):
        loss_of(model, tokens).backward()
        optimizer.step()
        data, digest = source.message()
        assert all(replica.handle(data).refusal is None for replica in replicas)
        assert sum(replica.digest or 0 for replica in replicas) & MASK == digest
    layer = model.model.layers[1]
    wanted = {name: getattr(layer.self_attn, name).weight.to(torch.bfloat16) for name in ("q_proj", "k_proj", "v_proj")}
    for place, engine in enumerate(engines):
        fused = engine["model.layers.1.self_attn.qkv_proj.weight"]
        queries, keys = 32 // parts, max(8, 16 // parts)
        head = place * 2 // parts if parts > 2 else place
        assert torch.equal(fused[:queries], wanted["q_proj"][place * queries : (place + 1) * queries])
        assert torch.equal(fused[queries : queries + keys], wanted["k_proj"][head * keys : (head + 1) * keys])
        assert torch.equal(fused[queries + keys :], wanted["v_proj"][head * keys : (head + 1) * keys])
        width = 80 // parts
        down = layer.mlp.down_proj.weight.to(torch.bfloat16)[:, place * width : (place + 1) * width]
        assert torch.equal(engine["model.layers.1.mlp.down_proj.weight"], down)
        both = engine["model.layers.1.mlp.gate_up_proj.weight"]
        assert torch.equal(
            both[width:], layer.mlp.up_proj.weight.to(torch.bfloat16)[place * width : (place + 1) * width]
        )


def test_an_engine_of_another_shape_is_refused() -> None:
    _, _, source, _, _ = pair("bf16")
    (engine,) = engine_parameters(source.layout, 1, head=8)
    engine["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 79)
    with pytest.raises(ValueError, match=r"down_proj has the shape \(32, 79\) in one of 1 parts"):
        fused_slices(source.layout, engine)
    engine["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 80)
    engine["model.layers.0.mlp.gate_up_proj.weight"] = torch.zeros(161, 32)
    with pytest.raises(ValueError, match=r"gate_proj lies in a fused tensor of shape \(161, 32\)"):
        fused_slices(source.layout, engine)
    del engine["model.layers.0.mlp.gate_up_proj.weight"]
    with pytest.raises(ValueError, match=r"2 of 14 weights .* such as 'model.layers.0.mlp.gate_proj'"):
        Replica(source.layout, fused_slices(source.layout, engine), {})
