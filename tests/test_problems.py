"""Which problem comes when: sets row by row, held-out problems, tasks of the evaluation, curricula, going on."""

import json
from pathlib import Path
from typing import Any

import pytest

from logra.curriculum import Ladder
from logra.problems import Mixture
from logra.run_settings import EvaluationSettings, TaskSettings, TrainSettings


def rows_file(folder: Path, count: int, name: str = "rows") -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}", "answer": str(i)}) + "\n" for i in range(count)))
    return {"path": str(path)}


def test_rows_come_once_each_before_any_comes_again_and_in_another_order(tmp_path: Path) -> None:
    task = TaskSettings(names={"rows": 1.0}, sources={"rows": rows_file(tmp_path, 30)})
    settings = TrainSettings(task=task, evaluation=EvaluationSettings(problems=10))
    mixture = Mixture(settings)
    held_out = {str(problem.prompt) for _, problem in mixture.held_out}
    assert len(held_out) == 10
    epochs = [[str(mixture.next_problem()[1].prompt) for _ in range(20)] for _ in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 20
        assert not held_out & set(epoch)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_set_that_is_all_held_out_is_refused(tmp_path: Path) -> None:
    task = TaskSettings(names={"rows": 1.0}, sources={"rows": rows_file(tmp_path, 5)})
    with pytest.raises(ValueError, match=r"all 5 rows are held out .* lower evaluation.problems, or name other tasks"):
        Mixture(TrainSettings(task=task))


def test_an_evaluation_may_have_tasks_of_its_own(tmp_path: Path) -> None:
    task = TaskSettings(
        names={"train": 1.0},
        sources={"train": rows_file(tmp_path, 5, "train"), "exam": rows_file(tmp_path, 6, "exam")},
    )
    evaluation = EvaluationSettings(names={"exam": 1.0, "times": 1.0}, problems=40)
    mixture = Mixture(TrainSettings(task=task, evaluation=evaluation))
    names = [owner.name for owner, _ in mixture.held_out]
    assert (names.count("exam"), names.count("times")) == (6, 20)
    assert {str(mixture.next_problem()[1].prompt) for _ in range(5)} == {f"train {i}" for i in range(5)}
    with pytest.raises(ValueError, match=r"task.sources names \['exam'\], which are not among the tasks \['train'\]"):
        TrainSettings(task=task)


def test_shares_are_kept() -> None:
    mixture = Mixture(TrainSettings(task=TaskSettings(names={"sums": 3.0, "times": 1.0})))
    names = [mixture.next_problem()[0].name for _ in range(2000)]
    assert 0.7 < names.count("sums") / 2000 < 0.8


def test_a_task_goes_on_to_its_next_level_when_it_is_right_often_enough() -> None:
    levels = {"sums": [{"max_value": 9}, {"max_value": 999}]}
    settings = TrainSettings(task=TaskSettings(levels=levels, promote_at=0.75, promote_samples=8))
    mixture = Mixture(settings)
    widths = {len(str(problem.prompt)) for _, problem in mixture.held_out}
    assert min(widths) <= 4
    assert max(widths) == 8
    (task, _) = mixture.next_problem()
    assert not mixture.record(task, [True] * 5)
    assert not mixture.record(task, [False] * 3)  # 5 of 8
    assert not mixture.record(task, [True] * 5)  # 5 of the latest 8
    assert mixture.record(task, [True])  # 6 of the latest 8
    assert mixture.ladders["sums"].level == 1
    assert not mixture.record(task, [True] * 8)  # samples of the level before
    prompts = [str(mixture.next_problem()[1].prompt) for _ in range(50)]
    assert max(map(len, prompts)) == 8
    (harder, _) = mixture.next_problem()
    assert not mixture.record(harder, [True] * 8)  # there is no further level
    assert mixture.ladders["sums"].level == 1


def test_a_ladder_against_a_slow_reference() -> None:
    import random

    chance = random.Random(0)
    ladder, seen, level = Ladder(5, 0.6, 10), list[bool](), 0
    for _ in range(400):
        part = [chance.random() < 0.6 for _ in range(chance.randrange(4))]
        seen += part
        promoted = len(seen) >= 10 and sum(seen[-10:]) >= 6 and level < 4
        assert ladder.record(part) == promoted
        if promoted:
            level, seen = level + 1, []
        assert ladder.level == level
    assert level == 4


def test_going_on_from_a_state_gives_the_same_problems(tmp_path: Path) -> None:
    task = TaskSettings(
        names={"rows": 1.0, "sums": 1.0},
        sources={"rows": rows_file(tmp_path, 50)},
        levels={"sums": [{"max_value": 9}, {"max_value": 99}]},
        promote_samples=4,
    )
    settings = TrainSettings(task=task, evaluation=EvaluationSettings(problems=20))
    whole = Mixture(settings)
    for _ in range(70):
        owner, _ = whole.next_problem()
        whole.record(owner, [True])
    state = json.loads(json.dumps(whole.state()))
    resumed, cold = Mixture(settings), Mixture(settings)
    resumed.load(state)
    wanted = [whole.next_problem()[1] for _ in range(60)]
    assert [resumed.next_problem()[1] for _ in range(60)] == wanted
    assert [cold.next_problem()[1] for _ in range(60)] != wanted
    assert resumed.ladders["sums"].level == 1


def test_levels_and_knobs_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match=r"levels of \['sums'\] replace knobs"):
        TaskSettings(levels={"sums": [{}]}, knobs={"sums": {}})
    with pytest.raises(ValueError, match="at least one set of knobs"):
        TaskSettings(levels={"sums": []})
    with pytest.raises(ValueError, match="promote_at is 80"):
        TaskSettings(promote_at=80)
    with pytest.raises(ValueError, match=r"task.levels names \['gcd'\]"):
        TrainSettings(task=TaskSettings(levels={"gcd": [{}]}))
