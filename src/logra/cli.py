# SPDX-License-Identifier: Apache-2.0
"""The command line: `logra train`, `eval`, `plan`, `engine`, `report`, `tasks`, `convert`."""

import json
import os
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from logra.run_settings import TrainSettings, as_plain
from logra.scale_settings import EngineSettings

MAY_CHANGE = {f"run.{name}" for name in ("folder", "updates", "save_every", "keep", "overwrite", "trackers")}
MAY_CHANGE |= {
    f"run.{name}" for name in ("samples_logged", "alarm_entropy", "alarm_gap", "stop_after_alarms", "push_to_hub")
}
MAY_CHANGE |= {"parallel.shard", "parallel.timeout"}
MAY_CHANGE |= {f"engines.{each.name}" for each in fields(EngineSettings)}
MAY_CHANGE |= {"learning.mismatch_band", "learning.mismatch_share"}
MAY_CHANGE |= {f"evaluation.{name}" for name in ("every", "stop_at", "patience")}
COMMANDS = {
    "train": "Train a model from rewarded answers.",
    "eval": "Score a model on held-out problems, with the sections model, task, rollout and evaluation.",
    "engine": "Run one rollout engine, which trainers reach over a socket (sections model, rollout and engines).",
    "plan": "Say how much memory a run needs, by cause and method, from the model's configuration alone.",
}


def make_parser() -> ArgumentParser:
    """All commands with all their settings; every default, YAML file and override goes through the same checks."""
    parser = ArgumentParser(
        prog="logra", description="Reinforcement-learning post-training with low-rank gradient sketches."
    )
    commands = parser.add_subcommands()
    for name, what in COMMANDS.items():
        command = ArgumentParser(description=what)
        command.add_argument("--config", action="config", help="YAML file with any of the settings below.")
        command.add_class_arguments(TrainSettings)
        _add_help(command, TrainSettings, "")
        if name == "train":
            command.add_argument("--resume", metavar="RUN", help="Go on with the run in this folder.")
            command.add_argument("--processes", type=int, default=1, help="Run in so many processes on this machine.")
            command.add_argument("--ray", action="store_true", help="Let Ray place trainer processes and engines.")
        if name == "plan":
            _add_plan_arguments(command)
        if name == "engine":
            command.add_argument("--listen", default="127.0.0.1:8200", help="HOST:PORT; port 0 takes a free one.")
            command.add_argument("--announce", help="File that gets HOST:PORT once the engine listens.")
            command.add_argument("--with-parent", type=int, default=0, help="End with the process of this number.")
        commands.add_subcommand(name, command, help=what)
    tasks = ArgumentParser(description="Show each generated task with an example: prompt, answer, and what scores.")
    commands.add_subcommand("tasks", tasks, help="show the generated tasks")
    report = ArgumentParser(description="Write one HTML file that shows what runs did; several overlay by method.")
    report.add_argument("runs", nargs="+", help="folders of runs")
    report.add_argument("-o", "--output", default="report.html", help="the file")
    commands.add_subcommand("report", report, help="write an HTML report of runs")
    convert = ArgumentParser(description="Make a Hugging Face folder from a GGUF file, in bf16.")
    convert.add_argument("file", help="the .gguf file")
    convert.add_argument("folder", help="where to write; must not hold anything")
    commands.add_subcommand("convert", convert, help="make a Hugging Face folder from a GGUF file")
    return parser


def _add_plan_arguments(command: ArgumentParser) -> None:
    command.add_argument("--gpus", type=int, default=1, help="Devices that share the training.")
    command.add_argument("--gpu-memory", type=float, help="GiB of each; default: what is free on this machine.")
    command.add_argument("--prompt-tokens", type=int, default=512, help="Tokens of the longest prompt.")
    command.add_argument("--json", action="store_true", help="Print JSON instead of a table.")


def _add_help(parser: ArgumentParser, section: Any, prefix: str) -> None:
    """Each setting's line of help is that of its field."""
    actions = {action.dest: action for action in parser._actions}
    hints = get_type_hints(section)
    for spec in fields(section):
        kind, name = hints[spec.name], f"{prefix}{spec.name}"
        if is_dataclass(kind):
            _add_help(parser, kind, f"{name}.")
        elif name in actions and spec.metadata.get("help"):
            allowed = spec.metadata.get("allowed")
            choices = f" One of: {', '.join(map(str, allowed))}." if allowed else ""
            actions[name].help = spec.metadata["help"].replace("%", "%%") + choices


def main(arguments: list[str] | None = None) -> int:
    """Run one command; 0 if all that was asked was done."""
    parser = make_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given else None
    try:
        parsed = parser.parse_args(_with_settings_of_the_run(_with_model_by_name(given)))
        command = parsed.subcommand
        built = parser.instantiate(parsed)
        if command == "train" and built[command].ray:
            return _launched_by_ray(built[command], given)
        if command == "train" and built[command].processes != 1 and "WORLD_SIZE" not in os.environ:
            return _launched(built[command].processes, given)
        return RUN[command](built[command])
    except (ValueError, ImportError, OSError) as error:
        if getattr(error, "said_elsewhere", False):
            return 2
        place = os.environ.get("RANK", "0")
        sys.stderr.write(f"logra {command}{'' if place == '0' else f' (process {place})'}: {error}\n")
        return 2


def _with_model_by_name(given: list[str]) -> list[str]:
    """`plan --model NAME` means `--model.name NAME`."""
    if not given or given[0] != "plan":
        return given
    return [re.sub(r"^--model(?==|$)", "--model.name", each) for each in given]


def _settings(built: Namespace) -> TrainSettings:
    return TrainSettings(**{spec.name: built[spec.name] for spec in fields(TrainSettings)})


def _with_settings_of_the_run(given: list[str]) -> list[str]:
    """`train --resume RUN ...` reads RUN's settings first; what follows on the command line changes them."""
    if not given or given[0] != "train":
        return given
    place = next((i for i, each in enumerate(given) if each == "--resume" or each.startswith("--resume=")), None)
    if place is None:
        return given
    folder = given[place].partition("=")[2] or (given[place + 1] if place + 1 < len(given) else "")
    settings = Path(folder) / "settings.json"
    if not settings.is_file():
        raise ValueError(f"--resume {folder}: there is no run in that folder (no {settings})")
    return [given[0], "--config", str(settings), *given[1:], "--run.folder", folder]


def _train(built: Namespace) -> int:
    settings = _settings(built)
    from logra.train_command import train

    if built.resume is not None:
        _check_same_run(settings, Path(built.resume) / "settings.json")
    return train(settings, resume=built.resume is not None)


def _launched(count: int, given: list[str]) -> int:
    if count < 1:
        raise ValueError(f"processes is {count}; it must be at least 1")
    from logra.parallel.launch import launch

    return launch(count, given)


def _launched_by_ray(built: Namespace, given: list[str]) -> int:
    if built.processes < 1:
        raise ValueError(f"processes is {built.processes}; it must be at least 1")
    try:
        from logra.engines.ray_workers import launch_by_ray
    except ImportError as error:
        raise ValueError(f"--ray needs Ray, which cannot be imported ({error}); install logra[ray]") from error
    arguments = [each for each in given if each != "--ray"] + ["--engines.placement", "ray"]
    return launch_by_ray(built.processes, arguments, _settings(built))


def _check_same_run(settings: TrainSettings, saved: Path) -> None:
    """A run that goes on may be longer or be watched differently; what it learns from stays."""
    before, now = json.loads(saved.read_text()), json.loads(json.dumps(as_plain(settings)))
    changed = [
        f"{section}.{name}"
        for section, values in now.items()
        for name, value in values.items()
        if before.get(section, {}).get(name, value) != value and f"{section}.{name}" not in MAY_CHANGE
    ]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} cannot change when a run goes on; those that can are {', '.join(sorted(MAY_CHANGE))}"
        )


def _eval(built: Namespace) -> int:
    settings = _settings(built)
    from logra.train_command import evaluate

    return evaluate(settings)


def _plan(built: Namespace) -> int:
    settings = _settings(built)
    if built.gpus < 1 or built.prompt_tokens < 1 or (built.gpu_memory is not None and built.gpu_memory <= 0):
        raise ValueError(
            f"gpus is {built.gpus}, prompt-tokens {built.prompt_tokens}, gpu-memory {built.gpu_memory}; each must be "
            f"above 0"
        )
    from logra.plan_command import plan

    return plan(settings, built.gpus, built.gpu_memory, built.prompt_tokens, built.json)


def _engine(built: Namespace) -> int:
    settings = _settings(built)
    from logra.engines.serve_command import serve_engine

    return serve_engine(settings, built.listen, built.announce, built.with_parent)


def _report(built: Namespace) -> int:
    from logra.report.page import write_report
    from logra.report.runs import read_run

    path = write_report([read_run(Path(folder)) for folder in built.runs], Path(built.output))
    sys.stdout.write(f"report: {path} ({path.stat().st_size / 1e6:.2f} MB)\n")
    return 0


def _convert(built: Namespace) -> int:
    from logra.convert import convert_gguf

    sys.stdout.write(f"written to {convert_gguf(Path(built.file), Path(built.folder))}\n")
    return 0


def _tasks(_: Namespace) -> int:
    from logra.tasks.generated import PLAIN, SCORERS, generated_task
    from logra.tasks.known_sets import KNOWN_SETS
    from logra.tasks.task import Completion

    for name in (*PLAIN, *SCORERS):
        task = generated_task(name, 0)
        problem = task.problem(0)
        (gold,) = task.grade([problem], [Completion(problem.answer)])
        sys.stdout.write(f"{name}\n  prompt: {problem.prompt}\n  answer: {problem.answer}  (scores {gold.score})\n\n")
    sys.stdout.write("known sets, from the hub or, with task.sources: {NAME: {path: FILE}}, from a file:\n")
    for name, source in KNOWN_SETS.items():
        sys.stdout.write(f"  {name}: {source['path']}, split {source['split']}, rewards {source['rewards']}\n")
    return 0


RUN = {
    "train": _train,
    "eval": _eval,
    "plan": _plan,
    "engine": _engine,
    "tasks": _tasks,
    "report": _report,
    "convert": _convert,
}
