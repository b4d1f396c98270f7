# SPDX-License-Identifier: Apache-2.0
r"""Whether two mathematical answers are the same: exact rationals here, everything else by math-verify in a worker.

A completion answers in its last `\boxed{...}` (else by the rule of `logra.tasks.answers`). Two plain rationals
(integers, decimals, fractions, mixed numbers, powers, scientific notation) are compared exactly, so 1/3 is not
0.333333. Everything else goes to math-verify in a process of its own, which is killed when it does not answer in
time: what it is given has passed guards of length, depth and size of exponents, and the clock starts with the
grading. An answer that was not graded in time has no verdict (None), not a score of 0.
"""

import multiprocessing
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from logra.tasks.answers import final_answer

MAX_CHARACTERS, MAX_DEPTH, MAX_EXPONENT_DIGITS, MAX_POWERS = 400, 12, 3, 6
VERDICT_SECONDS, START_SECONDS = 1.0, 60.0

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


class MathGrader:
    """math-verify in a process that can be killed; usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None

    def same(self, gold: str, answer: str) -> bool | None:
        """The verdict of math-verify, or None if there is none within a second."""
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self._start()
            try:
                self._pipe.send((gold, answer))
                if self._pipe.poll(VERDICT_SECONDS):
                    return self._pipe.recv()
            except (EOFError, OSError):
                pass
            self.close()
            return None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_SECONDS) or self._pipe.recv() != "ready":
            self.close()
            raise RuntimeError("the process that runs math-verify did not start; is math-verify installed?")

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


def _work(pipe: Any) -> None:
    """The worker: memory-limited, answers until its pipe closes."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    except (ImportError, ValueError, OSError):
        pass
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def parsed(text: str) -> Any:
        found = parse(f"$${text}$$", [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
        return found or parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)

    pipe.send("ready")
    while True:
        try:
            gold, answer = pipe.recv()
        except EOFError:
            return
        try:
            verdict = bool(verify(parsed(gold), parsed(answer), float_rounding=15, timeout_seconds=None))
        except Exception:
            verdict = False
        pipe.send(verdict)


_grader = MathGrader()


def score_math(completion: str, gold: str) -> float | None:
    """1 if the completion's answer is the gold answer, 0 if not, None if that could not be decided in time."""
    answer = tidy(final_answer(completion))
    wanted = tidy(gold)
    if not answer or ("=" in answer and "=" not in wanted):
        return 0.0
    left, right = exact_rational(wanted), exact_rational(answer)
    if left is not None and right is not None:
        return float(left == right)
    if answer == wanted:
        return 1.0
    if not is_safe(answer) or not _same_shape(wanted, answer):
        return 0.0
    verdict = _grader.same(wanted, answer)
    return None if verdict is None else float(verdict)


def _same_shape(gold: str, answer: str) -> bool:
    """Brackets, separators and words that math-verify is lenient about must agree."""
    pairs = [side[:1] + side[-1:] if "," in side and side[:1] in "[(" else "" for side in (gold, answer)]
    commas = [len(re.findall(r",(?!\d{3}(?!\d))", side)) for side in (gold, answer)]
    words = [set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]{1,}(?![a-zA-Z{])", side)) for side in (gold, answer)]
    return pairs[0] == pairs[1] and commas[0] == commas[1] and words[0] == words[1] and "..." not in answer


def checked_golds(golds: Sequence[str]) -> list[int]:
    """Positions (from 0) of golds that cannot be used: empty, unsafe, or not equal to themselves."""
    return [i for i, gold in enumerate(golds) if not gold.strip() or score_math(f"\\boxed{{{gold}}}", gold) != 1.0]
