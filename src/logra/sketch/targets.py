# SPDX-License-Identifier: Apache-2.0
"""Which weights are sketched, under which names, and what is left out.

Targets follow PEFT: a list of leaf names (or dotted suffixes), a regular expression matched
against the whole module name, or `all-linear` (every linear layer but the output head).
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
_LINEAR_ATTENTION = ("linear_attn", "in_proj_qkv", "in_proj_ba", "in_proj_z", "in_proj_a", "in_proj_b")

# Leaf names that read one tensor when they are children of one module.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)
_TWO_SOURCES = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


def stable_name(name: str) -> str:
    """A module's name without the parts that wrappers (DDP, FSDP, checkpointing, compile) insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is GPT-2's linear layer, whose weight is stored [in_features, out_features]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether the layer can be sketched: nn.Linear with its own forward, or GPT-2's Conv1D."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or is_conv1d(module)


def find_targets(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The selected linear layers by stable name, in the model's order.

    Raises:
        ValueError: nothing matches, or a match is not a linear layer of a supported kind.
    """
    if isinstance(targets, str) and targets != "all-linear":
        try:
            re.compile(targets)
        except re.error as error:
            raise ValueError(
                f"targets {targets!r} is no regular expression ({error}); give a list of names for leaf names"
            ) from error
    head = _output_head(model)
    selected: dict[str, nn.Module] = {}
    for raw_name, module in model.named_modules():
        name = stable_name(raw_name)
        if targets == "all-linear":
            if not is_linear(module) or module is head:
                continue
        elif not _matches(name, targets):
            continue
        elif not is_linear(module):
            if any(True for _ in module.children()) or not hasattr(module, "weight"):
                continue
            raise ValueError(_not_linear(name, module))
        if name in selected:
            raise ValueError(f"two layers have the name {name!r} once wrappers are left out; rename one of them")
        selected[name] = module
    if not selected:
        raise ValueError(_no_match(model, targets))
    return selected


def _matches(name: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith("." + target) for target in targets)


def _output_head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    if get is None:
        return None
    try:
        return get()
    except NotImplementedError:
        return None


def _not_linear(name: str, module: nn.Module) -> str:
    return (
        f"target {name!r} is of type {type(module).__name__}; only nn.Linear with its own forward and GPT-2's Conv1D "
        f"can be sketched. Narrow `targets` so that it does not match this module."
    )


def _no_match(model: nn.Module, targets: str | Sequence[str]) -> str:
    linear = [stable_name(name) for name, module in model.named_modules() if is_linear(module)]
    if not linear:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        return f"targets {targets!r} match no layer: {type(model).__name__} has no linear layer (it holds {kinds})."
    leaves = sorted({name.rsplit(".", 1)[-1] for name in linear})
    wanted = [targets] if isinstance(targets, str) else list(targets)
    near = sorted({hit for want in wanted for hit in difflib.get_close_matches(want.rsplit(".", 1)[-1], leaves)})
    hint = f" Did you mean {near}?" if near else ""
    return (
        f"targets {targets!r} match no layer of {type(model).__name__}.{hint} Its linear layers end in {leaves}; "
        f"give such names as a list, a regular expression for the whole name (such as {linear[0]!r}), or 'all-linear'."
    )


def input_groups(layers: dict[str, nn.Module], in_features: dict[str, int]) -> dict[str, list[str]]:
    """Group name -> names of the layers that read one tensor, guessed from names; in doubt, alone.

    The guess is checked in the first forward (`logra.sketch.hooks`).
    """
    by_parent: dict[str, dict[str, str]] = defaultdict(dict)
    for name in layers:
        parent, _, leaf = name.rpartition(".")
        by_parent[parent][leaf] = name
    groups: dict[str, list[str]] = {}
    for parent, leaves in by_parent.items():
        left = dict(leaves)
        for siblings in () if _TWO_SOURCES.search(parent) else _SIBLINGS:
            members = [leaf for leaf in siblings if leaf in left]
            if len(members) > 1 and len({in_features[left[leaf]] for leaf in members}) == 1:
                group = f"{parent}.{'|'.join(members)}" if parent else "|".join(members)
                groups[group] = [left.pop(leaf) for leaf in members]
        groups.update({name: [name] for name in left.values()})
    order = {name: position for position, name in enumerate(layers)}
    return dict(sorted(groups.items(), key=lambda item: min(order[name] for name in item[1])))


@dataclass(frozen=True)
class Coverage:
    """What is sketched and what is not, in parameters.

    Attributes:
        total: distinct parameters of the model.
        selected: leaf name -> parameters sketched under it.
        left_out: kind (with names where they matter) -> parameters not sketched.
    """

    total: int
    selected: dict[str, int]
    left_out: dict[str, int]

    @property
    def share(self) -> float:
        """Selected parameters over all parameters."""
        return sum(self.selected.values()) / max(1, self.total)

    def __str__(self) -> str:
        lines = [f"sketched: {sum(self.selected.values()):,} of {self.total:,} parameters ({self.share:.1%})"]
        lines += [f"  {kind}: {count:,}" for kind, count in self.selected.items()]
        lines += ["left out:"] if self.left_out else []
        lines += [f"  {kind}: {count:,}" for kind, count in self.left_out.items()]
        return "\n".join(lines)


def coverage(model: nn.Module, selected: Iterable[str]) -> Coverage:
    """Count each distinct parameter once, as sketched or by the kind it is left out under."""
    names = {f"{name}.weight".lstrip(".") for name in selected}
    modules = {stable_name(name): module for name, module in model.named_modules()}
    head = _output_head(model)
    picked: dict[str, int] = defaultdict(int)
    left: dict[str, int] = defaultdict(int)
    parameters = [(stable_name(name), parameter) for name, parameter in model.named_parameters()]
    for name, parameter in parameters:
        owner, _, leaf = name.rpartition(".")
        if name in names:
            picked[owner.rpartition(".")[2] or leaf] += parameter.numel()
        else:
            left[_kind(name, leaf, parameter.ndim, modules.get(owner), head)] += parameter.numel()
    return Coverage(sum(parameter.numel() for _, parameter in parameters), dict(picked), dict(left))


def _kind(name: str, leaf: str, dimensions: int, owner: nn.Module | None, head: nn.Module | None) -> str:
    last_two = ".".join(name.split(".")[-2:])
    if owner is not None and owner is head:
        return "output head"
    if isinstance(owner, nn.Embedding):
        return "embeddings"
    if dimensions == 3:
        return f"fused expert weights ({last_two})" if "expert" in name else f"three-dimensional weights ({last_two})"
    if any(part in name for part in _LINEAR_ATTENTION) and dimensions > 1:
        return f"linear attention ({last_two})"
    if leaf == "bias":
        return "biases"
    if dimensions <= 1:
        return "norms and vectors"
    return f"other matrices ({last_two})"
