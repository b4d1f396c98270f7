"""The main job on the tiny policy: real processes, every method, refusals before a model loads."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from logra.cli import main
from logra.metrics import METRICS
from logra.problems import Mixture
from logra.run_settings import (
    EvaluationSettings,
    LearningSettings,
    MethodSettings,
    RolloutSettings,
    RunSettings,
    TaskSettings,
    TrainSettings,
    as_plain,
)

QUICK = [
    "--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--evaluation.problems", "8",
    "--evaluation.every", "0", "--run.updates", "2",
]  # fmt: skip


def run(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    assert main(["train", *QUICK, "--run.folder", str(tmp_path / "run"), *arguments]) == 0
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["logra", "adamw", "lora", "sgd"])
def test_every_method_trains_and_leaves_a_loadable_model(method: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = run(tmp_path, "--method.name", method, "--method.lr", "1e-3", "--learning.skip_equal_groups", "false")
    assert [line["update"] for line in lines] == [0, 1, 2, 2]
    for line in lines:
        assert set(line) <= set(METRICS)
    updates = [line for line in lines if "evaluation" not in line]
    for line in updates:
        assert line["samples"] == 16
        assert line["memory"]["learning"]["peak_bytes"] >= line["memory"]["learning"]["average_bytes"] > 0
        assert min(line["tokens_per_second"].values()) > 0
        assert line["logprob_gap_p95"] >= line["logprob_gap_absolute"] * 0.5
        assert 0 <= line["pass_rate"] <= 1
        assert line["logprob_gap_absolute"] < 0.05
        assert line["steps"] == 1
        assert set(line["seconds"]) == {"rollout", "reward", "learning"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert model(**tokenizer("1+1=", return_tensors="pt")).logits.isfinite().all()
    start = AutoModelForCausalLM.from_pretrained(Path(__file__).parent.parent / "src" / "logra" / "tiny_policy")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert any(moved)
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["method"]["name"] == method


@pytest.mark.parametrize(
    "arguments",
    [
        ["--learning.advantage", "running_baseline", "--learning.negative_outcome", "-0.01"],
        ["--learning.advantage", "group_normalised", "--learning.loss", "clipped", "--learning.minibatches", "2"],
        ["--learning.loss", "sequence", "--learning.normalisation", "sequence", "--learning.updates_per_batch", "2"],
        ["--learning.loss", "cispo", "--learning.normalisation", "constant", "--learning.train_truncated", "false"],
        ["--learning.advantage", "batch_normalised", "--model.compute", "bf16", "--model.weights", "bfloat16"],
        ["--learning.advantage", "leave_one_out", "--model.gradient_checkpointing", "true"],
        ["--method.logra.storage", "split", "--method.schedule", "cosine", "--method.warmup_updates", "1"],
        ["--rollout.refill", "2", "--learning.format_pattern", "^[0-9]", "--learning.overlong_tokens", "3"],
        ["--learning.reference_kl", "0.1", "--learning.loss", "clipped", "--learning.updates_per_batch", "2"],
        ["--evaluation.preset", "paper", "--evaluation.also_greedy", "true", "--evaluation.names", '{"gcd": 1.0}'],
    ],
)
def test_variants_run(arguments: list[str], tmp_path: Path) -> None:
    lines = run(tmp_path, *arguments, "--task.names", '{"sums": 1.0, "times": 2.0}')
    assert len(lines) == 4


def test_compute_auto_is_bf16_only_where_the_machine_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from logra.model import chosen_compute
    from logra.run_settings import ModelSettings

    run(tmp_path)
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())["model"]["compute"]
    assert saved == chosen_compute(ModelSettings())
    for has_amx in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has_amx: has)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        assert chosen_compute(ModelSettings(device="cpu")) == ("bf16" if has_amx else "fp32")
        assert chosen_compute(ModelSettings(device="cpu", weights="bfloat16")) == "bf16"
        assert chosen_compute(ModelSettings(device="cpu", compute="bf16")) == "bf16"


def test_in_fp32_rollout_and_trainer_agree_to_1e_5(tmp_path: Path) -> None:
    lines = run(tmp_path, "--model.compute", "fp32", "--rollout.temperature", "0.6")
    assert max(line["logprob_gap_absolute"] for line in lines if "evaluation" not in line) < 1e-5


def test_at_step_size_0_nothing_moves_for_20_updates(tmp_path: Path) -> None:
    """The gap between rollout and trainer is what it was, and so is the policy."""
    from safetensors.torch import load_file

    from logra.model import TINY

    still = ["--method.logra.lr", "0", "--run.updates", "20", "--learning.skip_equal_groups", "false"]
    lines = run(tmp_path, *still, "--evaluation.temperature", "1")
    gaps = [line["logprob_gap_absolute"] for line in lines if "evaluation" not in line]
    assert max(gaps) < 0.02
    assert sum(gaps[10:]) < sum(gaps[:10]) + 0.05
    scores = [line["evaluation"] for line in lines if "evaluation" in line]
    assert scores[0] == scores[1]
    saved, start = load_file(tmp_path / "run" / "model" / "model.safetensors"), load_file(TINY / "model.safetensors")
    assert all(torch.equal(saved[name].float(), start[name].float()) for name in start)


def test_a_reference_model_holds_the_policy_back(tmp_path: Path) -> None:
    """Its divergence is 0 before the first step and grows; a large weight keeps it small."""
    common = ["--run.updates", "12", "--method.name", "adamw", "--method.lr", "1e-3", "--rollout.prompts", "16"]
    common += ["--model.compute", "fp32", "--learning.skip_equal_groups", "false"]
    free, held = (
        [
            line["reference_kl"]
            for line in run(tmp_path / weight, *common, "--learning.reference_kl", weight)
            if "reference_kl" in line
        ]
        for weight in ("1e-9", "0.3")
    )
    assert abs(free[0]) < 1e-6
    assert abs(held[0]) < 1e-6
    assert sum(free[6:]) > 1.5 * sum(held[6:]) > 0


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--evaluation.stop_at", "0.01", "--evaluation.temperature", "1"], 0, "reached evaluation.stop_at 0.01"),
        (["--evaluation.patience", "1", "--method.logra.lr", "0"], 1, "no better pass@1 in 1 evaluations"),
        (["--run.stop_after_alarms", "2", "--rollout.max_tokens", "1"], 1, "alarm all_truncated in 2 updates in a row"),
    ],
)
def test_a_run_may_end_early_and_says_why(
    arguments: list[str], code: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [*QUICK, "--run.updates", "6", "--evaluation.every", "1", "--evaluation.problems", "40"]
    assert main(["train", *quick, "--run.folder", str(tmp_path / "run"), *arguments]) == code
    told = capsys.readouterr().out
    assert why in told
    assert "of 6" in told
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 1 <= lines[-1]["update"] < 6
    assert "evaluation" in lines[-1]
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_samples_are_written_down_right_and_wrong(tmp_path: Path) -> None:
    run(tmp_path, "--evaluation.problems", "40", "--evaluation.temperature", "1", "--run.samples_logged", "5")
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    training = [sample for sample in samples if sample["phase"] == "training"]
    assert [sample["update"] for sample in training] == [1] * 5 + [2] * 5
    for update in (0, 2):
        shown = [each["score"] for each in samples if each["phase"] == "evaluation" and each["update"] == update]
        assert shown == sorted(shown, reverse=True)
        assert set(shown) == {0.0, 1.0}
        assert len(shown) <= 10
    for sample in samples:
        assert (sample["completion"].strip() == sample["answer"]) == (sample["score"] == 1)


def test_the_same_seed_is_the_same_run_and_another_is_not(tmp_path: Path) -> None:
    def numbers(name: str, seed: str) -> tuple[list[float], list[Any]]:
        lines = run(tmp_path / name, "--run.seed", seed)
        from safetensors.torch import load_file

        weights = load_file(tmp_path / name / "run" / "model" / "model.safetensors")
        return [line["reward"] for line in lines if "reward" in line], list(weights.values())

    first, again, other = numbers("a", "0"), numbers("b", "0"), numbers("c", "1")
    assert first[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))


def test_it_learns(tmp_path: Path) -> None:
    arguments = ["--task.knobs", '{"sums": {"max_value": 99}}', "--rollout.prompts", "32", "--rollout.samples", "8"]
    arguments += ["--evaluation.problems", "200", "--evaluation.temperature", "1", "--run.updates", "40"]
    lines = run(tmp_path, *arguments, "--method.logra.lr", "1e-4")
    scores = [line["evaluation"]["pass@1"] for line in lines if "evaluation" in line]
    assert scores[-1] > scores[0] + 0.1


def test_the_command_as_a_process(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "rollout: {prompts: 2, samples: 2, max_tokens: 4}\nevaluation: {problems: 4}\nrun: {updates: 1}\n"
    )
    command = [sys.executable, "-m", "logra", "train", "--config", str(config), "--run.folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "held-out pass@1" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr
    assert "Traceback" not in again.stderr


def test_eval_scores_what_training_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(tmp_path)
    capsys.readouterr()
    assert main(["eval", *QUICK, "--model.name", str(tmp_path / "run" / "model")]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["pass_at_1"] == lines[-1]["evaluation"]["pass@1"]
    assert printed["problems"] == 8


def test_checkpoints_are_kept_by_number_and_the_best_apart(tmp_path: Path) -> None:
    arguments = ["--run.updates", "5", "--run.save_every", "1", "--run.keep", "2", "--evaluation.every", "2"]
    run(tmp_path, *arguments, "--method.name", "lora")
    names = {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()}
    assert names - {"best"} == {"checkpoint-4", "checkpoint-5", "model"}
    last = (tmp_path / "run" / "checkpoint-5" / "model.safetensors").read_bytes()
    assert last == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()


def test_every_setting_is_read_somewhere() -> None:
    source = "".join(path.read_text() for path in (Path(__file__).parent.parent / "src" / "logra").rglob("*.py"))
    source = re.sub(r"^    \w+: .*setting\($|^    \w+: .* = setting\(.*$", "", source, flags=re.MULTILINE)
    for section in fields(TrainSettings):
        for spec in fields(getattr(TrainSettings(), section.name)):
            assert re.search(rf"\.{spec.name}\b", source), f"{section.name}.{spec.name}"


def test_held_out_problems_are_never_trained_on() -> None:
    settings = TrainSettings(task=TaskSettings(names={"sums": 1.0, "times": 1.0}))
    mixture = Mixture(settings)
    held_out = {problem.prompt for _, problem in mixture.held_out}
    trained = [mixture.next_problem()[1].prompt for _ in range(500)]
    assert not held_out & set(trained)
    again = Mixture(settings)
    assert trained == [again.next_problem()[1].prompt for _ in range(500)]
    everything = TrainSettings(
        task=TaskSettings(knobs={"sums": {"max_value": 1}}), evaluation=EvaluationSettings(problems=200)
    )
    with pytest.raises(ValueError, match="held-out problems leave almost none"):
        Mixture(everything).next_problem()


def test_help_and_printed_settings_name_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "--rollout.temperature",
        "Divides the logits",
        "--method.logra.rank",
        "One of: logra, adamw, lora, sgd",
    ):
        assert words in shown
    with pytest.raises(SystemExit):
        main(["train", "--print_config"])
    assert "samples: 8" in capsys.readouterr().out


def test_convert_refuses_what_is_no_gguf_file_and_full_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "absent.gguf"), str(tmp_path / "out")]) == 2
    assert "is not a .gguf file" in capsys.readouterr().err
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert main(["convert", str(tmp_path / "a.gguf"), str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_gguf_file_becomes_a_folder_in_bf16(tmp_path: Path) -> None:
    """A tiny Llama written with the gguf package, read back weight by weight."""
    import gguf
    from transformers import AutoModelForCausalLM

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    shape = {"hidden": 32, "vocabulary": 8, "intermediate": 64}
    writer.add_context_length(64)
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(1)
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(shape["vocabulary"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<end>", "a", "b", "c", "d", "e", "f", "ab"])
    writer.add_token_types([3] + [1] * 7)
    writer.add_token_scores([0.0] * 8)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    generator = torch.Generator().manual_seed(0)
    h, v, m = shape["hidden"], shape["vocabulary"], shape["intermediate"]
    sizes = {
        "token_embd": (v, h),
        "output": (v, h),
        "output_norm": (h,),
        "blk.0.attn_norm": (h,),
        "blk.0.ffn_norm": (h,),
    }
    sizes |= {f"blk.0.attn_{name}": (h, h) for name in ("q", "k", "v", "output")}
    sizes |= {"blk.0.ffn_gate": (m, h), "blk.0.ffn_up": (m, h), "blk.0.ffn_down": (h, m)}
    values = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, values["blk.0.ffn_up"].bfloat16())


def test_tasks_are_shown_with_prompt_answer_and_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    assert "countdown" in shown
    assert "(scores 1.0)" in shown
    assert "(scores 0.0)" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout.samplez", "3"], "samplez"),
        (["--model.compute", "fp32", "--model.weights", "bfloat16"], "products would be in bf16"),
        (["--rollout.samples", "0"], "samples is 0; it must be at least 1"),
        (["--rollout.top_p", "0.8"], "filtered policy"),
        (["--rollout.temperature", "0"], "temperature is 0.0; it must be above 0"),
        (["--method.name", "adamm"], "Did you mean 'adamw'"),
        (["--method.logra.storage", "spilt"], "Did you mean 'split'"),
        (["--learning.updates_per_batch", "2"], "takes one update per batch"),
        (["--rollout.samples", "1"], "compares the samples of a prompt"),
        (["--task.knobs", '{"gcd": {}}'], "not among the tasks"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
    ],
)
def test_refusals_come_before_any_model_loads(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logra.model.load_policy", lambda *_: pytest.fail("a model was loaded"))
    try:
        code: Any = main(["train", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_missing_models_and_tasks_are_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--run.folder", str(tmp_path / "run")]
    assert main(["train", *folder, "--model.name", str(tmp_path / "nothing")]) == 2
    assert "could not be loaded" in capsys.readouterr().err
    assert main(["train", *folder, "--task.names", '{"sumz": 1.0}']) == 2
    assert "task 'sumz' is not known" in capsys.readouterr().err


def test_settings_become_plain_values() -> None:
    plain = as_plain(TrainSettings(task=TaskSettings(names={"sums": 1.0})))
    assert json.loads(json.dumps(plain))["method"]["logra"]["rank"] == 64
    with pytest.raises(ValueError, match="minibatches is 9, more than the 4 prompts"):
        TrainSettings(
            rollout=RolloutSettings(prompts=4),
            learning=LearningSettings(loss="clipped", minibatches=9),
            method=MethodSettings(name="adamw"),
            run=RunSettings(updates=1),
        )
