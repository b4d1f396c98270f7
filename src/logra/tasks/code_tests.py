# SPDX-License-Identifier: Apache-2.0
"""Running a completion's Python against tests, in a process of its own that can do as little as the system allows.

Where the system has user namespaces, the code sees no network, no other processes and a read-only file system with an
empty /tmp. Everywhere it has limits of time, memory, file size and processes, an empty environment and a folder that is
deleted. Where only limits protect, `protection` says so, and the run says it loudly.

Tests are Python text with assertions, run after the code, or a list of {"input": ..., "output": ...} for a program that
reads and writes. The first kind runs in the process of the code, so code that sets out to can fake it; the second
compares from outside.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cache
from typing import Any

WALL_SECONDS, MEMORY_BYTES, FILE_BYTES, PROCESSES = 6.0, 1 << 30, 1 << 20, 32
CODE_CHARACTERS, OUTPUT_BYTES = 60_000, 100_000
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount"]
_CLOSE = (
    "mount -o bind,ro / / 2>/dev/null || mount -o remount,bind,ro / || exit 97; "
    "mount -t tmpfs -o size=16m tmpfs /tmp || exit 97; mount -t proc proc /proc || exit 97; cd /tmp; "
    f"ulimit -u {PROCESSES} 2>/dev/null || ulimit -p {PROCESSES} 2>/dev/null;"
)
_HARNESS = """
import sys
_code, _tests, _mark = __import__("json").load(sys.stdin)
sys.stdin = open("/dev/null")
_space = {"__name__": "__main__"}
exec(compile(_code, "completion", "exec"), _space)
exec(compile(_tests, "tests", "exec"), _space)
print(_mark, file=sys.__stdout__, flush=True)
"""


def code_of(completion: str) -> str:
    """The last fenced block of Python, else all of it."""
    blocks = _FENCE.findall(completion)
    return (blocks[-1] if blocks else completion).strip()


def limits() -> None:
    """For the child, before the code runs."""
    import resource

    os.setsid()
    for kind, value in (
        (resource.RLIMIT_CPU, int(WALL_SECONDS)),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if os.getuid() != 0:  # root is not limited by it, and other users' processes count
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES * 8, PROCESSES * 8))


def _sandboxed(command: list[str]) -> list[str]:
    """The command in namespaces of its own. The shell sees it as arguments and reads none of it."""
    return [*_NAMESPACES, "sh", "-c", f'{_CLOSE} exec "$@"', "sh", *command]


@cache
def protection() -> str:
    """What protects here: namespaces of its own ("namespaces"), or limits alone ("limits")."""
    if shutil.which("unshare") is None:
        return "limits"
    try:
        tried = subprocess.run(
            _sandboxed(["/bin/sh", "-c", "echo inside"]), capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return "limits"
    return "namespaces" if tried.returncode == 0 and tried.stdout.strip() == "inside" else "limits"


def run_python(arguments: list[str], given: str) -> tuple[int | None, str]:
    """Exit code (None: out of time) and output of a Python process that can do as little as possible."""
    command = [sys.executable, "-I", "-S", *arguments]
    # Output goes to a file, where the limit on file sizes holds.
    with tempfile.TemporaryDirectory(prefix="logra-code-") as folder, tempfile.TemporaryFile() as output:
        running = subprocess.Popen(
            _sandboxed(command) if protection() == "namespaces" else command,
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, text=True, cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, errors="replace",
            preexec_fn=limits,  # noqa: PLW1509 - the grading process has no threads
        )  # fmt: skip
        try:
            running.communicate(given, timeout=WALL_SECONDS)
            output.seek(0)
            return running.returncode, output.read(OUTPUT_BYTES).decode(errors="replace")
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            running.communicate()


def run_tests(request: tuple[str, Any]) -> tuple[str, str]:
    """The outcome ("right", "wrong", "unparseable" or "timed_out") and a word on why.

    Args:
        request: the completion, and its tests: text, or a list of {"input", "output"} (also as JSON text).
    """
    completion, tests = request
    code = code_of(completion)
    if not code or len(code) > CODE_CHARACTERS:
        return "unparseable", f"{len(code)} characters of code"
    try:
        compile(code, "completion", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return "unparseable", type(error).__name__
    cases = _cases(tests)
    if cases is None:
        mark = secrets.token_hex(16)
        exit_code, output = run_python(["-c", _HARNESS], json.dumps([code, tests, mark]))
        if exit_code is None:
            return "timed_out", f"no end within {WALL_SECONDS} s"
        return ("right", "") if exit_code == 0 and output.rstrip().endswith(mark) else ("wrong", f"exit {exit_code}")
    for case in cases:
        exit_code, output = run_python(["-c", code], str(case["input"]))
        if exit_code is None:
            return "timed_out", f"no end within {WALL_SECONDS} s"
        if exit_code != 0 or output.split() != str(case["output"]).split():
            return "wrong", f"exit {exit_code}, output {output[:60]!r}"
    return "right", ""


def _cases(tests: Any) -> list[dict[str, Any]] | None:
    """Input and output pairs, or None if the tests are Python text."""
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        try:
            tests = json.loads(tests)
        except ValueError:
            return None
    if not isinstance(tests, list) or not tests:
        return None
    return tests if all(isinstance(case, dict) and {"input", "output"} <= set(case) for case in tests) else None
