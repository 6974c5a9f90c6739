"""Weight files: what a gpt-oss checkpoint must hold, told from headers alone, and files written tensor by tensor.

A safetensors file is eight bytes (length of the header, little endian), the header (JSON: name -> dtype, shape,
data_offsets) and the data. It is read and written by hand here: safetensors' own writer wants all tensors at once, its
reader maps the whole file into memory, and its errors do not name the tensor. Checking needs no torch.
Source: the format's own description (safetensors README, "Format").
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.anatomy import Architecture, component_of, tensor_shapes
from helpers.messages import one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8"}
FLOATS = ("F32", "BF16", "F16")  # what a plain tensor of gpt-oss may be stored in
BLOCK = 32  # MXFP4 values that share a scale; see helpers.mxfp4
LARGEST_SIZE, MOST_LAYERS = 2**31, 10_000  # of a dimension, and of layers, in a config.json
CHUNK = 2**24  # bytes that are converted, read or written at a time


class CheckpointError(ValueError):
    """A checkpoint that cannot be trusted; one line that names the file, the tensor and what to do next."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class NotGptOss(CheckpointError):
    """The folder holds no gpt-oss checkpoint at all: no config.json, or that of another model."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is in a file. dtype: safetensors' name, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor and its place: `offset` bytes from the start of `file`."""

    file: Path = field(default=Path())
    offset: int = 0


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint that passed check_checkpoint: its config, and name -> StoredTensor of everything in it."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    quantised: bool

    @property
    def shards(self) -> tuple[str, ...]:
        """File names, sorted."""
        return tuple(sorted({tensor.file.name for tensor in self.tensors.values()}))

    @property
    def bytes(self) -> int:
        """Of tensor data, headers aside."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


# --- check ------------------------------------------------------------------------------------------------------------
def check_checkpoint(folder: Path | str) -> CheckpointReport:
    """Everything that the folder's config.json asks for is there, whole and of the right shape; reads headers only.

    Plain (float) and MXFP4 checkpoints, one file or shards with an index. Raises CheckpointError with one line that names
    the file and the tensor. It cannot see a wrong value: the data is not read.
    """
    folder = Path(folder)
    config = read_config(folder)
    quantised = is_quantised(config)
    _check_sizes(folder / "config.json", config)
    try:
        expected = expected_tensors(config, quantised)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    found = _stored_tensors(folder, list(expected))
    _compare_names(folder, expected, found)
    for name, form in expected.items():
        _compare_form(name, found[name], *form)
    return CheckpointReport(folder, config, found, quantised)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a gpt-oss checkpoint.

    Raises NotGptOss where there is none or another model's, CheckpointError for one that cannot be read.
    """
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise NotGptOss(
            f"{folder} has no config.json: name the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise _unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON ({error}): fetch it again") from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type != "gpt_oss":
        raise NotGptOss(f"{file} describes a {model_type!r} model: name a gpt-oss checkpoint")
    quantization = config.get("quantization_config") or {"quant_method": "mxfp4"}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "mxfp4":
        raise CheckpointError(
            f"{file}: quantization_config says {method!r}, only plain and MXFP4 checkpoints are read here; fetch one of them"
        )
    return config


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    reason = error.strerror or type(error).__name__
    return CheckpointError(f"{file} cannot be read ({reason}): it has to be a file that you may read")


def _check_sizes(file: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a size that no model has; what is missing, read_architecture names."""
    for name in (f.name for f in fields(Architecture) if f.type == "int"):
        value = config.get(name)
        # every layer's tensors are listed: a billion of them would take all memory before anything is compared
        most = LARGEST_SIZE if name != "num_hidden_layers" else MOST_LAYERS
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise CheckpointError(
                f"{file}: {name} is {value!r:.60}, it has to be a positive whole number up to {most}: take the config.json "
                "that came with the weights"
            )


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether the experts of a checkpoint with this config.json are quantised."""
    return bool(config.get("quantization_config"))


def expected_tensors(
    config: Mapping[str, Any], quantised: bool
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """name -> (shape, dtypes that it may have) of every tensor that a checkpoint of this config holds."""
    expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for name, shape in tensor_shapes(config).items():
        if quantised and is_matrix(name):
            expected |= {new: (spec.shape, (spec.dtype,)) for new, spec in mxfp4_specs(name, shape).items()}
        else:
            expected[name] = (shape, FLOATS)
    return expected


def is_matrix(name: str) -> bool:
    """Whether a plain tensor of this name is one that MXFP4 checkpoints quantise."""
    return component_of(name) == "expert matrices"


def mxfp4_specs(name: str, shape: Sequence[int]) -> dict[str, TensorSpec]:
    """The two tensors that stand for a plain expert tensor [experts, in, out] in an MXFP4 file.

    Example: [4, 64, 96] -> blocks U8 [4, 96, 2, 16] and scales U8 [4, 96, 2].
    """
    experts, inputs, outputs = shape
    if inputs % BLOCK:
        raise CheckpointError(
            f"{name} has {inputs} inputs, which do not divide by {BLOCK}: MXFP4 needs a hidden_size and an "
            f"intermediate_size that are multiples of {BLOCK}"
        )
    scales = (experts, outputs, inputs // BLOCK)
    return {
        f"{name}_blocks": TensorSpec("U8", (*scales, BLOCK // 2)),
        f"{name}_scales": TensorSpec("U8", scales),
    }


def _stored_tensors(folder: Path, expected: list[str]) -> dict[str, StoredTensor]:
    """name -> StoredTensor of all weight files in the folder, in file order."""
    single, index = folder / SINGLE, folder / INDEX
    homes = _read_index(index) if index.is_file() else dict.fromkeys(expected, SINGLE)
    if not index.is_file() and not single.is_file():
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}, so {expected[0]} and all other tensors are missing: fetch the "
            "weights, or save the model there"
        )
    _refuse_strays(folder, set(homes.values()))
    if not index.is_file():
        return read_header(single, expected)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(homes.values())):
        found |= _read_shard(folder / file, [name for name, home in homes.items() if home == file])
    return found


def _read_index(index: Path) -> dict[str, str]:
    """name -> file name, as the index says."""
    try:
        homes = json.loads(index.read_text())["weight_map"]
        if not all(Path(file).name == file and file.endswith(".safetensors") for file in homes.values()):
            raise ValueError("a value of weight_map is no name of a .safetensors file beside it")
    except OSError as error:
        raise _unreadable(index, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} has no usable weight_map ({type(error).__name__}: {error}): fetch it again"
        ) from error
    if not homes:
        raise CheckpointError(f"{index} has an empty weight_map: fetch it again")
    return homes


def _refuse_strays(folder: Path, named: set[str]) -> None:
    strays = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in named)
    if strays:
        raise CheckpointError(
            f"{folder / strays[0]} lies beside the weights and belongs to none of them: transformers and SGLang would choose "
            "differently between the two; move it out of the folder"
        )


def _read_shard(file: Path, names: list[str]) -> dict[str, StoredTensor]:
    """The header of one shard, which must hold exactly what the index places in it."""
    header = read_header(file, names)
    for name in names:
        if name not in header:
            raise CheckpointError(
                f"{file} does not hold {name}, which {INDEX} places there: fetch both again"
            )
    for name in header:
        if name not in names:
            raise CheckpointError(
                f"{file} holds {name}, which {INDEX} does not place there: fetch both again"
            )
    return header


def _compare_names(folder: Path, expected: Mapping[str, Any], found: Mapping[str, StoredTensor]) -> None:
    missing, unknown = [n for n in expected if n not in found], [n for n in found if n not in expected]
    if not missing and not unknown:
        return
    file = found[unknown[0]].file if unknown else folder / (INDEX if (folder / INDEX).is_file() else SINGLE)
    what = [f"{names[0]} {word}{_more(names)}" for names, word in
            ((missing, "is missing"), (unknown, "is unknown")) if names]  # fmt: skip
    raise CheckpointError(f"{file}: {' and '.join(what)}: {_advice(missing, unknown, found)}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _advice(missing: list[str], unknown: list[str], found: Mapping[str, StoredTensor]) -> str:
    """What to do about names that do not fit, told from the first of them."""
    if unknown and unknown[0].endswith(("_blocks", "_scales")):
        return "it is in MXFP4 but config.json has no quantization_config; take the config.json that came with it"
    if missing and missing[0].endswith(("_blocks", "_scales")):
        stem, partner = missing[0][:-7], {"_blocks": "_scales", "_scales": "_blocks"}[missing[0][-7:]]
        if stem + partner in found:
            return f"its partner {stem + partner} is in {found[stem + partner].file.name}; fetch the checkpoint again"
        return "config.json says MXFP4; if the weights are plain, remove its quantization_config"
    return "fetch the checkpoint again, and check that config.json belongs to it"


def _compare_form(name: str, tensor: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if tensor.shape != shape:
        turned = len(shape) > 1 and tensor.shape == (*shape[:-2], shape[-1], shape[-2])
        why = "it is transposed (experts are [expert, in, out])" if turned else "it belongs to another config"
        raise CheckpointError(
            f"{tensor.file}: {name} is {list(tensor.shape)}, config.json asks for {list(shape)}: {why}; export or fetch it again"
        )
    if tensor.dtype not in dtypes:
        raise CheckpointError(
            f"{tensor.file}: {name} is stored as {tensor.dtype}, it has to be {' or '.join(dtypes)}: a converter changed it; "
            "fetch the checkpoint again"
        )


# --- read -------------------------------------------------------------------------------------------------------------
def read_header(file: Path, wanted: Sequence[str] = ()) -> dict[str, StoredTensor]:
    """name -> StoredTensor of one safetensors file; the file is exactly as long as its header says.

    wanted: names that should be in it, for the error. Raises CheckpointError for a missing, unreadable, damaged or
    truncated file.
    """
    holds = f", which should hold {wanted[0]}{_more(list(wanted))}" if wanted else ""
    try:
        size, text = file.stat().st_size, _header_text(file)
        entries = json.loads(text)
        if not isinstance(entries, dict) or not _is_metadata(entries.pop("__metadata__", {})):
            raise ValueError("it is no table of tensors")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing{holds}: fetch the checkpoint again") from None
    except OSError as error:
        raise _unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}{holds}, has a damaged header ({error}): fetch it again") from error
    start = 8 + len(text)
    tensors = {name: _stored(file, name, entry, start) for name, entry in entries.items()}
    _check_places(file, tensors, start, size)
    return tensors


def _header_text(file: Path) -> bytes:
    with file.open("rb") as data:
        length, room = int.from_bytes(data.read(8), "little"), file.stat().st_size - 8
        if not 2 <= length <= room:
            raise ValueError(f"it claims {length} bytes and the file has {max(room, 0)}")
        return data.read(length)


def _is_metadata(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())


def _stored(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise ValueError("shape and data_offsets have to be non-negative integers")
        stored = StoredTensor(entry["dtype"], shape, file, start + begin)
        if stored.nbytes != end - begin:
            raise ValueError(f"{stored.nbytes} bytes by dtype and shape, {end - begin} by data_offsets")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} has a damaged header at {name} ({type(error).__name__}: {error}): fetch it again"
        ) from error
    return stored


def _check_places(file: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Tensors follow each other without gaps and end where the file ends."""
    place, name = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != place:
            raise CheckpointError(
                f"{file} has a damaged header at {name}: its data starts at byte {tensor.offset}, the data before it ends "
                f"at {place}; fetch it again"
            )
        place += tensor.nbytes
        if place > size:
            raise CheckpointError(
                f"{file} is truncated: {name} ends at byte {place}, the file has {size}; fetch it again"
            )
    if place != size:
        raise CheckpointError(
            f"{file} has {size - place} bytes behind {name}, its last tensor: fetch it again"
        )


def read_rows(stored: StoredTensor, first: int = 0, count: int | None = None) -> Tensor:
    """Rows first .. first + count of the first dimension (default: all), read at their place into memory of their own.

    A memory map would keep every page that was touched in the process's resident size.
    """
    import torch

    rows, rest = stored.shape[0], stored.shape[1:]
    count = rows - first if count is None else count
    out = torch.empty((count, *rest), dtype=getattr(torch, TORCH_NAMES[stored.dtype]))
    view = memoryview(out.flatten().view(torch.uint8).numpy())
    with stored.file.open("rb", buffering=0) as data:
        data.seek(stored.offset + first * (stored.nbytes // max(rows, 1)))
        while len(view):
            done = data.readinto(view)
            if not done:
                raise CheckpointError(f"{stored.file} became shorter while it was read: fetch it again")
            view = view[done:]
    return out


def read_chunks(stored: StoredTensor, chunk: int = CHUNK) -> Iterator[Tensor]:
    """The whole tensor as consecutive pieces of the first dimension, at most `chunk` bytes each (or one row)."""
    rows = stored.shape[0]
    step = max(1, chunk * rows // max(stored.nbytes, 1))
    for first in range(0, rows, step):
        yield read_rows(stored, first, min(step, rows - first))


# --- write ------------------------------------------------------------------------------------------------------------
def shard_plan(specs: Mapping[str, TensorSpec], shard_bytes: float) -> dict[str, str]:
    """name -> file name, in the order of `specs`: one file, or shards of at most `shard_bytes` (or one larger tensor).

    >>> shard_plan({"a": TensorSpec("F32", (3,)), "b": TensorSpec("F32", (2,))}, shard_bytes=12)
    {'a': 'model-00001-of-00002.safetensors', 'b': 'model-00002-of-00002.safetensors'}
    """
    shard, filled, number = {}, 0, 1
    for name, spec in specs.items():
        if filled and filled + spec.nbytes > shard_bytes:
            number, filled = number + 1, 0
        shard[name] = number
        filled += spec.nbytes
    if number == 1:
        return dict.fromkeys(specs, SINGLE)
    return {name: f"model-{i:05d}-of-{number:05d}.safetensors" for name, i in shard.items()}


class TensorWriter:
    """Writes tensors whose names, dtypes and shapes are known beforehand, in any order, each at its place in its file.

    `with TensorWriter(folder, specs) as writer:` then write() or write_rows() for every name; leaving the block checks that
    each arrived exactly once and writes the index. files: name -> file name, from shard_plan unless given.
    convert: change the dtype of what arrives; without it, another dtype is refused, since a conversion loses bits.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        shard_bytes: float = 5e9,
        files: Mapping[str, str] | None = None,
        convert: bool = False,
    ):
        self.folder, self.specs, self.convert = Path(folder), dict(specs), convert
        self.files = dict(files or shard_plan(specs, shard_bytes))
        self.rows = dict.fromkeys(self.specs, 0)  # so many rows of each tensor are written
        self.places: dict[str, int] = {}
        self.descriptors: dict[str, int] = {}

    def __enter__(self) -> TensorWriter:
        require_space(self.folder, sum(spec.nbytes for spec in self.specs.values()))
        for file in sorted(set(self.files.values())):
            # the widest items first, so that every tensor is aligned to its own
            names = [name for name, home in self.files.items() if home == file]
            names.sort(key=lambda name: -ITEM_BYTES[self.specs[name].dtype])
            self._open(file, names)
        return self

    def _open(self, file: str, names: list[str]) -> None:
        """Make the file at its full length, with its header."""
        entries, offset = {}, 0
        for name in names:
            spec = self.specs[name]
            entries[name] = {
                "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes],
            }  # fmt: skip
            offset += spec.nbytes
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(self.folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.descriptors[file] = descriptor
        os.ftruncate(descriptor, 8 + len(text) + offset)
        _write_at(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
        for name in names:
            self.places[name] = 8 + len(text) + entries[name]["data_offsets"][0]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one whole tensor. Raises CheckpointError for an unknown name, a second arrival, another shape or dtype."""
        spec = self._spec(name)
        if tuple(tensor.shape) != spec.shape:
            self._refuse(name, f"arrives as {list(tensor.shape)}, the model's shape is {list(spec.shape)}")
        if self.rows[name]:
            self._refuse(name, "arrives twice")
        self.write_rows(name, tensor)

    def write_rows(self, name: str, rows: Tensor) -> None:
        """Write the next rows of a tensor's first dimension, at most CHUNK bytes of copies at a time."""
        spec = self._spec(name)
        dtype = _torch_dtype(spec.dtype)
        if rows.dtype != dtype and not self.convert:
            self._refuse(name, f"arrives as {rows.dtype}, the file holds {dtype}; ask for dtype={rows.dtype}")
        row_bytes = spec.nbytes // max(spec.shape[0], 1)
        if tuple(rows.shape[1:]) != spec.shape[1:] or self.rows[name] + len(rows) > spec.shape[0]:
            self._refuse(
                name, f"arrives with {self.rows[name]} + {list(rows.shape)} rows of {list(spec.shape)}"
            )
        for part in rows.detach().split(max(1, CHUNK // max(row_bytes, 1))):
            place = self.places[name] + self.rows[name] * row_bytes
            _write_at(self.descriptors[self.files[name]], _raw(part.to("cpu", dtype)), place)
            self.rows[name] += len(part)

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.specs:
            raise CheckpointError(
                f"{self.folder}: {name} arrives and is no tensor of the model; compare the exporter's names with "
                "helpers.anatomy.tensor_shapes"
            )
        return self.specs[name]

    def _refuse(self, name: str, why: str) -> None:
        raise CheckpointError(f"{self.folder / self.files[name]}: {name} {why}; nothing was published")

    def __exit__(self, kind, *exc) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for descriptor in self.descriptors.values():
                os.close(descriptor)

    def _finish(self) -> None:
        short = [name for name, spec in self.specs.items() if self.rows[name] < spec.shape[0]]
        if short:
            self._refuse(short[0], f"did not arrive whole{_more(short)}")
        for descriptor in self.descriptors.values():
            os.fsync(descriptor)  # the rename that publishes must not overtake the data
        if set(self.files.values()) != {SINGLE}:
            size = sum(spec.nbytes for spec in self.specs.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(self.files.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, TORCH_NAMES[name])


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a torch dtype. Raises CheckpointError for one that no gpt-oss checkpoint holds."""
    for name, torch_name in TORCH_NAMES.items():
        if str(dtype) == f"torch.{torch_name}":
            return name
    raise CheckpointError(f"{dtype} is no dtype of a gpt-oss checkpoint; use float32, bfloat16 or float16")


def _raw(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy where it is contiguous.

    Not through numpy(): that would make the storage of a live parameter one that can never be resized, and so offloaded.
    """
    whole = tensor.detach().contiguous()
    data = (ctypes.c_uint8 * (whole.numel() * whole.element_size())).from_address(whole.data_ptr())
    data.tensor = whole  # lives as long as the view
    return memoryview(data).cast("B")


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, place)
        data, place = data[done:], place + done


def require_space(folder: Path, needed: int) -> None:
    """Raise CheckpointError where the disk of `folder` has no room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"the checkpoint takes {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free: choose a folder on a "
            "larger disk"
        )


def copy_companions(source: Path, folder: Path) -> None:
    """Copy everything but weights and their index (tokenizer, config, generation_config ...) into `folder`.

    Without permissions: the copies of a read-only source have to be writable, since config.json is changed afterwards.
    """
    for file in Path(source).iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copyfile(file, folder / file.name)


def plain_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config of the same model unquantised. dtype: torch's name, such as "bfloat16"."""
    dropped = ("quantization_config", "torch_dtype")
    return {k: v for k, v in config.items() if k not in dropped} | {"dtype": dtype}


def publish_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Call write(temporary folder) and put the result in place of `folder` by a rename.

    An old folder is moved aside first and removed last, so that no interruption leaves half of either.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        write(new)
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(new, folder)
        except BaseException:
            if old.exists() and not folder.exists():
                os.replace(old, folder)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
