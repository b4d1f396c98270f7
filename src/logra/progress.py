# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it runs: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections import deque
from typing import Any, Protocol, TextIO

_ROWS = 12


class Progress(Protocol):
    """Gets every line of metrics."""

    def show(self, line: dict[str, Any]) -> None:
        """A line of an update or of an evaluation."""
        ...

    def say(self, text: str) -> None:
        """Something that must be read, such as an alarm."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def scores_as_text(scores: dict[str, Any]) -> str:
    """The shares of an evaluation, in one line."""
    flat = {name: value for name, value in scores.items() if isinstance(value, float)} | scores.get("by_task", {})
    return ", ".join(f"{name} {value:.3f}" for name, value in flat.items())


class PlainLines:
    """One line of text for each line of metrics."""

    def __init__(self, updates: int, stream: TextIO) -> None:
        self.updates, self.stream = updates, stream

    def show(self, line: dict[str, Any]) -> None:
        """Write it."""
        place = f"update {line['update']}/{self.updates}"
        if "evaluation" in line:
            self.say(f"{place}: held-out {scores_as_text(line['evaluation'])}")
            return
        reward = "no verdict" if line["reward"] is None else f"reward {line['reward']:.3f}"
        gap = "-" if line["logprob_gap_absolute"] is None else f"{line['logprob_gap_absolute']:.1e}"
        self.say(
            f"{place}: {reward}, entropy {_number(line['entropy'])}, length {line['length']:.1f}, "
            f"log-prob gap {gap}, {sum(line['seconds'].values()):.1f} s"
        )

    def say(self, text: str) -> None:
        """Write it at once."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Nothing is left to do."""


class LiveTable:
    """The latest updates as a table, the latest evaluation, alarms, and the time that is left."""

    def __init__(self, updates: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.updates, self.start = updates, time.monotonic()
        self.rows: deque[dict[str, Any]] = deque(maxlen=_ROWS)
        self.evaluations: list[str] = []
        self.first_update: int | None = None
        self.live = Live(console=Console(file=stream), auto_refresh=False, vertical_overflow="visible")
        self.live.start()

    def show(self, line: dict[str, Any]) -> None:
        """Draw the table again."""
        if "evaluation" in line:
            self.evaluations.append(f"update {line['update']}: held-out {scores_as_text(line['evaluation'])}")
        else:
            if self.first_update is None:
                self.first_update = line["update"] - 1
                self.start = time.monotonic() - sum(line["seconds"].values())
            self.rows.append(line)
        self._draw()

    def say(self, text: str) -> None:
        """Print it above the table, where it stays."""
        self.live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last table on the screen."""
        self.live.stop()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title(), title_justify="left")
        for name in ("update", "reward", "pass rate", "entropy", "length", "truncated", "gap p95", "seconds"):
            table.add_column(name, justify="right")
        for line in self.rows:
            cells = [str(line["update"]), _number(line["reward"]), _number(line["pass_rate"]), _number(line["entropy"])]
            cells += [f"{line['length']:.1f}", f"{line['truncated']:.2f}", _number(line["logprob_gap_p95"], 4)]
            table.add_row(*cells, f"{sum(line['seconds'].values()):.1f}", style="red" if line.get("alarms") else "")
        self.live.update(Group(table, *(Text(each) for each in self.evaluations[-3:])), refresh=True)

    def _title(self) -> str:
        if not self.rows or self.first_update is None:
            return f"0/{self.updates} updates"
        done = self.rows[-1]["update"]
        left = (self.updates - done) * (time.monotonic() - self.start) / (done - self.first_update)
        return f"{done}/{self.updates} updates, about {left / 60:.0f} min left"


def make_progress(updates: int, stream: TextIO | None = None) -> Progress:
    """The view that suits the stream (stdout by default)."""
    stream = sys.stdout if stream is None else stream
    return LiveTable(updates, stream) if stream.isatty() else PlainLines(updates, stream)
