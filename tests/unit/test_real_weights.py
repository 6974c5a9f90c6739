"""The command for real weights, without engines: checksums, verdicts, exit codes, and a result that can be shared."""

import hashlib
import http.server
import json
import math
import os
import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import real_weights
from helpers.anatomy import GPT_OSS_20B
from helpers.doctor import BadUsage, Case
from helpers.gsm8k import Graded
from helpers.preflight import gpu_names
from helpers.profiles import PROJECT_ROOT, RUNS_VARIABLE
from helpers.real_weights import (
    FAILED, OK, REPOSITORY, SKIPPED, STEPS, Entry, Failed, Report, Skipped, Sum, SyncEvidence, compare_sums,
    completions_scored, file_sums, group_advantages_of, hub_sums, judge_answers, judge_gap, judge_sums, judge_sync, main,
    read_sums, redact, release_differences, secrets_of, sink_gradients,
)  # fmt: skip
from helpers.records import Episode
from helpers.tensor_files import check_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- checksums ----------------------------------------------------------------------------------------------
def test_sums_are_sha256sums_and_gits(tmp_path):
    file = tmp_path / "x.json"
    file.write_bytes(b"{}\n" * 1000)
    sums = file_sums(file, chunk=7)
    printed = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout
    assert sums.sha256 == printed.split()[0] and sums.bytes == 3000
    if shutil.which("git"):
        blob = subprocess.run(["git", "hash-object", file], capture_output=True, text=True, check=True).stdout
        assert sums.git == blob.strip()


A, B = "a" * 64, "B" * 64


def test_the_forms_of_sha256sum_are_read(tmp_path):
    (tmp_path / "s").write_text(
        f"{A}  config.json\n{B} *./model.safetensors\n\n{A}  original/config.json\n{A}  config.json\n"
    )
    assert read_sums(tmp_path / "s") == {
        "config.json": Sum("sha256", A), "model.safetensors": Sum("sha256", B.lower()),
        "original/config.json": Sum("sha256", A),
    }  # fmt: skip


BAD_SUMS = {
    "not hex": ("xyz  config.json", "line 1 is not"),
    "md5": (f"{A[:32]}  config.json", "line 1 is not"),
    "no name": (f"{A}  ", "line 1 is not"),
    "two sums": (f"{A}  x\n{B}  x", "two sums for x"),
    "empty": ("\n", "holds no sum"),
}


@pytest.mark.parametrize("case", BAD_SUMS)
def test_a_bad_sum_file_is_named(tmp_path, case):
    text, words = BAD_SUMS[case]
    (tmp_path / "s").write_text(text)
    with pytest.raises(BadUsage, match=words):
        read_sums(tmp_path / "s")


def test_a_sum_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadUsage, match="absent cannot be read"):
        read_sums(tmp_path / "absent")


@pytest.fixture
def files(tmp_path):
    for name in ("config.json", "model-1.safetensors", "tokenizer.json", "extra.json"):
        (tmp_path / name).write_text(name)
    return {f.name: file_sums(f) for f in tmp_path.iterdir()}


def record_of(files, **changes):
    record = {name: Sum("sha256", sums.sha256) for name, sums in files.items()}
    record["config.json"] = Sum("git", files["config.json"].git)  # the hub's small files have no SHA-256
    return {k: v for k, v in (record | changes).items() if v is not None}


def test_equal_sums_are_said_to_be_equal(files):
    verdicts = compare_sums(files, record_of(files, **{"original/model.safetensors": Sum("sha256", A)}))
    assert (
        set(verdicts.values()) == {"equal"} and len(verdicts) == 4
    )  # a copy for other engines is not needed
    assert judge_sums(verdicts, "S") == "4 files are those of S"


JUDGED = {
    "one bit": ({"model-1.safetensors": Sum("sha256", A)}, Failed, "model-1.safetensors is different"),
    "small file": ({"config.json": Sum("git", "0" * 40)}, Failed, "config.json is different"),
    "missing shard": ({"model-2.safetensors": Sum("sha256", A)}, Failed, "model-2.safetensors is missing"),
    "extra shard": (
        {"model-1.safetensors": None},
        Skipped,
        "computed, not compared: S has no sum of model-1",
    ),
}


@pytest.mark.parametrize("case", JUDGED)
def test_what_differs_is_named(files, case):
    change, kind, words = JUDGED[case]
    with pytest.raises(kind, match=words):
        judge_sums(compare_sums(files, record_of(files, **change)), "S")


def test_files_that_do_not_matter_may_lack_a_sum_or_be_absent(files):
    change = {"extra.json": None, "README.md": Sum("git", "0" * 40)}
    assert judge_sums(compare_sums(files, record_of(files, **change)), "S").endswith("no sum of extra.json")


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub's answer about a repository, in the form of its API."""

    def do_GET(self):
        large = {
            "rfilename": "m.safetensors",
            "size": 9,
            "blobId": "1" * 40,
            "lfs": {"sha256": A, "size": 9, "pointerSize": 1},
        }
        small = {"rfilename": "config.json", "size": 2, "blobId": "2" * 40}
        known = self.path == "/api/models/a/b/revision/r1?blobs=true"
        body = json.dumps({"id": "a/b", "siblings": [large, small]} if known else {"error": "no"}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_hubs_own_record_is_read(hub):
    assert hub_sums("a/b", "r1", hub) == {
        "m.safetensors": Sum("sha256", A), "config.json": Sum("git", "2" * 40)
    }  # fmt: skip


def test_a_hub_without_the_record_is_one_line(hub):
    with pytest.raises(ConnectionError, match=r"the hub does not give a/c \(\w+\)$"):
        hub_sums("a/c", "r1", hub)
    with pytest.raises(ConnectionError, match="the hub does not give a/b"):
        hub_sums("a/b", "r1", "http://127.0.0.1:9")


# ---- verdicts -----------------------------------------------------------------------------------------------
def test_the_releases_config_is_told_from_others():
    assert release_differences(dict(GPT_OSS_20B), GPT_OSS_20B) == []
    kinds = ["sliding_attention", "full_attention"] * 12
    assert release_differences({**GPT_OSS_20B, "layer_types": kinds}, GPT_OSS_20B) == []
    assert release_differences({**GPT_OSS_20B, "layer_types": kinds[::-1]}, GPT_OSS_20B) == ["layer_types"]
    other = release_differences({**GPT_OSS_20B, "num_local_experts": 16}, GPT_OSS_20B)
    assert other == ["num_local_experts 16 instead of 32"]


def test_answers_that_never_arrive_or_are_all_wrong_are_a_fault():
    with pytest.raises(
        Failed, match="no answer reached the final channel, 50% were cut off: raise --max-new-tokens"
    ):
        judge_answers([Graded(0.0, None, True), Graded(0.0, None, False)])
    with pytest.raises(Failed, match="0% were cut off: see the examples"):
        judge_answers([Graded(0.0, None, False)])
    with pytest.raises(Failed, match="none of 2 answers was right"):
        judge_answers([Graded(0.0, "7", False), Graded(0.0, None, True)])
    assert (
        judge_answers([Graded(1.0, "8", False), Graded(0.0, None, True)]) == "mean reward 0.500 of 2 answers"
    )


FOLLOWS = SyncEvidence(noise=0.0, gap_before=1e-6, change=0.05, moved=0.05, gap_after=1e-6, worst=1e-5)
BF16 = SyncEvidence(noise=0.001, gap_before=0.01, change=0.05, moved=0.05, gap_after=0.011, worst=0.4)
SYNCS = {
    "float32": (FOLLOWS, 1e-4, "moved by"),
    "float32, dropped": (replace(FOLLOWS, moved=0.0, gap_after=0.05), 1e-4, Failed),
    "float32, one tensor stale": (replace(FOLLOWS, moved=0.04, gap_after=0.01, worst=0.2), 1e-4, Failed),
    "float32, no step": (replace(FOLLOWS, moved=0.0, change=0.0), 1e-4, Skipped),
    "float32, garbage": (replace(FOLLOWS, moved=9.0, change=0.0, gap_after=9.0, worst=9.0), 1e-4, Failed),
    "bfloat16": (BF16, None, "moved by"),
    "bfloat16, dropped": (replace(BF16, moved=0.001, gap_after=0.05), None, Failed),
    "bfloat16, other weights": (replace(BF16, moved=0.08, gap_after=0.09), None, Failed),
    "bfloat16, too small a step": (replace(BF16, change=0.001, moved=0.001), None, Skipped),
    "bfloat16, small step": (replace(BF16, change=0.005, moved=0.005), None, "might not show"),
}


@pytest.mark.parametrize("case", SYNCS)
def test_a_sync_is_judged_by_what_moved(case):
    evidence, tolerance, wanted = SYNCS[case]
    if isinstance(wanted, str):
        assert wanted in judge_sync(evidence, tolerance)
    else:
        with pytest.raises(wanted):
            judge_sync(evidence, tolerance)


def gap(mean, worst, kl):
    return {"logprob_gap_mean_nats": mean, "logprob_gap_max_nats": worst, "generation_kl_k3_nats": kl}


def test_the_engines_gap_is_judged_by_the_servers_dtype(checkpoint):
    case = Case(check_checkpoint(checkpoint))
    case.info = {"dtype": "float32"}
    assert judge_gap(case, gap(1e-6, 1e-5, 0)).endswith("1.0e-05 at most")
    with pytest.raises(Failed, match="more than rounding explains"):
        judge_gap(case, gap(1e-6, 1e-3, 0))
    case.info = {"dtype": "bfloat16"}
    assert judge_gap(case, gap(0.01, 0.5, 1e-3)).endswith("at most")
    assert "above the aim" in judge_gap(case, gap(0.01, 0.5, 1e-2))
    assert "above the aim" in judge_gap(case, gap(0.05, 0.5, 1e-3))
    with pytest.raises(Failed):
        judge_gap(case, gap(0.2, 0.5, 1e-3))


def test_the_doctor_gets_the_completions_of_a_batch():
    episodes = [Episode((1, 2, 3), (4, 5), (-1.0, -2.0), "stop", 0), Episode((1,), (6,), (-3.0,), "stop", 0)]
    scored = completions_scored(episodes, torch.arange(12.0).view(2, 6))
    assert scored.sequences == [[1, 2, 3, 4, 5], [1, 6]]
    assert [None if math.isnan(v) else v for v in scored.logprobs.tolist()] == [None, None, 2.0, 3.0, 6.0]


def test_sinks_without_gradient_are_counted():
    def layer(value):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.main_grad = torch.tensor([0.0, value])
        return parameter

    class Chunk(torch.nn.Module):
        def __init__(self, *values):
            super().__init__()
            for i, value in enumerate(values):
                self.register_module(f"layer{i}", torch.nn.Module())
                getattr(self, f"layer{i}").softmax_offset = layer(value)
            self.other = layer(9.0)

    trainer = SimpleNamespace(model=SimpleNamespace(chunks=[Chunk(0.0, -3.0)]))
    assert sink_gradients(trainer) == {
        "sink_layers": 2, "sink_layers_with_gradient": 1, "sink_gradient_max": 3.0
    }  # fmt: skip


def test_silent_groups_are_said_to_have_no_advantages(checkpoint):
    episodes = [Episode((1, 2), (3, 4), (-1.0, -1.0), "stop", group) for group in (0, 0, 1, 1)]
    algorithm, trainer = SimpleNamespace(advantage="std"), SimpleNamespace(seq_length=None)
    session = SimpleNamespace(
        episodes=episodes, server=SimpleNamespace(checkpoint=checkpoint), rewards=torch.ones(4), batch=None,
        settings=SimpleNamespace(algorithm=algorithm, trainer=trainer),
    )  # fmt: skip
    with pytest.raises(Skipped, match="none of 2 groups .* advantages are all 0; .* stand in"):
        group_advantages_of(session, Entry("advantages"))
    assert session.batch.advantages[:, 1].tolist() == [1.0, -1.0, 1.0, -1.0]
    session.rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    group_advantages_of(session, Entry("advantages"))
    assert session.batch.advantages[:, 1].tolist() == pytest.approx([0.7070, -0.7070, 0.0, 0.0], abs=1e-3)


# ---- the result file ----------------------------------------------------------------------------------------
@pytest.fixture
def report(tmp_path):
    said = []
    made = Report(tmp_path / "r.json", {"schema": 1}, {}, said.append)
    made.said = said
    return made


def raising(error):
    def step(entry):
        entry.numbers["before"] = 1
        raise error

    return step


def read(report):
    return json.loads(report.file.read_text())


OUTCOMES = {
    "all right": ([lambda e: "fine"], 0, "nothing is wrong (ok: 0)"),
    "one fails": ([lambda e: "fine", raising(Failed("bad"))], 1, "something is wrong (ok: 0; failed: 1)"),
    "one cannot tell": ([raising(Skipped("why")), lambda e: ""], 3, "could be compared (ok: 1; skipped: 0)"),
    "failed goes before skipped": ([raising(Skipped("x")), raising(Failed("y"))], 1, "something is wrong"),
    "a crash is a failure": ([raising(ZeroDivisionError("by zero"))], 1, "something is wrong"),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_exit_codes_and_summary(report, case):
    steps, code, words = OUTCOMES[case]
    for number, step in enumerate(steps):
        report.run(str(number), step)
    report.write()
    assert report.exit_code == code and words in read(report)["summary"]
    assert read(report)["status"] == "finished"


def test_what_the_caller_left_out_is_no_open_question(report):
    report.run("a", lambda entry: "")
    report.skip("b", "left out", asked=True)
    assert report.exit_code == 0
    report.skip("c", "needs a, which is not there")
    assert report.exit_code == 3


def test_the_file_is_there_after_every_step_and_keeps_what_a_crash_left(report):
    def look(entry):
        assert read(report)["steps"][0]["status"] == "running"
        return "seen"

    report.run("first", look)
    assert [s["status"] for s in read(report)["steps"]] == [OK]
    report.run("second", raising(ValueError("a b")))
    second = read(report)["steps"][1]
    assert (second["status"], second["reason"], second["numbers"]) == (
        FAILED,
        "ValueError: a b",
        {"before": 1},
    )
    with pytest.raises(KeyboardInterrupt):
        report.run("third", raising(KeyboardInterrupt()))
    assert read(report)["steps"][2]["reason"] == "interrupted"
    assert read(report)["status"] == "running" and "not finished" in read(report)["summary"]


def test_numbers_that_json_lacks_are_text(report):
    report.run("x", lambda entry: entry.numbers.update(loss=math.nan, worst=math.inf))
    assert read(report)["steps"][0]["numbers"] == {"loss": "nan", "worst": "inf"}


# ---- what must not be shared --------------------------------------------------------------------------------
DATA = "/" + "data/models"


def test_paths_leave_their_last_name():
    secrets = {
        f"{DATA}/gpt-oss-20b": "gpt-oss-20b",
        str(PROJECT_ROOT): "<project>",
        "alice": "<user>",
        "node7": "<host>",
    }
    for text, wanted in {
        f"{DATA}/gpt-oss-20b/model.safetensors is cut": "gpt-oss-20b/model.safetensors is cut",
        f"see {PROJECT_ROOT}/runs/x.log": "see <project>/runs/x.log",
        "File '/opt/python/lib/torch/x.py', line 3": "File 'x.py', line 3",
        "alice on node7, malice": "<user> on <host>, malice",
        "http://127.0.0.1:30000/generate does not answer /server_info": "http://127.0.0.1:30000/generate does not answer "
        "/server_info",
        "3/4 of 5 km/h, and/or": "3/4 of 5 km/h, and/or",
    }.items():
        assert redact(text, secrets) == wanted


NAMES = st.text("abcdefgh-._0", min_size=1, max_size=8)


@given(st.lists(NAMES, min_size=2, max_size=5), st.sampled_from(["{}", "at {}:3", "'{}'", "({})", "x={}"]))
def test_no_absolute_path_survives(names, form):
    path = "/" + "/".join(names)
    assert path not in redact({"a": [form.format(path)]}, {})["a"][0]


def test_user_host_and_home_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.example")
    monkeypatch.setenv("LOGNAME", "alice")
    secrets = secrets_of((tmp_path / "ck", None))
    assert secrets[str(tmp_path / "ck")] == "ck" and secrets["alice"] == "<user>"
    assert redact("node7 and node7.cluster.example", secrets) == "<host> and <host>"
    assert redact(f"{Path.home()}/x", secrets) == "~/x"


def test_a_host_that_is_called_like_a_step_does_not_spoil_the_file(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "trainer")
    assert "trainer" not in secrets_of(())


# ---- the command --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, uneven):
    return uneven(tmp_path_factory.mktemp("real"), torch.Generator().manual_seed(1))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run it; (exit code, stderr, its result). The environment that it sets for itself is put back."""
    before = dict(os.environ)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "runs"))

    def run(*arguments):
        out = tmp_path / "result.json"
        code = main([*map(str, arguments), "--out", str(out)])
        return code, capsys.readouterr().err, json.loads(out.read_text()) if out.exists() else None

    yield run
    os.environ.clear()
    os.environ.update(before)


def sum_file(tmp_path, folder):
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in folder.iterdir()]
    (tmp_path / "SUMS").write_text("".join(lines))
    return tmp_path / "SUMS"


def statuses(result):
    return {step["name"]: step["status"] for step in result["steps"]}


def test_a_damaged_checkpoint_is_1_and_nothing_is_started(command, tmp_path, checkpoint):
    sums = sum_file(tmp_path, checkpoint)
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    code, _, result = command("--checkpoint", broken, "--sums", sums, "--repository", "none", "--skip-step")
    assert code == 1
    found = statuses(result)
    assert (found["checksums"], found["checkpoint"], found["server"]) == (FAILED, FAILED, SKIPPED)
    assert "model.safetensors is different" in result["steps"][0]["reason"]
    assert result["steps"][0]["details"]["files"]["config.json"]["verdict"] == "equal"
    assert str(tmp_path) not in json.dumps(result) and result["checkpoint"] == "broken"
    assert list(found) == [step.name for step in STEPS]


@pytest.mark.skipif(bool(gpu_names()), reason="here the server would start: there is a GPU")
def test_without_a_gpu_the_files_are_examined_and_the_rest_is_open(command, tmp_path, checkpoint):
    arguments = ("--checkpoint", checkpoint, "--sums", sum_file(tmp_path, checkpoint), "--repository", "none")
    code, _, result = command(*arguments, "--skip-step")
    assert code == 3 and result["profile"] == "gpu-20b"
    found = statuses(result)
    assert (found["checksums"], found["checkpoint"], found["server"]) == (OK, OK, SKIPPED)
    assert "profile gpu-20b cannot run here" in result["steps"][2]["reason"]
    assert result["steps"][-1]["asked"] and result["versions"]["torch"] and result["hardware"]["cores"]


@pytest.mark.skipif(bool(gpu_names()), reason="here the server would start: there is a GPU")
def test_mxfp4_is_how_the_release_comes_and_no_fault(command, tmp_path, checkpoint):
    from helpers.mxfp4 import write_mxfp4_checkpoint

    quantised = write_mxfp4_checkpoint(checkpoint, tmp_path / "quantised")
    _, _, result = command("--checkpoint", quantised, "--repository", "none", "--skip-step")
    files = result["steps"][1]
    assert (files["status"], files["details"]["form"], files["numbers"]["fail"]) == (OK, "MXFP4", 0)
    assert "checkpoint: takes updates" not in {f["probe"] for f in files["details"]["findings"]}


def test_another_model_than_the_release_is_1(command, checkpoint, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, result = command("--checkpoint", checkpoint, "--skip-step")
    assert code == 1
    sums, files = result["steps"][:2]
    assert sums["status"] == SKIPPED and sums["reason"].startswith(
        "computed, not compared: the hub does not give"
    )
    assert "verdict" not in sums["details"]["files"]["model.safetensors"]
    assert f"this is not {REPOSITORY}: num_hidden_layers 2 instead of 24" in files["reason"]
    assert (
        files["numbers"]["fail"] == 0 and files["numbers"]["parameters"] == 258_000
    )  # the doctor was asked all the same


def test_a_snapshot_of_the_hubs_cache_names_its_revision(tmp_path):
    (tmp_path / ("a" * 40)).mkdir()
    args = real_weights._parser().parse_args(["--checkpoint", str(tmp_path / ("a" * 40))])
    args.out = tmp_path / "r.json"
    assert real_weights._checked(args).revision == "a" * 40


@pytest.fixture
def usable(tmp_path):
    """Arguments that nothing is wrong with."""
    (tmp_path / "ck").mkdir()
    (tmp_path / "q.jsonl").write_text('{"question": "1+1", "answer": "#### 2"}\n' * 8)
    return {"--checkpoint": tmp_path / "ck", "--questions": tmp_path / "q.jsonl"}


USAGE = {
    "no checkpoint": ({"--checkpoint": "absent"}, "there is no folder absent"),
    "bad profile": ({"--profile": "gpu20b"}, "did you mean 'gpu-20b'"),
    "several ranks": ({"--profile": "cluster"}, "trains on 8 GPUs"),
    "no group": ({"--group-size": "1"}, "group_size must be at least 2"),
    "no prompts": ({"--prompts": "0"}, "--prompts 0 has to be a positive number"),
    "no number": ({"--prompts": "x"}, "invalid int value"),
    "bad rate": ({"--learning-rate": "nan"}, "--learning-rate nan has to be"),
    "too few questions": ({"--prompts": "9"}, "9 prompts a step, and there are 8 questions"),
    "no question file": ({"--questions": "absent"}, "absent cannot be read"),
    "no sum file": ({"--sums": "absent"}, "--sums: absent cannot be read"),
    "unknown option": ({"--check": "x"}, "unrecognized arguments"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_2_and_one_line(command, usable, case):
    changes, words = USAGE[case]
    code, err, result = command(*(part for pair in (usable | changes).items() for part in pair))
    assert code == 2 and words in err and len(err.splitlines()) == 1, err
    assert result is None


def test_an_out_file_that_cannot_be_is_2(usable, capsys, tmp_path):
    arguments = [str(part) for pair in usable.items() for part in pair]
    assert main([*arguments, "--out", str(tmp_path / "no" / "r.json")]) == 2
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "--out: there is no folder" in capsys.readouterr().err


def test_without_questions_both_ways_are_named(command, usable, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, err, _ = command("--checkpoint", usable["--checkpoint"])
    assert code == 2 and "--questions FILE.jsonl" in err and "hub" in err and len(err.splitlines()) == 1
