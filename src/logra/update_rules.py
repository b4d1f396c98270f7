# SPDX-License-Identifier: Apache-2.0
"""The update rules that a run can choose from, behind one small interface, so that they can be compared.

A step has two phases: `propose` sizes it and changes nothing, `apply(alpha)` takes it, `skip` gives it up.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from logra.config import DEFAULT_TARGETS
from logra.kl.displacement import DenseDisplacement, Displacement, LowRankDisplacement
from logra.optim.optimizer import LograOptimizer
from logra.optim.others import put_back, values_after
from logra.parallel.rows import exchanged, whole
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

    def propose(self) -> Displacement | None:
        """The step, sized and not taken; None if it must not be taken."""
        ...

    def apply(self, alpha: float = 1.0) -> StepReport:
        """Take `alpha` times the proposed step, advance moments once, drop the gradients."""
        ...

    def skip(self) -> StepReport:
        """Give the step up: weights and moments stay bit for bit, gradients go."""
        ...

    def step(self) -> StepReport:
        """Propose, then apply or skip."""
        ...

    def computing_weights(self) -> dict[str, Tensor]:
        """By name, what bf16 compute uses where that is not the weight rounded to nearest."""
        ...


class LograRule:
    """`LograOptimizer` in its two-phase form."""

    def __init__(self, model: Any, settings: MethodSettings, seed: int) -> None:
        self.optimizer: LograOptimizer = LograOptimizer(model, settings.logra, seed=seed)
        self._norm = math.nan

    def propose(self) -> LowRankDisplacement | None:
        """The step as it would be merged."""
        proposal = self.optimizer.propose()
        self._norm = proposal.sketch_norm
        if proposal.skip_reason is not None:
            return None
        parameters, after = self.optimizer.others_after()
        others = DenseDisplacement(parameters, after) if parameters else None
        return LowRankDisplacement(proposal, self.optimizer.storages, others)

    def apply(self, alpha: float = 1.0) -> StepReport:
        """Merge it."""
        applied = self.optimizer.apply(alpha)
        return StepReport(applied.sketch_norm, True, applied.realised_stored, applied.realised_compute)

    def skip(self) -> StepReport:
        """Count it as skipped."""
        self.optimizer.skip()
        return StepReport(self._norm, False)

    def step(self) -> StepReport:
        """Propose, then apply or skip."""
        proposal = self.optimizer.propose()
        self._norm = proposal.sketch_norm
        return self.skip() if proposal.skip_reason is not None else self.apply()

    def computing_weights(self) -> dict[str, Tensor]:
        """The dithered copies, if the optimizer keeps them."""
        found = {}
        for layer in self.optimizer.sketches.layers.values():
            if layer.compute_copy is not None:
                copy = layer.compute_copy
                found[f"{layer.name}.weight"] = copy.T.contiguous() if layer.transposed else copy
        return found


class DenseRule:
    """AdamW or SGD on parameters that have gradients: all of them, or LoRA's adapters.

    Between `propose` and `apply` two copies of the parameters and of the moments exist; `step` needs none.
    """

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
        self.copied_bytes = 0
        self._norm = math.nan
        self._proposed: DenseDisplacement | None = None
        self._moments: list[dict[str, Any]] = []

    def propose(self) -> DenseDisplacement | None:
        """What the optimizer would do; parameters are as before, moments wait for `apply` or `skip`."""
        if not self._clip():
            return None
        after, self._moments = values_after(self.optimizer, self.trained, self.optimizer.step)
        self._proposed = DenseDisplacement(self.trained, after)
        moments = sum(_bytes(each) for state in self._moments for each in state.values() if isinstance(each, Tensor))
        self.copied_bytes = self._proposed.bytes() + moments
        return self._proposed

    @torch.no_grad()
    def apply(self, alpha: float = 1.0) -> StepReport:
        """Take it; at alpha 1 the very values that the optimizer gave."""
        if self._proposed is None:
            raise RuntimeError("there is nothing to apply: call propose() first, once for each apply()")
        for index, parameter in enumerate(self.trained):
            exchanged(parameter, self._proposed.values(index, alpha))
        return self._done(True)

    def skip(self) -> StepReport:
        """Restore the moments."""
        if self._proposed is not None:
            put_back(self.optimizer, self.trained, self._moments)
        return self._done(False)

    def step(self) -> StepReport:
        """Clip, and step unless the gradient is not finite."""
        applied = self._clip()
        if applied:
            self.optimizer.step()
        return self._done(applied)

    def computing_weights(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def _clip(self) -> bool:
        self._norm = float(whole(torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm)))
        return math.isfinite(self._norm)

    def _done(self, applied: bool) -> StepReport:
        self._proposed, self._moments = None, []
        self.optimizer.zero_grad()
        return StepReport(self._norm, applied)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
