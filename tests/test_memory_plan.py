"""The plan of memory against what is measured, what a run does with it, and how large shapes are counted."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plan_accuracy import COMPLETION, LINES, PROMPT, measured, settings_of
from logra import plan_command
from logra.cli import main
from logra.live_bytes import LiveBytes
from logra.memory_plan import Device, model_size, plan_method, stored_bytes
from logra.memory_trace import Lengths, _period, _traced, learning_stages
from logra.model_shapes import config_of, known_names
from logra.rl.logprobs import chosen_logprobs

SMALL: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 49152,
}  # fmt: skip
LENGTHS = Lengths(LINES, PROMPT + COMPLETION, COMPLETION, masked=True)


def small(**changes: Any) -> Any:
    return AutoConfig.for_model("llama", **(SMALL | {"tie_word_embeddings": True} | changes))


def test_live_bytes_follow_what_is_made_and_freed() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        with live.cause("special"):
            second = torch.ones(500)
        live.hold("kept", [first])
        view = first[10:]
        assert live.by_cause == Counter(kept=4000, special=2000)
        del second
        assert (live.now, live.peak) == (4000, 6000)
        assert live.at_peak["special"] == 2000
        live.start_peak()
        del first
        assert live.now == 4000
        del view
        assert live.now == 0
        assert live.peak == 4000


@pytest.mark.parametrize(
    "case",
    [
        ("logra", "float32", "fp32", "bf16", False),
        ("logra", "bfloat16", "split", "bf16", True),
        ("logra", "bfloat16", "bf16", "bf16", False),
        ("adamw", "float32", "auto", "fp32", False),
        ("adamw", "float32", "auto", "bf16", True),
        ("lora", "bfloat16", "auto", "bf16", False),
    ],
)
def test_the_planned_peak_of_learning_is_the_measured_one(case: tuple[str, str, str, str, bool]) -> None:
    settings, config = settings_of(*case), small()
    plan = plan_method(config, settings, case[0], LENGTHS, Device(kind="cpu"))
    learning = max(stage.total for stage in plan.stages if stage.name != "rollout")
    assert learning == pytest.approx(measured(config, settings), rel=0.03)


def test_two_shallow_models_tell_of_a_deep_one() -> None:
    settings = settings_of("logra", "float32", "fp32", "fp32", False)
    deep = _traced(small(), settings, LENGTHS, 5)
    for stage, causes in learning_stages(small(), settings, LENGTHS).items():
        for cause, count in causes.items():
            assert count == pytest.approx(deep[stage][cause], rel=1e-3, abs=2e5), (stage, cause)


def test_layers_of_alternating_kinds_are_traced_by_whole_periods() -> None:
    assert _period(None) == 1
    assert _period(["full"] * 6) == 1
    assert _period(["linear", "linear", "linear", "full"] * 3) == 4
    assert _period(["sliding", "full", "sliding", "full", "sliding"]) == 2


def test_sizes_are_those_of_the_models() -> None:
    counts = {
        "Qwen2.5-7B": 7.616,
        "Qwen3-0.6B": 0.596,
        "Llama-3.1-8B": 8.030,
        "gemma-2-9b": 9.242,
        "SmolLM2-135M": 0.1345,
    }
    for name, billions in counts.items():
        size = model_size(config_of(name), "all-linear")
        assert size.total / 1e9 == pytest.approx(billions, rel=1e-3), name
    assert config_of("Qwen/Qwen2.5-0.5B-Instruct").hidden_size == 896
    assert len(known_names()) >= 25


def test_stored_bytes_against_a_real_optimizer() -> None:
    from logra import LograOptimizer

    config = small()
    settings = settings_of("logra", "bfloat16", "split", "bf16", False)
    wanted = stored_bytes(model_size(config, settings.method.logra.targets), settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = LograOptimizer(model, settings.method.logra)
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits.float().sum().backward()
    held = optimizer.state_bytes()
    assert wanted["gradients"] == held["sketches"]
    assert wanted["moments"] == held["row_second_moments"]
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    assert wanted["weights"] == weights + held["storage_extras"]
    assert held["projections"] == pytest.approx(wanted["projections"], rel=0.2)  # rows of bits end on whole words


def test_devices_share_what_is_stored() -> None:
    settings = settings_of("logra", "bfloat16", "bf16", "bf16", True)
    config = small(tie_word_embeddings=False, vocab_size=1024)
    one, four = (plan_method(config, settings, "logra", LENGTHS, Device(count)) for count in (1, 4))
    for cause in ("weights", "gradients", "moments"):
        assert four.stages[0].bytes[cause] == -(-one.stages[0].bytes[cause] // 4)
    assert "gathered weights" in four.stages[0].bytes
    assert "gathered weights" not in one.stages[0].bytes


def test_a_reference_model_counts() -> None:
    settings, config = settings_of("logra", "float32", "fp32", "fp32", True), small(vocab_size=1024)
    with_reference = replace(settings, learning=replace(settings.learning, reference_kl=0.1))
    totals = [plan_method(config, each, "logra", LENGTHS, Device()).peak.total for each in (settings, with_reference)]
    assert totals[1] - totals[0] == 4 * model_size(config, "all-linear").total


def test_log_probabilities_hold_their_logits_and_one_gradient() -> None:
    logits = torch.randn(64, 50_000, requires_grad=True)
    with LiveBytes() as live:
        live.hold("logits", [logits])
        chosen_logprobs(logits, torch.zeros(64, dtype=torch.int64), 0.7).sum().backward()
    size = logits.numel() * 4
    assert live.peak < 2 * size + 3 * 4 * 2**20 + 2**20


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    return main(["plan", *arguments]), capsys.readouterr().out


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small(vocab_size=1024).to_dict()))
    return path


def test_the_command_gives_a_table_and_json(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", str(config_file), "--prompt-tokens", "64", "--gpus", "2"]
    code, text = run_plan(capsys, *common, "--gpu-memory", "8")
    assert code == 0
    for words in ("logra r=64", "adamw", "lora r=32", "gradients", "largest context", "logra fits"):
        assert words in text
    code, text = run_plan(capsys, *common, "--gpu-memory", "8", "--json")
    found = json.loads(text)
    assert set(found["methods"]) == {"logra", "adamw", "lora"}
    logra = found["methods"]["logra"]
    assert logra["fits"]
    assert logra["peak_bytes"] == max(sum(stage.values()) for stage in logra["stages"].values())
    assert logra["peak_bytes"] < found["methods"]["adamw"]["peak_bytes"]
    assert logra["largest_context"] >= 128
    code, text = run_plan(capsys, *common, "--gpu-memory", "0.005")
    assert code == 1
    assert "does not fit" in text
    assert "model.gradient_checkpointing true" in text


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    settings = settings_of("logra", "float32", "fp32", "fp32", False)
    capacity, lengths = 400 * 2**20, Lengths(16, 128, 64, masked=False)
    found = plan_command._with_largest(small(vocab_size=1024), settings, "logra", lengths, Device(1, capacity, "cpu"))
    assert found.largest_tokens is not None
    lines = found.largest_tokens // 128
    assert lines > 16
    for count, fits in ((lines, True), (int(lines * 1.05) + 2, False)):
        plan = plan_method(
            small(vocab_size=1024), settings, "logra", replace(lengths, lines=count), Device(1, capacity, "cpu")
        )
        assert plan.fits(capacity) is fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no such model"], "the sizes of model 'no such model' are not known"),
        (["--gpus", "0"], "gpus is 0"),
        (["--model", "gemma-2-2b"], "model.attention is 'sdpa', which this model does not have"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


QUICK = [
    "train", "--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--evaluation.problems",
    "8", "--evaluation.every", "0", "--run.updates", "2",
]  # fmt: skip


def test_a_run_that_cannot_fit_is_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "PLANNED_FROM_BYTES", 0)
    monkeypatch.setattr(plan_command, "capacity_here", lambda _: 2**20)
    monkeypatch.setattr("logra.train_command.load_policy", lambda _: pytest.fail("a model was loaded"))
    assert main([*QUICK, "--run.folder", str(tmp_path / "run")]) == 2
    assert "logra does not fit" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_plan_and_measured_peak_stand_side_by_side_after_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "PLANNED_FROM_BYTES", 0)
    assert main([*QUICK, "--run.folder", str(tmp_path / "run")]) == 0
    assert "memory: planned 0.0" in (out := capsys.readouterr().out)
    assert "measured " in out


@pytest.mark.parametrize("method", ["logra", "adamw"])
def test_trying_the_longest_first_changes_nothing(method: str, tmp_path: Path) -> None:
    weights = []
    for tried in ("false", "true"):
        folder = tmp_path / tried
        assert main([*QUICK, "--method.name", method, "--run.probe_longest", tried, "--run.folder", str(folder)]) == 0
        weights.append((folder / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_a_longest_micro_batch_that_does_not_fit_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 8 bytes")

    monkeypatch.setattr("logra.learner.token_logprobs", fails)
    assert main([*QUICK, "--run.probe_longest", "true", "--run.folder", str(tmp_path / "run")]) == 2
    assert "a micro-batch of 16 x " in (err := capsys.readouterr().err)
    assert "learning.micro_batch_tokens" in err
