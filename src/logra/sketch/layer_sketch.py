# SPDX-License-Identifier: Apache-2.0
"""One selected weight: how its backward adds H^T (X A^T) to the sketch, and never builds H^T X.

Shapes: X [tokens, in_features], H [tokens, out_features], A [rank, in_features], P = X A^T
[tokens, rank], S = H^T P [out_features, rank]. Equation: section 2.1 of the design; arXiv 2610.06647.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logra.parallel.rows import Holders, Rows, local
from logra.sketch.projection import Projection


class InputGroup:
    """The layers that read one tensor: they share the projection A and the projected inputs P."""

    def __init__(self, name: str, in_features: int, rank: int) -> None:
        self.name, self.in_features, self.rank = name, in_features, rank
        self.layers: list[LayerSketch] = []
        self.projection: Projection | None = None
        self._inputs: Tensor | None = None
        self._version = -1
        self._read: tuple[Tensor, Tensor] | None = None
        self._readers = 0

    def read(self, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`inputs` in `dtype`, and P up to the row scales of A: X integers^T, [tokens, rank] in `dtype`.

        Both are made once for all readers of `inputs`, outside of autograd, and held only until
        every layer of the group has read them.
        """
        if not self.holds(inputs) or self._read is None or self._read[0].dtype != dtype:
            assert self.projection is not None
            with torch.no_grad():
                computed = inputs.detach().to(dtype)
                projected = computed.reshape(-1, self.in_features) @ self.projection.integers().to(dtype).T
            self._inputs, self._version, self._readers = inputs, inputs._version, 0
            self._read = (computed, projected)
        read = self._read
        assert read is not None
        self._readers += 1
        self.forget_if_read_by_all()
        return read

    def forget_if_read_by_all(self) -> None:
        """Drop what is held once no layer waits for it."""
        if self._readers >= len(self.layers):
            self.forget_inputs()

    def holds(self, inputs: Tensor) -> bool:
        """Whether `inputs`, unmodified, is the tensor last read."""
        return self._inputs is inputs and self._version == inputs._version

    def waits_for_readers(self) -> bool:
        """Whether some layer of the group has not yet read what is held."""
        return self._inputs is not None

    def forget_inputs(self) -> None:
        """Drop what is held."""
        self._inputs = self._read = None


class LayerSketch:
    """One selected weight and its sketch.

    Attributes:
        name: stable name of the module.
        module: the layer; where several share the weight, the first of them.
        transposed: whether the parameter is stored [in_features, out_features].
        rows: which rows of the weight this process holds; all of them unless `fully_shard` divided it.
        sketch: S, fp32 [rows held, rank], or None before the first backward of an update.
        collect: takes H^T P and the scales of A instead of the sketch, where sums are over processes; or None.
        compute_copy: bf16 weight used instead of `weight` in bf16 compute, if kept.
        refresh: called before the weight is used, so that what is kept beside it can follow a change; or None.
        shift: while a step is looked at without being taken, what the layer computes instead from inputs, weight and
            bias; or None.
        detached: whether the model has its own forward back.
        group: the input group, set when sketches are attached.
    """

    group: InputGroup

    def __init__(self, name: str, module: nn.Module, transposed: bool) -> None:
        self.name, self.module, self.transposed = name, module, transposed
        self.rows = Rows(self.out_features, Holders.of(self.weight))
        # While the layer computes, `weight` is a gathered whole.
        self._in_parts = None if self.rows.holders.mesh is None else self.weight
        self.sketch: Tensor | None = None
        self.collect: Callable[[LayerSketch, Tensor, Tensor], None] | None = None
        self.compute_copy: Tensor | None = None
        self.refresh: Callable[[], None] | None = None
        self.shift: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self.detached = False
        # Gives the output a gradient even where neither the input nor the weight asks for one.
        self.anchor = torch.zeros((), requires_grad=True, device=self.weight.device)
        self.seen_backward = False

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, looked up anew: wrappers such as FSDP replace it."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def rows_view(self) -> Tensor:
        """The rows held here, [rows held, in_features], sharing the weight's storage."""
        held = local(self.weight if self._in_parts is None else self._in_parts)
        return held.T if self.transposed else held

    @property
    def out_features(self) -> int:
        """Rows of the whole weight."""
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        """Columns of the weight and of the projection."""
        return self.weight.shape[0 if self.transposed else 1]

    def computing_weight(self, dtype: torch.dtype) -> Tensor:
        """[out_features, in_features] as the forward uses it in `dtype`."""
        if self.refresh is not None:
            self.refresh()
        kept = self.compute_copy is not None and dtype == torch.bfloat16
        weight = self.compute_copy if kept else self.weight
        assert weight is not None
        return weight.T if self.transposed and not kept else weight

    def add(self, output_grads: Tensor, projected_inputs: Tensor) -> None:
        """Add H^T P to S: products in the compute dtype, the sum over micro-batches in fp32.

        Args:
            output_grads: H, [tokens, out_features].
            projected_inputs: the P that `InputGroup.read` returned for the same tokens.
        """
        assert self.group.projection is not None
        product = output_grads.T @ projected_inputs
        scales = self.group.projection.row_scales()
        self.seen_backward = True
        if self.collect is not None:
            self.collect(self, product, scales)
        elif self.sketch is None:
            wide = torch.float64 if product.dtype == torch.float64 else torch.float32
            self.sketch = product.to(wide).mul_(scales)
        else:
            self.sketch.addcmul_(product, scales.to(self.sketch.dtype))


class SketchedLinear(torch.autograd.Function):
    """y = X W^T + b, whose backward sketches the weight's gradient into the layer.

    `inputs` carries the autograd graph; `computed` is the same values in the compute dtype.
    """

    @staticmethod
    def forward(
        inputs: Tensor,
        computed: Tensor,
        projected: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LayerSketch,
        _: Any,
    ) -> Tensor:
        """The ordinary product."""
        return plain_linear(computed, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the weight and P, not X."""
        source, _, projected, weight, bias, layer, _ = inputs
        ctx.save_for_backward(weight, projected)
        ctx.save_for_forward(weight)
        ctx.layer = weakref.ref(layer)
        ctx.input_dtype, ctx.bias_dtype = source.dtype, None if bias is None else bias.dtype
        ctx.compute_dtype = output.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add to the sketch; give the input's and the bias's gradient where they are wanted."""
        weight, projected = ctx.saved_tensors
        layer = ctx.layer()
        if layer is None or layer.detached:
            raise RuntimeError("a backward ran after its model's sketches were detached; run the forward again")
        flat = output_grads.reshape(-1, output_grads.shape[-1])
        input_grads = bias_grads = None
        with torch.autocast(flat.device.type, enabled=False):
            layer.add(flat, projected)
            if ctx.needs_input_grad[0]:
                input_grads = (output_grads @ weight.to(output_grads.dtype)).to(ctx.input_dtype)
            if ctx.needs_input_grad[4]:
                bias_grads = flat.sum(0, dtype=torch.promote_types(flat.dtype, torch.float32)).to(ctx.bias_dtype)
        return input_grads, None, None, None, bias_grads, None, None

    @staticmethod
    def jvp(ctx: Any, inputs_t: Tensor | None, *tangents: Tensor | None) -> Tensor | None:
        """The tangent through the ordinary product."""
        (weight,) = ctx.saved_tensors
        bias_t = tangents[3]
        tangent = None if inputs_t is None else plain_linear(inputs_t.to(ctx.compute_dtype), weight, None)
        if bias_t is None:
            return tangent
        bias_t = bias_t.to(ctx.compute_dtype)
        return bias_t if tangent is None else tangent + bias_t


def plain_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b in the dtype of X, whatever the dtype of the weight, autocast or not."""
    with torch.autocast(inputs.device.type, enabled=False):
        return F.linear(inputs, weight.to(inputs.dtype), None if bias is None else bias.to(inputs.dtype))
