"""Saving and loading by several processes: whole or not at all, and every process learns what went wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from logra.config import LograSettings
from logra.divide import divide
from logra.optim.optimizer import LograOptimizer
from logra.parallel.processes import Processes
from logra.rl.logprobs import CausalModel
from logra.run_folder import FollowedFolder, RunFolder
from logra.run_settings import RunSettings, TrainSettings
from logra.saved_state import VALUES, load_nested, save_nested
from logra.train_command import save_together
from logra.trainer_state import load_state, restore, save_state
from tests.two_processes.conftest import Workers
from tests.two_processes.updates import backward, make, weights_of


def optimizer_of(processes: Processes, kind: str, storage: str) -> tuple[Any, LograOptimizer, CausalModel]:
    model = make(kind).to(torch.bfloat16)
    causal = CausalModel(model)
    if processes.count > 1:
        divide(causal, processes, "bf16")
    optimizer = LograOptimizer(model, LograSettings(rank=8, targets="all-linear", storage=storage))
    return model, optimizer, causal


def whole_low_bits(optimizer: LograOptimizer) -> dict[str, Tensor]:
    return {name: each.layer.rows.whole(each.low) for name, each in optimizer.storages.items()}  # type: ignore[attr-defined]


def saved_by(processes: Processes, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer, causal = optimizer_of(processes, "gpt2", "split")
    backward(causal, processes)
    optimizer.step()
    save_state(Path(folder), {"n": 3}, optimizer, dict(model.named_parameters()), processes)
    return weights_of(model), whole_low_bits(optimizer)


def loaded_by(processes: Processes, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer, _ = optimizer_of(processes, "gpt2", "split")
    state = load_state(Path(folder), processes)
    assert state["numbers"] == {"n": 3}
    restore(state, model, optimizer)
    optimizer.propose()  # low bits that waited for their weights are settled
    return weights_of(model), whole_low_bits(optimizer)


def test_weights_stored_the_other_way_round_go_on_too(two: Workers, tmp_path: Path) -> None:
    """GPT-2's square layers: low bits lie by rows while the parameter is divided by columns."""
    saved, _ = two(saved_by, str(tmp_path / "two"))
    for found in (loaded_by(Processes(), str(tmp_path / "two")), *two(loaded_by, str(tmp_path / "two"))):
        for mine, theirs in zip(found, saved, strict=True):
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    alone = saved_by(Processes(), str(tmp_path / "one"))
    for found in two(loaded_by, str(tmp_path / "one")):
        for mine, theirs in zip(found, alone, strict=True):
            assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def nowhere_to_save(processes: Processes, folder: str) -> tuple[str, int]:
    settings = TrainSettings(run=RunSettings(folder=folder))
    kept = RunFolder(settings) if processes.first else FollowedFolder(settings)
    processes.wait()
    if processes.first:
        (Path(folder) / "taken").write_text("a file, not a folder")
    with pytest.raises(ValueError, match="could not be saved") as error:
        save_together(kept, "taken/model", lambda path: None, processes)
    return str(error.value), len(processes.gathered("still together"))


def test_a_folder_that_cannot_be_made_is_learned_of_by_all(two: Workers, tmp_path: Path) -> None:
    (first, count), (second, _) = two(nowhere_to_save, str(tmp_path / "run"))
    assert first == second
    assert "everything saved before is intact" in first
    assert count == 2


def full_in_one_process(processes: Processes, folder: str) -> tuple[str, int]:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    write = HuggingFaceStorageWriter.write_data

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    model, _, _ = optimizer_of(processes, "plain", "bf16")
    if processes.place == 1:
        HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(OSError, match="No space left on device") as error:
            save_nested(Path(folder), dict(model.named_parameters()), processes)
    finally:
        HuggingFaceStorageWriter.write_data = write  # type: ignore[method-assign]
    return str(error.value), len(processes.gathered("still together"))


def test_a_disk_that_is_full_for_one_process_is_learned_of_by_all(two: Workers, tmp_path: Path) -> None:
    answers = two(full_in_one_process, str(tmp_path / "state"))
    assert all(told.startswith("process 1: OSError") and count == 2 for told, count in answers)


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    alone = Processes()
    save_nested(tmp_path, {"a": [1, None, {"b": torch.arange(6.0).view(2, 3)}], "c": "text"}, alone)
    found = load_nested(tmp_path, alone)
    assert found["a"][:2] == [1, None]
    assert torch.equal(found["a"][2]["b"], torch.arange(6.0).view(2, 3))
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match="cannot be read or written"):
        load_nested(tmp_path, alone)
    (tmp_path / VALUES).write_text("{")
    with pytest.raises(ValueError, match=r"values.json cannot be read"):
        load_nested(tmp_path, alone)
