"""FP8 e4m3 weights with one scale per block, per output channel or per tensor. Pure torch; never imports Megatron.

Formats: DeepSeek-V3's and Qwen3's FP8 checkpoints (`weight_scale_inv`), E8M0 scales (`scale_fmt: ue8m0`).
Shapes: R = rows, C = columns, a x b = block, nR = ceil(R/a), nC = ceil(C/b); blocks at the edges are partial.
Per channel is a block of 1 x C, per tensor one of R x C; as_blocks brings the shapes that files use into this form.

Definitions, RN = round to nearest, ties to even, in the precision named:
- amax = max |w| of the block, exact. scale = RN_fp32(amax / 448), at least 2^-149 where amax > 0; a block of zeros has
  scale 1. With power_of_two_scale: the least 2^k, k >= -127, with 448 * 2^k >= amax. A bfloat16 scale is
  RN_bf16(RN_fp32(amax / 448)), at least 2^-133, and the payload is made with it.
  Weights of 2^127 and more may decode to infinity.
- payload = RN_e4m3(w / scale) of the exact quotient, saturating at +-448: never NaN. It saturates by more than e4m3's
  rounding only where the scale is subnormal or a bfloat16 one was rounded down.
- dequantised = RN_target(RN_fp32(payload * scale)), the FP32 arithmetic of DeepSeek's and SGLang's kernels. For
  bfloat16 and E8M0 scales the product is exact in float32, so there is one rounding.

Quantising what was dequantised, block by block (s = scale, x = its significand as an integer, p = largest |payload|;
s in [2^-117, 2^118], outside which products underflow or overflow):
- E8M0, p in (224, 448]: payload and scale come back bit for bit, through float32 and through bfloat16. Blocks of
  p = 224, those with amax in (224, 232] * scale, come back as the same values with half the scale, which then stays.
- float32 scales through float32, p = 448: the payload comes back. The scale is RN(RN(448 s) / 448). For s in [1, 8/7)
  of its binade that is s; in [8/7, 2) it is s but where 448 s is a tie, x = 4 (mod 8), and then one ulp off. These are
  3 in 28 of all significands, and no arithmetic repairs them: RN(448 s) takes fewer values there than s. But
  RN(amax / 448) is never one of them, because there RN(448 s) is amax again. So *every scale made by this definition
  comes back*, and every scale of at most 21 significant bits.
- bfloat16 scales (Qwen3's) through float32, p = 448: payload and scale come back, 448 s being exact.
- bfloat16 scales through bfloat16, p = 448: payload comes back; the scale too, but for x = 4 (mod 8), x >= 147, which
  this definition never makes from bfloat16 weights. A checkpoint that it made from bfloat16 weights comes back whole.
- float32 scales through bfloat16, p = 448: payload comes back. So does a scale that this definition made from bfloat16
  weights, 448 s being amax within 2^-23; another moves by up to 2^-8 of itself, as its amax does.
- Otherwise (another p, blocks of zeros whose scale is not 1): the weights do not tell which scale they were made with.
  Values agree to the rounding of e4m3, bits need not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

E4M3_MAX = 448.0
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
# Large tensors are worked on in bands of rows: temporaries are at most 32 bytes per element of one band,
# which is this many elements or one row.
BAND_ELEMENTS = 2**18

Block = tuple[int, int]


def scale_shape(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """Shape of the scales, (nR, nC), of a weight of this shape."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def as_blocks(scale_inv: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Block]:
    """Scales stored per tensor or per output channel as a grid of blocks.

    Args:
        scale_inv: [] or [1] or [1, 1], one for the tensor; [R] or [R, 1], one per row.
        shape: (R, C) of the weight.

    Returns:
        [nR, 1] scales of the same dtype, and the block.

    Raises:
        ValueError: another shape.
    """
    rows, columns = shape
    if scale_inv.numel() == 1 and scale_inv.dim() <= 2:
        return scale_inv.reshape(1, 1), (max(rows, 1), max(columns, 1))
    if tuple(scale_inv.shape) in ((rows,), (rows, 1)):
        return scale_inv.reshape(rows, 1), (1, max(columns, 1))
    raise ValueError(f"scale has shape {tuple(scale_inv.shape)}, wants one value, [{rows}] or [{rows}, 1] for {shape}")


def quantize_blockwise(
    weight: Tensor,
    block: Block = (128, 128),
    *,
    power_of_two_scale: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3 as the module header defines.

    Args:
        weight: [R, C] bfloat16, float16 or float32.
        block: rows and columns of a block.
        power_of_two_scale: round scales up to powers of two (E8M0).
        scale_dtype: float32 or bfloat16; float8_e8m0fnu with power_of_two_scale.

    Returns:
        payload [R, C] float8_e4m3fn; scale_inv [nR, nC] of scale_dtype, by which the payload is to be multiplied.

    Raises:
        ValueError: a NaN or infinity, named by its block; not a matrix; a dtype or block that has no meaning here.
    """
    _check(weight, block, (*WEIGHT_DTYPES, torch.float16))
    if scale_dtype == torch.float8_e8m0fnu and not power_of_two_scale:
        raise ValueError("scale_dtype=float8_e8m0fnu: holds powers of two only; wants power_of_two_scale=True")
    if scale_dtype not in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        raise ValueError(f"scale_dtype={scale_dtype}: wants float32, bfloat16 or float8_e8m0fnu")
    amax = _block_amax(weight, block)
    scale_inv = (_power_of_two_scale(amax) if power_of_two_scale else _scale(amax, scale_dtype)).to(scale_dtype)
    payload = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for rows, scale in _scale_bands(scale_inv, block, (0, 0), weight.shape):
        payload[rows] = _nearest_e4m3(weight[rows], scale)
    return payload, scale_inv


def dequantize_blockwise(
    payload: Tensor,
    scale_inv: Tensor,
    block: Block,
    *,
    dtype: torch.dtype,
    offset: tuple[int, int] = (0, 0),
) -> Tensor:
    """Multiply a box of a quantised weight by its scales.

    Args:
        payload: [r, c] float8_e4m3fn, rows and columns of the weight from offset on. NaN codes stay NaN.
        scale_inv: [nR, nC] of the whole weight; float32, bfloat16, float16 or float8_e8m0fnu.
        block: rows and columns of a block.
        dtype: of the result, bfloat16 or float32.
        offset: (row, column) of the box in the whole weight; need not be a multiple of the block.

    Returns:
        [r, c] of dtype, contiguous.

    Raises:
        ValueError: a scale that is negative, NaN or infinite; a box outside the scales; a dtype without meaning here.
    """
    _check(payload, block, (torch.float8_e4m3fn,))
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype={dtype}: wants bfloat16 or float32")
    if scale_inv.dim() != 2 or scale_inv.dtype not in SCALE_DTYPES:
        got = f"{tuple(scale_inv.shape)} {scale_inv.dtype}"
        raise ValueError(f"scales are {got}, want two axes of float32, bfloat16, float16 or float8_e8m0fnu")
    end = (offset[0] + payload.shape[0], offset[1] + payload.shape[1])
    needed = scale_shape(end, block)
    if min(offset) < 0 or needed[0] > scale_inv.shape[0] or needed[1] > scale_inv.shape[1]:
        box = f"rows {offset[0]}:{end[0]}, columns {offset[1]}:{end[1]}"
        raise ValueError(f"{box} in blocks of {block} do not lie in scales of shape {tuple(scale_inv.shape)}")
    bad = ~(torch.isfinite(scale_inv.float()) & (scale_inv.float() >= 0))
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(f"scale [{row}, {column}] is {scale_inv[row, column].item()}, wants a finite value >= 0")
    out = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    for rows, scale in _scale_bands(scale_inv, block, offset, payload.shape):
        out[rows] = scale.mul_(payload[rows].float())
    return out


def _check(matrix: Tensor, block: Block, dtypes: tuple[torch.dtype, ...]) -> None:
    if matrix.dim() != 2:
        raise ValueError(f"tensor has shape {tuple(matrix.shape)}, wants two axes")
    if matrix.dtype not in dtypes:
        raise ValueError(f"tensor is {matrix.dtype}, wants {' or '.join(str(d) for d in dtypes)}")
    if min(block) < 1:
        raise ValueError(f"block={block}: wants rows and columns of at least 1")


def _row_bands(num_rows: int, num_columns: int) -> Iterator[slice]:
    step = max(1, BAND_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _scale_bands(
    scale_inv: Tensor, block: Block, offset: tuple[int, int], shape: torch.Size
) -> Iterator[tuple[slice, Tensor]]:
    """Bands of rows of a box, each with its scales: a new float32 tensor with one value per element."""
    device = scale_inv.device
    columns = torch.arange(offset[1], offset[1] + shape[1], device=device) // block[1]
    for rows in _row_bands(shape[0], shape[1]):
        row_blocks = torch.arange(offset[0] + rows.start, offset[0] + rows.stop, device=device) // block[0]
        first, last = int(row_blocks[0]), int(row_blocks[-1])
        by_block_row = scale_inv[first : last + 1].float().index_select(1, columns)
        yield rows, by_block_row.index_select(0, row_blocks - first)


def _block_amax(weight: Tensor, block: Block) -> Tensor:
    """[nR, nC] float32, the largest magnitude of each block."""
    num_rows, num_columns = scale_shape((weight.shape[0], weight.shape[1]), block)
    amax = torch.zeros(num_rows, num_columns, device=weight.device)
    whole = weight.shape[1] // block[1] * block[1]
    for rows in _row_bands(weight.shape[0], weight.shape[1]):
        band = weight[rows].abs().float()
        parts = [band[:, :whole].view(len(band), -1, block[1]).amax(2)] if whole else []
        if whole < weight.shape[1]:
            parts.append(band[:, whole:].amax(1, keepdim=True))
        row_blocks = torch.arange(rows.start, rows.stop, device=weight.device) // block[0]
        amax.scatter_reduce_(0, row_blocks[:, None].expand(-1, num_columns), torch.cat(parts, dim=1), "amax")
    bad = ~torch.isfinite(amax)
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        place = f"rows from {row * block[0]}, columns from {column * block[1]}"
        raise ValueError(f"{int(bad.sum())} block(s) of {block} hold a NaN or infinity; the first: {place}")
    return amax


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    smallest = 2.0**-149 if dtype == torch.float32 else 2.0**-133
    scale = (amax / E4M3_MAX).to(dtype).float()
    # a zero scale would decode to zeros at best, and divide to NaN
    return torch.where(amax > 0, scale.clamp_min(smallest), 1.0)


def _power_of_two_scale(amax: Tensor) -> Tensor:
    # 448 is 0.875 * 2^9, so the exponent is read off the significand: exact, where a logarithm is not.
    significand, exponent = torch.frexp(amax)
    code = exponent - 9 + (significand > E4M3_MAX / 512).int() + 127  # E8M0: the biased exponent itself
    scale = code.clamp_min(0).to(torch.uint8).view(torch.float8_e8m0fnu).float()
    return torch.where(amax > 0, scale, 1.0)


def _nearest_e4m3(weight: Tensor, scale: Tensor) -> Tensor:
    """RN_e4m3(weight / scale) of the exact quotient.

    torch casts through float32, and a quotient rounded to float32 can land on a tie of e4m3 that it was only near.
    So the float64 quotient is truncated to float32's bits, the lowest set where anything was cut off (round to odd),
    which leaves the second rounding right. Rounding to float64 makes no ties: w / s is at least 2^-30 of its size away
    from one that it is not.
    """
    quotient = weight.double().div_(scale.double()).clamp_(-E4M3_MAX, E4M3_MAX)
    bits = quotient.view(torch.int64)
    cut = bits & (2**29 - 1)
    bits.sub_(cut).bitwise_or_(cut.add_(2**29 - 1).bitwise_and_(2**29))
    return quotient.float().to(torch.float8_e4m3fn)
