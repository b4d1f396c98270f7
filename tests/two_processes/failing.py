"""`logra` with a fault in one of its processes: `python failing.py FAULT PHASE arguments...`."""

import os
import signal
import sys
import time
from typing import Any

from logra import train_command
from logra.cli import main
from logra.learner import Learner
from logra.rollout.transformers_engine import TransformersEngine


def fails(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def break_at(fault: str, phase: str) -> None:
    """Let the second process fail once three updates are done."""
    updates = {"done": 0}

    def after(method: Any, place: str) -> Any:
        def broken(self: Any, *arguments: Any, **more: Any) -> Any:
            if place == "learning":
                updates["done"] += 1
            if phase == place and updates["done"] >= (4 if place == "learning" else 3):
                fails(fault)
            return method(self, *arguments, **more)

        return broken

    if os.environ.get("RANK") == "1":
        TransformersEngine.generate = after(TransformersEngine.generate, "rollout")  # type: ignore[method-assign]
        Learner._backward = after(Learner._backward, "learning")  # type: ignore[method-assign]
        train_command.save_state = after(train_command.save_state, "checkpoint")


if __name__ == "__main__":
    break_at(sys.argv[1], sys.argv[2])
    sys.exit(main(sys.argv[3:]))
