# SPDX-License-Identifier: Apache-2.0
"""`logra train` and `logra eval`: put the parts together, run, write what is left behind."""

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from logra.checkpoint import compute_weights, model_card, write_model
from logra.evaluator import Evaluator, ScoredSample
from logra.hub import check_hub, push
from logra.interruption import Interrupted
from logra.longest_first import try_longest
from logra.memory_plan import GIB
from logra.model import Policy, chosen_compute, chosen_device, load_policy, on_this_machine
from logra.plan_command import longest_of, planned_or_refused
from logra.problems import Mixture
from logra.progress import make_progress
from logra.rl.logprobs import CausalModel
from logra.rollout.engine import RolloutEngine
from logra.rollout.recorded import RecordingEngine, ReplayEngine
from logra.rollout.transformers_engine import TransformersEngine
from logra.run_folder import STATE, RunFolder
from logra.run_settings import TrainSettings
from logra.tracking import Trackers
from logra.trainer import Trainer
from logra.trainer_state import inexact_weights, load_state, restore, save_state
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

    def write(self, folder: Path, run: TrainingRun | None, with_state: bool = False) -> None:
        """The policy as it is, as an ordinary Hugging Face folder; `with_state` adds what a run goes on from."""
        settings, update = self.trainer.settings, self.trainer.update
        # Adapters are merged into a copy; the run goes on with them apart.
        model = self.policy.model if self.adapted is None else copy.deepcopy(self.adapted).merge_and_unload()
        weights = compute_weights(model, settings.model.compute, self.rule.computing_weights())
        standing = {"before": run.standing.before, "now": run.standing.now} if run and run.standing.now else {}
        exact = inexact_weights(model, weights, self.adapted) if with_state else {}
        write_model(folder, model, self.policy.tokenizer, weights, model_card(settings, update, standing))
        if with_state and run is not None:
            save_state(folder / STATE, run.state(), self.rule.optimizer, exact)


def assemble(settings: TrainSettings, checkpoint: Path | None = None, mixture: Mixture | None = None) -> Parts:
    """Load the model, from a checkpoint of the run if there is one, and build everything around it.

    Raises:
        ValueError: model, tasks or settings do not fit; the message says what to do.
    """
    torch.manual_seed(settings.run.seed)  # LoRA's first weights; nothing else draws from it
    if chosen_device(settings.model) == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    lora = settings.method.name == "lora"
    # A checkpoint of LoRA holds merged weights; its adapters go on beside the weights at start.
    place = settings.model if checkpoint is None or lora else replace(settings.model, name=str(checkpoint))
    policy = load_policy(place)
    reference = _reference(settings)
    adapted = add_adapters(policy.model, settings.method) if lora else None
    rule = make_rule(policy.model if adapted is None else adapted, settings.method, settings.run.seed)
    trainer = Trainer(settings, policy, make_engine(settings, policy), rule, reference, mixture)
    return Parts(policy, adapted, rule, trainer)


def make_engine(settings: TrainSettings, policy: Policy) -> RolloutEngine:
    """Rollout in this process, on the policy's own weights."""
    dtype = torch.bfloat16 if chosen_compute(settings.model) == "bf16" else torch.float32
    ends, rollout = (policy.end_ids, policy.pad_id), settings.rollout
    engine = TransformersEngine(policy.causal, policy.tokenizer, *ends, dtype, rollout.max_rows)
    if rollout.replay is not None:
        return ReplayEngine(engine, Path(rollout.replay))
    return RecordingEngine(engine, Path(settings.run.folder) / "batches") if rollout.record else engine


def _reference(settings: TrainSettings) -> CausalModel | None:
    """The model at start, computing as the policy does."""
    if not settings.learning.reference_kl:
        return None
    model = load_policy(replace(settings.model, gradient_checkpointing=False)).causal
    model.model.requires_grad_(False).eval()
    return model


def train(settings: TrainSettings, resume: bool = False) -> int:
    """Train, and save the model; 0 if all updates asked for were done, or a score asked for was reached."""
    settings = on_this_machine(settings)
    if settings.run.push_to_hub is not None:
        check_hub(settings.run.push_to_hub)
    mixture = Mixture(settings)  # data and golds are checked before a model loads
    lengths = longest_of(settings, [problem for _, problem in mixture.held_out])
    planned = planned_or_refused(settings, lengths)
    folder = RunFolder(settings, resume)
    try:
        checkpoint = _checkpoint(folder) if resume else None
        parts = assemble(settings, checkpoint, mixture)
        if settings.run.probe_longest:
            try_longest(parts.trainer.learn, lengths)
        trackers = Trackers(settings.run.trackers, settings)
    except BaseException:
        folder.give_up()
        raise
    folder.started()
    progress = make_progress(settings.run.updates)

    def save(name: str) -> Path:
        return folder.save_model(name, lambda path: parts.write(path, run, name.startswith("checkpoint")))

    run = TrainingRun(parts.trainer, folder, progress, save, trackers)
    if resume:
        _go_on(folder, checkpoint, parts, run)
    try:
        reason = run()
    except Interrupted as stop:
        progress.close()
        done = f"{parts.trainer.update} of {settings.run.updates} updates are done"
        sys.stdout.write(f"{stop}: {done}; go on with `logra train --resume {folder.path}`\n")
        return stop.exit_code
    finally:
        progress.close()
        trackers.close()
    with run.interruption.watching():
        run.interruption.defer()  # all updates are done: what is left is to save them
        code = _finish(folder, parts, run, save, reason)
    if planned is not None:
        sys.stdout.write(f"memory: planned {planned.peak.total / GIB:.2f} GiB, {_measured_memory(folder)}\n")
    return code


def _measured_memory(folder: RunFolder) -> str:
    """The highest peak of all updates, as the metrics have it."""
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    peaks = [(each["peak_bytes"], name) for line in lines for name, each in line.get("memory", {}).items()]
    if not peaks:
        return "not measured here"
    peak, name = max(peaks)
    return f"measured {peak / GIB:.2f} GiB (in {name}; on a CPU, of the whole process)"


def _checkpoint(folder: RunFolder) -> Path | None:
    """The checkpoint to go on from; None for the beginning."""
    found, wrong = folder.latest_checkpoint()
    for each in wrong:
        sys.stdout.write(f"not used: {each}\n")
    if found is None and (folder.path / "model").exists():
        raise ValueError(
            f"{folder.path} holds a run that has ended and no checkpoint to go on from (run.save_every was 0, or the "
            f"checkpoints were deleted); begin another run with model.name {folder.path / 'model'}"
        )
    sys.stdout.write(f"going on from {'the beginning: no checkpoint is there yet' if found is None else found}\n")
    return found


def _go_on(folder: RunFolder, checkpoint: Path | None, parts: Parts, run: TrainingRun) -> None:
    """Put everything back as it was at the checkpoint."""
    if checkpoint is None:
        folder.forget_after(-1, False)
        return
    state = load_state(checkpoint / STATE)
    restore(state, parts.policy.model if parts.adapted is None else parts.adapted, parts.rule.optimizer)
    run.load(state["numbers"])
    run.saved_update = parts.trainer.update
    folder.forget_after(parts.trainer.update, run.standing.now.get("update") == parts.trainer.update)


def _finish(folder: RunFolder, parts: Parts, run: TrainingRun, save: Callable[[str], Path], reason: str | None) -> int:
    """Save what is left to save, and say what was done."""
    asked, update = run.settings.run, parts.trainer.update
    if asked.save_every and update > run.saved_update:
        save(f"checkpoint-{update}")
    where = save("model")
    if reason is not None:
        sys.stdout.write(f"ended after update {update} of {asked.updates}: {reason}\n")
    sys.stdout.write(f"model: {where}\nmetrics: {folder.path / 'metrics.jsonl'}\n")
    if asked.push_to_hub is not None:
        sys.stdout.write(f"sent to {push(where, asked.push_to_hub)}\n")
    return 0 if update >= asked.updates or run.reached else 1


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
