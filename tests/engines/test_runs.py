"""`logra train` with engines of its own: real processes, every method, kills, resume, and what ends a run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from logra.cli import main
from logra.metrics import METRICS
from tests.conftest import engine_processes, wait_for_lines

QUICK = [
    "--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--evaluation.problems", "8",
    "--evaluation.every", "0", "--model.compute", "fp32", "--learning.skip_equal_groups", "false",
]  # fmt: skip
ENGINES = ["--engines.kind", "transformers"]


def run(folder: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    assert main(["train", *QUICK, "--run.folder", str(folder), *arguments]) == code
    return lines(folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in found:
        assert set(line) <= set(METRICS)
    return found


def updates(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in found if "evaluation" not in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six updates by the trainer's own model."""
    folder = tmp_path_factory.mktemp("inside") / "run"
    run(folder, "--run.updates", "6", "--run.save_every", "3")
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    mine, theirs = updates(lines(folder)), updates(lines(other))
    assert [line["update"] for line in mine] == [line["update"] for line in theirs]
    for key in ("reward", "completion_tokens", "tokens_trained"):
        assert [line[key] for line in mine] == [line[key] for line in theirs], key
    found, wanted = weights(folder), weights(other)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_engines_change_nothing_but_where_it_is_drawn(inside: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = updates(run(folder, "--run.updates", "6", *ENGINES, "--engines.count", "2"))
    assert_same_run(folder, inside)
    assert all(line["logprob_gap_max"] < 1e-4 for line in found)
    assert all(line["lag"] == {"mean": 0.0, "max": 0} for line in found)
    assert all(line["sync"]["full_states"] == 0 and line["sync"]["message_bytes"] > 0 for line in found)
    assert all({"rollout", "learning", "sync"} <= set(line["seconds"]) for line in found)
    assert engine_processes(folder) == []


def test_killing_an_engine_costs_no_update(inside: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "logra", "train", *QUICK, "--run.folder", str(folder), "--run.updates", "6"]
    running = subprocess.Popen([*command, *ENGINES, "--engines.count", "2"], text=True, stdout=subprocess.PIPE)
    wait_for_lines(running, folder, 3)
    (first, second) = sorted(engine_processes(folder))
    os.kill(first, signal.SIGKILL)
    wait_for_lines(running, folder, 5)
    if second in engine_processes(folder):
        os.kill(second, signal.SIGKILL)
    output, _ = running.communicate(timeout=600)
    assert running.returncode == 0, output
    assert_same_run(folder, inside)
    assert engine_processes(folder) == []


def test_three_updates_and_three_more_are_six(inside: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, "--run.updates", "3", "--run.save_every", "3", *ENGINES)
    assert main(["train", "--resume", str(folder), "--run.updates", "6"]) == 0
    assert_same_run(folder, inside)


@pytest.mark.parametrize("method", ["adamw", "sgd", "lora"])
def test_dense_methods_sync_too(method: str, tmp_path: Path) -> None:
    chosen = ["--method.name", method, "--method.lr", "1e-3", "--run.updates", "3"]
    own = run(tmp_path / "inside", *chosen)
    found = run(tmp_path / "run", *chosen, *ENGINES)
    for line in updates(found):
        assert line["logprob_gap_max"] < 1e-4
        assert line["sync"]["full_states"] == 0
        assert line["sync"]["message_bytes"] > 1.9 * line["sync"]["weights_bytes"]  # fp32
        assert line["sync"]["patch_bytes"] > 0
    for line, wanted in zip(updates(found), updates(own), strict=True):
        assert line["reward"] == pytest.approx(wanted["reward"], abs=0.2)


@pytest.mark.parametrize("storage", ["fp32", "split", "bf16"])
def test_in_bf16_too_every_storage(storage: str, tmp_path: Path) -> None:
    dtype = "float32" if storage == "fp32" else "bfloat16"
    arguments = ["--model.compute", "bf16", "--model.weights", dtype, "--method.logra.storage", storage]
    found = updates(run(tmp_path / "run", "--run.updates", "3", *arguments, *ENGINES))
    assert all(line["sync"]["full_states"] == 0 for line in found)
    assert all(line["logprob_gap_absolute"] < 0.05 for line in found)


@pytest.mark.parametrize("lag", [1, 2])
def test_drawing_ahead_lags_by_no_more_than_allowed(lag: int, tmp_path: Path) -> None:
    arguments = [
        "--run.updates",
        "7",
        "--engines.max_lag",
        str(lag),
        "--evaluation.every",
        "3",
        "--rollout.record",
        "true",
    ]
    found = updates(run(tmp_path / "run", *arguments, *ENGINES))
    assert [line["update"] for line in found] == list(range(1, 8))
    assert max(line["lag"]["max"] for line in found) == lag
    assert all(line["lag"]["max"] <= lag for line in found)
    assert all({"waiting", "rollout", "learning"} <= set(line["seconds"]) for line in found)
    for line in found:
        text = (tmp_path / "run" / "batches" / f"update-{line['update']:06d}.jsonl").read_text()
        drawn = [json.loads(each)["policy_update"] for each in text.splitlines()]
        assert line["update"] - 1 - min(drawn) == line["lag"]["max"]


def test_a_run_that_draws_ahead_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    common = ["--run.save_every", "2", "--engines.max_lag", "2"]
    first = run(folder, "--run.updates", "4", *common, *ENGINES)
    assert main(["train", "--resume", str(folder), "--run.updates", "6"]) == 0
    found = lines(folder)
    assert found[: len(first) - 1] == first[:-1]
    assert [line["update"] for line in updates(found)] == [1, 2, 3, 4, 5, 6]
    assert updates(found)[4]["lag"]["max"] == 0  # what had been drawn ahead is drawn anew


def test_two_trainer_processes_share_the_engines(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, more in ((one, []), (two, ["--processes", "2"])):
        command = [sys.executable, "-m", "logra", "train", *QUICK, "--run.updates", "3", *ENGINES, *more]
        subprocess.run([*command, "--run.folder", str(folder)], check=True, timeout=600)
    for line, other in zip(updates(lines(one)), updates(lines(two)), strict=True):
        assert line["completion_tokens"] == other["completion_tokens"]
        assert line["sync"]["message_bytes"] == other["sync"]["message_bytes"]
        assert other["sync"]["full_states"] == 0
        assert other["logprob_gap_max"] < 1e-4
    mine, theirs = weights(one), load_file(two / "model" / "model-00001-of-00001.safetensors")
    assert all(
        torch.allclose(theirs[name], value, atol=1e-5 * float(value.abs().max())) for name, value in mine.items()
    )


def test_two_trainer_processes_that_draw_ahead(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "logra", "train", *QUICK, "--run.updates", "4", *ENGINES, "--processes", "2"]
    subprocess.run([*command, "--run.folder", str(folder), "--engines.max_lag", "1"], check=True, timeout=600)
    assert max(line["lag"]["max"] for line in updates(lines(folder))) == 1
    assert (folder / "samples.jsonl").read_text().count('"training"') == 4 * 8


def test_an_engine_that_listens_already(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "logra", "engine", *ENGINES, "--model.compute", "fp32", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        said = engine.stdout.readline()
        address = re.search(r"listens on (\S+)", said)
        assert address is not None, said
        try:
            there = [*ENGINES, "--engines.addresses", f"[{address[1]}]"]
            assert len(updates(run(tmp_path / "run", "--run.updates", "2", *there))) == 2
            again = run(tmp_path / "again", "--run.updates", "2", *there)  # it is re-anchored by the next run
            assert all(line["sync"]["full_states"] == 0 for line in updates(again))
            assert main(["eval", "--evaluation.problems", "8", "--model.compute", "fp32", *there]) == 0
        finally:
            engine.kill()


def test_eval_with_engines_of_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for chosen in ([], ["--method.name", "lora"]):
        assert main(["eval", "--evaluation.problems", "8", "--model.compute", "fp32", *ENGINES, *chosen]) == 0
    where = ["--engines.addresses", "['127.0.0.1:9']", "--engines.restarts", "0", "--engines.start_timeout", "0.5"]
    capsys.readouterr()
    assert main(["eval", "--evaluation.problems", "8", *ENGINES, *where]) == 2
    assert (
        "logra eval: the engines are lost: no engine is left. Engines were left out: 0 (127.0.0.1:9): "
        in capsys.readouterr().err
    )


def test_with_minibatches_too_a_batch_of_another_policy_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    several = ["--learning.loss", "clipped", "--learning.minibatches", "2", "--learning.updates_per_batch", "2"]
    edges = ["--learning.mismatch_band", "1e-12", "--learning.mismatch_share", "0.01"]
    (line,) = updates(run(folder, "--run.updates", "3", *several, *edges, code=1))
    assert line["mismatched"] is True
    assert (line["steps"], line["steps_skipped"]) == (0, 1)
    start = load_file(Path(__file__).parents[2] / "src" / "logra" / "tiny_policy" / "model.safetensors")
    assert all(torch.equal(value.float(), start[name].float()) for name, value in weights(folder).items())
    found = updates(run(tmp_path / "fine", "--run.updates", "2", *several, *ENGINES))
    assert all(each["steps"] == 4 and each["sync"]["full_states"] == 0 for each in found)
    assert all(each["logprob_gap_max"] < 1e-4 for each in found)


def test_an_engine_that_cannot_start_ends_the_run_with_its_last_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "generation_config.json",
    ):
        source = Path(__file__).parents[2] / "src" / "logra" / "tiny_policy" / name
        (tmp_path / "model" / name).write_bytes(source.read_bytes())
    arguments = ["--run.updates", "2", "--model.name", str(tmp_path / "model"), "--engines.restarts", "0"]
    command = [sys.executable, "-m", "logra", "train", *QUICK, "--run.folder", str(tmp_path / "run"), *arguments]
    changed = {"PYTHONPATH": str(tmp_path / "broken")}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import sys\nif 'engine' in sys.argv or 'engine' in sys.orig_argv:\n    raise SystemExit('no engine today')\n"
    )
    done = subprocess.run(
        [*command, *ENGINES], env=os.environ | changed, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert "logra: the engines are lost" in done.stderr
    assert "no engine today" in done.stderr


def test_a_batch_of_another_policy_ends_the_run_unused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    found = run(
        folder, "--run.updates", "3", "--learning.mismatch_band", "1e-12", "--learning.mismatch_share", "0.01", code=1
    )
    (line,) = updates(found)
    assert line["mismatched"] is True
    assert (line["steps"], line["steps_skipped"]) == (0, 1)
    assert line["logprob_gap_outside"] > 0.01
    said = capsys.readouterr().out
    assert "the batch was not used: the engine draws from another policy than is trained" in said
    start = load_file(Path(__file__).parents[2] / "src" / "logra" / "tiny_policy" / "model.safetensors")
    assert all(torch.equal(value.float(), start[name].float()) for name, value in weights(folder).items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines.max_lag", "1"], "engines.max_lag would have no effect: engines.kind is 'inside'"),
        (["--engines.kind", "http"], "engines.addresses is empty; give the servers' URLs"),
        (["--engines.kind", "http", "--engines.addresses", "[10.0.0.1:80]"], "each is a URL, such as http://"),
        ([*ENGINES, "--engines.addresses", "[nowhere]"], "each is a HOST:PORT, such as"),
        ([*ENGINES, "--engines.addresses", "[a:1]", "--engines.count", "2"], "leave out engines.count and devices"),
        ([*ENGINES, "--engines.count", "2", "--engines.devices", "['4']"], "has 1 entries for 2 engines"),
        ([*ENGINES, "--engines.tensor_parallel", "2"], "are for vLLM engines that are started here"),
        ([*ENGINES, "--engines.retire_below", "1.5"], "retire_below is 1.5; it is a share, below 1"),
        (
            [*ENGINES, "--method.logra.storage", "split", "--model.compute", "fp32"],
            "computes in bf16, but model.compute is 'fp32'; engines have one dtype",
        ),
        ([*ENGINES, "--method.logra.dithered_copy", "true"], "dithered_copy computes with weights that no engine has"),
    ],
)
def test_what_engines_cannot_do_is_refused_at_start(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["train", *QUICK[:10], "--run.folder", str(tmp_path / "run"), *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert said in capsys.readouterr().err
