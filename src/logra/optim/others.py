# SPDX-License-Identifier: Apache-2.0
"""The parameters that no sketch covers: which they are, and AdamW's step on them before it is taken."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from logra.parallel.rows import exchanged, local
from logra.sketch.hooks import Sketches


def others_of(model: nn.Module, sketches: Sketches) -> list[nn.Parameter]:
    """Every parameter that is not a selected weight."""
    selected = {id(layer.weight) for layer in sketches}
    return [parameter for parameter in model.parameters() if id(parameter) not in selected]


def refuse_short_others(model: nn.Module, others: list[nn.Parameter]) -> None:
    """AdamW's steps need fp32.

    Raises:
        ValueError: a parameter that would be trained is shorter; the message says what to do.
    """
    short = {id(each) for each in others if each.requires_grad and each.dtype != torch.float32}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in short]
    if names:
        raise ValueError(
            f"others='adamw' trains {len(names)} parameters that are not float32, such as {names[0]}: rounding would "
            f"swallow AdamW's steps. Load the model in float32 and set storage='split' or 'bf16' for the selected "
            f"weights, or use others='frozen'."
        )


def cloned_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a parameter's optimizer state that a later step does not change."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


@torch.no_grad()
def values_after(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], step: Callable[[], object]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """What `step` would make of the parameters; they are as before afterwards, bit for bit.

    Returns:
        What is held here of the values after the step, and copies of the optimizer's state from before it: the state
        itself has advanced.
    """
    state = [cloned_state(optimizer.state.get(parameter, {})) for parameter in parameters]
    before = [local(parameter).clone() for parameter in parameters]
    step()
    after = [exchanged(parameter, value) for parameter, value in zip(parameters, before, strict=True)]
    return after, state


def put_back(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], state: Sequence[dict[str, Any]]
) -> None:
    """Restore the state that `values_after` copied."""
    for parameter, each in zip(parameters, state, strict=True):
        if each:
            optimizer.state[parameter] = each
        else:
            optimizer.state.pop(parameter, None)
