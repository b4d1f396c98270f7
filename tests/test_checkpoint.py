"""Saved models: the dtype that computes, the same log-probabilities in plain transformers, card, hub."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from logra.checkpoint import compute_weights, model_card
from logra.cli import main
from logra.run_settings import MethodSettings, ModelSettings, TaskSettings, TrainSettings
from tests.conftest import tiny_gpt2, tiny_llama
from tests.test_training import QUICK


def logprobs(model: Any, compute: str) -> torch.Tensor:
    ids = torch.arange(2, 42).reshape(2, 20)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == "bf16"):
        return model.eval()(input_ids=ids).logits.float().log_softmax(-1)


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_llama(tied=True), tiny_gpt2])
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_written_weights_compute_the_same(make: Any, compute: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make()
    wanted = logprobs(model, compute)
    weights = compute_weights(model, compute, {})
    short = {name for name, value in weights.items() if value.dtype == torch.bfloat16}
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logprobs(loaded, compute), wanted)
    assert bool(short) == (compute == "bf16")
    # The stored embedding has more digits than bf16 and is looked up in fp32.
    assert not any("embed" in name or "wte" in name for name in short)


def test_a_model_that_was_bf16_stays_so_where_nothing_was_trained(tmp_path: Path) -> None:
    model = tiny_llama().to(torch.bfloat16).float()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.0001)
    weights = compute_weights(model, "bf16", {})
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    with torch.no_grad():
        model.model.norm.weight.mul_(1.0001)
    assert compute_weights(model, "bf16", {})["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    "logra", [{"storage": "fp32", "dithered_copy": True}, {"storage": "fp32"}, {"storage": "split"}]
)
def test_a_trained_model_loaded_by_plain_transformers_has_the_last_logprobs(
    logra: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    from logra import train_command

    kept: list[train_command.Parts] = []
    assemble = train_command.assemble

    def remember(*arguments: Any) -> train_command.Parts:
        kept.append(assemble(*arguments))
        return kept[-1]

    monkeypatch.setattr(train_command, "assemble", remember)
    arguments = [f"--method.logra.{name}={str(value).lower()}" for name, value in logra.items()]
    arguments += ["--model.weights", "bfloat16" if logra["storage"] == "split" else "float32"]
    arguments += ["--learning.skip_equal_groups", "false", "--method.logra.lr", "1e-3", "--model.compute", "bf16"]
    assert main(["train", *QUICK, "--run.folder", str(tmp_path / "run"), *arguments]) == 0
    (parts,) = kept
    folder = tmp_path / "run" / "model"
    dtype = torch.bfloat16 if logra["storage"] == "split" else torch.float32
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert torch.equal(logprobs(loaded, "bf16"), logprobs(parts.policy.model, "bf16"))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {"README.md", "generation_config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    card = (folder / "README.md").read_text()
    assert "2 updates of 4 prompts x 4 completions by `logra train` with method `logra` on sums" in card
    assert "| pass@1 | 0." in card
    with torch.no_grad():
        next(module for module in loaded.modules() if isinstance(module, nn.Linear)).weight.mul_(1.01)
    assert not torch.equal(logprobs(loaded, "bf16"), logprobs(parts.policy.model, "bf16"))


def test_the_card_names_a_base_model_of_the_hub_only() -> None:
    hub = TrainSettings(model=ModelSettings(name="Qwen/Qwen2.5-0.5B"), task=TaskSettings(names={"gsm8k": 1.0}))
    card = model_card(hub, 3, {"before": {"update": 0, "pass@1": 0.25}, "now": {"update": 3, "pass@1": 0.5}})
    assert "base_model: Qwen/Qwen2.5-0.5B" in card
    assert "| held-out | before | now |\n| --- | --- | --- |\n| pass@1 | 0.250 | 0.500 |" in card
    ungraded = model_card(hub, 3, {"before": {"update": 0, "pass@1": 0.25}, "now": {"update": 3, "pass@1": None}})
    assert "| pass@1 | 0.250 | - |" in ungraded
    assert "base_model" not in model_card(TrainSettings(method=MethodSettings(name="adamw")), 0, {})


class Hub:
    """Stands in for the hub's client, and remembers what it was asked."""

    known, works = True, True
    asked: list[tuple[str, Any]]

    def whoami(self) -> dict[str, str]:
        if not self.known:
            raise OSError("Invalid token\nsecond line")
        return {"name": "me"}

    def create_repo(self, repository: str, exist_ok: bool) -> str:
        self.asked.append(("create", repository))
        return f"https://hub/{repository}"

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> None:
        if not self.works:
            raise OSError("no connection")
        self.asked.append(("upload", sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.mark.parametrize(("known", "works", "code"), [(True, True, 0), (False, True, 2), (True, False, 2)])
def test_push_to_hub(
    known: bool, works: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    monkeypatch.setattr(Hub, "known", known)
    monkeypatch.setattr(Hub, "works", works)
    folder = tmp_path / "run"
    arguments = ["train", *QUICK, "--run.updates", "1", "--run.folder", str(folder), "--run.push_to_hub", "me/model"]
    assert main(arguments) == code
    told = capsys.readouterr()
    if code == 0:
        assert Hub.asked[0] == ("create", "me/model")
        assert "model.safetensors" in Hub.asked[1][1]
        assert "sent to https://hub/me/model" in told.out
    elif known:
        assert f"it is in {folder / 'model'}. Send it with `hf upload me/model" in told.err
        assert (folder / "model" / "model.safetensors").exists()
    else:
        assert "the hub does not know who you are (Invalid token); log in" in told.err
        assert not folder.exists()


def test_a_bad_repository_name_is_refused(capsys: Any) -> None:
    assert main(["train", "--run.push_to_hub", "just-a-name"]) == 2
    assert "it must be owner/name" in capsys.readouterr().err
