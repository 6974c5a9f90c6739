"""Checkpoints: a tiny gpt-oss with a tokenizer, written in the Hugging Face layout that both engines read.

torch and transformers are imported inside the functions: the kernel of notebook 06 never needs them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from helpers.harmony import encode, load_tokenizer
from helpers.profiles import ModelSettings, Profile

log = logging.getLogger(__name__)

SPECIAL_TOKENS = ("<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
WORDS = ("user", "assistant", "analysis", "final")  # single tokens, as in o200k_harmony
CHARACTERS = tuple("0123456789+-*/=,.:;? ()<>")
PAD_TOKEN, END_TOKEN = "<|endoftext|>", "<|return|>"


def tiny_vocabulary(size: int) -> dict[str, int]:
    """Token -> id: harmony's special tokens, its words, digits and punctuation, and reserved tokens up to `size`."""
    tokens = [*SPECIAL_TOKENS, *WORDS, *CHARACTERS]
    if size < len(tokens):
        raise ValueError(
            f"model.vocab_size = {size} is too small: the tiny tokenizer needs {len(tokens)} tokens"
        )
    tokens += [f"<|reserved_{i}|>" for i in range(size - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}


def write_tiny_tokenizer(folder: Path, size: int) -> None:
    """tokenizer.json and tokenizer_config.json of a one-token-a-word tokenizer with harmony's special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = tiny_vocabulary(size)
    longest_first = sorted(vocabulary, key=len, reverse=True)
    pattern = "|".join(re.escape(token) for token in longest_first)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=list(vocabulary)[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "pad_token": PAD_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def gpt_oss_config(model: ModelSettings):
    """transformers' GptOssConfig of these settings. Layers alternate sliding and full attention, the first one slides.

    swiglu_limit is a field that SGLang reads and GptOssConfig lacks; YaRN's numbers are gpt-oss's own, which the
    Megatron-Bridge mapping takes for granted (megatron/bridge/models/gpt_oss/gpt_oss_bridge.py).
    """
    from transformers import GptOssConfig

    vocabulary = tiny_vocabulary(model.vocab_size) if model.vocab_size < 1000 else None
    pad, end = (vocabulary[PAD_TOKEN], vocabulary[END_TOKEN]) if vocabulary else (199_999, 200_002)
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
    import torch
    from transformers import GptOssForCausalLM

    torch.manual_seed(settings.seed)
    model = GptOssForCausalLM(gpt_oss_config(settings.model)).to(getattr(torch, settings.model.dtype))
    with torch.no_grad():
        # transformers starts sinks at 0.02: give them a size that attention notices
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(0.0, 1.0)
    return publish_folder(folder, lambda temporary: _save(model, settings, temporary))


def starting_checkpoint(settings: Profile) -> Path:
    """The checkpoint that settings.model names: generated here, a local folder, or a repository of the Hugging Face hub.

    Raises FileNotFoundError for a folder without one, ConnectionError when the hub does not give it.
    """
    model = settings.model
    if model.source == "generated":
        return write_tiny_checkpoint(settings)
    if model.source == "folder":
        return require_checkpoint(Path(model.path))
    if model.source != "hub":
        raise ValueError(f"model.source is {model.source!r}; it can be generated, folder or hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model.path, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ConnectionError(
            f"the hub did not give {model.path!r} ({type(error).__name__}); check the name and the network, or download it "
            "elsewhere and set model.source = 'folder', model.path = its folder"
        ) from error


def _save(model, settings: Profile, folder: Path) -> None:
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder, settings.model.vocab_size)


def publish_folder(folder: Path, write) -> Path:
    """Call write(temporary folder) and put the result in place of `folder` in one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def save_weights(weights: dict, template: Path, folder: Path) -> Path:
    """A Hugging Face folder with these weights ({name: tensor}) and everything else copied from `template`."""
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        for file in Path(template).iterdir():
            if file.suffix != ".safetensors" and file.is_file():
                shutil.copy(file, temporary)
        save_file(weights, str(temporary / "model.safetensors"), metadata={"format": "pt"})

    return publish_folder(folder, write)


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
