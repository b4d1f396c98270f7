"""Mathematical answers: the table of cases, hostile inputs, verdicts within a second from any thread."""

import threading
import time

import pytest

from logra.tasks.math_answers import MathGrader, checked_golds, exact_rational, is_safe, score_math


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1/2", "0.5", True), ("1/3", "0.333333", False), ("\\{1,2,3\\}", "\\{3,2,1\\}", True),
        ("(1,2]", "[1,2]", False),
        ("12345", "12,345", True), ("12345", "12\\,345", True), ("-3", "3", False),
        ("-3", "\u22123", True),
        ("300000000", "3e8", True), ("1/2^{99}", "1/2^{98}", False), ("1.0000001", "1.0000002", False),
        ("5/2", "2 1/2", True), ("7", "3=7", False), ("9", "1,2,...,9", False), ("5", "", False),
        ("(1,2)", "(2,1)", False),
        ("5 m", "5 cm", False), ("\\frac{1}{2}", "0.5", True), ("\\frac{\\sqrt{3}}{2}", "\\frac{1}{2}\\sqrt{3}", True),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", False),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", True),
        ("x^2+2x+1", "(x+1)^2", True), ("2\\pi", "6.28", False), ("(1,2)", "(1, 2)", True),
    ],
)  # fmt: skip
def test_the_table_of_cases(gold: str, answer: str, same: bool) -> None:
    assert score_math(f"Hence \\boxed{{{answer}}}.", gold) == float(same)


def test_the_last_box_counts_and_lists_are_no_answer() -> None:
    assert score_math("\\boxed{7} then \\boxed{3}", "7") == 0
    assert score_math("1 2 3 4 5 6 7", "7") == 0
    assert score_math("1, 2, 3, 4, 5, 6, 7", "7") == 0
    assert score_math("7", "7") == 1


@pytest.mark.parametrize(
    "hostile",
    [
        "10^{10^{10}}", "9**9**9", "99999!", "(((((" * 100, "{" * 3000, "2^{999999999}", "x^{x^{x^{x^x}}}",
        "\\frac{" * 200,
        "__import__('os').system('x')", "\\input{/etc/passwd}", "9" * 100_000, "1e999", "3!!!!",
    ],
)  # fmt: skip
def test_hostile_answers_are_wrong_at_once(hostile: str) -> None:
    assert score_math("\\boxed{1+x}", "x+1") == 1  # the worker is there; starting it is no part of the grading
    start = time.monotonic()
    assert score_math(f"\\boxed{{{hostile}}}", "7") in (0.0, None)
    assert time.monotonic() - start < 1.5


def test_exact_rationals() -> None:
    assert exact_rational("2 1/2") == exact_rational("\\frac{5}{2}") == exact_rational("2\\frac{1}{2}") == 2.5
    assert exact_rational("-\\frac{5}{2}") == exact_rational("-2.5")
    assert exact_rational("1/0") is None
    assert exact_rational("x") is None
    assert not is_safe("10^{10^{10}}")
    assert is_safe("x^2+y^2")


def test_a_worker_that_hangs_is_killed_and_replaced_from_any_thread() -> None:
    grader = MathGrader()
    assert grader.same("x+1", "1+x") is True
    verdicts: list[bool | None] = []

    def hang() -> None:
        start = time.monotonic()
        verdicts.append(
            grader.same("x", "(x+1)^{300}(x+2)^{300}(x+3)^{300}(y+1)^{200} + " + "+".join(f"x^{i}" for i in range(99)))
        )
        assert time.monotonic() - start < 3
        verdicts.append(grader.same("x+1", "1+x"))

    thread = threading.Thread(target=hang)
    thread.start()
    thread.join(90)
    assert verdicts[0] in (None, False)
    assert verdicts[1] is True
    grader.close()


def test_golds_that_cannot_be_used_are_found() -> None:
    assert checked_golds(["7", "", "\\frac{1}{2}", "   ", "x+1"]) == [1, 3]
