# SPDX-License-Identifier: Apache-2.0
"""A model as an ordinary Hugging Face folder: weights in the dtype they compute in, tokenizer, settings, model card.

With bf16 compute the weights of linear layers are written in bf16, as the matrix products see them. Everything else
(embeddings, norms) computes in its stored dtype and is written in bf16 only where that changes no value. Loaded with
`dtype=torch.float32` under the same autocast, the folder therefore gives the log-probabilities that training had.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logra.run_settings import TrainSettings


def compute_weights(model: Any, compute: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict in the dtype that `compute` ("bf16" or "fp32") uses.

    Args:
        model: the Hugging Face model.
        compute: of the run.
        own: weight name -> what bf16 compute uses, where that is not the weight rounded to nearest.
    """
    state: dict[str, Tensor] = model.state_dict()
    if compute != "bf16":
        return state
    tied = _shared(state)
    products = {
        f"{name}.{kind}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        for kind in ("weight", "bias")
    }
    written: dict[int, Tensor] = {}
    for name, value in state.items():
        if value.dtype != torch.float32:
            continue
        place = value.data_ptr()
        if place not in written:
            short = own.get(name, value).to("cpu", torch.bfloat16)  # a checkpoint takes no memory of the device
            computes_short = name in products and place not in tied
            written[place] = short if computes_short or torch.equal(short.to(value.dtype), value.cpu()) else value
        state[name] = written[place]
    return state


def _shared(state: Mapping[str, Tensor]) -> set[int]:
    """Addresses of tensors that have several names, such as a head tied to the embedding."""
    places = [value.data_ptr() for value in state.values()]
    return {place for place in places if places.count(place) > 1}


def write_model(folder: Path, model: Any, tokenizer: Any, weights: dict[str, Tensor], card: str) -> None:
    """Write everything into `folder`, which must not be in use."""
    all_short = all(value.dtype == torch.bfloat16 for value in weights.values() if value.is_floating_point())
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    if all_short:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
    (folder / "README.md").write_text(card)


def model_card(settings: TrainSettings, update: int, scores: Mapping[str, Any]) -> str:
    """The card: what the model is made from and how, and its scores on held-out problems.

    Args:
        settings: of the run.
        update: updates done.
        scores: "before" and "now", each as metrics.jsonl has evaluations; may be empty.
    """
    base, method = settings.model.name, settings.method.name
    is_hub_name = base.count("/") == 1 and not Path(base).exists()
    head = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, logra]",
    ]
    head += [f"base_model: {base}", "---"] if is_hub_name else ["---"]
    tasks = ", ".join(settings.task.names)
    lines = [
        "",
        f"# {Path(base).name}, trained from rewarded answers",
        "",
        f"{update} updates of {settings.rollout.prompts} prompts x {settings.rollout.samples} completions by "
        f"`logra train` with method `{method}` on {tasks}, starting from `{base}`. Compute: {settings.model.compute}.",
        "",
    ]
    if scores:
        lines += ["| held-out | " + " | ".join(scores) + " |", "| --- |" + " --- |" * len(scores)]
        names = [name for name, value in next(iter(scores.values())).items() if isinstance(value, float)]
        for name in names:
            cells = [f"{each[name]:.3f}" if each.get(name) is not None else "-" for each in scores.values()]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(head + lines)
