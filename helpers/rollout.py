"""Rollout: an SGLang server in a session of its own, and groups of sampled answers from it.

A server rather than an in-process Engine: in a notebook the Engine meets a running event loop, and a kernel interrupt
kills its scheduler (sglang 4478, 3770).
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import requests

from helpers.anatomy import tensor_shapes
from helpers.checkpoints import require_checkpoint, rollout_checkpoint
from helpers.harmony import encode, load_tokenizer, stop_token_ids
from helpers.nodes import INTERFACES, LOOPBACK, interface_of, is_loopback
from helpers.processes import alive
from helpers.profiles import SHARED_VARIABLE, Profile
from helpers.records import Episode
from helpers.routing_replay import RoutingShape, decode_experts
from helpers.tasks import Problem
from helpers.tensor_files import read_config

log = logging.getLogger(__name__)
LAUNCHER = Path(__file__).with_name("launcher.py")
RETURN_EXPERTS = "--enable-return-routed-experts"
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")  # what a server can release


class RolloutError(RuntimeError):
    """The server did not start, died, or refused a request; the message says which and where its log is."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, whose it is, the shape of its model, and whether it can return experts."""

    url: str
    pid: int
    log: str
    shape: str
    returns_experts: bool = False


@dataclass(frozen=True)
class ServedModel:
    """The model behind a server, as far as a weight update must know it.

    quantisation: "" for a plain one, else the method ("mxfp4"). shapes: Hugging Face name -> shape of what it can take.
    """

    folder: str
    quantisation: str
    shapes: Mapping[str, tuple[int, ...]]


def model_shape(folder: Path | str) -> str:
    """What decides whether a running server can take a checkpoint's weights: the config without names, versions and dtype.

    A server computes in the dtype that it was started with, whatever a checkpoint stores.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    aside = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
    return json.dumps({k: v for k, v in sorted(config.items()) if k not in aside})


def free_port() -> int:
    """A free TCP port below the range from which the kernel hands out ports by itself.

    A server binds its port only after half a minute of imports; until then any outgoing connection of this machine
    could be given a port from that range (seen: two engines and Ray starting at once).
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        port = random.SystemRandom().randrange(min(20_000, first - 1000), first)
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) != 0:
                return port
    raise RolloutError("no free TCP port found below the ephemeral range; end what listens on this machine")


def server_command(settings: Profile, checkpoint: Path, port: int, host: str = LOOPBACK) -> list[str]:
    """SGLang's command line for this profile."""
    r, m = settings.rollout, settings.model
    command = [
        sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(checkpoint),
        "--host", host, "--port", str(port), "--nccl-port", str(free_port()), "--dtype", m.dtype,
        "--weight-version", "initial",
        "--random-seed", str(settings.seed), "--log-level", "warning", "--skip-server-warmup", "--skip-tokenizer-init",
        "--max-running-requests", str(r.max_running_requests),
    ]  # fmt: skip
    if r.max_total_tokens:
        command += ["--max-total-tokens", str(r.max_total_tokens)]
    if r.mem_fraction:
        command += ["--mem-fraction-static", str(r.mem_fraction)]
    if r.memory_saver:
        command.append("--enable-memory-saver")
        if r.kv_saver == "plain":
            command.append("--disable-hybrid-swa-memory")
    if settings.device == "cpu":
        # "triton" is the name under which SGLang runs gpt-oss experts (bias, clamp, alpha) in plain torch without AMX
        command += ["--device", "cpu", "--moe-runner-backend", "triton"]
    elif settings.sampling.seeded:
        command.append("--enable-deterministic-inference")
    if settings.algorithm.routing_replay:
        command.append(RETURN_EXPERTS)
        if settings.device == "cuda":
            # its own choice for gpt-oss on Hopper, triton_kernel, routes in a kernel of its own and returns zeros
            # (sglang 0.5.17, layers/moe/topk.py: forward_cuda captures in the standard format only)
            command += ["--moe-runner-backend", "triton"]
    return command + list(r.server_arguments)


def returns_experts(settings: Profile) -> bool:
    """Whether a server that this profile starts can say which experts each token took."""
    return settings.algorithm.routing_replay or RETURN_EXPERTS in settings.rollout.server_arguments


class SGLangClient:
    """HTTP requests to one SGLang server. timeout: seconds a request may take. key: of a server that asks for one."""

    def __init__(self, url: str, timeout: float, log: Path | str = "", key: str = ""):
        self.url, self.timeout, self.log = url, timeout, Path(log)
        self._served: ServedModel | None = None
        self.http = requests.Session()
        self.http.trust_env = False  # a proxy from the environment must not see loopback requests
        if key:
            self.http.headers["Authorization"] = f"Bearer {key}"

    def healthy(self) -> bool:
        try:
            return self.http.get(self.url + "/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def post(self, path: str, **payload):
        """POST to the server; returns its JSON. Raises RolloutError with the server's own words."""
        body = {"data": orjson.dumps(payload), "headers": {"content-type": "application/json"}}
        return self._ask("POST", path, **body)

    def served_model(self) -> ServedModel:
        """What the server serves; asked once a client. Raises RolloutError where its config.json is not to be seen here.

        SGLang takes an update for a tensor that it does not have without a word, so whoever sends one has to know.
        """
        if self._served is None:
            info, settings = self._ask("GET", "/model_info"), self._ask("GET", "/server_info")
            # after load_weights the first is the folder loaded last, which may be gone; the second is from the start
            folders = [Path(info[key]) for key in ("model_path", "tokenizer_path")]
            folder = next((f for f in folders if (f / "config.json").is_file()), None)
            if folder is None:
                raise RolloutError(
                    f"the server at {self.url} serves {info['model_path']}, whose config.json cannot be read here, so nothing "
                    "says which tensors it takes; put the checkpoint where trainer and servers both see it"
                )
            config = json.loads((folder / "config.json").read_text())
            method = settings.get("quantization") or (config.get("quantization_config") or {}).get(
                "quant_method"
            )
            self._served = ServedModel(str(folder), method or "", tensor_shapes(config))
        return self._served

    def stop_requests(self) -> None:
        """Stop all that the server is sampling: each request answers at once with what it has ("abort").

        A request that is still on its way to the scheduler is missed, so ask again until all have answered.
        """
        self.post("/abort_request", abort_all=True)

    def _ask(self, method: str, path: str, **request):
        try:
            reply = self.http.request(method, self.url + path, timeout=self.timeout, **request)
        except requests.RequestException as error:
            raise RolloutError(
                f"SGLang does not answer {path}: {type(error).__name__}.{self.log_tail()}"
            ) from error
        if reply.status_code != 200:
            raise RolloutError(f"SGLang refused {path} ({reply.status_code}): {reply.text[:300]}")
        is_json = "json" in reply.headers.get("content-type", "")
        # orjson: a rollout's answer is megabytes of logprobs, which json reads in twice the time (60 ms for 65,536 tokens)
        return orjson.loads(reply.content) if is_json else {"message": reply.text}

    def log_tail(self, lines: int = 12) -> str:
        """The end of the server's log, for error messages; empty where this client does not know it."""
        if not self.log.is_file():
            return ""
        text = self.log.read_text(errors="replace").splitlines()
        return f" Last lines of {self.log}:\n" + "\n".join(text[-lines:])


def flush_cache(post, seconds: float = 30.0) -> None:
    """Drop the keys and values that old weights computed; waits until no request runs. post: SGLangClient.post.

    A request of its own because an update's flush_cache=True asserts that nothing runs, and ends the server when something
    does: a request that was just answered still counts as running for a moment (overlap scheduler). Asked again and again,
    since the server's own waiting (?timeout=) sleeps up to a second. Raises RolloutError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            post("/flush_cache")
            return
        except RolloutError as error:
            # no answer at all, or busy for too long
            if error.__cause__ is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class RolloutServer(SGLangClient):
    """An SGLang server. `with RolloutServer(settings, checkpoint) as server:` or start() ... stop() over several cells.

    start() launches and wait() blocks until it answers, so that imports can overlap with other work in between.
    The checkpoint is checked first (CheckpointError), and a plain copy is served where it is in MXFP4, since SGLang takes no
    expert updates into that (helpers.checkpoints.rollout_checkpoint).
    host: the address to listen at. Where other machines reach it, key is required: a weight update is code for
    whoever may send one (SGLang unpickles it). The key goes to the server in a file of this user's alone, never on
    the command line.
    """

    def __init__(
        self,
        settings: Profile,
        checkpoint: Path | str,
        log_file: Path | str | None = None,
        host: str = LOOPBACK,
        key: str = "",
    ):
        if not is_loopback(host) and not key:
            raise RolloutError(
                f"a server that listens at {host}, where other machines reach it, needs a key: anyone who may "
                "update its weights can run code there; give RolloutServer(..., key=secrets.token_hex(32))"
            )
        self.settings, self.host, self._key = settings, host, key
        self.checkpoint = rollout_checkpoint(settings, require_checkpoint(Path(checkpoint)))
        log_file = log_file or settings.runs / "logs" / f"sglang-{os.getpid()}-{time.time_ns() % 10**9}.log"
        super().__init__("", settings.rollout.request_timeout, log_file, key)
        self.tokenizer = load_tokenizer(self.checkpoint)
        self.shape = model_shape(self.checkpoint)
        self.process: subprocess.Popen | None = None
        self._port_retries = 0  # a port that was free can be taken before the server binds it
        self.pid = 0  # of the launcher; all of the server's processes are below it

    # --- life ---------------------------------------------------------------------------------------------------------
    def __enter__(self) -> RolloutServer:
        return self.start().wait()

    def __exit__(self, *exc) -> None:
        self.stop()

    def start(self) -> RolloutServer:
        """Launch the server; returns at once."""
        port = free_port()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.url = f"http://{self.host}:{port}"
        environment = {**os.environ, **self.settings.process_environment("server")}
        # SGLang's imports take twice as long without .pyc files
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if not is_loopback(self.host):  # it may have to meet the trainer in a group
            own = interface_of(self.host)
            environment |= {name: os.environ.get(name, own) for name in INTERFACES}
        command, removed = server_command(self.settings, self.checkpoint, port, self.host), []
        if self._key:
            secret = _secret_file(self._key)
            command, removed = [*command, "--config", str(secret)], ["--remove", str(secret.parent)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-S", str(LAUNCHER), *removed, *command],
                stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip
        self._started, self.pid = time.monotonic(), self.process.pid
        return self

    def wait(self) -> RolloutServer:
        """Block until the server answers. Raises RolloutError if it dies or takes longer than rollout.start_timeout."""
        deadline = self._started + self.settings.rollout.start_timeout
        while not self.healthy():
            if not alive([self.pid], patience=0):
                if self.process and "address already in use" in self.log_tail() and self._port_retries < 2:
                    self._port_retries += 1
                    self.stop()
                    self.start()
                    continue
                code = self.process.poll() if self.process else "unknown"
                raise RolloutError(f"SGLang ended with code {code} before it answered.{self.log_tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise RolloutError(
                    f"SGLang did not answer within {self.settings.rollout.start_timeout:.0f} s; on a busy machine raise "
                    f"rollout.start_timeout.{self.log_tail()}"
                )
            time.sleep(0.25)
        # else each flush of the cache walks all of the start's objects: 0.4 s on a CPU
        self.post("/freeze_gc")
        self.start_seconds = time.monotonic() - self._started
        return self

    def stop(self) -> None:
        """End the server and all its processes; safe to call twice."""
        if self.process is not None:
            pid = self.process.pid
            self.process.stdin.close()
            try:
                self.process.wait(25)
            except subprocess.TimeoutExpired:
                os.killpg(pid, signal.SIGKILL)
                self.process.wait(10)
            self.process = None

    # --- requests -----------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        n: int = 1,
        max_new_tokens: int | Sequence[int] = 24,
        seeds: Sequence[int] = (),
        **extra,
    ):
        """SGLang's raw answers, n for each prompt in order, with one logprob a token.

        max_new_tokens: of all answers, or one an answer. seeds: one an answer; without them the server draws as it goes.

        A prompt is sent n times rather than once with SGLang's own n: that would prefill each prompt once more by itself,
        to fill a prefix cache which a CPU profile does without.
        """
        sampling = dict(temperature=temperature, stop_token_ids=stop_token_ids(self.tokenizer))
        ids = [list(p) for p in prompts for _ in range(n)]
        limits = [max_new_tokens] * len(ids) if isinstance(max_new_tokens, int) else max_new_tokens
        each = [sampling | {"max_new_tokens": limit} for limit in limits]
        for one, seed in zip(each, seeds, strict=False):
            one["sampling_seed"] = seed
        outputs = self.post("/generate", input_ids=ids, sampling_params=each, return_logprob=True, **extra)
        return outputs if isinstance(outputs, list) else [outputs]

    def prompt_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token[t] | before) for t >= 1 of given sequences: the server as a scorer.

        Greedy, since sampling from a NaN would end the server; logprobs of the input are those of temperature 1 all the same.
        """
        outputs = self.generate(tokens, temperature=0.0, max_new_tokens=1, logprob_start_len=0)
        return [[entry[0] for entry in o["meta_info"]["input_token_logprobs"][1:]] for o in outputs]

    def load_weights(self, checkpoint: Path | str, version: str = "initial") -> float:
        """Take the weights of a checkpoint folder of the same shape; returns seconds.

        Raises CheckpointError for a folder that is not whole, RolloutError for another shape or a refusal.
        """
        folder = rollout_checkpoint(self.settings, require_checkpoint(Path(checkpoint)))
        if model_shape(folder) != self.shape:
            raise RolloutError(
                f"{folder} is a model of another shape than the server's; start a server of its own for it"
            )
        start = time.perf_counter()
        done = self.post(
            "/update_weights_from_disk", model_path=str(folder), weight_version=version, flush_cache=False
        )
        if not done.get("success"):
            raise RolloutError(f"SGLang did not take the weights of {folder}: {done.get('message')}")
        flush_cache(self.post)
        return time.perf_counter() - start

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> float:
        """Give GPU memory back, between steps only; returns seconds. The server answers no request until it has resumed.

        Does nothing in a profile without rollout.memory_saver. tags: of MEMORY_TAGS. Raises RolloutError where the server
        refuses.
        """
        if not self.settings.rollout.memory_saver:
            return 0.0
        start = time.perf_counter()
        flush_cache(self.post)
        self.post("/release_memory_occupation", tags=list(tags))
        return time.perf_counter() - start

    def resume_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> float:
        """Take the memory again; returns seconds. Does nothing in a profile without rollout.memory_saver.

        The weights come back as they were only with --enable-weights-cpu-backup; else their content is undefined until
        the next sync_weights or load_weights (slime 579, sglang 19442).
        """
        if not self.settings.rollout.memory_saver:
            return 0.0
        start = time.perf_counter()
        self.post("/resume_memory_occupation", tags=list(tags))
        return time.perf_counter() - start

    # --- sharing ------------------------------------------------------------------------------------------------------
    def address(self) -> ServerAddress:
        return ServerAddress(self.url, self.pid, str(self.log), self.shape, returns_experts(self.settings))

    @classmethod
    def attach(cls, settings: Profile, checkpoint: Path | str, address: ServerAddress) -> RolloutServer:
        """A handle on a server that somebody else started and will stop."""
        server = cls(settings, checkpoint, address.log)
        server.url, server.pid, server._started = address.url, address.pid, time.monotonic()
        server.shape = address.shape
        return server


def _secret_file(key: str) -> Path:
    """SGLang's --config with the key, in a folder that only this user may enter. The launcher removes it."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-key-"))
    path = folder / "server.yaml"
    path.write_text(f"api-key: {key}\n")
    return path


def open_server(settings: Profile, checkpoint: Path | str) -> RolloutServer:
    """A server that serves `checkpoint`: the series' shared one if it can (model shape, routed experts), else a new one.

    Logs which; in both cases stop() is right afterwards (it leaves a shared server alone). Call wait() before use.
    """
    shared = os.environ.get(SHARED_VARIABLE)
    if shared and Path(shared).is_file():
        address = ServerAddress(**json.loads(Path(shared).read_text()))
        folder = rollout_checkpoint(settings, require_checkpoint(Path(checkpoint)))
        able = address.returns_experts or not settings.algorithm.routing_replay
        if alive([address.pid], patience=0) and address.shape == model_shape(folder) and able:
            server = RolloutServer.attach(settings, checkpoint, address).wait()
            server.load_weights(checkpoint)
            log.info("attached to the running SGLang server at %s", address.url)
            return server
    log.info("starting an SGLang server for %s", checkpoint)
    return RolloutServer(settings, checkpoint).start()


@contextmanager
def shared_server(settings: Profile, checkpoint: Path | str) -> Iterator[dict[str, str]]:
    """Start a server for a series of notebooks; yields the environment that lets open_server find it.

    It is not waited for: whoever attaches first waits, while the notebooks that need no server run already.
    """
    server = RolloutServer(settings, checkpoint, settings.runs / "logs" / "sglang-shared.log").start()
    path = settings.runs / "shared_server.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(server.address())))
    os.replace(temporary, path)
    try:
        yield {SHARED_VARIABLE: str(path)}
    finally:
        path.unlink(missing_ok=True)
        server.stop()


def answer_seeds(seed: int, draw: int, first: int, count: int) -> list[int]:
    """Seeds of answers first ... first + count of a draw: the same however the draw is split over servers.

    >>> answer_seeds(0, 5, 0, 4)[2:] == answer_seeds(0, 5, 2, 2), answer_seeds(0, 6, 0, 2) == answer_seeds(0, 5, 0, 2)
    (True, False)
    """
    rng = random.Random(f"answers-{seed}-{draw}")
    return [rng.getrandbits(62) for _ in range(first + count)][first:]


def roll_out(
    server: RolloutServer,
    problems: Sequence[Problem],
    settings: Profile,
    greedy: bool = False,
    draw: int | None = None,
    first: int = 0,
    partial: Sequence[Episode] | None = None,
) -> list[Episode]:
    """group_size sampled answers for each problem (one greedy answer each if `greedy`), as episodes in order.

    draw: number of this draw of questions in the run (helpers.dynamic_sampling.draw_step). With it, and in a profile whose
    sampling is seeded, the same weights give the same answers again. first: place of problems[0] in the draw.
    partial: the episodes that an earlier call for the same draw returned when its requests were stopped
    (SGLangClient.stop_requests): those that are unfinished go on from their last token, with the weights of now.

    With algorithm.routing_replay each holds the experts that its tokens took. Raises RolloutError where the server
    returns none, ValueError where no router can have made such a choice.
    """
    prompts = [encode(server.tokenizer, p.prompt) for p in problems]
    n = 1 if greedy else settings.batch.group_size
    temperature = 0.0 if greedy else settings.sampling.temperature
    replay = settings.algorithm.routing_replay and not greedy  # greedy answers are scored, never trained on
    extra = {"return_routed_experts": True} if replay else {}
    seeds = ()
    if draw is not None and settings.sampling.seeded and not greedy:
        seeds = answer_seeds(settings.seed, draw, first * n, len(prompts) * n)
    shape = RoutingShape.of(read_config(server.checkpoint)) if replay else None
    if partial is None:
        partial = [Episode(prompt, (), (), "abort", group) for group, prompt in enumerate(prompts) for _ in range(n)]
    episodes, left = list(partial), [i for i, e in enumerate(partial) if e.unfinished]
    if not left:
        return episodes
    outputs = server.generate(
        [partial[i].prompt_ids + partial[i].completion_ids for i in left], temperature, 1,
        [settings.sampling.max_new_tokens - len(partial[i].completion_ids) for i in left],
        [seeds[i] for i in left] if seeds else (), **extra,
    )  # fmt: skip
    if len(outputs) != len(left):
        raise RolloutError(f"asked SGLang for {len(left)} answers, got {len(outputs)}")
    for i, output in zip(left, outputs, strict=True):
        episodes[i] = _ended(_extended(partial[i], output, shape), settings, stop_token_ids(server.tokenizer))
    return episodes


def _ended(episode: Episode, settings: Profile, stops: Sequence[int]) -> Episode:
    """An answer that was stopped with its very last token is whole, though SGLang calls it aborted."""
    if episode.unfinished and len(episode.completion_ids) >= settings.sampling.max_new_tokens:
        return replace(episode, finish_reason="length")
    if episode.unfinished and episode.completion_ids[-1:] and episode.completion_ids[-1] in stops:
        return replace(episode, finish_reason="stop")
    return episode


def _extended(partial: Episode, output: dict, routing: RoutingShape | None) -> Episode:
    """The episode with what the server added to it. routing: the experts are read, for a model of this shape.

    A token keeps the logprob and the experts that it had when it was sampled, under the weights of then.
    """
    info, ids = output["meta_info"], tuple(output["output_ids"])
    logprobs = tuple(entry[0] for entry in info.get("output_token_logprobs") or ())  # none where none was sampled
    experts = partial.routed_experts
    if routing and ids:
        rows = _experts(info, len(partial.prompt_ids) + len(partial.completion_ids) + len(ids), routing)
        experts = rows if experts is None else np.concatenate([experts, rows[len(experts) :]])
    return Episode(
        partial.prompt_ids,
        partial.completion_ids + ids,
        partial.logprobs + logprobs,
        info["finish_reason"]["type"],
        partial.group,
        partial.weight_versions + (str(info.get("weight_version", "")),) * len(ids),
        experts,
    )


def _experts(info: dict, tokens: int, shape: RoutingShape):
    """int16 [tokens - 1, layers, experts a token] from an answer's meta_info."""
    if "routed_experts" not in info:
        raise RolloutError(
            "SGLang returned no routed experts: this server was started without them; start it with "
            f"algorithm.routing_replay on ({RETURN_EXPERTS})"
        )
    return decode_experts(info["routed_experts"], tokens, shape)
