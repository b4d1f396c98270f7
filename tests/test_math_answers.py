"""Mathematical answers: the table of cases, hostile inputs, verdicts within a second from any thread."""

import threading
import time

import pytest

from logra.tasks.math_answers import exact_rational, grade_math, is_safe, score_math
from logra.tasks.rewards import gold_trouble
from logra.tasks.worker_pool import Answer, Limits, WorkerPool


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
    slow = "(x+1)^{300}(x+2)^{300}(x+3)^{300}(y+1)^{200} + " + "+".join(f"x^{i}" for i in range(99))
    pool = WorkerPool("math", Limits(wall_seconds=1.0, cpu_seconds=4))
    pool.start()
    answers: list[Answer] = []

    def hang() -> None:
        start = time.monotonic()
        answers.extend(pool.map([("x", slow)]))
        assert time.monotonic() - start < 3
        answers.extend(pool.map([("x+1", "1+x"), ("x", "y")]))

    thread = threading.Thread(target=hang)
    thread.start()
    thread.join(90)
    assert answers[0].status in ("timed_out", "done")
    assert [answer.value for answer in answers[1:]] == [(True, True), (False, True)]
    pool.close()


def test_outcomes_and_golds() -> None:
    told = ["\\boxed{7}", "\\boxed{8}", "\\boxed{}", "\\boxed{10^{10^{10}}}"]
    outcomes = [verdict.outcome for verdict in grade_math(told, ["7"] * 4)]
    assert outcomes == ["right", "wrong", "unparseable", "unparseable"]
    assert [bool(gold_trouble("math", gold)) for gold in ["7", " ", "\\frac{1}{2}", "x+1", "{1}{"]] == [
        False, True, False, False, False,
    ]  # fmt: skip
