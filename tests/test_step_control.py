"""Budgets over updates, the size of a step, and runs that keep to them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from logra.cli import main
from logra.config import KlSettings
from logra.kl.controlled_step import ControlledStep
from logra.kl.looked_at import LookedAt
from logra.kl.measure import KlMeter
from logra.kl.step_control import StepControl
from logra.rl.logprobs import CausalModel
from logra.run_settings import MethodSettings
from logra.update_rules import DenseRule, LograRule
from tests.conftest import loss_of, tiny_llama
from tests.test_kl import batch


def test_budgets_over_updates() -> None:
    control = StepControl(KlSettings(budget=2e-4, budget_final=2e-5))
    assert control.budget(1) == pytest.approx(2e-4)
    assert control.budget(300) == pytest.approx(2e-5)
    assert control.budget(1000) == pytest.approx(2e-5)
    middle = 2e-5 + (2e-4 - 2e-5) * 0.5 * (1 + math.cos(math.pi * 99 / 299))
    assert control.budget(100) == pytest.approx(middle)
    linear = StepControl(KlSettings(budget=1.0, budget_final=0.5, schedule="linear", schedule_updates=11))
    assert [linear.budget(update) for update in (1, 6, 11, 20)] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert StepControl(KlSettings(budget=1.0, budget_final=0.5, schedule="constant")).budget(900) == 1.0


def test_alpha_mismatch_and_what_is_not_finite() -> None:
    control = StepControl(KlSettings(budget=1e-4))
    assert control.alpha(1e-4, 1) == pytest.approx(1.0)
    assert control.alpha(4e-4, 1) == pytest.approx(0.5)
    assert control.alpha(1e-9, 1) == 3.0
    assert control.alpha(0.0, 1) == 1.0
    assert control.alpha(math.inf, 1) is None
    assert control.alpha(math.nan, 1) is None
    assert control.alpha(1e4, 1) == pytest.approx(1e-4)
    control.observe(1e-4)
    assert control.mismatch == pytest.approx(3e-5)
    control.observe(-5.0)
    assert control.mismatch == pytest.approx(2.1e-5)
    assert control.effective(1) == pytest.approx(7.9e-5)
    control.observe(1.0)
    assert control.effective(1) == pytest.approx(5e-5)
    control.observe(None)
    again = StepControl(KlSettings(budget=1e-4))
    again.load(control.state())
    assert again.mismatch == control.mismatch


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("method", ["logra", "adamw"])
def test_the_budget_holds_however_large_the_proposed_step(method: str, scale: float) -> None:
    from logra.config import LograSettings

    model = tiny_llama()
    logra = LograSettings(rank=8, targets="all-linear", step_size="lr", lr=1e-4 * scale)
    settings = MethodSettings(name=method, lr=1e-4 * scale, logra=logra, kl=KlSettings(budget=1e-4))
    rule: Any = LograRule(model, settings, 0) if method == "logra" else DenseRule(model, settings)
    step = ControlledStep(rule, KlMeter(CausalModel(model), 1.0), StepControl(settings.kl))
    generator = torch.Generator().manual_seed(7)
    for update in range(1, 8):
        loss_of(model, torch.randint(48, (4, 11), generator=generator)).backward()
        report, metrics = step(update, LookedAt.whole(batch(), 2), "fp32", lambda: None)
        assert report.applied
        assert metrics["realised_kl"] <= 1.1 * metrics["kl_budget_effective"]
        assert metrics["realised_kl"] == pytest.approx(metrics["verified_kl"], rel=1e-2)
        if scale == 100.0:
            assert metrics["realised_kl"] > 0.3 * metrics["kl_budget_effective"]


def test_an_estimator_that_does_not_run_is_replaced_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    settings = MethodSettings(kl=KlSettings(budget=1e-4, verify=False))
    rule, meter = LograRule(model, settings, 0), KlMeter(CausalModel(model), 1.0)

    def fails(*_: Any) -> None:
        raise NotImplementedError("no forward-mode derivative for _fused_attention")

    monkeypatch.setattr(meter, "_jvp", fails)
    step = ControlledStep(rule, meter, StepControl(settings.kl))
    tokens = torch.randint(48, (4, 11), generator=torch.Generator().manual_seed(1))
    loss_of(model, tokens).backward()
    with pytest.warns(UserWarning, match="forward-mode AD does not run on this model .*_fused_attention"):
        step(1, LookedAt.whole(batch(), 2), "fp32", lambda: None)
    loss_of(model, tokens).backward()
    report, metrics = step(2, LookedAt.whole(batch(), 2), "fp32", lambda: None)
    assert report.applied
    assert metrics["predicted_kl"] > 0


QUICK = [
    "train", "--rollout.prompts", "8", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--run.updates", "4",
    "--evaluation.problems", "8", "--evaluation.every", "0", "--learning.skip_equal_groups", "false",
    "--method.kl.budget", "5e-3", "--model.compute", "bf16",
]  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        ["--method.name", "logra"],
        ["--method.logra.storage", "split", "--model.weights", "bfloat16", "--method.kl.estimator", "secant"],
        ["--method.logra.others", "adamw", "--rollout.temperature", "0.6", "--model.compute", "fp32"],
        ["--method.name", "adamw", "--learning.loss", "clipped", "--learning.minibatches", "2"],
        ["--method.name", "lora", "--method.kl.verify", "false"],
        ["--method.name", "logra", "--model.gradient_checkpointing", "true", "--method.logra.lr", "1e-2"],
    ],
)
def test_runs_under_a_budget(more: list[str], tmp_path: Path) -> None:
    assert main([*QUICK, *more, "--run.folder", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "evaluation" not in line]
    assert len(updates) == 4
    for line in updates:
        limit = 1.1 if "--method.kl.verify" not in more else 3.0
        assert 0 < line["realised_kl"] <= limit * line["kl_budget_effective"]
        assert line["realised_kl_others"] >= 0
        assert ("kl_compute" in line) == ("fp32" not in more)
        assert line["alpha"] <= 3.0
