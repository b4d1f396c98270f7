# SPDX-License-Identifier: Apache-2.0
"""Samples as they were drawn, and the micro-batches they are trained in.

The ids sampled are the ids trained on: nothing is decoded and encoded again. Masks come from
lengths, never from the pad id, so a pad token that is also an end token is no special case.
Token tensors are flat: the N completion tokens of a micro-batch, sample by sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One completion of one prompt.

    Attributes:
        sample_id: unique in its update; keys its random numbers and its score.
        group_id: samples of one prompt share it.
        prompt_ids: the ids the model read.
        completion_ids: the ids drawn, an end token included where one was drawn.
        rollout_logprobs: log-probability of each drawn id, as the engine that drew it computed it.
        text: the completion decoded, without special tokens, up to a stop string.
        truncated: whether the token limit ended it.
    """

    sample_id: int
    group_id: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    text: str
    truncated: bool

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Samples side by side, padded on the right.

    Attributes:
        rows: position of each sample in the update's list of samples.
        input_ids: int64 [samples, width].
        attention_mask: int64 [samples, width], 1 on prompt and completion.
        completion_mask: bool [samples, width - 1], true where the next id is a completion token.
        targets: int64 [N], those next ids.
        sample_index: int64 [N], the row of `input_ids` each belongs to.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    targets: Tensor
    sample_index: Tensor


def collate(samples: Sequence[Sample], rows: Sequence[int], pad_id: int, device: torch.device | str) -> MicroBatch:
    """The micro-batch of `samples[row] for row in rows`."""
    chosen = [samples[row] for row in rows]
    width = max(sample.num_tokens for sample in chosen)
    input_ids = torch.full((len(chosen), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(len(chosen), width, dtype=torch.int64)
    completion_mask = torch.zeros(len(chosen), width - 1, dtype=torch.bool)
    for row, sample in enumerate(chosen):
        input_ids[row, : sample.num_tokens] = torch.tensor(sample.prompt_ids + sample.completion_ids)
        attention_mask[row, : sample.num_tokens] = 1
        completion_mask[row, len(sample.prompt_ids) - 1 : sample.num_tokens - 1] = True
    targets = input_ids[:, 1:][completion_mask]
    sample_index = torch.arange(len(chosen))[:, None].expand_as(completion_mask)[completion_mask]
    tensors = (input_ids, attention_mask, completion_mask, targets, sample_index)
    return MicroBatch(tuple(rows), *(tensor.to(device) for tensor in tensors))


def micro_batches(samples: Sequence[Sample], rows: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split `rows` into micro-batches of at most `max_tokens` padded tokens each, longest samples first.

    A single sample longer than that is a micro-batch of its own.
    """
    part: list[int] = []
    for row in sorted(rows, key=lambda row: (-samples[row].num_tokens, row)):
        width = samples[part[0]].num_tokens if part else samples[row].num_tokens
        if part and width * (len(part) + 1) > max_tokens:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
