# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: answers trainers with completions, and keeps its weights equal to theirs."""

from collections.abc import Callable

from logra.engines.requests import Completions, Request, is_request
from logra.rollout.engine import RolloutEngine
from logra.sync.replica import Answer


class Host:
    """One engine and its replica; nothing is drawn while weights are half changed, for there is one thread.

    Args:
        engine: draws completions.
        answer: of the replica on its weights.
    """

    def __init__(self, engine: RolloutEngine, answer: Callable[[bytes], Answer]) -> None:
        self.engine, self.answer = engine, answer
        self.version: int | None = None

    def __call__(self, data: bytes) -> bytes:
        """To whatever a trainer sends."""
        if is_request(data):
            return self._drawn(data).to_bytes()
        found = self.answer(data)
        self.version = found.version
        return found.to_bytes()

    def _drawn(self, data: bytes) -> Completions:
        if self.version is None:
            return Completions(None, (), "this engine has no whole weights of the trainer yet")
        try:
            request = Request.from_bytes(data)
            if not all(prompt.ids for prompt in request.prompts):
                raise ValueError("a prompt has no tokens; give each problem a prompt")
            samples = self.engine.generate(request.prompts, request.sampling, request.update)
        except (ValueError, TypeError, LookupError) as error:
            return Completions(self.version, (), f"{type(error).__name__}: {error}")
        return Completions(self.version, samples)
