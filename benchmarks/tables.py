# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md and docs/ from benchmarks/results/*.json and the settings themselves.

python -m benchmarks.tables           # write
python -m benchmarks.tables --check   # only say whether they are up to date
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from logra.alarms import ALARMS
from logra.config import DEFAULT_TARGETS, KlSettings, LograSettings
from logra.metrics import METRICS
from logra.run_settings import TrainSettings, as_plain

ROOT = Path(__file__).parent.parent


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def measured() -> str:
    """The README's table: ratios, each with its command."""
    time, memory = result("update_time"), result("state_memory")
    shape = time["settings"]
    lines = [
        f"One training update (forward, backward, step) of {shape['layers']} blocks of width {shape['hidden']} "
        f"(a 7B Llama's) at rank {shape['rank']}, {shape['sequences'] * shape['length']:,} tokens, fp32 weights, "
        f"{time['threads']} threads of {time['cpu']} (`{time['command']}`):",
        "",
        "| compute | AdamW | LoRA | LoGRA | LoGRA / AdamW | LoGRA / LoRA |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key, dtype in (("bf16", "bf16 autocast"), ("fp32", "fp32")):
        seconds = {row["method"]: row["total"]["median"] for row in time["rows"] if row["dtype"] == dtype}
        ratios = [time["ratios"][f"logra_over_{other}_{key}"] for other in ("adamw", "lora")]
        cells = [f"{seconds[method]:.2f} s" for method in ("adamw", "lora", "logra")] + [f"{r:.3f}" for r in ratios]
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Weights, gradients and optimizer state of the selected weights at in_features / rank = 14, and the measured "
        f"peak of a whole update (`{memory['command']}`):",
        "",
        "| method | weights | gradients or sketches | state | sum | over AdamW fp32 | measured peak |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = memory["rows"][0]["total"]
    for row in memory["rows"]:
        cells = [f"{row[key] / 2**20:,.1f}" for key in ("weights", "gradients", "state", "total")]
        name = (
            row["method"].replace("_", " ").replace("adamw", "AdamW").replace("lora", "LoRA").replace("logra", "LoGRA")
        )
        lines.append(
            f"| {name} | {' | '.join(cells)} | {row['total'] / base:.3f} | {row['measured_peak'] / 2**20:,.1f} |"
        )
    lines += ["", "(MiB; LoRA's weights and gradients include its adapters.)", ""]
    sync = result("sync")
    ratios = sync["ratios"]
    lines.append(
        f"Sending a step to vLLM at in_features / rank of 9 and more, 8-bit factors (`{sync['command']}`): "
        f"{ratios['bytes_over_full']:.3f} of the bytes of whole bf16 weights, {ratios['bytes_over_patch']:.2f} of a "
        f"lossless sparse patch at most, and {ratios['seconds_over_full']:.2f} of the seconds until the engine has "
        f"answered with the same digest."
    )
    return "\n".join(lines)


def settings() -> str:
    """The reference of `LograSettings`."""
    lines = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for spec in fields(LograSettings):
        default = ", ".join(DEFAULT_TARGETS) if spec.name == "targets" else repr(spec.default)
        allowed = spec.metadata["allowed"]
        choices = f" One of {', '.join(f'`{choice}`' for choice in allowed)}." if allowed else ""
        lines.append(f"| `{spec.name}` | `{default}` | {spec.metadata['help']}{choices} |")
    return "\n".join(lines)


def all_settings() -> str:
    """Every section of `logra train`, with the optimizer's settings under method.logra."""
    lines: list[str] = []
    for section in fields(TrainSettings):
        lines += [f"### {section.name}", "", "| setting | default | meaning |", "| --- | --- | --- |"]
        for spec in fields(getattr(TrainSettings(), section.name)):
            value = getattr(getattr(TrainSettings(), section.name), spec.name)
            if isinstance(value, KlSettings):
                lines += [_row(f"{spec.name}.{each.name}", getattr(value, each.name), each) for each in fields(value)]
                continue
            if isinstance(value, LograSettings):
                lines.append(f"| `{spec.name}` | see [optimizer.md](optimizer.md) | {spec.metadata['help']} |")
                continue
            lines.append(_row(spec.name, value, spec))
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(name: str, value: Any, spec: Any) -> str:
    allowed = spec.metadata.get("allowed")
    choices = f" One of {', '.join(f'`{choice}`' for choice in allowed)}." if allowed else ""
    return f"| `{name}` | `{json.dumps(as_plain(value))}` | {spec.metadata['help']}{choices} |"


def metrics() -> str:
    """Every number of metrics.jsonl."""
    rows = [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    return "\n".join(["| name | unit | meaning |", "| --- | --- | --- |", *rows])


def alarms() -> str:
    """Every alarm and what to do."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in ALARMS.items()]
    return "\n".join(["| name | meaning |", "| --- | --- |", *rows])


def first_run() -> str:
    """The main job on SmolLM2, method by method."""
    found = result("smollm2_first_run")
    lines = [
        f"`{found['command'].split(' --cells')[0]}`: 40 updates of 128 samples, one-digit sums and products, 200 "
        f"held-out problems, one seed. Seconds of an update with every group trained on, the methods taking turns in "
        f"one process, medians; resident memory while learning, each method in a process of its own. "
        f"Same: whether the saved model gives the last log-probabilities and score.",
        "",
        "| method | greedy before | after | sampled before | after | rollout | learning | peak | average | same |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        scores = [f"{row[key]:.3f}" for key in ("greedy_before", "greedy_after", "sampled_before", "sampled_after")]
        turns = found["seconds_in_turn"].get(row["method"], {})
        seconds = [f"{turns[phase]['median']:.1f} s" if turns else "-" for phase in ("rollout", "learning")]
        memory = row.get("training_memory", {})
        held = [f"{memory[key] / 2**30:.2f} GiB" if memory else "-" for key in ("peak_bytes", "average_bytes")]
        checked = row["checkpoint"]
        same = checked["largest_logprob_difference"] == 0 and checked["loaded_score"] == checked["trainer_score"]
        lines.append(f"| {row['method']} | {' | '.join(scores + seconds + held)} | {'yes' if same else 'no'} |")
    return "\n".join(lines)


def beside_trl() -> str:
    """Whole updates of four trainers in turn."""
    found = result("rl_update")
    tried = ", ".join(f"{way} {seconds:.1f} s" for way, seconds in found["settings"]["trl_ways_tried"].items())
    lines = [
        f"`{found['command']}`: 64 samples of at most 16 tokens on SmolLM2-135M, {found['threads']} threads of "
        f"{found['cpu']}. TRL {found['settings']['trl']}, best step of each way tried: {tried}.",
        "",
        "| trainer | whole update | over TRL | rollout | learning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        name = f"TRL, {found['settings']['trl_way']}" if row["method"] == "trl" else row["method"]
        ratio = found["ratios"].get(f"{row['method']}_over_trl", 1.0)
        phases = [f"{row[phase]['median']:.2f} s" if phase in row else "-" for phase in ("rollout", "learning")]
        lines.append(f"| {name} | {row['total']['median']:.2f} s | {ratio:.2f} | {' | '.join(phases)} |")
    return "\n".join(lines)


def cards() -> str:
    """Planned peak of training on one card, and the smallest card that has it."""
    found = result("plan_cards")
    settings = found["settings"]
    ways = list(dict.fromkeys(row["way"] for row in found["rows"]))
    lines = [
        f"`{found['command']}`: planned peak of training in GiB on one card, and the smallest card of "
        f"{', '.join(map(str, settings['cards_gb']))} GB that has it. One micro-batch of {settings['tokens']:,} "
        f"tokens, activation checkpointing, bf16 compute, rank {settings['rank']} for LoGRA and LoRA; no rollout.",
        "",
        f"| model | {' | '.join(ways)} |",
        f"| --- |{' --- |' * len(ways)}",
    ]
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        cells = []
        for way in ways:
            row = next(row for row in found["rows"] if (row["model"], row["way"]) == (model, way))
            card = f"{row['smallest_card_gb']} GB" if row["smallest_card_gb"] else "none"
            cells.append(f"{row['peak_bytes'] / 2**30:.1f} ({card})")
        name = "a dense decoder of 27e9" if model == "27B" else model
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(intro: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """What was measured, in words, and a table of it."""
    lines = [intro, "", f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def sizing() -> str:
    """Planned memory and traffic of trainers and engines."""
    found = result("plan_scaling")
    settings, rows = found["settings"], []
    for row in found["rows"]:
        names = ("trainer_peak", "engine_weights", "engine_cache", "message", "selected_weights")
        numbers = [row[f"{name}_bytes"] / 2**30 for name in names]
        name = "a dense decoder of 27e9" if row["model"] == "27B" else row["model"]
        shown = [
            f"{number:.3f}" if part == "message" else f"{number:.1f}"
            for part, number in zip(names, numbers, strict=True)
        ]
        rows.append([name, row["trainer_gpus"], *shown])
    return table(
        f"`{found['command']}`: planned GiB. LoGRA in storage bf16, rank {settings['rank']}, 8-bit factors, one "
        f"micro-batch of {settings['tokens']:,} tokens on each trainer GPU; an engine's cache for "
        f"{settings['sequences']} sequences of {settings['tokens']:,} tokens.",
        (
            "model",
            "trainer GPUs",
            "peak of each",
            "engine: weights",
            "engine: cache",
            "message",
            "selected weights whole",
        ),
        rows,
    )


def syncs() -> str:
    """Bytes and seconds of a sync beside whole weights and a sparse patch."""
    found = result("sync")
    shown = []
    for storage in ("fp32", "bf16"):
        rows = [row for row in found["rows"] if row.get("storage") == storage and row["update"] > 1]
        sizes = [statistics.median(row[f"{n}_bytes"] for row in rows) / 1e6 for n in ("factors", "patch", "weights")]
        times = [found[f"seconds_{storage}"][way] for way in ("factors", "whole")]
        spans = [f"{each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})" for each in times]
        ratio = times[0]["median"] / times[1]["median"]
        shown.append([storage, *(f"{size:.1f}" for size in sizes), *spans, f"{ratio:.2f}"])
    return table(
        f"`{found['command']}`: SmolLM2-135M in vLLM on {found['threads']} processor cores, rank "
        f"{found['settings']['rank']}, {found['settings']['factor_bits']}-bit factors; medians of six. In a run of "
        f"{found['settings']['updates']} updates under Ray in fp32, no log-probability of a sampled token differed by "
        f"more than {found['ratios']['gap_max']:.1e} nats between engine and trainer.",
        (
            "storage of the trainer",
            "factors MB",
            "sparse patch MB",
            "whole MB",
            "factors s",
            "whole s",
            "factors / whole",
        ),
        shown,
    )


def ahead() -> str:
    """Held-out scores by lag."""
    found = result("ahead_learning")
    shown = []
    for lag in dict.fromkeys(row["lag"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["lag"] == lag]
        scores = [f"{row['before']:.2f} → {row['after']:.2f}" for row in rows]
        gap = statistics.mean(row["logprob_gap_absolute"] for row in rows)
        gain = found["ratios"].get(f"gain_lag_{lag}_over_sync", 1.0)
        shown.append([max(row["largest_lag"] for row in rows), *scores, f"{gap:.1e}", f"{gain:.2f}"])
    return table(
        f"`{found['command']}`: the tiny task, {found['settings']['updates']} updates; held-out pass@1 before and "
        f"after, and the mean gap between rollout and trainer log-probabilities. Between seeds, the "
        f"scores of lag 0 differ by {found['ratios']['spread_of_seeds']:.2f} of its mean gain.",
        ("largest lag", "seed 0", "seed 1", "seed 2", "gap, nats", "gain over that of lag 0"),
        shown,
    )


def paper_plan() -> str:
    """Plan, PyTorch's tracker and the paper, for the paper's models."""
    found = result("plan_paper")
    lines = [
        f"`{found['command']}`: GiB on each device, FSDP2, {found['settings']['tokens']:,} tokens, rank "
        f"{found['settings']['rank']}; tracked by PyTorch's `FSDPMemTracker` on fake tensors, planned by `logra plan`, "
        f"and the average that the paper reports.",
        "",
        "| model | devices | method | tracked average | tracked peak | planned peak | paper, average |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        planned = f"{row['planned_bytes'] / 2**30:.2f}" if "planned_bytes" in row else "-"
        paper = row["paper_average_gib"] or "-"
        name = {"port": "LoGRA as the authors' port holds it"}.get(row["way"], row["way"])
        label = row["model"].split(" ")[0]
        average = f"{row['average_bytes'] / 2**30:.2f}" if "average_bytes" in row else "-"
        tracked = f"{average} | {row['tracked_bytes'] / 2**30:.2f}"
        lines.append(f"| {label} | {row['devices']} | {name} | {tracked} | {planned} | {paper} |")
    return "\n".join(lines)


def two_processes() -> str:
    """LoGRA beside AdamW under FSDP2, in two processes."""
    found = result("two_processes")
    lines = [
        f"`{found['command']}`: SmolLM2-135M, {found['settings']['processes']} processes, rank "
        f"{found['settings']['rank']}; a process's bytes in one update of fixed responses, MiB.",
        "",
        "| method | compute | measured peak | planned peak | gathered | reduced |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in (row for row in found["rows"] if "collective_bytes" in row):
        sent = {
            kind: sum(count for name, count in row["collective_bytes"].items() if kind in name)
            for kind in ("allgather", "reduce_scatter")
        }
        numbers = (max(row["peak_bytes"]), row["planned_bytes"], sent["allgather"], sent["reduce_scatter"])
        cells = " | ".join(f"{number / 2**20:,.1f}" for number in numbers)
        lines.append(f"| {row['method']} | {row['compute']} | {cells} |")
    return "\n".join(lines)


PLACES = (
    ("README.md", "measured", measured),
    ("docs/optimizer.md", "settings", settings),
    ("docs/experiments.md", "first run", first_run),
    ("docs/experiments.md", "beside trl", beside_trl),
    ("docs/memory.md", "cards", cards),
    ("docs/memory.md", "paper plan", paper_plan),
    ("docs/processes.md", "two processes", two_processes),
    ("docs/scaling.md", "sizing", sizing),
    ("docs/scaling.md", "syncs", syncs),
    ("docs/scaling.md", "ahead", ahead),
    ("docs/reference.md", "all settings", all_settings),
    ("docs/reference.md", "metrics", metrics),
    ("docs/reference.md", "alarms", alarms),
)


def filled(text: str, name: str, table: str) -> str:
    """`text` with what stands between the markers of `name` replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return before + begin + table + "\n" + end + rest.split(end)[1]


def stale() -> list[str]:
    """Files whose tables are not those that would be written now."""
    return [
        file
        for file, name, make in PLACES
        if filled((ROOT / file).read_text(), name, make()) != (ROOT / file).read_text()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        raise SystemExit(f"out of date: {stale()}; run python -m benchmarks.tables" if stale() else 0)
    for file, name, make in PLACES:
        (ROOT / file).write_text(filled((ROOT / file).read_text(), name, make()))


if __name__ == "__main__":
    main()
