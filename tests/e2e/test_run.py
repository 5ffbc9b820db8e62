"""The shortened recipe through `gspo_megatron.launch`: cold start, GSPO steps, weight push, what is left behind."""

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine, ServerClient
from gspo_megatron.metrics import load_metrics
from gspo_megatron.routed_experts import RouteFormat
from gspo_megatron.types import load_groups
from tests.chaos.proxy import Fault
from tests.chaos.runs import assert_complete, suffer
from tests.distributed.policy_worker import checkpoint_logprobs, tiny_sequences
from tests.distributed.spawn import spawn
from tests.e2e.launching import ROOT, Launched, launch, wait_for_line
from tests.tolerances import BITWISE, EXPORT_LOGPROBS, assert_close

MAX_MISMATCH = 1.0e-5
"""Nats, mean over a minibatch: float32 log-probs of two implementations (measured 3e-7)."""


@dataclass(frozen=True)
class Finished:
    """A run that ended with status 0."""

    dir: Path
    output: str

    @property
    def rows(self):
        return load_metrics(self.dir / "metrics.jsonl")

    def groups(self, step, kind="rollouts"):
        return load_groups(self.dir / kind / f"step_{step:05d}.jsonl")


@pytest.fixture(scope="module")
def output_dir(tmp_path_factory):
    """Shared by the runs of this module, so that they share one cold start."""
    return tmp_path_factory.mktemp("runs")


def finish(output_dir, name, *overrides, only=None):
    done = launch(output_dir, name, *overrides, only=only).wait(timeout_s=240)
    assert done.returncode == 0, done.text
    return Finished(output_dir / name, done.text)


@pytest.fixture(scope="module")
def joined(output_dir):
    return finish(output_dir, "joined", "cluster.rollout_servers=2")


@pytest.fixture(scope="module")
def silent(output_dir, joined):
    """lr = 0 and asynchronous, with pushes that abort what runs; after `joined`, whose cold start it reuses."""
    overrides = [
        "cluster.max_policy_lag=1",
        "cluster.rollout_servers=2",
        "train.num_rollout_steps=10",
        "rollout.pause_mode=abort",
        "rollout.dynamic_sampling=true",
        "rollout.oversample_prompts=4",
        "rollout.min_response_tokens=4",
    ]
    return finish(output_dir, "silent", "optimizer.lr=0.0", "evaluate.every=1", *overrides)


@pytest.fixture(scope="module")
def half(output_dir, joined):
    """The groups of three steps, all of the starting weights, with SGLang's routes; after `joined`, as `silent`."""
    return finish(output_dir, "half", "loss.routing_replay=r3", only="rollout")


def minibatches(run, name):
    return [[m[name] for m in row["minibatches"]] for row in run.rows if row["minibatches"]]


def sampled(groups):
    return [rollout.response_ids for group in groups for rollout in group.rollouts]


def test_first_minibatch_has_ratio_one_and_later_ones_move(joined):
    clipped, spread = (minibatches(joined, name) for name in ("clip_fraction_tokens", "log_ratio_abs_max"))
    assert [len(step) for step in clipped] == [4, 4, 4]
    assert [step[0] for step in clipped] == [0.0, 0.0, 0.0]
    assert [step[0] for step in spread] == [0.0, 0.0, 0.0]
    for later in list(zip(*spread, strict=True))[1:]:
        assert max(later) > 0.0


def test_each_push_raises_the_version_and_each_token_carries_its_own(joined):
    assert [row["weight_version"] for row in joined.rows] == [0, 1, 2, 3]
    for step in (1, 2, 3):
        versions = {v for g in joined.groups(step) for r in g.rollouts for v in r.weight_versions}
        assert versions == {step - 1}


FATES = ("num_used", "num_overlong", "num_too_short", "num_stale", "num_zero_spread", "num_surplus")


def test_every_response_of_two_servers_is_used(joined):
    for step, row in enumerate(joined.rows[1:], start=1):
        report, groups = row["rollout"], joined.groups(step)
        assert [len(g.rollouts) for g in groups] == [8] * 16
        assert report["num_asked"] == report["num_used"] == 16 * 8
        assert [report[name] for name in FATES[1:]] == [0] * 5
        assert report["policy_lag_max"] == report["mixed_version_fraction"] == 0


def test_trainer_and_server_agree_at_equal_weights_after_every_push(joined):
    means = [row[0] for row in minibatches(joined, "mismatch_abs_mean")]
    assert 0.0 < max(means) < MAX_MISMATCH


def test_weights_moved_and_the_server_noticed(joined):
    first, last = (torch.cat([t.flatten() for t in weights(d)]) for d in (cold_start(joined), joined.dir / "hf"))
    assert (first - last).abs().max() > 1.0e-4
    before, after = ({r.sampling_seed: r.response_ids for g in joined.groups(s, "evaluations") for r in g.rollouts}
                     for s in (0, 3))
    assert before.keys() == after.keys()
    assert before != after


def cold_start(run):
    (folder,) = (path for path in run.dir.parent.glob("cold-start-*") if path.is_dir())
    return folder


def weights(folder):
    tensors = load_file(folder / "model.safetensors")
    return [tensors[name] for name in sorted(tensors)]


def test_lr_zero_is_silent_over_ten_asynchronous_steps(silent):
    clipped, spread = (minibatches(silent, name) for name in ("clip_fraction_tokens", "log_ratio_abs_max"))
    assert [len(step) for step in clipped] == [4] * 10
    assert {x for step in clipped for x in step} == {0.0}
    assert {x for step in spread for x in step} == {0.0}


def test_asynchronous_tokens_have_the_lag_that_is_reported_and_no_more_than_the_limit(silent):
    lags = []
    for step, row in enumerate(silent.rows[1:], start=1):
        used = [r for g in silent.groups(step) for r in g.rollouts if not r.is_filtered]
        lags.append([step - 1 - version for r in used for version in r.weight_versions])
        assert row["rollout"]["policy_lag_max"] == max(lags[-1])
        assert row["rollout"]["policy_lag_mean"] == pytest.approx(sum(lags[-1]) / len(lags[-1]))
    assert set(lags[0]) == {0}
    assert {lag for step in lags for lag in step} == {0, 1}


def test_asynchronous_responses_that_were_asked_for_are_accounted_for(silent):
    for step, row in enumerate(silent.rows[1:], start=1):
        report, groups = row["rollout"], silent.groups(step)
        assert [len(g.rollouts) for g in groups] == [8] * 16
        assert sum(report[name] for name in FATES) == report["num_asked"] >= 20 * 8
        short = [r for g in groups for r in g.rollouts if len(r.response_ids) < 4]
        assert {r.filtered_because for r in short} <= {"too_short"}
        assert len(short) == report["num_too_short"] == 16 * 8 - report["num_used"]
    total = {name: sum(row["rollout"][name] for row in silent.rows[1:]) for name in FATES}
    assert min(total[name] for name in ("num_used", "num_too_short", "num_zero_spread")) > 0
    assert total["num_stale"] == 0


def test_lr_zero_leaves_the_servers_logprobs_where_they_were(silent):
    def samples(step):
        return [(r.response_ids, r.rollout_logprobs) for g in silent.groups(step, "evaluations") for r in g.rollouts]

    for step in range(1, 11):
        for (ids, logprobs), (first_ids, first_logprobs) in zip(samples(step), samples(0), strict=True):
            assert ids == first_ids
            assert logprobs == pytest.approx(first_logprobs, abs=2.0e-6)  # SGLang's batches differ in composition


def test_only_train_on_saved_groups_gives_the_parameters_bit_for_bit(output_dir, joined):
    replay = finish(output_dir, "replay", f"rollout.groups_dir={joined.dir / 'rollouts'}", only="train")
    for a, b in zip(weights(replay.dir / "hf"), weights(joined.dir / "hf"), strict=True):
        assert_close(a, b, BITWISE)


@pytest.mark.parametrize(("place", "replay"), [("loss", "r2"), ("reward", "r3")])
def test_every_part_of_the_objective_runs_in_the_loop(output_dir, joined, half, place, replay):
    everything = [
        f"loss.kl={{coef: 0.05, estimator: k3, place: {place}}}",
        "loss.correction={name: sequence_tis_mean, high: 2.0}",
        "loss.entropy_coef=0.001",
        f"loss.routing_replay={replay}",
        "advantage.overlong_filter=after_statistics",
        "advantage.overlong_buffer_tokens=8",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
        *(["batch.mode=padded"] if place == "reward" else []),
    ]
    groups_dir = f"rollout.groups_dir={(half if replay == 'r3' else joined).dir / 'rollouts'}"
    run = finish(output_dir, f"everything-{place}", groups_dir, *everything, only="train")
    kl = minibatches(run, "kl_to_reference")
    assert abs(kl[0][0]) < 1e-6, "the reference has the weights that RL started from"
    assert min(kl[0][1:] + kl[1] + kl[2]) > 1e-4, "and keeps them"
    for step in minibatches(run, "clip_fraction_responses"):
        assert step[0] == 0.0, "with replayed routes minibatch 1 is on-policy"
    assert minibatches(run, "corrected_fraction")[0] == [0.0] * 4
    truncated = [row["truncated_fraction"] for row in run.rows if row["minibatches"]]
    assert [row["filtered_fraction"] for row in run.rows if row["minibatches"]] == truncated
    assert any(not torch.equal(a, b) for a, b in zip(weights(run.dir / "hf"), weights(joined.dir / "hf"), strict=True))


def test_only_rollout_saves_groups_of_the_starting_weights(half, joined):
    ids = [[r.response_ids for r in g.rollouts] for g in half.groups(1)]
    assert ids == [[r.response_ids for r in g.rollouts] for g in joined.groups(1)]
    assert not (half.dir / "hf").exists()


def test_rollouts_bring_routes_where_they_are_replayed(half, joined):
    routes = RouteFormat.of(json.loads((ROOT / "recipes" / "tiny-moe" / "config.json").read_text()))
    for step in (1, 2, 3):
        for group in half.groups(step):
            for rollout in group.rollouts:
                num_tokens = len(group.prompt.token_ids) + len(rollout.response_ids)
                assert len(rollout.routed_experts) == routes.num_bytes(num_tokens)
    assert {r.routed_experts for group in joined.groups(1) for r in group.rollouts} == {None}


async def score_all(url, sequences):
    async with aiohttp.ClientSession() as session:
        client = ServerClient(session, url, timeout_s=60.0)
        return [await client.score(ids) for ids in sequences]


def served_logprobs(model_dir, sequences, log_path):
    """Prompt log-probs of a fresh SGLang server with these weights."""
    recipe = load_recipe(ROOT / "recipes" / "gspo-tiny-moe-cpu.yaml")
    engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=log_path)
    try:
        engine.wait_ready(timeout_s=180)
        return asyncio.run(score_all(engine.url, sequences))
    finally:
        engine.stop()


def test_export_and_checkpoint_hold_the_weights_that_the_trainer_had(joined, tmp_path):
    from transformers import AutoModelForCausalLM

    sequences = [s.prompt_ids + s.response_ids for s in tiny_sequences(8)]
    trainer = spawn(checkpoint_logprobs, 1, str(joined.dir / "checkpoint"), sequences, timeout_s=120)[0]
    model = AutoModelForCausalLM.from_pretrained(joined.dir / "hf", dtype=torch.float32).eval()
    served = served_logprobs(joined.dir / "hf", sequences, tmp_path / "server.log")
    for ids, logprobs, from_server in zip(sequences, trainer, served, strict=True):
        with torch.no_grad():
            table = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
        assert_close(table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], logprobs, EXPORT_LOGPROBS)
        assert_close(from_server, logprobs, EXPORT_LOGPROBS)


def test_run_starts_from_a_megatron_checkpoint_as_from_its_hugging_face_export(output_dir, joined):
    one_silent_step = ["cold_start=null", "optimizer.lr=0.0", "train.num_rollout_steps=1"]
    runs = {
        name: finish(output_dir, f"from_{name}", f"model.load={joined.dir / name}", *one_silent_step)
        for name in ("checkpoint", "hf")
    }
    tokens = {name: sampled(run.groups(1)) for name, run in runs.items()}
    assert tokens["checkpoint"] == tokens["hf"] != sampled(joined.groups(1))
    assert runs["checkpoint"].rows[0]["evaluation"] == runs["hf"].rows[0]["evaluation"]
    means = [row[0] for run in runs.values() for row in minibatches(run, "mismatch_abs_mean")]
    assert max(means) < MAX_MISMATCH


def test_run_leaves_what_the_readme_says(joined):
    for name in ("resolved.yaml", "versions.json", "metrics.jsonl", "checkpoint", "hf", "tensorboard", "report.html"):
        assert (joined.dir / name).exists(), name
    versions = json.loads((joined.dir / "versions.json").read_text())
    assert versions["megatron-core"] == "0.19.2"
    page = (joined.dir / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", "")
    assert "accuracy before" in joined.output


def test_tensorboard_reads_the_curves(joined):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(joined.dir / "tensorboard"))
    events.Reload()
    rewards = [e.value for e in events.Scalars("train/reward_mean")]
    assert rewards == pytest.approx([row["reward_mean"] for row in joined.rows[1:]], rel=1.0e-6)


def running(launched: Launched, text: str) -> list[psutil.Process]:
    """Processes of the run whose command line holds text."""
    return [p for p in launched.tree() if text in " ".join(p.cmdline())]


def assert_ends(launched: Launched, *, status: int, timeout_s: float):
    """The run ends in time with one error message, and nothing of it is left."""
    tree = launched.tree()
    done = launched.wait(timeout_s=timeout_s)
    assert done.returncode == status, done.text
    _, alive = psutil.wait_procs(tree, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    return done.text


@pytest.mark.timeout(600)
def test_run_whose_servers_die_and_lie_trains_on_the_same_tokens(output_dir, joined):
    faults = [
        Fault(do="nan_logprob", server="server_1", pushes=2, nth=2),
        Fault(do="kill", server="server_0", pushes=2, nth=4),
        Fault(do="kill", on="update_weights_from_distributed", server="server_1", pushes=3),
    ]
    run = suffer(output_dir, "faults", faults)
    assert [hit["do"] for hit in run.hits] == ["nan_logprob", "kill", "kill"]
    assert_complete(run)
    assert run.token_ids() == [[[r.response_ids for r in g.rollouts] for g in joined.groups(s)] for s in (1, 2, 3)]


def test_killed_rank_is_one_error_within_a_minute_and_nothing_is_left(output_dir, joined):
    launched = launch(output_dir, "rank_killed", "train.num_rollout_steps=500")
    wait_for_line(launched, "step    1", timeout_s=180)
    running(launched, "-m gspo_megatron.train")[-1].kill()
    text = assert_ends(launched, status=1, timeout_s=60)
    assert text.count("error: ") == 1
    assert "trainer ended" in text


def test_interrupt_stops_what_was_started_and_nothing_else(output_dir, joined):
    with psutil.Popen(["sleep", "600"]) as bystander:
        launched = launch(output_dir, "interrupted", "train.num_rollout_steps=500")
        wait_for_line(launched, "step    1", timeout_s=180)
        launched.process.send_signal(2)
        text = assert_ends(launched, status=130, timeout_s=60)
        assert "interrupted" in text
        assert "Traceback" not in text
        assert bystander.is_running()
        bystander.kill()


def test_busy_port_is_refused_before_anything_starts(output_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(output_dir, "busy", f"cluster.server_port={port}").wait(timeout_s=60)
    assert done.returncode == 2
    assert f"cluster.server_port={port}: port is in use" in done.text
    assert not (output_dir / "busy").exists()
