# SPDX-License-Identifier: Apache-2.0
"""Rollout in the trainer's process, on the trainer's weights.

Each prompt is read once and its key/value cache repeated for its samples; finished rows are retired
from the batch. No cache outlives a call, so none is ever used with other weights than it was made with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from logra.rl.batch import Sample
from logra.rl.logprobs import CausalModel, chosen_logprobs
from logra.rollout.engine import Prompt, Sampling
from logra.rollout.sampling import draw, filtered, uniforms
from logra.rollout.stops import stop_place, text_of

_RETIRE_SHARE = 0.75


@contextmanager
def acting(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """No gradients, evaluation mode, computing in `dtype`; each weight is cast once for the whole block.

    Autocast keeps casts of weights that ask for gradients, so all of them do meanwhile.
    """
    was_training = model.training
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    device = next(model.parameters()).device.type
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            for parameter, _ in flags:
                parameter.requires_grad_(parameter.is_floating_point())
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        model.train(was_training)


@dataclass
class _Row:
    prompt: Prompt
    sample_id: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class TransformersEngine:
    """Completions by a Hugging Face model.

    Args:
        causal: the policy.
        tokenizer: decodes completions and stop strings.
        end_ids: every id that ends a completion (`generation_config.eos_token_id` may be a list).
        pad_id: fills prompts on the left; masked.
        dtype: torch.bfloat16 (autocast) or torch.float32.
        max_rows: completions drawn side by side at most.
    """

    def __init__(
        self,
        causal: CausalModel,
        tokenizer: Any,
        end_ids: frozenset[int],
        pad_id: int,
        dtype: torch.dtype,
        max_rows: int = 256,
    ) -> None:
        self.causal, self.tokenizer, self.end_ids, self.pad_id = causal, tokenizer, end_ids, pad_id
        self.dtype, self.max_rows = dtype, max_rows

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """All samples of all prompts, ordered by sample id."""
        samples: list[Sample] = []
        with acting(self.causal.model, self.dtype):
            for part in self._parts(prompts):
                samples += self._generate_part(part, sampling, update)
        return sorted(samples, key=lambda sample: sample.sample_id)

    def _parts(self, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        """Prompts of similar length together, at most `max_rows` samples at a time."""
        part: list[Prompt] = []
        for prompt in sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.group_id)):
            if part and sum(each.samples for each in part) + prompt.samples > self.max_rows:
                yield part
                part = []
            part.append(prompt)
        if part:
            yield part

    def _generate_part(self, prompts: list[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        from transformers import DynamicCache

        device = next(self.causal.model.parameters()).device
        ids, mask = self._left_padded(prompts, device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=self.causal.model.config)
        with_cache: dict[str, Any] = {self.causal.cache_argument: cache, "use_cache": True}
        hidden = self.causal.hidden(ids, mask, position_ids=positions, **with_cache).last_hidden_state[:, -1]
        repeats = torch.tensor([prompt.samples for prompt in prompts], device=device)
        parent = torch.repeat_interleave(torch.arange(len(prompts), device=device), repeats)
        cache.batch_select_indices(parent)
        hidden, mask, lengths = hidden[parent], mask[parent], mask.sum(-1)[parent]
        rows = [_Row(prompt, prompt.first_sample_id + i) for prompt in prompts for i in range(prompt.samples)]
        active = list(rows)
        for position in range(sampling.max_tokens):
            drawn = self._draw(hidden, active, sampling, position, update)
            for row in active:
                row.finished = row.finished or self._ends(row, sampling)
            keep = [index for index, row in enumerate(active) if not row.finished]
            if not keep or position + 1 == sampling.max_tokens:
                break
            if len(keep) <= _RETIRE_SHARE * len(active):
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                drawn, mask, lengths = drawn[index], mask[index], lengths[index]
                active = [active[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            where = (lengths + position)[:, None]
            hidden = self.causal.hidden(drawn[:, None], mask, position_ids=where, **with_cache).last_hidden_state[:, -1]
        return [self._sample(row, sampling) for row in rows]

    def _left_padded(self, prompts: list[Prompt], device: torch.device) -> tuple[Tensor, Tensor]:
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            mask[row, width - len(prompt.ids) :] = 1
        return ids.to(device), mask.to(device)

    def _draw(self, hidden: Tensor, active: list[_Row], sampling: Sampling, position: int, update: int) -> Tensor:
        """One id for each row, entered in the rows that are not finished."""
        logits = self.causal.logits(hidden)
        if sampling.temperature == 0:
            drawn = logits.argmax(-1)
            logprobs = chosen_logprobs(logits, drawn, 1.0)
        else:
            sample_ids = torch.tensor([row.sample_id for row in active])
            numbers = uniforms(sampling.seed, update, sample_ids, position, sampling.purpose)
            drawn = draw(filtered(logits, sampling.temperature, sampling.top_k, sampling.top_p), numbers)
            logprobs = chosen_logprobs(logits, drawn, sampling.temperature)
        for row, token, logprob in zip(active, drawn.tolist(), logprobs.tolist(), strict=True):
            if not row.finished:
                row.ids.append(token)
                row.logprobs.append(logprob)
        return drawn

    def _ends(self, row: _Row, sampling: Sampling) -> bool:
        if row.ids[-1] in self.end_ids:
            return True
        if not sampling.stop:
            return False
        return stop_place(self.tokenizer.decode(row.ids, skip_special_tokens=False), sampling.stop) is not None

    def _sample(self, row: _Row, sampling: Sampling) -> Sample:
        """The ids as they were sampled; the text without special tokens and up to the stop string."""
        return Sample(
            row.sample_id,
            row.prompt.group_id,
            row.prompt.ids,
            tuple(row.ids),
            tuple(row.logprobs),
            text_of(self.tokenizer, row.ids, sampling.stop),
            not row.finished,
        )
