# SPDX-License-Identifier: Apache-2.0
"""Tasks whose problems come from a file or from a data set of the Hugging Face hub.

Files are JSON lines or parquet. A prompt is text or chat messages; gold answers are checked at load.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logra.tasks.rewards import call_reward, load_reward, weighted
from logra.tasks.task import Problem


@dataclass(frozen=True)
class Source:
    """Where a task's rows are and how they are read.

    Attributes:
        path: a .jsonl or .parquet file, or the name of a data set on the hub.
        prompt: column with text or chat messages.
        answer: column with the gold answer.
        split: of a hub data set; a part such as "train[:90%]" works for files too.
        name: configuration of a hub data set, if it has several.
        rewards: reward name -> weight; see `logra.tasks.rewards`.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    split: str = "train"
    name: str | None = None
    rewards: Mapping[str, float] = field(default_factory=lambda: {"number": 1.0})


def read_rows(source: Source) -> list[dict[str, Any]]:
    """All rows of a source.

    Raises:
        ValueError: the file or data set is not there or cannot be read.
    """
    path = Path(source.path)
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error})") from error
        return [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{source.path} needs the package datasets: pip install datasets") from error
    try:
        if path.suffix == ".parquet":
            loaded = datasets.load_dataset("parquet", data_files=str(path), split="train")
        else:
            loaded = datasets.load_dataset(source.path, source.name, split=source.split)
    except (OSError, ValueError, ConnectionError) as error:
        raise ValueError(f"data set {source.path!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    return [dict(row) for row in loaded]


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: a row must be an object with columns, not {type(row).__name__}")
    return row


class DatasetTask:
    """Problems of a source, scored by its rewards.

    Raises:
        ValueError: a column is missing, or rows have no usable prompt or answer; bad rows are named by number.
    """

    def __init__(self, name: str, source: Source) -> None:
        self.name, self.source = name, source
        self.rewards = {spec: load_reward(spec) for spec in source.rewards}
        rows = read_rows(source)
        if not rows:
            raise ValueError(f"task {name!r}: {source.path} has no rows")
        self._problems = [self._problem(number, row) for number, row in enumerate(rows, 1)]
        bad = [number for number, problem in enumerate(self._problems, 1) if problem is None]
        if bad:
            raise ValueError(
                f"task {name!r}: {len(bad)} of {len(rows)} rows of {source.path} have no usable prompt (text or chat "
                f"messages in column {source.prompt!r}) or answer (column {source.answer!r}); their "
                f"numbers begin {bad[:10]}"
            )

    def _problem(self, number: int, row: dict[str, Any]) -> Problem | None:
        missing = [column for column in (self.source.prompt, self.source.answer) if column not in row]
        if missing:
            raise ValueError(
                f"task {self.name!r}, row {number} of {self.source.path}: no column {missing}; it has {sorted(row)}. "
                f"Name the columns by `prompt` and `answer`."
            )
        prompt, answer = row[self.source.prompt], row[self.source.answer]
        chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "content" in m for m in prompt)
        if not (chat or (isinstance(prompt, str) and prompt.strip())) or answer is None or not str(answer).strip():
            return None
        rest = {key: value for key, value in row.items() if key not in (self.source.prompt, self.source.answer)}
        return Problem(f"{self.name}-{number}", prompt, str(answer), rest)

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        """Problem `index`, from 0."""
        problem = self._problems[index]
        assert problem is not None
        return problem

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float | None]:
        """The weighted sum of the rewards; None where one of them gives no verdict."""
        scores = [call_reward(name, reward, problems, completions) for name, reward in self.rewards.items()]
        return weighted(scores, list(self.source.rewards.values()))
