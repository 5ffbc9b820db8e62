"""What tests on real servers share: prompts, a client of some servers, a push by hand, transformers as reference."""

import asyncio
import random
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import aiohttp
import torch

from gspo_megatron.engine import ServerClient, post, take_port
from gspo_megatron.fleet import Fleet, Server, announce
from gspo_megatron.rollout import Client, Vocabulary, sampling_seed
from gspo_megatron.sglang_checksum import send_plan
from gspo_megatron.types import Prompt

EOS, VOCAB = 1, 48
HOST = "127.0.0.1"


def make_prompts(count):
    rng = random.Random(5)
    ids = [tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(3, 14))) for _ in range(count)]
    return [Prompt(prompt_id=f"{i:064x}", text="", token_ids=t, expected="", entry={}) for i, t in enumerate(ids)]


VOCABULARY = Vocabulary(
    size=VOCAB,
    stop_token_ids=frozenset({EOS}),
    decode=lambda ids: " ".join(map(str, ids)),
    encode=lambda text: [int(word) for word in text.split()],
)


def make_fleet(folder, urls, *, weight_version=0):
    """A fleet of these servers, all confirmed."""
    for i, url in enumerate(urls):
        announce(folder, Server(name=f"server_{i}", url=url, incarnation=0))
    fleet = Fleet(folder)
    fleet.confirm(fleet.announced(), weight_version)
    return fleet


def sample(urls, prompts, recipe, **options):
    """Groups of these servers, without the client's counts."""
    return sample_and_count(urls, prompts, recipe, **options)[0]


def sample_and_count(
    urls,
    prompts,
    recipe,
    *,
    vocabulary=VOCABULARY,
    seed=1,
    rollout_step=0,
    weight_version=0,
    group_size=8,
    temperature=1.0,
    wait_s=1.0,
):
    """Groups of these servers, and the client's events; gives up soon when no server is left."""
    urls = [urls] if isinstance(urls, str) else urls
    recipe = replace(recipe, cluster=replace(recipe.cluster, start_timeout_s=wait_s, probe_timeout_s=0.0))

    async def run(folder):
        async with Client(make_fleet(folder, urls, weight_version=weight_version), recipe, vocabulary) as client:
            groups = await asyncio.gather(
                *(
                    client.sample_group(
                        prompt,
                        [sampling_seed(seed, rollout_step, prompt.prompt_id, member) for member in range(group_size)],
                        temperature=temperature,
                    )
                    for prompt in prompts
                )
            )
            return groups, client.take_events()

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


def rollout_with(recipe, **keys):
    return replace(recipe, rollout=replace(recipe.rollout, **keys))


def tokens(groups):
    return {g.prompt.prompt_id: [r.response_ids for r in g.rollouts] for g in groups}


def hf_model(path):
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def hf_logprobs(model, ids, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double() / temperature
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def call(url, method, *args, timeout_s=60.0, **kwargs):
    async def run():
        async with aiohttp.ClientSession() as session:
            return await getattr(ServerClient(session, url, timeout_s=timeout_s), method)(*args, **kwargs)

    return asyncio.run(run())


async def push_weights(url, state, *, weight_version, mode="retract", flush=True):
    """Send all tensors of state in two messages over a gloo group of this process and the server.

    What runs is paused in a mode of SGLang's, and resumed.
    """
    from sglang.srt.utils.common import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    port, name = take_port(HOST, 0), f"push-{weight_version}-{time.monotonic_ns()}"
    half = len(state) // 2
    buckets = [list(state.items())[:half], list(state.items())[half:]]

    async with aiohttp.ClientSession() as session:
        server = ServerClient(session, url, timeout_s=60)
        await post(session, f"{url}/pause_generation", {"mode": mode}, timeout_s=60)
        joined = asyncio.create_task(
            server.init_weights_update_group(
                master_address=HOST, master_port=port, rank_offset=1, world_size=2, group_name=name, backend="gloo"
            )
        )
        group = await asyncio.to_thread(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://{HOST}:{port}",
            world_size=2,
            rank=0,
            group_name=name,
            timeout=timedelta(seconds=60),
        )
        await joined
        await server.begin_weight_update()
        received = asyncio.create_task(server.update_weights_from_distributed(group_name=name))
        plan = [[(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in bucket] for bucket in buckets]
        await asyncio.to_thread(send_plan, plan, group, torch.device("cpu"))
        for bucket in buckets:
            flat = FlattenedTensorBucket(named_tensors=bucket).get_flattened_tensor()
            await asyncio.to_thread(torch.distributed.broadcast, flat, src=0, group=group)
        await received
        await server.end_weight_update()
        if flush:
            await server.flush_cache()
        await server.update_weight_version(weight_version)
        await server.continue_generation()
        await server.destroy_weights_update_group(group_name=name)
        torch.distributed.destroy_process_group(group)


def push(url, state, **options):
    """push_weights, from outside an event loop."""
    asyncio.run(push_weights(url, state, **options))
