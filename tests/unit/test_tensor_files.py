"""Weight files: what is damaged is named by file and tensor, and what is written is what safetensors itself reads."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from helpers.anatomy import checkpoint_bytes, tensor_shapes
from helpers.mxfp4 import QUANTIZATION_CONFIG
from helpers.tensor_files import (
    INDEX, ITEM_BYTES, SINGLE, CheckpointError, NotGptOss, TensorSpec, TensorWriter, _read_index, check_checkpoint,
    copy_companions, dtype_name, expected_tensors, publish_folder, read_chunks, read_config, read_header,
    read_rows, require_space, shard_plan,
)  # fmt: skip

CONFIG = dict(
    model_type="gpt_oss", vocab_size=40, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, num_local_experts=3, num_experts_per_tok=2, sliding_window=8, dtype="bfloat16",
)  # fmt: skip
DOWN = "model.layers.0.mlp.experts.down_proj"
SINKS = "model.layers.1.self_attn.sinks"
LAST = "lm_head.weight"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def random_weights(quantised=False):
    """Every tensor of CONFIG's model as it is stored: bfloat16, or any bytes for MXFP4."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, (shape, dtypes) in expected_tensors(CONFIG, quantised).items():
        if dtypes == ("U8",):
            weights[name] = torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8)
        else:
            weights[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return weights


def write(folder, weights, **config):
    """A checkpoint by safetensors' own writer: one file."""
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def write_shards(folder, weights, **config):
    """The same in two files with an index; layer 1 and what follows is in the second."""
    write(folder, weights, **config)
    (folder / SINGLE).unlink()
    homes = {name: TWO if ".layers.1." in name or name == LAST else ONE for name in weights}
    for file in (ONE, TWO):
        save_file({n: w for n, w in weights.items() if homes[n] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder


@pytest.fixture
def single(tmp_path):
    return write(tmp_path / "single", random_weights())


@pytest.fixture
def sharded(tmp_path):
    return write_shards(tmp_path / "sharded", random_weights())


@pytest.fixture
def mxfp4(tmp_path):
    return write(tmp_path / "mxfp4", random_weights(True), quantization_config=QUANTIZATION_CONFIG)


# --- whole checkpoints --------------------------------------------------------------------------


def test_a_whole_checkpoint_is_reported(single, sharded, mxfp4):
    for folder, quantised, shards in ((single, False, (SINGLE,)), (sharded, False, (ONE, TWO)), (mxfp4, True, (SINGLE,))):  # fmt: skip
        report = check_checkpoint(folder)
        assert (report.folder, report.quantised, report.shards) == (folder, quantised, shards)
        assert report.config["hidden_size"] == 64
        assert report.bytes == checkpoint_bytes(CONFIG, "mxfp4" if quantised else "bf16")
    assert {n: t.shape for n, t in check_checkpoint(single).tensors.items()} == tensor_shapes(CONFIG)


def test_a_checkpoint_of_each_float_dtype_is_whole(tmp_path):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weights = {name: weight.to(dtype) for name, weight in random_weights().items()}
        stored = check_checkpoint(write(tmp_path / str(dtype), weights)).tensors
        assert {tensor.dtype for tensor in stored.values()} == {dtype_name(dtype)}


def test_checking_reads_headers_only(single):
    """Zeros in place of all data pass: the check says that files are whole, not that values are right."""
    first = min(t.offset for t in check_checkpoint(single).tensors.values())
    data = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(data[:first] + bytes(len(data) - first))
    assert check_checkpoint(single).bytes == len(data) - first


def test_checking_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, helpers.checkpoints, helpers.rollout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- damage -------------------------------------------------------------------------------------


def cut(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[: keep(len(data)) if callable(keep) else keep])


def change_header(file, change):
    """Rewrite the header of a file after change(entries); the data stays."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    change(entries)
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def change_weights(folder, change, file=SINGLE):
    weights = load_file(folder / file)
    change(weights)
    save_file(weights, folder / file, metadata={"format": "pt"})


def change_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def turned(weights):
    weights[DOWN] = weights[DOWN].transpose(1, 2).contiguous()


def a_folder_instead(file):
    """What nobody can read, root included, whom permissions do not stop."""
    file.unlink()
    file.mkdir()


def last_of(folder, file):
    """The tensor whose data is at the end of the file."""
    return max(read_header(folder / file).values(), key=lambda t: t.offset + t.nbytes)


SINGLE_DAMAGE = {
    "no weights": (lambda f: (f / SINGLE).unlink(), [SINGLE, "model.embed_tokens.weight", "missing"]),
    "empty file": (lambda f: cut(f / SINGLE, 0), [SINGLE, "model.embed_tokens.weight", "damaged header"]),
    "cut in the header": (lambda f: cut(f / SINGLE, 1000), [SINGLE, "model.embed_tokens.weight", "damaged header"]),
    "header is no JSON": (
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:8] + b"[" + (f / SINGLE).read_bytes()[9:]),
        [SINGLE, "model.embed_tokens.weight", "damaged header"],
    ),
    "header length is absurd": (
        lambda f: (f / SINGLE).write_bytes(b"\xff" * 8 + (f / SINGLE).read_bytes()[8:]),
        [SINGLE, "damaged header"],
    ),
    "header's metadata is no text": (
        lambda f: change_header(f / SINGLE, lambda e: e.update(__metadata__={"format": 1})), [SINGLE, "damaged header"],
    ),
    "header lacks a shape": (
        lambda f: change_header(f / SINGLE, lambda e: e[DOWN].pop("shape")), [SINGLE, DOWN, "damaged header"],
    ),
    "header has a negative size": (
        lambda f: change_header(f / SINGLE, lambda e: e[DOWN].update(shape=[-3, 96, 64])),
        [SINGLE, DOWN, "non-negative"],
    ),
    "header's dtype is unknown": (
        lambda f: change_header(f / SINGLE, lambda e: e[DOWN].update(dtype="Q9")), [SINGLE, DOWN, "damaged header"],
    ),
    "header's bytes contradict its shape": (
        lambda f: change_header(f / SINGLE, lambda e: e[DOWN].update(shape=[3, 96, 63])),
        [SINGLE, DOWN, "damaged header"],
    ),
    "two tensors in one place": (
        lambda f: change_header(f / SINGLE, lambda e: e[SINKS].update(data_offsets=[0, 8])),
        [SINGLE, "damaged header"],
    ),
    "surplus bytes": (
        lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"\0\0"), [SINGLE, "2 bytes behind"],
    ),
    "tensor missing": (
        lambda f: change_weights(f, lambda w: w.pop(DOWN)), [SINGLE, DOWN, "is missing"],
    ),
    "tensor unknown": (
        lambda f: change_weights(f, lambda w: w.update(extra=torch.zeros(1))), [SINGLE, "extra is unknown"],
    ),
    "tensor renamed": (
        lambda f: change_weights(f, lambda w: w.update({"x": w.pop(DOWN)})),
        [SINGLE, f"{DOWN} is missing", "x is unknown"],
    ),
    "transposed expert": (
        lambda f: change_weights(f, turned), [SINGLE, DOWN, "[3, 64, 96]", "[3, 96, 64]", "transposed"],
    ),
    "wrong shape": (
        lambda f: change_weights(f, lambda w: w.update({SINKS: torch.zeros(5)})),
        [SINGLE, SINKS, "[5]", "[4]", "another config"],
    ),
    "wrong dtype": (
        lambda f: change_weights(f, lambda w: w.update({SINKS: torch.zeros(4, dtype=torch.int8)})),
        [SINGLE, SINKS, "stored as I8"],
    ),
    "another config": (
        lambda f: change_json(f / "config.json", lambda c: c.update(num_local_experts=8)),
        [SINGLE, "mlp.router", "config.json asks for"],
    ),
    "a stray file": (
        lambda f: save_file({DOWN: torch.zeros(1)}, f / "old.safetensors"), ["old.safetensors", "belongs to none"],
    ),
    "config of another model": (
        lambda f: change_json(f / "config.json", lambda c: c.update(model_type="llama")), ["config.json", "'llama'"],
    ),
    "config without a size": (
        lambda f: change_json(f / "config.json", lambda c: c.pop("hidden_size")), ["config.json", "'hidden_size'"],
    ),
    "config with a text as size": (
        lambda f: change_json(f / "config.json", lambda c: c.update(hidden_size="64")),
        ["config.json", "hidden_size is '64'", "positive whole number"],
    ),
    "config with a word as number of layers": (
        lambda f: change_json(f / "config.json", lambda c: c.update(num_hidden_layers="two", layer_types=["x"] * 2)),
        ["config.json", "num_hidden_layers is 'two'", "positive whole number"],
    ),
    "config with a negative number of layers": (
        lambda f: change_json(f / "config.json", lambda c: c.update(num_hidden_layers=-1, layer_types=["x"] * 2)),
        ["config.json", "num_hidden_layers is -1", "positive whole number"],
    ),
    "config without key-value heads": (
        lambda f: change_json(f / "config.json", lambda c: c.update(num_key_value_heads=0)),
        ["config.json", "num_key_value_heads is 0"],
    ),
    "config with yes as a size": (
        lambda f: change_json(f / "config.json", lambda c: c.update(vocab_size=True)), ["vocab_size is True"],
    ),
    "config is a folder": (
        lambda f: a_folder_instead(f / "config.json"), ["config.json cannot be read (Is a directory)"],
    ),
    "config of another quantisation": (
        lambda f: change_json(f / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"})),
        ["config.json", "'fp8'"],
    ),
    "config says MXFP4": (
        lambda f: change_json(f / "config.json", lambda c: c.update(quantization_config=QUANTIZATION_CONFIG)),
        [SINGLE, f"{DOWN[:-9]}gate_up_proj_blocks is missing", "remove its quantization_config"],
    ),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json", "no JSON"]),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "gpt-oss"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
}  # fmt: skip
SHARDED_DAMAGE = {
    "shard is a folder": (lambda f: a_folder_instead(f / TWO), [f"{TWO} cannot be read (Is a directory)"]),
    "shard missing": (lambda f: (f / TWO).unlink(), [TWO, "is missing", "model.layers.1.input_layernorm.weight"]),
    "shard's header cut": (lambda f: cut(f / TWO, 100), [TWO, "model.layers.1.input_layernorm.weight", "damaged"]),
    "named by the index, not in its shard": (
        lambda f: change_weights(f, lambda w: w.pop(SINKS), TWO), [TWO, f"does not hold {SINKS}"],
    ),
    "in a shard, not in the index": (
        lambda f: change_json(f / INDEX, lambda i: i["weight_map"].pop(SINKS)), [TWO, f"holds {SINKS}"],
    ),
    "in no shard and not in the index": (
        lambda f: (change_weights(f, lambda w: w.pop(SINKS), TWO),
                   change_json(f / INDEX, lambda i: i["weight_map"].pop(SINKS))),
        [INDEX, f"{SINKS} is missing"],
    ),
    "index points outside": (
        lambda f: change_json(f / INDEX, lambda i: i["weight_map"].update({SINKS: "../x.safetensors"})),
        [INDEX, "weight_map"],
    ),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), [INDEX, "weight_map"]),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), [INDEX, "KeyError"]),
    "index with an empty map": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), [INDEX, "empty"]),
    "index and a single file": (
        lambda f: save_file({SINKS: torch.zeros(4)}, f / SINGLE), [SINGLE, "belongs to none"],
    ),
}  # fmt: skip
MXFP4_DAMAGE = {
    "no scales": (
        lambda f: change_weights(f, lambda w: w.pop(f"{DOWN}_scales")),
        [SINGLE, f"{DOWN}_scales is missing", f"partner {DOWN}_blocks"],
    ),
    "no blocks": (
        lambda f: change_weights(f, lambda w: w.pop(f"{DOWN}_blocks")),
        [SINGLE, f"{DOWN}_blocks is missing", f"partner {DOWN}_scales"],
    ),
    "blocks of another shape": (
        lambda f: change_weights(f, lambda w: w.update({f"{DOWN}_blocks": w[f"{DOWN}_blocks"][:2].contiguous()})),
        [SINGLE, f"{DOWN}_blocks", "[2, 64, 3, 16]", "[3, 64, 3, 16]"],
    ),
    "scales of another shape": (
        lambda f: change_weights(f, lambda w: w.update({f"{DOWN}_scales": w[f"{DOWN}_scales"][..., :2].contiguous()})),
        [SINGLE, f"{DOWN}_scales", "[3, 64, 2]", "[3, 64, 3]"],
    ),
    "scales converted": (
        lambda f: change_weights(f, lambda w: w.update({f"{DOWN}_scales": w[f"{DOWN}_scales"].bfloat16()})),
        [SINGLE, f"{DOWN}_scales", "stored as BF16", "U8"],
    ),
    "no quantization_config": (
        lambda f: change_json(f / "config.json", lambda c: c.pop("quantization_config")),
        [SINGLE, "gate_up_proj is missing", "_blocks is unknown", "no quantization_config"],
    ),
    "sizes that do not divide": (
        lambda f: change_json(f / "config.json", lambda c: c.update(intermediate_size=80)),
        ["config.json", DOWN, "80 inputs", "multiples of 32"],
    ),
}  # fmt: skip


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as refused:
        check_checkpoint(folder)
    message = str(refused.value)
    assert "\n" not in message
    return message


DAMAGE = [
    *(("single", name, case) for name, case in SINGLE_DAMAGE.items()),
    *(("sharded", name, case) for name, case in SHARDED_DAMAGE.items()),
    *(("mxfp4", name, case) for name, case in MXFP4_DAMAGE.items()),
]


@pytest.mark.parametrize(("kind", "name", "case"), DAMAGE, ids=[f"{kind}-{name}" for kind, name, _ in DAMAGE])
def test_damage_is_named(request, kind, name, case):
    folder, (break_it, words) = request.getfixturevalue(kind), case
    break_it(folder)
    message = refusal(folder)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize("damage", ["no config", "config of another model", "config is a list"])
def test_what_is_no_gpt_oss_at_all_is_told_apart_from_damage(single, damage):
    SINGLE_DAMAGE[damage][0](single)
    with pytest.raises(NotGptOss):
        read_config(single)


@pytest.mark.parametrize("missing", [1, 100, 20_000])
@pytest.mark.parametrize("file", [SINGLE, TWO])
def test_a_file_whose_data_is_cut_names_the_first_tensor_that_suffers(tmp_path, file, missing):
    folder = (write if file == SINGLE else write_shards)(tmp_path / "cut", random_weights())
    end = (folder / file).stat().st_size - missing
    hurt = min((t.offset, n) for n, t in read_header(folder / file).items() if t.offset + t.nbytes > end)
    cut(folder / file, end)
    message = refusal(folder)
    assert file in message and "is truncated" in message and f"{hurt[1]} ends at byte" in message


def test_a_file_that_shrinks_while_it_is_read_is_named(single):
    stored = last_of(single, SINGLE)
    cut(single / SINGLE, lambda size: size - 1)
    with pytest.raises(CheckpointError, match=f"{SINGLE} became shorter"):
        read_rows(stored)


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_is_refused_or_is_no_damage_to_safetensors_either(single, data):
    """What our reader of headers accepts, safetensors accepts as well, and no byte makes it fail in another way."""
    original = (single / SINGLE).read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    place = data.draw(st.integers(0, header - 1))
    broken = bytearray(original)
    broken[place] = data.draw(st.integers(0, 255))
    file = single / "changed"
    file.write_bytes(broken)
    try:
        ours = read_header(file)
    except CheckpointError as error:
        assert "changed" in str(error)
        return
    with safe_open(file, "pt") as theirs:
        assert set(theirs.keys()) == set(ours)
        assert all(tuple(theirs.get_slice(n).get_shape()) == t.shape for n, t in ours.items())


@pytest.mark.parametrize(
    "damage", [d for d in SINGLE_DAMAGE if d.startswith(("header", "cut", "surplus", "empty"))]
)
def test_what_is_refused_here_is_refused_by_safetensors(single, damage):
    """The damage is real: no reader of the format takes these files."""
    SINGLE_DAMAGE[damage][0](single)
    with pytest.raises(SafetensorError):
        safe_open(single / SINGLE, "pt")


# --- read and write -----------------------------------------------------------------------------


def test_reading_gives_what_safetensors_reads(single, mxfp4):
    for folder in (single, mxfp4):
        theirs = load_file(folder / SINGLE)
        for name, stored in check_checkpoint(folder).tensors.items():
            assert torch.equal(read_rows(stored), theirs[name])
            assert torch.equal(read_rows(stored, 1, 2), theirs[name][1:3])
            assert torch.equal(torch.cat(list(read_chunks(stored, chunk=200))), theirs[name])


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
specs = st.builds(TensorSpec, st.sampled_from(["F32", "BF16", "F16", "U8"]), shapes)
tables = st.dictionaries(st.sampled_from([f"t{i}" for i in range(12)]), specs, min_size=1)


@given(tables, st.integers(1, 400))
def test_a_shard_plan_is_full_ordered_and_within_its_limit(table, limit):
    plan = shard_plan(table, limit)
    files = list(dict.fromkeys(plan.values()))
    assert list(plan) == list(table) and files == sorted(files)
    for number, file in enumerate(files, 1):
        names = [name for name in plan if plan[name] == file]
        assert len(names) == 1 or sum(table[name].nbytes for name in names) <= limit
        assert file == (SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors")
    for one, next_one in zip(files, files[1:]):  # no shard is closed before it is full
        first = next(name for name in plan if plan[name] == next_one)
        assert sum(table[n].nbytes for n in plan if plan[n] == one) + table[first].nbytes > limit


def tensor_of(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 200, spec.shape, generator=generator)
    return values.to(
        {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}[spec.dtype]
    )


@given(tables, st.integers(1, 400), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_order_of_arrival_gives_files_that_safetensors_reads(tmp_path_factory, table, limit, random):
    folder = tmp_path_factory.mktemp("written")
    tensors = {name: tensor_of(spec, i) for i, (name, spec) in enumerate(table.items())}
    order = list(table)
    random.shuffle(order)
    with TensorWriter(folder, table, shard_bytes=limit) as writer:
        for name in order:
            writer.write(name, tensors[name])
    files = list(folder.glob("*.safetensors"))
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[n], t) and read[n].dtype == t.dtype for n, t in tensors.items())
    for file in files:
        for stored in read_header(file).values():
            assert stored.offset % ITEM_BYTES[stored.dtype] == 0
    index = folder / INDEX
    assert index.exists() == (len(files) > 1)
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"] == shard_plan(table, limit)
        assert content["metadata"]["total_size"] == sum(spec.nbytes for spec in table.values())


def test_views_rows_and_large_tensors_are_written_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.tensor_files.CHUNK", 100)  # so that a small tensor takes many pieces
    base = torch.randn(6, 50)
    table = {
        "turned": TensorSpec("F32", (50, 6)),
        "rows": TensorSpec("F32", (6, 50)),
        "half": TensorSpec("BF16", (6, 50)),
    }
    with TensorWriter(tmp_path, table, convert=True) as writer:
        writer.write("turned", base.T)
        writer.write("half", base)
        for first in (0, 2, 4):
            writer.write_rows("rows", base[first : first + 2])
    read = load_file(tmp_path / SINGLE)
    assert torch.equal(read["turned"], base.T) and torch.equal(read["rows"], base)
    assert torch.equal(read["half"], base.bfloat16())


PAIR = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("F32", (4,))}
MISTAKES = {
    "twice": (lambda w: [w.write("a", torch.zeros(2, 3))] * 2 and w.write("a", torch.zeros(2, 3)), "a arrives twice"),
    "unknown": (lambda w: w.write("c", torch.zeros(4)), "c arrives and is no tensor"),
    "shape": (lambda w: w.write("a", torch.zeros(3, 2)), r"a arrives as \[3, 2\], the model's shape is \[2, 3\]"),
    "dtype": (lambda w: w.write("b", torch.zeros(4).double()), "b arrives as torch.float64, the file holds torch.float32"),
    "rows": (lambda w: w.write_rows("a", torch.zeros(3, 3)), "a arrives with 0 \\+"),
    "never": (lambda w: w.write("a", torch.zeros(2, 3)), "b did not arrive whole"),
    "half": (lambda w: w.write_rows("a", torch.zeros(1, 3)), r"a did not arrive whole \(and 1 more\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_refused_by_name(tmp_path, mistake):
    act, words = MISTAKES[mistake]
    with pytest.raises(CheckpointError, match=words) as refused:
        with TensorWriter(tmp_path, PAIR) as writer:
            act(writer)
    assert SINGLE in str(refused.value) or mistake == "unknown"


def test_a_dtype_that_no_gpt_oss_holds_is_refused():
    with pytest.raises(CheckpointError, match="torch.int64 is no dtype"):
        dtype_name(torch.int64)


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="takes 1000000000.00 GB.*larger disk"):
        require_space(tmp_path, 10**18)
    with pytest.raises(CheckpointError, match="larger disk"):
        with TensorWriter(tmp_path, {"a": TensorSpec("F32", (10**15,))}):
            pass
    assert not list(tmp_path.iterdir())


def test_an_index_that_cannot_be_read_is_named(sharded):
    with pytest.raises(CheckpointError, match=r"nowhere.json cannot be read \(No such file"):
        _read_index(sharded / "nowhere.json")


def test_companions_of_a_read_only_source_can_be_changed(single, tmp_path):
    """What writes a checkpoint rewrites config.json of its own copy."""
    (single / "config.json").chmod(0o444)
    target = tmp_path / "target"
    target.mkdir()
    copy_companions(single, target)
    (target / "new").touch()
    assert [file.name for file in target.iterdir() if file.name != "new"] == ["config.json"]
    assert (target / "config.json").read_bytes() == (single / "config.json").read_bytes()
    assert (target / "config.json").stat().st_mode == (target / "new").stat().st_mode


def test_a_folder_is_replaced_whole(tmp_path):
    folder = tmp_path / "there"
    for text in ("old", "new"):
        publish_folder(folder, lambda new: (new / "config.json").write_text(text))
    assert (folder / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_published_folder_has_the_permissions_of_any_new_folder(tmp_path):
    (tmp_path / "plain").mkdir()
    publish_folder(tmp_path / "published", lambda new: None)
    assert (tmp_path / "published").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writing_a_tensor_leaves_its_storage_resizable():
    """numpy() does not: a parameter that was once written that way could never be offloaded."""
    from helpers.tensor_files import _raw

    tensor = torch.arange(6.0)[1:].view(5, 1)
    view = _raw(tensor)
    assert bytes(view) == tensor.clone().numpy().tobytes() and len(view) == 20
    assert tensor.untyped_storage().resizable()
    assert bytes(_raw(torch.arange(6.0).view(2, 3).T)) == torch.arange(6.0).view(2, 3).T.contiguous().numpy().tobytes()
    del tensor
    assert len(bytes(view)) == 20, "the view keeps the bytes"
