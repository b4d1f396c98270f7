"""Data sets and users' rewards: columns, bad rows by number, functions that misbehave."""

import json
from pathlib import Path
from typing import Any

import pytest

from logra.tasks.dataset import DatasetTask, Source
from logra.tasks.task import Problem
from tests.conftest import scores

ROWS = [
    {"question": "2+2?", "gold": "4", "level": "easy"},
    {"question": [{"role": "user", "content": "3*3?"}], "gold": 9, "level": "hard"},
]


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_json_lines_with_named_columns(tmp_path: Path) -> None:
    task = DatasetTask("mine", Source(write(tmp_path, ROWS), prompt="question", answer="gold"))
    assert len(task) == 2
    assert task.problem(0) == Problem("mine-1", "2+2?", "4", {"gold": "4", "level": "easy"})
    assert task.problem(1).answer == "9"
    problems = [task.problem(0), task.problem(1)]
    assert scores(task, problems, ["\\boxed{4}", "8"]) == [1.0, 0.0]


def test_parquet(tmp_path: Path) -> None:
    import pandas

    path = tmp_path / "rows.parquet"
    pandas.DataFrame({"prompt": ["1+1?", "1+2?"], "answer": ["2", "3"]}).to_parquet(path)
    task = DatasetTask("mine", Source(str(path)))
    assert [task.problem(i).answer for i in range(2)] == ["2", "3"]


def test_bad_rows_and_columns_are_named(tmp_path: Path) -> None:
    rows = [*ROWS, {"question": " ", "gold": "1"}, {"question": "?", "gold": None}]
    with pytest.raises(ValueError, match=r"2 of 4 rows .*row 3: no text or chat messages.*row 4: no answer"):
        DatasetTask("mine", Source(write(tmp_path, rows), prompt="question", answer="gold"))
    with pytest.raises(ValueError, match=r"row 1 of .*: no column 'prompt'; it has \['gold'"):
        DatasetTask("mine", Source(write(tmp_path, ROWS)))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{oops\n')
    with pytest.raises(ValueError, match=r"line 2: not JSON"):
        DatasetTask("mine", Source(str(tmp_path / "rows.jsonl")))
    with pytest.raises(ValueError, match="cannot be read"):
        DatasetTask("mine", Source(str(tmp_path / "absent.jsonl")))
    with pytest.raises(ValueError, match="has no rows"):
        DatasetTask("mine", Source(write(tmp_path, [])))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content is a list "),
        ({"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}, "role 'assistant'"),
        ({"prompt": [{"role": "user", "content": "?"}, {"role": "tool", "content": "!"}]}, "role 'tool'"),
        ({"prompt": [{"role": "user", "content": "?", "tool_calls": [1]}]}, "role 'user'; only"),
        ({"prompt": "?", "images": ["a.png"]}, "column 'images' is not empty"),
        ({"prompt": "?", "tools": [{"name": "search"}]}, "column 'tools' is not empty"),
    ],
)
def test_turns_tools_and_images_are_refused(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    good: dict[str, Any] = {"prompt": "1+1?", "answer": "2", "images": None, "tools": []}
    with pytest.raises(ValueError, match=f"row 2 of .*{why}.*single-turn text is what can be trained on"):
        DatasetTask("mine", Source(write(tmp_path, [good, row | {"answer": "2"}]), drop_bad=True))
    assert len(DatasetTask("mine", Source(write(tmp_path, [good])))) == 1
