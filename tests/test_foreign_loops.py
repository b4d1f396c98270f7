"""The optimizer inside Hugging Face's Trainer: accumulation, clipping, schedulers, checkpoints, resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from logra import LograOptimizer
from tests.conftest import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainer's own, of which there are many


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(48, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def trainer(folder: Path, steps: int) -> tuple[Any, LograOptimizer]:
    from transformers import Trainer, TrainingArguments

    model = tiny_llama(layers=1)
    optimizer = LograOptimizer(model, rank=8, storage="split", lr=1e-3, others="adamw", others_lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        save_steps=3, logging_steps=1, report_to=[], use_cpu=True, seed=0,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, scheduler)), optimizer


def test_hugging_face_trainer_resumes_exactly(tmp_path: Path) -> None:
    whole, optimizer = trainer(tmp_path / "whole", 6)
    whole.train()
    assert optimizer.updates == 6
    assert optimizer.skipped == 0
    first, _ = trainer(tmp_path / "parts", 3)
    first.train()
    rest, resumed = trainer(tmp_path / "parts", 6)
    rest.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert resumed.updates == 6
    for (name, wanted), got in zip(whole.model.named_parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    for layer, twin in zip(optimizer.sketches, resumed.sketches, strict=True):
        assert torch.equal(
            optimizer.storages[layer.name].extra_state()["low_bits"],
            resumed.storages[twin.name].extra_state()["low_bits"],
        )
