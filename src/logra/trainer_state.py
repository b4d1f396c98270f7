# SPDX-License-Identifier: Apache-2.0
"""All that a run needs to go on exactly, as plain tensors and numbers, for any number of processes.

The folder of a checkpoint holds the weights that compute. What it does not hold exactly (fp32 weights of which bf16 is
the computing form, LoRA's adapters) is here, with the optimizer's state, the problems drawn, curriculum, baseline,
alarms and best scores.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra.optim.optimizer import LograOptimizer
from logra.parallel.processes import Processes
from logra.parallel.rows import local
from logra.saved_state import held_as, load_nested, save_nested

FORMAT = 2


def inexact_weights(model: Any, written: dict[str, torch.dtype], adapted: Any) -> dict[str, Tensor]:
    """By name, the weights that a written folder does not hold bit for bit.

    Args:
        model: the Hugging Face model.
        written: dtypes in its folder.
        adapted: peft's wrapper; then all that is trained, by the wrapper's names.
    """
    if adapted is not None:
        return {name: value.detach() for name, value in adapted.named_parameters() if value.requires_grad}
    return {name: value for name, value in model.state_dict().items() if written.get(name, value.dtype) != value.dtype}


def save_state(
    folder: Path,
    numbers: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    weights: dict[str, Tensor],
    processes: Processes,
) -> None:
    """Write it.

    Args:
        folder: for it alone, seen by all processes.
        numbers: `TrainingRun.state()`.
        optimizer: of the update rule.
        weights: from `inexact_weights`.
        processes: of the run; each writes what it holds.
    """
    state = {
        "format": FORMAT,
        "numbers": numbers,
        "optimizer": optimizer.state_dict(),
        "weights": weights,
        "torch_rng": torch.get_rng_state(),
    }
    save_nested(folder, state, processes)


def load_state(folder: Path, processes: Processes) -> dict[str, Any]:
    """Read it; nothing in it is executed.

    Raises:
        ValueError: it was written by another version of this format.
    """
    state = load_nested(folder, processes)
    if state.get("format") != FORMAT:
        raise ValueError(f"{folder} has format {state.get('format')}, this version reads {FORMAT}")
    optimizer = state["optimizer"]
    optimizer["state"] = {int(index): value for index, value in optimizer["state"].items()}
    return state


def restore(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and optimizer back, in place.

    Args:
        state: from `load_state`.
        model: loaded from the checkpoint's folder; peft's wrapper where there is one.
        optimizer: fresh, of the same settings.

    Raises:
        ValueError: the checkpoint is of another model or other settings.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    unknown = sorted(set(state["weights"]) - set(own))
    if unknown:
        raise ValueError(f"the checkpoint has weights that the model lacks: {unknown[:5]}")
    with torch.no_grad():
        for name, value in state["weights"].items():
            local(own[name]).copy_(local(held_as(value, own[name])))
    saved, parameters = state["optimizer"], [p for group in optimizer.param_groups for p in group["params"]]
    sketched = len(optimizer.sketches) if isinstance(optimizer, LograOptimizer) else 0
    for index, entries in saved["state"].items():
        if index < sketched:
            continue  # held by rows, whatever the parameter's layout; the optimizer sees to it
        for name, value in entries.items():
            if isinstance(value, Tensor):
                entries[name] = held_as(value, parameters[index])
    optimizer.load_state_dict(saved)
    torch.set_rng_state(state["torch_rng"])
