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
# # 04 · The maths of GRPO on three tokens
#
# **Question:** what do advantages, clipping, KL and token or sequence ratios
# do, by hand on three tokens, then in code?
#
# **You need first:** logarithms, a softmax, and what a gradient is. No other
# notebook has to run before this one, and it starts no engine.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12 and torch
# 2.11.0.
#
# | profile | time | peak memory |
# |---|---|---|
# | `cpu` | about half a minute on 2 cores | below 1 GiB |
# | `gpu`, `gpu-20b`, `cluster` | the same: nothing runs on a GPU | the same |

# %% [markdown]
# Every section goes the same way: you work a few numbers by hand, then you
# call the helper that the trainer calls, and `agree` checks that both give
# the same. Left out: value networks and per-token rewards (GRPO has neither),
# and what section 7's corrections do to a real training run (notebook 08).

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* the sign (a loss is minus the objective), the mask one
# position too late, the clip taken for a wall, and the estimator with the
# right value taken for the one with the right gradient. *Say:* "fill in the
# table by hand first"; `agree` settles every argument, so let people change
# the hand-worked numbers until it stops them, and read what it says.
#
# *Ask:* A question that is always answered right: what does it cost, what does
# it teach? Why is a negative advantage with ratio 50 worse than a positive
# one? Which divisor would you choose if answers grow and rewards do not?
#
# *Short of time:* sections 1 to 4; 5 to 8 in the two-day plan. *A late
# learner* can begin with any section after running the cells above it
# (seconds, no engine).

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %% [markdown]
# ## Set up
#
# `agree` compares a hand-worked value with the code's, prints both, and
# keeps the largest difference. That number is this notebook's result.

# %%
import math

import matplotlib.pyplot as plt
import torch

from helpers.figures import show_figure, use_style
from helpers.profiles import load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
run = NotebookRun("04_grpo_math", settings)
use_style()
gaps = {}


# %%
def agree(name, hand, code):
    """Print both, keep the largest difference, stop if it is too large."""
    hand = torch.as_tensor(hand, dtype=torch.float64)
    code = code.detach().double()
    assert hand.shape == code.shape, f"{name}: compare equal shapes"
    gaps[name] = (hand - code).abs().max().item()
    for who, values in ((f"{name}: hand", hand), (f"{name}: code", code)):
        rounded = [round(x, 4) + 0.0 for x in values.flatten().tolist()]
        print(f"{who:30} {rounded}")
    assert gaps[name] < 1e-6, f"{name}: hand and code differ by {gaps[name]}"


# %% [markdown]
# ## 1 · Advantages: compared with whom?
#
# The policy answers one question four times; a rule gives each answer a
# reward. Is a reward of 1 good? Only by comparison, and GRPO compares with
# the other answers to the *same* question. No second network estimates how
# hard the question is: the group says so. Read the *advantage* as "this many
# standard deviations better than the others":
#
# $$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}$$

# %% [markdown]
# **By hand.** Rewards $1, 0, 0, 0$. The mean is $1/4$. The squared distances
# are $9/16$ and three times $1/16$, together $12/16$; divided by
# $n - 1 = 3$ that is $1/4$, so the standard deviation is $1/2$. The right
# answer gets $(3/4) / (1/2) = 1.5$, each wrong one $-0.5$. (The code adds
# $\epsilon = 10^{-4}$ below, which moves the fourth digit.)

# %%
from helpers.advantages import KINDS, group_advantages, zero_variance_share

rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
question = torch.zeros(4, dtype=torch.int64)  # one label a question
std = 0.5 + 1e-4
agree(
    "advantage std",
    [0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std],
    group_advantages(rewards, question),
)

# %% [markdown]
# Two variants change the scale, not the sign:
#
# - `mean` (Dr. GRPO) does not divide: $r_i - \mathrm{mean}(r)$.
# - `leave_one_out` (RLOO) leaves the answer itself out of the mean it is
#   compared with. The right answer sees three zeros, so $1 - 0 = 1$; a wrong
#   one sees $1, 0, 0$, so $0 - 1/3$.

# %%
agree(
    "advantage mean",
    [0.75, -0.25, -0.25, -0.25],
    group_advantages(rewards, question, kind="mean"),
)
agree(
    "advantage leave_one_out",
    [1.0, -1 / 3, -1 / 3, -1 / 3],
    group_advantages(rewards, question, kind="leave_one_out"),
)

# %% [markdown]
# `leave_one_out` is `mean` times $n / (n - 1)$: the same direction, a longer
# step.

# %% [markdown]
# **Predict** before you run the next cell: of eight answers, $k$ are right.
# For which $k$ does a right answer get the largest advantage? And what do
# you get when all eight are right?

# %%
right = list(range(9))
eight = torch.zeros(8, dtype=torch.int64)  # one question, eight answers
data = {"right": right}
for kind in KINDS:
    rows = [
        group_advantages((torch.arange(8) < k).float(), eight, kind)
        for k in right
    ]
    data[f"right_{kind}"] = [row[0].item() for row in rows]
    data[f"wrong_{kind}"] = [row[-1].item() for row in rows]
print("k = 1 .. 7, std:", [round(a, 2) for a in data["right_std"][1:8]])
print("k = 0 and k = 8:", data["right_std"][0], data["right_std"][8])

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.8))
for axis, which in zip(axes, ("right", "wrong")):
    for kind in KINDS:
        axis.plot(right[1:8], data[f"{which}_{kind}"][1:8], label=kind)
    axis.plot([0, 8], [0, 0], "kx", label="all equal: 0")
    axis.set_title(f"a {which} answer")
    axis.set_xlabel("right answers among 8 (count)")
axes[0].set_ylabel("advantage (1)")
axes[0].legend()
show_figure(
    fig,
    alt="Advantage of a right and of a wrong answer against how many of eight "
    "are right. With std a lone right answer gets about 2.5, a lone wrong one "
    "about -2.5; mean and leave-one-out are straight lines of size 1 or less.",
    run=run, name="advantages", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** The rarer an outcome, the larger its advantage, and `std` bends
# the line: it multiplies by $1 / \mathrm{std}$, which is large for questions
# that are nearly always or nearly never answered right. Dr. GRPO calls this a
# difficulty bias and drops the division.
#
# How large is it? At $k = 4$ the standard deviation is 0.53, at $k = 1$ or 7
# it is 0.35: set against `mean`, `std` turns the rarely solved question up
# by half again.

# %% [markdown]
# At both ends (the crosses) every reward is the same, every advantage is
# exactly 0, and eight answers were sampled for nothing. DAPO's *dynamic
# sampling* replaces such groups; the share of them is a health figure that
# you meet again in notebook 06.

# %%
rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
questions = torch.tensor([0, 0, 1, 1, 2, 2])
agree(
    "zero-variance share",
    2 / 3,  # questions 1 and 2
    torch.tensor(zero_variance_share(rewards, questions)).double(),
)

# %% [markdown] tags=["exercise"]
# ### Exercise: change the group size
#
# (5 minutes, easy) In a group of 8, a lone right answer has an advantage near
# 2.47 (kind `std`). Now sample 16 answers a question, one of them right.
# Predict its advantage by hand, then check.
#
# <details><summary>Hint</summary>
#
# Mean 1/16. The squared distances are (15/16)² once and (1/16)² fifteen times;
# their sum divided by 15 is the variance.
#
# </details>

# %% tags=["start"]
lone_advantage = ...  # your turn: a number

# %% tags=["solution"]
rewards_of_16 = torch.eye(16)[0]  # one right answer
one_question = torch.zeros(16, dtype=torch.int64)
lone_advantage = group_advantages(rewards_of_16, one_question)[0]

# %% tags=["check"]
from helpers.exercises import check

check("lone-advantage", lone_advantage)

# %% [markdown]
# ## 2 · The ratio and the clip
#
# The answers were sampled by the policy of a moment ago, $\pi_{old}$. After
# an update the policy is another one, $\pi$. The ratio
# $r_t = \pi(t) / \pi_{old}(t)$ says how much more likely token $t$ has
# become since. (Here $r$ with an index $t$ is a ratio; rewards do not occur
# again.)

# %% [markdown]
# The objective is $r_t A$, and the clip takes away the reason
# to go on once the ratio has moved far enough in the wanted direction:
#
# $$\min\big(r_t A,\ \mathrm{clip}(r_t,\, 1 - 0.2,\, 1 + 0.28)\, A\big)$$

# %% [markdown]
# **By hand.** Three tokens had probability $1/4$, $2/5$, $1/2$ at the rollout
# and have $1/2$, $2/5$, $1/4$ now, so the ratios are $2$, $1$, $1/2$.
#
# | ratio | clipped ratio | $A = 1$ | $A = -1$ |
# |---|---|---|---|
# | 2 | 1.28 | min(2, 1.28) = **1.28** | min(-2, -1.28) = **-2** |
# | 1 | 1 | min(1, 1) = **1** | min(-1, -1) = **-1** |
# | 1/2 | 0.8 | min(0.5, 0.8) = **0.5** | min(-0.5, -0.8) = **-0.8** |

# %%
from helpers.losses import clipped_objective

old = torch.tensor([[0.25, 0.4, 0.5]]).log()
new = torch.tensor([[0.5, 0.4, 0.25]]).log()
ratio = (new - old).exp()
plus, minus = torch.ones(1, 3), -torch.ones(1, 3)
agree("clip, A = 1", [[1.28, 1, 0.5]], clipped_objective(ratio, plus))
agree("clip, A = -1", [[-2, -1, -0.8]], clipped_objective(ratio, minus))

# %% [markdown]
# Look at the bold values that differ from $r_t A$: a good token that is
# already much likelier (1.28 in place of 2), and a bad token that is already
# much rarer (-0.8 in place of -0.5). In both cases the policy has gone far
# enough. The opposite mistakes, a good token made rarer or a bad one made
# likelier, are never clipped: those should be put right.

# %% [markdown]
# **Why 0.28 above and 0.2 below?** A token of probability 0.9 can hardly grow
# by a factor 1.2; one of 0.01 grows from 0.010 to 0.012 and stops. An equal
# clip holds back exactly the rare tokens that exploration needs. DAPO's
# *clip-higher* gives the upper side more room.

# %% [markdown]
# **Predict:** where on the ratio axis is each curve flat? With a negative
# advantage, is there any bound on how bad one token can count?

# %%
grid = torch.linspace(0, 5, 501)
up, down = torch.ones(501), -torch.ones(501)
curves = {
    "clip 0.2 / 0.2, A = +1": clipped_objective(grid, up, clip_high=0.2),
    "clip 0.2 / 0.28, A = +1": clipped_objective(grid, up),
    "clip 0.2 / 0.28, A = -1": clipped_objective(grid, down),
    "and dual clip 3, A = -1": clipped_objective(grid, down, dual_clip=3.0),
}
data = {"ratio": grid.tolist()}
data |= {name: values.tolist() for name, values in curves.items()}

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4.2))
for number, (name, values) in enumerate(curves.items()):
    label = name.split(",")[0]
    axes[number // 2].plot(grid, values, label=label, markevery=50)
for axis, sign in zip(axes, (1, -1)):
    axis.plot(grid, sign * grid, "k:", marker="", label="no clip: ratio × A")
    axis.set_title(f"advantage {sign:+d}")
    axis.set_xlabel("ratio, new / old probability (1)")
    axis.legend()
axes[0].set_xlim(0, 2.5)
axes[0].set_ylim(0, 2)
axes[0].set_ylabel("objective of one token (1)")
show_figure(
    fig,
    alt="Objective of one token against its ratio. Advantage +1: rises with "
    "the ratio, flat above 1.2 or 1.28. Advantage -1: flat at -0.8 below 0.8, "
    "then falls without end, unless the dual clip holds it at -3.",
    run=run, name="clip", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** Flat means no gradient. Left: flat above 1.2 or 1.28. Right:
# flat below 0.8; above 1 nothing stops the fall.

# %% [markdown]
# What does that fall cost you? Take a bad token with
# probability 0.01 at the rollout and 0.5 now: its ratio is 50, and one token
# outweighs fifty others. The *dual clip* puts a floor under it, here at
# $3A$. The price is visible too: beyond 3 that token no longer learns.

# %% [markdown]
# Does the code agree that flat means no gradient? The same three tokens,
# with a ratio of 4 as the fourth. **Predict** the zeros before you look: two
# for $A = 1$; for $A = -1$ one from the clip and one from the dual clip.

# %%
ratio = torch.tensor([2.0, 1.0, 0.5, 4.0], requires_grad=True)
for advantage, expected in ((1.0, [0, 1, 1, 0]), (-1.0, [-1, -1, 0, 0])):
    advantages = torch.full((4,), advantage)
    objective = clipped_objective(ratio, advantages, dual_clip=3.0)
    gradient = torch.autograd.grad(objective.sum(), ratio)[0]
    agree(f"gradient, A = {advantage:+.0f}", expected, gradient)


# %% [markdown] tags=["exercise"]
# ### Exercise: which tokens fall silent?
#
# (10 minutes, medium) For token ratios of one answer, [tokens], and its
# advantage (a number) return a mask, [tokens], that is true where the clip of
# 0.2 / 0.28 removes the gradient. Write it with comparisons, without
# `clipped_objective`.
#
# <details><summary>Hint</summary>
#
# Go through the table of this section row by row. A good token that has become
# rarer is to be put right: does the clip stop that?
#
# </details>

# %% tags=["start"]
def silent(ratio, advantage):
    return ...  # your turn: a mask, [tokens]

# %% tags=["solution"]
def silent(ratio, advantage):
    if advantage > 0:
        return ratio > 1.28
    return ratio < 0.8

# %% tags=["check"]
from helpers.exercises import check

check("silent-tokens", silent)

# %% [markdown]
# ## 3 · From answers to a batch to a loss
#
# The trainer sees rectangles, and a position *predicts the next token*:
# `labels[t]` is `tokens[t + 1]`. So the mask is 1 from the last prompt token
# on, one position earlier than you may expect. Work one row by hand: prompt
# 11, 12 and completion 21, 22, 23.

# %% [markdown]
# | position | 0 | 1 | 2 | 3 | 4 | 5 |
# |---|---|---|---|---|---|---|
# | token | 11 | 12 | 21 | 22 | 23 | pad |
# | label | 12 | 21 | 22 | 23 | pad | pad |
# | mask | 0 | 1 | 1 | 1 | 0 | 0 |

# %%
from helpers.collate import collate
from helpers.records import Episode

logprobs = tuple(old[0].tolist())  # of the rollout engine, one a token
episode = Episode((11, 12), (21, 22, 23), logprobs, "stop", group=0)
batch = collate([episode], torch.tensor([1.0]), pad_id=0, seq_length=6)
agree("labels", [[12, 21, 22, 23, 0, 0]], batch.labels)
agree("mask", [[0, 1, 1, 1, 0, 0]], batch.loss_mask)

# %% [markdown] tags=["exercise"]
# ### Exercise: a mask by hand
#
# (5 minutes, easy) A prompt of three tokens and an answer of two, padded to
# six positions. Write the loss mask.
#
# <details><summary>Hint</summary>
#
# Write tokens and labels below each other first, as in the table above. The
# mask is 1 where the *label* is a token of the answer.
#
# </details>

# %% tags=["start"]
mask_of_six = ...  # your turn: a list of six numbers

# %% tags=["solution"]
mask_of_six = [0, 0, 1, 1, 0, 0]

# %% tags=["check"]
from helpers.exercises import check

check("mask-by-hand", mask_of_six)

# %% [markdown]
# Now the loss. By hand, with section 2's three tokens and $A = 1$: the
# objectives are $1.28$, $1$ and $0.5$, their sum $2.78$, and since an
# optimizer minimises, the total is $-2.78$. It is divided by 3 tokens.

# %% [markdown]
# Why does the helper return the total *and* the divisor? Because micro-batches
# and GPUs each see a part. Means of parts are not the mean of the whole; sums
# are. You divide once, at the end.

# %% [markdown]
# **Predict** the gradient with respect to the logprobs. Since
# $dr/d\log\pi = r$, an unclipped token has $-rA$ (before the division): 0
# where the clip is active, $-1$ for ratio 1, $-0.5$ for ratio $1/2$. And 0 in
# the three columns that are prompt or padding, where we put nonsense.

# %%
from helpers.losses import clipped_policy_loss

trainer = torch.full((1, 6), math.nan)  # the nonsense: not even a number
trainer[0, 1:4] = new
trainer.requires_grad_()
loss = clipped_policy_loss(trainer, batch)
agree("total", -2.78, loss.total)
agree("normaliser", 3, loss.normaliser)
gradient = torch.autograd.grad(loss.total, trainer)[0]
agree("gradient of the loss", [[0, 0, -1, -0.5, 0, 0]], gradient)

# %% [markdown]
# The loss also carries what you watch during training, again as sum and
# count. One token of three is clipped. `logprob_gap` is the mean
# $|\log\pi - \log\pi_{old}|$: here $(\ln 2 + 0 + \ln 2) / 3$.

# %%
means = {
    name: total / count for name, (total, count) in loss.metrics.items()
}
for name, value in means.items():
    print(f"{name:14} {value.item():.4f}")
agree("clip_fraction", 1 / 3, means["clip_fraction"])
agree("ratio_mean", 3.5 / 3, means["ratio_mean"])
agree("logprob_gap", 2 * math.log(2) / 3, means["logprob_gap"])

# %% [markdown]
# Keep `approx_kl` = 0.1667 in mind: section 5 works it by hand.

# %% [markdown]
# **What does the clip do to learning?** A policy with a vocabulary of three
# tokens answers with one token; token 0 is right. All start at probability
# 1/3. You sample six answers, two of each, and reuse this one batch for 40
# updates, with the clip and without. (With one update a batch every ratio is
# 1 and nothing clips: the gradient is simply $-A$.)

# %% [markdown]
# **Predict:** with the clip, does the probability of token 0 stop at
# $1.28 \times 1/3 = 0.427$?

# %%
answers = torch.tensor([0, 0, 1, 1, 2, 2])
uniform = (math.log(1 / 3),)  # the logprob of any token at the start
episodes = [Episode((9,), (a,), uniform, "stop", 0) for a in answers.tolist()]
rewards = (answers == 0).float()
advantages = group_advantages(rewards, torch.zeros(6, dtype=torch.int64))
six = collate(episodes, advantages, pad_id=0, seq_length=2)


def reuse(updates=40, rate=0.3, **clips):
    """Probability of token 0 before and after each update on `six`."""
    logits, path = torch.zeros(3), []
    for _ in range(updates + 1):
        logits.requires_grad_()
        policy = logits.log_softmax(-1)
        path.append(policy[0].exp().item())
        columns = torch.stack([policy[answers], torch.zeros(6)], dim=1)
        loss = clipped_policy_loss(columns, six, **clips).loss
        step = torch.autograd.grad(loss, logits)[0]
        logits = (logits - rate * step).detach()
    return path


# %%
free = reuse(clip_low=1.0, clip_high=math.inf)  # no limit on either side
held = reuse()
print(f"after 40 updates: no clip {free[-1]:.3f}, clip {held[-1]:.3f}")
assert held[-1] == held[-2] > 1.28 / 3, "the clip stops, but later"
assert free[-1] > held[-1]

# %%
fig, axis = plt.subplots()
axis.plot(free, label="no clip", markevery=4)
axis.plot(held, label="clip 0.2 / 0.28", markevery=4)
axis.axhline(1.28 / 3, color="k", linestyle=":", label="1.28 × 1/3")
axis.set_xlabel("updates on the same batch (count)")
axis.set_ylabel("probability of the right token (1)")
axis.set_ylim(0.3, 1)
axis.legend()
show_figure(
    fig,
    alt="Probability of the right token over 40 updates on one batch. Without "
    "a clip it keeps rising towards 1; with the clip it passes the dotted "
    "line at 0.427 and then stays constant below 0.5.",
    run=run, name="reuse",
    data={"update": list(range(41)), "no_clip": free, "clip": held},
);  # fmt: skip

# %% [markdown]
# **Read it.** The clip ends the over-use of six answers, which is its purpose:
# without it one small sample drags the policy towards certainty.

# %% [markdown]
# But the clip is no wall. At 0.427 the two good answers stop pulling; the four
# bad ones, still above $0.8 \times 1/3$, go on pushing, and the softmax hands
# what they lose to token 0. All movement ends when every token is past its own
# limit. So a ratio may lie beyond the clip range, and `clip_fraction` tells
# you how often.

# %% [markdown]
# **Must a clipped token fall silent?** CISPO says no. It differentiates
# $\log\pi$ alone and multiplies by the ratio as a plain number, held below a
# limit (here 5; $\mathrm{sg}$ means: no gradient):
#
# $$\mathrm{sg}\big[\min(r_t,\, 5)\big]\; A\; \log\pi(t)$$

# %% [markdown]
# **By hand.** The gradient on $\log\pi$ is the factor in front of it. The
# three tokens with ratios $2$, $1$, $1/2$ and $A = 1$ have $-2$, $-1$, $-1/2$
# in the loss. The first, which the clip had silenced, now weighs most.

# %%
from helpers.losses import cispo_loss

loss = cispo_loss(trainer, batch)
gradient = torch.autograd.grad(loss.total, trainer)[0]
agree("CISPO gradient", [[0, -2, -1, -0.5, 0, 0]], gradient)

# %% [markdown]
# Now the weight at every ratio: the size of the gradient on $\log\pi$,
# divided by $|A|$. A token whose ratio is 1 has weight 1 everywhere.
#
# **Predict** for the clip, the dual clip and CISPO: where is the weight 0,
# and which one is flat *without* being 0?

# %%
ratios = torch.linspace(0.02, 8, 400)
row = Episode((9,), (1,) * 400, (-3.0,) * 400, "stop", 0)


def weight_at(loss_function, advantage, **options):
    """Size of the gradient on the logprob at each of `ratios`."""
    many = collate([row], torch.tensor([advantage]), pad_id=0)
    logprobs = many.rollout_logprobs.clone()
    logprobs[0, :400] += ratios.log()
    logprobs.requires_grad_()
    total = loss_function(logprobs, many, **options).total
    return torch.autograd.grad(total, logprobs)[0][0, :400].abs().tolist()


# %%
data = {"ratio": ratios.tolist()}
for sign, advantage in (("plus", 1.0), ("minus", -1.0)):
    data |= {
        f"clip_{sign}": weight_at(clipped_policy_loss, advantage),
        f"dual_{sign}": weight_at(
            clipped_policy_loss, advantage, dual_clip=3.0
        ),
        f"cispo_{sign}": weight_at(cispo_loss, advantage),
    }
assert data["clip_plus"] == data["dual_plus"], "dual clip: A < 0 alone"

# %%
labels = {"cispo": "CISPO, limit 5", "dual": "dual clip 3"}
labels["clip"] = "clip 0.2 / 0.28"
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4), sharey=True)
for axis, sign in zip(axes, ("plus", "minus")):
    axis.plot(ratios, ratios, "k:", label="no clip: the ratio")
    for start, (name, label) in enumerate(labels.items()):
        places = (10 * start, 40)  # markers apart where curves coincide
        weight = data[f"{name}_{sign}"]
        axis.plot(ratios, weight, label=label, markevery=places)
    axis.set_title(f"A = {'+1' if sign == 'plus' else '-1'}")
    axis.set_xlabel("ratio, new / old probability (1)")
axes[0].set_ylabel("weight of the gradient (1)")
axes[0].legend(loc="upper left")
show_figure(
    fig,
    alt="Gradient weight against ratio. Advantage +1: clip and dual clip "
    "follow the ratio and fall to 0 at 1.28. Advantage -1: 0 below 0.8; the "
    "clip then follows the ratio, and the dual clip falls to 0 at 3. CISPO "
    "follows the ratio up to 5 and stays there for both signs.",
    run=run, name="gradient_weights", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** The clip has a cliff: a good token at ratio 1.27 weighs 1.27,
# at 1.29 nothing. CISPO has a ceiling, and no token is ever dropped. Its
# authors (MiniMax-M1) saw the clip drop the rare tokens at which an answer
# turns ("wait", "however"), since those move by large factors first.

# %% [markdown]
# The price: nothing in CISPO stops the over-use of one batch. For the six
# answers above it is the curve without a clip: no ratio gets past 3 there, so
# the limit never acts. And its total is not the objective: only the gradient
# means something, so do not plot the loss.

# %% [markdown]
# **What if you update once a batch?** Then the policy that learns is the one
# that answered: every ratio is 1. Trainers take a shortcut and put
# `logprobs.detach()` in place of the old logprobs, which saves a pass.
#
# **Predict:** with $A = 1$, value and gradient of this loss, beside the plain
# policy gradient's $-A \log\pi$. Which of the two agree?

# %% [markdown]
# **By hand.** $r = 1$ whatever the probabilities, so the total is $-3$. Its
# gradient is $-r A = -1$ a token. The plain total is
# $-\log(1/2 \cdot 2/5 \cdot 1/4) = \log 20$, and its gradient $-1$ a token.

# %%
from dataclasses import replace

on_policy = replace(batch, rollout_logprobs=trainer.detach())
loss = clipped_policy_loss(trainer, on_policy)
plain = -trainer[0, 1:4].sum()
agree("on-policy total", -3, loss.total)
agree("plain total", math.log(20), plain)
for name, total in (("on-policy", loss.total), ("plain", plain)):
    gradient = torch.autograd.grad(total, trainer)[0]
    agree(f"{name} gradient", [[0, -1, -1, -1, 0, 0]], gradient)
for name in ("clip_fraction", "ratio_mean", "logprob_gap"):
    total, count = loss.metrics[name]
    print(f"{name:14} {(total / count).item():.4f}")

# %% [markdown]
# Other value, same gradient: with one update a batch GRPO *is* the plain
# policy gradient with group advantages. Look at the three figures, too. They
# are 0, 1 and 0 by construction, whatever the engines do: with the shortcut
# you have to measure the gap between rollout and trainer elsewhere
# (section 7).

# %% [markdown]
# ## 4 · One ratio a token, or one an answer?
#
# The reward belongs to the whole answer, the ratio so far to a single token.
# GSPO asks for one ratio an answer, the geometric mean of its tokens' ratios:
#
# $$s = \Big(\prod_t r_t\Big)^{1/n}
#     = \exp\Big(\frac{1}{n}\sum_t \log r_t\Big)$$

# %% [markdown]
# **By hand.** Section 2's ratios $2$, $1$, $1/2$ multiply to 1, so $s = 1$:
# for GSPO nothing has happened, though two tokens moved by a factor of two.
# With $A = 1$ nothing is clipped, each token counts $1 \cdot 1$, and the mean
# over the answer is 1.

# %% [markdown]
# **Predict** the gradient of each token. GSPO writes each token's ratio so
# that its *value* is $s$ and its *gradient* is the token's own; the answer
# divides by its length.

# %%
loss = clipped_policy_loss(
    trainer, batch, ratio="sequence", normaliser="sequence"
)
agree("GSPO total", -1, loss.total)
gradient = torch.autograd.grad(loss.total, trainer)[0]
agree("GSPO gradient", [[0, -1 / 3, -1 / 3, -1 / 3, 0, 0]], gradient)

# %% [markdown]
# Compare with section 3, where the gradients were $0$, $-1$, $-0.5$: by tokens
# each had a weight of its own and the first was cut off. By sequences they
# all share one fate.

# %% [markdown]
# Now the same with noise. Two answers, 4 and 40 tokens; each token's log
# ratio is random with spread 0.05, and the second token of both is an outlier
# with ratio $e$. **Predict:** which sequence ratio notices the outlier more?

# %%
from helpers.losses import sequence_log_ratio, token_log_ratio

generator = torch.Generator().manual_seed(settings.seed)
moves = 0.05 * torch.randn(2, 40, generator=generator)
moves[:, 1] = 1.0  # log ratio 1: this token became e times as likely
mask = torch.ones(2, 40)
mask[0, 4:] = 0  # the short answer ends after 4 tokens
rollout = torch.full((2, 40), -2.0)
by_token = token_log_ratio(rollout + moves, rollout, mask).exp()
by_answer = sequence_log_ratio(rollout + moves, rollout, mask).exp()
geometric = [math.exp(moves[0, :4].mean()), math.exp(moves[1].mean())]
agree("sequence ratios", geometric, by_answer[:, 0])

# %%
columns = {"position": torch.arange(1, 41).expand(2, 40), "mask": mask}
columns |= {"token_ratio": by_token, "sequence_ratio": by_answer}
data = {"answer_tokens": [4] * 40 + [40] * 40}
data |= {name: rows.flatten().tolist() for name, rows in columns.items()}

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True)
for row, (axis, length) in enumerate(zip(axes, (4, 40))):
    places = range(1, length + 1)
    one_ratio = by_answer[row, :length]
    axis.axhspan(0.8, 1.28, color="0.9", label="clip range 0.8 to 1.28")
    axis.scatter(places, by_token[row, :length], s=24, label="token ratios")
    axis.plot(places, one_ratio, "C1", marker="", label="sequence ratio")
    axis.set_title(f"answer of {length} tokens")
    axis.set_xlabel("token (position in the answer)")
axes[0].set_xticks([1, 2, 3, 4])
axes[0].set_ylabel("ratio, new / old probability (1)")
axes[1].legend()
show_figure(
    fig,
    alt="Token ratios lie around 1 with one outlier at 2.7 far outside the "
    "clip range. The sequence ratio of the 4-token answer is pulled up to "
    "about 1.3, that of the 40-token answer stays near 1.03.",
    run=run, name="ratios", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** By tokens, the outlier of each answer is far outside the grey
# band, whatever the length. By sequences it is worth a factor
# $e^{1/4} = 1.28$ to the short answer and $e^{1/40} = 1.03$ to the long one:
# the longer the answer, the less one token matters.

# %% [markdown]
# For a mixture-of-experts model such as gpt-oss this is the point: when a
# token is routed to other experts its logprob jumps, and a sequence ratio
# averages such jumps away.

# %% [markdown]
# Averaging also shrinks the ordinary spread. **Predict:** if one token's log
# ratio has spread 0.05, what is the spread of the mean over $n$ tokens, and
# of the plain product $\prod_t r_t$ (in logs: the sum)?

# %%
lengths = [4, 16, 64, 256, 1024]
data = {"length": lengths, "product": [], "token": [], "mean": []}
for length in lengths:
    noise = 0.05 * torch.randn(500, length, generator=generator)
    zero, ones = torch.zeros_like(noise), torch.ones_like(noise)
    mean = sequence_log_ratio(noise, zero, ones)[:, 0]
    data["product"].append((length * mean).std().item())
    data["token"].append(noise.std().item())
    data["mean"].append(mean.std().item())
for name in ("product", "token", "mean"):
    print(f"{name:8}", [round(spread, 4) for spread in data[name]])

# %%
fig, axis = plt.subplots(figsize=(8.4, 3.8))
axis.loglog(lengths, data["product"], label="product of ratios")
axis.loglog(lengths, data["token"], label="one token's ratio")
axis.loglog(lengths, data["mean"], label="geometric mean (GSPO)")
axis.axhline(math.log(1.28), color="k", ls=":", label="clip 0.28")
axis.axhline(4e-4, color="k", ls="--", label="GSPO's clip 0.0004")
axis.minorticks_off()
axis.set_xticks(lengths, lengths)
axis.set_xlabel("answer length (tokens)")
axis.set_ylabel("spread of the log ratio (nat)")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
show_figure(
    fig,
    alt="Spread of the log ratio against answer length, both logarithmic. "
    "The product's rises from about 0.1 to about 1.5, a token's stays at "
    "0.05, the geometric mean's falls from about 0.025 to 0.0016.",
    run=run, name="spread", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** $0.05 \sqrt n$ for the product, $0.05 / \sqrt n$ for the mean.
# The product is useless at a thousand tokens: a typical ratio is then
# $e^{1.6} = 5$ or $1/5$, though no single token moved by more than a few
# tenths of a nat. The geometric mean is so tame that a clip at 0.28 never
# acts: GSPO clips at 0.0003 below and 0.0004 above.

# %% [markdown]
# **If you switch the ratio, switch the clip range too**, or you train without
# a clip and do not notice. `clip_fraction` tells: a value of exactly 0 over
# many updates on reused batches is a clip that is out of reach.

# %% [markdown] tags=["exercise"]
# ### Exercise: write the GSPO ratio
#
# (10 minutes, medium) From the logprobs `new` and `old`, [answers, tokens],
# and the `mask` return one ratio an answer, [answers]. The answers differ in
# length, and where the mask is 0 stand numbers that mean nothing.
#
# <details><summary>Hint</summary>
#
# A geometric mean is the exp of a mean of logarithms. The mean of *what*, and
# divided by what, if the answer is shorter than the row?
#
# </details>

# %% tags=["start"]
def gspo_ratio(new, old, mask):
    return ...  # your turn: [answers]

# %% tags=["solution"]
def gspo_ratio(new, old, mask):
    log_ratio = (new - old) * mask
    return (log_ratio.sum(-1) / mask.sum(-1)).exp()

# %% tags=["check"]
from helpers.exercises import check

check("gspo-ratio", gspo_ratio)

# %% [markdown]
# ## 5 · KL: the right value is not the right gradient
#
# A KL penalty keeps the policy near a reference. The exact divergence sums
# over the whole vocabulary at every position; you have one sampled token and
# two logprobs.

# %% [markdown]
# With $d = \log p - \log q$ of that token, three estimators:
#
# $$k_1 = d \qquad k_2 = d^2 / 2 \qquad k_3 = e^{-d} - 1 + d$$

# %% [markdown]
# **By hand.** A vocabulary of three tokens, policy $p = (1/2, 1/4, 1/4)$,
# reference $q = (1/4, 1/4, 1/2)$. The ratios $p/q$ are $2, 1, 1/2$, so
# $d = (\ln 2,\ 0,\ -\ln 2)$, with $\ln 2 = 0.6931$.
#
# | | token 0 | token 1 | token 2 | mean under $p$ |
# |---|---|---|---|---|
# | $k_1$ | 0.6931 | 0 | -0.6931 | 0.3466 - 0.1733 = **0.1733** |
# | $k_2$ | 0.2402 | 0 | 0.2402 | 0.1201 + 0.0601 = **0.1802** |
# | $k_3$ | 1/2 - 1 + ln 2 = 0.1931 | 0 | 2 - 1 - ln 2 = 0.3069 | **0.1733** |
#
# The true $KL(p \| q) = \sum p \log(p/q)$ is the first row's mean, 0.1733.

# %%
from helpers.kl import kl_estimate

p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
ln2 = math.log(2)
by_hand = {
    "k1": [ln2, 0, -ln2],
    "k2": [ln2**2 / 2, 0, ln2**2 / 2],
    "k3": [ln2 - 0.5, 0, 1 - ln2],
}
for kind, hand in by_hand.items():
    values = kl_estimate(p.log(), q.log(), kind)
    agree(kind, hand, values)
    print(f"{kind}: mean under p {(p * values).sum():.4f}")

# %% [markdown]
# $k_1$ and $k_3$ are right on average, $k_2$ is not. So why not always $k_1$?
# Look at its row: on token 2 it is *negative*, which no divergence is. Its
# values scatter, and you average only as many as you sampled.

# %% [markdown]
# **Predict:** move the policy away from the reference step by step. Which
# estimator has the least spread near the reference, and does that hold far
# away?

# %%
data = {"true_kl": []}
data |= {f"{k}_{what}": [] for k in by_hand for what in ("bias", "spread")}
tilt = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
for shift in torch.linspace(0.05, 2.5, 50):
    policy = (q.log() + shift * tilt).softmax(-1)
    true = (policy * (policy / q).log()).sum()
    data["true_kl"].append(true.item())
    for kind in by_hand:
        values = kl_estimate(policy.log(), q.log(), kind)
        mean = (policy * values).sum()
        std = (policy * (values - mean).square()).sum().sqrt()
        data[f"{kind}_bias"].append((mean / true - 1).item())
        data[f"{kind}_spread"].append((std / true).item())

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4))
for start, kind in enumerate(by_hand):
    places = (3 * start, 9)  # markers apart where curves coincide
    for axis, what in zip(axes, ("bias", "spread")):
        values = data[f"{kind}_{what}"]
        axis.semilogx(data["true_kl"], values, label=kind, markevery=places)
        axis.set_xlabel("true KL(policy || reference) (nat)")
axes[1].set_yscale("log")
axes[0].set_ylabel("bias / true KL (1)")
axes[1].set_ylabel("standard deviation / true KL (1)")
axes[0].legend()
show_figure(
    fig,
    alt="Left: bias relative to the true KL is zero for k1 and k3 at every "
    "distance; k2's is a few percent, then falls below -10 percent. Right: "
    "near the reference k1 spreads 48 times the true KL, k2 and k3 less than "
    "once; beyond about 0.65 nat k3 spreads most of all.",
    run=run, name="kl_estimators", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** Left: $k_1$ and $k_3$ lie on zero at every distance; $k_2$ is
# off by a few percent, then by more. Right: near the reference, $k_1$ spreads
# many times the value that you want to know. How many samples does that cost?
# It goes with the square.

# %%
for place in (0, 3, 49):
    ratio = data["k1_spread"][place] / data["k3_spread"][place]
    kl = data["true_kl"][place]
    print(f"KL {kl:.4f}: k1 needs {ratio**2:8.2f} times k3's samples")
biases = [b for k in ("k1", "k3") for b in data[f"{k}_bias"]]
assert max(map(abs, biases)) < 1e-6
assert data["k1_spread"][3] > 10 * data["k3_spread"][3]
assert data["k3_spread"][49] > data["k1_spread"][49]

# %% [markdown]
# Near the reference, where a healthy run stays (about 0.01 nat a token or
# less), $k_3$ does with one sample what takes $k_1$ hundreds. Far away the
# order turns round: a token that the policy finds rare and the reference
# likely has a huge $e^{-d}$. So $k_3$ is what you log, and a $k_3$ that jumps
# about is itself a sign that the two have parted.

# %% [markdown]
# So much for exact averages. What do you see in a run, where you average over
# the tokens that you happened to draw? Back to $p$ and $q$ from above, with a
# true KL of $\ln 2 / 4$.

# %% [markdown]
# **By hand.** $E[k_1^2] = \frac{3}{4} \ln^2 2$, less the squared mean
# $\frac{1}{16} \ln^2 2$: one draw of $k_1$ has a standard deviation of
# $\sqrt{11/16}\, \ln 2 = 0.575$, three times the value itself. The mean of
# $k_2$ is $\frac{3}{8} \ln^2 2$, so its bias is $0.0069$.

# %%
moments = {}
for kind in by_hand:
    values = kl_estimate(p.log(), q.log(), kind)
    mean = (p * values).sum()
    spread = (p * (values - mean).square()).sum().sqrt()
    moments[kind] = (mean - ln2 / 4, spread)
agree("k1 spread", math.sqrt(11 / 16) * ln2, moments["k1"][1])
agree("k2 bias", 3 / 8 * ln2**2 - ln2 / 4, moments["k2"][0])

# %% [markdown]
# Draw $n$ tokens, average, and do so 1000 times. **Predict:** which error
# goes on shrinking as $n$ grows, and which gets stuck? How often is the
# average of sixteen $k_1$ *below zero*?

# %%
counts = [4, 16, 64, 256, 1024, 4096]
generator = torch.Generator().manual_seed(settings.seed)
averages = {}
for n in counts:
    draws = torch.multinomial(p, 1000 * n, True, generator=generator)
    for kind in by_hand:
        values = kl_estimate(p.log(), q.log(), kind)
        averages[kind, n] = values[draws].view(1000, n).mean(-1)
data = {"samples": counts}
for kind in by_hand:
    wrong = [averages[kind, n] - ln2 / 4 for n in counts]
    data[kind] = [w.square().mean().sqrt().item() for w in wrong]
    below = (averages[kind, 16] < 0).double().mean()
    print(f"{kind}: {below:6.1%} of the averages of 16 are below 0")
assert data["k2"][-1] > 2 * data["k3"][-1], "the bias stays"

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4))
bins = (torch.arange(-8, 17) - 0.5) * ln2 / 16  # k1's averages: n ln2 / 16
for kind, line in zip(by_hand, ("-", "--", "-.")):
    look = {"histtype": "step", "linestyle": line, "linewidth": 1.8}
    axes[0].hist(averages[kind, 16], bins=bins, label=kind, **look)
    axes[1].loglog(counts, data[kind], label=kind)
axes[0].axvline(ln2 / 4, color="k", linestyle=":", label="true KL")
axes[0].set_xlabel("average of 16 draws (nat)")
axes[0].set_ylabel("how often in 1000 (count)")
axes[0].legend()
axes[1].axhline(moments["k2"][0], color="k", ls=":", label="bias of k2")
axes[1].minorticks_off()
axes[1].set_xticks(counts, counts)
axes[1].set_xlabel("draws in the average (tokens)")
axes[1].set_ylabel("root mean square error (nat)")
axes[1].legend()
show_figure(
    fig,
    alt="Left: averages of 16 draws; k1 spreads from about -0.3 to 0.6, k2 "
    "and k3 lie close around the true KL of 0.173. Right: error against "
    "draws; k1 and k3 fall as one over the root, k3 five times lower, k2 "
    "levels off at its bias of 0.007.",
    run=run, name="kl_samples", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** Spread can be bought off with samples, bias cannot: $k_2$ ends
# at its dotted line and $k_3$ passes below it. $k_1$ is as unbiased as $k_3$,
# and one average of sixteen in ten shows a negative divergence.

# %% [markdown]
# Now use it as a *loss*. Autograd does not know that the sampled tokens came
# from the policy; it differentiates the formula with the samples held fixed.

# %% [markdown]
# By hand, with $s = \nabla \log p$ of the sampled token and the known fact
# that $E_p[s] = 0$:
#
# - $\nabla k_1 = s$, on average **0**: it pulls nowhere.
# - $\nabla k_2 = d\,s$, on average the gradient of $KL(p \| q)$.
# - $\nabla k_3 = (1 - q/p)\,s$, on average $-\sum q\, s$: the gradient of the
#   *other* divergence, $KL(q \| p)$.

# %% [markdown]
# In numbers: on logits, token $j$ has $s_i = [i = j] - p_i$. The gradient of
# $KL(p \| q)$ is $p_i (d_i - KL)$; that of $KL(q \| p)$ is $p_i - q_i =
# (1/4, 0, -1/4)$.

# %% [markdown]
# **Predict:** token 1 is equally likely under both, $d = 0$. Which of the
# three estimators moves its logit all the same, and which way?

# %%
gradients = {}
for kind in by_hand:
    logits = p.log().requires_grad_()  # softmax of log p is p again
    values = kl_estimate(logits.log_softmax(-1), q.log(), kind)
    mean = (p * values).sum()  # p as a number: the samples are held fixed
    gradients[kind] = torch.autograd.grad(mean, logits)[0]
d = (p / q).log()
forward = (p * (d - (p * d).sum())).tolist()
agree("k1 gradient", [0, 0, 0], gradients["k1"])
agree("k2 gradient", forward, gradients["k2"])
agree("k3 gradient", [0.25, 0, -0.25], gradients["k3"])

# %%
bars = {"k1 (zero)": gradients["k1"], "k2": gradients["k2"]}
bars |= {"true KL(p || q)": torch.tensor(forward), "k3": gradients["k3"]}
bars |= {"true KL(q || p)": p - q}
data = {"token": [0, 1, 2]}
data |= {name: height.tolist() for name, height in bars.items()}

# %%
fig, axis = plt.subplots(figsize=(8.4, 4))
hatches = ("", "", "//", "", "\\\\")
for number, (name, height) in enumerate(bars.items()):
    places = torch.arange(3) + 0.17 * (number - 2)
    axis.bar(places, height, 0.15, label=name, hatch=hatches[number])
axis.axhline(0, color="k", linewidth=0.8)
axis.set_xticks([0, 1, 2], ["token 0", "token 1", "token 2"])
axis.set_ylabel("expected gradient on the logit (nat)")
axis.legend()
show_figure(
    fig,
    alt="Expected gradient of each estimator on three logits. k1 is zero, k2 "
    "equals the true gradient of KL(p||q), k3 equals that of KL(q||p). They "
    "differ most on token 1, where k3 is zero and k2 is negative.",
    run=run, name="kl_gradients", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** Look at token 1. To lower $KL(p \| q)$ the policy should take
# probability from token 0 and give it to token 2 *and* token 1, so $k_2$'s
# gradient there is negative (a descent step raises the logit). $k_3$ leaves
# token 1 alone. On the other two tokens they nearly agree, as they do
# everywhere when policy and reference are close.

# %% [markdown]
# If a KL penalty is what you mean, the gradient you want is
# $k_2$'s; the value you want in the log is $k_3$'s. The straight-through sum
# `k2 - k2.detach() + k3.detach()` has both. GRPO's paper adds $k_3$ itself.

# %% [markdown]
# **Predict:** as functions of $d$, where does `k3+` (verl's name for that
# sum, and ours) lie among the others, in value and in gradient on $\log p$?
#
# By hand for the three tokens: value $\ln 2 - 1/2,\ 0,\ 1 - \ln 2$; gradient
# $d = \ln 2,\ 0,\ -\ln 2$. `k1+` has the same gradient and $k_1$'s value.

# %%
from helpers.kl import straight_through_kl

sampled = p.log().requires_grad_()
for kind in ("k3", "k1"):
    values = straight_through_kl(sampled, q.log(), kind)
    agree(f"{kind}+ value", by_hand[kind], values)
    slope = torch.autograd.grad(values.sum(), sampled)[0]
    agree(f"{kind}+ gradient", [ln2, 0, -ln2], slope)

# %%
distance = torch.linspace(-2, 2, 81, requires_grad=True)
reference = torch.zeros(81)  # so that d is the policy's logprob itself
curves = {k: kl_estimate(distance, reference, k) for k in by_hand}
curves["k3+"] = straight_through_kl(distance, reference)
data = {"d": distance.tolist()}
for name, values in curves.items():
    slope = torch.autograd.grad(values.sum(), distance)[0]
    data |= {f"{name}_value": values.tolist()}
    data |= {f"{name}_gradient": slope.tolist()}

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4))
for axis, what in zip(axes, ("value", "gradient")):
    for start, name in enumerate(curves):
        line = {"linestyle": ":", "color": "k"} if name == "k3+" else {}
        axis.plot(
            data["d"], data[f"{name}_{what}"], label=name,
            markevery=(2 * start, 10), **line,
        )  # fmt: skip
    axis.set_xlabel("d = log p - log q of the token (nat)")
    axis.set_ylim(-3, 4.5)
axes[0].set_ylabel("value (nat)")
axes[1].set_ylabel("gradient on log p (1)")
axes[0].legend()
show_figure(
    fig,
    alt="Left: values; k1 is a straight line, k2 a parabola, k3 lies above "
    "the parabola for negative d and below it for positive d, and k3+ on k3. "
    "Right: gradients; k1 is 1, k2 the line d, k3 is steep for negative d "
    "and flat below 1 for positive d, and k3+ lies on k2.",
    run=run, name="kl_straight_through", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** Left `k3+` is $k_3$, right it is $k_2$. Look at $k_3$'s own
# gradient: a token that the policy has made much *too likely* ($d = 2$) is
# pulled back with less than 1, one that it has made too rare is thrown back
# with $e^2 - 1 = 6.4$ (off the picture). $k_1$ pushes every token down alike,
# right or wrong.

# %% [markdown]
# The series trains without a reference (as DAPO and Dr. GRPO do), so its loss
# has no KL term; it *logs* $k_3$ between rollout and trainer as `approx_kl`.
# There the samples are the rollout's, so $p$ is the rollout and $q$ the
# trainer. Section 3's three tokens had ratios $q/p = 2, 1, 1/2$: their $k_3$
# are $2 - 1 - \ln 2$, $0$ and $1/2 - 1 + \ln 2$. The logarithms cancel, and
# the mean is $0.5 / 3$.

# %%
agree("approx_kl", 0.5 / 3, means["approx_kl"])

# %% [markdown]
# ## 6 · Who pays for length? The divisor
#
# The sum over tokens must be divided by something. Three choices:
#
# | `normaliser` | divides by | from |
# |---|---|---|
# | `token` | all tokens of the batch | DAPO |
# | `sequence` | each answer by its length, then by the answers | GRPO |
# | `constant` | answers × a fixed token budget | Dr. GRPO |

# %% [markdown]
# **By hand.** Two wrong answers, $A = -1$, of 1 and 2 tokens, ratio 1. Each
# token's gradient is $+1$ over the divisor: by token $1/3, 1/3, 1/3$; by
# sequence $1/2$ and twice $1/4$; by constant, budget 4, three times $1/8$.


# %%
def token_weights(lengths, normaliser, budget=None):
    """[B, S] gradient of the loss at each token, all with A = -1."""
    minus = -torch.ones(len(lengths))
    episodes = [
        Episode((9,), (1,) * n, (-1.0,) * n, "stop", 0) for n in lengths
    ]
    batch = collate(episodes, minus, pad_id=0)
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    output = clipped_policy_loss(
        logprobs, batch, normaliser=normaliser, constant=budget
    )
    return torch.autograd.grad(output.loss, logprobs)[0]


# %%
for normaliser, budget, hand in (
    ("token", None, [[1 / 3, 0], [1 / 3, 1 / 3]]),
    ("sequence", None, [[1 / 2, 0], [1 / 4, 1 / 4]]),
    ("constant", 4, [[1 / 8, 0], [1 / 8, 1 / 8]]),
):
    weights = token_weights([1, 2], normaliser, budget)
    agree(f"weights by {normaliser}", hand, weights[:, :2])

# %% [markdown]
# **Predict:** one wrong answer grows from 1 to 64 tokens; the other stays at
# 16; the budget is 64. For which divisor does a wrong answer get *cheaper per
# token* by rambling? For which does its total weight depend on its length?

# %%
lengths = [1, 2, 4, 8, 16, 32, 64]
budgets = {"token": None, "sequence": None, "constant": 64}
data = {"length": lengths}
for name, budget in budgets.items():
    rows = [token_weights([n, 16], name, budget)[0] for n in lengths]
    data[f"one_{name}"] = [row[0].item() for row in rows]
    data[f"whole_{name}"] = [row.sum().item() for row in rows]
    fall = data[f"one_{name}"][0] / data[f"one_{name}"][-1]
    print(f"{name:9} a token of 1 weighs {fall:5.1f} x a token of 64")
halves = torch.tensor(data["whole_sequence"])
agree("whole answer by sequence", [0.5] * 7, halves)

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4))
for axis, what in zip(axes, ("one", "whole")):
    for name in budgets:
        axis.loglog(lengths, data[f"{what}_{name}"], label=name)
    axis.minorticks_off()
    axis.set_xticks(lengths, lengths)
    axis.set_xlabel("length of the answer (tokens)")
axes[0].set_title("one token of the answer")
axes[1].set_title("the whole answer")
axes[0].set_ylabel("gradient of the loss (1 / nat)")
axes[0].legend(title="normaliser")
show_figure(
    fig,
    alt="Left: gradient of one token against the answer's length: by sequence "
    "it falls as 1/length, by token it falls once the answer dominates the "
    "batch, by constant it is flat. Right: the whole answer's weight is flat "
    "by sequence and grows with length otherwise.",
    run=run, name="length_bias", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** By `sequence`, a token of a 64-token wrong answer is punished 64
# times less than that of a one-token wrong answer: the policy learns that if
# it must be wrong, it should be wrong at length. For right answers it is the
# other way: short ones are praised more a token.

# %% [markdown]
# By `token` all tokens *of one batch* weigh the same (the left curve falls
# only since the batch gets bigger), and a long answer counts more in total.
# By `constant` a token's weight depends on no other answer at all: the price
# is a small gradient when answers are much shorter than the budget.

# %% [markdown]
# No choice is neutral. Rising completion length with falling or constant
# reward is the symptom to look for, and the reason why notebook 06 plots the
# length beside the reward.

# %% [markdown]
# **A price on length itself.** Answers that hit the token budget are cut off
# and count as wrong, however good they were. DAPO warns them first: over the
# last part of the budget, the *buffer*, a penalty grows from 0 to $-1$, and is
# added to the reward before the advantages are taken.

# %% [markdown]
# **By hand.** Budget 100, buffer 20: nothing up to 80 tokens, then $-1/20$ a
# token. So 80, 95, 100 tokens cost $0$, $-3/4$, $-1$.
#
# Four answers, right and wrong, of 60 and of 95 tokens, and the penalty times
# $1/2$: rewards $1$, $0.625$, $0$, $-0.375$. Their mean is $0.3125$, and the
# `mean` advantages are $0.6875$, $0.3125$, $-0.3125$, $-0.6875$.

# %%
from helpers.shaping import overlong_penalty

price = overlong_penalty(torch.tensor([80, 95, 100]), 100, buffer=20)
agree("overlong penalty", [0, -0.75, -1], price)
price = overlong_penalty(torch.tensor([60, 95, 60, 95]), 100, buffer=20)
shaped = torch.tensor([1.0, 1.0, 0.0, 0.0]) + 0.5 * price
agree(
    "shaped advantages",
    [0.6875, 0.3125, -0.3125, -0.6875],
    group_advantages(shaped, torch.zeros(4, dtype=torch.int64), "mean"),
)

# %% [markdown]
# **Predict:** rewards are 0 and 1. With the penalty at full size, what is a
# right answer of 100 tokens worth, compared with a wrong one of 10?

# %%
tokens = torch.arange(0, 121)
price = overlong_penalty(tokens, 100, buffer=20)
data = {"length": tokens.tolist(), "penalty": price.tolist()}
lines = {"right, penalty × 1/2": 1 + 0.5 * price}
lines |= {"right, penalty × 1": 1 + price}
lines |= {"wrong, penalty × 1/2": 0.5 * price, "wrong, penalty × 1": price}
data |= {name: values.tolist() for name, values in lines.items()}
fig, axis = plt.subplots(figsize=(8.4, 3.8))
for name, values in lines.items():
    axis.plot(tokens, values, label=name, markevery=10)
axis.axvspan(80, 100, color="0.9", label="buffer")
axis.set_xlabel("length of the answer (tokens)")
axis.set_ylabel("reward after the penalty (1)")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
show_figure(
    fig,
    alt="Reward against length. All four lines are flat up to 80 tokens, fall "
    "straight to 100 and are flat again. A right answer falls from 1 to 0 "
    "with the full penalty, to 0.5 with half; a wrong one from 0 to -1 or "
    "-0.5.",
    run=run, name="overlong", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** At full size the right answer ends at 0, where the short wrong
# one began: the policy may learn to be brief rather than right. DAPO's rewards
# are $-1$ and $1$, twice as far apart; with 0 and 1, halve the penalty.

# %% [markdown]
# ## 7 · When rollout and trainer disagree
#
# So far $\pi_{old}$ was *one* policy. In practice the rollout engine samples
# and the trainer computes the gradient. Both hold the same weights, and still
# they give a token slightly different probabilities: other kernels, other
# rounding, now and then other experts. The samples are then off-policy before
# the first update.

# %% [markdown]
# The cure is a weight $w_t = \pi_{trainer}(t) / \pi_{rollout}(t)$ on each
# token, and it has to be bounded. Three ways:
#
# - **TIS** (truncated importance sampling) cuts the weight at a cap, here 2.
# - **MIS** (masked importance sampling) drops what lies outside a range,
#   here 1/2 to 2. Such a token is more likely a fault than news.
# - A **trust-region mask** only drops. What stays has weight exactly 1.
#
# Each works on a token or on a whole answer.

# %% [markdown]
# **By hand.** Three tokens, rollout $1/2, 1/4, 1/8$, trainer
# $1/5, 1/4, 1/2$: $w = 2/5, 1, 4$. The answer's ratio is the product, $1.6$.
#
# | | token 0 | token 1 | token 2 |
# |---|---|---|---|
# | TIS by token | 0.4 | 1 | **2** |
# | MIS by token | **0** | 1 | **0** |
# | TIS and MIS by sequence | 1.6 | 1.6 | 1.6 |
#
# **Predict** the geometric level, where the answer's ratio is the cube root
# of 1.6: does either bound act?

# %%
from helpers.corrections import (
    masked_importance_sampling,
    truncated_importance_sampling,
)

sampler = torch.tensor([[1 / 2, 1 / 4, 1 / 8]]).log()  # the rollout's
learner = torch.tensor([[1 / 5, 1 / 4, 1 / 2]]).log()  # the trainer's
three = (learner, sampler, torch.ones(1, 3))  # and the mask
root = 1.6 ** (1 / 3)
for level, cut, dropped in (
    ("token", [[0.4, 1, 2]], [[0, 1, 0]]),
    ("sequence", [[1.6] * 3], [[1.6] * 3]),
    ("geometric", [[root] * 3], [[root] * 3]),
):
    tis = truncated_importance_sampling(*three, cap=2.0, level=level)
    mis = masked_importance_sampling(*three, 0.5, 2.0, level=level)
    agree(f"TIS by {level}", cut, tis.weights)
    agree(f"MIS by {level}", dropped, mis.weights)

# %% [markdown]
# What does it cost? Uneven weights waste samples: the *effective sample size*
# $(\sum w)^2 / \sum w^2$ is how many equally weighted tokens would scatter as
# much. TIS by token: $3.4^2 / (0.16 + 1 + 4) = 2.24$ of 3. MIS keeps one
# token of three.

# %%
tis = truncated_importance_sampling(*three)
mis = masked_importance_sampling(*three)
agree("TIS effective", 3.4**2 / 5.16, tis.effective_sample_size)
agree("MIS kept share", 1 / 3, mis.kept_share)

# %% [markdown]
# The trust region measures distance in nats. $|\log w| = 0.92,\ 0,\ 1.39$;
# with a bound of 1 nat:
#
# - `token` drops the third token alone.
# - `any_token` drops the answer, since one of its tokens is outside: every
#   later token stands in a context that the trainer would hardly have
#   reached.
# - `sequence_kl` takes the mean of $k_3 = w - 1 - \log w$, here
#   $(0.316 + 0 + 1.614) / 3 = 0.64$, and keeps the answer.

# %%
from helpers.corrections import combine, corrected_batch, trust_region_mask

for rule, hand in (
    ("token", [[1, 1, 0]]),
    ("any_token", [[0, 0, 0]]),
    ("sequence_kl", [[1, 1, 1]]),
):
    region = trust_region_mask(*three, bound=1.0, rule=rule)
    agree(f"region by {rule}", hand, region.weights)

# %% [markdown]
# Now into a loss. The weight multiplies the advantage, and the *trainer's*
# logprobs become the old ones, so that the ratio measures the update alone.
# Left as it was, the ratio would hold the mismatch as well, and a weight on
# top would count it twice.
#
# **Predict** the gradient before the first update with TIS inside the
# `token` trust region, $A = 1$.

# %%
region = trust_region_mask(*three, bound=1.0)
both = combine(three[2], region, tis)
agree("region and TIS", [[0.4, 1, 0]], both.weights)
episode = Episode((9,), (1, 2, 3), tuple(sampler[0].tolist()), "stop", 0)
pair = collate([episode], torch.tensor([1.0]), pad_id=0, seq_length=4)
weights = torch.nn.functional.pad(both.weights, (0, 1))
now = torch.nn.functional.pad(learner, (0, 1)).requires_grad_()
corrected = corrected_batch(pair, now, replace(both, weights=weights))
loss = clipped_policy_loss(now, corrected)
gradient = torch.autograd.grad(loss.total, now)[0]
agree("corrected gradient", [[-0.4, -1, 0, 0]], gradient)
agree("still divided by", 3, loss.normaliser)

# %% [markdown]
# The dropped token still counts in the divisor: dropping makes the step
# smaller, not the rest of the answer louder.

# %% [markdown]
# Token or sequence? Let the two differ by noise alone: $\log w$ of a token
# with spread 0.05, a KL of $0.05^2 / 2 = 0.00125$ nat a token, which counts
# as healthy (NeMo-RL's tests allow 0.002).
#
# **Predict:** what share of the tokens does MIS (1/2 to 2) keep at each level
# when answers have 4, 64, 1024 tokens? And `any_token` with 0.2 nat, four
# times the spread?

# %%
lengths = [4, 16, 64, 256, 1024]
levels = ("token", "sequence", "geometric")
generator = torch.Generator().manual_seed(settings.seed)
data = {"length": lengths} | {level: [] for level in (*levels, "any_token")}
for length in lengths:
    noise = 0.05 * torch.randn(400, length, generator=generator)
    zero, ones = torch.zeros_like(noise), torch.ones_like(noise)
    gap = (noise - 0.05**2 / 2, zero, ones)  # so that w is 1 on average
    for level in levels:
        mis = masked_importance_sampling(*gap, level=level)
        data[level].append(mis.kept_share.item())
    region = trust_region_mask(*gap, bound=0.2, rule="any_token")
    data["any_token"].append(region.kept_share.item())
for level in data:
    print(f"{level:10}", [round(share, 3) for share in data[level]])

# %%
w = torch.linspace(0.05, 4, 396)[None]
one = (w.log(), torch.zeros_like(w), torch.ones_like(w))
bounded = {
    "TIS, cap 2": truncated_importance_sampling(*one),
    "MIS, 1/2 to 2": masked_importance_sampling(*one),
    "trust region, ln 2": trust_region_mask(*one, bound=ln2),
}
run.series(
    "correction_weights",
    {"w": w[0].tolist()}
    | {name: rule.weights[0].tolist() for name, rule in bounded.items()},
)

# %%
fig, axes = plt.subplots(1, 2, figsize=(9.6, 4))
for start, (name, rule) in enumerate(bounded.items()):
    places = (10 * start, 40)
    axes[0].plot(w[0], rule.weights[0], label=name, markevery=places)
axes[0].set_xlabel("trainer / rollout probability w (1)")
axes[0].set_ylabel("weight of the token (1)")
axes[0].legend()
for start, level in enumerate((*levels, "any_token")):
    name = f"MIS by {level}" if level in levels else "region by any_token"
    places = (start % 3, 2)  # markers apart where curves coincide
    axes[1].semilogx(lengths, data[level], label=name, markevery=places)
axes[1].minorticks_off()
axes[1].set_xticks(lengths, lengths)
axes[1].set_ylim(0, 1.05)
axes[1].set_xlabel("length of the answers (tokens)")
axes[1].set_ylabel("share of the tokens that is kept (1)")
axes[1].legend(loc="lower left")
show_figure(
    fig,
    alt="Left: weight against w; TIS follows w to 2 and stays, MIS follows w "
    "between 1/2 and 2 and is 0 outside, the trust region is 1 there and 0 "
    "outside. Right: kept share against length; by token and geometric it "
    "stays at 1, any_token falls a little, by sequence to about a quarter.",
    run=run, name="corrections", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it.** The product is the *exact* ratio of two answers, and it drifts
# with the length: by sequence a healthy pair of engines loses three quarters
# of its thousand-token answers. By token nothing is lost, but a token's weight
# ignores that its context was drawn by the other policy. Section 4 told the
# same story about updates: choose the range to fit the level.

# %% [markdown]
# Whether any of this helps is a question for an experiment, not for algebra
# (notebook 08). Where both engines agree all weights are 1, and a correction
# changes nothing.

# %% [markdown]
# ## 8 · The family by name
#
# Every paper of the family picks from what you have worked out here.
# `load_profile("cpu", algorithm="gspo")` picks a named recipe, and notebook 06
# trains with it. A recipe is the default with a few settings changed.
#
# **Predict:** which two settings must GSPO change *together* (section 4)?
# Which recipes take the on-policy shortcut?

# %%
from dataclasses import asdict

from helpers.recipes import RECIPES

plain = asdict(RECIPES["default"].settings)
basics = "advantage loss ratio normaliser clip_low clip_high old_logprobs"
for name, recipe in RECIPES.items():
    values = asdict(recipe.settings).items()
    changed = [f"{k}={value}" for k, value in values if value != plain[k]]
    if name == "default":
        changed = [f"{key}={plain[key]}" for key in basics.split()]
    for start in range(0, len(changed), 3):
        title = "" if start else name
        print(f"{title:13}", *changed[start : start + 3])

# %% [markdown]
# GSPO changes the ratio and both clips (and divides by sequences). `rloo`,
# `on_policy`, `tis` and `mis` have `old_logprobs=current`, the shortcut.
#
# Where the numbers come from, and what had to be changed to fit a small run:

# %%
import textwrap

for name, recipe in RECIPES.items():
    lines = textwrap.wrap(recipe.source, 64)
    if recipe.adapted:
        lines += textwrap.wrap(f"here: {recipe.adapted}", 64)
    for number, line in enumerate(lines):
        print(f"{'' if number else name:13} {line}")

# %% [markdown]
# What do they *do*? One answer of three tokens had $1/8, 2/5, 1/2$ at the
# rollout and has $2/5, 2/5, 1/4$ now: ratios $3.2$, $1$, $1/2$, their product
# $1.6$. `recipe_loss` is the loss that the trainer descends. Its negative
# gradient, times 3 for the divisor, is the *push* on each token.

# %% [markdown]
# For recipes with the on-policy shortcut the same difference is no update but
# a mismatch. **Predict** the pushes for $A = 1$ of `default`, `cispo`, `tis`,
# `mis`, `gspo`, and for $A = -1$ of `dual_clip`.

# %%
from helpers.objective import recipe_loss

was = tuple(torch.tensor([1 / 8, 2 / 5, 1 / 2]).log().tolist())
answer = Episode((9,), (1, 2, 3), was, "stop", 0)
policy = torch.tensor([[2 / 5, 2 / 5, 1 / 4, 1.0]]).log().requires_grad_()


def pushes(settings, advantage):
    """-3 × the gradient of a recipe's loss at each of the three tokens."""
    part = collate([answer], torch.tensor([advantage]), 0, seq_length=4)
    before = part.rollout_logprobs  # trainer and start agreed with it then
    part = replace(part, old_logprobs=before, reference_logprobs=before)
    budget = 3.0 if settings.normaliser == "constant" else None
    loss = recipe_loss(policy, part, settings, budget).loss
    return -3 * torch.autograd.grad(loss, policy)[0][0, :3]


# %%
for name, advantage, hand in (
    ("default", 1.0, [0, 1, 0.5]),  # 3.2 is above 1.28
    ("cispo", 1.0, [3.2, 1, 0.5]),  # below the limit of 5
    ("tis", 1.0, [2, 1, 0.5]),  # cut at 2
    ("mis", 1.0, [1.6, 1.6, 1.6]),  # the product is inside
    ("gspo", 1.0, [0, 0, 0]),  # its cube root, 1.17, is above 1.0004
    ("gspo", -1.0, [-(1.6 ** (1 / 3))] * 3),  # and not clipped here
    ("dual_clip", -1.0, [0, -1, 0]),  # 3.2 above 3; 0.5 below 0.8
):
    code = pushes(RECIPES[name].settings, advantage)
    agree(f"{name}, A = {advantage:+.0f}", hand, code)

# %%
rows = {
    name: torch.cat([pushes(recipe.settings, a) for a in (1.0, -1.0)])
    for name, recipe in RECIPES.items()
}
table = torch.stack(list(rows.values()))
heads = [f"{r}\nA = {a}" for a in ("+1", "-1") for r in ("3.2", "1", "1/2")]
data = {"recipe": list(rows)}
for number, head in enumerate(heads):
    data[f"ratio {head}".replace("\n", ", ")] = table[:, number].tolist()
largest = table.abs().max().item()

# %%
fig, axis = plt.subplots(figsize=(8.4, 5.6))
axis.imshow(table, cmap="PuOr_r", vmin=-largest, vmax=largest, aspect="auto")
for (row, column), push in zip(torch.cartesian_prod(
    torch.arange(len(rows)), torch.arange(6)
).tolist(), table.flatten().tolist()):  # fmt: skip
    shade = "white" if abs(push) > 0.7 * largest else "black"
    text = f"{round(push, 2) + 0.0:.2f}"
    axis.text(column, row, text, ha="center", va="center", color=shade)
axis.axvline(2.5, color="k", linewidth=0.8)
axis.set_xticks(range(6), heads)
axis.set_yticks(range(len(rows)), list(rows))
axis.set_xlabel("ratio of the token, and advantage of the answer")
axis.set_title("push on each token: -3 × gradient of the loss (1 / nat)")
axis.grid(False)
show_figure(
    fig,
    alt="Pushes on tokens of ratio 3.2, 1 and 1/2, a row for each recipe. "
    "A = +1: most give 0, 1, 0.5; gspo 0; cispo 3.2 and tis 2 on the first; "
    "mis 1.6 and the on-policy ones 1 on all. A = -1: most give -3.2, -1, 0; "
    "dual_clip only -1 on the second; gspo -1.17 on all.",
    run=run, name="recipes", data=data,
);  # fmt: skip

# %% [markdown]
# **Read it** by columns. A good token at ratio 3.2 is silent under every clip,
# weighs most under CISPO, and TIS cuts it to 2. A bad one at 3.2 pushes with
# full weight unless a dual clip of 3 removes it; verl's 10 and CISPO's 5 are
# not reached. `gspo` and `mis` judge the answer as one, so that all its tokens
# get the same push. The odd hundredths of `grpo` are its KL term.

# %% [markdown]
# `default`, `dr_grpo` and `dapo` look alike, since one answer cannot show what
# tells them apart: the scale of the advantages (section 1), the groups that
# are drawn again, the divisor and the price on length (section 6). A recipe is
# more than its loss.

# %% [markdown]
# ## Try it
#
# Change one thing, predict, run.
#
# 1. (5 minutes, easy) Give two of section 1's four answers the reward 1.
#    <details><summary>What you should see</summary>Mean 1/2, std
#    sqrt(1/3): advantages near 0.866 and -0.866. A difference in the fourth
#    digit is epsilon.</details>
# 2. (10 minutes, medium) Call `reuse(clip_low=1.0)`, which takes away the
#    lower limit alone, then `reuse(clip_high=math.inf)`, the upper alone.
#    <details><summary>What you should see</summary>Both run away, to about
#    0.87 and 0.94 after 40 updates. The softmax ties the tokens together:
#    pushing the bad ones down lifts the good one, so one open side is
#    enough.</details>
# 3. (10 minutes, medium) Swap `p` and `q` in section 5.
#    <details><summary>What you should see</summary>Here q is p reversed, so
#    this pair's KL is the same both ways, and every list that you worked by
#    hand must be reversed. If `agree` stops you, that is the check at
#    work.</details>
# 4. (5 minutes, easy) Halve the bound in section 7's loop over the three
#    trust-region rules to 0.5 nat.
#    <details><summary>What you should see</summary>`token` keeps only the
#    middle token, and `sequence_kl` drops the answer, since 0.64 is above
#    0.5. `agree` stops you until your hand says so too.</details>

# %% [markdown]
# ## Three takeaways
#
# 1. An advantage is a comparison within one question; equal rewards teach
#    nothing, and `std` favours the questions that are nearly decided.
# 2. A clip removes gradients, it does not hold the policy; CISPO bounds the
#    weight and removes none. A range belongs to the kind of ratio: 0.2 / 0.28
#    for tokens, a few 0.0001 for sequences.
# 3. Value and gradient are two questions ($k_3$ to look at, $k_2$ to train
#    on), and the divisor decides how much a token of a long answer counts.
#
# The result is `metrics.json` in this notebook's run folder, beside the
# figures and their CSV files. There is nothing to tear down.

# %%
run.record("hand_vs_code_max_abs", max(gaps.values()))
run.finish()
print(f"{len(gaps)} comparisons by hand, largest gap {max(gaps.values()):.1e}")
