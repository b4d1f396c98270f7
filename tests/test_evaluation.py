"""pass@k against enumeration, majority against counting."""

import itertools

import pytest

from logra.evaluation import evaluate, pass_at_k
from logra.rl.batch import Sample
from logra.run_settings import EvaluationSettings


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        verdicts = [index < right for index in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(verdicts, k))
            assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="k is"):
        pass_at_k(samples, 0, samples + 1)


def drawn(groups: dict[int, list[tuple[str, float | None]]]) -> tuple[list[Sample], list[float | None]]:
    samples: list[Sample] = []
    scores: list[float | None] = []
    for group, members in groups.items():
        for text, score in members:
            samples.append(Sample(len(samples), group, (1,), (2,), (0.0,), text, False))
            scores.append(score)
    return samples, scores


def test_means_are_over_problems_and_ungraded_samples_are_left_out() -> None:
    result = evaluate(
        *drawn(
            {
                0: [("7", 1.0), ("7", 1.0), ("8", 0.0), ("9", 0.0)],
                1: [("1", 0.0), ("1", 0.0), ("2", 1.0), ("3", 0.0)],
                2: [("5", 1.0), ("5", 1.0), ("4", 0.0), ("?", None), ("6", 0.0)],
            }
        )
    )
    assert result.pass_at_1 == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert result.pass_at_k[2] == pytest.approx((5 / 6 + 0.5 + 5 / 6) / 3)
    assert result.pass_at_k[4] == 1.0
    assert result.majority == pytest.approx(2 / 3)
    assert (result.problems, result.ungraded) == (3, 1)


def test_one_sample_has_no_majority_and_no_verdict_gives_no_score() -> None:
    result = evaluate(*drawn({0: [("7", 1.0)], 1: [("3", 0.0)]}))
    assert (result.pass_at_1, result.majority, result.pass_at_k) == (0.5, None, {})
    result = evaluate(*drawn({0: [("7", None)]}))
    assert (result.pass_at_1, result.majority, result.pass_at_k, result.ungraded) == (None, None, {}, 1)


def test_one_ungraded_sample_does_not_take_pass_at_k_from_the_others() -> None:
    four: list[tuple[str, float | None]] = [("7", 1.0), ("7", 0.0), ("8", 0.0), ("9", 0.0)]
    result = evaluate(*drawn({0: four, 1: [*four[:3], ("9", None)]}))
    assert result.pass_at_k == {2: (1 - 3 / 6 + 1 - 1 / 3) / 2, 4: 1.0}


def test_the_papers_preset_and_settings_that_contradict_it() -> None:
    paper = EvaluationSettings(preset="paper")
    assert (paper.samples, paper.temperature, paper.top_p) == (4, 0.7, 0.7)
    assert EvaluationSettings(preset="paper", samples=4).samples == 4
    with pytest.raises(ValueError, match="samples is 8, but preset 'paper' sets it to 4"):
        EvaluationSettings(preset="paper", samples=8)
    with pytest.raises(ValueError, match="at temperature 0 they are all equal"):
        EvaluationSettings(samples=4)
    with pytest.raises(ValueError, match="top_p is 0"):
        EvaluationSettings(top_p=0.0)
