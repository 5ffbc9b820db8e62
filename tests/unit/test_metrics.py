"""Metrics: reductions worked by hand, the table as contract, metrics.jsonl and TensorBoard read back."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gspo_megatron.evaluate import Evaluation
from gspo_megatron.metrics import (
    PER_RESPONSE,
    MetricsWriter,
    load_metrics,
    make_row,
    metric_names,
    summarize_groups,
    summarize_minibatch,
    summarize_rollout,
)
from gspo_megatron.mismatch import MISMATCH_REDUCTIONS
from gspo_megatron.types import Prompt, Rollout, RolloutGroup, RolloutReport, TrainState

OF_THE_STEP = {"loss": -0.5, "grad_norm": 0.75, "lr": 1.0e-4, "packing_efficiency": 0.25}


def per_response(**columns: list[float]) -> dict[str, torch.Tensor]:
    """Four responses; the third has no token. Columns that a test does not name are 0."""
    size = len(columns["length"])
    dtypes = dict.fromkeys(PER_RESPONSE, torch.float32) | dict.fromkeys(MISMATCH_REDUCTIONS, torch.float64)
    # Where nothing disagrees every ratio is 1.
    length = columns["length"]
    columns = {"mismatch_ratio_sum": length, "mismatch_ratio_square_sum": length, **columns}
    return {name: torch.tensor(columns.get(name, [0.0] * size), dtype=dtype) for name, dtype in dtypes.items()}


FOUR = dict(
    length=[4.0, 2.0, 0.0, 10.0],
    advantage=[1.0, -1.0, 1.0, -1.0],
    clipped_tokens=[4.0, 0.0, 0.0, 10.0],
    outside_tokens=[4.0, 2.0, 0.0, 10.0],
    log_ratio=[0.5, -0.25, 0.0, 0.25],
    clamped_tokens=[1.0, 0.0, 0.0, 3.0],
    corrected_tokens=[2.0, 0.0, 0.0, 6.0],
    kl_sum=[0.5, -0.25, 0.0, 1.75],
    entropy_sum=[4.0, 2.0, 0.0, 2.0],
    mismatch_abs_sum=[0.5, 0.25, 0.0, 1.25],
    mismatch_abs_max=[0.25, 0.125, 0.0, 0.5],
    mismatch_k3_sum=[0.25, 0.25, 0.0, 0.5],
    mismatch_sum=[0.5, -0.5, 0.0, 1.0],
    mismatch_above_2_tokens=[1.0, 0.0, 0.0, 1.0],
    mismatch_ratio_sum=[6.0, 1.0, 0.0, 9.0],
    mismatch_ratio_square_sum=[12.0, 1.0, 0.0, 19.0],
    mismatch_old_sum=[2.0, 1.0, 0.0, 1.0],
    mismatch_old_square_sum=[2.0, 1.0, 0.0, 1.0],
    mismatch_rollout_sum=[2.0, 1.0, 0.0, 1.0],
    mismatch_rollout_square_sum=[2.0, 1.0, 0.0, 1.0],
    mismatch_product_sum=[1.0, 0.5, 0.0, 1.0],
)


def minibatch() -> dict[str, float]:
    return summarize_minibatch(per_response(**FOUR)) | OF_THE_STEP


def group(*, rewards: list[float], advantages: list[float], lengths: list[int], name: str = "p") -> RolloutGroup:
    return RolloutGroup(
        prompt=Prompt(prompt_id=name, text=name, token_ids=(1,), expected="1", entry={}),
        rollouts=tuple(
            Rollout(
                response_ids=(1,) * length,
                rollout_logprobs=(0.0,) * length,
                weight_versions=(0,) * length,
                finish_reason="length" if length == 4 else "stop",
                filtered_because="overlong" if length == 4 else None,
                text="1",
                sampling_seed=0,
                reward=reward,
                is_exact=reward == 1.0,
                advantage=advantage,
            )
            for reward, advantage, length in zip(rewards, advantages, lengths, strict=True)
        ),
    )


GROUPS = [
    group(rewards=[1.0, 0.0, 0.5], advantages=[1.0, -1.0, 0.0], lengths=[3, 4, 3], name="a"),
    group(rewards=[1.0], advantages=[0.0], lengths=[1], name="b"),
]

REPORT = RolloutReport(
    num_asked=10, num_zero_spread=4, num_surplus=2, num_retries=3, num_continued=5, num_retracted=4, num_rejected=1
)

EVALUATION = {
    "accuracy": 0.25,
    "low": 0.2,
    "high": 0.3,
    "num_prompts": 256,
    "num_samples": 1,
    "mean_reward": 0.5,
    "mean_response_tokens": 6.5,
    "truncated_fraction": 0.0,
    "distinct_fraction": 0.75,
}


def row(step: int = 1) -> dict[str, object]:
    return make_row(
        TrainState(rollout_step=step, optimizer_step=2 * step, weight_version=step),
        groups=GROUPS,
        minibatches=[minibatch(), minibatch()],
        stage_s={"rollout": 1.5, "train": 2.0},
        evaluation=EVALUATION,
        report=REPORT,
    )


def test_minibatch_shares_divide_by_tokens_by_responses_and_by_sign() -> None:
    got = summarize_minibatch(per_response(**FOUR))
    assert got["clip_fraction_tokens"] == 14 / 16
    assert got["clip_fraction_responses"] == 2 / 4
    assert got["clip_fraction_positive"] == 1 / 2
    assert got["clip_fraction_negative"] == 1 / 2
    assert got["outside_band_fraction"] == 1.0


def test_sign_shares_are_not_swapped_and_leave_zero_advantage_out() -> None:
    columns = per_response(length=[1.0] * 4, advantage=[1.0, 0.0, -1.0, -1.0], clipped_tokens=[1.0, 1.0, 1.0, 0.0])
    got = summarize_minibatch(columns)
    assert (got["clip_fraction_positive"], got["clip_fraction_negative"]) == (1.0, 0.5)
    assert got["clip_fraction_responses"] == 0.75


def test_token_means_divide_by_tokens_and_maxima_are_over_responses() -> None:
    got = summarize_minibatch(per_response(**FOUR))
    assert got["entropy"] == 8 / 16
    assert got["mismatch_abs_mean"] == 2 / 16
    assert got["mismatch_abs_max"] == 0.5
    assert got["mismatch_k1"] == -1 / 16
    assert got["mismatch_k3"] == 1 / 16
    assert got["mismatch_share_above_2"] == 2 / 16
    assert got["mismatch_ess_token"] == 16**2 / (16 * 32)
    assert got["mismatch_chi2_token"] == 32 / 16 - 1
    # Means 1/4, variances 3/16, covariance 2.5/16 - 1/16.
    assert got["mismatch_pearson"] == pytest.approx(0.5)
    assert (got["clamped_fraction"], got["corrected_fraction"], got["kl_to_reference"]) == (4 / 16, 8 / 16, 2 / 16)
    # |0.5 / 4|, |-0.5 / 2|, |1 / 10|: the short negative one is largest.
    assert got["mismatch_log_ratio_abs_max"] == 0.25


def test_log_ratio_statistics_leave_out_responses_without_tokens() -> None:
    got = summarize_minibatch(per_response(**FOUR))
    # Sorted -0.25, 0.25, 0.5 with linear interpolation.
    assert got["log_ratio_p50"] == 0.25
    assert got["log_ratio_p05"] == pytest.approx(-0.25 + 0.1 * 0.5)
    assert got["log_ratio_p95"] == pytest.approx(0.5 - 0.1 * 0.25)
    assert got["log_ratio_std"] == pytest.approx(math.sqrt((0.25**2 * 2 + 0.5**2) / 3 - (0.5 / 3) ** 2))
    assert got["log_ratio_abs_max"] == 0.5


def test_minibatch_without_tokens_or_signs_reads_zero_everywhere_and_full_sample_size() -> None:
    got = summarize_minibatch(per_response(length=[0.0, 0.0]))
    assert got == dict.fromkeys(got, 0.0) | {"mismatch_ess_token": 1.0}


def test_minibatch_names_are_the_tables() -> None:
    assert tuple(minibatch()) == metric_names("minibatch")


def test_evaluation_names_are_those_of_evaluate() -> None:
    assert metric_names("evaluation") == tuple(f.name for f in fields(Evaluation))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("advantage"), r"misses \['advantage'\]"),
        (lambda c: c.update(kl=c["length"]), r"unknown \['kl'\]"),
        (lambda c: c.update(advantage=c["advantage"][:3]), r"'advantage'\] is torch.float32 \(3,\)"),
        (lambda c: c.update(length=c["length"].long()), r"'length'\] is torch.int64"),
        (lambda c: c.update(kl_sum=c["kl_sum"].double()), r"'kl_sum'\] is torch.float64 .*wants torch.float32"),
        (lambda c: c.update(mismatch_sum=c["length"]), r"'mismatch_sum'\] is torch.float32 .*wants torch.float64"),
        (lambda c: c.pop("mismatch_k3_sum"), r"misses \['mismatch_k3_sum'\]"),
    ],
)
def test_minibatch_input_that_breaks_the_contract_is_refused(change, message) -> None:
    columns = per_response(**FOUR)
    change(columns)
    with pytest.raises(ValueError, match=message):
        summarize_minibatch(columns)


def test_group_metrics_by_hand() -> None:
    assert summarize_groups(GROUPS) == {
        "reward_mean": 2.5 / 4,
        "exact_fraction": 2 / 4,
        "zero_advantage_groups_fraction": 1 / 2,
        "response_tokens_mean": 11 / 4,
        "truncated_fraction": 1 / 4,
        "filtered_fraction": 1 / 4,
        "num_response_tokens": 11,
        "turns_mean": 1.0,
        "turn_reward_mean": 0.0,
    }


def test_turns_are_counted_and_their_advantages_end_a_groups_silence() -> None:
    flat = group(rewards=[1.0, 1.0], advantages=[0.0, 0.0], lengths=[3, 3])
    fields = {"response_mask": (True, False, True), "turn_lengths": (1, 1)}
    two, one = flat.rollouts
    two = replace(two, turn_rewards=(0.5, 0.25), token_advantages=(0.1, 0.0, 0.0), **fields)
    got = summarize_groups([flat, replace(flat, rollouts=(two, one))])
    assert got["turns_mean"] == 5 / 4
    assert got["turn_reward_mean"] == 0.75 / 4
    assert got["zero_advantage_groups_fraction"] == 1 / 2
    assert got["num_response_tokens"] == 11


def test_rollout_metrics_by_hand() -> None:
    first, second = GROUPS
    versions = [(4, 4, 5), (0, 0, 0, 0), (5, 5, 5)]
    rollouts = [replace(r, weight_versions=v) for r, v in zip(first.rollouts, versions, strict=True)]
    # A tool's token in the last: its version is that of the token before, and no lag of a sampled one.
    last = replace(second.rollouts[0], weight_versions=(3, 3), response_mask=(True, False))
    groups = [replace(first, rollouts=tuple(rollouts)), replace(second, rollouts=(last,))]
    assert summarize_rollout(groups, REPORT, trained_from=5) == {
        "num_asked": 10,
        "num_used": 3,
        "num_overlong": 1,
        "num_too_short": 0,
        "num_stale": 0,
        "num_zero_spread": 4,
        "num_surplus": 2,
        "num_retries": 3,
        "num_continued": 5,
        "num_retracted": 4,
        "num_rejected": 1,
        "policy_lag_mean": (1 + 1 + 2) / 7,
        "policy_lag_max": 2,
        "mixed_version_fraction": 1 / 3,
    }


def test_responses_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="9 responses were asked for, .*'num_used': 3"):
        summarize_rollout(GROUPS, replace(REPORT, num_asked=9), trained_from=0)
    odd = replace(GROUPS[1], rollouts=(replace(GROUPS[1].rollouts[0], filtered_because="no reason that is counted"),))
    with pytest.raises(ValueError, match="10 responses were asked for"):
        summarize_rollout([GROUPS[0], odd], REPORT, trained_from=0)


def test_lag_is_that_of_the_weights_that_the_step_was_trained_from() -> None:
    assert row(4)["rollout"]["policy_lag_max"] == 3, "versions are 0, and the step leaves version 4"


def test_groups_without_advantage_are_refused() -> None:
    unscored = group(rewards=[1.0], advantages=[None], lengths=[1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="add advantages first"):
        summarize_groups([unscored])


def test_rows_read_back_equal_and_every_row_is_on_disk_before_close(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    start = make_row(TrainState(), groups=[], minibatches=[], stage_s={"evaluate": 0.5}, evaluation=EVALUATION)
    writer.write(start)
    assert load_metrics(tmp_path / "metrics.jsonl") == [start]
    writer.write(row())
    assert load_metrics(tmp_path / "metrics.jsonl") == [start, row()]
    writer.close()


def test_second_writer_appends_and_rows_of_a_resumed_run_replace_the_abandoned_ones(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        first.write(row(step))
    first.close()
    resumed = MetricsWriter(tmp_path)
    again = row(2) | {"reward_mean": 0.125}
    resumed.write(again)
    resumed.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert load_metrics(tmp_path / "metrics.jsonl") == [row(1), again]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["reward_mean", "minibatches[2].entropy", "stage_s.train", "evaluation.low"])
def test_non_finite_value_is_refused_by_name_and_nothing_is_written(tmp_path: Path, value: float, place: str) -> None:
    bad = json.loads(json.dumps(row()))
    section, _, name = place.rpartition(".")
    target = {"": bad, "minibatches[2]": bad["minibatches"][1]}.get(section, bad.get(section))
    target[name] = value
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=rf"{place.replace('[', '.').replace(']', '.')}=.*not finite"):
        writer.write(bad)
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(kl=0.1), "kl: unknown metric"),
        (lambda r: r["minibatches"][0].update(kl=0.1), r"minibatches\[1\].kl: unknown metric"),
        (lambda r: r["stage_s"].update(sleep=0.1), "stage_s.sleep: unknown metric"),
        (lambda r: r["evaluation"].pop("low"), "evaluation.low: missing"),
        (lambda r: r["rollout"].pop("num_used"), "rollout.num_used: missing"),
        (lambda r: r.pop("reward_mean"), "reward_mean: missing"),
        (lambda r: r.pop("stage_s"), "row misses stage_s"),
        (lambda r: r.update(weight_version=1.0), "weight_version=1.0: wants an int"),
        (lambda r: r.update(reward_mean="1"), "reward_mean='1': wants a number"),
        (lambda r: r.update(minibatches=None), "minibatches: wants a list"),
    ],
)
def test_row_that_disagrees_with_the_table_is_refused(tmp_path: Path, change, message) -> None:
    bad = row()
    change(bad)
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=message):
        writer.write(bad)
    writer.close()


def test_second_row_of_a_step_is_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(row(3))
    with pytest.raises(ValueError, match="rollout_step=3 after 3"):
        writer.write(row(3))
    writer.close()


@pytest.mark.parametrize("line", ["{", "[]", '{"rollout_step": 1}'])
def test_broken_line_is_reported_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row()) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a metrics row"):
        load_metrics(path)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_holds_the_rows_under_stable_tags(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(row(step))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    wanted = {
        "train/reward_mean": 0.625,
        "clip_fraction_responses/minibatch_1": 0.5,
        "grad_norm/minibatch_2": 0.75,
        "seconds/rollout": 1.5,
        "rollout/num_asked": 10,
        "evaluation/accuracy": 0.25,
    }
    assert wanted.keys() <= set(events.Tags()["scalars"])
    for tag, value in wanted.items():
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [(1, value), (2, value)], tag
    num_tags = sum(len(metric_names(s)) for s in ("train", "rollout", "evaluation", "minibatch", "minibatch")) + 2
    assert len(events.Tags()["scalars"]) == num_tags
