# SPDX-License-Identifier: Apache-2.0
"""`logra train` and `logra eval`: put the parts together, run, write what is left behind."""

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from logra.checkpoint import compute_weights, model_card, write_model
from logra.divide import RolloutCopy, divide
from logra.engines.build import make_pool, threads_each
from logra.evaluator import Evaluator, ScoredSample
from logra.export_divided import export_divided
from logra.hub import check_hub, push
from logra.interruption import Interrupted
from logra.longest_first import try_longest
from logra.memory_plan import GIB
from logra.model import Policy, chosen_compute, chosen_device, load_policy, on_this_machine
from logra.parallel.processes import Processes, is_lost, join, leave
from logra.plan_command import longest_of, planned_or_refused
from logra.problems import Mixture
from logra.progress import make_progress
from logra.rl.logprobs import CausalModel
from logra.rollout.divided_engine import DividedEngine
from logra.rollout.engine import RolloutEngine
from logra.rollout.transformers_engine import TransformersEngine
from logra.run_folder import STATE, FollowedFolder, RunFolder
from logra.run_settings import ModelSettings, TrainSettings
from logra.sync.sender import SyncLost
from logra.tracking import Trackers
from logra.trainer import Trainer
from logra.trainer_state import inexact_weights, load_state, restore, save_state
from logra.training_run import TrainingRun
from logra.update_rules import LograRule, UpdateRule, add_adapters, make_rule


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
        """The policy as it is, as an ordinary Hugging Face folder; `with_state` adds what a run goes on from.

        With several processes all of them call it, for one folder that is there.
        """
        settings, processes = self.trainer.settings, self.trainer.processes
        compute, policy = settings.model.compute, self.policy
        standing = {"before": run.standing.before, "now": run.standing.now} if run and run.standing.now else {}
        card = model_card(settings, self.trainer.update, standing)
        if processes.count > 1:
            export_divided(folder, policy.model, policy.tokenizer, compute, card, processes)
            short = torch.bfloat16 if compute == "bf16" else torch.float32
            written = {name: short for name, each in policy.model.named_parameters() if each.is_floating_point()}
        else:
            # Adapters are merged into a copy; the run goes on with them apart.
            model = policy.model if self.adapted is None else copy.deepcopy(self.adapted).merge_and_unload()
            weights = compute_weights(model, compute, self.rule.computing_weights())
            written = {name: value.dtype for name, value in weights.items()}
            write_model(folder, model, policy.tokenizer, weights, card)
        if with_state and run is not None:
            exact = inexact_weights(policy.model, written, self.adapted)
            save_state(folder / STATE, run.state(), self.rule.optimizer, exact, processes)


def assemble(
    settings: TrainSettings,
    checkpoint: Path | None = None,
    mixture: Mixture | None = None,
    processes: Processes | None = None,
) -> Parts:
    """Load the model, from a checkpoint of the run if there is one, and build everything around it.

    Raises:
        ValueError: model, tasks or settings do not fit; the message says what to do.
    """
    processes = processes or Processes()
    settings = on_this_machine(settings)
    torch.manual_seed(settings.run.seed)  # LoRA's first weights; nothing else draws from it
    if chosen_device(settings.model) == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    lora = settings.method.name == "lora"
    # A checkpoint of LoRA holds merged weights; its adapters go on beside the weights at start.
    place = settings.model if checkpoint is None or lora else replace(settings.model, name=str(checkpoint))
    if processes.count > 1:
        policy, adapted, copied = _in_parts(place, settings, processes)
    else:
        policy = load_policy(place)
        adapted, copied = add_adapters(policy.model, settings.method) if lora else None, None
    reference = _reference(settings, processes)
    rule = make_rule(policy.model if adapted is None else adapted, settings.method, settings.run.seed)
    if isinstance(rule, LograRule):
        if processes.count > 1 and any(layer.module is policy.causal.head for layer in rule.optimizer.sketches):
            raise ValueError("targets name the output layer, which several processes cannot sketch; leave it out")
        rule.optimizer.set_gradient_divide_factor(1.0)  # the loss is divided by the counts of all processes
    engine = make_pool(settings, policy, rule, processes) or make_engine(settings, policy, copied, processes)
    if settings.engines.max_lag and policy.device == "cpu":
        torch.set_num_threads(threads_each(settings.engines))
    trainer = Trainer(settings, policy, engine, rule, reference, mixture, processes)
    return Parts(policy, adapted, rule, trainer)


def _in_parts(
    place: ModelSettings, settings: TrainSettings, processes: Processes
) -> tuple[Policy, Any, RolloutCopy | None]:
    """The model divided among processes, peft's wrapper, and the copy that acts; one process of a machine at a time."""
    compute = settings.model.compute
    with processes.taking_turns():
        policy = load_policy(place, "cpu")
        adapted = add_adapters(policy.model, settings.method) if settings.method.name == "lora" else None
        inside = settings.engines.kind == "inside"
        copied = RolloutCopy(policy.model, compute, chosen_device(settings.model)) if inside else None
        divide(policy.causal, processes, compute)
    return replace(policy, device=chosen_device(settings.model)), adapted, copied


def make_engine(
    settings: TrainSettings,
    policy: Policy,
    copied: RolloutCopy | None = None,
    processes: Processes | None = None,
) -> RolloutEngine:
    """Rollout in this process, on the policy's own weights or, where those are divided, on a copy."""
    dtype = torch.bfloat16 if chosen_compute(settings.model) == "bf16" else torch.float32
    ends, rollout = (policy.end_ids, policy.pad_id), settings.rollout
    causal = policy.causal if copied is None else CausalModel(copied.model)
    engine: RolloutEngine = TransformersEngine(causal, policy.tokenizer, *ends, dtype, rollout.max_rows)
    return engine if copied is None else DividedEngine(engine, copied, processes or Processes())


def _reference(settings: TrainSettings, processes: Processes) -> CausalModel | None:
    """The model at start, computing as the policy does."""
    if not settings.learning.reference_kl:
        return None
    place = replace(settings.model, gradient_checkpointing=False)
    if processes.count > 1:
        with processes.taking_turns():
            model = load_policy(place, "cpu").causal
            divide(model, processes, settings.model.compute)
    else:
        model = load_policy(place).causal
    model.model.requires_grad_(False).eval()
    return model


def train(settings: TrainSettings, resume: bool = False) -> int:
    """Train, and save the model; 0 if all updates asked for were done, or a score asked for was reached."""
    processes = join(chosen_device(settings.model), settings.parallel.timeout, settings.parallel.shard)
    with processes.only_first_talks():
        try:
            _refuse_in_parts(settings, processes)
            code = _train(processes.told(on_this_machine(settings)), resume, processes)
            leave(processes)
        except SyncLost as error:
            saved = "What was saved is intact; go on with `logra train --resume`."
            sys.stderr.write(f"logra: the engines are lost: {error}\n{saved}\n")
            code = 1
        except RuntimeError as error:
            if processes.count == 1 or not is_lost(error):
                raise
            sys.stderr.write(_lost(error, processes))
            code = 1
    return code


def _refuse_in_parts(settings: TrainSettings, processes: Processes) -> None:
    """What several processes cannot do, before a model loads.

    Raises:
        ValueError: says what to set instead.
    """
    if processes.count == 1:
        return
    method, short = settings.method, settings.model.weights == "bfloat16"
    if settings.engines.kind != "inside" and settings.parallel.timeout <= settings.engines.sync_timeout:
        raise ValueError(
            f"parallel.timeout is {settings.parallel.timeout:g}, but the first process may wait "
            f"engines.sync_timeout {settings.engines.sync_timeout:g} s for an engine; raise the one or lower the other"
        )
    if method.kl.budget is not None and method.kl.estimator == "jvp":
        raise ValueError("kl.estimator is 'jvp', which runs in one process; with several, use 'secant' or 'auto'")
    if method.name == "logra" and method.logra.others == "adamw" and short:
        raise ValueError(
            "logra.others is 'adamw', whose parameters must be float32, but model.weights is 'bfloat16', and several "
            "processes keep one dtype; use model.weights float32 with storage fp32, or others 'frozen'"
        )


def _lost(error: RuntimeError, processes: Processes) -> str:
    """What to say when the processes can no longer go on together."""
    what = (str(error).strip().splitlines() or [type(error).__name__])[0]
    lines = "".join(f"\n  {line}" for line in processes.what_each_was_doing())
    return (
        f"logra: process {processes.place} cannot go on ({what}). One of the processes ended, hangs, or failed; what "
        f"each was doing:{lines}\nWhat was saved is intact; go on with `logra train --resume`.\n"
    )


def _train(settings: TrainSettings, resume: bool, processes: Processes) -> int:
    hub = settings.run.push_to_hub
    processes.of_first(lambda: None if hub is None else check_hub(hub))
    mixture = processes.first_makes(lambda: Mixture(settings))  # data and golds are checked before a model loads
    lengths = longest_of(settings, [problem for _, problem in mixture.held_out])
    planned = processes.of_first(lambda: planned_or_refused(settings, lengths, processes.count))
    folder = _folder(settings, resume, processes)
    processes.notes("loading the model")
    try:
        checkpoint = processes.of_first(lambda: _checkpoint(folder) if resume else None)
        parts = assemble(settings, checkpoint, mixture, processes)
        if settings.run.probe_longest:
            try_longest(parts.trainer.learn, lengths)
        trackers = Trackers(settings.run.trackers if processes.first else [], settings)
    except BaseException:
        folder.give_up()
        raise
    folder.started()
    progress = make_progress(settings.run.updates)

    def save(name: str) -> Path:
        processes.notes(f"writing {name}")
        return save_together(
            folder, name, partial(parts.write, run=run, with_state=name.startswith("checkpoint")), processes
        )

    run = TrainingRun(parts.trainer, folder, progress, save, trackers)
    if resume:
        _go_on(folder, checkpoint, parts, run)
    try:
        parts.trainer.start_engines()
        reason = run()
    except Interrupted as stop:
        progress.close()
        done = f"{parts.trainer.update} of {settings.run.updates} updates are done"
        sys.stdout.write(f"{stop}: {done}; go on with `logra train --resume {folder.path}`\n")
        return stop.exit_code
    finally:
        progress.close()
        trackers.close()
        if parts.trainer.pool is not None:
            parts.trainer.pool.close()
    with run.interruption.watching():
        run.interruption.defer()  # all updates are done: what is left is to save them
        code = _finish(folder, parts, run, save, reason)
    if planned is not None and processes.first:
        sys.stdout.write(f"memory: planned {planned.peak.total / GIB:.2f} GiB, {_measured_memory(folder)}\n")
    return code


def save_together(
    folder: RunFolder | FollowedFolder, name: str, write: Callable[[Path], None], processes: Processes
) -> Path:
    """A folder of the run that every process writes its part of, whole or not at all."""
    begun, error = False, None

    def write_part(path: Path) -> None:
        nonlocal begun
        begun = True
        processes.of_first(lambda: None)  # the folder is there
        write(path)

    def failed() -> None:
        assert error is not None
        raise error

    try:
        folder.save_model(name, write_part)
    except Exception as found:
        error = found
    if error is not None and processes.first and not begun:
        with contextlib.suppress(Exception):
            processes.of_first(failed)  # the others wait to begin
    processes.agree(error)
    return folder.path / name


def _folder(settings: TrainSettings, resume: bool, processes: Processes) -> RunFolder | FollowedFolder:
    """Kept by the first process; what is wrong with it, all of them learn."""
    made: list[RunFolder] = []
    processes.of_first(lambda: made.append(RunFolder(settings, resume)))
    return made[0] if made else FollowedFolder(settings)


def _measured_memory(folder: RunFolder | FollowedFolder) -> str:
    """The highest peak of all updates, as the metrics have it."""
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    peaks = [(each["peak_bytes"], name) for line in lines for name, each in line.get("memory", {}).items()]
    if not peaks:
        return "not measured here"
    peak, name = max(peaks)
    return f"measured {peak / GIB:.2f} GiB (in {name}; on a CPU, of the whole process)"


def _checkpoint(folder: RunFolder | FollowedFolder) -> Path | None:
    """The checkpoint to go on from; None for the beginning."""
    found, wrong = folder.latest_checkpoint()
    for each in wrong:
        sys.stdout.write(f"not used: {each}\n")
    earlier = sorted(folder.path.glob("checkpoint-*/trainer_state.pt"))
    if found is None and earlier:
        raise ValueError(
            f"{earlier[-1]} was written by an earlier version of logra, which this one cannot go on from; begin "
            f"another run with model.name {earlier[-1].parent}"
        )
    if found is None and (folder.path / "model").exists():
        raise ValueError(
            f"{folder.path} holds a run that has ended and no checkpoint to go on from (run.save_every was 0, or the "
            f"checkpoints were deleted); begin another run with model.name {folder.path / 'model'}"
        )
    sys.stdout.write(f"going on from {'the beginning: no checkpoint is there yet' if found is None else found}\n")
    return found


def _go_on(folder: RunFolder | FollowedFolder, checkpoint: Path | None, parts: Parts, run: TrainingRun) -> None:
    """Put everything back as it was at the checkpoint."""
    if checkpoint is None:
        folder.forget_after(-1, False)
        return
    state = load_state(checkpoint / STATE, parts.trainer.processes)
    restore(state, parts.policy.model if parts.adapted is None else parts.adapted, parts.rule.optimizer)
    run.load(state["numbers"])
    run.saved_update = parts.trainer.update
    folder.forget_after(parts.trainer.update, run.standing.now.get("update") == parts.trainer.update)


def _finish(
    folder: RunFolder | FollowedFolder, parts: Parts, run: TrainingRun, save: Callable[[str], Path], reason: str | None
) -> int:
    """Save what is left to save, and say what was done."""
    asked, update = run.settings.run, parts.trainer.update
    if asked.save_every and update > run.saved_update:
        save(f"checkpoint-{update}")
    where = save("model")
    if reason is not None:
        sys.stdout.write(f"ended after update {update} of {asked.updates}: {reason}\n")
    sys.stdout.write(f"model: {where}\nmetrics: {folder.path / 'metrics.jsonl'}\n")
    if asked.push_to_hub is not None and parts.trainer.processes.first:
        sys.stdout.write(f"sent to {push(where, asked.push_to_hub)}\n")
    return 0 if update >= asked.updates or run.reached else 1


def evaluate(settings: TrainSettings) -> int:
    """Score the model on the held-out problems: some right and wrong samples, and the result as JSON."""
    mixture = Mixture(settings)
    settings = on_this_machine(settings)
    policy = load_policy(settings.model)
    pool = make_pool(settings, policy, None, Processes())
    evaluator = Evaluator(settings, policy, pool or make_engine(settings, policy), mixture)
    with contextlib.ExitStack() as stack:
        if pool is not None:
            stack.callback(pool.close)
        try:
            if pool is not None:
                pool.start(0, evaluator.prompts[0].ids)
            found = evaluator()
        except SyncLost as error:
            raise ValueError(f"the engines are lost: {error}") from error
    for each in found.right_and_wrong(2):
        sys.stdout.write(_shown(each))
    scores = asdict(found.result) | {"by_task": found.by_task, "greedy": found.greedy}
    sys.stdout.write(json.dumps({"model": settings.model.name, **scores}) + "\n")
    return 0


def _shown(scored: ScoredSample) -> str:
    verdict = "right" if scored.score is not None and scored.score >= 1 else "wrong"
    problem, text = scored.problem, scored.sample.text
    return f"{verdict}: {problem.prompt!r}\n  completion: {text[-200:]!r}\n  answer: {problem.answer!r}\n"
