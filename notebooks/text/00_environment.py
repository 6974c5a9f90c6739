# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Is this machine ready?
#
# **Question:** is this machine ready, which profile suits it, and which
# versions fit together and why?
#
# **You need first:** a set-up environment (`bash environment/run.sh` makes
# one) and some Python. Nothing from another notebook.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12.

# %% [markdown]
# | profile | time | memory | what it starts |
# |---|---|---|---|
# | every profile | a few seconds | below 0.5 GB | nothing |
#
# This notebook imports no engine: no torch, no Megatron, no SGLang. What it
# needs to know about them it reads from their files. That way it can still
# tell you what is wrong when an engine cannot even be imported.

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* `/dev/shm` of 64 MiB in a container; a Python other
# than 3.12; a kernel of another environment (the pins of section 2 say `NO`
# then). *Say:* read the advice behind the line first.
# `bash environment/run.sh --set-up-only` repairs an environment in seconds;
# only the first download takes long, so have it done before the day.
#
# *Ask:* Which package decides the version of torch, and why not the trainer?
# What would you notice if a patched function changed upstream, and nobody
# compared hashes?
#
# *A late learner* needs one thing from here: `preflight.check_machine` passes.
# Send them to 01.

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %%
import sys
import textwrap

from helpers import preflight
from helpers.figures import show_figure, use_style
from helpers.profiles import PROFILES, load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
run = NotebookRun("00_environment", settings)
use_style()

# %% [markdown]
# ## 1 · The machine
#
# A **profile** is one frozen record with everything that a run depends on:
# the size of the model, the device, batch sizes, time limits. You name one,
# and every process of the run gets its settings from it.
#
# Each profile asks something of the machine. Here is what yours asks, and what
# it finds. **Before you run:** which line is the likeliest to fail inside a
# container?

# %%
checks = preflight.machine_checks(settings)
for check in checks:
    advice = "" if check.ok else check.advice
    print(f"{'ok' if check.ok else 'NO':3}{check.name:18}{check.found}",
          advice)
run.record("machine_checks_failed", sum(not c.ok for c in checks))

# %% [markdown]
# In a container it is `/dev/shm`, the shared memory. Docker gives it 64 MiB
# unless you say `--shm-size`. Ray's object store lives in it, and on GPUs NCCL
# uses it too, so a small one fails late, in the middle of a run, with an error
# that names something else.
#
# The same checks tell which of the profiles would run here:

# %%
for name in PROFILES:
    other = load_profile(name)
    failed = [c for c in preflight.machine_checks(other) if not c.ok]
    wants = [c.advice if c.name == "GPUs" else c.name for c in failed]
    print(f"{name:9}", "ready" if not failed else "; ".join(wants))
print("\nfits this machine:", preflight.fitting_profile())

# %% [markdown]
# | profile | trains | for |
# |---|---|---|
# | `cpu` | a gpt-oss of 258 thousand parameters, float32 | learning, CI |
# | `gpu` | a few hundred million parameters, bf16 | one GPU |
# | `gpu-20b` | the shape of gpt-oss-20b, experts frozen | one large GPU |
# | `cluster` | the shape of gpt-oss-20b, all parameters | 8 GPUs |
#
# The profiles of 20b's size start from random weights in that shape until you
# set `model.source` to `hub` or `folder`. `cpu` and `gpu` have been run end to
# end, `gpu-20b` in part, the others never (README). The engines, the notebooks
# and the helpers are the same in all of them.

# %% [markdown]
# ## 2 · Versions that fit together
#
# Four packages decide everything: a trainer (Megatron-core), a bridge that
# moves weights (Megatron-Bridge), a rollout engine (SGLang), and the PyTorch
# that they share. On GPUs a fifth joins them, TransformerEngine.
#
# You cannot choose freely. **Predict:** which of them dictates the version of
# PyTorch? The packages say it themselves, in the metadata that `pip` reads.

# %%
import re
from importlib import metadata

ENGINES = ("sglang", "megatron-bridge", "megatron-core")
SHARED = ("torch", "transformers", "megatron-core")
demands = []
for engine in ENGINES:
    for line in metadata.requires(engine):
        package = re.match(r"[\w-]+", line)[0]
        if package in SHARED and "extra ==" not in line:
            demands.append((engine, package, line[len(package):]))
            print(f"{engine:16} wants {line}")
exact = {d[1] for d in demands if d[0] == "sglang" and "==" in d[2]}
assert exact == {"torch", "transformers"}

# %% [markdown]
# SGLang does. Its compiled kernels are built against one PyTorch release, so
# it asks for exactly that one, and for exactly one transformers as well. The
# Megatron packages accept a range.
#
# So the order of choosing is: an SGLang that serves gpt-oss and takes weights
# at run time; the torch and transformers that it dictates; a Megatron-Bridge
# whose range contains that transformers; the Megatron-core it is built
# against; and at last TransformerEngine, whose torch extension is *compiled*
# against the torch you now have.

# %% [markdown]
# This project began as a reading of verl's pull request 4394, an example that
# trains gpt-oss with Megatron and SGLang. It was tried in two environments.
# Beside them, ours:
#
# | | PR 4394, first | PR 4394, second | this project |
# |---|---|---|---|
# | Python | 3.12 | 3.12 | 3.12 |
# | torch | 2.8 | 2.9.1 | 2.11.0 |
# | SGLang | 0.5.5 | 0.5.5 | 0.5.17 |
# | TransformerEngine | 2.9 | 2.9 | 2.20.2 (GPU only) |
#
# Why newer: gpt-oss has attention sinks, which TransformerEngine calls a
# *learnable softmax*. With TransformerEngine 2.10 and the cuDNN of that time,
# people found no attention kernel at all that would take them (verl issue
# 5224). The versions in the last column have such a kernel; no recorded run of
# this course shows it on a GPU yet.

# %% [markdown]
# Every pin of this project stands in `environment/cpu.in` or `gpu.in` with its
# reason. Compare them with what is installed here:

# %%
pins = preflight.pins(settings)
for pin in pins:
    state = "ok" if pin.ok else "NO"
    print(f"{state:3}{pin.package:26}{pin.wanted:10}found {pin.found}")
    print(textwrap.indent(textwrap.fill(pin.reason, 68), "     "))
engines = [p for p in pins if p.package != "uv"]  # uv only installs
run.record("versions_off_pin", sum(not p.ok for p in engines))

# %% [markdown]
# `environment/cpu.lock` goes further. It fixes every package, also those that
# nobody names, with the hash of each file. Two machines that install from it
# hold the same bytes.
#
# A `NO` here is not always fatal, but then you run a combination that nobody
# tested. The next command is `bash environment/run.sh`: it repairs the
# environment in seconds.

# %% [markdown]
# ## 3 · What you installed
#
# The environment takes gigabytes. **Predict:** what is the largest part, on a
# machine without a GPU? Every installed package lists its files with their
# sizes, so you can add them up without touching the disk.

# %%
sizes = {}
for package in metadata.distributions():
    total = sum(file.size or 0 for file in package.files or ())
    sizes[package.metadata["Name"].lower()] = total / 1e6  # MB
gpu_only = ("nvidia", "triton", "cuda", "flashinfer", "cutlass")
share = sum(mb for name, mb in sizes.items() if name.startswith(gpu_only))
share /= sum(sizes.values())
print(f"{len(sizes)} packages, {sum(sizes.values()) / 1000:.1f} GB;",
      f"{share:.0%} in packages that only a GPU uses")

# %%
import matplotlib.pyplot as plt

largest = sorted(sizes, key=sizes.get, reverse=True)[:12]
marked = ENGINES + ("transformers", "ray")
shown = sorted({*largest, *marked} & set(sizes), key=sizes.get)[::-1]
gpu = [name for name in shown if name.startswith(gpu_only)]
engine = [name for name in shown if name in marked]
groups = {"GPU only": gpu, "engine": engine,
          "other": [n for n in shown if n not in gpu + engine]}

# %%
fig, axis = plt.subplots(figsize=(8, 4.8))
for (group, names), hatch in zip(groups.items(), ("//", "", "..")):
    rows = [shown.index(n) for n in names]
    bars = axis.barh(rows, [sizes[n] for n in names], hatch=hatch,
                     edgecolor="white", label=group)
    axis.bar_label(bars, [f"{sizes[n]:.0f}" for n in names], padding=3)
axis.set_yticks(range(len(shown)), shown)
axis.invert_yaxis()
axis.set(xlabel="size of the installed files (MB)")
axis.legend()
show_figure(
    fig, run=run, name="package_sizes",
    alt="Bars: the twelve largest installed packages and the engines. PyTorch "
    "and the CUDA libraries are hundreds of megabytes each; every engine "
    "except Ray stays below a hundred.",
    data={"package": shown, "megabytes": [sizes[n] for n in shown]},
);

# %% [markdown]
# PyTorch and its CUDA libraries, even here. SGLang demands the torch that the
# package index offers, and that is a CUDA build: on a CPU its GPU libraries
# are dead weight, but they do no harm. The engines that this course is about
# are small beside it.

# %% [markdown]
# ## 4 · What is different without a GPU
#
# Megatron and SGLang are written for GPUs. On a CPU a few of their functions
# have to be replaced, while the program runs. That is dangerous in one way:
# when a package changes such a function, the replacement may silently be
# wrong.
#
# The guard is a **manifest**. For each replaced function it holds the reason,
# and a hash of the upstream text that the replacement was written for. By hand
# on a small function first:

# %%
from hashlib import sha256

before = "def scale(x):\n    return x * 2\n"
after = "def scale(x):\n    return x * 3\n"
for text in (before, after):
    print(sha256(text.encode()).hexdigest()[:16], repr(text))
assert sha256(before.encode()) != sha256(after.encode())

# %% [markdown]
# One character, another hash. Now a real one. Megatron's all-to-all dispatcher
# calls this to turn split sizes into numbers. Find the condition that makes it
# useless on a CPU.

# %%
from helpers.cpu import manifest

recorded = manifest.recorded()
patch = next(p for p in manifest.PATCHES if p.name.startswith("maybe_move"))
source = manifest.upstream_source(patch)
print(source, "\n")
assert (sha256(source.encode()).hexdigest()
        == recorded[patch.symbol]["sha256"])
print("hash as recorded;", patch.reason)

# %% [markdown]
# `tensor.is_cuda`: a CPU tensor comes back as it went in, and the dispatcher
# then fails on it. The whole list:

# %%
owners = {}
for patch in manifest.PATCHES:
    key = (patch.module.split(".")[0], patch.ours, patch.reason)
    owners.setdefault(key, []).append(patch.symbol)
for (package, ours, reason), symbols in owners.items():
    print(f"[{package}] {symbols[0]}",
          f"and {len(symbols) - 1} more" if len(symbols) > 1 else "")
    print(textwrap.indent(textwrap.fill(reason, 70), "    "))
    print(f"    replaced by helpers/cpu/{ours}")

# %% [markdown]
# Three kinds: torch functions that ask for a GPU, gaps in Megatron's layers
# that are not TransformerEngine's, and attention in SGLang that has neither
# sinks nor windows on a CPU. The mathematics of the model is not among them,
# except for that attention: notebook 03 compares it with transformers, token
# by token, and finds no difference above 0.00001.
#
# **Check it live**, against the packages installed on this machine:

# %%
moved = manifest.check()
print(f"{len(manifest.PATCHES)} upstream sources compared,",
      f"{len(moved)} changed", *moved, sep="\n")
run.record("patches_checked", len(manifest.PATCHES))
run.record("patches_moved", len(moved))
assert not moved

# %% [markdown]
# ## 5 · How a process learns what it runs on
#
# A run has several processes: this kernel, trainers, servers. It is tempting
# to let each look whether there is a GPU. Don't. A Ray actor that asked for no
# GPU sees none, even on a GPU node. It would take the CPU path by itself, and
# nothing would say why it is slow.
#
# Here the profile decides, and every process is *told*, by environment
# variables:

# %%
roles = ("kernel", "trainer", "server")
told = {role: settings.process_environment(role) for role in roles}
for variable in sorted(set().union(*told.values())):
    where = [role for role in roles if variable in told[role]]
    value = str(told[where[0]][variable])
    value = value if "/" not in value else ".../" + value.split("/")[-1]
    print(f"{variable:36}{value or '(empty)':11}"
          f"{'all' if len(where) == 3 else ', '.join(where)}")

# %% [markdown]
# `GRPO_DEVICE` is the one that decides. What happens to a process that was
# told nothing? Start one:

# %%
import os
import subprocess

code = ("from helpers.bridge import prepare_process\n"
        "from helpers.profiles import load_profile\n"
        "prepare_process(load_profile('cpu'))")
untold = {k: v for k, v in os.environ.items() if k != "GRPO_DEVICE"}
done = subprocess.run([sys.executable, "-c", code], env=untold,
                      capture_output=True, text=True, timeout=60)
assert done.returncode != 0
print(textwrap.fill(done.stderr.strip().splitlines()[-1], 76))

# %% [markdown]
# It refuses, at once, and names the call that was forgotten. That call,
# `prepare_kernel(settings)`, is the second thing that every engine notebook
# does. It checks the machine as above and sets the variables, before torch is
# imported.

# %% [markdown]
# ## 6 · Settings that contradict
#
# The last thing that can be wrong is what you ask for. **Predict:** the six
# lines below all contain a mistake. Which one would otherwise show itself
# only after minutes, inside Megatron?

# %%
attempts = [
    lambda: load_profile("cup"),
    lambda: load_profile("cpu", step=3),
    lambda: load_profile("cpu", steps="10"),
    lambda: load_profile("cpu", **{"batch.group_size": 1}),
    lambda: load_profile("cpu", **{"trainer.ranks": 3,
                                   "trainer.tensor_parallel": 2}),
    lambda: load_profile("cpu", **{"trainer.expert_parallel": 3}),
]
refused = 0
for attempt in attempts:
    try:
        attempt()
    except (ValueError, TypeError) as error:
        refused += 1
        print("·", textwrap.fill(str(error), 76), "\n")
assert refused == len(attempts)

# %% [markdown]
# The last two. A layout that does not divide is a fact about two numbers, and
# here it costs a millisecond. In Megatron it costs the start of every rank.
#
# Each message says what is wrong, with the nearest thing that you may have
# meant. When you change a profile, change it in this one place:

# %%
small = load_profile("cpu", steps=10, **{"batch.prompts": 8})
print(small.steps, "steps of", small.batch.episodes, "episodes")
assert load_profile("cpu").steps != 10  # the profile itself is as it was

# %% [markdown]
# ## The verdict
#
# `check_machine` is what the other notebooks call. It says nothing when all is
# well, and stops with every failed line otherwise.

# %%
preflight.check_machine(settings)
assert "torch" not in sys.modules  # as promised at the top
print(f"this machine is ready for profile {settings.name!r}")

# %% [markdown]
# ## What you take away
#
# 1. **The rollout engine dictates the versions.** SGLang pins one torch and
#    one transformers; everything else is chosen to fit. Pins carry reasons,
#    and the lock carries hashes.
# 2. **A patch needs a guard.** What the CPU path replaces is listed with the
#    hash of the upstream source, so a changed package is an error and not a
#    wrong number.
# 3. **A process is told its device; it never guesses.** And settings that
#    contradict each other are refused before anything starts.

# %% [markdown]
# ### Try it
#
# - (5 minutes, easy) Ask for `load_profile("cpu", lerning_rate=1e-3)`, then
#   find the right spelling from the messages. *Check:* it has a dot in it.
# - (5 minutes, medium) Run `python -m helpers.cpu.manifest check` in a
#   terminal. *Check:* it exits with 0. Which file would you edit if it named
#   a changed function?

# %%
run.finish();
