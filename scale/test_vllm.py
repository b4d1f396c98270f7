"""vLLM and Ray for real, on processors: `make test-replicas`. Runs are processes, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import engine_processes

ROOT = Path(__file__).parents[1]
QUICK = [
    "--rollout.prompts", "4", "--rollout.samples", "4", "--rollout.max_tokens", "6", "--evaluation.problems", "16",
    "--evaluation.every", "0", "--model.compute", "fp32", "--learning.skip_equal_groups", "false",
]  # fmt: skip
VLLM = ["--engines.kind", "vllm"]
SECONDS = 900


def train(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a run's updates."""
    command = [sys.executable, "-m", "logra", "train", *QUICK, "--run.folder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)
    return updates(folder)


def updates(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation" not in line]


def logs(folder: Path) -> str:
    return "".join(path.read_text()[-4000:] for path in (folder / "engines").glob("*.log"))


def assert_synced(found: list[dict[str, Any]], nats: float = 1e-4) -> None:
    for line in found:
        assert line["logprob_gap_max"] <= nats, line
        assert line["sync"]["full_states"] == 0
        assert line["sync"]["message_bytes"] > 0


def test_vllm_follows_every_update_in_fp32(tmp_path: Path) -> None:
    found = train(tmp_path / "run", "--run.updates", "6", *VLLM)
    assert [line["update"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert_synced(found)
    assert engine_processes(tmp_path / "run") == []


def test_two_tensor_parallel_parts_have_the_trainers_bits(tmp_path: Path) -> None:
    found = train(tmp_path / "run", "--run.updates", "4", *VLLM, "--engines.tensor_parallel", "2")
    assert_synced(found)


@pytest.mark.parametrize("method", ["adamw", "lora"])
def test_dense_methods_reach_vllms_fused_weights(method: str, tmp_path: Path) -> None:
    found = train(tmp_path / "run", "--run.updates", "3", "--method.name", method, "--method.lr", "1e-3", *VLLM)
    assert_synced(found)


def test_dense_weights_are_divided_like_any(tmp_path: Path) -> None:
    """Embeddings with padded vocabularies, norms that every part has, fused and divided linear layers."""
    chosen = ["--method.name", "adamw", "--method.lr", "1e-3", "--engines.tensor_parallel", "2"]
    assert_synced(train(tmp_path / "run", "--run.updates", "2", *chosen, *VLLM))


def test_a_prefix_is_never_served_from_older_weights(tmp_path: Path) -> None:
    """Prompts longer than a block of the cache, the same ones at every update."""
    rows = [{"prompt": "0" * 90 + f"+{number}=", "answer": str(number)} for number in range(4)]
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def varied(completions, **columns):\n    return [float(len(set(each))) for each in completions]\n"
    )
    rewards = {f"{reward}:varied": 1.0}
    source = json.dumps({"long": {"path": str(data), "prompt": "prompt", "answer": "answer", "rewards": rewards}})
    arguments = ["--task.names", '{"long": 1.0}', "--task.sources", source, "--evaluation.problems", "1"]
    arguments += ["--evaluation.names", '{"sums": 1.0}', "--method.logra.lr", "1e-3"]
    found = train(tmp_path / "run", "--run.updates", "4", *arguments, *VLLM, "--engines.options", "{block_size: 32}")
    assert_synced(found)


def test_greedy_answers_end_where_transformers_ends_them(tmp_path: Path) -> None:
    """Ids, texts, end tokens and stop strings of both engines are the same."""
    drawn = {}
    for name, chosen in (("inside", []), ("vllm", VLLM)):
        command = [
            sys.executable,
            "-m",
            "logra",
            "eval",
            *QUICK,
            "--rollout.stop",
            "['7']",
            "--evaluation.problems",
            "32",
        ]
        done = subprocess.run([*command, *chosen], capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        drawn[name] = done.stdout[done.stdout.index("right: ") :].splitlines()
    assert drawn["inside"] == drawn["vllm"]


@pytest.mark.parametrize(
    ("trap", "said"),
    [
        ("emptied", "(0,) in one of 1 parts of the engine"),
        ("packed once", "all its weights were changed, but its log-probabilities stayed as they were"),
    ],
)
def test_weights_that_vllm_packed_are_noticed_at_start(trap: str, said: str, tmp_path: Path) -> None:
    """What happens without `_weights_kept`: changes of an emptied weight, or of one whose packed copy computes."""
    folder = tmp_path / "run"
    listening = tmp_path / "address"
    command = [sys.executable, str(ROOT / "scale" / "trapped_engine.py"), trap, str(listening)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as engine:
        try:
            deadline = time.monotonic() + SECONDS
            while not listening.exists():
                assert engine.poll() is None, (tmp_path / "log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.2)
            there = [*VLLM, "--engines.addresses", f"['{listening.read_text()}']", "--engines.restarts", "0"]
            arguments = ["--run.folder", str(folder), "--run.updates", "2", *there]
            run = [sys.executable, "-m", "logra", "train", *QUICK, *arguments]
            done = subprocess.run(run, capture_output=True, text=True, timeout=SECONDS, check=False)
        finally:
            engine.kill()
    assert done.returncode == 1
    assert said in done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """vLLM's own server, started as docs/scaling.md says."""
    port = 8000 + os.getpid() % 1000
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(ROOT / "src" / "logra" / "tiny_policy"),
        "--worker-cls", "logra.engines.vllm_engine.SyncWorker", "--logprobs-mode", "processed_logprobs",
        "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", "268435456",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    with (tmp_path / "server.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    yield f"http://127.0.0.1:{port}"
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def test_vllms_own_server_over_http(server: str, tmp_path: Path) -> None:
    there = ["--engines.kind", "http", "--engines.addresses", f"['{server}']"]
    assert_synced(train(tmp_path / "run", "--run.updates", "3", *there))
    with urllib.request.urlopen(f"{server}/v1/models", timeout=30) as answer:
        assert answer.status == 200  # a run leaves others' servers alone
    lagging = train(tmp_path / "ahead", "--run.updates", "4", *there, "--engines.max_lag", "1")
    assert max(line["lag"]["max"] for line in lagging) == 1


def test_ray_places_engines_and_a_killed_one_costs_no_update(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "logra", "train", *QUICK, "--ray", "--run.folder", str(folder)]
    command += ["--run.updates", "30", *VLLM, "--engines.count", "2"]
    with (tmp_path / "out").open("wb") as out:
        running = subprocess.Popen(command, stdout=out, stderr=out)
    deadline = time.monotonic() + SECONDS
    path = folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        assert running.poll() is None, (tmp_path / "out").read_text() + logs(folder)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(engine_processes(folder)[0], signal.SIGKILL)
    running.wait(SECONDS)
    said = (tmp_path / "out").read_text()
    assert running.returncode == 0, said + logs(folder)
    found = updates(folder)
    assert [line["update"] for line in found] == list(range(1, 31))
    assert all(line["logprob_gap_max"] <= 1e-4 for line in found)
    assert "it is reached again" in said
    assert engine_processes(folder) == []


def test_ray_places_two_trainer_processes(tmp_path: Path) -> None:
    found = train(tmp_path / "run", "--ray", "--processes", "2", "--run.updates", "2", "--engines.kind", "transformers")
    assert_synced(found)
