"""A user's reward in its processes: what it is given, and what becomes of one that fails."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from logra.cli import main
from logra.tasks.dataset import DatasetTask, Source
from logra.tasks.rewards import RewardLimits, UserReward, gold_trouble, make_reward, weighted
from logra.tasks.task import Completion, Problem
from logra.tasks.verdict import Verdict, graded
from logra.tasks.worker_pool import Limits, WorkerPool
from tests.conftest import scores
from tests.test_training import QUICK

REWARDS = """
import os, sys, time

def plain(prompts, completions, answers):
    return [float(completion == answer) for completion, answer in zip(completions, answers)]

def trl_style(completions, level, **kwargs):
    return [len(completion) if kind == "easy" else None for completion, kind in zip(completions, level)]

def seen(completions, sample_ids, group_ids, **kwargs):
    return [1000 * len(completions) + 10 * group + sample for sample, group in zip(sample_ids, group_ids)]

def raises(completions, **kwargs):
    raise KeyError("level")

def too_few(completions, **kwargs):
    return [1.0]

def too_many(completions, **kwargs):
    return [1.0] * 9

def not_a_number(completions, **kwargs):
    return [0.5] + [float("nan")] * (len(completions) - 1)

def words(completions, **kwargs):
    return ["good"] * len(completions)

def nothing(completions, **kwargs):
    return [None] * len(completions)

def chatty(completions, **kwargs):
    print("hello from the reward")
    return [1.0] * len(completions)

def hangs(completions, **kwargs):
    while "slow" in completions[0]:
        time.sleep(1)
    return [1.0] * len(completions)

def spins(completions, **kwargs):
    while "slow" in completions[0]:
        pass
    return [1.0] * len(completions)

def allocates(completions, **kwargs):
    kept = []
    while "slow" in completions[0]:
        kept.append(bytearray(1 << 28))
    return [1.0] * len(completions)

def leaves(completions, **kwargs):
    if "slow" in completions[0]:
        os._exit(3)
    return [1.0] * len(completions)

def half_a_second(completions, **kwargs):
    time.sleep(0.5)
    return [1.0] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(REWARDS)
    return str(tmp_path / "mine.py")


def problems(count: int) -> list[Problem]:
    return [
        Problem(f"p-{i}", f"{i}+{i}?", str(2 * i), {"level": "easy" if i % 2 == 0 else "hard"}) for i in range(count)
    ]


def completions(texts: list[str], size: int = 1) -> list[Completion]:
    return [Completion(text, row, row // size) for row, text in enumerate(texts)]


def test_functions_get_what_they_name_group_by_group(file: str) -> None:
    assert [v.score for v in make_reward(f"{file}:plain")(problems(2), completions(["0", "5"]))] == [1.0, 0.0]
    told = make_reward(f"{file}:trl_style")(problems(2), completions(["abc", "d"]))
    assert told == [Verdict(3.0, "right"), Verdict(None, "no_verdict")]
    seen = make_reward(f"{file}:seen")(problems(6), completions(["x"] * 6, size=3))
    assert [v.score for v in seen] == [3000, 3001, 3002, 3013, 3014, 3015]


def test_what_a_reward_prints_is_no_output_of_the_run(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    make_reward(f"{file}:chatty")(problems(1), completions(["x"]))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised KeyError: 'level' \(first of 2 samples, sample 0: prompt \"0\+0\?\", completion \"abc\"\)"),
        ("raises", r"line \d+, in raises"),
        ("too_few", "gave 1 scores for 2 samples"),
        ("too_many", "gave 9 scores for 2 samples"),
        ("not_a_number", r"gave nan; a score is a finite number, or None \(sample 1: .*completion \"d\"\)"),
        ("words", "gave 'good'; a score is a number, or None"),
    ],
)
def test_functions_that_misbehave_are_shown_with_their_sample(name: str, message: str, file: str) -> None:
    reward = make_reward(f"{file}:{name}")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        reward(problems(2), completions(["abc", "d"], size=2))


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("hangs", "timed_out"), ("spins", "timed_out"), ("allocates", "crashed"), ("leaves", "crashed")],
)
def test_groups_whose_grading_does_not_end_count_nowhere_and_the_others_do(name: str, outcome: Any, file: str) -> None:
    reward = UserReward(
        f"{file}:{name}", RewardLimits(seconds=3.0 if name == "allocates" else 1.0, memory_bytes=1 << 29, workers=2)
    )
    texts = ["ok", "ok", "slow", "slow", "ok", "ok", "slow", "slow", "ok", "ok"]
    start = time.monotonic()
    verdicts = reward(problems(10), completions(texts, size=2))
    assert time.monotonic() - start < 30
    assert verdicts == [Verdict(1.0, "right") if text == "ok" else Verdict(None, outcome) for text in texts]
    assert reward(problems(2), completions(["ok", "ok"], size=2)) == [Verdict(1.0, "right")] * 2


def test_waiting_in_line_is_no_grading_time(file: str) -> None:
    """Twelve half seconds on one process: each is within its second, though the last waits for six."""
    reward = UserReward(f"{file}:half_a_second", RewardLimits(seconds=1.0, workers=1))
    verdicts = reward(problems(12), completions(["x"] * 12))
    assert {verdict.outcome for verdict in verdicts} == {"right"}
    assert reward.pool.killed == 0


def test_a_process_that_was_ended_from_outside_is_replaced(file: str) -> None:
    reward = UserReward(f"{file}:plain", RewardLimits(workers=1))
    (worker,) = reward.pool._idle
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    assert [v.score for v in reward(problems(1), completions(["0"]))] == [1.0]


def test_an_interrupted_call_leaves_no_answer_behind(file: str) -> None:
    """What a process answers after an interrupt must not be taken for the answer to the next request."""
    reward = UserReward(f"{file}:half_a_second", RewardLimits(workers=1))

    class Stop(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Stop):
        reward(problems(4), completions(["a"] * 4))
    signal.signal(signal.SIGALRM, before)
    assert reward.pool._idle == []
    assert len(reward(problems(1), completions(["a"]))) == 1


def test_processes_end_with_their_pool(file: str) -> None:
    pool = WorkerPool(f"reward={file}:plain", Limits(), 2)
    pool.start()
    (worker,) = pool._idle
    del pool
    assert worker.process.poll() is not None


def test_names_of_rewards_that_lead_nowhere(file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be one of \['code', 'math', 'number', 'text'\]"):
        make_reward("nubmer")
    with pytest.raises(ValueError, match="no_such_module could not be imported"):
        make_reward("no_such_module:reward")
    with pytest.raises(ValueError, match="could not be imported"):
        make_reward(f"{tmp_path / 'absent.py'}:reward")
    with pytest.raises(ValueError, match=r"has no function 'rewrad'; it has \['allocates', 'chatty'"):
        make_reward(f"{file}:rewrad")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        make_reward(f"{tmp_path / 'broken.py'}:reward")


def test_modules_of_the_working_folder_are_found(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [v.score for v in make_reward("mine:plain")(problems(1), completions(["0"]))] == [1.0]


def test_several_rewards_with_weights(file: str, tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "answer": "4"}, {"prompt": "3*3?", "answer": "9"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(str(tmp_path / "rows.jsonl"), rewards={f"{file}:plain": 2.0, "number": 0.5})
    task = DatasetTask("mine", source)
    assert scores(task, [task.problem(0), task.problem(1)], ["4", "\\boxed{9}"]) == [2.5, 0.5]
    none, one, zero = Verdict(None, "timed_out"), graded(1.0), graded(0.0, parsed=False)
    assert weighted([[one, none, zero], [one, one, zero]], [1.0, 3.0]) == [graded(4.0), none, zero]
    assert gold_trouble("mine:reward", "anything") is None


def write_rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)))
    return str(path)


def run_with(reward: str, folder: Path) -> int:
    """A run on rows in a file, paid by a user's reward."""
    source = {"mine": {"path": write_rows(folder), "rewards": {reward: 1.0}}}
    arguments = ["--task.names", '{"mine": 1.0}', "--task.sources", json.dumps(source)]
    arguments += ["--evaluation.names", '{"sums": 1}', "--run.folder", str(folder / "run")]
    return main(["train", *QUICK, *arguments])


def test_a_run_with_a_reward_that_gives_nothing_goes_on_and_says_so(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(f"{file}:nothing", tmp_path) == 0
    assert "alarm no_verdict: no sample was graded" in capsys.readouterr().out
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert line["outcomes"] == {
        "right": 0, "wrong": 0, "unparseable": 0, "timed_out": 0, "crashed": 0, "no_verdict": 16,
    }  # fmt: skip
    assert line["steps"] == 0


def test_a_run_with_a_reward_that_raises_stops_with_the_sample(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(f"{file}:raises", tmp_path) == 2
    assert "raised KeyError: 'level' (first of 4 samples, sample 0: prompt" in capsys.readouterr().err
