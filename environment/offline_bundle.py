#!/usr/bin/env python3
"""Carries an installed environment to a GPU host that reaches no package index.

    python offline_bundle.py pack SITE_PACKAGES PARTS [--have gpu_host_has.txt] [--arch 90] [--part-mib 57]
    python offline_bundle.py unpack PARTS TARGET        # on the GPU host; then PYTHONPATH=TARGET

`pack` leaves out what the host has and what never runs there, and keeps one GPU architecture's device code in
CUDA libraries (90 is H100 and H200): the other code is zeroed in place, so sizes and offsets stay and compression
removes it. The parts are numbered, of at most --part-mib each, with their SHA-256 in PARTS/SHA256SUMS, which
`unpack` checks before it writes anything. Standard library only, Python 3.12 or newer.
"""

import argparse
import gzip
import hashlib
import io
import mmap
import shutil
import struct
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path

SUMS = "SHA256SUMS"
BUFFER = 1 << 22
LARGE_LIBRARY = 4 << 20  # bytes; a smaller .so holds no device code worth removing
NEVER_RUN = (
    "*.pyc",
    "*.a",
    "*.js.map",
    "ray/jars/*",
    "ray/dashboard/client/*",
    "sgl_kernel/sm100/*",
    "*/libnccl_ep.so",
    "sgl_kernel/infllm_ops*",
    "sgl_kernel/flashmla_ops*",
)

# CUDA fat binaries: a container header, then entries of one architecture each. All little-endian; offsets in bytes.
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of all entries
ENTRY_HEADER = struct.Struct("<HHIQ")  # kind, version, header size, payload size
ENTRY_ARCH_AT = 28  # uint32 in the entry header: 90 for sm_90
MACHINE_CODE = 2  # the entry kind of SASS; 1 is PTX


class BundleError(Exception):
    """What is wrong with a bundle, in one sentence that names the next step."""


def normalise(name: str) -> str:
    """The form in which distribution and folder names are compared: Foo-Bar -> foo_bar."""
    return name.strip().lower().replace("-", "_")


def read_names(text: str) -> set[str]:
    """Names of a have-file: one a line, `#` starts a comment."""
    lines = (line.split("#", 1)[0] for line in text.splitlines())
    return {normalise(line) for line in lines if line.strip()}


def top_level_name(entry: str) -> str:
    """The name a site-packages entry is known by: torch-2.11.dist-info, torch.libs and torch.py -> torch."""
    name = entry.split("-")[0]
    for suffix in (".libs", ".py"):
        name = name.removesuffix(suffix)
    return normalise(name)


def files_to_pack(site: Path, have: set[str]) -> Iterator[tuple[Path, str]]:
    """(file, its path inside site-packages), sorted, without what `have` names or NEVER_RUN matches."""
    for top in sorted(site.iterdir()):
        if top_level_name(top.name) in have or normalise(top.name) in have:
            continue
        found = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file())
        for path in found:
            inside = path.relative_to(site).as_posix()
            if not any(fnmatch(inside, pattern) for pattern in NEVER_RUN):
                yield path, inside


def _keep_in_fatbin(data: mmap.mmap, start: int, end: int, arch: int) -> int:
    """Zeroes the entries of data[start:end] that are not machine code of `arch`; returns the bytes kept."""
    kept = 0
    while start < end:
        kind, _, header, size = ENTRY_HEADER.unpack_from(data, start)
        payload, next_entry = start + header, start + header + size
        if header == 0 or next_entry > end:
            break
        (entry_arch,) = struct.unpack_from("<I", data, start + ENTRY_ARCH_AT)
        if kind == MACHINE_CODE and entry_arch == arch:
            kept += size
        else:
            data[payload:next_entry] = bytes(size)
        start = next_entry
    return kept


def keep_one_arch(path: Path, arch: int) -> int:
    """Zeroes all device code in `path` but machine code of `arch`. The size stays. Returns the bytes kept."""
    kept = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at = data.find(FATBIN_MAGIC)
        while at != -1 and at + FATBIN_HEADER.size <= len(data):
            _, version, header, size = FATBIN_HEADER.unpack_from(data, at)
            end = at + header + size
            if version == 1 and header == FATBIN_HEADER.size and end <= len(data):
                kept += _keep_in_fatbin(data, at + header, end, arch)
                at = data.find(FATBIN_MAGIC, end)
            else:
                at = data.find(FATBIN_MAGIC, at + len(FATBIN_MAGIC))
    return kept


class PartsWriter(io.RawIOBase):
    """A write-only stream that is cut into files part.000, part.001, ... of at most `limit` bytes."""

    def __init__(self, folder: Path, limit: int):
        super().__init__()
        self.folder, self.limit = folder, limit
        self.sums: list[str] = []
        self._file, self._hash, self._left = None, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if self._left == 0:
                self._next_part()
            piece = view[done : done + self._left]
            self._file.write(piece)
            self._hash.update(piece)
            done += len(piece)
            self._left -= len(piece)
        return done

    def _next_part(self) -> None:
        self._end_part()
        self._file = (self.folder / f"part.{len(self.sums):03d}").open("wb")
        self._hash, self._left = hashlib.sha256(), self.limit

    def _end_part(self) -> None:
        if self._file is not None:
            self._file.close()
            self.sums.append(f"{self._hash.hexdigest()}  {Path(self._file.name).name}\n")
            self._file = None

    def close(self) -> None:
        if not self.closed:
            self._end_part()
            super().close()


class PartsReader(io.RawIOBase):
    """The parts read as one stream."""

    def __init__(self, paths: Iterable[Path]):
        super().__init__()
        self._paths, self._file = list(paths), None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while self._file is not None or self._paths:
            if self._file is None:
                self._file = self._paths.pop(0).open("rb")
            count = self._file.readinto(buffer)
            if count:
                return count
            self._file.close()
            self._file = None
        return 0


def _add(tar: tarfile.TarFile, path: Path, inside: str, arch: int, scratch: Path) -> None:
    """Adds one file, a large library as a copy with one architecture's device code."""
    if path.suffix == ".so" and path.stat().st_size > LARGE_LIBRARY:
        copy = scratch / "library.so"
        shutil.copy(path, copy)
        keep_one_arch(copy, arch)
        path = copy
    tar.add(path, inside)


def pack(site: Path, parts: Path, have: set[str], arch: int = 90, part_bytes: int = 57 << 20) -> int:
    """Packs `site` into the new folder `parts`; returns the number of parts.

    Raises BundleError if `site` is no folder or `parts` exists with something in it.
    """
    if not site.is_dir():
        raise BundleError(
            f"{site} is not a folder; give the site-packages folder of an installed environment."
        )
    if parts.exists() and any(parts.iterdir()):
        raise BundleError(f"{parts} is not empty; remove it or name another folder.")
    parts.mkdir(parents=True, exist_ok=True)
    with closing(PartsWriter(parts, part_bytes)) as sink, tempfile.TemporaryDirectory() as scratch:
        with (
            io.BufferedWriter(sink, BUFFER) as buffer,
            gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=4, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", dereference=True) as tar,
        ):
            for path, inside in files_to_pack(site, have):
                _add(tar, path, inside, arch, Path(scratch))
    (parts / SUMS).write_text("".join(sink.sums))
    return len(sink.sums)


def checked_parts(parts: Path) -> list[Path]:
    """The part files in order, after their SHA-256 was compared. Raises BundleError for a missing or changed one."""
    listing = parts / SUMS
    if not listing.is_file():
        raise BundleError(f"{listing} is missing; copy the whole folder that `pack` wrote.")
    paths = []
    for line in listing.read_text().splitlines():
        expected, name = line.split(maxsplit=1)
        path = parts / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy it again.")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise BundleError(f"{path} is damaged (its SHA-256 differs); copy it again.")
        paths.append(path)
    return paths


def unpack(parts: Path, target: Path) -> int:
    """Checks all parts, then writes their files into `target`; returns the number of parts."""
    paths = checked_parts(parts)
    target.mkdir(parents=True, exist_ok=True)
    with io.BufferedReader(PartsReader(paths), BUFFER) as stream, gzip.GzipFile(fileobj=stream) as packed:
        with tarfile.open(fileobj=packed, mode="r|") as tar:
            tar.extractall(target, filter="tar")  # refuses paths that leave the target; keeps modes
    return len(paths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="site-packages -> numbered parts")
    packing.add_argument("site", type=Path)
    packing.add_argument("parts", type=Path)
    packing.add_argument("--have", type=Path, help="file of names that the host has")
    packing.add_argument("--arch", type=int, default=90, help="GPU architecture to keep (default 90)")
    packing.add_argument("--part-mib", type=int, default=57, help="largest part in MiB (default 57)")
    unpacking = verbs.add_parser("unpack", help="numbered parts -> a folder for PYTHONPATH")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("target", type=Path)
    return parser


def main() -> int:
    options = _parser().parse_args()
    try:
        if options.verb == "pack":
            have = read_names(options.have.read_text()) if options.have else set()
            count = pack(options.site, options.parts, have, options.arch, options.part_mib << 20)
            print(f"packed into {count} parts in {options.parts}")
        else:
            count = unpack(options.parts, options.target)
            print(f"unpacked {count} parts; use them with PYTHONPATH={options.target}")
    except (BundleError, OSError) as error:
        print(f"offline_bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
