# SPDX-License-Identifier: Apache-2.0
"""KL(before || after) of the next-token distribution, full vocabulary, at generated positions: predicted from a
directional derivative of the logits, and exact between two states of the model.

    predicted:  1/(2 T^2) Var_{v ~ p}[z'_v],   p = softmax(z / T)
    exact:      sum_v p_v (log p_v - log q_v)

Every difference of two forwards is computed in fp32, autocast off, with short weights widened layer by layer: between
two bf16 forwards a step whose true KL is 4e-6 reads as 1e-3. Logits exist for a chunk of positions at a time.
Source: section 2.4 of the design.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra.kl.displacement import Displacement
from logra.optim.factors import exact_products
from logra.parallel.rows import whole
from logra.rl.batch import MicroBatch
from logra.rl.logprobs import BLOCK_MIB, LOGIT_MIB, CausalModel, row_slices

SHORT = (torch.bfloat16, torch.float16)
SECANT_STEP = 0.1  # of the proposal: small against its curvature, large against the rounding of fp32 logits


@contextmanager
def exactly(model: nn.Module) -> Iterator[None]:
    """No gradients, evaluation mode, autocast and fast fp32 paths off; parameters shorter than fp32 widened for the
    call of the module that holds them, embeddings afterwards. Of what processes hold in parts in fp32 and gather in
    bf16 to compute, the fp32 values are gathered for that call.
    """
    device = next(model.parameters()).device.type
    was_training, handles = model.training, []
    in_parts = {
        (id(module), name): parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if hasattr(parameter, "device_mesh") and parameter.dtype == torch.float32
    }

    def widened(module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype in SHORT:
                kept.append((parameter, parameter.data))
                held = in_parts.get((id(module), name))
                parameter.data = parameter.data.to(torch.float32) if held is None else whole(held)

    def restored(module: nn.Module, _: Any, output: Any) -> Any:
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        for parameter, value in [pair for pair in kept if id(pair[0]) in own]:
            parameter.data = value
        kept[:] = [pair for pair in kept if id(pair[0]) not in own]
        return output

    def widened_output(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        return output.to(torch.float32) if output.dtype in SHORT else output

    kept: list[tuple[nn.Parameter, Tensor]] = []
    has_short = bool(in_parts) or any(parameter.dtype in SHORT for parameter in model.parameters())
    for module in model.modules() if has_short else ():
        held_wide = any((id(module), name) in in_parts for name, _ in module.named_parameters(recurse=False))
        if isinstance(module, nn.Embedding) and not held_wide:
            handles.append(module.register_forward_hook(widened_output))
        elif any(True for _ in module.parameters(recurse=False)) and (held_wide or "forward" not in module.__dict__):
            handles.append(module.register_forward_pre_hook(widened))
            handles.append(module.register_forward_hook(restored, always_call=True))
    model.eval()
    try:
        with torch.no_grad(), exact_products(device):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, value in kept:
            parameter.data = value
        model.train(was_training)


@dataclass(frozen=True)
class HeadWeights:
    """The output layer as it was, where a step changes it; weight None where not."""

    weight: Tensor | None
    bias: Tensor | None


ToLogits = Callable[[Tensor], Tensor]


def present_logits(causal: CausalModel) -> ToLogits:
    """From hidden states [positions, hidden] to logits [positions, vocabulary] of the model as it is."""
    head = causal.head
    if type(head) is not nn.Linear or "forward" in head.__dict__:
        return causal.logits
    return logits_of(causal, HeadWeights(whole(head.weight), None if head.bias is None else whole(head.bias)))


def logits_of(causal: CausalModel, head: HeadWeights, present: ToLogits | None = None) -> ToLogits:
    """Likewise with the output layer as it was; `present` is what it is now."""
    weight = head.weight
    if weight is None:
        assert present is not None
        return present
    return lambda hidden: causal.finished(_product(hidden, weight, head.bias))


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in the dtype of `hidden`; a shorter weight is widened a few rows at a time."""
    bias = None if bias is None else bias.to(hidden.dtype)
    if weight.dtype == hidden.dtype:
        return nn.functional.linear(hidden, weight, bias)
    parts = [
        nn.functional.linear(hidden, weight[rows].to(hidden.dtype), None if bias is None else bias[rows])
        for rows in row_slices(weight.shape, LOGIT_MIB)
    ]
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class Snapshot:
    """The policy as it is at one time, at the generated positions of some responses.

    Attributes:
        batch: the responses.
        hidden: fp32 [N, hidden], final hidden states.
        head: the output layer then.
    """

    batch: MicroBatch
    hidden: Tensor
    head: HeadWeights

    def first(self, responses: int) -> "Snapshot":
        """Of the first responses alone."""
        batch = self.batch.lines(0, responses)
        return Snapshot(batch, self.hidden[: len(batch.targets)], self.head)


class KlMeter:
    """Measures on one model at one sampling temperature.

    Args:
        causal: the policy.
        temperature: of the sampling.
        logit_mib: of fp32 logits at a time.
        max_tokens: padded tokens that go through the model at once, one response at least.
    """

    def __init__(
        self, causal: CausalModel, temperature: float, logit_mib: float = LOGIT_MIB, max_tokens: int = 2048
    ) -> None:
        self.causal, self.temperature, self.logit_mib, self.max_tokens = causal, temperature, logit_mib, max_tokens

    def snapshot(self, batch: MicroBatch, displacement: Displacement | None = None) -> Snapshot:
        """The policy as it is; the output layer is copied if the displacement would change it."""
        weight = self.causal.head.weight
        assert isinstance(weight, nn.Parameter)
        head = HeadWeights(None, None)
        if displacement is not None and displacement.moves(weight):
            bias = getattr(self.causal.head, "bias", None)
            head = HeadWeights(whole(weight).clone(), None if bias is None else whole(bias).clone())
        with exactly(self.causal.model):
            return Snapshot(batch, self._states(batch), head)

    def exact(self, before: Snapshot, after: AbstractContextManager[None] | None = None) -> Tensor:
        """KL(before || now) in nats at each position, fp64 [N]; `after` is entered for the present policy."""
        with exactly(self.causal.model), after or nullcontext():
            return self._from(before, self._states(before.batch))

    def between(self, before: Snapshot, now: Snapshot) -> Tensor:
        """As `exact`, where the present policy has been read already."""
        with exactly(self.causal.model):
            return self._from(before, now.hidden)

    def _from(self, before: Snapshot, hidden: Tensor) -> Tensor:
        present = present_logits(self.causal)
        earlier = logits_of(self.causal, before.head, present)

        def of_chunk(old: Tensor, new: Tensor) -> Tensor:
            return _kl(earlier(old), present(new), self.temperature)

        return self._chunks(before.hidden, hidden, of_chunk)

    def floor_of_compute(self, now: Snapshot) -> Tensor:
        """KL between the present policy in fp32 and as bf16 autocast computes it, at each position, fp64 [N]."""
        was_training = self.causal.model.training
        self.causal.model.eval()
        with torch.no_grad(), torch.autocast(now.hidden.device.type, dtype=torch.bfloat16):
            short = self._states(now.batch).to(torch.float32)
        self.causal.model.train(was_training)
        return self.between(now, Snapshot(now.batch, short, now.head))

    def predicted(self, before: Snapshot, displacement: Displacement, estimator: str) -> Tensor:
        """Second-order KL of the whole displacement in nats at each position, fp64 [N]; "jvp" or "secant"."""
        return self._jvp(before, displacement) if estimator == "jvp" else self._secant(before, displacement)

    def _jvp(self, before: Snapshot, displacement: Displacement) -> Tensor:
        from torch.autograd import forward_ad

        device = before.hidden.device
        with exactly(self.causal.model), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            zero, one = torch.zeros((), device=device), torch.ones((), device=device)
            with displacement.along(forward_ad.make_dual(zero, one)):
                hidden, present = self._states(before.batch), present_logits(self.causal)

                def of_chunk(_: Tensor, moving: Tensor) -> Tensor:
                    logits = forward_ad.unpack_dual(present(moving))
                    if logits.tangent is None:
                        return torch.zeros(len(moving), dtype=torch.float64, device=device)
                    return _half_variance(logits.primal, logits.tangent, self.temperature)

                return self._chunks(before.hidden, hidden, of_chunk)

    def _secant(self, before: Snapshot, displacement: Displacement) -> Tensor:
        with exactly(self.causal.model), displacement.at(SECANT_STEP):
            hidden, present = self._states(before.batch), present_logits(self.causal)
            earlier = logits_of(self.causal, before.head, present)

            def of_chunk(old: Tensor, new: Tensor) -> Tensor:
                start = earlier(old)
                slope = (present(new) - start) / SECANT_STEP
                return _half_variance(start, slope, self.temperature)

            return self._chunks(before.hidden, hidden, of_chunk)

    def jvp_mib(self, batch: MicroBatch) -> float:
        """Of attention scores and their tangents in the math kernel, which alone has a forward-mode derivative."""
        lines, width = batch.input_ids.shape
        lines = min(lines, max(1, self.max_tokens // width))
        heads = self.causal.model.config.get_text_config().num_attention_heads
        return 2 * 4 * lines * int(heads) * width**2 / 2**20

    def _states(self, batch: MicroBatch) -> Tensor:
        """[N, hidden], some responses at a time; with processes, as often in each of them."""
        lines, width = batch.input_ids.shape
        size = max(1, self.max_tokens // width)
        states = partial(self.causal.within, self.causal.states)
        if size >= lines:
            return states(batch)
        return torch.cat([states(batch.lines(first, first + size)) for first in range(0, lines, size)])

    def _chunks(self, first: Tensor, second: Tensor, of_chunk: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        slices = row_slices((len(first), self.causal.vocabulary), self.logit_mib, 8)  # fp32 logits of both
        parts = [of_chunk(first[rows], second[rows]) for rows in slices]
        return torch.cat(parts) if parts else first.new_zeros(0, dtype=torch.float64)


def _by_blocks(reduced: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> Tensor:
    """`reduced` of a few rows at a time: its fp64 numbers are many."""
    return torch.cat([reduced(first[rows], second[rows]) for rows in row_slices(first.shape, BLOCK_MIB, 8)])


def _kl(before: Tensor, after: Tensor, temperature: float) -> Tensor:
    return _by_blocks(lambda old, new: _kl_of_rows(old, new, temperature), before, after)


def _half_variance(logits: Tensor, slope: Tensor, temperature: float) -> Tensor:
    return _by_blocks(lambda some, slopes: _half_variance_of_rows(some, slopes, temperature), logits, slope)


def _kl_of_rows(before: Tensor, after: Tensor, temperature: float) -> Tensor:
    p = (before.to(torch.float64) / temperature).log_softmax(-1)
    q = (after.to(torch.float64) / temperature).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _half_variance_of_rows(logits: Tensor, slope: Tensor, temperature: float) -> Tensor:
    p = (logits.to(torch.float64) / temperature).softmax(-1)
    slope = slope.to(torch.float64)
    centred = slope - (p * slope).sum(-1, keepdim=True)
    return (p * centred.square()).sum(-1) / (2 * temperature**2)
