"""Advantages and losses against TRL's own GRPOTrainer: the same completions, scores and weights on both sides."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from logra.model import TINY
from logra.rl import losses
from logra.rl.advantages import KINDS
from logra.rl.batch import Sample, collate
from logra.rl.logprobs import CausalModel, token_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL and transformers deprecate names of each other
TEMPERATURE, LIMIT, GROUPS, SIZE = 0.8, 6, 3, 4


def reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs within a group."""
    return [len(text.strip()) + 0.25 * text.count("1") for text in completions]


def grpo(folder: Path, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """A real trainer on the tiny policy, and a batch that it generated and scored."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE,
        bf16=False,
        use_cpu=True,
        report_to=[],
        gradient_checkpointing=False,
        seed=3,
        model_init_kwargs={"dtype": "float32"},
        **settings,
    )
    rows = [{"prompt": f"{i}+{7 * i + 3}="} for i in range(GROUPS)]
    trainer = GRPOTrainer(model=str(TINY), reward_funcs=reward, args=arguments, train_dataset=Dataset.from_list(rows))
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions([row for row in rows for _ in range(SIZE)])
    return trainer, batch


def samples_of(batch: dict[str, Tensor]) -> list[Sample]:
    """The batch in our form; log-probabilities of the rollout are filled in later."""
    found = []
    for row in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
        found.append(Sample(row, row // SIZE, tuple(prompt), tuple(completion), (), "", False))
    return found


@pytest.mark.parametrize(
    ("scale_rewards", "kind"), [("none", "group_mean"), ("group", "group_normalised"), ("batch", None)]
)
def test_advantages(scale_rewards: str, kind: str | None, tmp_path: Path) -> None:
    trainer, batch = grpo(tmp_path, scale_rewards=scale_rewards)
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    scores = torch.tensor(reward(texts), dtype=torch.float64)
    groups = torch.arange(GROUPS).repeat_interleave(SIZE)
    if kind is None:
        # TRL centres by group and divides by the deviation of the batch.
        wanted = KINDS["group_mean"](scores, groups) / (scores.std() + 1e-4)
    else:
        wanted = KINDS[kind](scores, groups)
    assert wanted.abs().max() > 0.1
    assert torch.allclose(batch["advantages"].double(), wanted, atol=1e-6)


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("clipped", "token", {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    ("clipped", "sequence", {"loss_type": "grpo", "epsilon": 0.1}),
    ("clipped", "constant", {"loss_type": "dr_grpo", "epsilon": 0.1}),
    ("clipped", "token", {"loss_type": "bnpo", "epsilon": 0.3}),
    ("sequence", "sequence", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05}),
    ("cispo", "token", {"loss_type": "cispo", "epsilon_high": 1.1}),
]


@pytest.mark.parametrize(("loss", "normalisation", "theirs"), CASES, ids=lambda case: str(case)[:20])
def test_losses_and_their_gradients(loss: str, normalisation: str, theirs: dict[str, Any], tmp_path: Path) -> None:
    trainer, batch = grpo(tmp_path, beta=0.0, **theirs)
    samples = samples_of(batch)
    causal = CausalModel(trainer.model)
    micro = collate(samples, range(len(samples)), 0, "cpu")
    with torch.no_grad():
        old = token_logprobs(causal, micro, TEMPERATURE).logprobs
        batch["old_per_token_logps"] = torch.zeros(batch["completion_mask"].shape)
        batch["old_per_token_logps"][batch["completion_mask"].bool()] = old
        generator = torch.Generator().manual_seed(0)
        for parameter in trainer.model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    trainer.model.train()
    wanted = trainer._compute_loss(trainer.model, batch)
    wanted.backward()
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    wanted_gradient, weight.grad = weight.grad, None

    low = float(theirs.get("epsilon", 0.0))
    high = float(theirs.get("epsilon_high", low))
    if loss == "cispo":  # TRL caps the ratio itself, from above only
        low, high = 1.0, high - 1
    mine = token_logprobs(causal, micro, TEMPERATURE).logprobs
    ratio = (mine - old).exp()
    assert bool((ratio > 1 + high).any() or (ratio < 1 - low).any())
    tokens = losses.Tokens(mine, old, old, batch["advantages"][micro.sample_index], micro.sample_index)
    per_token = losses.KINDS[loss](tokens, losses.LossSettings(2.0, low, high))
    lengths = torch.tensor([len(sample.completion_ids) for sample in samples])
    got = (per_token * losses.token_weights(lengths, normalisation, LIMIT)[micro.sample_index]).sum()
    got.backward()
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-7)
    assert weight.grad.abs().max() > 1e-4
    assert torch.allclose(weight.grad, wanted_gradient, rtol=1e-4, atol=1e-7)
