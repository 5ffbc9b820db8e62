"""Real pretrained weights, SmolLM2-135M-Instruct: both ways through the converter, and into SGLang by a push."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine, post
from gspo_megatron.fleet import Fleet, Server, announce
from tests.distributed.policy_worker import RECIPE
from tests.distributed.spawn import spawn
from tests.tolerances import SMOLLM2_LOGPROBS, assert_close

ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is 7 + 5?", "Name three colours of the rainbow.", "Write one sentence about the sea.")
MAX_NEW_TOKENS = 48
END = 2
"""Token id of <|im_end|>."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def tool(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, f"tools/{name}.py", *arguments], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source/ as transformers writes it, mcore/ converted from it, back/ converted from that."""
    folder = tmp_path_factory.mktemp("smollm2")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / '.venv' / 'soak'}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.soak.write_smollm2", str(folder / "source")]
    subprocess.run(command, cwd=ROOT, check=True, env=environment)
    tool("convert_hf_to_mcore", "--hf-dir", f"{folder}/source", "--mcore-dir", f"{folder}/mcore")
    tool("convert_mcore_to_hf", "--mcore-dir", f"{folder}/mcore", "--hf-dir", f"{folder}/back")
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "back")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


@pytest.fixture(scope="module")
def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Token ids that transformers generates from source/."""
    return by_transformers(folder / "source", prompts)


def by_transformers(hf_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32, attn_implementation="eager").eval()
    generate: Any = model.generate
    options = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
    return [up_to_end(generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()) for ids in prompts]


def up_to_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END) + 1] if END in ids else ids


def recipe_of(folder: Path) -> list[str]:
    return [
        *(f"model.hf_dir={folder / 'source'}", f"model.load={folder / 'mcore'}", "cold_start=null"),
        *("cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1", "batch.max_tokens_per_microbatch=1024"),
    ]


def push_and_score(rank: int, folder: Path, url: str, sequences: list[tuple[list[int], list[int]]]) -> list[Any]:
    """Load mcore/ into the policy, push it to the server, and return the responses' log-probs."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.checkpoint import load_initial_weights
    from gspo_megatron.mcore.model import build_optimizer, build_policy
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.optimize import compute_logprobs
    from gspo_megatron.weight_sync import WeightSync

    recipe = load_recipe(RECIPE, recipe_of(folder))
    policy = build_policy(recipe, initialize(recipe))
    load_initial_weights(policy, build_optimizer(policy, recipe, recipe.optimizer), recipe, recipe.model.load)
    announce(folder / "servers", Server(name="server_0", url=url, incarnation=0))
    sync = WeightSync(policy, recipe, Fleet(folder / "servers"))
    sync.push(1)
    sync.close()
    packed = [TrainSequence(name="", prompt_ids=tuple(p), response_ids=tuple(r)) for p, r in sequences]
    batch = pack_batch(packed, 1024, policy.parallel.batch_layout, minibatch_index=0)
    found: dict[int, list[float]] = {}
    for m, logprobs_T in zip(batch.microbatches, compute_logprobs(policy, batch, temperature=1.0), strict=True):
        for index, number in enumerate(m.response_number_B.tolist()):
            found[number] = logprobs_T[m.response_mask_T & (m.response_index_T == index)].tolist()
    return [found[i] for i in range(len(sequences))]


async def generate_greedily(url: str, prompts: list[list[int]]) -> list[list[int]]:
    sampling = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        bodies = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts]
        answers = [await post(session, f"{url}/generate", body, timeout_s=300) for body in bodies]
    return [up_to_end(answer["output_ids"]) for answer in answers]


def test_every_tensor_comes_back_bit_for_bit(folder: Path) -> None:
    source, back = load_file(folder / "source" / "model.safetensors"), load_file(folder / "back" / "model.safetensors")
    assert source.keys() == back.keys() and len(source) == 272
    for name, tensor in source.items():
        assert torch.equal(tensor, back[name]), name


def test_export_generates_the_same_text_in_transformers(
    folder: Path, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    from transformers import AutoTokenizer

    assert by_transformers(folder / "back", prompts) == greedy
    assert "12" in AutoTokenizer.from_pretrained(folder / "back").decode(greedy[0]), "it is a model that can add"


def test_server_generates_the_same_text_after_a_push_and_logprobs_agree(
    folder: Path, prompts: list[list[int]], greedy: list[list[int]]
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = load_recipe(RECIPE, recipe_of(folder))
    engine = Engine.start(
        recipe, model_dir=folder / "source", port=0, log_path=folder / "server.log", load_format="dummy"
    )
    try:
        engine.wait_ready(timeout_s=300)
        assert asyncio.run(generate_greedily(engine.url, prompts)) != greedy, "the server started without weights"
        sequences = list(zip(prompts, greedy, strict=True))
        (logprobs,) = spawn(push_and_score, 1, folder, engine.url, sequences, timeout_s=600)
        assert asyncio.run(generate_greedily(engine.url, prompts)) == greedy
    finally:
        engine.stop()
    model = AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.float32).eval()
    for (prompt, response), found in zip(sequences, logprobs, strict=True):
        with torch.no_grad():
            table = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert_close(found, table.gather(1, torch.tensor(response)[:, None])[:, 0], SMOLLM2_LOGPROBS)
