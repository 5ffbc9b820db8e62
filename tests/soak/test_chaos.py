"""Servers that die, hang, answer late, wrongly or not at all, in whole runs on two of them: what is trained on is the
same as without, or the run stops with one error.

A synchronous run samples every token from the seed and the weights of its step alone. So a fault that is survived must
leave the very same tokens.
"""

import pytest

from tests.chaos.proxy import Fault
from tests.chaos.runs import assert_complete, assert_stopped, suffer
from tests.e2e.launching import two_ports

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PUSH = "update_weights_from_distributed"
STEP_2 = dict(server="server_0", pushes=2)
"""From the push after step 1 on."""
SURVIVED = {
    "killed_during_generation": Fault(do="kill", nth=3, **STEP_2),
    "killed_during_a_push": Fault(do="kill", on=PUSH, server="server_0"),
    "killed_before_the_group_is_made": Fault(do="kill", on="init_weights_update_group", server="server_1", pushes=0),
    "killed_between_steps": Fault(do="kill_after", on="continue_generation", server="server_0"),
    "hung_during_generation": Fault(do="stop", nth=3, **STEP_2),
    "hung_during_a_push": Fault(do="stop", on=PUSH, server="server_1"),
    "slow": Fault(do="slow", times=None, **STEP_2),
    "silent": Fault(do="silent", nth=2, **STEP_2),
    "status_500_once": Fault(do="status_500", nth=2, **STEP_2),
    "status_500_always": Fault(do="status_500", times=None, **STEP_2),
    "status_500_to_a_push": Fault(do="status_500", on=PUSH, server="server_0"),
    "connection_reset": Fault(do="reset", nth=2, **STEP_2),
    "connection_reset_during_a_push": Fault(do="reset", on=PUSH, server="server_0"),
    "wrong_version": Fault(do="wrong_version", nth=2, **STEP_2),
    "older_version": Fault(do="older_version", nth=2, **STEP_2),
    "nan_logprob": Fault(do="nan_logprob", nth=2, **STEP_2),
    "null_logprob": Fault(do="null_logprob", nth=2, **STEP_2),
    "fewer_logprobs_than_ids": Fault(do="fewer_logprobs", nth=2, **STEP_2),
    "fewer_ids_than_logprobs": Fault(do="fewer_ids", nth=2, **STEP_2),
    "all_killed_during_generation": Fault(do="kill_all", nth=3, **STEP_2),
    "all_killed_during_a_push": Fault(do="kill_all", on=PUSH, server="server_0"),
}


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    """Shared, so that the runs share one cold start."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(output_dir):
    run = suffer(output_dir, "undisturbed", [])
    assert_complete(run)
    return run


@pytest.mark.parametrize("name", SURVIVED)
def test_run_trains_on_the_same_tokens_as_without_the_fault(output_dir, undisturbed, name):
    run = suffer(output_dir, name, [SURVIVED[name]])
    assert run.hits
    assert_complete(run)
    assert run.token_ids() == undisturbed.token_ids()


def test_restarted_server_takes_part_again(output_dir, undisturbed):
    faults = [
        Fault(do="kill", nth=3, **STEP_2),
        Fault(do="slow", server="server_1", pushes=2, times=None),  # so that the run is not over before
        Fault(do="slow", server="server_0", pushes=3),  # if asked: its third push is to the restarted one
    ]
    run = suffer(output_dir, "restarted", faults, "train.num_rollout_steps=60", "evaluate.every=60")
    assert run.count("slow", "server_0") == 1
    assert_complete(run, num_steps=60)
    assert run.token_ids() == undisturbed.token_ids()


def test_push_that_a_server_only_claims_to_have_received_is_found(output_dir, undisturbed):
    fault = Fault(do="swallow", on="update_weights_from_disk", server="server_0")
    run = suffer(output_dir, "swallowed", [fault], "cluster.weight_transport=disk")
    assert run.hits
    assert_complete(run)
    assert run.token_ids() == undisturbed.token_ids()


@pytest.mark.parametrize("name", ["killed_during_generation", "killed_during_a_push", "hung_during_generation"])
def test_asynchronous_run_loses_nothing_and_keeps_its_lag(output_dir, undisturbed, name):
    run = suffer(output_dir, f"async_{name}", [SURVIVED[name]], "cluster.max_policy_lag=1")
    assert run.hits
    assert_complete(run, max_policy_lag=1)


def test_status_500_from_all_servers_stops_the_run(output_dir, undisturbed):
    run = suffer(output_dir, "500_from_all", [Fault(do="status_500", times=None, pushes=2)])
    assert "status 500: injected" in assert_stopped(run)


def test_port_that_is_taken_at_the_restart_stops_the_run(output_dir, undisturbed):
    fault = Fault(do="kill_and_take_port", nth=3, **STEP_2)
    # Long enough for the restart to be tried before the run is over.
    long = ["train.num_rollout_steps=500", f"cluster.server_port={two_ports()}"]
    error = assert_stopped(suffer(output_dir, "port_taken", [fault], *long))
    assert "server_0 was lost (its process ended with status -9) and cannot be restarted within 30 s" in error
    assert "port is in use on 127.0.0.1" in error


def test_server_that_is_lost_too_often_stops_the_run(output_dir, undisturbed):
    fault = Fault(do="kill", nth=3, **STEP_2)
    overrides = ["train.num_rollout_steps=500", "cluster.max_restarts=0"]
    error = assert_stopped(suffer(output_dir, "lost_too_often", [fault], *overrides))
    assert "server_0" in error and "was lost 1 times within an hour (cluster.max_restarts=0)" in error
