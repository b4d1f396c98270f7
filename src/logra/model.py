# SPDX-License-Identifier: Apache-2.0
"""Loading a policy: any Hugging Face causal LM with safetensors weights, or the tiny one that ships here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from logra.rl.logprobs import CausalModel
from logra.run_settings import ModelSettings, TaskSettings, TrainSettings
from logra.tasks.task import Problem

TINY = Path(__file__).parent / "tiny_policy"


@dataclass(frozen=True)
class Policy:
    """A model ready to be trained.

    Attributes:
        model: the Hugging Face model.
        tokenizer: its tokenizer.
        causal: its body and head.
        end_ids: every id that ends a completion.
        pad_id: what padding is filled with; masked by length, so it may be an end id.
        device: "cpu" or "cuda".
    """

    model: Any
    tokenizer: Any
    causal: CausalModel
    end_ids: frozenset[int]
    pad_id: int
    device: str = "cpu"

    def encode(self, problem: Problem, task: TaskSettings) -> tuple[int, ...]:
        """The ids of a problem's prompt, through the chat template where there is one."""
        if self.tokenizer.chat_template is None:
            if not isinstance(problem.prompt, str):
                raise ValueError(
                    f"problem {problem.key} is a list of chat messages, but the model's tokenizer has no chat "
                    f"template; use prompts of plain text, or a model with a template"
                )
            return tuple(self.tokenizer(problem.prompt + task.suffix, add_special_tokens=True)["input_ids"])
        if isinstance(problem.prompt, str):
            messages = [{"role": "user", "content": problem.prompt + task.suffix}]
        else:
            messages = [dict(message) for message in problem.prompt]
            messages[-1]["content"] += task.suffix
        if task.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise ValueError(
                    f"problem {problem.key} has a system message of its own, and task.system_prompt would be a second "
                    f"one; leave task.system_prompt out"
                )
            messages = [{"role": "system", "content": task.system_prompt}, *messages]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def chosen_device(settings: ModelSettings) -> str:
    """The GPU ("cuda") if there is one and it is not declined, else "cpu".

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ValueError("model.device is 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    return "cuda" if has_gpu and settings.device != "cpu" else "cpu"


def chosen_compute(settings: ModelSettings) -> str:
    """What `compute` means on this machine, "bf16" or "fp32": a processor that emulates bf16 is far slower with it."""
    if settings.compute != "auto":
        return settings.compute
    if settings.weights == "bfloat16":
        return "bf16"
    if chosen_device(settings) == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    native = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return "bf16" if any(each is not None and each() for each in native) else "fp32"


def on_this_machine(settings: TrainSettings) -> TrainSettings:
    """The settings with what depends on the machine filled in."""
    return replace(settings, model=replace(settings.model, compute=chosen_compute(settings.model)))


def load_policy(settings: ModelSettings, device: str | None = None) -> Policy:
    """Load model and tokenizer, to the device that the settings mean or to another one.

    Raises:
        ValueError: the model is not there or cannot be used; the message says what to do.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = device or chosen_device(settings)
    place = path_of(settings)
    common: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **common)
        model = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=getattr(torch, settings.weights),
            attn_implementation=settings.attention,
            use_safetensors=True,
            **common,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {settings.name!r} could not be loaded: {str(error).splitlines()[0]} Give a Hugging Face name, a "
            f"folder with config.json, tokenizer and *.safetensors, or 'tiny'."
        ) from error
    prepare(model.to(device), settings)
    causal = CausalModel(model)
    causal.check()
    end_ids = _end_ids(type(model).__name__, getattr(model, "generation_config", None), model.config, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids)
    return Policy(model, tokenizer, causal, end_ids, int(pad_id), device)


def prepare(model: Any, settings: ModelSettings) -> None:
    """Make a loaded model fit for training: no dropout, and activation checkpointing if it is wanted."""
    _switch_dropout_off(model)
    if settings.gradient_checkpointing:
        # Renamed in transformers 5.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def _switch_dropout_off(model: Any) -> None:
    """The policy that is trained must be the one that acts, so no part of it is dropped at random."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def tokenizer_of(settings: ModelSettings) -> tuple[Any, frozenset[int]]:
    """The tokenizer, and every id that ends a completion, without the model.

    Raises:
        ValueError: they are not there.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    place, common = path_of(settings), {"trust_remote_code": settings.trust_remote_code}
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(place, **common), AutoConfig.from_pretrained(place, **common)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {settings.name!r} could not be loaded: {str(error).splitlines()[0]}") from error
    try:
        generation = GenerationConfig.from_pretrained(place)
    except OSError:
        generation = None
    return tokenizer, _end_ids(settings.name, generation, config, tokenizer)


def path_of(settings: ModelSettings) -> str:
    """Where the model is: a name or a folder."""
    return str(TINY) if settings.name == "tiny" else settings.name


def _end_ids(what: str, *sources: Any) -> frozenset[int]:
    """All ids that end a completion, from generation settings, configuration and tokenizer."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found |= set(value) if isinstance(value, Sequence) else {value} if value is not None else set()
    if not found:
        raise ValueError(f"{what} and its tokenizer name no end-of-sequence id; set eos_token in the tokenizer")
    return frozenset(int(index) for index in found)
