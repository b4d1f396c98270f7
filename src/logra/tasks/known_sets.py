# SPDX-License-Identifier: Apache-2.0
"""Public sets of mathematics problems under short names: where they are, their columns, splits and gold answers.

A local copy is read in the same way: `task.sources: {gsm8k: {path: my/train.jsonl}}`.
"""

from typing import Any

KNOWN_SETS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "path": "openai/gsm8k",
        "name": "main",
        "split": "train",
        "prompt": "question",
        "answer": "answer",
        "gold": "after_hashes",
        "rewards": {"number": 1.0},
    },
    "gsm8k_test": {
        "path": "openai/gsm8k",
        "name": "main",
        "split": "test",
        "prompt": "question",
        "answer": "answer",
        "gold": "after_hashes",
        "rewards": {"number": 1.0},
    },
    "math500": {
        "path": "HuggingFaceH4/MATH-500",
        "split": "test",
        "prompt": "problem",
        "answer": "answer",
        "rewards": {"math": 1.0},
    },
    "dapo_math": {
        "path": "open-r1/DAPO-Math-17k-Processed",
        "name": "all",
        "split": "train",
        "prompt": "prompt",
        "answer": "solution",
        "rewards": {"math": 1.0},
    },
}
