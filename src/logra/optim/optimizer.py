# SPDX-License-Identifier: Apache-2.0
"""`LograOptimizer`: low-rank gradient sketches as a `torch.optim.Optimizer` for any training loop.

    optimizer = LograOptimizer(model, rank=256)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

The gradient of a selected weight is never built: `weight.grad` stays None, backward fills the
sketches, `step` merges the update into the weights and draws new projections. For controllers the
step comes in two phases, `propose()` and then `apply(alpha)` or `discard()`.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from logra.config import LograSettings
from logra.optim.factors import check_exact, exact_products
from logra.optim.merge import RealisedShare, merge
from logra.optim.others import others_of, put_back, refuse_short_others, values_after
from logra.optim.proposal import AppliedUpdate, Proposal, make_proposal
from logra.optim.storage import make_storages
from logra.parallel.rows import Holders, local, refuse_undivided
from logra.sketch.hooks import Sketches, attach
from logra.sketch.projection import KINDS

STATE_FORMAT = 1
FIXED = ("rank", "projection", "step_size", "rule", "dithered_copy", "others", "seed")


class LograOptimizer(torch.optim.Optimizer):
    """Updates selected linear weights from low-rank sketches of their gradients.

    Any backward through the model adds to the sketches, `torch.autograd.grad` included; `step`, `apply` and
    `skip` use up what was gathered, sketches and other parameters' gradients alike, and `zero_grad` (the
    optimizer's, not the model's) drops it.

    Args:
        model: its selected layers' forward is replaced (see `logra.sketch.hooks`); `detach` restores it.
        settings: all settings at once; or leave it out and name those that differ from the defaults.
        **changes: fields of `LograSettings`, such as rank=64, lr=1e-4, step_size="lr", storage="bf16".

    Attributes:
        sketches: the attached sketches; `sketches.coverage` says what is selected.
        updates: updates applied. skipped: updates skipped (non-finite, no backward). zero_updates:
            applied updates without a direction.
        last: the `AppliedUpdate` of the latest step.
        watcher: is told of each merge (`logra.sync.source.FactorSource`), or None.

    Raises:
        ValueError: settings or model are unusable; the message names value, what is allowed, and remedy.
    """

    def __init__(self, model: nn.Module, settings: LograSettings | None = None, **changes: Any) -> None:
        self.settings = (settings or LograSettings()).with_changes(**changes)
        s = self.settings
        check_exact(s.factor_bits, s.rank, KINDS[s.projection].max_entry)
        refuse_undivided(model)
        self.sketches: Sketches = attach(model, s.targets, s.rank, s.projection, s.seed, s.sketch_sync == "update")
        self.set_gradient_divide_factor(self._holders.all_count)
        self.updates = self.skipped = self.zero_updates = 0
        self.last: AppliedUpdate | None = None
        self.watcher: Any = None
        self._proposal: Proposal | None = None
        self._complete = False
        self._others = others_of(model, self.sketches)
        self._others_required_grad = [parameter.requires_grad for parameter in self._others]
        try:
            self._build(model)
        except BaseException:
            self.detach()
            raise
        self._complete = True

    def _build(self, model: nn.Module) -> None:
        """Storages, parameter groups and state; whatever is refused is refused before a weight is converted."""
        s = self.settings
        trained = s.others == "adamw"
        if trained:
            refuse_short_others(model, self._others)
        self.storages = make_storages(self.sketches, s.storage, s.seed, s.dithered_copy)
        for parameter in self._others:
            parameter.requires_grad_(parameter.requires_grad and trained)
        self.trained_others = [parameter for parameter in self._others if parameter.requires_grad]
        selected = {"params": [layer.weight for layer in self.sketches], "lr": s.lr, "weight_decay": s.weight_decay}
        super().__init__([selected], {"lr": s.lr, "weight_decay": s.weight_decay})
        self._adamw: torch.optim.AdamW | None = None
        if self.trained_others:
            self._adamw = torch.optim.AdamW(
                self.trained_others, lr=s.others_lr, betas=s.others_betas, weight_decay=s.others_weight_decay
            )
            self.add_param_group(dict(self._adamw.param_groups[0]))
            self._share_with_adamw()
        for layer in self.sketches:
            v = torch.zeros(len(layer.rows.mine), dtype=torch.float64, device=layer.weight.device)
            self._state(layer.name)["row_second_moment"] = v

    def _share_with_adamw(self) -> None:
        """One home for the other parameters' groups and state: schedulers and checkpoints see them here."""
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[1:]
            self._adamw.state = self.state

    def _state(self, name: str) -> dict[str, Any]:
        return self.state[self.sketches.layers[name].weight]

    # One phase: any training loop

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step that the sketches since the last one ask for; skip it, with a warning, if it is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        proposal = self.propose()
        if proposal.skip_reason is None:
            self.apply()
        else:
            self.skip()
            warnings.warn(f"update {proposal.update} skipped: {proposal.skip_reason}; weights unchanged", stacklevel=2)
        return loss

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of sketches over processes by this, as `FSDPModule` does with gradients.

        The default, the number of processes, gives their mean; set 1.0 where the loss is divided by counts of all.
        """
        if self.sketches.buckets is not None:
            self.sketches.buckets.divisor = float(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all sketches and the other parameters' gradients."""
        self._proposal = None
        self.sketches.clear()
        super().zero_grad(set_to_none)

    # Two phases: controllers

    @torch.no_grad()
    def propose(self) -> Proposal:
        """Size the step that the sketches ask for. No weight, moment or counter changes.

        Where processes hold weights in parts, all of them propose, apply and skip together, and size the same step.

        Raises:
            RuntimeError: a selected parameter was replaced or cast since the optimizer was made.
        """
        lr, decay = float(self.param_groups[0]["lr"]), float(self.param_groups[0]["weight_decay"])
        for storage in self.storages.values():
            storage.follow()
        moments = {name: self._state(name)["row_second_moment"] for name in self.sketches.layers}
        self.sketches.complete()
        grads = [local(parameter.grad) for parameter in self.trained_others if parameter.grad is not None]
        square_norm = (
            torch.stack([torch.linalg.vector_norm(g.float()).cpu() for g in grads]).square().sum() if grads else None
        )
        with exact_products(self._device.type):
            self._proposal = make_proposal(
                self.sketches, moments, self.updates, (lr, decay), square_norm, self.settings
            )
        return self._proposal

    @torch.no_grad()
    def apply(self, alpha: float = 1.0) -> AppliedUpdate:
        """Merge `alpha` times the proposed step, commit moments and counters, and draw new projections.

        Raises:
            ValueError: alpha is negative or not finite.
            RuntimeError: nothing is proposed, the proposal must not be applied, or sketches changed since.
        """
        proposal = self._proposal
        if proposal is None:
            raise RuntimeError("there is nothing to apply: call propose() after backward, once for each apply()")
        if proposal.skip_reason is not None:
            raise RuntimeError(f"the proposal cannot be applied ({proposal.skip_reason}); call skip() or discard()")
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha is {alpha}; it must be a finite number, 0 or more")
        for proposed in proposal.layers:
            proposed.check_current()
        self._warn_of_unreached_layers()
        share = RealisedShare.zero(self._device)
        watcher = self.watcher
        if watcher is not None:
            watcher.begin(proposal.update)
        with exact_products(self._device.type):
            for proposed in proposal.layers:
                layer, step = proposed.layer, proposal.step_of(proposed, alpha)
                if step is not None:
                    merge(self.storages[layer.name], step, share, watcher and partial(watcher.block, layer))
                if watcher is not None:
                    watcher.layer(layer, step)
                self._state(proposed.layer.name)["row_second_moment"] = proposed.next_second_moment
        share = share.summed(self._holders)
        self._step_others(alpha, proposal.clip)
        self.updates += 1
        self.zero_updates += proposal.is_zero
        intended = float(share.intended)
        self.last = AppliedUpdate(
            proposal.update,
            alpha * proposal.norm,
            proposal.sketch_norm,
            float(share.stored) / intended if intended else None,
            float(share.compute) / intended if intended else None,
        )
        self._next_update()
        return self.last

    @torch.no_grad()
    def others_after(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """The other parameters that are trained, and their values after the proposed step; nothing is changed."""
        if self._proposal is None or not self.trained_others:
            return [], []
        clip, grads = self._proposal.clip, [parameter.grad for parameter in self.trained_others]
        for parameter in self.trained_others:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()  # clipping changes them
        after, state = values_after(self, self.trained_others, lambda: self._step_others(1.0, clip))
        put_back(self, self.trained_others, state)
        for parameter, grad in zip(self.trained_others, grads, strict=True):
            parameter.grad = grad
        return self.trained_others, after

    def discard(self) -> None:
        """Drop the proposal. Sketches, weights, moments and counters are as if it had never been made."""
        self._proposal = None

    def skip(self) -> None:
        """Give up this update: drop its sketches and gradients, count it as skipped, change nothing else."""
        proposal = self._proposal
        self.skipped += 1
        if proposal is not None:
            self.last = AppliedUpdate(proposal.update, 0.0, proposal.sketch_norm, skip_reason=proposal.skip_reason)
        self._next_update()

    def _next_update(self) -> None:
        """What was gathered is used up: sketches, and with them the other parameters' gradients."""
        self._proposal = None
        self.sketches.draw(self.updates + 1)
        for parameter in self.trained_others:
            parameter.grad = None

    @property
    def _device(self) -> torch.device:
        return next(iter(self.sketches)).weight.device

    @property
    def _holders(self) -> Holders:
        return next(iter(self.sketches)).rows.holders

    def _step_others(self, alpha: float, clip: float) -> None:
        """AdamW's displacement, decay included, is linear in its learning rate: alpha scales it there."""
        if self._adamw is None:
            return
        rates = [group["lr"] for group in self._adamw.param_groups]
        for parameter in self.trained_others:
            if parameter.grad is not None and clip != 1.0:
                parameter.grad.mul_(clip)
        try:
            for group in self._adamw.param_groups:
                group["lr"] = group["lr"] * alpha
            self._adamw.step()
        finally:
            for group, rate in zip(self._adamw.param_groups, rates, strict=True):
                group["lr"] = rate

    def _warn_of_unreached_layers(self) -> None:
        missed = self.sketches.never_reached() if self.updates == 0 else []
        if missed:
            warnings.warn(
                f"{len(missed)} of {len(self.sketches)} selected layers got no gradient in the first update, such as "
                f"{missed[:3]}. If they are meant to: reentrant activation checkpointing needs an input that asks for "
                f"gradients (set use_reentrant=False), and code that reads layer.weight itself bypasses the sketch.",
                stacklevel=4,
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: torch's format plus the key "logra". Loads with weights_only=True.

        Sketches of an unfinished update are left out, as gradients are.
        """
        state = super().state_dict()
        names = list(self.sketches.layers)
        for index, name in enumerate(names):
            mine = dict(state["state"][index])
            mine["row_second_moment"] = self.sketches.layers[name].rows.as_dtensor(mine["row_second_moment"])
            state["state"][index] = {**mine, **self.storages[name].extra_state()}
        state["logra"] = {
            "format": STATE_FORMAT,
            "updates": self.updates,
            "skipped": self.skipped,
            "zero_updates": self.zero_updates,
            "fixed": self._fixed_settings(),
            "storage": {name: storage.kind for name, storage in self.storages.items()},
            "groups": {layer.name: layer.group.name for layer in self.sketches},
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was made. The model's weights are loaded apart, before or after.

        Raises:
            ValueError: the state was made by another optimizer, for other layers or with settings that differ.
        """
        extra = state_dict.get("logra")
        if not isinstance(extra, dict) or extra.get("format") != STATE_FORMAT:
            raise ValueError(
                f"this is not a state of LograOptimizer in format {STATE_FORMAT} (key 'logra' is {extra!r:.80}); "
                f"load it into the optimizer that saved it"
            )
        self._check_same(extra)
        # Torch would cast the selected weights' state to their dtype; it is restored below instead.
        mine = set(range(len(self.sketches)))
        state = {index: {} if index in mine else value for index, value in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
        self._share_with_adamw()
        self.sketches.restore_groups(extra["groups"])
        for index, name in enumerate(self.sketches.layers):
            saved = state_dict["state"][index]
            device = self.sketches.layers[name].weight.device
            moment = self.sketches.layers[name].rows.part_of(saved["row_second_moment"])
            self.state[self.sketches.layers[name].weight] = {
                "row_second_moment": moment.to(device, torch.float64, copy=True)
            }
            self.storages[name].load_extra_state(saved)
        self.updates, self.skipped = extra["updates"], extra["skipped"]
        self.zero_updates = extra["zero_updates"]
        self._next_update()

    def _fixed_settings(self) -> dict[str, Any]:
        """Settings that a run cannot change on its way; the others may differ after loading."""
        return {name: getattr(self.settings, name) for name in FIXED}

    def _check_same(self, extra: dict[str, Any]) -> None:
        now = self._fixed_settings()
        differing = {key: (value, now[key]) for key, value in extra["fixed"].items() if now.get(key) != value}
        if differing:
            shown = ", ".join(f"{key} {saved!r} (now {here!r})" for key, (saved, here) in differing.items())
            raise ValueError(f"the state was saved with {shown}; make the optimizer with the saved values to continue")
        storage = {name: kept.kind for name, kept in self.storages.items()}
        if storage != extra["storage"]:
            raise ValueError(
                f"the state was saved for other layers or storages ({_first_difference(extra['storage'], storage)}); "
                f"make the optimizer with the same targets and storage to continue"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Used at construction only; the groups of a LograOptimizer follow from its model and settings."""
        if self._complete:
            raise ValueError("a LograOptimizer takes its parameters from the model; use `targets` and `others` instead")
        super().add_param_group(param_group)

    # Looking and leaving

    def state_bytes(self) -> dict[str, int]:
        """Bytes now held for training beside the model: sketches, row moments, projections, storage extras, AdamW."""
        layers = list(self.sketches)
        projections = [group.projection for group in self.sketches.groups.values()]
        adamw = [t for p in self.trained_others for t in self.state[p].values() if isinstance(t, Tensor)]
        return {
            "sketches": sum(_bytes(layer.sketch) for layer in layers if layer.sketch is not None),
            "row_second_moments": sum(_bytes(self._state(layer.name)["row_second_moment"]) for layer in layers),
            "projections": sum(projection.kept_bytes() for projection in projections if projection is not None),
            "storage_extras": sum(storage.extra_bytes() for storage in self.storages.values()),
            "others": sum(map(_bytes, adamw)) + sum(_bytes(p.grad) for p in self.trained_others if p.grad is not None),
        }

    def detach(self) -> None:
        """Restore the model's forwards and requires_grad flags; weights keep their values and dtype."""
        self.sketches.detach()
        for parameter, flag in zip(self._others, self._others_required_grad, strict=True):
            parameter.requires_grad_(flag)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_difference(saved: dict[str, str], here: dict[str, str]) -> str:
    for name in sorted(set(saved) | set(here)):
        if saved.get(name) != here.get(name):
            return f"{name}: {saved.get(name, 'absent')} then, {here.get(name, 'absent')} now"
    return "same layers"
