# SPDX-License-Identifier: Apache-2.0
r"""Exact scorers: what a completion answers, and whether that is the gold answer. Nothing is ever executed.

The final answer is what stands in the last `\boxed{...}`, else in the last `<answer>...</answer>`, else
after the last "answer:" or "answer is" on its line, else the whole completion. It must be the gold
answer and nothing else: a list that contains the gold is wrong.
"""

import ast
import re
from collections import Counter
from fractions import Fraction

MAX_ANSWER_CHARACTERS = 2000
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_MARKER = re.compile(r"answer\s*(?:is\b\s*:?|:)[ \t]*([^\n]*)", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def final_answer(completion: str) -> str:
    """The part of a completion that answers, stripped."""
    boxed = last_boxed(completion)
    if boxed is not None:
        return boxed.strip()
    tagged = _TAGGED.findall(completion)
    if tagged:
        return tagged[-1].strip()
    marked = [match for match in _MARKER.findall(completion) if match.strip()]
    return (marked[-1] if marked else completion).strip()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...}, braces balanced; None if there is none. One pass."""
    found: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []
    for position, character in enumerate(text):
        if character == "{":
            open_braces.append((position, text[max(0, position - 10) : position].rstrip().endswith("\\boxed")))
        elif character == "}" and open_braces:
            start, boxed = open_braces.pop()
            if boxed and (found is None or start > found[0]):
                found = (start, position)
    return None if found is None else text[found[0] + 1 : found[1]]


def plain_number(text: str) -> Fraction | None:
    """The number that `text` is and nothing else: integer or decimal, thousands separators allowed."""
    text = text.strip().replace("\u2212", "-").strip("$").strip()
    text = text[:-1] if text.endswith(".") else text
    if len(text) > MAX_ANSWER_CHARACTERS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", ""))


def score_number(completion: str, gold: str) -> float:
    """1 if the final answer is the gold number."""
    wanted, got = plain_number(gold), plain_number(final_answer(completion))
    return float(wanted is not None and got == wanted)


def score_text(completion: str, gold: str) -> float:
    """1 if the final answer is the gold text, letter case aside."""
    got = final_answer(completion)
    return float(bool(gold.strip()) and len(got) <= MAX_ANSWER_CHARACTERS and got.casefold() == gold.strip().casefold())


def number_list(text: str) -> list[Fraction] | None:
    """The numbers of a bracketed list, quoted or not, and nothing else."""
    text = text.strip()
    if len(text) > MAX_ANSWER_CHARACTERS or not (text.startswith("[") and text.endswith("]")):
        return None
    parts = [part.strip().strip("'\"") for part in text[1:-1].split(",")]
    numbers = [plain_number(part) for part in parts]
    return None if None in numbers else [number for number in numbers if number is not None]


def score_number_list(completion: str, gold: str) -> float:
    """1 if the final answer is the gold list of numbers in its order."""
    wanted, got = number_list(gold), number_list(final_answer(completion))
    return float(wanted is not None and got == wanted)


def expression_of(completion: str) -> tuple[str, str] | None:
    """The arithmetic expression that a completion answers, and what stands right of one equals sign; or None."""
    text = final_answer(completion).replace("\u2212", "-").replace("\u00d7", "*").replace("\u00f7", "/")
    if len(text) > 200 or text.count("=") > 1:
        return None
    left, _, right = (part.strip() for part in text.partition("="))
    plain = re.fullmatch(r"[\d\s+\-*/()]+", left, re.ASCII) and "**" not in left and "//" not in left
    return (left, right) if plain else None


def score_expression(completion: str, numbers: list[int], target: int) -> float:
    """1 if the final answer is an expression of + - * / that uses each number at most once and equals the target.

    "expression = target" counts too, but not with another number on the right.
    """
    found = expression_of(completion)
    if found is None:
        return 0.0
    text, claimed = found
    if claimed and plain_number(claimed) != target:
        return 0.0
    try:
        tree = ast.parse(text, mode="eval")
        used: Counter[int] = Counter()
        value = _value(tree.body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(used <= Counter(numbers) and value == target)


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    """Exact value of an arithmetic tree, counting the integers in it; anything else raises ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, used), _value(node.right, used)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError("not plain arithmetic")
