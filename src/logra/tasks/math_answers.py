# SPDX-License-Identifier: Apache-2.0
r"""Whether two mathematical answers are the same: exact rationals here, everything else by math-verify in a worker.

A completion answers in its last `\boxed{...}` (else by the rule of `logra.tasks.answers`). Two plain rationals
(integers, decimals, fractions, mixed numbers, powers, scientific notation) are compared exactly, so 1/3 is not
0.333333. Everything else goes to math-verify in a process of its own, which is killed when it does not answer in
time: what it is given has passed guards of length, depth and size of exponents, and the clock starts with the
grading. An answer that was not graded in time has no verdict (None), not a score of 0.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from logra.tasks.answers import final_answer
from logra.tasks.verdict import CRASHED, TIMED_OUT, Verdict, graded
from logra.tasks.worker_pool import Limits, WorkerPool

MAX_CHARACTERS, MAX_DEPTH, MAX_EXPONENT_DIGITS, MAX_POWERS = 400, 12, 3, 6
VERDICT_SECONDS = 1.0

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_RATIONAL = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)\s+)?(?P<top>{_DIGITS})\s*/\s*(?P<bottom>{_DIGITS})(?:\^\{{?(?P<power>\d{{1,3}})\}}?)?
      | (?P<base>{_DIGITS})(?:e(?P<exponent>[-+]?\d{{1,3}})|\^\{{?(?P<raised>\d{{1,3}})\}}?)?
    )""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_FRACTION = re.compile(r"(\d*)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")


def tidy(answer: str) -> str:
    """Dollar signs, spacing commands and typographic minus signs removed."""
    text = re.sub(r"(?<!\\)\\[!,]", "", answer.replace("\u2212", "-").replace("{,}", ","))
    text = re.sub(r"(?<!\\)\\ ", " ", text)
    text = text.replace("\\left", "").replace("\\right", "").strip().strip("$").strip()
    return text[:-1].strip() if text.endswith(".") else text


def exact_rational(answer: str) -> Fraction | None:
    """The rational that `answer` is and nothing else, or None."""
    text = tidy(answer)
    if len(text) > MAX_CHARACTERS:
        return None
    text = _FRACTION.sub(lambda m: f"{m[1] + ' ' if m[1] else ''}{m[2]}/{m[3]}", text)
    match = _RATIONAL.fullmatch(text)
    if match is None:
        return None
    parts = {key: value.replace(",", "") if value else value for key, value in match.groupdict().items()}
    if parts["top"] is not None:
        bottom = Fraction(parts["bottom"]) ** int(parts["power"] or 1)
        if bottom == 0:
            return None
        value = Fraction(parts["top"]) / bottom + int(parts["whole"] or 0)
    else:
        value = Fraction(parts["base"]) * Fraction(10) ** int(parts["exponent"] or 0)
        value = value ** int(parts["raised"]) if parts["raised"] else value
    return -value if parts["sign"] == "-" else value


def is_safe(answer: str) -> bool:
    """Whether math-verify may see it: short, shallow, no towers of powers, no large exponents or factorials."""
    if len(answer) > MAX_CHARACTERS or answer.count("^") + answer.count("**") > MAX_POWERS:
        return False
    depth = deepest = 0
    for character in answer:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(character, 0)
        deepest = max(deepest, depth)
    large = re.search(rf"(?:\^|\*\*)\s*[{{(]*\s*[-+]?\d{{{MAX_EXPONENT_DIGITS + 1},}}", answer)
    return deepest <= MAX_DEPTH and not large and not _has_tower(answer) and not re.search(r"\d{3,}\s*!|!\s*!", answer)


def _has_tower(answer: str) -> bool:
    """Whether an exponent holds another power."""
    text = answer.replace(" ", "").replace("**", "^")
    if re.search(r"\^[^{}()+\-*/=,^]{1,40}\^", text):
        return True
    groups: list[bool] = []
    for position, character in enumerate(text):
        if character in "{(":
            groups.append(text[position - 1 : position] == "^")
        elif character in "})" and groups:
            groups.pop()
        elif character == "^" and any(groups):
            return True
    return False


_pool = WorkerPool("math", Limits(wall_seconds=VERDICT_SECONDS, cpu_seconds=4, memory_bytes=4 << 30))


def grade_math(completions: Sequence[str], golds: Sequence[str]) -> list[Verdict]:
    """One verdict for each completion; those that need math-verify go to its processes side by side."""
    verdicts: dict[int, Verdict] = {}
    asked: list[int] = []
    requests: list[tuple[str, str]] = []
    for row, (completion, gold) in enumerate(zip(completions, golds, strict=True)):
        answer, wanted = tidy(final_answer(completion)), tidy(gold)
        known = _without_math_verify(answer, wanted)
        if known is not None:
            verdicts[row] = known
        else:
            asked.append(row)
            requests.append((wanted, answer))
    for row, reply in zip(asked, _pool.map(requests), strict=True):
        if reply.status == "done":
            same, could_be_read = reply.value
            verdicts[row] = graded(float(same), could_be_read)
        elif reply.status == "raised":
            verdicts[row] = graded(0.0, parsed=False)
        else:
            verdicts[row] = TIMED_OUT if reply.status == "timed_out" else CRASHED
    return [verdicts[row] for row in range(len(completions))]


def score_math(completion: str, gold: str) -> float | None:
    """1 if the completion's answer is the gold answer, 0 if not, None if that could not be decided in time."""
    return grade_math([completion], [gold])[0].score


def _without_math_verify(answer: str, wanted: str) -> Verdict | None:
    """The verdict that needs no algebra, or None."""
    if not answer:
        return graded(0.0, parsed=False)
    if "=" in answer and "=" not in wanted:
        return graded(0.0)
    left, right = exact_rational(wanted), exact_rational(answer)
    if left is not None and right is not None:
        return graded(float(left == right))
    if answer == wanted:
        return graded(1.0)
    if not is_safe(answer):
        return graded(0.0, parsed=False)
    return None if _same_shape(wanted, answer) else graded(0.0)


def _same_shape(gold: str, answer: str) -> bool:
    """Brackets, separators and words that math-verify is lenient about must agree."""
    pairs = [side[:1] + side[-1:] if "," in side and side[:1] in "[(" else "" for side in (gold, answer)]
    commas = [len(re.findall(r",(?!\d{3}(?!\d))", side)) for side in (gold, answer)]
    words = [set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{1,}(?![a-zA-Z{])", side)) for side in (gold, answer)]
    return pairs[0] == pairs[1] and commas[0] == commas[1] and words[0] == words[1] and "..." not in answer
