"""SGLang against transformers: prefill, decode past the window, every kind of weight update, and ends that leave nothing."""

import base64
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from helpers.checkpoints import CheckpointError
from helpers.collate import collate
from helpers.harmony import stop_token_ids
from helpers.processes import process_tree
from helpers.profiles import load_profile
from helpers.records import Episode
from helpers.rollout import RolloutError, RolloutServer, SGLangClient, free_port, roll_out
from helpers.tasks import load_task
from helpers.tensor_files import is_matrix
from helpers.weight_sync import (
    SyncGroup, _values, check_sync_target, send_tensors, sync_through_disk, sync_weights,
)  # fmt: skip

pytestmark = pytest.mark.engine
WINDOW = load_profile("cpu").model.sliding_window
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW)


def sequences(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]


def reference_logprobs(model, tokens, temperature=1.0):
    """log p(tokens[t] | before), t >= 1."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def served(server):
    return torch.cat([torch.tensor(x) for x in server.prompt_logprobs(sequences())])


def wanted(model):
    return torch.cat([reference_logprobs(model, s) for s in sequences()])


@pytest.fixture
def clean_server(server, checkpoint):
    """The server with the checkpoint's weights, before and after."""
    server.load_weights(checkpoint)
    yield server
    server.load_weights(checkpoint)


def test_prefill_agrees_over_three_windows(clean_server, reference):
    assert (served(clean_server) - wanted(reference)).abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_decode_agrees_past_the_window(clean_server, reference, temperature):
    outputs = clean_server.generate(sequences(), temperature, 2, 2 * WINDOW)
    passed = 0
    for i, output in enumerate(outputs):
        start = sequences()[i // 2]
        got = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        full = reference_logprobs(reference, start + output["output_ids"], temperature)
        assert (full[-len(got) :] - got).abs().max() < 1e-5
        passed += len(start) < WINDOW < len(start) + len(got)
    assert passed, "no answer crossed the window while it was decoded: the test shows nothing"


def test_asking_again_changes_nothing(clean_server):
    """The profile serves without a prefix tree (measured faster on a CPU), so nothing may come from a cache."""
    tokens = sequences((3 * WINDOW,))
    first = clean_server.generate(tokens, 0.0, 1, 8)[0]
    again = clean_server.generate(tokens, 0.0, 1, 8)[0]
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == first["output_ids"]
    a, b = ([e[0] for e in o["meta_info"]["output_token_logprobs"]] for o in (first, again))
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-5


def test_an_update_right_after_an_answer_does_not_end_the_server(clean_server, checkpoint):
    """An answered request still counts as running for a moment, and SGLang's own flush in an update asserts that none is."""
    for _ in range(20):
        clean_server.generate(sequences((5,)), 1.0, 8, 4)
        clean_server.load_weights(checkpoint)
    assert clean_server.healthy()


def test_groups_keep_their_order_and_their_prompt(clean_server, settings):
    problems = load_task("median").sample(5)
    episodes = roll_out(clean_server, problems, settings)
    size = settings.batch.group_size
    assert [e.group for e in episodes] == [i // size for i in range(5 * size)]
    assert len({e.prompt_ids for e in episodes}) == 5
    stops = stop_token_ids(clean_server.tokenizer)
    for e in episodes:
        full = len(e.completion_ids) == settings.sampling.max_new_tokens
        assert len(e.completion_ids) <= settings.sampling.max_new_tokens
        assert not set(e.completion_ids[:-1]) & set(stops)
        # a stop token that comes as the very last token that is allowed counts as "length"
        assert e.finish_reason == ("length" if full else "stop")
        assert full or e.completion_ids[-1] in stops
        assert all(lp <= 0 for lp in e.logprobs) and e.weight_version == "initial"


def test_greedy_is_repeatable(clean_server, settings):
    problems = load_task("median").held_out(16)
    once, twice = (roll_out(clean_server, problems, settings, greedy=True) for _ in range(2))
    assert [e.completion_ids for e in once] == [e.completion_ids for e in twice] and len(once) == 16


def _kinds():
    """Every name of layer 0 and of what is in no layer; layer 1 holds the same kinds."""
    from transformers import GptOssForCausalLM

    from helpers.checkpoints import gpt_oss_config

    with torch.device("meta"):
        model = GptOssForCausalLM(gpt_oss_config(load_profile("cpu").model))
    return [name for name, _ in model.named_parameters() if ".layers.1." not in name]


@pytest.mark.parametrize("name", _kinds())
def test_every_kind_of_tensor_arrives(clean_server, reference, name):
    before = wanted(reference)
    weight = dict(reference.named_parameters())[name].detach()
    weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    send_tensors(clean_server, {name: weight.clone()}, "changed")
    got = served(clean_server)
    assert (got - before).abs().max() > 1e-2, f"{name}: the server said success and dropped it"
    assert (got - wanted(reference)).abs().max() < 1e-4


def _post_tensors(server, weights):
    """What send_tensors posts, without its checks: SGLang's own behaviour."""
    payload = base64.b64encode(_values(list(weights.items()))).decode()
    return server.post("/update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=False)


def test_an_unknown_name_is_refused_since_the_server_takes_it_without_a_word(clean_server):
    before = served(clean_server)
    unknown = {"model.layers.0.mlp.experts.down_projj": torch.zeros(4, 128, 64)}
    assert _post_tensors(clean_server, unknown)["success"]
    assert torch.equal(served(clean_server), before)
    with pytest.raises(RolloutError, match="down_projj is no tensor of .* drop it without a word"):
        send_tensors(clean_server, unknown, "nothing")


def test_a_wrong_shape_is_refused_and_the_server_lives(clean_server):
    before = served(clean_server)
    turned = {"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 64, 128)}
    with pytest.raises(RolloutError, match=r"down_proj is \[4, 64, 128\] .* has it as \[4, 128, 64\]"):
        send_tensors(clean_server, turned, "turned")
    assert torch.equal(served(clean_server), before)


def test_a_sync_must_be_complete(clean_server, trainer):
    shapes = trainer.tensor_shapes()
    assert shapes == {name: tuple(tensor.shape) for name, tensor in trainer.export().items()}
    check_sync_target(clean_server, shapes, complete=True)
    del shapes["lm_head.weight"]
    check_sync_target(clean_server, shapes)
    with pytest.raises(RolloutError, match="lm_head.weight and 0 more"):
        check_sync_target(clean_server, shapes, complete=True)


@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 1 << 30])
def test_a_sync_in_buckets_is_the_same_sync(clean_server, trainer, bucket_bytes):
    """Streamed in pieces of this size; after the last one the server computes what the trainer does."""
    with torch.no_grad():
        for parameter in trainer.model.module.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(8)))
    report = sync_weights(trainer, clean_server, "piecewise", bucket_bytes)
    assert report.tensors == 37 and (report.buckets == 37) == (bucket_bytes == 1)
    assert (report.buckets == 1) == (bucket_bytes == 1 << 30)
    rows = [
        Episode(tuple(s[:1]), tuple(s[1:]), (0.0,) * (len(s) - 1), "stop", i)
        for i, s in enumerate(sequences())
    ]
    batch = collate(rows, None, pad_id=0)
    ours = trainer.logprobs(batch)[batch.loss_mask > 0]
    assert (served(clean_server) - ours).abs().max() < 1e-4


def test_no_server_is_changed_when_one_of_them_cannot_be(clean_server, trainer):
    before = served(clean_server)
    absent = SGLangClient(f"http://127.0.0.1:{free_port()}", timeout=5)
    with pytest.raises(RolloutError, match="does not answer /model_info"):
        sync_weights(trainer, [clean_server, absent], "half")
    assert torch.equal(served(clean_server), before)
    assert clean_server.generate([[1, 2]], 0.0, 1, 1)[0]["meta_info"]["weight_version"] == "initial"


# --- checkpoints from disk ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mxfp4(checkpoint, tmp_path_factory):
    from helpers.mxfp4 import write_mxfp4_checkpoint

    return write_mxfp4_checkpoint(checkpoint, tmp_path_factory.mktemp("quantised") / "mxfp4")


def test_a_server_that_took_mxfp4_is_refused_as_a_sync_target(clean_server, mxfp4, trainer, reference):
    """SGLang says success, takes what is not quantised and drops every expert matrix; whoever syncs next is told."""
    reply = clean_server.post("/update_weights_from_disk", model_path=str(mxfp4), flush_cache=False)
    assert reply["success"]
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if not is_matrix(name):
                parameter.copy_(parameter.bfloat16())
    assert (served(clean_server) - wanted(reference)).abs().max() < 1e-4  # with the old expert matrices
    client = SGLangClient(clean_server.url, clean_server.timeout)
    for sync in (
        lambda: send_tensors(client, trainer.export(), "x"),
        lambda: sync_weights(trainer, client, "x"),
    ):
        with pytest.raises(RolloutError, match="in mxfp4 and would drop expert updates .*rollout_checkpoint"):
            sync()


def test_an_mxfp4_checkpoint_is_served_through_its_plain_copy(
    clean_server, mxfp4, settings, load_reference, reference
):
    from helpers.checkpoints import rollout_checkpoint

    copy = rollout_checkpoint(settings, mxfp4)
    clean_server.load_weights(mxfp4)
    assert (served(clean_server) - wanted(load_reference(copy))).abs().max() < 1e-4
    assert (served(clean_server) - wanted(reference)).abs().max() > 0.1  # the quantised experts did arrive
    assert SGLangClient(clean_server.url, 60).served_model().quantisation == ""


@pytest.mark.parametrize("shard_bytes", [5e9, 200_000])
def test_a_streamed_export_is_loaded(clean_server, checkpoint, reference, tmp_path, shard_bytes):
    from helpers.checkpoints import save_streamed

    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    stream = ((name, parameter.detach()) for name, parameter in reference.named_parameters())
    folder = save_streamed(stream, checkpoint, tmp_path / "streamed", shard_bytes=shard_bytes)
    clean_server.load_weights(folder)
    assert (served(clean_server) - wanted(reference)).abs().max() < 1e-4


def test_what_a_server_takes_is_known_though_its_last_checkpoint_is_gone(clean_server, checkpoint, tmp_path):
    gone = shutil.copytree(checkpoint, tmp_path / "gone")
    clean_server.load_weights(gone)
    shutil.rmtree(gone)
    assert SGLangClient(clean_server.url, 60).served_model().folder == str(checkpoint)
    hidden = checkpoint.rename(checkpoint.with_name("hidden"))
    try:
        with pytest.raises(RolloutError, match="config.json cannot be read here"):
            SGLangClient(clean_server.url, 60).served_model()
    finally:
        hidden.rename(checkpoint)


def test_the_trainers_weights_arrive_whole(clean_server, trainer):
    moved(trainer, seed=3)
    shared_memory = set(os.listdir("/dev/shm"))
    report = sync_weights(trainer, clean_server, "7")
    assert arrived(clean_server, trainer) < 1e-4
    assert report.tensors == len(trainer.export()) and 0 < report.seconds < 60
    assert clean_server.generate([[1, 2]], 0.0, 1, 1)[0]["meta_info"]["weight_version"] == "7"
    left = {name for name in set(os.listdir("/dev/shm")) - shared_memory if name.startswith("torch_")}
    assert not left, "weights stay in shared memory after a sync"


def moved(trainer, seed: int) -> None:
    with torch.no_grad():
        for parameter in trainer.model.module.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.add_(0.02 * noise)


def arrived(server, trainer) -> float:
    """Largest difference of a logprob between the server and the trainer."""
    episodes = [
        Episode(tuple(s[:1]), tuple(s[1:]), (0.0,) * (len(s) - 1), "stop", i)
        for i, s in enumerate(sequences())
    ]
    batch = collate(episodes, None, pad_id=0)
    return (served(server) - trainer.logprobs(batch)[batch.loss_mask > 0]).abs().max().item()


def _stopped_after(seconds, server, problems, settings):
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(roll_out, server, problems, settings, draw=0)
        time.sleep(seconds)
        while not asked.done():
            server.stop_requests()
            time.sleep(0.01)
    return asked.result()


def test_a_stopped_rollout_goes_on_under_other_weights_and_each_token_keeps_its_own(
    clean_server, settings, reference
):
    """Partial rollouts: what was sampled stays with its logprobs and weights, and the rest is asked for anew."""
    longer = replace(settings, sampling=replace(settings.sampling, max_new_tokens=300))
    problems = load_task("median").sample(4)
    for patience in (0.05, 0.1, 0.2, 0.4, 0.8):  # how long until the first token depends on the machine
        partial = _stopped_after(patience, clean_server, problems, longer)
        if any(e.unfinished and e.completion_ids for e in partial):
            break
    else:
        pytest.fail("nothing was stopped on its way")
    tokens = [reference_logprobs(reference, e.prompt_ids + e.completion_ids) for e in partial]
    weight = dict(reference.named_parameters())["lm_head.weight"].detach()
    weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
    send_tensors(clean_server, {"lm_head.weight": weight.clone()}, "step-1")
    whole = roll_out(clean_server, problems, longer, draw=0, partial=partial)
    crossed = 0
    for start, end, before in zip(partial, whole, tokens, strict=True):
        old, new = len(start.completion_ids), len(end.completion_ids)
        assert end.completion_ids[:old] == start.completion_ids and end.logprobs[:old] == start.logprobs
        assert not end.unfinished and new <= 300
        assert end.weight_versions == ("initial",) * old + ("step-1",) * (new - old)
        after = reference_logprobs(reference, end.prompt_ids + end.completion_ids)
        got, first = torch.tensor(end.logprobs), len(end.prompt_ids) - 1
        assert torch.allclose(got[:old], before[first:], atol=1e-4, rtol=0)
        assert torch.allclose(got[old:], after[first + old :], atol=1e-4, rtol=0)
        crossed += 0 < old < new
    assert crossed, "no answer has tokens of both weights"
    assert roll_out(clean_server, problems, longer, draw=0, partial=whole) == whole


def test_offloaded_weights_arrive_whole_and_stay_away(clean_server, trainer):
    moved(trainer, seed=4)
    trainer.memory.offload()
    report = sync_weights(trainer, clean_server, "offloaded", bucket_bytes=100_000)
    assert next(trainer.model.module.parameters()).untyped_storage().nbytes() == 0
    trainer.memory.load_back()
    assert arrived(clean_server, trainer) < 1e-4 and report.buckets > 3


@pytest.mark.parametrize("overlap", [True, False])
def test_weights_arrive_in_many_buckets(clean_server, trainer, overlap):
    moved(trainer, seed=7)
    report = sync_weights(trainer, clean_server, f"overlap-{overlap}", 10_000, overlap=overlap)
    assert arrived(clean_server, trainer) < 1e-4
    assert report.buckets > 10 and report.tensors == len(trainer.tensor_shapes())


def test_an_error_while_sending_reaches_the_caller_and_ends_the_export(clean_server, trainer, monkeypatch):
    """The last bucket's error too, which nothing comes after; the export's other ranks would wait otherwise."""
    import helpers.weight_sync as module

    post, sent = module._post_to_each, []

    def fails(servers, weights, version):
        sent.append(list(weights))
        if "lm_head.weight" in weights:
            raise RolloutError("the line is cut")
        return post(servers, weights, version)

    monkeypatch.setattr(module, "_post_to_each", fails)
    with pytest.raises(RolloutError, match="the line is cut"):
        sync_weights(trainer, clean_server, "cut", bucket_bytes=10_000)
    monkeypatch.undo()
    sync_weights(trainer, clean_server, "whole again")
    assert arrived(clean_server, trainer) < 1e-4


def test_weights_arrive_through_a_process_group(clean_server, trainer):
    """Twice, and then once more in a second group: the first one is left properly."""
    for version in ("first", "second"):
        with SyncGroup(clean_server, "gloo") as group:
            for part in ("a", "b"):
                moved(trainer, seed=len(version + part))
                report = sync_weights(trainer, clean_server, version + part, 100_000, group)
                assert arrived(clean_server, trainer) < 1e-4
    assert report.tensors == len(trainer.tensor_shapes()) and 0 < report.transfer_seconds < report.send_seconds
    assert clean_server.generate([[1, 2]], 0.0, 1, 1)[0]["meta_info"]["weight_version"] == "secondb"


def test_weights_arrive_through_the_disk(clean_server, trainer, tmp_path):
    moved(trainer, seed=5)
    report = sync_through_disk(trainer, clean_server, tmp_path / "step", "written")
    assert arrived(clean_server, trainer) < 1e-4
    assert 0 < report.transfer_seconds < report.send_seconds
    assert clean_server.generate([[1, 2]], 0.0, 1, 1)[0]["meta_info"]["weight_version"] == "written"


def test_a_server_that_does_not_join_is_an_error_in_time(clean_server):
    absent = SGLangClient("http://127.0.0.1:9", timeout=2)
    start = time.monotonic()
    with pytest.raises(RolloutError, match="does not answer /init_weights_update_group"):
        SyncGroup([absent], "gloo", timeout=3).__enter__()
    assert time.monotonic() - start < 10


def test_a_group_of_a_name_that_is_taken_is_refused_before_the_server_waits(clean_server, trainer):
    moved(trainer, seed=6)
    with SyncGroup(clean_server, "gloo", "twice") as group:
        with pytest.raises(RolloutError, match="'twice' already"):
            SyncGroup(clean_server, "gloo", "twice").__enter__()
        sync_weights(trainer, clean_server, "within", group=group)
    assert arrived(clean_server, trainer) < 1e-4


def test_a_checkpoint_of_another_shape_is_refused_and_the_server_lives(clean_server, tmp_path):
    from helpers.checkpoints import write_tiny_checkpoint

    other = write_tiny_checkpoint(load_profile("cpu", **{"model.num_local_experts": 8}), tmp_path / "other")
    with pytest.raises(RolloutError, match="another shape"):
        clean_server.load_weights(other)
    assert clean_server.healthy()


def test_a_refused_request_has_the_servers_words_and_the_server_lives(clean_server):
    with pytest.raises(RolloutError, match="refused /generate"):
        clean_server.post("/generate", input_ids=[[1, 2]], sampling_params={"temperature": -1.0})
    assert clean_server.healthy()


def test_a_killed_parent_leaves_nothing_even_during_the_start(checkpoint, processes):
    parent, address = processes.start_parent(checkpoint)
    deadline = time.monotonic() + 20
    while len(process_tree([address["pid"]])) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(process_tree([address["pid"]])) >= 2, "launcher and server were not started"
    assert processes.kill_parent(parent, address["pid"]) == []


def test_stop_during_the_start_leaves_nothing_and_can_be_called_twice(settings, checkpoint, processes):
    server = RolloutServer(settings, checkpoint).start()
    time.sleep(1)
    tree = process_tree([server.pid])
    server.stop()
    server.stop()
    assert tree and processes.living(tree) == []


def test_a_server_that_dies_gives_one_error_with_the_log_and_leaves_nothing(checkpoint, processes):
    wrong = load_profile("cpu", **{"rollout.server_arguments": ("--no-such-flag",)})
    server = RolloutServer(wrong, checkpoint).start()
    tree = []
    with pytest.raises(RolloutError) as refusal:
        try:
            server.wait()
        finally:
            tree = process_tree([server.pid])
            server.stop()
    assert "SGLang ended with code" in str(refusal.value) and "Last lines of" in str(refusal.value)
    assert "--no-such-flag" in str(refusal.value)
    assert processes.living(tree) == []


def test_a_broken_checkpoint_is_named_and_starts_nothing(settings, checkpoint, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    children = process_tree([os.getpid()])
    with pytest.raises(CheckpointError, match="model.safetensors is truncated: model"):
        RolloutServer(settings, broken)
    assert set(process_tree([os.getpid()])) <= set(children)


def test_a_server_that_takes_too_long_is_ended(checkpoint, processes):
    hasty = load_profile("cpu", **{"rollout.start_timeout": 1.0})
    server = RolloutServer(hasty, checkpoint).start()
    tree = process_tree([server.pid])
    with pytest.raises(RolloutError, match="did not answer within 1 s"):
        server.wait()
    assert processes.living(tree) == []


def test_a_checkpoint_that_is_not_there_starts_nothing(settings, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        RolloutServer(settings, tmp_path)
