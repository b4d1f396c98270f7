# SPDX-License-Identifier: Apache-2.0
"""Ray decides where trainer processes and engines run, and keeps them: one actor each, which starts the process on its
node, says where it listens, and is started again elsewhere by Ray when its node is gone.

Tensors and messages do not go through Ray: trainers talk by torch.distributed, engines over sockets. The run's folder,
the model and this package must be where every node sees them. Imported only with `logra[ray]` installed.
"""

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from logra.engines.places import Local, Place
from logra.parallel.launch import GRACE_SECONDS
from logra.run_settings import TrainSettings

NAMESPACE = "logra"
_PLACED_SECONDS = 120.0
_PAUSE_SECONDS = 0.2
_END_SECONDS = 10.0


class _Keeper:
    """An actor: one engine's process on the node that Ray gave it."""

    def __init__(self, command: Sequence[str], log: str, folder: str, threads: int) -> None:
        host = ray.util.get_node_ip_address()
        environment = {"OMP_NUM_THREADS": str(threads)}  # Ray would have one each
        self.local = Local([*command, "--listen", f"{host}:0"], Path(log), environment, folder)

    def address(self, seconds: float) -> str:
        """HOST:PORT of the process, which is started if it does not run."""
        return self.local.address(seconds)

    def renew(self) -> None:
        """End the process, at once."""
        self.local.renew()

    def end(self) -> None:
        """End it in good order."""
        self.local.end()


class _Trainer:
    """An actor: one trainer process on the node that Ray gave it."""

    def __init__(self) -> None:
        self.output: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.process: subprocess.Popen[bytes] | None = None
        self.reader: threading.Thread | None = None

    def host_and_port(self) -> tuple[str, int]:
        """Of this node, and a port that is free there."""
        with socket.create_server(("", 0)) as free:
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Start the process in a folder that all nodes see."""
        self.process = subprocess.Popen(
            command,
            env=os.environ | dict(environment),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        while part := os.read(self.process.stdout.fileno(), 1 << 16):
            self.output.put(part)

    def poll(self) -> tuple[bytes, int | None]:
        """What it printed since the last call, and its exit code if it has ended."""
        assert self.process is not None and self.reader is not None
        code = self.process.poll()
        if code is not None:
            self.reader.join(_END_SECONDS)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.output.get_nowait())
        return b"".join(found), code

    def signal(self, number: int) -> None:
        """Pass a signal on to it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class RayPlace:
    """An engine that one of Ray's actors keeps.

    Args:
        keeper: the actor's handle.
    """

    def __init__(self, keeper: Any) -> None:
        self.keeper = keeper

    def connect(self, seconds: float) -> socket.socket:
        """A connection; actor and process are started again if they are gone.

        Raises:
            OSError: that did not succeed in time.
        """
        deadline = time.monotonic() + seconds
        with _as_os_errors(f"it did not start within {seconds:g} s"):
            address: str = ray.get(self.keeper.address.remote(seconds), timeout=seconds)
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=max(0.1, deadline - time.monotonic()))

    def renew(self) -> None:
        """End the process, at once."""
        with contextlib.suppress(OSError), _as_os_errors("it does not answer"):
            ray.get(self.keeper.renew.remote(), timeout=_PAUSE_SECONDS * 50)

    def end(self) -> None:
        """End process and actor."""
        with contextlib.suppress(OSError), _as_os_errors("it does not answer"):
            ray.get(self.keeper.end.remote(), timeout=_PLACED_SECONDS)
        ray.kill(self.keeper)


@contextlib.contextmanager
def _as_os_errors(late: str) -> Iterator[None]:
    """What goes wrong with an actor, as if it had gone wrong with a connection."""
    try:
        yield
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(late) from error
    except ray.exceptions.RayTaskError as error:
        raise ConnectionError(str(error.cause or error)) from error
    except ray.exceptions.RayError as error:  # the actor is being started again
        raise ConnectionRefusedError(f"{type(error).__name__}: {error}") from error


def placed_engines(settings: TrainSettings) -> list[tuple[str, Place]]:
    """The engines that `launch_by_ray` reserved room for, from within a trainer process."""
    from logra.engines.build import engine_command, engine_threads

    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), namespace=NAMESPACE, log_to_driver=False)
    folder = (Path(settings.run.folder) / "engines").resolve()
    command = engine_command(settings, folder)
    group = ray.util.get_placement_group(_group_name(settings))
    trainers = int(os.environ.get("WORLD_SIZE", "1"))
    found: list[tuple[str, Place]] = []
    for number in range(settings.engines.count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=trainers + number)
        actor = ray.remote(_Keeper).options(
            num_cpus=_cores(trainers + settings.engines.count),
            num_gpus=_gpus(settings) * settings.engines.tensor_parallel,
            scheduling_strategy=strategy,
            max_restarts=-1,
            max_task_retries=0,
        )
        log = str(folder / f"engine-{number}.log")
        keeper = actor.remote(command, log, os.getcwd(), engine_threads(settings.engines))
        found.append((str(number), RayPlace(keeper)))
    return found


def launch_by_ray(count: int, arguments: Sequence[str], settings: TrainSettings) -> int:
    """Run `logra ARGUMENTS` in `count` processes where Ray places them, with room for the run's engines.

    Args:
        count: trainer processes.
        arguments: of each of them.
        settings: of the run.

    Raises:
        ValueError: the cluster has no room; says what is asked and what is there.
    """
    ray.init(namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    started = "RAY_ADDRESS" not in os.environ
    gpus = _gpus(settings)
    engines = 0 if settings.engines.kind == "inside" or settings.engines.addresses else settings.engines.count
    cores = _cores(count + engines)
    bundles = [{"CPU": cores} | ({"GPU": 1.0} if gpus else {}) for _ in range(count)]
    room = float(settings.engines.tensor_parallel)
    bundles += [{"CPU": cores} | ({"GPU": room} if gpus else {}) for _ in range(engines)]
    group = placement_group(bundles, strategy="PACK", name=_group_name(settings))
    try:
        if not group.wait(_PLACED_SECONDS):
            raise ValueError(
                f"Ray found no room within {_PLACED_SECONDS:g} s for {count} trainer processes and {engines} engines "
                f"({bundles}); it has {ray.available_resources()}"
            )
        return _run(count, arguments, group, cores, bool(gpus))
    finally:
        remove_placement_group(group)
        if started:
            ray.shutdown()


def _run(count: int, arguments: Sequence[str], group: Any, cores: float, gpus: bool) -> int:
    trainers = []
    for number in range(count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        actor = ray.remote(_Trainer).options(num_cpus=cores, num_gpus=int(gpus), scheduling_strategy=strategy)
        trainers.append(actor.remote())
    host, port = ray.get(trainers[0].host_and_port.remote())
    hosts = [each[0] for each in ray.get([trainer.host_and_port.remote() for trainer in trainers])]
    command = [sys.executable, "-m", "logra", *arguments]
    address = ray.get_runtime_context().gcs_address
    for number, trainer in enumerate(trainers):
        environment = {"RAY_ADDRESS": address}
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // hosts.count(hosts[number])))
        if count > 1:
            environment |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
            # Each sees its own GPUs alone.
            environment |= {
                "RANK": str(number),
                "LOCAL_RANK": "0" if gpus else str(hosts[:number].count(hosts[number])),
            }
            environment |= {"LOCAL_WORLD_SIZE": "1" if gpus else str(hosts.count(hosts[number]))}
        ray.get(trainer.start.remote(command, environment, os.getcwd()))

    def forward(number: int, _: Any) -> None:
        for trainer in trainers:
            trainer.signal.remote(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _watch(trainers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(trainers: list[Any]) -> int:
    """Pass on what they print; the exit code of the first one that failed, else 0."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(trainers):
        time.sleep(_PAUSE_SECONDS)
        if any(codes.values()) and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:  # they wait for the one that failed
            for trainer in trainers:
                trainer.signal.remote(signal.SIGKILL)
        for number, trainer in enumerate(trainers):
            if number in codes:
                continue
            try:
                output, code = ray.get(trainer.poll.remote())
            except ray.exceptions.RayActorError as error:
                output, code = f"logra: trainer process {number} is gone ({error})\n".encode(), 1
            sys.stdout.buffer.write(output)
            sys.stdout.flush()
            if code is not None:
                codes[number] = code if code >= 0 else 128 - code
    return next((code for code in codes.values() if code), 0)


def _gpus(settings: TrainSettings) -> int:
    """GPUs of one trainer process: none where the model runs on processors."""
    return 0 if settings.model.device == "cpu" or not _cluster_has_gpus() else 1


def _cores(processes: int) -> float:
    """That Ray reserves for each: one, or less where there are fewer than processes."""
    there = float(ray.cluster_resources().get("CPU", 1))
    return min(1.0, math.floor(100 * there / processes) / 100)


def _cluster_has_gpus() -> bool:
    return float(ray.cluster_resources().get("GPU", 0)) > 0


def _group_name(settings: TrainSettings) -> str:
    return f"logra {Path(settings.run.folder).resolve()}"
