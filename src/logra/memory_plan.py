# SPDX-License-Identifier: Apache-2.0
"""How much memory a run needs, by cause, before anything is allocated: from the model's configuration alone.

What is stored (weights, sketches or gradients, moments, projections) is counted from shapes. What comes and goes with
a micro-batch is found by running the update's own code on fake tensors (`logra.memory_trace`). On several devices
stored things are divided by rows, and weights are gathered block by block. docs/memory.md has every formula.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from logra.memory_trace import Lengths, learning_stages
from logra.optim.merge import BLOCK_ELEMENTS, OTHER_BLOCK_ELEMENTS
from logra.rl.logprobs import LOGIT_MIB
from logra.run_settings import TrainSettings
from logra.sketch.targets import find_targets, input_groups, is_conv1d

GIB = 2**30
METHODS = ("logra", "adamw", "lora")
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Device:
    """Where a run would take place.

    Attributes:
        count: devices that share the training.
        shard: of these, those among which weights are divided; 0: all.
        capacity: bytes of each; None if unknown.
        kind: "cuda" or "cpu".
    """

    count: int = 1
    capacity: int | None = None
    kind: str = "cuda"
    shard: int = 0

    @property
    def holders(self) -> int:
        """Devices that hold a weight together."""
        return self.shard or self.count


@dataclass(frozen=True)
class Stage:
    """A time in an update, and the bytes on each device by cause."""

    name: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        """All causes together."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class MethodPlan:
    """What one method needs on each device.

    Attributes:
        method: "logra", "adamw" or "lora".
        stages: of an update.
        sync_bytes: that a rollout replica elsewhere gets after each update.
        largest_tokens: of a micro-batch that fits in the capacity; None if unknown, 0 if nothing fits.
    """

    method: str
    stages: tuple[Stage, ...]
    sync_bytes: int
    largest_tokens: int | None = None

    @property
    def peak(self) -> Stage:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total)

    def fits(self, capacity: int) -> bool:
        """Whether every stage does."""
        return self.peak.total <= capacity


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model's parameters, by where they are and who trains them.

    Attributes:
        total, block: parameters of the model, and of its largest block.
        head: of the output layer. tied: whether it is the embedding, too.
        selected: that the targets name.
        largest: parameters of the largest selected layer.
        rows: out_features of the selected layers, summed.
        block_rows: the same of the largest block.
        inputs: in_features of the distinct inputs of selected layers, summed.
        lora: in_features + out_features of the selected layers, summed: parameters of adapters of rank 1.
    """

    total: int
    block: int
    head: int
    tied: bool
    selected: int
    largest: int
    rows: int
    block_rows: int
    inputs: int
    lora: int


def model_size(config: Any, targets: Any) -> ModelSize:
    """Count without making a weight.

    Raises:
        ValueError: the targets name no layer.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = find_targets(model, targets)
    shapes = {name: _rows_and_columns(module) for name, module in modules.items()}
    groups = input_groups(modules, {name: shape[1] for name, shape in shapes.items()})
    blocks: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        blocks[_block_of(name)] += parameter.numel()
    block_rows: Counter[str] = Counter()
    for name, (rows, _) in shapes.items():
        block_rows[_block_of(name)] += rows
    in_blocks = [count for name, count in blocks.items() if name]
    return ModelSize(
        total=sum(blocks.values()),
        block=max(in_blocks, default=0),
        head=model.get_output_embeddings().weight.numel(),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        selected=sum(rows * columns for rows, columns in shapes.values()),
        largest=max(rows * columns for rows, columns in shapes.values()),
        rows=sum(rows for rows, _ in shapes.values()),
        block_rows=max(block_rows.values()),
        inputs=sum(shapes[members[0]][1] for members in groups.values()),
        lora=sum(rows + columns for rows, columns in shapes.values()),
    )


def _rows_and_columns(module: torch.nn.Module) -> tuple[int, int]:
    assert isinstance(module.weight, torch.Tensor)
    first, second = module.weight.shape
    return (second, first) if is_conv1d(module) else (first, second)


def _block_of(name: str) -> str:
    """The block that a parameter lies in, such as "model.layers.3"; "" outside of blocks."""
    parts = name.split(".")
    place = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def plan_method(
    config: Any, settings: TrainSettings, method: str, lengths: Lengths, device: Device, rank: int | None = None
) -> MethodPlan:
    """Plan one method with the settings of a run.

    Args:
        config: of the model.
        settings: of the run; `method.name` is replaced by `method`.
        method: "logra", "adamw" or "lora".
        lengths: the largest micro-batch.
        device: where.
        rank: of LoGRA, or of LoRA's adapters; default: that of the settings.
    """
    settings = _with_method(settings, method, rank)
    size = model_size(config, settings.method.logra.targets)
    stored = stored_bytes(size, settings)
    shared = {cause: math.ceil(count / device.holders) for cause, count in stored.items()}
    shared["projections"] = stored["projections"]  # bits, whole on every device
    if device.count > 1 and method == "logra" and settings.method.logra.sketch_sync == "update":
        shared["whole sketches"] = 4 * settings.method.logra.rank * size.rows
    if settings.learning.reference_kl > 0:
        shared["reference model"] = math.ceil(WEIGHT_BYTES[settings.model.weights] * size.total / device.holders)
    stages = [
        Stage(name, {**shared, **_gathered(size, settings, device, name), "activations and logits": each["temporary"]})
        for name, each in learning_stages(config, settings, lengths, gathered=device.count > 1).items()
    ]
    at_rest = {cause: count for cause, count in shared.items() if cause != "gradients"}
    if settings.method.kl.budget is not None:
        gathered = _gathered(size, settings, device, "KL probe")
        stages.append(Stage("KL probe", {**shared, **gathered, **_probe(config, size, settings, lengths, device)}))
    stages.append(Stage("step", {**shared, "step": _step(size, settings, device)}))
    inside = settings.engines.kind == "inside"
    stages.append(
        Stage("rollout", {**at_rest, **(_rollout(config, size, settings, lengths, device) if inside else {})})
    )
    return MethodPlan(method, tuple(stages), _sync(size, settings))


def _with_method(settings: TrainSettings, name: str, rank: int | None) -> TrainSettings:
    method = replace(settings.method, name=name)
    if rank is not None:
        method = replace(method, logra=replace(method.logra, rank=rank), lora_rank=rank)
    return replace(settings, method=method)


def stored_bytes(size: ModelSize, settings: TrainSettings) -> dict[str, int]:
    """Of the whole model, wherever its parts lie: weights, gradients or sketches, moments, projections."""
    method, each = settings.method, WEIGHT_BYTES[settings.model.weights]
    if method.name == "logra":
        storage = method.logra.storage
        if storage == "auto":
            storage = "fp32" if each == 4 else "split"
        selected = {"fp32": 4, "split": 3, "bf16": 2}[storage] + 2 * method.logra.dithered_copy
        rank = method.logra.rank
        others = size.total - size.selected if method.logra.others == "adamw" else 0
        return {
            "weights": selected * size.selected + each * (size.total - size.selected),
            "gradients": 4 * rank * size.rows + each * others,
            "moments": 8 * size.rows + 2 * each * others,
            "projections": rank * math.ceil(size.inputs / 8),
        }
    if method.name == "lora":
        adapters = method.lora_rank * size.lora
        return {
            "weights": each * size.total + 4 * adapters,
            "gradients": 4 * adapters,
            "moments": 8 * adapters,
            "projections": 0,
        }
    moments = 2 if method.name == "adamw" else 0
    return {
        "weights": each * size.total,
        "gradients": each * size.total,
        "moments": moments * each * size.total,
        "projections": 0,
    }


def _gathered(size: ModelSize, settings: TrainSettings, device: Device, stage: str) -> dict[str, int]:
    """What is whole on a device for a while although it is stored in parts; the output layer is, to the end."""
    if device.count == 1:
        return {}
    each = 4 if settings.model.compute == "fp32" else 2
    blocks = 2 * each * size.block  # the block at work and the one that is fetched meanwhile
    whole = blocks + each * size.head
    if stage != "blocks":
        return {"gathered weights": whole}
    if settings.method.name == "logra":
        waits = 0 if settings.method.logra.sketch_sync == "update" else 4 * settings.method.logra.rank * size.block_rows
        return {"gathered weights": whole, "gradients of a block": waits}
    if settings.method.name == "lora":
        return {"gathered weights": whole}
    return {"gathered weights": whole, "gradients of a block": 4 * size.block}


def _probe(config: Any, size: ModelSize, settings: TrainSettings, lengths: Lengths, device: Device) -> dict[str, int]:
    """In fp32, a few responses at a time: a block's tensors twice (value and tangent), snapshots, logits of a chunk."""
    text = config.get_text_config()
    tokens = min(4 * settings.method.kl.responses, max(1, settings.learning.micro_batch_tokens // lengths.width))
    tokens = lengths.width * max(1, tokens // 4)
    wide = 4 * tokens * (6 * text.hidden_size + 3 * text.intermediate_size)
    snapshots = 2 * 2 * settings.method.kl.responses * lengths.completion * 4 * text.hidden_size
    found = {"KL probe": 2 * wide + snapshots + int(2 * LOGIT_MIB * 2**20) + 4 * size.block}
    if settings.method.name != "logra":
        trained = stored_bytes(size, settings)
        found["copies of a dense step"] = math.ceil((trained["gradients"] + trained["moments"]) / device.holders)
    if device.count > 1:  # the output layer, and an embedding of its own, in fp32
        found["gathered for the probe"] = 4 * size.head * (1 if size.tied else 2)
    return found


def _step(size: ModelSize, settings: TrainSettings, device: Device) -> int:
    """The merge's row blocks, four at a time; torch's fused AdamW works in place."""
    if settings.method.name != "logra":
        return 0
    return 4 * 4 * min(size.largest, BLOCK_ELEMENTS.get(device.kind, OTHER_BLOCK_ELEMENTS))


def _rollout(config: Any, size: ModelSize, settings: TrainSettings, lengths: Lengths, device: Device) -> dict[str, int]:
    """In this process: bf16 copies of fp32 weights (of divided ones, a whole copy), the key/value cache, and logits of
    one position of all rows.
    """
    text, rollout, evaluation = config.get_text_config(), settings.rollout, settings.evaluation
    short = settings.model.compute != "fp32"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    groups = ((rollout.prompts, rollout.samples), (evaluation.problems, evaluation.samples))
    most = max(math.ceil(prompts / device.count) * samples for prompts, samples in groups)
    rows = min(rollout.max_rows, most)
    cache = 2 * text.num_hidden_layers * keys * head_dim * rows * lengths.width * (2 if short else 4)
    whole = device.count > 1 or (settings.model.weights == "float32" and short)
    return {
        "rollout weights": (2 if short else 4) * size.total if whole else 0,
        "key/value cache": cache,
        "logits of a position": 5 * 4 * rows * text.vocab_size,
    }


def _sync(size: ModelSize, settings: TrainSettings) -> int:
    """A replica elsewhere gets factors and scales, or bf16 weights."""
    if settings.method.name != "logra":
        return 2 * size.total
    logra = settings.method.logra
    return size.rows * (logra.rank * logra.factor_bits // 8 + 4)


def with_largest(plan: MethodPlan, larger: MethodPlan, tokens: int, capacity: int) -> MethodPlan:
    """Enter the largest micro-batch that fits, from plans of `tokens` and of twice as many: bytes grow linearly."""
    learning = {"forward", "head", "blocks", "embedding"}
    limits = []
    for small, large in zip(plan.stages, larger.stages, strict=True):
        slope = (large.total - small.total) / tokens if small.name in learning else 0.0
        spare = capacity - small.total
        limits.append(tokens + spare / slope if slope > 0 else math.inf if spare >= 0 else 0.0)
    largest = min(limits)
    return replace(plan, largest_tokens=0 if largest < 1 else int(min(largest, 2**40)))
