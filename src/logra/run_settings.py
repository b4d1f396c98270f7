# SPDX-License-Identifier: Apache-2.0
"""Settings of a run, readable without torch: one dataclass a section, one line of help a field.

Every value is checked at construction, before any model loads; a message names the value, what is
allowed and the remedy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from logra.config import KlSettings, LograSettings, check_allowed, check_section, setting
from logra.scale_settings import EngineSettings, ParallelSettings

METHODS = ("logra", "adamw", "lora", "sgd")


@dataclass(frozen=True)
class ModelSettings:
    """The policy."""

    name: str = setting("tiny", "Hugging Face name, a folder, or 'tiny', the small policy that ships with the package.")
    weights: str = setting("float32", "Stored dtype of the weights.", ("float32", "bfloat16"))
    compute: str = setting(
        "auto",
        "Matrix products: bf16 (autocast) or fp32; auto: bf16 where the machine multiplies it natively.",
        ("auto", "bf16", "fp32"),
    )
    attention: str = setting("sdpa", "Attention kernel of transformers.", ("sdpa", "eager", "flash_attention_2"))
    gradient_checkpointing: bool = setting(False, "Recompute blocks in backward instead of keeping their activations.")
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")
    device: str = setting("auto", "Where it runs; auto: the GPU if there is one.", ("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        check_section(self)
        if self.weights == "bfloat16" and self.compute == "fp32":
            raise ValueError(
                "compute is 'fp32', but weights is 'bfloat16': products would be in bf16. Use weights float32, or "
                "compute bf16"
            )


@dataclass(frozen=True)
class TaskSettings:
    """Where prompts and rewards come from."""

    names: dict[str, float] = setting(
        {"sums": 1.0},
        "Tasks by name, with their shares of the prompts: generated ones, known sets (see `logra tasks`), `sources`.",
    )
    sources: dict[str, dict[str, Any]] = setting(
        {},
        "Tasks from data: name -> path (.jsonl, .parquet or hub name), prompt, answer, gold, split, name, rewards, "
        "drop_bad. For a known set, what differs from it.",
    )
    knobs: dict[str, dict[str, Any]] = setting({}, "Difficulty of generated tasks, by task name.")
    levels: dict[str, list[dict[str, Any]]] = setting(
        {}, "Curriculum of generated tasks: name -> knobs of each level, easiest first; they replace `knobs`."
    )
    promote_at: float = setting(0.8, "Pass rate at which a task goes on to its next level.", least=0.0)
    promote_samples: int = setting(256, "Latest graded samples of a level that this pass rate is of.", least=1)
    reward_seconds: float = setting(
        10.0, "Time for your reward to score the completions of one prompt; later they count as ungraded.", least=0.1
    )
    reward_memory_gib: float = setting(4.0, "Memory of each process that runs your reward; 0: no limit.", least=0.0)
    code_sandbox: str = setting(
        "auto",
        "For reward code: warn where the system has no namespaces for it, or refuse.",
        ("auto", "required"),
    )
    reward_workers: int = setting(0, "Processes that run your reward; 0: as many as cores.", least=0)
    system_prompt: str | None = setting(None, "System message before each prompt, if the model has a chat template.")
    suffix: str = setting("", "Text after each prompt, such as 'Answer with the number only.'")

    def __post_init__(self) -> None:
        check_section(self)
        if not self.names or any(not share > 0 for share in self.names.values()):
            raise ValueError(f"names is {self.names}; give at least one task, each with a share above 0")
        both = sorted(set(self.levels) & (set(self.knobs) | set(self.sources)))
        if both:
            raise ValueError(f"levels of {both} replace knobs and are for generated tasks; name a task in one place")
        if any(not steps for steps in self.levels.values()):
            raise ValueError(f"levels is {self.levels}; give each task at least one set of knobs")
        if self.promote_at > 1:
            raise ValueError(f"promote_at is {self.promote_at}; it is a share, at most 1")


@dataclass(frozen=True)
class RolloutSettings:
    """How completions are drawn."""

    prompts: int = setting(16, "Prompts per update.", least=1)
    samples: int = setting(8, "Completions per prompt (paper: 1).", least=1)
    refill: int = setting(
        0, "Times that prompts whose scores are all equal are replaced by new ones (DAPO's dynamic sampling).", least=0
    )
    max_tokens: int = setting(64, "Tokens of a completion at most.", least=1)
    temperature: float = setting(1.0, "Divides the logits, in the rollout and in every log-probability.")
    top_p: float = setting(1.0, "Must be 1 for training: a filtered sampler draws from another policy than is trained.")
    top_k: int = setting(0, "Must be 0 for training, likewise.")
    stop: list[str] = setting([], "Strings that end a completion.")
    max_rows: int = setting(256, "Completions drawn side by side.", least=1)
    record: bool = setting(False, "Write every batch of completions to RUN/batches, for replay.")
    replay: str | None = setting(None, "A folder of recorded batches that are learned from instead of new ones.")

    def __post_init__(self) -> None:
        check_section(self)
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0 (greedy decoding learns nothing)")
        if self.record and self.replay is not None:
            raise ValueError(f"record writes what is drawn, but replay {self.replay!r} draws nothing; choose one")
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p {self.top_p} and top_k {self.top_k} would draw from a filtered policy that the trainer's "
                f"log-probabilities do not describe; use top_p 1 and top_k 0 in rollout (evaluation has its own)"
            )


@dataclass(frozen=True)
class LearningSettings:
    """From scores to a gradient."""

    advantage: str = setting(
        "group_mean",
        "Baseline and scale of scores (paper: running_baseline).",
        ("running_baseline", "group_mean", "group_normalised", "leave_one_out", "batch_normalised"),
    )
    loss: str = setting("policy_gradient", "Loss of a token.", ("policy_gradient", "clipped", "sequence", "cispo"))
    normalisation: str = setting("token", "What a token counts: see rl/losses.py.", ("token", "sequence", "constant"))
    max_importance: float = setting(2.0, "Cap of the detached weight pi_trainer / pi_rollout (paper: 2).", least=1.0)
    clip_low: float = setting(0.2, "Lower clip of the ratio to the old policy.", least=0.0)
    clip_high: float = setting(0.2, "Upper clip of that ratio (DAPO: 0.28).", least=0.0)
    updates_per_batch: int = setting(1, "Passes over a batch of completions.", least=1)
    minibatches: int = setting(1, "Updates that each pass is divided into.", least=1)
    micro_batch_tokens: int = setting(8192, "Padded tokens that go through the model at once.", least=1)
    share_prompts: bool = setting(
        True, "Read a prompt once for its completions in learning, where the model's attention allows it."
    )
    skip_equal_groups: bool = setting(True, "Leave out groups whose raw scores are all equal.")
    train_truncated: bool = setting(True, "Whether completions that the token limit cut are trained on.")
    negative_outcome: float | None = setting(
        None, "If given, a score is 1 at 1 or more and this below (paper: -0.01); none: scores as they are."
    )
    format_pattern: str | None = setting(None, "Regular expression that a well-formed completion matches somewhere.")
    format_reward: float = setting(0.1, "Added to the shaped score of a completion that matches format_pattern.")
    overlong_tokens: int = setting(
        0, "Last tokens before the limit over which the shaped score falls (DAPO: 4096 of 20480); 0: none.", least=0
    )
    overlong_penalty: float = setting(1.0, "How far it falls at the limit.", least=0.0)
    mismatch_band: float = setting(
        0.5, "Nats by which rollout and trainer log-probability of a token may differ.", least=0.0
    )
    mismatch_share: float = setting(
        0.2, "Share of tokens beyond that band at which the run ends, the batch unused.", least=0.0
    )
    reference_kl: float = setting(
        0.0, "Weight of the KL divergence from the model as it was at start; above 0 a copy of it is kept.", least=0.0
    )

    def __post_init__(self) -> None:
        check_section(self)
        if self.loss == "policy_gradient" and self.updates_per_batch * self.minibatches > 1:
            raise ValueError(
                f"loss 'policy_gradient' takes one update per batch, but updates_per_batch is {self.updates_per_batch} "
                f"and minibatches {self.minibatches}; choose loss 'clipped', 'sequence' or 'cispo', or set both to 1"
            )
        if self.format_pattern is not None:
            try:
                re.compile(self.format_pattern)
            except re.error as error:
                raise ValueError(f"format_pattern {self.format_pattern!r} is no regular expression: {error}") from error


@dataclass(frozen=True)
class MethodSettings:
    """The update rule."""

    name: str = setting("logra", "Update rule.", METHODS)
    logra: LograSettings = field(
        default_factory=lambda: LograSettings(rank=64, step_size="lr", lr=3e-5, max_norm=1.0),
        metadata={"help": "Settings of LograOptimizer, for method logra."},
    )
    lr: float = setting(3e-5, "Learning rate of adamw, lora and sgd (logra has its own, logra.lr).", least=0.0)
    betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's betas (paper's dense control).")
    weight_decay: float = setting(0.0, "Weight decay of adamw and lora.", least=0.0)
    max_norm: float = setting(1.0, "Gradient clip of adamw, lora and sgd.", least=0.0)
    lora_rank: int = setting(32, "Rank of LoRA's adapters.", least=1)
    lora_alpha: float = setting(64.0, "LoRA's alpha.")
    warmup_updates: int = setting(0, "Updates over which the step size rises from 0.", least=0)
    schedule: str = setting(
        "constant", "Step size after warm-up: constant, or cosine to a tenth.", ("constant", "cosine")
    )

    kl: KlSettings = field(default_factory=KlSettings, metadata={"help": "KL-controlled step sizes, for every method."})

    def __post_init__(self) -> None:
        check_section(self)


PRESETS: dict[str, dict[str, Any]] = {"paper": {"samples": 4, "temperature": 0.7, "top_p": 0.7}}


@dataclass(frozen=True)
class EvaluationSettings:
    """Held-out problems, before, during and after."""

    names: dict[str, float] = setting(
        {}, "Tasks of the evaluation with their shares; none: problems held out from the training tasks."
    )
    problems: int = setting(200, "Held-out problems.", least=1)
    every: int = setting(10, "Updates between evaluations; 0: only before and after.", least=0)
    preset: str = setting("none", "paper: 4 samples, temperature 0.7, top-p 0.7.", ("none", *PRESETS))
    samples: int = setting(1, "Completions per problem (paper: 4); pass@k for k up to this.", least=1)
    temperature: float = setting(0.0, "0: greedy (paper: 0.7).", least=0.0)
    top_p: float = setting(1.0, "Smallest set of this mass (paper: 0.7).")
    top_k: int = setting(0, "The k most probable ids; 0: all.", least=0)
    also_greedy: bool = setting(False, "Score one greedy completion of each problem as well.")
    stop_at: float | None = setting(None, "End the run once pass@1 reaches this.", least=0.0)
    patience: int = setting(0, "End the run after this many evaluations without a better pass@1; 0: never.", least=0)

    def __post_init__(self) -> None:
        check_section(self)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if any(not share > 0 for share in self.names.values()):
            raise ValueError(f"names is {self.names}; every share must be above 0")
        if self.preset != "none":
            self._take_preset()
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(f"samples is {self.samples}, but at temperature 0 they are all equal; use temperature 0.7")

    def _take_preset(self) -> None:
        plain = {spec.name: spec.default for spec in fields(self)}
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) not in (plain[name], value):
                raise ValueError(f"{name} is {getattr(self, name)}, but preset {self.preset!r} sets it to {value}")
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class RunSettings:
    """The run as a whole."""

    folder: str = setting("runs/latest", "Where everything of the run is written.")
    updates: int = setting(30, "Updates in all.", least=0)
    seed: int = setting(0, "Of problems, sampling, projections and rounding.")
    save_every: int = setting(
        20, "Updates between checkpoints that the run can go on from; 0: only the final model.", least=0
    )
    keep: int = setting(2, "Latest checkpoints kept; beside them, the best by evaluation.", least=1)
    overwrite: bool = setting(False, "Whether a folder that holds a run may be replaced.")
    probe_longest: bool = setting(
        False, "Try the largest micro-batch before the first update, so that a run that will not fit fails at once."
    )
    samples_logged: int = setting(
        8, "Samples of each update, and right and wrong ones of each evaluation, that go to samples.jsonl.", least=0
    )
    alarm_entropy: float = setting(0.02, "Alarm when entropy falls below this share of its first values.", least=0.0)
    alarm_gap: float = setting(
        0.5, "Alarm when the 95th percentile of the log-prob gap exceeds this, in nats.", least=0.0
    )
    stop_after_alarms: int = setting(0, "End the run after so many updates in a row with an alarm; 0: never.", least=0)
    trackers: list[str] = setting([], "Services that get the metrics too: tensorboard, wandb, trackio.")
    push_to_hub: str | None = setting(None, "Name of a hub repository that gets the final model, such as me/model.")

    def __post_init__(self) -> None:
        check_section(self)
        for name in self.trackers:
            check_allowed("trackers", name, ("tensorboard", "wandb", "trackio"))
        if self.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.push_to_hub):
            raise ValueError(f"push_to_hub is {self.push_to_hub!r}; it must be owner/name")


@dataclass(frozen=True)
class TrainSettings:
    """All sections of `logra train`."""

    model: ModelSettings = field(default_factory=ModelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    learning: LearningSettings = field(default_factory=LearningSettings)
    method: MethodSettings = field(default_factory=MethodSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    engines: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        self._check_engines()
        tasks = self.task.names | self.evaluation.names
        for field_name in ("sources", "knobs", "levels"):
            unused = sorted(set(getattr(self.task, field_name)) - set(tasks))
            if unused:
                raise ValueError(f"task.{field_name} names {unused}, which are not among the tasks {sorted(tasks)}")
        grouped = self.learning.advantage in ("group_mean", "group_normalised", "leave_one_out")
        if grouped and self.rollout.samples == 1:
            raise ValueError(
                f"advantage {self.learning.advantage!r} compares the samples of a prompt, but rollout.samples is 1; "
                f"use at least 2 samples, or advantage 'running_baseline'"
            )
        if self.rollout.samples == 1 and self.learning.skip_equal_groups:
            raise ValueError("skip_equal_groups would leave out every group of one sample; set it to false")
        if self.rollout.samples == 1 and self.rollout.refill:
            raise ValueError("refill replaces groups whose scores are all equal; it needs at least 2 rollout.samples")
        if self.learning.overlong_tokens > self.rollout.max_tokens:
            raise ValueError(
                f"overlong_tokens is {self.learning.overlong_tokens}, more than max_tokens {self.rollout.max_tokens}"
            )
        if self.rollout.prompts < self.learning.minibatches:
            raise ValueError(
                f"minibatches is {self.learning.minibatches}, more than the {self.rollout.prompts} prompts of an update"
            )

    def _check_engines(self) -> None:
        """Refuse what engines of their own cannot do."""
        if self.engines.kind == "inside":
            return
        method = self.method
        if method.name == "logra" and method.logra.dithered_copy:
            raise ValueError(
                "method.logra.dithered_copy computes with weights that no engine has; use storage 'split', or "
                "engines.kind 'inside'"
            )
        if method.name == "logra" and method.logra.storage in ("split", "bf16") and self.model.compute == "fp32":
            raise ValueError(
                f"method.logra.storage is {method.logra.storage!r}, which computes in bf16, but model.compute is "
                f"'fp32'; engines have one dtype: use storage fp32, or model.compute bf16"
            )
        if self.engines.max_lag and self.rollout.replay is not None:
            raise ValueError("engines.max_lag is for batches that are drawn, but rollout.replay draws none")


def as_plain(settings: Any) -> Any:
    """Settings as nested dictionaries of plain values, for files."""
    if hasattr(settings, "__dataclass_fields__"):
        return {spec.name: as_plain(getattr(settings, spec.name)) for spec in fields(settings)}
    if isinstance(settings, Mapping):
        return {str(key): as_plain(value) for key, value in settings.items()}
    if isinstance(settings, (list, tuple)):
        return [as_plain(value) for value in settings]
    return settings
