"""Rules of the house that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_settings_are_read_without_torch() -> None:
    run("import sys, logra.config, logra; logra.LograSettings(rank=8); assert 'torch' not in sys.modules")


def test_the_optimizer_needs_torch_alone() -> None:
    foreign = ["transformers", "peft", "accelerate", "safetensors", "vllm", "ray"]
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in foreign)
    run(
        f"import sys; {blocked}\n"
        "import torch; from torch import nn; from logra import LograOptimizer\n"
        "model = nn.Sequential(nn.Linear(4, 4)); optimizer = LograOptimizer(model, targets='all-linear', rank=2)\n"
        "model(torch.ones(2, 4)).sum().backward(); optimizer.step(); assert optimizer.updates == 1"
    )


def test_imports_run_one_way() -> None:
    order = [
        "config",
        "scale_settings",
        "run_settings",
        "native",
        "random_bits",
        "parallel",
        "sketch",
        "optim",
        "sync",
        "rl",
        "kl",
        "divide",
        "rollout",
        "tasks",
        "model",
    ]
    order += [
        "evaluation",
        "curriculum",
        "problems",
        "evaluator",
        "update_rules",
        "durable",
        "saved_state",
        "export_divided",
        "engines",
        "phases",
        "collect",
        "collect_ahead",
        "learner",
        "metrics",
        "trainer",
        "alarms",
        "progress",
        "interruption",
        "tracking",
        "training_run",
        "run_folder",
        "checkpoint",
        "trainer_state",
        "hub",
        "convert",
        "live_bytes",
        "memory_trace",
        "memory_plan",
        "model_shapes",
        "plan_command",
        "longest_first",
        "train_command",
        "report",
        "cli",
        "__main__",
    ]

    def rank(module: str) -> int:
        return order.index(module.split(".")[1])

    for path in SOURCES:
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        if parts[-1] == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("logra."):
                assert rank(node.module) <= rank(".".join(parts)), f"{path.name} imports {node.module}"


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "benchmarks").glob("*.py"))], ids=lambda path: path.name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
            arguments = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
            assert len(arguments) <= 7, node.name


def test_tables_are_made_from_the_results_and_settings() -> None:
    assert tables.stale() == [], "run python -m benchmarks.tables"


def test_the_example_is_short_and_the_readme_names_what_exists() -> None:
    assert len((ROOT / "examples" / "optimizer_only.py").read_text().splitlines()) < 60
    readme = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", readme + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        assert f"\n{command}:" in makefile
    for module in re.findall(r"python -m (benchmarks\.\w+)", readme + (ROOT / "CONTRIBUTING.md").read_text()):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_readme_snippet_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (snippet,) = [each for each in snippets if "LograOptimizer" in each]
    run(
        "import torch; from torch import nn\n"
        "model = nn.ModuleDict({'q_proj': nn.Linear(300, 8)}); batches = [torch.ones(2, 300)] * 2\n"
        "loss_of = lambda model, batch: model['q_proj'](batch).square().sum()\n" + snippet +
        "\nassert optimizer.updates == 2; print(optimizer.sketches.coverage)"
    )  # fmt: skip
