# SPDX-License-Identifier: Apache-2.0
"""Running a completion's Python against tests, in a process of its own that can do as little as the system allows.

Where the system has user namespaces ("namespaces"), the code has no network, no other processes, no capabilities, and a
root of its own that holds the interpreter, the system's libraries (read-only) and an empty /tmp, nothing of the user's.
Everywhere it has limits of time, memory, file size and open files, an empty environment and a folder that is deleted.
Where only limits protect ("limits"), the run says it loudly. Which of the two holds is decided once, before grading.

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
CODE_BYTES = 60_000  # what a command line takes, twice over
NO_SANDBOX = 97  # exit code of the shell where the sandbox could not be closed
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount"]
_NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs"]
# $1 is an empty folder that becomes the root, $2 the interpreter's home, the rest a command that runs inside.
_CLOSE = f"""
root=$1; home=$2; shift 2
fail() {{ echo "$1" >&2; exit {NO_SANDBOX}; }}
mount -t tmpfs -o size=16m,mode=755 tmpfs "$root" || fail "no tmpfs"
show() {{
    mkdir -p "$root$1" && mount --rbind "$1" "$root$1" || fail "no $1"
    for flags in ro ro,nosuid,nodev ro,nodev ro,nosuid; do
        mount -o "remount,bind,$flags" "$root$1" 2>/dev/null && return
    done
    fail "$1 is not read-only"
}}
for place in /usr /bin /sbin /lib /lib32 /lib64 /libx32; do
    if [ -L "$place" ]; then ln -s "$(readlink "$place")" "$root$place"; elif [ -d "$place" ]; then show "$place"; fi
done
case "$home" in /usr|/usr/*) ;; *) show "$home" ;; esac
mkdir "$root/proc" "$root/tmp" "$root/dev"
mount -t proc proc "$root/proc" || fail "no proc"
for device in null zero urandom; do
    : > "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device" || fail "no /dev/$device"
done
ulimit -u {PROCESSES} 2>/dev/null || ulimit -p {PROCESSES} 2>/dev/null
cd "$root/tmp" && exec chroot "$root" {" ".join(_NO_CAPABILITIES)} "$@" || fail "no chroot"
"""
_HARNESS = """
import sys
_code, _tests, _mark = __import__("json").load(sys.stdin)
sys.stdin = open("/dev/null")
_space = {"__name__": "__main__"}
exec(compile(_code, "completion", "exec"), _space)
exec(compile(_tests, "tests", "exec"), _space)
print(_mark, file=sys.__stdout__, flush=True)
"""


class SandboxLostError(RuntimeError):
    """The sandbox that was there at the start could not be made now; nothing was run."""


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


def _sandboxed(command: list[str], root: str) -> list[str]:
    """The command in namespaces of its own. The shell sees it as arguments and reads none of it."""
    return [*_NAMESPACES, "sh", "-c", _CLOSE, "sh", root, sys.base_prefix, *command]


@cache
def protection() -> str:
    """What protects here, found out by running Python inside: "namespaces", or "limits" alone."""
    if any(shutil.which(program) is None for program in ("unshare", "setpriv", "chroot", "mount")):
        return "limits"
    try:
        exit_code, output = run_python(["-c", "print('inside')"], "", "namespaces")
    except (OSError, SandboxLostError):
        return "limits"
    return "namespaces" if exit_code == 0 and output.strip() == "inside" else "limits"


def run_python(arguments: list[str], given: str, mode: str) -> tuple[int | None, str]:
    """Exit code (None: out of time) and output of a Python process that can do as little as possible.

    Raises:
        SandboxLostError: `mode` is "namespaces", and they could not be made.
    """
    command = [os.path.realpath(sys.executable), "-I", "-S", *arguments]
    # Output goes to a file, where the limit on file sizes holds.
    with tempfile.TemporaryDirectory(prefix="logra-code-") as folder, tempfile.TemporaryFile() as output:
        running = subprocess.Popen(
            _sandboxed(command, folder) if mode == "namespaces" else command,
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL, text=True, cwd=folder,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}, errors="replace",
            preexec_fn=limits,  # noqa: PLW1509 - the grading process has no threads
        )  # fmt: skip
        try:
            running.communicate(given, timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
        if mode == "namespaces" and running.returncode == NO_SANDBOX:
            raise SandboxLostError("namespaces for code could not be made")
        output.seek(0)
        return running.returncode, output.read().decode(errors="replace")


def run_tests(request: tuple[str, Any, str]) -> tuple[str, str]:
    """The outcome ("right", "wrong", "unparseable", "timed_out" or "crashed") and a word on why.

    Args:
        request: the completion; its tests: text, or a list of {"input", "output"} (also as JSON text); and what
            `protection` gave.
    """
    completion, tests, mode = request
    code = code_of(completion)
    if not code or len(code.encode(errors="replace")) > CODE_BYTES:
        return "unparseable", f"{len(code)} characters of code"
    try:
        compile(code, "completion", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return "unparseable", type(error).__name__
    try:
        return _verdict(code, tests, mode)
    except SandboxLostError as error:
        return "crashed", str(error)


def _verdict(code: str, tests: Any, mode: str) -> tuple[str, str]:
    cases = _cases(tests)
    if cases is None:
        mark = secrets.token_hex(16)
        exit_code, output = run_python(["-c", _HARNESS], json.dumps([code, tests, mark]), mode)
        if exit_code is None:
            return "timed_out", f"no end within {WALL_SECONDS} s"
        return ("right", "") if exit_code == 0 and output.rstrip().endswith(mark) else ("wrong", f"exit {exit_code}")
    for case in cases:
        exit_code, output = run_python(["-c", code], str(case["input"]), mode)
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
