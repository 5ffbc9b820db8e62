"""The policy on packed, uneven sequences against transformers on each alone: log-probs, entropy, gradients."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import read_config, write_hf_dir
from tests.distributed.policy_worker import HF_DIR, build, hf_view_of, tiny_sequences, tiny_tensors
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_GRADIENT, PARITY_LOGPROBS, assert_close

TEMPERATURE = 0.8
ONE = ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"]


def one_process(rank: int) -> dict[str, Any]:
    """Log-probs, summed entropy per response and weight gradients of a supervised step, on two packed microbatches."""
    overrides = ["batch.max_tokens_per_microbatch=256", "parallel.use_distributed_optimizer=false"]
    recipe, policy, optimizer = build([*ONE, *overrides, "optimizer.clip_grad=1.0e+9"])
    from gspo_megatron.loss import sft_loss
    from gspo_megatron.optimize import add_old_logprobs, compute_logprobs, optimizer_step

    sequences = tiny_sequences()
    batch = pack_batch(
        sequences, recipe.batch.max_tokens_per_microbatch, policy.parallel.batch_layout, minibatch_index=0
    )
    step = partial(optimizer_step, policy, optimizer, batch, sft_loss, temperature=TEMPERATURE)
    results: dict[str, Any] = {
        "microbatches": batch.microbatches,
        "logprobs": compute_logprobs(policy, batch, temperature=TEMPERATURE),
        "old": add_old_logprobs(policy, [batch], temperature=TEMPERATURE, source="recompute")[0].microbatches,
        "step": step(denominator=sum(len(s.response_ids) for s in sequences), lr=0.0),
    }
    results["grad"] = hf_view_of(policy, {n: p.main_grad for n, p in policy.parameters()})
    return results


def by_transformers(hf_dir: Path, sequences: list[TrainSequence]) -> dict[str, Any]:
    """The same by transformers, one sequence at a time; log-probs and entropy of the response tokens only."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager", dtype=torch.float32)
    num_tokens = sum(len(s.response_ids) for s in sequences)
    logprobs, entropies, loss = [], [], 0.0
    for s in sequences:
        ids = torch.tensor([s.prompt_ids + s.response_ids])
        log_p = (model(ids).logits[0].float() / TEMPERATURE).log_softmax(-1)[len(s.prompt_ids) - 1 : -1]
        own = log_p.gather(1, torch.tensor(s.response_ids)[:, None])[:, 0]
        logprobs.append(own.detach())
        entropies.append(-(log_p.exp() * log_p).sum(-1).detach())
        (-own.sum() / num_tokens).backward()
        loss -= float(own.detach().sum()) / num_tokens
    grad = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logprobs": logprobs, "entropies": entropies, "loss": loss, "grad": _per_expert(grad)}


def _per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of files for what transformers holds fused in memory."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    named[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = half
        elif name.endswith("experts.down_proj"):
            named |= {name.replace("down_proj", f"{e}.down_proj.weight"): t for e, t in enumerate(tensor)}
        else:
            named[name] = tensor
    return named


@pytest.fixture(scope="module")
def actual() -> dict[str, Any]:
    return spawn(one_process, 1, timeout_s=120)[0]


@pytest.fixture(scope="module")
def in_order(actual: dict[str, Any]) -> list[int]:
    """Index of each packed response among tiny_sequences, in the order of packing."""
    whole = [s.prompt_ids + s.response_ids for s in tiny_sequences()]
    order = []
    for m in actual["microbatches"]:
        for start, length in zip(m.cu_seqlens_padded.tolist()[:-1], m.cu_seqlens.diff().tolist(), strict=True):
            order.append(whole.index(tuple(m.tokens_T[start : start + length].tolist())))
    assert sorted(order) == list(range(len(whole)))
    return order


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    hf_dir = tmp_path_factory.mktemp("parity") / "hf"
    config = read_config(HF_DIR)
    ops = family_of(config).op_list(config)
    tensors = tiny_tensors(ops)
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_hf_dir(hf_dir, specs, tensors.items(), companions_from=HF_DIR)
    return by_transformers(hf_dir, tiny_sequences())


def test_logprobs_equal(actual: dict[str, Any], want: dict[str, Any], in_order: list[int]) -> None:
    assert len(actual["microbatches"]) >= 2 and len(actual["microbatches"][0].response_length_B) >= 5
    packed = [lp[m.response_mask_T] for lp, m in zip(actual["logprobs"], actual["microbatches"], strict=True)]
    expected = torch.cat([want["logprobs"][i] for i in in_order])
    assert expected.std() > 0.5, "the model is not uniform"
    assert_close(torch.cat(packed), expected, PARITY_LOGPROBS)


def test_old_logprobs_equal(actual: dict[str, Any], want: dict[str, Any], in_order: list[int]) -> None:
    packed = [m.old_logprobs_T[m.response_mask_T] for m in actual["old"]]
    expected = torch.cat([want["logprobs"][i] for i in in_order])
    assert_close(torch.cat(packed), expected, PARITY_LOGPROBS)


def test_entropy_equals(actual: dict[str, Any], want: dict[str, Any]) -> None:
    per_response = actual["step"].per_response  # in the order of the sequences, however they were packed
    assert per_response["length"].tolist() == [len(e) for e in want["entropies"]]
    means = torch.stack([e.mean() for e in want["entropies"]])
    assert_close(per_response["entropy_sum"] / per_response["length"], means, PARITY_LOGPROBS)


def test_loss_and_gradients_of_every_weight_equal(actual: dict[str, Any], want: dict[str, Any]) -> None:
    assert_close(actual["step"].loss, want["loss"], PARITY_LOGPROBS)
    assert actual["grad"].keys() == want["grad"].keys()
    for name, gradient in want["grad"].items():
        assert gradient.count_nonzero() > 0, name
        assert_close(actual["grad"][name], gradient, FLOAT32_GRADIENT)
    norm = torch.stack([g.double().norm() for g in want["grad"].values()]).norm()
    assert_close(actual["step"].grad_norm, norm, FLOAT32_GRADIENT)
