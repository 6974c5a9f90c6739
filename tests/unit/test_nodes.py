"""Where actors are and what they were told: addresses, interfaces, cards, and what is refused."""

import doctest
import socket
import time

import pytest

from helpers import nodes
from helpers.cluster import (
    Clients,
    ClusterError,
    RayHead,
    check_engines,
    check_network,
    check_ranks,
    sync_plan,
)
from helpers.nodes import NodeError
from helpers.preflight import machine_checks
from helpers.profiles import load_profile
from helpers.rollout import RolloutError, RolloutServer, _secret_file, server_command


def test_examples():
    assert doctest.testmod(nodes).failed == 0


# --- addresses and interfaces -------------------------------------------------------------------------------
def test_all_of_the_loopback_network_is_one_interface():
    name = nodes.interface_of("127.0.0.1")
    assert (name, "127.0.0.1") in nodes.addresses() and name in dict((n, i) for i, n in socket.if_nameindex())
    assert nodes.interface_of("127.0.0.77") == name


def test_an_address_of_another_machine_has_no_interface():
    with pytest.raises(NodeError, match="198.51.100.7 .*--node-ip-address"):
        nodes.interface_of("198.51.100.7")


def test_a_store_listens_at_its_address_only():
    with nodes.listening_socket("127.0.0.2") as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=2).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=2)


def test_what_the_node_says_about_its_network_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "placeholder")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    name = nodes.choose_interface("127.0.0.3")
    told = {k: nodes.os.environ[k] for k in nodes.INTERFACES}
    assert told == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": "ib0"}


# --- cards --------------------------------------------------------------------------------------------------
def fake_nvidia_smi(tmp_path, monkeypatch, text: str) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{text}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_cards_are_told_apart_by_uuid(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, r"0, GPU-1a2b-00\n1, GPU-3c4d-00\n")
    assert nodes.visible_cards({}) == ("1a2b-00", "3c4d-00")
    assert nodes.visible_cards({"CUDA_VISIBLE_DEVICES": "1"}) == ("3c4d-00",)
    assert nodes.visible_cards({"CUDA_VISIBLE_DEVICES": "GPU-1a2b-00"}) == ("1a2b-00",)
    assert nodes.visible_cards({"CUDA_VISIBLE_DEVICES": ""}) == ()
    for missing in ("2", "GPU-ffff"):
        with pytest.raises(NodeError, match="this machine has the GPUs"):
            nodes.visible_cards({"CUDA_VISIBLE_DEVICES": missing})


def test_no_tool_no_cards(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nodes.visible_cards({}) == ()


# --- what actors report -------------------------------------------------------------------------------------
def ranks(**changes):
    """Two sound ranks on two nodes, rank 1 with changes."""
    sound = [
        {
            "rank": i, "node": f"n{i}", "address": f"10.0.0.{i + 1}", "interface": "eth0", "pid": 100, "device": "cpu",
            "card": "", "cards": (), "interfaces": {"GLOO_SOCKET_IFNAME": "eth0"},
        }
        for i in (0, 1)
    ]  # fmt: skip
    return [sound[0], sound[1] | changes]


def test_ranks_of_two_nodes_may_have_the_same_pid():
    check_ranks(ranks(), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": "10.0.0.1"}, "cannot tell each other where they are"),
        ({"address": "127.0.0.1"}, "cannot tell each other where they are"),
        (
            {"interfaces": {"GLOO_SOCKET_IFNAME": "lo"}},
            "rank 1 on 10.0.0.2 would look for other nodes through",
        ),
        ({"interfaces": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "lo"}}, "that of eth0"),
        ({"interfaces": {}}, "any interface"),
    ],
)
def test_ranks_that_cannot_meet_are_refused(changes, message):
    with pytest.raises(ClusterError, match=message):
        check_network(ranks(**changes))
    check_network([ranks()[0], ranks(**changes)[1] | {"node": "n0"}])  # on one machine none of it matters


def test_a_rank_on_another_card_than_it_was_given_is_refused():
    """CUDA and nvidia-smi may count a host's unequal cards in different orders."""
    on_cards = [r | {"device": "cuda", "card": c, "cards": (c,)} for r, c in zip(ranks(), "ab", strict=True)]
    check_ranks(on_cards, "cuda")
    with pytest.raises(ClusterError, match="{1: 'b'}.*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        check_ranks([on_cards[0], on_cards[1] | {"cards": ("c",)}], "cuda")


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ([{"device": "cpu", "cards": ("a",)}], "told otherwise .*{0: 'cpu'}"),
        ([{"device": "cuda", "cards": ()}], "do not have GPUs of their own"),
        (
            [{"device": "cuda", "cards": ("a",)}, {"device": "cuda", "cards": ("a",)}],
            "do not have GPUs of their own",
        ),
    ],
)
def test_engines_without_cards_of_their_own_are_refused(engines, message):
    check_engines([{"device": "cuda", "cards": ("a",)}, {"device": "cuda", "cards": ("b", "c")}], "cuda")
    with pytest.raises(ClusterError, match=message):
        check_engines(engines, "cuda")


def test_engines_may_share_a_card_that_is_meant_for_several():
    shared = [{"device": "cuda", "cards": ("a",)}] * 2
    check_engines(shared, "cuda", per_card=2)
    with pytest.raises(ClusterError, match="a GPU for each 2 of them"):
        check_engines([*shared, shared[0]], "cuda", per_card=2)


@pytest.mark.parametrize(
    ("cards", "engines", "plan"),
    [
        ("a", ["a"], ("", [[0]])),  # on the trainer's card: handles
        ("a", ["b"], ("nccl", [[0]])),  # on another card, of this host or not
        ("ab", ["a", "b"], ("", [[0], [1]])),  # each rank to its own card
        ("ab", ["b", "a"], ("", [[1], [0]])),  # by UUID, whatever the order
        ("ab", ["b"], ("", [[], [0]])),
        ("ab", ["c", "d"], ("nccl", [[0, 1], []])),
    ],
)
def test_weights_go_as_handles_on_one_card_only(cards, engines, plan):
    described = [{"cards": tuple(e)} for e in engines]
    assert sync_plan("cuda", [{"card": c} for c in cards], described) == plan


def test_on_a_cpu_the_engines_are_dealt_out_to_the_ranks():
    assert sync_plan("cpu", ranks(), [{"cards": ()}] * 3) == ("", [[0, 2], [1]])
    assert sync_plan("cpu", ranks(), [{"cards": ()}]) == ("", [[0], []])


def test_weights_do_not_go_two_ways_at_once():
    with pytest.raises(ClusterError, match=r"engines \[1\] share no card .*'split'"):
        sync_plan("cuda", [{"card": "a"}], [{"cards": ("a",)}, {"cards": ("b",)}])


# --- a cluster that is there --------------------------------------------------------------------------------
@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://10.0.0.1:8265"])
def test_a_clients_address_is_refused_with_the_command_that_works(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match="ray job submit --address http://10.0.0.1:"):
        RayHead(load_profile("cpu")).start()


def test_with_an_address_nothing_is_launched(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("helpers.cluster.subprocess.Popen", lambda *_, **__: pytest.fail("started a process"))
    head = RayHead(load_profile("cpu")).start()
    assert head.attached and head.address == "10.0.0.1:6379"


def test_a_cluster_that_is_not_there_is_named_at_once(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    head, start = RayHead(load_profile("cpu")).start(), time.monotonic()
    with pytest.raises(ClusterError, match="RAY_ADDRESS=127.0.0.1:9: .*refused.* unset RAY_ADDRESS"):
        head.connect()
    assert time.monotonic() - start < 11


def test_a_run_on_a_cluster_does_not_keep_ray_on_loopback(monkeypatch):
    settings = load_profile("cpu")
    assert settings.process_environment("kernel")[nodes.CLUSTER_SWITCH] == "0"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert settings.process_environment("kernel")[nodes.CLUSTER_SWITCH] == "1"


def test_the_drivers_machine_needs_no_cards_of_a_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path))
    monkeypatch.setattr("helpers.preflight.gpu_names", lambda: [])

    def cards():
        return next(check.ok for check in machine_checks(load_profile("cluster")) if check.name == "GPUs")

    assert not cards()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cards()


def test_an_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="cluster.strategy = 'NEAR'.*STRICT_SPREAD"):
        load_profile("cpu", **{"cluster.strategy": "NEAR"})


# --- servers that other machines reach ----------------------------------------------------------------------
@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "node-7"])
def test_a_server_that_others_reach_needs_a_key(host):
    with pytest.raises(RolloutError, match="needs a key"):
        RolloutServer(load_profile("cpu"), "checkpoint", host=host)


def test_a_server_on_another_machine_meets_the_trainer_at_its_own_interface(monkeypatch, tmp_path):
    """Profile cpu says `lo`, which is right on one machine only."""
    started = []
    monkeypatch.setattr(
        "helpers.rollout.subprocess.Popen", lambda command, **more: started.append((command, more))
    )
    monkeypatch.setattr("helpers.rollout.interface_of", lambda address: "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    server = object.__new__(RolloutServer)
    server.settings, server.host, server._key = load_profile("cpu"), "10.0.0.1", "secret-of-a-test"
    server.checkpoint, server.log = tmp_path, tmp_path / "log"
    with pytest.raises(AttributeError):  # the stand-in starts no process
        server.start()
    command, more = started[0]
    assert more["env"]["GLOO_SOCKET_IFNAME"] == "eth7" and more["env"]["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "secret-of-a-test" not in " ".join(command) and command[command.index("--host") + 1] == "10.0.0.1"
    folder = nodes.Path(command[command.index("--remove") + 1])
    assert (folder / "server.yaml").read_text() == "api-key: secret-of-a-test\n"
    (folder / "server.yaml").unlink(), folder.rmdir()


def test_a_key_is_in_a_file_of_this_user_alone():
    path = _secret_file("secret-of-a-test")
    try:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert "secret-of-a-test" in path.read_text()
    finally:
        path.unlink(), path.parent.rmdir()
    assert "secret" not in " ".join(server_command(load_profile("cpu"), "checkpoint", 30000, "10.0.0.1"))
    assert "secret" not in repr(Clients(("http://10.0.0.1:30000",), 1.0, "secret-of-a-test"))


# --- the command line ---------------------------------------------------------------------------------------
def test_what_a_node_needs_is_the_profiles_without_one_machines_interfaces(capsys, monkeypatch):
    assert nodes.main(["environment", "--profile", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "export GRPO_DEVICE=cpu\n" in said and "export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1\n" in said
    assert "IFNAME" not in said


def test_waiting_for_nodes_ends_with_what_was_seen(capsys):
    assert nodes.main(["wait", "--dashboard", "http://127.0.0.1:9", "--nodes", "2", "--seconds", "0.5"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "2 nodes were to join" in said and "no answer" in said
