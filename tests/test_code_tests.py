"""Code that is run against tests: verdicts, and what it cannot do."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from logra.tasks import code_tests
from logra.tasks.code_tests import code_of, protection, run_tests
from logra.tasks.rewards import RewardLimits, gold_trouble, make_reward
from logra.tasks.task import Completion, Problem

TESTS = "assert double(2) == 4\nassert double(0) == 0"


@pytest.mark.parametrize(
    ("completion", "tests", "outcome"),
    [
        ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", TESTS, "right"),
        ("def double(x): return x + x", TESTS, "right"),
        ("def double(x): return x", TESTS, "wrong"),
        ("```python\nraise SystemExit(0)\n```", TESTS, "wrong"),
        ("import os\nos._exit(0)", TESTS, "wrong"),
        ("import sys\ndef double(x):\n    sys.exit(0)", TESTS, "wrong"),
        ("def double(x:", TESTS, "unparseable"),
        ("", TESTS, "unparseable"),
        ("x = '\x00'", TESTS, "unparseable"),
        ("#" * 100_000, TESTS, "unparseable"),
        ("x = '\u4e2d\u6587'" + "#\u4e2d" * 25_000, [{"input": "1", "output": "1"}], "unparseable"),
        ("print('talk ' * 50_000)\ndouble = lambda x: 2 * x", TESTS, "right"),
        ("while True: pass", TESTS, "timed_out"),
        ("print(int(input()) * 2)", [{"input": "3\n", "output": "6"}, {"input": "4", "output": " 8 "}], "right"),
        ("print(int(input()) * 2)", json.dumps([{"input": "3", "output": "7"}]), "wrong"),
        ("print('6')\nprint('6' * 10**7)", [{"input": "3", "output": "6"}], "wrong"),
        ("x = '$(touch /tmp/p)' \"; touch /tmp/p\"\ndouble = lambda x: 2 * x", TESTS, "right"),
    ],
)
def test_verdicts(completion: str, tests: Any, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "WALL_SECONDS", 2.0)
    assert run_tests((completion, tests, protection()))[0] == outcome


HARM = {
    "memory": "kept = bytearray(1 << 31)",
    "file size": "open('big', 'wb').write(b'x' * (8 << 20))",
    "environment": "import os\nassert set(os.environ) <= {'PATH', 'LANG', 'LC_CTYPE', 'PWD', 'SHLVL', 'OLDPWD', '_'}",
    "open files": "kept = [open('/dev/null') for _ in range(1000)]",
}


@pytest.mark.parametrize("name", sorted(HARM))
@pytest.mark.parametrize("kind", ["as here", "limits"])
def test_limits_hold_whatever_the_system_allows(name: str, kind: str) -> None:
    outcome, why = run_tests((HARM[name], "pass", protection() if kind == "as here" else "limits"))
    assert outcome == ("right" if name == "environment" else "wrong"), why


needs_namespaces = pytest.mark.skipif(protection() != "namespaces", reason="this system allows no namespaces")


@needs_namespaces
@pytest.mark.parametrize(
    "code",
    [
        "open('/usr/written', 'w').write('x')",
        "import os\nassert os.system('mount -o remount,bind,rw /usr') == 0",
        "import os\nassert os.system('unshare --user --map-root-user --mount mount -t tmpfs none /tmp') == 0",
        "import os\nos.chroot('/tmp')",
        "import os\nassert any(os.path.exists(p) for p in ('/home', '/etc/passwd', '/run', '/dev/shm', '/sys'))",
        f"import os\nassert os.path.exists({str(Path(__file__).resolve())!r})",
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
        "import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) > 3",
        "status = open('/proc/self/status').read()\nassert 'CapEff:\\t0000000000000000' not in status",
    ],
)
def test_namespaces_keep_everything_away(code: str) -> None:
    assert run_tests((code, "pass", "namespaces"))[0] == "wrong"


@needs_namespaces
def test_what_code_needs_is_there() -> None:
    useful = "import math, json, re, collections, itertools, heapq, random, decimal, datetime, sys\n"
    useful += "open('/tmp/scratch', 'w').write('x')\nassert open('/tmp/scratch').read() == 'x'"
    assert run_tests((useful, "pass", "namespaces"))[0] == "right"


@needs_namespaces
def test_a_fork_bomb_is_over_when_its_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "WALL_SECONDS", 1.0)
    start = time.monotonic()
    bomb = (
        "import os, time\nfor _ in range(200):\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(9)"
    )
    assert run_tests((bomb, "pass", "namespaces"))[0] in ("timed_out", "wrong")
    assert time.monotonic() - start < 20
    assert run_tests(("x = 1", "assert x", "namespaces"))[0] == "right"


def test_a_sandbox_that_cannot_be_made_grades_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never falls back on less, and right code is not called wrong."""
    monkeypatch.setattr(code_tests, "_NAMESPACES", ["sh", "-c", f"exit {code_tests.NO_SANDBOX}"])
    assert run_tests(("x = 1", "assert x", "namespaces"))[0] == "crashed"


def test_the_reward_by_its_name() -> None:
    reward = make_reward("code")
    problem = Problem("a", "Write double.", TESTS)
    told = ["def double(x): return 2 * x", "def double(x): return 3", "no code here", "import time\ntime.sleep(60)"]
    verdicts = reward([problem] * 4, [Completion(text, row) for row, text in enumerate(told)])
    assert [verdict.outcome for verdict in verdicts] == ["right", "wrong", "unparseable", "wrong"]
    assert gold_trouble("code", TESTS) is None
    assert gold_trouble("code", "assert (") == "its tests are no Python"


def test_where_only_limits_protect_it_is_said_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logra.tasks.rewards.protection", lambda: "limits")
    with pytest.warns(UserWarning, match="limits of time, memory, file size and processes ONLY"):
        make_reward("code")
    with pytest.raises(ValueError, match="is 'required', so it is refused"):
        make_reward("code", RewardLimits(sandbox_required=True))


def test_the_last_block_is_the_code() -> None:
    assert code_of("```\na\n```\ntext\n```py\nb\n```") == "b"
    assert code_of("plain") == "plain"
