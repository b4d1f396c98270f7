"""What a run shows: a table on a terminal, plain lines elsewhere; phases measure what they hold."""

import io
import time
from typing import Any

import pytest

from logra.phases import Phases, resident_bytes
from logra.progress import LiveTable, PlainLines, make_progress

LINE: dict[str, Any] = {
    "update": 3, "reward": 0.25, "pass_rate": 0.2, "entropy": 1.5, "length": 7.25, "truncated": 0.125,
    "logprob_gap_absolute": 0.002, "logprob_gap_p95": 0.0123, "seconds": {"rollout": 1.5, "learning": 0.5},
}  # fmt: skip
EVALUATION: dict[str, Any] = {"update": 3, "evaluation": {"pass@1": 0.5, "by_task": {"sums": 0.75}, "problems": 8}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = make_progress(10, stream)
    assert isinstance(progress, PlainLines)
    progress.show(LINE)
    progress.show(LINE | {"reward": None, "entropy": None, "logprob_gap_absolute": None})
    progress.show(EVALUATION)
    progress.say("alarm")
    progress.close()
    assert stream.getvalue().splitlines() == [
        "update 3/10: reward 0.250, entropy 1.500, length 7.2, log-prob gap 2.0e-03, 2.0 s",
        "update 3/10: no verdict, entropy -, length 7.2, log-prob gap -, 2.0 s",
        "update 3/10: held-out pass@1 0.500, sums 0.750",
        "alarm",
    ]


def test_a_table_on_a_terminal() -> None:
    stream = Terminal()
    progress = make_progress(10, stream)
    assert isinstance(progress, LiveTable)
    progress.show(EVALUATION | {"update": 0})
    for update in range(1, 31):
        progress.show(LINE | {"update": update, "alarms": ["no_signal"] if update == 30 else []})
    progress.say("alarm [no_signal]: all equal")
    progress.close()
    shown = stream.getvalue()
    for words in ("30/10 updates", "min left", "0.250", "0.0123", "held-out pass@1 0.500", "alarm [no_signal]: all"):
        assert words in shown


def test_phases_add_up_seconds_and_see_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"now": 100}
    monkeypatch.setattr("logra.phases.resident_bytes", lambda: held["now"])
    phases = Phases()
    with phases.phase("small"):
        time.sleep(0.03)
    held["now"] = 900
    with phases.phase("large"):
        time.sleep(0.03)
    held["now"] = 100
    with phases.phase("small"):
        time.sleep(0.03)
        held["now"] = 300
    assert phases.seconds["small"] >= 0.06
    assert phases.memory["large"] == {"peak_bytes": 900, "average_bytes": 900}
    assert phases.memory["small"]["peak_bytes"] == 300
    assert 100 <= phases.memory["small"]["average_bytes"] < 300


def test_resident_memory_is_that_of_this_process() -> None:
    found = resident_bytes()
    assert found is None or 10 << 20 < found < 1 << 40


def test_where_the_system_does_not_tell_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logra.phases.resident_bytes", lambda: None)
    phases = Phases()
    with phases.phase("any"):
        pass
    assert phases.memory == {}
    assert set(phases.seconds) == {"any"}
