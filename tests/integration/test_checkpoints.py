"""Checkpoints through the engines: MXFP4 and its plain copy, square and other experts, streamed export, memory.

Fresh biases are zero and fresh norms one, so weights get noise; they are values of bfloat16 kept in fp32, so that every form
holds them exactly but for the quantised experts, whose plain copy is the yardstick.
"""

import pytest
import torch
from safetensors.torch import load_file

from helpers.bridge import compare_weights, export_weights, load_megatron
from helpers.checkpoints import CheckpointError, save_streamed, save_weights, write_tiny_checkpoint
from helpers.faults import FAULTS
from helpers.mxfp4 import dequantised_checkpoint, write_mxfp4_checkpoint
from helpers.profiles import load_profile
from helpers.tensor_files import check_checkpoint

pytestmark = pytest.mark.engine
HIDDEN = load_profile("cpu").model.hidden_size
LENGTH = 48  # three windows
WIDTHS = pytest.mark.parametrize(
    "width", [2 * HIDDEN, HIDDEN + 32, HIDDEN], ids=["wider", "32 more", "square"]
)


def profile(width):
    return load_profile("cpu", **{"model.intermediate_size": width})


@pytest.fixture(scope="module")
def folders(trainer, tmp_path_factory):
    """width -> {"plain", "mxfp4", "copy"}: a checkpoint, its MXFP4 form and that one's plain copy. trainer: parallel state."""
    made = {}

    def make(width):
        if width not in made:
            base = tmp_path_factory.mktemp(f"width-{width}")
            random = write_tiny_checkpoint(profile(width), base / "random")
            generator, weights = torch.Generator().manual_seed(1), load_file(random / "model.safetensors")
            uneven = {
                n: (t + 0.1 * torch.randn(t.shape, generator=generator)).bfloat16().float()
                for n, t in weights.items()
            }
            plain = save_weights(uneven, random, base / "plain")
            mxfp4 = write_mxfp4_checkpoint(plain, base / "mxfp4")
            made[width] = {
                "plain": plain,
                "mxfp4": mxfp4,
                "copy": dequantised_checkpoint(mxfp4, base / "copy"),
            }
        return made[width]

    return make


def megatron(folder, width):
    return load_megatron(folder, profile(width), with_ddp=False)


def parameters(model):
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def logits(model):
    tokens = torch.randint(1, 64, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens), tokens


@WIDTHS
def test_mxfp4_and_its_plain_copy_give_the_same_megatron_weights(folders, width):
    made = folders(width)
    from_mxfp4, from_copy = (parameters(megatron(made[form], width)) for form in ("mxfp4", "copy"))
    from_plain = parameters(megatron(made["plain"], width))
    assert from_mxfp4.keys() == from_copy.keys() and len(from_copy) > 20
    assert [name for name in from_copy if not torch.equal(from_mxfp4[name], from_copy[name])] == []
    changed = {name for name in from_plain if not torch.equal(from_plain[name], from_copy[name])}
    assert changed == {
        n for n in from_plain if ".experts." in n and ".weight" in n
    }  # quantising is seen here


@WIDTHS
@pytest.mark.parametrize("form", ["plain", "mxfp4"])
def test_logits_agree_with_transformers(folders, load_reference, width, form):
    """In the square case names and shapes fit either way round: only the values tell how a matrix is turned."""
    made = folders(width)
    reference = load_reference(made["plain" if form == "plain" else "copy"])
    wanted, tokens = logits(lambda t: reference(t).logits)
    model, places = megatron(made[form], width), torch.arange(LENGTH).expand_as(tokens)
    ours, _ = logits(lambda t: model.module(t, places, None))
    assert (ours - wanted).abs().max() < 1e-4


def test_a_turned_square_matrix_is_seen_by_the_logits(folders, load_reference):
    """Megatron against a reference with the fault: what the test above would say if one of the two turned down_proj."""
    folder = folders(HIDDEN)["plain"]
    model, reference = megatron(folder, HIDDEN), load_reference(folder)
    _, tokens = logits(lambda t: t)
    ours, _ = logits(lambda t: model.module(t, torch.arange(LENGTH).expand_as(tokens), None))
    with FAULTS["down-proj-transposed"].plant(reference):
        turned, _ = logits(lambda t: reference(t).logits)
    assert (ours - turned).abs().max() > 0.1


@WIDTHS
@pytest.mark.parametrize("form", ["plain", "copy"])
def test_the_export_is_bit_exact(folders, width, form):
    folder = folders(width)[form]
    exported = {name: tensor.clone() for name, tensor in export_weights(megatron(folder, width))}
    assert not compare_weights(exported, folder)


@WIDTHS
def test_the_export_of_mxfp4_is_its_plain_copy(folders, width):
    made = folders(width)
    exported = {name: tensor.clone() for name, tensor in export_weights(megatron(made["mxfp4"], width))}
    assert not compare_weights(exported, made["copy"])


def test_the_width_that_megatron_bridge_turns_wrongly_is_refused(trainer, tmp_path):
    folder = write_tiny_checkpoint(profile(HIDDEN // 2), tmp_path / "half")
    with pytest.raises(CheckpointError, match="gate_up_proj is square and Megatron-Bridge cannot see"):
        megatron(folder, HIDDEN // 2)


def test_a_damaged_checkpoint_is_named_before_megatron_reads_it(checkpoint, settings, trainer, tmp_path):
    folder = save_weights(load_file(checkpoint / "model.safetensors"), checkpoint, tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="model.safetensors is truncated: .* ends at byte"):
        load_megatron(folder, settings, with_ddp=False)


# --- streamed export ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [5e9, 200_000])
def test_a_streamed_export_equals_the_trainers(trainer, checkpoint, load_reference, tmp_path, shard_bytes):
    """Written while the export runs, in its order; transformers and Megatron read the result back bit by bit."""
    whole = trainer.export()
    folder = save_streamed(
        export_weights(trainer.model), checkpoint, tmp_path / "streamed", shard_bytes=shard_bytes
    )
    assert not compare_weights(whole, folder)
    assert (len(check_checkpoint(folder).shards) > 2) == (shard_bytes < 1e9)
    assert (folder / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    state = load_reference(folder).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
    again = load_megatron(folder, trainer.settings, with_ddp=False)
    assert not compare_weights({n: t.clone() for n, t in export_weights(again)}, folder)


def test_the_export_holds_one_fused_tensor_and_its_parts(trainer, tmp_path):
    """Peak bytes of tensors that the export makes, tensor by tensor, against one that is collected (the control).

    Counted by torch's own profiler of allocations, on a model whose largest tensor is 32 MiB.
    """
    large = load_profile(
        "cpu", **{"model.hidden_size": 512, "model.intermediate_size": 1024, "model.num_local_experts": 8}
    )
    folder = write_tiny_checkpoint(large, tmp_path / "large")
    model = load_megatron(folder, large, with_ddp=False)
    largest = max(tensor.nbytes for tensor in check_checkpoint(folder).tensors.values())
    streamed = allocated_peak(lambda: [None for _ in export_weights(model)])
    collected = allocated_peak(lambda: dict(export_weights(model)))
    written = allocated_peak(lambda: save_streamed(export_weights(model), folder, tmp_path / "out"))
    print(f"largest {largest / 2**20:.0f} MiB; streamed {streamed / largest:.2f}, written {written / largest:.2f}, "
          f"collected {collected / largest:.2f} times that")  # fmt: skip
    assert streamed < 2.5 * largest and written < 2.5 * largest + 2 * 2**24
    assert collected > 2.9 * largest


def allocated_peak(act) -> int:
    """Most bytes of CPU tensors beyond those at the start that lived at one time while act() ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        act()
    changes = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak
