# SPDX-License-Identifier: Apache-2.0
"""Configurations of common models, known without weights and without a hub, for planning memory.

Only what fixes sizes is here. Any other model is read from a folder, a config.json, or the hub.
"""

import json
from pathlib import Path
from typing import Any

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip

# name: type, then the sizes above
_KNOWN: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 128, 152064, False),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "meta-llama/Llama-3.1-70B": ("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
    "mistralai/Mistral-7B-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False),
    "google/gemma-2-2b": ("gemma2", 2304, 9216, 26, 8, 4, 256, 256000, True),
    "google/gemma-2-9b": ("gemma2", 3584, 14336, 42, 16, 8, 256, 256000, True),
    "google/gemma-2-27b": ("gemma2", 4608, 36864, 46, 32, 16, 128, 256000, True),
    "google/gemma-3-1b-pt": ("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, True),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 2560, 32, 15, 5, 64, 49152, True),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 8192, 24, 32, 32, 64, 49152, True),
}  # fmt: skip
_SUFFIXES = ("-Instruct", "-Base", "-it", "-instruct")


def known_names() -> list[str]:
    """Models whose sizes are known here."""
    return sorted(_KNOWN)


def config_of(name: str, trust_remote_code: bool = False) -> Any:
    """The configuration of a model: by name, with or without its owner, or from a folder or a config.json.

    Raises:
        ValueError: there is no such model here or on the hub.
    """
    from transformers import AutoConfig

    place = Path(name)
    if place.is_file():
        values = json.loads(place.read_text())
        return AutoConfig.for_model(values.pop("model_type"), **values)
    known = None if place.is_dir() else _known(name)
    if known is not None:
        kind, *sizes = _KNOWN[known]
        return AutoConfig.for_model(kind, **dict(zip(_SIZES, sizes, strict=True)))
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the sizes of model {name!r} are not known: {str(error).splitlines()[0]} Give a folder, a config.json, a "
            f"Hugging Face name that can be reached, or one of {', '.join(known_names())}."
        ) from error


def _known(name: str) -> str | None:
    plain = name
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    wanted = plain.lower()
    return next((each for each in _KNOWN if wanted in (each.lower(), each.lower().partition("/")[2])), None)
