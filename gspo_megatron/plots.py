"""A run's rows -> figures for its report page, and a figure -> an inline <svg>.

Each plot_* takes the run and returns a figure, or None where the run holds nothing for it. PLOTS lists them in the
page's order with their captions.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gspo_megatron.metrics import metric_names

if TYPE_CHECKING:
    from gspo_megatron.report import Run

# Mid tones that read on a white and on a dark page; minibatch k always has colour k.
COLOURS = ("#3b82c4", "#e08a1e", "#2f9e6e", "#c2569b", "#8a6fd1", "#b59a1b", "#d1584f", "#4aa3a2", "#7a8793")
"""One for each stage of a rollout step, which are the most that one figure tells apart."""
INK = "#010203"
"""Stands for the page's text colour while matplotlib draws; replaced in the SVG."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gspo",
    "font.size": 11,
    "axes.titlesize": 11,
    "legend.fontsize": 10,
    "legend.title_fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
}
SMOOTH_STEPS = 10
"""Rollout steps of the moving mean where single steps are noisy."""


def _figure(run: Run, num_panels: int = 1, *, panel_height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Panels above each other (inches), with the run's rollout steps on the x axis, the same in every plot."""
    fig = Figure(figsize=(4.8, panel_height * num_panels + 0.3), layout="constrained")
    fig.patch.set_alpha(0.0)
    axes = list(fig.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
    for ax in axes:
        ax.patch.set_alpha(0.0)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    margin = 0.5 + 0.02 * run.rows[-1]["rollout_step"]
    axes[-1].set_xlim(-margin, run.rows[-1]["rollout_step"] + margin)
    axes[-1].set_xlabel("rollout step")
    return fig, axes


def _legend_below(fig: Figure, ax: Axes, num_columns: int, *, title: str | None = None) -> None:
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=num_columns, title=title)


def _line(ax: Axes, steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
    """A line; with dots while there are few points, so that a single one shows."""
    dots: dict[str, Any] = {"marker": "o", "markersize": 3} if len(steps) <= 30 else {}
    ax.plot(steps, values, **(dots | style))


def _noisy_line(ax: Axes, steps: Sequence[int], values: Sequence[float], *, color: str, label: str) -> None:
    """Each step pale, the mean of the last SMOOTH_STEPS steps on top."""
    smooth = [_mean(values[max(0, i + 1 - SMOOTH_STEPS) : i + 1]) for i in range(len(values))]
    ax.plot(steps, values, color=color, alpha=0.35, linewidth=0.8)
    _line(ax, steps, smooth, color=color, label=label)


def _percent_axis(ax: Axes, label: str, shares: Sequence[float]) -> None:
    """From 0 to what the shares need, at least 1 percent, so that a line at 0 lies on the axis."""
    ax.set_ylabel(label)
    ax.set_ylim(0.0, max(1.0, 105.0 * max(shares)))


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]


def _of_minibatch(run: Run, k: int, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of minibatch k, counted from 0."""
    rows = [row for row in run.rows if len(row["minibatches"]) > k]
    return [row["rollout_step"] for row in rows], [row["minibatches"][k][name] for row in rows]


def _over_minibatches(run: Run, name: str, reduce: Callable[[list[float]], float]) -> tuple[list[int], list[float]]:
    """Steps and one metric reduced over the minibatches of each step."""
    rows = [row for row in run.rows if row["minibatches"]]
    return [r["rollout_step"] for r in rows], [reduce([m[name] for m in r["minibatches"]]) for r in rows]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _of_train(run: Run, name: str) -> tuple[list[int], list[float]]:
    return [row["rollout_step"] for row in run.train_rows], [row[name] for row in run.train_rows]


def plot_accuracy(run: Run) -> Figure | None:
    """Held-out accuracy with its 95% interval."""
    rows = run.evaluated_rows
    if not rows:
        return None
    fig, (ax,) = _figure(run)
    steps = [row["rollout_step"] for row in rows]
    centre, low, high = ([100 * row["evaluation"][n] for row in rows] for n in ("accuracy", "low", "high"))
    ax.fill_between(steps, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    ax.vlines(steps, low, high, color=COLOURS[0], linewidth=1)
    ax.plot(steps, centre, color=COLOURS[0], marker="o", markersize=4)
    ax.axhline(centre[0], color=INK, linestyle=":", linewidth=1)
    ax.set_ylabel("exact responses (%)")
    return fig


def plot_reward(run: Run) -> Figure | None:
    """Mean reward and share of exact responses in the training rollouts."""
    steps, rewards = _of_train(run, "reward_mean")
    if not steps:
        return None
    fig, (ax,) = _figure(run)
    _noisy_line(ax, steps, rewards, color=COLOURS[0], label="mean reward")
    _noisy_line(ax, steps, _of_train(run, "exact_fraction")[1], color=COLOURS[1], label="exact share")
    ax.set_ylabel("reward, share")
    _legend_below(fig, ax, 2)
    return fig


def plot_silent_groups(run: Run) -> Figure | None:
    """Share of groups whose advantages are all zero."""
    steps, values = _of_train(run, "zero_advantage_groups_fraction")
    if not steps:
        return None
    fig, (ax,) = _figure(run)
    _line(ax, steps, [100 * v for v in values], color=COLOURS[0])
    _percent_axis(ax, "groups (%)", values)
    return fig


def _per_minibatch(run: Run, name: str, *, label: str, scale: float = 1.0) -> tuple[Figure, Axes] | None:
    """One line of a metric per minibatch index."""
    if not run.num_minibatches:
        return None
    fig, (ax,) = _figure(run)
    for k in range(run.num_minibatches):
        steps, values = _of_minibatch(run, k, name)
        _noisy_line(ax, steps, [scale * v for v in values], color=_colour(k), label=str(k + 1))
    ax.set_ylabel(label)
    _legend_below(fig, ax, min(8, run.num_minibatches), title="minibatch")
    return fig, ax


def plot_clipped_responses(run: Run) -> Figure | None:
    """Clip fraction by responses."""
    drawn = _per_minibatch(run, "clip_fraction_responses", label="responses clipped (%)", scale=100)
    return drawn and drawn[0]


def plot_clipped_tokens(run: Run) -> Figure | None:
    """Clip fraction by tokens."""
    drawn = _per_minibatch(run, "clip_fraction_tokens", label="tokens clipped (%)", scale=100)
    return drawn and drawn[0]


def plot_grad_norm(run: Run) -> Figure | None:
    """Gradient norm with the limit of the recipe."""
    drawn = _per_minibatch(run, "grad_norm", label="global L2 norm")
    if drawn is None:
        return None
    fig, ax = drawn
    if run.recipe is not None:
        ax.axhline(run.recipe["optimizer"]["clip_grad"], color=INK, linestyle="--", linewidth=1)
    ax.set_ylim(bottom=0)
    return fig


def plot_entropy(run: Run) -> Figure | None:
    """Entropy of the policy on the sampled tokens."""
    drawn = _per_minibatch(run, "entropy", label="entropy (nats per token)")
    return drawn and drawn[0]


def _band(run: Run) -> tuple[float, float] | None:
    """log(1 - clip_low), log(1 + clip_high) of a sequence-level objective, nats; None where it has no such band."""
    if run.recipe is None or run.recipe["loss"]["name"] != "gspo":
        return None
    return math.log1p(-run.recipe["loss"]["clip_low"]), math.log1p(run.recipe["loss"]["clip_high"])


def plot_log_ratio(run: Run) -> Figure | None:
    """Quantiles of log s per minibatch index, one panel each, with the clip band."""
    if not run.num_minibatches:
        return None
    fig, axes = _figure(run, run.num_minibatches, panel_height=1.5)
    band = _band(run)
    for k, ax in enumerate(axes):
        low, median, high = (_of_minibatch(run, k, f"log_ratio_p{q}") for q in ("05", "50", "95"))
        steps = low[0]
        ax.fill_between(steps, low[1], high[1], color=_colour(k), alpha=0.3, linewidth=0)
        for quantile in (low, high):
            _line(ax, *quantile, color=_colour(k), linewidth=0.7)
        _line(ax, *median, color=_colour(k))
        for edge in band or ():
            ax.axhline(edge, color=INK, linestyle="--", linewidth=1)
        ax.set_title(f"minibatch {k + 1}", loc="left")
        ax.sharey(axes[0])
    axes[0].yaxis.set_major_locator(MaxNLocator(4))
    fig.supylabel("log s (nats per token)", fontsize=11)
    return fig


def plot_mismatch(run: Run) -> Figure | None:
    """Trainer against engine log-probs on the same tokens, log axis that holds 0."""
    lines = (
        ("max |d|", *_over_minibatches(run, "mismatch_abs_max", max)),
        ("mean |d|", *_over_minibatches(run, "mismatch_abs_mean", _mean)),
        ("k3", *_over_minibatches(run, "mismatch_k3", _mean)),
        ("max |mean d of a response|", *_over_minibatches(run, "mismatch_log_ratio_abs_max", max)),
    )
    if not lines[0][1]:
        return None
    fig, (ax,) = _figure(run, panel_height=3.4)
    for k, (label, steps, values) in enumerate(lines):
        # Colours from the other end of the list: these lines are no minibatches.
        _line(ax, steps, values, color=COLOURS[-1 - k], label=label)
    band = _band(run)
    if band is not None:
        ax.axhline(-band[0], color=INK, linestyle="--", linewidth=1, label="clip_low")
    sizes = [abs(v) for _, _, values in lines for v in values if v != 0.0]
    if sizes:
        smallest = 10.0 ** math.floor(math.log10(min(sizes)))
        ax.set_yscale("symlog", linthresh=smallest, linscale=1.0)
        top = max([*sizes, *([-band[0]] if band else [])])
        _decade_ticks(ax, smallest, top)
    ax.set_ylabel("d (nats)")
    _legend_below(fig, ax, 2)
    return fig


def _decade_ticks(ax: Axes, smallest: float, largest: float) -> None:
    """Ticks at 0 and at up to 7 decades between the two values."""
    low, high = round(math.log10(smallest)), math.ceil(math.log10(largest))
    stride = max(1, math.ceil((high - low) / 6))
    powers = range(low, high + 1, stride)
    ax.set_yticks([0.0, *(10.0**p for p in powers)], labels=["0", *(f"1e{p}" for p in powers)])
    ax.set_yticks([], minor=True)


def plot_length(run: Run) -> Figure | None:
    """Response length and share of truncated responses."""
    steps, tokens = _of_train(run, "response_tokens_mean")
    if not steps:
        return None
    fig, (top, bottom) = _figure(run, 2, panel_height=1.7)
    _line(top, steps, tokens, color=COLOURS[0])
    top.set_ylabel("length (tokens)")
    truncated = _of_train(run, "truncated_fraction")[1]
    _line(bottom, steps, [100 * v for v in truncated], color=COLOURS[6])
    _percent_axis(bottom, "truncated (%)", truncated)
    return fig


def _of_rollout(run: Run, name: str) -> tuple[list[int], list[float]]:
    rows = [row for row in run.rows if row["rollout"] is not None]
    return [row["rollout_step"] for row in rows], [row["rollout"][name] for row in rows]


def plot_lag(run: Run) -> Figure | None:
    """Age of the weights that sampled the tokens, in pushes."""
    steps, largest = _of_rollout(run, "policy_lag_max")
    if not steps:
        return None
    fig, (ax,) = _figure(run)
    _line(ax, steps, largest, color=COLOURS[6], label="largest of a token")
    _line(ax, *_of_rollout(run, "policy_lag_mean"), color=COLOURS[0], label="mean over tokens")
    ax.set_ylabel("policy lag (pushes)")
    ax.set_ylim(0.0, max(1.0, 1.05 * max(largest)))
    _legend_below(fig, ax, 2)
    return fig


def plot_left_out(run: Run) -> Figure | None:
    """Shares of the responses that were asked for and are not in the loss."""
    steps, asked = _of_rollout(run, "num_asked")
    if not steps:
        return None
    fig, (ax,) = _figure(run)
    lines = {
        "filtered": ("num_overlong", "num_too_short", "num_stale"),
        "equal rewards": ("num_zero_spread",),
        "surplus": ("num_surplus",),
    }
    everything = []
    for k, (label, names) in enumerate(lines.items()):
        counts = zip(*(_of_rollout(run, name)[1] for name in names), strict=True)
        shares = [sum(parts) / whole for parts, whole in zip(counts, asked, strict=True)]
        _line(ax, steps, [100 * share for share in shares], color=COLOURS[-1 - k], label=label)
        everything += shares
    _percent_axis(ax, "responses (%)", everything)
    _legend_below(fig, ax, 3)
    return fig


def plot_seconds(run: Run) -> Figure | None:
    """Seconds of each stage, stacked."""
    rows = [row for row in run.rows if row["stage_s"]]
    if not rows:
        return None
    fig, (ax,) = _figure(run)
    steps = np.array([row["rollout_step"] for row in rows], dtype=float)
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    base = np.zeros(len(rows))
    for k, stage in enumerate(metric_names("seconds")):
        values = np.array([row["stage_s"][stage] if stage in row["stage_s"] else 0.0 for row in rows])
        if values.any():
            ax.stairs(base + values, edges, baseline=base, fill=True, color=_colour(k), label=stage)
            base = base + values
    ax.set_ylabel("seconds per rollout step")
    ax.set_ylim(bottom=0)
    _legend_below(fig, ax, 3)
    return fig


PLOTS: tuple[tuple[str, Callable[[Run], Figure | None], str], ...] = (
    (
        "Held-out accuracy",
        plot_accuracy,
        "Should rise; bars are 95% intervals, the dotted line is the starting policy. Intervals that do not overlap "
        "are a clear difference.",
    ),
    (
        "Reward in training rollouts",
        plot_reward,
        f"Here and below, pale: each step; strong: mean of the last {SMOOTH_STEPS} steps. Rising reward with flat "
        "held-out accuracy means that the scorer is being gamed.",
    ),
    (
        "Responses clipped",
        plot_clipped_responses,
        "Minibatch 1 must read exactly 0 when old log-probs are recomputed; later ones drift away from the policy "
        "that sampled, so the clip acts more.",
    ),
    (
        "Tokens clipped",
        plot_clipped_tokens,
        "The same weighted by length. Above the plot by responses means that long responses are clipped more.",
    ),
    (
        "Log-ratio of responses",
        plot_log_ratio,
        "Line: median; shade: 5 to 95% of responses; dashed: the clip band, log(1 - clip_low) and log(1 + clip_high). "
        "Shade far inside the band: the clip never acts; far outside: most of the gradient is dropped.",
    ),
    (
        "Trainer against engine",
        plot_mismatch,
        "d: Megatron's log-prob minus SGLang's, same token, equal weights but for the policy lag. Flat is healthy. "
        "Where the per-response line nears the dashed clip_low, SGLang's own log-probs in place of the recomputed "
        "would clip on noise alone.",
    ),
    (
        "Entropy",
        plot_entropy,
        "Mean over sampled tokens. A slow fall is learning; a fall to 0 leaves nothing to explore.",
    ),
    (
        "Gradient norm",
        plot_grad_norm,
        "Before clipping; dashed: the recipe's limit. Single spikes are cut by the limit, a steady rise is trouble.",
    ),
    (
        "Response length",
        plot_length,
        "Mean tokens of a training response and the share cut at the limit. A cut response cannot be right.",
    ),
    (
        "Groups without a signal",
        plot_silent_groups,
        "All responses of the group had the same reward, so its advantages are 0 and it teaches nothing.",
    ),
    (
        "Responses left out",
        plot_left_out,
        "Share of the responses asked for. Filtered ones are too long, too short or too old for this recipe; the rest "
        "is what dynamic sampling drops. What is left out costs generation all the same.",
    ),
    (
        "Policy lag",
        plot_lag,
        "How many pushes older the weights that sampled a token are than those its step was trained from. 0 when "
        "training is synchronous; never above max_policy_lag.",
    ),
    (
        "Seconds per stage",
        plot_seconds,
        "Stacked; the top edge is the whole step. The widest colour is what to make faster.",
    ),
)


def draw_svg(run: Run, title: str, draw: Callable[[Run], Figure | None]) -> str | None:
    """One plot as an <svg> element in the page's text colour and width; None where there is nothing to draw."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        fig = draw(run)
        if fig is None:
            return None
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        fig.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    opening = rf'<svg viewBox="\1" role="img" aria-label="{title}">'
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', opening, svg, count=1)
    # Group ids repeat from figure to figure; nothing refers to them.
    return re.sub(r'<g id="[^"]*"', "<g", svg).replace(INK, "currentColor").replace("xlink:href", "href")
