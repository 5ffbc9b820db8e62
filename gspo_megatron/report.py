"""A run's files -> one self-contained HTML page with plots, and the table that closes a run on the console.

Reads metrics.jsonl; resolved.yaml, versions.json and rollouts/step_*.jsonl where they exist. Needs no network to read.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from rich.table import Table

from gspo_megatron.metrics import load_metrics, metric_names
from gspo_megatron.plots import PLOTS, draw_svg
from gspo_megatron.types import Rollout, RolloutGroup, load_groups

Row = dict[str, Any]

MAX_ROWS_DRAWN = 500
"""Rows that a plot draws; more would make the page megabytes without showing more."""
NUM_PROMPTS_SHOWN = 3
NUM_RESPONSES_SHOWN = 4
MAX_TEXT_SHOWN = 2000
"""Characters of a prompt or response on the page."""

KNOWN_FILES = {
    "metrics.jsonl": "one row of numbers per rollout step",
    "resolved.yaml": "the complete recipe, defaults written out",
    "versions.json": "packages, commit, hardware",
    "rollouts": "prompts and responses of each step, with rewards",
    "tensorboard": "the same numbers as TensorBoard events",
    "checkpoint": "Megatron checkpoint (torch_dist)",
    "hf": "exported Hugging Face directory",
    "report.html": "this page",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run directory holds; None stands for a file that is not there."""

    run_dir: Path
    rows: list[Row]
    recipe: dict[str, Any] | None
    versions: dict[str, Any] | None
    rollout_paths: list[Path]
    """rollouts/step_*.jsonl in the order of their step."""

    @property
    def train_rows(self) -> list[Row]:
        """Rows with rollouts of their own."""
        return [row for row in self.rows if "reward_mean" in row]

    @property
    def evaluated_rows(self) -> list[Row]:
        """Rows with a held-out evaluation."""
        return [row for row in self.rows if row["evaluation"] is not None]

    @property
    def num_minibatches(self) -> int:
        """Most optimizer steps that a rollout step had."""
        return max(len(row["minibatches"]) for row in self.rows)


def load_run(run_dir: Path) -> Run:
    """Read a run directory, complete or not.

    Raises:
        ValueError: metrics.jsonl is missing, empty or broken, or another file of the run is broken.
    """
    rows = load_metrics(run_dir / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run_dir / 'metrics.jsonl'}: has no row yet; the first comes with the first evaluation")
    return Run(
        run_dir=run_dir,
        rows=rows,
        recipe=_read_mapping(run_dir / "resolved.yaml", yaml.safe_load, yaml.YAMLError),
        versions=_read_mapping(run_dir / "versions.json", json.loads, json.JSONDecodeError),
        rollout_paths=sorted((run_dir / "rollouts").glob("step_*.jsonl"), key=_step_of),
    )


def _stride(run: Run) -> int:
    """The plots draw every so many rows."""
    return math.ceil(len(run.rows) / MAX_ROWS_DRAWN)


def thinned(run: Run) -> Run:
    """The run with the rows that plots draw: every stride-th, the last, and all with an evaluation."""
    stride, last = _stride(run), len(run.rows) - 1
    rows = [row for i, row in enumerate(run.rows) if i % stride == 0 or i == last or row["evaluation"] is not None]
    return replace(run, rows=rows)


def _read_mapping(path: Path, parse: Callable[[str], Any], error: type[Exception]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        tree = parse(path.read_text())
    except error as problem:
        raise ValueError(f"{path}: cannot be read ({problem})") from problem
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: holds {type(tree).__name__}, wants a mapping")
    return tree


def _step_of(path: Path) -> int:
    digits = re.search(r"\d+", path.stem)
    if digits is None:
        raise ValueError(f"{path}: has no step number; wants step_<number>.jsonl")
    return int(digits.group())


# ---- numbers ----


def accuracy_gain(before: Row, after: Row) -> tuple[float, float, float]:
    """Difference of two accuracies with its 95% interval (Newcombe's hybrid of the two intervals).

    Both evaluations see the same prompts, which this leaves out: it errs on the wide side.

    Args:
        before: an evaluation with accuracy, low and high, shares in [0, 1].
        after: likewise.

    Returns:
        (difference, low, high), shares.
    """
    gain = after["accuracy"] - before["accuracy"]
    low = math.hypot(after["accuracy"] - after["low"], before["high"] - before["accuracy"])
    high = math.hypot(after["high"] - after["accuracy"], before["accuracy"] - before["low"])
    return gain, gain - low, gain + high


def _percent_with_interval(evaluation: Row) -> str:
    return f"{evaluation['accuracy']:.1%} ({evaluation['low']:.1%} to {evaluation['high']:.1%})"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _clip_summary(run: Run) -> str:
    """Clipped responses on the first and on the later minibatches, averaged over the run."""
    name = "clip_fraction_responses"
    first = [row["minibatches"][0][name] for row in run.rows if row["minibatches"]]
    later = [minibatch[name] for row in run.rows for minibatch in row["minibatches"][1:]]
    if not first:
        return "no optimizer step yet"
    text = f"minibatch 1: at most {max(first):.1%}" if any(first) else "minibatch 1: none"
    return text + (f"; later ones: {sum(later) / len(later):.1%} on average" if later else "")


def _rollout_lines(run: Run) -> list[tuple[str, str]]:
    """What became of the responses, and what went wrong on the way; nothing without servers."""
    rows = [row["rollout"] for row in run.rows if row["rollout"] is not None]
    if not rows:
        return []
    total = {name: sum(row[name] for row in rows) for name in metric_names("rollout") if name.startswith("num_")}
    filtered = total["num_overlong"] + total["num_too_short"] + total["num_stale"]
    dropped = total["num_zero_spread"] + total["num_surplus"]
    fates = f"{total['num_asked']:,} asked for: {total['num_used']:,} used, {filtered:,} filtered, {dropped:,} dropped"
    troubles = f"{total['num_retries']} requests sent again, servers taken out {total['num_rejected']} times"
    return [("responses", f"{fates}; {troubles}")]


def summary_lines(run: Run) -> list[tuple[str, str]]:
    """The run in a few lines of label and text: accuracy, steps, tokens, time, where things are."""
    lines = []
    evaluations = [row["evaluation"] for row in run.evaluated_rows]
    if not evaluations:
        lines.append(("held-out accuracy", "not evaluated yet"))
    else:
        first, last = evaluations[0], evaluations[-1]
        where = f"step {run.evaluated_rows[0]['rollout_step']}"
        lines.append((f"accuracy before ({where})", _percent_with_interval(first)))
        if len(evaluations) > 1:
            where = f"step {run.evaluated_rows[-1]['rollout_step']}"
            lines.append((f"accuracy after ({where})", _percent_with_interval(last)))
            gain, low, high = (100 * share for share in accuracy_gain(first, last))
            apart = "do not overlap" if last["low"] > first["high"] or last["high"] < first["low"] else "overlap"
            lines.append(("difference", f"{gain:+.1f} points ({low:+.1f} to {high:+.1f}); the intervals {apart}"))
        lines.append(("evaluated on", f"{last['num_prompts']} held-out prompts x {last['num_samples']} each"))
    last_row = run.rows[-1]
    rollout_step = f"rollout step {last_row['rollout_step']}"
    if run.recipe is not None:
        rollout_step += f" of {run.recipe['train']['num_rollout_steps']}"
    updates = f"{last_row['optimizer_step']} optimizer steps, weight version {last_row['weight_version']}"
    tokens = sum(row["num_response_tokens"] for row in run.train_rows)
    seconds = sum(sum(row["stage_s"].values()) for row in run.rows)
    return [
        *lines,
        ("steps", f"{rollout_step}, {updates}"),
        ("tokens", f"{tokens:,} response tokens"),
        ("time in the loop", f"{_duration(seconds)} (sum of the stages; without cold start and start-up)"),
        *_rollout_lines(run),
        ("responses clipped", _clip_summary(run)),
        *((label, str(run.run_dir / name)) for label, name in _places(run)),
    ]


def _places(run: Run) -> list[tuple[str, str]]:
    places = (("checkpoint", "checkpoint"), ("Hugging Face export", "hf"), ("metrics", "metrics.jsonl"))
    return [(label, name) for label, name in places if (run.run_dir / name).exists()]


def console_summary(run_dir: Path) -> Table:
    """The closing table of a run.

    Raises:
        ValueError: as load_run.
    """
    table = Table(title=f"run {run_dir.name}", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    lines = summary_lines(load_run(run_dir))
    if (run_dir / "report.html").exists():
        lines.append(("report", str(run_dir / "report.html")))
    for label, text in lines:
        table.add_row(label, text)
    return table


# ---- the page ----

CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --page: #f6f7f9; --card: #ffffff; --faint: #5d6877;
        --line: #dde1e7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe4ea; --page: #14181d; --card: #1d2229; --faint: #98a3b0; --line: #333b45; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 16px; background: var(--page); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 8px 0; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 32px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p.lead { font-size: 1.1rem; margin: 0 0 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; margin: 0 0 16px; }
.plots { columns: 2; column-gap: 16px; } .plots .card { break-inside: avoid; }
@media (max-width: 800px) { body { padding: 8px; } .plots { columns: 1; } }
svg { display: block; width: 100%; height: auto; }
figure { margin: 0; } figcaption, .faint { color: var(--faint); font-size: 0.875rem; }
.note { border-left: 4px solid #e08a1e; padding-left: 10px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0; border-top: 1px solid var(--line);
         overflow-wrap: anywhere; }
th { font-weight: 600; width: 30%; overflow-wrap: normal; } tr:first-child > * { border-top: 0; }
pre, code { font: 0.875rem/1.4 ui-monospace, monospace; }
pre { margin: 2px 0 8px; padding: 6px 8px; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--page);
      border-radius: 4px; }
.response { border-left: 4px solid var(--line); padding-left: 8px; margin: 0 0 8px; }
.response.up { border-color: #2f9e6e; } .response.down { border-color: #d1584f; }
summary { cursor: pointer; }
"""


def _table(lines: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in lines)
    return f"<table>{cells}</table>"


def _notes(run: Run) -> list[str]:
    """What this run lacks, or the page leaves out, in words."""
    conditions = [
        (not run.train_rows, "no rollout step is finished, so the training plots are empty"),
        (not run.evaluated_rows, "there is no held-out evaluation, so nothing is said about accuracy"),
        (run.recipe is None, "there is no resolved.yaml, so the clip band and limits are not drawn"),
        (run.versions is None, "there is no versions.json, so software and hardware are unknown"),
        (_stride(run) > 1, f"it is long: plots draw every {_stride(run)} rows and every evaluation"),
        (not run.rollout_paths, "there are no rollouts/step_*.jsonl, so there are no responses to read"),
    ]
    notes = [text for holds, text in conditions if holds]
    last = run.rows[-1]["rollout_step"]
    if run.recipe is not None and last < run.recipe["train"]["num_rollout_steps"]:
        notes.append(f"it stands at rollout step {last} of {run.recipe['train']['num_rollout_steps']}")
    return notes


def _lead(run: Run) -> str:
    evaluations = [row["evaluation"] for row in run.evaluated_rows]
    if len(evaluations) < 2:
        return "No accuracy before and after yet."
    before, after = evaluations[0]["accuracy"], evaluations[-1]["accuracy"]
    return f"Held-out accuracy {before:.1%} to {after:.1%} in {run.rows[-1]['rollout_step']} rollout steps."


def _plot_card(run: Run, title: str, draw: Callable[[Run], Figure | None], caption: str) -> str:
    body = draw_svg(run, title, draw) or '<p class="faint">Nothing to draw yet.</p>'
    return f'<figure class="card"><h3>{escape(title)}</h3>{body}<figcaption>{escape(caption)}</figcaption></figure>'


def _shorten(text: str) -> str:
    rest = len(text) - MAX_TEXT_SHOWN
    return text if rest <= 0 else f"{text[:MAX_TEXT_SHOWN]} [... {rest:,} more characters]"


def _response_html(rollout: Rollout) -> str:
    advantage = rollout.advantage or 0.0
    sign = "up" if advantage > 0 else "down" if advantage < 0 else ""
    named = (("reward", rollout.reward), ("advantage", rollout.advantage))
    numbers = [f"{name} {value:+.3f}" for name, value in named if value is not None]
    meta = ", ".join([*numbers, f"{len(rollout.response_ids)} tokens", f"finish {rollout.finish_reason}"])
    exact = " (exact)" if rollout.is_exact else ""
    return (
        f'<div class="response {sign}"><div class="faint">{escape(meta + exact)}</div>'
        f"<pre>{escape(_shorten(rollout.text))}</pre></div>"
    )


def _group_html(group: RolloutGroup) -> str:
    shown = group.rollouts[:NUM_RESPONSES_SHOWN]
    responses = "".join(_response_html(rollout) for rollout in shown)
    return (
        f'<div class="card"><div class="faint">prompt</div><pre>{escape(_shorten(group.prompt.text))}</pre>'
        f'<div class="faint">expected</div><pre>{escape(_shorten(group.prompt.expected))}</pre>'
        f'<div class="faint">{len(shown)} of {len(group.rollouts)} responses</div>{responses}</div>'
    )


def _rollouts_html(run: Run) -> str:
    if not run.rollout_paths:
        return '<p class="faint">No rollouts on disk.</p>'
    parts = []
    for path in dict.fromkeys((run.rollout_paths[0], run.rollout_paths[-1])):
        groups = load_groups(path)
        num_shown = min(NUM_PROMPTS_SHOWN, len(groups))
        parts.append(f"<h3>{escape(path.name)}: the first {num_shown} of {len(groups)} prompts</h3>")
        parts.append("".join(_group_html(group) for group in groups[:NUM_PROMPTS_SHOWN]))
    return "".join(parts)


def _flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as (dotted key, text)."""
    lines: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += _flatten(value, f"{prefix}{key}.")
        else:
            lines.append((f"{prefix}{key}", str(value)))
    return lines


def _details(title: str, body: str) -> str:
    return f'<details class="card"><summary>{escape(title)}</summary>{body}</details>'


def _page(run: Run) -> str:
    name = escape(run.run_dir.resolve().name)
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(run))
    files = [(p.name, KNOWN_FILES[p.name] if p.name in KNOWN_FILES else "") for p in sorted(run.run_dir.iterdir())]
    recipe = "" if run.recipe is None else yaml.safe_dump(run.recipe, sort_keys=False)
    rollouts = _rollouts_html(run)
    drawn = thinned(run)
    plots = "\n".join(_plot_card(drawn, *plot) for plot in PLOTS)
    parts = [
        f"<h1>{name}</h1>",
        f'<p class="lead">{escape(_lead(run))}</p>',
        f'<div class="card note">About this run: <ul>{notes}</ul></div>' if notes else "",
        f'<div class="card">{_table(summary_lines(run))}</div>',
        f'<h2>Plots</h2><div class="plots">{plots}</div>',
        f"<h2>Rollouts to read</h2>{rollouts}",
        "<h2>What this run was</h2>",
        _details("Files in the run directory", _table(files)),
        _details("Versions and hardware", _table(_flatten(run.versions or {"versions.json": "absent"}))),
        _details("Recipe", f"<pre>{escape(recipe or 'resolved.yaml is absent')}</pre>"),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{name}</title>'
        f"<style>{CSS}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html from what the run has left so far.

    Returns:
        The page's path.

    Raises:
        ValueError: as load_run, or a rollout file is broken; no page is written then.
    """
    path = run_dir / "report.html"
    tmp = path.with_name(path.name + ".tmp")
    page = _page(load_run(run_dir))
    tmp.write_text(page)
    tmp.rename(path)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status, 2 where run_dir has no readable metrics."""
    parser = argparse.ArgumentParser(prog="python -m gspo_megatron.report", description="Write a run's report.html.")
    parser.add_argument("run_dir", type=Path, help="directory with metrics.jsonl, such as runs/<name>")
    args = parser.parse_args(arguments)
    try:
        print(write_report(args.run_dir))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
