"""Doctor: what is wrong with this checkpoint, this running SGLang server, this trainer, and what cures it.

    python -m helpers.doctor --checkpoint DIR [--server URL] [--trainer-logprobs FILE]

Reads the checkpoint, talks HTTP to the server (whatever framework started it) and prints one table of pass, fail and
"cannot tell". Numbers that disagree with transformers' are compared with those of transformers' model with each known
fault planted (helpers.faults), and the fault that reproduces them is named. Needs no Megatron.

Exit code: 0 nothing failed, 1 something failed, 2 bad usage, 3 nothing failed, but no comparison of the server's or of the
trainer's numbers came to a verdict ("cannot tell" is no pass).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests

from helpers.anatomy import (
    FULL, GPT_OSS_20B, SLIDING, layer_types, read_architecture, tensor_shapes, total_parameters, yarn_correction_range,
)  # fmt: skip
from helpers.checkpoints import SPECIAL_TOKENS
from helpers.faults import (
    FAULTS, Fault, Fit, by_mean, load_reference, logprobs, rank_faults, shifted_fits, stale_faults,
)  # fmt: skip
from helpers.harmony import STOP_TOKENS, encode, load_tokenizer
from helpers.messages import OneLineParser, one_line
from helpers.preflight import installed_versions
from helpers.rollout import RolloutError, SGLangClient
from helpers.tensor_files import (
    TORCH_NAMES, CheckpointError, CheckpointReport, NotGptOss, check_checkpoint, read_chunks, read_config, read_rows,
)  # fmt: skip
from helpers.weight_sync import send_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import GptOssForCausalLM

log = logging.getLogger(__name__)
PASS, FAIL, UNKNOWN = "pass", "fail", "cannot tell"
NUMBERS = {  # the probes that compare numbers, by what they examine
    "server": {"server: prefill logprobs", "server: decode equals prefill", "server: temperature"},
    "trainer": {"trainer: logprobs", "trainer: gap to server"},
}
WIDTH = 100  # columns of the table
FP32_TOLERANCE = 1e-4  # nats a token; sound engines in float32 stay below 1e-5
NOISE = 0.1  # nats: mean gap that bfloat16 shows without a fault (0.01 to 0.08 measured on the tiny model: router flips)
BETTER = 0.5  # a fault is named without an exact match only if it leaves less than this share of the mean gap
NAN = float("nan")
# of gpt-oss in sglang 0.5.17 (server_args.py): the attention backends that take sinks
SINK_BACKENDS = ("triton", "trtllm_mha", "fa3", "fa4", "ascend", "intel_amx", "intel_xpu", "aiter")


class BadUsage(ValueError):
    """The command line or a file that it names is unusable; one line that says why."""


class NotFinite(RolloutError):
    """The server's logprobs are no numbers."""


class Unusable(ValueError):
    """A file that a probe needs is no good. symptom: a key of ADVICE; verdict: what that makes of the probe."""

    def __init__(self, message: str, symptom: str, verdict: str = FAIL):
        super().__init__(message)
        self.symptom, self.verdict = symptom, verdict


@dataclass(frozen=True)
class Finding:
    """One row of the table. cause and cure: of a failure; for "cannot tell", why not and what would tell."""

    probe: str
    verdict: str
    found: str
    cause: str = ""
    cure: str = ""


@dataclass(frozen=True)
class Scored:
    """Token sequences and log p(tokens[t] | before), t >= 1, all in one float tensor; NaN where a token does not count."""

    sequences: list[list[int]]
    logprobs: Tensor

    def place(self, index: int) -> tuple[int, int]:
        """(sequence, position in it) of one element of `logprobs`."""
        for number, tokens in enumerate(self.sequences):
            if index < len(tokens) - 1:
                return number, index + 1
            index -= len(tokens) - 1
        raise IndexError(index)


@dataclass
class Case:
    """What is examined, and how strictly. tolerance: nats, None for the rule of the dtype (see `tolerance_for`)."""

    report: CheckpointReport
    client: SGLangClient | None = None
    trainer: Scored | None = None
    older: Path | None = None
    write: bool = False
    tolerance: float | None = None
    max_reference_gb: float = 16.0
    info: dict[str, Any] = field(default_factory=dict)  # of /server_info

    @property
    def config(self) -> dict[str, Any]:
        return self.report.config

    @property
    def window(self) -> int:
        return read_architecture(self.config).sliding_window

    @cached_property
    def faults(self) -> dict[str, Fault]:
        return {**FAULTS, **(stale_faults(self.older) if self.older else {})}

    @cached_property
    def reference(self) -> GptOssForCausalLM | None:
        """The checkpoint in transformers, float32; None where it is larger than allowed."""
        return load_reference(self.report.folder) if self.reference_gb <= self.max_reference_gb else None

    @property
    def reference_gb(self) -> float:
        return 4 * total_parameters(self.config) / 1e9

    @property
    def dtype(self) -> str:
        """Of the checkpoint's embedding, by torch's name: what engines compute in unless told otherwise."""
        return TORCH_NAMES[self.report.tensors["model.embed_tokens.weight"].dtype]

    def tolerance_for(self, dtype: str) -> float | None:
        """Largest gap of a sound engine that computes in `dtype`, or None: in 16 bits the best fit decides."""
        return self.tolerance or (FP32_TOLERANCE if dtype == "float32" else None)

    @property
    def served_dtype(self) -> str:
        named = self.info.get("dtype")
        return self.dtype if named in (None, "auto") else str(named)

    @property
    def served_tolerance(self) -> float | None:
        return self.tolerance_for(self.served_dtype)

    def small(self, worst: float, mean: float) -> bool:
        """Whether a gap of the server's logprobs (nats: largest and mean) is what a sound server may show."""
        return worst <= self.served_tolerance if self.served_tolerance else mean <= NOISE


# Why, and what to do: of each failure (cause, cure), and of each "cannot tell" (why not, what would tell).
# fmt: off
ADVICE: dict[str, tuple[str, str]] = {
    "damaged": ("an interrupted download or export, or a config of another model",
                "fetch or export it again; nothing else was examined"),
    "not gpt-oss": ("this is not a gpt-oss checkpoint",
                    "name the right folder: the one with gpt-oss's config.json and weights"),
    "unreadable": ("permissions, or a folder in the place of a file",
                   "make it readable for this user; nothing else was examined"),
    "bad table": ("an interrupted download, or edited by hand", "take the file that came with the model"),
    "no tokenizer": ("weights were saved without their tokenizer; a server could take token ids only",
                     "copy tokenizer.json and tokenizer_config.json from the model that this one was trained from"),
    "bad tokenizer": ("an interrupted download or an unreadable file; no server would start with it",
                      "copy tokenizer.json from the model that this one was trained from"),
    "square": ("shapes do not show it", "compare numbers: give --server or --trainer-logprobs"),
    "square gate_up": ("Megatron-Bridge tells plain checkpoints from MXFP4 by this shape alone and imports it transposed",
                       "choose another intermediate_size than half of hidden_size"),
    "not finite": ("a diverged run, or an export of memory that was released",
                   "take the last checkpoint before the loss became NaN, or export again with the weights loaded"),
    "not finite served": ("NaN in the server's weights (an update from a diverged trainer, or from memory that was released), or "
                          "an overflow", "load the checkpoint again; if it is finite and this stays, serve in another dtype"),
    "equal sinks": ("an export left them at their initial value; equal sinks also hide exchanged heads",
                    "export again with sinks mapped (Megatron: softmax_type = 'learnable')"),
    "initial values": ("a fresh model, or an export that left the initial values (trained gpt-oss has none such)",
                       "if it was trained, export again; to test a pipeline, add noise to every tensor first"),
    "layer pattern": ("gpt-oss alternates and starts with a sliding layer; Megatron-Bridge takes that for granted and does "
                      "not read layer_types", "correct layer_types and sliding_window in config.json"),
    "other positions": ("not gpt-oss's positions; Megatron-Bridge hard-codes factor 32 over 4096 tokens, bounds not rounded, "
                        "and would train another model than the server runs",
                        "restore rope_parameters from gpt-oss's config.json (theta 150000, factor 32, truncate false)"),
    "no limit": ("gpt-oss clamps gate and up at 7; SGLang reads the number from config.json and does not start without it, "
                 "transformers and Megatron-Bridge take 7 for granted", "write swiglu_limit: 7.0 into config.json"),
    "stops at end": ("<|end|> closes the analysis message: stopping there cuts each answer before `final` (pitfall 18)",
                     "take <|end|> out of eos_token_id in config.json and generation_config.json and restart the server"),
    "no return": ("<|return|> ends an answer and is no stop token: answers run to the length limit",
                  "add the id of <|return|> to eos_token_id in generation_config.json, or send stop_token_ids"),
    "split specials": ("the tokenizer lost its added tokens, or is another model's",
                       "copy tokenizer.json and tokenizer_config.json from the gpt-oss release"),
    "padding": ("a padding token that is also an end (or none) makes a trainer mask real ends or learn from padding",
                "set pad_token_id to <|endoftext|> and keep it apart from eos_token_id in config.json"),
    "no template": ("messages cannot be rendered by the server",
                    "send token ids, or copy chat_template.jinja from the gpt-oss release"),
    "quantised": ("a server that loaded quantised experts drops their updates and reports success (pitfall 26)",
                  "de-quantise the checkpoint for training and serve the plain one"),
    "too large": ("no numbers to compare with", "raise --max-reference-gb on a machine with twice that memory"),
    "unknown gap": ("no known fault reproduces these numbers",
                    "check that both have the same weights (--older DIR tries an earlier checkpoint's); if it computes in 16 "
                    "bits, give --tolerance 0.1; else compare layer by layer"),
    "16 bits": (f"rounding alone stays below a mean of {NOISE} as a rule, and no known fault fits twice as well",
                "run it in float32 once: then the verdict is exact"),
    "unreachable": ("no SGLang server listens there, or it is still loading",
                    "check URL and port with `curl URL/health`, and read the server's log"),
    "backend": ("not among SGLang 0.5.17's backends with sinks, unless a plugin changed it",
                "the logprobs below decide; else start it with --attention-backend triton or fa3"),
    "other model": ("the server runs another model, or the same with another config",
                    "give the URL of the right server, or restart it with --model-path of the checkpoint"),
    "model elsewhere": ("its config cannot be read here", "run the doctor where the server runs; the logprobs tell as well"),
    "decode": ("the decode kernel or its cache treats sinks or window otherwise than prefill (pitfall 16: sglang 11634, 32087)",
               "choose another decode attention backend, or start it with --disable-hybrid-swa-memory"),
    "unscaled": ("the server returns logprobs of logits that were not divided by the temperature",
                 "unset SGLANG_RETURN_ORIGINAL_LOGPROB, sample at temperature 1, or leave the trainer's logits unscaled too"),
    "neither": ("the server's logits are not the checkpoint's", "cure what the verdict on its prefill logprobs names first"),
    "needs --write": ("it changes the server's weights for some seconds", "repeat with --write while nobody else uses it"),
    "tensor parallel": ("the doctor sends the payload of one rank", "serve with tp 1 for this probe"),
    "nothing to restore": ("the server's numbers are not this checkpoint's, so they could not be put back",
                           "cure what the verdict on its prefill logprobs names first"),
    "dropped": ("the server reports success and drops or repacks them (packed layout, quantised load, unknown names)",
                "serve a plain checkpoint with another --moe-runner-backend, and compare logprobs after each sync (pitfalls "
                "15 and 26)"),
    "too small": ("their effect is within what 16-bit rounding does", "serve in float32 once: then the verdict is exact"),
    "not restored": ("an update was taken only in part",
                     "load the checkpoint again (/update_weights_from_disk) or restart the server before anybody uses it"),
    "trainer gap": ("the two compute different models, or have different weights",
                    "cure what the verdicts on the server's and the trainer's own logprobs name; sync and repeat"),
    "could not run": ("the probe could not run", "see the message"),
}
# fmt: on


def passed(probe: str, found: str) -> Finding:
    return Finding(probe, PASS, found)


def failed(probe: str, found: str, symptom: str) -> Finding:
    return Finding(probe, FAIL, found, *ADVICE[symptom])


def unknown(probe: str, found: str, symptom: str) -> Finding:
    return Finding(probe, UNKNOWN, found, *ADVICE[symptom])


# --- checkpoint ---------------------------------------------------------------------------------------------------------


def orientation(case: Case) -> Finding:
    """Whether shapes alone show that no expert matrix is transposed."""
    a, probe = read_architecture(case.config), "checkpoint: orientation"
    if a.hidden_size == 2 * a.intermediate_size:
        return failed(probe, "gate_up_proj is square", "square gate_up")
    if case.report.quantised:
        return passed(probe, "MXFP4 keeps experts [expert, out, in]; the blocks' shapes fit the config")
    if a.hidden_size == a.intermediate_size:
        return unknown(probe, "down_proj is square: transposed, it has the same shape", "square")
    return passed(probe, "experts are [expert, in, out]; how gate and up are interleaved, shapes do not tell")


def finite(case: Case) -> Finding:
    """NaN and infinity, tensor by tensor."""
    probe, tensors = "checkpoint: finite", case.report.tensors
    floats = {name: stored for name, stored in tensors.items() if stored.dtype != "U8"}
    bad = [n for n, stored in floats.items() if not all(c.isfinite().all() for c in read_chunks(stored))]
    if bad:
        return failed(probe, f"NaN or infinity in {_some(bad)}", "not finite")
    return passed(probe, f"{len(floats)} float tensors without NaN or infinity")


def sinks_alive(case: Case) -> Finding:
    """Sinks that are all equal were never trained or were lost."""
    sinks, probe = _small(case, "self_attn.sinks"), "checkpoint: sinks alive"
    dead = [name for name, tensor in sinks.items() if (tensor == tensor[0]).all() and len(tensor) > 1]
    if dead:
        return failed(probe, f"all heads have the same sink in {_some(dead)}", "equal sinks")
    return passed(probe, "the sinks of each layer differ from head to head")


def evenness(case: Case) -> Iterator[Finding]:
    """Tensors that are constant cannot show that they were dropped or exchanged; that is no fault by itself."""
    before, after = _small(case, "input_layernorm.weight"), _small(case, "post_attention_layernorm.weight")
    equal = [n for (n, a), b in zip(before.items(), after.values(), strict=True) if a.equal(b)]
    biases = [n for kind in ("gate_up_proj_bias", "down_proj_bias") for n in _zeros(case, kind)]
    for kind, bad, what, hidden in (
        ("norms", equal, "equal norms", "an exchange of the two"),
        ("expert biases", biases, "all zero", "dropped ones"),
        ("router bias", _zeros(case, "router.bias"), "all zero", "a dropped one"),
    ):
        probe = f"checkpoint: {kind}"
        if bad:
            yield unknown(probe, f"{what} in {_some(bad)}: that hides {hidden}", "initial values")
        else:
            yield passed(probe, f"uneven: {hidden} would show")


def _zeros(case: Case, suffix: str) -> list[str]:
    return [name for name, tensor in _small(case, suffix).items() if not tensor.any()]


def _small(case: Case, suffix: str) -> dict[str, Tensor]:
    """The (small) tensors whose names end so, layer by layer."""
    names = (n for n in tensor_shapes(case.config) if n.endswith(suffix))
    return {name: read_rows(case.report.tensors[name]).float() for name in names}


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def window_pattern(case: Case) -> Finding:
    """Even layers slide, odd ones do not."""
    a, probe = read_architecture(case.config), "checkpoint: window"
    expected = tuple(FULL if i % 2 else SLIDING for i in range(a.num_hidden_layers))
    if layer_types(a) == expected:
        return passed(probe, f"{a.sliding_window} tokens, the token included; even layers slide")
    pattern = "".join("S" if kind == SLIDING else "F" for kind in layer_types(a))
    return failed(probe, f"sliding_window {a.sliding_window}, layers {pattern} (S slides)", "layer pattern")


def yarn_numbers(case: Case) -> Finding:
    """The RoPE fields against gpt-oss's own."""
    ours, theirs = read_architecture(case.config), read_architecture(GPT_OSS_20B)
    names = ("rope_theta", "factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings")
    other = [f"{n} {getattr(ours, n)}" for n in names if getattr(ours, n) != getattr(theirs, n)]
    rope = case.config.get("rope_parameters") or case.config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    other += [f"rope_type {kind}"] if kind != "yarn" else []
    low, high = yarn_correction_range(ours)
    blend = f"pairs {low:.4f} to {high:.4f} of {ours.head_dim // 2} are blended"
    if other:
        return failed("checkpoint: YaRN", f"{', '.join(other)}; {blend}", "other positions")
    return passed("checkpoint: YaRN", f"gpt-oss's numbers: factor {ours.factor:g}, {blend}")


def swiglu_limit(case: Case) -> Finding:
    """SGLang reads the field, transformers takes 7 for granted and does not write it."""
    limit = case.config.get("swiglu_limit")
    judge = passed if limit == 7.0 else partial(failed, symptom="no limit")
    return judge("checkpoint: SwiGLU limit", str(limit))


def stop_tokens(case: Case) -> Finding:
    """The end-of-sequence ids of generation_config.json and config.json."""
    probe, tokenizer = "checkpoint: stop tokens", _tokenizer(case)
    generation = _read_table(case.report.folder / "generation_config.json")
    ids = {i for config in (generation, case.config) for i in _as_list(config.get("eos_token_id"))}
    names = [tokenizer.id_to_token(i) or f"unknown id {i}" for i in sorted(ids)]
    shown = ", ".join(names) or "none"
    if "<|end|>" in names:
        return failed(probe, shown, "stops at end")
    if "<|return|>" not in names:
        return failed(probe, shown, "no return")
    lacking = [t for t in STOP_TOKENS if t not in names and tokenizer.token_to_id(t) is not None]
    return passed(probe, shown + (f"; not among them: {', '.join(lacking)}" if lacking else ""))


def _as_list(value: Any) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise Unusable(f"eos_token_id {value!r} is neither a token id nor a list of them", "bad table")
    return ids


def _tokenizer(case: Case) -> Tokenizer:
    try:
        return load_tokenizer(case.report.folder)
    except FileNotFoundError as error:
        raise Unusable(str(error), "no tokenizer", UNKNOWN) from error
    except ValueError as error:
        raise Unusable(str(error), "bad tokenizer") from error


def _read_table(file: Path) -> dict[str, Any]:
    """A JSON object that lies beside the weights; {} where there is no such file. Raises Unusable for anything else."""
    try:
        content = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise Unusable(f"{file.name} cannot be read: {error}", "bad table") from error
    if not isinstance(content, dict):
        raise Unusable(
            f"{file.name} holds a {type(content).__name__}, not an object of settings", "bad table"
        )
    return content


def special_tokens(case: Case) -> Finding:
    """Harmony's special tokens are one id each, and padding is not an end."""
    probe, tokenizer = "checkpoint: special tokens", _tokenizer(case)
    split = [t for t in SPECIAL_TOKENS if len(encode(tokenizer, t)) != 1]
    # generation_config.json of the release stops at the padding token too, and that does no harm
    pad, ends = case.config.get("pad_token_id"), _as_list(case.config.get("eos_token_id"))
    if split:
        return failed(probe, f"not one id: {', '.join(split)}", "split specials")
    if pad is None or pad in ends:
        return failed(probe, f"pad_token_id {pad}, eos_token_id {ends}", "padding")
    return passed(probe, f"harmony's are one id each; padding is {tokenizer.id_to_token(pad)}")


def chat_template(case: Case) -> Finding:
    """Whether messages can be rendered by the checkpoint's own template."""
    folder, probe = case.report.folder, "checkpoint: chat template"
    inside = _read_table(folder / "tokenizer_config.json").get("chat_template")
    if inside or (folder / "chat_template.jinja").is_file():
        return passed(
            probe, "present; gpt-oss's prints the date and marks no assistant tokens: mask by spans"
        )
    return unknown(probe, "none in this folder", "no template")


def quantisation(case: Case) -> Finding:
    """Whether a server that loads this folder takes weight updates."""
    if case.report.quantised:
        return failed("checkpoint: takes updates", "experts are MXFP4", "quantised")
    return passed("checkpoint: takes updates", f"plain {case.dtype}")


Probe = Callable[[Case], Finding | Iterable[Finding]]
CHECKPOINT_PROBES: tuple[Probe, ...] = (
    orientation, finite, sinks_alive, evenness, window_pattern, yarn_numbers, swiglu_limit, stop_tokens, special_tokens,
    chat_template, quantisation,
)  # fmt: skip


# --- numbers ------------------------------------------------------------------------------------------------------------


def probe_sequences(case: Case) -> list[list[int]]:
    """Random tokens, the same ones each time, in lengths around the window: only past it can a window be wrong."""
    w, generator = case.window, random.Random(0)
    lengths = sorted({max(2, n) for n in (w - 1, w, w + 1, 2 * w, 3 * w)})
    return [[generator.randrange(case.config["vocab_size"]) for _ in range(n)] for n in lengths]


def diagnose(case: Case, probe: str, scored: Scored, dtype: str) -> Finding:
    """Compare an engine's logprobs with the reference, and where they disagree with each fault planted in it.

    dtype: of the engine. In float32 a tolerance decides. In 16 bits routers flip between nearly equal experts, so no fixed
    tolerance holds, and the reference that fits clearly best decides.
    """
    if case.reference is None:
        return _no_reference(case, probe)
    fits = rank_faults(case.reference, scored.sequences, scored.logprobs, case.faults)
    sound = logprobs(case.reference, scored.sequences)
    if scored is case.trainer:  # whoever wrote the file may have shifted it
        fits[1:] = sorted(fits[1:] + shifted_fits(scored.sequences, scored.logprobs, sound), key=by_mean)
    gap = scored.logprobs - sound
    found = f"{_size(fits[0])} {_where(case, scored, gap)}"
    tolerance = case.tolerance_for(dtype)
    return _judge_by_fit(probe, fits, found) if tolerance is None else _judge(probe, fits, found, tolerance)


def _no_reference(case: Case, probe: str) -> Finding:
    size = f"the float32 reference takes {case.reference_gb:.1f} GB, allowed are {case.max_reference_gb:g}"
    return unknown(probe, size, "too large")


def _size(fit: Fit) -> str:
    return f"gap to the reference: max {fit.worst:.1e}, mean {fit.mean:.1e} nats"


def _where(case: Case, scored: Scored, gap: Tensor) -> str:
    """Where the largest gap is, as "(largest at token 20 of 32, past the window)"."""
    number, position = scored.place(int(gap.abs().nan_to_num(-1.0).argmax()))
    side = "past" if position >= case.window else "within"
    return f"(largest at token {position} of {len(scored.sequences[number])}, {side} the window)"


def _judge(probe: str, fits: list[Fit], found: str, tolerance: float) -> Finding:
    """Sound within the tolerance; else the planted faults that are within it."""
    sound, best, *_ = fits
    if sound.worst <= tolerance:
        return passed(probe, f"{_size(sound)} (tolerance {tolerance:g}){_not_seen(fits, tolerance)}")
    exact = [fit.fault for fit in fits[1:] if fit.worst <= tolerance]
    if exact:
        names = " or ".join(fault.name for fault in exact)
        return _named(probe, f"{found}; with {names} planted the reference is within {best.worst:.1e}", exact)
    if best.mean < BETTER * sound.mean:
        found += f"; with {best.fault.name} planted the mean is {best.mean:.1e}: there is something beside it"
        return _named(probe, found, [best.fault])
    found += f"; nearest of {len(fits) - 1} known faults: {best.fault.name}"
    return failed(probe, found, "unknown gap")


def _named(probe: str, found: str, faults: list[Fault]) -> Finding:
    cause = "; or ".join(f"{f.what}: {f.cause} ({f.references})" for f in faults)
    return Finding(probe, FAIL, found, cause, "; or ".join(dict.fromkeys(f.cure for f in faults)))


def _not_seen(fits: list[Fit], tolerance: float) -> str:
    """Faults that these tokens cannot show: planted, they change the reference by no more than the tolerance."""
    return _listed("not visible on these tokens", (fit for fit in fits[1:] if fit.effect <= tolerance))


def _listed(what: str, fits: Iterable[Fit]) -> str:
    """The temperature is left out: it was fitted, so it is 1 where all is sound."""
    names = [fit.fault.name for fit in fits if fit.fault.name != "temperature"]
    return f"; {what}: {', '.join(names)}" if names else ""


def _judge_by_fit(probe: str, fits: list[Fit], found: str) -> Finding:
    """A fault is named that leaves less than half of the mean gap; sound is what no fault explains better."""
    sound, best, *_ = fits
    if best.mean < BETTER * sound.mean:
        found += f"; {best.fault.name} planted fits {sound.mean / max(best.mean, 1e-9):.1f} times better"
        return _named(probe, found, [best.fault])
    if sound.mean <= NOISE and best.mean > 0.9 * sound.mean:
        near = _listed("too close to exclude in 16 bits", (f for f in fits[1:] if f.mean < 2 * sound.mean))
        return passed(probe, f"{_size(sound)}: the sound reference fits best{near}")
    return unknown(probe, f"{found}; nearest known fault: {best.fault.name}", "16 bits")


# --- server -------------------------------------------------------------------------------------------------------------


def ask(client: SGLangClient, path: str) -> dict[str, Any]:
    """GET a JSON page of the server. Raises RolloutError."""
    try:
        reply = client.http.get(client.url + path, timeout=client.timeout)
        reply.raise_for_status()
        return dict(reply.json())
    except (requests.RequestException, ValueError, TypeError) as error:
        what = f"{client.url} does not answer {path} as SGLang does"
        raise RolloutError(f"{what}: {type(error).__name__}") from error


def generate(case: Case, prompts: Sequence[Sequence[int]], new: int, **sampling) -> list[dict]:
    """meta_info of SGLang's answers, with logprobs of prompt and answer; nothing ends an answer early unless asked to."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new, **sampling}
    ids = [list(p) for p in prompts]
    outputs = case.client.post(
        "/generate", input_ids=ids, sampling_params=sampling, return_logprob=True, logprob_start_len=0
    )
    answers = [output["meta_info"] for output in (outputs if isinstance(outputs, list) else [outputs])]
    if len(answers) != len(ids):
        raise RolloutError(f"asked for {len(ids)} answers, got {len(answers)}")
    for answer in answers:
        entries = answer["input_token_logprobs"][1:] + answer["output_token_logprobs"]
        if not all(entry[0] is not None and math.isfinite(entry[0]) for entry in entries):
            raise NotFinite("the server returns logprobs that are NaN, infinite or null")
    return answers


def score(case: Case, sequences: Sequence[Sequence[int]]) -> Scored:
    """The server's own logprobs of given sequences, from prefill."""
    import torch

    outputs = generate(case, sequences, 1)  # greedy: sampling from NaN would end the server
    rows = [[entry[0] for entry in output["input_token_logprobs"][1:]] for output in outputs]
    for row, tokens in zip(rows, sequences, strict=True):
        if len(row) != len(tokens) - 1:
            raise RolloutError(f"asked for logprobs of {len(tokens) - 1} tokens, got {len(row)}")
    return Scored([list(s) for s in sequences], torch.tensor(sum(rows, [])))


def server_settings(case: Case) -> Iterator[Finding]:
    """Versions and switches that decide about numbers and updates. Never /server_info as a whole: it holds keys."""
    info = case.info
    quantised, cache = info.get("quantization"), "off" if info.get("disable_radix_cache") else "on"
    yield passed(
        "server: version",
        f"sglang {info.get('version')}, {case.served_dtype}, quantisation {quantised or 'none'}, tp {info.get('tp_size')}, "
        f"radix cache {cache}",
    )
    both = (info.get(f"{phase}_attention_backend") for phase in ("prefill", "decode"))
    backends = sorted({str(own or info.get("attention_backend")) for own in both})
    judge = passed if set(backends) <= set(SINK_BACKENDS) else partial(unknown, symptom="backend")
    yield judge("server: attention backend", ", ".join(backends))
    if quantised:
        yield failed("server: takes updates", f"quantisation {quantised}", "quantised")


def same_model(case: Case) -> Finding:
    """Whether the served model is the checkpoint's: type, and config where its folder can be read here."""
    probe, model = "server: same model", ask(case.client, "/model_info")
    if model.get("model_type") not in (None, "gpt_oss"):
        return failed(probe, f"it serves a {model['model_type']}", "other model")
    served = Path(str(model.get("model_path")))
    if not (served / "config.json").is_file():
        return unknown(probe, f"it serves {served.name}, no folder of this machine", "model elsewhere")
    if read_architecture(read_config(served)) != read_architecture(case.config):
        return failed(probe, f"the config of {served.name} is not {case.report.folder.name}'s", "other model")
    return passed(probe, f"{served.name}, weights version {model.get('weight_version')}")


def prefill(case: Case) -> Finding:
    """The server as a scorer of whole sequences, against the reference."""
    return diagnose(case, "server: prefill logprobs", score(case, probe_sequences(case)), case.served_dtype)


def decode(case: Case) -> Finding:
    """Tokens that the server decodes past the window, scored once more by its own prefill."""
    probe, prompts = (
        "server: decode equals prefill",
        [s[: case.window - 1] for s in probe_sequences(case)[:1]],
    )
    prompts.append(prompts[0][:1])
    decoded, whole = [], []
    for prompt, output in zip(prompts, generate(case, prompts, case.window + 4), strict=True):
        entries = output["output_token_logprobs"]
        whole.append(prompt + [token for _, token, *_ in entries])
        decoded += [NAN] * (len(prompt) - 1) + [value for value, *_ in entries]
    scored = score(case, whole)
    gap = (scored.logprobs.new_tensor(decoded) - scored.logprobs).abs()
    worst, mean = gap.nan_to_num(0.0).max().item(), gap.nanmean().item()
    found = f"max {worst:.1e}, mean {mean:.1e} nats {_where(case, scored, gap)}"
    return passed(probe, found) if case.small(worst, mean) else failed(probe, found, "decode")


def served_temperature(case: Case) -> Finding:
    """Whether returned logprobs belong to the distribution that was sampled (logits / temperature)."""
    probe, t, prompt = "server: temperature", 0.5, probe_sequences(case)[0][:3]
    if case.reference is None:
        return _no_reference(case, probe)
    entries = generate(case, [prompt], 12, temperature=t)[0]["output_token_logprobs"]
    tokens, first = [prompt + [entry[1] for entry in entries]], len(prompt) - 1
    raw, scaled = (logprobs(case.reference, tokens, value)[first:] for value in (1.0, t))
    given = raw.new_tensor([entry[0] for entry in entries])
    to_scaled, to_raw = ((given - ours).abs().mean().item() for ours in (scaled, raw))
    found = f"sampled at {t}: mean gap {to_scaled:.1e} to logits / {t}, {to_raw:.1e} to unscaled ones"
    if to_scaled < BETTER * to_raw:
        return passed(probe, f"{found}: the trainer has to divide its logits by the temperature too")
    if to_raw < BETTER * to_scaled:
        return failed(probe, found, "unscaled")
    return unknown(probe, found, "neither")


def served_stops(case: Case) -> Finding:
    """What ends an answer by the server's own defaults, told by forcing one token with a logit bias."""
    probe, tokenizer = "server: stop tokens", _tokenizer(case)
    ids = {name: tokenizer.token_to_id(name) for name in ("<|end|>", *STOP_TOKENS)}
    ends = [name for name, token in ids.items() if token is not None and _ends_answer(case, token)]
    found = f"by default answers end at {', '.join(ends) or 'nothing'}"
    if "<|end|>" in ends:
        return failed(probe, found, "stops at end")
    return passed(probe, found) if "<|return|>" in ends else failed(probe, found, "no return")


def _ends_answer(case: Case, token: int) -> bool:
    output = generate(case, [[token]], 3, ignore_eos=False, logit_bias={str(token): 1e4})[0]
    return len(output["output_token_logprobs"]) < 3


# --- weight sync --------------------------------------------------------------------------------------------------------


def sync(case: Case) -> Iterator[Finding]:
    """Perturb one tensor of each kind, send it, ask logprobs; put the checkpoint's tensors back and verify that."""
    probe = "server: updates arrive"
    if symptom := _no_sync(case):
        yield unknown(probe, "not tried", symptom)
        return
    names = [name for name in case.report.tensors if ".layers." not in name or ".layers.0." in name]
    sequences, outcome = probe_sequences(case)[-1:], {}
    before, old = score(case, sequences).logprobs, logprobs(case.reference, sequences)
    try:
        for name in names:
            got, new = _update(case, name, sequences)
            outcome[name] = _arrival(case, got, before, old, new)
    finally:
        restored = _put_back(case, names, sequences, before)
        if restored.verdict == FAIL:  # logged as well: after an interruption there is no table
            log.error("%s: %s; %s", restored.probe, restored.found, restored.cure)
    yield from (_arrivals(probe, outcome), restored)


def _no_sync(case: Case) -> str:
    """Why the server's weights are left alone: a key of ADVICE, "" if nothing speaks against it."""
    if not case.write:
        return "needs --write"
    if case.report.quantised or case.info.get("quantization"):
        return "quantised"
    if (case.info.get("tp_size") or 1) > 1:
        return "tensor parallel"
    if case.reference is None:
        return "too large"
    served = score(case, probe_sequences(case))
    gap = (served.logprobs - logprobs(case.reference, served.sequences)).abs()
    return "" if case.small(gap.max().item(), gap.mean().item()) else "nothing to restore"


def _update(case: Case, name: str, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Send one perturbed tensor, then its original; logprobs in between: the server's, and what they should be."""
    import torch

    original = read_rows(case.report.tensors[name])
    noise = torch.randn(original.shape, generator=torch.Generator().manual_seed(0))
    sent = (original.float() + noise * max(original.float().std().item(), 0.2)).to(original.dtype)
    with _replaced(name, sent.float()).plant(case.reference):
        new = logprobs(case.reference, sequences)
    send_tensors(case.client, {name: sent}, "doctor")
    got = score(case, sequences).logprobs
    send_tensors(case.client, {name: original}, "doctor")
    return got, new


def _replaced(name: str, value: Tensor) -> Fault:
    return Fault(name, "", "", "", "", lambda model: [(model.get_parameter(name), "data", value)])


def _arrival(case: Case, got: Tensor, before: Tensor, old: Tensor, new: Tensor) -> str:
    """got, before: the server's logprobs with and without the update; new, old: the reference's."""
    effect, noise = (new - old).abs().mean().item(), (before - old).abs().mean().item()
    if effect <= (10 * case.served_tolerance if case.served_tolerance else 3 * noise):
        return "too small to see"
    if (got - before).abs().mean() < 0.1 * effect:
        return "dropped"
    gap = (got - new).abs()
    right = gap.max() <= case.served_tolerance if case.served_tolerance else gap.mean() < BETTER * effect
    return "arrived" if right else "changed on the way"


def _arrivals(probe: str, outcome: Mapping[str, str]) -> Finding:
    words = dict.fromkeys(outcome.values())
    kinds = {word: [n.rpartition("layers.0.")[2] for n, o in outcome.items() if o == word] for word in words}
    arrived = len(kinds.pop("arrived", ()))
    found = f"{arrived} of {len(outcome)} kinds of tensor change the logprobs as they should"
    found += "".join(f"; {word}: {', '.join(names)}" for word, names in kinds.items())
    if kinds.keys() - {"too small to see"}:
        return failed(probe, found, "dropped")
    return unknown(probe, found, "too small") if kinds else passed(probe, found)


def _put_back(case: Case, names: Sequence[str], sequences: list[list[int]], before: Tensor) -> Finding:
    """Send the checkpoint's own tensors and ask once more. A failure here is the loudest one."""
    probe = "server: weights put back"
    try:
        for name in names:
            send_tensors(case.client, {name: read_rows(case.report.tensors[name])}, "doctor")
        gap = (score(case, sequences).logprobs - before).abs()
    except RolloutError as error:
        return failed(probe, str(error), "not restored")
    found = f"the logprobs differ from those before by {gap.max().item():.1e} at most"
    sound = case.small(gap.max().item(), gap.mean().item())
    return passed(probe, found) if sound else failed(probe, found, "not restored")


SERVER_PROBES: tuple[Probe, ...] = (
    server_settings, same_model, prefill, decode, served_temperature, served_stops, sync,
)  # fmt: skip


# --- trainer ------------------------------------------------------------------------------------------------------------


def read_trainer_file(path: Path, vocab_size: int) -> Scored:
    """JSON lines {"tokens": [...], "logprobs": [...]}, both of one length.

    logprobs[t] is log p(tokens[t] | tokens before it) in nats; null where a token does not count, and at t = 0.
    Raises BadUsage naming the line.
    """
    import torch

    sequences, parts = [], []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if line.strip():
            tokens, values = _trainer_line(line, f"{path.name}, line {number}", vocab_size)
            sequences.append(tokens)
            parts += [float("nan") if v is None else float(v) for v in values[1:]]
    given = torch.tensor(parts)
    if not given.isfinite().any():
        raise BadUsage(f"{path.name} holds no logprob: each line needs tokens and their logprobs")
    return Scored(sequences, given)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        raise BadUsage(f"--trainer-logprobs: there is no file {path}") from None
    except IsADirectoryError:
        raise BadUsage(f"--trainer-logprobs: {path} is a folder: name the file in it") from None
    except OSError as error:
        raise BadUsage(f"--trainer-logprobs: {path} cannot be read ({error.strerror})") from error


def _trainer_line(line: str, where: str, vocab_size: int) -> tuple[list[int], list]:
    try:
        record = json.loads(line)
        tokens, values = list(record["tokens"]), list(record["logprobs"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadUsage(
            f'{where} is not {{"tokens": [...], "logprobs": [...]}}: {type(error).__name__} {error}'
        ) from error
    if len(tokens) != len(values) or len(tokens) < 2:
        raise BadUsage(
            f"{where}: {len(tokens)} tokens and {len(values)} logprobs; it needs as many logprobs as tokens (null for the "
            "first) and two tokens at least"
        )
    if any(type(t) is not int or not 0 <= t < vocab_size for t in tokens):
        raise BadUsage(
            f"{where}: tokens have to be whole numbers from 0 to {vocab_size - 1}, the model's vocabulary"
        )
    if values[0] is not None and type(values[0]) not in (int, float):
        raise BadUsage(
            f"{where}: logprobs[0] is {values[0]!r}; it does not count and has to be null or a number"
        )
    for t, value in enumerate(values[1:], 1):
        if value is not None and (type(value) not in (int, float) or not -1e30 < value <= 1e-4):
            raise BadUsage(
                f"{where}: logprobs[{t}] is {value!r}; a logprob is a finite number, zero at most (null if masked)"
            )
    return tokens, values


def against_reference(case: Case) -> Finding:
    """The trainer's logprobs, judged as the server's are."""
    return diagnose(case, "trainer: logprobs", case.trainer, case.dtype)


def against_server(case: Case) -> Finding:
    """The gap that importance weights have to bridge: the trainer's logprobs against the server's on the same tokens."""
    from helpers.kl import kl_estimate

    probe, served = "trainer: gap to server", score(case, case.trainer.sequences).logprobs
    counts = case.trainer.logprobs.isfinite()
    gap = case.trainer.logprobs - served
    kl = kl_estimate(served[counts], case.trainer.logprobs[counts]).mean().item()
    worst, mean = gap[counts].abs().max().item(), gap[counts].abs().mean().item()
    found = f"max {worst:.1e}, mean {mean:.1e}, k3 KL {kl:.1e} nats {_where(case, case.trainer, gap)}"
    if case.small(worst, mean):
        return passed(probe, found)
    return failed(probe, found, "trainer gap") if case.served_tolerance else unknown(probe, found, "16 bits")


# --- examination --------------------------------------------------------------------------------------------------------


def examine(case: Case) -> Iterator[Finding]:
    """All findings, one after the other: checkpoint, server, trainer."""
    versions = {name: version for name, version in installed_versions().items() if version != "-"}
    yield passed("machine: versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    yield from examine_checkpoint(case)
    if case.client is not None:
        yield from examine_server(case)
    if case.trainer is not None:
        yield from examine_trainer(case)


def examine_checkpoint(case: Case, probes: Sequence[Probe] = CHECKPOINT_PROBES) -> Iterator[Finding]:
    """What the checkpoint's files show."""
    count, files = len(case.report.tensors), len(case.report.shards)
    yield passed("checkpoint: files", f"{count} tensors in {files} file(s), whole, of the config's shapes")
    yield from (finding for probe in probes for finding in _guarded("checkpoint", probe, case))


def examine_server(case: Case) -> Iterator[Finding]:
    """What case.client's server shows; fills case.info."""
    try:
        info = ask(case.client, "/server_info")
        if not isinstance(info.get("version"), str):
            raise RolloutError(f"{case.client.url} is not an SGLang server: its /server_info has no version")
    except RolloutError as error:
        yield failed("server: reachable", str(error), "unreachable")
        return
    case.info = info
    yield passed("server: reachable", case.client.url)
    for probe in SERVER_PROBES:
        findings = list(_guarded("server", probe, case))
        yield from findings
        if any(finding.cause == ADVICE["not finite served"][0] for finding in findings):
            return  # the later probes would fail as well, and sampling from NaN can end the server


def examine_trainer(case: Case) -> Iterator[Finding]:
    """What case.trainer's logprobs show, against the reference and against the server if that was examined."""
    yield from _guarded("trainer", against_reference, case)
    if case.client is not None and case.info:
        yield from _guarded("trainer", against_server, case)


def _guarded(area: str, probe: Probe, case: Case) -> Iterator[Finding]:
    """The probe's findings; an input that it cannot read becomes "cannot tell" and does not end the examination."""
    name = f"{area}: {probe.__name__.replace('_', ' ')}"
    try:
        found = probe(case)
        yield from [found] if isinstance(found, Finding) else found
    except NotFinite as error:
        yield failed(name, str(error), "not finite served")
    except Unusable as error:
        yield Finding(name, error.verdict, str(error), *ADVICE[error.symptom])
    except Exception as error:  # tokenizers raises plain Exception
        text = " ".join(str(error).split())[:300]
        yield unknown(name, f"{type(error).__name__}: {text}", "could not run")


def table(findings: Sequence[Finding]) -> str:
    """Aligned text, WIDTH columns: probe, verdict, what was found; cause and cure below what did not pass."""
    left, middle = max(len(f.probe) for f in findings) + 2, len(UNKNOWN) + 2
    lines = []
    for f in findings:
        texts = [f.found]
        if f.verdict != PASS:
            texts += [
                f"{'cause' if f.verdict == FAIL else 'why'}: {f.cause}",
                f"{'cure' if f.verdict == FAIL else 'next'}: {f.cure}",
            ]
        body = [part for text in texts for part in textwrap.wrap(text, WIDTH - left - middle)] or [""]
        lines.append(f"{f.probe:<{left}}{f.verdict:<{middle}}{body[0]}")
        lines += [" " * (left + middle) + part for part in body[1:]]
    count = {v: sum(f.verdict == v for f in findings) for v in (PASS, FAIL, UNKNOWN)}
    return "\n".join([*lines, "", ", ".join(f"{n} {verdict}" for verdict, n in count.items())])


class Parser(OneLineParser):
    """argparse that raises BadUsage, so that wrong usage is one line."""

    def error(self, message: str):
        raise BadUsage(one_line(message))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m helpers.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="Hugging Face folder of a gpt-oss")
    add("--server", metavar="URL", help="a running SGLang server, such as http://127.0.0.1:30000")
    add("--trainer-logprobs", type=Path, metavar="FILE",
        help='JSON lines {"tokens": [...], "logprobs": [...]}; logprobs[t] = log p(tokens[t] | before), null if masked')  # fmt: skip
    add(
        "--older", type=Path, metavar="DIR", help="an earlier plain checkpoint: are parts of it still in use?"
    )
    add(
        "--write",
        action="store_true",
        help="allow to change the server's weights for some seconds and put them back",
    )
    add("--tolerance", type=float, metavar="NATS",
        help=f"largest sound gap a token (default: {FP32_TOLERANCE:g} in float32; otherwise the best fit decides)")  # fmt: skip
    add(
        "--max-reference-gb",
        type=float,
        default=16.0,
        metavar="GB",
        help="size of the float32 reference (default 16)",
    )
    add("--json", type=Path, metavar="FILE", help="write the findings there too")
    return parser


def _case(args: argparse.Namespace, report: CheckpointReport) -> Case:
    client = SGLangClient(args.server.rstrip("/"), timeout=300) if args.server else None
    trainer = None
    if args.trainer_logprobs:
        trainer = read_trainer_file(args.trainer_logprobs, report.config["vocab_size"])
    return Case(report, client, trainer, args.older, args.write, args.tolerance, args.max_reference_gb)


def _check_usage(args: argparse.Namespace) -> None:
    """Raises BadUsage for what argparse cannot see."""
    if args.server and not _is_url(args.server):
        raise BadUsage(
            f"--server {args.server!r} is no URL with a port up to 65535; it looks like http://127.0.0.1:30000"
        )
    if args.write and not args.server:
        raise BadUsage("--write changes a server's weights and needs --server URL")
    for name, value in (("--tolerance", args.tolerance), ("--max-reference-gb", args.max_reference_gb)):
        if value is not None and not 0 < value < float("inf"):
            raise BadUsage(f"{name} {value} has to be a positive number")
    for name, folder in (("--checkpoint", args.checkpoint), ("--older", args.older)):
        # os.path rather than Path: False, not an error, where one may not look
        if folder is not None and os.path.isfile(folder):
            raise BadUsage(f"{name}: {folder} is a file: name its folder")
        if folder is not None and not os.path.isdir(folder):
            raise BadUsage(f"{name}: there is no folder {folder}")
    if args.json:
        check_output("--json", args.json)


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # an open bracket, or a port that is no number up to 65535
        return False


def check_output(option: str, file: Path) -> None:
    """Raises BadUsage where the option's file could not be written: better now than after the work."""
    if not os.path.isdir(file.parent):
        raise BadUsage(f"{option}: there is no folder {file.parent}")
    if os.path.isdir(file):
        raise BadUsage(f"{option}: {file} is a folder: name a file in it")
    new = not os.path.lexists(file)
    try:
        file.open("a").close()
    except OSError as error:
        raise BadUsage(f"{option}: {file} cannot be written ({error.strerror})") from error
    if new:
        file.unlink()


def _check_older(older: Path, config: Mapping[str, Any]) -> None:
    """Raises BadUsage unless parts of `older` can stand in this model."""
    try:
        report = check_checkpoint(older)
    except CheckpointError as error:
        raise BadUsage(f"--older: {error}") from error
    if report.quantised or read_architecture(report.config) != read_architecture(config):
        raise BadUsage(f"--older: {older} is quantised or of another shape than the checkpoint")


def _findings(args: argparse.Namespace) -> list[Finding]:
    try:
        report = check_checkpoint(args.checkpoint)
    except CheckpointError as error:
        return [failed("checkpoint: files", str(error), _symptom(error))]
    if args.older:
        _check_older(args.older, report.config)
    return list(examine(_case(args, report)))


def _symptom(error: CheckpointError) -> str:
    if isinstance(error, NotGptOss):
        return "not gpt-oss"
    return "unreadable" if isinstance(error.__cause__, OSError) else "damaged"


def _undecided(args: argparse.Namespace, findings: Sequence[Finding]) -> list[str]:
    """What was given (server, trainer) and has no comparison of numbers that passed or failed."""
    decided = {f.probe for f in findings if f.verdict != UNKNOWN}
    given = {"server": args.server, "trainer": args.trainer_logprobs}
    return [area for area, value in given.items() if value and not NUMBERS[area] & decided]


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = _parser().parse_args(argv)
        _check_usage(args)
        findings = _findings(args)
    except BadUsage as error:
        print(f"doctor: {error} (--help shows the options)", file=sys.stderr)
        return 2
    print(table(findings))
    try:
        if args.json:
            args.json.write_text(json.dumps([asdict(f) for f in findings], indent=1) + "\n")
    except OSError as error:
        print(f"doctor: --json: {args.json} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    if any(f.verdict == FAIL for f in findings):
        return 1
    if undecided := _undecided(args, findings):
        print(f"doctor: nothing was compared to a verdict: {' and '.join(undecided)}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
