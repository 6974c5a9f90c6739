"""Two trainer ranks and two SGLang engines under one Ray placement group: the loop of notebook 06, wider."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.advantages import group_advantages
from helpers.async_rollout import AsyncRollout, staleness
from helpers.cluster import ClusterError, GrpoCluster, RayHead
from helpers.collate import collate
from helpers.objective import learn, rated
from helpers.processes import alive, process_tree
from helpers.profiles import load_profile
from helpers.rollout import SGLangClient
from helpers.saves import SaveError, resume_newest, saved_steps, step_folder
from helpers.tasks import MedianTask
from helpers.trainer import MegatronTrainer

pytestmark = pytest.mark.engine
CHANGES = {
    "algorithm": "verl_gpt_oss",  # asks for every pass: old logprobs, reference, two updates
    "trainer.ranks": 2,
    "rollout.engines": 2,
    "batch.prompts": 6,
    "batch.group_size": 4,
    "cluster.dashboard": False,
}


@pytest.fixture(scope="module")
def cluster(checkpoint):
    """A running cluster; its teardown leaves no process and no folder behind."""
    settings = load_profile("cpu", **CHANGES)
    before = set(Path("/tmp").glob("ray-*"))
    head = RayHead(settings).start().connect()
    group = GrpoCluster(settings, checkpoint).start()
    group.head, group.ranks = head, group.ready()
    yield group
    started = [pid for pid in process_tree([os.getpid()]) if pid in process_tree([head.process.pid])]
    group.stop()
    head.stop()
    assert len(started) > 6
    assert alive(started) == []
    assert set(Path("/tmp").glob("ray-*")) == before


@pytest.fixture(scope="module")
def batch(cluster):
    problems = MedianTask(0).sample(6, step=0)
    episodes = cluster.roll_out(problems)
    assert [e.group for e in episodes] == [g for g in range(6) for _ in range(4)]
    rewards = torch.arange(24.0) % 5  # any rewards with a spread
    advantages = group_advantages(rewards, torch.tensor([e.group for e in episodes]))
    return collate(episodes, advantages, pad_id=0)


def test_ranks_and_engines_are_apart(cluster):
    assert [r["rank"] for r in cluster.ranks] == [0, 1]
    assert len({r["pid"] for r in cluster.ranks}) == 2
    assert len(set(cluster.clients.urls)) == 2


def test_answers_of_a_draw_do_not_depend_on_the_number_of_engines(cluster):
    import ray

    problems = MedianTask(0).sample(6, step=3)
    both = cluster.roll_out(problems, draw=3)
    one = ray.get(cluster.engines[0].roll_out.remote(problems, False, 3))
    assert [e.completion_ids for e in both] == [e.completion_ids for e in one]
    assert [e.completion_ids for e in cluster.roll_out(problems, draw=4)] != [e.completion_ids for e in one]


def test_two_ranks_compute_what_the_servers_sampled(cluster, batch):
    gap = ((cluster.logprobs(batch) - batch.rollout_logprobs) * batch.loss_mask).abs()
    assert gap.max() < 1e-4


def test_a_step_on_two_ranks_is_the_step_of_one(cluster, batch, trainer):
    """Same statistics, and afterwards the same policy and reference, as a one-rank trainer of this process."""
    one_rank = load_profile("cpu", **{**CHANGES, "trainer.ranks": 1})
    alone = MegatronTrainer(one_rank, cluster.checkpoint)
    alone.update(rated(alone, batch, one_rank))  # away from the start, which the reference stays at
    saved = alone.save(step_folder(Path(os.environ["GRPO_RUNS"]) / "one-rank", 1), {"step": 1})
    assert resume_newest(saved.parent, cluster.resume) == (1, {"step": 1})
    one, two = learn(alone, batch, one_rank), learn(cluster, batch, cluster.settings)
    assert one.keys() == two.keys() and one["reference_kl"] > 0
    for name in one.keys() - {"seconds"}:
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    for call in ("logprobs", "reference_logprobs"):
        difference = getattr(cluster, call)(batch) - getattr(alone, call)(batch)
        assert difference.abs().max() < 1e-4


def test_two_ranks_write_in_the_background_and_say_what_is_wrong(cluster, batch, tmp_path):
    """Errors of the ranks come back as what they are, so that a damaged checkpoint is passed over."""
    for step in (1, 2):
        cluster.save(step_folder(tmp_path, step), {"step": step}, wait=False)
    cluster.finish_saves()
    assert saved_steps(tmp_path) == [1, 2]
    largest = max(step_folder(tmp_path, 2).glob("*.distcp"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(SaveError, match="step-2 cannot be used"):
        cluster.resume(step_folder(tmp_path, 2))
    assert resume_newest(tmp_path, cluster.resume) == (1, {"step": 1})


def test_both_engines_follow_a_sync(cluster, batch):
    report = cluster.sync_weights("two-engines")
    want = cluster.logprobs(batch)
    row = batch.tokens[0][: int(batch.loss_mask[0].nonzero().max()) + 2].tolist()
    for url in cluster.clients.urls:
        client = SGLangClient(url, 60)
        reply = client.post(
            "/generate", input_ids=[row], return_logprob=True, logprob_start_len=0,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
        )  # fmt: skip
        meta = (reply[0] if isinstance(reply, list) else reply)["meta_info"]
        assert meta["weight_version"] == "two-engines"
        got = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]])
        mask = batch.loss_mask[0, : len(got)].bool()
        assert (got - want[0, : len(got)]).abs()[mask].max() < 1e-4
    assert report.tensors == 37


@pytest.mark.parametrize("at_sync", ["finish", "continue", "drop"])
def test_answers_sampled_ahead_are_those_of_a_synchronous_loop_while_weights_stay_the_same(cluster, at_sync):
    """Each sync sends the same weights under another name, right after the engines were asked, so that every way of
    settling must give the answers of the synchronous draw, token by token, with the versions that it promises."""
    settings = dataclasses.replace(
        cluster.settings, steps=4,
        rollout=dataclasses.replace(cluster.settings.rollout, max_staleness=1, at_sync=at_sync),
    )  # fmt: skip
    ahead = AsyncRollout(cluster, partial(MedianTask(0).sample, 6), settings)
    cluster.sync_weights("step-0")
    seen = set()
    for step in range(4):
        problems, episodes = ahead.take(step)
        now = cluster.roll_out(problems, draw=step)
        assert [e.group for e in episodes] == [g for g in range(6) for _ in range(4)]
        assert [e.prompt_ids for e in episodes] == [e.prompt_ids for e in now]
        assert [e.completion_ids for e in episodes] == [e.completion_ids for e in now]
        assert [e.finish_reason for e in episodes] == [e.finish_reason for e in now]
        gaps = [abs(x - y) for e, o in zip(episodes, now, strict=True) for x, y in zip(e.logprobs, o.logprobs, strict=True)]
        assert max(gaps) < 1e-4
        seen |= {staleness([e], step)[1] for e in episodes if step}
        ahead.start_ahead(step)
        ahead.sync_weights(f"step-{step + 1}")
    # stopped at once, most tokens are of the newer weights
    assert seen == {1} if at_sync == "finish" else 0 in seen <= {0, 1}


HEAD = """
import sys, time
from helpers.cluster import RayHead
from helpers.profiles import load_profile
head = RayHead(load_profile("cpu", **{"cluster.dashboard": False})).start().connect()
print(head.process.pid, head.folder, flush=True)
time.sleep(600)
"""


def test_a_killed_driver_leaves_no_ray_behind():
    """SIGKILL of the process that holds the head; Ray's own agents would outlive it by more than a minute."""
    driver = subprocess.Popen([sys.executable, "-W", "ignore", "-c", HEAD], stdout=subprocess.PIPE, text=True)
    pid, folder = driver.stdout.readline().split()
    tree = process_tree([int(pid)])
    assert len(tree) > 4
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    driver.stdout.close()
    assert alive(tree, patience=20) == []
    assert not Path(folder).exists()


def test_what_does_not_fit_is_refused(cluster):
    settings = dataclasses.replace(
        cluster.settings, trainer=dataclasses.replace(cluster.settings.trainer, ranks=64)
    )
    start = time.monotonic()
    with pytest.raises(ClusterError, match="64 trainer ranks and 2 engines"):
        GrpoCluster(settings, cluster.checkpoint).start(patience=3)
    assert time.monotonic() - start < 20
