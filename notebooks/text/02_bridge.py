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
# # 02 · The bridge: Hugging Face to Megatron and back
#
# **Question:** how do Hugging Face weights become a Megatron model and come
# back bit-exact?
#
# **You need first:** notebook 01, or a picture of what is inside gpt-oss:
# sinks, sliding windows, experts. You have trained a small network in PyTorch.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12, torch 2.11.0,
# transformers 5.12.1, megatron-core 0.19.2 and megatron-bridge 0.6.2.

# %% [markdown]
# | profile | time | memory | what it opens |
# |---|---|---|---|
# | `cpu` | about 1 1/2 minutes on 2 cores | about 1 GB | tiny gpt-oss |
#
# The trainer of this course is Megatron. It keeps weights in another layout
# than the checkpoint, because it splits them over GPUs. SGLang, the rollout
# engine, reads the checkpoint's layout. So weights cross a bridge: in, once at
# the start, and out, after every single update. One wrong stride, and the
# policy that samples is not the policy that learns.
#
# You will check the crossing in four ways: weight by weight, by the numbers
# that the model computes, by training it and coming back, and by putting in,
# one at a time, the mistakes that people have made.

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* the imports of Megatron look like a hang (ten seconds,
# on a busy machine a minute): announce them. Cells run twice: section 5 trains
# the model, so going back to section 4 afterwards finds every tensor changed;
# restart the kernel and run all above. *Say:* "which of the three orders is
# this?" whenever somebody is lost among shapes.
#
# *Ask:* Why are norms of ones bad test data? What would you do if logits
# differ by 0.001 in float32? In bf16? Why does a square `down_proj` worry you?
#
# *Short of time:* sections 1 to 4 and 7. *A late learner* runs all cells
# (below a minute), reads section 2 and joins at section 5. The warm-started
# checkpoint that 03, 05 and 06 want is made here; where it is missing they
# make it.

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %%
from helpers.figures import LivePlot, show_figure, use_style
from helpers.preflight import prepare_kernel
from helpers.profiles import load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
prepare_kernel(settings)  # before anything imports torch
run = NotebookRun("02_bridge", settings)
use_style()
exact = settings.model.dtype == "float32"  # parity is asserted in fp32 only

# %% [markdown]
# ## 1 · The same model twice
#
# A checkpoint folder is all you need: `config.json`, a tokenizer, and
# `safetensors` files with named tensors. This one is random, and is made here
# if no earlier notebook made it.

# %%
import torch
from safetensors.torch import load_file

from helpers.checkpoints import write_tiny_checkpoint

folder = write_tiny_checkpoint(settings)
files = sorted(folder.glob("*.safetensors"))
hf = {name: tensor for f in files for name, tensor in load_file(f).items()}
for name in [n for n in hf if ".layers.1." not in n][:10]:
    print(f"{name:50}{tuple(hf[name].shape)}")
print(f"... {len(hf)} tensors")

# %% [markdown]
# Now the trainer. Its constructor does four things, each a function that you
# can read in `helpers/bridge.py` and `helpers/trainer.py`:
#
# 1. `prepare_process` imports Megatron; on a CPU it first puts the patches in
#    place that notebook 00 lists;
# 2. `start_ranks` joins the process group, here a group of one;
# 3. `load_megatron` asks Megatron-Bridge to read the config, build the model
#    and load the weights;
# 4. an optimizer is built, for the last part of this notebook.

# %%
from helpers.trainer import MegatronTrainer
from helpers.warm_start import warm_start_settings

trainer = MegatronTrainer(warm_start_settings(settings), folder)
megatron = trainer.model.module
print(f"import {trainer.seconds['import']:.1f} s,",
      f"load {trainer.seconds['load']:.1f} s")
print(f"{len(list(megatron.parameters()))} parameters in Megatron,",
      f"{len(hf)} tensors in the checkpoint")

# %% [markdown]
# The counts differ. **Predict** why, before the next cell shows it: which
# tensors does Megatron merge, and which does it split?
#
# The bridge holds a list of *conversion tasks*, one for each Megatron
# parameter: its name, the checkpoint's name or names, and how to convert.

# %%
tasks = trainer.model.bridge.get_conversion_tasks(trainer.model.chunks)
layout = {}  # checkpoint name -> Megatron's tensors, experts in order
for task in tasks:
    names = task.mapping.hf_param
    names = [names] if isinstance(names, str) else list(names.values())
    for name in names:
        layout.setdefault(name, []).append(task.param_weight)
for name, tensors in layout.items():
    if ".layers.1." not in name:
        short = name.removeprefix("model.").replace("layers.0.", "0.")
        print(f"{short:36}{str(tuple(hf[name].shape)):16}-> "
              f"{len(tensors)} x {tuple(tensors[0].shape)}")
assert set(layout) == set(hf)

# %% [markdown]
# - `q_proj`, `k_proj` and `v_proj` end in **one** tensor: a single matrix
#   product computes all three.
# - an expert tensor ends in **several**, one an expert: experts are what
#   Megatron spreads over GPUs.
# - the rest keeps its shape and changes its name only. (`sinks` becomes
#   `softmax_offset`.)
#
# Merging and splitting would be simple. What makes conversions fail is the
# *order* inside.

# %% [markdown]
# ## 2 · Three orders, by hand
#
# ### Queries, keys and values come in groups
#
# gpt-oss shares each key-value head among several query heads. Megatron keeps
# such a group together, so that a tensor-parallel cut between groups gives
# every GPU complete groups. With four query heads and two key-value heads:

# %%
heads, groups = 4, 2
per_group = heads // groups
order = []
for g in range(groups):
    order += [f"q{g * per_group + i}" for i in range(per_group)]
    order += [f"k{g}", f"v{g}"]
print("checkpoint: q0 q1 q2 q3 | k0 k1 | v0 v1")
print("Megatron:  ", *order)
assert order == ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]

# %% [markdown]
# Each name stands for `head_dim` rows of the matrix. Do the same to the real
# tensors, and compare with what Megatron holds:

# %%
m = settings.model
prefix = "model.layers.0.self_attn"

def by_group(q, k, v):
    """[heads * D, ...] each -> Megatron's order, groups together."""
    parts = [x.view(m.num_key_value_heads, -1, m.head_dim, *x.shape[1:])
             for x in (q, k, v)]  # [group, heads in group, D, ...]
    return torch.cat(parts, dim=1).flatten(0, 2)

for kind in ("weight", "bias"):
    qkv = [hf[f"{prefix}.{x}_proj.{kind}"] for x in "qkv"]
    held = layout[f"{prefix}.q_proj.{kind}"][0]
    assert torch.equal(by_group(*qkv), held.cpu())
    print(f"{kind}: {[tuple(x.shape) for x in qkv]} -> {tuple(held.shape)}")

# %%
import matplotlib.pyplot as plt

q, k = m.num_attention_heads, m.num_key_value_heads
kinds = torch.tensor([0] * q + [1] * k + [2] * k)
rows = kinds.repeat_interleave(m.head_dim)
in_megatron = by_group(rows[:q * m.head_dim],
                       *rows[q * m.head_dim:].chunk(2))

# %%
fig, axes = plt.subplots(2, 1, figsize=(8, 2.6), sharex=True)
for axis, title, line in ((axes[0], "checkpoint: q, then k, then v", rows),
                          (axes[1], "Megatron: by group", in_megatron)):
    axis.imshow(line[None], aspect="auto", cmap="cividis", vmin=0, vmax=2)
    changes = [0, *(line.diff().nonzero().flatten() + 1).tolist(), len(line)]
    for start, end in zip(changes, changes[1:]):
        axis.text((start + end) / 2, 0, "qkv"[line[start]], ha="center",
                  color="white" if line[start] == 0 else "black")
    axis.set(title=title, yticks=[])
    axis.grid(False)
axes[1].set_xlabel("row of the matrix")
show_figure(
    fig, run=run, name="qkv_order",
    alt="Two coloured strips. In the checkpoint all query rows come first, "
    "then key rows, then value rows. In Megatron each group has its query "
    "rows, then its key rows, then its value rows.",
    data={"row": range(len(rows)), "checkpoint": rows,
          "megatron": in_megatron},
);

# %% [markdown] tags=["exercise"]
# ### Exercise: where does the key begin?
#
# (5 minutes, easy) gpt-oss-20b has 64 query heads and 8 key-value heads, each
# of 64 rows. At which row of Megatron's matrix does the key of group 3 begin?
# Rows and groups are counted from 0.
#
# <details><summary>Hint</summary>
#
# How many heads has a group, its key and its value included? Three groups
# stand before group 3, and its own queries stand before its key.
#
# </details>

# %% tags=["start"]
row = ...  # your turn

# %% tags=["solution"]
heads_in_group = 64 // 8 + 2  # queries, key, value
row = (3 * heads_in_group + 64 // 8) * 64

# %% tags=["check"]
from helpers.exercises import check

check("qkv-row", row)

# %% [markdown]
# ### Gate and up are interleaved
#
# An expert computes two things from its input, *gate* and *up*. The checkpoint
# stores them as alternating columns of `gate_up_proj`. Megatron wants all
# gates first, then all ups, because its activation splits the result in half.
# And the checkpoint stores `[in, out]`, Megatron `[out, in]`.
#
# With two gates and two ups:

# %%
alternating = ["gate0", "up0", "gate1", "up1"]
halves = alternating[::2] + alternating[1::2]
print(alternating, "->", halves)

experts = "model.layers.0.mlp.experts"
for expert, held in enumerate(layout[f"{experts}.gate_up_proj"]):
    columns = hf[f"{experts}.gate_up_proj"][expert]  # [hidden, 2 * inner]
    gate, up = columns[:, ::2], columns[:, 1::2]
    assert torch.equal(torch.cat([gate, up], dim=1).T, held.cpu())
print(tuple(columns.shape), "->", tuple(held.shape), "in every expert")

# %% [markdown]
# ### The way down is transposed
#
# `down_proj` has nothing to interleave; each expert is simply transposed.

# %%
for expert, held in enumerate(layout[f"{experts}.down_proj"]):
    assert torch.equal(hf[f"{experts}.down_proj"][expert].T, held.cpu())
print(tuple(hf[f"{experts}.down_proj"].shape), "->",
      len(layout[f"{experts}.down_proj"]), "x", tuple(held.shape))

# %% [markdown] tags=["exercise"]
# ### Exercise: mend a bridge
#
# (15 minutes, hard) Here is a way back from Megatron's tensors of one layer of
# the tiny model to the checkpoint's, with one mistake in it that somebody has
# really shipped. Every shape is right, and so are five of the six tensors.
# Find the sixth and mend the function.
#
# <details><summary>Hint</summary>
#
# Feed it the tensors of `layout` (one expert's) and compare with `hf`, name by
# name, as this section did. What must happen to a bias whose matrix is put
# into another order?
#
# </details>

# %% tags=["start"]
def to_checkpoint(qkv, gate_up, gate_up_bias, down):
    """Megatron's tensors of a layer, of one expert -> by name."""
    grouped = qkv.unflatten(0, (2, 4, -1))  # groups, heads, rows
    q, k, v = (part.flatten(0, 2)
               for part in grouped.split((2, 1, 1), dim=1))
    halves = gate_up.T.chunk(2, dim=1)  # [hidden, inner], twice
    return {"q_proj": q, "k_proj": k, "v_proj": v,
            "gate_up_proj": torch.stack(halves, dim=-1).flatten(1),
            "gate_up_proj_bias": gate_up_bias,
            "down_proj": down.T}

# %% tags=["solution"]
def to_checkpoint(qkv, gate_up, gate_up_bias, down):
    """Megatron's tensors of a layer, of one expert -> by name."""
    grouped = qkv.unflatten(0, (2, 4, -1))  # groups, heads, rows
    q, k, v = (part.flatten(0, 2)
               for part in grouped.split((2, 1, 1), dim=1))
    halves = gate_up.T.chunk(2, dim=1)  # [hidden, inner], twice
    biases = gate_up_bias.chunk(2)
    return {"q_proj": q, "k_proj": k, "v_proj": v,
            "gate_up_proj": torch.stack(halves, dim=-1).flatten(1),
            "gate_up_proj_bias": torch.stack(biases, dim=-1).flatten(),
            "down_proj": down.T}

# %% tags=["check"]
from helpers.exercises import check

check("mend-the-bridge", to_checkpoint)

# %% [markdown]
# ## 3 · Do they compute the same?
#
# Equal weights are not yet an equal model. YaRN, windows, sinks, the clamp in
# the experts, the router: each engine has its own code for them. So feed both
# the same tokens and compare the logits.
#
# The sequences must be **longer than the window**, or a missing window hides.
# **Predict:** how large will the largest difference be? Zero?

# %%
from transformers import GptOssForCausalLM
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

def reference(path):
    """The checkpoint in transformers, in its plainest implementation."""
    model = GptOssForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager")
    return model.to(settings.device).eval()

hugging_face = reference(folder)

# %%
def megatron_logits(tokens):
    """[B, S] -> [B, S, V]"""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return megatron(tokens, positions.expand_as(tokens), None)

def hf_logits(tokens):
    """[B, S] -> [B, S, V]"""
    return hugging_face(tokens).logits

generator = torch.Generator().manual_seed(SEED)
length = 3 * m.sliding_window
tokens = torch.randint(1, m.vocab_size, (8, length), generator=generator)
tokens = tokens.to(settings.device)
with torch.no_grad():
    gap = (megatron_logits(tokens) - hf_logits(tokens)).abs().float()
print(f"{tuple(tokens.shape)} tokens, window {m.sliding_window}:",
      f"largest difference {gap.max():.1e}")
assert gap.max() < 1e-4 or not exact
run.record("parity_megatron_hf_max_abs_logit", gap.max())

# %% [markdown]
# Not zero: the two add the same numbers in another order, and float32 rounds.
# A difference of a few millionths is that rounding. A real mistake looks
# different, as you will see in a moment.
#
# Is it the same everywhere? Past the first window the sliding layer starts to
# forget, so look by position.

# %%
by_position = gap.amax(dim=(0, 2)).cpu()
fig, axis = plt.subplots(figsize=(7.5, 3.2))
axis.semilogy(by_position, markevery=4)
for edge in range(m.sliding_window, length, m.sliding_window):
    axis.axvline(edge, color="black", ls=":", lw=1)
axis.set(xlabel="position (token)", ylim=(1e-8, 1e-3),
         ylabel="largest difference\nof a logit (logit)")
show_figure(
    fig, run=run, name="logit_gap",
    alt="Largest logit difference by position, on a logarithmic scale: a flat "
    "line near a millionth over three windows, with no step at the dotted "
    "lines where a window ends.",
    data={"position": range(length), "max_abs_logit": by_position},
);

# %% [markdown]
# Flat across the dotted lines: no step where a window ends.

# %% [markdown]
# ### Gradients too
#
# Training needs gradients, and those of the sinks have been wrong in more than
# one kernel. Both models get the same loss. To compare tensor by tensor, the
# gradients must be in one layout.
#
# A trick does that: the bridge only moves numbers around. Put the gradients
# where Megatron's weights are, export, and put the weights back.
# (`trainer.gradients` does the same through Megatron's own schedule.)

# %%
from torch.nn.functional import cross_entropy

def next_token_loss(logits):
    """Mean cross-entropy of each token given those before it."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(),
                         tokens[:, 1:].flatten())

megatron.zero_grad_buffer()
next_token_loss(megatron_logits(tokens)).backward()
kept = [p.detach().clone() for p in megatron.parameters()]
with torch.no_grad():
    for p in megatron.parameters():
        p.copy_(p.main_grad)
    gradients = trainer.export()
    for p, weight in zip(megatron.parameters(), kept):
        p.copy_(weight)

# %%
hugging_face.zero_grad()
next_token_loss(hf_logits(tokens)).backward()
print(f"{'layer 0':42}{'largest gradient':>17}{'difference':>12}")
worst = 0.0
for name, parameter in hugging_face.named_parameters():
    largest = parameter.grad.abs().max().item()
    off = (gradients[name].cpu() - parameter.grad.cpu()).abs().max().item()
    worst = max(worst, off / largest)
    if ".layers.1." not in name:
        short = name.removeprefix("model.layers.0.")
        print(f"{short:42}{largest:17.1e}{off:12.1e}")
print(f"worst ratio over all {len(gradients)} tensors: {worst:.1e}")
assert worst < 1e-3 or not exact
run.record("parity_gradient_max_relative", worst)

# %% [markdown]
# Every kind agrees, the sinks included.
#
# One trap was avoided above: the tokens were drawn from 1 on. Token 0 is the
# padding token here. transformers never gives its embedding a gradient,
# Megatron does. In training it makes no difference, since padding is masked.

# %% [markdown]
# ## 4 · The way back
#
# Export turns the Megatron model into checkpoint names and shapes again. The
# weights have not been trained yet, so the demand is the strictest there is.
# **Predict:** of how many tensors will every bit be as before?

# %%
from helpers.bridge import compare_weights

difference = compare_weights(trainer.export(), folder)
for what in ("missing", "extra", "unequal"):
    names = getattr(difference, what)
    run.record(f"export_{what}", len(names))
    print(f"{what}: {len(names)}")
assert not difference

# %% [markdown]
# All of them. Moving numbers does not round them.
#
# ### What a wrong bridge looks like
#
# Would the logits have told you? Break the conversion on purpose, one mistake
# at a time, on a copy, and compare the logits with Megatron's. **Predict**
# which mistake is the hardest to see.

# %%
def swap_gate_and_up(w):
    for name in w:
        if "gate_up_proj" in name:
            halves = w[name].unflatten(-1, (-1, 2))
            w[name] = halves.flip(-1).flatten(-2)

def forget_the_groups(w):
    for layer in range(m.num_hidden_layers):
        at = [f"model.layers.{layer}.self_attn.{x}_proj.weight" for x in "qkv"]
        rows = torch.cat([w[name] for name in at])
        grouped = rows.view(k, -1, m.head_dim, m.hidden_size)
        sizes = (q // k, 1, 1)
        for name, part in zip(at, grouped.split(sizes, dim=1)):
            w[name] = part.reshape(-1, m.hidden_size)

def drop_the_sinks(w):
    for name in w:
        if name.endswith("sinks"):
            w[name] = torch.full_like(w[name], -1e4)

def swap_the_norms(w):
    for layer in range(m.num_hidden_layers):
        one, two = (f"model.layers.{layer}.{which}_layernorm.weight"
                    for which in ("input", "post_attention"))
        w[one], w[two] = w[two], w[one]

# %%
mistakes = (swap_gate_and_up, forget_the_groups, drop_the_sinks,
            swap_the_norms)
errors = {"none": gap.max().item()}
with torch.no_grad():
    right = megatron_logits(tokens)
    for mistake in mistakes:
        broken = dict(hf)
        mistake(broken)
        hugging_face.load_state_dict(broken)
        off = (hf_logits(tokens) - right).abs().max().item()
        errors[mistake.__name__.replace("_", " ")] = off
    hugging_face.load_state_dict(hf)
for name, error in errors.items():
    print(f"{name:22}{error:10.1e}")
assert errors["swap the norms"] < 1e-4 < errors["drop the sinks"] or not exact

# %%
fig, axis = plt.subplots(figsize=(7.5, 3))
axis.barh(list(errors), list(errors.values()), color="#0072B2")
axis.axvline(1e-4, color="#D55E00", ls="--", label="limit of this course")
axis.invert_yaxis()
axis.set(xscale="log", xlim=(1e-7, 30), ylabel="mistake",
         xlabel="largest difference of a logit (logit)")
axis.grid(axis="y", visible=False)
axis.legend(loc="upper right")
show_figure(
    fig, run=run, name="mistakes",
    alt="Bars on a logarithmic scale. Without a mistake the largest logit "
    "difference is near a millionth, left of the dashed limit at 1e-4. Three "
    "mistakes are far to the right of it; swapped norms are as far left as no "
    "mistake.",
    data={"mistake": list(errors), "max_abs_logit": list(errors.values())},
);

# %% [markdown]
# Three mistakes stand more than ten thousand times above the limit. There is
# nothing to argue about between rounding and a mistake.
#
# The swapped norms leave **no trace**. Both norms of a layer start as ones, so
# exchanging them changes nothing yet. That is a lesson about test data, not
# about norms: equal values hide an exchange, and zeros hide a loss. You will
# repeat this one with trained weights.

# %% [markdown]
# ### The mistake that shapes catch, and when they do not
#
# Forget to transpose `down_proj`, and PyTorch refuses:

# %%
broken = dict(hf)
name = f"{experts}.down_proj"
broken[name] = hf[name].transpose(-1, -2).contiguous()
try:
    hugging_face.load_state_dict(broken)
except RuntimeError as error:
    print(str(error).splitlines()[-1].strip())
else:
    raise AssertionError("a transposed down_proj was accepted")

# %% [markdown]
# In gpt-oss-20b `hidden_size` equals `intermediate_size`: 2880 both. The
# matrix is square, and the same mistake is accepted without a word. On three
# numbers:

# %%
square = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0, 0, 0]])
x = torch.tensor([1.0, 2, 3])
print("right:", (x @ square).tolist(), " transposed:",
      (x @ square.T).tolist(), " both have shape", tuple(square.shape))
if PROFILE == "cpu":
    assert m.hidden_size != m.intermediate_size

# %% [markdown]
# That is why the tiny model of this course is not square: what cannot be
# caught by eye should at least be caught by shape.

# %% [markdown]
# ## 5 · There, changed, and back
#
# A bridge that returns what you gave it is only half a test. Now change the
# weights in Megatron, by training, and see whether the changed ones arrive.
#
# The training is useful by itself. GRPO needs a policy that sometimes succeeds
# at the task, and a random model never does. The task of this course is the
# median of seven digits.

# %%
from helpers.checkpoints import tokenizer_and_pad
from helpers.tasks import load_task

task = load_task(settings.task, SEED)
w = settings.warm_start
examples = task.demonstrations(6, w.lazy_share, w.slip_rate)
for example in examples:
    print(example.completion)
print("\nafter prompts like", examples[0].prompt)

# %% [markdown]
# Most demonstrations are *lazy*: they answer at once with some digit of the
# question. Some are *worked*: they sort the digits in the analysis channel,
# now and then with a slip, and give the one in the middle. The policy learns
# both habits. GRPO will later have to find out which one pays.
#
# **Predict:** a random model spreads its bets over 64 tokens, which costs
# about ln 64 = 4.2 nats a token. Down to what can the loss fall, when lazy
# answers are random?

# %%
from helpers.warm_start import supervised_steps

tokenizer, pad = tokenizer_and_pad(folder)
plot = LivePlot({"loss": "cross-entropy (nat/token)",
                 "grad_norm": "gradient norm before clipping"})

def watch(step, stats):
    plot.add(step, loss=stats["loss"], grad_norm=stats["grad_norm"])

losses = supervised_steps(trainer, tokenizer, pad, watch)
plot.finish(run, "warm_start", alt="Cross-entropy of the warm start falls "
            "from above four nats a token to below half a nat, steeply in "
            "the first thirty steps. The gradient norm is noisy.")

# %%
final = sum(losses[-10:]) / 10
run.record("warm_start_loss", final)
print(f"loss {losses[0]:.2f} -> {final:.2f} nat/token",
      f"in {len(losses)} steps")
assert final < 1.5

# %% [markdown]
# What is left has parts that nobody can predict: the random digit of a lazy
# answer, which of the two habits comes next, and the slips of the worked
# answers. The rest is sorting that is not learned yet.
#
# Now export, and write a checkpoint folder that anyone can read.

# %%
from helpers.checkpoints import save_weights

trained = trainer.export()
changed = compare_weights(trained, folder)
print(f"{len(changed.unequal)} of {len(trained)} tensors changed,",
      f"{len(changed.missing)} missing, {len(changed.extra)} extra")
assert len(changed.unequal) == len(trained)

warm = save_weights(trained, folder, settings.checkpoint("warm"))
assert not compare_weights(trained, warm)
print("written:", sorted(p.name for p in warm.iterdir()))

# %% [markdown]
# Every tensor moved, also the norms. So this time the comparison of the logits
# leaves nothing out. transformers reads the folder, knowing nothing of
# Megatron:

# %%
hugging_face = reference(warm)
with torch.no_grad():
    gap = (megatron_logits(tokens) - hf_logits(tokens)).abs().float().max()
print(f"after training: largest difference {gap:.1e}")
assert gap < 1e-3 or not exact
run.record("parity_trained_max_abs_logit", gap)

# %% [markdown]
# Still rounding. (Trained logits are larger than random ones, so the same
# relative error is a larger number.) Now the mistake that was invisible
# before:

# %%
broken = dict(trained)
swap_the_norms(broken)
with torch.no_grad():
    hugging_face.load_state_dict(broken)
    off = (hf_logits(tokens) - megatron_logits(tokens)).abs().max()
    hugging_face.load_state_dict(trained)
print(f"norms swapped, after training: {off:.1e}")
assert off > 1e-2 or not exact

# %% [markdown]
# And does the model do something? Ask it five questions that it was never
# trained on, taking the likeliest token each time.

# %%
from helpers.harmony import decode, encode

for problem in task.held_out(5):
    prompt = torch.tensor([encode(tokenizer, problem.prompt)])
    answer = hugging_face.generate(prompt.to(settings.device),
                                   max_new_tokens=24, do_sample=False)
    text = decode(tokenizer, answer[0, prompt.shape[1]:].tolist())
    print(problem.question, "median", problem.answer, " ", text)

# %% [markdown]
# It speaks harmony: channels, messages, an end. Whether the digit is right is
# another matter, and what the rest of the course is about.

# %% [markdown]
# ## 6 · Tensor by tensor
#
# Comparing whole models has a blind spot, as the norms showed: a tensor
# that happens not to matter can be lost unseen. So look at one kind of tensor
# at a time. Add a little noise to it in **both** models (Megatron gets it
# through the bridge) and ask both again. Two things must hold:
#
# - the noise shows in the logits, or the row proves nothing (*effect*);
# - the two models still agree (*forward*), and about the gradient of that
#   tensor too (*gradient*).
#
# Megatron gets the sequences as one padded batch, transformers one by one:
# padding that leaks would show.
#
# **Predict:** which kind has the smallest effect?

# %%
from helpers.parity import parity_rows, parity_table

rows = []
if exact:  # a bf16 router flips between near-equal experts
    probes = [
        torch.randint(1, m.vocab_size, (n,), generator=generator).tolist()
        for n in (5, m.sliding_window, m.sliding_window + 1, length)
    ]
    rows = parity_rows(trainer, hugging_face, probes, pad)
    print(parity_table([r for r in rows if r.layers != "full"]))

# %% [markdown]
# The full layers have the same 17 rows; they are in the picture.

# %%
from helpers.parity import parity_columns

if rows:
    names = [f"{r.kind.removesuffix('.weight')} ({r.layers})" for r in rows]
    fig, axis = plt.subplots(figsize=(8, 8.5))
    columns = parity_columns(rows)
    for label, column in (("effect on a logit", "effect"),
                          ("difference of a logit", "forward_abs"),
                          ("gradient, share", "gradient_rel")):
        axis.plot(columns[column], names, ls="none", label=label)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="logit, or share of the largest gradient",
             ylabel="kind of tensor (kind of layer)")
    axis.legend(loc="upper center", bbox_to_anchor=(0.3, 1.08), ncols=3)
    show_figure(
        fig, run=run, name="parity", data=columns,
        alt="For each of 37 kinds of tensor three marks on a logarithmic "
        "scale. The effect of noise lies between some hundredths of a logit "
        "and ten logits; the difference between the two models and that of "
        "the gradients lie below a hundred-thousandth, far to the left.",
    );

# %% [markdown]
# On the left (triangles, squares) is what the two engines disagree about:
# rounding. On the right (dots) is what a change of the tensor is worth. In
# between is nothing. Had the bridge lost a tensor, its square would stand
# where its dot is.

# %%
bad = [r for r in rows
       if not (r.forward_rel < 1e-4 and r.gradient_rel < 1e-3)]
if rows:
    run.record("parity_kinds", len(rows))
    run.record("parity_kinds_failed", len(bad))
    least = min(rows, key=lambda r: r.effect)
    print(f"smallest effect: {least.kind} ({least.layers}),",
          f"{least.effect:.1e} logit")
assert not bad

# %% [markdown]
# ### What no logit shows
#
# A kernel may compute the right output and a wrong gradient. Sinks have had
# that in more than one kernel. Plant it: let Megatron's sinks learn nothing.
# **Predict:** what does the comparison of logits say?

# %%
from helpers.parity import gradient_gaps

sinks = [p for name, p in megatron.named_parameters()
         if name.endswith("softmax_offset")]
hooks = [p.register_hook(lambda gradient: gradient * 0) for p in sinks]
if exact:
    with torch.no_grad():
        gap = (megatron_logits(tokens) - hf_logits(tokens)).abs().max()
    wrong = {name: share for name, (_, share) in gradient_gaps(
        trainer, hugging_face, probes, pad).items() if share > 1e-3}
    print(f"logits differ by {gap:.1e}; gradients that differ: {wrong}")
    assert gap < 1e-3 and all("sinks" in name for name in wrong) and wrong
for hook in hooks:
    hook.remove()

# %% [markdown]
# The logits are as right as before. Only the gradients tell, and only those of
# the sinks.

# %% [markdown]
# ## 7 · The mistakes that people made
#
# `helpers/faults.py` collects mistakes from the public threads of the engines
# in this course. Each is a few lines that make the reference compute what the
# broken engine would. Here is one:

# %%
from helpers.faults import FAULTS, fitting_faults

fault = FAULTS["window-one-long"]
for part in ("what", "cause", "cure", "references"):
    print(f"{part:11}{getattr(fault, part)}")

# %% [markdown]
# **Predict:** with the trained weights and sequences of three windows, which
# mistake is closest to rounding? Sinks, windows, YaRN, experts, router?

# %%
def distance(ours, theirs):
    """Largest |difference|; in bf16 the mean, since single logits flip."""
    gap = (ours - theirs).abs().float()
    return (gap.max() if exact else gap.mean()).item()

with torch.no_grad():
    right = megatron_logits(tokens)
    planted = {"none": distance(hf_logits(tokens), right)}
    for name, fault in fitting_faults(hugging_face.config).items():
        with fault.plant(hugging_face):
            planted[name] = distance(hf_logits(tokens), right)
limit = 1e-3 if exact else 2 * planted["none"]
planted = dict(sorted(planted.items(), key=lambda item: item[1]))
unseen = [n for n, off in planted.items() if n != "none" and off < limit]
run.record("faults_planted", len(planted) - 1)
run.record("faults_unseen", len(unseen))
print(f"{len(planted) - 1} mistakes, unseen: {unseen}")

# %%
fig, axis = plt.subplots(figsize=(8, 7))
axis.barh(list(planted), list(planted.values()), color="#0072B2")
axis.axvline(limit, color="#D55E00", ls="--", label="limit")
axis.set(xscale="log", ylabel="mistake", xlabel=(
    f"{'largest' if exact else 'mean'} difference of a logit (logit)"))
axis.grid(axis="y", visible=False)
axis.legend(loc="lower right")
show_figure(
    fig, run=run, name="faults",
    alt="Bars on a logarithmic scale, sorted. Without a mistake the "
    "difference is rounding. Most planted mistakes lie far right of the "
    "dashed limit; the shortest, such as rounded sinks and rounded YaRN "
    "bounds, come nearest to it or below it.",
    data={"mistake": list(planted), "difference": list(planted.values())},
);

# %% [markdown]
# Look at the short bars first; they are the ones to fear. A bar as short as
# "none" means that your test data cannot show the mistake: here, experts that
# never reach the clamp at 7. Rounded YaRN bounds show hundreds of times less
# than most, because 48 positions are few. Such a mistake is there all the same
# and waits for longer prompts or larger weights.
# `tests/integration/test_planted_faults.py` therefore repeats this with
# weights that are made to show every one of them.
#
# And when an engine disagrees with you, turn the picture round: a mistake
# whose numbers it reproduces is the first suspect. `python -m helpers.doctor
# --checkpoint DIR --server URL` does that for a checkpoint and a server of
# yours.

# %% [markdown] tags=["exercise"]
# ### Exercise: name the fault
#
# (10 minutes, medium) An engine sends you its logprobs of two sequences,
# `reported`. It is one of the engines that `helpers/faults.py` knows. Which
# mistake does it make? Give the fault's name as a string.
#
# <details><summary>Hint</summary>
#
# `rank_faults(hugging_face, sequences, reported)` plants one fault after the
# other and sorts them by how well they explain the numbers. The first entry is
# the sound model, for comparison; an entry has `.fault.name`, `.mean` and
# `.worst`.
#
# </details>

# %% tags=["given"]
from helpers.exercises import mystery_logprobs
from helpers.faults import rank_faults

sequences = tokens[:2].tolist()
reported = mystery_logprobs(hugging_face, sequences)

# %% tags=["start"]
culprit = ...  # your turn: a name, such as "sinks-ignored"

# %% tags=["solution"]
ranking = rank_faults(hugging_face, sequences, reported)
for fit in ranking[1:4]:
    print(f"{fit.fault.name:20}{fit.mean:10.1e} nat off on average")
culprit = ranking[1].fault.name

# %% tags=["check"]
from helpers.exercises import check

check("name-the-fault", culprit)

# %% [markdown]
# ## What you take away
#
# 1. **A conversion is a permutation, and permutations can be checked
#    exactly.** Groups of q, k and v; gate and up; the transposed way down.
#    Export gives every bit back.
# 2. **Equal weights are not an equal model.** Compare logits on sequences
#    longer than the window, and gradients of every kind of tensor. In float32
#    rounding stays at a few millionths; nearly every mistake is thousands of
#    times that.
# 3. **Test data can hide mistakes.** Norms that are all ones cannot show that
#    they were exchanged, a square matrix cannot show by its shape that it was
#    transposed, small experts cannot show a missing clamp. Plant the mistake
#    to see that your test would have caught it.

# %% [markdown]
# ### Try it
#
# - (5 minutes, easy) Break the order of the sinks: flip those of layer 0.
#   *Check:* the error is far above 1e-4. If it is not, you flipped a copy
#   that was never loaded.
# - (10 minutes, medium) Compare logits on sequences of 10 tokens, with the
#   window of the reference set to 8 (`config.sliding_window`). *Check:* the
#   first 8 positions agree, the others do not.

# %%
run.finish();
