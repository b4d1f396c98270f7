"""Several engines as one: prompts are spread, every update arrives, and what falls out comes back or is left out."""

import copy
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from logra.engines.engine import State
from logra.engines.requests import Completions, Request
from logra.rl.batch import Sample
from logra.rollout.engine import Prompt, Sampling
from logra.sync.sender import SyncLost
from tests.conftest import tiny_llama
from tests.engines.near import PROMPTS, SAMPLING, NearEngine, Trainer, fall_silent, gate_before_next


@pytest.fixture
def made() -> Iterator[list[Trainer]]:
    trainers: list[Trainer] = []
    yield trainers
    for each in trainers:
        each.pool.close()


def plain(samples: list[Any]) -> list[Any]:
    return [(s.sample_id, s.group_id, s.prompt_ids, s.completion_ids, s.text, s.truncated) for s in samples]


def test_engines_draw_what_the_trainer_would(made: list[Trainer]) -> None:
    trainer = Trainer(count=3)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    for update in range(1, 4):
        drawn = trainer.pool.generate(PROMPTS, SAMPLING, update)
        wanted = trainer.alone(SAMPLING, update)
        assert plain(drawn) == plain(wanted)
        for one, other in zip(drawn, wanted, strict=True):
            assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-6)
            assert one.policy_update == update - 1
        trainer.update()
    assert all(each.asked for each in trainer.engines)
    found = trainer.pool.metrics()
    assert found["sync"]["full_states"] == 0
    assert 0 < found["sync"]["message_bytes"] < found["sync"]["weights_bytes"] * 3
    assert found["sync"]["patch_bytes"] > 0
    assert found["engines"]["live"] == 3
    assert 0 < found["engines"]["utilisation"] < 1
    assert trainer.pool.notices() == []


def test_a_step_of_size_zero_sends_nothing(made: list[Trainer]) -> None:
    trainer = Trainer(count=1)
    made.append(trainer)
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.pool.start(0, (5, 7, 9))
    asked = trainer.engines[0].asked
    gaps = []
    for update in range(1, 21):
        trainer.update()
        assert trainer.pool.metrics()["sync"]["message_bytes"] == 0
        if update in (1, 20):
            drawn, own = trainer.pool.generate(PROMPTS, SAMPLING, 1), trainer.alone(SAMPLING, 1)
            gaps.append([a.rollout_logprobs == b.rollout_logprobs for a, b in zip(drawn, own, strict=True)])
    assert gaps[0] == gaps[1]
    assert trainer.engines[0].asked == asked + 2
    assert trainer.pool.version_after(20) == 0


def test_an_engine_that_falls_silent_is_started_anew(made: list[Trainer]) -> None:
    trainer = Trainer(rollout_timeout=1.0)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    first = trainer.engines[0]
    first.faults[first.asked + 1] = fall_silent()
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 1)) == plain(trainer.alone(SAMPLING, 1))
    assert any("no completions within 1 s; it is reached again" in each for each in trainer.pool.notices())
    trainer.update()
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 2)) == plain(trainer.alone(SAMPLING, 2))
    assert first.starts == 2


def test_weights_changed_behind_an_engines_back_are_found_and_put_right(made: list[Trainer]) -> None:
    trainer = Trainer(count=1)
    made.append(trainer)
    own = copy.deepcopy(trainer.model)
    engine = trainer.engines[0]
    engine.model = own
    trainer.pool.start(0, (5, 7, 9))
    trainer.pool.engines[0].link.ask(trainer.source.forced(), 5.0)  # as another trainer would
    trainer.update()
    trainer.pool.attend(trainer.pool._up)
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 1)) == plain(trainer.alone(SAMPLING, 1))
    assert trainer.pool.report.full.keys() == {"0"}
    assert "follows version 0, this replica has 1" in trainer.pool.notices()[0]


def test_an_engine_that_computes_with_other_weights_is_found_at_start(made: list[Trainer]) -> None:
    model = tiny_llama()
    trainer = Trainer([NearEngine(model, computing=copy.deepcopy(model))])
    made.append(trainer)
    with pytest.raises(SyncLost, match="engine 0: all its weights were changed, but its log-probabilities stayed"):
        trainer.pool.start(0, (5, 7, 9))


def test_an_engine_of_another_model_is_refused_at_start(made: list[Trainer]) -> None:
    trainer = Trainer([NearEngine(tiny_llama(layers=1))], restarts=0)
    made.append(trainer)
    with pytest.raises(SyncLost, match=r"0: .*7 of 14 weights of the trainer are not in this model"):
        trainer.pool.start(0, (5, 7, 9))


def test_what_an_engine_cannot_do_is_said_and_costs_no_engine(made: list[Trainer]) -> None:
    trainer = Trainer(count=1)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    with pytest.raises(ValueError, match="engine 0: ValueError: a prompt has no tokens"):
        trainer.pool.generate([Prompt(0, (), 0, 1)], SAMPLING, 1)
    assert trainer.pool.engines[0].state == State.READY
    assert trainer.pool.generate(PROMPTS, SAMPLING, 1)


def test_an_engine_much_slower_than_the_others_is_left_out(made: list[Trainer]) -> None:
    trainer = Trainer(count=3, retire_below=0.3)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    slow = trainer.engines[1]
    for number in range(1, 40, 2):
        slow.faults[slow.asked + number] = fall_silent(0.5)
        slow.faults[slow.asked + number + 1] = fall_silent(0.5)
    for update in range(1, 9):
        assert plain(trainer.pool.generate(PROMPTS, SAMPLING, update)) == plain(trainer.alone(SAMPLING, update))
        trainer.update()
        trainer.pool.metrics()
    assert [engine.state == State.RETIRED for engine in trainer.pool.engines] == [False, True, False]
    (notice,) = trainer.pool.notices()
    assert "engine 1: it draws" in notice
    assert trainer.pool.metrics()["engines"]["live"] == 2


def test_all_weights_come_again_when_due(made: list[Trainer]) -> None:
    trainer = Trainer(count=2, full_every=2)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    fulls = []
    for _ in range(4):
        trainer.update()
        fulls.append(trainer.pool.metrics()["sync"]["full_states"])
    assert fulls == [0, 2, 0, 2]
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 5)) == plain(trainer.alone(SAMPLING, 5))


def test_when_no_engine_is_left_the_run_is_told_why(made: list[Trainer]) -> None:
    trainer = Trainer(count=1, restarts=0, sync_timeout=1.0)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    trainer.engines[0].faults[trainer.engines[0].asked + 1] = fall_silent()
    with pytest.raises(SyncLost, match=r"no engine is left. Engines were left out: 0: no answer within 1 s"):
        trainer.update()


def test_draws_ahead_start_at_the_oldest_version_allowed(made: list[Trainer]) -> None:
    """A message waits for the draw before it; a draw that needs newer weights waits for the message."""
    trainer = Trainer(count=1, max_lag=1)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    gate = gate_before_next(trainer.engines[0])
    old = trainer.alone(SAMPLING, 1)
    first = trainer.pool.ask(PROMPTS, SAMPLING, 1, trainer.pool.version_after(-1))
    second = trainer.pool.ask(PROMPTS, replace(SAMPLING, seed=1), 2, 1)
    time.sleep(0.3)
    trainer.update()  # does not wait
    assert not first.done
    assert not second.done
    gate.put(None)
    trainer.pool.attend(lambda: second.done)
    assert plain(trainer.pool.result(first)) == plain(old)
    assert {each.policy_update for each in first.samples} == {0}
    assert {each.policy_update for each in second.samples} == {1}
    assert plain(trainer.pool.result(second)) == plain(trainer.alone(replace(SAMPLING, seed=1), 2))


def test_a_pool_that_closes_lets_waiting_threads_go(made: list[Trainer]) -> None:
    trainer = Trainer(count=1)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(trainer.pool.wait_for(lambda: False)))
    thread.start()
    trainer.pool.close()
    thread.join(5)
    assert results == [False]


def test_requests_and_completions_travel_whole() -> None:
    sampling = Sampling(0.7, 3, 0.9, 5, ("a", "\n"), 4, "evaluation")
    request = Request((Prompt(1, (2, 3), 4, 5),), sampling, 6)
    assert Request.from_bytes(request.to_bytes()) == request
    logprobs = tuple(float(value) for value in torch.rand(3, dtype=torch.float64))
    there = Completions(3, [Sample(1, 2, (3,), (4, 5, 6), logprobs, "x", True)], None)
    assert Completions.from_bytes(there.to_bytes()) == there


def test_a_full_state_that_falls_due_while_a_message_is_merged(made: list[Trainer]) -> None:
    trainer = Trainer(count=1, max_lag=2, full_every=2)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    gate = gate_before_next(trainer.engines[0])
    trainer.update()  # its message is being merged
    time.sleep(0.3)
    trainer.update()  # all weights are due
    gate.put(None)
    trainer.pool.attend(trainer.pool._up)
    assert trainer.pool.report.full == {"0": "due"}
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 3)) == plain(trainer.alone(SAMPLING, 3))


def test_an_engine_many_messages_behind_gets_all_weights_instead(made: list[Trainer]) -> None:
    trainer = Trainer(count=1, max_lag=20)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    gate = gate_before_next(trainer.engines[0])
    trainer.pool.ask(PROMPTS, SAMPLING, 1, 0)
    time.sleep(0.3)
    for _ in range(12):
        trainer.update()
    gate.put(None)
    trainer.pool.attend(trainer.pool._up)
    assert trainer.pool.report.full == {"0": "it is many messages behind"}
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 3)) == plain(trainer.alone(SAMPLING, 3))


def test_nonsense_from_an_engine_does_not_end_its_thread(made: list[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(count=1)
    made.append(trainer)
    trainer.pool.start(0, (5, 7, 9))
    link = trainer.pool.engines[0].link
    ask, answers = link.ask, [ZeroDivisionError("nonsense"), LookupError("more of it")]

    def nonsense(data: bytes, seconds: float) -> bytes:
        if answers:
            raise answers.pop()
        return ask(data, seconds)

    monkeypatch.setattr(link, "ask", nonsense)
    trainer.update()
    trainer.pool.attend(trainer.pool._up)
    assert plain(trainer.pool.generate(PROMPTS, SAMPLING, 2)) == plain(trainer.alone(SAMPLING, 2))


def test_an_engine_that_does_not_listen_yet_is_waited_for(made: list[Trainer]) -> None:
    trainer = Trainer(count=1, restarts=0)
    made.append(trainer)
    engine, connect, refused = trainer.engines[0], trainer.engines[0].connect, [1, 2, 3]

    def later(seconds: float) -> socket.socket:
        if refused:
            raise ConnectionRefusedError(f"nobody listens yet ({refused.pop()})")
        return connect(seconds)

    engine.connect = later  # type: ignore[method-assign]
    trainer.pool.engines[0].link.connect = later  # type: ignore[attr-defined]
    trainer.pool.start(0, (5, 7, 9))
    assert not refused
    assert trainer.pool.notices() == []
