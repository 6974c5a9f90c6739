"""The doctor on a running SGLang server: healthy, with broken weights, and before and after its own updates."""

import base64
import http.server
import json
import threading
from contextlib import contextmanager

import pytest
import torch

from helpers.doctor import FAIL, PASS, UNKNOWN, Finding, main
from helpers.faults import FAULTS, stale_faults
from helpers.profiles import load_profile

pytestmark = pytest.mark.engine


@pytest.fixture
def clean_server(server, checkpoint):
    """The server with the checkpoint's weights, before and after."""
    server.load_weights(checkpoint)
    yield server
    server.load_weights(checkpoint)


@pytest.fixture(scope="module")
def older(checkpoint, tmp_path_factory):
    """An earlier checkpoint: every tensor differs a little."""
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights

    generator = torch.Generator().manual_seed(9)
    weights = load_file(checkpoint / "model.safetensors")
    other = {n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in weights.items()}
    return save_weights(other, checkpoint, tmp_path_factory.mktemp("older") / "older")


@pytest.fixture
def examined(capsys, tmp_path, checkpoint):
    """Run the command; (exit code, {probe: finding})."""

    def run(*arguments):
        file = tmp_path / "findings.json"
        code = main(["--checkpoint", str(checkpoint), "--json", str(file), *map(str, arguments)])
        capsys.readouterr()
        return code, {f["probe"]: Finding(**f) for f in json.loads(file.read_text())}

    return run


@pytest.fixture(scope="module")
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the server's processes compute on the same cores
    yield
    torch.set_num_threads(before)


SEQUENCES = [[7, 12, 40, 33, 21] * 8]


def test_a_healthy_server_passes_and_is_left_as_it_was(clean_server, examined, threads):
    before = clean_server.prompt_logprobs(SEQUENCES)
    code, found = examined("--server", clean_server.url, "--write")
    assert code == 0, found
    assert clean_server.prompt_logprobs(SEQUENCES) == before
    # torch_native has sinks through this project's plugin only, which its name does not show
    assert {p for p, f in found.items() if f.verdict == UNKNOWN} <= {
        "server: attention backend",
        "checkpoint: chat template",
    }
    assert "20 of 20 kinds" in found["server: updates arrive"].found
    assert found["server: weights put back"].verdict == PASS
    assert "past the window" in found["server: decode equals prefill"].found
    assert "torch_native" in found["server: attention backend"].found
    assert "sglang 0.5.17, float32, quantisation none, tp 1" in found["server: version"].found


def test_nothing_of_the_servers_settings_but_what_is_needed_is_shown(clean_server, examined, threads):
    _, found = examined("--server", clean_server.url, "--max-reference-gb", "1e-6")
    text = json.dumps({p: f.found for p, f in found.items()})
    assert "api_key" not in text and "launch_server" not in text
    assert found["server: prefill logprobs"].verdict == UNKNOWN
    assert found["server: updates arrive"].cause  # not without --write
    assert found["server: stop tokens"].verdict == found["server: decode equals prefill"].verdict == PASS


@pytest.mark.parametrize(
    "name",
    [
        "gate-up-halves",
        "sinks-of-other-heads",
        "norms-swapped",
        "stale-experts",
        "qkv-split-flat",
        "sinks-ignored",
    ],
)
def test_broken_weights_are_named_and_never_overwritten(
    name, clean_server, checkpoint, older, reference, examined, tmp_path, threads
):
    from helpers.checkpoints import save_weights

    fault = {**FAULTS, **stale_faults(older)}[name]
    assert fault.weights
    with fault.plant(reference):
        weights = {n: t.clone() for n, t in reference.state_dict().items()}
    clean_server.load_weights(save_weights(weights, checkpoint, tmp_path / "broken"))
    before = clean_server.prompt_logprobs(SEQUENCES)
    code, found = examined("--server", clean_server.url, "--older", older, "--write")
    finding = found["server: prefill logprobs"]
    assert code == 1 and finding.verdict == FAIL
    assert f"with {name} planted the reference is within" in finding.found
    assert finding.cause.startswith(fault.what) and finding.cure == fault.cure
    assert "could not be put back" in found["server: updates arrive"].cause
    assert clean_server.prompt_logprobs(SEQUENCES) == before


def test_a_trainer_is_compared_with_the_server_too(clean_server, reference, examined, tmp_path, threads):
    from helpers.faults import logprobs

    def lines(path, values):
        path.write_text(json.dumps({"tokens": SEQUENCES[0], "logprobs": [None, *values.tolist()]}))
        return path

    sound = lines(tmp_path / "sound.jsonl", logprobs(reference, SEQUENCES))
    code, found = examined("--server", clean_server.url, "--trainer-logprobs", sound)
    assert code == 0 and found["trainer: logprobs"].verdict == found["trainer: gap to server"].verdict == PASS
    with FAULTS["window-one-long"].plant(reference):
        broken = lines(tmp_path / "broken.jsonl", logprobs(reference, SEQUENCES))
    code, found = examined("--server", clean_server.url, "--trainer-logprobs", broken)
    assert code == 1 and "with window-one-long planted" in found["trainer: logprobs"].found
    gap = found["trainer: gap to server"]
    assert gap.verdict == FAIL and "k3 KL" in gap.found and "past the window" in gap.found
    assert found["server: prefill logprobs"].verdict == PASS


def test_a_server_of_another_model_is_told_from_a_broken_one(
    clean_server, examined, tmp_path, capsys, threads
):
    from helpers.checkpoints import write_tiny_checkpoint

    other = write_tiny_checkpoint(load_profile("cpu", **{"model.num_local_experts": 8}), tmp_path / "other")
    code = main(["--checkpoint", str(other), "--server", clean_server.url, "--write"])
    printed = " ".join(capsys.readouterr().out.split())
    assert code == 1 and "is not other's cause: the server runs another model" in printed
    assert clean_server.healthy()


# --- faults of the server's own, put between doctor and server ------------------------------------------------------------


@contextmanager
def between(server, ask=None, answer=None):
    """URL of a proxy to the real server. ask(path, payload) may change the payload or return a reply of its own;
    answer(payload, reply) may change the reply."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(server.http.get(server.url + self.path))

        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            own = ask(self.path, payload) if ask else None
            if own is not None:
                return self.send(200, json.dumps(own).encode(), "application/json")
            got = server.http.post(server.url + self.path, json=payload, timeout=60)
            if answer and self.path == "/generate":
                body = got.json()
                answer(payload, body)
                return self.send(got.status_code, json.dumps(body).encode(), "application/json")
            return self.reply(got)

        def reply(self, got):
            self.send(got.status_code, got.content, got.headers.get("content-type", "text/plain"))

        def send(self, code, body, kind):
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            thread.join()


def updates(name):
    """Whether a payload updates the tensor of this name."""
    return lambda payload: name.encode() in base64.b64decode(payload["serialized_named_tensors"][0])


def test_updates_that_are_dropped_silently_are_found(clean_server, examined, threads):
    """Pitfall 26: success for an update that never happens."""
    biases = updates("down_proj_bias")

    def drop(path, payload):
        if path == "/update_weights_from_tensor" and biases(payload):
            return {"success": True, "message": "Success"}

    with between(clean_server, drop) as url:
        code, found = examined("--server", url, "--write")
    finding = found["server: updates arrive"]
    assert code == 1 and finding.verdict == FAIL
    assert finding.found.endswith("19 of 20 kinds of tensor change the logprobs as they should; "
                                  "dropped: mlp.experts.down_proj_bias")  # fmt: skip
    assert found["server: weights put back"].verdict == PASS


def test_a_server_that_cannot_be_put_back_is_told(clean_server, examined, threads, caplog):
    """It takes the first update of the norms and none after it."""
    norms, taken = updates("model.norm.weight"), []

    def once(path, payload):
        if path == "/update_weights_from_tensor" and norms(payload):
            taken.append(path)
            return {"success": True, "message": "Success"} if len(taken) > 1 else None

    with between(clean_server, once) as url:
        code, found = examined("--server", url, "--write")
    finding = found["server: weights put back"]
    assert code == 1 and finding.verdict == FAIL and "update_weights_from_disk" in finding.cure
    assert "weights put back" in caplog.text


def test_decode_that_is_wrong_past_the_window_is_found(clean_server, examined, settings, threads):
    """Pitfall 16. Prefill is sound, so only this probe fails."""
    window = settings.model.sliding_window

    def wrong(payload, reply):
        for output in reply if isinstance(reply, list) else [reply]:
            info = output["meta_info"]
            for i, entry in enumerate(info["output_token_logprobs"]):
                entry[0] -= 0.5 if i > 1 and info["prompt_tokens"] + i >= window else 0.0

    with between(clean_server, answer=wrong) as url:
        code, found = examined("--server", url)
    assert {p for p, f in found.items() if f.verdict == FAIL} == {"server: decode equals prefill"}
    assert code == 1 and "past the window" in found["server: decode equals prefill"].found


def test_logprobs_without_the_temperature_are_found(clean_server, examined, threads):
    """What SGLang returns under SGLANG_RETURN_ORIGINAL_LOGPROB: the answer's tokens scored at temperature 1."""

    def unscaled(payload, reply):
        if payload["sampling_params"]["temperature"] == 0.5:
            entries = reply[0]["meta_info"]["output_token_logprobs"]
            scored = clean_server.prompt_logprobs([payload["input_ids"][0] + [e[1] for e in entries]])[0]
            for entry, value in zip(entries, scored[-len(entries) :], strict=True):
                entry[0] = value

    with between(clean_server, answer=unscaled) as url:
        code, found = examined("--server", url)
    assert {p for p, f in found.items() if f.verdict == FAIL} == {"server: temperature"}
    assert code == 1 and "RETURN_ORIGINAL_LOGPROB" in found["server: temperature"].cure


@pytest.mark.parametrize(
    "change, words",
    [({"stop_token_ids": [4]}, "<|end|>, <|return|>"), ({"ignore_eos": True}, "end at nothing")],
)
def test_wrong_default_stops_are_found(change, words, clean_server, examined, threads):
    """Pitfall 18. Token 4 is <|end|>."""

    def ask(path, payload):
        if path == "/generate":
            if not payload["sampling_params"]["ignore_eos"]:
                payload["sampling_params"] |= change

    with between(clean_server, ask) as url:
        code, found = examined("--server", url)
    assert {p for p, f in found.items() if f.verdict == FAIL} == {"server: stop tokens"}
    assert code == 1 and words in found["server: stop tokens"].found


@pytest.mark.parametrize("reply", [[], {"text": "hello"}, [{"meta_info": {}}]])
def test_answers_of_another_form_end_in_cannot_tell(reply, clean_server, examined, threads):
    """No traceback, no update tried on a server whose answers cannot be read, and the exit code says that nothing was compared."""
    sent = []

    def ask(path, payload):
        sent.append(path)
        return reply if path == "/generate" else None

    with between(clean_server, ask) as url:
        code, found = examined("--server", url, "--write")
    assert code == 3 and found["server: prefill"].verdict == found["server: sync"].verdict == UNKNOWN
    assert "/update_weights_from_tensor" not in sent


def test_logprobs_that_are_no_numbers_fail(clean_server, checkpoint, examined, tmp_path, threads):
    """Weights that became NaN: the checkpoint on disk is sound, the server is not."""
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights

    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"][3] = float("nan")
    clean_server.load_weights(save_weights(weights, checkpoint, tmp_path / "broken"))
    code, found = examined("--server", clean_server.url, "--write")
    assert code == 1 and {p for p, f in found.items() if f.verdict == FAIL} == {"server: prefill"}
    assert "NaN in the server's weights" in found["server: prefill"].cause
    assert clean_server.healthy()  # sampling from NaN would have ended it


@pytest.mark.parametrize(
    "settings_of_server, probe, verdict",
    [
        ({"attention_backend": "fa3"}, "server: attention backend", PASS),
        (
            {"attention_backend": "fa3", "decode_attention_backend": "flashinfer"},
            "server: attention backend",
            UNKNOWN,
        ),
        ({"quantization": "mxfp4"}, "server: takes updates", FAIL),
        ({"tp_size": 2}, "server: updates arrive", UNKNOWN),
    ],
)
def test_settings_are_judged(settings_of_server, probe, verdict, clean_server, examined, threads, tmp_path):
    from helpers.doctor import Case, server_settings, sync
    from helpers.tensor_files import check_checkpoint

    info = {
        "version": "0.5.17",
        "attention_backend": "triton",
        "dtype": "float32",
        "tp_size": 1,
        **settings_of_server,
    }
    case = Case(check_checkpoint(clean_server.checkpoint), clean_server, write=True, info=info)
    found = {
        f.probe: f.verdict
        for f in [*server_settings(case), *(sync(case) if "tp_size" in settings_of_server else ())]
    }
    assert found[probe] == verdict
