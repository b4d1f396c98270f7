# SPDX-License-Identifier: Apache-2.0
"""The page: result first, then what was run, curves, and samples with a search; one file that loads nothing.

Everything that a model or a user wrote is escaped, and a content security policy lets no script run but the page's own.
"""

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logra.alarms import ALARMS
from logra.report.plots import CURVES, by_method, draw_calibration, draw_curve, draw_memory, draw_seconds
from logra.report.runs import Run, changed_settings
from logra.tasks.verdict import OUTCOMES

MAX_SAMPLES, MAX_CHARACTERS = 400, 4000
_HERE = Path(__file__).parent


def write_report(runs: Sequence[Run], path: Path) -> Path:
    """Write the page of some runs; several of one method are shown as their mean and band."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(page(runs))
    temporary.replace(path)
    return path


def page(runs: Sequence[Run]) -> str:
    """The whole page as text."""
    script, style = (_HERE / "report.js").read_text(), (_HERE / "report.css").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    title = _text(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    plots = [draw_curve(curve, runs) for curve in CURVES]
    plots += [draw_calibration(runs), draw_seconds(runs), draw_memory(runs)]
    figures = "\n".join(f"<figure>{_own_ids(svg, place)}</figure>" for place, svg in enumerate(plots) if svg)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>LoGRA: {title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{_results(runs)}
{_alarms(runs)}
<h2>Curves</h2>
<div class="plots">{figures}</div>
<h2>Samples</h2>
{_samples(runs)}
<h2>What was run</h2>
{_settings(runs)}
</main>
<script>{script}</script>
</body>
</html>
"""


def _text(value: Any) -> str:
    return html.escape(str(value))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _results(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        before, after, best = run.scores()
        gain = "-" if before is None or after is None else f"{after - before:+.3f}"
        cells = [
            _share(before),
            _share(after),
            gain,
            _share(best),
            str(len(run.updates)),
            f"{run.seconds() / 60:.1f} min",
        ]
        cells.append(_outcomes(run))
        row = f"<td>{_text(run.name)}</td><td>{_text(run.method)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr>{row}</tr>")
    for method, group in by_method(runs).items():
        if len(group) > 1:
            rows.append(_mean_row(method, group))
    headline = "".join(_headline(method, group) for method, group in by_method(runs).items())
    names = ("run", "method", "pass@1 before", "after", "gain", "best", "updates", "time", "graded training samples")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'{headline}<div class="wide"><table class="results"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _headline(method: str, group: Sequence[Run]) -> str:
    """One line for a method: what its runs reached on held-out problems."""
    scores = [run.scores() for run in group]
    pairs = [(before, after) for before, after, _ in scores if before is not None and after is not None]
    if not pairs:
        return f'<p class="headline"><b>{_text(method)}</b> no evaluation after an update yet</p>'
    before, after = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    of = "" if len(pairs) == 1 else f" (mean of {len(pairs)})"
    return f'<p class="headline"><b>{_text(method)}</b> pass@1 {before:.3f} \u2192 {after:.3f}{of}</p>'


def _mean_row(method: str, group: Sequence[Run]) -> str:
    columns = list(zip(*(run.scores() for run in group), strict=True))
    means = [
        sum(value for value in column if value is not None) / len(column) if None not in column else None
        for column in columns
    ]
    before, after, best = means
    gain = "-" if before is None or after is None else f"{after - before:+.3f}"
    cells = [f"mean of {len(group)}", _text(method), _share(before), _share(after), gain, _share(best), "", "", ""]
    return '<tr class="mean">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _outcomes(run: Run) -> str:
    counts: Counter[str] = Counter()
    for line in run.updates:
        counts.update(line.get("outcomes", {}))
    return ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in OUTCOMES if counts[name]) or "-"


def _alarms(runs: Sequence[Run]) -> str:
    items = []
    for name, meaning in ALARMS.items():
        where = []
        for run in runs:
            updates = [line["update"] for line in run.updates if name in line.get("alarms", [])]
            if updates:
                when = f"update {updates[0]}" if len(updates) == 1 else f"{len(updates)} updates, first {updates[0]}"
                where.append(f"{_text(run.name)} ({when})")
        if where:
            items.append(f"<li><b>{_text(name)}</b>: {', '.join(where)}. Meaning: {_text(meaning)}.</li>")
    if not items:
        return ""
    return f'<details class="alarms"><summary>Alarms: {len(items)} kinds</summary><ul>{"".join(items)}</ul></details>'


def _samples(runs: Sequence[Run]) -> str:
    rows, left_out = [], 0
    for run in runs:
        kept = run.samples[-MAX_SAMPLES:]
        left_out += len(run.samples) - len(kept)
        # Latest updates first; within one, as logged: training samples, then right and wrong ones of the evaluation.
        rows += [_sample_row(run, sample) for sample in sorted(kept, key=lambda sample: -sample["update"])]
    if not rows:
        return "<p>No samples were logged (run.samples_logged).</p>"
    note = f"<p>The latest {len(rows)} samples; {left_out} earlier ones are in samples.jsonl.</p>" if left_out else ""
    names = ("run", "update", "phase", "task", "verdict", "prompt", "completion", "answer")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"""{note}
<div class="search">
<input id="search" type="search" placeholder="search prompts, completions, answers" aria-label="search samples">
<select id="verdict" aria-label="verdict"><option value="">all</option><option>right</option><option>wrong</option>
<option>ungraded</option></select>
<output id="count">{len(rows)} samples</output>
</div>
<div class="wide"><table id="samples"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>"""


def _sample_row(run: Run, sample: dict[str, Any]) -> str:
    score = sample["score"]
    verdict = "ungraded" if score is None else "right" if score >= 1 else "wrong"
    shown = verdict if score is None or score in (0, 1) else f"{verdict} ({score:g})"
    prompt = sample["prompt"] if isinstance(sample["prompt"], str) else json.dumps(sample["prompt"], ensure_ascii=False)
    texts = [
        f"<td><pre>{_text(_shortened(text))}</pre></td>" for text in (prompt, sample["completion"], sample["answer"])
    ]
    cells = [run.name, sample["update"], sample["phase"], sample["task"], shown]
    return f'<tr data-verdict="{verdict}">{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}{"".join(texts)}</tr>'


def _shortened(text: str) -> str:
    half, more = MAX_CHARACTERS // 2, len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:half]}\n[{more} characters left out]\n{text[-half:]}"


def _settings(runs: Sequence[Run]) -> str:
    changed = [changed_settings(run.settings) for run in runs]
    names = sorted({name for each in changed for name in each})
    head = "".join(f"<th>{_text(run.name)}</th>" for run in runs)
    rows = [
        f"<tr><td>{_text(name)}</td>"
        + "".join(f"<td>{_text(json.dumps(each[name]) if name in each else 'default')}</td>" for each in changed)
        + "</tr>"
        for name in names
    ]
    versions = ", ".join(f"{_text(name)} {_text(number)}" for name, number in runs[0].versions.items() if number)
    return (
        f"<p>Settings that differ from their defaults; {versions}.</p>"
        f'<div class="wide"><table><tr><th>setting</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _own_ids(svg: str, place: int) -> str:
    """Make the ids of a drawing differ from those of the others, and let its width follow the page."""
    svg = re.sub(r'\bid="', f'id="p{place}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>p{place}-", svg)
    for name in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {name}="[^"]*"', r"\1", svg, count=1)
    return svg
