# SPDX-License-Identifier: Apache-2.0
"""The engines that a run's settings ask for, and the source of the weights that they get."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from logra.engines.engine import EngineLink
from logra.engines.http_link import HttpLink
from logra.engines.places import Address, Elsewhere, Kept, Local, Place
from logra.engines.pool import EnginePool
from logra.export_divided import export_weights
from logra.model import Policy, chosen_device
from logra.parallel.processes import Processes
from logra.run_settings import TrainSettings, as_plain
from logra.scale_settings import EngineSettings
from logra.sketch.targets import stable_name
from logra.sync.sender import Source
from logra.sync.source import FactorSource, WholeSource
from logra.sync.wire import SocketLink
from logra.update_rules import LograRule, UpdateRule


def make_pool(
    settings: TrainSettings, policy: Policy, rule: UpdateRule | None, processes: Processes
) -> EnginePool | None:
    """All engines of a run, not yet started; None where the trainer's own model draws.

    Args:
        settings: of the run, with what depends on the machine filled in.
        policy: whose weights engines get.
        rule: that changes them; None if nothing does.
        processes: that hold them.
    """
    if settings.engines.kind == "inside":
        return None
    engines: list[tuple[EngineLink, Kept]] = []
    processes.of_first(lambda: engines.extend(_engines(settings, policy)))
    return EnginePool(_source(settings, policy, rule), engines, settings.engines, processes)


def _source(settings: TrainSettings, policy: Policy, rule: UpdateRule | None) -> Source:
    model, compute = policy.model, settings.model.compute
    if isinstance(rule, LograRule):
        return FactorSource(rule.optimizer, model, compute)

    def tensors() -> dict[str, Tensor]:
        own = {id(each) for each in model.buffers()}
        merged = export_weights(model, "fp32").items()
        return {stable_name(name): each for name, each in merged if id(each) not in own}

    changing = None
    if settings.method.name == "lora" and rule is not None:
        changing = {
            stable_name(name.replace(".base_layer.", "."))
            for name, _ in model.named_parameters()
            if name.endswith(".base_layer.weight")
        }
    return WholeSource(tensors, compute, changing)


def _engines(settings: TrainSettings, policy: Policy) -> Iterator[tuple[EngineLink, Kept]]:
    engines = settings.engines
    if engines.kind == "http":
        for place, url in enumerate(engines.addresses):
            yield HttpLink(f"{place} ({url})", url, policy.tokenizer, policy.end_ids), Elsewhere()
        return
    places: list[tuple[str, Place]] = []
    for number, each in enumerate(engines.addresses):
        places.append((f"{number} ({each})", Address(each)))
    if not places and engines.placement == "ray":
        from logra.engines.ray_workers import placed_engines

        places = placed_engines(settings)
    elif not places:
        places = [(str(number), _local(settings, number)) for number in range(engines.count)]
    for name, found in places:
        yield SocketLink(name, found.connect), found


def _local(settings: TrainSettings, number: int) -> Local:
    folder = Path(settings.run.folder) / "engines"
    if chosen_device(settings.model) == "cuda":
        environment = {"CUDA_VISIBLE_DEVICES": devices_of(settings, number)}
    else:
        environment = {"OMP_NUM_THREADS": str(engine_threads(settings.engines))}
    command = [*engine_command(settings, folder), "--listen", "127.0.0.1:0"]
    return Local(command, folder / f"engine-{number}.log", environment)


def threads_each(engines: EngineSettings) -> int:
    """Processor threads of the trainer and of each engine: all if they take turns, a share each if they do not."""
    cores = os.cpu_count() or 1
    return max(1, cores // (1 + engines.count)) if engines.max_lag else cores


def engine_threads(engines: EngineSettings) -> int:
    """Processor threads of an engine that is started."""
    return engines.threads or threads_each(engines)


def engine_command(settings: TrainSettings, folder: Path) -> list[str]:
    """What starts an engine of a run on a machine that sees the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    path.write_text(json.dumps(as_plain(settings)))
    return [sys.executable, "-m", "logra", "engine", "--config", str(path)]


def devices_of(settings: TrainSettings, number: int) -> str:
    """The GPUs of an engine: those named, or the ones behind the trainer's and those of engines before it."""
    engines = settings.engines
    if engines.devices:
        return engines.devices[number]
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = trainers + number * engines.tensor_parallel
    wanted = list(range(first, first + engines.tensor_parallel))
    if visible is None:
        return ",".join(map(str, wanted))
    names = visible.split(",")
    if wanted[-1] >= len(names):
        raise ValueError(
            f"engine {number} needs GPUs {wanted} of CUDA_VISIBLE_DEVICES={visible}, which the trainer's {trainers} "
            f"come before; make more visible, or set engines.devices"
        )
    return ",".join(names[each] for each in wanted)
