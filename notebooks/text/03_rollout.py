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
# # 03 · Rollout: answers, logprobs, and new weights in flight
#
# **Question:** how does SGLang generate groups of answers with logprobs, and
# take new weights while it is up?
#
# **You need first:** notebook 02 and its warm-started checkpoint. If that is
# missing it is trained here, and this notebook says so. You know what
# sampling from a language model is.
#
# **Last verified:** 2026-12-01 on 2 CPU cores with Python 3.12, torch 2.11.0,
# transformers 5.12.1 and sglang 0.5.17.

# %% [markdown]
# | profile | time | memory | what it starts |
# |---|---|---|---|
# | `cpu` | half a minute on 2 cores | about 2.5 GB | an SGLang server |
#
# In GRPO the policy writes hundreds of answers a step. That is an inference
# engine's job: SGLang batches the requests, caches what prompts have in
# common, and returns the log-probability of every token it sampled. Then the
# trainer changes the weights, and the engine must take the new ones without a
# restart, thousands of times in a run.

# %% [markdown] tags=["instructor"]
# **For whoever teaches**
#
# <!-- timing -->
#
# *Usually goes wrong:* the wait for the server, a minute on two busy cores
# where none is shared: start the cell, then explain harmony. A server that
# will not start shows the end of its log; most often the machine is out of
# memory, or a second notebook holds a second server. *Say:* "one notebook with
# engines at a time", and "is that special token a token or five characters?".
#
# *Ask:* Who would notice if you stopped at `<|end|>`? Which logprob may the
# trainer never trust without a test, and at which position? What does
# *success* of a weight update prove?
#
# *Short of time:* sections 2, 3, 4 and 6. *A late learner* needs nothing of
# this kernel: 05 opens its own server, and 02's checkpoint is made where it is
# missing.

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile: cpu, gpu, gpu-20b or cluster
SEED: int = 0  # seed of every random choice in this notebook

# %%
from helpers.figures import show_figure, use_style
from helpers.preflight import prepare_kernel
from helpers.profiles import load_profile
from helpers.results import NotebookRun

settings = load_profile(PROFILE, seed=SEED)
prepare_kernel(settings)  # before anything imports torch
run = NotebookRun("03_rollout", settings)
use_style()
exact = settings.model.dtype == "float32"  # parity is asserted in fp32 only

# %% [markdown]
# ## 1 · Start the server
#
# The server needs a while: three processes, each importing a lot. So it is
# started first and waited for later. In a series of notebooks one server is
# shared, and then `open_server` finds it running.
#
# It lives in a **session of its own**, under a small launcher. Interrupting
# this kernel does not reach it, and if this kernel dies, even by SIGKILL, the
# launcher notices and ends the server. Nothing is left behind.

# %%
import os

from helpers.rollout import open_server
from helpers.warm_start import warm_checkpoint

shared_memory = set(os.listdir("/dev/shm"))  # compared at the end
if not (settings.checkpoint("warm") / "config.json").is_file():
    print("no warm-started checkpoint: training it now, as in notebook 02")
folder = warm_checkpoint(settings)
server = open_server(settings, folder)
print("serving", folder.name)

# %% [markdown]
# ## 2 · What the model reads and writes
#
# While it starts: a prompt in **harmony**, gpt-oss's chat format. Special
# tokens mark roles, channels and ends. This course uses a short form without
# a system message.

# %%
from helpers import harmony
from helpers.tasks import load_task

tokenizer = server.tokenizer
task = load_task(settings.task, SEED)
problem = task.sample(1)[0]
prompt = harmony.encode(tokenizer, problem.prompt)
print("question", problem.question, " median", problem.answer)
for token in prompt:
    print(f"{token:4} {harmony.decode(tokenizer, [token])}")

# %% [markdown]
# The prompt ends with `assistant`: it is the model's turn. A worked answer has
# two messages, and each one is closed by an end token:

# %%
digits = "".join(sorted(problem.question))
worked = harmony.render_completion(problem.answer, digits)
print(worked)
print(harmony.parse_completion(worked))
print("stop tokens:", *harmony.STOP_TOKENS)

# %% [markdown]
# `<|end|>` closes the analysis message, `<|return|>` closes the answer. Only
# `<|return|>` (and two rarer ones) may stop the generation.
#
# **Predict:** what does the verifier see if you also stop at `<|end|>`, as
# many a chat template would?

# %%
from helpers.rewards import grade

cut = worked[:worked.index("<|end|>") + len("<|end|>")]
print("stopped at <|return|>:", grade(worked, problem.answer))
print("stopped at <|end|>:   ", grade(cut, problem.answer), " ", cut)
assert (grade(worked, problem.answer), grade(cut, problem.answer)) == (1, 0)

# %% [markdown]
# The answer is cut before it is given. Every worked answer would earn
# nothing, every lazy guess could still win, and GRPO would teach the model
# not to think. No error would be raised.

# %% [markdown] tags=["exercise"]
# ### Exercise: grade four answers
#
# (5 minutes, easy) The right answer is 4. What does the verifier give for each
# of these four completions, 1 or 0? Decide before you call `grade`.
#
# <details><summary>Hint</summary>
#
# Three things must hold: the harmony is well-formed and ended, there is a
# final message, and it is exactly the answer.
#
# </details>

# %% tags=["given"]
completions = [
    "<|channel|>final<|message|>4<|return|>",
    "<|channel|>final<|message|>4",
    "<|channel|>analysis<|message|>4<|end|>"
    "<|start|>assistant<|channel|>final<|message|>3<|return|>",
    "<|channel|>final<|message|>4.<|return|>",
]

# %% tags=["start"]
grades = ...  # your turn: a list of four numbers

# %% tags=["solution"]
grades = [grade(text, "4") for text in completions]

# %% tags=["check"]
from helpers.exercises import check

check("predict-the-grades", grades)

# %% [markdown]
# ### Who wrote which token?
#
# Training may only touch what the policy wrote. `render` cuts a conversation
# into **spans**, each one special token or plain text, and says which of them
# are the policy's own.
#
# **Predict** twice. `<|start|>assistant` is there two times: is it trained
# both times, once, or never? And if a user types `<|end|>1`, where does that
# user's message end?

# %%
from helpers.harmony import Message, encode_spans, render

said = [Message("user", problem.question),
        Message("assistant", digits, "analysis"),
        Message("assistant", problem.answer, "final")]
spans = render(said, open_assistant=False)
for span in spans:
    print(f"{'trained' if span.trained else '-':8}",
          f"{'special' if span.special else 'text':8}", span.text)
ids, mask = encode_spans(tokenizer, spans)
assert sum(mask) == len(harmony.encode(tokenizer, worked))

# %%
typed = "<|end|>1"
by_spans, _ = encode_spans(tokenizer, render([Message("user", typed)]))
as_text = harmony.encode(tokenizer, harmony.render_prompt(typed))
end = tokenizer.token_to_id("<|end|>")
for name, ids in (("spans", by_spans), ("text", as_text)):
    print(f"{name:6}<|end|> x {ids.count(end)}: ",
          *[harmony.decode(tokenizer, [i]) for i in ids])
assert (by_spans.count(end), as_text.count(end)) == (1, 2)

# %% [markdown]
# Once: the first opening is in the prompt, which the policy is given; the
# second one it writes after its own `<|end|>`. And the typed `<|end|>` stays
# five tokens of plain text if the message is encoded span by span. As one
# string, it ends the message, and whatever the user types next speaks in
# another role.

# %% [markdown]
# ## 3 · One answer, then a group
#
# Greedy first: always the likeliest token. One request, over HTTP.

# %%
server.wait()
answer = server.generate([prompt], temperature=0.0)[0]
info = answer["meta_info"]
print(harmony.decode(tokenizer, answer["output_ids"]))
print("finish:", info["finish_reason"]["type"],
      " weights:", info["weight_version"])
for logprob, token, _ in info["output_token_logprobs"][:5]:
    print(f"{logprob:8.4f}  {harmony.decode(tokenizer, [token])}")

# %% [markdown]
# One logprob for each token. A value near 0 is a token that the model was sure
# of: the format. Two tokens are choices: the channel, that is whether to guess
# or to work it out, and the digit.
#
# GRPO compares several answers to *one* question, a **group**, so now sample.
# `roll_out` does what you just did, for many prompts, and returns episodes.

# %%
from helpers.rewards import score
from helpers.rollout import roll_out

episodes = roll_out(server, [problem], settings)
rewards = score(episodes, [problem], tokenizer)
print("median of", problem.question, "is", problem.answer)
for e, reward in zip(episodes, rewards):
    text = harmony.decode(tokenizer, e.completion_ids)
    print(f"{reward:.0f} {sum(e.logprobs):7.2f} {e.finish_reason:7}{text}")
assert len(episodes) == settings.batch.group_size

# %% [markdown]
# Columns: reward, logprob of the whole answer, why it ended, the answer.
#
# An episode holds what training needs: token ids of prompt and answer,
# logprobs, the group, and the version of the weights. Ids and not text: text
# must be tokenised again, and that need not give the same tokens back.

# %%
held_out = task.held_out(settings.heldout)
greedy = roll_out(server, held_out, settings, greedy=True)
accuracy = sum(score(greedy, held_out, tokenizer)) / len(held_out)
run.record("heldout_before", accuracy)
guess = sum(p.question.count(p.answer) / len(p.question) for p in held_out)
print(f"greedy, {len(held_out)} held-out questions: {accuracy:.1%} right;",
      f"a random digit of the question: {guess / len(held_out):.1%}")
assert 0.1 < accuracy < 0.9 or PROFILE != "cpu"

# %% [markdown]
# That is the baseline that notebook 06 has to beat. It is above the lazy guess,
# because some of the greedy answers are worked.

# %% [markdown]
# ## 4 · Are the logprobs true?
#
# The trainer will divide its own probability of a token by the engine's. If
# the engine's numbers are off, every ratio is. So compare with transformers,
# on the same tokens, over three windows.
#
# **Predict:** the server took these tokens in one piece (a *prefill*). Would a
# mistake show up there, or when it goes on token by token (*decode*)?

# %%
import torch
from transformers import GptOssForCausalLM
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
reference = GptOssForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager",
    experts_implementation="eager").to(settings.device).eval()

def reference_logprobs(tokens, temperature=1.0):
    """log p(tokens[t] | before), t >= 1, of one sequence."""
    inputs = torch.tensor([tokens], device=settings.device)
    with torch.no_grad():
        logits = reference(inputs).logits[0, :-1].cpu()
    labels = torch.tensor(tokens[1:])[:, None]
    return (logits / temperature).log_softmax(-1).gather(-1, labels)[:, 0]

# %%
def largest_gap(theirs, ours):
    """Largest |difference| over lists of logprobs, one a sequence."""
    pairs = zip(theirs, ours, strict=True)
    gaps = [(torch.as_tensor(a) - b).abs() for a, b in pairs]
    return torch.cat(gaps).max().item()  # NaN if there is one

m = settings.model
generator = torch.Generator().manual_seed(SEED)
window = m.sliding_window
lengths = (3, window - 1, window, window + 1, 2 * window, 3 * window)
sequences = [torch.randint(1, m.vocab_size, (n,), generator=generator)
             .tolist() for n in lengths]
theirs = server.prompt_logprobs(sequences)
ours = [reference_logprobs(s) for s in sequences]
prefill = largest_gap(theirs, ours)
print(f"prefill, {lengths} tokens: {prefill:.1e} nat")

# %% [markdown]
# Now decode: start each sequence in another place relative to the window, and
# let the server write two windows more. Also at another temperature. The
# engine divides logits by it before it reports a logprob, and so must the
# trainer.

# %%
def decode_gap(temperature, new_tokens):
    """Largest gap of sampled tokens' logprobs."""
    outputs = server.generate(sequences, temperature, 1, new_tokens)
    gaps = []
    for start, output in zip(sequences, outputs):
        entries = output["meta_info"]["output_token_logprobs"]
        sampled = torch.tensor([entry[0] for entry in entries])
        full = reference_logprobs(start + output["output_ids"], temperature)
        gaps.append((full[-len(sampled):] - sampled).abs().max().item())
    return max(gaps)

decoded = {T: decode_gap(T, 2 * window) for T in (0.5, 1.0, 1.5)}
for temperature, gap in decoded.items():
    print(f"decode, temperature {temperature}: {gap:.1e} nat")
parity = max(prefill, *decoded.values())
run.record("parity_sglang_hf_max_abs_logprob", parity)
assert parity < 1e-4 or not exact

# %% [markdown]
# Rounding, in prefill and decode, on both sides of the window's edge. Decode
# is the one to fear: it reads the window from a cache that is written token
# by token. Engines have been wrong there only, and only past the window.

# %% [markdown] tags=["exercise"]
# ### Exercise: the logprob that the engine reports
#
# (10 minutes, medium) Write the logprob of a sampled `token` as SGLang reports
# it: from the `logits` of one position, [vocabulary], at a `temperature`.
#
# <details><summary>Hint</summary>
#
# The probabilities that were sampled from sum to one. At which point must the
# division by the temperature stand for that?
#
# </details>

# %% tags=["start"]
def reported_logprob(logits, token, temperature):
    return ...  # your turn

# %% tags=["solution"]
def reported_logprob(logits, token, temperature):
    return (logits / temperature).log_softmax(-1)[token]

# %% tags=["check"]
from helpers.exercises import check

check("engine-logprob", reported_logprob)

# %% [markdown]
# ## 5 · Why one sends everything at once
#
# **Predict:** a batch of 64 prompts, how much faster is a token in it than
# alone? Each decode step reads all the weights once, however many sequences
# there are.

# %%
import time

sizes, speeds = (1, 4, 16, 64, 256), []
for size in sizes:
    prompts = [harmony.encode(tokenizer, p.prompt) for p in task.sample(size)]
    start = time.perf_counter()
    outputs = server.generate(prompts, 1.0, max_new_tokens=24)
    seconds = time.perf_counter() - start
    new = sum(len(output["output_ids"]) for output in outputs)
    speeds.append(new / seconds)
    print(f"{size:4} prompts: {speeds[-1]:7.0f} new tokens a second")
run.record("rollout_tokens_per_second", max(speeds))

# %%
import matplotlib.pyplot as plt

fig, axis = plt.subplots(figsize=(6.5, 3.4))
axis.loglog(sizes, speeds, label="measured")
alone = [speeds[0] * size for size in sizes]
axis.loglog(sizes, alone, ls=":", label="if a batch cost no more than one")
axis.set(xlabel="prompts in the batch", xticks=sizes, xticklabels=sizes,
         ylabel="new tokens (1/s)")
axis.minorticks_off()
axis.legend()
show_figure(
    fig, run=run, name="throughput",
    alt="New tokens per second against batch size, both axes logarithmic. "
    "The measured line rises over the whole range and flattens at the "
    "largest batch; it stays below the dotted line of a batch that costs no "
    "more than one prompt.",
    data={"prompts": sizes, "tokens_per_second": speeds},
);

# %% [markdown]
# The line rises, because a batch shares what each step costs anyway: compare
# the printed speeds of 64 prompts and of one with your prediction. It stays
# below the dotted one, because arithmetic is not shared. On a GPU the
# two keep together much longer: there a decode step waits for memory, not for
# arithmetic.
#
# GRPO is in a good position here: a whole step's answers can go out as one
# batch.

# %% [markdown]
# ## 6 · New weights, while the server is up
#
# After each update the trainer sends its weights. The server keeps running:
# it overwrites its tensors in place. What can go wrong is quiet. A name that
# the engine does not know, a layout that it packed at the start and does not
# pack again, an update that is dropped. The server then says *success* and
# samples from the old policy.
#
# The honest test: change **one** kind of tensor, send it, and ask two things.
# Did the logprobs change? And are they what transformers gets with the same
# change?

# %%
names = [name for name, _ in reference.named_parameters()
         if ".layers.0." in name or ".layers." not in name]
print(len(names), "kinds:", *(n.split("layers.0.")[-1] for n in names))

# %% [markdown]
# `send_tensors` hands named tensors to the server and then drops its cache:
# keys and values that old weights computed must not meet new ones. (The `cpu`
# profile serves without a prefix cache: for prompts this short it costs more
# than it saves.) On a GPU
# only handles travel over HTTP, and the server reads the trainer's memory
# itself. On a CPU the values travel; a tiny model is a megabyte.
#
# **Predict** which kind changes the logprobs the least.

# %%
from helpers.weight_sync import send_tensors

def served_logprobs():
    return torch.cat([torch.tensor(x)
                      for x in server.prompt_logprobs(sequences)])

before = served_logprobs()
weights = dict(reference.named_parameters())
kinds, changes, errors, seconds = [], [], [], []

def send(name, version):
    """Send the reference's present tensor of this name."""
    start = time.perf_counter()
    send_tensors(server, {name: weights[name].detach().clone()}, version)
    seconds.append(time.perf_counter() - start)

# %%
for name in names:
    weight = weights[name].detach()
    kept = weight.clone()
    noise = torch.randn(weight.shape, generator=generator)
    weight += 0.1 * noise.to(weight.device)
    send(name, f"changed {name}")
    served = served_logprobs()
    wanted = torch.cat([reference_logprobs(s) for s in sequences])
    kinds.append(name.split("layers.0.")[-1])
    changes.append((served - before).abs().max().item())
    errors.append((served - wanted).abs().max().item())
    weight.copy_(kept)
    send(name, "restored")
    print(f"{kinds[-1]:34}{changes[-1]:8.3f}{errors[-1]:10.1e}")

# %%
rows = sorted(range(len(kinds)), key=lambda i: changes[i])
fig, axis = plt.subplots(figsize=(8, 5.4))
axis.plot([changes[i] for i in rows], range(len(rows)), ls="",
          label="change by the update")
axis.plot([errors[i] for i in rows], range(len(rows)), ls="",
          label="server against transformers, after it")
axis.set_yticks(range(len(rows)), [kinds[i] for i in rows], fontsize=9)
axis.set(xscale="log", xlabel="largest |difference| of a logprob (nat)")
axis.legend(loc="center")
show_figure(
    fig, run=run, name="sync_by_kind",
    alt="Two columns of points on a logarithmic scale, one row for each kind "
    "of tensor. Changes by the update lie far right, near one nat or above; "
    "differences between server and transformers lie far left, near a "
    "millionth. No row has them close together.",
    data={"kind": kinds, "change": changes, "error": errors},
);

# %% [markdown]
# Two clouds, far apart. On the right: every kind of tensor arrives, and the
# policy changes. On the left: it changes to exactly what was sent.
#
# A dropped update would show as a point on the right that fell to the left,
# with its partner on the right. That happens for real: a server that was
# started from an MXFP4 checkpoint drops the experts' updates silently.

# %%
run.record("sync_kinds_checked", len(kinds))
run.record("sync_max_abs_logprob_error", max(errors))
run.record("sync_min_abs_logprob_change", min(changes))
run.record("sync_seconds_max", max(seconds))
print(f"smallest change {min(changes):.3f} nat,",
      f"largest error {max(errors):.1e} nat,",
      f"slowest sync {max(seconds):.2f} s")
assert min(changes) > 1e-2
assert max(errors) < 1e-4 or not exact

# %% [markdown]
# ### Which weights wrote this answer?
#
# Every sync carries a version, and every episode says under which version it
# finished. That is how a training loop can tell that an answer is stale.
#
# To restore the policy for whoever uses the server next, load the folder:

# %%
stale = roll_out(server, [problem], settings)
took = server.load_weights(folder, version="warm start")
fresh = roll_out(server, [problem], settings)
print("before:", {e.weight_version for e in stale})
print("after: ", {e.weight_version for e in fresh}, f"in {took:.2f} s")
assert {e.weight_version for e in fresh} == {"warm start"}
assert (served_logprobs() - before).abs().max() < 1e-4 or not exact

# %% [markdown] tags=["exercise"]
# ### Exercise: which updates were dropped?
#
# (10 minutes, medium) Judge a sync as this section did. From the lists
# `kinds`, `changes` (of the logprobs, by the sync) and `errors` (against
# transformers, after it) return the kinds that the server *dropped*. Rounding
# stays below 0.0001.
#
# <details><summary>Hint</summary>
#
# Four things can happen: a tensor arrives; it is dropped; it arrives in a
# wrong order; or it arrives and has no effect on any logprob. What are change
# and error in each case?
#
# </details>

# %% tags=["start"]
def dropped(kinds, changes, errors):
    return ...  # your turn: a list of kinds

# %% tags=["solution"]
def dropped(kinds, changes, errors):
    rows = zip(kinds, changes, errors)
    return [kind for kind, change, error in rows
            if change < 1e-4 < error]

# %% tags=["check"]
from helpers.exercises import check

check("dropped-updates", dropped)

# %% [markdown]
# ## 7 · Leave nothing behind
#
# Stop the server if it is yours. A shared one goes on.

# %%
from helpers.processes import process_tree, pss

mine = [] if server.process is None else process_tree([server.pid])
server.stop()
left = [pid for pid in mine if pss(pid) > 0]  # bytes it still holds
files = set(os.listdir("/dev/shm")) - shared_memory
counters = f"torch_{os.getpid()}_" if settings.device == "cuda" else "-"
weights_left = [name for name in files if name.startswith("torch_")
                and not name.startswith(counters)]  # CUDA's, 80 kB, at exit
run.record("processes_left", len(left))
print(f"{len(mine)} processes were started, {len(left)} are left;",
      f"{len(weights_left)} weight files in shared memory")
assert not left and not weights_left

# %% [markdown]
# ## What you take away
#
# 1. **Stop tokens are part of the reward.** Stop at `<|end|>` and thinking
#    never pays.
# 2. **Logprobs must be true, in prefill and in decode, past the window, at
#    your temperature.** In float32 the engine and transformers agree to a few
#    millionths of a nat.
# 3. **Prove a sync, kind by kind.** A server can say *success* and drop the
#    update. Change one tensor, send it, and see the logprobs follow.

# %% [markdown]
# ### Try it
#
# - (5 minutes, easy) Sample one group at temperature 0.2 and at 2.0. *Check:*
#   at 2.0 some answers are no longer well-formed.
# - (10 minutes, medium) Send a tensor under a wrong name, and compare the
#   logprobs. *Check:* read what the server answers, and whether anything
#   changed. Restore with `server.load_weights(folder)`.

# %%
run.finish();
