# SPDX-License-Identifier: Apache-2.0
"""What vLLM is asked for a prompt and how its output becomes samples, offline and over HTTP alike."""

import hashlib
from collections.abc import Sequence
from typing import Any

from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, Sampling
from logra.rollout.stops import text_of


def sampling_parameters(prompt: Prompt, sampling: Sampling, update: int, end_ids: frozenset[int]) -> dict[str, Any]:
    """By vLLM's names. Every end id ends a completion, and only those; each sample has a seed of its own."""
    key = f"{sampling.seed} {sampling.purpose} {update} {prompt.first_sample_id}"
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 2
    return {
        "n": prompt.samples,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(end_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": seed,
        # A server would take these from the model's generation settings, and draw from another policy.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_p": 0.0,
        "logprobs": 0,
    }


Output = tuple[Sequence[int], Sequence[float], str | None]


def completed(prompt: Prompt, outputs: Sequence[Output], stop: Sequence[str], tokenizer: Any) -> list[Sample]:
    """The samples of a prompt, from ids, log-probabilities and reason of each."""
    found = []
    for place, (ids, logprobs, finish) in enumerate(outputs):
        sample_id, text = prompt.first_sample_id + place, text_of(tokenizer, ids, stop)
        truncated = finish == "length"
        found.append(Sample(sample_id, prompt.group_id, prompt.ids, tuple(ids), tuple(logprobs), text, truncated))
    return found
