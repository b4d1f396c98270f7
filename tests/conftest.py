"""Shared pieces: tiny models of real architectures, dense gradients to compare with."""

import copy
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)


def tiny_llama(layers: int = 2, hidden: int = 32, intermediate: int = 80, tied: bool = False, seed: int = 0) -> Any:
    """A Llama with grouped-query attention, random weights, vocabulary 48."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def tiny_gpt2() -> Any:
    """A GPT-2, whose linear layers are Conv1D with biases."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
    )


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def dense_gradients(model: nn.Module, backward: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Gradients [out_features, in_features] of every linear weight, by an ordinary backward on a copy."""
    twin = copy.deepcopy(model).requires_grad_(True)
    backward(twin)
    gradients = {}
    for name, module in twin.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.ndim == 2 and weight.grad is not None:
            gradients[name] = weight.grad.T if type(module).__name__ == "Conv1D" else weight.grad
    return gradients


def scores(task: Any, problems: Any, texts: list[str]) -> list[float | None]:
    """The scores that a task gives to texts."""
    from logra.tasks.task import Completion

    completions = [Completion(text, row, row) for row, text in enumerate(texts)]
    return [verdict.score for verdict in task.grade(problems, completions)]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def wait_for_lines(running: "subprocess.Popen[str]", folder: Path, count: int) -> None:
    """Until a run has written so many lines of metrics; a slow machine may take minutes."""
    deadline, path = time.monotonic() + 600, folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        assert running.poll() is None
        time.sleep(0.05)


def latest(source: Any) -> tuple[bytes, int]:
    """The message of an update that changed something."""
    found = source.message()
    assert found is not None
    return found


def engine_processes(folder: Path) -> list[int]:
    """Of a run's engines that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"engine" in words and str(folder / "engines" / "settings.json").encode() in words:
            found.append(int(path.parent.name))
    return sorted(found)
