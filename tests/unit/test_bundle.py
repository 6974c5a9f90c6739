"""environment/bundle.py: the offline bundle and the run-time kernel caches, on tiny fake environments."""

import contextlib
import gzip
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "environment"


def load_bundle():
    spec = importlib.util.spec_from_file_location("bundle", ENVIRONMENT / "bundle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bundle = load_bundle()
PYPROJECT = """[project]
name = "gpt-oss-grpo"
version = "9.9"
[project.entry-points."sglang.srt.plugins"]
first = "helpers.first:register"
second = "helpers.second:register"
"""


def write_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def installed(name: str, version: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Files of a distribution as an installer leaves them, RECORD included."""
    info = f"{name}-{version}.dist-info"
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/METADATA", f"{info}/RECORD"])
    return files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/RECORD": record.encode(),
    }


@pytest.fixture
def project(tmp_path):
    return write_tree(tmp_path / "project", {"pyproject.toml": PYPROJECT.encode()})


@pytest.fixture
def site(tmp_path):
    """A tiny environment: packages to carry, ones that the node has, an editable install, files that never run."""
    files = (
        installed("mine", "1.0", {"mine/__init__.py": b"x = 1\n", "mine/data.bin": bytes(range(256)) * 40})
        | installed(
            "torch", "2.0", {"torch/__init__.py": b"", "torchgen/__init__.py": b"", "torch/lib.so": b"big"}
        )
        | installed("nvidia_cublas", "13.1", {"nvidia/cublas.h": b"//"})
        | installed("ninja", "1.13", {"ninja/__init__.py": b""})
        | installed("gpt_oss_grpo", "0.0", {"__editable___gpt_oss_grpo_finder.py": b"MAPPING = {}"})
        | {
            "gpt_oss_grpo-0.0.dist-info/entry_points.txt": b"[sglang.srt.plugins]\nstale = helpers.stale:register\n",
            "__editable__.gpt_oss_grpo-0.0.pth": b"import __editable___gpt_oss_grpo_finder\n",
            "mine/__init__.pyc": b"cache",
            "mine/torch/__init__.py": b"deep",
            "single.py": b"y = 2\n",
        }
    )
    write_tree(tmp_path / "venv/bin", {"ninja": b"\x7fELF program", "ray": b"#!/venv/bin/python\n"})
    (tmp_path / "venv/bin/ninja").chmod(0o755)
    return write_tree(tmp_path / "venv/lib/python3.12/site-packages", files)


HAVE = {"torch", "nvidia"}
CARRIED = {
    "mine/__init__.py", "mine/data.bin", "mine/torch/__init__.py", "single.py", "ninja/__init__.py",
    "mine-1.0.dist-info/METADATA", "mine-1.0.dist-info/RECORD",
    "ninja-1.13.dist-info/METADATA", "ninja-1.13.dist-info/RECORD", "bin/ninja",
    "gpt_oss_grpo-9.9.dist-info/METADATA", "gpt_oss_grpo-9.9.dist-info/entry_points.txt",
}  # fmt: skip


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def parts(site, project, tmp_path):
    bundle.pack(site, tmp_path / "parts", HAVE, part_bytes=256, project=project)
    return tmp_path / "parts"


@pytest.fixture
def target(parts, tmp_path):
    assert bundle.unpack(parts, tmp_path / "out") is True
    return tmp_path / "out"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A PATH with nothing on it but what a test puts there, and a home folder of its own."""
    (tmp_path / "node-bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "node-bin"))
    monkeypatch.setenv("HOME", str(tmp_path / "node-home"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-cuda"))
    for cache in bundle.CACHES:
        for variable, _ in cache.variables:
            monkeypatch.delenv(variable, raising=False)
    return tmp_path / "node-bin"


def fake_gpu(node: Path, capability: str = "9.0", driver: str = "580.1", status: int = 0) -> None:
    """An nvidia-smi that answers the three questions that bundle.py asks."""
    answers = f"*compute_cap*) echo {capability} ;; *driver_version*) echo {driver} ;; *) echo A Card ;;"
    (node / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in {answers} esac\nexit {status}\n')
    (node / "nvidia-smi").chmod(0o755)


# ---- pack and unpack ----------------------------------------------------------------------------------------
def test_a_bundle_comes_back_as_it_was(parts, target, site):
    came = files_of(target)
    assert came.keys() == CARRIED | {"MANIFEST.json"}
    shared = [name for name in CARRIED if (site / name).is_file()]
    assert len(shared) == 9 and all(came[name] == (site / name).read_bytes() for name in shared)
    assert len(list(parts.glob("part.*"))) > 1
    assert max(p.stat().st_size for p in parts.glob("part.*")) <= 256
    assert os.access(target / "bin/ninja", os.X_OK) and not os.access(target / "single.py", os.X_OK)
    assert target.stat().st_mode & 0o777 == 0o755


def test_the_manifest_says_what_the_bundle_is(target, project):
    manifest = bundle.read_manifest(target)
    assert manifest["files"].keys() == CARRIED
    assert manifest["distributions"] == {"mine": "1.0", "ninja": "1.13"}
    assert manifest["left_to_the_node"] == {"torch": "2.0", "nvidia_cublas": "13.1"}
    assert (manifest["python"], manifest["arch"]) == ("3.12", 90)
    assert manifest["platform"] == sysconfig.get_platform() and manifest["lock_sha256"] is None


def test_the_lock_is_in_the_manifest_and_compared_with_the_site(site, project, tmp_path):
    write_tree(
        project / "environment", {"gpu.lock": b"mine==1.0 \\\n", "gpu-built.lock": b"torch==3.0 \\\nx.y==1\n"}
    )
    manifest = bundle.pack(site, tmp_path / "parts", HAVE, project=project)
    assert manifest["lock_sha256"] == bundle.sha256_of(project / "environment/gpu.lock")
    wrong, missing = bundle.lock_notes(bundle.choose(site, HAVE), project / "environment")
    assert "torch 2.0 (3.0)" in wrong and "mine" not in wrong and "x_y" in missing


def test_the_same_site_packs_to_the_same_bytes(site, project, parts, tmp_path):
    os.utime(site / "single.py", (5, 5))
    bundle.pack(site, tmp_path / "again", HAVE, part_bytes=256, project=project)
    assert files_of(parts) == files_of(tmp_path / "again")


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda names: "/".join(names) + ".txt")


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, st.binary(max_size=2000), max_size=6), st.integers(64, 3000))
def test_any_files_come_back_in_parts_of_any_size(files, part_bytes):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        site = write_tree(folder / "site", files | installed("p", "1", {"p.py": b""}))
        project = write_tree(folder / "project", {"pyproject.toml": PYPROJECT.encode()})
        bundle.pack(site, folder / "parts", part_bytes=part_bytes, project=project)
        bundle.unpack(folder / "parts", folder / "out")
        came = files_of(folder / "out")
        assert {name: came[name] for name in files_of(site)} == files_of(site)
        assert all(p.stat().st_size <= part_bytes for p in (folder / "parts").glob("part.*"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda parts: (parts / "part.001").unlink(), "part.001 is missing; copy it again"),
        (lambda parts: (parts / "part.001").write_bytes(b"?"), "part.001 is damaged"),
        (lambda parts: (parts / "SHA256SUMS").unlink(), "copy the whole folder"),
        (lambda parts: (parts / "SHA256SUMS").write_text(""), "cut short"),
        (lambda parts: (parts / "SHA256SUMS").write_text(f"{'0' * 64}  ../part.000\n"), "does not write"),
        (lambda parts: (parts / "MANIFEST.json").write_text("{}"), "MANIFEST.json is damaged"),
    ],
)
def test_a_damaged_bundle_writes_nothing(parts, tmp_path, damage, words):
    damage(parts)
    before = set(tmp_path.iterdir())
    with pytest.raises(bundle.BundleError, match=words):
        bundle.unpack(parts, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def sign(parts: Path) -> None:
    """Writes SHA256SUMS anew, as somebody who made the parts by hand would."""
    names = [*sorted(p.name for p in parts.glob("part.*")), "MANIFEST.json"]
    (parts / "SHA256SUMS").write_text("".join(f"{bundle.sha256_of(parts / n)}  {n}\n" for n in names))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["files"].pop("single.py"), "single.py was added"),
        (lambda m: m["files"].update({"more.py": [0, "0" * 64]}), "more.py is missing"),
        (lambda m: m["files"].update({"single.py": [6, "0" * 64]}), "single.py was changed"),
        (lambda m: m.update(schema=99), "schema 99"),
        (lambda m: m.pop("arch"), "lacks arch"),
    ],
)
def test_what_was_unpacked_is_compared_with_the_manifest(parts, tmp_path, change, words):
    manifest = json.loads((parts / "MANIFEST.json").read_text())
    change(manifest)
    (parts / "MANIFEST.json").write_text(json.dumps(manifest))
    sign(parts)
    before = set(tmp_path.iterdir())
    with pytest.raises(bundle.BundleError, match=words):
        bundle.unpack(parts, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"") -> tuple:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


HOSTILE = [
    member("/absolute"),
    member("../outside"),
    member("a/../../outside"),
    member("link", tarfile.SYMTYPE, "/etc"),
    member("inner", tarfile.SYMTYPE, "single.py"),
    member("hard", tarfile.LNKTYPE, "single.py"),
    member("device", tarfile.CHRTYPE),
    member("pipe", tarfile.FIFOTYPE),
]


def write_tar(path: Path, members: list[tuple]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda pair: pair[0].name)
def test_members_that_are_no_plain_files_inside_are_refused(parts, tmp_path, hostile):
    for part in parts.glob("part.*"):
        part.unlink()
    write_tar(parts / "part.000", [member("single.py", data=b"y = 2\n"), hostile])
    sign(parts)
    before = set(tmp_path.iterdir())
    with pytest.raises(bundle.BundleError, match="no plain file inside"):
        bundle.unpack(parts, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


ZIPPED = gzip.compress(os.urandom(2000))


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"no tar" * 200), ZIPPED[:-9], ZIPPED[:10] + b"\xff" * 50]
)
def test_parts_that_hold_no_archive(parts, tmp_path, content):
    for part in parts.glob("part.*"):
        part.unlink()
    (parts / "part.000").write_bytes(content)
    sign(parts)
    with pytest.raises(bundle.BundleError, match="cannot be unpacked"):
        bundle.unpack(parts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unpacking_again_verifies(parts, target):
    before = (target / "single.py").stat().st_mtime_ns
    assert bundle.unpack(parts, target) is False
    assert (target / "single.py").stat().st_mtime_ns == before
    (target / "single.py").write_text("y = 3\n")
    with pytest.raises(bundle.BundleError, match="single.py was changed.*unpack again"):
        bundle.unpack(parts, target)


def test_a_target_that_holds_something_else_is_left_alone(parts, target, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious").touch()
    with pytest.raises(bundle.BundleError, match="not an unpacked bundle"):
        bundle.unpack(parts, tmp_path / "mine")
    (target / "MANIFEST.json").write_text("{}")
    with pytest.raises(bundle.BundleError, match="another bundle"):
        bundle.unpack(parts, target)
    (tmp_path / "empty").mkdir()
    assert bundle.unpack(parts, tmp_path / "empty") is True


def test_too_little_space_is_said_before_anything_is_written(parts, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=30_000)
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda folder: usage)
    before = set(tmp_path.iterdir())
    with pytest.raises(bundle.BundleError, match="only 0.00 GB are free .* free some space"):
        bundle.unpack(parts, tmp_path / "a/new/place")
    assert set(tmp_path.iterdir()) == before


def test_what_cannot_be_packed(site, project, tmp_path):
    for folder, words in ((tmp_path / "none", "set-up-only"), (tmp_path, "holds no installed package")):
        with pytest.raises(bundle.BundleError, match=words):
            bundle.pack(folder, tmp_path / "parts", project=project)
    with pytest.raises(bundle.BundleError, match="not empty"):
        bundle.pack(site, site, project=project)
    (site / "other.pth").write_text("/home/learner/other/src\n")
    with pytest.raises(bundle.BundleError, match="other.pth points to /home/learner/other/src"):
        bundle.pack(site, tmp_path / "parts", project=project)


def test_a_pack_that_fails_leaves_an_empty_folder(site, project, tmp_path):
    with pytest.raises(bundle.BundleError, match="none.tgz is missing"):
        bundle.pack(site, tmp_path / "parts", caches=[tmp_path / "none.tgz"], project=project)
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_disk_that_fills_while_packing_leaves_an_empty_folder(site, project, tmp_path, monkeypatch):
    write_tree(project, {"environment/gpu.lock": b""})

    def full(path):
        assert list((tmp_path / "parts").glob("part.*")), "parts were written before"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "sha256_of", full)
    with pytest.raises(OSError, match="No space left"):
        bundle.pack(site, tmp_path / "parts", HAVE, project=project)
    assert list((tmp_path / "parts").iterdir()) == []


# ---- what is written for the node ---------------------------------------------------------------------------
def entry_points_seen(target: Path) -> set[str]:
    found = importlib.metadata.distributions(name="gpt_oss_grpo", path=[str(target)])
    return {point.name for distribution in found for point in distribution.entry_points}


def test_the_plugins_are_those_of_pyproject_not_of_an_old_install(target):
    assert entry_points_seen(target) == {"first", "second"}


def test_without_pyproject_the_installed_entry_points_are_carried(site, tmp_path):
    bundle.pack(site, tmp_path / "parts", HAVE, project=tmp_path)
    bundle.unpack(tmp_path / "parts", tmp_path / "out")
    assert entry_points_seen(tmp_path / "out") == {"stale"}
    shutil.rmtree(site / "gpt_oss_grpo-0.0.dist-info")
    with pytest.raises(bundle.BundleError, match="SGLang would not find its plugins"):
        bundle.pack(site, tmp_path / "parts2", HAVE, project=tmp_path)


def test_this_projects_plugins_are_carried():
    written = bundle.project_info(ROOT, ROOT)
    text = next(data for name, data in written.items() if name.endswith("entry_points.txt")).decode()
    assert "gpt_oss_cpu = helpers.cpu.sglang_plugin:register" in text
    assert "gpt_oss_saver = helpers.sglang_saver:register" in text


def test_pth_files_work_on_pythonpath_and_the_machines_own_sitecustomize_still_runs(site, project, tmp_path):
    write_tree(site, {"mine/more/hidden.py": b"", "mine.pth": b"mine/more\n"})
    bundle.pack(site, tmp_path / "parts", HAVE, project=project)
    bundle.unpack(tmp_path / "parts", tmp_path / "out")
    write_tree(tmp_path / "own", {"sitecustomize.py": b"import sys\nsys.own_ran = True\n"})
    path = os.pathsep.join(map(str, (tmp_path / "out", tmp_path / "own")))
    code = "import hidden, sys; assert sys.own_ran"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)


def test_carried_cuda_libraries_are_named_for_transformer_engine(target):
    assert not any("_HOME=" in line for line in bundle.export_lines(target))
    write_tree(target, {"nvidia/cudnn/lib/libcudnn.so.9": b"", "nvidia/cu13/lib/libnvrtc.so.13": b""})
    named = {line for line in bundle.export_lines(target) if "_HOME=" in line}
    folders = {"CUDNN": "nvidia/cudnn", "NVRTC": "nvidia/cu13", "CURAND": "nvidia/cu13"}
    assert named == {f"export {name}_HOME={target / folder}" for name, folder in folders.items()}
    exports = "\n".join(bundle.export_lines(target)) + "\necho $LD_LIBRARY_PATH"
    for own, expected in ({}, ""), ({"LD_LIBRARY_PATH": "/own"}, ":/own"):
        said = subprocess.run(
            ["bash", "-c", exports], env=own, capture_output=True, text=True, check=True
        ).stdout
        assert said.strip() == f"{target}/nvidia/cu13/lib:{target}/nvidia/cudnn/lib" + expected


def test_programs_with_a_path_inside_are_not_carried(site):
    (site.parents[2] / "bin/ninja").write_text("#!/venv/bin/python\n")
    assert not [name for _, name in bundle.choose(site, HAVE).files if name.startswith("bin/")]


@pytest.mark.parametrize(("arch", "kept"), [(90, "sm90"), (80, "sm100"), (100, "sm100"), (120, "sm100")])
def test_the_build_of_sgl_kernel_that_the_gpu_loads_is_carried(site, arch, kept):
    write_tree(site, {"sgl_kernel/sm90/ops.so": b"", "sgl_kernel/sm100/ops.so": b""})
    names = [name for _, name in bundle.choose(site, HAVE, arch).files if name.startswith("sgl_kernel/")]
    assert names == [f"sgl_kernel/{kept}/ops.so"]


def test_names_of_the_host_are_read():
    have = bundle.read_names((ENVIRONMENT / "gpu_host_has.txt").read_text())
    assert {"torch", "nvidia"} <= have and not any("#" in name for name in have)
    entries = {"torch-2.11.0.dist-info": "torch", "PIL": "pil", "scipy.libs": "scipy", "six.py": "six"}
    assert {entry: bundle.top_level_name(entry) for entry in entries} == entries


# ---- one architecture's device code -------------------------------------------------------------------------
def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 1, 32, len(payload))
    return header.ljust(28, b"\0") + struct.pack("<I", arch) + payload


def library(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return b"ELF" * 11 + bundle.FATBIN_HEADER.pack(0xBA55ED50, 1, 16, len(body)) + body + b"tail"


A, B, C = (letter * 16 for letter in (b"A", b"B", b"C"))


@pytest.mark.parametrize(
    ("arch", "entries", "kept"),
    [
        (90, [(2, 80, A), (2, 90, B), (1, 90, C)], B),
        (89, [(2, 80, A), (2, 86, B), (2, 90, C)], B),  # machine code runs on a later minor version
        (90, [(2, 80, A), (1, 80, B), (1, 100, C)], B),  # no machine code: the driver compiles PTX
        (120, [(2, 100, A), (2, 90, B), (1, 70, C)], C),
        (75, [(2, 80, A), (1, 80, B)], b""),
    ],
)
def test_what_a_gpu_does_not_run_is_zeroed(tmp_path, arch, entries, kept):
    before = library(*(entry(*one) for one in entries))
    (tmp_path / "lib.so").write_bytes(before)
    assert bundle.keep_one_arch(tmp_path / "lib.so", arch) == len(kept)
    after = before
    for _, _, payload in entries:
        after = after if payload == kept else after.replace(payload, bytes(16))
    assert (tmp_path / "lib.so").read_bytes() == after


def test_unknown_and_broken_entries_are_left_as_they_are(tmp_path):
    unknown = library(entry(64, 80, A), entry(2, 80, B))
    cut = library(entry(2, 80, A))[:60]
    (tmp_path / "lib.so").write_bytes(unknown + cut)
    bundle.keep_one_arch(tmp_path / "lib.so", 90)
    assert (tmp_path / "lib.so").read_bytes() == unknown.replace(B, bytes(16)) + cut


def test_large_libraries_are_packed_with_one_architecture(site, project, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "LARGE_LIBRARY", 10)
    (site / "mine/lib.so").write_bytes(library(entry(2, 80, A), entry(2, 90, B)))
    before = (site / "mine/lib.so").read_bytes()
    bundle.pack(site, tmp_path / "parts", HAVE, project=project)
    bundle.unpack(tmp_path / "parts", tmp_path / "out")
    assert (tmp_path / "out/mine/lib.so").read_bytes() == before.replace(A, bytes(16))
    assert (site / "mine/lib.so").read_bytes() == before


# ---- verify -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: (t / "single.py").write_text("z = 2\n"), "single.py was changed"),
        (lambda t: (t / "single.py").write_text("longer\n"), "single.py was changed"),
        (lambda t: (t / "single.py").unlink(), "single.py is missing"),
        (lambda t: (t / "extra.py").touch(), "extra.py was added"),
        (lambda t: (t / "mine/link").symlink_to(t), "mine/link was added"),
        (
            lambda t: ((t / "single.py").unlink(), (t / "single.py").symlink_to(t / "x")),
            "single.py was changed",
        ),
    ],
)
def test_verify_names_every_difference(target, change, words):
    assert bundle.file_problems(target, bundle.read_manifest(target)) == []
    change(target)
    assert bundle.file_problems(target, bundle.read_manifest(target)) == [words]


def test_byte_code_is_no_difference(target):
    write_tree(target, {"mine/__pycache__/__init__.cpython-312.pyc": b"made at import"})
    assert bundle.file_problems(target, bundle.read_manifest(target)) == []


def manifest_for(**changes) -> dict:
    this = "{}.{}".format(*sys.version_info)
    return {
        "python": this,
        "platform": sysconfig.get_platform(),
        "arch": 90,
        "left_to_the_node": {},
    } | changes


@pytest.mark.parametrize(
    ("changes", "archs", "words"),
    [
        ({"python": "3.9"}, [90], "the bundle is for 3.9; start it with python3.9"),
        ({"platform": "linux-aarch64"}, [90], "the bundle is for linux-aarch64"),
        ({}, [90, 80], "compute capability 8.0, the bundle holds kernels for 9.0; pack again with --arch 80"),
        ({"arch": 89}, [86], "compute capability 8.6, the bundle holds kernels for 8.9"),
        ({}, [100], "compute capability 10.0"),
    ],
)
def test_a_machine_that_does_not_fit_is_said_plainly(changes, archs, words):
    (problem,) = bundle.machine_report(manifest_for(**changes), archs).problems
    assert words in problem


def test_a_machine_that_fits(node):
    assert bundle.machine_report(manifest_for(arch=86), [86, 89]).problems == []
    assert "no GPU was seen" in bundle.machine_report(manifest_for(), []).notes[0]
    assert "no CUDA compiler" in bundle.machine_report(manifest_for(), [90]).notes[0]
    write_tree(Path(os.environ["CUDA_HOME"]), {"bin/nvcc": b""})
    assert bundle.machine_report(manifest_for(), [90]).notes == []


@pytest.mark.parametrize(
    ("capability", "status", "archs"),
    [("9.0", 0, [90]), ("12.1", 0, [121]), ("[N/A]", 0, []), ("9.0", 9, [])],
)
def test_the_gpus_are_asked(node, capability, status, archs):
    assert bundle.gpu_archs() == []
    fake_gpu(node, capability, status=status)
    assert bundle.gpu_archs() == archs


@pytest.mark.parametrize(
    ("here", "problems", "notes"),
    [
        ({"torch": "2.0+cu130", "numpy": "1.0"}, [], []),
        ({"torch": "2.1", "numpy": "1.0"}, ["this Python has 2.1"], ["torch 2.1 (2.0)"]),
        ({"numpy": "1.1"}, ["this Python has none"], ["numpy 1.1 (1.0)", "does not know them: torch"]),
    ],
)
def test_what_was_left_to_the_node_is_compared(here, problems, notes):
    manifest = manifest_for(left_to_the_node={"torch": "2.0", "numpy": "1.0"})
    report = bundle.node_report(manifest, here.get)
    for found, expected in zip(report, (problems, notes), strict=True):
        assert len(found) == len(expected) and all(
            word in text for word, text in zip(expected, found, strict=True)
        )


def test_bundle_and_project_that_went_apart_are_noted(target, project):
    manifest = bundle.read_manifest(target)
    assert bundle.project_notes(target, manifest, project) == []
    assert (
        bundle.project_notes(target, manifest, project.parent) == []
    )  # bundle.py was copied to a node alone
    write_tree(
        project, {"environment/gpu.lock": b"changed", "pyproject.toml": PYPROJECT.encode() + b'x = "y:z"\n'}
    )
    notes = bundle.project_notes(target, manifest | {"lock_sha256": "0" * 64}, project)
    assert "another gpu.lock" in notes[0] and "other SGLang plugins" in notes[1]


def test_imports_are_tried_from_the_bundle(site, project, tmp_path, caplog):
    caplog.set_level("INFO", "bundle")
    write_tree(
        site, {"mine/broken.py": b"import no_such_thing\n", "mine/dies.py": b"import os; os._exit(7)\n"}
    )
    bundle.pack(site, tmp_path / "parts", HAVE, project=project)
    bundle.unpack(tmp_path / "parts", tmp_path / "out")
    modules = {"mine": "mine", "mine.broken": "mine", "mine.dies": "mine"}
    broken, dies = bundle.import_problems(tmp_path / "out", modules)
    assert "No module named 'no_such_thing'" in broken and "exit status 7" in dies
    assert "1.0 imports" in caplog.text
    (tmp_path / "out/mine-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 8\n"
    )
    assert bundle.import_problems(tmp_path / "out", {"mine": "mine"}) == [
        "mine is 8, the bundle was packed with 1.0"
    ]


def test_an_import_that_hangs_is_ended(target):
    write_tree(target, {"hangs.py": b"import time; time.sleep(60)\n"})
    assert "did not end within" in bundle.import_problem("hangs", target, seconds=0.3)


# ---- run-time kernel caches ---------------------------------------------------------------------------------
VERSIONS = {
    "triton": "3.6.0", "flashinfer_python": "0.6.15", "apache_tvm_ffi": "0.1.11", "sglang": "0.5.17", "torch": "2.11.0",
}  # fmt: skip


def machine(arch: int | None = 90, driver: str | None = "580.1", **versions):
    return bundle.Machine(arch, "A Card", driver, (VERSIONS | versions).get)


@pytest.fixture
def home(tmp_path):
    files = {
        ".triton/cache/KEY/kernel.cubin": b"triton",
        ".cache/flashinfer/0.6.15/90a/cached_ops/norm/norm.so": b"flashinfer",
        ".cache/tvm-ffi/module__arch_9.0a/module.so": b"tvm",
        ".cache/tvm-ffi/module__arch_9.0a/lock": b"",
        ".cache/sglang/gpu_p2p_access_cache_for_0.json": b"of one machine",
        ".cache/deep_gemm/kernel.cubin": b"its package is not installed",
        ".nv/ComputeCache/index": b"driver",
        ".cache/huggingface/token": b"not a kernel",
    }
    return write_tree(tmp_path / "home", files)


@pytest.fixture
def archive(home, tmp_path):
    os.utime(home / ".triton/cache/KEY/kernel.cubin", (1_700_000_000.9, 1_700_000_000.9))
    bundle.collect(tmp_path / "caches.tgz", machine(), home)
    return tmp_path / "caches.tgz"


KERNELS = {
    ".triton/cache/KEY/kernel.cubin", ".cache/flashinfer/0.6.15/90a/cached_ops/norm/norm.so",
    ".cache/tvm-ffi/module__arch_9.0a/module.so", ".nv/ComputeCache/index",
}  # fmt: skip


def test_caches_come_back_with_their_times(archive, home, tmp_path):
    assert bundle.restore(archive, machine(), tmp_path / "next") == bundle.Restored(4, 0, {})
    assert files_of(tmp_path / "next") == {name: (home / name).read_bytes() for name in KERNELS}
    assert (tmp_path / "next/.triton/cache/KEY/kernel.cubin").stat().st_mtime == 1_700_000_000
    assert bundle.restore(archive, machine(), tmp_path / "next") == bundle.Restored(0, 4, {})


def test_the_key_names_what_kernels_depend_on(archive):
    about = bundle.read_key(archive)
    assert about["gpu"] == "A Card" and about["caches"]["triton"] == {"arch": 90, "triton": "3.6.0"}
    assert about["caches"].keys() == {"triton", "flashinfer", "tvm-ffi", "cuda"}


@pytest.mark.parametrize(
    ("here", "left", "reason"),
    [
        (machine(triton="3.5.1"), {"triton"}, "triton is 3.5.1 here, the kernels were compiled with 3.6.0"),
        (machine(sglang=None), {"tvm-ffi"}, "sglang is not known here"),
        (machine(driver="570.2"), {"cuda"}, "driver is 570.2 here"),
        (machine(arch=80), {"triton", "flashinfer", "tvm-ffi", "cuda"}, "arch is 80 here"),
        (machine(arch=None), {"triton", "flashinfer", "tvm-ffi", "cuda"}, "arch is not known here"),
        (machine(torch="9"), set(), ""),
        (machine(triton="3.6.0+cu130"), set(), ""),
    ],
)
def test_caches_that_do_not_fit_are_left_out_and_named(archive, tmp_path, here, left, reason):
    result = bundle.restore(archive, here, tmp_path / "next")
    assert result.left.keys() == left and all(reason in text for text in result.left.values())
    assert result.written == 4 - len(left) == len(files_of(tmp_path / "next"))


def test_newer_files_are_kept_and_older_ones_replaced(archive, tmp_path):
    newer, older = ".cache/tvm-ffi/module__arch_9.0a/module.so", ".triton/cache/KEY/kernel.cubin"
    write_tree(tmp_path / "next", {newer: b"newer", older: b"older"})
    os.utime(tmp_path / "next" / newer, (4_000_000_000, 4_000_000_000))
    os.utime(tmp_path / "next" / older, (1, 1))
    assert bundle.restore(archive, machine(), tmp_path / "next")[:2] == (3, 1)
    assert (tmp_path / "next" / newer).read_bytes() == b"newer"
    assert (tmp_path / "next" / older).read_bytes() == b"triton"


def test_variables_move_caches(node, tmp_path, monkeypatch):
    folders = {cache.name: bundle.cache_folder(cache, None) for cache in bundle.CACHES}
    assert folders["triton"] == Path(os.environ["HOME"]) / ".triton/cache"
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "t"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "f"))
    folders = {cache.name: bundle.cache_folder(cache, None) for cache in bundle.CACHES}
    assert (folders["triton"], folders["flashinfer"]) == (
        tmp_path / "t/.triton/cache",
        tmp_path / "f/.cache/flashinfer",
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "c"))
    triton = next(cache for cache in bundle.CACHES if cache.name == "triton")
    assert bundle.cache_folder(triton, None) == tmp_path / "c"
    assert bundle.cache_folder(triton, tmp_path / "h") == tmp_path / "h/.triton/cache"


def test_what_cannot_be_collected(home, tmp_path):
    with pytest.raises(bundle.BundleError, match="--arch 90"):
        bundle.collect(tmp_path / "c.tgz", machine(arch=None), home)
    with pytest.raises(bundle.BundleError, match="no kernel caches"):
        bundle.collect(tmp_path / "c.tgz", machine(), tmp_path / "nobody")
    assert not list(tmp_path.glob("c.tgz*"))


KEYED = member(
    "key.json", data=json.dumps({"schema": 1, "caches": {"triton": {"arch": 90}, "new": {}}}).encode()
)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda pair: pair[0].name)
def test_hostile_cache_archives_write_nothing(tmp_path, hostile):
    info, data = hostile
    write_tar(tmp_path / "c.tgz", [KEYED, member("triton/good", data=b"1"), (info, data)])
    with pytest.raises(bundle.BundleError, match="no plain file inside"):
        bundle.restore(tmp_path / "c.tgz", machine(), tmp_path / "next")
    assert not (tmp_path / "next").exists()


def test_a_link_in_the_cache_folder_is_not_followed_out_of_it(archive, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "next/.triton/cache").mkdir(parents=True)
    (tmp_path / "next/.triton/cache/KEY").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(bundle.BundleError, match="would be written outside .* remove the link"):
        bundle.restore(archive, machine(), tmp_path / "next")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_cache_archives_that_are_none(tmp_path):
    write_tar(tmp_path / "by-hand.tgz", [member(".triton/cache/x", data=b"1")])
    with pytest.raises(bundle.BundleError, match="caches collect OUT.tgz --home FOLDER"):
        bundle.restore(tmp_path / "by-hand.tgz", machine(), tmp_path / "next")
    (tmp_path / "damaged.tgz").write_bytes(b"?")
    with pytest.raises(bundle.BundleError, match="damaged"):
        bundle.read_key(tmp_path / "damaged.tgz")


def test_a_cache_that_this_file_does_not_know_is_left_out(tmp_path):
    write_tar(tmp_path / "c.tgz", [KEYED, member("new/x", data=b"1"), member("triton/y", data=b"2")])
    result = bundle.restore(tmp_path / "c.tgz", machine(), tmp_path / "next")
    assert result.written == 1 and result.left == {"new": "this bundle.py does not know it"}
    assert files_of(tmp_path / "next") == {".triton/cache/y": b"2"}


def test_a_bundle_carries_archives_and_home_folders(site, project, archive, home, tmp_path):
    write_tree(site, installed("triton", "3.6.0", {"triton/__init__.py": b""}))
    bundle.pack(site, tmp_path / "parts", HAVE, caches=[archive, home], project=project)
    bundle.unpack(tmp_path / "parts", tmp_path / "out")
    folder = tmp_path / "out/gpu-caches"
    assert (folder / "00.tgz").read_bytes() == archive.read_bytes()
    assert bundle.read_key(folder / "01.tgz")["caches"]["triton"] == {"arch": 90, "triton": "3.6.0"}


# ---- the command line ---------------------------------------------------------------------------------------
def command(*arguments: object) -> tuple[int, str]:
    """Exit status and output of bundle.py, run in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            return bundle.main([str(argument) for argument in arguments]), out.getvalue()
        except SystemExit as end:
            return end.code, out.getvalue()


def test_the_whole_story_by_command(site, home, node, tmp_path):
    fake_gpu(node)
    write_tree(site, installed("triton", "3.6.0", {"triton/__init__.py": b""}))
    shutil.rmtree(site / "torch-2.0.dist-info")  # a package that the node would have to have
    (tmp_path / "has.txt").write_text("torch\nnvidia  # libraries\n")
    assert command("caches", "collect", tmp_path / "c.tgz", "--home", home, "--site", site)[0] == 0
    options = [
        "--site",
        site,
        "--out",
        tmp_path / "parts",
        "--have",
        tmp_path / "has.txt",
        "--caches",
        tmp_path / "c.tgz",
    ]
    code, text = command("pack", *options)
    assert code == 0 and "1 parts" in text and "locked, but not installed" in text

    code, text = command("unpack", tmp_path / "parts", tmp_path / "out")
    assert code == 0 and f"export PYTHONPATH={tmp_path / 'out'}" in text
    assert f"export PATH={tmp_path / 'out/bin'}${{PATH:+:$PATH}}" in text
    assert (Path(os.environ["HOME"]) / ".triton/cache/KEY/kernel.cubin").read_bytes() == b"triton"
    code, text = command("unpack", tmp_path / "parts", tmp_path / "out", "--no-caches")
    assert code == 0 and "already unpacked" in text and "kernel caches" not in text

    code, text = command("verify", tmp_path / "out")
    assert code == 0 and "as packed, and fits here" in text
    (tmp_path / "out/single.py").unlink()
    fake_gpu(node, "8.0")
    code, text = command("verify", tmp_path / "out")
    assert (
        code == 1
        and "single.py is missing" in text
        and "compute capability 8.0" in text
        and "2 problems" in text
    )
    code, text = command("caches", "restore", tmp_path / "c.tgz", "--home", tmp_path / "n", "--site", site)
    assert code == 0 and "arch is 80 here" in text and not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "none"], 1, "name a folder that `unpack` made"),
        (["unpack", "none", "out"], 1, "copy the whole folder"),
        (["pack", "--site", "none", "--out", "parts"], 1, "--set-up-only"),
        (["pack", "--out", "parts", "--have", "none.txt"], 1, "none.txt"),
        (["caches", "restore", "none.tgz"], 1, "none.tgz"),
        (["caches", "collect", "c.tgz", "--home", "none", "--arch", "90"], 1, "no kernel caches"),
        (["pack"], 2, "--out"),
        ([], 2, "verb"),
    ],
)
def test_exit_statuses(node, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    result, text = command(*arguments)
    assert result == code and words in text and len(text.strip().splitlines()[-1]) < 300


def test_an_old_python_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(bundle.sys, "version_info", (3, 10, 0))
    assert command("verify", "x") == (
        1,
        "bundle: this needs Python 3.12 or newer; start it with python3.12.\n",
    )


def test_the_file_runs_alone(tmp_path):
    shutil.copy(ENVIRONMENT / "bundle.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "bundle.py"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "verify" in done.stdout
