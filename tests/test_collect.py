"""Batches: groups without signal are replaced, shaped scores are kept apart from raw ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from logra.collect import Collector
from logra.phases import Phases
from logra.problems import Mixture
from logra.rl.batch import Sample
from logra.rl.shaping import format_bonus, outcomes, overlong_malus
from logra.rollout.engine import Prompt, Sampling
from logra.run_settings import LearningSettings, RolloutSettings, TrainSettings
from logra.tasks.verdict import graded


class Encoder:
    def encode(self, problem: Any, task: Any) -> tuple[int, ...]:
        return (1, 2)


class Scripted:
    """An engine whose group g has, by `right[g]`, so many right completions out of four."""

    def __init__(self, right: Sequence[int]) -> None:
        self.right, self.asked = right, list[list[int]]()
        self.answers: dict[int, str] = {}

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, update: int) -> list[Sample]:
        self.asked.append([prompt.group_id for prompt in prompts])
        return [
            Sample(
                prompt.first_sample_id + i, prompt.group_id, prompt.ids, (5,) * (i + 1), (-1.0,) * (i + 1),
                f"{'yes' if i < self.right[prompt.group_id] else 'no'} {prompt.group_id}", False,
            )
            for prompt in prompts
            for i in range(prompt.samples)
        ]  # fmt: skip


def collector(right: Sequence[int], refill: int, monkeypatch: pytest.MonkeyPatch, **learning: Any) -> Any:
    settings = TrainSettings(
        rollout=RolloutSettings(prompts=4, samples=4, refill=refill, max_tokens=10),
        learning=LearningSettings(**learning),
    )
    engine, mixture = Scripted(right), Mixture(settings)
    monkeypatch.setattr(
        "logra.problems.grade_by_task",
        lambda tasks, problems, samples: [graded(float(sample.text.startswith("yes"))) for sample in samples],
    )
    return Collector(settings, Encoder(), engine, mixture), engine  # type: ignore[arg-type]


def test_groups_without_signal_are_replaced_until_the_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, engine = collector([0, 2, 4, 1, 0, 3, 4, 2], 3, monkeypatch)
    phases = Phases()
    batch = collect(1, phases)
    assert engine.asked == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert [group.samples[0].group_id for group in batch.groups] == [1, 3, 5, 7]
    assert batch.replaced == 4
    assert len({sample.sample_id for sample in batch.samples}) == 16
    assert batch.group_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    # What is reported as reward is of everything drawn: here 16 right of 32.
    assert sum(verdict.outcome == "right" for verdict in batch.drawn) == 16
    assert len(batch.drawn) == 32
    assert set(phases.seconds) == {"rollout", "reward"}


def test_when_refills_run_out_the_batch_is_full_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, engine = collector([0, 2, 4, 0, 0, 0, 4], 1, monkeypatch)
    batch = collect(1, Phases())
    assert engine.asked == [[0, 1, 2, 3], [4, 5, 6]]
    assert len(batch.groups) == 4
    assert batch.groups[0].samples[0].group_id == 1
    assert batch.replaced == 3


def test_without_refill_groups_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    collect, engine = collector([0, 0, 0, 0], 0, monkeypatch)
    batch = collect(1, Phases())
    assert engine.asked == [[0, 1, 2, 3]]
    assert [group.samples[0].group_id for group in batch.groups] == [0, 1, 2, 3]
    assert batch.replaced == 0


def test_filtering_and_metrics_use_raw_scores_and_advantages_shaped_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-wrong groups that differ in length only are not let through by overlong shaping."""
    collect, engine = collector(
        [0, 0, 0, 2, 1, 1, 1], 1, monkeypatch, overlong_tokens=10, format_pattern=r"^yes", format_reward=0.25
    )
    batch = collect(1, Phases())
    assert engine.asked == [[0, 1, 2, 3], [4, 5, 6]]
    assert batch.raw.tolist()[:4] == [1.0, 1.0, 0.0, 0.0]
    assert batch.shaped.tolist()[:4] == pytest.approx([1.25 - 0.1, 1.25 - 0.2, -0.3, -0.4])


def sample(tokens: int, text: str = "") -> Sample:
    return Sample(0, 0, (1,), (2,) * tokens, (0.0,) * tokens, text, False)


def test_overlong_malus_is_daposs() -> None:
    """DAPO's soft punishment, written out case by case (arXiv 2503.14476)."""
    limit, last = 20, 4

    def reference(length: int) -> float:
        if length <= limit - last:
            return 0.0
        return ((limit - last) - length) / last if length <= limit else -1.0

    lengths = list(range(1, 21))
    got = overlong_malus([sample(length) for length in lengths], limit, last, 1.0)
    assert got.tolist() == pytest.approx([reference(length) for length in lengths])
    assert overlong_malus([sample(20)], limit, last, 0.3).tolist() == [-0.3]


def test_format_bonus_and_outcomes() -> None:
    samples = [sample(1, "<think>a\nb</think> 3"), sample(1, "3")]
    assert format_bonus(samples, r"^<think>.*</think>", 0.1).tolist() == [0.1, 0.0]
    got = outcomes(torch.tensor([1.0, 0.5, 2.0, float("nan")], dtype=torch.float64), -0.01)
    assert got.tolist()[:3] == [1.0, -0.01, 1.0]
    assert got[3].isnan()


def test_settings_of_shaping_and_refill_are_checked() -> None:
    with pytest.raises(ValueError, match="no regular expression"):
        LearningSettings(format_pattern="(")
    with pytest.raises(ValueError, match="overlong_tokens is 90, more than max_tokens 64"):
        TrainSettings(learning=LearningSettings(overlong_tokens=90))
    with pytest.raises(ValueError, match="needs at least 2 rollout"):
        TrainSettings(
            rollout=RolloutSettings(samples=1, refill=1),
            learning=LearningSettings(advantage="running_baseline", skip_equal_groups=False),
        )
