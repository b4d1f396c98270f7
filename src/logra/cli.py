# SPDX-License-Identifier: Apache-2.0
"""The command line: `logra train`, `logra eval`, `logra tasks`, `logra convert`."""

import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from logra.run_settings import TrainSettings

COMMANDS = {
    "train": "Train a model from rewarded answers.",
    "eval": "Score a model on held-out problems, with the sections model, task, rollout and evaluation.",
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
        commands.add_subcommand(name, command, help=what)
    tasks = ArgumentParser(description="Show each generated task with an example: prompt, answer, and what scores.")
    commands.add_subcommand("tasks", tasks, help="show the generated tasks")
    convert = ArgumentParser(description="Make a Hugging Face folder from a GGUF file, in bf16.")
    convert.add_argument("file", help="the .gguf file")
    convert.add_argument("folder", help="where to write; must not hold anything")
    commands.add_subcommand("convert", convert, help="make a Hugging Face folder from a GGUF file")
    return parser


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
    parsed = parser.parse_args(arguments)
    command = parsed.subcommand
    try:
        built = parser.instantiate(parsed)
        return {"train": _train, "eval": _eval, "tasks": _tasks, "convert": _convert}[command](built[command])
    except (ValueError, ImportError) as error:
        sys.stderr.write(f"logra {command}: {error}\n")
        return 2


def _settings(built: Namespace) -> TrainSettings:
    return TrainSettings(**{spec.name: built[spec.name] for spec in fields(TrainSettings)})


def _train(built: Namespace) -> int:
    settings = _settings(built)
    from logra.train_command import train

    return train(settings)


def _eval(built: Namespace) -> int:
    settings = _settings(built)
    from logra.train_command import evaluate

    return evaluate(settings)


def _convert(built: Namespace) -> int:
    from logra.convert import convert_gguf

    sys.stdout.write(f"written to {convert_gguf(Path(built.file), Path(built.folder))}\n")
    return 0


def _tasks(_: Namespace) -> int:
    from logra.tasks.generated import PLAIN, SCORERS, generated_task
    from logra.tasks.known_sets import KNOWN_SETS

    for name in (*PLAIN, *SCORERS):
        task = generated_task(name, 0)
        problem = task.problem(0)
        (gold,) = task.score([problem], [problem.answer])
        sys.stdout.write(f"{name}\n  prompt: {problem.prompt}\n  answer: {problem.answer}  (scores {gold})\n\n")
    sys.stdout.write("known sets, from the hub or, with task.sources: {NAME: {path: FILE}}, from a file:\n")
    for name, source in KNOWN_SETS.items():
        sys.stdout.write(f"  {name}: {source['path']}, split {source['split']}, rewards {source['rewards']}\n")
    return 0
