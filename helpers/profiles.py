"""Profiles: one frozen record that says everything a run depends on, from model size to process environment.

`load_profile("cpu")` is the only way that settings enter a notebook. This module imports neither torch nor any engine, so
that the runner and the kernel can read settings in milliseconds.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.messages import one_line

PROJECT_ROOT = Path(__file__).resolve().parent.parent
SHARED_VARIABLE = "GRPO_SHARED_SERVER"  # file with the address of the SGLang server that a series shares
RUNS_VARIABLE = "GRPO_RUNS"  # another place for results than <project>/runs
KV_SAVER_VARIABLE = "GRPO_KV_SAVER"  # "1": helpers/sglang_saver.py hooks this server
ADDRESS_VARIABLE = "RAY_ADDRESS"  # Ray's own: the cluster that a run goes to; unset: a head of its own
CLUSTER_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's own: "0" keeps it on loopback
DEVICE_VARIABLE = "GRPO_DEVICE"  # what a process was told to run on: "cpu" or "cuda"; never guessed


@dataclass(frozen=True)
class ModelSettings:
    """The gpt-oss architecture; names are those of transformers' GptOssConfig.

    source: "generated" (random weights of this shape), "folder" (path) or "hub" (path is the repository's name).
    """

    source: str = "generated"
    path: str = ""
    vocab_size: int = 64
    hidden_size: int = 64
    intermediate_size: int = 128  # != hidden_size: a wrongly transposed down_proj cannot hide
    num_hidden_layers: int = 2  # one sliding, one full attention layer
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    sliding_window: int = 16
    max_position_embeddings: int = 4096
    initializer_range: float = 0.1
    dtype: str = "float32"  # of weights and arithmetic in both engines


@dataclass(frozen=True)
class BatchSettings:
    """One GRPO step trains on `prompts` x `group_size` episodes."""

    prompts: int = 32
    group_size: int = 8

    @property
    def episodes(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True)
class SamplingSettings:
    """How the rollout engine samples. Temperature also scales the trainer's logits, so that both speak of one policy."""

    temperature: float = 1.0
    max_new_tokens: int = 24
    # each sampled answer has a seed of its own, a function of the run's seed, the draw and its place, so that a run can be
    # repeated and resumed token by token. On a GPU that takes --enable-deterministic-inference, which is slower
    seeded: bool = False


@dataclass(frozen=True)
class AlgorithmSettings:
    """From rewards to a loss. Defaults: GRPO advantages (arXiv 2402.03300), DAPO's token mean and clips (2503.14476).

    helpers/recipes.py names the papers' combinations and refuses those that contradict themselves.
    """

    recipe: str = "default"  # the named recipe that this started from; pick one with algorithm="gspo"
    # --- rewards and groups
    advantage: str = "std"  # std | mean | leave_one_out
    extra_draws: int = 0  # dynamic sampling: at most so many more draws a step, to replace silent groups
    overlong_buffer: float = 0.0  # last share of the token budget that costs reward; 0: none
    overlong_scale: float = 1.0  # reward that an answer at the budget's end loses
    # --- the surrogate
    loss: str = "clipped"  # clipped | cispo (2506.13585)
    ratio: str = "token"  # token | sequence (GSPO, 2507.18071)
    normaliser: str = "token"  # token | sequence | constant (Dr. GRPO, 2503.20783)
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    # --- the old policy of the ratio
    mini_batches: int = 1  # optimizer steps that a step's answers are spread over
    # rollout: its logprobs, so that the ratio holds the mismatch too | trainer: a pass of its own before the first
    # update | current: the update's own, detached (on-policy: ratio 1, no pass; right with one mini-batch only)
    old_logprobs: str = "rollout"
    # --- trainer-rollout mismatch (helpers/corrections.py): w = pi_old / pi_rollout
    correction: str = "none"  # none | tis | mis
    correction_level: str = "token"  # token | sequence | geometric
    correction_cap: float = 2.0  # tis: largest weight; mis: largest ratio that is kept
    correction_floor: float = 0.5  # mis: smallest ratio that is kept
    trust_region: str = "none"  # none | token | any_token | sequence_kl (2512.23075)
    trust_region_bound: float = 0.0  # nats; what lies outside is dropped
    routing_replay: bool = False  # R3 (2510.11370): the trainer's tokens take the rollout's experts
    # --- KL(policy || start checkpoint), added to the loss
    kl_coefficient: float = 0.0
    kl_kind: str = "k3"  # k2 | k3 | k1+ | k3+ (+: that value with k2's gradient)


@dataclass(frozen=True)
class TrainerSettings:
    """Megatron: parallel layout and optimizer."""

    ranks: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1  # more is refused: each rank would add the expert's bias (Megatron-LM 2383)
    distributed_optimizer: bool = False  # Adam's state spread over the data-parallel ranks (ZeRO-1)
    learning_rate: float = 5e-4
    warmup_steps: int = 5
    decay_steps: int | None = (
        None  # None: constant after warm-up; else cosine down to a tenth over so many steps
    )
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    micro_batch: int = 256  # episodes a forward-backward pass and rank
    seq_length: int | None = None  # None: the step's longest episode, rounded up to 8
    keep_saves: int = 2  # newest checkpoints of a run that are kept
    freeze_experts: bool = False


@dataclass(frozen=True)
class WarmStartSettings:
    """Supervised steps that give GRPO a policy with something to choose from (facts: the median task)."""

    demonstrations: int = 4000
    lazy_share: float = 0.65  # answers at once with a random digit of the question
    slip_rate: float = 0.2  # chance of each further slip in a worked demonstration
    steps: int = 180
    batch: int = 64
    learning_rate: float = 5e-3


@dataclass(frozen=True)
class RolloutSettings:
    """SGLang servers."""

    engines: int = 1
    shared: bool = (
        True  # one server for all notebooks of a series; on a GPU each notebook starts and stops its own
    )
    max_total_tokens: int | None = (
        16384  # KV cache in tokens; SGLang on a CPU takes half the memory when unset
    )
    max_running_requests: int = 256
    start_timeout: float = 300.0  # seconds
    request_timeout: float = 180.0  # seconds
    max_staleness: int = 0  # steps that answers are sampled ahead of their update (helpers/async_rollout.py); 0: none
    at_sync: str = "finish"  # answers under way at a weight sync: finish (waited for) | continue | drop (sampled again)
    mem_fraction: float | None = None  # GPU: SGLang's mem_fraction_static
    memory_saver: bool = False  # GPU: weights, cache and graphs can be released and come back (torch_memory_saver)
    # what puts gpt-oss's KV cache under it: "hook" (helpers/sglang_saver.py), "plain" (one pool for all layers, no windows),
    # or "stock" (nothing: SGLang 0.5.17 then keeps the cache when it is told to release it)
    kv_saver: str = "hook"
    # graphs too; measured on an H200: 0.05 GB more is given back
    saver_graphs: bool = False
    # Measured on 2 cores (tests/bench/recorded/rollout_flags.csv): a rollout of 256 short answers takes 0.4 to 0.8 s
    # without the prefix tree and 0.6 to 1.3 s with it. Overlap is made for a GPU beside the CPU; off or on is within noise
    # here. An idle scheduler polls unless told to sleep, and would take a core from the trainer.
    # That the server can return routed experts costs nothing until somebody asks (256 answers: 0.31 s with and without,
    # 0.36 s asked), so that notebook 08 finds its server among the shared ones.
    server_arguments: tuple[str, ...] = (
        "--disable-radix-cache",
        "--disable-overlap-schedule",
        "--sleep-on-idle",
        "--enable-return-routed-experts",
    )


@dataclass(frozen=True)
class ClusterSettings:
    """Ray, started on this machine only and bound to loopback; or the cluster that RAY_ADDRESS names (environment/clusters.md).

    num_cpus, object_store_mib and dashboard are those of a head of our own.
    """

    num_cpus: int = 2
    strategy: str = "PACK"  # Ray's placement of the bundles: PACK | SPREAD | STRICT_PACK | STRICT_SPREAD
    placement: str = "colocated"  # GPUs: trainer rank i and engine i share a card | split: each has its own
    engines_per_card: int = 1  # colocated: so many engines beside a trainer rank; lower rollout.mem_fraction with it
    object_store_mib: int = 80
    call_timeout: float = 900.0  # seconds that all trainer ranks may take for one call, an update or a checkpoint
    dashboard: bool = True


@dataclass(frozen=True)
class Profile:
    """All settings of a run. `load_profile` makes one; nothing changes it afterwards."""

    name: str
    device: str  # "cpu" or "cuda": chosen here and nowhere else
    seed: int = 0
    steps: int = 100
    task: str = "median"
    heldout: int = 256  # questions in the held-out set
    model: ModelSettings = field(default_factory=ModelSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    @property
    def distributed_backend(self) -> str:
        """torch.distributed's backend for the trainer ranks."""
        return {"cpu": "gloo", "cuda": "nccl"}[self.device]

    @property
    def runs(self) -> Path:
        """Folder of all results of this profile."""
        root = os.environ.get(RUNS_VARIABLE)
        return (Path(root) if root else PROJECT_ROOT / "runs") / self.name

    def run_folder(self, notebook: str) -> Path:
        """runs/<profile>/<notebook>, made if missing."""
        folder = self.runs / notebook
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checkpoint(self, name: str) -> Path:
        """runs/<profile>/checkpoints/<name>-seed<seed>: a Hugging Face folder. Not made here."""
        return self.runs / "checkpoints" / f"{name}-seed{self.seed}"

    def process_environment(self, role: str) -> dict[str, str]:
        """The environment variables that a process of this run gets. role: "kernel", "trainer" or "server".

        This is the one place where the CPU back end is handed on; no process looks at the hardware to decide.
        """
        if role not in ("kernel", "trainer", "server"):
            raise ValueError(f"unknown process role {role!r}: use kernel, trainer or server")
        env = {DEVICE_VARIABLE: self.device, **_COMMON_ENVIRONMENT}
        if os.environ.get(ADDRESS_VARIABLE):
            env[CLUSTER_SWITCH] = "1"
        if role == "server":
            env |= _SERVER_ENVIRONMENT
            if self.rollout.memory_saver:
                env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(self.rollout.saver_graphs))
                env[KV_SAVER_VARIABLE] = "1" if self.rollout.kv_saver == "hook" else "0"
        if self.device == "cpu":
            env |= _CPU_ENVIRONMENT
            if role == "server":
                env |= _CPU_SERVER_ENVIRONMENT
        return env


_COMMON_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",  # no request to another host
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray must not hide GPUs by itself (verl 589, NeMo-RL 2252)
    # Ray replaces a loopback address by this machine's outward one, at which our head does not listen. Ray's switch for
    # systems without clusters keeps it: everything stays on loopback (ray 2.60, _private/services.py get_node_ip_address)
    CLUSTER_SWITCH: "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # a raylet ends itself when its agents, Python processes, have not registered within 30 s: on a busy machine they have not
    "RAY_agent_register_timeout_ms": "300000",
}
_CPU_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # trainer ranks of one machine; also where the host's own name does not resolve
    "CUDA_VISIBLE_DEVICES": "",  # a GPU that happens to be there stays out of a CPU run
    "OMP_NUM_THREADS": "1",  # two engines share two cores: more threads stall (13 s a step was seen)
    "TORCHDYNAMO_DISABLE": "1",  # first steps took up to 34 s with the compiler on
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",  # the tiny model is generated; a hub look-up would only hang
}
# SGLang asks the network for harmony's vocabulary at each start of a gpt-oss server when openai-harmony is installed, for an
# endpoint that this course does not use. A folder without that file makes it give up at once.
_SERVER_ENVIRONMENT = {"TIKTOKEN_ENCODINGS_BASE": str(PROJECT_ROOT / "helpers")}
_CPU_SERVER_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # the stub of the CUDA-only sgl_kernel is seen by CPU servers alone: on a GPU it would shadow the real kernels
    "PYTHONPATH": str(PROJECT_ROOT / "helpers" / "cpu" / "stubs"),
}


def _profiles() -> dict[str, Profile]:
    harmony_20b = ModelSettings(
        source="generated", vocab_size=201_088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, max_position_embeddings=131_072, initializer_range=0.02, dtype="bfloat16",
    )  # fmt: skip
    few_hundred_million = ModelSettings(
        vocab_size=64, hidden_size=768, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, num_local_experts=16, num_experts_per_tok=4, sliding_window=128,
        max_position_embeddings=4096, initializer_range=0.02, dtype="bfloat16",
    )  # fmt: skip
    gpu_rollout = RolloutSettings(
        shared=False, max_total_tokens=131_072, max_running_requests=64, start_timeout=900.0, mem_fraction=0.4,
        # capturing graphs for 58 prefill sizes took over two minutes of a first start (H200, 2026-11-30)
        server_arguments=("--disable-prefill-cuda-graph",),
    )  # fmt: skip
    # a small model leaves room for the server beside every trainer, and its start compiles and captures for minutes
    # Its decode steps are bound by the scheduler's Python (a tenth of a step is kernels), and the prefix tree is part of
    # that: 512 short answers took 1.06 to 1.15 s without it and 1.4 to 1.5 s with it (H200, 2026-12-01)
    beside = dataclasses.replace(
        gpu_rollout, shared=True, max_running_requests=512,
        server_arguments=(*gpu_rollout.server_arguments, "--disable-radix-cache"),
    )  # fmt: skip
    # trainer and server of 20 billion parameters do not fit one card beside each other while the trainer works
    in_turns = dataclasses.replace(gpu_rollout, memory_saver=True, mem_fraction=0.45)
    one_gpu = dict(
        device="cuda", rollout=gpu_rollout, cluster=ClusterSettings(num_cpus=8, object_store_mib=512)
    )
    long_answers = SamplingSettings(max_new_tokens=1024)
    return {
        "cpu": Profile(name="cpu", device="cpu", sampling=SamplingSettings(seeded=True)),
        # learning rates: those of profile cpu, divided by the ratio of the widths (768 / 64)
        "gpu": Profile(
            name="gpu", model=few_hundred_million, task="median-15", heldout=512,
            batch=BatchSettings(prompts=64, group_size=8), sampling=SamplingSettings(max_new_tokens=40),
            trainer=TrainerSettings(learning_rate=4e-5, micro_batch=512),
            warm_start=WarmStartSettings(steps=250, learning_rate=4e-4, demonstrations=20_000),
            **{**one_gpu, "rollout": beside},
        ),
        # random weights until model.source says where the real ones are: then task and warm_start are for you to choose
        "gpu-20b": Profile(
            name="gpu-20b", model=harmony_20b, task="even-tokens", heldout=32, sampling=long_answers,
            batch=BatchSettings(prompts=8, group_size=8), warm_start=WarmStartSettings(steps=0),
            trainer=TrainerSettings(freeze_experts=True, micro_batch=4, learning_rate=1e-5),
            **{**one_gpu, "rollout": in_turns},
        ),
        "cluster": Profile(
            name="cluster", device="cuda", model=harmony_20b, sampling=long_answers,
            task="even-tokens", warm_start=WarmStartSettings(steps=0),
            batch=BatchSettings(prompts=64, group_size=4), rollout=in_turns,
            trainer=TrainerSettings(ranks=8, tensor_parallel=8, expert_parallel=8, micro_batch=4, learning_rate=1e-6),
            cluster=ClusterSettings(num_cpus=32, object_store_mib=2048),
        ),
        # verl's pull request 4394, flag by flag in notebooks/cards/verl_4394.md
        "verl-4394": Profile(
            name="verl-4394", device="cuda", model=harmony_20b, sampling=long_answers, steps=1740,
            task="even-tokens", warm_start=WarmStartSettings(steps=0), batch=BatchSettings(prompts=64, group_size=4),
            algorithm=AlgorithmSettings(
                recipe="verl_gpt_oss", dual_clip=10.0, kl_coefficient=0.001, mini_batches=2, old_logprobs="trainer"
            ),
            trainer=TrainerSettings(
                ranks=8, tensor_parallel=8, expert_parallel=8, learning_rate=1e-6, warmup_steps=3, beta2=0.999,
                weight_decay=0.1, micro_batch=2, seq_length=1152,
            ),
            # a server of ours has one card, so a card holds a whole model instead of an eighth: 0.75 of 80 GB, not 0.3
            rollout=dataclasses.replace(
                in_turns, engines=8, mem_fraction=0.75, server_arguments=(
                    "--attention-backend", "triton",
                    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
                ),
            ),
            cluster=ClusterSettings(num_cpus=32, object_store_mib=2048),
        ),
    }  # fmt: skip


PROFILES = tuple(_profiles())


def load_profile(name: str, **changes) -> Profile:
    """The profile `name` with top-level or dotted changes, e.g. load_profile("cpu", seed=1, **{"batch.prompts": 8}).

    algorithm may be the name of a recipe (helpers/recipes.py), of which parts may be changed:
    load_profile("cpu", algorithm="dapo", **{"algorithm.clip_high": 0.3}). Whole settings are replaced before their
    parts, in whatever order they are named.
    Raises ValueError for an unknown profile or setting (with the nearest known name), TypeError for a wrong type.
    """
    from helpers.recipes import named_recipe  # it builds on AlgorithmSettings

    known = _profiles()
    if not isinstance(name, str):
        raise TypeError(f"a profile's name is text, not {type(name).__name__}; profiles: {', '.join(known)}")
    if name not in known:
        raise ValueError(
            f"unknown profile {name!r:.80}{nearest_name(name, known)}; profiles: {', '.join(known)}"
        )
    profile = known[name]
    if isinstance(changes.get("algorithm"), str):
        changes["algorithm"] = named_recipe(changes["algorithm"])
    for key in sorted(changes, key=lambda key: key.count(".")):
        profile = _replace(profile, key, changes[key])
    _check(profile)
    return profile


def nearest_name(word: str, known: Iterable[str]) -> str:
    """" (did you mean 'x'?)" for a message, or "" where none of `known` is near."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _replace(record, dotted: str, value):
    """A copy of the nested frozen record with one field changed; the type must be that of the present value."""
    head, _, rest = dotted.partition(".")
    names = [f.name for f in dataclasses.fields(record)]
    if head not in names:
        raise ValueError(
            f"unknown setting {dotted!r:.80} of {type(record).__name__}{nearest_name(head, names)}; it has: {', '.join(names)}"
        )
    present = getattr(record, head)
    if rest:
        if not dataclasses.is_dataclass(present):
            raise ValueError(f"setting {head!r} has no parts, so {dotted!r:.80} names nothing")
        return dataclasses.replace(record, **{head: _replace(present, rest, value)})
    return dataclasses.replace(record, **{head: _checked(dotted, _kinds(record, head), present, value)})


def _kinds(record, name: str) -> tuple[type, ...]:
    """The types that a setting's annotation allows; NoneType among them where None means something."""
    hint = typing.get_type_hints(type(record))[name]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


def _checked(name: str, kinds: tuple[type, ...], present, value):
    if float in kinds and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) not in kinds or (tuple in kinds and not all(type(part) is str for part in value)):
        wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise TypeError(
            one_line(f"setting {name!r} is a {wanted} (now {present!r:.80}), not {value!r:.80} ({type(value).__name__})", 400)
        )
    if isinstance(value, float) and not math.isfinite(value) or isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"setting {name!r} is {value!r:.30}: give a finite number that 64 bits hold")
    for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
        if not text.isprintable() or len(text) > LONGEST_TEXT:
            raise ValueError(
                f"setting {name!r} holds {text!r:.60}: give printable text of at most {LONGEST_TEXT} characters"
            )
    return value


# settings that count something, and the least that makes sense
_AT_LEAST = {
    "steps": 1, "heldout": 1, "seed": 0, "batch.prompts": 1, "batch.group_size": 1, "sampling.max_new_tokens": 1,
    "sampling.temperature": 0, "trainer.ranks": 1, "trainer.tensor_parallel": 1, "trainer.pipeline_parallel": 1,
    "trainer.expert_parallel": 1, "trainer.expert_tensor_parallel": 1, "trainer.micro_batch": 1, "trainer.seq_length": 1,
    "trainer.keep_saves": 1, "trainer.learning_rate": 0, "trainer.warmup_steps": 0, "trainer.decay_steps": 1,
    "trainer.weight_decay": 0, "warm_start.steps": 0, "warm_start.batch": 1, "warm_start.demonstrations": 1,
    "warm_start.learning_rate": 0, "rollout.engines": 1, "rollout.max_running_requests": 1, "rollout.max_total_tokens": 1,
    "rollout.start_timeout": 0, "rollout.request_timeout": 0, "rollout.max_staleness": 0, "cluster.num_cpus": 1, "cluster.object_store_mib": 1,
    "cluster.engines_per_card": 1,
}  # fmt: skip
PLACEMENTS = ("colocated", "split")
AT_SYNC = ("finish", "continue", "drop")
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")  # of a placement group: Ray's names
LONGEST_TEXT = 4096  # characters: of a path
# what a server of ours must not be told: to listen elsewhere than on loopback, to run a checkpoint's own code, or a secret in
# the process list. Also their beginnings from four characters, which argparse takes for the whole
_NO_SERVER_ARGUMENTS = ("--host", "--trust-remote-code", "--api-key", "--admin-api-key", "--config")


def _out_of_range(p: Profile) -> Iterator[str]:
    """What is wrong with single settings, a line each; the others are compared only after these."""
    sizes = {f"model.{f.name}": 1 for f in dataclasses.fields(p.model) if f.type == "int"}
    for name, least in (_AT_LEAST | sizes).items():
        value = p
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None and value < least:
            yield f"{name} = {value} must be at least {least}"
    if p.device not in ("cpu", "cuda"):
        yield f"device = {p.device!r:.80}; it can be cpu or cuda"
    for word in (argument.split("=")[0] for argument in p.rollout.server_arguments):
        if len(word) >= 4 and any(refused.startswith(word) for refused in _NO_SERVER_ARGUMENTS):
            yield (
                f"rollout.server_arguments holds {word}: servers listen on loopback, run no code of a checkpoint and take no "
                "secret from a command line; leave it out"
            )


def _async_contradictions(p: Profile) -> Iterator[str]:
    """What asynchronous rollout does not go with."""
    r, a = p.rollout, p.algorithm
    if r.at_sync not in AT_SYNC:
        yield f"rollout.at_sync = {r.at_sync!r:.80}; it can be {', '.join(AT_SYNC)}"
    if not r.max_staleness:
        return
    if r.memory_saver:
        yield "rollout.max_staleness needs both engines' memory at once: turn rollout.memory_saver off"
    if r.max_staleness > 1 and r.at_sync == "finish":
        yield (
            f"rollout.max_staleness = {r.max_staleness} with rollout.at_sync = 'finish': all answers are waited for at each "
            "sync, so that more than 1 only makes them older; use 'continue'"
        )
    if a.old_logprobs != "rollout" and a.correction == "none":
        yield (
            f"rollout.max_staleness with algorithm.old_logprobs = {a.old_logprobs!r} and no algorithm.correction: nothing "
            "would tell that the answers are of older weights; use old_logprobs = 'rollout', or correction = 'tis' or 'mis'"
        )


def _check(p: Profile) -> None:
    """Refuse settings that contradict each other, before anything starts."""
    from helpers.recipes import contradictions

    t, problems = p.trainer, list(_out_of_range(p))
    if problems:
        raise ValueError(one_line(f"profile {p.name!r:.80} contradicts itself: {'; '.join(problems)}"))
    if p.batch.group_size < 2:
        problems.append(
            "batch.group_size must be at least 2: GRPO compares the answers to one question with each other"
        )
    if t.ranks % (t.tensor_parallel * t.pipeline_parallel):
        problems.append(
            f"trainer.ranks = {t.ranks} does not divide into tensor_parallel x pipeline_parallel = "
            f"{t.tensor_parallel} x {t.pipeline_parallel}"
        )
    if t.expert_tensor_parallel != 1:
        problems.append(
            f"trainer.expert_tensor_parallel = {t.expert_tensor_parallel}: gpt-oss's experts have biases, and Megatron adds them "
            "once a rank when an expert is split (Megatron-LM 2383); keep 1 and raise trainer.expert_parallel"
        )
    if p.model.num_local_experts % t.expert_parallel:
        problems.append(
            f"{p.model.num_local_experts} experts do not divide by expert_parallel = {t.expert_parallel}"
        )
    if p.model.num_key_value_heads % t.tensor_parallel:
        problems.append(
            f"{p.model.num_key_value_heads} key-value heads do not divide by tensor_parallel = {t.tensor_parallel}"
        )
    if p.model.num_hidden_layers % t.pipeline_parallel:
        problems.append(
            f"{p.model.num_hidden_layers} layers do not divide by pipeline_parallel = {t.pipeline_parallel}"
        )
    if p.cluster.strategy not in STRATEGIES:
        problems.append(f"cluster.strategy = {p.cluster.strategy!r:.80}; it can be {', '.join(STRATEGIES)}")
    if p.cluster.placement not in PLACEMENTS:
        problems.append(f"cluster.placement = {p.cluster.placement!r:.80}; it can be {' or '.join(PLACEMENTS)}")
    if p.cluster.engines_per_card > 1 and (p.cluster.placement == "split" or p.device != "cuda"):
        problems.append(
            f"cluster.engines_per_card = {p.cluster.engines_per_card} is for engines beside a trainer on a GPU: elsewhere weights "
            "travel through NCCL, which takes one rank a card, or there is no card; keep 1"
        )
    problems += _async_contradictions(p)
    if p.rollout.kv_saver not in ("hook", "plain", "stock"):
        problems.append(f"rollout.kv_saver = {p.rollout.kv_saver!r}; it can be hook, plain or stock")
    if p.rollout.saver_graphs and p.rollout.kv_saver != "hook":
        problems.append("rollout.saver_graphs needs rollout.kv_saver = 'hook', which also restores the saver's preload mode")
    if p.rollout.memory_saver and p.device != "cuda":
        problems.append("rollout.memory_saver needs a GPU: on a CPU releasing frees nothing")
    problems += contradictions(p.algorithm, p.batch.prompts)
    if problems:
        raise ValueError(one_line(f"profile {p.name!r} contradicts itself: {'; '.join(problems)}"))
