"""Every shipped recipe is parsed by the real parser; those of the paper carry the paper's numbers."""

from pathlib import Path

import pytest

from logra.cli import make_parser
from logra.run_settings import TrainSettings

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.rglob("*.yaml"))


def parsed(path: Path) -> TrainSettings:
    parser = make_parser()
    built = parser.instantiate(parser.parse_args(["train", "--config", str(path)])).train
    return TrainSettings(**{name: built[name] for name in TrainSettings.__dataclass_fields__})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_parsed(path: Path) -> None:
    settings = parsed(path)
    assert settings.run.folder.startswith("runs/")
    assert set(settings.task.names)


def test_all_recipes_are_there() -> None:
    names = {str(path.relative_to(FOLDER)) for path in RECIPES}
    assert names == {
        "tiny.yaml",
        "smollm2-arithmetic.yaml",
        "gsm8k-qwen2.5-0.5b.yaml",
        "paper/qwen2.5-math-1.5b-logra.yaml",
        "paper/qwen2.5-math-1.5b-adamw.yaml",
        "paper/qwen2.5-math-1.5b-lora.yaml",
        "paper/qwen2.5-math-7b-logra.yaml",
        "paper/qwen2.5-math-7b-adamw.yaml",
        "paper/qwen-27b-logra.yaml",
    }


@pytest.mark.parametrize("path", [path for path in RECIPES if path.parent.name == "paper"], ids=lambda path: path.stem)
def test_the_papers_recipes(path: Path) -> None:
    settings = parsed(path)
    rollout, learning, evaluation = settings.rollout, settings.learning, settings.evaluation
    assert (rollout.prompts, rollout.samples, rollout.temperature, rollout.max_tokens) == (128, 1, 1.0, 4096)
    assert (learning.advantage, learning.loss, learning.max_importance) == ("running_baseline", "policy_gradient", 2.0)
    assert (learning.negative_outcome, learning.normalisation, learning.skip_equal_groups) == (-0.01, "token", False)
    assert (learning.updates_per_batch, learning.minibatches, learning.reference_kl) == (1, 1, 0.0)
    assert (evaluation.samples, evaluation.temperature, evaluation.top_p) == (4, 0.7, 0.7)
    assert evaluation.names == {"math500": 1.0}
    assert (evaluation.problems, settings.task.names) == (500, {"dapo_math": 1.0})
    assert (settings.model.weights, settings.model.compute) == ("float32", "bf16")
    assert settings.model.gradient_checkpointing
    method = settings.method
    if method.name == "logra":
        logra = method.logra
        assert (logra.rank, logra.step_size, logra.lr) == (256, "update_ratio", 6e-5)
        assert (logra.beta2, logra.eps) == (0.95, 1e-8)
        kl = method.kl
        assert (kl.budget, kl.budget_final, kl.schedule, kl.schedule_updates) == (2e-4, 2e-5, "cosine", 300)
        assert (kl.alpha_max, kl.responses) == (3.0, 2)
    if method.name == "adamw":
        assert (method.lr, method.betas, method.weight_decay) == (1e-6, (0.9, 0.95), 0.0)
        assert (method.schedule, method.warmup_updates) == ("cosine", 9)
    if method.name == "lora":
        assert method.lora_rank == 256
