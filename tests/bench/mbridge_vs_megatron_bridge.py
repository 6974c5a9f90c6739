"""What does mbridge (verl's vanilla_mbridge=True) do with gpt-oss, beside Megatron-Bridge, on the same tiny
checkpoint?

    python tests/bench/mbridge_vs_megatron_bridge.py --mbridge-site [NAME=]FOLDER ... [--out FOLDER]

FOLDER holds an mbridge; tests/bench/requirements.txt says how to make one. Two were recorded: the release
on the package index, which has no gpt-oss, and the branch gpt-oss of ISEEKYAN/mbridge (commit 606ddb90),
which verl 0.7's gpt-oss recipe for Megatron asks for (verl release/v0.7.0,
recipe/dapo/test_dapo_gptoss_20b_megatron.sh).

Every side gets a process of its own and the checkpoint of `load_profile("cpu")` with noise on every tensor,
in float32, on one rank, without TransformerEngine. What mbridge refuses on the way is a row "refused: ...",
with the error as it came; the script then goes around that one thing and on to the next. Everything that it
changes for this is in `adapted`. The rows "logprob gap" say how far the logprobs of 48 tokens (three
windows) are from transformers', first with the numbers that the branch sets and then with one after the
other replaced by the checkpoint's. Export and MXFP4 are compared bit by bit.

Writes mbridge_vs_megatron_bridge.csv: side, check, value, detail. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TextIO

from helpers.profiles import Profile, load_profile
from helpers.results import git_commit, hardware, write_rows

NAME = "mbridge_vs_megatron_bridge.csv"
OURS = "Megatron-Bridge"
LENGTH, SEQUENCES, SHARD = 48, 4, 200_000
LOUD = 30.0  # factor on gate_up_proj: activations pass the clamp at 7
GAP = "logprob gap"
AS_SET = f"{GAP}: as the bridge sets gpt-oss"
UNCLAMPED = f"{GAP}, large activations: all of these, no clamp"
CLAMPED = f"{GAP}, large activations: clamped at 7"
Row = dict[str, object]


def row(check: str, value: object, detail: str = "") -> Row:
    return {"check": check, "value": value, "detail": detail}


# --- the checkpoints ----------------------------------------------------------------------------
def write_checkpoints(settings: Profile, root: Path) -> None:
    """root/one_file, sharded (the same with an index), loud (large activations), mxfp4, and mxfp4_plain
    (mxfp4 in bfloat16).
    """
    import torch
    from safetensors.torch import load_file

    from helpers.checkpoints import save_streamed, write_tiny_checkpoint
    from helpers.mxfp4 import dequantised_checkpoint, write_mxfp4_checkpoint

    random = write_tiny_checkpoint(settings, root / "random")
    noise = torch.Generator().manual_seed(1)
    stored = load_file(random / "model.safetensors")
    weights = {name: t + 0.1 * torch.randn(t.shape, generator=noise) for name, t in stored.items()}
    loud = {name: t * (LOUD if name.endswith("gate_up_proj") else 1) for name, t in weights.items()}
    save_streamed(weights.items(), random, root / "one_file", torch.float32)
    save_streamed(weights.items(), random, root / "sharded", torch.float32, shard_bytes=SHARD)
    save_streamed(loud.items(), random, root / "loud", torch.float32, shard_bytes=SHARD)
    write_mxfp4_checkpoint(root / "sharded", root / "mxfp4")
    dequantised_checkpoint(root / "mxfp4", root / "mxfp4_plain")


# --- what both sides are asked ------------------------------------------------------------------
def logprob_gap(module, folder: Path) -> float:
    """Largest difference of a token's logprob, in nats, between a Megatron model and transformers in plain
    float32.
    """
    import torch

    from helpers.faults import load_reference, logprobs

    tokens = torch.randint(1, 64, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = module(tokens, torch.arange(LENGTH).expand_as(tokens), None)[:, :-1].float()
    ours = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten()
    return (ours - logprobs(load_reference(folder), tokens.tolist())).abs().max().item()


def export_rows(what: str, weights: Iterator, folder: Path) -> list[Row]:
    """Tensors that an export yields, in which dtypes, and how many of the checkpoint's are missing, extra
    or unequal.
    """
    from helpers.bridge import compare_weights

    exported = {name: tensor.clone() for name, tensor in weights}
    difference = compare_weights(exported, folder)
    counts = {field.name: len(getattr(difference, field.name)) for field in dataclasses.fields(difference)}
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in exported.values()}))
    detail = ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; {dtypes}"
    return [row(f"{what}: tensors", len(exported), detail), row(f"{what}: differing", sum(counts.values()))]


def code_rows(package: Path, gpt_oss: list[Path]) -> list[Row]:
    """Lines of the package and of what is for gpt-oss alone, and a hash that says which code this was."""
    files = sorted(package.rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    count = lambda paths: sum(len(path.read_text().splitlines()) for path in paths)
    names = ", ".join(path.name for path in gpt_oss)
    return [
        row("code: lines of the package", count(files), f"sha256 of all its files {digest}"),
        row("code: lines for gpt-oss", count(gpt_oss), names),
    ]


def refusal(call: Callable[[], object]) -> str:
    """The error that `call` ends with, as one line; "" when it works."""
    try:
        call()
    except Exception as error:  # any error at all is the answer
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return ""


# --- Megatron-Bridge ----------------------------------------------------------------------------
def ask_megatron_bridge(settings: Profile, root: Path, site: Path) -> list[Row]:
    import megatron.bridge as package

    from helpers.bridge import export_weights, load_megatron

    folder = Path(package.__file__).parent
    rows = [row("registered", 1, f"megatron-bridge {version('megatron-bridge')}")]
    rows += code_rows(folder, sorted((folder / "models" / "gpt_oss").glob("*.py")))
    model = load_megatron(root / "sharded", settings, with_ddp=False)
    rows.append(row("load: seconds, once", model.seconds["load"]))
    rows.append(row(AS_SET, logprob_gap(model.module, root / "sharded")))
    rows += export_rows("export", export_weights(model), root / "sharded")
    loud = load_megatron(root / "loud", settings, with_ddp=False)
    rows.append(row(CLAMPED, logprob_gap(loud.module, root / "loud")))
    quantised = load_megatron(root / "mxfp4", settings, with_ddp=False)
    rows.append(row("MXFP4 load: seconds, once", quantised.seconds["load"]))
    return rows + export_rows("MXFP4 load, export", export_weights(quantised), root / "mxfp4_plain")


# --- mbridge ------------------------------------------------------------------------------------
def ask_mbridge(settings: Profile, root: Path, site: Path) -> list[Row]:
    """Up to where it refuses for good. The release has no gpt-oss, so its answer ends early."""
    import mbridge
    import torch
    from mbridge.core import util

    tiny = lambda **_: torch.nn.Linear(1, 1)
    rows = [
        row(
            "refused: mbridge.core.util.get_model, any model", *flag(lambda: util.get_model(tiny, bf16=False))
        )
    ]
    known = refusal(lambda: mbridge.AutoBridge.from_pretrained(str(root / "sharded")))
    unknown = known.startswith("ValueError: Unregistered model type")
    rows.append(row("registered", int(not unknown), installed(site)))
    package = Path(mbridge.__file__).parent
    own = [p for p in sorted(package.rglob("*.py")) if "gpt_oss" in p.relative_to(package).as_posix()]
    rows += code_rows(package, own)
    rows.append(row("refused: AutoBridge.from_pretrained", int(bool(known)), known))
    return rows if unknown else rows + ask_branch(root)


def flag(call: Callable[[], object]) -> tuple[int, str]:
    error = refusal(call)
    return int(bool(error)), error


def installed(site: Path) -> str:
    """The distribution's name and version in this folder; a copy of a source tree has none."""
    found = [d for d in distributions(path=[str(site)]) if d.metadata["Name"] == "mbridge"]
    return f"mbridge {found[0].version}" if found else "a source tree, no version"


class GroupedOrder:
    """A model whose expert parameters come in the order of TransformerEngine's grouped layer: all fc1
    weights, then biases.

    mbridge collects an export's experts in one list and stacks it when it is full; in the order of local
    experts it would mix fc1 with fc2.
    """

    def __init__(self, model):
        self.decoder, self.state_dict, self._pairs = model.decoder, model.state_dict, model.named_parameters

    def named_parameters(self):
        pairs, first = list(self._pairs()), {}
        for index, (name, _) in enumerate(pairs):
            if match := LOCAL_EXPERT.match(name):
                first.setdefault(match[1], index)
        return [pairs[i] for i in sorted(range(len(pairs)), key=lambda i: self._place(i, pairs[i][0], first))]

    @staticmethod
    def _place(index: int, name: str, first: dict[str, int]) -> tuple:
        match = LOCAL_EXPERT.match(name)
        return (first[match[1]], match[3], match[4], int(match[2])) if match else (index, "", "", 0)


LOCAL_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)$")


def adapted(folder: Path, **numbers):
    """The branch's bridge for `folder` in float32 without TransformerEngine; numbers: TransformerConfig
    fields to replace.

    Changed: TE-only fusions off and local layers, their names and order translated, a loader that takes
    float32 and MXFP4 alike, and rope_theta put where transformers 4 had it.
    """
    import torch
    from mbridge.models import gpt_oss
    from mbridge.models.ext.gpt_oss.dequant_mxfp4_safetensor_io import DequantMXFP4SafeTensorIO
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from transformers import AutoConfig

    plain = gpt_oss.GPTOSSBridge
    norm = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}

    class LocalBridge(plain):
        _ATTENTION_MAPPING = plain._ATTENTION_MAPPING | norm
        has_vp_stage = True

        def _get_transformer_layer_spec(self, vp_stage=None):
            return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)

        def _get_safetensor_io(self, weights_path):
            return DequantMXFP4SafeTensorIO(weights_path)

        def _weight_name_mapping_mcore_local_to_global(self, model, consider_ep=True):
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)
            return {local: LOCAL_EXPERT.sub(r"\1.\3.\4\2", name) for local, name in names.items()}

    config = AutoConfig.from_pretrained(folder)
    config.rope_theta = config.rope_parameters["rope_theta"]
    with replaced_config(gpt_oss, numbers):
        return LocalBridge(config, dtype=torch.float32)


class replaced_config:
    """Inside it gpt_oss.GPTOSSConfig is made with these numbers and without what needs TransformerEngine."""

    FUSED = (
        "moe_grouped_gemm", "moe_permute_fusion", "masked_softmax_fusion", "bias_activation_fusion",
        "persist_layer_norm", "gradient_accumulation_fusion", "apply_rope_fusion",
    )  # fmt: skip

    def __init__(self, module, numbers: dict):
        self.module, self.plain = module, module.GPTOSSConfig
        self.numbers = {**dict.fromkeys(self.FUSED, False), "use_cpu_initialization": True, **numbers}

    def __enter__(self):
        self.module.GPTOSSConfig = lambda **fields: self.plain(**{**fields, **self.numbers})

    def __exit__(self, *exc):
        self.module.GPTOSSConfig = self.plain


def build(bridge, folder: Path | None = None):
    """A Megatron model from the bridge, with `folder`'s weights. Around get_model, which this megatron-core
    breaks.
    """
    from helpers.cpu.megatron_backend import clone_expert_outputs

    model = bridge._model_provider([])(True, True)
    if folder is not None:
        bridge.load_weights([model], str(folder))
    return clone_expert_outputs([model])[0]


def ask_branch(root: Path) -> list[Row]:
    sharded, config = root / "sharded", json.loads((root / "sharded" / "config.json").read_text())
    shape = {
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
    }
    start = time.perf_counter()
    bridge = adapted(sharded, **shape)
    model = build(bridge, sharded)
    rows = refusals(bridge, model, root) + [row("load: seconds, once", time.perf_counter() - start)]
    rows += gap_rows(root, config, shape)
    rows += export_rows("export", bridge.export_weights([GroupedOrder(model)]), sharded)
    start = time.perf_counter()
    bridge = adapted(root / "mxfp4", **shape)
    model = build(bridge, root / "mxfp4")
    rows.append(row("MXFP4 load: seconds, once", time.perf_counter() - start))
    return rows + export_rows(
        "MXFP4 load, export", bridge.export_weights([GroupedOrder(model)]), root / "mxfp4_plain"
    )


def refusals(bridge, model, root: Path) -> list[Row]:
    """What stops the branch as it is, each tried with everything else out of the way."""
    from mbridge.models.gpt_oss import GPTOSSBridge as Plain
    from transformers import AutoConfig

    def without_rope_theta():
        bare = adapted(root / "sharded")
        bare.hf_config = AutoConfig.from_pretrained(root / "sharded")
        build(bare)

    tries = {
        "GPTModel arguments (transformers 5 has no config.rope_theta)": without_rope_theta,
        "loading another shape than 20b's (expert width, top-k and window are constants)": lambda: build(
            adapted(root / "sharded"), root / "sharded"
        ),
        "loading in float32": lambda: Plain._get_safetensor_io(bridge, str(root / "sharded")),
        "loading one file without an index": lambda: build(bridge, root / "one_file"),
        "the local layer's input_layernorm": lambda: Plain._weight_name_mapping_attention(
            AsPlain(Plain), "decoder.layers.0.input_layernorm.weight"
        ),
        "export of local experts": lambda: list(bridge.export_weights([model])),
    }
    return [row(f"refused: {what}", *flag(call)) for what, call in tries.items()]


class AsPlain:
    """Just the mapping tables of the unchanged class."""

    def __init__(self, cls):
        self._ATTENTION_MAPPING = cls._ATTENTION_MAPPING


def gap_rows(root: Path, config: dict, shape: dict) -> list[Row]:
    """Logprob gaps with the branch's numbers, then with one after the other replaced by the checkpoint's."""
    window, original = config["sliding_window"], config["rope_parameters"]["original_max_position_embeddings"]
    steps = [
        (AS_SET, {}),
        (f"{GAP}: + window_size ({window}, 0), as 20b gets (128, 0)", {"window_size": (window, 0)}),
        (
            f"{GAP}: + window_size ({window - 1}, 0), so that the token itself counts",
            {"window_size": (window - 1, 0)},
        ),
        (
            f"{GAP}: + YaRN from {original} positions, not 131072",
            {"yarn_original_max_position_embeddings": original},
        ),
    ]
    numbers, rows = dict(shape), []
    for what, change in steps:
        numbers |= change
        gap = logprob_gap(build(adapted(root / "sharded", **numbers), root / "sharded"), root / "sharded")
        rows.append(row(what, gap))
    for what, change in ((UNCLAMPED, {}), (CLAMPED, {"activation_func_clamp_value": 7.0})):
        numbers |= change
        gap = logprob_gap(build(adapted(root / "loud", **numbers), root / "loud"), root / "loud")
        rows.append(row(what, gap))
    return rows


# --- a side's process ---------------------------------------------------------------------------
def private_stdout() -> TextIO:
    """Today's stdout, for the answer alone; whatever a library prints from here on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def be_a_side(settings: Profile, name: str, root: Path, site: Path) -> list[Row]:
    from helpers.bridge import prepare_process, start_ranks

    prepare_process(settings)
    start_ranks(settings)
    if name == OURS:
        return ask_megatron_bridge(settings, root, site)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(settings.seed, inference_rng_tracker=True, force_reset_rng=True)
    return ask_mbridge(settings, root, site)


# --- the parent ---------------------------------------------------------------------------------
def answers_of(name: str, settings: Profile, root: Path, site: Path | None) -> list[Row]:
    """The rows of one side, from a process of its own. RuntimeError with its last lines if it fails."""
    environment = {**os.environ, **settings.process_environment("trainer")}
    path = [str(site)] if site else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, environment.get("PYTHONPATH", "")]).strip(os.pathsep)
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--side",
        name,
        "--root",
        str(root),
        "--site",
        str(site or ""),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise RuntimeError(f"side {name!r} ended with code {done.returncode}:\n{tail}")
    rows = [{"side": name, **answer} for answer in json.loads(done.stdout)]
    for answer in rows:
        print(
            "  ".join([f"{name:22}", f"{answer['check']:82}", shown(answer["value"]), answer["detail"]]),
            flush=True,
        )
    return rows


def shown(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def conditions() -> str:
    """Date, commit, versions and processor, in one line."""
    names = ("torch", "transformers", "megatron-core", "megatron-bridge")
    machine, versions = hardware(), ", ".join(f"{n} {version(n)}" for n in names)
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {git_commit()}, {versions}, Python {sys.version.split()[0]}, "
        f"{machine['cpu']}, {machine['cores']} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbridge-site", action="append", default=[], metavar="[NAME=]FOLDER")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    for name in ("--side", "--root", "--site"):  # internal: be this side
        parser.add_argument(name, help=argparse.SUPPRESS)
    a = parser.parse_args()
    settings = load_profile("cpu")
    if a.side:
        answers = private_stdout()
        answers.write(json.dumps(be_a_side(settings, a.side, Path(a.root), Path(a.site))))
        answers.flush()
        return
    sites = {}
    for given in a.mbridge_site:
        name, _, folder = given.rpartition("=")
        sites[name or Path(folder).name] = Path(folder).resolve()
    if not sites or not all((folder / "mbridge").is_dir() for folder in sites.values()):
        parser.error(
            "--mbridge-site must name a folder that holds mbridge; tests/bench/requirements.txt says how"
        )
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_checkpoints(settings, root)
        rows = answers_of(OURS, settings, root, None)
        for name, folder in sites.items():
            rows += answers_of(name, settings, root, folder)
    write_rows(a.out / NAME, [{**r, "value": shown(r["value"])} for r in rows], conditions())


if __name__ == "__main__":
    main()
