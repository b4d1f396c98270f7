# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen ids, in chunks of positions: sampler, trainer, reference and probe share this.

log_softmax(logits / temperature) in fp32 of whatever dtype the head computes in. The model's body runs
once; its head runs chunk by chunk, forward and backward, so that no [tokens, vocabulary] tensor exists.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from logra.rl.batch import MicroBatch

LOGIT_MIB = 64.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Of N completion tokens, sample by sample.

    Attributes:
        logprobs: fp32 [N], of the ids that were drawn.
        entropy: fp32 [N], of the distribution they were drawn from; detached.
    """

    logprobs: Tensor
    entropy: Tensor


def chosen_logprobs(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) at the chosen ids, fp32 [N], from logits [N, vocabulary] and ids [N]."""
    scaled = logits.to(torch.float32) / temperature
    return scaled.gather(-1, chosen[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)


@torch.no_grad()
def entropies(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) in nats, fp32 [N]."""
    scaled = logits.to(torch.float32) / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    return normaliser - ((scaled - normaliser[:, None]).exp_() * scaled).sum(-1)


class CausalModel:
    """A Hugging Face causal LM as a body that gives hidden states and a head that gives logits.

    Some models scale or cap what the head gives; that is done here as their configuration says, and
    `check` compares with the model's own logits once at start.
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
        # Renamed in transformers 5.
        parameters = inspect.signature(self.body.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, **more: Any) -> Any:
        """The body's output; `.last_hidden_state` is [samples, width, hidden]."""
        return self.body(input_ids=input_ids, attention_mask=attention_mask, **more)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary] from hidden states [..., hidden]."""
        return self.finished(self.head(hidden))

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
    hidden = causal.hidden(batch.input_ids, batch.attention_mask, use_cache=False).last_hidden_state
    states = hidden[:, :-1][batch.completion_mask]

    def of_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = causal.logits(states)
        return chosen_logprobs(logits, targets, temperature), entropies(logits, temperature)

    rows = max(1, int(logit_mib * 2**20 / (4 * causal.vocabulary)))
    parts = []
    for start in range(0, len(batch.targets), rows):
        arguments = (states[start : start + rows], batch.targets[start : start + rows])
        if torch.is_grad_enabled():
            parts.append(checkpoint(of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of_chunk(*arguments))
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))
