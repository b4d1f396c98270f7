# SPDX-License-Identifier: Apache-2.0
"""`logra plan`: what a run needs, method by method, as a table or JSON; and the same check before a run begins."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from logra.memory_plan import GIB, METHODS, Device, MethodPlan, model_size, plan_method, stored_bytes, with_largest
from logra.memory_trace import Lengths
from logra.model import TINY, chosen_device, on_this_machine
from logra.model_shapes import config_of
from logra.run_settings import TrainSettings
from logra.tasks.task import Problem

PLANNED_FROM_BYTES = 64 * 2**20  # of weights, gradients and moments; smaller runs fit anywhere
_CHARACTERS_PER_TOKEN, _TEMPLATE_TOKENS = 2, 64


def longest(settings: TrainSettings, prompt_tokens: int) -> Lengths:
    """The largest micro-batch that a run can meet."""
    width = prompt_tokens + settings.rollout.max_tokens
    lines = min(settings.rollout.prompts * settings.rollout.samples, settings.learning.micro_batch_tokens // width)
    lines = max(1, lines)
    return Lengths(lines, width, settings.rollout.max_tokens, masked=lines > 1 or settings.rollout.samples > 1)


def capacity_here(settings: TrainSettings) -> int | None:
    """Bytes that a run could take on this machine now: free memory of the GPU, or available memory of the system."""
    if chosen_device(settings.model) == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable()
    except (OSError, ValueError):
        return None


def _reclaimable() -> int:
    """Memory that the system holds as cache and would give up."""
    with open("/proc/meminfo") as lines:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (kib["MemAvailable"] - kib["MemFree"])


def plan(settings: TrainSettings, gpus: int, gpu_memory: float | None, prompt_tokens: int, as_json: bool) -> int:
    """Print the plan; 0 if the run's own method fits or nothing is known of the memory, else 1."""
    settings = on_this_machine(settings) if gpu_memory is None else _on_a_gpu(settings)
    capacity = capacity_here(settings) if gpu_memory is None else int(gpu_memory * GIB)
    kind = chosen_device(settings.model) if gpu_memory is None else "cuda"
    config, lengths, device = (
        config_of(_place(settings)),
        longest(settings, prompt_tokens),
        Device(gpus, capacity, kind, settings.parallel.shard),
    )
    methods = METHODS if settings.method.name in METHODS else (*METHODS, settings.method.name)
    plans = [_with_largest(config, settings, name, lengths, device) for name in methods]
    own = next(each for each in plans if each.method == settings.method.name)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(settings, lengths, device, plans)) + "\n")
    else:
        _print_table(settings, lengths, device, plans)
        sys.stdout.write(_verdict(settings, own, device) + "\n")
    return 0 if capacity is None or own.fits(capacity) else 1


def longest_of(settings: TrainSettings, problems: Sequence[Problem]) -> Lengths:
    """The largest micro-batch, where the longest of some prompts is guessed from its characters."""
    task = settings.task
    characters = max((len(str(problem.prompt)) for problem in problems), default=0)
    characters += len(task.suffix) + len(task.system_prompt or "")
    return longest(settings, characters // _CHARACTERS_PER_TOKEN + _TEMPLATE_TOKENS)


def _on_a_gpu(settings: TrainSettings) -> TrainSettings:
    """`compute` auto as a GPU has it, whatever this machine is."""
    compute = "bf16" if settings.model.compute == "auto" else settings.model.compute
    return replace(settings, model=replace(settings.model, compute=compute))


def planned_or_refused(settings: TrainSettings, lengths: Lengths, processes: int = 1) -> MethodPlan | None:
    """The plan of a run that is about to begin in some processes; None for one so small that it fits anywhere.

    Raises:
        ValueError: it cannot fit; the message says by how much and what to change.
    """
    settings, name = on_this_machine(settings), settings.method.name
    try:
        config = config_of(_place(settings), settings.model.trust_remote_code)
    except ValueError:
        return None  # loading the model will say what is wrong
    size = model_size(config, settings.method.logra.targets)
    if sum(stored_bytes(size, settings).values()) < PLANNED_FROM_BYTES:
        return None
    kind, capacity = chosen_device(settings.model), capacity_here(settings)
    if capacity is not None and kind == "cpu":
        capacity //= int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    device = Device(processes, capacity, kind, settings.parallel.shard)
    found = plan_method(config, settings, name, lengths, device)
    if device.capacity is not None and not found.fits(device.capacity):
        raise ValueError(_verdict(settings, found, device))
    return found


def _place(settings: TrainSettings) -> str:
    return str(TINY) if settings.model.name == "tiny" else settings.model.name


def _with_largest(config: Any, settings: TrainSettings, method: str, lengths: Lengths, device: Device) -> MethodPlan:
    found = plan_method(config, settings, method, lengths, device)
    if device.capacity is None:
        return found
    twice = plan_method(config, settings, method, replace(lengths, lines=2 * lengths.lines), device)
    return with_largest(found, twice, lengths.lines * lengths.width, device.capacity)


def _verdict(settings: TrainSettings, plan: MethodPlan, device: Device) -> str:
    need, stage = plan.peak.total / GIB, plan.peak.name
    if device.capacity is None:
        return f"{plan.method} needs {need:.2f} GiB on each device (stage: {stage})"
    have = device.capacity / GIB
    if plan.fits(device.capacity):
        return f"{plan.method} fits: {need:.2f} of {have:.2f} GiB on each device at its peak (stage: {stage})"
    return (
        f"{plan.method} does not fit: {need:.2f} GiB are needed on each device (stage: {stage}), {have:.2f} are there. "
        f"Try {', '.join(_remedies(settings, plan, device)) or 'a smaller model, or more devices'}."
    )


def _remedies(settings: TrainSettings, plan: MethodPlan, device: Device) -> list[str]:
    model, method, learning = settings.model, settings.method, settings.learning
    found = []
    if plan.peak.name == "rollout":
        found.append(f"rollout.max_rows below {settings.rollout.max_rows}")
    elif not model.gradient_checkpointing:
        found.append("model.gradient_checkpointing true")
    elif learning.micro_batch_tokens > 1:
        found.append(f"learning.micro_batch_tokens below {learning.micro_batch_tokens}")
    if method.name != "logra":
        found.append("method.name logra")
    elif model.weights == "float32":
        found.append("model.weights bfloat16 (LoGRA then stores three bytes a weight, or two with logra.storage bf16)")
    elif method.logra.storage in ("auto", "split"):
        found.append("method.logra.storage bf16")
    elif method.logra.rank > 16:
        found.append(f"method.logra.rank below {method.logra.rank}")
    return found


def _as_dict(settings: TrainSettings, lengths: Lengths, device: Device, plans: list[MethodPlan]) -> dict[str, Any]:
    def of_method(each: MethodPlan) -> dict[str, Any]:
        tokens = each.largest_tokens
        return {
            "peak_bytes": each.peak.total,
            "peak_stage": each.peak.name,
            "stages": {stage.name: stage.bytes for stage in each.stages},
            "sync_bytes": each.sync_bytes,
            "fits": None if device.capacity is None else each.fits(device.capacity),
            "largest_batch": None if tokens is None else tokens // lengths.width,
            "largest_context": tokens,
        }

    return {
        "model": settings.model.name,
        "gpus": device.count,
        "capacity_bytes": device.capacity,
        "micro_batch": {"lines": lengths.lines, "width": lengths.width},
        "methods": {each.method: of_method(each) for each in plans},
    }


def _print_table(settings: TrainSettings, lengths: Lengths, device: Device, plans: list[MethodPlan]) -> None:
    from rich.console import Console
    from rich.table import Table

    where = f"{settings.model.name}, {device.count} device(s)"
    batch = f"micro-batch of {lengths.lines} x {lengths.width} tokens"
    table = Table(title=f"{where}, {batch}: GiB on each device at the peak")
    table.add_column("")
    for each in plans:
        table.add_column(_title(settings, each), justify="right")
    causes = list(dict.fromkeys(cause for each in plans for cause in each.peak.bytes))
    for cause in causes:
        table.add_row(cause, *(_gib(each.peak.bytes.get(cause)) for each in plans))
    table.add_section()
    table.add_row("peak", *(_gib(each.peak.total) for each in plans))
    table.add_row("at the stage", *(each.peak.name for each in plans))
    stages = list(dict.fromkeys(stage.name for each in plans for stage in each.stages))
    for name in stages:
        totals = [next((s.total for s in each.stages if s.name == name), None) for each in plans]
        table.add_row(f"stage {name}", *map(_gib, totals))
    table.add_section()
    table.add_row("sent to a replica at each update", *(_gib(each.sync_bytes) for each in plans))
    if device.capacity is not None:
        table.add_row("fits", *("yes" if each.fits(device.capacity) else "no" for each in plans))
        batches = [(each.largest_tokens or 0) // lengths.width for each in plans]
        table.add_row("largest batch of this width", *map(str, batches))
        table.add_row("largest context, one line", *(str(each.largest_tokens or 0) for each in plans))
    Console().print(table)


def _title(settings: TrainSettings, plan: MethodPlan) -> str:
    ranks = {"logra": settings.method.logra.rank, "lora": settings.method.lora_rank}
    return f"{plan.method} r={ranks[plan.method]}" if plan.method in ranks else plan.method


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / GIB:.3f}"
