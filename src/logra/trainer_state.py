# SPDX-License-Identifier: Apache-2.0
"""All that a run needs to go on exactly, as plain tensors and numbers: a file that loads with `weights_only=True`.

The folder of a checkpoint holds the weights that compute. What it does not hold exactly (fp32 weights of which bf16 is
the computing form, LoRA's adapters) is here, with the optimizer's state, the problems drawn, curriculum, baseline,
alarms and best scores.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1


def inexact_weights(model: Any, written: dict[str, Tensor], adapted: Any) -> dict[str, Tensor]:
    """By name, the weights that a written folder does not hold bit for bit.

    Args:
        model: the Hugging Face model.
        written: what its folder holds.
        adapted: peft's wrapper; then all that is trained, by the wrapper's names.
    """
    if adapted is not None:
        return {name: value.detach() for name, value in adapted.named_parameters() if value.requires_grad}
    return {name: value for name, value in model.state_dict().items() if written[name].dtype != value.dtype}


def save_state(
    path: Path, numbers: dict[str, Any], optimizer: torch.optim.Optimizer, weights: dict[str, Tensor]
) -> None:
    """Write the file.

    Args:
        path: of the file.
        numbers: `TrainingRun.state()`.
        optimizer: of the update rule.
        weights: from `inexact_weights`.
    """
    state = {
        "format": FORMAT,
        "numbers": numbers,
        "optimizer": optimizer.state_dict(),
        "weights": weights,
        "torch_rng": torch.get_rng_state(),
    }
    torch.save(state, path)


def load_state(path: Path) -> dict[str, Any]:
    """Read the file; nothing in it is executed.

    Raises:
        ValueError: it was written by another version of this format.
    """
    state = torch.load(path, weights_only=True, map_location="cpu")
    if state.get("format") != FORMAT:
        raise ValueError(f"{path} has format {state.get('format')}, this version reads {FORMAT}")
    assert isinstance(state, dict)
    return state


def restore(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put weights and optimizer back, in place.

    Args:
        state: from `load_state`.
        model: loaded from the checkpoint's folder; peft's wrapper where there is one.
        optimizer: fresh, of the same settings.
    """
    missing = model.load_state_dict(state["weights"], strict=False)
    if missing.unexpected_keys:
        raise ValueError(f"the checkpoint has weights that the model lacks: {missing.unexpected_keys[:5]}")
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
