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
# # 01 · What is inside gpt-oss
#
# **Question:** what is inside gpt-oss (sinks, sliding windows, MoE routing,
# YaRN, MXFP4), and where do its 20,914,757,184 parameters and its gigabytes
# sit?
#
# **You need first:** Python and a little PyTorch. You know what softmax and an
# attention head are. Nothing from another notebook.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12, torch 2.11.0
# and transformers 5.12.1.

# %% [markdown]
# | profile | time | memory | what it opens |
# |---|---|---|---|
# | `cpu` | below a minute on 2 cores | about 1 GB | tiny gpt-oss |
# | `gpu`, `gpu-20b`, `cluster` | the same | the same | the same |
#
# Two models appear. The **tiny** one is a real gpt-oss with random weights,
# small enough to open on any machine: you measure on it. The **20b** one stays
# closed: everything you learn about its size follows from a config of a few
# lines, so no weights are downloaded.

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* people take the sink for a token (it is a number a
# head, and has no value vector); they count the window as 128 tokens *before*
# the token; they expect MXFP4 to shrink the file to a quarter. *Say:* "what
# does the row sum to?", "does the token see itself?", "what stays in bf16?".
# Let the predictions be written down; here most first guesses are wrong, which
# is the point.
#
# *Ask:* Why does a sink of 0 hide a kernel without sinks? Which tensor would
# you look at first after a conversion? Why do short tests not find rounded
# YaRN bounds?
#
# *Short of time:* sections 1, 2, 3 and 7; leave YaRN and MXFP4 to read at
# home. *A late learner* can start at any section once the cells of "Open the
# tiny model" have run: nothing later changes the model.

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %%
import torch
from transformers import GptOssForCausalLM
from transformers.utils.logging import disable_progress_bar

from helpers import anatomy, mxfp4
from helpers.checkpoints import write_tiny_checkpoint
from helpers.figures import show_figure, use_style
from helpers.profiles import load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
run = NotebookRun("01_gpt_oss", settings)
use_style()
disable_progress_bar()

# %% [markdown]
# ## 1 · Open the tiny model
#
# The tiny model belongs to the `cpu` profile; you open that one under every
# profile. It is loaded in float32 with the `eager` implementations: slow, but
# every attention weight is a tensor you can look at.

# %%
tiny = load_profile("cpu", seed=SEED)
folder = write_tiny_checkpoint(tiny)
model = GptOssForCausalLM.from_pretrained(
    folder,
    dtype=torch.float32,
    attn_implementation="eager",
    experts_implementation="eager",
).eval()
config = model.config
print(f"{config.num_hidden_layers} layers, hidden {config.hidden_size},",
      f"{config.num_attention_heads} heads of {config.head_dim},",
      f"{config.num_key_value_heads} key-value heads,",
      f"{config.num_local_experts} experts, top-{config.num_experts_per_tok}")

# %% [markdown]
# One layer holds 17 tensors. In the order of computation: a norm, attention
# (four projections and the sinks), a second norm, the router, the experts.
# PyTorch prints the two norms last, because that is where the class defines
# them.
#
# **Before you run:** which of the tensors will be the largest?

# %%
layer = model.model.layers[0]
for name, parameter in layer.named_parameters():
    shape = " x ".join(str(size) for size in parameter.shape)
    print(f"{name:35}{shape:>15}{parameter.numel():>9,}")
assert len(list(layer.parameters())) == 17

# %% [markdown]
# Almost everything sits in `mlp.experts`. All experts of a layer share one
# tensor whose first index is the expert.
#
# Two details of that tensor cause many broken conversions. `gate_up_proj`
# keeps gate and up columns **interleaved** (even columns gate, odd columns
# up), and both expert tensors are stored `[expert, in, out]` while every other
# weight is `[out, in]`.

# %% [markdown]
# `helpers.anatomy` lists the same tensors from the config alone. If names and
# shapes agree here, you can trust the list for the 20b model, which you do not
# open.

# %%
counted = anatomy.tensor_shapes(config)
loaded = {name: tuple(t.shape) for name, t in model.state_dict().items()}
assert counted == loaded

tiny_parameters = anatomy.total_parameters(config)
assert tiny_parameters == sum(p.numel() for p in model.parameters())
run.record("tiny_parameters", tiny_parameters)
print(f"{len(counted)} tensors, {tiny_parameters:,} parameters: they agree")

# %% [markdown]
# ## 2 · Sinks: attention that may go nowhere
#
# Softmax makes every head spend all of its attention, even when nothing in the
# context is of use. gpt-oss gives each head one learned number, the **sink**.
# It joins the softmax like the score of one more key, and is then dropped. The
# weights of the real keys sum to less than one.
#
# By hand: two keys with scores 0 and 0, and a sink of 0. Three equal logits
# share the attention, so each key gets a third and the last third is gone.

# %%
by_hand = torch.tensor([1 / 3, 1 / 3])
scores, sink = torch.zeros(1, 1, 2), torch.zeros(1)  # [heads, queries, keys]
weights = anatomy.attention_with_sinks(scores, sink)[0, 0]
print("weights", [round(weight, 4) for weight in weights.tolist()],
      f"and {1 - weights.sum():.4f} for the sink")
torch.testing.assert_close(weights, by_hand)

# %% [markdown]
# With *n* keys of score 0 and a sink *s*, the sink takes exp(*s*) / (*n* +
# exp(*s*)).
#
# **Predict:** how much does a sink of 0 take from a query that sees 128 keys?
# And how much does a sink of 5?

# %%
import matplotlib.pyplot as plt

logits = torch.linspace(-4, 8, 25)
shares = {}
for keys in (1, 16, 128):
    row = torch.zeros(len(logits), 1, keys)  # one head for each sink
    row_weights = anatomy.attention_with_sinks(row, logits)
    shares[keys] = anatomy.sink_share(row_weights).flatten()
fig, axis = plt.subplots()
for keys, share in shares.items():
    axis.plot(logits, share, label=f"{keys} key{'s' * (keys > 1)}")
axis.axvline(0, color="black", lw=1, ls=":")
axis.set(xlabel="sink (logit)", ylabel="share of the sink (1)")
axis.legend(title="query sees")
show_figure(
    fig, run=run, name="sink_share",
    alt="Share of attention taken by the sink, against the sink's logit, for "
    "1, 16 and 128 keys: three S curves, further right for more keys. At a "
    "sink of 0 the share is a half, 6 percent and below 1 percent.",
    data={"sink": logits} | {f"keys_{k}": v for k, v in shares.items()},
);

# %% [markdown]
# Look at the dotted line. A sink of 0 takes half of a query with one key, but
# less than a hundredth of a query with 128 keys. That is why a **zero sink
# hides a missing sink**: an attention kernel that ignores sinks passes a test
# with a tolerance of 1 percent.
#
# Now play that test through. "Broken" is plain softmax, as in a kernel that
# does not know sinks.

# %%
def error_of_ignoring(sink: float, keys: int = 128) -> float:
    """Largest relative error when a kernel leaves the sink out."""
    scores = torch.zeros(1, 1, keys)
    right = anatomy.attention_with_sinks(scores, torch.tensor([sink]))
    broken = scores.softmax(dim=-1)
    return ((broken - right).abs() / broken).max().item()

for sink in (0.0, 5.0):
    error = error_of_ignoring(sink)
    verdict = "passes" if error < 0.01 else "is caught"
    print(f"sink {sink}: error {error:7.2%}, the broken kernel {verdict}")
assert error_of_ignoring(0.0) < 0.01 < 0.5 < error_of_ignoring(5.0)

# %% [markdown]
# Zeros also hide sinks that went to the wrong head. Swap the sinks of two
# heads and compare:

# %%
torch.manual_seed(SEED)
scores = torch.randn(2, 1, 128)
moved = []
for sinks in (torch.zeros(2), torch.tensor([5.0, -5.0])):
    right = anatomy.attention_with_sinks(scores, sinks)
    swapped = anatomy.attention_with_sinks(scores, sinks.flip(0))
    moved.append(((swapped - right).abs() / right).max().item())
    print(f"sinks {sinks.tolist()}: swapping moves a weight by",
          f"up to {moved[-1]:.0%}")
assert moved[0] == 0 and moved[1] > 0.5

# %% [markdown]
# So every test of sinks in this project uses large, different sinks.
#
# There is a second way to compute the same thing. Flash kernels return the
# log-sum-exp of the scores (`lse`) beside the plain output, and `output *
# sigmoid(lse - sink)` then equals the softmax with the extra column. A kernel
# without sinks can be corrected by it afterwards. Check it, outputs and
# gradients, with large sinks:

# %%
torch.manual_seed(SEED)
scores = torch.randn(4, 20, 20, dtype=torch.float64)  # [heads, query, key]
values = torch.randn(4, 20, 8, dtype=torch.float64)
sinks = torch.tensor([6.0, -6.0, 3.0, 0.0], dtype=torch.float64)
sinks.requires_grad_()

column = anatomy.attention_with_sinks(scores, sinks) @ values
plain, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
rescaled = anatomy.apply_sink(plain, lse, sinks)
grads = [torch.autograd.grad(out.square().sum(), sinks)[0]
         for out in (column, rescaled)]

gap = max((column - rescaled).abs().max(), (grads[0] - grads[1]).abs().max())
run.record("sink_identity_max_abs", gap)
print(f"largest difference, outputs and gradients: {gap:.1e}")
assert gap < 1e-10

# %% [markdown] tags=["exercise"]
# ### Exercise: a sink that takes half
#
# (5 minutes, easy) A query sees `keys` keys, all of score 0. Which sink takes
# exactly half of its attention? Write it as a function, and say first whether
# the sink for 128 keys is nearer to 5 or to 64.
#
# <details><summary>Hint</summary>
#
# The share is exp(sink) / (keys + exp(sink)). Set it to 1/2 and solve for the
# sink.
#
# </details>

# %% tags=["given"]
import math

# %% tags=["start"]
def half_sink(keys):
    return ...  # your turn

# %% tags=["solution"]
def half_sink(keys):
    return math.log(keys)  # exp(sink) equals the number of keys

# %% tags=["check"]
from helpers.exercises import check

check("half-sink", half_sink)

# %% [markdown]
# ## 3 · Sliding and full layers
#
# gpt-oss alternates two kinds of attention. Even layers **slide**: a token
# sees itself and the `window` - 1 tokens before it. Odd layers are **full**: a
# token sees everything before it. The window of 20b is 128 tokens, that of the
# tiny model is printed below.
#
# Note the "itself". TransformerEngine counts only the tokens to the left, so a
# window of 128 becomes `(127, 0)` there. One off, and trainer and rollout
# engine disagree on every long answer.

# %%
window = config.sliding_window
print("layers:", anatomy.layer_types(config))
print("window:", window, " in TransformerEngine:", anatomy.te_window(window))
print(anatomy.window_mask(length=5, window=3).int())
assert list(anatomy.layer_types(config)) == config.layer_types
assert anatomy.te_window(128) == (127, 0)

# %% [markdown]
# The 5 x 5 mask is a window of 3 tokens: each row is a query, each 1 is a key
# that it sees. The last row sees three keys, itself included.
#
# Next, run the tiny model on 48 random tokens and keep its attention weights.
# **Predict** the shape of the bright area in each of the two layers.

# %%
torch.manual_seed(SEED)
tokens = torch.randint(config.vocab_size, (1, 3 * window))
with torch.no_grad():
    attentions = model(tokens, output_attentions=True).attentions
sliding, full = (layer[0] for layer in attentions[:2])  # [heads, query, key]
length = tokens.shape[1]
assert torch.equal(sliding[0] > 0, anatomy.window_mask(length, window))
assert torch.equal(full[0] > 0, anatomy.window_mask(length, None))

# %% [markdown]
# The two assertions say it exactly: a weight is above zero where the mask says
# so, and nowhere else. The picture says it at a glance. To the right of each
# pattern stands one more column: the share that went to the sink, which is
# what the row lacks to one.

# %%
head = 0
fig, axes = plt.subplots(1, 4, figsize=(9.5, 4.2), width_ratios=(14, 1) * 2)
for panel, name, maps in ((0, "sliding", sliding), (2, "full", full)):
    sink = anatomy.sink_share(maps)[head][:, None]
    axes[panel].imshow(maps[head].sqrt(), vmin=0, vmax=1, aspect="auto")
    bar = axes[panel + 1].imshow(sink.sqrt(), vmin=0, vmax=1, aspect="auto")
    axes[panel].set(title=f"{name} layer, head {head}", xlabel="key (token)",
                    ylabel="query (token)")
    axes[panel + 1].set(title="sink", xticks=[], yticks=[])
for axis in axes:
    axis.grid(False)
fig.colorbar(bar, ax=list(axes), label="square root of weight", shrink=0.8)
show_figure(
    fig, run=run, name="attention",
    alt="Attention weights of head 0. The sliding layer is a diagonal band as "
    "wide as the window; the full layer is the whole lower triangle. A "
    "separate column beside each shows the share of the sink, largest for the "
    "first tokens, which have few keys to choose from.",
    data={"query": range(length),
          "sink_sliding": anatomy.sink_share(sliding)[head],
          "sink_full": anatomy.sink_share(full)[head]},
);

# %% [markdown]
# The sliding layer is a band, the full layer a triangle. The weights inside
# are noise, because this model has learned nothing yet.
#
# Follow the sink columns from top to bottom. The first tokens have few keys,
# so the sink has little competition. In the full layer the competition keeps
# growing, in the sliding layer it stops at `window` keys.
#
# The size of the sink matters too. **Predict** what happens to the sliding
# layer when every sink of it is raised by 3.

# %%
sinks = [layer.self_attn.sinks for layer in model.model.layers]
with torch.no_grad():
    kept = sinks[0].clone()
    sinks[0] += 3
    raised = model(tokens, output_attentions=True).attentions[0][0]
    sinks[0].copy_(kept)  # the model is as it was
share = {name: anatomy.sink_share(maps) for name, maps in
         (("sliding", sliding), ("full", full), ("raised", raised))}
assert (share["raised"] > share["sliding"]).all()
for name in ("sliding", "full"):  # early queries against late ones
    assert share[name][:, :window].mean() > share[name][:, -window:].mean()

# %%
fig, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
columns = {"query": list(range(length))}
titles = ("sliding layer", "full layer", "sliding layer, sinks + 3")
for axis, title, name in zip(axes, titles, share):
    logits = sinks[1] if name == "full" else sinks[0] + 3 * (name == "raised")
    for head, line in enumerate(share[name]):
        label = f"head {head}: {logits[head].item():+.2f}"
        axis.plot(line, label=label, markevery=8)
        columns[f"{name}_head{head}"] = line
    axis.set(title=title, xlabel="query (token)", ylim=(0, 1.4))
    axis.legend(title="sink (logit)", fontsize=8, ncols=2, loc="upper center")
axes[0].set_ylabel("share of the sink (1)")
show_figure(
    fig, run=run, name="sink_by_head", data=columns,
    alt="Share of attention that goes to the sink, by query position, one "
    "line a head. In the sliding and in the full layer the lines are high for "
    "the first tokens and low later. With every sink raised by 3 all lines "
    "of the sliding layer lie higher at every position.",
);

# %% [markdown]
# Raising a sink quietens its head at every position; that much is certain. How
# high a line lies without it depends on the scores of the keys as well.

# %% [markdown]
# ### Where the window ends
#
# Now test the window from outside, as you would test a kernel that you cannot
# look into. Change one token and watch which later positions of the attention
# output move.
#
# **Predict:** the token `window` - 1 back is the last one that a sliding layer
# sees. What moves at distance `window`?

# %%
def attention_outputs(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Attention output of each layer, [length, hidden]."""
    outputs = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0][0])
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return outputs

# %%
changed_at = 4
other = tokens.clone()
other[0, changed_at] = (other[0, changed_at] + 1) % config.vocab_size
moves = [
    (after - before).abs().amax(-1)
    for before, after in zip(attention_outputs(tokens),
                             attention_outputs(other))
]
leak = moves[0][changed_at + window:].max()  # sliding layer, out of the window
run.record("window_leak_max_abs", leak)
print(f"sliding layer: distance {window - 1} moves by",
      f"{moves[0][changed_at + window - 1]:.1e},",
      f"{window} and beyond by {leak}")

assert moves[0][changed_at + window - 1] > 0
assert leak == 0
assert moves[1][changed_at:].min() > 0  # the full layer sees all of it
assert all(move[:changed_at].max() == 0 for move in moves)  # causal

# %%
distance = torch.arange(length) - changed_at
fig, axis = plt.subplots()
for name, move in zip(("sliding layer", "full layer"), moves):
    axis.plot(distance, move, label=name)
axis.axvline(window - 0.5, color="black", lw=1, ls=":")
axis.set_yscale("symlog", linthresh=1e-4)
axis.set(xlabel="distance from the changed token (tokens)",
         ylabel="largest change of the output", ylim=(-2e-5, None))
axis.legend()
show_figure(
    fig, run=run, name="window",
    alt="Largest change of the attention output against the distance from the "
    "changed token. The sliding layer moves up to a distance of window minus "
    "one and is exactly zero beyond; the full layer moves at every later "
    "position. Nothing moves before the changed token.",
    data={"distance": distance, "sliding": moves[0], "full": moves[1]},
);

# %% [markdown]
# Left of 0 nothing moves (attention is causal). The sliding layer stops
# exactly at the dotted line, to the last bit. The full layer carries the
# change to the end: it is the only way for information to travel far in one
# step.
#
# The windows pay off in memory. During a rollout the keys and values of
# earlier tokens stay in the KV cache. A sliding layer needs to keep only its
# window. **Predict:** what share of the cache of gpt-oss-20b is saved at a
# long context?

# %%
real = anatomy.GPT_OSS_20B
contexts = [2**power for power in range(5, 18)]
ideal = [anatomy.kv_cache_bytes(real, n) / 2**20 for n in contexts]
naive = [anatomy.kv_cache_bytes(real, n, windows=False) / 2**20
         for n in contexts]
per_token = anatomy.kv_cache_bytes_per_token(real)
print(f"{per_token / 1024:.0f} KiB for each further token, and",
      f"{(ideal[-1] * 2**20 - per_token * contexts[-1]) / 2**20:.0f} MiB",
      "a sequence for the windows")
print(f"at {contexts[-1]:,} tokens: {ideal[-1] / 1024:.2f} GiB with windows,",
      f"{naive[-1] / 1024:.2f} GiB without")
assert per_token == 24 * 1024 and 0.49 < 1 - ideal[-1] / naive[-1] < 0.5

# %%
fig, axis = plt.subplots()
axis.loglog(contexts, naive, base=2, label="every layer keeps every token")
axis.loglog(contexts, ideal, base=2, label="sliding layers keep 128 tokens")
axis.axvline(128, color="black", lw=1, ls=":")
axis.xaxis.set_major_formatter("{x:,.0f}")
axis.yaxis.set_major_formatter("{x:,g}")
axis.set(xlabel="tokens in the sequence", ylabel="KV cache, bf16 (MiB)")
axis.legend()
show_figure(
    fig, run=run, name="kv_cache",
    alt="KV cache of one gpt-oss-20b sequence against its length, both axes "
    "logarithmic. The two lines are one up to 128 tokens; beyond, the line "
    "with windows bends and ends at half of the other.",
    data={"tokens": contexts, "with_windows_mib": ideal,
          "without_mib": naive},
);

# %% [markdown]
# Half of the layers slide, so almost half of the cache is saved, and nothing
# at all below 128 tokens.

# %% [markdown] tags=["exercise"]
# ### Exercise: how many answers fit into the cache?
#
# (5 minutes, easy) A rollout engine has 16 GiB left for the KV cache of
# gpt-oss-20b. How many answers of 1,024 tokens can it hold at once? Guess
# first: would it be half as many without the windows?
#
# <details><summary>Hint</summary>
#
# `anatomy.kv_cache_bytes(real, 1024)` is one answer. A GiB is 2**30 bytes, and
# half an answer does not count.
#
# </details>

# %% tags=["start"]
answers_at_once = ...  # your turn: a whole number

# %% tags=["solution"]
one_answer = anatomy.kv_cache_bytes(real, 1024)
answers_at_once = 16 * 2**30 // one_answer

# %% tags=["check"]
from helpers.exercises import check

check("cache-room", answers_at_once)

# %% [markdown]
# ## 4 · Routing: four experts of thirty-two
#
# The feed-forward part of each layer is a mixture of experts. A small linear
# layer, the **router**, scores every expert for each token. The top-k experts
# run, and a softmax **over those k scores only** gives their weights.
#
# By hand: three experts with scores 0, 2 and 1, top-2. Experts 1 and 2 win,
# and their weights are softmax(2, 1), that is sigmoid(1) and the rest.

# %%
weights, experts = anatomy.route(torch.tensor([[0.0, 2.0, 1.0]]), top_k=2)
sigmoid_of_1 = 1 / (1 + torch.tensor(-1.0).exp())
print("experts", experts[0].tolist(),
      "weights", [round(weight, 4) for weight in weights[0].tolist()])
assert experts.tolist() == [[1, 2]]
torch.testing.assert_close(weights[0, 0], sigmoid_of_1)

# %% [markdown]
# Now one token through the real expert layer. An expert multiplies by
# `gate_up_proj`, mixes gate and up by a clamped SwiGLU, (up + 1) · gate ·
# sigmoid(1.702 · gate), and multiplies by `down_proj`. The results are added
# with the router's weights.
#
# If your five lines equal the model's output, you have read the model right,
# interleaving included.

# %%
mlp = model.model.layers[0].mlp
torch.manual_seed(SEED)
token = torch.randn(1, 1, config.hidden_size)
with torch.no_grad():
    weights, experts = anatomy.route(mlp.router(token[0])[0], mlp.router.top_k)
    mine = torch.zeros(config.hidden_size)
    for weight, e in zip(weights[0], experts[0]):
        wide = token[0, 0] @ mlp.experts.gate_up_proj[e]
        inner = anatomy.clamped_swiglu(wide + mlp.experts.gate_up_proj_bias[e])
        mine += weight * (inner @ mlp.experts.down_proj[e]
                          + mlp.experts.down_proj_bias[e])
    theirs = mlp(token)[0][0, 0]
print(f"largest difference {(mine - theirs).abs().max():.1e}")
torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)

# %% [markdown]
# Which experts do the tokens of a whole batch choose? A good router spreads
# them. This one is random.
#
# **Predict:** will a random router use its experts evenly?

# %%
torch.manual_seed(SEED)
batch = torch.randint(config.vocab_size, (16, 3 * window))
with torch.no_grad():
    logits = model(batch, output_router_logits=True).router_logits
loads = [
    anatomy.expert_load(anatomy.route(layer, mlp.router.top_k)[1],
                        config.num_local_experts)
    for layer in logits
]
even = batch.numel() * mlp.router.top_k / config.num_local_experts
assert all(load.sum() == batch.numel() * mlp.router.top_k for load in loads)
for number, load in enumerate(loads):
    print(f"layer {number}: {load.tolist()}, even would be {even:.0f},",
          f"busiest {load.max() / even:.2f} times that")
assert max(load.max() for load in loads) > 1.05 * even

# %%
names = [str(expert) for expert in range(config.num_local_experts)]
fig, axis = plt.subplots()
places = torch.arange(len(names))
for number, (load, hatch) in enumerate(zip(loads, ("", "//"))):
    axis.bar(places + 0.4 * number - 0.2, load, 0.38, hatch=hatch,
             label=f"layer {number}")
axis.axhline(even, color="black", ls=":", label="even load")
axis.set(xticks=places, xlabel="expert", ylabel="(token, choice) pairs",
         ylim=(0, 1.35 * max(load.max() for load in loads)))
axis.legend(ncols=3, loc="upper center")
show_figure(
    fig, run=run, name="router_load",
    alt="Tokens routed to each expert in both layers of the tiny model, "
    "beside the even load: some experts get clearly more than others.",
    data={"expert": names} | {f"layer_{i}": v for i, v in enumerate(loads)},
);

# %% [markdown]
# It does not. A random router is a fixed preference, not a coin toss, so some
# experts are favoured. In expert-parallel training the busiest expert sets the
# pace for all.
#
# Routing matters for GRPO for another reason: it is a hard choice. Rollout
# engine and trainer compute the scores with slightly different rounding, and
# where two experts are nearly tied, the top-k can flip. Notebook 08 measures
# how often.

# %% [markdown] tags=["exercise"]
# ### Exercise: write the router
#
# (10 minutes, medium) From `scores`, [tokens, experts], make the weights and
# the numbers of the `top_k` experts of each token, both [tokens, top_k], best
# expert first. Do not look at `anatomy.route` before you have tried.
#
# <details><summary>Hint</summary>
#
# `scores.topk(top_k, dim=-1)` gives two tensors. The question is what the
# softmax sees: all scores, or the chosen ones?
#
# </details>

# %% tags=["start"]
def my_router(scores, top_k):
    return ...  # your turn: weights, experts

# %% tags=["solution"]
def my_router(scores, top_k):
    best, chosen = scores.topk(top_k, dim=-1)
    return best.softmax(-1), chosen

# %% tags=["check"]
from helpers.exercises import check

check("write-the-router", my_router)

# %% [markdown]
# ## 5 · YaRN: positions beyond the trained context
#
# Rotary embeddings turn each pair of a head's numbers by an angle that grows
# with the position. The first pair turns one radian a token, the last one
# turns so slowly that it needs far more than the 4,096 tokens of the original
# context for one round. YaRN stretches the context by a factor of 32: fast
# pairs stay as they are, slow pairs are slowed down by 32, and between two
# bounds the two are blended.
#
# The bounds are the pairs that make 32 turns and 1 turn within 4,096 tokens.
# In gpt-oss they are **not rounded** to whole pairs, as other YaRN models do
# it.

# %%
low, high = anatomy.yarn_correction_range(real)
scale = anatomy.yarn_attention_factor(32.0)
print(f"blend from pair {low} to pair {high}")
print(f"cos and sin are multiplied by {scale:.5f},",
      f"so attention scores by {scale**2:.5f}")
assert (low, high) == (8.092779115512402, 17.39802450158856)
assert abs(scale - 1.34657) < 5e-6

rotary = model.model.rotary_emb  # the tiny model: other head size, same YaRN
torch.testing.assert_close(
    rotary.inv_freq, anatomy.yarn_inverse_frequencies(config)
)

# %% [markdown]
# The **wavelength** of a pair is the number of tokens for a full turn.
# **Predict:** which pairs of gpt-oss-20b never finish a turn within 131,072
# tokens, the stretched context?

# %%
plain = 2 * torch.pi / anatomy.rope_inverse_frequencies(real)
yarn = 2 * torch.pi / anatomy.yarn_inverse_frequencies(real)
pairs = torch.arange(len(plain))
fig, axis = plt.subplots()
axis.semilogy(pairs, plain, label="RoPE")
axis.semilogy(pairs, yarn, label="with YaRN")
axis.axvspan(low, high, color="black", alpha=0.08, label="blended")
for context in (4096, 131_072):
    axis.axhline(context, color="black", lw=1, ls=":")
    axis.text(0, context * 1.2, f"{context:,} tokens")
axis.set(xlabel="rotary pair of a head", ylabel="wavelength (tokens)")
axis.legend(loc="lower right")
show_figure(
    fig, run=run, name="yarn",
    alt="Wavelength of each of the 32 rotary pairs, logarithmic. Both curves "
    "are one up to pair 8; from pair 18 on, the YaRN curve lies 32 times "
    "higher; in the shaded range between it moves from one to the other.",
    data={"pair": pairs, "rope_tokens": plain, "yarn_tokens": yarn},
);

# %%
slow = [int(pair) for pair in pairs if yarn[pair] > 131_072]
print("no full turn in 131,072 tokens: pairs", slow[0], "to", slow[-1])
assert slow == [int(pair) for pair in pairs if plain[pair] > 4096]
torch.testing.assert_close(yarn[18:], 32 * plain[18:])
assert torch.equal(yarn[:9], plain[:9])

# %% [markdown]
# The same pairs that never finished a turn in the original context still do
# not in the stretched one. The model never meets an angle that it has not been
# trained on.
#
# Rounding the bounds looks harmless. What would it change?

# %%
rope = dict(real["rope_parameters"], truncate=True)
rounded = anatomy.yarn_inverse_frequencies(dict(real, rope_parameters=rope))
exact = anatomy.yarn_inverse_frequencies(real)
faster = rounded / exact - 1
worst = faster.abs().argmax().item()
print(f"rounded bounds: pair {worst} turns {faster[worst]:.0%} faster")
angles = {n: n * (rounded - exact)[worst].item() for n in (100, 10_000)}
for position, angle in angles.items():
    print(f"its angle at position {position:6,}: off by {angle:.2f} rad")
assert faster[worst] > 0.5 and angles[100] < 0.02 and angles[10_000] > 0.5

# %% [markdown]
# One pair turns at a very different speed, and still its angle is right to a
# hundredth of a radian at position 100. The error grows with the position:
# short tests do not find it, long answers do.
#
# ## 6 · MXFP4: four bits and a shared scale
#
# On the hub, gpt-oss keeps its expert matrices in MXFP4. A block is 32
# neighbouring values along the input. Each value is a 4-bit code: sign, two
# exponent bits, one mantissa bit. That makes 16 codes. The block shares one
# scale byte *b*, which stands for 2^(*b* - 127).

# %%
for code in range(8):
    value = mxfp4.FP4_VALUES[code]
    print(f"code {code:2} = {code:04b}: {value:4}     "
          f"code {code + 8:2} = {code + 8:04b}: {-value:4}")

# %% [markdown]
# Two codes share a byte, the even element in the **low** half. Take a block
# whose first byte is `0x7A` and whose scale byte is 125:
#
# - low half `A` = 1010, code 10: -1.0
# - high half `7` = 0111, code 7: 6.0
# - scale 2^(125 - 127) = 0.25
#
# **Predict** the first two weights.

# %%
blocks = torch.zeros(1, 16, dtype=torch.uint8)
blocks[0, 0] = 0x7A
scales = torch.tensor([125], dtype=torch.uint8)
decoded = mxfp4.dequantise(blocks, scales)
print("first two weights:", decoded[:2].tolist())
assert decoded[:2].tolist() == [-1.0 * 0.25, 6.0 * 0.25]

# %% [markdown]
# Quantising goes the other way. The exponent is chosen so that the block's
# largest value lands between 4 and 8 (what is above 6 becomes 6), and each
# value goes to the nearest code. Do it to 32 real weights of an expert.

# %%
experts = model.model.layers[0].mlp.experts
row = experts.down_proj[0, :32, 0].detach()  # 32 inputs of one output
blocks, scales = mxfp4.quantise(row)
coarse = mxfp4.dequantise(blocks, scales)
step = 2.0 ** (scales.item() - 127)
print(f"scale byte {scales.item()}: one unit is {step}")
print("first byte", hex(blocks[0, 0]), "->", coarse[:2].tolist(),
      "from", [round(x, 4) for x in row[:2].tolist()])
error = (coarse - row).abs().max()
print(f"largest error {error / row.abs().max():.1%} of the largest weight")
assert error <= row.abs().max() / 4

# %%
fig, axis = plt.subplots(figsize=(8, 3.8))
for value in mxfp4.FP4_VALUES:
    axis.axhline(value * step, color="black", lw=0.6, alpha=0.35)
axis.grid(False)
axis.plot(row, ls="", label="weight")
axis.plot(coarse, ls="", mfc="none", ms=8, label="after MXFP4")
axis.vlines(range(32), torch.minimum(row, coarse), torch.maximum(row, coarse),
            color="black", lw=1)
axis.set(xlabel="input of the block", ylabel="weight (1)")
axis.legend()
show_figure(
    fig, run=run, name="mxfp4_block",
    alt="Thirty-two weights of one block and what MXFP4 makes of them. Grey "
    "lines are the 15 values that the block can hold, dense around zero and "
    "wide apart at the ends; each weight jumps to the nearest line.",
    data={"input": range(32), "weight": row, "mxfp4": coarse},
);

# %% [markdown]
# The grid is dense near zero and coarse at the ends, so large weights take
# larger errors. The next cell checks that on a whole tensor.
#
# Does your decoding agree with the one that others use? Compare all experts of
# a layer with transformers' own function. There is no tolerance: both multiply
# a small number by a power of two, which is exact.

# %%
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

weight = experts.gate_up_proj.detach()  # [expert, in, out]
blocks, scales = mxfp4.quantise_experts(weight)
print("plain", tuple(weight.shape), "-> blocks", tuple(blocks.shape),
      "scales", tuple(scales.shape))
ours = mxfp4.dequantise_experts(blocks, scales)
theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
gap = (ours - theirs).abs().max()
run.record("mxfp4_decode_max_abs", gap)
assert torch.equal(ours, theirs)

error, size = (ours - weight).abs(), weight.abs()
large = error[size > size.quantile(0.75)].mean()
small = error[size < size.quantile(0.25)].mean()
print(f"mean error: largest quarter of the weights {large:.4f},",
      f"smallest {small:.4f}")
assert large > small

# %% [markdown]
# They are equal to the last bit. Note the shapes: on disk the matrix is turned
# to `[expert, out, in / 32, 16]`, because a block runs along the input.
#
# One consequence for GRPO: MXFP4 is a format to **start from**. In this series
# you train unquantised weights and hand unquantised weights to the rollout
# engine. How much would quantising change the tiny model's answers? Write a
# whole checkpoint and quantise the experts of a copy:

# %%
import copy
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as scratch:
    small = mxfp4.write_mxfp4_checkpoint(folder, Path(scratch) / "mxfp4")
    size = {f: sum(x.stat().st_size for x in f.glob("*.safetensors"))
            for f in (folder, small)}
print(f"float32 {size[folder] / 1e6:.2f} MB, MXFP4 {size[small] / 1e6:.2f} MB")
assert size[small] < size[folder] / 4

# %%
twin = copy.deepcopy(model)
with torch.no_grad():
    for layer in twin.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            pair = mxfp4.quantise_experts(weight)
            weight.copy_(mxfp4.dequantise_experts(*pair))
    before = model(tokens).logits.log_softmax(-1)
    after = twin(tokens).logits.log_softmax(-1)
kl = (before.exp() * (before - after)).sum(-1).mean()
print(f"mean KL between the two: {kl:.1e} nat a token")
assert kl > 1e-5

# %% [markdown]
# The file shrinks, and the answers shift: sampling from MXFP4 weights means
# sampling from another policy than the one you train. Only the expert matrices
# were quantised, no bit of attention.

# %% [markdown] tags=["exercise"]
# ### Exercise: unpack two weights
#
# (10 minutes, medium) Turn one byte of an MXFP4 block and the block's scale
# byte into the list of its two weights. The example of this section, 0x7A with
# 125, has to give [-0.25, 1.5].
#
# <details><summary>Hint</summary>
#
# `byte & 15` is the low half, `byte >> 4` the high one. Codes 0 to 7 are in
# `mxfp4.FP4_VALUES`; a code from 8 on is the negative of the code 8 below it.
#
# </details>

# %% tags=["start"]
def two_weights(byte, scale):
    return ...  # your turn: a list of two numbers

# %% tags=["solution"]
def two_weights(byte, scale):
    def value(code):
        sign = -1 if code >= 8 else 1
        return sign * float(mxfp4.FP4_VALUES[code % 8])

    unit = 2.0 ** (scale - 127)
    return [value(byte & 15) * unit, value(byte >> 4) * unit]

# %% tags=["check"]
from helpers.exercises import check

check("unpack-mxfp4", two_weights)

# %% [markdown]
# ## 7 · Where the 20,914,757,184 parameters sit
#
# You have seen every kind of tensor. Now count the real model. **Predict** the
# largest row, and the order of magnitude of the smallest.

# %%
table = anatomy.parameter_table(real)
total = anatomy.total_parameters(real)
print(f"{'component':16}{'layers':>7}{'tensors':>9}{'parameters':>16}  share")
for row in table:
    print(f"{row.component:16}{row.layers:7}{row.tensors:9}"
          f"{row.parameters:16,}{row.parameters / total:8.2%}")
print(f"{'total':16}{'':7}{sum(r.tensors for r in table):9}{total:16,}")
assert total == 20_914_757_184 and sum(r.tensors for r in table) == 411
assert max(row.parameters for row in table) > 0.9 * total  # the experts
run.record("gpt_oss_20b_parameters", total)

# %% [markdown]
# More than nine parameters of ten are expert matrices. The smallest row is the
# sinks: one number a head and layer, and still an engine that forgets them is
# broken.
#
# A token uses only 4 of the 32 experts, so it multiplies with far fewer
# parameters than the model has. Twice that number is the forward cost of one
# token in FLOPs (attention scores aside).

# %%
active = anatomy.active_parameters(real)
print(f"active: {active:,} of {total:,} ({active / total:.1%}),",
      f"{2 * active / 1e9:.1f} GFLOP a token")
big = anatomy.GPT_OSS_120B
print(f"gpt-oss-120b: {anatomy.total_parameters(big):,} parameters,",
      f"{anatomy.active_parameters(big):,} active")
assert active == 3_608_307_264 and active / total < 0.2

# %% [markdown]
# Now the gigabytes. In bfloat16 every parameter takes 2 bytes. In an MXFP4
# checkpoint an expert weight takes half a byte and a 32nd part of a scale
# byte.
#
# **Predict:** when the experts shrink to about a quarter, does the whole
# checkpoint shrink to a quarter too?

# %%
forms = ("bf16", "mxfp4")
gigabytes = {form: {name: size / 1e9 for name, size in
                    anatomy.component_bytes(real, form).items()}
             for form in forms}
totals = {form: sum(gigabytes[form].values()) for form in forms}
for form in forms:
    run.record(f"gpt_oss_20b_{form}_gigabytes", totals[form])
    print(f"{form:6}{totals[form]:7.2f} GB, of these expert matrices",
          f"{gigabytes[form]['expert matrices']:.2f} GB")
assert round(totals["bf16"], 2) == 41.83
assert round(totals["mxfp4"], 2) == 13.76
stays = 1 - gigabytes["mxfp4"]["expert matrices"] / totals["mxfp4"]
print(f"MXFP4 / bf16: {totals['mxfp4'] / totals['bf16']:.2f};",
      f"what stays bf16 is {stays:.0%} of the MXFP4 file")
assert 0.3 < totals["mxfp4"] / totals["bf16"] < 0.35 and stays > 0.25

# %%
parts = ("expert matrices", "embedding", "head", "attention")
rest = "router, norms, biases, sinks"
bars = {form: [sizes[part] for part in parts] for form, sizes
        in gigabytes.items()}
for form in forms:
    bars[form].append(totals[form] - sum(bars[form]))
bars["billion parameters"] = [gb / 2 for gb in bars["bf16"]]

# %%
fig, axis = plt.subplots(figsize=(9, 3.4))
labels = ["bf16 (GB)", "MXFP4 (GB)", "parameters (10⁹)"]
hatches = ("", "//", "..", "xx", "")
for number, part in enumerate((*parts, rest)):
    widths = [bars[form][number] for form in bars]
    starts = [sum(bars[form][:number]) for form in bars]
    drawn = axis.barh(labels, widths, 0.62, left=starts, label=part,
                      hatch=hatches[number], edgecolor="white")
axis.bar_label(drawn, [f"{sum(bars[form]):.1f}" for form in bars], padding=4)
axis.invert_yaxis()
axis.set(xlabel="GB, or billion parameters", xlim=(0, 46))
axis.grid(axis="y", visible=False)
axis.legend(loc="upper right", bbox_to_anchor=(1, 0.68))
show_figure(
    fig, run=run, name="where_it_sits",
    alt="Three stacked bars for gpt-oss-20b: 41.8 GB in bf16, 13.8 GB in "
    "MXFP4 and 20.9 billion parameters. Expert matrices fill most of each; "
    "in MXFP4 embedding, head and attention are a quarter of the bar.",
    data={"part": [*parts, rest]} | bars,
);

# %% [markdown]
# The checkpoint shrinks to a third, not to a quarter: what stays in bfloat16
# now weighs a quarter of the file.
#
# Keep the 41.8 GB in mind. Training holds more than weights: float32 master
# weights and two Adam moments take another 12 bytes for each parameter that
# you train. Notebook 07 adds it all up.

# %%
adam = 12 * total / 1e9
print(f"Adam for all parameters: {adam:.0f} GB, {adam / totals['bf16']:.0f}",
      "times the bf16 weights")
trainable = total - sum(row.parameters for row in table
                        if row.component.startswith("expert"))
print(f"with frozen experts: {12 * trainable / 1e9:.1f} GB")
assert round(adam) == 251

# %% [markdown]
# ## What you take away
#
# 1. **Sinks and windows are part of the model, not an optimisation.** Weights
#    of a row sum to less than one; a window of 128 tokens counts the token
#    itself. Test sinks with large values: a zero sink hides a missing one.
# 2. **The experts are the model.** They hold over nine tenths of the
#    parameters while a token uses an eighth of them. Routing is a hard choice
#    that two engines can make differently.
# 3. **MXFP4 is a format to start from.** It makes the checkpoint three times
#    smaller and is decoded exactly; you train and roll out in bfloat16.

# %% [markdown]
# ### Try it
#
# - (5 minutes, easy) Set all sinks of layer 1 to 5 and draw the attention
#   figure again. *Check:* the sink column of the full layer lights up to the
#   last row. If it fades, you changed the sliding layer's sinks.
# - (10 minutes, medium) Decode a block with the two halves of each byte
#   swapped. *Check:* `convert_moe_packed_tensors` disagrees, though mean and
#   spread of the weights stay the same. If it agrees, you swapped twice.
# - (10 minutes, medium) From `anatomy.GPT_OSS_120B`, find the smallest number
#   of 80 GB cards that hold the bf16 weights. *Check:* it is 3.

# %%
run.finish();
