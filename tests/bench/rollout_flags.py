"""Which SGLang settings make a CPU rollout fast: 32 prompts x 8 short answers, variants in turn (A/B/A/B).

    python tests/bench/rollout_flags.py [--rounds 3]

Writes recorded/rollout_flags.csv: median seconds of six rollouts a round. "n=8" sends each prompt once with SGLang's own n,
"repeat" sends it eight times. All servers sleep when idle: three that poll would share two cores.
About five minutes on two cores. The profile behind the choice (py-spy, stock): 37% of the scheduler's busy time checks the
prefix tree's invariants, 15% inserts into it and matches against it.
"""

import argparse
import csv
import dataclasses
import os
import statistics
import time
from pathlib import Path

from helpers.profiles import load_profile
from helpers.results import git_commit, hardware
from helpers.rollout import RolloutServer, flush_cache
from helpers.harmony import encode
from helpers.tasks import load_task

SLEEP = ("--sleep-on-idle",)
VARIANTS = {
    "sleep": SLEEP,
    "no prefix tree": (*SLEEP, "--disable-radix-cache"),
    "no prefix tree, no overlap": (*SLEEP, "--disable-radix-cache", "--disable-overlap-schedule"),
}


def seconds(server: RolloutServer, settings, repeat: bool, step: int) -> float:
    """One rollout as roll_out does it, with either way to ask for eight answers."""
    prompts = [
        encode(server.tokenizer, p.prompt) for p in load_task("median").sample(settings.batch.prompts, step)
    ]
    n, new = settings.batch.group_size, settings.sampling.max_new_tokens
    flush_cache(server.post)
    start = time.perf_counter()
    if repeat:
        outputs = server.generate(prompts, 1.0, n, new)
    else:
        sampling = dict(temperature=1.0, n=n, max_new_tokens=new, stop_token_ids=[0, 5])
        outputs = server.post(
            "/generate", input_ids=[list(p) for p in prompts], sampling_params=sampling, return_logprob=True
        )
    assert len(outputs) == n * len(prompts)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    settings = load_profile("cpu")
    os.environ.update(settings.process_environment("kernel"))
    servers, rows = {}, []
    try:
        for name, arguments in VARIANTS.items():
            rollout = dataclasses.replace(settings.rollout, server_arguments=arguments)
            variant = dataclasses.replace(settings, rollout=rollout)
            servers[name] = RolloutServer(variant, settings.checkpoint("grpo")).start().wait()
        for number in range(rounds):
            for name, server in servers.items():
                for repeat in (False, True):
                    times = [seconds(server, settings, repeat, 6 * number + i) for i in range(6)]
                    row = {"round": number, "server": name, "ask": "repeat" if repeat else "n=8"}
                    rows.append(row | {"median_seconds": round(statistics.median(times), 3)})
                    print(rows[-1], flush=True)
    finally:
        for server in servers.values():
            server.stop()
    out = Path(__file__).with_name("recorded") / "rollout_flags.csv"
    with out.open("w", newline="") as file:
        file.write(f"# {time.strftime('%Y-%m-%d')} commit {git_commit()} {hardware()}\n")
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
