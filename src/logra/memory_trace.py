# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch's forward and backward hold in memory, found by running the run's own code on fake tensors:
tensors with sizes and no contents, so nothing is allocated and nothing computed.

The model is built from its configuration alone with a few blocks; each further block adds the same bytes, so the peak
of a deep model follows from two shallow ones.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logra.live_bytes import LiveBytes
from logra.model import prepare
from logra.optim.optimizer import LograOptimizer
from logra.rl.batch import MicroBatch
from logra.rl.logprobs import LOGIT_MIB, CausalModel, row_slices, token_logprobs
from logra.run_settings import TrainSettings
from logra.update_rules import add_adapters, make_rule

SHALLOW = (1, 2)  # blocks, or repeats of their pattern, in the models that are traced
CAUSES = ("weights", "gradients", "moments", "temporary")


@dataclass(frozen=True)
class Lengths:
    """A micro-batch, as numbers.

    Attributes:
        lines: side by side.
        width: tokens of each line.
        completion: of these, tokens whose log-probability is trained on.
        masked: whether attention gets a mask (several lines, padding, or completions that share a prompt).
    """

    lines: int
    width: int
    completion: int
    masked: bool

    def fake(self, count: int) -> MicroBatch:
        """Zeros of these sizes, with the log-probabilities of `count` tokens."""
        ids = torch.zeros(self.lines, self.width, dtype=torch.int64)
        mask = torch.ones(self.lines, 1, self.width, self.width, dtype=torch.bool)
        tokens = [torch.zeros(count, dtype=torch.int64) for _ in range(3)]
        return MicroBatch(tuple(range(self.lines)), ids, mask if self.masked else None, ids, *tokens)


@contextmanager
def nothing_allocated() -> Iterator[None]:
    """Tensors made inside have sizes only."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def learning_stages(
    config: Any, settings: TrainSettings, lengths: Lengths, gathered: bool = False
) -> dict[str, Counter[str]]:
    """Bytes by cause at the peak of each stage of a later micro-batch of an update, on one device.

    Stages: "forward", and backward through "head", "blocks" and "embedding": within one, the peak is at one place.
    Causes: "weights", "gradients" (sketches for logra), "moments" (for logra, projections too), and "temporary":
    activations kept for backward, logits, and what backward makes on its way. With `gathered`, blocks compute with
    weights that sharding gathers in bf16, adapters too, so that autocast makes no copies of its own.
    """
    gathered = gathered and settings.model.compute != "fp32"
    if gathered:
        settings = replace(settings, model=replace(settings.model, weights="bfloat16", compute="bf16"))
    period = _period(getattr(config, "layer_types", None))
    first, second = (_traced(config, settings, lengths, count * period, gathered) for count in SHALLOW)
    steps = (config.num_hidden_layers / period - SHALLOW[0]) / (SHALLOW[1] - SHALLOW[0])
    # More positions than a chunk or two add their hidden states and the gradients of those, and nothing else.
    left_out = lengths.lines * lengths.completion - _traced_positions(config, lengths)
    width = config.get_text_config().hidden_size * (2 if settings.model.weights == "bfloat16" else 4)
    found = {
        stage: Counter({cause: round(few[cause] + steps * (second[stage][cause] - few[cause])) for cause in CAUSES})
        for stage, few in first.items()
    }
    found["forward"]["temporary"] += left_out * width
    found["head"]["temporary"] += 2 * left_out * width
    return found


def _traced_positions(config: Any, lengths: Lengths) -> int:
    """Enough for two chunks of logits."""
    chunk = next(row_slices((2**40, config.get_text_config().vocab_size), LOGIT_MIB)).stop
    return min(lengths.lines * lengths.completion, 2 * int(chunk))


def _period(layer_types: list[str] | None) -> int:
    """Blocks after which their kinds repeat."""
    if not layer_types:
        return 1
    count = len(layer_types)
    return next(p for p in range(1, count + 1) if all(layer_types[i] == layer_types[i % p] for i in range(count)))


def _traced(
    config: Any, settings: TrainSettings, lengths: Lengths, layers: int, gathered: bool = False
) -> dict[str, Counter[str]]:
    """Bytes by cause at the peak of each stage."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:layers]
    model, trained = shapes_only(shallow, settings)
    with nothing_allocated():
        make_fake(model, all_short=gathered)
        rule = make_rule(trained, settings.method, 0)
        batch, causal = lengths.fake(_traced_positions(config, lengths)), CausalModel(model)
        autocast = settings.model.compute == "bf16" and not gathered
        return _later_micro_batch(model, rule, causal, batch, autocast)


def _later_micro_batch(
    model: Any, rule: Any, causal: CausalModel, batch: MicroBatch, autocast: bool
) -> dict[str, Counter[str]]:
    peaks: dict[str, Counter[str]] = {}
    with LiveBytes() as live:
        live.hold("weights", [*model.parameters(), *model.buffers(), *_low_bits(rule)])
        live.hold("moments", _moments(rule))

        def end(stage: str) -> None:
            peaks[stage] = live.at_peak
            live.start_peak()

        live.hold("gradients", _gradients(rule))
        live.start_peak()
        handles = _at_stage_ends(model, causal, end)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            scores = token_logprobs(causal, batch, temperature=1.0)
        end("forward")
        scores.logprobs.sum().backward()
        end("embedding")
        for handle in handles:
            handle.remove()
    return peaks


def _at_stage_ends(model: Any, causal: CausalModel, end: Callable[[str], None]) -> list[Any]:
    """Call `end` once backward is through the head, and through the blocks."""

    def after_head(_: Any, __: Any, output: Any) -> None:
        output.last_hidden_state.register_hook(lambda _: end("head"))

    def after_blocks(_: Any, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: end("blocks"))

    embedding = model.get_input_embeddings()
    return [causal.body.register_forward_hook(after_head), embedding.register_forward_hook(after_blocks)]


def shapes_only(config: Any, settings: TrainSettings) -> tuple[Any, Any]:
    """The model on torch's "meta" device, and what its update rule trains: peft's wrapper for lora."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, settings.model.weights)
    attention = settings.model.attention
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        except ValueError as error:
            raise ValueError(
                f"model.attention is {attention!r}, which this model does not have ({str(error).splitlines()[0]}); "
                f"set model.attention eager"
            ) from error
        prepare(model, settings.model)
        trained = add_adapters(model, settings.method) if settings.method.name == "lora" else model
    return model.train(), trained


def make_fake(model: Any, all_short: bool = False) -> None:
    """Exchange tensors without a device for fake ones, which behave as a CPU's; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = made.get(id(parameter))
                if empty is None:
                    values = torch.empty(parameter.shape, dtype=torch.bfloat16 if all_short else parameter.dtype)
                    empty = made[id(parameter)] = torch.nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = empty
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


def _gradients(rule: Any) -> list[Tensor]:
    """As an earlier micro-batch left them: sketches, or a gradient for each trained parameter."""
    optimizer = rule.optimizer
    found = []
    if isinstance(optimizer, LograOptimizer):
        for layer in optimizer.sketches:
            layer.sketch = torch.zeros(layer.out_features, layer.group.rank)
            found.append(layer.sketch)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
    return found


def _low_bits(rule: Any) -> list[Tensor]:
    storages = getattr(rule.optimizer, "storages", {}).values()
    return [storage.low for storage in storages if storage.kind == "split"]


def _moments(rule: Any) -> list[Tensor]:
    """AdamW's as its first step would make them; LoGRA's row moments and projections are there from the start."""
    optimizer = rule.optimizer
    if isinstance(optimizer, LograOptimizer):
        projections = [group.projection for group in optimizer.sketches.groups.values()]
        kept = [projection.compact for projection in projections if projection is not None]
        return [*kept, *(t for state in optimizer.state.values() for t in state.values())]
    if isinstance(optimizer, torch.optim.AdamW):
        for parameter in rule.trained:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter].update(moments)
    return [t for state in optimizer.state.values() for t in state.values()]
