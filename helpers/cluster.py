"""Ray: a head on this machine, or a cluster that is there; trainer ranks and rollout engines in one placement group.

Ray does placement, retries and health; nothing here schedules. A head of our own runs under helpers/launcher.py, so all of
Ray's processes end with the kernel, even when it is killed (Ray's own agents outlive it by more than a minute).
Where RAY_ADDRESS names a cluster (environment/clusters.md), a run goes there and leaves it as it was.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.nodes import (
    INTERFACES, LOOPBACK, choose_interface, interface_of, is_loopback, listening_socket, visible_cards,
)  # fmt: skip
from helpers.profiles import ADDRESS_VARIABLE, DEVICE_VARIABLE, Profile
from helpers.records import Batch, Episode
from helpers.rollout import LAUNCHER, RolloutServer, SGLangClient, free_port, open_server, roll_out
from helpers.tasks import Problem
from helpers.weight_sync import SyncGroup, SyncReport, sync_weights

log = logging.getLogger(__name__)


class ClusterError(RuntimeError):
    """Ray did not start, or cannot place what the profile asks for."""


class RayHead:
    """A Ray head on loopback, or a handle on the cluster that RAY_ADDRESS names, which others started and will stop.

    `with RayHead(settings) as ray_head:` or start() ... stop().
    """

    def __init__(self, settings: Profile):
        self.settings, self.process = settings, None
        self.address = self.dashboard = ""
        self.attached = False

    def __enter__(self) -> RayHead:
        return self.start().connect()

    def __exit__(self, *exc) -> None:
        self.stop()

    def start(self) -> RayHead:
        """Launch Ray's processes; returns at once. With RAY_ADDRESS nothing is launched.

        Raises ClusterError for an address that no driver can use.
        """
        named = _named_cluster()
        if named:
            self.address, self.attached = named, True
            self.token = os.environ.get("RAY_AUTH_TOKEN", "")
            return self
        c = self.settings.cluster
        # a short path: Ray puts sockets below it, and theirs have a limit
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        port, dashboard_port = free_port(), free_port()
        self.address = f"{LOOPBACK}:{port}"
        self.dashboard = f"http://{LOOPBACK}:{dashboard_port}" if c.dashboard else ""
        cpus = max(c.num_cpus, sum(bundle["CPU"] for bundle in _bundles(self.settings)[0]))
        command = [
            sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--head", "--block",
            "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={self.folder}", "--disable-usage-stats",
            f"--num-cpus={cpus}", f"--object-store-memory={c.object_store_mib << 20}",
            f"--include-dashboard={c.dashboard}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}",
            "--include-log-monitor=False",
        ]  # fmt: skip
        if self.settings.device == "cpu":
            command.append("--num-gpus=0")
        # a token for this process's heads: loopback alone would let any user of this machine run code through Ray, and
        # Ray reads the token once a process
        self.token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        environment = {**os.environ, **self.settings.process_environment("kernel")}
        self._output = (self.folder / "head.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(LAUNCHER), "--remove", str(self.folder), *command],
            stdin=subprocess.PIPE, stdout=self._output,
            stderr=subprocess.STDOUT, start_new_session=True, env=environment,
        )  # fmt: skip
        return self

    def connect(self, timeout: float = 120.0) -> RayHead:
        """Wait until Ray takes connections and make this process its driver. Raises ClusterError."""
        if self.attached:
            return self._attach()
        import ray

        port, deadline = int(self.address.rsplit(":", 1)[1]), time.monotonic() + timeout
        while not _listens(port):
            self._check_alive(deadline)
            time.sleep(0.2)
        while not ray.is_initialized():
            try:
                ray.init(
                    address=self.address,
                    log_to_driver=False,
                    logging_level="error",
                    _node_ip_address="127.0.0.1",
                )
            except ConnectionError:
                # Ray's store listens before its node is there, and stays when that never comes
                self._check_alive(deadline)
                time.sleep(0.2)
        return self

    def _attach(self) -> RayHead:
        """Make this process a driver of the named cluster; it has to be on one of its nodes."""
        host, _, port = self.address.rpartition(":")
        if port.isdigit():  # Ray itself would try for minutes
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            except (OSError, OverflowError) as error:
                raise self._not_ours(error) from error
        import ray

        try:
            context = ray.init(address=self.address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise self._not_ours(error) from error
        self.dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else ""
        if os.environ.get("RAY_AUTH_MODE") != "token":
            log.warning("this Ray cluster asks for no token: whoever reaches its ports can run code as you")
        log.info("attached to the Ray cluster at %s: %s", self.address, sorted(node_addresses().values()))
        return self

    def _not_ours(self, error: Exception) -> ClusterError:
        reason = " ".join(str(error).split())[:400]
        return ClusterError(
            f"no Ray cluster of ours at {ADDRESS_VARIABLE}={self.address}: {reason}. Run on one of its nodes (or send "
            f"the run there: ray job submit) with its RAY_AUTH_TOKEN, or unset {ADDRESS_VARIABLE} to start a head here"
        )

    def _check_alive(self, deadline: float) -> None:
        """Raise ClusterError with Ray's own words when its start has ended or takes too long."""
        if self.process.poll() is None and time.monotonic() < deadline:
            return
        ended = "Ray's start ended" if self.process.poll() is not None else "Ray did not start in time"
        text = (self.folder / "head.log").read_text(errors="replace")[-1500:]
        self.stop()
        raise ClusterError(f"{ended}. Its last words:\n{text}")

    def stop(self) -> None:
        """Disconnect, end all of Ray's processes and remove its folder; safe to call twice.

        A cluster that RAY_ADDRESS named goes on.
        """
        if self.process is None and not self.attached:
            return
        import ray

        ray.shutdown()
        if self.attached:
            self.attached = False
            return
        self.process.stdin.close()
        self.process.wait(30)
        self.process = None
        self._output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _listens(port: int, host: str = LOOPBACK) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _named_cluster() -> str:
    """The cluster that RAY_ADDRESS names, "" where it names none.

    Raises ClusterError for the protocol of a client outside the cluster.
    """
    named = os.environ.get(ADDRESS_VARIABLE, "")
    if "://" in named:
        raise ClusterError(
            f"{ADDRESS_VARIABLE}={named} is an address for a client outside the cluster; the loop's driver runs on "
            "a node. Give HOST:PORT of the cluster's head, or: ray job submit --address "
            f"{named.replace('ray://', 'http://')} -- COMMAND"
        )
    return "" if named == "local" else named


def node_addresses() -> dict[str, str]:
    """node id -> address of every node of the cluster that lives. This process has to be its driver."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


@dataclass(frozen=True)
class Clients:
    """Addresses of the rollout servers, as plain values that can travel to another actor.

    key: what they ask for, "" on one machine. group: backend of a SyncGroup to send weights through, "" for none.
    """

    urls: tuple[str, ...]
    timeout: float
    key: str = field(default="", repr=False)
    group: str = ""

    def open(self) -> list[SGLangClient]:
        return [SGLangClient(url, self.timeout, key=self.key) for url in self.urls]


def describe_place(device: str) -> dict:
    """Where this actor is (node, address, interface), what it was told, and the cards it may use (UUIDs)."""
    import ray

    address = ray.util.get_node_ip_address()
    return {
        "node": ray.get_runtime_context().get_node_id(),
        "address": address,
        "interface": interface_of(address),
        "interfaces": {name: os.environ[name] for name in INTERFACES if name in os.environ},
        "pid": os.getpid(),
        "device": os.environ.get(DEVICE_VARIABLE, "nothing"),
        "cards": visible_cards() if device == "cuda" else (),
    }


class TrainerActor:
    """One trainer rank. Synchronous and single-threaded: Megatron's CPU back end holds in one thread only.

    store_host: address of the ranks' store, loopback where all of them are on one machine. spread: some actors of the
    run are on another one.
    """

    def __init__(
        self, settings: Profile, checkpoint: str, rank: int, store_host: str = LOOPBACK, spread: bool = False
    ):
        self.settings, self.checkpoint, self.rank = settings, checkpoint, rank
        self.store_host, self.spread = store_host, spread
        self.trainer, self.group = None, None

    def open_store(self) -> int:
        """On rank 0: open the store that the ranks meet at, on its address only; returns its port."""
        import torch.distributed as dist

        # a socket of our own: TCPStore would listen on every address of the machine
        listening = listening_socket(self.store_host)
        port = listening.getsockname()[1]
        self.store = dist.TCPStore(
            self.store_host, port, world_size=self.settings.trainer.ranks, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        return port

    def build(self, port: int) -> dict:
        """Load the model and build the optimizer; returns what happened here (seconds, device, process)."""
        import ray
        import torch.distributed as dist

        from helpers.trainer import MegatronTrainer

        if self.spread:
            choose_interface(ray.util.get_node_ip_address())
        if self.rank:
            self.store = dist.TCPStore(
                self.store_host, port, world_size=self.settings.trainer.ranks, is_master=False
            )
        self.trainer = MegatronTrainer(self.settings, self.checkpoint, self.rank, self.store)
        return self.describe()

    def describe(self) -> dict:
        """Rank, place (describe_place), the card that torch got (UUID; "" on a CPU), and where its time went."""
        place = describe_place(self.settings.device)
        return {"rank": self.rank, **place, "card": _card(), **self.trainer.seconds}

    def update(self, batch: Batch) -> dict[str, float]:
        return self.trainer.update(batch)

    def logprobs(self, batch: Batch, reference: bool = False):
        """(data-parallel rank, [B / ranks, S] numpy), or None on ranks whose part another one repeats.

        As numpy: megatron-core makes tensors unpickle through a function of its own, so the driver would import Megatron.
        """
        from megatron.core import parallel_state

        share = self.trainer.reference_logprobs(batch) if reference else self.trainer.logprobs(batch)
        if share is None or parallel_state.get_tensor_model_parallel_rank():
            return None
        return parallel_state.get_data_parallel_rank(), share.numpy()

    def sync(self, clients: Clients, version: str, own: list[int]) -> SyncReport:
        """own: places of the servers that this rank sends to."""
        servers = clients.open()
        if clients.group and not self.rank:
            self._join(servers, clients.group)
        return sync_weights(self.trainer, servers, version, group=self.group, own=own)

    def _join(self, servers: list[SGLangClient], backend: str) -> None:
        """One group for as long as the servers stay the same."""
        import ray

        if self.group is None or [s.url for s in self.group.servers] != [s.url for s in servers]:
            self.leave_group()
            self.group = SyncGroup(servers, backend, address=ray.util.get_node_ip_address()).__enter__()

    def leave_group(self) -> None:
        """Before the servers stop, or others take their place: leave the group that weights went through, if any."""
        group, self.group = self.group, None
        if group is not None:
            group.close()

    def save(self, folder: str, data: dict | None = None, wait: bool = True) -> str:
        return str(self.trainer.save(folder, data, wait))

    def finish_saves(self) -> None:
        self.trainer.finish_saves()

    def resume(self, folder: str) -> int:
        return self.trainer.resume(folder)

    def export_checkpoint(self, folder: str) -> str:
        """Write the present weights as a Hugging Face folder (rank 0; the export is collective)."""
        return str(self.trainer.export_checkpoint(folder) or "")


def _card() -> str:
    """UUID of this process's current GPU, "" where torch sees none."""
    import torch

    return (
        str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-")
        if torch.cuda.is_available()
        else ""
    )


def check_ranks(ranks: Sequence[dict], device: str) -> None:
    """Raise ClusterError unless each trainer rank is a process and, on GPUs, has a card of its own. ranks: their describe().

    Ray and the engines both set CUDA_VISIBLE_DEVICES: mask it twice and a rank sees no card, or that of its neighbour
    (verl 589, 1752; NeMo-RL 2252).
    """
    wrong = {r["rank"]: r["device"] for r in ranks if r["device"] != device}
    if wrong:
        raise ClusterError(
            f"the profile runs on {device!r} and Ray started ranks that were told otherwise (rank: device): {wrong}; start the "
            "actors with the environment of Profile.process_environment('trainer')"
        )
    cards = [r["card"] for r in ranks]
    if device == "cuda" and ("" in cards or len(set(cards)) < len(cards)):
        raise ClusterError(
            f"{len(ranks)} trainer ranks do not have a GPU each: {cards}; unset CUDA_VISIBLE_DEVICES in the actors' environment "
            "and let Ray assign one card a rank"
        )
    moved = {r["rank"]: r["card"] for r in ranks if r.get("cards") and r["card"] not in r["cards"]}
    if moved:
        raise ClusterError(
            "CUDA gave ranks another card than the one that CUDA_VISIBLE_DEVICES names (rank: UUID): "
            f"{moved}; it counts the fastest first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID where Ray starts"
        )
    if len({(r.get("node"), r["pid"]) for r in ranks}) < len(ranks):
        raise ClusterError(f"{len(ranks)} trainer ranks share a process: {[r['pid'] for r in ranks]}")
    check_network(ranks)


def check_network(ranks: Sequence[dict]) -> None:
    """Raise ClusterError unless ranks on several nodes can meet at the addresses that Ray knows.

    ranks: their describe().
    """
    places = {r.get("node"): r for r in ranks}
    if len(places) < 2:
        return
    where = {f"rank {r['rank']}": r["address"] for r in ranks}
    hidden = [is_loopback(r["address"]) for r in places.values()]
    if len({r["address"] for r in places.values()}) < len(places) or (any(hidden) and not all(hidden)):
        raise ClusterError(
            f"trainer ranks on {len(places)} nodes cannot tell each other where they are: {where}; start each node's "
            "Ray with an address of its own that the others reach (ray start --node-ip-address)"
        )
    for r in ranks:
        wrong = {k: v for k, v in r["interfaces"].items() if v == "lo" and r["interface"] != "lo"}
        if wrong or "GLOO_SOCKET_IFNAME" not in r["interfaces"]:
            raise ClusterError(
                f"rank {r['rank']} on {r['address']} would look for other nodes through "
                f"{r['interfaces'] or 'any interface'}; its address is that of {r['interface']}: unset these "
                "variables, or name the right one, where its Ray starts"
            )


def check_engines(engines: Sequence[dict], device: str, per_card: int = 1) -> None:
    """Raise ClusterError unless each engine was told the profile's device and, on GPUs, shares cards with few others.

    engines: their describe(). per_card: engines that one card is meant for (cluster.engines_per_card).
    """
    wrong = {i: e["device"] for i, e in enumerate(engines) if e["device"] != device}
    if wrong:
        raise ClusterError(
            f"the profile runs on {device!r} and Ray started engines that were told otherwise (engine: device): "
            f"{wrong}; start them with the environment of Profile.process_environment"
        )
    cards = [card for e in engines for card in e["cards"]]
    most = max(Counter(cards).values(), default=0)
    if device == "cuda" and (not all(e["cards"] for e in engines) or most > per_card):
        own = "GPUs of their own" if per_card == 1 else f"a GPU for each {per_card} of them"
        raise ClusterError(
            f"{len(engines)} engines do not have {own} (UUIDs): {[list(e['cards']) for e in engines]}; "
            "unset CUDA_VISIBLE_DEVICES where Ray starts and let it assign the cards"
        )


def sync_plan(device: str, ranks: Sequence[dict], engines: Sequence[dict]) -> tuple[str, list[list[int]]]:
    """How weights reach the engines: the backend of a group, or ""; and for each trainer rank the engines it sends to.

    ranks, engines: their describe(). Every rank has the whole weights once they are gathered. On a CPU they travel by
    value and the engines are dealt out. On GPUs a rank hands CUDA IPC handles to the engine on its own card, since a
    handle is of use on the card that it was made on, and cards are told apart by UUID: their numbers are those that each
    process was left with. Where no engine shares a card with a rank, rank 0 broadcasts to all through NCCL, which takes no
    two ranks on one card.
    Raises ClusterError where some do and some do not.
    """
    if device == "cpu":
        return "", [list(range(rank, len(engines), len(ranks))) for rank in range(len(ranks))]
    here = [[i for i, e in enumerate(engines) if r["card"] in e["cards"]] for r in ranks]
    apart = sorted(set(range(len(engines))) - {i for own in here for i in own})
    if len(apart) == len(engines):
        return "nccl", [list(range(len(engines))) if not rank else [] for rank in range(len(ranks))]
    if apart:
        raise ClusterError(
            f"engines {apart} share no card with a trainer rank and others do, so that weights would need two ways; use at "
            "most as many engines as ranks, or cluster.placement = 'split'"
        )
    return "", here


class RolloutActor:
    """One SGLang server: a new one, or a handle on the series' shared one. host, key: as in RolloutServer."""

    def __init__(self, settings: Profile, checkpoint: str, shared: bool, host: str = LOOPBACK, key: str = ""):
        self.settings = settings
        self.server = (
            open_server(settings, checkpoint)
            if shared
            else RolloutServer(settings, checkpoint, host=host, key=key).start()
        )

    def wait(self) -> str:
        return self.server.wait().url

    def describe(self) -> dict:
        return describe_place(self.settings.device)

    def roll_out(
        self,
        problems: Sequence[Problem],
        greedy: bool = False,
        draw: int | None = None,
        first: int = 0,
        partial: Sequence[Episode] | None = None,
    ) -> list[Episode]:
        return roll_out(self.server, problems, self.settings, greedy, draw, first, partial)

    def release_memory(self) -> float:
        return self.server.release_memory()

    def resume_memory(self) -> float:
        return self.server.resume_memory()

    def stop(self) -> None:
        self.server.stop()


def _bundles(settings: Profile) -> tuple[list[dict], list[int]]:
    """Placement-group bundles, and which of them each engine takes; trainer rank i takes bundle i.

    CPU: one bundle an actor. GPU: one bundle a card, which trainer rank i shares with engine i (colocated; with several
    engines a card they are dealt out, and each actor has an equal part of the card in Ray's books), or which one of them
    has to itself (cluster.placement = "split").
    """
    ranks, engines, each = settings.trainer.ranks, settings.rollout.engines, settings.cluster.engines_per_card
    if _shares_cards(settings):
        cards = max(ranks, -(-engines // each))
        return [{"CPU": 1 + each, "GPU": 1}] * cards, [engine % cards for engine in range(engines)]
    one = {"CPU": 1, "GPU": 1} if settings.device == "cuda" else {"CPU": 1}
    return [one] * (ranks + engines), list(range(ranks, ranks + engines))


def _gpu_share(settings: Profile) -> float:
    """What an actor takes of a card in Ray's books, which count ten-thousandths; it limits no memory."""
    if settings.device != "cuda":
        return 0.0
    return (10_000 // (1 + settings.cluster.engines_per_card)) / 10_000 if _shares_cards(settings) else 1.0


def _shares_cards(settings: Profile) -> bool:
    return settings.device == "cuda" and settings.cluster.placement == "colocated"


@dataclass(frozen=True)
class PendingRollout:
    """Answers that the engines are sampling: what GrpoCluster.start_rollout was asked for, and a reference for each share.

    firsts: place of each share's first problem among `problems`.
    """

    problems: tuple[Problem, ...]
    greedy: bool
    draw: int | None
    firsts: tuple[int, ...]
    references: tuple


def _moved(episode: Episode, by: int) -> Episode:
    return replace(episode, group=episode.group + by)


class GrpoCluster:
    """Trainer ranks and rollout engines of a profile, placed by one Ray placement group.

    start() returns at once and ready() waits, so that imports of trainer and server overlap.
    """

    def __init__(self, settings: Profile, checkpoint: Path | str):
        self.settings, self.checkpoint = settings, str(Path(checkpoint).resolve())
        self.trainers, self.engines, self.group = [], [], None
        self.spread, self.clients, self.places, self._sends = False, Clients((), 0.0), [], []

    def start(self, patience: float = 60.0) -> GrpoCluster:
        """Reserve the bundles (see _bundles) and start the actors. Raises ClusterError when the bundles do not fit."""
        import ray
        from ray.util.placement_group import placement_group

        ranks, engines = self.settings.trainer.ranks, self.settings.rollout.engines
        bundles, engine_bundles = _bundles(self.settings)
        self.group = placement_group(bundles, strategy=self.settings.cluster.strategy)
        if not self.group.wait(patience):
            raise ClusterError(
                f"Ray cannot place {ranks} trainer ranks and {engines} engines on {ray.cluster_resources()}; "
                "lower trainer.ranks or rollout.engines, or start Ray with more"
            )
        self._start_actors(ranks, engine_bundles)
        self._built = self._build()
        return self

    def _start_actors(self, ranks: int, engine_bundles: list[int]) -> None:
        """On one machine they meet on loopback; on several at the nodes' addresses, and servers ask for a key."""
        import ray

        nodes, hosts = self._nodes(), node_addresses()
        self.spread = len({nodes[b] for b in (*range(ranks), *engine_bundles)}) > 1
        self._key = secrets.token_hex(32) if self.spread else ""
        # several engines of one series never share a server, and its server is on the driver's machine
        here = ray.get_runtime_context().get_node_id()
        shared = len(engine_bundles) == 1 and not self.spread and nodes[engine_bundles[0]] == here
        for bundle in engine_bundles:
            host = hosts[nodes[bundle]] if self.spread else LOOPBACK
            self.engines.append(self._actor(RolloutActor, bundle, "server", shared, host, self._key))
        apart = len({nodes[rank] for rank in range(ranks)}) > 1
        store = hosts[nodes[0]] if apart else LOOPBACK
        for rank in range(ranks):
            self.trainers.append(self._actor(TrainerActor, rank, "trainer", rank, store, self.spread))

    def _nodes(self) -> dict[int, str]:
        """bundle -> id of the node that Ray put it on."""
        from ray.util.placement_group import placement_group_table

        return placement_group_table(self.group)["bundles_to_node_id"]

    def _actor(self, kind: type, bundle: int, role: str, *arguments):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        # a rollout actor is no server itself: it hands the server its environment when it launches one
        environment = self.settings.process_environment("trainer" if role == "trainer" else "kernel")
        if self.spread:
            environment.pop("GLOO_SOCKET_IFNAME", None)  # each node has its own (choose_interface)
        environment |= {k: os.environ[k] for k in ("GRPO_SHARED_SERVER", "GRPO_RUNS") if k in os.environ}
        gpus = _gpu_share(self.settings)
        # one thread for each rollout ahead, one for that of now, one for calls between; a trainer rank has one thread
        threads = 1 if role == "trainer" else 2 + self.settings.rollout.max_staleness
        remote = ray.remote(
            num_cpus=1, num_gpus=gpus, scheduling_strategy=place, runtime_env={"env_vars": environment},
            max_concurrency=threads,
        )(kind)  # fmt: skip
        return remote.remote(self.settings, self.checkpoint, *arguments)

    def _build(self) -> list:
        import ray

        port = ray.get(self.trainers[0].open_store.remote())
        return [t.build.remote(port) for t in self.trainers]

    def ready(self, timeout: float = 600.0) -> list[dict]:
        """Wait for all actors and check where they are; returns each trainer rank's description."""
        import ray

        urls = tuple(ray.get([e.wait.remote() for e in self.engines], timeout=timeout))
        ranks = ray.get(self._built, timeout=timeout)
        check_ranks(ranks, self.settings.device)
        self.places = ray.get([e.describe.remote() for e in self.engines], timeout=timeout)
        check_engines(self.places, self.settings.device, self.settings.cluster.engines_per_card)
        group, self._sends = sync_plan(self.settings.device, ranks, self.places)
        self.clients = Clients(urls, self.settings.rollout.request_timeout, self._key, group)
        return ranks

    # --- the calls of one step ----------------------------------------------------------------------------------------
    def roll_out(
        self, problems: Sequence[Problem], greedy: bool = False, draw: int | None = None
    ) -> list[Episode]:
        """Episodes of all problems in order; with several engines each takes a contiguous share of the problems.

        draw: as in helpers.rollout.roll_out; the answers do not depend on the number of engines.
        """
        return self.finish_rollout(self.start_rollout(problems, greedy, draw))

    def start_rollout(
        self,
        problems: Sequence[Problem],
        greedy: bool = False,
        draw: int | None = None,
        partial: Sequence[Episode] | None = None,
    ) -> PendingRollout:
        """As roll_out, without waiting: the engines sample while this process goes on.

        partial: episodes of the same problems and draw from a rollout that was stopped, all of them in order; those that
        are unfinished go on.
        """
        each = len(partial) // len(problems) if partial else 0
        size = -(-len(problems) // len(self.engines))
        firsts = tuple(range(0, len(problems), size))
        references = []
        for engine, first in zip(self.engines, firsts, strict=False):
            share, mine = list(problems[first : first + size]), None
            if partial:
                mine = [_moved(e, -first) for e in partial[first * each : (first + len(share)) * each]]
            references.append(engine.roll_out.remote(share, greedy, draw, first, mine))
        return PendingRollout(tuple(problems), greedy, draw, firsts, tuple(references))

    def finish_rollout(self, pending: PendingRollout) -> list[Episode]:
        """Wait for the answers; episodes of all problems in order."""
        import ray

        shares = zip(pending.firsts, ray.get(list(pending.references)), strict=True)
        return [_moved(e, first) for first, share in shares for e in share]

    def stop_rollouts(self, pending: Sequence[PendingRollout]) -> None:
        """Make the engines answer now with what they have: unfinished episodes end with "abort".

        All of the engines' requests are stopped, not only these. Raises ClusterError where they go on nevertheless.
        """
        import ray

        clients, waiting = self.clients.open(), [r for p in pending for r in p.references]
        deadline = time.monotonic() + self.clients.timeout
        while waiting:
            # again and again: a request that has not reached the scheduler is not stopped (sglang 0.5.17). SGLang's own
            # loop, /pause_generation with mode abort, sleeps for a second between two tries
            for client in clients:
                client.stop_requests()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.05)
            if waiting and time.monotonic() > deadline:
                raise ClusterError(f"{len(waiting)} rollouts went on for {self.clients.timeout:.0f} s after they were stopped")

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on all ranks; returns the last rank's statistics (the last pipeline stage knows the loss)."""
        return self._all("update", batch)[-1]

    def logprobs(self, batch: Batch):
        """[B, S] log-probability of batch.labels under the present weights, 0 where masked."""
        return self._gathered(self._all("logprobs", batch))

    def reference_logprobs(self, batch: Batch):
        """The same under the checkpoint that training began from, in a profile with a KL term only."""
        return self._gathered(self._all("logprobs", batch, True))

    @staticmethod
    def _gathered(shares: list):
        """[B, S] from what the ranks' `logprobs` returned."""
        import torch

        ordered = sorted((share for share in shares if share is not None), key=lambda share: share[0])
        return torch.cat([torch.from_numpy(array.copy()) for _, array in ordered])

    def sync_weights(self, version: str) -> SyncReport:
        """The trainer's weights into every engine."""
        reports = self._each("sync", [(self.clients, version, own) for own in self._sends])
        return max(reports, key=lambda report: (report.tensors, report.seconds))  # of a rank that sends; the slowest

    def release_memory(self) -> float:
        """Engines give their GPU memory to the trainers until resume_memory; returns the slowest one's seconds.

        Does nothing in a profile without rollout.memory_saver.
        """
        import ray

        return max(ray.get([engine.release_memory.remote() for engine in self.engines]))

    def resume_memory(self) -> float:
        """Engines take their memory again. Their weights are undefined until the next sync_weights."""
        import ray

        return max(ray.get([engine.resume_memory.remote() for engine in self.engines]))

    def save(self, folder: Path | str, data: dict | None = None, wait: bool = True) -> Path:
        """A checkpoint of all ranks, as MegatronTrainer.save; with wait=False it is written while training goes on."""
        return Path(self._all("save", str(folder), data, wait)[0])

    def finish_saves(self) -> None:
        """Wait for a checkpoint that is being written. Raises SaveError where it could not be."""
        self._all("finish_saves")

    def resume(self, folder: Path | str) -> int:
        return self._all("resume", str(folder))[0]

    def export_checkpoint(self, folder: Path | str) -> Path:
        return Path(self._all("export_checkpoint", str(folder))[0])

    def _all(self, method: str, *arguments) -> list:
        import ray

        shared = [ray.put(a) if isinstance(a, Batch) else a for a in arguments]
        return self._each(method, [shared] * len(self.trainers))

    def _each(self, method: str, arguments: Sequence[Sequence]) -> list:
        """Call a method on every trainer rank, each with arguments of its own."""
        import ray

        calls = [getattr(t, method).remote(*given) for t, given in zip(self.trainers, arguments, strict=True)]
        bound = self.settings.cluster.call_timeout
        # the first that fails is raised at once: the others may wait in a collective for it
        waiting, deadline = calls, time.monotonic() + bound
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                raise ClusterError(
                    f"{len(waiting)} of {len(calls)} trainer ranks have not finished {method} within {bound:.0f} s "
                    "(cluster.call_timeout); one may wait for another in a collective. Stop the cluster and resume from "
                    "the newest checkpoint"
                )
            ray.get(ready)
        return ray.get(calls)

    def stop(self) -> None:
        """Stop servers and actors, free the placement group; safe to call twice."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self.group is None:
            return
        try:
            self.finish_saves()
        except Exception as error:  # the ranks may be what has failed
            log.warning("a checkpoint may be unfinished: %s", str(error).splitlines()[-1:])
        if self.spread or self.clients.group:
            try:
                ray.get(self.trainers[0].leave_group.remote(), timeout=60)
            except Exception as error:
                log.warning("the group for weights was not left: %s", str(error).splitlines()[-1:])
        ray.get([e.stop.remote() for e in self.engines], timeout=60)
        for actor in (*self.engines, *self.trainers):
            ray.kill(actor)
        remove_placement_group(self.group)
        self.trainers, self.engines, self.group = [], [], None
