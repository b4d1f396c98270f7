# SPDX-License-Identifier: Apache-2.0
"""What every benchmark writes beside its figures: the command, commit, versions and machine."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def summary(values: list[float]) -> dict[str, float]:
    """Min, median and max of some measurements."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {"min": ordered[0], "median": median, "max": ordered[-1]}


def write_result(
    name: str,
    rows: list[dict[str, Any]],
    ratios: dict[str, float],
    settings: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> Path:
    """Write benchmarks/results/NAME.json, whole or not at all; `more` are keys beside rows and ratios."""
    result = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "commit": commit(),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", ":!results")),
        "versions": {package: _version(package) for package in ("torch", "transformers", "peft", "numpy", "logra")},
        "python": platform.python_version(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "settings": settings,
        "rows": rows,
        "ratios": ratios,
        **(more or {}),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)
    return path


def cell(folder: str, name: str, command: list[str]) -> dict[str, Any]:
    """What `command` prints as its last line, as JSON; kept under runs/, so that a long benchmark goes on cell by cell.

    Delete the folder under runs/ to measure anew.
    """
    path = RESULTS.parent.parent / "runs" / folder / f"{name.replace(' ', '_')}.json"
    if not path.exists():
        done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"commit": commit()} | json.loads(done.stdout.splitlines()[-1])))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def commit() -> str:
    """The commit that is checked out."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
