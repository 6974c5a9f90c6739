"""Profiles: frozen, checked before anything starts, handed to processes in one place."""

import dataclasses
import os
import subprocess
import sys

import pytest

from helpers.profiles import DEVICE_VARIABLE, PROFILES, RUNS_VARIABLE, load_profile


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_consistent(name):
    settings = load_profile(name)
    assert settings.name == name and settings.device in ("cpu", "cuda")
    assert settings.batch.episodes == settings.batch.prompts * settings.batch.group_size
    assert settings.distributed_backend == {"cpu": "gloo", "cuda": "nccl"}[settings.device]


@pytest.mark.parametrize("name", PROFILES)
def test_a_share_of_the_batch_divides_into_micro_batches(name):
    settings = load_profile(name)
    t = settings.trainer
    share = settings.batch.episodes // (t.ranks // (t.tensor_parallel * t.pipeline_parallel))
    assert share % min(t.micro_batch, share) == 0


def test_the_tiny_model_cannot_hide_a_transpose():
    model = load_profile("cpu").model
    assert model.hidden_size != model.intermediate_size
    assert load_profile("cpu").sampling.max_new_tokens > model.sliding_window  # decoding passes the window


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"step": 3}, ValueError, "did you mean 'steps'"),
        ({"trainer.learning_rat": 1.0}, ValueError, "did you mean 'learning_rate'"),
        ({"steps": "10"}, TypeError, "is a int"),
        ({"steps": True}, TypeError, "is a int"),
        ({"steps.more": 1}, ValueError, "has no parts"),
        ({"steps": 0}, ValueError, "at least 1"),
        ({"batch.group_size": 1}, ValueError, "at least 2"),
        ({"trainer.ranks": 3, "trainer.tensor_parallel": 2}, ValueError, "does not divide"),
        ({"trainer.expert_parallel": 3}, ValueError, "experts do not divide"),
        ({"trainer.ranks": 4, "trainer.tensor_parallel": 4}, ValueError, "key-value heads do not divide"),
        ({"trainer.ranks": 3, "trainer.pipeline_parallel": 3}, ValueError, "layers do not divide"),
        ({"rollout.saver_graphs": True, "rollout.kv_saver": "plain"}, ValueError, "saver_graphs needs"),
    ],
)
def test_what_cannot_be_is_refused(changes, error, words):
    try:
        load_profile("cpu", **changes)
    except error as refusal:
        assert words in str(refusal)
    else:
        pytest.fail(f"{changes} was accepted")


def test_unknown_profile_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'cluster'"):
        load_profile("clustre")


def test_a_change_touches_nothing_else():
    base, changed = load_profile("cpu"), load_profile("cpu", seed=7, **{"batch.prompts": 8})
    assert (changed.seed, changed.batch.prompts) == (7, 8)
    assert dataclasses.replace(changed, seed=base.seed, batch=base.batch) == base
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.seed = 1


def test_an_int_is_taken_for_a_float():
    assert load_profile("cpu", **{"trainer.learning_rate": 1}).trainer.learning_rate == 1.0


def test_every_process_is_told_its_device_and_only_cpu_servers_see_the_stub():
    for name in PROFILES:
        settings = load_profile(name)
        for role in ("kernel", "trainer", "server"):
            env = settings.process_environment(role)
            assert env[DEVICE_VARIABLE] == settings.device
            assert ("PYTHONPATH" in env) == (settings.device == "cpu" and role == "server")
            assert all(isinstance(v, str) for v in env.values())
            assert ("CUDA_VISIBLE_DEVICES" in env) == (settings.device == "cpu")
    with pytest.raises(ValueError, match="unknown process role"):
        load_profile("cpu").process_environment("driver")


def test_results_can_go_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    settings = load_profile("cpu", seed=3)
    assert settings.run_folder("02_bridge") == tmp_path / "cpu" / "02_bridge"
    assert settings.run_folder("02_bridge").is_dir()
    assert settings.checkpoint("warm").name == "warm-seed3" and not settings.checkpoint("warm").exists()


def test_settings_import_neither_torch_nor_an_engine():
    code = (
        "import sys; import helpers.profiles, helpers.preflight, helpers.harmony, helpers.tasks, helpers.checkpoints, helpers.results;"
        "bad = {'torch', 'transformers', 'megatron', 'sglang', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=dict(os.environ))


ADDRESS = """
import ray._private.services as services
services.node_ip_address_from_perspective = lambda address=None: "192.0.2.2"  # as on a machine with a default route
print(services.canonicalize_bootstrap_address("127.0.0.1:6379"))
"""


@pytest.mark.parametrize(("told", "address"), [(True, "127.0.0.1:6379"), (False, "192.0.2.2:6379")])
def test_ray_stays_on_loopback_though_the_machine_has_another_address(told, address):
    """Without our environment Ray's driver looks for the head where it does not listen (seen on a GPU host)."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    environment = {k: v for k, v in os.environ.items() if k != name}
    environment |= {name: load_profile("cpu").process_environment("kernel")[name]} if told else {}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ADDRESS], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == address, done.stderr
