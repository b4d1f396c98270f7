# SPDX-License-Identifier: Apache-2.0
"""A GGUF file becomes an ordinary Hugging Face folder, once: safetensors in bf16, tokenizer, chat template."""

from pathlib import Path

import torch


def convert_gguf(file: Path, folder: Path) -> Path:
    """Write `folder` from `file`. Dequantised values lie on ties of bf16; rounding them once settles those.

    Raises:
        ValueError: the file is not there or not GGUF, the folder is not empty, or the package gguf is missing.
    """
    if file.suffix != ".gguf" or not file.is_file():
        raise ValueError(f"{file} is not a .gguf file")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose another folder")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except ImportError as error:
        raise ValueError("reading GGUF needs the package gguf: pip install 'logra[gguf]'") from error
    for holder, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, attribute):
            delattr(holder, attribute)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
