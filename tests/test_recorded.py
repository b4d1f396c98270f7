"""Batches written down and learned from again: the same update without drawing anything."""

import json
from pathlib import Path
from typing import Any

import pytest

from logra.cli import main
from logra.rollout.transformers_engine import TransformersEngine

COMMON = [
    "train", "--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_tokens", "6",
    "--evaluation.problems", "8", "--evaluation.every", "0", "--run.updates", "3", "--method.logra.lr", "1e-4",
]  # fmt: skip


def test_a_replayed_run_is_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    refill = ["--rollout.refill", "2"]
    assert main([*COMMON, *refill, "--run.folder", str(first), "--rollout.record", "true"]) == 0
    files = sorted((first / "batches").iterdir())
    assert [path.name for path in files] == [f"update-{update:06d}.jsonl" for update in (1, 2, 3)]
    generate, drawn = TransformersEngine.generate, []

    def watched(self: Any, prompts: Any, sampling: Any, update: int) -> Any:
        drawn.append(sampling.purpose)
        return generate(self, prompts, sampling, update)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    replay = ["--rollout.replay", str(first / "batches")]
    assert main([*COMMON, *refill, *replay, "--run.folder", str(second)]) == 0
    assert set(drawn) == {"evaluation"}
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]
    # Another method learns from the same completions.
    assert main([*COMMON, *refill, *replay, "--run.folder", str(other), "--method.name", "adamw"]) == 0
    capsys.readouterr()
    changed = [*COMMON, *refill, *replay, "--run.overwrite", "true", "--run.folder", str(other)]
    assert main([*changed, "--run.seed", "5"]) == 2
    assert "answers another prompt; replay with the task, prompts, samples and seed" in capsys.readouterr().err
    assert main([*changed, "--run.updates", "4"]) == 2
    assert "update 4 cannot be replayed" in capsys.readouterr().err


def test_recorded_samples_keep_every_digit(tmp_path: Path) -> None:
    assert main([*COMMON, "--run.folder", str(tmp_path / "run"), "--rollout.record", "true"]) == 0
    lines = (tmp_path / "run" / "batches" / "update-000001.jsonl").read_text().splitlines()
    assert len(lines) == 16
    sample = json.loads(lines[5])
    assert sample["sample_id"] == 5
    assert sample["group_id"] == 1
    assert len(sample["completion_ids"]) == len(sample["rollout_logprobs"])
    assert any(len(repr(value)) > 12 for value in sample["rollout_logprobs"])


def test_recording_a_replay_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--rollout.record", "true", "--rollout.replay", "x"]) == 2
    assert "replay 'x' draws nothing" in capsys.readouterr().err
