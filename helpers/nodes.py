"""Which machine a process is on: its address, the interface that has it, and the cards it may use.

Reads the system and the environment; standard library only.

    python -m helpers.nodes environment --profile cpu       # what `ray start` needs, as shell lines
    python -m helpers.nodes wait --dashboard URL --nodes 2  # until so many nodes of a cluster are there
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.messages import OneLineParser, one_line
from helpers.profiles import CLUSTER_SWITCH, PROFILES, Profile, load_profile

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFCONF, _IFREQ = 0x8912, 40  # linux/sockios.h; bytes of a struct ifreq on 64 bits


class NodeError(RuntimeError):
    """This machine has no such address, or its cards cannot be told apart."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or a name.

    >>> [is_loopback(host) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost", "10.0.0.7", "node-7")]
    [True, True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this machine; an interface may have several. Source: netdevice(7)."""
    room = array.array("B", bytes(_IFREQ * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))[0]
    found = []
    for start in range(0, size, _IFREQ):
        name = bytes(room[start : start + 16]).split(b"\0")[0].decode()
        # "eth0:1" is a second address of eth0
        found.append((name.split(":")[0], socket.inet_ntoa(bytes(room[start + 20 : start + 24]))))
    return found


def interface_of(address: str) -> str:
    """The interface that has this IPv4 address; all of 127.0.0.0/8 is the loopback's.

    Raises NodeError where none has it.
    """
    here = addresses()
    for name, other in here:
        if other == address or (is_loopback(address) and is_loopback(other)):
            return name
    listed = ", ".join(f"{name} {other}" for name, other in here)
    raise NodeError(
        f"no interface of this machine has the address {address} (it has {listed}); give `ray start` one of these with "
        "--node-ip-address"
    )


def listening_socket(address: str) -> socket.socket:
    """A socket that listens on a free port of this address only."""
    listening = socket.create_server((address, 0), backlog=512)
    listening.set_inheritable(False)
    return listening


def choose_interface(address: str) -> str:
    """Tell gloo and NCCL to meet other nodes at this address; returns the interface. Before a group is made.

    What the node's own environment says stays: a cluster with a network for this purpose names it there.
    """
    found = interface_of(address)
    for name in INTERFACES:
        os.environ.setdefault(name, found)
    return found


# --- cards --------------------------------------------------------------------------------------------------
def visible_cards(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """UUIDs of the GPUs that a process with this environment sees, in its order; () where there is none.

    By nvidia-smi and CUDA_VISIBLE_DEVICES, so that nobody makes a CUDA context to find out. Raises NodeError
    for a device that the machine does not have.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    pairs = re.findall(
        r"^(\d+), *(GPU-)?([0-9a-fA-F-]+)$", done.stdout if done.returncode == 0 else "", re.MULTILINE
    )
    return seen_cards([uuid for _, _, uuid in pairs], environment.get("CUDA_VISIBLE_DEVICES"))


def seen_cards(cards: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """Those of a machine's cards that CUDA_VISIBLE_DEVICES names, by number or UUID.

    cards: UUIDs in the order of nvidia-smi.

    >>> [seen_cards(["aa", "bb"], visible) for visible in (None, "1", "GPU-bb,0", "")]
    [('aa', 'bb'), ('bb',), ('bb', 'aa'), ()]
    """
    if visible is None:
        return tuple(cards)
    found = []
    for word in filter(None, (part.strip().removeprefix("GPU-") for part in visible.split(","))):
        if word.isdigit() and int(word) < len(cards):
            found.append(cards[int(word)])
        elif word in cards:
            found.append(word)
        else:
            raise NodeError(
                f"CUDA_VISIBLE_DEVICES={visible} names {word}, and this machine has the GPUs {list(cards)}"
            )
    return tuple(found)


# --- what a node's `ray start` needs ------------------------------------------------------------------------
def node_environment(settings: Profile) -> dict[str, str]:
    """Environment of `ray start` on each node: the kernel's, less what belongs to a run on one machine.

    Actors get theirs from the driver; this is what Ray's own processes and the drivers of submitted jobs
    inherit.
    """
    told = settings.process_environment("kernel") | {CLUSTER_SWITCH: "1"}
    return {name: value for name, value in told.items() if name not in INTERFACES}


def alive_nodes(dashboard: str, timeout: float = 10.0) -> int:
    """How many nodes of a cluster live, by its dashboard.

    Raises OSError where it does not answer, NodeError where it refuses.
    Source: Ray's state API, /api/v0/nodes.
    """
    query = urllib.parse.urlencode(
        {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
    )
    request = urllib.request.Request(f"{dashboard.rstrip('/')}/api/v0/nodes?{query}")
    request.add_header("Authorization", f"Bearer {ray_token()}")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # no proxy between a cluster's own machines
    try:
        with opener.open(request, timeout=timeout) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise NodeError(
                f"the Ray cluster at {dashboard} has another token ({error.code}): give RAY_AUTH_TOKEN the cluster's"
            ) from error
        raise
    return len(((answer.get("data") or {}).get("result") or {}).get("result") or [])


def ray_token() -> str:
    """The token of RAY_AUTH_TOKEN, or of the file that RAY_AUTH_TOKEN_PATH names; "" without one."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    return os.environ.get("RAY_AUTH_TOKEN", "") or (Path(path).read_text().strip() if path else "")


def wait_for_nodes(dashboard: str, count: int, seconds: float) -> None:
    """Until `count` nodes of the cluster live.

    Raises NodeError when they do not within `seconds`, or the token is wrong.
    """
    deadline, found = time.monotonic() + seconds, "no answer"
    while time.monotonic() < deadline:
        try:
            found = f"{alive_nodes(dashboard)} nodes"
            if int(found.split()[0]) >= count:
                return
        except (OSError, ValueError) as error:
            found = f"no answer ({error})"
        time.sleep(1)
    raise NodeError(
        f"{count} nodes were to join the Ray cluster at {dashboard} within {seconds:.0f} s; the last look found {found}. Read the "
        "output of the nodes that are missing (environment/clusters/node.sh)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(prog="python -m helpers.nodes", description="Nodes of a Ray cluster.")
    tasks = parser.add_subparsers(dest="task", required=True)
    told = tasks.add_parser("environment", help="what `ray start` needs on every node, as shell lines")
    told.add_argument("--profile", default="cpu", choices=PROFILES)
    wait = tasks.add_parser("wait", help="wait until so many nodes of a cluster are there")
    wait.add_argument("--dashboard", required=True, metavar="URL", help="such as http://127.0.0.1:8265")
    wait.add_argument("--nodes", type=int, required=True)
    wait.add_argument("--seconds", type=float, default=300.0, help="how long (default %(default)g)")
    args = parser.parse_args(argv)
    try:
        if args.task == "wait":
            wait_for_nodes(args.dashboard, args.nodes, args.seconds)
            return 0
        for name, value in sorted(node_environment(load_profile(args.profile)).items()):
            print(f"export {name}={shlex.quote(value)}")
        return 0
    except (NodeError, OSError, ValueError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
