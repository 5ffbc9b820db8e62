"""Properties of every objective on random batches: 200 each, drawn the same on every run.

Responses of 0 to 4,096 tokens, log-ratios from far inside the band to far outside. The reference is plain Python
(reference.py).
"""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_megatron.config import CorrectionConfig, KlConfig, LossConfig
from gspo_megatron.loss import policy_loss
from gspo_megatron.types import Microbatch
from tests.tolerances import BITWISE, FLOAT64, FLOAT64_DIFFERENCE, FLOAT64_SUM, assert_close
from tests.unit import reference
from tests.unit.reference import Response
from tests.unit.test_loss import CONFIGS

two_hundred = settings(max_examples=200, deadline=None, derandomize=True, database=None)
EXTRAS = {  # everything that joins the terms, at once
    "correction": CorrectionConfig(name="tis", high=1.2),
    "kl": KlConfig(coef=0.1, estimator="k3", place="loss"),
    "entropy_coef": 0.01,
}
FIELDS = ("logprobs", "old", "rollout", "ref", "entropy", "advantages")


@dataclass(frozen=True)
class Batch:
    """Responses as float64 rows of FIELDS, [6, length] each."""

    rows: list[Tensor]

    @property
    def responses(self) -> list[Response]:
        names = ("logprobs", "old_logprobs", "rollout_logprobs")
        return [
            Response(**{n: row[i].tolist() for i, n in enumerate(names)}, advantages=row[5].tolist())
            for row in self.rows
        ]


@st.composite
def batches(draw: st.DrawFn, *, max_mean: float = 19.0, own_advantages: bool = False) -> Batch:
    """One to six responses; each has its own scale of log-ratio, whose mean stays within max_mean."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 40), st.sampled_from([1, 2, 400, 4096])), min_size=1, max_size=6))
    scales = draw(st.lists(st.sampled_from([1e-5, 4e-4, 1e-2, 0.3, max_mean]), min_size=len(lengths), max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows = []
    for length, scale in zip(lengths, scales, strict=False):
        row = -normal(len(FIELDS), length).abs()  # log-probs and, in row 4, minus the entropy
        mean = scale * (2.0 * torch.rand(1, generator=generator, dtype=torch.float64) - 1.0)
        row[1] = row[0] - mean - (min(scale, 0.1) * (noise := normal(length)) - min(scale, 0.1) * noise.mean())
        row[2] = row[1] + 0.2 * normal(length)
        row[5] = normal(length) if own_advantages else normal(1)
        rows.append(row)
    return Batch(rows)


def pack(
    rows: list[Tensor], *, order: list[int], gaps: list[int], garbage: float
) -> tuple[Tensor, Tensor, Microbatch]:
    """(logprobs_T, entropy_T, microbatch) of the rows in an order, each followed by a gap of garbage."""
    columns = [
        torch.cat([rows[i], torch.full((len(FIELDS), gap), garbage).double()], 1)
        for i, gap in zip(order, gaps, strict=True)
    ]
    packed = dict(zip(FIELDS, torch.cat(columns, 1), strict=True))
    index = [torch.full((c.shape[1],), place) for place, c in enumerate(columns)]
    mask = [torch.arange(c.shape[1]) < rows[i].shape[1] for i, c in zip(order, columns, strict=True)]
    mask_T, no_tokens = torch.cat(mask), torch.zeros(packed["old"].shape, dtype=torch.int64)
    microbatch = Microbatch(
        tokens_T=no_tokens,
        labels_T=no_tokens,
        position_ids_T=no_tokens,
        response_mask_T=mask_T,
        response_index_T=torch.where(mask_T, torch.cat(index), 0),
        response_length_B=torch.tensor([rows[i].shape[1] for i in order]),
        response_number_B=torch.tensor(order),
        advantages_B=torch.stack([rows[i][5, 0] if rows[i].shape[1] else torch.tensor(1.0).double() for i in order]),
        advantages_T=packed["advantages"],
        is_padding_T=~mask_T,
        rollout_logprobs_T=packed["rollout"],
        old_logprobs_T=packed["old"],
        ref_logprobs_T=packed["ref"],
        rollout_routes_T=None,
        routed_experts=None,
        row_length=None,
        cu_seqlens=no_tokens,
        cu_seqlens_padded=no_tokens,
        max_seqlen=0,
        num_unpadded_tokens=int(mask_T.sum()),
    )
    return packed["logprobs"].clone().requires_grad_(), packed["entropy"], microbatch


def run(
    rows: list[Tensor],
    cfg: LossConfig,
    *,
    order: list[int] | None = None,
    gaps: list[int] | None = None,
    garbage: float = 0.0,
) -> tuple[float, list[Tensor], list[dict[str, float]]]:
    """Loss sum, and by response in the rows' own order: gradient and per_response."""
    order = list(range(len(rows))) if order is None else order
    gaps = gaps or [0] * len(order)
    logprobs_T, entropy_T, microbatch = pack(rows, order=order, gaps=gaps, garbage=garbage)
    out = policy_loss(logprobs_T, entropy_T, microbatch, cfg)
    (grad_T,) = torch.autograd.grad(out.loss_sum, logprobs_T)
    pieces = grad_T.split([rows[i].shape[1] + gap for i, gap in zip(order, gaps, strict=True)])
    assert not any(piece[rows[i].shape[1] :].any() for i, piece in zip(order, pieces, strict=True)), "padding moves"
    place = {number: at for at, number in enumerate(order)}
    gradients = [pieces[place[i]][: rows[i].shape[1]] for i in sorted(order)]
    values = [{n: float(v[place[i]]) for n, v in out.per_response.items()} for i in sorted(order)]
    return float(out.loss_sum.detach()), gradients, values


def assert_same(actual: tuple, expected: tuple) -> None:
    """Loss, gradients, clip decisions and every other value by response."""
    assert_close(actual[0], expected[0], FLOAT64_SUM)
    for a, e in zip(actual[1], expected[1], strict=True):
        assert_close(a, e, FLOAT64_SUM)
    for a_row, e_row in zip(actual[2], expected[2], strict=True):
        for name, value in e_row.items():
            if name.endswith("_tokens"):
                assert a_row[name] == value
            assert_close(a_row[name], value, FLOAT64_DIFFERENCE)


names = st.sampled_from(sorted(CONFIGS))
seeds = st.integers(0, 2**31)


@two_hundred
@given(batches(), names, seeds)
def test_loss_does_not_depend_on_the_order_of_responses(batch: Batch, name: str, seed: int) -> None:
    cfg = replace(CONFIGS[name], **EXTRAS)
    order = list(range(len(batch.rows)))
    random.Random(seed).shuffle(order)
    assert_same(run(batch.rows, cfg, order=order), run(batch.rows, cfg))


@two_hundred
@given(batches(), names, seeds, st.sampled_from([math.nan, math.inf, -math.inf, 55.5, 1e30]))
def test_loss_does_not_depend_on_packing_or_on_what_padding_holds(
    batch: Batch, name: str, seed: int, garbage: float
) -> None:
    cfg = replace(CONFIGS[name], **EXTRAS)
    gaps = [random.Random(seed + i).randint(0, 9) for i in range(len(batch.rows))]
    assert_same(run(batch.rows, cfg, gaps=gaps, garbage=garbage), run(batch.rows, cfg))


@two_hundred
@given(batches(), names, seeds)
def test_sums_of_any_microbatch_split_add_up(batch: Batch, name: str, seed: int) -> None:
    cfg = replace(CONFIGS[name], **EXTRAS)
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    owner = [rng.randrange(count) for _ in batch.rows]
    parts = [[i for i, o in enumerate(owner) if o == part] for part in range(count)]
    results = {i: None for i in range(len(batch.rows))}
    total = 0.0
    for part in filter(None, parts):
        loss, gradients, values = run(batch.rows, cfg, order=part)
        total += loss
        results |= dict(zip(part, zip(gradients, values, strict=True), strict=True))
    gradients, values = zip(*(results[i] for i in range(len(batch.rows))), strict=True)
    assert_same((total, gradients, values), run(batch.rows, cfg))


@two_hundred
@given(batches())
def test_gspo_token_is_gspo_where_a_response_has_one_advantage(batch: Batch) -> None:
    assert_same(run(batch.rows, CONFIGS["gspo_token"]), run(batch.rows, CONFIGS["gspo"]))
    loss, _, _ = run(batch.rows, CONFIGS["gspo_token"])
    assert_close(loss, reference.loss_sum(batch.responses, CONFIGS["gspo"]), FLOAT64_DIFFERENCE)


@two_hundred
@given(batches(own_advantages=True), names)
def test_value_is_the_published_equation(batch: Batch, name: str) -> None:
    assume(name not in ("gspo", "gmpo") or all(row.shape[1] > 0 for row in batch.rows))
    loss, _, _ = run(batch.rows, CONFIGS[name])
    assert_close(loss, reference.loss_sum(batch.responses, CONFIGS[name]), FLOAT64_DIFFERENCE)


def is_near_a_kink(responses: list[Response], cfg: LossConfig) -> bool:
    """A ratio, of a token or a response, whose clip decision a step of 1e-4 nats could change."""
    some = [r.log_ratios for r in responses if r.logprobs]
    exponents = [x for ratios in some for x in [math.fsum(ratios) / len(ratios), *ratios]]
    edges = [-20.0, 20.0]
    edges += [math.log1p(cfg.clip_high), cfg.clip_high] if cfg.clip_high is not None else []
    edges += [math.log1p(-cfg.clip_low), -cfg.clip_low] if cfg.clip_low is not None else []
    return any(abs(x - edge) < 1e-4 for x in exponents for edge in edges)


@two_hundred
@given(batches(own_advantages=True), names, seeds)
def test_gradient_is_the_finite_difference_of_the_published_equation(batch: Batch, name: str, seed: int) -> None:
    cfg = CONFIGS[name]
    if name in ("gspo", "gspo_token"):
        cfg = replace(cfg, clip_low=0.02, clip_high=0.03)  # wide beside the step, and the scales lie on both sides
    assume(not is_near_a_kink(batch.responses, cfg))
    _, gradients, _ = run(batch.rows, cfg)
    generator = torch.Generator().manual_seed(seed)
    step = 1e-5
    for i, (row, gradient) in enumerate(zip(batch.rows, gradients, strict=True)):
        direction = torch.randn(row.shape[1], generator=generator, dtype=torch.float64)
        moved = []
        for sign in (1.0, -1.0):
            new = row.clone()
            new[0] += sign * step * direction
            moved.append(reference.loss_sum(Batch([new]).responses, cfg, [batch.responses[i]]))
        want = (moved[0] - moved[1]) / (2.0 * step)
        scale = float((gradient * direction).abs().sum()) + abs(moved[0])
        assert abs(float(gradient @ direction) - want) <= FLOAT64_DIFFERENCE.atol + 1e-6 * scale


@two_hundred
@given(
    st.sampled_from(["gspo", "gspo_token", "gmpo"]),
    st.integers(1, 4096),
    st.floats(20.001, 300.0),
    st.sampled_from([1.0, -1.0]),
    st.sampled_from([0.5, -0.5]),
)
def test_beyond_the_guard_the_value_is_clamped_the_gradient_zero_and_the_tokens_counted(
    name: str, length: int, mean: float, sign: float, advantage: float
) -> None:
    row = torch.zeros(len(FIELDS), length, dtype=torch.float64)
    row[0], row[5] = sign * mean, advantage
    cfg = replace(CONFIGS[name], clip_low=0.9, clip_high=1e3) if name == "gmpo" else CONFIGS[name]
    loss, (gradient,), (values,) = run([row], cfg)
    row[0] = sign * 20.0
    assert_close(loss, run([row], cfg)[0], FLOAT64_DIFFERENCE)
    assert_close(gradient, torch.zeros(length), BITWISE)
    is_bounded_first = name == "gmpo" and sign < 0 and advantage < 0  # by clip_low, which keeps the exponent small
    assert values["clamped_tokens"] == (0 if is_bounded_first else length)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_decides_as_float64_away_from_the_bounds(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for length in (1, 7, 100, 4096):
        row = -torch.randn(len(FIELDS), length, generator=generator, dtype=torch.float64).abs()
        row[1] = row[0] + 0.05 * torch.randn(length, generator=generator, dtype=torch.float64) / math.sqrt(length)
        row[5] = 1.0 if length % 2 else -1.0
        rows.append(row)
    wide = run(rows, CONFIGS[name])
    logprobs_T, entropy_T, m = pack(rows, order=[0, 1, 2, 3], gaps=[0] * 4, garbage=0.0)
    names = ("advantages_B", "advantages_T", "rollout_logprobs_T", "old_logprobs_T")
    narrow = {name: getattr(m, name).float() for name in names}
    out = policy_loss(logprobs_T.float(), entropy_T.float(), replace(m, **narrow), CONFIGS[name])
    assert out.loss_sum.dtype == torch.float32
    assert_close(out.loss_sum, wide[0], FLOAT64._replace(rtol=1e-5, atol=1e-5))
    assert out.per_response["clipped_tokens"].tolist() == [v["clipped_tokens"] for v in wide[2]]
