"""Commands and files of README and docs are what they say: each `logra` command is run, each name exists."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from logra.alarms import ALARMS
from logra.cli import main, make_parser
from logra.metrics import METRICS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = [
    "--rollout.prompts", "2", "--rollout.samples", "2", "--rollout.max_tokens", "4", "--evaluation.problems", "2",
    "--run.updates", "2",
]  # fmt: skip


def plain_blocks(text: str) -> list[str]:
    """Lines of the code blocks that name no language."""
    lines: list[str] = []
    inside: str | None = None
    for line in text.splitlines():
        if line.startswith("```"):
            inside = line[3:] if inside is None else None
        elif inside == "":
            lines.append(line)
    return lines


def commands(path: Path) -> list[list[str]]:
    """`logra` commands of the code blocks, comments left out, in order."""
    lines = plain_blocks(path.read_text())
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("logra ")]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes, and with the files that README shows under the names it gives them."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"`([\w.]+)`[^`]*:\n\n```(?:json|python|yaml)\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in shown] == ["rows.jsonl", "my_reward.py", "mine.yaml"]
    for name, content in shown:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_run_as_they_are_written_on_small_numbers(workplace: Path, capsys: Any) -> None:
    """README first, then docs/training.md, in one folder, as a reader would."""
    done: list[str] = []
    for path in (ROOT / "README.md", ROOT / "docs" / "training.md"):
        for arguments in commands(path):
            if "--help" in arguments or "--print_config" in arguments:
                with pytest.raises(SystemExit) as stop:
                    main(arguments)
                assert stop.value.code == 0
            elif arguments[0] == "train" and "--resume" in arguments:
                assert main([*arguments, "--run.updates", "3"]) == 0
            else:
                assert main([*arguments, *(SMALL if arguments[0] in ("train", "eval") else [])]) == 0, arguments
            done.append(arguments[0])
    assert {"train", "eval", "plan", "tasks", "report"} <= set(done)
    assert (workplace / "both.html").exists()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_names_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    parser = make_parser()
    for arguments in commands(path):
        if not {"--config", "--resume", "--help", "plan"} & set(arguments):
            parser.parse_args(arguments)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    for script in re.findall(r"python (scripts/\w+\.py|examples/\w+\.py)", text):
        assert (ROOT / script).exists(), script
    for section, name in re.findall(r"`(model|task|rollout|learning|evaluation|run)\.(\w+)", text):
        if section != "model" or path.name != "optimizer.md":  # there, `model` is the user's
            assert hasattr(_defaults(section), name), f"{section}.{name}"


def _defaults(section: str) -> Any:
    from logra.run_settings import TrainSettings

    return getattr(TrainSettings(), section)


def test_the_reference_is_complete() -> None:
    from dataclasses import fields

    from logra.config import KlSettings
    from logra.run_settings import TrainSettings

    text = (ROOT / "docs" / "reference.md").read_text()
    for section in fields(TrainSettings):
        for spec in fields(getattr(TrainSettings(), section.name)):
            names = [f"kl.{each.name}" for each in fields(KlSettings)] if spec.name == "kl" else [spec.name]
            for name in names:
                assert f"| `{name}` |" in text, f"{section.name}.{name}"
    for name in (*METRICS, *ALARMS):
        assert f"| `{name}` |" in text, name


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = " ".join(path.read_text() for path in (ROOT / "src" / "logra").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    for message in re.findall(r"^\| `(.*?)` \|", text, re.MULTILINE)[0:]:
        for part in re.split(r"\.\.\.|\b[NM]\b", message):
            words = part.replace("(first of", "first of").strip()
            assert words in source, message
