"""Routes from a real SGLang server: they are each token's own, whatever became of its request, and replaying them in
the trainer brings its log-probs to the server's (R3).

The server's routers are the trainer's with noise; its cache and its chunks of prompts are small.
"""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_megatron.batch import make_batches
from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine, post
from gspo_megatron.mismatch import mismatch_per_response, summarize_mismatch
from gspo_megatron.prompts import load_tokenizer
from gspo_megatron.rollout import Client
from gspo_megatron.routed_experts import RouteFormat, lay_out_routes, pack_routes
from gspo_megatron.types import Prompt, Rollout, RolloutGroup, TrainBatch
from tests.distributed.spawn import spawn
from tests.e2e.conftest import RECIPES, make_model_dir
from tests.e2e.serving import make_fleet, make_prompts
from tests.e2e.test_turns import SEEDS, make_vocabulary

VOCAB = 48
NOISE = 0.01
"""Standard deviation that moves 5 to 10 % of the slots; a router's weights have 0.15."""
MAX_TOTAL_TOKENS = 1024
"""Of the server's cache: fewer than the requests of a test ask for."""
TIED = 0.001
"""Share of (token, layer) pairs that rounding may turn; measured 0."""


def noisy_copy(model_dir: Path, path: Path) -> Path:
    """The model with other router weights."""
    shutil.copytree(model_dir, path)
    generator = torch.Generator().manual_seed(3)
    state = load_file(path / "model.safetensors")
    for name in sorted(state):
        if name.endswith("mlp.gate.weight"):
            state[name] += NOISE * torch.randn(state[name].shape, generator=generator)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def clean_dir(tmp_path_factory):
    """The trainer's model."""
    return make_model_dir(tmp_path_factory.mktemp("clean"), seed=0, max_position_embeddings=512)


@pytest.fixture(scope="module")
def noisy_dir(clean_dir, tmp_path_factory):
    """The server's."""
    return noisy_copy(clean_dir, tmp_path_factory.mktemp("noisy") / "model")


@pytest.fixture(scope="module")
def routes(clean_dir):
    return RouteFormat.of(json.loads((clean_dir / "config.json").read_text()))


@pytest.fixture(scope="module")
def url(clean_dir, noisy_dir, tmp_path_factory):
    """A ready server with the noisy routers and weight version 0."""
    sglang = {
        "mem_fraction_static": 0.3,
        "max_total_tokens": MAX_TOTAL_TOKENS,
        "chunked_prefill_size": 64,
        "max_running_requests": 32,
        "schedule_conservativeness": 0.05,  # so that it takes on more than fits, and has to retract
    }
    recipe = load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [*overrides(clean_dir), f"rollout.sglang={sglang}"])
    log_path = tmp_path_factory.mktemp("log") / "server.log"
    engine = Engine.start(recipe, model_dir=noisy_dir, port=0, log_path=log_path)
    try:
        engine.wait_ready(timeout_s=180)
        yield engine.url
    finally:
        engine.stop()


def overrides(clean_dir: Path) -> list[str]:
    return [f"model.hf_dir={clean_dir}", f"model.load={clean_dir}", "cold_start=null", "loss.routing_replay=r3"]


class Server:
    """Requests for routes."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    async def call(self, endpoint: str, **body: Any) -> Any:
        return await post(self.session, f"{self.url}/{endpoint}", body, timeout_s=120)

    async def generate(self, ids: list[int], num_tokens: int, seed: int) -> dict[str, Any]:
        return await self.call(
            "generate",
            input_ids=ids,
            sampling_params={
                "temperature": 1.0,
                "max_new_tokens": num_tokens,
                "ignore_eos": True,
                "sampling_seed": seed,
            },
            return_logprob=True,
            return_routed_experts=True,
        )

    async def flush(self) -> None:
        await self.call("flush_cache?timeout=30")

    async def push(self, model_dir: Path, version: int, mode: str) -> None:
        """Other weights while requests run."""
        await self.call("pause_generation", mode=mode)
        flush_cache = mode == "retract"  # in_place requests still need it
        await self.call(
            "update_weights_from_disk", model_path=str(model_dir), weight_version=str(version), flush_cache=flush_cache
        )
        await self.call("continue_generation")


def with_server(url: str, use: Any) -> Any:
    async def run() -> Any:
        async with aiohttp.ClientSession() as session:
            return await use(Server(session, url))

    return asyncio.run(run())


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def experts_of(answer: dict[str, Any], prompt: list[int], routes: RouteFormat) -> Tensor:
    """[tokens - 1, MoE layers, topk], each row in order."""
    n = len(prompt) + len(answer["output_ids"])
    packed = pack_routes(answer["meta_info"]["routed_experts"], n, routes)
    return lay_out_routes(packed, n, n, routes)[:-1].sort(-1).values


def share_different(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a != b).any(-1).float().mean())


async def assert_as_computed_anew(
    server: Server, prompts: list[list[int]], answers: list[Any], routes: RouteFormat
) -> None:
    """The routes of each answer are those of a request that has all its tokens as its prompt, and no cache."""
    for prompt, answer in zip(prompts, answers, strict=True):
        got, ids = experts_of(answer, prompt, routes), prompt + answer["output_ids"]
        await server.flush()
        fresh = await server.generate(ids, 1, seed=0)
        assert fresh["meta_info"]["cached_tokens"] == 0
        want = experts_of(fresh, ids, routes)[: len(got)]
        assert share_different(got, want) <= TIED
        assert share_different(got[1:], want[:-1]) > 0.5, "or a shift would not show"


def test_tokens_from_a_cached_prefix_have_their_own_routes(url, routes):
    async def use(server: Server) -> None:
        rng = random.Random(1)
        common = random_ids(rng, 150)
        prompts = [common + random_ids(rng, rng.randint(1, 9)) for _ in range(4)]
        await server.flush()
        first = await server.generate(prompts[0], 20, seed=1)
        later = await asyncio.gather(*[server.generate(p, 20, seed=i) for i, p in enumerate(prompts[1:])])
        assert [a["meta_info"]["cached_tokens"] for a in later] == [150] * 3
        await assert_as_computed_anew(server, prompts, [first, *later], routes)

    with_server(url, use)


def test_retracted_requests_have_their_tokens_own_routes(url, routes):
    async def use(server: Server) -> None:
        rng = random.Random(2)
        prompts = [random_ids(rng, rng.randint(3, 20)) for _ in range(5)]
        running = [asyncio.create_task(server.generate(p, 90, seed=i)) for i, p in enumerate(prompts)]
        while not all(task.done() for task in running):
            await asyncio.sleep(0.1)
            await server.call("pause_generation", mode="retract")
            await server.call("continue_generation")
        answers = await asyncio.gather(*running)
        assert min(a["meta_info"]["num_retractions"] for a in answers) > 0
        await assert_as_computed_anew(server, prompts, answers, routes)

    with_server(url, use)


def test_requests_retracted_for_want_of_memory_have_their_tokens_own_routes(url, routes):
    async def use(server: Server) -> None:
        rng = random.Random(3)
        prompts = [random_ids(rng, rng.randint(3, 20)) for _ in range(24)]
        answers = await asyncio.gather(*[server.generate(p, 100, seed=i) for i, p in enumerate(prompts)])
        retracted = [a["meta_info"]["num_retractions"] > 0 for a in answers]
        assert 2 <= sum(retracted) < len(answers)
        some = [retracted.index(False), *(i for i, was in enumerate(retracted) if was)][:4]
        await assert_as_computed_anew(server, [prompts[i] for i in some], [answers[i] for i in some], routes)

    with_server(url, use)


def test_responses_of_several_turns_have_the_routes_of_all_their_tokens(url, routes, clean_dir, tmp_path):
    turns = ["rollout.multi_turn=tests.e2e.test_turns:answer", "rollout.max_response_tokens=60", "rollout.max_turns=6"]
    recipe = load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [*overrides(clean_dir), *turns])
    vocabulary, (prompt,) = make_vocabulary(load_tokenizer(clean_dir)), make_prompts(1)

    async def use(server: Server) -> None:
        async with Client(make_fleet(tmp_path, [url]), recipe, vocabulary) as client:
            group = await client.sample_group(prompt, SEEDS, temperature=1.0, routes=routes)
        assert max(len(rollout.turn_lengths) for rollout in group.rollouts) > 2
        for rollout in group.rollouts:
            n, ids = len(prompt.token_ids + rollout.response_ids), list(prompt.token_ids + rollout.response_ids)
            got = lay_out_routes(rollout.routed_experts, n, n, routes)[:-1].sort(-1).values
            await server.flush()
            fresh = await server.generate(ids, 1, seed=0)
            assert share_different(got, experts_of(fresh, ids, routes)[: n - 1]) <= TIED

    with_server(url, use)


def transformers_experts(model_dir: Path, ids: list[int]) -> Tensor:
    """[tokens, MoE layers, topk], each row in order."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([x.topk(2).indices.sort(-1).values.to(torch.int16) for x in logits], dim=1)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_push_gives_retracted_tokens_new_routes_and_others_keep_their_own(url, routes, clean_dir, noisy_dir, mode):
    prompts = [random_ids(random.Random(i), 12) for i in range(3)]

    async def use(server: Server) -> list[Any]:
        running = [asyncio.create_task(server.generate(p, 120, seed=i)) for i, p in enumerate(prompts)]
        await asyncio.sleep(0.4)
        await server.push(clean_dir, 1, mode)
        answers = await asyncio.gather(*running)
        await server.push(noisy_dir, 0, "retract")
        return answers

    answers = with_server(url, use)
    for prompt, answer in zip(prompts, answers, strict=True):
        (old, new) = answer["meta_info"]["weight_versions"]
        assert (old["version"], new["version"]) == ("0", "1") and 0 < old["end"] < 119
        got, ids = experts_of(answer, prompt, routes), prompt + answer["output_ids"]
        of_old, of_new = (transformers_experts(d, ids)[:-1] for d in (noisy_dir, clean_dir))
        # The last of the old tokens was sampled by the pass that read the token before it.
        before = len(prompt) - 1 + old["end"]
        if mode == "retract":
            assert share_different(got, of_new) <= TIED
            assert share_different(got[:before], of_old[:before]) > 0.03
        else:
            assert share_different(got[:before], of_old[:before]) <= TIED
            assert share_different(got[:before], of_new[:before]) > 0.03


def as_group(prompt: list[int], answers: list[dict[str, Any]], routes: RouteFormat) -> RolloutGroup:
    rollouts = []
    for answer in answers:
        ids = answer["output_ids"]
        rollouts.append(
            Rollout(
                response_ids=tuple(ids),
                rollout_logprobs=tuple(v for v, _, _ in answer["meta_info"]["output_token_logprobs"]),
                weight_versions=(0,) * len(ids),
                finish_reason="length",
                text="",
                sampling_seed=0,
                advantage=1.0,
                routed_experts=pack_routes(answer["meta_info"]["routed_experts"], len(prompt) + len(ids), routes),
            )
        )
    return RolloutGroup(
        prompt=Prompt(prompt_id=str(prompt), text="", token_ids=tuple(prompt), expected="", entry={}),
        rollouts=tuple(rollouts),
    )


def mismatch_k3(batch: TrainBatch) -> float:
    per_response = [
        mismatch_per_response(
            m.old_logprobs_T,
            m.rollout_logprobs_T,
            response_mask_T=m.response_mask_T,
            response_index_T=m.response_index_T,
            response_length_B=m.response_length_B,
        )
        | {"length": m.response_length_B}
        for m in batch.microbatches
    ]
    joined = {name: torch.cat([values[name] for values in per_response]) for name in per_response[0]}
    return summarize_mismatch(joined)["mismatch_k3"]


def trainer_mismatch(rank: int, hf_dir: Path, groups: list[RolloutGroup]) -> dict[str, float]:
    """k3 with free and with replayed routes, and the share of slots whose expert the trainer would not have chosen."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.convert.hf_io import TensorReader
    from gspo_megatron.mcore.model import build_optimizer, build_policy, load_hf_weights
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.optimize import add_old_logprobs

    one_rank = ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1", "batch.num_minibatches=1"]
    recipe = load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [*overrides(hf_dir), *one_rank])
    policy = build_policy(recipe, initialize(recipe))
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_hf_weights(policy, optimizer, TensorReader(hf_dir), str(hf_dir))
    routes = RouteFormat.of(policy.hf_config)
    batches = make_batches(groups, recipe.batch, policy.parallel.batch_layout, routes=routes)
    (free,), (recorded,), (replayed,) = (
        add_old_logprobs(policy, batches, temperature=1.0, source="recompute", routing_replay=replay)
        for replay in ("none", "r2", "r3")
    )
    different = [
        ~(a[..., None] == b[..., None, :]).any(-1)[:, m.labels_T > 0]
        for m, n in zip(recorded.microbatches, replayed.microbatches, strict=True)
        for a, b in zip(m.routed_experts, n.routed_experts, strict=True)
    ]
    return {
        "free": mismatch_k3(free),
        "replayed": mismatch_k3(replayed),
        "slots": float(torch.cat(different, dim=1).float().mean()),
    }


def test_replay_lowers_the_mismatch_with_noisy_routers_by_more_than_half(url, routes, clean_dir):
    async def use(server: Server) -> list[RolloutGroup]:
        rng = random.Random(4)
        prompts = [random_ids(rng, rng.randint(4, 12)) for _ in range(16)]
        groups = []
        for number, prompt in enumerate(prompts):
            answers = await asyncio.gather(*[server.generate(prompt, 24, seed=100 * number + i) for i in range(8)])
            groups.append(as_group(prompt, answers, routes))
        return groups

    (got,) = spawn(trainer_mismatch, 1, clean_dir, with_server(url, use), timeout_s=120)
    assert 0.05 <= got["slots"] <= 0.10, got
    assert got["free"] > 1.0e-4, got
    assert got["replayed"] < 0.5 * got["free"], got
