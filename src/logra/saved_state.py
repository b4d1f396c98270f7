# SPDX-License-Identifier: Apache-2.0
"""Nested dictionaries of tensors and plain values, written by any number of processes and read by any other number.

Plain values go to a JSON file, tensors to safetensors files, each process writing the rows that it holds (PyTorch's
distributed checkpoint): nothing in them is executed when they are read, and no process needs a whole tensor.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra.durable import write_json
from logra.parallel.processes import Processes

VALUES = "values.json"
_MARK = "tensor"


def save_nested(folder: Path, nested: dict[str, Any], processes: Processes) -> None:
    """Write into an empty folder that all processes see; every process calls it with its part.

    Args:
        folder: of this state alone.
        nested: dictionaries and lists of tensors, numbers, strings, booleans and None.
        processes: that write.

    Raises:
        OSError: a process could not write; then all of them raise.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    tensors: dict[str, Tensor] = {}
    values = _without_tensors(nested, "", tensors)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / VALUES, values)

    processes.of_first(begin)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    if tensors:
        with checkpointing(OSError):
            dcp.save(tensors, storage_writer=writer, no_dist=processes.count == 1)


def load_nested(folder: Path, processes: Processes) -> dict[str, Any]:
    """What `save_nested` was given; tensors that were held in parts, or have several dimensions, come in parts again.

    Raises:
        ValueError: it cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        values = json.loads((folder / VALUES).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / VALUES} cannot be read ({error})") from error
    places: dict[str, int | None] = dict(_marks(values))
    tensors: dict[str, Tensor] = {}
    if places:
        reader = HuggingFaceStorageReader(str(folder))
        with checkpointing(ValueError):
            saved = reader.read_metadata().state_dict_metadata
        for name, dim in places.items():
            entry: Any = saved[name]
            tensors[name] = _empty(entry.size, entry.properties.dtype, dim, processes)
        with checkpointing(ValueError):
            dcp.load(tensors, storage_reader=reader, no_dist=processes.count == 1)
    found = _with_tensors(values, tensors)
    assert isinstance(found, dict)
    return found


def _without_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The same structure with a mark in the place of each tensor."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {_MARK: name, "dim": _dim(value)}
    if isinstance(value, dict):
        return {str(key): _without_tensors(each, f"{name}/{key}", tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(each, f"{name}/{index}", tensors) for index, each in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_MARK, "dim"}:
            return tensors[value[_MARK]]
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    return [_with_tensors(each, tensors) for each in value] if isinstance(value, list) else value


def _marks(value: Any) -> Iterator[tuple[str, int | None]]:
    if isinstance(value, dict) and set(value) == {_MARK, "dim"}:
        yield value[_MARK], value["dim"]
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _marks(each)


def _dim(tensor: Tensor) -> int | None:
    """Along which dimension a tensor is divided, or would be."""
    if hasattr(tensor, "device_mesh"):
        dims = [each.dim for each in tensor.placements if each.is_shard()]  # type: ignore[attr-defined]
        return int(dims[0]) if dims else None
    return 0 if tensor.ndim > 1 else None


def _empty(size: torch.Size, dtype: torch.dtype, dim: int | None, processes: Processes) -> Tensor:
    if processes.mesh is None or dim is None:
        return torch.empty(size, dtype=dtype)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import empty as empty_in_parts

    placements = [*[Replicate()] * (processes.mesh.ndim - 1), Shard(dim)]
    found: Tensor = empty_in_parts(size, dtype=dtype, device_mesh=processes.mesh, placements=placements)
    return found


def held_as(value: Tensor, parameter: Tensor) -> Tensor:
    """A saved tensor of a parameter's shape, in parts as the parameter is."""
    if not hasattr(parameter, "device_mesh") or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(value, DTensor):
        value = DTensor.from_local(
            value, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim, run_check=False
        )
    return value.redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


@contextmanager
def checkpointing(error: type[Exception]) -> Iterator[None]:
    """Around torch's distributed checkpoint: its exception is no `Exception`; and without its remark that a single
    process is a single process.

    Args:
        error: what is raised instead, with the first thing that went wrong.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as found:
        place, failure = next(iter(found.failures.items()))
        what = failure[0] if isinstance(failure, tuple) else failure
        raise error(f"process {place}: {type(what).__name__}: {what}") from found
    except Exception as found:
        if type(found).__name__ != "SafetensorError":  # safetensors has an exception of its own
            raise
        raise error(f"a file of the state cannot be read or written ({found})") from found
