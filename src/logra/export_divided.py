# SPDX-License-Identifier: Apache-2.0
"""One ordinary Hugging Face folder from a divided model, without the whole model in any process: each process writes
the rows that it holds, and the files are put together on disk (PyTorch's distributed checkpoint).
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logra.parallel.processes import Processes
from logra.parallel.rows import local, whole, with_part
from logra.saved_state import checkpointing

FILE_BYTES = 4 * 2**30
_PARTS = "sharded"


def export_weights(model: Any, compute: str) -> dict[str, Tensor]:
    """By name, what this process holds of the weights that compute; of tied ones, the first name; adapters merged.

    Args:
        model: divided; with peft's adapters in it or not.
        compute: "bf16" or "fp32"; divided models compute everything in it.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    adapted = dict(_adapted_layers(model))
    for name, value in model.named_parameters(remove_duplicate=False):
        if ".lora_" in name or id(value) in seen:
            continue
        seen.add(id(value))
        place = name.removesuffix(".base_layer.weight")
        merged = _merged(value, adapted[place]) if place in adapted and name.endswith("base_layer.weight") else value
        found[name.replace(".base_layer.", ".")] = _short(merged) if compute == "bf16" else merged.detach()
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            found[name] = buffer
    return found


def _short(value: Tensor) -> Tensor:
    return value.detach().to(torch.bfloat16) if value.is_floating_point() else value


def _adapted_layers(model: nn.Module) -> Any:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _merged(weight: Tensor, layer: Any) -> Tensor:
    """W + scaling B A: of the rows held here, with the rows of B held here and the whole of A."""
    (adapter,) = layer.active_adapters
    up, down = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
    change = local(up).to(torch.float32) @ whole(down).to(torch.float32) * layer.scaling[adapter]
    return with_part(weight, (local(weight).to(torch.float32) + change).to(weight.dtype))


def export_divided(folder: Path, model: Any, tokenizer: Any, compute: str, card: str, processes: Processes) -> None:
    """Write everything into `folder`, which all processes see; every process calls it.

    Args:
        folder: empty.
        model: divided.
        tokenizer: of the model.
        compute: "bf16" or "fp32".
        card: the model card.
        processes: that hold the model.

    Raises:
        OSError: a process could not write; then all of them raise.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    weights = export_weights(model, compute)
    writer = HuggingFaceStorageWriter(
        str(folder), _file_of_each(weights), save_distributed=True, enable_consolidation=True
    )
    with checkpointing(OSError):
        dcp.save(weights, storage_writer=writer)

    def finish() -> None:
        shutil.rmtree(folder / _PARTS)
        config = model.config
        before, config.dtype = config.dtype, torch.bfloat16 if compute == "bf16" else torch.float32
        try:
            config.save_pretrained(folder)
        finally:
            config.dtype = before
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card)

    processes.of_first(finish)


def _file_of_each(weights: dict[str, Tensor]) -> dict[str, int]:
    """Number of the file, from 1, that each tensor goes to."""
    found, number, size = {}, 1, 0
    for name, value in weights.items():
        more = value.numel() * value.element_size()
        if size and size + more > FILE_BYTES:
            number, size = number + 1, 0
        found[name], size = number, size + more
    return found
