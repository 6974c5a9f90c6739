"""Weight sync on a GPU: what arrives, what is dropped without a word, and what stays behind (pitfalls 14, 15 and 26)."""

import base64
import re

import pytest

from helpers.anatomy import checkpoint_bytes, tensor_shapes
from helpers.faults import logprobs
from helpers.profiles import load_profile
from helpers.rollout import RolloutError, flush_cache
from helpers.tensor_files import is_matrix, read_config
from helpers.weight_sync import _values, send_tensors, sync_weights

# Noise is added to a kind of tensor until logprobs move by EFFECT nat on average, far above bfloat16's own noise (0.01 to 0.02).
# Some kinds saturate before: no router can do more than choose other experts. LEAST is what a row must show to count.
EFFECT, LEAST = 0.5, 0.2
EXPLAINED = 0.25  # the server's distance to the new weights, as a share of the change; 1 where the update had no effect
SYNCS = 20
LAYER = re.compile(r"model\.layers\.\d+\.")


def kinds() -> list[str]:
    """Every kind of tensor: the names of layer 0 without the layer, and those of no layer."""
    return list(dict.fromkeys(LAYER.sub("", name) for name in tensor_shapes(load_profile("cpu").model)))


def moved(tensor, scale: float, upwards: bool):
    """`tensor` with noise of scale times its own size, in bfloat16's grid. upwards: with its absolute value."""
    import torch

    generator = torch.Generator(tensor.device).manual_seed(2)
    noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    size = scale * (tensor.std() + tensor.abs().mean())
    return (tensor + size * (noise.abs() if upwards else noise)).bfloat16().to(tensor)


def move_kind(reference, kind: str, prompts, before):
    """Add noise to a kind of tensor, in all layers, until EFFECT is reached, else the noise that moves most.

    Returns ({name: new weight}, the reference's new logprobs); the reference has the new weights then.
    """
    import torch

    weights = {name: p for name, p in reference.named_parameters() if LAYER.sub("", name) == kind}
    kept = {name: p.detach().clone() for name, p in weights.items()}

    def attempt(scale: float):
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(
                    moved(kept[name], scale, kind.endswith("sinks"))
                )  # a sink that falls takes nothing any more
        after = logprobs(reference, prompts).cpu()
        return (after - before).abs().mean().item(), scale, after

    tries = []
    for power in range(-5, 12):
        tries.append(attempt(2.0**power))
        if tries[-1][0] > EFFECT:
            break
    effect, scale, after = max(tries, key=lambda t: t[0])
    assert effect > LEAST, (
        f"{kind}: no noise moves a logprob by {LEAST} nat on average, so it cannot show that it arrived"
    )
    attempt(scale)
    return {name: p.detach().clone() for name, p in weights.items()}, after


@pytest.fixture
def sound(reference, trained):
    """The reference, put back afterwards."""
    import torch

    kept = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    yield reference
    with torch.no_grad():
        reference.load_state_dict(kept)


@pytest.fixture(scope="module")
def short(prompts, settings):
    """The prompts at the window's edge and of two windows: each kind is asked with these several times."""
    return prompts[2:5]


@pytest.fixture(scope="module")
def before(reference, short):
    return logprobs(reference, short).cpu()


@pytest.fixture(scope="module")
def send(device, settings):
    """(server, weights) -> the server has them: from the trainer's device and in its dtype, as a sync would send them."""
    import torch

    dtype = getattr(torch, settings.model.dtype)

    def send(server, weights):
        send_tensors(server, {name: weight.to(device, dtype) for name, weight in weights.items()}, "changed")

    return send


def share(given, wanted, before) -> float:
    """Mean |given - wanted| over mean |wanted - before|."""
    return ((given - wanted).abs().mean() / (wanted - before).abs().mean()).item()


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_of_tensor_arrives(server, sound, short, before, ask, send, record, kind):
    """Sent alone, through CUDA IPC, into a server that has packed its experts long ago: it must compute with the new values."""
    originals = {n: p.detach().clone() for n, p in sound.named_parameters() if LAYER.sub("", n) == kind}
    weights, wanted = move_kind(sound, kind, short, before)
    try:
        send(server, weights)
        record(f"{kind}, mean change of a logprob", (wanted - before).abs().mean(), "nat", at_least=LEAST)
        gap = share(ask(server, short), wanted, before)
        record(f"{kind}, distance to the new weights over the change", gap, "1", below=EXPLAINED)
    finally:
        send(server, originals)


def test_experts_that_stay_behind_are_caught(server, sound, short, before, ask, send, record):
    """Control: the reference's experts change and the server gets another tensor only."""
    norm = {"model.norm.weight": dict(sound.named_parameters())["model.norm.weight"].detach().clone()}
    _, wanted = move_kind(sound, "mlp.experts.down_proj", short, before)
    send(server, norm)
    stale = share(ask(server, short), wanted, before)
    record(
        "experts left behind, distance to the new weights over the change", stale, "1", at_least=2 * EXPLAINED
    )


@pytest.mark.parametrize("where", ["on the device", "offloaded"])
def test_a_full_sync_gives_the_server_the_trainers_weights(
    server, trainer, trained, prompts, ask, trainer_logprobs, record, where
):
    import torch

    old = ask(server)
    with torch.no_grad():
        for parameter in trainer.model.module.parameters():
            generator = torch.Generator(parameter.device).manual_seed(3)
            noise = torch.randn(parameter.shape, generator=generator, device=parameter.device).to(parameter)
            parameter.add_(0.3 * parameter.float().std().nan_to_num().to(parameter) * noise)
    try:
        if where == "offloaded":
            trainer.memory.offload()
        report = sync_weights(trainer, server, "7")
        trainer.memory.load_back()
        new, ours = ask(server), trainer_logprobs()
        name = f"full sync, weights {where}"
        record(f"{name}: mean change of a logprob", (new - old).abs().mean(), "nat", at_least=0.1)
        record(f"{name}: distance to the trainer over the change", share(new, ours, old), "1", below=EXPLAINED)
        record(f"{name}: seconds", report.seconds, "s")
        assert server.generate([prompts[0]], 0.0, 1, 1)[0]["meta_info"]["weight_version"] == "7"
    finally:
        trainer.memory.restore()
        trainer.load_weights(trained)
        server.load_weights(trained)


# --- memory behind the handles (14) -------------------------------------------------------------------------------------
def slope(values) -> float:
    """Least-squares growth a step."""
    import numpy

    return float(numpy.polyfit(range(len(values)), values, 1)[0])


def test_syncs_leave_no_memory_behind(quiet_card, settings, server, trainer, used, record):
    """CUDA IPC handles that nobody closes keep the sender's memory (slime 1731): a whole model a sync."""
    import torch

    size = checkpoint_bytes(settings.model, "bf16")
    readings, allocated = [], []
    for sync in range(3 + SYNCS):
        report = sync_weights(trainer, server, f"sync-{sync}")
        if sync >= 3:  # the first ones fill the allocators
            readings.append(used())
            allocated.append(torch.cuda.memory_allocated())
    record("sync, megabytes", report.megabytes, "MB", at_least=0.99 * size / 1e6)
    record("20 syncs, GPU memory growth a sync", slope(readings) / size, "1 (of the weights)", below=0.005)
    record(
        "20 syncs, trainer's allocations, growth a sync",
        slope(allocated) / size,
        "1 (of the weights)",
        below=0.005,
    )


def test_the_slope_sees_a_leak(quiet_card, settings, trainer, used, record):
    """Control: somebody keeps each export."""
    import torch

    size, kept, readings = checkpoint_bytes(settings.model, "bf16"), [], []
    torch.cuda.empty_cache()
    for _ in range(5):
        readings.append(used())
        kept.append([tensor.clone() for _, tensor in trainer.export_stream()])
    record("kept exports, GPU memory growth each", slope(readings) / size, "1 (of the weights)", at_least=0.8)
    kept.clear()
    torch.cuda.empty_cache()


# --- a server that loaded MXFP4 (26) ------------------------------------------------------------------------------------
def post_unchecked(server, weights: dict) -> dict:
    """What send_tensors posts, without its checks: SGLang's own behaviour."""
    payload = base64.b64encode(_values(list(weights.items()))).decode()
    reply = server.post("/update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=False)
    flush_cache(server.post)
    return reply


def test_a_server_that_loaded_mxfp4_drops_expert_updates_and_is_refused(
    card, mxfp4_server, mxfp4_checkpoint, trainer, short, ask, record
):
    """SGLang says success to all of them. (A version that takes them, or refuses, fails here, and the rule can go.)"""
    import torch

    before, generator = ask(mxfp4_server, short), torch.Generator().manual_seed(5)
    shapes = tensor_shapes(read_config(mxfp4_checkpoint))
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        noise = torch.randn(shapes[name], generator=generator).bfloat16()
        assert is_matrix(name) and post_unchecked(mxfp4_server, {name: noise})["success"]
        record(f"MXFP4, {name}, change", (ask(mxfp4_server, short) - before).abs().mean(), "nat", below=1e-3)
    name = "model.layers.0.self_attn.v_proj.weight"
    noise = torch.randn(shapes[name], generator=generator).bfloat16()
    assert post_unchecked(mxfp4_server, {name: noise})["success"]
    record(f"MXFP4, {name}, change", (ask(mxfp4_server, short) - before).abs().mean(), "nat", at_least=0.1)
    with pytest.raises(RolloutError, match="in mxfp4 and would drop expert updates .*rollout_checkpoint"):
        sync_weights(trainer, mxfp4_server, "x")
    with pytest.raises(RolloutError, match="in mxfp4 and would drop expert updates"):
        send_tensors(mxfp4_server, {name: noise}, "x")
