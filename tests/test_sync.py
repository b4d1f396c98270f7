"""Messages and replicas: equal bits after every update, nothing silent when something goes wrong."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from logra.config import LograSettings
from logra.optim.digest import MASK
from logra.optim.optimizer import LograOptimizer
from logra.sync.fused import fused_frozen, fused_slices
from logra.sync.held import Slice
from logra.sync.layout import Layout, WeightLayout
from logra.sync.message import message_bytes
from logra.sync.replica import Answer, Replica, as_slice, replica_of, slices_of, tensors_of
from logra.sync.sender import Sender, SyncLost
from logra.sync.source import FactorSource, WholeSource
from tests.conftest import latest, loss_of, tiny_gpt2, tiny_llama


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


def whole_of(model: Any) -> dict[str, list[Slice]]:
    return {name: [as_slice(each)] for name, each in tensors_of(model).items()}


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
        return replica_of(layout, models[-1])

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
        messages.append(latest(source)[0])
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
        replica_of(source.layout, other)


def test_full_state_comes_again_when_due_and_dense_methods_use_the_same_way(tokens: Tensor) -> None:
    model = tiny_llama(tied=True)
    source = WholeSource(lambda: dict(model.named_parameters()), "bf16")
    replica_model = copy.deepcopy(model).to(torch.bfloat16)
    link = Near(lambda: Replica(source.layout, {}, whole_of(replica_model)))
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
        Replica(source.layout, slices_of(model), whole_of(short))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is torch.float32 \(48, 32\) in this model"):
        Replica(source.layout, slices_of(short), whole_of(model))
    frozen, _, source, _, _ = pair("bf16")
    other = copy.deepcopy(frozen).to(torch.bfloat16)
    with torch.no_grad():
        other.model.norm.weight[0] += 1.0
    with pytest.raises(ValueError, match=r"1 tensors .* have other values here, such as model.norm.weight"):
        replica_of(source.layout, other)
    with pytest.raises(ValueError, match="dithered_copy"):
        pair("bf16", dithered_copy=True)


def test_layers_that_are_regrouped_lead_to_a_new_layout(tokens: Tensor) -> None:
    model, optimizer, source, link, models = pair("bf16")
    link.make = lambda: replica_of(Layout.from_json(source.layout.to_json()), models[0])
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
        replica.handle(latest(source)[0])
    assert len(calls) == 3
    assert (replica.version, replica.digest) == (None, None)


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
        data, digest = latest(source)
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
    with pytest.raises(ValueError, match=r"down_proj.weight has the shape \(32, 79\) in one of 1 parts"):
        fused_slices(source.layout, engine)
    engine["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 80)
    engine["model.layers.0.mlp.gate_up_proj.weight"] = torch.zeros(161, 32)
    with pytest.raises(ValueError, match=r"gate_proj.weight lies in a fused tensor of shape \(161, 32\)"):
        fused_slices(source.layout, engine)
    del engine["model.layers.0.mlp.gate_up_proj.weight"]
    with pytest.raises(ValueError, match=r"2 of 14 weights .* such as 'model.layers.0.mlp.gate_proj'"):
        Replica(source.layout, fused_slices(source.layout, engine), {})


def test_weights_fused_with_frozen_ones_are_found() -> None:
    """PEFT's classic targets, q and v, lie in one tensor with k."""
    model, _, source, _, _ = pair("fp32", targets=["q_proj", "v_proj"])
    (engine,) = engine_parameters(pair("fp32")[2].layout, 1, head=8)
    layer = model.model.layers[0].self_attn
    engine["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat(
        [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    ).detach()
    found = fused_slices(source.layout, engine)
    assert len(found) == 4
    frozen = fused_frozen(source.layout, engine)["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(frozen[0].computing, layer.k_proj.weight)
    assert (found["model.layers.0.self_attn.v_proj"][0].computing == layer.v_proj.weight).all()


def test_weights_that_the_trainer_itself_fuses_are_not_divided() -> None:
    weights = (WeightLayout("layers.0.qkv_proj", 12, 4, 2, "g", "fp32"),)
    layout = Layout(0, "rademacher", 8, "fp32", weights)
    assert fused_slices(layout, {"layers.0.qkv_proj.weight": torch.zeros(12, 4)})
    with pytest.raises(ValueError, match=r"fused in the trainer's model too, .* use tensor_parallel 1"):
        fused_slices(layout, {"layers.0.qkv_proj.weight": torch.zeros(6, 4)}, 0, 2)
