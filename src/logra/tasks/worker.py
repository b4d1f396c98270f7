# SPDX-License-Identifier: Apache-2.0
"""The process that grades: `python -m logra.tasks.worker FD JOB MEMORY_BYTES CPU_SECONDS`.

It loads one job, says "ready", and answers requests over a pipe until that closes. It may be killed at any moment; it
limits its own memory and CPU time, and dies with its parent. Nothing here imports torch.
"""

import importlib
import importlib.util
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Handler = Callable[[Any], Any]


def load_function(name: str) -> Callable[..., Any]:
    """The function that "module:function" or "file.py:function" names.

    Raises:
        ValueError: it is not there, or is no function; the message says what was looked for.
    """
    place, _, attribute = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            module = importlib.import_module(place)
    except Exception as error:
        raise ValueError(f"{place} could not be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"{place} has no function {attribute!r}; it has {found}")
    return function


def reward_handler(name: str) -> Handler:
    """Calls a user's function with the arguments that it names."""
    function = load_function(name)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def handle(given: dict[str, Any]) -> Any:
        scores = function(**{key: value for key, value in given.items() if takes_all or key in parameters})
        return [_number(score) for score in scores]

    return handle


def _number(score: Any) -> float | None:
    """A plain number, so that nothing else travels to the trainer."""
    if score is None:
        return None
    try:
        return float(score)
    except (TypeError, ValueError):
        raise TypeError(f"it gave {score!r:.60}; a score is a number, or None") from None


def make_handler(job: str) -> Handler:
    """What a job does with a request: "math", "code", or "reward=NAME"."""
    if job == "math":
        from logra.tasks.math_worker import same_answer, warm_up

        warm_up()
        return same_answer
    if job == "code":
        from logra.tasks.code_tests import run_tests

        return run_tests  # each request says in which way
    kind, _, name = job.partition("=")
    assert kind == "reward", job
    return reward_handler(name)


def limit_memory(memory_bytes: int) -> None:
    """Address space of this process; 0 means no limit, and some systems know none."""
    if not memory_bytes:
        return
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (ImportError, ValueError, OSError):
        pass


def limit_cpu(seconds: int) -> None:
    """CPU time from now on; beyond it the process is ended by SIGXCPU."""
    try:
        import resource

        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + seconds, hard))
    except (ImportError, ValueError, OSError):
        pass


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that comes about."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def main() -> None:
    """Answer requests until the pipe closes. Each answer is ("done", value) or ("raised", message, trace)."""
    descriptor, job, memory_bytes, cpu_seconds = sys.argv[1:]
    pipe = Connection(int(descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    die_with_parent()
    os.dup2(2, 1)  # what a reward prints must not be taken for output of the run
    limit_memory(int(memory_bytes))
    try:
        handle = make_handler(job)
    except Exception as error:
        pipe.send(("failed", str(error)))
        return
    pipe.send(("ready", None))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        limit_cpu(int(cpu_seconds))
        try:
            answer: tuple[Any, ...] = ("done", handle(request))
        except MemoryError:
            answer = ("crashed", "out of memory")
        except BaseException as error:
            answer = ("raised", f"{type(error).__name__}: {error}", traceback.format_exc(limit=-6))
        try:
            pipe.send(answer)
        except (TypeError, ValueError, AttributeError) as error:
            pipe.send(("raised", f"its scores could not be sent ({error})", ""))


if __name__ == "__main__":
    main()
