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
# # 05 · One GRPO step in five calls
#
# **Question:** what happens in one GRPO step, from a question to a policy that
# answers it a little better?
#
# **You need first:** notebook 02 (the Megatron model), 03 (the SGLang server)
# and 04 (advantages and the clipped loss). What they leave on disk is used
# here; if it is missing, it is made again, and this page says so.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12, torch 2.11.0,
# sglang 0.5.17, megatron-core 0.19.2 and megatron-bridge 0.6.2.

# %% [markdown]
# | profile | time | memory of all processes |
# |---|---|---|
# | `cpu` | about half a minute on 2 cores | about 3 GB, most of it libraries |
#
# The whole step is five named calls:
#
# | call | who works | what comes out |
# |---|---|---|
# | `roll_out` | SGLang | groups of sampled answers with logprobs |
# | `score` | a verifier | one reward an answer |
# | `group_advantages` | a few lines of maths | who did better than its group |
# | `trainer.update` | Megatron | new weights |
# | `sync_weights` | both | the server speaks for the new weights |
#
# Here trainer and notebook share one process, so that you can look at every
# tensor. Notebook 06 spreads the same calls over Ray.

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* `update` run twice, so that the clip fraction is not 0
# and the comparison of old and new logprobs is off: restart, run all above.
# People read the loss; it says little. *Say:* "look at what the new weights
# think of the old answers". If the gap between Megatron and SGLang is not near
# a millionth, stop: a kernel restarted without its server, or weights of
# another run.
#
# *Ask:* Why did answers with an advantage of 0 move? Where would you see that
# sync was forgotten? Which of the five calls knows what is right?
#
# *A late learner* runs all cells, which takes half a minute, and joins at
# "Advantages".

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %%
import time

from helpers.figures import show_figure, use_style
from helpers.preflight import prepare_kernel
from helpers.profiles import load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
prepare_kernel(settings)
run = NotebookRun("05_grpo_step", settings)
use_style()

# %% [markdown]
# ## 0 · Two engines, one checkpoint
#
# Both engines start from the warm-started checkpoint of notebook 02. The
# server is asked for first: while its processes import their libraries, this
# kernel builds the Megatron model.

# %%
from helpers.checkpoints import tokenizer_and_pad
from helpers.rollout import open_server, roll_out
from helpers.trainer import MegatronTrainer
from helpers.warm_start import policy_folder, warm_checkpoint

if not (policy_folder(settings) / "config.json").exists():
    print("no checkpoint to start from yet: making it now, as notebook 02")
checkpoint = warm_checkpoint(settings)
tokenizer, pad_id = tokenizer_and_pad(checkpoint)
server = open_server(settings, checkpoint)

# %%
trainer = MegatronTrainer(settings, checkpoint)
server.wait()
parameters = sum(p.numel() for p in trainer.model.module.parameters())
print(f"trainer: {parameters:,} parameters, "
      f"imports {trainer.seconds['import']:.1f} s, "
      f"load {trainer.seconds['load']:.1f} s")
print(f"server:  answers at {server.url}")

# %% [markdown]
# ## 1 · Roll out
#
# The task: give the median of seven digits (fifteen in profile `gpu`). Each of
# the step's questions gets a *group* of answers, sampled at temperature 1.
#
# **Predict:** the policy was warm-started on demonstrations of which 65% guess
# a digit at once and 35% sort the digits first. What will the eight answers to
# one question look like?

# %%
from helpers.harmony import decode
from helpers.tasks import load_task

task = load_task(settings.task, settings.seed)
clock = {}
start = time.perf_counter()
problems = task.sample(settings.batch.prompts, step=0)
episodes = roll_out(server, problems, settings, draw=0)
clock["roll out"] = time.perf_counter() - start
print(f"{len(problems)} questions, {len(episodes)} answers, "
      f"{sum(len(e.completion_ids) for e in episodes):,} new tokens, "
      f"{clock['roll out']:.2f} s")

# %%
group = [e for e in episodes if e.group == 0]
print("question", problems[0].question, "median", problems[0].answer, "\n")
for e in group:
    print(f"{len(e.completion_ids):2d} tokens  "
          f"{decode(tokenizer, e.completion_ids)}")

# %% [markdown]
# Short answers go straight to the `final` channel: a guess. Long ones sort the
# digits in the `analysis` channel and read the middle one off. Nothing tells
# the policy which habit is better. Only the reward will.

# %% [markdown]
# ## 2 · Score
#
# The verifier is strict: the answer must be well-formed harmony, and its final
# message must be exactly the right digit. A right digit in a broken message
# earns nothing.

# %%
import torch

from helpers.rewards import score

start = time.perf_counter()
rewards = torch.tensor(score(episodes, problems, tokenizer))
clock["score"] = time.perf_counter() - start
length = torch.tensor([float(len(e.completion_ids)) for e in episodes])
worked = length > task.digits
print(f"mean reward {rewards.mean():.3f}")
print(f"guesses     {(~worked).sum():3d}, right {rewards[~worked].mean():.2f}")
print(f"worked      {worked.sum():3d}, right {rewards[worked].mean():.2f}")

# %% [markdown]
# Working the answer out pays about three times as often, though the policy
# does it in only a third or a quarter of its answers. That difference is all
# the signal GRPO gets.

# %% [markdown]
# ## 3 · Advantages
#
# GRPO has no value network: an answer is compared with its siblings. Its
# advantage is `(reward - group mean) / group standard deviation`.
#
# **Predict:** what is the advantage in a group whose answers are all wrong?

# %%
from helpers.advantages import group_advantages, zero_variance_share

start = time.perf_counter()
groups = torch.tensor([e.group for e in episodes])
advantages = group_advantages(rewards, groups, settings.algorithm.advantage)
clock["advantages"] = time.perf_counter() - start
silent = zero_variance_share(rewards, groups)
shown = next((g for g in range(len(problems))
              if rewards[groups == g].std() > 0), 0)  # a group that differs
print(f"group {shown}, rewards   ", rewards[groups == shown].tolist())
print(f"group {shown}, advantages",
      [round(a, 2) for a in advantages[groups == shown].tolist()])
print(f"groups that say nothing: {silent:.0%}")
run.record("zero_variance_share", silent)

# %%
import matplotlib.pyplot as plt

table = advantages.view(settings.batch.prompts, -1)
limit = float(table.abs().max())
fig, ax = plt.subplots(figsize=(8, 3))
image = ax.imshow(table.T, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
ax.set_xlabel("question (group)")
ax.set_ylabel("answer in the group")
ax.grid(False)
fig.colorbar(image, label="advantage")
show_figure(
    fig, run=run, name="advantages",
    alt="Advantages of all answers, one column a question: each column mixes "
        "positive and negative values; columns of one blank colour are "
        "groups whose answers all earned the same.",
    data={"question": groups.tolist(), "reward": rewards.tolist(),
          "advantage": advantages.tolist()},
)

# %% [markdown]
# Read a column from top to bottom: one lone right answer among seven wrong
# ones gets a large positive advantage, and each wrong one a small negative
# one. A column without colour is a zero-variance group: all right or all
# wrong, so it pushes nowhere.

# %% [markdown] tags=["exercise"]
# ### Exercise: predict the silent groups
#
# (10 minutes, medium) Every answer to a question is right with probability
# `right`, each by itself. Which share of groups of `size` answers says
# nothing? Then look at the share of silent groups above: is it what a single
# probability would give?
#
# <details><summary>Hint</summary>
#
# A group says nothing if all its answers are right, or all are wrong. For two
# answers and 0.5 it is a half.
#
# </details>

# %% tags=["start"]
def silent_share(right, size):
    return ...  # your turn: a number from 0 to 1

# %% tags=["solution"]
def silent_share(right, size):
    return right**size + (1 - right)**size

# %% tags=["check"]
from helpers.exercises import check

check("silent-groups", silent_share)

# %% [markdown] tags=["exercise"]
# ### Exercise: find the planted bug
#
# (10 minutes, medium) This function shall give each answer its distance from
# the mean of its group (Dr. GRPO's advantage). Answers to one question stand
# beside each other in `rewards`. It runs, its sum is zero, and it is wrong.
# Mend it.
#
# <details><summary>Hint</summary>
#
# Try it on two questions with three answers each, `torch.arange(6.)`, and
# print the table before the subtraction. Which answers share a column?
#
# </details>

# %% tags=["start"]
def by_group(rewards, size):
    """[answers] rewards, `size` answers a question -> [answers]."""
    table = rewards.view(size, -1)
    return (table - table.mean(0)).flatten()

# %% tags=["solution"]
def by_group(rewards, size):
    """[answers] rewards, `size` answers a question -> [answers]."""
    table = rewards.view(-1, size)  # a row is a question
    return (table - table.mean(1, keepdim=True)).flatten()

# %% tags=["check"]
from helpers.exercises import check

check("by-group", by_group)

# %% [markdown]
# ## 4 · Update
#
# On one GPU with a large model the two engines take turns: the server now
# gives its memory to the trainer. In a profile without `memory_saver` nothing
# happens here.
#
# `collate` turns episodes into right-padded tensors in Megatron's convention:
# position *t* predicts token *t + 1*. The loss mask is 1 where that next token
# belongs to the completion.

# %%
from helpers.collate import collate

clock["release"] = server.release_memory()
batch = collate(episodes, advantages, pad_id, settings.trainer.seq_length)
print("tokens", tuple(batch.tokens.shape), "of which",
      int(batch.loss_mask.sum()), "are trained on")
row = int(advantages.argmax())  # an answer that did better than its group
prompt = len(episodes[row].prompt_ids)
n, first = prompt + len(episodes[row].completion_ids), prompt - 2
for t in range(first, min(n - 1, first + 24)):
    label = decode(tokenizer, [int(batch.labels[row, t])])
    print(f"position {t:2d} predicts {label:14s}"
          f" mask {batch.loss_mask[row, t]:.0f}"
          f" advantage {batch.advantages[row, t]:5.2f}"
          f" rollout logprob {batch.rollout_logprobs[row, t]:8.4f}")

# %% [markdown]
# Before any update, both engines hold the same weights. So Megatron's logprobs
# must be those that SGLang reported while it sampled. If they are not, the
# ratio of the loss is wrong from the first step on, and nothing would tell
# you.
#
# **Predict:** two engines, two implementations, fp32. How large is the gap?

# %%
before = trainer.logprobs(batch)
mask = batch.loss_mask.bool()
gap = (before - batch.rollout_logprobs).abs()[mask]
print(f"|Megatron - SGLang|: mean {gap.mean():.1e}, max {gap.max():.1e}"
      f" over {gap.numel():,} tokens")
run.record("logprob_gap_mean", gap.mean().item())
run.record("logprob_gap_max", gap.max().item())
assert settings.device != "cpu" or gap.max() < 1e-4

# %% [markdown]
# Now the update: forward and backward through Megatron's schedule, gradients
# summed by its DDP, divided by the number of trained tokens, clipped to norm
# 1, one Adam step.

# %%
start = time.perf_counter()
stats = trainer.update(batch)
clock["update"] = time.perf_counter() - start
for name in ("loss", "grad_norm", "entropy", "clip_fraction",
             "ratio_mean", "learning_rate"):
    print(f"{name:14s} {stats[name]: .5f}")

# %% [markdown]
# The clip fraction is 0 and the ratio 1: the first step on a batch is
# on-policy, so the clipped loss is plain policy gradient. The loss itself says
# little, as notebook 04 shows. What did the step *do*? Ask the new weights
# about the old answers.

# %%
after = trainer.logprobs(batch)
change = ((after - before) * batch.loss_mask).sum(1)
better = {"advantage > 0": change[advantages > 0],
          "advantage < 0": change[advantages < 0],
          "advantage = 0": change[advantages == 0]}
for name, values in better.items():
    if len(values):
        print(f"{name}: {len(values):3d} answers, "
              f"mean change of log p(answer) {values.mean():+.4f}")

# %%
fig, ax = plt.subplots(figsize=(7, 3.4))
for marker, (name, values) in zip("osx", better.items()):
    x = advantages[[i for i in range(len(change))
                    if (advantages[i] > 0) == ("> 0" in name)
                    and (advantages[i] == 0) == ("= 0" in name)]]
    ax.plot(x, values, marker, label=name, alpha=0.6)
ax.axhline(0, color="0.5", linewidth=1)
ax.set_xlabel("advantage")
ax.set_ylabel("change of log p(answer) (nat)")
ax.legend()
show_figure(
    fig, run=run, name="change",
    alt="Change of each answer's log-probability against its advantage: "
        "most answers with a positive advantage move up.",
    data={"advantage": advantages.tolist(), "change": change.tolist()},
)

# %% [markdown]
# Answers with a positive advantage became likelier on average. Not each of
# them: one shared set of weights serves all answers, and whoever resembles a
# better sibling is carried along. That is also why zero-advantage answers
# move.

# %% [markdown]
# ## 5 · Sync
#
# The server still speaks for the old weights. `sync_weights` exports the
# Megatron model to Hugging Face names and hands the tensors to the running
# server: on a CPU their values travel in the request, on a GPU only handles
# do. Nothing restarts.

# %%
from helpers.weight_sync import sync_weights

clock["resume"] = server.resume_memory()
report = sync_weights(trainer, server, "step-1")
clock["sync"] = report.seconds
print(f"{report.tensors} tensors, {report.megabytes:.1f} MB: export "
      f"{report.export_seconds:.3f} s, send {report.send_seconds:.3f} s")
run.record("sync_seconds_max", report.seconds)

# %% [markdown]
# **Predict:** ask the server for the logprobs of the same answers again. Will
# they agree with Megatron's *new* weights, or with the old ones?

# %%
some = range(0, len(episodes), 8)
full = [[*episodes[i].prompt_ids, *episodes[i].completion_ids] for i in some]
served = server.prompt_logprobs(full)
to_new, to_old = [], []
for i, logprobs in zip(some, served):
    first, last = len(episodes[i].prompt_ids) - 1, len(logprobs)
    line = torch.tensor(logprobs[first:])
    to_new.append((line - after[i, first:last]).abs().max())
    to_old.append((line - before[i, first:last]).abs().max())
print(f"server against new weights: max {max(to_new):.1e}")
print(f"server against old weights: max {max(to_old):.1e}")
run.record("sync_follow_max_abs_logprob", max(to_new).item())
assert settings.device != "cpu" or max(to_new) < 1e-4 < max(to_old)

# %% [markdown]
# The server follows. Every episode sampled from now on carries the label of
# the weights that sampled it:

# %%
again = roll_out(server, problems[:2], settings)
print("weight version before:", episodes[0].weight_version)
print("weight version now:   ", again[0].weight_version)
assert again[0].weight_version == "step-1"

# %% [markdown] tags=["exercise"]
# ### Exercise: put a step in order
#
# (5 minutes, easy) Seven calls of one step on a card that is too small for
# both engines at work: "advantages", "release" (the server's memory),
# "resume", "roll out", "score", "sync", "update". Write them in the order in
# which they must run.
#
# <details><summary>Hint</summary>
#
# What needs the server's memory, what needs the card for itself, and what
# needs new weights?
#
# </details>

# %% tags=["start"]
order_of_calls = ...  # your turn: a list of the seven names

# %% tags=["solution"]
order_of_calls = ["roll out", "score", "advantages", "release",
                  "update", "resume", "sync"]

# %% tags=["check"]
from helpers.exercises import check

check("order-of-a-step", order_of_calls)

# %% [markdown]
# ## Where did the time go?

# %%
fig, ax = plt.subplots(figsize=(7, 2.6))
ax.barh(list(clock), list(clock.values()))
ax.invert_yaxis()
ax.set_xlabel("seconds")
show_figure(
    fig, run=run, name="clock",
    alt="Seconds of the five calls of one step: rollout and update take "
        "nearly all of it, scoring, advantages and sync almost none.",
    data={"call": list(clock), "seconds": list(clock.values())},
)
run.record("step_seconds_median", sum(clock.values()))

# %% [markdown]
# One step is one sample. Later steps sample longer answers, and Ray adds calls
# of its own: notebook 06 shows the median over a hundred.
#
# **Three takeaways**
#
# 1. A GRPO step is five calls. Everything that makes it GRPO is in one line of
#    maths: compare each answer with its siblings.
# 2. Before you trust a curve, compare both engines' logprobs on the same
#    tokens. In fp32 they agree to about 1e-6 here.
# 3. Zero-variance groups cost rollout time and teach nothing. Watch their
#    share.

# %%
server.stop()
run.finish();
