"""Exact scorers: the gold is paid and nothing else is, for every generated task."""

import time

import pytest

from logra.tasks.answers import (
    final_answer,
    last_boxed,
    number_list,
    plain_number,
    score_expression,
    score_number,
    score_text,
)
from logra.tasks.generated import PLAIN, SCORERS, generated_task
from tests.conftest import scores


@pytest.mark.parametrize("name", [*PLAIN, *SCORERS])
def test_gold_is_paid_and_hostile_answers_are_not(name: str) -> None:
    task = generated_task(name, 3)
    for index in range(12):
        problem = task.problem(index)
        gold = problem.answer
        paid = [gold, f"  {gold}\n", f"<answer>{gold}</answer>", f"So it is \\boxed{{{gold}}}"]
        assert scores(task, [problem] * len(paid), paid) == [1.0] * len(paid), gold
        unpaid = [
            "", " ", "junk", "0123456789", f"one of 1, 2, {gold}, 3", f"[{gold}, {gold}]", f"{gold} {gold}",
            f"{gold}{gold}x", "None", "__import__('os').getcwd()", "\\boxed{}", f"\\boxed{{{gold}}} \\boxed{{junk}}",
            f"<answer>{gold}</answer><answer>junk</answer>", "9" * 5000, "{" * 5000, "\u0663",
        ]  # fmt: skip
        got = scores(task, [problem] * len(unpaid), unpaid)
        assert got == [0.0] * len(unpaid), [text[:40] for text, score in zip(unpaid, got, strict=True) if score]


def test_problems_are_the_same_in_every_run_and_differ_by_seed_and_index() -> None:
    for name in (*PLAIN, "chain_sum"):
        first, again = generated_task(name, 5), generated_task(name, 5)
        assert [first.problem(i) for i in range(5)] == [again.problem(i) for i in range(5)]
        assert len({str(generated_task(name, seed).problem(i).prompt) for seed in (5, 99_991) for i in range(5)}) > 5


def test_unknown_tasks_and_knobs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"task 'sumz' is not known.*'sums'"):
        generated_task("sumz", 0)
    with pytest.raises(ValueError, match="knobs"):
        generated_task("sums", 0, {"digits": 3})
    with pytest.raises(ValueError, match="do not fit task 'products'"):
        generated_task("products", 0, {"min_digits": 3, "max_digits": 2})
    with pytest.raises(ValueError, match="do not fit task 'products'"):
        generated_task("products", 0, {"digits": 2})


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7", "7"),
        ("The answer is: 7", "7"),
        ("Answer: 3\nNo. Answer: 7 \nbye", "7"),
        ("x \\boxed{3} y \\boxed { 7 }", "7"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7} and then \\boxed{", "7"),
        ("<answer>3</answer> hm <answer> 7 </answer>", "7"),
        ("<answer>3 <answer>7</answer>", "7"),
        ("the answer is \n7", "7"),
    ],
)
def test_the_last_valid_marker_anywhere_counts(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12,345", 12345), ("-3", -3), ("\u22123", -3), ("+7", 7), ("7.", 7), ("0.50", 0.5), ("$4$", 4),
        ("1,23", None), ("1 2", None), ("3=7", None), ("1e5", None), ("0x1F", None), ("", None), ("--3", None),
    ],
)  # fmt: skip
def test_plain_numbers(text: str, value: float | None) -> None:
    assert plain_number(text) == value


def test_scores_of_single_answers() -> None:
    assert score_number("-3", "3") == 0
    assert score_number("007", "7") == 1
    assert score_number("7", "seven") == 0
    assert score_text("ABC", "abc") == 1
    assert score_text("", "") == 0
    assert number_list("['1', '-2.5']") == [1, -2.5]
    assert number_list("[1, x]") is None


def test_expressions_use_each_number_at_most_once_and_are_never_executed() -> None:
    numbers, target = [3, 8, 8, 1], 24
    assert score_expression("8 * 3", numbers, target) == 1
    assert score_expression("8*3*1 = 24", numbers, target) == 1
    assert score_expression("\\boxed{(8 \u00d7 3)}", numbers, target) == 1
    for wrong in ("24", "3*8*1*1", "8+8+8", "8**3", "8//3", "8/0", "(8*3", "3*8 if 1 else 0", "abs(-24)", "8*3=8*3=24"):
        assert score_expression(wrong, numbers, target) == 0, wrong
    assert score_expression("(" * 90 + "8*3" + ")" * 90, numbers, target) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["\\boxed{" * 200_000, "{" * 1_000_000, "<answer>" * 200_000, "answer: " * 200_000])
def test_megabytes_of_markers_take_no_time(text: str) -> None:
    start = time.monotonic()
    final_answer(text)
    last_boxed(text)
    assert time.monotonic() - start < 5
