"""`logra train` by several processes: the run of one, resumed by any number, and its end when one of them fails."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from logra.cli import main
from logra.durable import damage
from logra.parallel.launch import launch
from logra.parallel.processes import Processes
from logra.parallel.rows import whole
from logra.rl.batch import collate
from tests.conftest import relative, wait_for_lines
from tests.two_processes.conftest import Workers
from tests.two_processes.updates import SAMPLES

COMMON = [
    "--rollout.prompts", "6", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--evaluation.problems", "9",
    "--evaluation.every", "2", "--run.updates", "4", "--learning.skip_equal_groups", "false", "--run.save_every", "1",
    "--run.keep", "9", "--learning.micro_batch_tokens", "64", "--model.compute", "fp32",
    "--method.logra.rank", "16", "--method.logra.lr", "1e-4",
]  # fmt: skip
VARIANTS: dict[str, list[str]] = {
    "logra": ["--rollout.record", "true"],
    "a budget": ["--method.kl.budget", "1e-3", "--method.logra.others", "adamw", "--method.logra.others_lr", "1e-5"],
    "adamw": ["--method.name", "adamw", "--method.kl.budget", "1e-3"],
    "lora": ["--method.name", "lora", "--method.lr", "1e-3"],
    "split": ["--model.weights", "bfloat16", "--model.compute", "bf16", "--method.kl.budget", "1e-3"],
    "mixed": ["--model.compute", "bf16", "--method.kl.budget", "1e-3", "--model.gradient_checkpointing", "true"],
    "clipped": [
        "--learning.loss", "clipped", "--learning.minibatches", "2", "--learning.reference_kl", "0.01",
        "--rollout.refill", "1",
    ],
}  # fmt: skip
TIMES = ("seconds", "memory", "tokens_per_second", "kl_seconds")


def run(processes: Processes, arguments: list[str]) -> int:
    return main(["train", *arguments])


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def assert_equal_bits(found: Path, wanted: Path) -> None:
    mine, theirs = weights(found), weights(wanted)
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_two_processes_train_as_one(two: Workers, name: str, tmp_path: Path) -> None:
    arguments = [*COMMON, *VARIANTS[name]]
    assert main(["train", *arguments, "--run.folder", str(tmp_path / "one")]) == 0
    assert two(run, [*arguments, "--run.folder", str(tmp_path / "two")]) == [0, 0]
    exact = name not in ("split", "mixed")  # bf16 rounds sums, whose order differs
    one, both = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line.keys() for line in one] == [line.keys() for line in both]
    for line, other in zip(one[:2], both[:2], strict=True):
        if exact:
            assert {k: v for k, v in line.items() if isinstance(v, int)} == {
                k: other[k] for k in line if isinstance(line[k], int)
            }
            numbers = {k: v for k, v in line.items() if isinstance(v, float) and "logprob_gap" not in k}
            assert {k: other[k] for k in numbers} == pytest.approx(numbers, rel=1e-2, abs=1e-6)
    mine, theirs = weights(tmp_path / "two" / "model"), weights(tmp_path / "one" / "model")
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        assert torch.allclose(
            mine[key].float(), value.float(), atol=(1e-5 if exact else 2e-2) * float(value.abs().max())
        )
    assert damage(tmp_path / "two" / "checkpoint-4") is None
    if name == "logra":
        first = (folder / "batches" / "update-000001.jsonl" for folder in (tmp_path / "one", tmp_path / "two"))
        drawn = [[json.loads(line)["completion_ids"] for line in path.read_text().splitlines()] for path in first]
        assert drawn[0] == drawn[1]
        assert len(drawn[0]) == 24


def test_the_saved_model_is_the_one_that_was_trained(two: Workers, tmp_path: Path) -> None:
    """A plain load gives the log-probabilities of the divided model."""
    arguments = [*COMMON, *VARIANTS["mixed"], "--run.updates", "2", "--run.folder", str(tmp_path / "run")]
    assert two(run, arguments) == [0, 0]
    inside, _ = two(logprobs_inside, str(tmp_path / "run" / "checkpoint-2"))
    from transformers import AutoModelForCausalLM

    from logra.rl.logprobs import CausalModel, token_logprobs

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.dtype == torch.bfloat16
    batch = collate(SAMPLES, range(7), 0, "cpu")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(token_logprobs(CausalModel(model), batch, 1.0).logprobs, inside)


def parts_of(processes: Processes, folder: str) -> tuple[Any, Any]:
    """The run as it is put together again from a checkpoint, and what the checkpoint holds."""
    from logra.cli import _settings, _with_settings_of_the_run, make_parser
    from logra.run_folder import STATE
    from logra.train_command import assemble
    from logra.trainer_state import load_state, restore

    path = Path(folder)
    parser = make_parser()
    given = _with_settings_of_the_run(["train", "--resume", str(path.parent)])
    settings = _settings(parser.instantiate(parser.parse_args(given))["train"])
    parts = assemble(settings, path, None, processes)
    state = load_state(path / STATE, processes)
    restore(state, parts.policy.model if parts.adapted is None else parts.adapted, parts.rule.optimizer)
    parts.trainer.load(state["numbers"]["trainer"])
    return parts, state


def logprobs_inside(processes: Processes, folder: str) -> Tensor:
    parts, _ = parts_of(processes, folder)
    with torch.no_grad():
        found: Tensor = parts.trainer.learn.logprobs(parts.policy.causal, collate(SAMPLES, range(7), 0, "cpu")).logprobs
    return found


def whole_state(value: Any) -> Any:
    """Nested tensors put together, as lists of bytes."""
    if isinstance(value, Tensor):
        return whole(value).contiguous().flatten().view(torch.uint8).tolist() if value.numel() else []
    if isinstance(value, dict):
        return {str(key): whole_state(each) for key, each in value.items()}
    return [whole_state(each) for each in value] if isinstance(value, (list, tuple)) else value


def restored(processes: Processes, folder: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """State and weights after restoring, and the sketches of the next update."""
    from logra.optim.optimizer import LograOptimizer

    parts, _ = parts_of(processes, folder)
    optimizer = parts.rule.optimizer
    state = whole_state([optimizer.state_dict(), parts.trainer.state()])
    held = whole_state(dict(parts.policy.model.named_parameters()))
    assert isinstance(optimizer, LograOptimizer)
    found: dict[str, Tensor] = {}
    propose = optimizer.propose

    def watched() -> Any:
        proposal = propose()
        found.update(
            {each.name: each.rows.whole(each.sketch) for each in optimizer.sketches if each.sketch is not None}
        )
        return proposal

    optimizer.propose = watched  # type: ignore[method-assign]
    parts.trainer.train_update()
    return state, held, found


@pytest.mark.parametrize("name", ["logra", "a budget", "split"])
def test_a_run_goes_on_with_another_number_of_processes(two: Workers, name: str, tmp_path: Path) -> None:
    arguments = [*COMMON, *VARIANTS[name], "--run.folder", str(tmp_path / "run"), "--rollout.record", "false"]
    assert two(run, [*arguments, "--run.updates", "2"]) == [0, 0]
    for update, by in ((2, "two"), (3, "one")):
        checkpoint = str(tmp_path / "run" / f"checkpoint-{update}")
        alone, (first, second) = restored(Processes(), checkpoint), two(restored, checkpoint)
        assert alone[:2] == first[:2] == second[:2], by
        for key, sketch in alone[2].items():
            assert relative(first[2][key], sketch) < (1e-5 if name != "split" else 5e-2), key
        if update == 2:
            assert main(["train", "--resume", str(tmp_path / "run"), "--run.updates", "3"]) == 0


def test_the_same_number_goes_on_bit_for_bit(two: Workers, tmp_path: Path) -> None:
    arguments = [*COMMON, *VARIANTS["a budget"]]
    assert two(run, [*arguments, "--run.folder", str(tmp_path / "whole")]) == [0, 0]
    assert two(run, [*arguments, "--run.folder", str(tmp_path / "parted"), "--run.updates", "2"]) == [0, 0]
    assert two(run, ["--resume", str(tmp_path / "parted"), "--run.updates", "4"]) == [0, 0]
    assert_equal_bits(tmp_path / "parted" / "model", tmp_path / "whole" / "model")
    assert lines(tmp_path / "parted") == lines(tmp_path / "whole")


@pytest.fixture(scope="module")
def never_failed(two: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("never") / "run"
    assert two(run, [*COMMON, "--run.folder", str(folder)]) == [0, 0]
    return folder


@pytest.mark.parametrize(
    ("fault", "phase", "told"),
    [
        ("killed", "rollout", "process 1 was ended by SIGKILL in rollout of update 4"),
        ("killed", "learning", "process 1 was ended by SIGKILL in learning of update 4"),
        ("killed", "checkpoint", "process 1 was ended by SIGKILL in writing checkpoint-3"),
        ("stopped", "learning", "process 1: in learning of update 4"),
    ],
)
def test_a_process_that_fails_ends_the_run_which_can_go_on(
    two: Workers,
    never_failed: Path,
    fault: str,
    phase: str,
    told: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    seconds = "40" if fault == "stopped" else "600"
    arguments = ["train", *COMMON, "--run.folder", str(folder), "--parallel.timeout", seconds]
    program = (sys.executable, str(Path(__file__).parent / "failing.py"), fault, phase)
    assert launch(2, arguments, program) != 0
    assert told in capfd.readouterr().err
    last = 2 if phase == "checkpoint" else 3
    assert damage(folder / f"checkpoint-{last}") is None
    assert not (folder / f"checkpoint-{last + 1}").exists()
    assert two(run, ["--resume", str(folder)]) == [0, 0]
    assert_equal_bits(folder / "model", never_failed / "model")
    assert lines(folder) == lines(never_failed)


def test_replicas_train_as_one(four: Workers, tmp_path: Path) -> None:
    """Two replicas of a model divided in two; their checkpoint goes on in one process."""
    arguments = [*COMMON, "--run.updates", "2"]
    assert main(["train", *arguments, "--run.folder", str(tmp_path / "one")]) == 0
    assert four(run, [*arguments, "--run.folder", str(tmp_path / "four"), "--parallel.shard", "2"]) == [0] * 4
    theirs = weights(tmp_path / "one" / "model")
    for key, value in weights(tmp_path / "four" / "model").items():
        assert torch.allclose(value, theirs[key], atol=1e-5 * float(value.abs().max())), key
    resumed = ["train", "--resume", str(tmp_path / "four"), "--run.updates", "3"]
    assert main(resumed) == 2  # one process is no replica of two
    assert main([*resumed, "--parallel.shard", "0"]) == 0
    assert {code for code, _ in four(said, [*arguments, "--parallel.shard", "3"])} == {2}


def test_a_signal_ends_all_processes_after_the_same_update(two: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "logra", "train", "--processes", "2", *COMMON, "--run.folder", str(folder)]
    running = subprocess.Popen([*command, "--run.updates", "5000"], stdout=subprocess.PIPE, text=True)
    wait_for_lines(running, folder, 4)
    running.send_signal(signal.SIGINT)
    told, _ = running.communicate(timeout=300)
    assert running.returncode == 128 + signal.SIGINT, told
    done = lines(folder)[-1]["update"]
    assert told.count(f"SIGINT: {done} of 5000 updates are done") == 1
    assert damage(folder / f"checkpoint-{done}") is None
    assert two(run, ["--resume", str(folder), "--run.updates", str(done + 1)]) == [0, 0]


def rows_with_reward(folder: Path, body: str) -> list[str]:
    """Arguments for a task of 40 rows that a user's reward scores."""
    (folder / "reward.py").write_text(f"def score(prompts, completions, group_ids, sample_ids, **more):\n    {body}\n")
    (folder / "rows.jsonl").write_text("".join(f'{{"q": "{n} + 1 =", "a": "{n + 1}"}}\n' for n in range(40)))
    source: dict[str, Any] = {"path": str(folder / "rows.jsonl"), "prompt": "q", "answer": "a"}
    source["rewards"] = {f"{folder / 'reward.py'}:score": 1.0}
    return ["--task.names", '{"mine": 1.0}', "--task.sources", json.dumps({"mine": source})]


def test_a_reward_sees_whole_groups(two: Workers, tmp_path: Path) -> None:
    written = tmp_path / "seen.txt"
    body = (
        f"open({str(written)!r}, 'a').write(f'{{group_ids}} {{sample_ids}}\\n'); "
        f"return [len(text) % 2 for text in completions]"
    )
    mine = rows_with_reward(tmp_path, body)
    arguments = [*COMMON, *mine, "--run.updates", "1", "--evaluation.problems", "4", "--run.folder"]
    assert two(run, [*arguments, str(tmp_path / "run")]) == [0, 0]
    seen = sorted(set(written.read_text().splitlines()))
    groups = [line for line in seen if line.count(",") == 6]  # four group ids, four sample ids
    assert groups == [f"{[g] * 4} {list(range(4 * g, 4 * g + 4))}" for g in range(6)]


def planned(processes: Processes, arguments: list[str]) -> tuple[int, str]:
    """A run that is planned however small it is."""
    from logra import plan_command

    plan_command.PLANNED_FROM_BYTES = 0
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = main(["train", *arguments])
    return code, told.getvalue()


def test_a_run_is_planned_for_its_processes(two: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (code, told), (_, other_told) = two(planned, [*COMMON, "--run.updates", "1", "--run.folder", str(folder)])
    assert code == 0
    assert re.search(r"memory: planned 0\.\d\d GiB, measured \d", told)
    assert other_told == ""


def said(processes: Processes, arguments: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = main(["train", *arguments])
    return code, told.getvalue()


def test_what_is_wrong_is_said_once(two: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mine").write_text("")
    (code, told), (other_code, other_told) = two(said, [*COMMON, "--run.folder", str(folder)])
    assert (code, other_code) == (2, 2)
    assert "is not empty and holds no run" in told
    assert other_told == ""
    mine = rows_with_reward(tmp_path, "raise KeyError('no such column')")
    answers = two(said, [*COMMON, *mine, "--run.folder", str(tmp_path / "other")])
    assert [code for code, _ in answers] == [2, 2]
    assert sorted("no such column" in told for _, told in answers) == [False, True]
