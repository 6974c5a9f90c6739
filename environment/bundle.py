#!/usr/bin/env python3
"""Carries the locked GPU environment, and compiled kernels, to a machine that reaches no package index.

    python environment/bundle.py pack --out PARTS [--site SITE] [--have FILE] [--caches HOME_OR_TGZ ...]
    python bundle.py unpack PARTS TARGET          # on the node; prints the exports that come next
    python bundle.py verify TARGET [--imports]    # at any time afterwards
    python bundle.py caches collect OUT.tgz       # on a node whose engines have run once
    python bundle.py caches restore IN.tgz        # on the next one

`pack` leaves out what the node has (--have) and what never runs there, and keeps one GPU architecture's device code
in CUDA libraries (90 is H100 and H200): the other code is zeroed in place, so sizes and offsets stay and compression
removes it. PARTS holds numbered parts, MANIFEST.json (size and SHA-256 of every file, what the bundle fits) and
SHA256SUMS. `unpack` checks all sums before it writes, writes beside TARGET, verifies, then renames.

One file, standard library only, Python 3.12: copy it to the node beside the parts.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import importlib.metadata
import io
import json
import logging
import mmap
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("bundle")

HERE = Path(__file__).resolve().parent
PROJECT_ROOT = HERE.parent  # the project, unless this file was copied away from it
PROJECT = "gpt_oss_grpo"
DEFAULT_SITE = PROJECT_ROOT / ".venv-gpu/lib/python3.12/site-packages"  # what environment/setup.sh makes
LOCKS = ("gpu.lock", "gpu-built.lock")
SUMS, MANIFEST, CACHE_FOLDER = "SHA256SUMS", "MANIFEST.json", "gpu-caches"
SCHEMA = 1
MANIFEST_KEYS = {"python", "platform", "arch", "lock_sha256", "distributions", "left_to_the_node", "files"}
BUFFER = 1 << 22
BROKEN_ARCHIVE = (EOFError, gzip.BadGzipFile, tarfile.ReadError, zlib.error)
LARGE_LIBRARY = 4 << 20  # bytes; a smaller .so holds no device code worth removing
# One time (2020-01-01) for all files, in seconds: the same site packs to the same bytes, and ninja, which compares
# times, does not compile cached kernels again because a header was installed after them.
SOURCE_TIME = 1577836800
BLOCK = 4096  # bytes that a file occupies at least, for the estimate of disk space
NEVER_RUN = (
    "*.pyc",
    "*.a",
    "*.js.map",
    "ray/jars/*",
    "*/libnccl_ep.so",
    "sgl_kernel/infllm_ops*",
    "sgl_kernel/flashmla_ops*",
)
# sgl_kernel/load_utils.py: one build for compute capability 9.0, another for all others.
ONLY_90, NOT_90 = "sgl_kernel/sm90/*", "sgl_kernel/sm100/*"
# Programs started by name: tvm_ffi/cpp/extension.py, flashinfer/jit/cpp_ext.py and torch's cpp_extension call ninja.
# Everything else in a venv's bin has its venv's path in its first line and a `python -m` form.
PROGRAMS = ("ninja",)
# Imported by verify --imports: module -> distribution whose version is reported.
MAIN_PACKAGES = {
    "torch": "torch",
    "transformer_engine.pytorch": "transformer_engine",
    "megatron.core": "megatron_core",
    "megatron.bridge": "megatron_bridge",
    "sglang": "sglang",
    "ray": "ray",
}
# TransformerEngine looks for CUDA libraries where these say, then in the interpreter's own site-packages, but not in
# folders of PYTHONPATH (transformer_engine/common/__init__.py, _load_cuda_library). What those libraries open in turn
# is found by LD_LIBRARY_PATH.
LIBRARY_FOLDERS = {"CUDNN_HOME": "nvidia/cudnn", "NVRTC_HOME": "nvidia/cu13", "CURAND_HOME": "nvidia/cu13"}
PREPENDED = ("PATH", "LD_LIBRARY_PATH")  # the node's own value stays behind ours
IMPORT_SECONDS = 300  # for each of them; the first import on a cold disk takes a minute

# CUDA fat binaries: a container header, then entries of one architecture each. All little-endian; offsets in bytes.
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, header size, size of all entries
ENTRY_HEADER = struct.Struct("<HHIQ")  # kind, version, header size, payload size
ENTRY_ARCH_AT = 28  # uint32 in the entry header: 90 for sm_90
PTX, MACHINE_CODE = 1, 2  # kinds of entry: what the driver can compile, and SASS


class BundleError(Exception):
    """What is wrong with a bundle, in one sentence that names the next step."""


# ---- what to carry ------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """What of a site-packages folder is carried."""

    files: list[tuple[Path, str]]  # (file, its path inside the bundle), sorted
    distributions: dict[str, str]  # carried: normalised name -> version
    left: dict[str, str]  # left to the node: normalised name -> version it was packed beside


def normalise(name: str) -> str:
    """The form in which distribution and folder names are compared.

    >>> normalise(" Foo-Bar ")
    'foo_bar'
    """
    return name.strip().lower().replace("-", "_")


def read_names(text: str) -> set[str]:
    """Names of a have-file: one a line, `#` starts a comment.

    >>> sorted(read_names("torch  # the image has it\\nScikit-Learn\\n"))
    ['scikit_learn', 'torch']
    """
    lines = (line.split("#", 1)[0] for line in text.splitlines())
    return {normalise(line) for line in lines if line.strip()}


def top_level_name(entry: str) -> str:
    """The name a site-packages entry is known by.

    >>> [top_level_name(entry) for entry in ("torch-2.11.0.dist-info", "scipy.libs", "six.py", "PIL")]
    ['torch', 'scipy', 'six', 'pil']
    """
    name = entry.split("-")[0]
    for suffix in (".libs", ".py"):
        name = name.removesuffix(suffix)
    return normalise(name)


def name_and_version(info: Path) -> tuple[str, str]:
    """Normalised name and version of a .dist-info folder, from its name."""
    name, _, version = info.name.removesuffix(".dist-info").partition("-")
    return normalise(name), version


def installed_files(info: Path) -> list[str]:
    """Paths of a distribution's RECORD inside site-packages, without scripts and its own .dist-info."""
    record = info / "RECORD"
    rows = csv.reader(record.read_text().splitlines()) if record.is_file() else []
    return [row[0] for row in rows if row and not row[0].startswith(("../", "/", f"{info.name}/"))]


def _walk(site: Path, skipped: set[str], arch: int) -> Iterator[tuple[Path, str]]:
    """(file, path inside), sorted; top-level names in `skipped` and what never runs on `arch` left out."""
    never = (*NEVER_RUN, NOT_90 if arch == 90 else ONLY_90)
    for top in sorted(site.iterdir()):
        if top_level_name(top.name) in skipped or normalise(top.name) in skipped:
            continue
        for path in [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.is_file()):
            inside = path.relative_to(site).as_posix()
            if not any(fnmatch(inside, pattern) for pattern in never):
                yield path, inside


def choose(site: Path, have: set[str], arch: int = 90) -> Choice:
    """What of `site` to carry to a machine that has `have` (names of distributions or top-level entries).

    A distribution in `have` stays behind with every file of its RECORD (torch with functorch and torchgen, for
    instance); so does the .dist-info of one whose files all stay behind, since the node's own says the version.
    This project and editable installs stay behind: their paths exist on this machine only.
    """
    infos = sorted(site.glob("*.dist-info"))
    named = have | {PROJECT}
    behind = {name for info in infos if name_and_version(info)[0] in named for name in installed_files(info)}
    kept = [
        pair for pair in _walk(site, named, arch) if pair[1] not in behind and "__editable__" not in pair[1]
    ]
    inside = {name for _, name in kept}
    distributions, left = {}, {}
    for info in infos:
        name, version = name_and_version(info)
        code = installed_files(info)
        carried = name not in named and (not code or any(f in inside for f in code))
        (distributions if carried else left)[name] = version
    left.pop(PROJECT, None)
    hidden = {info.name for info in infos if name_and_version(info)[0] not in distributions}
    return Choice(
        [pair for pair in kept if pair[1].split("/")[0] not in hidden] + _programs(site, distributions),
        distributions,
        left,
    )


def _programs(site: Path, distributions: dict[str, str]) -> list[tuple[Path, str]]:
    """PROGRAMS of the venv around `site` as (file, bin/name): machine code only, which knows no path."""
    found = []
    for name in PROGRAMS:
        path = site.parents[2] / "bin" / name if len(site.parents) > 2 else site / "bin" / name
        if name in distributions and path.is_file():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    found.append((path, f"bin/{name}"))
    return found


def refuse_foreign_paths(files: list[tuple[Path, str]]) -> None:
    """Raises BundleError for a .pth file that names a folder of this machine (an editable install)."""
    for path, inside in files:
        if "/" not in inside and inside.endswith(".pth"):
            for line in path.read_text().splitlines():
                if line.startswith("/"):
                    raise BundleError(
                        f"{inside} points to {line}, which the node does not have; install that package "
                        "without --editable and pack again."
                    )


# ---- what is written for the node ---------------------------------------------------------------------------

# Python reads .pth files in site-packages only, not in folders of PYTHONPATH.
SITECUSTOMIZE = '''"""Written by environment/bundle.py: reads this folder's .pth files, as Python does in site-packages."""

import importlib.machinery
import importlib.util
import os
import site
import sys

_here = os.path.dirname(os.path.abspath(__file__))
site.addsitedir(_here)
# This file hides the machine's own sitecustomize: run that one too.
_others = [path for path in sys.path if os.path.abspath(path) != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
'''


def _entry_points_of(project: Path) -> tuple[str, str] | None:
    """(version, text of entry_points.txt) from pyproject.toml in `project`; None where there is none of ours."""
    import tomllib  # not at the top: main() must get far enough to refuse an old Python

    path = project / "pyproject.toml"
    table = tomllib.loads(path.read_text()).get("project", {}) if path.is_file() else {}
    if normalise(table.get("name", "")) != PROJECT:
        return None
    groups = table.get("entry-points", {}).items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    return table["version"], "\n".join(lines)


def project_info(project: Path, site: Path) -> dict[str, bytes]:
    """The .dist-info that makes this project's SGLang plugins known on the node: path inside -> content.

    From pyproject.toml; the installed .dist-info is asked only where that is missing, since an editable install
    keeps the entry points of the day it was made. Raises BundleError where neither is found.
    """
    found = _entry_points_of(project)
    if found is None:
        installed = sorted(site.glob(f"{PROJECT}-*.dist-info/entry_points.txt"))
        if not installed:
            raise BundleError(
                f"neither {project / 'pyproject.toml'} nor {site} knows {PROJECT}, so SGLang would not find its "
                "plugins on the node; run environment/bundle.py where it lies in the project."
            )
        found = name_and_version(installed[0].parent)[1], installed[0].read_text()
    version, entry_points = found
    folder = f"{PROJECT}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {PROJECT.replace('_', '-')}\nVersion: {version}\n"
    return {f"{folder}/METADATA": metadata.encode(), f"{folder}/entry_points.txt": entry_points.encode()}


def _written_for_node(choice: Choice, project: Path, site: Path) -> dict[str, bytes]:
    written = project_info(project, site)
    inside = {name for _, name in choice.files}
    if "sitecustomize.py" not in inside and any(fnmatch(name, "*.pth") for name in inside):
        written["sitecustomize.py"] = SITECUSTOMIZE.encode()
    return written


# ---- one architecture's device code -------------------------------------------------------------------------


class Entry(NamedTuple):
    """One entry of a fat binary; offsets in bytes."""

    kind: int
    arch: int
    payload: int
    end: int


def _entries(data: mmap.mmap, start: int, end: int) -> Iterator[Entry]:
    while start + ENTRY_ARCH_AT + 4 <= end:
        kind, _, header, size = ENTRY_HEADER.unpack_from(data, start)
        if header == 0 or start + header + size > end:
            return
        (arch,) = struct.unpack_from("<I", data, start + ENTRY_ARCH_AT)
        yield Entry(kind, arch, start + header, start + header + size)
        start += header + size


def wanted_code(entries: Iterable[tuple[int, int]], arch: int) -> tuple[int, int] | None:
    """The (kind, architecture) that a GPU of `arch` runs of these, chosen as the CUDA driver does.

    Machine code of the same major version and at most its minor; where there is none, the newest PTX that is not
    newer than the GPU. None: this GPU cannot run any.

    >>> wanted_code([(2, 80), (2, 90), (1, 90)], 90), wanted_code([(2, 80), (1, 80)], 90), wanted_code([(2, 86)], 89)
    ((2, 90), (1, 80), (2, 86))
    """
    usable = [
        (kind, code)
        for kind, code in entries
        if code <= arch and (kind == PTX or kind == MACHINE_CODE and code // 10 == arch // 10)
    ]
    return max(usable, default=None)  # MACHINE_CODE is above PTX


def _fatbins(data: mmap.mmap) -> Iterator[list[Entry]]:
    """Entries of each fat binary in a library."""
    at = data.find(FATBIN_MAGIC)
    while at != -1 and at + FATBIN_HEADER.size <= len(data):
        _, version, header, size = FATBIN_HEADER.unpack_from(data, at)
        end = at + header + size
        if version == 1 and header == FATBIN_HEADER.size and end <= len(data):
            yield list(_entries(data, at + header, end))
            at = data.find(FATBIN_MAGIC, end)
        else:
            at = data.find(FATBIN_MAGIC, at + len(FATBIN_MAGIC))


def keep_one_arch(path: Path, arch: int) -> int:
    """Zeroes PTX and machine code in `path` that a GPU of `arch` does not run. Returns the bytes kept."""
    kept = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in _fatbins(data):
            wanted = wanted_code([(e.kind, e.arch) for e in entries], arch)
            for entry in entries:
                if (entry.kind, entry.arch) == wanted:
                    kept += entry.end - entry.payload
                elif entry.kind in (PTX, MACHINE_CODE):
                    data[entry.payload : entry.end] = bytes(entry.end - entry.payload)
    return kept


# ---- parts --------------------------------------------------------------------------------------------------


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

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


class HashingReader:
    """A file that is hashed while tarfile reads it."""

    def __init__(self, file):
        self._file, self.sha256 = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- pack ---------------------------------------------------------------------------------------------------


def _add(tar: tarfile.TarFile, path: Path, inside: str, mode: int, mtime: int) -> list:
    """Adds one file without anybody's name in it; returns [size, SHA-256]."""
    info = tarfile.TarInfo(inside)
    info.size, info.mode, info.mtime = path.stat().st_size, mode & 0o755, mtime
    with path.open("rb") as file:
        reader = HashingReader(file)
        tar.addfile(info, reader)
    return [info.size, reader.sha256.hexdigest()]


def _add_all(
    tar: tarfile.TarFile, files: list[tuple[Path, str]], arch: int, scratch: Path
) -> dict[str, list]:
    """Adds files, large libraries as copies with one architecture's device code; returns the manifest's entries."""
    entries = {}
    for path, inside in files:
        mode, source = path.stat().st_mode, path
        if path.suffix == ".so" and path.stat().st_size > LARGE_LIBRARY:
            source = scratch / "library.so"
            shutil.copyfile(path, source)
            keep_one_arch(source, arch)
        entries[inside] = _add(tar, source, inside, mode, SOURCE_TIME)
    return entries


@contextmanager
def _tar_into(parts: Path, part_bytes: int) -> Iterator[tuple[tarfile.TarFile, PartsWriter]]:
    with closing(PartsWriter(parts, part_bytes)) as sink, io.BufferedWriter(sink, BUFFER) as buffer:
        with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=4, mtime=0) as packed:
            with tarfile.open(fileobj=packed, mode="w|") as tar:
                yield tar, sink


def _python_of(site: Path) -> str:
    """The Python minor version of a site-packages folder: from lib/python3.12, else this interpreter's."""
    named = re.fullmatch(r"python(\d+\.\d+)", site.parent.name)
    return named.group(1) if named else "{}.{}".format(*sys.version_info)


def _lock_sum(environment: Path) -> str | None:
    lock = environment / LOCKS[0]
    return sha256_of(lock) if lock.is_file() else None


def lock_notes(choice: Choice, environment: Path) -> list[str]:
    """How the chosen site differs from the locks in `environment`, one sentence each."""
    paths = [environment / name for name in LOCKS if (environment / name).is_file()]
    text = "\n".join(path.read_text() for path in paths)
    locked = {normalise(n).replace(".", "_"): v for n, v in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M)}
    found = choice.distributions | choice.left
    wrong = [f"{n} {found[n]} ({v})" for n, v in locked.items() if found.get(n, v) != v]
    missing = [name for name in locked if name not in found]
    notes = []
    if wrong:
        notes.append(
            f"not the locked version (in brackets): {', '.join(wrong)}; install from {LOCKS[0]} again."
        )
    if missing:
        notes.append(f"locked, but not installed in the site: {', '.join(missing)}.")
    return notes


def _check_pack(site: Path, parts: Path) -> None:
    if not site.is_dir():
        raise BundleError(
            f"{site} is not a folder; make it (bash environment/run.sh --profile gpu --set-up-only), or name the "
            "site-packages folder of another environment with --site."
        )
    if not any(site.glob("*.dist-info")):
        raise BundleError(f"{site} holds no installed package; give a site-packages folder with --site.")
    if parts.exists() and (not parts.is_dir() or any(parts.iterdir())):
        raise BundleError(f"{parts} is not empty; remove it or name another folder with --out.")


def pack(
    site: Path,
    parts: Path,
    have: set[str] = frozenset(),
    arch: int = 90,
    part_bytes: int = 52 << 20,
    caches: Iterable[Path] = (),
    project: Path = PROJECT_ROOT,
) -> dict:
    """Packs `site` into the new folder `parts`; returns the manifest (see MANIFEST.json).

    `caches` are archives of collect(), or home folders to collect from. Raises BundleError where site, parts or a
    cache do not fit; then `parts` is left empty.
    """
    _check_pack(site, parts)
    choice = choose(site, have, arch)
    refuse_foreign_paths(choice.files)
    parts.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            files = choice.files + _store(_written_for_node(choice, project, site), Path(scratch) / "written")
            files += _cache_files(caches, Path(scratch), site, arch)
            with _tar_into(parts, part_bytes) as (tar, sink):
                entries = _add_all(tar, files, arch, Path(scratch))
        manifest = _manifest(site, choice, arch, entries, project / "environment")
        (parts / MANIFEST).write_text(json.dumps(manifest, indent=0))
        (parts / SUMS).write_text("".join(sink.sums) + f"{sha256_of(parts / MANIFEST)}  {MANIFEST}\n")
    except BaseException:
        for path in parts.iterdir():
            path.unlink()
        raise
    return manifest


def _store(contents: dict[str, bytes], folder: Path) -> list[tuple[Path, str]]:
    for inside, data in contents.items():
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / inside).write_bytes(data)
    return [(folder / inside, inside) for inside in contents]


def _manifest(site: Path, choice: Choice, arch: int, entries: dict[str, list], environment: Path) -> dict:
    return {
        "schema": SCHEMA,
        "python": _python_of(site),
        "platform": sysconfig.get_platform(),
        "arch": arch,
        "lock_sha256": _lock_sum(environment),
        "distributions": choice.distributions,
        "left_to_the_node": choice.left,
        "files": entries,
    }


# ---- unpack -------------------------------------------------------------------------------------------------


def checked_parts(parts: Path) -> list[Path]:
    """The part files in order, after every sum was compared. Raises BundleError for a missing or changed file."""
    listing = parts / SUMS
    if not listing.is_file():
        raise BundleError(f"{listing} is missing; copy the whole folder that `pack` wrote.")
    paths = []
    for line in listing.read_text().splitlines():
        match = re.fullmatch(rf"([0-9a-f]{{64}})  (part\.\d{{3,}}|{re.escape(MANIFEST)})", line)
        if match is None:
            raise BundleError(
                f"{listing} has a line that `pack` does not write ({line[:80]!r}); copy it again."
            )
        path = parts / match.group(2)
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy it again.")
        if sha256_of(path) != match.group(1):
            raise BundleError(f"{path} is damaged (its SHA-256 differs); copy it again.")
        paths.append(path)
    if not paths or paths[-1].name != MANIFEST:
        raise BundleError(f"{listing} is cut short (it does not end with {MANIFEST}); copy it again.")
    return paths[:-1]


def read_manifest(folder: Path) -> dict:
    """MANIFEST.json of `folder`. Raises BundleError where it is missing, broken or of another schema."""
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(f"{path} is missing; name a folder that `unpack` made.")
    try:
        manifest = json.loads(path.read_text())
        schema, missing = manifest["schema"], MANIFEST_KEYS - manifest.keys()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} is damaged; remove {folder} and unpack the bundle again.") from error
    if schema != SCHEMA:
        raise BundleError(
            f"{path} has schema {schema}, this file reads {SCHEMA}; use the bundle.py that packed it."
        )
    if missing:
        raise BundleError(f"{path} lacks {', '.join(sorted(missing))}; unpack the bundle again.")
    return manifest


def refuse_unsafe(member: tarfile.TarInfo) -> None:
    """Raises BundleError unless a member is a plain file or folder with a path inside its archive."""
    inside = Path(member.name)
    if inside.is_absolute() or ".." in inside.parts or not (member.isreg() or member.isdir()):
        raise BundleError(
            f"the archive holds {member.name!r}, which is no plain file inside it; do not use it, and ask for it "
            "again where it came from."
        )


def safe_member(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """A tar filter: refuse_unsafe(), then Python's own filter for data, which follows links that lie in `folder`."""
    refuse_unsafe(member)
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError as error:
        raise BundleError(
            f"{member.name!r} would be written outside {folder}; remove the link there."
        ) from error


def _check_space(target: Path, manifest: dict) -> None:
    need = sum(-(-size // BLOCK) * BLOCK for size, _ in manifest["files"].values())
    folder = next(parent for parent in target.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < need * 1.02:
        raise BundleError(
            f"only {free / 1e9:.2f} GB are free in {folder} and the bundle needs {need * 1.02 / 1e9:.2f} GB; "
            "free some space, or unpack to a larger disk."
        )


def _extract(paths: list[Path], folder: Path) -> None:
    with io.BufferedReader(PartsReader(paths), BUFFER) as stream, gzip.GzipFile(fileobj=stream) as packed:
        with tarfile.open(fileobj=packed, mode="r|") as tar:
            tar.extractall(folder, filter=safe_member)


def _is_finished(parts: Path, target: Path) -> bool:
    """Whether `target` was unpacked from `parts`. Raises BundleError if it holds something else."""
    if not target.exists() or target.is_dir() and not any(target.iterdir()):
        return False
    if target.is_dir() and (target / MANIFEST).is_file():
        if (target / MANIFEST).read_bytes() == (parts / MANIFEST).read_bytes():
            return True
        raise BundleError(f"{target} holds another bundle; remove it or name another folder.")
    raise BundleError(f"{target} exists and is not an unpacked bundle; remove it or name another folder.")


def _refuse(problems: list[str], what: str, remedy: str) -> None:
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise BundleError(f"{what}: {shown}. {remedy}")


def unpack(parts: Path, target: Path) -> bool:
    """Checks all sums, unpacks beside `target`, verifies every file and renames. True if anything was written.

    A target that these parts made before is verified only. Raises BundleError, and leaves nothing behind, where a
    sum differs, space is short, the archive holds what it should not, or `target` is something else.
    """
    paths = checked_parts(parts)
    manifest = read_manifest(parts)
    if _is_finished(parts, target):
        again = f"Remove {target} and unpack again."
        _refuse(file_problems(target, manifest), f"{target} was unpacked before and has changed", again)
        return False
    _check_space(target, manifest)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
    try:
        _extract(paths, beside)
        shutil.copyfile(parts / MANIFEST, beside / MANIFEST)
        _refuse(file_problems(beside, manifest), "what was unpacked is not what was packed", "Copy it again.")
        beside.chmod(0o755)
        beside.rename(target)
    except BROKEN_ARCHIVE as error:
        raise BundleError(f"{parts} cannot be unpacked ({error}); pack it again.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return True


# ---- verify -------------------------------------------------------------------------------------------------


def _files_in(folder: Path) -> set[str]:
    """Paths of everything but folders, without byte code, which Python writes as it imports."""
    found = set()
    for place, folders, names in os.walk(folder):
        linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name != "__pycache__" and name not in linked]
        found |= {Path(place, name).relative_to(folder).as_posix() for name in [*names, *linked]}
    return found - {MANIFEST}


def file_problems(folder: Path, manifest: dict) -> list[str]:
    """What differs between `folder` and the manifest: missing, added and changed files, a sentence each."""
    expected, found = manifest["files"], _files_in(folder)

    def problem(name: str) -> str | None:
        path, (size, sha256) = folder / name, expected[name]
        if path.is_symlink() or path.stat().st_size != size or sha256_of(path) != sha256:
            return f"{name} was changed"
        return None

    with ThreadPoolExecutor() as pool:  # hashing leaves the interpreter's lock
        changed = [text for text in pool.map(problem, sorted(found & expected.keys())) if text]
    missing = [f"{name} is missing" for name in sorted(expected.keys() - found)]
    return missing + changed + [f"{name} was added" for name in sorted(found - expected.keys())]


def _ask_gpu(field: str) -> list[str]:
    """One field of each GPU from nvidia-smi; empty where it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def gpu_archs() -> list[int]:
    """Architectures of this machine's GPUs, 90 for compute capability 9.0; empty where none is seen."""
    matches = (re.fullmatch(r"\s*(\d+)\.(\d)\s*", line) for line in _ask_gpu("compute_cap"))
    return [10 * int(match.group(1)) + int(match.group(2)) for match in matches if match]


class Report(NamedTuple):
    """What verify found: problems stop the bundle from running here, notes may."""

    problems: list[str]
    notes: list[str]


def machine_report(manifest: dict, archs: list[int]) -> Report:
    """Whether this machine's Python, platform and GPUs (`archs`) are what the bundle was packed for."""
    python, arch, problems, notes = "{}.{}".format(*sys.version_info), manifest["arch"], [], []
    if python != manifest["python"]:
        wanted = manifest["python"]
        problems.append(f"this is Python {python}, the bundle is for {wanted}; start it with python{wanted}")
    if sysconfig.get_platform() != manifest["platform"]:
        problems.append(
            f"this machine is {sysconfig.get_platform()}, the bundle is for {manifest['platform']}"
        )
    for other in sorted({a for a in archs if a // 10 != arch // 10 or a < arch}):
        problems.append(
            f"a GPU here has compute capability {other / 10}, the bundle holds kernels for {arch / 10}; pack "
            f"again with --arch {other}"
        )
    if not archs:
        notes.append("no GPU was seen (nvidia-smi is missing or fails), so kernels and GPU were not compared")
    elif (
        shutil.which("nvcc") is None
        and not Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin/nvcc").exists()
    ):
        notes.append("no CUDA compiler (nvcc) was found; SGLang compiles kernels at its first start")
    return Report(problems, notes)


def version_of(name: str, site: Path | None = None) -> str | None:
    """Version of a distribution that Python sees here, in `site` first; None where there is none."""
    path = ([str(site)] if site else []) + sys.path
    found = next(iter(importlib.metadata.distributions(name=name, path=path)), None)
    return found.version if found else None


def _public(version: str) -> str:
    """A version without its local part: 2.11.0+cu130 -> 2.11.0."""
    return version.split("+")[0]


def node_report(manifest: dict, version_here: Callable[[str], str | None] = version_of) -> Report:
    """Compares what was left to the node with what it has. Another torch is a problem: extensions are bound to it."""
    left = manifest["left_to_the_node"]
    here = {name: version_here(name) for name in left}
    other = {n: v for n, v in here.items() if v and _public(v) != _public(left[n])}
    absent = [name for name, version in here.items() if version is None]
    problems, notes = [], []
    if "torch" in other or "torch" in absent:
        problems.append(
            f"the bundle was packed beside torch {left['torch']} and this Python has "
            f"{other.get('torch', 'none')}; install that version, or pack again without torch in --have"
        )
    if other:
        listed = ", ".join(f"{n} {v} ({left[n]})" for n, v in sorted(other.items()))
        notes.append(f"other versions here than where it was packed (in brackets): {listed}")
    if absent:
        notes.append(f"left to this machine, but this Python does not know them: {', '.join(sorted(absent))}")
    return Report(problems, notes)


def project_notes(target: Path, manifest: dict, project: Path = PROJECT_ROOT) -> list[str]:
    """Where bundle and project have gone apart since it was packed; empty where this file lies alone."""
    ours = _entry_points_of(project)
    if ours is None:
        return []
    notes = []
    if manifest["lock_sha256"] not in (None, _lock_sum(project / "environment")):
        notes.append(
            f"the bundle was packed from another {LOCKS[0]} than the project here has; pack it again"
        )
    packed = sorted(target.glob(f"{PROJECT}-*.dist-info/entry_points.txt"))
    if not packed or packed[0].read_text() != ours[1]:
        notes.append("pyproject.toml names other SGLang plugins than the bundle; pack it again")
    return notes


def verify(target: Path) -> Report:
    """Every file against the manifest, then the machine, what it should have, and the project beside this file."""
    manifest = read_manifest(target)
    machine, node = machine_report(manifest, gpu_archs()), node_report(manifest)
    files = file_problems(target, manifest)
    notes = machine.notes + node.notes + project_notes(target, manifest)
    return Report(files + machine.problems + node.problems, notes)


def node_environment(target: Path) -> dict[str, str]:
    """The variables that a process needs to use `target`: PYTHONPATH, and what was carried of programs and libraries."""
    ours = [str(PROJECT_ROOT)] if (PROJECT_ROOT / "helpers").is_dir() else []
    variables = {"PYTHONPATH": os.pathsep.join([str(target.absolute()), *ours])}
    if (target / "bin").is_dir():
        variables["PATH"] = str(target.absolute() / "bin")
    for name, folder in LIBRARY_FOLDERS.items():
        if (target / folder).is_dir():
            variables[name] = str(target.absolute() / folder)
    libraries = sorted(str(path) for path in target.absolute().glob("nvidia/*/lib"))
    if libraries:
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return variables


def export_lines(target: Path) -> list[str]:
    """What the person types next."""
    return [
        f"export {name}={shlex.quote(value)}" + (f"${{{name}:+:${name}}}" if name in PREPENDED else "")
        for name, value in node_environment(target).items()
    ]


IMPORT_ONE = "import importlib, sys; importlib.import_module(sys.argv[1])"


def import_problem(module: str, target: Path, seconds: float = IMPORT_SECONDS) -> str | None:
    """Imports `module` in a process of its own as the node would; None, or what went wrong."""
    variables = node_environment(target)
    for name in variables.keys() & set(PREPENDED):
        variables[name] = os.pathsep.join(filter(None, [variables[name], os.environ.get(name)]))
    command = [sys.executable, "-c", IMPORT_ONE, module]
    try:
        done = subprocess.run(
            command,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"import {module} did not end within {seconds:.0f} s"
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"import {module} failed: {last}" if done.returncode else None


def import_problems(target: Path, modules: dict[str, str] = MAIN_PACKAGES) -> list[str]:
    """Imports each module and compares its distribution's version with the manifest, one log line each."""
    manifest = read_manifest(target)
    expected = manifest["left_to_the_node"] | manifest["distributions"]
    problems = []
    for module, distribution in modules.items():
        version = version_of(distribution, target)
        problem = import_problem(module, target)
        if not problem and version and _public(version) != _public(expected.get(distribution, version)):
            problem = f"{distribution} is {version}, the bundle was packed with {expected[distribution]}"
        log.info("  %-28s %s", module, problem or f"{version} imports")
        problems += [problem] if problem else []
    return problems


# ---- run-time kernel caches ---------------------------------------------------------------------------------


class Cache(NamedTuple):
    """Where an engine keeps kernels that it compiled, and what they depend on beside the GPU's architecture."""

    name: str
    default: str  # below the home folder
    variables: tuple[
        tuple[str, str], ...
    ]  # (variable that moves it, what is appended to its value), first wins
    needs: tuple[str, ...]  # distributions whose versions must be the same
    driver: bool = False  # whether the driver's version must be the same


# Read in sglang 0.5.17 (environ.py, kernels/jit/utils/compile.py, layers/deep_gemm_wrapper/compile_utils.py),
# flashinfer 0.6.15 (jit/env.py), tvm_ffi 0.1.11 (cpp/extension.py), triton 3.6.0 (knobs.py), tilelang 0.1.11 (env.py).
# Inductor keeps its own in a temporary folder unless the variable is set; SGLang sets it to one below its own.
CACHES = (
    Cache(
        "flashinfer",
        ".cache/flashinfer",
        (("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer"),),
        ("flashinfer_python",),
    ),
    Cache("tvm-ffi", ".cache/tvm-ffi", (("TVM_FFI_CACHE_DIR", ""),), ("apache_tvm_ffi", "sglang")),
    Cache(
        "triton",
        ".triton/cache",
        (("TRITON_CACHE_DIR", ""), ("TRITON_HOME", ".triton/cache")),
        ("triton",),
    ),
    Cache("sglang", ".cache/sglang", (("SGLANG_CACHE_DIR", ""),), ("sglang", "flashinfer_python", "torch")),
    Cache("deep_gemm", ".cache/deep_gemm", (("SGLANG_DG_CACHE_DIR", ""),), ("sgl_deep_gemm",)),
    Cache("tilelang", ".tilelang/cache", (("TILELANG_CACHE_DIR", ""),), ("tilelang",)),
    Cache("inductor", ".cache/torchinductor", (("TORCHINDUCTOR_CACHE_DIR", ""),), ("torch", "triton")),
    Cache("cuda", ".nv/ComputeCache", (("CUDA_CACHE_PATH", ""),), (), driver=True),
)
KEY = "key.json"
# Locks of running processes, and what SGLang measured about one machine's links between GPUs.
NOT_CACHED = ("*/lock", "*.lock", "*/gpu_p2p_access_cache*", "*.tmp", "*/tmp.*")


class Machine(NamedTuple):
    """What compiled kernels depend on."""

    arch: int | None  # 90 for compute capability 9.0
    gpu: str | None
    driver: str | None
    version: Callable[[str], str | None]  # of a distribution


class Restored(NamedTuple):
    """Files written, files kept because those in place are as new, and caches left out with the reason."""

    written: int
    kept: int
    left: dict[str, str]


def this_machine(arch: int | None = None, site: Path | None = None) -> Machine:
    """This machine's first GPU and installed versions, in `site` before sys.path; `arch` where no GPU is seen."""
    seen = (gpu_archs() or [None])[0]
    gpu, driver = ((_ask_gpu(field) or [None])[0] for field in ("name", "driver_version"))
    return Machine(arch or seen, gpu, driver, lambda name: version_of(name, site))


def cache_folder(cache: Cache, home: Path | None) -> Path:
    """Where a cache lies: below `home` if one is given, else where the variables say, else below one's own home."""
    if home is None:
        for variable, tail in cache.variables:
            if os.environ.get(variable):
                return Path(os.environ[variable]).expanduser() / tail
    return (home or Path.home()) / cache.default


def key_of(machine: Machine, cache: Cache) -> dict:
    """What must be equal for a cache to be of use: {"arch": 90, "triton": "3.6.0"}, for instance."""
    versions = {name: _public(machine.version(name) or "") or None for name in cache.needs}
    return {"arch": machine.arch} | versions | ({"driver": machine.driver} if cache.driver else {})


def _cached_files(folder: Path, name: str) -> list[tuple[Path, str]]:
    paths = (p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink())
    pairs = ((path, f"{name}/{path.relative_to(folder).as_posix()}") for path in paths)
    return [pair for pair in pairs if not any(fnmatch(pair[1], pattern) for pattern in NOT_CACHED)]


def collect(out: Path, machine: Machine, home: Path | None = None) -> dict:
    """Packs the kernel caches into `out` with the keys they depend on; returns what key.json says.

    A cache whose key is not known here (a package that is not installed) is left out with a log line. Raises
    BundleError if the architecture is not known or no cache is found.
    """
    if machine.arch is None:
        raise BundleError("no GPU was seen, so the kernels' architecture is not known; say it: --arch 90.")
    keys, files = {}, []
    for cache in CACHES:
        found, key = _cached_files(cache_folder(cache, home), cache.name), key_of(machine, cache)
        unknown = [name for name, value in key.items() if value is None]
        if found and unknown:
            log.info(
                "cache %s is left out: the version of %s is not known here", cache.name, ", ".join(unknown)
            )
        elif found:
            keys[cache.name], files = key, files + found
    if not files:
        raise BundleError(
            f"no kernel caches below {home or Path.home()}; start an engine on the GPU once, then again."
        )
    about = {"schema": SCHEMA, "gpu": machine.gpu, "driver": machine.driver, "caches": keys}
    _write_caches(out, about, files)
    return about


def _write_caches(out: Path, about: dict, files: list[tuple[Path, str]]) -> None:
    """key.json first, so that a reader can decide before it reads the rest."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        with (
            tempfile.TemporaryDirectory() as scratch,
            tarfile.open(unfinished, "w:gz", compresslevel=6) as tar,
        ):
            for path, inside in _store({KEY: json.dumps(about, indent=1).encode()}, Path(scratch)) + files:
                _add(tar, path, inside, path.stat().st_mode, int(path.stat().st_mtime))
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)


def read_key(archive: Path) -> dict:
    """key.json of a cache archive. Raises BundleError if it is none of collect()'s or holds unsafe members."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            names = [member.name for member in tar if refuse_unsafe(member) is None]
            if names[:1] != [KEY]:
                raise BundleError(
                    f"{archive} does not say which GPU and versions its kernels are for; unpack it into a folder and "
                    "pack that: bundle.py caches collect OUT.tgz --home FOLDER --arch 90 --site SITE."
                )
            return json.load(tar.extractfile(KEY))
    except (*BROKEN_ARCHIVE, ValueError) as error:
        raise BundleError(f"{archive} is damaged ({error}); copy it again.") from error


def misfit(key: dict, here: dict) -> str | None:
    """Why kernels with `key` do not serve a machine with `here`; None if they do.

    >>> misfit({"arch": 90, "triton": "3.6.0"}, {"arch": 90, "triton": "3.5.1"})
    'triton is 3.5.1 here, the kernels were compiled with 3.6.0'
    """
    for name, value in key.items():
        if here.get(name) != value:
            return f"{name} is {here.get(name) or 'not known'} here, the kernels were compiled with {value}"
    return None


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> bool:
    """Writes one file unless the one in place is as new; through a file beside it, for processes that have it open."""
    if target.exists() and target.stat().st_mtime >= member.mtime:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=".bundle.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            shutil.copyfileobj(tar.extractfile(member), file)
        os.chmod(beside, member.mode & 0o755)
        os.utime(beside, (member.mtime, member.mtime))
        os.replace(beside, target)
    finally:
        Path(beside).unlink(missing_ok=True)
    return True


def restore(archive: Path, machine: Machine, home: Path | None = None) -> Restored:
    """Puts the caches of `archive` in place where their keys fit this machine; never over a file that is as new."""
    keys = read_key(archive)["caches"]
    known = {cache.name: cache for cache in CACHES}
    left = {name: "this bundle.py does not know it" for name in keys.keys() - known.keys()}
    for name in keys.keys() & known.keys():
        reason = misfit(keys[name], key_of(machine, known[name]))
        if reason:
            left[name] = reason
    counts = [0, 0]
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name, _, inside = member.name.partition("/")
            if member.isreg() and name in keys.keys() - left.keys() and inside:
                folder = cache_folder(known[name], home)
                checked = safe_member(member.replace(name=inside, deep=False), str(folder))
                counts[not _place(tar, member, folder / checked.name)] += 1
    return Restored(*counts, left)


def _cache_files(caches: Iterable[Path], scratch: Path, site: Path, arch: int) -> list[tuple[Path, str]]:
    """Cache archives to carry, those of home folders collected here, as (file, path inside)."""
    carried = []
    for number, source in enumerate(caches):
        archive = source
        if source.is_dir():
            archive = scratch / f"caches-{number}.tgz"
            collect(archive, Machine(arch, None, None, lambda name: version_of(name, site)), source)
        elif not source.is_file():
            raise BundleError(
                f"{source} is missing; give a home folder, or an archive of `bundle.py caches collect`."
            )
        read_key(archive)
        carried.append((archive, f"{CACHE_FOLDER}/{number:02d}.tgz"))
    return carried


# ---- the command line ---------------------------------------------------------------------------------------


def _pack(options: argparse.Namespace) -> int:
    have = read_names(options.have.read_text()) if options.have else set()
    log.info("packing %s (minutes) ...", options.site)
    manifest = pack(options.site, options.out, have, options.arch, options.part_mib << 20, options.caches)
    for note in lock_notes(Choice([], manifest["distributions"], manifest["left_to_the_node"]), HERE):
        log.info("note: %s", note)
    sizes = [path.stat().st_size for path in options.out.iterdir()]
    log.info(
        "%d files of %d distributions in %d parts, %.0f MiB, in %s",
        len(manifest["files"]),
        len(manifest["distributions"]),
        len(sizes) - 2,
        sum(sizes) / 2**20,
        options.out,
    )
    log.info("copy that folder and bundle.py to the node, then: python3.12 bundle.py unpack PARTS TARGET")
    return 0


def _say_restored(result: Restored) -> None:
    for name, reason in sorted(result.left.items()):
        log.info("kernel cache %s is left out: %s", name, reason)
    log.info("kernel caches: %d files put in place, %d were there", result.written, result.kept)


def _unpack(options: argparse.Namespace) -> int:
    written = unpack(options.parts, options.target)
    log.info(
        "%s %s: every file is as packed", "unpacked" if written else "already unpacked in", options.target
    )
    manifest = read_manifest(options.target)
    reports = [machine_report(manifest, gpu_archs()), node_report(manifest)]
    for text in [*(p for r in reports for p in r.problems), *(n for r in reports for n in r.notes)]:
        log.info("note: %s", text)
    if not options.no_caches:
        for archive in sorted((options.target / CACHE_FOLDER).glob("*.tgz")):
            _say_restored(restore(archive, this_machine(site=options.target)))
    log.info("next:")
    for line in export_lines(options.target):
        log.info("%s", line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    problems, notes = verify(options.target)
    if options.imports:
        log.info("importing, each package in a process of its own:")
        problems = problems + import_problems(options.target)
    for note in notes:
        log.info("note: %s", note)
    for problem in problems[:20]:
        log.info("problem: %s", problem)
    if len(problems) > 20:
        log.info("problem: and %d more", len(problems) - 20)
    log.info(
        "%s: %s", options.target, f"{len(problems)} problems" if problems else "as packed, and fits here"
    )
    return 1 if problems else 0


def _collect(options: argparse.Namespace) -> int:
    about = collect(options.archive, this_machine(options.arch, options.site), options.home)
    log.info("%s holds the caches of %s", options.archive, ", ".join(about["caches"]))
    return 0


def _restore(options: argparse.Namespace) -> int:
    _say_restored(restore(options.archive, this_machine(options.arch, options.site), options.home))
    return 0


def _add_cache_verbs(caches: argparse.ArgumentParser) -> None:
    actions = caches.add_subparsers(dest="action", required=True)
    for name, run, text in (
        ("collect", _collect, "this machine's caches -> an archive"),
        ("restore", _restore, "an archive -> this machine's caches, where they fit"),
    ):
        verb = actions.add_parser(name, help=text)
        verb.add_argument("archive", type=Path, help="a .tgz file")
        verb.add_argument(
            "--home", type=Path, help="the folder that holds .cache and .triton (default: yours)"
        )
        verb.add_argument("--arch", type=int, help="GPU architecture, where nvidia-smi does not say it")
        verb.add_argument(
            "--site", type=Path, help="where versions are read first: a bundle or site-packages"
        )
        verb.set_defaults(run=run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="an installed environment -> numbered parts")
    packing.add_argument("--site", type=Path, default=DEFAULT_SITE, help="default: that of .venv-gpu")
    packing.add_argument("--out", type=Path, required=True, help="a new folder for the parts")
    packing.add_argument(
        "--have", type=Path, help="file of names that the node has (gpu_host_has.txt is one)"
    )
    packing.add_argument("--arch", type=int, default=90, help="GPU architecture to keep (default 90)")
    packing.add_argument("--part-mib", type=int, default=52, help="largest part in MiB (default 52)")
    packing.add_argument("--caches", type=Path, nargs="+", default=[], help="cache archives, or home folders")
    packing.set_defaults(run=_pack)
    unpacking = verbs.add_parser("unpack", help="numbered parts -> a folder for PYTHONPATH")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("target", type=Path)
    unpacking.add_argument("--no-caches", action="store_true", help="leave kernel caches in the bundle")
    unpacking.set_defaults(run=_unpack)
    verifying = verbs.add_parser("verify", help="is the folder as packed, and does it fit this machine?")
    verifying.add_argument("target", type=Path)
    verifying.add_argument("--imports", action="store_true", help="import the main packages too (minutes)")
    verifying.set_defaults(run=_verify)
    _add_cache_verbs(verbs.add_parser("caches", help="kernels that engines compiled at run time"))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 well; 1 a problem, said in one line; 2 wrong usage; 130 interrupted."""
    if sys.version_info < (3, 12):
        print("bundle: this needs Python 3.12 or newer; start it with python3.12.", file=sys.stderr)
        return 1
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    try:
        return options.run(options)
    except (BundleError, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "bundle: interrupted; what was half written is removed. Run the same command again.",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
