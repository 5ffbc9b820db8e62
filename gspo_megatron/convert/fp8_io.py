"""FP8 checkpoints: which tensors of a Hugging Face directory are payload and scale of one weight, and what to write.

Read: quant_method `fp8` (DeepSeek's blocks, one scale per tensor or per channel) and `compressed-tensors` with e4m3
weights. Written: `fp8` with blocks, the form of DeepSeek's and Qwen's releases. The arithmetic is in quantize.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.ops import ConversionError, Shape, raise_problems
from gspo_megatron.convert.safetensors_io import TensorSpec
from gspo_megatron.quantize import (
    SCALE_DTYPES,
    Block,
    as_blocks,
    dequantize_blockwise,
    quantize_blockwise,
    scale_shape,
)

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (".weight_scale_inv", ".weight_scale")
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")
# Matrices that FP8 releases leave alone without listing them: DeepSeek's config has no list at all.
_KEPT_MODULES = re.compile(
    r"(^|\.)(embed_tokens|lm_head|shared_head\.head|eh_proj|gate|router|shared_expert_gate|\w*norm)$"
)
# Keys that do not change what the stored numbers mean.
_FP8_IGNORED = frozenset({"quant_method", "dequantize", "packed_modules_mapping"})
_COMPRESSED_IGNORED = frozenset(
    "quant_method quantization_status global_compression_ratio run_compressed version".split()
)
_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Format:
    """What a quantization_config says of the weights."""

    block: Block | None
    """None: one scale per tensor or per output channel, as the scale's shape says."""
    power_of_two_scale: bool
    scale_suffixes: tuple[str, ...]
    not_converted: tuple[str, ...]
    """Module names, whole or in part, or `re:` and a regular expression."""

    def converts(self, hf_name: str, shape: Shape) -> bool:
        """Whether a tensor is stored as payload and scale: the matrices of linear layers, but for those listed."""
        module, dot, leaf = hf_name.rpartition(".")
        if leaf != "weight" or len(shape) != 2 or _KEPT_MODULES.search(module):
            return False
        return not any(_names(entry, module) for entry in self.not_converted)


def _names(entry: str, module: str) -> bool:
    """A part of the module's path, as SGLang and transformers read it; `mlp.gate` does not name `mlp.gate_proj`."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}."


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight stored as payload, under its own name, and scale."""

    scale_name: str
    block: Block | None
    power_of_two_scale: bool

    def dequantize(self, payload: Tensor, scale: Tensor, shape: Shape, *, offset: Shape, dtype: torch.dtype) -> Tensor:
        """A box of the weight.

        Args:
            payload: [r, c] float8_e4m3fn, the box.
            scale: as stored, all of it.
            shape: (R, C) of the weight.
            offset: first row and column of the box.
            dtype: of the result, bfloat16 or float32.

        Returns:
            [r, c] of dtype.

        Raises:
            ValueError: a scale that is negative or not finite, or no power of two where the config says that all are.
        """
        rows, columns = shape
        grid, block = (scale, self.block) if self.block else as_blocks(scale, (rows, columns))
        if self.power_of_two_scale and (torch.frexp(grid.float())[0] != 0.5).any():
            raise ValueError("scale_fmt is ue8m0 and a scale is no power of two")
        return dequantize_blockwise(payload, grid, block, dtype=dtype, offset=(offset[0], offset[1]))


def parse_format(config: Mapping[str, Any], where: str) -> Fp8Format:
    """The format of a quantization_config.

    Raises:
        ConversionError: a method, key or value that is not understood; lists all.
    """
    parsers = {"fp8": _parse_fp8, "compressed-tensors": _parse_compressed_tensors}
    if not isinstance(config, Mapping):
        raise ConversionError(f"{where}: quantization_config={config!r}: wants an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in parsers:
        raise ConversionError(f"{where}: quant_method={method!r}: wants {' or '.join(parsers)}, or no quantization")
    problems: list[str] = []
    found = parsers[method](dict(config), problems)
    raise_problems(f"{where}: quantization_config", problems)
    return found


def _parse_fp8(config: dict[str, Any], problems: list[str]) -> Fp8Format:
    _want(config.pop("fmt", "e4m3"), "e4m3", "fmt", problems)
    scheme = config.pop("activation_scheme", "dynamic")
    if scheme != "dynamic":
        problems.append(f"activation_scheme={scheme!r}: its input scales would be lost; only 'dynamic' is converted")
    scale_fmt = config.pop("scale_fmt", None)
    if scale_fmt not in (None, "float", "ue8m0"):
        problems.append(f"scale_fmt={scale_fmt!r}: wants 'float' or 'ue8m0'")
    block = _block(config.pop("weight_block_size", None), "weight_block_size", problems)
    lists = [value for key in _LISTS if (value := config.pop(key, None))]
    if len(lists) > 1 and any(entries != lists[0] for entries in lists):
        problems.append(f"more than one of {', '.join(_LISTS)}, and they differ")
    _want_nothing_else(config, _FP8_IGNORED, problems)
    return Fp8Format(
        block=block,
        power_of_two_scale=scale_fmt == "ue8m0",
        scale_suffixes=_SCALES[:1] if block else _SCALES,
        not_converted=_entries(lists[0] if lists else [], problems),
    )


def _parse_compressed_tensors(config: dict[str, Any], problems: list[str]) -> Fp8Format:
    """The llm-compressor form of FP8: one group, dynamic or no activation scales."""
    layout = config.pop("format", None)
    if layout not in ("float-quantized", "naive-quantized"):
        problems.append(f"format={layout!r}: wants 'float-quantized'")
    groups = config.pop("config_groups", None)
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        problems.append(f"config_groups={groups!r}: wants one group, with weights")
        group, weights = {}, {}
    _want(group.get("targets"), ["Linear"], "targets", problems)
    for key, want in {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}.items():
        _want(weights.get(key), want, f"weights.{key}", problems)
    inputs = group.get("input_activations")
    if inputs and not (isinstance(inputs, dict) and inputs.get("dynamic")):
        problems.append("input_activations: not dynamic; their scales would be lost")
    if group.get("output_activations"):
        problems.append("output_activations: their scales would be lost")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        problems.append(f"weights.strategy={strategy!r}: wants 'tensor', 'channel' or 'block'")
    block = weights.get("block_structure") if strategy == "block" else None
    ignore = config.pop("ignore", None) or []
    _want_nothing_else(config, _COMPRESSED_IGNORED, problems)
    return Fp8Format(
        block=_block(block, "weights.block_structure", problems),
        power_of_two_scale=False,
        scale_suffixes=(".weight_scale",),
        not_converted=_entries(ignore, problems),
    )


def _want(value: Any, want: Any, key: str, problems: list[str]) -> None:
    if value != want:
        problems.append(f"{key}={value!r}: wants {want!r}")


def _want_nothing_else(config: dict[str, Any], ignored: frozenset[str], problems: list[str]) -> None:
    problems += [f"{key}={value!r}: not understood" for key, value in config.items() if value and key not in ignored]


def _entries(value: Any, problems: list[str]) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        problems.append(f"modules that are not converted: {value!r}: wants a list of names")
        return ()
    for entry in (entry for entry in value if entry.startswith("re:")):
        try:
            re.compile(entry[3:])
        except re.error as error:
            problems.append(f"modules that are not converted: {entry!r}: {error}")
    return tuple(value)


def _block(value: Any, key: str, problems: list[str]) -> Block | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
        problems.append(f"{key}={value!r}: wants two whole numbers, rows and columns")
        return None
    return value[0], value[1]


def find_fp8(
    stored: Mapping[str, tuple[torch.dtype, Shape]], quantization_config: Mapping[str, Any] | None, where: str
) -> dict[str, Fp8Weight]:
    """Pair payloads with scales, and check that config and tensors agree.

    Args:
        stored: dtype and shape of every tensor of the files.
        quantization_config: of config.json.
        where: directory, for messages.

    Returns:
        Weights by name; the scales that they name are not weights.

    Raises:
        ConversionError: a scale is missing, unused, twice there, of a wrong shape or dtype; the config names no FP8
            or the wrong modules; FP8 that cannot be read. Lists all.
    """
    fp8 = [name for name, (dtype, _) in stored.items() if dtype in _FP8_DTYPES]
    if not quantization_config:
        problems = [f"{name} is {stored[name][0]}, and config.json has no quantization_config" for name in fp8]
        problems += [f"{name}: a scale, and config.json has no quantization_config" for name in _scale_names(stored)]
        raise_problems(where, problems)
        return {}
    fp8_format = parse_format(quantization_config, where)
    if not fp8:
        raise ConversionError(f"{where}: config.json has a quantization_config, and no tensor is FP8")
    found: dict[str, Fp8Weight] = {}
    problems = []
    for name in fp8:
        scale_names = [s for suffix in _SCALES if (s := name.removesuffix(".weight") + suffix) in stored]
        problem = _pair_problem(name, scale_names, stored, fp8_format)
        problems += [f"{name}: {problem}"] if problem else []
        if scale_names:
            found[name] = Fp8Weight(scale_names[0], fp8_format.block, fp8_format.power_of_two_scale)
    used = {weight.scale_name for weight in found.values()}
    problems += [f"{name}: a scale without FP8 weight" for name in _scale_names(stored) if name not in used]
    problems += [
        f"{name} is {dtype}; wants FP8, or its module in modules_to_not_convert"
        for name, (dtype, shape) in stored.items()
        if dtype not in _FP8_DTYPES and fp8_format.converts(name, shape)
    ]
    problems += [f"{n}: a static activation scale would be lost" for n in stored if n.endswith(_ACTIVATION_SCALES)]
    raise_problems(f"{where}: tensors and quantization_config do not agree", problems)
    return found


def _scale_names(stored: Iterable[str]) -> list[str]:
    return [name for name in stored if name.endswith(_SCALES)]


def _pair_problem(
    name: str, scale_names: list[str], stored: Mapping[str, tuple[torch.dtype, Shape]], fp8_format: Fp8Format
) -> str | None:
    dtype, shape = stored[name]
    if dtype != torch.float8_e4m3fn:
        return f"is {dtype}, wants float8_e4m3fn"
    if not name.endswith(".weight") or len(shape) != 2:
        return f"is FP8 of shape {shape}, wants a matrix that is called weight"
    if not fp8_format.converts(name, shape):
        return "is FP8, and its module is one that is not converted"
    if len(scale_names) != 1 or not scale_names[0].endswith(fp8_format.scale_suffixes):
        wanted = " or ".join(name.removesuffix(".weight") + suffix for suffix in fp8_format.scale_suffixes)
        return f"has {' and '.join(scale_names) or 'no scale'}, wants {wanted}"
    scale_dtype, got = stored[scale_names[0]]
    if scale_dtype not in SCALE_DTYPES:
        return f"{scale_names[0]} is {scale_dtype}, wants {', '.join(str(d) for d in SCALE_DTYPES)}"
    if fp8_format.block:
        wanted_shapes: list[Shape] = [scale_shape((shape[0], shape[1]), fp8_format.block)]
    else:
        wanted_shapes = [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
    if got not in wanted_shapes:
        return f"{scale_names[0]} has shape {got}, wants {' or '.join(str(w) for w in wanted_shapes)} for {shape}"
    return None


def fp8_config(
    specs: Sequence[TensorSpec], *, block: Block = (128, 128), power_of_two_scale: bool = False
) -> dict[str, Any]:
    """The quantization_config with which a model is exported, in the form of Qwen's FP8 releases.

    Every module that stays as it is is listed, by its whole name: transformers takes a name as a prefix, so that a
    general `mlp.gate` would stand for `mlp.gate_proj` too.

    Args:
        specs: all tensors of the model, before quantisation.
        block: rows and columns of a block.
        power_of_two_scale: E8M0 scales.
    """
    every = Fp8Format(block=block, power_of_two_scale=power_of_two_scale, scale_suffixes=_SCALES[:1], not_converted=())
    weights = [(name, shape) for name, _, shape in specs if name.endswith(".weight")]
    kept = {name.removesuffix(".weight") for name, shape in weights if not every.converts(name, shape)}
    kept.add("lm_head")  # tied or not: a linear layer of the model, which would be replaced by an FP8 one
    scale_fmt = {"scale_fmt": "ue8m0"} if power_of_two_scale else {}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(kept),
        "quant_method": "fp8",
        **scale_fmt,
        "weight_block_size": list(block),
    }


class Fp8Export:
    """Export with a quantization_config: what the files will hold, and the tensors themselves, one by one."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        quantization_config: Mapping[str, Any],
        *,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Plan.

        Args:
            specs: all tensors of the model, before quantisation.
            quantization_config: fp8_config's, or that of the checkpoint that is to be reproduced.
            scale_dtype: in which scales are stored: float32 (DeepSeek), bfloat16 (Qwen3), float8_e8m0fnu (ue8m0).

        Raises:
            ConversionError: the config has no blocks or is not understood; no weight would be quantised.
        """
        self._format = parse_format(quantization_config, "export")
        if self._format.block is None or quantization_config["quant_method"] != "fp8":
            raise ConversionError("export: wants quant_method 'fp8' with weight_block_size; no other form is written")
        if scale_dtype == torch.float8_e8m0fnu and not self._format.power_of_two_scale:
            raise ConversionError("export: scales in float8_e8m0fnu want scale_fmt 'ue8m0' in the quantization_config")
        self._block, self._scale_dtype = self._format.block, scale_dtype
        self.specs = self.specs_of(specs)
        """(name, dtype, shape) of every tensor that is written, in order: each payload, then its scale."""
        if len(self.specs) == len(specs):
            raise ConversionError("export: no weight of this model would be FP8")

    def specs_of(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """What `tensors` makes of these."""
        written: list[TensorSpec] = []
        for name, dtype, shape in specs:
            if not self._format.converts(name, shape):
                written.append((name, dtype, shape))
                continue
            scales = scale_shape((shape[0], shape[1]), self._block)
            written += [(name, torch.float8_e4m3fn, shape), (name + "_scale_inv", self._scale_dtype, scales)]
        return written

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Quantise a stream of the tensors that `specs` was made for, in their order.

        Raises:
            ConversionError: a weight that is not finite; names it.
        """
        for name, tensor in tensors:
            if not self._format.converts(name, tuple(tensor.shape)):
                yield name, tensor
                continue
            try:
                payload, scale_inv = quantize_blockwise(
                    tensor,
                    self._block,
                    power_of_two_scale=self._format.power_of_two_scale,
                    scale_dtype=self._scale_dtype,
                )
            except ValueError as error:
                raise ConversionError(f"{name}: {error}") from error
            yield name, payload
            yield name + "_scale_inv", scale_inv
