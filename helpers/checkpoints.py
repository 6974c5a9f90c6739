"""Checkpoints: a tiny gpt-oss with a tokenizer, written in the Hugging Face layout that both engines read.

torch and transformers are imported inside the functions: the kernel of notebook 06 never needs them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.anatomy import tensor_shapes, total_parameters
from helpers.harmony import CHAT_TEMPLATE, encode, load_tokenizer
from helpers.mxfp4 import dequantised_checkpoint
from helpers.profiles import ModelSettings, Profile
from helpers.tensor_files import (
    CheckpointError, CheckpointReport, TensorSpec, TensorWriter, check_checkpoint, copy_companions, dtype_name, is_quantised,
    plain_config, publish_folder, read_config,
)  # fmt: skip

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
WORDS = ("user", "assistant", "analysis", "final")  # single tokens, as in o200k_harmony
CHARACTERS = tuple("0123456789+-*/=,.:;? ()<>")
# These came later and took the first reserved ids: every other id is what it was in recorded runs. The names of the
# special tokens are words too, so that a typed <|end|> has ids of its own: "<", "|", "end", "|", ">".
LATER_TOKENS = (
    "<|call|>", "|", "system", "developer", "commentary",
    "endoftext", "start", "channel", "message", "end", "return", "call",
)  # fmt: skip
HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]
HUB_DUPLICATES = ["original/*", "metal/*"]  # the weights of openai/gpt-oss-* twice more, for other engines
STREAM_FROM = 2e9  # parameters; a model with more is written tensor by tensor
PAD_TOKEN, END_TOKEN = "<|endoftext|>", "<|return|>"


# Ids of gpt-oss's own tokenizer (o200k_harmony). A model of that vocabulary's size gets its special tokens there.
HARMONY_IDS = {
    "<|endoftext|>": 199_999, "<|return|>": 200_002, "<|channel|>": 200_005, "<|start|>": 200_006, "<|end|>": 200_007,
    "<|message|>": 200_008, "<|call|>": 200_012,
}  # fmt: skip
HARMONY_SIZE = 201_088
FILLER = "filler_"


def tiny_vocabulary(size: int) -> dict[str, int]:
    """Token -> id: harmony's special tokens, its words, digits and punctuation, and reserved tokens up to `size`.

    For gpt-oss's own size the special tokens have their own ids, and most of the others are fillers that no text becomes.
    """
    if size == HARMONY_SIZE:
        words = [t for t in (*WORDS, *CHARACTERS, *LATER_TOKENS) if t not in HARMONY_IDS]
        known = {t: i for i, t in enumerate(words)} | HARMONY_IDS
        free = sorted(set(range(size)) - set(known.values()))
        return known | {f"{FILLER}{i}": i for i in free[:-1]} | {"<|reserved|>": free[-1]}
    first = [*SPECIAL_TOKENS, *WORDS, *CHARACTERS]
    tokens = [*first, *LATER_TOKENS]
    if size <= len(tokens):  # the last reserved one stands for unknown text
        raise ValueError(
            f"model.vocab_size = {size} is too small: the tiny tokenizer needs {len(tokens) + 1} tokens"
        )
    tokens += [f"<|reserved_{i - len(first)}|>" for i in range(len(tokens), size)]
    return {token: i for i, token in enumerate(tokens)}


def write_tiny_tokenizer(folder: Path, size: int) -> None:
    """A one-token-a-word tokenizer with harmony's special tokens: tokenizer.json, tokenizer_config.json and the
    chat template beside them, for transformers' AutoTokenizer.

    The special tokens are added tokens, as in gpt-oss's own file; the words' pattern does not know them. So text is
    split at them only where the caller allows it (helpers.harmony.encode, not encode_spans).
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = tiny_vocabulary(size)
    special = [token for token in vocabulary if token.startswith("<|")]
    words = (w for w in vocabulary if not w.startswith(("<|", FILLER)))
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    pattern = "|".join(re.escape(word) for word in longest_first)
    unknown = list(vocabulary)[-1]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN, "unk_token": unknown}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def gpt_oss_config(model: ModelSettings):
    """transformers' GptOssConfig of these settings. Layers alternate sliding and full attention, the first one slides.

    swiglu_limit is a field that SGLang reads and GptOssConfig lacks; YaRN's numbers are gpt-oss's own, which the
    Megatron-Bridge mapping takes for granted (megatron/bridge/models/gpt_oss/gpt_oss_bridge.py).
    """
    from transformers import GptOssConfig

    vocabulary = tiny_vocabulary(model.vocab_size)
    pad, end = vocabulary[PAD_TOKEN], vocabulary[END_TOKEN]
    kinds = ("sliding_attention", "full_attention")
    yarn = {
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    shape = {k: v for k, v in vars(model).items() if k not in ("source", "path", "dtype")}
    return GptOssConfig(
        **shape, layer_types=[kinds[i % 2] for i in range(model.num_hidden_layers)], rope_parameters=yarn,
        attention_bias=True, tie_word_embeddings=False, pad_token_id=pad, eos_token_id=end, swiglu_limit=7.0,
        dtype=model.dtype,
    )  # fmt: skip


def write_tiny_checkpoint(settings: Profile, folder: Path | None = None) -> Path:
    """A randomly initialised gpt-oss of settings.model with its tokenizer, as a Hugging Face folder.

    Returns at once when the folder is already complete. Written beside its place and renamed, so that an interrupted
    run leaves no half of one.
    """
    folder = folder or settings.checkpoint("random")
    if (folder / "config.json").is_file():
        return folder
    if total_parameters(settings.model) > STREAM_FROM:
        return write_random_checkpoint(settings, folder)
    import torch
    from transformers import GptOssForCausalLM

    torch.manual_seed(settings.seed)
    model = GptOssForCausalLM(gpt_oss_config(settings.model)).to(getattr(torch, settings.model.dtype))
    with torch.no_grad():
        # transformers starts sinks at 0.02: give them a size that attention notices
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 1.0)
    return publish_folder(folder, lambda temporary: _save(model, settings, temporary))


def write_random_checkpoint(settings: Profile, folder: Path) -> Path:
    """The same kind of checkpoint for a model that should not stand in memory whole: tensor by tensor, drawn on the profile's
    device. Norms are ones, biases zeros, sinks of size 1, everything else has settings.model.initializer_range.
    """
    import torch

    model, config = settings.model, gpt_oss_config(settings.model)
    config.architectures = ["GptOssForCausalLM"]
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    dtype = getattr(torch, model.dtype)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device=settings.device, dtype=dtype)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        if "bias" in name:
            return tensor.zero_()
        spread = 1.0 if name.endswith("sinks") else model.initializer_range
        return tensor.normal_(0.0, spread, generator=generator)

    with tempfile.TemporaryDirectory() as template:
        config.save_pretrained(template)
        write_tiny_tokenizer(Path(template), model.vocab_size)
        shapes = tensor_shapes(read_config(template))
        weights = ((name, weight(name, shape).cpu()) for name, shape in shapes.items())
        return save_streamed(weights, template, folder, dtype)


def starting_checkpoint(settings: Profile) -> Path:
    """The checkpoint that settings.model names: generated here, a local folder, or a repository of the Hugging Face hub.

    For an MXFP4 checkpoint it is the plain copy that rollout_checkpoint makes. Megatron-Bridge reads MXFP4 as well, but
    de-quantises each fused tensor once for every expert in it (measured with 32 experts: 2.4 s against 0.5 s).
    Raises FileNotFoundError for a folder without one, CheckpointError for one that is not whole, ConnectionError when the
    hub does not give it.
    """
    model = settings.model
    if model.source == "generated":
        return write_tiny_checkpoint(settings)
    if model.source == "folder":
        return rollout_checkpoint(settings, require_checkpoint(Path(model.path)))
    if model.source != "hub":
        raise ValueError(f"model.source is {model.source!r}; it can be generated, folder or hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(model.path, allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES)
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ConnectionError(
            f"the hub did not give {model.path!r} ({type(error).__name__}); check the name and the network, or download it "
            "elsewhere and set model.source = 'folder', model.path = its folder"
        ) from error
    return rollout_checkpoint(settings, folder)


def _save(model, settings: Profile, folder: Path) -> None:
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder, settings.model.vocab_size)


def save_streamed(
    weights: Iterable[tuple[str, Tensor]],
    template: Path | str,
    folder: Path | str,
    dtype: torch.dtype | None = None,
    shard_bytes: float = 5e9,
) -> Path:
    """A Hugging Face folder with these weights, written while they arrive, and everything else copied from `template`.

    weights: (name, tensor) of every tensor of the template's model, in any order, for instance
    helpers.bridge.export_weights(model). One of them is in memory at a time: names and shapes are known from config.json, so
    each goes to its place in the file at once. Larger models than `shard_bytes` are split, with an index.
    dtype: of all tensors in the file; None: each as the template stores it (bfloat16 for what is MXFP4 there), and another
    dtype that arrives is refused rather than rounded.
    Raises CheckpointError for a name, shape or dtype that does not fit and for one that never comes; nothing is published
    then. The export is collective, so what is left of it is taken from `weights` before the error goes on.
    """
    stream = iter(weights)
    try:
        specs, config = _export_plan(Path(template), dtype)
        return publish_folder(
            Path(folder),
            lambda new: _write_export(
                stream, specs, config, Path(template), new, shard_bytes, dtype is not None
            ),
        )
    except Exception:
        deque(stream, maxlen=0)
        raise


def _export_plan(template: Path, dtype: torch.dtype | None) -> tuple[dict[str, TensorSpec], dict | None]:
    """What the files will hold, and the config to write; None: the template's config.json as it is."""
    config = read_config(template)
    shapes, quantised = tensor_shapes(config), is_quantised(config)
    if dtype is not None:
        named = str(dtype).removeprefix("torch.")
        specs = {name: TensorSpec(dtype_name(dtype), shape) for name, shape in shapes.items()}
        same = config.get("dtype", config.get("torch_dtype")) == named
        return specs, None if same and not quantised else plain_config(config, named)
    stored = check_checkpoint(template).tensors
    specs = {
        name: TensorSpec(stored[name].dtype if name in stored else "BF16", shape)
        for name, shape in shapes.items()
    }
    return specs, plain_config(config, "bfloat16") if quantised else None


def _write_export(
    stream: Iterable[tuple[str, Tensor]],
    specs: dict[str, TensorSpec],
    config: dict | None,
    template: Path,
    folder: Path,
    shard_bytes: float,
    convert: bool,
) -> None:
    with TensorWriter(folder, specs, shard_bytes, convert=convert) as writer:
        for name, tensor in stream:
            writer.write(name, tensor)
            del tensor  # else it lives until the next one is there
    copy_companions(template, folder)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_weights(weights: dict[str, Tensor], template: Path | str, folder: Path | str) -> Path:
    """save_streamed for weights that are in memory already; they keep their dtype when all have the same."""
    dtypes = {tensor.dtype for tensor in weights.values()}
    return save_streamed(weights.items(), template, folder, dtypes.pop() if len(dtypes) == 1 else None)


def rollout_checkpoint(settings: Profile, folder: Path | str) -> Path:
    """The checkpoint that a rollout server starts from: `folder`, or a plain copy of it where it is in MXFP4.

    SGLang drops expert updates without a word once it has loaded MXFP4 (models/gpt_oss.py, 0.5.17), so it never gets to see
    that form. The copy lies in runs/<profile>/checkpoints, is made once for each state of the source's files, and takes 3
    times its space (gpt-oss-20b: 42 GB).
    """
    report = check_checkpoint(folder)
    if not report.quantised:
        return report.folder
    target = settings.checkpoint(f"{report.folder.name}-{_fingerprint(report)}-plain")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several engines of one machine start at once
        if target.exists():
            return check_checkpoint(target).folder
        log.info("%s is in MXFP4, which takes no weight updates: writing a plain copy to %s", folder, target)
        return dequantised_checkpoint(report.folder, target)


def _fingerprint(report: CheckpointReport) -> str:
    """Eight characters that change when the checkpoint is another one or its files change."""
    files = [report.folder / "config.json", *(report.folder / shard for shard in report.shards)]
    facts = [str(report.folder.resolve())] + [f"{f.stat().st_size} {f.stat().st_mtime_ns}" for f in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def check_megatron_import(folder: Path | str) -> CheckpointReport:
    """check_checkpoint, and a refusal of the one shape that Megatron-Bridge imports wrongly.

    For hidden_size == 2 * intermediate_size each expert's gate_up_proj is square, and the bridge tells plain checkpoints
    from MXFP4 by that shape alone (megatron.bridge.models.conversion.param_mapping._align_expert_weight_to_shape): it takes
    the plain matrix untransposed, without an error. gpt-oss itself (hidden_size == intermediate_size) is not concerned.
    """
    report = check_checkpoint(folder)
    hidden, wide = report.config["hidden_size"], report.config["intermediate_size"]
    if hidden == 2 * wide:
        raise CheckpointError(
            f"{report.folder / 'config.json'}: hidden_size {hidden} is twice intermediate_size {wide}, so that "
            "model.layers.0.mlp.experts.gate_up_proj is square and Megatron-Bridge cannot see how it is turned; choose another "
            "intermediate_size"
        )
    return report


def require_checkpoint(folder: Path) -> Path:
    """The folder, if it holds a checkpoint. Raises FileNotFoundError with the next command otherwise."""
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(
            f"no checkpoint in {folder}: it needs a config.json and weights; notebook 02 makes the series' own "
            "(python -m helpers.series run --only 02)"
        )
    return Path(folder)


def tokenizer_and_pad(folder: Path):
    """(tokenizer, pad id) of a checkpoint folder."""
    tokenizer = load_tokenizer(folder)
    return tokenizer, encode(tokenizer, PAD_TOKEN)[0]
