"""Going on with a run: exactly, after any end, and never at the cost of what was there."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logra.cli import main
from logra.durable import damage, recover, write_folder
from logra.interruption import Interrupted, Interruption
from logra.parallel.processes import Processes
from logra.trainer import Trainer, Update
from logra.trainer_state import load_state
from tests.conftest import wait_for_lines

COMMON = [
    "--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--evaluation.problems", "8",
    "--evaluation.every", "2", "--run.updates", "6", "--learning.skip_equal_groups", "false",
    "--run.samples_logged", "3",
]  # fmt: skip
TIMES = ("seconds", "memory", "tokens_per_second")


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def interrupt_after(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during the backward of the update that follows `update`."""
    train_update = Trainer.train_update

    def stop(self: Trainer) -> Update:
        if self.update == update:
            self.learn.before_step = lambda: signal.raise_signal(signal.SIGTERM)
        return train_update(self)

    monkeypatch.setattr(Trainer, "train_update", stop)


VARIANTS: dict[str, list[str]] = {
    "logra fp32": ["--method.logra.lr", "1e-4"],
    "logra split": ["--method.logra.lr", "1e-4", "--method.logra.storage", "split", "--model.weights", "bfloat16"],
    "logra dithered": ["--method.logra.lr=1e-4", "--method.logra.storage=fp32", "--method.logra.dithered_copy=true"],
    "logra others": ["--method.logra.others", "adamw", "--method.logra.others_lr", "1e-4", "--model.compute", "fp32"],
    "adamw": ["--method.name", "adamw", "--method.lr", "1e-4", "--learning.advantage", "running_baseline"],
    "lora": ["--method.name", "lora", "--method.lr", "1e-3"],
    "sgd": ["--method.name", "sgd", "--method.lr", "3e-3", "--learning.reference_kl", "0.1"],
    "curriculum": [
        "--task.levels", '{"sums": [{"max_value": 1}, {"max_value": 3}, {"max_value": 9}]}', "--task.promote_at", "0.1",
        "--task.promote_samples", "16", "--method.logra.lr", "1e-4", "--rollout.refill", "1", "--evaluation.problems=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_six_updates_are_three_and_three_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parted, cold = tmp_path / "whole", tmp_path / "parted", tmp_path / "cold"
    arguments = ["train", *COMMON, *VARIANTS[name]]
    assert main([*arguments, "--run.folder", str(whole)]) == 0
    assert sum(line.get("grad_norm", 0) > 0 for line in lines(whole)[-5:]) >= 2
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert main([*arguments, "--run.folder", str(parted)]) == 128 + signal.SIGTERM
    told = capsys.readouterr().out
    assert f"SIGTERM: 3 of 6 updates are done; go on with `logra train --resume {parted}`" in told
    assert {path.name for path in parted.iterdir() if path.is_dir()} >= {"checkpoint-3"}
    assert main(["train", "--resume", str(parted)]) == 0
    assert f"going on from {parted / 'checkpoint-3'}" in capsys.readouterr().out
    assert weights(parted) == weights(whole)
    assert lines(parted) == lines(whole)
    assert lines(parted, "samples.jsonl") == lines(whole, "samples.jsonl")
    state, other = (load_state(folder / "checkpoint-6" / "trainer_state", Processes()) for folder in (whole, parted))
    assert str(state) == str(other)
    # Beginning from the weights alone, without the state, is another run.
    start = ["--model.name", str(parted / "checkpoint-3"), "--run.folder", str(cold), "--run.updates", "3"]
    assert main([*arguments, *start]) == 0
    assert weights(cold) != weights(whole)


def test_a_process_stops_at_a_signal_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "logra", "train", *COMMON, "--run.folder", str(folder), "--run.updates", "2000"]
    running = subprocess.Popen([*command, "--evaluation.every", "0"], stdout=subprocess.PIPE, text=True)
    wait_for_lines(running, folder, 4)
    running.send_signal(signal.SIGINT)
    told, _ = running.communicate(timeout=300)
    assert running.returncode == 128 + signal.SIGINT, told
    done = lines(folder)[-1]["update"]
    assert f"SIGINT: {done} of 2000 updates are done; go on with `logra train --resume {folder}`" in told
    assert damage(folder / f"checkpoint-{done}") is None
    assert main(["train", "--resume", str(folder), "--run.updates", str(done + 1)]) == 0
    assert main(["train", *COMMON, "--run.folder", str(tmp_path / "b"), "--run.updates", str(done + 1)]) == 0
    assert weights(folder) == weights(tmp_path / "b")


def test_lines_after_the_checkpoint_and_lines_cut_short_are_dropped(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    arguments = ["train", *COMMON, "--run.save_every", "2", "--run.keep", "9"]
    assert main([*arguments, "--run.folder", str(whole)]) == 0
    assert main([*arguments, "--run.folder", str(folder)]) == 0
    for name in ("checkpoint-6", "model", "best"):
        subprocess.run(["rm", "-r", str(folder / name)], check=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"update": 7, "rew')
    assert main(["train", "--resume", str(folder)]) == 0
    assert lines(folder) == lines(whole)
    assert lines(folder, "samples.jsonl") == lines(whole, "samples.jsonl")
    assert weights(folder) == weights(whole)


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "no state"])
def test_a_damaged_last_checkpoint_is_named_and_the_one_before_is_used(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["train", *COMMON, "--run.save_every", "2", "--run.folder", str(folder)]) == 0
    wanted = weights(folder)
    path = folder / "checkpoint-6" / ("trainer_state/values.json" if harm == "no state" else "model.safetensors")
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "truncate":
        path.write_bytes(content[:1000])
    else:
        path.unlink()
    capsys.readouterr()
    assert main(["train", "--resume", str(folder)]) == 0
    told = capsys.readouterr().out
    assert f"not used: {folder / 'checkpoint-6'}: {path.relative_to(folder / 'checkpoint-6')}" in told
    assert f"going on from {folder / 'checkpoint-4'}" in told
    assert weights(folder) == wanted
    assert damage(folder / "checkpoint-6") is None


def test_a_run_without_checkpoints_begins_again_and_a_finished_one_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    arguments = ["train", *COMMON, "--run.folder", str(folder), "--run.save_every", "0"]
    with monkeypatch.context() as patch:
        interrupt_after(0, patch)
        assert main(arguments) == 128 + signal.SIGTERM
    assert main(["train", "--resume", str(folder)]) == 0
    assert "going on from the beginning: no checkpoint is there yet" in capsys.readouterr().out
    assert [line["update"] for line in lines(folder) if "evaluation" in line] == [0, 2, 4, 6]
    wanted = weights(folder)
    assert main(["train", "--resume", str(folder), "--run.updates", "8"]) == 2
    assert "has ended and no checkpoint to go on from" in capsys.readouterr().err
    assert weights(folder) == wanted
    assert main(arguments) == 2
    assert f"go on with `logra train --resume {folder}`" in capsys.readouterr().err
    assert weights(folder) == wanted


def test_a_finished_run_can_go_on_to_more_updates_or_is_left_as_it_is(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    odd = ["--evaluation.every", "3"]
    assert main(["train", *COMMON, *odd, "--run.folder", str(folder), "--run.updates", "3"]) == 0
    before = lines(folder)
    assert main(["train", "--resume", str(folder)]) == 0
    assert lines(folder) == before
    assert main(["train", "--resume", str(folder), "--run.updates", "6"]) == 0
    assert main(["train", *COMMON, *odd, "--run.folder", str(whole)]) == 0
    assert weights(folder) == weights(whole)
    assert lines(folder) == lines(whole)


def test_a_run_that_cannot_begin_leaves_the_place_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    absent = ["--model.name", str(tmp_path / "absent"), "--run.folder", str(folder)]
    assert main(["train", *COMMON, *absent]) == 2
    assert not folder.exists()
    assert main(["train", *COMMON, "--run.folder", str(folder), "--run.updates", "1"]) == 0
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["train", *COMMON, *absent, "--run.overwrite", "true"]) == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert main(["train", *COMMON, "--run.folder", str(folder), "--run.updates", "2", "--run.overwrite", "true"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "settings.json").write_text('{"editor": "mine"}')
    capsys.readouterr()
    assert main(["train", *COMMON, "--run.folder", str(mine), "--run.overwrite", "true"]) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert (mine / "settings.json").read_text() == '{"editor": "mine"}'


def test_damaged_checkpoints_do_not_push_good_ones_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", *COMMON, "--run.folder", str(folder), "--run.save_every", "2", "--run.keep", "1"]
    assert main(arguments) == 0
    wanted = weights(folder)
    subprocess.run(["rm", "-r", str(folder / "model")], check=True)
    (folder / "checkpoint-6" / "model.safetensors").write_bytes(b"damaged")
    assert main(["train", "--resume", str(folder), "--run.updates", "4"]) == 0
    assert [number.name for number in folder.glob("checkpoint-*")].count("checkpoint-4") == 1
    assert (folder / "checkpoint-6.damaged").exists()
    assert main(["train", "--resume", str(folder), "--run.updates", "6"]) == 0
    assert weights(folder) == wanted


def test_what_a_run_learns_from_cannot_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", *COMMON, "--run.folder", str(folder), "--run.updates", "1"]) == 0
    assert main(["train", "--resume", str(folder), "--rollout.temperature", "0.9", "--run.seed", "4"]) == 2
    assert "rollout.temperature, run.seed cannot change when a run goes on" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "other")]) == 2
    assert "there is no run in that folder" in capsys.readouterr().err
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert main(["train", "--resume", str(moved), "--run.updates", "2"]) == 0
    assert lines(moved)[-1]["update"] == 2


def test_a_disk_that_fills_during_a_checkpoint_leaves_the_run_intact(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the full disk: the weights of a checkpoint no longer fit."""
    folder = tmp_path / "run"
    assert main(["train", *COMMON, "--run.folder", str(folder), "--run.updates", "2", "--run.save_every", "1"]) == 0
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"}
    command = [sys.executable, "-m", "logra", "train", "--resume", str(folder), "--run.updates", "4"]

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=small_files)
    assert done.returncode == 2
    assert f"{folder / 'checkpoint-3'} could not be saved (" in done.stderr
    assert "Free some space or make the folder writable, then go on from checkpoint-2 with" in done.stderr
    assert f"`logra train --resume {folder}`" in done.stderr
    assert "Traceback" not in done.stderr
    now = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"}
    assert {str(path) for path in now} == {str(path) for path in kept}
    assert all(now[path] == kept[path] for path in kept if path.name != "settings.json")
    assert main(["train", "--resume", str(folder), "--run.updates", "4"]) == 0
    assert main(["train", *COMMON, "--run.folder", str(tmp_path / "whole"), "--run.updates", "4"]) == 0
    assert weights(folder) == weights(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["train", *COMMON, "--run.folder", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_folders_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "model"

    def first(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "a").write_text("one")

    def fails(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "a").write_text("two")
        raise OSError("No space left on device")

    write_folder(final, first)
    with pytest.raises(OSError, match="No space left"):
        write_folder(final, fails)
    assert (final / "a").read_text() == "one"
    assert damage(final) is None
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    # Killed between the two renames:
    os.replace(final, tmp_path / "model.old")
    recover(final)
    assert (final / "a").read_text() == "one"
    (final / "a").write_text("owe")
    assert "a is not as it was written (3 of 3 bytes" in str(damage(final))


def test_signals_wait_where_something_is_half_done() -> None:
    interruption = Interruption()
    with interruption.watching():
        with pytest.raises(Interrupted, match="SIGINT"):
            signal.raise_signal(signal.SIGINT)
        interruption.allow()
        interruption.defer()
        signal.raise_signal(signal.SIGTERM)
        reached = True
        with pytest.raises(Interrupted) as stop:
            interruption.allow()
    assert reached
    assert stop.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
