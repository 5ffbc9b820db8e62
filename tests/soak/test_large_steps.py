"""512 responses a step from two servers: every one is accounted for, and its tokens are of the right weights."""

import pytest

from tests.chaos.runs import FILTERED, GROUP_SIZE, assert_complete, suffer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

NUM_PROMPTS, NUM_STEPS = 64, 3
LARGE = [f"rollout.num_prompts={NUM_PROMPTS}", "rollout.request_timeout_s=120"]


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    """Shared, so that the runs share one cold start."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("lag", [0, 1])
def test_every_response_is_used_and_has_the_weights_of_its_step(output_dir, lag):
    run = suffer(output_dir, f"lag_{lag}", [], *LARGE, f"cluster.max_policy_lag={lag}")
    assert_complete(run, num_prompts=NUM_PROMPTS, max_policy_lag=lag)


def test_every_response_of_refilled_groups_is_used_or_counted_with_its_reason(output_dir):
    refill = ["rollout.oversample_prompts=16", "rollout.dynamic_sampling=true", "rollout.min_response_tokens=4"]
    run = suffer(output_dir, "refilled", [], *LARGE, "cluster.max_policy_lag=1", *refill)
    assert run.returncode == 0, run.text
    rows = [row["rollout"] for row in run.rows if row["rollout"]]
    assert len(rows) == NUM_STEPS
    for step, report in enumerate(rows, start=1):
        groups = run.groups(step)
        assert [len(group.rollouts) for group in groups] == [GROUP_SIZE] * NUM_PROMPTS
        assert report["num_asked"] == report["num_used"] + sum(report[name] for name in FILTERED)
        used = [r for group in groups for r in group.rollouts if not r.is_filtered]
        assert len(used) == report["num_used"]
        assert {step - 1 - v for r in used for v in r.weight_versions} <= {0, 1}
    assert sum(report["num_zero_spread"] for report in rows) > 0
