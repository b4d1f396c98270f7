# SPDX-License-Identifier: Apache-2.0
"""Whether a change of the weights reaches what an engine computes with, seen in its log-probabilities."""

from collections.abc import Sequence

from logra.engines.requests import Completions, Request
from logra.rollout.engine import Prompt, Sampling
from logra.sync.replica import Answer
from logra.sync.sender import Link, SyncLost

_GREEDY = Sampling(temperature=0.0, max_tokens=4, purpose="probe")
_NATS = 1e-3


def moved_by(link: Link, prompt_ids: Sequence[int], forced: bytes, seconds: float) -> list[float]:
    """Change all weights; the log-probabilities of greedy tokens before that.

    Raises:
        SyncLost: they are the same afterwards, or the engine does not take part.
    """
    before = _logprobs(link, prompt_ids, seconds)
    answer = Answer.from_bytes(_asked(link, forced, seconds))
    if answer.refusal is not None:
        raise SyncLost(f"engine {link.name} refuses a change of its weights: {answer.refusal}")
    if _logprobs(link, prompt_ids, seconds) == before:
        raise SyncLost(
            f"engine {link.name}: all its weights were changed, but its log-probabilities stayed as they were, so it "
            f"computes with other ones (a packed copy, or a cache). Leave engines.options out, or use another engine"
        )
    return before


def back_at(link: Link, prompt_ids: Sequence[int], before: Sequence[float], seconds: float) -> None:
    """After the weights are back, the log-probabilities must be.

    Raises:
        SyncLost: they are not.
    """
    again = _logprobs(link, prompt_ids, seconds)
    if len(again) != len(before) or any(abs(one - two) > _NATS for one, two in zip(again, before, strict=True)):
        raise SyncLost(
            f"engine {link.name} has its weights back, but its log-probabilities are {again}, not {list(before)}: it "
            f"serves something that was computed with other weights"
        )


def _logprobs(link: Link, prompt_ids: Sequence[int], seconds: float) -> list[float]:
    request = Request((Prompt(0, tuple(prompt_ids), 0, 1),), _GREEDY, 0)
    found = Completions.from_bytes(_asked(link, request.to_bytes(), seconds))
    if found.error is not None:
        raise SyncLost(f"engine {link.name} cannot complete a prompt: {found.error}")
    return list(found.samples[0].rollout_logprobs)


def _asked(link: Link, data: bytes, seconds: float) -> bytes:
    try:
        return link.ask(data, seconds)
    except OSError as error:
        raise SyncLost(f"engine {link.name} does not answer at start: {error or type(error).__name__}") from error
