# SPDX-License-Identifier: Apache-2.0
"""`logra train` and `logra eval`: put the parts together, run, write what is left behind."""

import copy
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from logra.checkpoint import compute_weights, model_card, write_model
from logra.evaluator import Evaluator, ScoredSample
from logra.hub import check_hub, push
from logra.model import Policy, load_policy
from logra.problems import Mixture
from logra.progress import make_progress
from logra.rl.logprobs import CausalModel
from logra.rollout.transformers_engine import TransformersEngine
from logra.run_folder import RunFolder
from logra.run_settings import TrainSettings
from logra.trainer import Trainer
from logra.training_run import TrainingRun
from logra.update_rules import UpdateRule, add_adapters, make_rule


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        policy: model and tokenizer.
        adapted: peft's wrapper of the model, for method lora.
        rule: changes the weights.
        trainer: does the updates.
    """

    policy: Policy
    adapted: Any
    rule: UpdateRule
    trainer: Trainer

    def write(self, folder: Path, update: int, scores: dict[str, Any]) -> None:
        """The policy as it is, as an ordinary Hugging Face folder."""
        settings = self.trainer.settings
        # Adapters are merged into a copy; the run goes on with them apart.
        model = self.policy.model if self.adapted is None else copy.deepcopy(self.adapted).merge_and_unload()
        weights = compute_weights(model, settings.model.compute, self.rule.computing_weights())
        write_model(folder, model, self.policy.tokenizer, weights, model_card(settings, update, scores))


def assemble(settings: TrainSettings) -> Parts:
    """Load the model and build everything around it.

    Raises:
        ValueError: model, tasks or settings do not fit; the message says what to do.
    """
    torch.manual_seed(settings.run.seed)  # LoRA's first weights; nothing else draws from it
    policy = load_policy(settings.model)
    reference = _reference(settings)
    adapted = add_adapters(policy.model, settings.method) if settings.method.name == "lora" else None
    rule = make_rule(policy.model if adapted is None else adapted, settings.method, settings.run.seed)
    trainer = Trainer(settings, policy, make_engine(settings, policy), rule, reference)
    return Parts(policy, adapted, rule, trainer)


def make_engine(settings: TrainSettings, policy: Policy) -> TransformersEngine:
    """Rollout in this process, on the policy's own weights."""
    dtype = torch.bfloat16 if settings.model.compute == "bf16" else torch.float32
    ends = (policy.end_ids, policy.pad_id)
    return TransformersEngine(policy.causal, policy.tokenizer, *ends, dtype, settings.rollout.max_rows)


def _reference(settings: TrainSettings) -> CausalModel | None:
    """The model at start, held in the dtype it computes in."""
    if not settings.learning.reference_kl:
        return None
    weights = "bfloat16" if settings.model.compute == "bf16" else settings.model.weights
    model = load_policy(replace(settings.model, weights=weights, gradient_checkpointing=False)).causal
    model.model.requires_grad_(False).eval()
    return model


def train(settings: TrainSettings) -> int:
    """Train, and save the model; 0 if all updates asked for were done, or a score asked for was reached."""
    if settings.run.push_to_hub is not None:
        check_hub(settings.run.push_to_hub)
    Mixture(settings)  # data and golds are checked before a model loads
    folder = RunFolder(settings)
    parts = assemble(settings)
    progress = make_progress(settings.run.updates)

    def save(name: str) -> Path:
        standing = run.standing
        scores = {"before": standing.before, "now": standing.now} if standing.now else {}
        return folder.save_model(name, lambda path: parts.write(path, parts.trainer.update, scores))

    run = TrainingRun(parts.trainer, folder, progress, save)
    try:
        reason = run()
    finally:
        progress.close()
    where = save("model")
    if reason is not None:
        sys.stdout.write(f"ended after update {parts.trainer.update} of {settings.run.updates}: {reason}\n")
    sys.stdout.write(f"model: {where}\nmetrics: {folder.path / 'metrics.jsonl'}\n")
    if settings.run.push_to_hub is not None:
        sys.stdout.write(f"sent to {push(where, settings.run.push_to_hub)}\n")
    wanted = parts.trainer.update == settings.run.updates or run.reached
    return 0 if wanted else 1


def evaluate(settings: TrainSettings) -> int:
    """Score the model on the held-out problems: some right and wrong samples, and the result as JSON."""
    mixture = Mixture(settings)
    policy = load_policy(settings.model)
    found = Evaluator(settings, policy, make_engine(settings, policy), mixture)()
    for each in found.right_and_wrong(2):
        sys.stdout.write(_shown(each))
    scores = asdict(found.result) | {"by_task": found.by_task, "greedy": found.greedy}
    sys.stdout.write(json.dumps({"model": settings.model.name, **scores}) + "\n")
    return 0


def _shown(scored: ScoredSample) -> str:
    verdict = "right" if scored.score is not None and scored.score >= 1 else "wrong"
    problem, text = scored.problem, scored.sample.text
    return f"{verdict}: {problem.prompt!r}\n  completion: {text[-200:]!r}\n  answer: {problem.answer!r}\n"
