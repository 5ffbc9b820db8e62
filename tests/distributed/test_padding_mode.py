"""Padding changes nothing: rows or packed, whatever the alignment and the layout, auxiliary losses included."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import BatchLayout, TrainSequence, pack_batch
from gspo_megatron.config import load_recipe
from gspo_megatron.loss import policy_loss
from gspo_megatron.types import TrainBatch
from tests.distributed.policy_worker import HF_DIR, RECIPE, build, hf_tensors, tiny_sequences, tiny_tensors
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_GRADIENT, FLOAT32_LOSS, PARITY_LOGPROBS, assert_close

NUM_SEQUENCES, NUM_ROWS, MAX_TOKENS = 23, 12, 29
COMMON = [
    "parallel.expert_model_parallel_size=1",
    "parallel.use_distributed_optimizer=false",
    "model.mcore.moe_router_load_balancing_type=aux_loss",
    "model.mcore.moe_aux_loss_coeff=0.3",
    "model.mcore.moe_z_loss_coeff=0.03",
]
TP2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
LAYOUTS = {
    "one": (1, []),
    "tp2_sp": (2, TP2),
    "cp2": (2, ["parallel.context_parallel_size=2"]),
    "pp2": (2, PP2),
    "tp2_sp_pp2_vpp2": (4, [*TP2, *PP2, "parallel.virtual_pipeline_model_parallel_size=2"]),
}


def sequences_with_holes() -> list[TrainSequence]:
    """Every other response is multi-turn: a third of its tokens is context, with log-probs that nobody gave."""
    result = []
    for i, s in enumerate(tiny_sequences(NUM_SEQUENCES)):
        mask = tuple(not (i % 2 and t % 3 == 1) for t in range(len(s.response_ids)))
        rollout_logprobs = tuple(-1.0 if sampled else float("nan") for sampled in mask)
        result.append(replace(s, response_mask=mask, rollout_logprobs=rollout_logprobs))
    return result


def two_microbatches(mode: str, layout: BatchLayout) -> TrainBatch:
    """Sequences 0, 2, 4, ... and 1, 3, 5, ... in any mode: the auxiliary loss is a microbatch's own."""
    sequences = sequences_with_holes()
    assert max(s.num_tokens for s in sequences) <= MAX_TOKENS
    multiple = layout.microbatch_padding_multiple
    budget = NUM_ROWS * (-(-MAX_TOKENS // multiple) * multiple) // layout.cp_size
    batch = pack_batch(sequences, budget, layout, minibatch_index=0, mode="padded")
    if mode == "padded":
        assert [m.response_number_B.tolist()[-1] for m in batch.microbatches] == [22, -1], "wants a dummy row"
        return batch
    alone = replace(layout, microbatch_multiple=1)
    packed = [pack_batch(sequences[b::2], 1024, alone, minibatch_index=0).microbatches[0] for b in range(2)]
    packed = [replace(m, response_number_B=2 * m.response_number_B + b) for b, m in enumerate(packed)]
    return replace(batch, microbatches=packed)


def one_microbatch(with_dummy: bool, layout: BatchLayout) -> TrainBatch:
    """One microbatch and, with_dummy, a second that is padding only."""
    batch = pack_batch(tiny_sequences(12), 1024, layout, minibatch_index=0)
    if not with_dummy:
        return batch
    pair = pack_batch(tiny_sequences(1), 1024, replace(layout, microbatch_multiple=2), minibatch_index=0)
    dummy = pair.microbatches[1]
    assert dummy.is_padding_T.all()
    return replace(batch, microbatches=[*batch.microbatches, dummy])


def logprob_table(batch: TrainBatch) -> Tensor:
    """[sequence, position] log-probs of this rank's response tokens; 0 elsewhere."""
    table = torch.zeros(NUM_SEQUENCES, MAX_TOKENS)
    for m in batch.microbatches:
        assert m.old_logprobs_T is not None
        where = m.response_number_B[m.response_index_T], m.position_ids_T
        keep = m.response_mask_T
        table[where[0][keep], where[1][keep]] = m.old_logprobs_T[keep]
    return table


def numbers(rank: int, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """Log-probs, loss and gradient of one step in each mode, on one layout."""
    recipe, policy, optimizer = build(["optimizer.clip_grad=1.0e+9", *COMMON, *overrides])
    from gspo_megatron.mcore.model import load_hf_weights
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    layout = policy.parallel.batch_layout
    batches = {
        "packed": two_microbatches("packed", layout),
        "aligned": two_microbatches("packed", replace(layout, pack_alignment=48)),
        "padded": two_microbatches("padded", layout),
    }
    if recipe.parallel.virtual_pipeline_model_parallel_size is None:
        batches |= {"alone": one_microbatch(False, layout), "beside_dummy": one_microbatch(True, layout)}
    loss_fn = partial(policy_loss, cfg=recipe.loss, cp_group=policy.parallel.shared_cp_group)
    results = {}
    for name, packed in batches.items():
        load_hf_weights(policy, optimizer, tiny_tensors(policy.ops), "tiny_tensors")
        (batch,) = add_old_logprobs(policy, [packed], temperature=1.0, source="recompute")
        step = partial(optimizer_step, denominator=batch.num_responses, lr=0.0, temperature=1.0)
        loss = step(policy, optimizer, batch, loss_fn).loss
        with torch.no_grad():  # through the weights' own way out; not by name, which pipeline chunks share
            for _, parameter in policy.parameters():
                parameter.copy_(parameter.main_grad.view(parameter.shape))
        results[name] = {"logprobs": logprob_table(batch), "loss": loss, "gradient": hf_tensors(policy)}
    return results


def recipe_alignments(rank: int) -> list[tuple[int, int]]:
    """(pack_alignment, microbatch_multiple) of recipes that differ in model.mcore and parallel."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.mcore.parallel import microbatch_multiple, pack_alignment

    recipe = load_recipe(RECIPE, [f"model.hf_dir={HF_DIR}"])
    interleaved = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"pipeline_model_parallel_size": 4}),
        ({"fp8": "e4m3"}, {"tensor_model_parallel_size": 1}),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, {"tensor_model_parallel_size": 4}),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, {"tensor_model_parallel_size": 2}),
        ({"fp8": None, "fp8_recipe": "mxfp8"}, interleaved),
    ]
    results = []
    for mcore, parallel in cases:
        model = replace(recipe.model, mcore={**recipe.model.mcore, **mcore})
        changed = replace(recipe, model=model, parallel=replace(recipe.parallel, **parallel))
        results.append((pack_alignment(changed), microbatch_multiple(changed)))
    return results


def test_alignments_follow_fp8_and_the_interleaved_schedule() -> None:
    assert spawn(recipe_alignments, 1)[0] == [(1, 1), (16, 1), (64, 1), (64, 1), (1, 4)]


@cache
def ranks_of(layout: str) -> list[dict[str, dict[str, Any]]]:
    world_size, overrides = LAYOUTS[layout]
    return spawn(numbers, world_size, [f"cluster.trainer_ranks={world_size}", *overrides], timeout_s=120)


def assert_same_gradient(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.count_nonzero() > 0
        assert_close(actual[name], tensor, FLOAT32_GRADIENT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_of_padding_gives_the_numbers_of_one_process_packed(layout: str) -> None:
    expected = ranks_of("one")[0]["packed"]
    assert abs(expected["loss"]) > 1e-2
    ranks = ranks_of(layout)
    for mode in ("packed", "aligned", "padded"):
        tables = [r[mode]["logprobs"] for r in ranks]
        logprobs = sum(tables) if layout == "cp2" else tables[-1]
        assert_close(logprobs, expected["logprobs"], PARITY_LOGPROBS)
        assert_close(ranks[0][mode]["loss"], expected["loss"], FLOAT32_LOSS)
        assert_same_gradient(ranks[0][mode]["gradient"], expected["gradient"])


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "cp2", "pp2"])
def test_a_microbatch_of_padding_only_adds_nothing_to_the_gradient(layout: str) -> None:
    result = ranks_of(layout)[0]
    assert_same_gradient(result["beside_dummy"]["gradient"], result["alone"]["gradient"])
    assert_same_gradient(result["beside_dummy"]["gradient"], ranks_of("one")[0]["alone"]["gradient"])


def gradients_of_the_last_router(rank: int) -> tuple[Tensor, Tensor]:
    """The step's where every advantage is 0, and that of the z-loss written out over the router's inputs."""
    coeff = 0.03
    keys = ["cluster.trainer_ranks=1", "optimizer.clip_grad=1.0e+9", f"model.mcore.moe_z_loss_coeff={coeff}"]
    recipe, policy, optimizer = build([*COMMON[:2], *keys])
    from megatron.core.transformer.moe.router import TopKRouter

    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    sequences = [replace(s, advantage=0.0) for s in tiny_sequences()]
    layout = replace(policy.parallel.batch_layout, alignment=8)
    batch = pack_batch(sequences, 160, layout, minibatch_index=0)
    assert len(batch.microbatches) > 2
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="recompute")
    router = [m for m in policy.chunks[0].modules() if isinstance(m, TopKRouter)][-1]
    inputs: list[Tensor] = []
    router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().flatten(0, 1)))
    loss_fn = partial(policy_loss, cfg=recipe.loss)
    optimizer_step(policy, optimizer, batch, loss_fn, denominator=batch.num_responses, lr=0.0, temperature=1.0)
    kept = [x[~m.is_padding_T] for x, m in zip(inputs, batch.microbatches, strict=True)]
    weight = router.weight.detach().clone().requires_grad_()
    z_loss = coeff * (torch.cat(kept) @ weight.t()).logsumexp(dim=-1).square().mean()
    return router.weight.main_grad, torch.autograd.grad(z_loss, weight)[0]


def test_z_loss_is_its_coefficient_times_the_mean_over_tokens_whatever_the_terms_are_divided_by() -> None:
    ((actual, expected),) = spawn(gradients_of_the_last_router, 1)
    assert expected.count_nonzero() > 0
    assert_close(actual, expected, FLOAT32_GRADIENT)
