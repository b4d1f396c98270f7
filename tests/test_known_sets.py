"""GSM8K, MATH-500 and DAPO-Math, each read from a local sample of three rows in the set's own shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from logra.run_settings import TaskSettings
from logra.tasks.choose import is_from_data, make_task
from logra.tasks.dataset import DatasetTask
from tests.conftest import scores

# Rows of our own making, in the columns of the sets.
SAMPLES: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "Ann has 3 bags of 4 nuts. How many?", "answer": "Three times 4 is <<3*4=12>>12.\n#### 12"},
        {"question": "A car costs 1200 dollars more than 34. How much?", "answer": "Add them.\n#### 1,234"},
        {"question": "It was 2 degrees and fell by 5. How cold?", "answer": "2-5=-3\n#### -3"},
    ],
    "math500": [
        {"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "answer": "\\frac{1}{2}", "level": 1},
        {"problem": "Interval?", "solution": "...", "answer": "[2,5)", "level": 3, "subject": "Precalculus"},
        {"problem": "Solve.", "solution": "...", "answer": "3\\sqrt{13}", "level": 5, "unique_id": "test/x/1.json"},
    ],
    "dapo_math": [
        {"prompt": "How many primes below 50?", "solution": "15", "data_source": "math_dapo", "ability": "MATH"},
        {"prompt": "Find $m+n$.", "solution": "34", "reward_model": {"ground_truth": "34"}},
        {"prompt": "Find $x$.", "solution": "-7", "extra_info": {"index": "a"}},
    ],
}
RIGHT = {
    "gsm8k": ["12", "1234", "-3"],
    "math500": ["0.5", "[2,5)", "\\sqrt{117}"],
    "dapo_math": ["15", "34", "-7"],
}


def local(name: str, rows: list[dict[str, Any]], folder: Path, **more: Any) -> DatasetTask:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    task = make_task(name, TaskSettings(names={name: 1.0}, sources={name: {"path": str(path)} | more}), 0)
    assert isinstance(task, DatasetTask)
    return task


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_golds_are_paid_and_nothing_else(name: str, tmp_path: Path) -> None:
    task = local(name, SAMPLES[name], tmp_path)
    assert is_from_data(name, TaskSettings())
    problems = [task.problem(index) for index in range(3)]
    boxed = [f"So the answer is \\boxed{{{text}}}." for text in RIGHT[name]]
    assert scores(task, problems, boxed) == [1.0] * 3
    for wrong in ("", "I do not know", "\\boxed{}", "\\boxed{0,1,2,3,12,15,34}", "0123456789"):
        assert scores(task, problems, [wrong] * 3) == [0.0] * 3


def test_the_original_dapo_set_is_read_by_nested_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "Find x."}], "reward_model": {"ground_truth": str(i), "style": "rule"}}
        for i in range(3)
    ]
    task = local("dapo_math", rows, tmp_path, answer="reward_model.ground_truth")
    assert [task.problem(index).answer for index in range(3)] == ["0", "1", "2"]
    with pytest.raises(ValueError, match=r"row 1 of .*: no column 'reward_model.gold'; it has \['prompt', 'reward_m"):
        local("dapo_math", rows, tmp_path, answer="reward_model.gold")


def test_golds_that_cannot_be_checked_are_named_by_row_or_dropped(tmp_path: Path) -> None:
    rows = [
        *SAMPLES["gsm8k"],
        {"question": "No mark?", "answer": "12"},
        {"question": "Words?", "answer": "#### a dozen"},
    ]
    with pytest.raises(
        ValueError, match=r"2 of 5 rows .*row 4: no answer .*row 5: answer 'a dozen': it does not score 1"
    ):
        local("gsm8k", rows, tmp_path)
    with pytest.warns(UserWarning, match=r"2 of 5 rows left out \(drop_bad\): 4, 5"):
        task = local("gsm8k", rows, tmp_path, drop_bad=True)
    assert (len(task), task.dropped) == (3, [4, 5])
    hostile = local("math500", [{"problem": "?", "answer": "10^{10^{10}}"}, {"problem": "?", "answer": "}{"}], tmp_path)
    problems = [hostile.problem(0), hostile.problem(1)]
    assert scores(hostile, problems, ["\\boxed{10^{10^{9}}}", "\\boxed{}"]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="gold is 'after_hash'; it must be one of"):
        local("gsm8k", rows, tmp_path, gold="after_hash")


def test_boxed_golds(tmp_path: Path) -> None:
    rows = [{"problem": "Halve 1.", "solution": "First \\boxed{3}, no: \\boxed{\\frac{1}{2}}."}]
    task = local("math500", rows, tmp_path, answer="solution", gold="boxed")
    assert task.problem(0).answer == "\\frac{1}{2}"
