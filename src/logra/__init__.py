# SPDX-License-Identifier: Apache-2.0
"""LoGRA: reinforcement-learning post-training with low-rank gradient sketches."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from logra.config import LograSettings as LograSettings
    from logra.optim.optimizer import LograOptimizer as LograOptimizer

_HOMES = {"LograOptimizer": "logra.optim.optimizer", "LograSettings": "logra.config"}
__all__ = ["LograOptimizer", "LograSettings", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that settings can be read without torch."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'logra' has no attribute {name!r}")
