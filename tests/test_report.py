"""The report: what it says, that nothing a model wrote can act in it, and that it asks nobody for anything."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from logra.cli import main
from logra.report.page import page
from logra.report.plots import CURVES, draw_calibration, draw_curve, mean_and_band
from logra.report.runs import Run, changed_settings, read_run
from logra.run_settings import TrainSettings, as_plain
from tests.test_training import QUICK

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)></pre></table>&amp;\u202e\x00"


def made_up(method: str, seed: int, name: str = "") -> Run:
    """A run with known numbers; `seed` shifts them."""
    settings = as_plain(TrainSettings())
    settings["method"]["name"] = method
    updates: list[dict[str, Any]] = [
        {
            "update": update,
            "reward": 0.1 * update + seed,
            "entropy": None if update == 2 else 1.0,
            "length": 3.0,
            "truncated": 0.0,
            "seconds": {"rollout": 1.0, "reward": 0.5, "learning": 2.5},
            "memory": {"learning": {"peak_bytes": 2 << 30, "average_bytes": 1 << 30}},
            "outcomes": {"right": 3, "wrong": 4, "unparseable": 0, "timed_out": 1, "crashed": 0, "no_verdict": 0},
        }
        for update in (1, 2, 3)
    ]
    updates[2]["alarms"] = ["all_truncated"]
    evaluations: list[dict[str, Any]] = [
        {"update": update, "evaluation": {"pass@1": score + 0.1 * seed}, "seconds": {"evaluation": 1.0}}
        for update, score in ((0, 0.25), (2, 0.75), (3, 0.5))
    ]
    samples = [
        {
            "update": 3, "phase": "training", "task": "sums", "problem": "sums-1", "prompt": "1+1=", "answer": "2",
            "completion": HOSTILE, "score": score, "shaped": score, "tokens": 3, "truncated": False,
        }
        for score in (0.0, 1.0, None)
    ]  # fmt: skip
    return Run(name or f"{method}-{seed}", settings, {"torch": "2.13.0"}, updates, evaluations, samples)


class Reader(HTMLParser):
    """All tags and attributes, and the text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_the_result_comes_first_and_numbers_are_those_of_the_run() -> None:
    shown = read(page([made_up("logra", 0)])).text
    assert shown.index("pass@1 before") < shown.index("Curves") < shown.index("What was run")
    for words in ("0.250", "0.500", "+0.250", "0.750", "9 right, 12 wrong, 3 timed out", "0.2 min", "all_truncated"):
        assert words in shown
    assert "95th percentile of the log-prob gap" not in shown  # a curve without points is left out


def test_what_a_model_wrote_is_text_and_nothing_else() -> None:
    name = "<b>run</b>"
    runs = [made_up("logra", 0, name), made_up("</style><script>alert(2)</script>", 0)]
    text = page(runs)
    reader = read(text)
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert "b" not in [tag for tag in reader.tags if tag == "b" and name in text]
    assert not [key for key, _ in reader.attributes if key.startswith("on")]
    assert "alert('x')" in reader.text
    policy = next(value for key, value in reader.attributes if key == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_nothing_is_asked_of_the_network() -> None:
    reader = read(page([made_up("logra", 0), made_up("adamw", 1)]))
    places = [
        (key, value) for key, value in reader.attributes if key in ("src", "href", "xlink:href", "action", "data")
    ]
    assert all(value is not None and value.startswith("#") for _, value in places), places
    style = (Path(__file__).parent.parent / "src/logra/report/report.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_ids_of_drawings_are_unique_and_references_lead_somewhere() -> None:
    text = page([made_up("logra", 0), made_up("logra", 1), made_up("lora", 0)])
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", text)) <= set(ids)


def test_several_runs_of_a_method_are_their_mean_and_band() -> None:
    curves = [[(0, 1.0), (2, 3.0), (4, 5.0)], [(0, 2.0), (2, 5.0)]]
    assert mean_and_band(curves) == [(0, 1.5, 1.0, 2.0), (2, 4.0, 3.0, 5.0)]
    runs = [made_up("logra", 0), made_up("logra", 1), made_up("adamw", 0)]
    svg = draw_curve(CURVES[0], runs)
    assert svg is not None
    assert "logra, mean of 2" in svg
    assert ">adamw<" in svg
    shown = read(page(runs)).text
    assert "mean of 2logra0.3000.550+0.250" in shown
    assert "logra pass@1 0.300 \u2192 0.550 (mean of 2)" in shown
    assert draw_curve(CURVES[2], runs) is None
    assert draw_calibration(runs) is None


def test_budget_and_calibration_of_controlled_runs() -> None:
    run = made_up("logra", 0)
    for line in run.updates:
        line |= {"predicted_kl_of_step": 1e-4, "realised_kl": 1.1e-4, "kl_budget_effective": 2e-4, "alpha": 0.5}
    svg = draw_curve(CURVES[2], [run])
    assert svg is not None
    assert "budget" in svg
    assert "predicted and realised" in (draw_calibration([run]) or "")
    assert "what proposed steps were multiplied by" in page([run])


def test_only_settings_that_differ_are_listed() -> None:
    settings = as_plain(TrainSettings())
    assert changed_settings(settings) == {}
    settings["method"]["logra"]["rank"] = 7
    settings["task"]["names"] = {"gcd": 1.0}
    assert changed_settings(settings) == {"method.logra.rank": 7, "task.names": {"gcd": 1.0}}


def test_a_real_run_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", *QUICK, "--run.folder", str(folder)]) == 0
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "rew')  # cut short by a kill
    target = tmp_path / "deep" / "report.html"
    capsys.readouterr()
    assert main(["report", str(folder), str(folder), "-o", str(target)]) == 0
    assert f"report: {target}" in capsys.readouterr().out
    reader = read(target.read_text())
    assert reader.tags.count("svg") >= 7
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-2])
    assert f"{last['evaluation']['pass@1']:.3f}" in reader.text
    assert main(["report", str(tmp_path), "-o", str(target)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_an_empty_run_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(as_plain(TrainSettings())))
    assert "No samples were logged" in page([read_run(tmp_path)])
