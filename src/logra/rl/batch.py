# SPDX-License-Identifier: Apache-2.0
"""Samples as they were drawn, and the micro-batches they are trained in.

The ids sampled are the ids trained on: nothing is decoded and encoded again. Masks come from
lengths, never from the pad id, so a pad token that is also an end token is no special case.
Token tensors are flat: the N completion tokens of a micro-batch, sample by sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHARED_WIDTH = 1024


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
        policy_update: the update after which the weights that drew it were current; None where they are the trainer's.
    """

    sample_id: int
    group_id: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    text: str
    truncated: bool
    policy_update: int | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


def sample_of(entry: dict[str, Any]) -> Sample:
    """From plain lists and numbers."""
    lists = ("prompt_ids", "completion_ids", "rollout_logprobs")
    return Sample(**(entry | {name: tuple(entry[name]) for name in lists}))


@dataclass(frozen=True)
class MicroBatch:
    """Samples side by side, padded on the right; or packs of samples that share a prompt (`collate_shared`).

    Attributes:
        rows: position in the update's list of samples of each sample, in the order of the targets.
        input_ids: int64 [lines, width].
        attention_mask: int64 [lines, width], 1 on what is no padding; or bool [lines, 1, width, width] of packs; or
            None where nothing is padded.
        position_ids: int64 [lines, width] of packs, else None.
        source: int64 [N], flat position in [lines, width] whose output predicts each completion token.
        targets: int64 [N], the completion tokens, sample by sample.
        sample_index: int64 [N], which of `rows` each belongs to.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    source: Tensor
    targets: Tensor
    sample_index: Tensor

    def states(self, hidden: Tensor) -> Tensor:
        """[N, hidden], of hidden states [lines, width, hidden]: what predicts the completion tokens."""
        return hidden.flatten(0, 1)[self.source]

    def lines(self, first: int, last: int) -> "MicroBatch":
        """The samples from `first` up to `last` alone, of a batch with one line each."""
        assert self.position_ids is None and self.attention_mask is not None
        chosen = (self.sample_index >= first) & (self.sample_index < last)
        source = self.source[chosen] - first * self.input_ids.shape[1]
        lines = (self.input_ids[first:last], self.attention_mask[first:last], None)
        return MicroBatch(
            self.rows[first:last], *lines, source, self.targets[chosen], self.sample_index[chosen] - first
        )


def collate(
    samples: Sequence[Sample], rows: Sequence[int], pad_id: int, device: torch.device | str, width: int = 0
) -> MicroBatch:
    """The micro-batch of `samples[row] for row in rows`, one line each, padded to the longest or to `width`."""
    chosen = [samples[row] for row in rows]
    width = max(width, *(sample.num_tokens for sample in chosen))
    input_ids = torch.full((len(chosen), width), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(len(chosen), width, dtype=torch.int64)
    source = []
    for line, sample in enumerate(chosen):
        input_ids[line, : sample.num_tokens] = torch.tensor(sample.prompt_ids + sample.completion_ids)
        attention_mask[line, : sample.num_tokens] = 1
        first = line * width + len(sample.prompt_ids) - 1
        source.append(torch.arange(first, first + len(sample.completion_ids)))
    tensors = (input_ids, attention_mask, None, torch.cat(source), *_targets(chosen))
    return _micro_batch(rows, tensors, device)


def collate_shared(
    samples: Sequence[Sample], packs: Sequence[Sequence[int]], pad_id: int, device: torch.device | str
) -> MicroBatch:
    """The micro-batch of packs of rows that share a prompt: the prompt once, then the completions one after another.

    A completion sees the prompt and itself, at the positions it has behind the prompt; its last token, which predicts
    nothing, is left out. Outputs and gradients are those of `collate`, up to rounding.
    """
    width = max(packed_length(samples, pack) for pack in packs)
    input_ids = torch.full((len(packs), width), pad_id, dtype=torch.int64)
    positions = torch.zeros(len(packs), width, dtype=torch.int64)
    segments = torch.full((len(packs), width), -1, dtype=torch.int64)  # 0: prompt; 1, 2, ...: completions; -1: padding
    source = []
    for line, pack in enumerate(packs):
        prompt = samples[pack[0]].prompt_ids
        place = len(prompt)
        input_ids[line, :place] = torch.tensor(prompt)
        positions[line, :place] = torch.arange(place)
        segments[line, :place] = 0
        for segment, row in enumerate(pack, 1):
            assert samples[row].prompt_ids == prompt
            read = samples[row].completion_ids[:-1]
            end = place + len(read)
            input_ids[line, place:end] = torch.tensor(read, dtype=torch.int64)
            positions[line, place:end] = torch.arange(len(prompt), len(prompt) + len(read))
            segments[line, place:end] = segment
            source.append(torch.tensor([len(prompt) - 1, *range(place, end)]) + line * width)
            place = end
    own = segments[:, :, None] == segments[:, None, :]
    seen = (own | (segments == 0)[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    seen |= torch.eye(width, dtype=torch.bool)  # padding sees itself, so that no row is empty
    rows = [row for pack in packs for row in pack]
    tensors = (input_ids, seen[:, None], positions, torch.cat(source), *_targets([samples[row] for row in rows]))
    return _micro_batch(rows, tensors, device)


def _targets(chosen: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(sample.completion_ids) for sample in chosen])
    ids = torch.tensor([token for sample in chosen for token in sample.completion_ids], dtype=torch.int64)
    return ids, torch.arange(len(chosen)).repeat_interleave(lengths)


def _micro_batch(rows: Sequence[int], tensors: Sequence[Tensor | None], device: torch.device | str) -> MicroBatch:
    input_ids, mask, positions, source, targets, index = (None if t is None else t.to(device) for t in tensors)
    assert input_ids is not None
    assert source is not None and targets is not None and index is not None
    return MicroBatch(tuple(rows), input_ids, mask, positions, source, targets, index)


def micro_batches(samples: Sequence[Sample], rows: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Split `rows` into micro-batches of at most `max_tokens` padded tokens each, longest samples first.

    A single sample longer than that is a micro-batch of its own.
    """
    for packs in _filled([[row] for row in rows], max_tokens, lambda pack: samples[pack[0]].num_tokens):
        yield [row for pack in packs for row in pack]


def shared_batches(samples: Sequence[Sample], rows: Sequence[int], max_tokens: int) -> Iterator[list[list[int]]]:
    """Split `rows` into micro-batches of packs that share a prompt, likewise.

    A pack is at most `SHARED_WIDTH` tokens long: beyond, attention over a whole pack costs more than the prompt saves.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        by_prompt.setdefault(samples[row].prompt_ids, []).append(row)
    packs: list[list[int]] = []
    for members in by_prompt.values():
        pack: list[int] = []
        for row in sorted(members, key=lambda row: (-samples[row].num_tokens, row)):
            if pack and packed_length(samples, [*pack, row]) > min(SHARED_WIDTH, max_tokens):
                packs.append(pack)
                pack = []
            pack.append(row)
        packs.append(pack)
    yield from _filled(packs, max_tokens, lambda pack: packed_length(samples, pack))


def packed_length(samples: Sequence[Sample], pack: Sequence[int]) -> int:
    """Tokens of a pack: its prompt, and its completions without their last tokens."""
    return len(samples[pack[0]].prompt_ids) + sum(len(samples[row].completion_ids) - 1 for row in pack)


def _filled(
    packs: Sequence[list[int]], max_tokens: int, length: Callable[[list[int]], int]
) -> Iterator[list[list[int]]]:
    part: list[list[int]] = []
    for pack in sorted(packs, key=lambda pack: (-length(pack), pack[0])):
        width = length(part[0]) if part else length(pack)
        if part and width * (len(part) + 1) > max_tokens:
            yield part
            part = []
        part.append(pack)
    if part:
        yield part
