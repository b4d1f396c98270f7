# SPDX-License-Identifier: Apache-2.0
"""Where a trainer's weights lie in an engine that fuses and divides them: q, k and v in one tensor, gate and up in
another, each process with its rows (column-parallel layers) or its columns (row-parallel ones). vLLM's names.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from logra.sync.held import Slice
from logra.sync.layout import Layout
from logra.sync.replica import as_rows, as_slice

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fused_slices(
    layout: Layout, parameters: Mapping[str, Tensor], place: int = 0, parts: int = 1
) -> dict[str, list[Slice]]:
    """The slices of every selected weight that this process of an engine holds; weights that it lacks are left out.

    Args:
        layout: of the trainer.
        parameters: of the engine's model, by name; sharing its storage.
        place: of this process among those that divide the weights.
        parts: how many divide them.

    Raises:
        ValueError: a weight is there with a shape that no division explains.
    """
    names = [f"{each.name}.weight" for each in layout.weights]
    found = _found(names, layout, parameters, place, parts)
    return {name.removesuffix(".weight"): slices for name, slices in found.items()}


def fused_whole(
    layout: Layout, parameters: Mapping[str, Tensor], place: int = 0, parts: int = 1
) -> dict[str, list[Slice]]:
    """The same for the tensors that travel whole: biases, norms and embeddings too."""
    return _found([each.name for each in layout.whole], layout, parameters, place, parts)


def fused_frozen(
    layout: Layout, parameters: Mapping[str, Tensor], place: int = 0, parts: int = 1
) -> dict[str, list[Slice]]:
    """The same for the tensors that never change."""
    return _found([name for name, _, _ in layout.frozen], layout, parameters, place, parts)


def _shapes(layout: Layout) -> dict[str, Sequence[int]]:
    """Of all that the trainer has: what is fused with a weight may be frozen."""
    shapes: dict[str, Sequence[int]] = {f"{each.name}.weight": (each.rows, each.columns) for each in layout.weights}
    return shapes | {each.name: each.shape for each in layout.whole} | {name: shape for name, _, shape in layout.frozen}


def _found(
    names: Sequence[str], layout: Layout, parameters: Mapping[str, Tensor], place: int, parts: int
) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {}
    shapes = _shapes(layout)
    for name in names:
        if name in parameters:
            found[name] = [_own(name, shapes[name], parameters[name], place, parts)]
            continue
        layer, _, kind = name.rpartition(".")
        parent, _, leaf = layer.rpartition(".")
        for fused, members in FUSED.items():
            held = parameters.get(f"{parent}.{fused}.{kind}")
            siblings = [shapes.get(f"{parent}.{member}.{kind}") for member in members]
            if held is not None and leaf in members and None not in siblings:
                rows = [each[0] for each in siblings if each is not None]
                found[name] = [_inside(name, members.index(leaf), rows, held, place, parts)]
    return found


def _own(name: str, shape: Sequence[int], held: Tensor, place: int, parts: int) -> Slice:
    """A tensor of its own: whole, divided along one dimension, or rows of a vocabulary with padding behind them."""
    rows, columns = as_rows(shape)
    mine = as_slice(held)
    if parts > 1 and name.split(".")[-2] in FUSED:
        raise ValueError(
            f"{name} is fused in the trainer's model too, so that its parts in an engine are not rows that follow each "
            f"other; use tensor_parallel 1"
        )
    count, width = mine.computing.shape
    if (count, width) == (rows, columns):
        return Slice(mine.computing, range(rows), range(columns), counted=place == 0)
    if width == columns and (count * parts == rows or (count * parts > rows and _is_vocabulary(name))):
        mine_of = range(rows)[place * count : (place + 1) * count]
        return Slice(mine.computing[: len(mine_of)], mine_of, range(columns))
    if (count, width * parts) == (rows, columns):
        return Slice(mine.computing, range(rows), range(columns)[place * width : (place + 1) * width])
    raise ValueError(
        f"{name} has the shape {tuple(held.shape)} in one of {parts} parts of the engine; the trainer's is "
        f"{tuple(shape)}"
    )


def _is_vocabulary(name: str) -> bool:
    return any(word in name for word in ("embed", "lm_head", "wte"))


def _inside(name: str, index: int, rows: Sequence[int], held: Tensor, place: int, parts: int) -> Slice:
    """Rows inside a fused tensor. Key and value heads that are fewer than parts are held by several of them.

    Args:
        name: of the weight.
        index: its place among the fused ones.
        rows: of each of those.
        held: the fused tensor.
        place: of this process among those that divide it.
        parts: how many do.
    """
    lines = as_slice(held).computing
    counts = [each // parts for each in rows]
    missing = lines.shape[0] - sum(counts)
    if missing and len(rows) == 3:  # of k and v each process has one head, several the same
        counts[1] = counts[2] = counts[1] + missing // 2
    if sum(counts) != lines.shape[0]:
        raise ValueError(
            f"{name} lies in a fused tensor of shape {tuple(held.shape)} in one of {parts} parts of the engine, "
            f"which its parts of {list(rows)} rows do not explain"
        )
    start, count = sum(counts[:index]), counts[index]
    holders = parts * count // rows[index]  # processes that hold the same rows
    first = place // holders * count
    values = lines[start : start + count]
    return Slice(values, range(first, first + count), range(lines.shape[1]), counted=place % holders == 0)
