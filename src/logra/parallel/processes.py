# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: what they tell each other, what they agree on, and who is missing when one falls silent.

Started by torchrun or `logra train --processes N`. Every call here is made by all processes in the same order.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from logra.parallel.watch import Watch, watch_of_run

T = TypeVar("T")


class SaidElsewhere(ValueError):
    """What went wrong in another process, which says it."""

    said_elsewhere = True


@dataclass
class Processes:
    """This process among those of its run.

    Attributes:
        place: its number, from 0; the first one writes files and talks.
        count: how many there are.
        mesh: over which weights are divided; None for one process.
        watch: where each process notes what it is doing; None for one process.
    """

    place: int = 0
    count: int = 1
    mesh: Any = None
    watch: Watch | None = None
    _phase: str = "start"
    _leaves: bool = False

    @property
    def first(self) -> bool:
        """Whether this one writes and talks."""
        return self.place == 0

    def gathered(self, value: T) -> list[T]:
        """What each process has, by place."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def told(self, value: T) -> T:
        """What the first process has."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def of_first(self, work: Callable[[], T]) -> T:
        """What the first process gets by `work`, in every process.

        Raises:
            ValueError: it could not; then all of them raise.
        """
        box: list[Any] = [None, None]
        error: Exception | None = None
        if self.first:
            try:
                box[0] = work()
            except Exception as found:
                error, box[1] = found, str(found)
        if self.count > 1:
            dist.broadcast_object_list(box, src=0)
        if error is not None:
            raise error
        if box[1] is not None:
            raise SaidElsewhere(box[1])
        result: T = box[0]
        return result

    def first_makes(self, make: Callable[[], T]) -> T:
        """What each process makes for itself, once the first one could.

        Raises:
            ValueError: it could not; then all of them raise, and one says why.
        """
        made: list[T] = []
        self.of_first(lambda: made.append(make()))
        return made[0] if made else make()

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all processes, fp64."""
        total = values.to(torch.float64)
        if self.count > 1:
            total = total.clone() if total is values else total
            dist.all_reduce(total)
        return total

    def share(self, items: Sequence[T]) -> list[T]:
        """Of a list that all have, this process's part: every `count`-th item."""
        return list(items[self.place :: self.count])

    def shared_out(self, items: Sequence[T], work: Callable[[list[T]], Sequence[Any]]) -> list[Any]:
        """`work` of all items, each process doing its share; results in the order of the items, in every process.

        Raises:
            ValueError: it did, in some process; then in all of them.
        """
        if self.count == 1:
            return list(work(list(items)))
        mine: Sequence[Any] = []
        trouble: str | None = None
        try:
            part = self.share(items)
            mine = work(part) if part else []
        except ValueError as error:
            trouble = str(error)
        phase = self._phase
        self.notes(f"{phase}, waiting for the others")
        found = self.gathered((mine, trouble))
        told = next(((place, each) for place, (_, each) in enumerate(found) if each is not None), None)
        if told is not None:
            raise (ValueError if told[0] == self.place else SaidElsewhere)(told[1])
        self.notes(phase)
        result: list[Any] = [None] * len(items)
        for place, (of_process, _) in enumerate(found):
            result[place :: self.count] = list(of_process)
        return result

    def agree(self, error: Exception | None) -> None:
        """After something that all did together and that is whole only if all could.

        Raises:
            Exception: this process's own, or what another one could not do.
        """
        told = [each for each in self.gathered(None if error is None else str(error)) if each is not None]
        if error is not None:
            raise error
        if told:
            raise SaidElsewhere(told[0])

    @contextmanager
    def only_first_talks(self) -> Iterator[None]:
        """What the others write to stdout goes nowhere."""
        if self.first:
            yield
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield

    @contextmanager
    def taking_turns(self) -> Iterator[None]:
        """One process of a machine after another, for what needs much memory for a while."""
        here, of = int(os.environ.get("LOCAL_RANK", self.place)), int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        for turn in range(max(self.gathered(of))):
            if turn == here:
                yield
            if self.count > 1:
                dist.barrier()

    def notes(self, phase: str) -> None:
        """Note what this process is about to do, for the others to read if it falls silent."""
        self._phase = phase
        if self.watch is not None:
            self.watch.note(phase)

    def what_each_was_doing(self) -> list[str]:
        """The latest note of each process, in words."""
        return [] if self.watch is None else self.watch.report()


def is_lost(error: RuntimeError) -> bool:
    """Whether it comes of processes that no longer answer each other."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def join(device: str, seconds: float, shard: int = 0) -> Processes:
    """Join the processes that torchrun started; alone without it.

    Args:
        device: "cuda" or "cpu".
        seconds: that one process waits for another before it gives up.
        shard: processes among which weights are divided, each such group a replica of the others; 0: all.

    Raises:
        ValueError: `shard` does not divide the number of processes.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    wanted, shard = shard, shard or count
    if count % shard:
        raise ValueError(
            f"parallel.shard is {wanted}, but {count} processes run; it must divide their number, or be 0 for all"
        )
    if count == 1:
        return Processes()
    from torch.distributed.device_mesh import init_device_mesh

    if device == "cuda":
        here = int(os.environ.get("LOCAL_RANK", "0"))
        if here >= torch.cuda.device_count():
            count_here = os.environ.get("LOCAL_WORLD_SIZE", str(count))
            raise ValueError(
                f"{count_here} processes run on a machine of {torch.cuda.device_count()} GPUs; start one for each, or "
                f"set model.device cpu"
            )
        torch.cuda.set_device(here)
    leaves = not dist.is_initialized()
    if leaves:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # numbers per row are summed where they are
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    if shard == count:
        mesh = init_device_mesh(device, (count,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device, (count // shard, shard), mesh_dim_names=("replicate", "shard"))
    for dim in range(mesh.ndim):
        _set_pg_timeout(timedelta(seconds=seconds), mesh.get_group(dim))  # they would wait 30 minutes
    watch = watch_of_run(dist.get_rank(), count)
    return Processes(dist.get_rank(), count, mesh, watch, _leaves=leaves)


def leave(processes: Processes) -> None:
    """Part from the others in good order."""
    processes.wait()
    if processes.watch is not None:
        processes.watch.end()
    if processes._leaves:
        dist.destroy_process_group()
