# SPDX-License-Identifier: Apache-2.0
"""The update rules that a run can choose from, behind one small interface, so that they can be compared."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from logra.config import DEFAULT_TARGETS
from logra.optim.optimizer import LograOptimizer
from logra.run_settings import MethodSettings


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        grad_norm: norm of all gradients (or sketches) before clipping.
        applied: whether weights were changed; a gradient that is not finite changes nothing.
        realised_stored, realised_compute: shares of the step that arrived; None where not measured.
    """

    grad_norm: float
    applied: bool
    realised_stored: float | None = None
    realised_compute: float | None = None


class UpdateRule(Protocol):
    """Takes the gradient of a loss that was given to backward, and changes the model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose parameter groups carry the step size."""
        ...

    def step(self) -> StepReport:
        """Change the weights, and drop the gradients."""
        ...

    def computing_weights(self) -> dict[str, Tensor]:
        """By name, what bf16 compute uses where that is not the weight rounded to nearest."""
        ...


class LograRule:
    """`LograOptimizer` in its plain form."""

    def __init__(self, model: Any, settings: MethodSettings, seed: int) -> None:
        self.optimizer: LograOptimizer = LograOptimizer(model, settings.logra, seed=seed)

    def step(self) -> StepReport:
        """Propose, then apply or skip."""
        proposal = self.optimizer.propose()
        if proposal.skip_reason is not None:
            self.optimizer.skip()
            return StepReport(proposal.sketch_norm, False)
        applied = self.optimizer.apply()
        return StepReport(applied.sketch_norm, True, applied.realised_stored, applied.realised_compute)

    def computing_weights(self) -> dict[str, Tensor]:
        """The dithered copies, if the optimizer keeps them."""
        found = {}
        for layer in self.optimizer.sketches.layers.values():
            if layer.compute_copy is not None:
                copy = layer.compute_copy
                found[f"{layer.name}.weight"] = copy.T.contiguous() if layer.transposed else copy
        return found


class DenseRule:
    """AdamW or SGD on parameters that have gradients: all of them, or LoRA's adapters."""

    def __init__(self, model: Any, settings: MethodSettings) -> None:
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.max_norm = settings.max_norm
        self.optimizer: torch.optim.Optimizer
        if settings.name == "sgd":
            self.optimizer = torch.optim.SGD(self.trained, lr=settings.lr)
        else:
            self.optimizer = torch.optim.AdamW(
                self.trained, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
            )

    def step(self) -> StepReport:
        """Clip, and step unless the gradient is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm))
        applied = math.isfinite(norm)
        if applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepReport(norm, applied)

    def computing_weights(self) -> dict[str, Tensor]:
        """None."""
        return {}


def add_adapters(model: Any, settings: MethodSettings) -> Any:
    """Put LoRA's adapters into the model, in place; returns peft's wrapper, which knows how to merge them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=list(DEFAULT_TARGETS))
    return get_peft_model(model, config)


def make_rule(model: Any, settings: MethodSettings, seed: int) -> UpdateRule:
    """The rule that `settings.name` names; for "lora", call `add_adapters` first."""
    return LograRule(model, settings, seed) if settings.name == "logra" else DenseRule(model, settings)


def step_size_factor(settings: MethodSettings, update: int, updates: int) -> float:
    """What the step size is multiplied by at `update` (from 1) of `updates`."""
    if update <= settings.warmup_updates:
        return update / (settings.warmup_updates + 1)
    if settings.schedule == "constant":
        return 1.0
    progress = (update - settings.warmup_updates) / max(1, updates - settings.warmup_updates)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
