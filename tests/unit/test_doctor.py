"""The doctor on damaged checkpoints and on logprobs of broken trainers: it names what was planted, or says it cannot."""

import functools
import http.server
import json
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import save_weights, write_tiny_checkpoint
from helpers.doctor import (
    ADVICE,
    FAIL,
    PASS,
    UNKNOWN,
    WIDTH,
    Case,
    Finding,
    _arrival,
    examine,
    main,
    read_trainer_file,
    table,
    against_reference,
)
from helpers.faults import FAULTS, load_reference, logprobs, stale_faults
from helpers.profiles import load_profile
from helpers.rollout import free_port
from helpers.tensor_files import check_checkpoint


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(folders):
    return folders[0]


@pytest.fixture(scope="module")
def case(folders):
    """One reference for all comparisons; tests put a trainer's file into it."""
    return Case(check_checkpoint(folders[0]), older=folders[1])


def sequences(lengths=(16, 48)):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]


def write_lines(path, tokens, values):
    """A trainer's file; values: one tensor for all sequences."""
    parts = torch.as_tensor(values).split([len(s) - 1 for s in tokens])
    lines = [
        json.dumps({"tokens": s, "logprobs": [None, *p.tolist()]}) for s, p in zip(tokens, parts, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def judged(case, path) -> Finding:
    case.trainer = read_trainer_file(path, case.config["vocab_size"])
    return against_reference(case)


def copied(folder, target, damage):
    """A copy of the checkpoint with weights and files as damage(weights, config, folder) left them."""
    copy = save_weights(load_file(folder / "model.safetensors"), folder, target)
    weights, config = load_file(copy / "model.safetensors"), json.loads((copy / "config.json").read_text())
    damage(weights, config, copy)
    (copy / "config.json").write_text(json.dumps(config))
    return save_weights(weights, copy, target.with_name("damaged"))


def run(capsys, tmp_path, *arguments):
    """(exit code, {probe: finding}, what was printed)."""
    capsys.readouterr()
    code = main([str(a) for a in arguments] + ["--json", str(tmp_path / "findings.json")])
    found = json.loads((tmp_path / "findings.json").read_text())
    return code, {f["probe"]: Finding(**f) for f in found}, capsys.readouterr().out


# --- a trainer's logprobs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAULTS, *sorted(stale_faults("nowhere"))])
def test_the_planted_fault_is_named(name, case, tmp_path):
    fault, tokens = case.faults[name], sequences((48,))
    with fault.plant(case.reference):
        path = write_lines(tmp_path / "t.jsonl", tokens, logprobs(case.reference, tokens))
    finding = judged(case, path)
    assert finding.verdict == FAIL and f"with {name} planted the reference is within" in finding.found
    assert finding.cause.endswith(f"{fault.cause} ({fault.references})") and finding.cure == fault.cure


def test_a_sound_trainer_passes_and_the_place_of_the_gap_is_told(case, tmp_path):
    sound = logprobs(case.reference, sequences())
    finding = judged(case, write_lines(tmp_path / "t.jsonl", sequences(), sound))
    assert (finding.verdict, finding.cause) == (PASS, "") and "not visible" not in finding.found
    sound[15 + 30] -= 1.0  # of the second sequence, token 31
    finding = judged(case, write_lines(tmp_path / "t.jsonl", sequences(), sound))
    assert finding.verdict == FAIL and "largest at token 31 of 48, past the window" in finding.found
    assert (finding.cause, finding.cure) == ADVICE["unknown gap"]


def test_a_fault_that_these_tokens_cannot_show_is_listed_and_not_denied(case, tmp_path):
    short = sequences((16, 9))
    with FAULTS["window-one-long"].plant(case.reference):
        path = write_lines(tmp_path / "t.jsonl", short, logprobs(case.reference, short))
    finding = judged(case, path)
    assert finding.verdict == PASS
    hidden = finding.found.partition("not visible on these tokens: ")[2].split(", ")
    assert {"window-one-long", "window-one-short", "window-missing", "window-on-odd-layers"} <= set(hidden)


def test_two_faults_at_once_are_not_passed_off_as_one(case, tmp_path):
    with FAULTS["gate-up-halves"].plant(case.reference), FAULTS["down-bias-twice"].plant(case.reference):
        path = write_lines(tmp_path / "t.jsonl", sequences(), logprobs(case.reference, sequences()))
    finding = judged(case, path)
    assert finding.verdict == FAIL and "something beside it" in finding.found
    assert finding.cause.startswith(FAULTS["gate-up-halves"].what)


@pytest.mark.parametrize("offset", [1, -1])
def test_a_file_that_is_shifted_by_one_is_named_as_that(offset, case, tmp_path):
    parts = logprobs(case.reference, sequences()).split([len(s) - 1 for s in sequences()])
    rows = [[None, *part.tolist()] for part in parts]
    rows = [[*row[1:], None] if offset == 1 else [None, *row[:-1]] for row in rows]
    lines = [json.dumps({"tokens": s, "logprobs": r}) for s, r in zip(sequences(), rows, strict=True)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    finding = judged(case, path)
    assert finding.verdict == FAIL and "labels are shifted twice or not at all" in finding.cause
    assert f"log p(tokens[t{offset:+d}] | before)" in finding.cause and "shift once" in finding.cure


def test_masked_tokens_are_left_out(case, tmp_path):
    sound = logprobs(case.reference, sequences())
    path = write_lines(tmp_path / "t.jsonl", sequences(), sound)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["logprobs"][7] = None
    path.write_text("\n\n".join(json.dumps(line) for line in lines))  # blank lines do no harm
    assert judged(case, path).verdict == PASS


@pytest.fixture(scope="module")
def bf16(tmp_path_factory, uneven):
    """(case of a bfloat16 checkpoint, a trainer that computes in bfloat16)."""
    root, generator = tmp_path_factory.mktemp("bf16"), torch.Generator().manual_seed(1)
    folder = uneven(root, generator, **{"model.dtype": "bfloat16", "model.intermediate_size": 64})
    return Case(check_checkpoint(folder)), load_reference(folder).bfloat16()


def test_16_bits_pass_with_what_they_cannot_exclude(bf16, tmp_path):
    case, trainer = bf16
    path = write_lines(tmp_path / "t.jsonl", sequences(), logprobs(trainer, sequences()))
    finding = judged(case, path)
    assert finding.verdict == PASS and "too close to exclude in 16 bits: " in finding.found, finding
    assert "yarn-bounds-rounded" in finding.found


@pytest.mark.parametrize("name", ["gate-up-halves", "rope-twice", "qkv-split-flat", "swiglu-offset-missing"])
def test_16_bits_do_not_hide_a_large_fault(name, bf16, tmp_path):
    case, trainer = bf16
    with FAULTS[name].plant(trainer):
        path = write_lines(tmp_path / "t.jsonl", sequences(), logprobs(trainer, sequences()))
    finding = judged(case, path)
    assert finding.verdict == FAIL and f"{name} planted fits" in finding.found, finding


def test_16_bits_leave_an_unknown_gap_open(bf16, tmp_path):
    case, trainer = bf16
    given = logprobs(trainer, sequences())
    noise = torch.rand(given.shape, generator=torch.Generator().manual_seed(0))
    finding = judged(case, write_lines(tmp_path / "t.jsonl", sequences(), given - 2 * noise))
    assert (finding.verdict, finding.cause) == (UNKNOWN, ADVICE["16 bits"][0])


def test_a_reference_that_is_too_large_is_not_built(case, tmp_path, capsys, folder):
    path = write_lines(tmp_path / "t.jsonl", sequences(), logprobs(case.reference, sequences()))
    code, found, _ = run(
        capsys, tmp_path, "--checkpoint", folder, "--trainer-logprobs", path, "--max-reference-gb", "0.0001"
    )
    assert (code, found["trainer: logprobs"].verdict) == (3, UNKNOWN)
    assert "allowed are 0.0001" in found["trainer: logprobs"].found


def test_the_command_names_a_fault_and_obeys_its_options(case, folders, tmp_path, capsys):
    with case.faults["stale-experts"].plant(case.reference):
        path = write_lines(tmp_path / "t.jsonl", sequences(), logprobs(case.reference, sequences()))
    arguments = ("--checkpoint", folders[0], "--trainer-logprobs", path)
    code, found, printed = run(capsys, tmp_path, *arguments, "--older", folders[1])
    assert code == 1 and "stale-experts planted" in found["trainer: logprobs"].found
    assert "cause: experts of the older checkpoint" in " ".join(printed.split())
    code, found, _ = run(capsys, tmp_path, *arguments)
    assert code == 1 and found["trainer: logprobs"].cause == ADVICE["unknown gap"][0]
    code, found, _ = run(capsys, tmp_path, *arguments, "--tolerance", "50")
    assert code == 0 and "(tolerance 50)" in found["trainer: logprobs"].found


# --- a checkpoint -------------------------------------------------------------------------------------------------------


def test_a_healthy_checkpoint_passes(folder, tmp_path, capsys):
    code, found, printed = run(capsys, tmp_path, "--checkpoint", folder)
    assert code == 0
    assert {p for p, f in found.items() if f.verdict != PASS} == {"checkpoint: orientation"}  # square
    assert printed.endswith("pass, 0 fail, 1 cannot tell\n")


def _set(**fields):
    return lambda weights, config, folder: config.update(fields)


def _rope(**fields):
    return lambda weights, config, folder: config["rope_parameters"].update(fields)


def _fill(suffix, value):
    def damage(weights, config, folder):
        for name in weights:
            if name.endswith(suffix):
                weights[name] = torch.full_like(weights[name], value)

    return damage


def _nan(weights, config, folder):
    weights["model.layers.1.mlp.experts.down_proj"][3, 2, 1] = float("nan")


def _equal_norms(weights, config, folder):
    weights["model.layers.0.input_layernorm.weight"] = weights[
        "model.layers.0.post_attention_layernorm.weight"
    ].clone()


def _ends(name):
    def damage(weights, config, folder):
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        generation = json.loads((folder / "generation_config.json").read_text())
        generation["eos_token_id"] = config["eos_token_id"] = vocabulary[name]
        (folder / "generation_config.json").write_text(json.dumps(generation))

    return damage


def _lost_special(weights, config, folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("channel", "chanel"))


def _no_template(weights, config, folder):
    (folder / "chat_template.jinja").unlink()


def _template_inside(weights, config, folder):
    _no_template(weights, config, folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')


def _no_tokenizer(weights, config, folder):
    (folder / "tokenizer.json").unlink()


def _put(name, text):
    return lambda weights, config, folder: (folder / name).write_text(text)


def _eos(value):
    def damage(weights, config, folder):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))

    return damage


@pytest.mark.parametrize(
    "damage, probe, verdict, words",
    [
        (_nan, "checkpoint: finite", FAIL, "NaN or infinity in model.layers.1.mlp.experts.down_proj"),
        (
            _fill("input_layernorm.weight", float("inf")),
            "checkpoint: finite",
            FAIL,
            "NaN or infinity in model.layers.0",
        ),
        (_fill("sinks", 0.0), "checkpoint: sinks alive", FAIL, "layers.0.self_attn.sinks and 1 more"),
        (
            _equal_norms,
            "checkpoint: norms",
            UNKNOWN,
            "equal norms in model.layers.0.input_layernorm.weight: that hides",
        ),
        (_fill("down_proj_bias", 0.0), "checkpoint: expert biases", UNKNOWN, "that hides dropped ones"),
        (_fill("router.bias", 0.0), "checkpoint: router bias", UNKNOWN, "that hides a dropped one"),
        (_set(layer_types=["full_attention"] * 2), "checkpoint: window", FAIL, "layers FF"),
        (
            _set(layer_types=["full_attention", "sliding_attention"]),
            "checkpoint: window",
            FAIL,
            "layers FS",
        ),
        (_rope(factor=16.0), "checkpoint: YaRN", FAIL, "factor 16.0"),
        (_rope(truncate=True), "checkpoint: YaRN", FAIL, "truncate True; pairs 4.0000 to 9.0000"),
        (_rope(rope_type="default"), "checkpoint: YaRN", FAIL, "rope_type default"),
        (_set(swiglu_limit=None), "checkpoint: SwiGLU limit", FAIL, "None"),
        (_ends("<|end|>"), "checkpoint: stop tokens", FAIL, "<|end|>"),
        (_ends("<|message|>"), "checkpoint: stop tokens", FAIL, "<|message|>"),
        (_set(pad_token_id=5), "checkpoint: special tokens", FAIL, "pad_token_id 5, eos_token_id [5]"),
        (_set(pad_token_id=None), "checkpoint: special tokens", FAIL, "pad_token_id None"),
        (_lost_special, "checkpoint: special tokens", FAIL, "not one id: <|channel|>"),
        (_no_template, "checkpoint: chat template", UNKNOWN, "none in this folder"),
        (_template_inside, "checkpoint: chat template", PASS, "present"),
        (_no_tokenizer, "checkpoint: stop tokens", UNKNOWN, "no tokenizer at"),
        (_eos("2"), "checkpoint: stop tokens", FAIL, "eos_token_id '2' is neither"),
        (
            _put("generation_config.json", "[1]"),
            "checkpoint: stop tokens",
            FAIL,
            "generation_config.json holds a list",
        ),
        (
            _put("generation_config.json", "{"),
            "checkpoint: stop tokens",
            FAIL,
            "generation_config.json cannot be read",
        ),
        (
            _put("tokenizer_config.json", "[1]"),
            "checkpoint: chat template",
            FAIL,
            "tokenizer_config.json holds a list",
        ),
    ],
)
def test_damage_is_found_and_nothing_else(damage, probe, verdict, words, folder, tmp_path, capsys):
    damaged = copied(folder, tmp_path / "copy", damage)
    code, found, _ = run(capsys, tmp_path, "--checkpoint", damaged)
    assert code == (verdict == FAIL)
    assert found[probe].verdict == verdict and words in found[probe].found
    assert verdict == PASS or (found[probe].cause and found[probe].cure)
    assert {p for p, f in found.items() if f.verdict == FAIL} == ({probe} if verdict == FAIL else set())


@pytest.mark.parametrize("content", ["{", "{}", None])
def test_a_damaged_tokenizer_is_two_failures_and_no_traceback(content, folder, tmp_path, capsys):
    def damage(weights, config, copy):
        (copy / "tokenizer.json").unlink()
        (copy / "tokenizer.json").mkdir() if content is None else (copy / "tokenizer.json").write_text(
            content
        )

    copy = save_weights(load_file(folder / "model.safetensors"), folder, tmp_path / "copy")
    damage(None, None, copy)
    code, found, _ = run(capsys, tmp_path, "--checkpoint", copy)
    bad = {p: f for p, f in found.items() if f.verdict == FAIL}
    assert code == 1 and set(bad) == {"checkpoint: stop tokens", "checkpoint: special tokens"}
    assert all("tokenizer.json is no readable tokenizer" in f.found for f in bad.values())
    assert all((f.cause, f.cure) == ADVICE["bad tokenizer"] for f in bad.values())


def test_a_tokenizer_that_cannot_encode_does_not_end_the_examination(folder, tmp_path, capsys):
    """tokenizers raises plain Exception for a vocabulary without a token for unknown text."""
    from tokenizers import Tokenizer, models

    copy = save_weights(load_file(folder / "model.safetensors"), folder, tmp_path / "copy")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(copy / "tokenizer.json"))
    code, found, _ = run(capsys, tmp_path, "--checkpoint", copy)
    assert code == 1 and found["checkpoint: special tokens"].verdict == UNKNOWN
    assert "checkpoint: takes updates" in found


def test_the_cure_of_a_missing_tokenizer_is_the_models_own(folder, tmp_path, capsys):
    code, found, printed = run(
        capsys, tmp_path, "--checkpoint", copied(folder, tmp_path / "copy", _no_tokenizer)
    )
    assert code == 0 and "notebook" not in printed
    for probe in ("checkpoint: stop tokens", "checkpoint: special tokens"):
        assert (found[probe].verdict, found[probe].cure) == (UNKNOWN, ADVICE["no tokenizer"][1])


def test_what_is_no_gpt_oss_checkpoint_is_not_called_an_interrupted_download(folder, tmp_path, capsys):
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    for wrong in (empty, other):
        code, found, _ = run(capsys, tmp_path, "--checkpoint", wrong)
        finding = found["checkpoint: files"]
        assert code == 1 and len(found) == 1 and (finding.cause, finding.cure) == ADVICE["not gpt-oss"]


def test_a_config_that_is_a_folder_is_one_failure(tmp_path, capsys):
    (tmp_path / "model" / "config.json").mkdir(parents=True)
    code, found, _ = run(capsys, tmp_path, "--checkpoint", tmp_path / "model")
    finding = found["checkpoint: files"]
    assert code == 1 and "config.json cannot be read (Is a directory)" in finding.found
    assert (finding.cause, finding.cure) == ADVICE["unreadable"]


def test_a_truncated_file_is_the_only_finding(folder, tmp_path, capsys):
    broken = save_weights(load_file(folder / "model.safetensors"), folder, tmp_path / "broken")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    code, found, printed = run(capsys, tmp_path, "--checkpoint", broken)
    assert code == 1 and set(found) == {"checkpoint: files"}
    assert "is truncated" in found["checkpoint: files"].found and "cure: " in printed


def test_shapes_tell_the_orientation_where_they_can(tmp_path, capsys):
    oblong = write_tiny_checkpoint(load_profile("cpu"), tmp_path / "oblong")
    code, found, _ = run(capsys, tmp_path, "--checkpoint", oblong)
    assert code == 0 and found["checkpoint: orientation"].verdict == PASS
    fresh = {p for p, f in found.items() if f.verdict == UNKNOWN}
    assert {"checkpoint: norms", "checkpoint: expert biases"} <= fresh


def test_a_square_gate_up_is_refused(tmp_path, capsys):
    """Megatron-Bridge would import it turned the wrong way, without an error."""
    wide = {"model.hidden_size": 64, "model.intermediate_size": 32}
    square = write_tiny_checkpoint(load_profile("cpu", **wide), tmp_path / "square")
    code, found, _ = run(capsys, tmp_path, "--checkpoint", square)
    assert code == 1 and found["checkpoint: orientation"].verdict == FAIL
    assert "gate_up_proj is square" in found["checkpoint: orientation"].found


def test_a_quantised_checkpoint_is_no_sync_target_and_is_compared_all_the_same(folder, tmp_path, capsys):
    from helpers.mxfp4 import write_mxfp4_checkpoint

    quantised = write_mxfp4_checkpoint(folder, tmp_path / "mxfp4")
    path = write_lines(tmp_path / "t.jsonl", sequences(), logprobs(load_reference(quantised), sequences()))
    code, found, _ = run(capsys, tmp_path, "--checkpoint", quantised, "--trainer-logprobs", path)
    assert code == 1 and {p for p, f in found.items() if f.verdict == FAIL} == {"checkpoint: takes updates"}
    assert "MXFP4" in found["checkpoint: orientation"].found


# --- a server that is none ----------------------------------------------------------------------------------------------


@pytest.fixture
def other_server(tmp_path):
    """An HTTP server that is no SGLang: Python's own, serving an empty folder."""
    (tmp_path / "www").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "www")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_no_server_and_another_server_are_one_failure_each(folder, tmp_path, capsys, other_server):
    for url in (f"http://127.0.0.1:{free_port()}", other_server + "/"):
        code, found, _ = run(capsys, tmp_path, "--checkpoint", folder, "--server", url, "--write")
        assert code == 1 and [p for p in found if p.startswith("server")] == ["server: reachable"]
        finding = found["server: reachable"]
        assert finding.verdict == FAIL and url.rstrip("/") in finding.found and "curl" in finding.cure


@pytest.fixture
def json_server():
    """Serves one JSON object whatever it is asked: (its address, the object, to be changed)."""
    answer = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answer
        server.shutdown()


def test_a_server_that_answers_anything_with_an_empty_object_is_no_sglang(
    folder, tmp_path, capsys, json_server
):
    code, found, _ = run(capsys, tmp_path, "--checkpoint", folder, "--server", json_server[0])
    assert code == 1 and [p for p in found if p.startswith("server")] == ["server: reachable"]
    finding = found["server: reachable"]
    assert finding.verdict == FAIL and "is not an SGLang server" in finding.found and "curl" in finding.cure


def test_a_server_whose_numbers_nobody_could_compare_is_code_3(folder, tmp_path, capsys, json_server):
    url, answer = json_server
    answer["version"] = "0"
    assert main(["--checkpoint", str(folder), "--server", url]) == 3
    out, err = capsys.readouterr()
    assert " 0 fail" in out and err == "doctor: nothing was compared to a verdict: server\n"


# --- usage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "required: --checkpoint"),
        (["--checkpoint", "nowhere"], "--checkpoint: there is no folder nowhere"),
        (["--checkpoint", "{folder}", "--servr", "x"], "unrecognized arguments: --servr"),
        (["--checkpoint", "{folder}", "--server", "localhost:30000"], "no URL"),
        (["--checkpoint", "{folder}", "--write"], "needs --server"),
        (["--checkpoint", "{folder}", "--tolerance", "0"], "--tolerance 0.0 has to be a positive number"),
        (["--checkpoint", "{folder}", "--tolerance", "nan"], "has to be a positive number"),
        (["--checkpoint", "{folder}", "--tolerance", "small"], "invalid float value"),
        (["--checkpoint", "{folder}", "--max-reference-gb", "-1"], "--max-reference-gb -1.0"),
        (["--checkpoint", "{folder}", "--older", "nowhere"], "--older: there is no folder"),
        (["--checkpoint", "{folder}", "--older", "{folder}/.."], "--older: "),
        (["--checkpoint", "{folder}", "--json", "nowhere/f.json"], "--json: there is no folder"),
        (["--checkpoint", "{folder}", "--trainer-logprobs", "nowhere"], "there is no file nowhere"),
        (["--checkpoint", "{folder}", "--trainer-logprobs", "{folder}"], "is a folder: name the file in it"),
        (
            ["--checkpoint", "{folder}", "--trainer-logprobs", "{folder}/config.json/x"],
            "cannot be read (Not a",
        ),
        (["--checkpoint", "{folder}/config.json"], "config.json is a file: name its folder"),
        (
            ["--checkpoint", "{folder}", "--older", "{folder}/config.json"],
            "config.json is a file: name its folder",
        ),
        (["--checkpoint", "{folder}", "--json", "{folder}"], "is a folder: name a file in it"),
        (["--checkpoint", "{folder}", "--json", "/proc/nowhere"], "cannot be written"),
        (["--checkpoint", "{folder}", "--server", "http://[::1"], "no URL"),
        (["--checkpoint", "{folder}", "--server", "http://:30000"], "no URL"),
        (
            ["--checkpoint", "{folder}", "--server", "http://localhost:70000"],
            "no URL with a port up to 65535",
        ),
        (["--checkpoint", "{folder}", "--server", "http://localhost:-1"], "no URL with a port"),
        (["--checkpoint", "{folder}", "--server", "http://localhost:port"], "no URL with a port"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(arguments, words, folder, capsys):
    assert main([a.format(folder=folder) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_a_disk_that_fills_up_meanwhile_costs_the_file_and_not_the_table(folder, capsys):
    assert main(["--checkpoint", str(folder), "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert (
        " 0 fail" in out and err == "doctor: --json: /dev/full cannot be written (No space left on device)\n"
    )


def test_an_older_checkpoint_of_another_shape_is_refused(folder, tmp_path, capsys):
    other = write_tiny_checkpoint(load_profile("cpu"), tmp_path / "other")
    assert main(["--checkpoint", str(folder), "--older", str(other)]) == 2
    assert "another shape" in capsys.readouterr().err


GOOD = '{"tokens": [1, 2, 3], "logprobs": [null, -1.0, null]}'


@pytest.mark.parametrize(
    "line, words",
    [
        ("tokens", "is not {"),
        ("[1, 2]", "is not {"),
        ('{"tokens": [1, 2]}', "KeyError 'logprobs'"),
        ('{"tokens": 3, "logprobs": 4}', "is not {"),
        ('{"tokens": [1, 2], "logprobs": [-1.0]}', "2 tokens and 1 logprobs"),
        ('{"tokens": [1], "logprobs": [null]}', "two tokens at least"),
        ('{"tokens": [1, 64], "logprobs": [null, -1.0]}', "whole numbers from 0 to 63"),
        ('{"tokens": [1, 2.5], "logprobs": [null, -1.0]}', "whole numbers from 0 to 63"),
        ('{"tokens": [1, true], "logprobs": [null, -1.0]}', "whole numbers from 0 to 63"),
        ('{"tokens": [1, 2], "logprobs": [null, 0.5]}', "logprobs[1] is 0.5"),
        ('{"tokens": [1, 2], "logprobs": [null, NaN]}', "logprobs[1] is nan"),
        ('{"tokens": [1, 2], "logprobs": [null, -Infinity]}', "logprobs[1] is -inf"),
        ('{"tokens": [1, 2], "logprobs": [null, "x"]}', "logprobs[1] is 'x'"),
        ('{"tokens": [1, 2], "logprobs": ["x", -1.0]}', "logprobs[0] is 'x'"),
        ('{"tokens": [1, 2], "logprobs": [true, -1.0]}', "logprobs[0] is True"),
        ('{"tokens": [1, 2], "logprobs": [[], -1.0]}', "logprobs[0] is []"),
    ],
)
def test_a_bad_line_is_named(line, words, folder, tmp_path, capsys):
    path = tmp_path / "trainer.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    assert main(["--checkpoint", str(folder), "--trainer-logprobs", str(path)]) == 2
    err = capsys.readouterr().err
    assert "trainer.jsonl, line 2" in err and words in err and err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "\n\n", '{"tokens": [1, 2], "logprobs": [null, null]}'])
def test_a_file_without_a_logprob_is_refused(text, folder, tmp_path, capsys):
    path = tmp_path / "trainer.jsonl"
    path.write_text(text)
    assert main(["--checkpoint", str(folder), "--trainer-logprobs", str(path)]) == 2
    assert "holds no logprob" in capsys.readouterr().err


def test_the_table_fits_its_width_and_hides_nothing():
    rows = [
        Finding("a", PASS, "word " * 60),
        Finding("longer: probe", FAIL, "found", "cause " * 40, "cure"),
        Finding("c", UNKNOWN, "", "why", "next"),
    ]
    text = table(rows)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.count("word") == 60 and text.count("cause") == 41 and "next: next" in text
    assert text.endswith("1 pass, 1 fail, 1 cannot tell")


def test_importing_the_doctor_imports_no_engine():
    code = "import sys, helpers.doctor; print(sorted({'torch', 'transformers', 'megatron', 'sglang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_findings_come_one_by_one(folder):
    """A long examination can be shown while it runs."""
    assert next(examine(Case(check_checkpoint(folder)))).probe == "machine: versions"


@pytest.mark.parametrize(
    "dtype, got, word",
    [
        ("float32", 1.0, "arrived"),
        ("float32", 1.001, "changed on the way"),
        ("float32", 0.0, "dropped"),
        ("float32", 0.05, "dropped"),
        ("bfloat16", 1.2, "arrived"),
        ("bfloat16", 1.6, "changed on the way"),
        ("bfloat16", 0.01, "dropped"),
    ],
)
def test_what_became_of_an_update(dtype, got, word, folder):
    """Every token's logprob should go from 0 to 1; it went to `got`."""
    case = Case(check_checkpoint(folder), info={"dtype": dtype})
    zero, one = torch.zeros(8), torch.ones(8)
    assert _arrival(case, got * one, zero, zero, one) == word


@pytest.mark.parametrize("dtype, effect, noise", [("float32", 1e-4, 0.0), ("bfloat16", 0.1, 0.05)])
def test_an_update_too_small_to_see_is_no_verdict(dtype, effect, noise, folder):
    case = Case(check_checkpoint(folder), info={"dtype": dtype})
    old = torch.zeros(8)
    assert _arrival(case, old, old + noise, old, old + effect) == "too small to see"


def test_the_rule_follows_the_dtype_and_the_option(folder):
    report = check_checkpoint(folder)
    assert Case(report, info={"dtype": "auto"}).served_tolerance == Case(report).served_tolerance == 1e-4
    assert Case(report, info={"dtype": "bfloat16"}).served_tolerance is None
    assert Case(report, info={"dtype": "bfloat16"}, tolerance=0.3).served_tolerance == 0.3
