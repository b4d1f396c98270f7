"""Alarms: each is raised by what it names and by nothing else; lasting ones end a run."""

from typing import Any

import pytest

from logra.alarms import ALARMS, Alarms
from logra.run_settings import RunSettings

QUIET: dict[str, Any] = {
    "entropy": 1.0, "logprob_gap_p95": 0.01, "truncated": 0.5, "reward": 0.3, "samples_trained": 8, "steps_skipped": 0,
}  # fmt: skip
LOUD: dict[str, dict[str, Any]] = {
    "entropy_collapse": {"entropy": 0.019},
    "logprob_gap": {"logprob_gap_p95": 0.6},
    "all_truncated": {"truncated": 1},
    "no_signal": {"samples_trained": 0, "entropy": None, "logprob_gap_p95": None},
    "no_verdict": {"reward": None, "samples_trained": 0, "entropy": None, "logprob_gap_p95": None},
    "step_skipped": {"steps_skipped": 1},
}


@pytest.mark.parametrize("name", sorted(ALARMS))
def test_each_alarm_is_raised_by_what_it_names(name: str) -> None:
    alarms = Alarms(RunSettings())
    assert [alarms(QUIET) for _ in range(3)] == [[], [], []]
    assert alarms(QUIET | LOUD[name]) == [name]
    assert alarms(QUIET) == []


def test_a_lasting_alarm_ends_a_run_and_a_passing_one_does_not() -> None:
    alarms = Alarms(RunSettings(stop_after_alarms=3))
    for loud, lasting in ((1, None), (1, None), (0, None), (1, None), (1, None), (1, "all_truncated")):
        alarms(QUIET | {"truncated": loud})
        assert alarms.lasting() == lasting
    never = Alarms(RunSettings())
    for _ in range(50):
        never(QUIET | {"truncated": 1})
    assert never.lasting() is None


def test_going_on_from_a_state() -> None:
    alarms, again = Alarms(RunSettings(stop_after_alarms=2)), Alarms(RunSettings(stop_after_alarms=2))
    for line in (QUIET, QUIET, QUIET | {"entropy": 0.01}):
        alarms(line)
    again.load(alarms.state())
    line = QUIET | {"entropy": 0.02}
    assert (alarms(line), alarms.lasting()) == (again(line), again.lasting())
