"""What SGLang keeps on the GPU after it was told to release everything, by way of building its KV cache.

    python tests/gpu/footprint.py --out DIR [--profile gpu-20b --layers 4] [--mem-fraction 0.5] [--cycles 20] [--ways ...]

Each way is a server of its own: start, release tag by tag, resume, weights back, and the logprobs of prompts on both sides
of the window compared with those before. stock: SGLang as it is. plain: one pool for all layers, no sliding windows. hook:
helpers/sglang_saver.py. graphs: the hook, and CUDA graphs under the saver too. backup: the hook, and weights kept in host
memory, so that nothing has to be loaded after the resume. The way named by --cycle repeats release and resume.
Writes footprint.csv (one row a stage) and footprint_cycles.csv. GPU memory is that of the whole card by NVML: nothing else
may run on it.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

from helpers.memory import settled_card_use
from helpers.profiles import load_profile
from helpers.results import write_rows


WAYS = {  # name -> changes of the profile, further arguments of the server
    "stock": ({"rollout.kv_saver": "stock"}, ()),
    "plain": ({"rollout.kv_saver": "plain"}, ()),
    "hook": ({"rollout.kv_saver": "hook"}, ()),
    "graphs": ({"rollout.kv_saver": "hook", "rollout.saver_graphs": True}, ()),
    "backup": ({"rollout.kv_saver": "hook"}, ("--enable-weights-cpu-backup",)),
}


def prompts(settings) -> list[list[int]]:
    """Random tokens, shorter than the window, at its edge, and of three windows."""
    import random

    rng, window = random.Random(0), settings.model.sliding_window
    lengths = (20, window - 1, window, window + 1, 3 * window)
    return [[rng.randrange(1, settings.model.vocab_size) for _ in range(n)] for n in lengths]


def logprobs(server, settings) -> list[float]:
    """Of the prompts, and of a greedy decode that crosses the window."""
    scored = [x for row in server.prompt_logprobs(prompts(settings)) for x in row]
    outputs = server.generate([prompts(settings)[0]], 0.0, 1, 2 * settings.model.sliding_window)
    return scored + [entry[0] for entry in outputs[0]["meta_info"]["output_token_logprobs"]]


def gap(a, b) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def one_way(way: str, options, checkpoint: Path, rows: list[dict]) -> None:
    """Adds to rows and writes them after every stage: a run that is cut off keeps what it measured."""
    from helpers.rollout import MEMORY_TAGS, RolloutServer

    changes, arguments = WAYS[way]
    settings = load_options(options, **changes)
    rollout = replace(settings.rollout, server_arguments=settings.rollout.server_arguments + arguments)
    settings = replace(settings, rollout=rollout)
    empty = settled_card_use()

    def note(stage: str, seconds: float = 0.0, difference: float | str = "") -> int:
        held = settled_card_use() - empty
        row = {"way": way, "stage": stage, "gigabytes": held / 1e9, "seconds": seconds, "logprob_gap": difference}
        rows.append(row)
        write_rows(options.out / "footprint.csv", rows)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        return held

    server = RolloutServer(settings, checkpoint).start().wait()
    try:
        note("started", server.start_seconds)
        before = logprobs(server, settings)
        for tag in MEMORY_TAGS:
            note(f"released {tag}", server.release_memory([tag]))
        took = server.resume_memory()
        note("resumed", took)
        if way == "backup":
            note("weights from the host", 0.0, gap(logprobs(server, settings), before))
        took = server.load_weights(checkpoint)
        note("weights loaded", took, gap(logprobs(server, settings), before))
        cycles = []
        for cycle in range(options.cycles if way == options.cycle else 0):
            released = server.release_memory()
            low = settled_card_use() - empty
            resumed = server.resume_memory()
            server.load_weights(checkpoint)
            high = settled_card_use() - empty
            difference = gap(logprobs(server, settings), before)
            cycles.append({
                "cycle": cycle, "released_gigabytes": low / 1e9, "resumed_gigabytes": high / 1e9,
                "release_seconds": released, "resume_seconds": resumed, "logprob_gap": difference,
            })  # fmt: skip
            write_rows(options.out / "footprint_cycles.csv", cycles)
    finally:
        server.stop()


def load_options(options, **changes):
    """The profile with a cache that fills its share of the card, as SGLang has it by default."""
    if options.layers:
        changes["model.num_hidden_layers"] = options.layers
    changes |= {"rollout.memory_saver": True, "rollout.mem_fraction": options.mem_fraction}
    return load_profile(options.profile, **{"rollout.max_total_tokens": None}, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="gpu-20b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mem-fraction", type=float, default=0.5)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--cycle", default="hook", choices=WAYS)
    options = parser.parse_args()
    settings = load_options(options)
    os.environ.update(settings.process_environment("kernel"))
    from helpers.checkpoints import starting_checkpoint
    from helpers.rollout import RolloutError

    checkpoint, rows = starting_checkpoint(settings), []
    options.out.mkdir(parents=True, exist_ok=True)
    for way in options.ways:
        try:
            one_way(way, options, checkpoint, rows)
        except RolloutError as error:  # what a way cannot do is a result too
            print(way, "failed:", str(error)[-1500:], flush=True)
            rows.append({"way": way, "stage": "failed", "gigabytes": "", "seconds": "", "logprob_gap": ""})
            write_rows(options.out / "footprint.csv", rows)


if __name__ == "__main__":
    main()
