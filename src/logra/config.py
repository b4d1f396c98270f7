# SPDX-License-Identifier: Apache-2.0
"""Settings, readable without torch: each field has one line of help, a unit where it has one, and its source."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def setting(default: Any, help: str, allowed: tuple[Any, ...] | None = None, least: float | None = None) -> Any:
    """A dataclass field with its line of help, allowed values and least value."""
    metadata = {"help": help, "allowed": allowed, "least": least}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_allowed(name: str, value: Any, allowed: tuple[Any, ...] | None) -> None:
    """Refuse a value that is not among those allowed.

    Raises:
        ValueError: names the value, what is allowed, and the nearest.
    """
    if allowed is not None and value not in allowed:
        near = difflib.get_close_matches(str(value), [str(item) for item in allowed], 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} is {value!r}; it must be one of {list(allowed)}.{hint}")


def check_section(section: Any) -> None:
    """Compare each field with the allowed values and the least value that it carries.

    Raises:
        ValueError: names field, value and what is allowed.
    """
    for spec in fields(section):
        value = getattr(section, spec.name)
        check_allowed(spec.name, value, spec.metadata.get("allowed"))
        least = spec.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise ValueError(f"{spec.name} is {value!r}; it must be at least {least}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True)
class KlSettings:
    """How far a step may move the policy (arXiv 2610.06647, section 2.5).

    Raises:
        ValueError: a value is out of range; the message names the remedy.
    """

    budget: float | None = setting(
        None, "Predicted KL(before || after) of the first update, nats per token; none: no control (paper: 2e-4)."
    )
    budget_final: float | None = setting(
        None, "The same from update schedule_updates on; none: as budget (paper: 2e-5)."
    )
    schedule: str = setting("cosine", "Between the two.", ("cosine", "linear", "constant"))
    schedule_updates: int = setting(300, "Update at which budget_final is reached (paper: 300).")
    alpha_max: float = setting(3.0, "A step is made at most so many times larger than proposed (paper: 3).")
    estimator: str = setting(
        "auto",
        "Prediction: jvp (forward-mode derivative), secant (a second forward, any kernel and method); auto: secant, "
        "which costs less, where the KL is verified too, else jvp if it runs.",
        ("auto", "jvp", "secant"),
    )
    verify: bool = setting(True, "Measure the KL of the step before it is taken, and shrink it until it fits.")
    responses: int = setting(2, "Responses of the batch that size a step; half as many others are measured too.")

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_allowed(spec.name, getattr(self, spec.name), spec.metadata["allowed"])
        for name in ("budget", "budget_final", "alpha_max"):
            value = getattr(self, name)
            if value is not None and not (_is_size(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; it must be a number above 0")
        for name in ("schedule_updates", "responses"):
            if not _is_whole(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a whole number of at least 1")
        if self.budget_final is not None and self.budget is None:
            raise ValueError(f"budget_final is {self.budget_final}, but budget is none; give the first update's budget")


@dataclass(frozen=True)
class LograSettings:
    """How `LograOptimizer` updates a model. Defaults are the paper's where it has them (arXiv 2610.06647).

    Raises:
        ValueError: a value is out of range, or a combination has no meaning; the message names the remedy.
    """

    rank: int = setting(256, "Rows of each projection A: more keep more of the gradient (paper: 256).")
    targets: str | Sequence[str] = setting(
        DEFAULT_TARGETS, "Layers to update: leaf names, a regular expression for whole names, or 'all-linear'."
    )
    projection: str = setting(
        "rademacher", "Kind of A, drawn anew each update.", ("rademacher", "gaussian", "orthonormal")
    )
    step_size: str = setting(
        "update_ratio",
        "Meaning of lr: norm of the update over norm of the weights (paper), or an Adam-like learning rate.",
        ("update_ratio", "lr"),
    )
    lr: float = setting(6e-5, "Step size, in the unit step_size names; torch schedulers act on it (paper: ratio 6e-5).")
    rule: str = setting("row_adam", "Update rule on the sketches.", ("row_adam", "sgd"))
    beta2: float = setting(0.95, "Decay of the row second moment (paper: 0.95).")
    eps: float = setting(1e-8, "Added to the row scale, as a share of its mean over rows (paper: 1e-8).")
    weight_decay: float = setting(0.0, "Decoupled decay per unit of lr; only with step_size 'lr'.")
    max_norm: float | None = setting(
        None, "Clip the norm of all sketches together to this (dense meaning); none: no clip."
    )
    factor_bits: int = setting(8, "Bits per entry of the merged factors.", (8, 12, 16))
    sketch_sync: str = setting(
        "micro_batch",
        "Several processes: sum sketches over them block by block after each micro-batch, or once an update, which "
        "sends less and keeps whole sketches.",
        ("micro_batch", "update"),
    )
    storage: str = setting(
        "auto",
        "How selected weights are stored: fp32, split (bf16 + 8 bits), bf16 (stochastic rounding); auto: fp32 weights "
        "stay as they are, bf16 weights become split.",
        ("auto", "fp32", "split", "bf16"),
    )
    dithered_copy: bool = setting(
        False, "With fp32 storage, keep a dithered bf16 copy that bf16 compute uses (2 bytes)."
    )
    others: str = setting("frozen", "All other parameters: frozen, or trained by AdamW.", ("frozen", "adamw"))
    others_lr: float = setting(1e-6, "Learning rate of AdamW on the other parameters (paper's dense control: 1e-6).")
    others_betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's betas on the other parameters.")
    others_weight_decay: float = setting(0.0, "AdamW's weight decay on the other parameters.")
    seed: int = setting(0, "Seed of projections, rounding and dither.")

    def __post_init__(self) -> None:
        for spec in fields(self):
            check_allowed(spec.name, getattr(self, spec.name), spec.metadata["allowed"])
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        betas = self.others_betas
        limits = {
            "rank": (_is_whole(self.rank) and self.rank >= 1, "a whole number of at least 1"),
            "lr": (_is_size(self.lr), "a finite number, 0 or more"),
            "beta2": (_is_size(self.beta2) and self.beta2 < 1, "in [0, 1)"),
            "eps": (_is_size(self.eps), "a finite number, 0 or more"),
            "weight_decay": (_is_size(self.weight_decay), "a finite number, 0 or more"),
            "max_norm": (self.max_norm is None or (_is_size(self.max_norm) and self.max_norm > 0), "above 0, or None"),
            "others_lr": (_is_size(self.others_lr), "a finite number, 0 or more"),
            "others_betas": (len(betas) == 2 and all(_is_size(b) and b < 1 for b in betas), "two numbers in [0, 1)"),
            "others_weight_decay": (_is_size(self.others_weight_decay), "a finite number, 0 or more"),
            "seed": (_is_whole(self.seed), "a whole number"),
        }
        for name, (fits, allowed) in limits.items():
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

    def _check_combinations(self) -> None:
        if self.weight_decay and self.step_size == "update_ratio":
            raise ValueError(
                f"weight_decay is {self.weight_decay} with step_size 'update_ratio', where a decay per unit of lr has "
                f"no meaning; set weight_decay to 0 or step_size to 'lr'"
            )
        if self.dithered_copy and self.storage not in ("auto", "fp32"):
            raise ValueError(
                f"dithered_copy is for fp32 storage; storage {self.storage!r} computes with what it stores. "
                f"Leave it off."
            )

    def with_changes(self, **changes: Any) -> "LograSettings":
        """A copy with some fields changed.

        Raises:
            ValueError: a name is not a setting.
        """
        known = [spec.name for spec in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name!r} is not a setting of LograOptimizer.{hint} Settings: {', '.join(known)}")
        return replace(self, **changes)
