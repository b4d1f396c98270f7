# SPDX-License-Identifier: Apache-2.0
"""A step that has been sized but not taken, as something that a model can be looked at with.

    with displacement.at(0.5):
        ...  # the model computes as if half of the step had been taken

No weight of a low-rank step changes for that: each selected layer adds -alpha f (x A^T) D^T to its output (section 2.4
of the design). A dense step (AdamW, SGD, LoRA's adapters) is held as a second copy of the weights, whose places are
exchanged.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from logra.optim.merge import LayerStep, formed
from logra.optim.proposal import LayerProposal, Proposal
from logra.optim.storage import WeightStorage
from logra.parallel.rows import Rows, exchanged, local
from logra.sketch.layer_sketch import plain_linear


class Displacement(Protocol):
    """A change of weights.

    Attributes:
        differentiable: whether `along` works.
    """

    differentiable: bool

    def at(self, alpha: float, as_stored: bool = False) -> AbstractContextManager[None]:
        """Inside, the model computes with `alpha` times the change; `as_stored`: rounded as it would be stored."""
        ...

    def along(self, scale: Tensor) -> AbstractContextManager[None]:
        """Inside, with `scale` times the change, where `scale` may carry a forward-mode tangent."""
        ...

    def moves(self, parameter: nn.Parameter) -> bool:
        """Whether the change has a part in this parameter."""
        ...


class LowRankShift:
    """The forward of a selected layer after `scale` times its step: an ordinary product and two thin ones."""

    def __init__(self, step: LayerStep, rows: Rows, scale: Tensor | float) -> None:
        self.step, self.rows, self.scale = step, rows, scale

    def __call__(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of `inputs`."""
        step, dtype = self.step, inputs.dtype
        plain = plain_linear(inputs, weight, None)
        with torch.autocast(inputs.device.type, enabled=False):
            reduced = inputs @ step.projection_integers.to(dtype).T
            factors, scales = self.rows.whole(step.factors), self.rows.whole(step.scales)
            move = (reduced @ factors.to(dtype).T) * scales.to(dtype)
            if step.decay_factor != 1.0:
                move = move + plain * (1.0 - step.decay_factor)
            shifted = plain - self.scale * move
            return shifted if bias is None else shifted + bias.to(dtype)


class FormedShift:
    """The forward of a selected layer with its new weight, formed as it would be stored and freed again."""

    def __init__(self, storage: WeightStorage, step: LayerStep) -> None:
        self.storage, self.step = storage, step

    def __call__(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of `inputs`."""
        return plain_linear(inputs, self.storage.layer.rows.whole(formed(self.storage, self.step)), bias)


Shift = LowRankShift | FormedShift


class LowRankDisplacement:
    """The step that `LograOptimizer.propose` sized.

    Args:
        proposal: not yet applied, and of the present sketches.
        storages: of the optimizer, by layer name.
        others: the step of parameters that no sketch covers, if they are trained.
    """

    def __init__(
        self, proposal: Proposal, storages: dict[str, WeightStorage], others: "DenseDisplacement | None" = None
    ) -> None:
        self.proposal, self.storages, self.others = proposal, storages, others
        self.differentiable = others is None
        self._unit = [(each, proposal.step_of(each, 1.0)) for each in proposal.layers]
        self._weights = {id(each.layer.weight) for each, step in self._unit if step is not None}

    @contextmanager
    def at(self, alpha: float, as_stored: bool = False) -> Iterator[None]:
        """The model after `alpha` times the step."""
        shifts = [(each, self._shift(each, step, alpha, as_stored)) for each, step in self._unit]
        with self._shifted(shifts), nullcontext() if self.others is None else self.others.at(alpha):
            yield

    @contextmanager
    def along(self, scale: Tensor) -> Iterator[None]:
        """The model after `scale` times the step; `scale` may carry a tangent."""
        if not self.differentiable:
            raise NotImplementedError(
                "AdamW's step on other parameters has no forward-mode derivative here; use secant"
            )
        shifts = [(each, None if s is None else LowRankShift(s, each.layer.rows, scale)) for each, s in self._unit]
        with self._shifted(shifts):
            yield

    def moves(self, parameter: nn.Parameter) -> bool:
        """Whether the step reaches it."""
        return id(parameter) in self._weights or (self.others is not None and self.others.moves(parameter))

    def _shift(self, proposed: LayerProposal, unit: LayerStep | None, alpha: float, as_stored: bool) -> Shift | None:
        """fp32 weights take a step as it is, up to the rounding of single sums; shorter ones are formed."""
        storage = self.storages[proposed.layer.name]
        if unit is None:
            return None
        if not as_stored or storage.kind == "fp32":
            return LowRankShift(unit, proposed.layer.rows, alpha)
        step = self.proposal.step_of(proposed, alpha)
        return None if step is None else FormedShift(storage, step)

    @contextmanager
    def _shifted(self, shifts: Sequence[tuple[LayerProposal, Shift | None]]) -> Iterator[None]:
        try:
            for proposed, shift in shifts:
                proposed.layer.shift = shift
            yield
        finally:
            for proposed, _ in shifts:
                proposed.layer.shift = None


class DenseDisplacement:
    """A change held as a second copy of the parameters.

    Args:
        parameters: that change; they hold their values from before.
        after: the values that the full change would give, in the same order.
    """

    differentiable = False

    def __init__(self, parameters: Sequence[nn.Parameter], after: Sequence[Tensor]) -> None:
        self.parameters, self.after = list(parameters), [local(value) for value in after]
        self._ids = {id(parameter) for parameter in parameters}

    def values(self, index: int, alpha: float) -> Tensor:
        """What is held here of a parameter after `alpha` times the change; the very values of `after` at 1."""
        if alpha == 1.0:
            return self.after[index]
        before = local(self.parameters[index])
        return torch.add(before, self.after[index] - before, alpha=alpha)

    @contextmanager
    def at(self, alpha: float, as_stored: bool = False) -> Iterator[None]:
        """The model after `alpha` times the change; it is stored as it is computed."""
        before = []
        try:
            for index, parameter in enumerate(self.parameters):
                before.append(exchanged(parameter, self.values(index, alpha)))
            yield
        finally:
            for parameter, value in zip(self.parameters, before, strict=False):
                exchanged(parameter, value)

    def along(self, scale: Tensor) -> AbstractContextManager[None]:
        """Not for dense changes.

        Raises:
            NotImplementedError: always; the secant estimator needs `at` alone.
        """
        raise NotImplementedError("a dense step has no forward-mode derivative here; use the secant estimator")

    def moves(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of the parameters."""
        return id(parameter) in self._ids

    def bytes(self) -> int:
        """Of the second copy."""
        return sum(value.numel() * value.element_size() for value in self.after)
