"""FP8 quantiser against an independent float64 reference that decodes e4m3 by hand and rounds by exhaustive search."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_megatron import quantize
from gspo_megatron.quantize import as_blocks, dequantize_blockwise, quantize_blockwise, scale_shape

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def decode_e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


CODES = torch.tensor([decode_e4m3(code) for code in range(256)], dtype=torch.float64)


def nearest_codes(values: Tensor) -> Tensor:
    """The code nearest to each value, of two the even one, in its sign; the largest where the value lies beyond."""
    magnitudes = torch.arange(127)
    distance = (values.double().abs()[..., None] - CODES[magnitudes]).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    code = torch.argmax(torch.where(nearest, 2 - (magnitudes & 1), 0), dim=-1)
    return (code | (torch.signbit(values).long() << 7)).to(torch.uint8)


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    return [
        ((i, j), (slice(r, r + block[0]), slice(c, c + block[1])))
        for i, r in enumerate(range(0, shape[0], block[0]))
        for j, c in enumerate(range(0, shape[1], block[1]))
    ]


def reference_scale(amax: float, power_of_two: bool) -> float:
    if amax == 0:
        return 1.0
    if power_of_two:
        return next(2.0**k for k in range(-127, 128) if 448 * 2.0**k >= amax)
    # float64 holds amax / 448 to 29 bits more than float32 needs, so that rounding it again is the direct rounding
    return max(float(torch.tensor(amax / 448, dtype=torch.float64).float()), 2.0**-149)


def reference_quantize(weight: Tensor, block: tuple[int, int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    weight = weight.double()
    payload = torch.zeros(weight.shape, dtype=torch.uint8)
    scales = torch.zeros(math.ceil(len(weight) / block[0]), math.ceil(weight.shape[1] / block[1]), dtype=torch.float64)
    for place, box in blocks_of(weight.shape, block):
        scale = reference_scale(weight[box].abs().max().item(), power_of_two)
        scales[place] = scale
        payload[box] = nearest_codes(weight[box] / scale)
    return payload.view(E4M3), scales


def reference_dequantize(payload: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Exact products; float64 holds the 28 bits of each."""
    values = CODES[payload.view(torch.uint8).long()].clone()
    for place, box in blocks_of(payload.shape, block):
        values[box] *= scales[place].double().item()
    return values


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def weights(shape: tuple[int, int], *, dtype: torch.dtype, seed: int = 0, size: float = 0.02) -> Tensor:
    """Blocks of very different size, two rows of zeros, a denormal, a negative zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * size
    weight *= torch.exp2(torch.randint(-12, 4, shape, generator=generator).float())
    weight[: min(2, shape[0] - 1)] = 0
    weight[-1, 0], weight[-1, -1] = -0.0, 3.0e-41
    return weight.to(dtype)


SHAPES = [((128, 128), (128, 128)), ((7, 5), (4, 4)), ((10, 3), (3, 2)), ((4, 4), (8, 8)), ((6, 8), (1, 4)),
          ((9, 16), (1, 16)), ((9, 16), (9, 16)), ((1, 1), (128, 128)), ((130, 129), (128, 128))]  # fmt: skip


def test_codes_decode_as_the_format_says() -> None:
    assert torch.equal(torch.arange(256, dtype=torch.uint8).view(E4M3).double().nan_to_num(-1), CODES.nan_to_num(-1))
    assert decode_e4m3(0x7E) == 448 and decode_e4m3(0x01) == 2**-9 and decode_e4m3(0xC0) == -2.0


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_export_equals_the_reference(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, power_of_two: bool
) -> None:
    weight = weights(shape, dtype=dtype)
    payload, scale_inv = quantize_blockwise(weight, block, power_of_two_scale=power_of_two)
    want_payload, want_scales = reference_quantize(weight, block, power_of_two)
    assert_same_bits(weight, weights(shape, dtype=dtype))  # the caller's tensor is left alone
    assert tuple(scale_inv.shape) == scale_shape(shape, block) == tuple(want_scales.shape)
    assert_same_bits(scale_inv, want_scales.float())
    assert_same_bits(payload, want_payload)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_import_is_exact_to_the_rounding_of_the_target(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    payload = torch.where((codes & 0x7F) == 0x7F, 0, codes).view(E4M3)
    scales = torch.rand(scale_shape(shape, block), generator=generator)
    scales.view(-1)[0] = 1.2e-40  # denormal
    exact = reference_dequantize(payload, scales, block)
    assert_same_bits(dequantize_blockwise(payload, scales, block, dtype=dtype), exact.float().to(dtype))
    for scale_dtype in (torch.bfloat16, torch.float16, E8M0):
        stored = scales.to(scale_dtype)
        exact = reference_dequantize(payload, stored.double() if scale_dtype != E8M0 else stored.float(), block)
        got = dequantize_blockwise(payload, stored, block, dtype=dtype)
        assert_same_bits(got, exact.float().to(dtype))
        if scale_dtype != torch.float16:  # one rounding: the product has no more bits than float32
            assert torch.equal(exact.float().double(), exact)


def test_nan_codes_stay_nan() -> None:
    payload = torch.tensor([[0x7F, 0xFF, 0x7E]], dtype=torch.uint8).view(E4M3)
    for scale in (0.0, 2.0):
        got = dequantize_blockwise(payload, torch.tensor([[scale]]), (1, 3), dtype=torch.bfloat16)
        assert torch.isnan(got).tolist() == [[True, True, False]] and got[0, 2].item() == 448 * scale


def test_ties_of_the_exact_quotient_go_to_even_and_near_ties_to_the_nearer() -> None:
    # s is odd in its last bit and w the float32 next to s * tie: w / s is a tie only after rounding to float32
    scale = torch.tensor(1 + 5 * 2.0**-23)
    ties = torch.tensor([17 / 16 * 2.0**e for e in range(-5, 8)] + [19 / 16 * 2.0**e for e in range(-5, 8)])
    ties = torch.cat([ties, (torch.arange(8) + 0.5) * 2.0**-9])
    near = (ties.double() * scale.double()).float()
    near = torch.cat([near, torch.nextafter(near, torch.tensor(9e9)), torch.nextafter(near, torch.tensor(-9e9))])
    weight = torch.cat([torch.tensor([448.0]) * scale, near, -near])[None]
    payload, got_scale = quantize_blockwise(weight, (1, weight.shape[1]))
    assert got_scale.item() == scale.item()
    assert_same_bits(payload, reference_quantize(weight, (1, weight.shape[1]))[0])
    rounded_twice = (weight / scale).to(E4M3)
    assert not torch.equal(bits(payload), bits(rounded_twice)), "the weights are such that it makes a difference"


@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiny_blocks_stay_finite(power_of_two: bool) -> None:
    tiny = 2.0**-149
    for amax in (*(k * tiny for k in (1, 3, 223, 224, 225, 449, 672)), 1e-40, 1.1754944e-38, 448 * 2.0**-126):
        weight = torch.tensor([[amax, -amax / 2, tiny, 0.0]])
        payload, scale_inv = quantize_blockwise(weight, (1, 4), power_of_two_scale=power_of_two)
        want_payload, want_scale = reference_quantize(weight, (1, 4), power_of_two)
        assert_same_bits(scale_inv, want_scale.float())
        assert_same_bits(payload, want_payload)
        assert scale_inv.item() > 0
        back = dequantize_blockwise(payload, scale_inv, (1, 4), dtype=torch.float32)
        assert torch.isfinite(back).all()
        # half a step of e4m3 (2^-4), or of its denormals, and up to a third where a subnormal scale was rounded down
        limit = max(abs(amax) / 3, 2.0**-10 * scale_inv.item())
        assert ((back - weight).abs() <= limit).all(), (amax, back)


def test_block_of_zeros_has_scale_one_and_keeps_its_signs() -> None:
    for dtype in (torch.float32, torch.bfloat16, E8M0):
        weight = torch.tensor([[0.0, -0.0]])
        payload, scale_inv = quantize_blockwise(weight, power_of_two_scale=dtype == E8M0, scale_dtype=dtype)
        assert scale_inv.dtype == dtype and scale_inv.float().item() == 1.0
        assert payload.view(torch.uint8).tolist() == [[0, 0x80]]


def test_bfloat16_scales_are_used_as_stored() -> None:
    weight = weights((40, 40), dtype=torch.bfloat16)
    payload, scale_inv = quantize_blockwise(weight, (16, 16), scale_dtype=torch.bfloat16)
    _, float32_scales = reference_quantize(weight, (16, 16))
    assert_same_bits(scale_inv, torch.where(float32_scales == 0, 1, float32_scales).float().bfloat16())
    for place, box in blocks_of(weight.shape, (16, 16)):
        quotient = weight[box].double() / scale_inv[place].item()
        assert torch.equal(payload.view(torch.uint8)[box], nearest_codes(quotient))
    assert quantize_blockwise(torch.full((1, 1), 2.0**-140), scale_dtype=torch.bfloat16)[1].item() == 2.0**-133


def test_large_weights_saturate() -> None:
    # subnormal scale rounded down: 672 / 448 of the smallest float is 1.5 of it, and becomes 2; 1.4 becomes 1
    payload, scale_inv = quantize_blockwise(torch.tensor([[627 * 2.0**-149]]), (1, 1))
    assert scale_inv.item() == 2.0**-149 and payload.float().item() == 448
    weight = torch.tensor([[2.0**127, -(2.0**126)]])
    payload, scale_inv = quantize_blockwise(weight, (1, 2), power_of_two_scale=True)
    assert scale_inv.item() == 2.0**119 and payload.float().tolist() == [[256.0, -128.0]]


@pytest.mark.parametrize("band", [1, 7, 64, 2**18])
def test_result_does_not_depend_on_the_bands(band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "BAND_ELEMENTS", band)
    weight = weights((23, 11), dtype=torch.bfloat16)
    for block in ((4, 3), (1, 11), (23, 11)):
        payload, scale_inv = quantize_blockwise(weight, block)
        want_payload, want_scales = reference_quantize(weight, block)
        assert_same_bits(payload, want_payload)
        assert_same_bits(scale_inv, want_scales.float())
        back = dequantize_blockwise(payload, scale_inv, block, dtype=torch.bfloat16)
        assert_same_bits(back, reference_dequantize(payload, want_scales, block).float().bfloat16())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_box_of_a_tensor_is_the_box_of_the_whole(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    block = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    r0, c0 = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    r1, c1 = data.draw(st.integers(r0, rows)), data.draw(st.integers(c0, columns))
    payload, scale_inv = quantize_blockwise(weights((rows, columns), dtype=torch.float32), block)
    whole = dequantize_blockwise(payload, scale_inv, block, dtype=torch.float32)
    box = dequantize_blockwise(payload[r0:r1, c0:c1], scale_inv, block, dtype=torch.float32, offset=(r0, c0))
    assert_same_bits(box, whole[r0:r1, c0:c1].contiguous())


@pytest.mark.parametrize("form", ["scalar", "one", "one_by_one", "row", "column"])
def test_scale_per_tensor_and_per_channel(form: str) -> None:
    weight = weights((6, 10), dtype=torch.float32)
    per_row = form in ("row", "column")
    payload, grid = quantize_blockwise(weight, (1, 10) if per_row else (6, 10))
    stored = {"scalar": grid.reshape(-1)[0], "one": grid.reshape(-1)[:1], "one_by_one": grid.reshape(-1)[:1, None],
              "row": grid[:, 0], "column": grid}[form]  # fmt: skip
    scales, block = as_blocks(stored, (6, 10))
    assert block == ((1, 10) if per_row else (6, 10))
    got = dequantize_blockwise(payload[2:5], scales, block, dtype=torch.float32, offset=(2, 0))
    assert_same_bits(got, reference_dequantize(payload, grid, block).float()[2:5])


def test_scale_of_another_shape_is_refused() -> None:
    for shape in ((5,), (1, 6), (6, 2), (2, 2), (1, 1, 1)):
        with pytest.raises(ValueError, match=r"scale has shape .* wants one value, \[6\] or \[6, 1\]"):
            as_blocks(torch.ones(shape), (6, 10))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_weight_is_named_by_its_block(value: float) -> None:
    weight = torch.ones(10, 10)
    weight[5, 9] = value
    with pytest.raises(
        ValueError, match=r"1 block\(s\) of \(4, 4\) hold a NaN or infinity; .*rows from 4, columns from 8"
    ):
        quantize_blockwise(weight, (4, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_scale_that_is_no_scale_is_refused(value: float) -> None:
    scales = torch.ones(2, 2)
    scales[1, 0] = value
    with pytest.raises(ValueError, match=r"scale \[1, 0\] is .* wants a finite value >= 0"):
        dequantize_blockwise(torch.zeros(4, 4).to(E4M3), scales, (2, 2), dtype=torch.bfloat16)


def test_arguments_without_meaning_are_refused() -> None:
    payload, scales = torch.zeros(4, 4).to(E4M3), torch.ones(2, 2)
    for message, call in {
        "wants two axes": lambda: quantize_blockwise(torch.zeros(3)),
        "tensor is torch.int64": lambda: quantize_blockwise(torch.zeros(3, 3, dtype=torch.int64)),
        r"block=\(0, 4\)": lambda: quantize_blockwise(torch.zeros(3, 3), (0, 4)),
        "powers of two only": lambda: quantize_blockwise(torch.zeros(3, 3), scale_dtype=E8M0),
        "scale_dtype=torch.float16": lambda: quantize_blockwise(torch.zeros(3, 3), scale_dtype=torch.float16),
        "tensor is torch.float32": lambda: dequantize_blockwise(scales, scales, (2, 2), dtype=torch.float32),
        "dtype=torch.float16": lambda: dequantize_blockwise(payload, scales, (2, 2), dtype=torch.float16),
        r"scales are \(2,\)": lambda: dequantize_blockwise(payload, scales[0], (2, 2), dtype=torch.float32),
        "torch.uint8, want": lambda: dequantize_blockwise(payload, scales.byte(), (2, 2), dtype=torch.float32),
        r"rows 1:5, columns 0:4 in blocks of \(2, 2\) do not lie": lambda: dequantize_blockwise(
            payload, scales, (2, 2), dtype=torch.float32, offset=(1, 0)
        ),
        "rows -1:3": lambda: dequantize_blockwise(payload, scales, (2, 2), dtype=torch.float32, offset=(-1, 0)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


# What the module header says of quantising again what was dequantised.


def scales_and_payload(scales: Tensor, largest: float, seed: int) -> Tensor:
    """One row per scale: random codes of magnitude up to `largest`, which occurs."""
    generator = torch.Generator().manual_seed(seed)
    top = int(nearest_codes(torch.tensor(largest)))
    codes = torch.randint(0, top + 1, (len(scales), 12), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7
    codes[:, 5] = top
    return codes.view(E4M3)


def again(payload: Tensor, scales: Tensor, dtype: torch.dtype, **options: object) -> tuple[Tensor, Tensor]:
    block = (1, payload.shape[1])
    weight = dequantize_blockwise(payload, scales[:, None], block, dtype=dtype)
    payload, scales = quantize_blockwise(weight, block, **options)
    return payload, scales[:, 0]


@pytest.mark.parametrize("largest", [240.0, 256.0, 416.0, 448.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_e8m0_comes_back(dtype: torch.dtype, largest: float) -> None:
    exponents = range(-124 if dtype == torch.bfloat16 else -127, 120)
    scales = torch.tensor([2.0**k for k in exponents]).to(E8M0)
    payload = scales_and_payload(scales, largest, seed=2)
    got_payload, got = again(payload, scales, dtype, power_of_two_scale=True, scale_dtype=E8M0)
    assert_same_bits(got, scales)
    assert_same_bits(got_payload, payload)


def test_e8m0_with_a_maximum_of_224_comes_back_in_value() -> None:
    weight = torch.tensor([[225.0, -3.5, 0.01]])
    first, scale = quantize_blockwise(weight, power_of_two_scale=True)
    assert scale.item() == 1.0 and first[0, 0].float().item() == 224.0
    second, halved = again(first, scale[0], torch.bfloat16, power_of_two_scale=True)
    assert halved.item() == 0.5 and torch.equal(second.float() * 0.5, first.float())
    third, same = again(second, halved, torch.bfloat16, power_of_two_scale=True)
    assert same.item() == 0.5 and torch.equal(bits(third), bits(second))


def test_float32_scales_come_back_but_for_one_class_of_significands() -> None:
    generator = torch.Generator().manual_seed(3)
    around_the_border = torch.arange(9_586_900, 9_587_100)  # 8/7 * 2^23 is 9,586,980.6
    significands = torch.cat([torch.randint(2**23, 2**24, (100_000,), generator=generator), around_the_border])
    scales = torch.ldexp(significands.float(), torch.randint(-45, -20, significands.shape, generator=generator))
    payload = scales_and_payload(scales, 448.0, seed=4)
    got_payload, got = again(payload, scales, torch.float32)
    assert_same_bits(got_payload, payload)
    lost = (significands % 8 == 4) & (significands * 7 > 8 * 2**23)
    assert torch.equal(got != scales, lost)
    assert abs(lost.float().mean().item() - 6 / 56) < 0.005
    assert ((bits(got) - bits(scales)).abs() <= 1).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-149, 2.0**126, width=32, allow_subnormal=True))
def test_scales_made_by_the_definition_come_back(amax: float) -> None:
    scales = torch.tensor([reference_scale(amax, power_of_two=False)])
    assert again(scales_and_payload(scales, 448.0, seed=5), scales, torch.float32)[1].item() == scales.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_quantised_once_comes_back_from_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = (torch.randn(400, 300, generator=generator) * 0.02).to(dtype)
    for block in ((1, 4), (16, 16), (128, 128)):
        payload, scales = quantize_blockwise(weight, block)
        second = quantize_blockwise(dequantize_blockwise(payload, scales, block, dtype=torch.float32), block)
        assert_same_bits(second[0], payload)
        assert_same_bits(second[1], scales)


def test_bfloat16_scales_come_back_from_float32_all_and_from_bfloat16_but_for_one_class() -> None:
    significands = torch.arange(128, 256).repeat(20)
    exponents = torch.arange(-40, -20).repeat_interleave(128)
    scales = torch.ldexp(significands.float(), exponents).bfloat16()
    payload = scales_and_payload(scales, 448.0, seed=7)
    got_payload, got = again(payload, scales, torch.float32, scale_dtype=torch.bfloat16)
    assert_same_bits(got, scales)
    assert_same_bits(got_payload, payload)
    got_payload, got = again(payload, scales, torch.bfloat16, scale_dtype=torch.bfloat16)
    assert_same_bits(got_payload, payload)
    assert torch.equal(got != scales, (significands % 8 == 4) & (significands >= 147))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_what_was_quantised_from_bfloat16_comes_back_from_bfloat16(scale_dtype: torch.dtype) -> None:
    amax = torch.ldexp(torch.arange(128, 256).repeat(20).float(), torch.arange(-40, -20).repeat_interleave(128))
    generator = torch.Generator().manual_seed(8)
    weight = ((torch.rand(len(amax), 12, generator=generator) * 2 - 1) * amax[:, None]).bfloat16()
    weight[:, 0] = amax.bfloat16()  # every significand of an amax
    payload, scales = quantize_blockwise(weight, (1, 12), scale_dtype=scale_dtype)
    got_payload, got = again(payload, scales[:, 0], torch.bfloat16, scale_dtype=scale_dtype)
    assert_same_bits(got, scales[:, 0])
    assert_same_bits(got_payload, payload)


def test_float32_scales_through_bfloat16_keep_the_payload_and_move_the_scale_little() -> None:
    generator = torch.Generator().manual_seed(9)
    scales = torch.rand(50_000, generator=generator) + 2.0**-10
    payload = scales_and_payload(scales, 448.0, seed=10)
    got_payload, got = again(payload, scales, torch.bfloat16)
    assert_same_bits(got_payload, payload)
    assert ((got - scales).abs() <= 2.0**-8 * scales).all() and (got != scales).float().mean() > 0.9
