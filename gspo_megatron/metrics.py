"""Every metric's name, unit and reduction, in METRICS; the only module that logs numbers.

A run's metrics.jsonl holds one JSON object (a row) per rollout step:

    {"rollout_step", "optimizer_step", "weight_version",      COUNTERS, always
     "reward_mean", ...,                                      METRICS["train"], absent when nothing was sampled
     "rollout": null | {"num_asked", "policy_lag_max", ...},  METRICS["rollout"], null when no server was asked
     "minibatches": [{"loss", "clip_fraction_tokens", ...}],  METRICS["minibatch"], one object per optimizer step
     "stage_s": {"rollout": 3.1, ...},                        METRICS["seconds"], the stages that ran
     "evaluation": null | {"accuracy", ...}}                  METRICS["evaluation"]

The row of rollout_step 0 is the evaluation of the starting policy. Shapes: B = responses of the minibatch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboardX import SummaryWriter

from gspo_megatron.advantage import OVERLONG
from gspo_megatron.types import STALE, TOO_SHORT, Rollout, RolloutGroup, RolloutReport, TrainState

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    name: str
    unit: str
    reduction: str
    """What the number is taken over, and how."""


COUNTERS = ("rollout_step", "optimizer_step", "weight_version")

METRICS: dict[str, tuple[Metric, ...]] = {
    "train": (
        Metric("reward_mean", "reward", "mean over the step's responses"),
        Metric("exact_fraction", "share", "responses equal to the expected one / responses"),
        Metric("zero_advantage_groups_fraction", "share", "groups whose advantages are all 0 / groups"),
        Metric("response_tokens_mean", "tokens", "mean over responses of the sampled tokens, EOS counted once"),
        Metric("truncated_fraction", "share", "responses that end with finish reason length / responses"),
        Metric("filtered_fraction", "share", "responses taken out of the loss / responses"),
        Metric("num_response_tokens", "tokens", "sum over responses of the sampled tokens"),
        Metric("turns_mean", "turns", "mean over responses; 1 without rollout.multi_turn"),
        Metric("turn_reward_mean", "reward", "mean over responses of the sum of their turns' rewards"),
    ),
    "rollout": (
        Metric("num_asked", "responses", "asked of the servers for the step; the next six add up to it"),
        Metric("num_used", "responses", "in the loss"),
        Metric("num_overlong", "responses", "filtered: reached max_response_tokens (advantage.overlong_filter)"),
        Metric("num_too_short", "responses", "filtered: below min_response_tokens"),
        Metric("num_stale", "responses", "filtered: a token older than max_policy_lag"),
        Metric("num_zero_spread", "responses", "dropped with their group by dynamic_sampling"),
        Metric("num_surplus", "responses", "dropped, finished or not: sampled ahead and not needed"),
        Metric("num_retries", "requests", "sent again after a failure since the row before"),
        Metric("num_continued", "responses", "sent on after a push had aborted them since the row before"),
        Metric("num_retracted", "responses", "computed anew by the server (push, memory) since the row before"),
        Metric("num_rejected", "servers", "taken out until the next push to them since the row before"),
        Metric("policy_lag_mean", "pushes", "mean of trainer's less token's weight_version over tokens in the loss"),
        Metric("policy_lag_max", "pushes", "max over the same tokens"),
        Metric("mixed_version_fraction", "share", "responses with tokens of more than one version / used responses"),
    ),
    "minibatch": (
        Metric("clip_fraction_tokens", "share", "clipped tokens / response tokens"),
        Metric("clip_fraction_responses", "share", "responses with a clipped token / responses"),
        Metric("clip_fraction_positive", "share", "the same over responses with advantage > 0"),
        Metric("clip_fraction_negative", "share", "the same over responses with advantage < 0"),
        Metric("outside_band_fraction", "share", "tokens whose ratio is outside the band, any advantage / tokens"),
        Metric("log_ratio_p05", "nats per token", "5 percent quantile over responses with a token"),
        Metric("log_ratio_p50", "nats per token", "median over responses with a token"),
        Metric("log_ratio_p95", "nats per token", "95 percent quantile over responses with a token"),
        Metric("log_ratio_std", "nats per token", "population standard deviation over responses with a token"),
        Metric("log_ratio_abs_max", "nats per token", "max of |log s| over responses with a token"),
        Metric("entropy", "nats per token", "mean over response tokens"),
        Metric("clamped_fraction", "share", "tokens whose log-ratio is beyond the overflow guard / tokens"),
        Metric("corrected_fraction", "share", "tokens whose correction weight was bounded or rejected / tokens"),
        Metric("kl_to_reference", "nats", "mean of the recipe's estimate over response tokens; 0 without a reference"),
        Metric("mismatch_abs_mean", "nats", "mean of |d|, d = old - rollout log-prob, over response tokens"),
        Metric("mismatch_abs_max", "nats", "max of |d| over response tokens"),
        Metric("mismatch_k1", "nats", "mean of -d over response tokens; estimates KL(rollout || old), either sign"),
        Metric("mismatch_k3", "nats", "mean of exp(d) - d - 1 over response tokens; the same KL, never negative"),
        Metric("mismatch_share_above_2", "share", "tokens with max(rho, 1 / rho) > 2 / tokens; rho = exp(d)"),
        Metric("mismatch_ess_token", "share", "(sum of rho)^2 / (tokens x sum of rho^2); 1: no mismatch"),
        Metric("mismatch_chi2_token", "1", "mean of rho^2 over response tokens, less 1"),
        Metric("mismatch_pearson", "1", "correlation of the two probabilities over response tokens; 0: no spread"),
        Metric("mismatch_log_ratio_abs_max", "nats per token", "max over responses of |mean of d|; beside clip_low"),
        Metric("loss", "advantage", "-(sum of terms) / N over the optimizer step"),
        Metric("grad_norm", "1", "global L2 norm before clipping"),
        Metric("lr", "1", "learning rate of the optimizer step"),
        Metric("packing_efficiency", "share", "tokens / (microbatches x token budget) over data-parallel ranks"),
    ),
    "seconds": tuple(
        Metric(stage, "s", "wall time of the stage on rank 0")
        for stage in (
            *("rollout", "take_devices", "reference", "reward", "batch", "old_logprobs", "train", "weight_sync"),
            "evaluate",
        )
    ),
    "evaluation": (
        Metric("accuracy", "share", "exact responses / held-out responses (pass@1)"),
        Metric("low", "share", "lower end of the 95 percent interval of accuracy"),
        Metric("high", "share", "upper end of the 95 percent interval of accuracy"),
        Metric("num_prompts", "prompts", "count"),
        Metric("num_samples", "responses per prompt", "count"),
        Metric("mean_reward", "reward", "mean over held-out responses"),
        Metric("mean_response_tokens", "tokens", "mean over held-out responses of the sampled tokens"),
        Metric("truncated_fraction", "share", "held-out responses with finish reason length / responses"),
        Metric("distinct_fraction", "share", "distinct held-out response texts / responses"),
    ),
}

PER_RESPONSE = (
    "log_ratio",
    "advantage",
    "length",
    "clipped_tokens",
    "outside_tokens",
    "clamped_tokens",
    "corrected_tokens",
    "kl_sum",
    "entropy_sum",
)
"""What the optimizer step hands over for each response, beside the sums of mismatch.MISMATCH_REDUCTIONS."""


def metric_names(section: str) -> tuple[str, ...]:
    """Names of one section of METRICS, in the table's order."""
    return tuple(metric.name for metric in METRICS[section])


def summarize_minibatch(per_response: Mapping[str, Tensor]) -> dict[str, float]:
    """Reduce one minibatch's per-response numbers to METRICS["minibatch"] without the optimizer step's own numbers.

    A response with length 0 counts as a response, not as tokens; it has no log-ratio. A share of an empty set is 0.

    Args:
        per_response: gathered over data-parallel ranks and microbatches. The keys of PER_RESPONSE, each [B] float32:
            log_ratio: nats per token, log s_i; entropy_sum and kl_sum: nats; the rest in tokens. And the keys of
            mismatch.MISMATCH_REDUCTIONS, each [B] float64.

    Raises:
        ValueError: keys, shapes or dtypes are not those; or B is 0.
    """
    from gspo_megatron.mismatch import MISMATCH_REDUCTIONS, summarize_mismatch  # here: the report loads no torch

    dtypes = dict.fromkeys(PER_RESPONSE, "torch.float32") | dict.fromkeys(MISMATCH_REDUCTIONS, "torch.float64")
    _check_per_response(per_response, dtypes)
    watched = metric_names("minibatch")
    r = {name: value.double() for name, value in per_response.items()}
    has_tokens, clipped = r["length"] > 0, r["clipped_tokens"] > 0
    positive, negative = r["advantage"] > 0, r["advantage"] < 0
    num_tokens = float(r["length"].sum())
    # One zero stands in where no response has a token, so that the reductions below are defined.
    log_ratio = r["log_ratio"][has_tokens] if has_tokens.any() else r["log_ratio"].new_zeros(1)
    return {
        "clip_fraction_tokens": _share(r["clipped_tokens"].sum(), num_tokens),
        "clip_fraction_responses": _share(clipped.sum(), clipped.numel()),
        "clip_fraction_positive": _share((clipped & positive).sum(), positive.sum()),
        "clip_fraction_negative": _share((clipped & negative).sum(), negative.sum()),
        "outside_band_fraction": _share(r["outside_tokens"].sum(), num_tokens),
        "log_ratio_p05": float(log_ratio.quantile(0.05)),
        "log_ratio_p50": float(log_ratio.quantile(0.50)),
        "log_ratio_p95": float(log_ratio.quantile(0.95)),
        "log_ratio_std": float(log_ratio.std(correction=0)),
        "log_ratio_abs_max": float(log_ratio.abs().max()),
        "entropy": _share(r["entropy_sum"].sum(), num_tokens),
        "clamped_fraction": _share(r["clamped_tokens"].sum(), num_tokens),
        "corrected_fraction": _share(r["corrected_tokens"].sum(), num_tokens),
        "kl_to_reference": _share(r["kl_sum"].sum(), num_tokens),
        **{name: value for name, value in summarize_mismatch(per_response).items() if name in watched},
    }


def _share(part: Tensor, whole: Tensor | float) -> float:
    return float(part) / float(whole) if float(whole) > 0 else 0.0


def _check_per_response(per_response: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> None:
    if set(per_response) != set(dtypes):
        missing, unknown = set(dtypes) - set(per_response), set(per_response) - set(dtypes)
        raise ValueError(
            f"per_response: misses {sorted(missing)}, has unknown {sorted(unknown)}; see PER_RESPONSE and "
            "mismatch.MISMATCH_REDUCTIONS"
        )
    shape = per_response["length"].shape
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"per_response['length'] has shape {tuple(shape)}, wants [B] with B > 0")
    for name, value in per_response.items():
        if value.shape != shape or str(value.dtype) != dtypes[name]:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(f"per_response[{name!r}] is {got}, wants {dtypes[name]} {tuple(shape)} as length")


def summarize_groups(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Reduce a rollout step's groups to METRICS["train"].

    Raises:
        ValueError: there is no rollout, or one has no reward or no advantage.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise ValueError("groups: hold no rollout; wants at least one")
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if len(rewards) < len(rollouts) or any(r.is_exact is None or r.advantage is None for r in rollouts):
        raise ValueError("groups: a rollout has no reward, is_exact or advantage; score and add advantages first")
    num_tokens = sum(r.num_sampled_tokens for r in rollouts)
    silent_groups = sum(not any(r.advantage or any(r.token_advantages or ()) for r in g.rollouts) for g in groups)
    return {
        "reward_mean": math.fsum(rewards) / len(rollouts),
        "exact_fraction": sum(r.is_exact is True for r in rollouts) / len(rollouts),
        "zero_advantage_groups_fraction": silent_groups / len(groups),
        "response_tokens_mean": num_tokens / len(rollouts),
        "truncated_fraction": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "filtered_fraction": sum(r.is_filtered for r in rollouts) / len(rollouts),
        "num_response_tokens": num_tokens,
        "turns_mean": sum(len(r.turn_lengths) if r.turn_lengths else 1 for r in rollouts) / len(rollouts),
        "turn_reward_mean": math.fsum(x for r in rollouts for x in r.turn_rewards or ()) / len(rollouts),
    }


def summarize_rollout(groups: Sequence[RolloutGroup], report: RolloutReport, trained_from: int) -> dict[str, float]:
    """Reduce a rollout step's groups and report to METRICS["rollout"].

    Args:
        groups: with the reasons of filtered responses.
        report: of the same step.
        trained_from: weight_version that the step's training began at.

    Raises:
        ValueError: the responses do not add up.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reasons = Counter(rollout.filtered_because for rollout in rollouts)
    used = [rollout for rollout in rollouts if not rollout.is_filtered]
    lags = [trained_from - version for rollout in used for version in _sampled_versions(rollout)]
    fates = {
        "num_used": len(used),
        **{f"num_{reason}": reasons[reason] for reason in (OVERLONG, TOO_SHORT, STALE)},
        "num_zero_spread": report.num_zero_spread,
        "num_surplus": report.num_surplus,
    }
    if sum(fates.values()) != report.num_asked:
        raise ValueError(f"{report.num_asked} responses were asked for, {fates} are accounted for")
    mixed = sum(len(set(rollout.weight_versions)) > 1 for rollout in used)
    return {
        "num_asked": report.num_asked,
        **fates,
        "num_retries": report.num_retries,
        "num_continued": report.num_continued,
        "num_retracted": report.num_retracted,
        "num_rejected": report.num_rejected,
        "policy_lag_mean": sum(lags) / len(lags) if lags else 0.0,
        "policy_lag_max": max(lags, default=0),
        "mixed_version_fraction": mixed / len(used) if used else 0.0,
    }


def _sampled_versions(rollout: Rollout) -> Iterable[int]:
    if rollout.response_mask is None:
        return rollout.weight_versions
    return itertools.compress(rollout.weight_versions, rollout.response_mask)


def make_row(
    state: TrainState,
    *,
    groups: Sequence[RolloutGroup],
    minibatches: Sequence[Mapping[str, float]],
    stage_s: Mapping[str, float],
    evaluation: Mapping[str, float] | None,
    report: RolloutReport | None = None,
) -> dict[str, Any]:
    """Build one row of metrics.jsonl.

    Args:
        state: counters after the step; all 0 for the evaluation of the starting policy.
        groups: the step's scored groups with advantages; empty when nothing was sampled.
        minibatches: per optimizer step, summarize_minibatch's result with loss, grad_norm, lr and packing_efficiency.
        stage_s: seconds of each stage that ran.
        evaluation: the fields of evaluate.Evaluation for the weights after the step, or None.
        report: of what was asked of servers for the step; None where none was.

    Raises:
        ValueError: a name is not in METRICS or is missing, or a value is not finite; the message lists all.
    """
    row: dict[str, Any] = {
        "rollout_step": state.rollout_step,
        "optimizer_step": state.optimizer_step,
        "weight_version": state.weight_version,
    }
    row |= summarize_groups(groups) if groups else {}
    trained_from = state.weight_version - 1
    row["rollout"] = None if report is None else summarize_rollout(groups, report, trained_from)
    row["minibatches"] = [dict(minibatch) for minibatch in minibatches]
    row["stage_s"] = dict(stage_s)
    row["evaluation"] = None if evaluation is None else dict(evaluation)
    check_row(row)
    return row


def check_row(row: Any) -> None:
    """Hold a row against METRICS.

    Raises:
        ValueError: lists every unknown, missing or non-finite metric.
    """
    if not isinstance(row, dict):
        raise ValueError(f"row is {type(row).__name__}, wants an object")
    structure = ("rollout", "minibatches", "stage_s", "evaluation")
    missing = [name for name in (*COUNTERS, *structure) if name not in row]
    if missing:
        raise ValueError(f"row misses {', '.join(missing)}")
    problems = [f"{name}={row[name]!r}: wants an int >= 0" for name in COUNTERS if not _is_count(row[name])]
    train = {name: value for name, value in row.items() if name not in (*COUNTERS, *structure)}
    if train:
        problems += _check_section("train", train, where="")
    if not isinstance(row["minibatches"], list):
        problems.append("minibatches: wants a list")
    else:
        for k, minibatch in enumerate(row["minibatches"], start=1):
            problems += _check_section("minibatch", minibatch, where=f"minibatches[{k}].")
    problems += _check_section("seconds", row["stage_s"], where="stage_s.", needs_all=False)
    for section in ("rollout", "evaluation"):
        if row[section] is not None:
            problems += _check_section(section, row[section], where=f"{section}.")
    if problems:
        raise ValueError(f"row of rollout_step {row['rollout_step']}: " + "; ".join(problems))


def _check_section(section: str, values: Any, *, where: str, needs_all: bool = True) -> list[str]:
    if not isinstance(values, dict):
        return [f"{where.rstrip('.')}: wants an object, got {type(values).__name__}"]
    names = metric_names(section)
    problems = [f"{where}{name}: missing" for name in names if needs_all and name not in values]
    for name, value in values.items():
        if name not in names:
            problems.append(f"{where}{name}: unknown metric; METRICS[{section!r}] has {', '.join(names)}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{where}{name}={value!r}: wants a number, got {type(value).__name__}")
        elif not math.isfinite(value):
            problems.append(f"{where}{name}={value}: not finite, and JSON has no such number")
    return problems


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class MetricsWriter:
    """Appends rows to run_dir/metrics.jsonl and TensorBoard events under run_dir/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        # Unbuffered: a row is one write, so that a killed run leaves whole lines.
        self._file = self.path.open("ab", buffering=0)
        self._tensorboard = SummaryWriter(logdir=str(run_dir / "tensorboard"))
        self._last_step = -1

    def write(self, row: dict[str, Any]) -> None:
        """Append one row.

        Raises:
            ValueError: the row does not agree with METRICS, holds a non-finite number, or its rollout_step does not
                rise; nothing is written then.
        """
        check_row(row)
        step = row["rollout_step"]
        if step <= self._last_step:
            raise ValueError(f"{self.path}: rollout_step={step} after {self._last_step}; wants one row per step")
        self._file.write((json.dumps(row, allow_nan=False) + "\n").encode())
        self._last_step = step
        for tag, value in _scalars(row):
            self._tensorboard.add_scalar(tag, value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        """Flush and close both files."""
        self._tensorboard.close()
        self._file.close()


def _scalars(row: dict[str, Any]) -> Iterable[tuple[str, float]]:
    """TensorBoard's tags and values of a row."""
    yield from ((f"train/{name}", row[name]) for name in metric_names("train") if name in row)
    yield from ((f"rollout/{name}", value) for name, value in (row["rollout"] or {}).items())
    for k, minibatch in enumerate(row["minibatches"], start=1):
        yield from ((f"{name}/minibatch_{k}", value) for name, value in minibatch.items())
    yield from ((f"seconds/{stage}", value) for stage, value in row["stage_s"].items())
    yield from ((f"evaluation/{name}", value) for name, value in (row["evaluation"] or {}).items())


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, one row per rollout step.

    A resumed run appends the steps after its checkpoint again: a row replaces all earlier rows of its step or later.

    Raises:
        ValueError: the file is missing, or a line is not a row; the message names file and line.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run writes it from its first evaluation on")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            check_row(row)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a metrics row ({error})") from error
        while rows and rows[-1]["rollout_step"] >= row["rollout_step"]:
            rows.pop()
        rows.append(row)
    return rows
