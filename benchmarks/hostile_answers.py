# SPDX-License-Identifier: Apache-2.0
"""Hostile completions against every built-in reward and every generated task.

    python -m benchmarks.hostile_answers

Power towers, giant factorials, nested brackets, Python and shell in answers, LaTeX that reads files, lists that hold
the gold answer, look-alike characters, megabytes: as they are, boxed, tagged, after "the answer is". None is the gold
answer, so none may score. Whatever would be executed leaves a file behind, which is looked for. Beside them,
for every reward and task: the gold answer scores 1, and '', junk, all digits and the gold inside a list score 0. At the
end every reward still grades a plain right answer.
"""

import argparse
import itertools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from logra.tasks.code_tests import protection
from logra.tasks.generated import PLAIN, SCORERS, generated_task
from logra.tasks.rewards import make_reward
from logra.tasks.task import Completion, Problem
from logra.tasks.verdict import Verdict

HUNG_SECONDS = 3.0  # a verdict of math-verify may take one; more than this is a hang
OTHERS = ("4", "2", "3", "5", "11")  # no 1: a list such as "1 x+1" is the product x+1
WRAPPERS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "So the final answer is {}", "\\boxed{{3}} no, \\boxed{{{}}}")


def towers() -> Iterator[str]:
    for a, b, c in itertools.product((2, 9, 10, 99), (9, 10, 999), (9, 99, 10**6)):
        yield f"{a}^{{{b}^{{{c}}}}}"
        yield f"{a}**{b}**{c}"
    for base, exponent in itertools.product(("2", "x", "\\pi", "(-1)"), (999999999, 10**18)):
        yield f"{base}^{{{exponent}}}"
        yield f"{base}^{{-{exponent}}}"
        yield f"\\sqrt[{exponent}]{{{base}}}"


def factorials() -> Iterator[str]:
    for digits in range(3, 12):
        yield "9" * digits + "!"
        yield f"({'9' * digits}!)!"
        yield f"\\binom{{{'9' * digits}}}{{{'4' * digits}}}"
        yield f"\\Gamma({'9' * digits})"
    for count in range(2, 12):
        yield "3" + "!" * count


def nested() -> Iterator[str]:
    pieces = (
        "(",
        "{",
        "[",
        "\\frac{",
        "\\sqrt{",
        "\\left(",
        "|",
        "\\begin{pmatrix}",
        "x^{",
        "-(",
        "\\boxed{",
        "f(",
        "<answer>",
    )
    for piece, count in itertools.product(pieces, (10, 100, 1000, 20_000)):
        yield piece * count
        closing = {"(": ")", "{": "}", "[": "]"}.get(piece[-1], "")
        yield piece * count + "1" + closing * count


def programs(canary: Path) -> Iterator[str]:
    """Each would leave the canary behind if something executed it."""
    touch, write = f"touch {canary}", f"open({str(canary)!r},'w').write('x')"
    yield f"__import__('os').system('{touch}')"
    yield write
    yield f"(lambda: {write})()"
    yield f"[{write} for _ in (1,)]"
    yield f'eval("{write}")'
    yield f'exec("{write}")'
    yield f"$({touch})"
    yield f"`{touch}`"
    yield f"; {touch}"
    yield f"| {touch}"
    yield f"\\write18{{{touch}}}"
    yield f"\\immediate\\write18{{{touch}}}"
    yield f'\\input{{|"{touch}"}}'
    yield f"{{{{ {write} }}}}"
    yield f"f'{{{write}}}'"
    yield f"().__class__.__bases__[0].__subclasses__() or {write}"
    yield f'sympify("{write}")'
    yield f"!!python/object/apply:os.system ['{touch}']"
    yield f"```python\n{write}\n```"
    yield f"```python\nimport os\nos.system('{touch}')\n```"
    yield f"#!/bin/sh\n{touch}"
    yield "while True: pass"
    yield "[0]*10**12"
    yield "9**9**9**9"
    yield "raise SystemExit"
    yield "exit()"
    yield "os._exit(1)"
    yield "\\input{/etc/passwd}"
    yield "../../../../etc/passwd"
    yield "file:///etc/passwd"
    yield "True or 1"
    yield "1 if True else 0"
    yield "lambda x: x"
    yield "object()"


def lists(gold: str) -> Iterator[str]:
    others = [*OTHERS, "x", "a"]
    for count in range(1, 8):
        for separator in (", ", " ", "; ", " or ", " and ", "\n", " = "):
            yield separator.join([*others[:count], gold])
            if separator != "\n":  # after "the answer is", the gold alone on its line is the answer
                yield separator.join([gold, *others[:count]])
    yield f"[{gold}, {gold}]"
    yield f"{{{gold}, 1}}"
    yield f"not {gold}"
    yield f"{gold}?{gold}?1"
    yield f"{gold}...10"
    yield "0123456789"


def look_alikes() -> Iterator[str]:
    marks = [
        "\u0660",
        "\u0667",
        "\uff17",
        "\u2077",
        "\u2164",
        "\U0001d7d5",
        "\u3007",
        "\u200b",
        "\u202e",
        "\ufeff",
        "\u0000",
    ]
    marks += [
        "\u0301",
        "\ud7ff",
        "\U0001f600",
        "\u2212",
        "\u2044",
        "\u00bd",
        "\u221e",
        "\u03c0",
        "\u2261",
        "\x1b[2J",
        "\r",
    ]
    for mark in marks:
        yield mark
        yield mark * 50
        yield f"1{mark}2"
        yield f"{mark}junk"


def megabytes() -> Iterator[str]:
    for unit in (
        "9",
        "a",
        "{",
        "}",
        "(",
        "\\boxed{",
        "\\",
        "^",
        "answer is ",
        "<answer>",
        "</answer>",
        "\n",
        "1,",
        "1+",
        "\u200b",
    ):
        yield unit * (1_000_000 // len(unit))
    yield "\\boxed{" + "9" * 3_000_000 + "}"
    yield "0." + "3" * 2_000_000
    yield "1/" * 300_000 + "1"
    yield "```python\n" + "x = 1\n" * 200_000 + "```"


def chains() -> Iterator[str]:
    """Expressions that are long, but under the guards of length."""
    for count in (5, 20, 60):
        yield "+".join(f"x^{i}" for i in range(count))
        yield "*".join(f"(x+{i})" for i in range(count))
        yield "\\int_0^1 " * (count // 5) + "x dx"
        yield "\\sum_{i=1}^{10^{9}} " + "i" * (count // 5)
        yield "\\frac{1}{" * (count // 5) + "x" + "}" * (count // 5)
        yield "(x+1)^{300}" * (count // 5)
        yield "\\sin(" * (count // 5) + "x" + ")" * (count // 5)
        yield "=".join(["7"] * count)
        yield "\\begin{pmatrix}" + "&".join(["1"] * count) + "\\end{pmatrix}"
        yield "e" * count
        yield "1e" + "9" * count
        yield "0x" + "f" * count


def hostile(gold: str, canary: Path) -> list[str]:
    """All of them, each once; megabytes only as they are."""
    families = (towers(), factorials(), nested(), programs(canary), lists(gold), look_alikes(), chains())
    wrapped = [wrapper.format(text) for family in families for text in family for wrapper in WRAPPERS]
    return list(dict.fromkeys([*wrapped, *megabytes()]))


@dataclass
class Count:
    """What came of the gradings of one reward."""

    total: int = 0
    hung: int = 0
    worst_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[list[str]] = field(default_factory=list)

    def enter(self, text: str, verdict: Verdict, right: bool, seconds: float) -> None:
        self.total += 1
        self.hung += seconds > HUNG_SECONDS
        self.worst_seconds = max(self.worst_seconds, seconds)
        self.outcomes[verdict.outcome] += 1
        if (verdict.outcome == "right") != right:
            self.wrong.append([text[:120], verdict.outcome])


def subjects() -> Iterator[tuple[str, Any, Problem, str]]:
    """Name, grader, problem and a completion that is right, of every reward and task."""
    golds = {"number": ["7", "-3.5"], "text": ["abc"], "math": ["7", "x+1", "\\frac{1}{2}", "(1,2)"]}
    for name, some in golds.items():
        for gold in some:
            yield f"{name}: {gold}", make_reward(name), Problem("p", "?", gold), gold
    for name in (*PLAIN, *SCORERS):
        task = generated_task(name, 0)
        # Not a gold that a hostile text gives by itself, such as 1 in brackets.
        problems = [task.problem(index) for index in range(50) if task.problem(index).answer not in ("1", *OTHERS)]
        problem = next((each for each in problems if len(each.answer) > 1), problems[0])
        yield name, task.grade, problem, problem.answer


def grade(count: Count, grader: Any, problem: Problem, texts: Sequence[str], right: bool) -> None:
    for text in texts:
        start = time.perf_counter()
        (verdict,) = grader([problem], [Completion(text)])
        count.enter(text, verdict, right, time.perf_counter() - start)


def grade_code(canary: Path) -> Count:
    """The reward that runs code runs hostile code too; side by side, as a run does."""
    count, reward = Count(), make_reward("code")
    problem = Problem("p", "?", "assert double(2) == 4")
    texts = [text for text in hostile("7", canary) if len(text) < 100_000]
    start = time.perf_counter()
    verdicts = reward([problem] * len(texts), [Completion(text, row, row) for row, text in enumerate(texts)])
    mean = (time.perf_counter() - start) / len(texts)
    for text, verdict in zip(texts, verdicts, strict=True):
        count.enter(text, verdict, False, mean)
    grade(count, reward, problem, ["def double(x): return 2 * x"], True)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    counts: dict[str, Count] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        canary = Path(folder) / "executed"
        for name, grader, problem, right in subjects():
            count = counts[name] = Count()
            grade(count, grader, problem, hostile(problem.answer, canary), False)
            grade(count, grader, problem, [f"\\boxed{{{right}}}", right], True)
            plain = ["", " ", "junk", "0123456789", f"[{right}, 1]", f"1, {right}"]
            grade(count, grader, problem, plain, False)
            grade(count, grader, problem, [f"\\boxed{{{right}}}"], True)
            print(name, count.total, dict(count.outcomes), f"{count.worst_seconds:.2f} s", count.wrong[:5], flush=True)
        counts["code"] = grade_code(canary)
        print("code", counts["code"].total, dict(counts["code"].outcomes), counts["code"].wrong[:5], flush=True)
        executed = int(canary.exists()) + len(os.listdir(folder))
    rows = [
        {
            "reward": name, "total": count.total, "hung": count.hung, "worst_seconds": count.worst_seconds,
            "outcomes": dict(count.outcomes), "wrong_verdicts": count.wrong,
        }
        for name, count in counts.items()
    ]  # fmt: skip
    result = {
        "completions": len(hostile("7", Path("/canary"))),
        "total": sum(count.total for count in counts.values()),
        "executed": executed,
        "hung": sum(count.hung for count in counts.values()),
        "wrong_verdicts": sum(len(count.wrong) for count in counts.values()),
        "worst_seconds": max(count.worst_seconds for count in counts.values()),
    }
    print(json.dumps(result), write_result("hostile_answers", rows, {}, {"code_protection": protection()}, result))


if __name__ == "__main__":
    main()
