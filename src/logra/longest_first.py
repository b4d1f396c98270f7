# SPDX-License-Identifier: Apache-2.0
"""The largest micro-batch that a run can meet, tried before its first update: what does not fit fails at once."""

import torch

from logra.learner import Learner
from logra.memory_trace import Lengths
from logra.rl.batch import Sample, collate


def try_longest(learner: Learner, lengths: Lengths) -> None:
    """Forward and backward twice, as an update does it, gradients and room for moments included; nothing is kept.

    Raises:
        ValueError: memory does not suffice; the message says what to change.
    """
    prompt = lengths.width - lengths.completion
    samples = [Sample(i, i, (0,) * prompt, (0,) * lengths.completion, (), "", False) for i in range(lengths.lines)]
    policy, optimizer = learner.policy, learner.rule.optimizer
    try:
        micro = collate(samples, range(lengths.lines), policy.pad_id, policy.device)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments = [torch.empty_like(each) for each in trained if each.requires_grad and not optimizer.state.get(each)]
        moments += [torch.empty_like(each) for each in moments]
        policy.model.train()
        for _ in range(2):
            (learner.logprobs(policy.causal, micro).logprobs.sum() * 0.0).backward()
        del moments
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not _is_for_want_of_memory(error):
            raise
        raise ValueError(
            f"a micro-batch of {lengths.lines} x {lengths.width} tokens, which this run can meet, does not fit "
            f"({str(error).splitlines()[0]}). Lower learning.micro_batch_tokens or rollout.max_tokens, set "
            f"model.gradient_checkpointing, or see `logra plan`."
        ) from error
    finally:
        optimizer.zero_grad()


def _is_for_want_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
