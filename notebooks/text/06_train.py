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
# # 06 · Train: many steps under Ray
#
# **Question:** does GRPO teach the policy anything that it did not know, on
# questions it never saw?
#
# **You need first:** notebook 05, which takes one step apart. Here the same
# five calls run a hundred times, spread over Ray: trainer ranks and rollout
# engines are actors, placed by a placement group. The code is the same for one
# rank and for several; the profile says how many. Here everything is on one
# machine; notebook 09 plans for more.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12, torch 2.11.0,
# ray 2.60.0, sglang 0.5.17 and megatron-core 0.19.2.

# %% [markdown]
# | profile | time | memory of all processes |
# |---|---|---|
# | `cpu` | about 4 minutes on 2 cores | about 4.5 GB, most of it libraries |

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* the loop takes two to four minutes: start it, then let
# people write down where the completion length will end, and discuss the
# exercises of 05. After an interrupt restart the kernel, since actors may
# still hold half a step; they end with the kernel. `RESUME = True` goes on
# from the newest save. `STEPS = 30` is enough to see length and reward rise
# together, and leaves the last panels noisy. *Say:* "which of these curves
# says *why*?"
#
# *Ask:* Why does the reward still rise after the length has stopped? What
# would the shuffled control look like? Which single plot would you page
# somebody for?
#
# *A late learner* opens the recorded run in `notebooks/recorded/cpu/06_train`
# and reads along; the exercises need no loop.

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook
STEPS: int = 100  # GRPO steps
EVAL_EVERY: int = 20  # steps between two looks at the held-out questions
SAVE_EVERY: int = 50  # steps between two trainer checkpoints; 0: keep none
RESUME: bool = False  # go on from the newest checkpoint of an earlier run
SHUFFLE: bool = False  # control: shuffle the rewards among the answers
ALGORITHM: str = ""  # a recipe such as gspo or dapo; empty: the profile's

# %%
import statistics
import time

from helpers.figures import LivePlot, progress, show_figure, use_style
from helpers.preflight import prepare_kernel
from helpers.profiles import load_profile
from helpers.results import NotebookRun

recipe = {"algorithm": ALGORITHM} if ALGORITHM else {}
settings = load_profile(PROFILE, seed=SEED, steps=STEPS, **recipe)
prepare_kernel(settings)
run = NotebookRun("06_train", settings)
use_style()

# %% [markdown]
# ## 1 · A Ray head, a placement group, two kinds of actor
#
# The head is a process of its own that ends with this kernel, even if the
# kernel is killed. It listens on this machine only and asks for a token that
# is made fresh for each run.

# %%
from helpers.cluster import GrpoCluster, RayHead

from helpers.warm_start import policy_folder

start = time.perf_counter()
head = RayHead(settings).start()
checkpoint = policy_folder(settings)
print("the policy to start from is there:", checkpoint.exists())

# %% [markdown]
# If it is missing, the warm start runs now in a process of its own, exactly as
# notebook 02 does it.

# %%
import subprocess
import sys

if not checkpoint.exists():
    print("making it now (about a minute)")
    code = ("from helpers.profiles import load_profile as p;"
            "from helpers.warm_start import warm_checkpoint as w;"
            f"w(p({PROFILE!r}, seed={SEED}))")
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
head.connect()
print(f"Ray is up after {time.perf_counter() - start:.1f} s")
print("dashboard:", head.dashboard, "(its token: head.token)")

# %% [markdown]
# `GrpoCluster` reserves one bundle for each trainer rank and each engine, then
# starts the actors there. Started alone, trainer and server import their
# libraries at the same time; in a series the rollout actor is a handle on the
# shared server, which is up already.
#
# **Predict:** what does the trainer spend most of its start on?

# %%
import ray

start = time.perf_counter()
cluster = GrpoCluster(settings, checkpoint).start()
ranks = cluster.ready()
print(f"all actors are ready after {time.perf_counter() - start:.1f} s")
for rank in ranks:
    print(f"  trainer rank {rank['rank']}: {rank['device']}, imports "
          f"{rank['import']:.1f} s, load {rank['load']:.1f} s")
for url in cluster.clients.urls:
    print(f"  rollout engine at {url}")
print("bundles:", ray.util.placement_group_table(cluster.group)["bundles"])

# %% [markdown]
# ## 2 · Held-out accuracy before
#
# The held-out questions use *multisets* of digits that no training question
# and no demonstration ever uses in any order. Answers are greedy: no luck of
# the draw.

# %%
from helpers.checkpoints import tokenizer_and_pad
from helpers.rewards import score, shuffled
from helpers.tasks import is_held_out, load_task

tokenizer, pad_id = tokenizer_and_pad(checkpoint)
task = load_task(settings.task, settings.seed)
held_out = task.held_out(settings.heldout)
assert all(is_held_out(p.question) for p in held_out)


def held_out_accuracy():
    answers = cluster.roll_out(held_out, greedy=True)
    return statistics.mean(score(answers, held_out, tokenizer))


before = held_out_accuracy()
print(f"held-out accuracy before GRPO: {before:.3f}")
run.record("heldout_before", before)

# %% [markdown]
# ## 3 · The loop
#
# One step, written out. `settings.algorithm` reaches it in three places:
# `fill_step` draws again where a recipe asks for it, `step_advantages` makes
# advantages of rewards, and `learn` takes the updates, with the passes that
# the recipe needs before them. Where a card is too small for both engines at
# work, the servers hand their memory to the trainers for the update
# (`release_memory`, `resume_memory`); in the other profiles these two lines do
# nothing.

# %%
from helpers.recipes import RECIPES

a = settings.algorithm
print(f"recipe {a.recipe}: {RECIPES[a.recipe].source}")
print(f"{a.mini_batches} update(s) a batch, old logprobs: {a.old_logprobs}")

# %% [markdown]
# Start the notebook with `-p ALGORITHM gspo` and the same cells train with
# another recipe. The run shown here, and its sentences, are the default's.
#
# **Predict:** the completion length starts near 9 tokens, a mix of 5-token
# guesses and 18-token worked answers. Where will it be after 100 steps, and
# will the reward still rise after it has stopped?

# %%
from collections import Counter
from contextlib import contextmanager

from helpers.collate import collate
from helpers.dynamic_sampling import draw_step, fill_step
from helpers.objective import learn, step_advantages

spent = Counter()  # seconds of the present step, by what took them


@contextmanager
def clock(part):
    start = time.perf_counter()
    yield
    spent[part] += time.perf_counter() - start


def draw(step, number):
    count = settings.batch.prompts
    problems = task.sample(count, draw_step(step, number))
    with clock("rollout_seconds"):
        episodes = cluster.roll_out(problems, draw=draw_step(step, number))
    with clock("score_seconds"):
        return episodes, score(episodes, problems, tokenizer)


# %%
def grpo_step(step):
    spent.clear()
    drawn = fill_step(lambda number: draw(step, number),
                      settings.batch.prompts, settings.algorithm.extra_draws)
    with clock("score_seconds"):
        rewards = drawn.rewards
        if SHUFFLE:
            rewards = shuffled(rewards, f"{SEED}-{step}")
        advantages = step_advantages(drawn.episodes, rewards, settings)
        batch = collate(drawn.episodes, advantages, pad_id,
                        settings.trainer.seq_length)
        cluster.release_memory()
    with clock("update_seconds"):
        stats = learn(cluster, batch, settings)
    with clock("sync_call_seconds"):
        cluster.resume_memory()
        sync = cluster.sync_weights(f"step-{step + 1}")
    return keep(step, drawn, stats, sync)


# %%
def keep(step, drawn, stats, sync):
    return {
        "step": step, "reward": drawn.sampled_reward,
        "length": statistics.mean(drawn.lengths),
        "new_tokens": sum(drawn.lengths), "draws": drawn.draws,
        "zero_variance": drawn.silent_share, "sync_seconds": sync.seconds,
        "step_seconds": sum(spent.values()), **spent,
        **{k: stats[k] for k in (
            "entropy", "grad_norm", "logprob_gap", "logprob_gap_max",
            "generation_kl", "token_multiplier", "clip_fraction",
            "learning_rate")},
        "kept_share": stats.get("kept_share", 1.0),  # of trained tokens
    }


# %% [markdown]
# A run that stopped, or was killed, goes on from its newest whole checkpoint:
# model, optimizer, schedule and random state come back, and the curve so far.
# The questions of step *n* are a function of seed and *n* alone, and so are the
# seeds that the answers are sampled with (`draw=` above). On the CPU the curve
# that follows is the one of an uninterrupted run, bit by bit.
#
# A checkpoint is written by a forked process while training goes on, gets its
# name when it is whole, and the two newest are kept.

# %%
from helpers.saves import resume_newest, step_folder

saved = settings.run_folder("06_train") / f"trainer-{a.recipe}"
first, rows, looks = 0, [], {"step": [0], "accuracy": [before]}
if RESUME:
    first, kept = resume_newest(saved, cluster.resume)
    rows, looks = kept["rows"], kept["looks"]
    before = looks["accuracy"][0]
    cluster.sync_weights(f"step-{first}")
print("first step:", first)

# %%
plot = LivePlot({"reward": "mean reward (share right)",
                 "length": "completion length (tokens)",
                 "entropy": "entropy (nat a token)"})


def draw_row(row):
    plot.add(row["step"], reward=row["reward"], length=row["length"],
             entropy=row["entropy"])


for row in rows:  # of the run that is resumed
    draw_row(row)
for step in progress(range(first, settings.steps), label="GRPO steps"):
    rows.append(grpo_step(step))
    draw_row(rows[-1])
    done = step + 1
    if done % EVAL_EVERY == 0 or done == settings.steps:
        looks["step"].append(done)
        looks["accuracy"].append(held_out_accuracy())
    if SAVE_EVERY and (done % SAVE_EVERY == 0 or done == settings.steps):
        cluster.save(step_folder(saved, done),
                     {"rows": rows, "looks": looks}, wait=False)
plot.finish(run, "training", alt="Three curves over the GRPO steps: mean "
            "reward, completion length and entropy of the policy.")

# %%
columns = {name: [row[name] for row in rows] for name in rows[0]}
run.series("steps", columns)


def mean_of(name, part):
    return statistics.mean(columns[name][part])


head10, tail10 = slice(0, 10), slice(-10, None)
for name in ("reward", "length", "entropy", "zero_variance"):
    print(f"{name:14s} first ten steps {mean_of(name, head10):7.3f}"
          f"   last ten {mean_of(name, tail10):7.3f}")

# %% [markdown]
# Read the three panels together. At first length and reward rise together:
# within some twenty steps the policy finds that answers which sort the digits
# earn more, and it stops guessing. Then the length stands still near 18 tokens
# and the reward goes on rising, slowly: from there the policy sheds the slips
# that its demonstrations had taught it. Entropy falls, but not to zero: it
# still explores.

# %% [markdown]
# ## 4 · Held-out accuracy after

# %%
import matplotlib.pyplot as plt

after = looks["accuracy"][-1]
print(f"held-out accuracy {before:.3f} before, {after:.3f} after, "
      f"gain {after - before:+.3f}")
run.record("heldout_after", after)
run.record("heldout_gain", after - before)

fig, ax = plt.subplots(figsize=(7, 3.2))
ax.plot(columns["step"], columns["reward"], marker="", alpha=0.6,
        label="training reward (sampled)")
ax.plot(looks["step"], looks["accuracy"], "o-", label="held-out (greedy)")
ax.set(xlabel="step", ylabel="share right", ylim=(0, 1))
ax.legend()
show_figure(fig, run=run, name="accuracy", data=looks,
            alt="Training reward and held-out greedy accuracy over the "
                "steps; both rise fast at first and slowly after.")

# %% [markdown]
# Be honest about what this shows. Much of the gain is choosing a strategy that
# the warm start had already planted, and shedding slips that were planted with
# it. The task and its settings were picked after about fifteen trials on this
# size of model. What is real: nobody told the policy which of its two habits
# is better, and the held-out digits were never seen in any order.

# %% [markdown] tags=["exercise"]
# ### Exercise: is a gain of two points news?
#
# (5 minutes, easy) An accuracy is a mean of right and wrong over `questions`
# questions. Write its standard error, for a true share of `share`. Then say
# which of your gains above it makes believable.
#
# <details><summary>Hint</summary>
#
# One question that is right with probability p has the variance p (1 - p). The
# variance of a mean of n of them is n times smaller.
#
# </details>

# %% tags=["given"]
import math

# %% tags=["start"]
def standard_error(share, questions):
    return ...  # your turn

# %% tags=["solution"]
def standard_error(share, questions):
    return math.sqrt(share * (1 - share) / questions)

# %% tags=["check"]
from helpers.exercises import check

check("is-it-noise", standard_error)

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2))
axes[0].plot(columns["step"], columns["zero_variance"], marker="")
axes[0].set(xlabel="step", ylabel="zero-variance groups (share)", ylim=(0, 1))
axes[1].semilogy(columns["step"], columns["logprob_gap_max"], marker="",
                 label="max")
axes[1].semilogy(columns["step"], columns["logprob_gap"], marker="",
                 linestyle="--", label="mean")
axes[1].set(xlabel="step", ylabel="|trainer - rollout| logprob (nat)")
axes[1].legend()
show_figure(fig, run=run, name="health",
            data={k: columns[k] for k in ("step", "zero_variance",
                                          "logprob_gap", "logprob_gap_max")},
            alt="Left: share of zero-variance groups, rising. Right: "
                "gap between trainer and rollout logprobs, flat on a "
                "logarithmic axis.")

# %% [markdown]
# Two signs of health. The share of groups that say nothing rises as the policy
# improves: more and more groups are all right. By the end a good part of the
# sampled answers teaches nothing; DAPO replaces such groups by fresh ones
# (`-p ALGORITHM dapo`). And the gap between the two engines must stay flat: a
# gap that grows means that some weights never reach the server. Two gauges of
# that gap are gates in other frameworks: `generation_kl`, the KL of the
# sampler from the trainer (healthy below 0.002 nat a token), and
# `token_multiplier`, the factor by which they disagree about a token on
# average (below 1.05). Both come from the first update's own pass, in which
# the trainer still has the weights that the rollout had.

# %%
run.record("reward_first10", mean_of("reward", head10))
run.record("reward_last10", mean_of("reward", tail10))
run.record("completion_length_first10", mean_of("length", head10))
run.record("completion_length_last10", mean_of("length", tail10))
run.record("entropy_last10", mean_of("entropy", tail10))
run.record("zero_variance_share", statistics.mean(columns["zero_variance"]))
run.record("logprob_gap_mean", max(columns["logprob_gap"]))
run.record("logprob_gap_max", max(columns["logprob_gap_max"]))
run.record("generation_kl", max(columns["generation_kl"]))
run.record("token_multiplier", max(columns["token_multiplier"]))
run.record("kept_share", min(columns["kept_share"]))
run.record("sync_seconds_max", max(columns["sync_seconds"]))

# %% [markdown] tags=["exercise"]
# ### Exercise: four sick runs
#
# (10 minutes, medium) Four runs went wrong. What is the matter with each? The
# causes, each of which occurs once, are `"stop at <|end|>"`,
# `"stale weights"` (some never reach the server), `"temperature 0"` (in the
# rollout) and `"shuffled rewards"`.
#
# | run | reward | completion length | silent groups | logprob gap, max |
# |---|---|---|---|---|
# | A | ends at a guess's | falls to 5 tokens | normal | 0.00001 |
# | B | rises, falls from step 30 on | normal | normal | grows every step |
# | C | no trend | no trend | all of them | 0.00001 |
# | D | falls in fits and starts | wanders | normal | 0.00001 |
#
# <details><summary>Hint</summary>
#
# Ask of each run: do the groups still differ in reward? Do the two engines
# agree? If both are in order, is it the answer's length or the reward itself
# that makes no sense?
#
# </details>

# %% tags=["start"]
causes = {"A": ..., "B": ..., "C": ..., "D": ...}  # your turn

# %% tags=["solution"]
causes = {"A": "stop at <|end|>", "B": "stale weights",
          "C": "temperature 0", "D": "shuffled rewards"}

# %% tags=["check"]
from helpers.exercises import check

check("sick-runs", causes)

# %% [markdown] tags=["exercise"]
# ### Exercise: what dynamic sampling costs
#
# (5 minutes, easy) A step wants 32 groups that teach something, and 40% of all
# groups are silent. How many questions does `dapo` draw on average, if it
# draws one at a time until the step is full?
#
# <details><summary>Hint</summary>
#
# Of n questions, 0.6 n teach something.
#
# </details>

# %% tags=["start"]
drawn_on_average = ...  # your turn: a number

# %% tags=["solution"]
drawn_on_average = 32 / (1 - 0.4)

# %% tags=["check"]
from helpers.exercises import check

check("fill-the-step", drawn_on_average)

# %% [markdown]
# ## 5 · Where a step's time goes

# %%
parts = ("rollout_seconds", "score_seconds", "update_seconds",
         "sync_call_seconds")
medians = {p: statistics.median(columns[p]) for p in parts}
fig, ax = plt.subplots(figsize=(7, 2.6))
ax.barh([p.split("_")[0] for p in parts], list(medians.values()))
ax.invert_yaxis()
ax.set_xlabel("seconds, median over the steps")
show_figure(fig, run=run, name="seconds",
            data={"part": list(medians), "seconds": list(medians.values())},
            alt="Median seconds of rollout, scoring, update and sync: "
                "rollout and update take most of a step.")
run.record("rollout_seconds_median", medians["rollout_seconds"])
run.record("update_seconds_median", medians["update_seconds"])
run.record("step_seconds_median", statistics.median(columns["step_seconds"]))
run.record("rollout_tokens_per_second", statistics.median(
    n / s for n, s in zip(columns["new_tokens"], columns["rollout_seconds"])))

# %% [markdown]
# ## 6 · Keep the result, and prove that it can be resumed
#
# Two forms are kept: the trainer's checkpoint, which knows optimizer and
# schedule and can go on training, and a Hugging Face folder, which any other
# tool loads.
#
# The test of a checkpoint: take one more step, so that there is something to
# undo, then load the checkpoint back.
#
# **Predict:** how far will the logprobs of eight fresh questions be from those
# before?

# %%
fresh = task.sample(8, step=10**6)
probe = cluster.roll_out(fresh)
cluster.release_memory()
rewards = score(probe, fresh, tokenizer)
advantages = step_advantages(probe, rewards, settings)
batch = collate(probe, advantages, pad_id)
now = cluster.logprobs(batch)
learn(cluster, batch, settings)
moved = (cluster.logprobs(batch) - now).abs().max().item()
print(f"one more step moved them by {moved:.1e}")

# %%
if SAVE_EVERY:
    cluster.finish_saves()
    updates = cluster.resume(step_folder(saved, settings.steps))
    difference = (cluster.logprobs(batch) - now).abs().max().item()
    print(f"resumed after {updates} updates, "
          f"largest difference {difference:.1e}")
    run.record("resume_max_abs_logprob", difference)
    assert moved > difference
    final = cluster.export_checkpoint(settings.checkpoint("grpo"))
    print("exported:", final.name,
          [f.name for f in sorted(final.iterdir())])
else:
    print("nothing was kept (SAVE_EVERY = 0), so nothing is resumed")

# %% [markdown]
# ## 7 · The same loop on a GPU
#
# Profile `gpu` runs these cells with a gpt-oss of 315 million parameters in
# bf16 on a harder task, the median of fifteen digits. The picture below is a
# recorded run, not one of this machine.

# %%
from helpers.recorded import show_recorded

if settings.device == "cpu":
    show_recorded("gpu", "06_train", "training")
    show_recorded("gpu", "06_train", "accuracy")

# %% [markdown]
# ## 8 · Tear down
#
# Actors and Ray's own processes end here, and the server if it was started
# here. The runner counts what is left; it must be nothing.
#
# **Three takeaways**
#
# 1. The loop stays readable under Ray: it places actors, and the five calls of
#    notebook 05 do not change.
# 2. Watch completion length and zero-variance groups beside the reward: they
#    say *why* it moves.
# 3. A reward curve proves little. Held-out questions, greedy answers and a
#    control with shuffled rewards (`-p SHUFFLE true`) prove more.

# %%
import os

from helpers.processes import alive, process_tree

started = [pid for pid in process_tree([os.getpid()]) if pid != os.getpid()]
cluster.stop()
head.stop()
left = alive(started)
print(f"{len(started)} processes ran below this one, {len(left)} are left")
run.record("processes_left", len(left))
run.finish();
