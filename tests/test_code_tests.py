"""Code that is run against tests: verdicts, and what it cannot do."""

import json
import os
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
        ("while True: pass", TESTS, "timed_out"),
        ("print(int(input()) * 2)", [{"input": "3\n", "output": "6"}, {"input": "4", "output": " 8 "}], "right"),
        ("print(int(input()) * 2)", json.dumps([{"input": "3", "output": "7"}]), "wrong"),
        ("print('6')\nprint('6' * 10**7)", [{"input": "3", "output": "6"}], "wrong"),
        ("x = '$(touch /tmp/p)' \"; touch /tmp/p\"\ndouble = lambda x: 2 * x", TESTS, "right"),
    ],
)
def test_verdicts(completion: str, tests: Any, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "WALL_SECONDS", 2.0)
    assert run_tests((completion, tests))[0] == outcome


HARM = {
    "memory": "kept = bytearray(1 << 31)",
    "file size": "open('big', 'wb').write(b'x' * (8 << 20))",
    "environment": "import os\nassert set(os.environ) <= {'PATH', 'LANG', 'LC_CTYPE', 'PWD', 'SHLVL', 'OLDPWD', '_'}",
    "open files": "kept = [open('/dev/null') for _ in range(1000)]",
}


@pytest.mark.parametrize("name", sorted(HARM))
@pytest.mark.parametrize("kind", ["as here", "limits"])
def test_limits_hold_whatever_the_system_allows(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "limits":
        monkeypatch.setattr(code_tests, "protection", lambda: "limits")
    outcome, why = run_tests((HARM[name], "pass"))
    assert outcome == ("right" if name == "environment" else "wrong"), why


def test_namespaces_keep_files_and_network_away(tmp_path: Path) -> None:
    """Where the system has no namespaces for us, the run says so; elsewhere they must hold."""
    target = Path.home() / f"logra-test-{os.getpid()}"
    tries = {
        "write": f"open({str(target)!r}, 'w').write('x')",
        "network": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
        "processes": "import os\nassert len([p for p in os.listdir('/proc') if p.isdigit()]) > 5",
    }
    if protection() != "namespaces":
        assert protection() == "limits"
        return
    for name, code in tries.items():
        assert run_tests((code, "pass"))[0] == "wrong", name
    assert not target.exists()


def test_a_fork_bomb_is_over_when_its_time_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if protection() != "namespaces":
        return
    monkeypatch.setattr(code_tests, "WALL_SECONDS", 1.0)
    start = time.monotonic()
    bomb = (
        "import os, time\nfor _ in range(200):\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(9)"
    )
    assert run_tests((bomb, "pass"))[0] in ("timed_out", "wrong")
    assert time.monotonic() - start < 20
    assert run_tests(("x = 1", "assert x"))[0] == "right"


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
