"""MXFP4 as gpt-oss stores its experts: 4-bit values in blocks of 32 that share one power of two.

On disk (openai/gpt-oss-20b), for an expert matrix that computes `out` from `in`:
    <name>_blocks  uint8 [experts, out, in / 32, 16]  two codes a byte, even element in the low half
    <name>_scales  uint8 [experts, out, in / 32]      exponent of the block's scale, bias 127
Everything else is bfloat16. Hugging Face's plain tensor of the same matrix is [experts, in, out].

Left out: fast kernels. This is for reading, testing and writing checkpoints, tensor by tensor.
Sources: OCP Microscaling Formats (MX) specification 1.0; transformers' integrations/mxfp4.py.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from helpers.anatomy import checkpoint_bytes, component_of, tensor_shapes
from helpers.checkpoints import publish_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

BLOCK = 32  # values that share a scale
BIAS = 127  # of the scale byte
MAX_EXPONENT = 2  # exponent of E2M1's largest value, 6 = 1.5 * 2**2
SCALE_NAN = 255  # the one scale byte that is no power of two
# The value of each 4-bit code: sign, two exponent bits, one mantissa bit (E2M1).
FP4_VALUES = (
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
)  # fmt: skip
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes
QUANTIZATION_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


class Mxfp4Error(ValueError):
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
    """uint8 codes (0 to 15) of the E2M1 values nearest to `scaled`, ties to the even code."""
    import torch

    halfway, size = torch.tensor(_HALFWAY), scaled.abs().contiguous()
    below = torch.bucketize(size, halfway, out_int32=True)
    above = torch.bucketize(size, halfway, out_int32=True, right=True)  # differs in a tie
    codes = torch.where(below % 2 == 0, below, above)
    return (codes + 8 * (torch.signbit(scaled) & (codes > 0))).to(torch.uint8)  # never -0


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[..., in] from uint8 blocks [..., in / 32, 16] and scales [..., in / 32]; float32 by default.

    Exact: a code times a power of two fits bfloat16 and float32.
    """
    import torch

    _check_pair(blocks, scales)
    values = torch.tensor(FP4_VALUES)
    low, high = values[(blocks & 0x0F).int()], values[(blocks >> 4).int()]
    elements = torch.stack((low, high), dim=-1).flatten(-2)
    weight = torch.ldexp(elements, scales.int()[..., None] - BIAS).flatten(-2)
    return weight.to(dtype or torch.float32)


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
    """The on-disk pair of a Hugging Face expert tensor [experts, in, out], one expert at a time."""
    import torch

    if weight.ndim != 3:
        raise Mxfp4Error(
            f"an expert tensor is [experts, in, out], this one is {tuple(weight.shape)}: pass the "
            "whole tensor as the Hugging Face checkpoint holds it"
        )
    pairs = [quantise(expert.T) for expert in weight]  # one at a time: the peak is one expert
    return Mxfp4(torch.stack([p.blocks for p in pairs]), torch.stack([p.scales for p in pairs]))


def dequantise_experts(blocks: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Hugging Face's [experts, in, out] from the on-disk pair, one expert at a time."""
    import torch

    _check_pair(blocks, scales)
    return torch.stack([dequantise(*pair, dtype).T for pair in zip(blocks, scales, strict=True)])


# --- checkpoints -------------------------------------------------------------------------------


def write_mxfp4_checkpoint(source_folder: Path | str, target_folder: Path | str) -> Path:
    """Rewrite a plain gpt-oss checkpoint in the form that openai/gpt-oss-20b has on disk.

    Takes one safetensors file or shards with an index, and keeps the split. Experts become MXFP4,
    the rest bfloat16. One tensor is in memory at a time, so 20b fits in a few gigabytes.
    An existing target is refused; a run that is interrupted leaves none.
    """
    source, target = Path(source_folder), Path(target_folder)
    if target.exists():
        raise Mxfp4Error(f"{target} exists already: remove it, or choose another target folder")
    config = _read_config(source)
    files = _tensor_files(source, tensor_shapes(config))
    target.parent.mkdir(parents=True, exist_ok=True)
    _require_space(target.parent, checkpoint_bytes(config, "mxfp4"))
    return publish_folder(target, lambda folder: _write(source, folder, config, files))


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Mxfp4Error(
            f"the MXFP4 checkpoint takes {needed / 1e9:.2f} GB and {folder} has "
            f"{free / 1e9:.2f} GB free: choose a target on a larger disk"
        )


def _write(source: Path, folder: Path, config: dict[str, Any], files: Mapping[str, str]) -> None:
    weight_map: dict[str, str] = {}
    for file in sorted(set(files.values())):
        names = [name for name, home in files.items() if home == file]
        weight_map |= dict.fromkeys(_write_shard(source / file, folder / file, names), file)
        log.info("wrote %s: %d tensors", file, len(names))
    if set(files.values()) != {"model.safetensors"}:
        _write_index(folder, weight_map)
    for extra in source.iterdir():
        plain = extra.is_file() and extra.suffix != ".safetensors"
        if plain and not (folder / extra.name).exists():
            shutil.copy(extra, folder)
    config = {k: v for k, v in config.items() if k != "torch_dtype"} | {
        "dtype": "bfloat16", "quantization_config": QUANTIZATION_CONFIG,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _read_config(source: Path) -> dict[str, Any]:
    try:
        config = json.loads((source / "config.json").read_text())
    except FileNotFoundError:
        raise Mxfp4Error(
            f"{source} has no config.json: name the folder of a Hugging Face checkpoint"
        ) from None
    except json.JSONDecodeError as error:
        raise Mxfp4Error(f"{source}/config.json is no JSON ({error}): fetch it again") from error
    if config.get("model_type") != "gpt_oss":
        raise Mxfp4Error(
            f"{source} holds a {config.get('model_type')!r} model: only gpt_oss keeps its experts "
            "in this form, name a gpt-oss checkpoint"
        )
    if "quantization_config" in config:
        raise Mxfp4Error(f"{source} is quantised already: use it as it is, or name a plain one")
    return config


def _tensor_files(source: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Tensor name -> file name, in file order, after checking every name and shape."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in _shard_names(source):
        for name, shape in _shapes_in(source / file).items():
            found[name] = (file, shape)
    missing, unknown = sorted(shapes.keys() - found.keys()), sorted(found.keys() - shapes.keys())
    if missing or unknown:
        raise Mxfp4Error(
            f"{source} does not hold the tensors that its config.json asks for: {len(missing)} "
            f"missing (first: {missing[:1]}), {len(unknown)} unknown (first: {unknown[:1]}). "
            "Check that every shard is there and that config.json belongs to it"
        )
    for name, (_, shape) in found.items():
        if shape != shapes[name]:
            raise Mxfp4Error(
                f"{name} is {shape}, config.json asks for {shapes[name]}: the file belongs to "
                "another config, or is transposed (experts are [expert, in, out])"
            )
    return {name: file for name, (file, _) in found.items()}


def _shard_names(source: Path) -> list[str]:
    index = source / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if (source / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise Mxfp4Error(
        f"{source} has neither model.safetensors nor an index of shards: save the model there first"
    )


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as shard:
            return {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}
    except FileNotFoundError:
        raise Mxfp4Error(
            f"{file} is missing, though the index names it: fetch the checkpoint again"
        ) from None
    except SafetensorError as error:
        raise Mxfp4Error(f"{file} is damaged or truncated ({error}): fetch it again") from error


def _write_shard(source: Path, target: Path, names: list[str]) -> list[str]:
    """Write one safetensors file tensor by tensor; returns the names in it.

    By hand, since safetensors' own writer wants all tensors at once. The format: header length
    (8 bytes, little endian), JSON header, data. bfloat16 goes first, so that it stays aligned.
    """
    from safetensors import safe_open

    ordered = sorted(names, key=_is_matrix)
    with safe_open(source, framework="pt") as shard:
        header = _header({name: shard.get_slice(name).get_shape() for name in ordered})
        with target.open("wb") as out:
            _write_header(out, header)
            for name in ordered:
                for _, tensor in _converted(name, shard.get_tensor(name)):
                    _write_data(out, tensor)
    return list(header)


def _is_matrix(name: str) -> bool:
    return component_of(name) == "expert matrices"


def _converted(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The (name, tensor) pairs that replace one plain tensor on disk."""
    import torch

    if _is_matrix(name):
        pair = quantise_experts(weight)
        yield from ((f"{name}_blocks", pair.blocks), (f"{name}_scales", pair.scales))
    else:
        yield name, weight.to(torch.bfloat16)


def _header(shapes: Mapping[str, list[int]]) -> dict[str, dict[str, Any]]:
    """safetensors header entries of the converted tensors, with their place in the file."""
    entries, offset = {}, 0
    for name, shape in shapes.items():
        for new_name, dtype, size, new_shape in _specs(name, shape):
            entries[new_name] = {
                "dtype": dtype, "shape": new_shape, "data_offsets": [offset, offset + size],
            }  # fmt: skip
            offset += size
    return entries


def _specs(name: str, shape: list[int]) -> list[tuple[str, str, int, list[int]]]:
    """(name, dtype, bytes, shape) of what replaces one plain tensor; agrees with `_converted`."""
    if not _is_matrix(name):
        return [(name, "BF16", 2 * math.prod(shape), list(shape))]
    experts, inputs, outputs = shape
    if inputs % BLOCK:
        raise Mxfp4Error(
            f"{name} has {inputs} inputs, which do not divide by {BLOCK}: choose hidden_size and "
            f"intermediate_size as multiples of {BLOCK}"
        )
    scales = [experts, outputs, inputs // BLOCK]
    return [
        (f"{name}_blocks", "U8", math.prod(scales) * (BLOCK // 2), [*scales, BLOCK // 2]),
        (f"{name}_scales", "U8", math.prod(scales), scales),
    ]


def _write_header(out: IO[bytes], entries: Mapping[str, Any]) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little"))
    out.write(text)


def _write_data(out: IO[bytes], tensor: Tensor) -> None:
    import torch

    out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
