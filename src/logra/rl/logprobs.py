# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen ids, in chunks of positions: sampler, trainer, reference and probe share this.

log_softmax(logits / temperature) in fp32 of whatever dtype the head computes in. The model's body runs
once; its head runs chunk by chunk, forward and backward, so that no [tokens, vocabulary] tensor exists.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from logra.rl.batch import MicroBatch, Sample, collate, collate_shared

LOGIT_MIB = 64.0  # of fp32 logits in a chunk of positions
BLOCK_MIB = 4.0  # of fp32 numbers that exist at a time while a chunk's logits are reduced


@dataclass(frozen=True)
class TokenLogprobs:
    """Of N completion tokens, sample by sample.

    Attributes:
        logprobs: fp32 [N], of the ids that were drawn.
        entropy: fp32 [N], of the distribution they were drawn from; detached.
    """

    logprobs: Tensor
    entropy: Tensor


def row_slices(shape: Sequence[int], mib: float, bytes_each: int = 4) -> Iterator[slice]:
    """Slices of rows of a matrix [rows, columns] that each hold about `mib` MiB, and one row at least."""
    rows, columns = shape
    size = max(1, int(mib * 2**20 / (bytes_each * max(1, columns))))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) at the chosen ids, fp32 [N], from logits [N, vocabulary] and ids [N]."""
    found: Tensor = ChosenLogprobs.apply(logits, chosen, temperature)
    return found


class ChosenLogprobs(torch.autograd.Function):
    """Beside the logits only their gradient is made, in their dtype; fp32 numbers exist for a block of rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
        """fp32 [N]."""
        normalisers = logits.new_empty(len(logits), dtype=torch.float32)
        found = torch.empty_like(normalisers)
        for rows in row_slices(logits.shape, BLOCK_MIB):
            scaled = _scaled(logits[rows], temperature)
            normalisers[rows] = torch.logsumexp(scaled, dim=-1)
            found[rows] = scaled.gather(-1, chosen[rows, None])[:, 0] - normalisers[rows]
        ctx.save_for_backward(logits, chosen, normalisers)
        ctx.temperature = temperature
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:
        """(chosen - softmax) / temperature times the gradient of each row."""
        logits, chosen, normalisers = ctx.saved_tensors
        result, grads = torch.empty_like(logits), grads / ctx.temperature
        for rows in row_slices(logits.shape, BLOCK_MIB):
            block = _scaled(logits[rows], ctx.temperature) - normalisers[rows, None]
            block.exp_().mul_(-grads[rows, None])
            block.scatter_add_(-1, chosen[rows, None], grads[rows, None])
            result[rows] = block
        return result, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.float32)
    return wide if temperature == 1.0 else wide / temperature


@torch.no_grad()
def entropies(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats, fp32 [N]."""
    found = logits.new_empty(len(logits), dtype=torch.float32)
    for rows in row_slices(logits.shape, BLOCK_MIB):
        scaled = _scaled(logits[rows], temperature)
        normaliser = torch.logsumexp(scaled, dim=-1)
        found[rows] = normaliser - ((scaled - normaliser[:, None]).exp_() * scaled).sum(-1)
    return found


class CausalModel:
    """A Hugging Face causal LM as a body that gives hidden states and a head that gives logits.

    Some models scale or cap what the head gives; that is done here as their configuration says, and
    `check` compares with the model's own logits once at start.

    Attributes:
        within: calls a function with arguments; where processes hold the weights in parts, whatever uses body and head
            runs in it, on all processes alike, and gives a tensor or a tuple of tensors.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.body: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.cap = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", None) or 1.0
        self.scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
        self.vocabulary = int(config.vocab_size)
        self.within: Callable[..., Any] = _at_once
        # Renamed in transformers 5.
        parameters = inspect.signature(self.body.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None, **more: Any) -> Any:
        """The body's output; `.last_hidden_state` is [samples, width, hidden]."""
        return self.body(input_ids=input_ids, attention_mask=attention_mask, **more)

    def states(self, batch: MicroBatch) -> Tensor:
        """[N, hidden], final hidden states that predict the batch's completion tokens."""
        more = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        return batch.states(self.hidden(batch.input_ids, self._mask(batch), use_cache=False, **more).last_hidden_state)

    def _mask(self, batch: MicroBatch) -> Tensor | None:
        """As the attention kernel takes it: eager attention adds what others take as booleans."""
        mask = batch.attention_mask
        if mask is None or mask.dtype != torch.bool or self.model.config._attn_implementation != "eager":
            return mask
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    @torch.no_grad()
    def can_share(self) -> bool:
        """Whether packs (`collate_shared`) give what single samples give: the kernel must take any mask."""
        device, count = next(self.model.parameters()).device, self.vocabulary
        ids = [[(7 * line + 3 * place) % count for place in range(9)] for line in range(2)]
        samples = [Sample(line, 0, tuple(ids[0][:4]), tuple(ids[line][4:]), (), "", False) for line in range(2)]

        def logits_of(batch: MicroBatch) -> Tensor:
            return self.logits(self.states(batch)).float()

        wanted = self.within(logits_of, collate(samples, range(2), 0, device))
        try:
            got = self.within(logits_of, collate_shared(samples, [[0, 1]], 0, device))
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return False
        # Wider than rounding in the model's dtype, or the answer would depend on the weights that are loaded.
        near = 1e-3 if next(self.model.parameters()).dtype == torch.float32 else 5e-2
        return torch.allclose(got, wanted, rtol=near, atol=near * float(wanted.abs().max()))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary] from hidden states [..., hidden]."""
        return self.finished(self.head(hidden))

    def logits_of_one_cast(self) -> Callable[[Tensor], Tensor]:
        """`logits` for several calls in a row: a frozen output layer is cast to autocast's dtype once, not in each."""
        head, device = self.head, next(self.model.parameters()).device.type
        plain = type(head) is nn.Linear and "forward" not in head.__dict__ and not head._forward_hooks
        if not plain or not torch.is_autocast_enabled(device):
            return self.logits
        assert isinstance(head, nn.Linear)
        if head.weight.requires_grad:
            return self.logits
        dtype = torch.get_autocast_dtype(device)
        weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
        return lambda hidden: self.finished(nn.functional.linear(hidden, weight, bias))

    def finished(self, logits: Tensor) -> Tensor:
        """What the model does to the output layer's product: a scale, a cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose logits are not head(body(ids)).

        Raises:
            ValueError: the model does something else with its head.
        """
        device = next(self.model.parameters()).device
        ids = torch.arange(1, 9, device=device)[None] % self.vocabulary
        mask = torch.ones_like(ids)
        wanted = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        got = self.logits(self.hidden(ids, mask, use_cache=False).last_hidden_state).float()
        if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
            raise ValueError(
                f"{type(self.model).__name__} does more to its logits than its output layer, a scale and a cap; its "
                f"log-probabilities cannot be computed in chunks, so it cannot be trained here"
            )


def token_logprobs(
    causal: CausalModel, batch: MicroBatch, temperature: float, logit_mib: float = LOGIT_MIB
) -> TokenLogprobs:
    """Log-probabilities and entropies of a micro-batch's completion tokens, with a graph if gradients are on."""
    return TokenLogprobs(*causal.within(_logprobs_and_entropies, causal, batch, temperature, logit_mib))


def _logprobs_and_entropies(
    causal: CausalModel, batch: MicroBatch, temperature: float, logit_mib: float
) -> tuple[Tensor, Tensor]:
    states = causal.states(batch)
    to_logits = causal.logits_of_one_cast()
    entropy: dict[int, Tensor] = {}

    def of_chunk(states: Tensor, targets: Tensor, start: int) -> Tensor:
        logits = to_logits(states)
        if start not in entropy:  # not again when backward computes the chunk anew
            entropy[start] = entropies(logits, temperature)
        return chosen_logprobs(logits, targets, temperature)

    parts = []
    for rows in row_slices((len(batch.targets), causal.vocabulary), logit_mib):
        arguments = (states[rows], batch.targets[rows], rows.start)
        if torch.is_grad_enabled():
            parts.append(checkpoint(of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of_chunk(*arguments))
    return torch.cat(parts), torch.cat([entropy[start] for start in sorted(entropy)])


def _at_once(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)
