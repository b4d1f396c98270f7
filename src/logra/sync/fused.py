# SPDX-License-Identifier: Apache-2.0
"""Where a trainer's weights lie in an engine that fuses and divides them: q, k and v in one tensor, gate and up in
another, each process with its rows (column-parallel layers) or its columns (row-parallel ones). vLLM's names.
"""

from collections.abc import Mapping

from torch import Tensor

from logra.sync.held import Slice
from logra.sync.layout import Layout, WeightLayout

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_slices(
    layout: Layout, parameters: Mapping[str, Tensor], place: int = 0, parts: int = 1
) -> dict[str, list[Slice]]:
    """The slices of every weight that this process of an engine holds; weights that it does not know are left out.

    Args:
        layout: of the trainer.
        parameters: of the engine's model, by name; sharing its storage.
        place: of this process among those that divide the weights.
        parts: how many divide them.

    Raises:
        ValueError: a weight is there with a shape that no division explains.
    """
    weights = {each.name: each for each in layout.weights}
    found: dict[str, list[Slice]] = {}
    for weight in layout.weights:
        held = parameters.get(f"{weight.name}.weight")
        if held is not None:
            found[weight.name] = [_own(weight, held, place, parts)]
            continue
        parent, _, leaf = weight.name.rpartition(".")
        for fused, members in FUSED.items():
            held = parameters.get(f"{parent}.{fused}.weight")
            siblings = [weights.get(f"{parent}.{member}") for member in members]
            if held is not None and leaf in members and None not in siblings:
                known = [each for each in siblings if each is not None]
                found[weight.name] = [_inside(weight, known, held, place, parts)]
    return found


def _own(weight: WeightLayout, held: Tensor, place: int, parts: int) -> Slice:
    """A weight that has a tensor of its own, whole or divided along one dimension."""
    rows, columns = range(weight.rows), range(weight.columns)
    if tuple(held.shape) == (weight.rows, weight.columns):
        return Slice(held, rows, columns)
    if (held.shape[0] * parts, held.shape[1]) == (weight.rows, weight.columns):
        return Slice(held, rows[place * held.shape[0] : (place + 1) * held.shape[0]], columns)
    if (held.shape[0], held.shape[1] * parts) == (weight.rows, weight.columns):
        return Slice(held, rows, columns[place * held.shape[1] : (place + 1) * held.shape[1]])
    raise ValueError(
        f"{weight.name} has the shape {tuple(held.shape)} in one of {parts} parts of the engine; the trainer's is "
        f"{(weight.rows, weight.columns)}"
    )


def _inside(weight: WeightLayout, members: list[WeightLayout], held: Tensor, place: int, parts: int) -> Slice:
    """Rows inside a fused tensor. Key and value heads that are fewer than parts are held by several of them."""
    counts = [each.rows // parts for each in members]
    missing = held.shape[0] - sum(counts)
    if missing and len(members) == 3:  # of k and v each process has one head, several the same
        counts[1] = counts[2] = counts[1] + missing // 2
    if sum(counts) != held.shape[0] or held.shape[1] != weight.columns:
        raise ValueError(
            f"{weight.name} lies in a fused tensor of shape {tuple(held.shape)} in one of {parts} parts of the engine, "
            f"which its parts of {[each.rows for each in members]} rows do not explain"
        )
    index = members.index(weight)
    start, count = sum(counts[:index]), counts[index]
    holders = parts * count // weight.rows  # processes that hold the same rows
    first = place // holders * count
    values, counted = held[start : start + count], place % holders == 0
    return Slice(values, range(first, first + count), range(weight.columns), counted)
