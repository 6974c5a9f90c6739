"""MXFP4 as gpt-oss stores its experts: 4-bit values in blocks of 32 that share one power of two.

On disk (openai/gpt-oss-20b), for an expert matrix that computes `out` from `in`:
    <name>_blocks  uint8 [experts, out, in / 32, 16]  two codes a byte, even element in the low half
    <name>_scales  uint8 [experts, out, in / 32]      exponent of the block's scale, bias 127
Everything else is bfloat16. Hugging Face's plain tensor of the same matrix is [experts, in, out].

Left out: fast kernels. This is for reading, testing and writing checkpoints, expert by expert.
Sources: OCP Microscaling Formats (MX) specification 1.0; transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from helpers.anatomy import tensor_shapes
from helpers.tensor_files import (
    BLOCK, CheckpointError, CheckpointReport, StoredTensor, TensorSpec, TensorWriter, check_checkpoint, copy_companions,
    is_matrix, mxfp4_specs, plain_config, publish_folder, read_chunks, read_rows,
)  # fmt: skip

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

BIAS = 127  # of the scale byte
MAX_EXPONENT = 2  # exponent of E2M1's largest value, 6 = 1.5 * 2**2
SCALE_NAN = 255  # the one scale byte that is no power of two
# The value of each 4-bit code: sign, two exponent bits, one mantissa bit (E2M1).
FP4_VALUES = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)  # fmt: skip
_SLICE = 2**18  # values that are quantised at a time: a dozen temporaries of a megabyte
QUANTIZATION_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


class Mxfp4Error(CheckpointError):
    """A tensor or checkpoint that cannot be (de)quantised; the message says what to do next."""


class Mxfp4(NamedTuple):
    """blocks: uint8 [..., in / 32, 16].  scales: uint8 [..., in / 32]."""

    blocks: Tensor
    scales: Tensor


# --- tensors -----------------------------------------------------------------------------------


def quantise(weight: Tensor) -> Mxfp4:
    """Quantise the last dimension of a finite floating-point tensor [..., in], in blocks of 32.

    OCP MX rule: the block's exponent is floor(log2(largest magnitude)) - 2; values are rounded to
    the nearest E2M1 value, ties to the even code, and what lies above 6 becomes 6. So no value is
    off by more than a quarter of its block's largest magnitude.
    """
    import torch

    if weight.ndim == 0 or weight.shape[-1] == 0 or weight.shape[-1] % BLOCK:
        raise Mxfp4Error(
            f"MXFP4 quantises {BLOCK} values at a time and the last dimension of "
            f"{tuple(weight.shape)} does not divide by {BLOCK}: choose hidden_size and "
            f"intermediate_size as multiples of {BLOCK}, and pass the matrix as [..., out, in]"
        )
    if not torch.isfinite(weight).all():
        raise Mxfp4Error("the weights hold NaN or infinity, MXFP4 cannot: look for a diverged run")
    groups = weight.float().unflatten(-1, (-1, BLOCK))
    exponents = _block_exponents(groups)
    codes = _nearest_codes(torch.ldexp(groups, -exponents[..., None]))
    return Mxfp4(codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + BIAS).to(torch.uint8))


def _block_exponents(groups: Tensor) -> Tensor:
    """int32 [...] from [..., 32]: floor(log2(largest magnitude)) - 2, by frexp and so exact."""
    import torch

    largest = groups.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - MAX_EXPONENT  # frexp's mantissa is in [0.5, 1)
    return torch.where(largest > 0, exponents, -BIAS).clamp(min=-BIAS)


def _nearest_codes(scaled: Tensor) -> Tensor:
    """uint8 codes (0 to 15) of the E2M1 values nearest to `scaled`, ties to the even code.

    Values are 0.5 apart below 2, 1 apart below 4 and 2 apart above; in each range the code is linear in the value, and
    rounding half to even of that line is rounding to the even code.
    """
    import torch

    size = scaled.abs()
    line = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4))
    codes = line.round_().clamp_(max=7)
    negative = torch.signbit(scaled) & (codes > 0)  # never -0
    return codes.add_(negative, alpha=8).to(torch.uint8)


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[..., in] from uint8 blocks [..., in / 32, 16] and scales [..., in / 32]; float32 by default.

    Exact: a code times a power of two fits bfloat16 and float32.
    """
    import torch

    _check_pair(blocks, scales)
    exact = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    values = torch.tensor(FP4_VALUES, dtype=exact)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)  # [byte, (low, high half)]
    elements = pairs[blocks.flatten().int()].view(*scales.shape, BLOCK)
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS).to(exact)
    return elements.mul_(powers[..., None]).flatten(-2).to(dtype or torch.float32)


def _check_pair(blocks: Tensor, scales: Tensor) -> None:
    import torch

    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise Mxfp4Error(
            f"blocks are {blocks.dtype} and scales {scales.dtype}, MXFP4 keeps both as uint8: "
            "the loader converted them, read them with safetensors directly"
        )
    if blocks.ndim < 2 or blocks.shape[-1] != BLOCK // 2 or blocks.shape[:-1] != scales.shape:
        raise Mxfp4Error(
            f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} are no pair: blocks "
            f"end in [in / {BLOCK}, {BLOCK // 2}], scales have that shape without the last "
            "dimension. Check that both come from the same tensor name"
        )
    if (scales == SCALE_NAN).any():
        raise Mxfp4Error("a scale byte is 255, which means NaN: fetch the file again")


def quantise_experts(weight: Tensor) -> Mxfp4:
    """The on-disk pair of a Hugging Face expert tensor [experts, in, out], a slice of an expert at a time."""
    import torch

    if weight.ndim != 3:
        raise Mxfp4Error(
            f"an expert tensor is [experts, in, out], this one is {tuple(weight.shape)}: pass the "
            "whole tensor as the Hugging Face checkpoint holds it"
        )
    outputs = max(1, _SLICE // max(weight.shape[1], 1))
    pairs = [quantise(part.transpose(1, 2).contiguous()) for part in weight.split(outputs, dim=2)]
    return Mxfp4(torch.cat([p.blocks for p in pairs], 1), torch.cat([p.scales for p in pairs], 1))


def dequantise_experts(blocks: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Hugging Face's [experts, in, out] from the on-disk pair, one expert at a time."""
    import torch

    _check_pair(blocks, scales)
    return torch.stack([dequantise(*pair, dtype).T for pair in zip(blocks, scales, strict=True)])


# --- checkpoints -------------------------------------------------------------------------------


def write_mxfp4_checkpoint(source_folder: Path | str, target_folder: Path | str) -> Path:
    """Rewrite a plain gpt-oss checkpoint in the form that openai/gpt-oss-20b has on disk.

    Takes one safetensors file or shards with an index, and keeps the split. Experts become MXFP4,
    the rest bfloat16. One expert is in memory at a time, so 20b fits in less than a gigabyte.
    An existing target is refused; a run that is interrupted leaves none.
    """
    report = check_checkpoint(source_folder)
    if report.quantised:
        raise Mxfp4Error(f"{report.folder} is quantised already: use it as it is, or name a plain one")
    config = plain_config(report.config, "bfloat16") | {"quantization_config": QUANTIZATION_CONFIG}
    specs, files = {}, {}
    for name, stored in report.tensors.items():
        new = mxfp4_specs(name, stored.shape) if is_matrix(name) else {name: TensorSpec("BF16", stored.shape)}
        specs |= new
        files |= dict.fromkeys(new, stored.file.name)

    def write(folder: Path) -> None:
        with TensorWriter(folder, specs, files=files, convert=True) as writer:
            for name, stored in report.tensors.items():
                (_quantise_into if is_matrix(name) else _copy_into)(writer, name, stored)
        _finish(report, folder, config)

    return publish_folder(_new(target_folder), write)


def dequantised_checkpoint(folder: Path | str, target: Path | str) -> Path:
    """A plain copy of an MXFP4 checkpoint in `target`, expert matrices in bfloat16; exact, one expert in memory at a time.

    Each value is a code times a power of two, which bfloat16 holds, so the copy equals what transformers gets with
    Mxfp4Config(dequantize=True). A plain checkpoint is returned as it is. An existing target is refused.
    """
    report = check_checkpoint(folder)
    if not report.quantised:
        return report.folder
    specs = {name: _plain_spec(report, name, shape) for name, shape in tensor_shapes(report.config).items()}

    def write(new: Path) -> None:
        with TensorWriter(new, specs) as writer:
            for name in specs:
                if is_matrix(name):
                    _dequantise_into(writer, name, report.tensors)
                else:
                    _copy_into(writer, name, report.tensors[name])
        _finish(report, new, plain_config(report.config, "bfloat16"))

    return publish_folder(_new(target), write)


def _new(target: Path | str) -> Path:
    if Path(target).exists():
        raise Mxfp4Error(f"{target} exists already: remove it, or choose another target folder")
    return Path(target)


def _plain_spec(report: CheckpointReport, name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec("BF16" if is_matrix(name) else report.tensors[name].dtype, shape)


def _finish(report: CheckpointReport, folder: Path, config: Mapping[str, Any]) -> None:
    copy_companions(report.folder, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    log.info("wrote %s from %s: %d tensors", folder, report.folder, len(report.tensors))


def _copy_into(writer: TensorWriter, name: str, stored: StoredTensor) -> None:
    for rows in read_chunks(stored):
        writer.write_rows(name, rows)


def _quantise_into(writer: TensorWriter, name: str, stored: StoredTensor) -> None:
    for expert in range(stored.shape[0]):
        try:
            pair = quantise_experts(read_rows(stored, expert, 1))
        except Mxfp4Error as error:
            raise Mxfp4Error(f"{stored.file}: {name}, expert {expert}: {error}") from error
        writer.write_rows(f"{name}_blocks", pair.blocks)
        writer.write_rows(f"{name}_scales", pair.scales)


def _dequantise_into(writer: TensorWriter, name: str, tensors: Mapping[str, StoredTensor]) -> None:
    import torch

    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    for expert in range(blocks.shape[0]):
        pair = read_rows(blocks, expert, 1), read_rows(scales, expert, 1)
        try:
            writer.write_rows(name, dequantise_experts(*pair, torch.bfloat16))
        except Mxfp4Error as error:
            raise Mxfp4Error(f"{scales.file}: {name}_scales, expert {expert}: {error}") from error
