# SPDX-License-Identifier: Apache-2.0
"""Attaching sketches to a model: the selected layers' forward is replaced, nothing else changes.

`attach(model, ...)` gives a `Sketches`; `sketches.detach()` restores the model. Parameters, their
names and `state_dict` keys stay as they are. Selected weights stop asking for gradients, so
`weight.grad` stays None and no framework makes a bucket for one.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logra.sketch.buckets import Buckets
from logra.sketch.layer_sketch import InputGroup, LayerSketch, SketchedLinear, plain_linear
from logra.sketch.projection import KINDS, usable_rank
from logra.sketch.targets import Coverage, coverage, find_targets, input_groups, is_conv1d, stable_name

log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def attach(
    model: nn.Module,
    targets: str | Sequence[str],
    rank: int,
    projection: str = "rademacher",
    seed: int = 0,
    sum_each_update: bool = False,
) -> "Sketches":
    """Make the selected linear layers sketch the gradient of their weight in backward.

    Args:
        model: any module; changed in place, restored by `Sketches.detach`.
        targets: leaf names, a regular expression for whole names, or "all-linear".
        rank: rows of every projection; a layer with fewer in_features uses those.
        projection: a key of `logra.sketch.projection.KINDS`.
        seed: seed of the run; with a group's name and the update number it fixes the projections.
        sum_each_update: where processes share the weights, sum sketches once an update, not after each micro-batch.

    Raises:
        ValueError: no layer matches, a layer cannot be sketched, or a setting is out of range.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be at least 1")
    if projection not in KINDS:
        raise ValueError(f"projection is {projection!r}; it must be one of {sorted(KINDS)}")
    modules = find_targets(model, targets)
    for name, module in modules.items():
        _check_module(name, module)
    _check_ties(model, modules)
    _check_sharding(modules)
    sketches = Sketches(model, modules, rank, projection, seed)
    if any(layer.rows.holders.mesh is not None for layer in sketches):
        sketches.sum_over_processes(_by_block(model, sketches), sum_each_update)
    return sketches


class Sketches:
    """The sketches of a model: layers, input groups, coverage.

    Attributes:
        layers: stable name -> `LayerSketch`, one per distinct weight, in the model's order.
        groups: name -> `InputGroup`.
        coverage: what is sketched and what is left out.
        update: number of the update that the present projections belong to.
        buckets: where sketches wait to be summed over processes; None in one process.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], rank: int, projection: str, seed: int) -> None:
        self.rank, self.kind, self.seed = rank, projection, seed
        self.layers: dict[str, LayerSketch] = {}
        self.groups: dict[str, InputGroup] = {}
        self.buckets: Buckets | None = None
        self.coverage: Coverage = coverage(model, modules)
        self._modules = list(modules.values())
        self._required_grad: list[tuple[nn.Parameter, bool]] = []
        of_weight: dict[int, LayerSketch] = {}
        for name, module in modules.items():
            layer = of_weight.get(id(module.weight))
            if layer is None:
                layer = of_weight[id(module.weight)] = LayerSketch(name, module, is_conv1d(module))
                self.layers[name] = layer
                self._required_grad.append((layer.weight, layer.weight.requires_grad))
                layer.weight.requires_grad_(False)
            module.forward = SketchedForward(module, layer, self)
        self._make_groups()
        self.draw(1)
        log.info("%s", self.coverage)

    def __iter__(self) -> Iterator[LayerSketch]:
        return iter(self.layers.values())

    def __len__(self) -> int:
        return len(self.layers)

    def sum_over_processes(self, blocks: list[list[LayerSketch]], each_update: bool) -> None:
        """Let sketches leave each block summed over processes and divided by rows."""
        self.buckets = Buckets(blocks, each_update)
        for layer in self:
            layer.collect = self.buckets.add

    def complete(self) -> None:
        """Sum over processes what still waits for it."""
        if self.buckets is not None:
            self.buckets.complete()

    def _make_groups(self) -> None:
        in_features = {name: layer.in_features for name, layer in self.layers.items()}
        modules = {name: layer.module for name, layer in self.layers.items()}
        for name, members in input_groups(modules, in_features).items():
            self._add_group(name, [self.layers[member] for member in members])

    def _add_group(self, name: str, members: list[LayerSketch]) -> InputGroup:
        in_features = members[0].in_features
        group = InputGroup(name, in_features, usable_rank(self.rank, in_features, name))
        group.layers = members
        for layer in members:
            layer.group = group
        self.groups[name] = group
        return group

    def separate(self, layer: LayerSketch) -> None:
        """Take a layer out of its input group: from now on it has a projection of its own."""
        layer.group.layers.remove(layer)
        layer.group.forget_if_read_by_all()
        self._draw(self._add_group(layer.name, [layer]))

    def restore_groups(self, group_of: dict[str, str]) -> None:
        """Regroup as a checkpoint says (layer name -> group name).

        Raises:
            ValueError: the layers are not those of the checkpoint.
        """
        if set(group_of) != set(self.layers):
            odd = sorted(set(group_of) ^ set(self.layers))[:6]
            raise ValueError(f"the state was saved for other layers than are attached; they differ in {odd}")
        members: dict[str, list[LayerSketch]] = defaultdict(list)
        for name, group in group_of.items():
            members[group].append(self.layers[name])
        self.groups.clear()
        for name, layers in members.items():
            self._add_group(name, layers)

    def draw(self, update: int) -> None:
        """Drop all sketches and draw every projection anew for `update`."""
        self.update = update
        self.clear()
        for group in self.groups.values():
            self._draw(group)

    def _draw(self, group: InputGroup) -> None:
        device = group.layers[0].weight.device
        group.projection = KINDS[self.kind](self.seed, group.name, self.update, group.rank, group.in_features, device)
        group.projection.integers()  # now, where no transform of torch.func is in the way

    def clear(self) -> None:
        """Free all sketches and held inputs; the projections stay."""
        for group in self.groups.values():
            group.forget_inputs()
        for layer in self:
            layer.sketch = None
        if self.buckets is not None:
            self.buckets.clear()

    def never_reached(self) -> list[str]:
        """Names of layers that no backward has reached since attach."""
        return [layer.name for layer in self if not layer.seen_backward]

    def detach(self) -> None:
        """Give the model back its own forwards and `requires_grad` flags."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        for parameter, flag in self._required_grad:
            parameter.requires_grad_(flag)
        for layer in self:
            layer.detached = True
        self.clear()


class SketchedForward:
    """The forward of a selected layer: the ordinary product, and P for the backward when gradients are on."""

    def __init__(self, module: nn.Module, layer: LayerSketch, sketches: Sketches) -> None:
        self.module, self.layer, self.sketches = module, layer, sketches
        self.checked = False

    @torch.compiler.disable(reason="a sketched layer runs eagerly: its backward writes to the sketch")
    def __call__(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; the argument has the name it has in nn.Linear."""
        layer, inputs = self.layer, input
        dtype = _compute_dtype(inputs)
        weight, bias = layer.computing_weight(dtype), getattr(self.module, "bias", None)
        if layer.shift is not None:
            return layer.shift(inputs.to(dtype), weight, bias)
        if not torch.is_grad_enabled():
            if weight.dtype == torch.float32 and dtype == torch.bfloat16:
                return F.linear(inputs, weight, bias)  # autocast's own cast, which it can keep over many calls
            return plain_linear(inputs.to(dtype), weight, bias)
        if not self.checked:
            self._check_group(inputs)
        computed, projected = layer.group.read(inputs, dtype)
        return SketchedLinear.apply(inputs, computed, projected, weight, bias, layer, layer.anchor)

    def _check_group(self, inputs: Tensor) -> None:
        """In the first forward: a layer that reads another tensor than its group leaves it."""
        self.checked = True
        layer, group = self.layer, self.layer.group
        if len(group.layers) > 1 and group.waits_for_readers() and not group.holds(inputs):
            log.warning("%s does not read the same tensor as the rest of %s: it gets its own", layer.name, group.name)
            self.sketches.separate(layer)


def _compute_dtype(inputs: Tensor) -> torch.dtype:
    """What a linear layer computes in: autocast's dtype if it is on (it leaves fp64 alone), else that of the inputs."""
    device = inputs.device.type
    if torch.is_autocast_enabled(device) and inputs.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        if dtype == torch.float16:
            raise RuntimeError(
                f"autocast on {device} is set to float16, whose range sketches exceed; use "
                f"torch.autocast({device!r}, dtype=torch.bfloat16)"
            )
        return dtype
    return inputs.dtype


def _check_module(name: str, module: nn.Module) -> None:
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        raise ValueError(
            f"{name}.weight is not a parameter of its own (it may be parametrised, or stored elsewhere); remove the "
            f"parametrisation, or leave {name!r} out of the targets"
        )
    if "forward" in module.__dict__:
        raise ValueError(
            f"{name} already has a replaced forward ({module.__dict__['forward']!r}): it is sketched already, or "
            f"another library (offloading hooks, for example) has hold of it. Detach that first."
        )
    dtype = getattr(module.weight, "dtype", None)
    if dtype not in _DTYPES:
        raise ValueError(
            f"{name}.weight is {dtype}; weights must be float32 or bfloat16. Load the model with dtype=torch.bfloat16 "
            f"or torch.float32 (quantised and float16 weights cannot take updates of this size)."
        )


def _check_sharding(modules: dict[str, nn.Module]) -> None:
    """Of a weight that is held in parts, each part must be whole rows."""
    for name, module in modules.items():
        weight: Any = module.weight
        if not hasattr(weight, "device_mesh"):
            continue
        from torch.distributed.tensor import Replicate, Shard

        rows = Shard(1 if is_conv1d(module) else 0)
        if list(weight.placements) not in ([rows], [Replicate(), rows]):
            raise ValueError(
                f"{name}.weight is held as {weight.placements} over {weight.device_mesh.ndim} mesh dimensions; a "
                f"sketched weight must be divided by rows of its output: use fully_shard on a mesh of one dimension, "
                f"or of two (replicate, shard), with Shard({rows.dim}) for this layer (shard_placement_fn)"
            )


def _by_block(model: nn.Module, sketches: Sketches) -> list[list[LayerSketch]]:
    """Layers that `fully_shard` gathers together; those come out of backward together too."""
    from torch.distributed.fsdp import FSDPModule

    divided = [stable_name(name) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    blocks = {name: list[LayerSketch]() for name in [*divided, ""]}
    for layer in sketches:
        parts = layer.name.split(".")
        owners = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
        blocks[next(owner for owner in owners if owner in blocks)].append(layer)
    return [layers for layers in blocks.values() if layers]


def _check_ties(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """A weight with several uses is sketched as the sum of them, so all of them must be selected."""
    owners: dict[int, list[str]] = defaultdict(list)
    for raw_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(parameter)].append(f"{stable_name(raw_name)}.{leaf}")
    for name, module in modules.items():
        others = [owner for owner in owners[id(module.weight)] if owner.removesuffix(".weight") not in modules]
        if others:
            raise ValueError(
                f"{name}.weight is tied to {others}, which is not a selected linear layer: its gradient has a part "
                f"that no sketch sees. Remove {name!r} from the targets, or untie the weights "
                f"(tie_word_embeddings=False)."
            )
