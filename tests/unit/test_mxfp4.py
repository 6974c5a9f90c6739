"""MXFP4 against transformers' own dequantiser, against its rule, and in broken files."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from helpers.anatomy import checkpoint_bytes, tensor_shapes
from helpers.mxfp4 import (
    FP4_VALUES,
    Mxfp4Error,
    dequantise,
    dequantise_experts,
    dequantised_checkpoint,
    quantise,
    quantise_experts,
    write_mxfp4_checkpoint,
)
from helpers.tensor_files import CheckpointError, check_checkpoint

CONFIG = dict(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=8,
    pad_token_id=0,
    eos_token_id=1,
)


def random_pair(seed, *prefix):
    """Any bytes as blocks, scales around 1 as in real weights: exact in bfloat16 and float32."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*prefix, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(90, 140, prefix, dtype=torch.uint8, generator=generator)


# --- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantises_exactly_like_transformers(dtype):
    blocks, scales = random_pair(0, 3, 96, 2)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    ours = dequantise_experts(blocks, scales, dtype)
    assert ours.shape == theirs.shape == (3, 64, 96)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_under_every_scale_is_exact(dtype):
    """Also where the value is subnormal; above the largest float it is infinite, as it is in transformers."""
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    blocks = torch.arange(0, 256, 17, dtype=torch.uint8).expand(255, 1, 16)  # 0x00, 0x11 ... 0xff
    exact = torch.tensor(FP4_VALUES).repeat_interleave(2).double() * torch.exp2(scales.double() - 127)
    ours = dequantise(blocks, scales, dtype)
    assert torch.equal(ours, exact.to(dtype))
    assert torch.equal(ours[:252].double(), exact[:252])  # no value was rounded


def test_the_even_element_sits_in_the_low_nibble():
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0] = 0x72  # low nibble 2 -> 1.0, high nibble 7 -> 6.0
    values = dequantise(blocks, torch.tensor([128], dtype=torch.uint8))  # scale 2**1
    assert values[:3].tolist() == [2.0, 12.0, 0.0]


def test_a_block_by_hand():
    """Largest magnitude 10: floor(log2 10) - 2 = 1, so values are halved and rounded."""
    weight = torch.zeros(32)
    weight[:5] = torch.tensor([10.0, -3.1, 0.9, 0.4, -7.2])  # halved 5, -1.55, .45, .2, -3.6
    blocks, scales = quantise(weight)
    assert scales.tolist() == [128]
    # 5 is half-way between 4 (code 6) and 6 (code 7): the tie goes to the even code
    assert dequantise(blocks, scales)[:5].tolist() == [8.0, -3.0, 1.0, 0.0, -8.0]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),
     (0.2501, 0.5), (0.7499, 0.5), (4.9999, 4.0), (5.0001, 6.0), (7.9, 6.0)],
)  # fmt: skip
def test_rounds_to_nearest_and_ties_to_the_even_code(value, rounded):
    weight = torch.zeros(32)
    weight[0], weight[1], weight[2] = 4.0, value, -value
    block = dequantise(*quantise(weight))
    assert block[:3].tolist() == [4.0, rounded, -rounded]


def test_nearest_is_what_a_search_over_all_values_finds():
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    blocks, scales = quantise(weight)
    scaled = weight / torch.exp2(scales.float() - 127)
    distances = (scaled.clamp(-6, 6)[..., None] - torch.tensor(FP4_VALUES)).abs()
    ours = (dequantise(blocks, scales) - weight).abs() / torch.exp2(scales.float() - 127)
    best = distances.min(-1).values + (scaled.abs() - 6).clamp(min=0)
    torch.testing.assert_close(ours, best, atol=1e-6, rtol=0)


# Six free values and 26 zeros: the extremes matter, and hypothesis takes long over 32 floats.
finite_rows = st.lists(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    min_size=6, max_size=6,
).map(lambda values: values + [0.0] * 26)  # fmt: skip


@given(finite_rows)
@settings(max_examples=60, deadline=None)
def test_no_value_is_off_by_more_than_a_quarter_of_the_largest(row):
    weight = torch.tensor(row, dtype=torch.float32)
    back = dequantise(*quantise(weight))
    tiny = 2.0**-127  # the smallest scale: below it a step of E2M1 is worth more than the quarter
    bound = max(weight.abs().max().double().item() / 4, tiny)
    assert (back.double() - weight.double()).abs().max().item() <= bound


@given(finite_rows.map(lambda row: [max(min(x, 1e30), -1e30) for x in row]))
@settings(max_examples=40, deadline=None)
def test_quantising_twice_changes_nothing_more(row):
    once = dequantise(*quantise(torch.tensor(row, dtype=torch.float32)))
    normal = once.abs().max() == 0 or once.abs().max() > 2.0**-120
    if normal:
        assert torch.equal(dequantise(*quantise(once)), once)


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_what_mxfp4_holds_survives_a_round_trip(seed, rows, groups):
    values = dequantise(*random_pair(seed, rows, groups))
    assert torch.equal(dequantise(*quantise(values)), values)


@given(st.integers(-60, 60))
@settings(max_examples=30, deadline=None)
def test_a_power_of_two_moves_the_scale_only(shift):
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(shift + 100))
    plain, moved = quantise(weight), quantise(weight * 2.0**shift)
    assert torch.equal(plain.blocks, moved.blocks)
    assert (moved.scales.int() - plain.scales.int()).unique().tolist() == [shift]


def test_zeros_stay_zero_and_carry_no_sign():
    weight = torch.full((1, 32), -0.0)
    blocks, scales = quantise(weight)
    assert not blocks.any()
    assert not torch.signbit(dequantise(blocks, scales)).any()


def test_the_largest_float_does_not_overflow():
    weight = torch.full((32,), torch.finfo(torch.float32).max)
    assert torch.isfinite(dequantise(*quantise(weight))).all()


def test_experts_are_transposed_on_disk():
    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(2))
    blocks, scales = quantise_experts(weight)
    assert tuple(blocks.shape) == (3, 96, 2, 16)
    assert tuple(scales.shape) == (3, 96, 2)
    assert torch.equal(dequantise_experts(blocks, scales)[1], dequantise(*quantise(weight[1].T)).T)


@pytest.mark.parametrize("shape", [(31,), (4, 48), (2, 0), ()])
def test_refuses_a_last_dimension_that_does_not_divide(shape):
    with pytest.raises(Mxfp4Error, match="does not divide by 32.*multiples of 32"):
        quantise(torch.zeros(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_refuses_values_that_are_not_finite(bad):
    weight = torch.zeros(32)
    weight[7] = bad
    with pytest.raises(Mxfp4Error, match="NaN or infinity"):
        quantise(weight)


def test_refuses_pairs_that_do_not_fit():
    blocks, scales = random_pair(3, 2, 4)
    with pytest.raises(Mxfp4Error, match="no pair"):
        dequantise(blocks, scales[:1])
    with pytest.raises(Mxfp4Error, match="uint8"):
        dequantise(blocks.float(), scales)
    scales[0, 0] = 255
    with pytest.raises(Mxfp4Error, match="255"):
        dequantise(blocks, scales)
    with pytest.raises(Mxfp4Error, match=r"\[experts, in, out\]"):
        quantise_experts(torch.zeros(64, 96))


# --- checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny random checkpoint in float32, one file, with an extra file beside it."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    GptOssForCausalLM(GptOssConfig(**CONFIG)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def copy(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "copy")


def shard(folder):
    """Split the single file in two, with an index, as large checkpoints are."""
    weights, weight_map = load_file(folder / "model.safetensors"), {}
    names = sorted(weights)
    for number, part in enumerate((names[:20], names[20:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load_all(folder):
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def test_writes_the_on_disk_form(plain, tmp_path):
    target = write_mxfp4_checkpoint(plain, tmp_path / "mxfp4")
    before, after = load_file(plain / "model.safetensors"), load_file(target / "model.safetensors")
    assert len(after) == len(before) + 2 * CONFIG["num_hidden_layers"]
    for name, weight in before.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = after[f"{name}_blocks"], after[f"{name}_scales"]
            assert (blocks.dtype, scales.dtype) == (torch.uint8, torch.uint8)
            assert torch.equal(
                dequantise_experts(blocks, scales), dequantise_experts(*quantise_experts(weight))
            )
        else:
            assert torch.equal(after[name], weight.to(torch.bfloat16))
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert config["dtype"] == "bfloat16"
    assert (target / "tokenizer.json").is_file()


def test_the_bytes_are_those_that_anatomy_counts(plain, tmp_path):
    target = write_mxfp4_checkpoint(plain, tmp_path / "mxfp4")
    size = sum(t.numel() * t.element_size() for t in load_all(target).values())
    assert size == checkpoint_bytes(CONFIG, "mxfp4")


def test_shards_keep_their_split_and_give_the_same_tensors(plain, copy, tmp_path):
    one = write_mxfp4_checkpoint(plain, tmp_path / "one")
    two = write_mxfp4_checkpoint(shard(copy), tmp_path / "two")
    index = json.loads((two / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(load_all(one)) == set(load_all(two))
    for name, file in index.items():
        assert torch.equal(load_file(two / file)[name], load_all(one)[name])


def test_transformers_reads_what_we_write(plain, tmp_path):
    """Loaded dequantised, every parameter equals our own dequantisation."""
    pytest.importorskip("accelerate")
    from transformers import Mxfp4Config

    target = write_mxfp4_checkpoint(plain, tmp_path / "mxfp4")
    loaded = GptOssForCausalLM.from_pretrained(
        target, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    stored = load_file(target / "model.safetensors")
    for name in tensor_shapes(CONFIG):
        if f"{name}_blocks" in stored:
            pair = stored[f"{name}_blocks"], stored[f"{name}_scales"]
            expected = dequantise_experts(*pair, torch.bfloat16)
        else:
            expected = stored[name]
        assert torch.equal(loaded[name].to(torch.bfloat16), expected), name


def refuses(source, target, message):
    with pytest.raises(CheckpointError, match=message):
        write_mxfp4_checkpoint(source, target)
    assert not target.exists()
    assert not list(target.parent.glob(f".{target.name}*"))


def test_refuses_an_existing_target_and_leaves_it(plain, tmp_path):
    target = tmp_path / "mxfp4"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(Mxfp4Error, match="exists already"):
        write_mxfp4_checkpoint(plain, target)
    assert (target / "mine").read_text() == "kept"


def test_refuses_folders_that_hold_no_checkpoint(tmp_path):
    refuses(tmp_path / "nowhere", tmp_path / "t", "has no config.json")
    (tmp_path / "config.json").write_text("{")
    refuses(tmp_path, tmp_path / "t", "no JSON")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refuses(tmp_path, tmp_path / "t", "'llama'")


def test_refuses_a_checkpoint_that_is_quantised_already(plain, tmp_path):
    refuses(write_mxfp4_checkpoint(plain, tmp_path / "a"), tmp_path / "b", "quantised already")


def test_refuses_a_missing_shard(copy, tmp_path):
    (shard(copy) / "model-00002-of-00002.safetensors").unlink()
    refuses(copy, tmp_path / "t", "00002.*is missing")


def test_refuses_no_weights_at_all(copy, tmp_path):
    (copy / "model.safetensors").unlink()
    refuses(copy, tmp_path / "t", "neither model.safetensors nor model.safetensors.index.json")


def test_refuses_a_truncated_file(copy, tmp_path):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuses(copy, tmp_path / "t", "is truncated")


def test_refuses_missing_unknown_and_misshapen_tensors(copy, tmp_path):
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    turned = weights | {name: weights[name].transpose(1, 2).contiguous()}
    save_file(turned, copy / "model.safetensors")
    refuses(copy, tmp_path / "t", "down_proj.*transposed")
    save_file({k: v for k, v in weights.items() if k != name}, copy / "model.safetensors")
    refuses(copy, tmp_path / "t", "down_proj is missing")
    save_file(weights | {"extra.weight": torch.zeros(1)}, copy / "model.safetensors")
    refuses(copy, tmp_path / "t", "extra.weight is unknown")


def test_refuses_sizes_that_mxfp4_cannot_hold(tmp_path):
    folder = tmp_path / "odd"
    GptOssForCausalLM(GptOssConfig(**{**CONFIG, "intermediate_size": 80})).save_pretrained(folder)
    refuses(folder, tmp_path / "t", "80 inputs.*multiples of 32")


# --- and back -----------------------------------------------------------------------------------


def transformers_own(folder):
    """Every tensor as transformers loads an MXFP4 folder dequantised."""
    pytest.importorskip("accelerate")
    from transformers import Mxfp4Config

    config = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    ).state_dict()


@pytest.mark.parametrize("intermediate", [96, 64])
def test_the_plain_copy_is_transformers_own_dequantisation(tmp_path, intermediate):
    """Also for square experts (64 x 64), where only values tell which way a matrix is turned."""
    torch.manual_seed(1)
    config = GptOssConfig(**{**CONFIG, "intermediate_size": intermediate})
    GptOssForCausalLM(config).save_pretrained(tmp_path / "plain")
    quantised = write_mxfp4_checkpoint(tmp_path / "plain", tmp_path / "mxfp4")
    copy = dequantised_checkpoint(quantised, tmp_path / "copy")
    stored, theirs = load_file(copy / "model.safetensors"), transformers_own(quantised)
    assert stored.keys() == tensor_shapes(config).keys()
    assert all(torch.equal(stored[name], theirs[name].to(torch.bfloat16)) for name in stored)
    read_back = GptOssForCausalLM.from_pretrained(copy, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(stored[name], read_back[name]) for name in stored)


def test_the_plain_copy_says_that_it_is_plain(plain, tmp_path):
    copy = dequantised_checkpoint(write_mxfp4_checkpoint(plain, tmp_path / "mxfp4"), tmp_path / "copy")
    report = check_checkpoint(copy)
    assert not report.quantised and "quantization_config" not in report.config
    assert report.config["dtype"] == "bfloat16" and report.bytes == checkpoint_bytes(CONFIG, "bf16")
    assert (copy / "tokenizer.json").is_file()


def test_quantising_the_plain_copy_gives_the_same_blocks(plain, tmp_path):
    once = write_mxfp4_checkpoint(plain, tmp_path / "once")
    twice = write_mxfp4_checkpoint(dequantised_checkpoint(once, tmp_path / "copy"), tmp_path / "twice")
    first, second = load_all(once), load_all(twice)
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_sharded_source_gives_the_same_copy(plain, copy, tmp_path):
    one = dequantised_checkpoint(write_mxfp4_checkpoint(plain, tmp_path / "q1"), tmp_path / "one")
    two = dequantised_checkpoint(write_mxfp4_checkpoint(shard(copy), tmp_path / "q2"), tmp_path / "two")
    assert not (two / "model.safetensors.index.json").exists()  # the source's index is not copied along
    first, second = load_all(one), load_all(two)
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_plain_checkpoint_comes_back_as_it_is(plain, tmp_path):
    assert dequantised_checkpoint(plain, tmp_path / "copy") == plain
    assert not (tmp_path / "copy").exists()


def test_a_bad_scale_names_file_tensor_and_expert(plain, tmp_path):
    quantised = write_mxfp4_checkpoint(plain, tmp_path / "mxfp4")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    weights = load_file(quantised / "model.safetensors")
    weights[name][2, 0, 0] = 255
    save_file(weights, quantised / "model.safetensors")
    with pytest.raises(Mxfp4Error, match=f"model.safetensors: {name}, expert 2: a scale byte is 255"):
        dequantised_checkpoint(quantised, tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mxfp4"]


def test_a_weight_that_diverged_names_file_tensor_and_expert(copy, tmp_path):
    name = "model.layers.1.mlp.experts.down_proj"
    weights = load_file(copy / "model.safetensors")
    weights[name][1, 0, 0] = float("nan")
    save_file(weights, copy / "model.safetensors")
    refuses(copy, tmp_path / "t", f"model.safetensors: {name}, expert 1: the weights hold NaN")


def test_an_existing_copy_is_left_alone(plain, tmp_path):
    quantised = write_mxfp4_checkpoint(plain, tmp_path / "mxfp4")
    with pytest.raises(Mxfp4Error, match="exists already"):
        dequantised_checkpoint(quantised, plain)
