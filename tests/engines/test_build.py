"""Where engines are put, and what of a run they get."""

from dataclasses import replace

import pytest

from logra.engines.build import devices_of, threads_each
from logra.memory_plan import Device, plan_method
from logra.memory_trace import Lengths
from logra.model_shapes import config_of
from logra.run_settings import ModelSettings, TrainSettings
from logra.scale_settings import EngineSettings


def settings(**changes: object) -> TrainSettings:
    return TrainSettings(engines=EngineSettings(kind="vllm", **changes))  # type: ignore[arg-type]


def test_engines_get_the_gpus_behind_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    four = settings(count=4)
    assert [devices_of(four, number) for number in range(4)] == ["4", "5", "6", "7"]
    wide = settings(count=2, tensor_parallel=2)
    assert [devices_of(wide, number) for number in range(2)] == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8,7,6,5,4")
    assert [devices_of(settings(count=2), number) for number in range(2)] == ["5", "4"]
    with pytest.raises(ValueError, match=r"engine 1 needs GPUs \[6, 7\] of CUDA_VISIBLE_DEVICES=9,8,7,6,5,4"):
        devices_of(wide, 1)
    assert devices_of(settings(count=2, devices=["0", "3"]), 1) == "3"


def test_processors_are_shared_only_where_both_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert threads_each(EngineSettings(kind="vllm", count=2)) == 12
    assert threads_each(EngineSettings(kind="vllm", count=2, max_lag=1)) == 4
    assert threads_each(EngineSettings(kind="vllm", count=40, max_lag=1)) == 1


def test_the_plan_leaves_rollout_to_engines_elsewhere() -> None:
    inside = TrainSettings(model=ModelSettings(name="Qwen2.5-0.5B", compute="bf16"))
    config, lengths = config_of("Qwen2.5-0.5B"), Lengths(1, 256, 128, masked=False)
    stages = {}
    for name, chosen in (("inside", inside), ("vllm", replace(inside, engines=EngineSettings(kind="vllm")))):
        plan = plan_method(config, chosen, "logra", lengths, Device())
        stages[name] = next(stage for stage in plan.stages if stage.name == "rollout").bytes
    assert set(stages["inside"]) - set(stages["vllm"]) == {"rollout weights", "key/value cache", "logits of a position"}
