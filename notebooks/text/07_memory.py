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
# # 07 · Where does memory go?
#
# **Question:** where does memory go in each phase of a GRPO step, predicted
# and measured, and what does a smaller micro-batch cure?
#
# **You need first:** notebook 05. What it leaves on disk is used here, else it
# is made again.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12, torch 2.11.0,
# sglang 0.5.17 and megatron-core 0.19.2.

# %% [markdown]
# | profile | time | memory of all processes |
# |---|---|---|
# | `cpu` | about half a minute on 2 cores | about 3.2 GB, most of it libraries |
#
# On a laptop CPU the tiny model itself is a megabyte, so two different scales
# appear on this page. **Tensors** (weights, gradients, optimizer, activations,
# KV cache) obey formulas, the same ones at 20 billion parameters: you predict
# them to the byte and check. **Processes** are mostly libraries: gigabytes
# that no formula of the model explains, and that surprise people who size a
# machine by the weights alone.

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* people add RSS and count every library several times;
# they look at the weights and forget gradients, moments and logits; they
# expect `nvidia-smi` to fall when a tensor is freed (the allocator keeps it).
# *Say:* "predicted, measured, difference: write all three down before you
# explain anything".
#
# *Ask:* Which of these bytes grow with the batch, which with the model, which
# with neither? Your server says it released its memory: how do you know? Why
# is the gradient the same with half the micro-batch?
#
# *Short of time:* sections 1, 3, 5 and 7; the tables of 4 and 6 are recorded
# and read well at home. *A late learner* runs the notebook once (below half a
# minute) and starts at section 3. Without a GPU, sections 4 to 6 show recorded
# runs; say so.

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %%
import os

from helpers.bridge import prepare_process
from helpers.figures import show_figure, use_style
from helpers.memory import MemoryTimeline
from helpers.preflight import prepare_kernel
from helpers.processes import MIB, process_tree, pss
from helpers.profiles import load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
prepare_kernel(settings)
run = NotebookRun("07_memory", settings)
use_style()
me = os.getpid()
print(f"this kernel before any engine: {pss(me) / MIB:.0f} MiB")

# %% [markdown]
# PSS, the *proportional set size*, divides a page that three processes share
# into three thirds. Sums of PSS are what the machine really holds; sums of RSS
# count every shared library once a process.

# %% [markdown]
# ## 1 · Predict first
#
# The trainer's long-lived tensors follow from the config: 4 bytes a weight in
# fp32, an fp32 gradient buffer, two Adam moments. In fp32 there is no master
# copy; bf16 training adds one.
#
# **Predict:** the model has 258,000 parameters. How many megabytes are the
# four rows together?

# %%
from helpers.memory import parameter_count, predicted_trainer_bytes

predicted = predicted_trainer_bytes(settings)
print(f"{parameter_count(settings):,} parameters")
for name, size in predicted.items():
    print(f"{name:15s} {size / 1e6:8.3f} MB predicted")
print(f"{'sum':15s} {sum(predicted.values()) / 1e6:8.3f} MB")

# %% [markdown]
# ## 2 · Measure the processes through one step
#
# A sampler thread reads the PSS of every process below this kernel (and of the
# SGLang server) while the phases pass. The trainer lives in this kernel, so
# the kernel's line is the trainer's.

# %%
from helpers.checkpoints import tokenizer_and_pad
from helpers.tasks import load_task
from helpers.warm_start import policy_folder, warm_checkpoint

if not (policy_folder(settings) / "config.json").exists():
    print("no checkpoint to start from yet: making it now, as notebook 02")
checkpoint = warm_checkpoint(settings)
tokenizer, pad_id = tokenizer_and_pad(checkpoint)
task = load_task(settings.task, settings.seed)
problems = task.sample(settings.batch.prompts, step=0)
on_gpu = settings.device == "cuda"

# %% [markdown]
# On a GPU the card itself is predicted too, phase by phase, before anything is
# on it: what is static, what a phase adds, and the two CUDA contexts (the size
# of one is measured here). Graphs, workspaces and allocators' reserves are
# *not* predicted; they have to show up as a gap.

# %%
from helpers.harmony import encode
from helpers.memory import cuda_context_bytes, predicted_phases

prompt = max(len(encode(tokenizer, p.prompt)) for p in problems)
length = -(-(prompt + settings.sampling.max_new_tokens) // 8) * 8
tokens = settings.trainer.micro_batch * length
if on_gpu:
    context = cuda_context_bytes()
    card = predicted_phases(settings, tokens, context)
    run.series("predicted_phases", {
        "phase": [p for p, items in card.items() for _ in items],
        "item": [i for items in card.values() for i in items],
        "bytes": [b for items in card.values() for b in items.values()]})
    for phase, items in card.items():
        print(f"{phase:17s} {sum(items.values()) / 1e9:6.1f} GB predicted")
else:
    print("no GPU in this profile; section 4 shows a recorded run")

# %%
from helpers.rollout import open_server

server = open_server(settings, checkpoint)
timeline = MemoryTimeline([me, server.pid], gpu=on_gpu)
timeline.__enter__()
with timeline.phase("before"):
    timeline.sample()
with timeline.phase("imports"):
    prepare_process(settings)
with timeline.phase("server start"):
    server.wait()
print("processes:", len(process_tree([me, server.pid])))

# %%
from functools import partial

from helpers.memory import device_bytes
from helpers.trainer import MegatronTrainer

with timeline.phase("load"):
    trainer = MegatronTrainer(settings, checkpoint)
    timeline.count = partial(device_bytes, trainer)
info = server.http.get(server.url + "/server_info", timeout=60).json()
use = info["internal_states"][0]["memory_usage"]

# %%
import torch

from helpers.advantages import group_advantages
from helpers.collate import collate
from helpers.rewards import score
from helpers.rollout import roll_out

with timeline.phase("rollout"):
    episodes = roll_out(server, problems, settings)
rewards = torch.tensor(score(episodes, problems, tokenizer))
groups = torch.tensor([e.group for e in episodes])
advantages = group_advantages(rewards, groups)
batch = collate(episodes, advantages, pad_id, settings.trainer.seq_length)
print(f"{len(episodes)} answers, padded to {batch.size[1]} tokens")

# %% [markdown]
# Where a card is too small for both engines at work, the server gives its
# memory to the trainer for the update and takes it back before the sync
# (`memory_saver`; elsewhere these phases do nothing). Afterwards the trainer
# leaves the device in its turn, and the weights are sent from where they are.

# %%
from helpers.weight_sync import sync_weights

with timeline.phase("release"):
    server.release_memory()
with timeline.phase("logprobs"):
    trainer.logprobs(batch)
trainer.update(batch, phase=timeline.phase)
with timeline.phase("resume"):
    server.resume_memory()
with timeline.phase("sync"):
    sent = sync_weights(trainer, server, "step-1")

# %%
with timeline.phase("offload"):
    moves = trainer.memory.offload()
with timeline.phase("sync, offloaded"):
    away = sync_weights(trainer, server, "step-1")
with timeline.phase("load back"):
    moves += trainer.memory.load_back()
timeline.__exit__()
for m in moves:
    print(f"{m.part:9s} {m.where.value:14s} {m.bytes / 1e6:9.1f} MB "
          f"in {m.seconds - m.pin_seconds:.3f} s, and {m.pin_seconds:.1f} s "
          "to reserve and pin host memory")
print(f"sync {sent.seconds:.3f} s, from the host {away.seconds:.3f} s")
print(f"{len(timeline.rows)} samples over {timeline.rows[-1][0]:.0f} s")

# %% [markdown]
# **Predict:** which process is the largest, and by how much does the update
# raise the trainer?

# %%
import matplotlib.pyplot as plt

ALT = ("Stacked bars of PSS by process for each phase of a step. SGLang's "
       "three processes hold some hundred MiB each in every phase; the "
       "kernel with the trainer grows with imports, logprobs and update.")

def stacked(peaks, ylabel, name, alt):
    """One bar a phase, its processes stacked; returns its heights in MiB."""
    fig, ax = plt.subplots(figsize=(8.5, 4))
    bottom = [0.0] * len(peaks)
    for role in sorted({r for p in peaks.values() for r in p}):
        sizes = [p.get(role, 0) / MIB for p in peaks.values()]
        ax.bar(list(peaks), sizes, bottom=bottom, label=role, edgecolor="w")
        bottom = [b + s for b, s in zip(bottom, sizes)]
    ax.set(ylabel=ylabel, ylim=(0, max(bottom) * 1.45))
    ax.tick_params(axis="x", rotation=20)
    ax.legend(loc="upper left", fontsize=8)
    rows = [(k, r, v) for k, p in peaks.items() for r, v in p.items()]
    columns = dict(zip(("phase", "process", "bytes"), zip(*rows)))
    show_figure(fig, run=run, name=name, alt=alt, data=columns)
    return bottom

peaks = timeline.peak_by_phase()
bottom = stacked(peaks, "PSS (MiB)", "phases", ALT)
run.record("peak_pss_gib", max(bottom) / 1024)

# %%
kernel = {k: p.get("notebook kernel", 0) / MIB for k, p in peaks.items()}
last = kernel["before"]
for phase, size in kernel.items():
    print(f"{phase:13s} kernel {size:5.0f} MiB, {size - last:+5.0f}")
    last = size
others = {r: size / MIB for r, size in peaks["sync"].items()
          if "SGLang" in r}
print({role: round(size) for role, size in others.items()}, "MiB")
if not on_gpu:
    assert kernel["load"] - kernel["server start"] < 100 < kernel["sync"]

# %% [markdown]
# Read the steps, not the heights. Loading the model and building DDP and
# optimizer is hardly visible: the tensors are four megabytes. Libraries cost
# hundreds of MiB
# before anything is computed. Then the first `logprobs` and the first
# `forward-backward` raise the kernel once more, and it stays up there: those are the buffers of a
# forward and a backward pass, which the allocator keeps for the next one.
#
# SGLang pays for its libraries three times. Its HTTP server, its scheduler and
# its detokenizer import the same packages, though only the scheduler holds
# weights and cache.

# %% [markdown]
# ## 3 · The ledger: tensors, predicted beside measured
#
# Now the tensors themselves. The trainer's are found by walking model, DDP
# buffers and optimizer state. SGLang reports the size of its pools.

# %%
from helpers.memory import (
    measured_trainer_bytes, predicted_kv_bytes, predicted_pools,
)

ledger = []  # (item, predicted bytes, measured bytes)
measured = measured_trainer_bytes(trainer)
for name, size in predicted.items():
    ledger.append((name, size, measured[name]))
pools = predicted_pools(settings)
kv = predicted_kv_bytes(settings, *pools)
ledger.append(("SGLang KV cache", kv, round(use["kvcache"] * 2**30)))
if on_gpu:
    ledger.append(("SGLang weights", predicted["weights"],
                   round(use["weight"] * 2**30)))
size = sum(t.numel() * t.element_size() for _, t in trainer.export_stream())
ledger.append(("export", predicted["weights"], size))

# %%
print(f"{'item':16s} {'predicted':>10s} {'measured':>10s}  difference")
worst = 0.0
for name, guess, found in ledger:
    part = abs(found - guess) / guess if guess else 0.0
    worst = max(worst, part)
    print(f"{name:16s} {guess / 1e6:7.3f} MB {found / 1e6:7.3f} MB"
          f"  {part:8.2%}")
run.record("ledger_max_error", worst)

# %% [markdown]
# The trainer's rows agree to the byte. SGLang reports its figures rounded to a
# thousandth of a GiB, which is where the cache's difference comes from. (On a
# GPU there is a row for its weights too: what the card lost while they were
# loaded. It is 0.3 GB too large at 20b, and 63 MB at 315 million parameters,
# which is 10% there. Blocks of torch's allocator are 18 MB of those; the rest
# is not explained.)
#
# Note the cache's size: SGLang keeps *two* pools, one for full-attention layers
# and one for sliding layers. With a prefix cache the second has 0.8 of the
# first one's tokens. Without one, as here, it is sized for the most requests
# that may run, with room beyond the window for late eviction and for a prefill
# chunk, up to the size of the first.

# %%
capacity = {"full-attention pool": use["token_capacity"],
            "sliding-window pool": use["token_capacity_swa"]}
print("predicted from the profile:", *pools, "tokens")
window = settings.model.sliding_window
need = window * settings.rollout.max_running_requests
for name, tokens in capacity.items():
    print(f"{name:20s} {tokens:6d} tokens")
print(f"{'windows would need':20s} {need:6d} tokens "
      f"({settings.rollout.max_running_requests} requests x {window})")

# %% [markdown] tags=["exercise"]
# ### Exercise: bytes a parameter
#
# (5 minutes, easy) In bf16 training with an fp32 master copy, how many bytes
# of static memory does *one* parameter cost the trainer, if it is trained?
#
# <details><summary>Hint</summary>
#
# Go through the rows of section 1: weights, gradients, Adam moments, and the
# row that only bf16 training has.
#
# </details>

# %% tags=["start"]
bytes_a_parameter = ...  # your turn

# %% tags=["solution"]
bytes_a_parameter = 2 + 4 + 2 * 4 + 4  # weight, gradient, Adam, master

# %% tags=["check"]
from helpers.exercises import check

check("bytes-a-parameter", bytes_a_parameter)

# %% [markdown]
# ## 4 · The card, phase by phase
#
# Left bar: predicted before the run. Right bar: what NVML saw of the two
# processes, taken apart into the trainer's own tensors, what its allocator held
# beyond them, and the server: at the phase's peak, or at its end where
# something moved. The table says what is left unexplained.

# %%
from helpers.memory import measured_phases
from helpers.recorded import show_recorded

if on_gpu:
    asleep = ("release", "logprobs", "forward-backward", "optimizer step")
    saver = settings.rollout.memory_saver
    found = measured_phases(timeline, use, asleep if saver else ())
    run.series("measured_phases", {
        "phase": [p for p, items in found.items() for _ in items],
        "item": [i for items in found.values() for i in items],
        "bytes": [b for items in found.values() for b in items.values()],
        "seconds": [timeline.seconds[p]
                    for p, items in found.items() for _ in items]})
    tops = [sum(roles.values())
            for roles in timeline.peak_by_phase("GPU").values()]
    run.record("peak_gpu_gib", max(tops) / 2**30)
else:
    show_recorded("gpu-20b", "07_memory", "card")

# %%
from helpers.figures import paired_stacks

if on_gpu:
    shown = [phase for phase in card if phase in found]
    fig = paired_stacks({p: card[p] for p in shown},
                        {p: found[p] for p in shown},
                        scale=1e9, ylabel="GPU memory (GB)")
    show_figure(fig, run=run, name="card", alt=(
        "Two stacked bars a phase, predicted and measured GPU memory of "
        "trainer and server. The server's share vanishes while it is "
        "released, the trainer's while it is offloaded; the tallest phases "
        "are those in which both are there or gradients are computed."))

# %%
if on_gpu:
    lines = [f"{'phase':17s} {'predicted':>9s} {'measured':>9s} "
             f"{'unexplained':>12s} {'seconds':>8s}"]
    for phase in shown:
        guess, total = sum(card[phase].values()), sum(found[phase].values())
        lines.append(f"{phase:17s} {guess / 1e9:6.1f} GB {total / 1e9:6.1f} "
                     f"GB {(total - guess) / 1e9:+9.1f} GB "
                     f"{timeline.seconds[phase]:8.2f}")
    print("\n".join(lines))
    (run.folder / "table.txt").write_text("\n".join(lines) + "\n")
else:
    show_recorded("gpu-20b", "07_memory", "table")

# %% [markdown]
# Read the recorded picture of gpt-oss-20b's shape (random weights, experts
# frozen) from left to right. Orange and blue take turns: the server leaves
# before the update, the trainer can leave before the next rollout. Weights,
# gradients, optimizer and KV cache agree with their prediction within 1%. What
# is grey, and the rest of the server, is where a formula ends and an
# implementation begins: CUDA graphs, workspaces, and what torch's allocator
# keeps for the next micro-batch. The 26 GB of `optimizer step` are such: blocks
# of the backward pass, which go back to the driver once the step is over.
#
# The first version of this ledger found four mistakes, three of them ours.
# `logprobs` held 30 GB too much: Megatron's `forward_only` does not switch
# autograd off, so the pass kept a graph that nobody used. The loss held five
# fp32 copies of the logits at once: they are cut into pieces now, and four
# episodes fit where two did. `offload` showed its peak, not its end. And the
# sampler booked memory to the wrong phase. A ledger finds mistakes, its own
# too.

# %% [markdown]
# ## 5 · What SGLang keeps when it is told to let go
#
# The pull request that this course grew out of (verl 4394) shows a memory curve
# of gpt-oss and calls SGLang's share unusual. Here is the reason.
#
# gpt-oss alternates sliding and full attention. SGLang therefore builds a
# *hybrid* pool of two KV caches, and in that class it switches the memory
# saver off for both (`mem_cache/swa_memory_pool.py`). So
# `release_memory_occupation` answers "success" and keeps the cache. Public
# threads: sglang 22807, 24661, 32213; miles 860.
#
# **Predict:** of 75 GB, nearly all of it KV cache, how much is left after a
# stock server released everything?

# %%
from helpers.recorded import recorded_rows

stages = recorded_rows("footprint.csv")
for way in dict.fromkeys(row["way"] for row in stages):
    print(f"{way:7s}", "  ".join(
        f"{row['stage'].replace('released ', '-')} "
        f"{float(row['gigabytes']):.1f}"
        for row in stages if row["way"] == way and row["gigabytes"]))

# %%
shown = ("started", "released kv_cache", "released weights",
         "released cuda_graph")
fig, ax = plt.subplots(figsize=(7.5, 3.4))
for way in dict.fromkeys(row["way"] for row in stages):
    held = {row["stage"]: row["gigabytes"] for row in stages
            if row["way"] == way}
    if all(held.get(stage) for stage in shown):
        ax.plot(shown, [float(held[s]) for s in shown], label=way, alpha=0.8)
ax.set_ylabel("GB on the card (recorded)")
ax.set_ylim(0)
ax.legend(title="rollout.kv_saver")
show_figure(fig, run=run, name="footprint", data={
    "way": [r["way"] for r in stages], "stage": [r["stage"] for r in stages],
    "gigabytes": [r["gigabytes"] for r in stages]}, alt=(
    "GB that SGLang holds after releasing cache, weights and graphs in turn: "
    "the stock server stays at 67 of 76 GB, all others fall below 2 GB."))

# %% [markdown]
# (Four of 24 layers, so that four servers could be tried in a few minutes; the
# cache fills its share of the card as it would with all of them.)
#
# *stock* gives back its 9 GB of weights and nothing else. *plain* switches the
# hybrid pool off: it works, and every sliding layer then pays for the full
# length. *hook* (`helpers/sglang_saver.py`, the course's setting) puts the flag
# back and changes nothing else: what remains, 1.9 GB, is CUDA context,
# workspaces and graphs. *graphs* puts those under the saver too, for another
# 0.05 GB: not worth a switch.
#
# After the resume the weights are empty until they are loaded or synced again.
# Then the logprobs are the old ones, bit by bit, also for prompts past the
# window. (*backup* adds SGLang's `--enable-weights-cpu-backup`: the weights come
# back by themselves, just as exact. It costs host memory, and 3.1 s to release
# 9 GB and 1.0 s to resume instead of hundredths: in training, where new weights
# follow anyway, there is no use for it.) Twenty cycles in a row change nothing:

# %%
cycles = recorded_rows("footprint_cycles.csv")
for name in ("released_gigabytes", "resumed_gigabytes", "logprob_gap"):
    values = [float(row[name]) for row in cycles]
    print(f"{name:19s} {len(values)} cycles, from {min(values):.3f} "
          f"to {max(values):.3f}")
stuck = 0.3 * 80 - 2 * parameter_count(load_profile("gpu-20b")) / 8 / 1e9
print(f"origin (sglang 0.5.5, fraction 0.3 of 80 GB, TP8): {stuck:.0f} GB "
      "of cache a GPU that no release gives back (arithmetic)")

# %% [markdown]
# ## 6 · Must offloaded weights be loaded back before they are sent?
#
# The same pull request leaves a question open: when the trainer's weights lie
# in host memory, can they be exported from there? Megatron-Bridge alone cannot:
# it reads the emptied storage. `helpers/offload.py` hands it each weight just
# before its turn, through pinned memory.
#
# **Predict:** the link from host to device of the recorded machine moves
# 55 GB/s. Which is faster: weights back, send, weights away again, or
# streaming?

# %%
def print_ways(rows, columns):
    """The median run of each way, and its peak memory on the card."""
    print(f"{'way':18s}", "  ".join(name for name, _ in columns), " GPU peak")
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        timed = sorted((row for row in mine if row["total_seconds"]),
                       key=lambda row: float(row["total_seconds"]))
        middle = timed[(len(timed) - 1) // 2]
        peak = max(float(r["card_extra_gb"] or 0) for r in mine)
        print(f"{way:18s}", "  ".join(
            f"{float(middle[key]):{len(name)}.2f}" for name, key in columns),
            f"{peak:6.1f} GB")


print_ways(recorded_rows("sync_ways.csv"), [
    ("move", "move_seconds"), ("export", "export_seconds"),
    ("wait", "send_seconds"), ("total s", "total_seconds")])

# %% [markdown]
# *ipc* is the ordinary sync, with the trainer on the device. *offloaded* streams
# from the host; *loaded back* is what it replaces (weights in, sync, weights
# out). "In turn" sends a bucket before it exports the next; otherwise the
# server loads one while the next is made, and *wait* is what that did not hide.
#
# So yes: streaming is faster than loading back, 1.4 s against 2.9 s, and it
# takes 6 GB of the card where loading back takes 46, for the trainer never has
# its weights there.
#
# How good is 1.4 s? The link alone needs 0.76 s for 41.8 GB, so this is 1.9
# times the bound (the three runs: 1.4, 1.8 and 1.4 s). It was 2.5 times before
# a profile (`tests/gpu/recorded/sync_profile.txt`) showed where the time went:
# not copies, but Python. Megatron-Bridge tries to import a package that is not
# there, once a weight: 551 searches of the whole path for four layers.
# `helpers/upstream_fixes.py` lets the import fail at once. And we waited for
# the whole device at each bucket, copies ahead included. What is left is still
# Python: even from the device, where nothing crosses the link, an export takes
# 1 s. The ledger above was recorded between the two cures.
#
# And the host pays: as much pinned memory as weights, reserved once, which took
# 16 s.
#
# Two more ways, from an earlier run (its trainer kept gradients that it did not
# need, which made *loaded back* look worse than it is):

# %%
print_ways(recorded_rows("sync_ways_first.csv"), [
    ("move", "move_seconds"), ("export", "export_seconds"),
    ("transfer", "transfer_seconds"), ("load", "load_seconds"),
    ("total s", "total_seconds")])

# %% [markdown]
# *group* goes through gloo and host memory, since NCCL refuses two ranks on
# one card; between two cards it is the usual way. *disk* writes and reads a
# checkpoint.

# %% [markdown]
# ## 7 · The peak that you can cure: activations
#
# Between forward and backward autograd keeps what the backward pass needs.
# That grows with the tokens of one micro-batch, not with the model, and for
# long answers it dwarfs everything above.
#
# **Predict:** halve the micro-batch. What happens to these bytes, to the
# result, and to the time?

# %%
import dataclasses
import time

from helpers.memory import saved_for_backward


def backward_with(micro_batch):
    layout = dataclasses.replace(trainer.settings.trainer,
                                 micro_batch=micro_batch)
    trainer.settings = dataclasses.replace(settings, trainer=layout)
    start = time.perf_counter()
    with saved_for_backward(trainer.model.module) as saved:
        trainer.backward(batch)
    squares = [p.main_grad.float().pow(2).sum()
               for p in trainer.model.module.parameters() if p.requires_grad]
    norm = torch.stack(squares).sum().sqrt().item()
    return saved, time.perf_counter() - start, norm


# %%
most = min(settings.trainer.micro_batch, len(episodes))
sizes = [most >> i for i in range(4) if most >> i]
server.release_memory()
rows = [(size, *backward_with(size)) for size in sizes]
for micro_batch, saved, seconds, norm in rows:
    print(f"micro-batch {micro_batch:3d}: {saved.bytes / 1e6:6.1f} MB kept, "
          f"{seconds:.2f} s, gradient norm {norm:.6f}")

# %%
fig, ax = plt.subplots(figsize=(6.5, 3.2))
ax.plot(sizes, [r[1].bytes / 1e6 for r in rows], "o-")
ax.set_xlabel("episodes in a micro-batch")
ax.set_ylabel("kept for backward (MB)")
ax.set_ylim(0)
show_figure(
    fig, run=run, name="activations",
    alt="Bytes kept for the backward pass grow in proportion to the "
        "micro-batch.",
    data={"micro_batch": sizes, "bytes": [r[1].bytes for r in rows],
          "seconds": [r[2] for r in rows], "grad_norm": [r[3] for r in rows]},
)
norms = [r[3] for r in rows]
rounding = 1e-4 if settings.model.dtype == "float32" else 2e-2
assert max(norms) - min(norms) < rounding * max(norms)
run.record("activation_bytes_halved", rows[1][1].bytes / rows[0][1].bytes)

# %% [markdown]
# Half the micro-batch, half the bytes, the same gradient: Megatron adds the
# micro-batches' gradients before it divides by the tokens of all of them. The
# price is time, as each pass is less well filled.
#
# Which part of the model keeps them? The same measurement, put down to the
# module that was running when autograd saved a tensor.
#
# **Predict:** attention weights are quadratic in the length, experts are not.
# At the length of this batch, which is larger?

# %%
parts = sorted(rows[0][1].by_component.items(), key=lambda item: -item[1])
fig, ax = plt.subplots(figsize=(7, 3))
ax.barh([name for name, _ in parts], [size / 1e6 for _, size in parts])
ax.invert_yaxis()
ax.set_xlabel("kept for backward (MB)")
show_figure(
    fig, run=run, name="components",
    alt="Bytes kept for the backward pass by part of the model; the experts "
        "keep the most.",
    data={"component": [n for n, _ in parts], "bytes": [b for _, b in parts]},
)

# %%
from helpers.memory import predicted_attention_bytes, predicted_logits_bytes

episodes_in, length = sizes[0], batch.size[1]
kept = dict(parts)
one = {"attention weights":
       predicted_attention_bytes(settings, episodes_in, length),
       "loss and rest": predicted_logits_bytes(settings, episodes_in, length)}
for name, size in one.items():
    held = kept.get(name, 0)
    print(f"{name:18s} one copy {size / 1e6:5.1f} MB, kept "
          f"{held / 1e6:5.1f} MB: {held / size:.1f} copies")

# %% [markdown]
# Formulas of activations predict the size of *one copy* well. How many copies
# survive until the backward pass is a property of the implementation: the
# unfused attention here keeps its scores before and after masking, with the
# sink's column and without. Fused kernels on a GPU keep none of them. So the
# honest way is to measure copies once per implementation, then multiply.
#
# At 20b scale the logits grow most: 201,088 numbers a token, 3.3 GB for one
# fp32 copy of four answers of 1,024 tokens, against 2 MB here.

# %% [markdown] tags=["exercise"]
# ### Exercise: the largest micro-batch
#
# (10 minutes, medium) With profile `gpu-20b`, 40 GB of the card are left for
# one micro-batch (40e9 bytes). How many episodes of 1,024 tokens fit? Count
# what the layers keep for the backward pass,
# `predicted_activation_bytes(settings, tokens)`, and what the loss needs,
# `predicted_loss_bytes(settings, tokens, backward=True)`.
#
# <details><summary>Hint</summary>
#
# Both take the tokens of the whole micro-batch. Try sizes from 1 on until the
# sum is too large; `load_profile("gpu-20b")` gives the settings.
#
# </details>

# %% tags=["given"]
from helpers.memory import (
    predicted_activation_bytes, predicted_loss_bytes,
)

# %% tags=["start"]
episodes_that_fit = ...  # your turn: a whole number

# %% tags=["solution"]
shape = load_profile("gpu-20b")


def micro_batch_bytes(episodes):
    tokens = 1024 * episodes
    return (predicted_activation_bytes(shape, tokens)
            + predicted_loss_bytes(shape, tokens, backward=True))


fitting = [n for n in range(1, 100) if micro_batch_bytes(n) <= 40e9]
episodes_that_fit = max(fitting)

# %% tags=["check"]
from helpers.exercises import check

check("largest-micro-batch", episodes_that_fit)

# %% [markdown] tags=["exercise"]
# ### Exercise: cut this memory peak
#
# (15 minutes, hard) This is the first thing one writes for the logprobs of
# `labels`, [tokens], from bf16 `logits`, [tokens, vocabulary]. It holds two
# fp32 copies of all logits at its peak: 6.6 GB for four answers of 1,024
# tokens at 20b. Keep its values and cut the peak below a quarter of *one*
# copy.
#
# <details><summary>Hint</summary>
#
# Tokens do not need each other. `logits.split(32)` gives views of 32 rows,
# which cost nothing; `torch.cat` puts the results together.
#
# </details>

# %% tags=["start"]
def label_logprobs(logits, labels):
    """[tokens] fp32 logprobs of labels; logits are bf16."""
    wide = logits.float().log_softmax(-1)
    return wide.gather(-1, labels[:, None])[:, 0]

# %% tags=["solution"]
def label_logprobs(logits, labels):
    """[tokens] fp32 logprobs of labels; logits are bf16."""
    pieces = []
    for rows, ids in zip(logits.split(32), labels.split(32)):
        narrow = rows.float().log_softmax(-1)
        pieces.append(narrow.gather(-1, ids[:, None])[:, 0])
    return torch.cat(pieces)

# %% tags=["check"]
from helpers.exercises import check

check("cut-the-peak", label_logprobs)

# %% [markdown]
# ## 8 · The same ledger at 20 billion parameters
#
# The formulas do not care about size. The first block is what the recorded run
# of section 4 found again; the second, all parameters trained, is prediction
# alone.

# %%
big = load_profile("gpu-20b")
full = dataclasses.replace(
    big, trainer=dataclasses.replace(big.trainer, freeze_experts=False))
for label, choice in (("experts frozen", big), ("all trained", full)):
    table = predicted_trainer_bytes(choice)
    print(f"gpt-oss-20b, {label}: {sum(table.values()) / 1e9:.1f} GB")
    for name, size in table.items():
        print(f"    {name:15s} {size / 1e9:7.2f} GB")

# %% [markdown]
# This is the trainer's static share alone. The rollout engine holds a copy of
# the weights of its own, 41.8 GB in bf16, and its KV cache; activations come
# on top.
#
# **Three takeaways**
#
# 1. Weights, gradients and optimizer follow from the config to the byte. Write
#    the prediction down first; a ledger that is off shows a bug.
# 2. Activations grow with the tokens of a micro-batch. Smaller micro-batches
#    cure that peak and leave the gradient as it is.
# 3. "Released" is a claim: measure it. In the recorded test SGLang kept 67 of
#    76 GB and said success.

# %%
server.stop()
run.finish();
