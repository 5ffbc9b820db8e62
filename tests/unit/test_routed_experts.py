"""SGLang's routes: what is checked of its answer, how they are packed, and which position of a batch gets which."""

import base64
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import BatchLayout, TrainSequence, make_batches, pack_batch
from gspo_megatron.config import BatchConfig
from gspo_megatron.routed_experts import RouteFormat, lay_out_routes, pack_routes
from gspo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.models import TINY_CONFIGS

ROUTES = RouteFormat(num_layers=3, moe_layers=(0, 2), num_experts=6, topk=2)
MANY = replace(ROUTES, num_experts=300)
# [2 tokens, 3 layers, 2 experts]; layer 1 has none, and what stands there is not read.
EXPERTS = [[[5, 0], [4, 3], [1, 2]], [[3, 4], [1, 0], [2, 5]]]


def answer(experts: Any, dtype: torch.dtype = torch.int32) -> str:
    return base64.b64encode(torch.tensor(experts, dtype=dtype).numpy().tobytes()).decode()


def changed(token: int, layer: int, experts: list[int]) -> str:
    copy = torch.tensor(EXPERTS)
    copy[token, layer] = torch.tensor(experts)
    return answer(copy.tolist())


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3_moe", (0, 1, 2, 3)),
        ("qwen3_moe_sparse", (1, 3)),
        ("qwen3_moe_mlp_only", (1, 2, 3)),
        ("qwen2_moe_sparse", (1,)),
    ],
)
def test_format_names_the_layers_with_experts(name: str, layers: tuple[int, ...]) -> None:
    assert RouteFormat.of(TINY_CONFIGS[name]) == RouteFormat(num_layers=4, moe_layers=layers, num_experts=6, topk=2)


def test_model_without_experts_has_no_format() -> None:
    with pytest.raises(ValueError, match="model_type=qwen3: has no experts"):
        RouteFormat.of(TINY_CONFIGS["qwen3"])


def test_packed_routes_are_the_bytes_of_the_layers_with_experts() -> None:
    assert pack_routes(answer(EXPERTS), 3, ROUTES) == bytes([5, 0, 1, 2, 3, 4, 2, 5])
    assert ROUTES.num_bytes(3) == 8


def test_more_than_256_experts_take_two_bytes_each() -> None:
    packed = pack_routes(changed(0, 0, [299, 256]), 3, MANY)
    assert packed[:4] == bytes([299 - 256, 1, 0, 1]) and len(packed) == MANY.num_bytes(3) == 16
    assert pack_routes(answer(EXPERTS), 3, replace(ROUTES, num_experts=256)) == pack_routes(answer(EXPERTS), 3, ROUTES)
    assert lay_out_routes(packed, 3, 3, MANY)[0].tolist() == [[299, 256], [1, 2]]


def test_single_token_has_no_route() -> None:
    assert pack_routes("", 1, ROUTES) == b""
    assert lay_out_routes(b"", 1, 2, ROUTES)[:, 0].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "routed_experts=None: the server returned no routes; wants --enable-return-routed-experts"),
        ("AA*A", "routed_experts: not base64"),
        (answer(EXPERTS[:1]), r"has 24 bytes, wants int32 \[tokens - 1, layers, topk\] = \[2, 3, 2\]"),
        (answer(EXPERTS, torch.int64), r"has 96 bytes, wants int32"),
        (answer(EXPERTS + EXPERTS[:1]), r"has 72 bytes, wants int32"),
        (changed(1, 2, [2, 6]), r"1 of 4 routes are not 2 different experts in \[0, 6\): token 1, layer 2: \[2, 6\]"),
        (changed(0, 0, [-1, 3]), r"1 of 4 routes .*: token 0, layer 0: \[-1, 3\]"),
        (changed(1, 0, [4, 4]), r"1 of 4 routes .*: token 1, layer 0: \[4, 4\]"),
        (answer(torch.zeros(2, 3, 2).tolist()), r"4 of 4 routes .*: token 0, layer 0: \[0, 0\]; .*; .*1, layer 0"),
    ],
    ids="absent text one_token_less int64 one_token_more above below twice zeros".split(),
)
def test_record_that_is_absent_or_of_something_else_is_an_error(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_routes(given, 3, ROUTES)


def test_positions_without_a_route_get_experts_in_turn() -> None:
    packed = pack_routes(answer(EXPERTS), 3, ROUTES)
    laid_out = lay_out_routes(packed, 3, 5, ROUTES)
    assert laid_out.dtype == torch.int16
    assert laid_out[:, 0].tolist() == [[5, 0], [3, 4], [4, 5], [0, 1], [2, 3]]
    assert laid_out[:, 1].tolist() == [[1, 2], [2, 5], [4, 5], [0, 1], [2, 3]]
    assert lay_out_routes(None, 3, 3, ROUTES)[:, 0].tolist() == [[0, 1], [2, 3], [4, 5]]


# Each token's route says which token it is: expert = token id + MoE layer, + 100 for the second.
NUMBERED = RouteFormat(num_layers=2, moe_layers=(0, 1), num_experts=256, topk=2)


def numbered(first: int, num_prompt: int, num_response: int) -> TrainSequence:
    ids = tuple(range(first, first + num_prompt + num_response))
    return TrainSequence(
        name=f"sequence {first}",
        prompt_ids=ids[:num_prompt],
        response_ids=ids[num_prompt:],
        routed_experts=bytes(token + layer + more for token in ids[:-1] for layer in (0, 1) for more in (0, 100)),
    )


def expected_routes(tokens_T: Tensor) -> Tensor:
    offsets = torch.tensor([[0, 100], [1, 101]])
    return tokens_T[:, None, None] + offsets


@pytest.mark.parametrize("mode", ["packed", "padded"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_routes_lie_beside_their_tokens_on_every_rank(mode: Any, cp_size: int) -> None:
    sequences = [numbered(1, 3, 8), numbered(20, 2, 4), numbered(40, 5, 12), numbered(70, 1, 0), numbered(80, 2, 1)]
    seen = set()
    for dp_rank in range(2):
        for cp_rank in range(cp_size):
            layout = BatchLayout(dp_rank=dp_rank, dp_size=2, cp_rank=cp_rank, cp_size=cp_size, alignment=2)
            batch = pack_batch(sequences, 24, layout, minibatch_index=0, mode=mode, routes=NUMBERED)
            for m in batch.microbatches:
                assert m.rollout_routes_T is not None and m.routed_experts is None
                has_route_T = (m.labels_T > 0) & ~m.is_padding_T  # a next token, and so a pass that read this one
                got, want = m.rollout_routes_T[has_route_T].long(), expected_routes(m.tokens_T[has_route_T])
                assert torch.equal(got, want)
                seen |= set(m.tokens_T[has_route_T].tolist())
                others = m.rollout_routes_T[~has_route_T]
                assert (others[..., 0] != others[..., 1]).all()
    assert seen == {token for s in sequences for token in (*s.prompt_ids, *s.response_ids)[:-1]}


def test_batch_without_replay_carries_no_routes() -> None:
    (m,) = pack_batch(
        [numbered(1, 3, 8)],
        24,
        BatchLayout(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, alignment=1),
        minibatch_index=0,
    ).microbatches
    assert m.rollout_routes_T is None


def test_rollout_without_routes_or_with_those_of_other_tokens_is_named() -> None:
    prompt = Prompt(prompt_id="p", text="", token_ids=(2, 3), expected="", entry={})
    cfg = BatchConfig(num_minibatches=1, max_tokens_per_microbatch=16)
    layout = BatchLayout(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, alignment=1)

    def batch(routed_experts: bytes | None) -> None:
        rollout = Rollout(
            response_ids=(4, 1),
            rollout_logprobs=(-1.0, -1.0),
            weight_versions=(0, 0),
            finish_reason="stop",
            text="",
            sampling_seed=0,
            advantage=1.0,
            routed_experts=routed_experts,
        )
        make_batches([RolloutGroup(prompt=prompt, rollouts=(rollout,))], cfg, layout, routes=NUMBERED)

    batch(bytes(12))
    with pytest.raises(ValueError, match="prompt p, member 0: has no routed_experts, which loss.routing_replay: r3"):
        batch(None)
    with pytest.raises(ValueError, match=r"member 0: has 8 bytes of routed_experts, wants 12 for .* = \[3, 2, 2\]"):
        batch(bytes(8))
