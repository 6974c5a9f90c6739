"""The patch manifest: every upstream source as recorded, every replacement where it says it is."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.cpu import manifest

engines = pytest.mark.skipif(
    find_spec("sglang") is None or find_spec("megatron") is None, reason="engines not installed"
)
CPU = Path(manifest.__file__).parent


@engines
def test_upstream_is_what_the_patches_were_written_for():
    assert manifest.check() == []


@engines
def test_every_patch_has_its_own_entry():
    assert len(manifest.current()) == len(manifest.PATCHES) == len(manifest.recorded())


@engines
def test_a_changed_upstream_source_is_named(tmp_path, monkeypatch):
    changed = json.loads(manifest.MANIFEST.read_text())
    symbol = "megatron.core.transformer.mlp.MLP.forward"
    changed[symbol]["sha256"] = "0" * 64
    monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
    manifest.MANIFEST.write_text(json.dumps(changed))
    [problem] = manifest.check()
    assert (
        symbol in problem
        and "changed upstream" in problem
        and "megatron_backend.clone_expert_outputs" in problem
    )
    assert manifest.main(["check"]) == 1


@engines
def test_an_entry_on_one_side_only_is_named(tmp_path, monkeypatch):
    less = json.loads(manifest.MANIFEST.read_text())
    gone = sorted(less)[0]
    del less[gone]
    monkeypatch.setattr(manifest, "MANIFEST", tmp_path / "manifest.json")
    manifest.MANIFEST.write_text(json.dumps(less))
    [problem] = manifest.check()
    assert gone in problem and "code only" in problem


@engines
def test_a_symbol_that_is_gone_says_so():
    patch = manifest.Patch(
        "megatron.core.transformer.mlp", "MLP.no_such_method", "-", "megatron_backend.install"
    )
    with pytest.raises(LookupError, match="no_such_method is gone"):
        manifest.upstream_source(patch)
    moved = manifest.Patch("megatron.core.no_such_module", "f", "-", "megatron_backend.install")
    with pytest.raises(ModuleNotFoundError, match="has moved it"):
        manifest.upstream_source(moved)


@pytest.mark.parametrize("patch", manifest.PATCHES, ids=lambda p: p.symbol)
def test_the_replacement_exists(patch):
    module, name = patch.ours.split(".")
    file = next(f / f"{module}.py" for f in (CPU, CPU.parent) if (f / f"{module}.py").is_file())
    names = {n.name for n in ast.parse(file.read_text()).body if hasattr(n, "name")}
    assert name in names
    assert len(patch.reason) > 20


def test_only_modules_of_the_manifest_patch():
    """A hook on an engine anywhere else would escape the manifest."""
    listed = {patch.ours.split(".")[0] for patch in manifest.PATCHES}
    for file in CPU.parent.glob("*.py"):
        hooks = "HookRegistry" in file.read_text()
        assert not hooks or file.stem in listed, f"{file.name} hooks SGLang and is not in the manifest"
        assert "TorchFunctionMode" not in file.read_text(), f"{file.name} renames devices outside helpers/cpu"


def test_usage_is_an_error_code(capsys):
    assert manifest.main([]) == 2
    assert "check|write" in capsys.readouterr().err
