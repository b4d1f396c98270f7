# SPDX-License-Identifier: Apache-2.0
"""Tasks whose problems come from a file or from a data set of the Hugging Face hub.

Files are JSON lines or parquet. A prompt is text or chat messages; gold answers are checked at load.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logra.config import check_allowed
from logra.tasks.answers import last_boxed
from logra.tasks.rewards import RewardLimits, gold_trouble, make_reward, weighted
from logra.tasks.task import Completion, Problem
from logra.tasks.verdict import Verdict

GOLDS = ("plain", "after_hashes", "boxed")


@dataclass(frozen=True)
class Source:
    """Where a task's rows are and how they are read.

    Attributes:
        path: a .jsonl or .parquet file, or the name of a data set on the hub.
        prompt: column with text or chat messages; "a.b" is column b inside column a.
        answer: column with the gold answer.
        gold: where in that column it stands: "plain" (all of it), "after_hashes" (after the last ####), "boxed".
        split: of a hub data set, such as "train[:90%]"; a file is read whole.
        name: configuration of a hub data set, if it has several.
        rewards: reward name -> weight; see `logra.tasks.rewards`.
        drop_bad: leave out rows without a usable prompt or answer instead of refusing them.
    """

    path: str
    prompt: str = "prompt"
    answer: str = "answer"
    gold: str = "plain"
    split: str = "train"
    name: str | None = None
    rewards: Mapping[str, float] = field(default_factory=lambda: {"number": 1.0})
    drop_bad: bool = False

    def __post_init__(self) -> None:
        check_allowed("gold", self.gold, GOLDS)
        if not self.rewards:
            raise ValueError(f"source {self.path} has no rewards; give at least one, such as {{number: 1.0}}")


def read_rows(source: Source) -> list[dict[str, Any]]:
    """All rows of a source.

    Raises:
        ValueError: the file or data set is not there or cannot be read.
    """
    path = Path(source.path)
    if path.suffix == ".jsonl":
        try:
            lines = path.read_text().split("\n")  # JSON strings may hold what splitlines() takes for an end of line
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

    finite = True

    def __init__(self, name: str, source: Source, limits: RewardLimits | None = None) -> None:
        self.name, self.source = name, source
        self.rewards = {spec: make_reward(spec, limits) for spec in source.rewards}
        rows = read_rows(source)
        if not rows:
            raise ValueError(f"task {name!r}: {source.path} has no rows")
        read = [self._problem(number, row) for number, row in enumerate(rows, 1)]
        self._problems = [problem for problem in read if isinstance(problem, Problem)]
        bad = [(number, why) for number, why in enumerate(read, 1) if isinstance(why, str)]
        if bad and (not source.drop_bad or not self._problems):
            shown = "; ".join(f"row {number}: {why}" for number, why in bad[:10])
            raise ValueError(
                f"task {name!r}: {len(bad)} of {len(rows)} rows of {source.path} cannot be used ({shown}). Correct "
                f"them, name other columns, or leave them out with drop_bad: true"
            )
        self.dropped = [number for number, _ in bad]
        if bad:
            shown = ", ".join(map(str, self.dropped[:10])) + (", ..." if len(bad) > 10 else "")
            warnings.warn(f"task {name!r}: {len(bad)} of {len(rows)} rows left out (drop_bad): {shown}", stacklevel=2)

    def _problem(self, number: int, row: dict[str, Any]) -> Problem | str:
        """The problem of a row, or why it has none."""
        source = self.source
        prompt, answer = (self._column(number, row, column) for column in (source.prompt, source.answer))
        refusal = _not_single_turn(prompt, row)
        if refusal:
            raise ValueError(f"task {self.name!r}, row {number} of {source.path}: {refusal}")
        chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and m.get("content") for m in prompt)
        if not (chat or (isinstance(prompt, str) and prompt.strip())):
            return f"no text or chat messages in column {source.prompt!r}"
        gold = _gold(answer, source.gold)
        if not gold:
            return f"no answer in column {source.answer!r} (gold: {source.gold})"
        for reward in source.rewards:
            trouble = gold_trouble(reward, gold)
            if trouble:
                return f"answer {gold[:60]!r}: {trouble}"
        rest = {key: value for key, value in row.items() if key != source.prompt}
        return Problem(f"{self.name}-{number}", prompt, gold, rest)

    def _column(self, number: int, row: dict[str, Any], column: str) -> Any:
        value: Any = row
        for part in column.split(".") if column not in row else [column]:
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(
                    f"task {self.name!r}, row {number} of {self.source.path}: no column {column!r}; it has "
                    f"{sorted(row)}. Name the columns by `prompt` and `answer`."
                )
            value = value[part]
        return value

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        """Problem `index`, from 0."""
        return self._problems[index]

    def grade(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Verdict]:
        """The weighted sum of the rewards; no score where one of them has none."""
        verdicts = [reward(problems, completions) for reward in self.rewards.values()]
        return weighted(verdicts, list(self.source.rewards.values()))


def _gold(answer: Any, where: str) -> str:
    """The gold answer, or '' if there is none."""
    text = "" if answer is None else str(answer)
    if where == "after_hashes":
        text = text.rpartition("####")[2] if "####" in text else ""
    elif where == "boxed":
        text = last_boxed(text) or ""
    return text.strip()


def _not_single_turn(prompt: Any, row: Mapping[str, Any]) -> str | None:
    """Why a row asks for more than one reply of text, or None."""
    remedy = "single-turn text is what can be trained on for now"
    for column in ("images", "image", "tools", "videos", "audio"):
        if row.get(column):
            return f"column {column!r} is not empty; {remedy}"
    for message in prompt if isinstance(prompt, list) else []:
        if not isinstance(message, Mapping):
            continue
        if not isinstance(message.get("content", ""), str):
            kind = type(message["content"]).__name__
            return f"a message's content is a {kind} (parts such as images), not text; {remedy}"
        if message.get("tool_calls") or message.get("role") not in ("system", "user"):
            return f"a message has role {message.get('role')!r}; only system and user messages may be there: {remedy}"
    return None
