"""Every public command with bad arguments: one line on stderr and exit code 2, and what no code of ours may do."""

import ast
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import doctor, planner, real_weights, recipe_cards, recorded, series, teaching, twins
from helpers.cluster import RayHead
from helpers.cpu import manifest
from helpers.messages import LIMIT
from helpers.profiles import PROFILES, load_profile
from helpers.rollout import server_command

ROOT = Path(__file__).parents[2]
LONG, NO_TEXT = "x" * 20_000, ("\ud800", "a\nb", "\0", "\x1b[31m")
NO_NUMBER, ODD = ("", "x", "1e", "٣x", "0x1", "--"), ("x", "\u202e\U0001f600", "../nowhere", "x" * 300)
COMMANDS = {
    "series": series.main, "doctor": doctor.main, "real_weights": real_weights.main, "planner": planner.main,
    "recorded": recorded.main, "twins": twins.main, "recipe_cards": recipe_cards.main, "manifest": manifest.main,
    "teaching": teaching.main,
}  # fmt: skip


def refused(name, argv):
    """stderr of a command that must refuse its arguments; raises AssertionError for anything else than one line and code 2
    (1 where helpers.recorded was asked rightly and there is nothing to record)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = COMMANDS[name](argv)
        except SystemExit as stop:
            code = stop.code
    shown, message = [word[:40] for word in argv], err.getvalue()
    assert code == 2 or (name == "recorded" and code == 1), f"{name} {shown}: exit code {code}"
    assert message.count("\n") == 1 and 0 < len(message) <= LIMIT + 500, f"{name} {shown}: {message!r:.300}"
    assert not out.getvalue() and "Traceback" not in message
    message.encode()
    return message


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Nothing is written into the project; `here` is an empty folder for what a command needs beside its bad argument."""
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


OPTIONS = {  # command -> (what stands before the option, options of text or paths, options of numbers)
    "series": (["run", "--only", "zz"], ("--profile",), ("--cell-seconds", "--start-seconds", "--min-free-gb", "--settle-seconds")),
    "doctor": (["--checkpoint", "."], ("--checkpoint", "--older", "--server"), ("--tolerance", "--max-reference-gb")),
    "real_weights": (
        ["--checkpoint", ".", "--skip-step"], ("--checkpoint", "--profile", "--sums"),
        ("--prompts", "--group-size", "--max-new-tokens", "--learning-rate", "--max-reference-gb"),
    ),
    "planner": ([], ("--profile", "--model", "--card", "--fit"), ("--gpus", "--gpus-per-node", "--prompt", "--top")),
    "recorded": ([], ("--profile", "--runs", "--only"), ()),
    "twins": (["write"], ("--form",), ()),
}  # fmt: skip
TEXT = [(c, o, v) for c, (_, options, _) in OPTIONS.items() for o in options for v in (LONG, *NO_TEXT, *ODD)]
NUMBERS = [
    (c, o, v) for c, (_, _, options) in OPTIONS.items() for o in options
    for v in (LONG, "9" * 5000, *NO_TEXT, *NO_NUMBER, "-1", "nan", "-inf", "inf", "-1e400")
]  # fmt: skip


def _shown(value):
    return ascii(value)[:24]


@pytest.mark.parametrize(("command", "option", "value"), TEXT + NUMBERS, ids=_shown)
def test_a_bad_value_is_one_line(command, option, value):
    refused(command, [*OPTIONS[command][0], option, value])


@pytest.mark.parametrize("value", [LONG, *NO_TEXT, *ODD, "-1", ""], ids=_shown)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_word_is_one_line(command, value):
    refused(command, [value])


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("series", []), ("series", ["run", "-p", "STEPS"]), ("series", ["run", "-p", "STEPS", "many"]),
        ("series", ["run", "-p", "STEP", "1"]), ("series", ["run", "--only"]), ("series", ["run", "--only", ""]),
        ("series", ["list", "--notebooks", "nowhere"]), ("series", ["report", "--runs", "nowhere"]),
        ("series", ["run", "--cell-seconds", "0"]), ("series", ["run", "-p", "STEPS", "1.5"]),
        ("doctor", []), ("doctor", ["--checkpoint"]), ("doctor", ["--checkpoint", "nowhere"]),
        ("doctor", ["--checkpoint", ".", "--write"]), ("doctor", ["--checkpoint", ".", "--server", "http://127.0.0.1:99999"]),
        ("real_weights", []), ("real_weights", ["--checkpoint", ".", "--prompts", "0"]),
        ("real_weights", ["--checkpoint", ".", "--questions", "nowhere"]), ("real_weights", ["--checkpoint", ".", "--out", "a/b"]),
        ("planner", ["predict"]), ("planner", ["predict", "--out", "/dev/null/x"]), ("planner", ["--gpus", "0"]),
        ("planner", ["--gpus-per-node", "0"]), ("planner", ["--prompt", "0"]), ("planner", ["--top", "0"]),
        ("twins", []), ("twins", ["write", ""]), ("twins", ["check", "--notebooks", "nowhere"]),
        ("twins", ["write", "--form", "slides"]), ("manifest", []), ("manifest", ["write", "check"]),
        ("recorded", ["--only"]), ("recipe_cards", ["check", "check"]),
    ], ids=str,
)  # fmt: skip
def test_what_is_missing_or_out_of_range_is_one_line(command, argv):
    refused(command, argv)


@pytest.mark.parametrize("script", ["run.sh", "lab.sh", "test.sh"])
def test_the_scripts_help_and_refuse(script):
    if script != "test.sh":
        done = subprocess.run(
            ["bash", ROOT / "environment" / script, "--profile", "cpü"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1 and "there is no profile 'cpü'" in done.stderr and not done.stdout
    done = subprocess.run(
        ["bash", ROOT / "environment" / script, "--help"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and script in done.stdout and not done.stderr


def test_the_check_sees_a_traceback_and_two_lines(monkeypatch):
    monkeypatch.setitem(COMMANDS, "planted", lambda argv: print("one\ntwo", file=sys.stderr) or 2)
    with pytest.raises(AssertionError, match="one"):
        refused("planted", [])
    monkeypatch.setitem(COMMANDS, "planted", lambda argv: {}["x"])
    with pytest.raises(KeyError):
        refused("planted", [])


# --- what no code of ours may do ----------------------------------------------------------------------------------------
# weight_sync pickles for SGLang's own update call, over loopback; it never unpickles
MAY_IMPORT_PICKLE = {"helpers/weight_sync.py"}


def dangers(source):
    """What a module does that could run somebody else's code: a list of names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            last = name.rpartition(".")[2]
            if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
                found.append(name)
            if name == "torch.load" and given.get("weights_only") != "True":
                found.append("torch.load")
            if last in ("load", "loads", "Unpickler") and name.split(".")[0] in (
                "pickle",
                "cloudpickle",
                "dill",
                "joblib",
                "marshal",
            ):
                found.append(name)
            if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
                found.append(name)
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
                found.append(name)
            if given.get("shell", "False") != "False":
                found.append("shell=True")
            if given.get("trust_remote_code", "False") != "False":
                found.append("trust_remote_code")
        elif isinstance(node, ast.Constant) and node.value == "--trust-remote-code":
            found.append("trust_remote_code")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            found += [
                f"import {m}"
                for m in modules
                if m.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal", "shelve")
            ]
    return found


MODULES = sorted(
    [
        *(ROOT / "helpers").rglob("*.py"),
        *(ROOT / "environment").glob("*.py"),
        *(ROOT / "notebooks" / "text").glob("*.py"),
    ]
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_runs_code_from_outside(path):
    name = str(path.relative_to(ROOT))
    found = dangers(path.read_text(encoding="utf-8"))
    if name in MAY_IMPORT_PICKLE:
        found = [danger for danger in found if danger != "import pickle"]
    if name == "helpers/profiles.py":  # the list of what servers are refused
        found = [danger for danger in found if danger != "trust_remote_code"]
    assert found == []


@pytest.mark.parametrize(
    ("planted", "danger"),
    [
        ("torch.load(p)", "torch.load"), ("torch.load(p, weights_only=False)", "torch.load"), ("pickle.load(f)", "pickle.load"),
        ("pickle.Unpickler(f)", "pickle.Unpickler"), ("import pickle", "import pickle"), ("from dill import loads", "import dill"),
        ("eval(answer)", "eval"), ("exec(answer)", "exec"), ("os.system(x)", "os.system"), ("np.load(p, allow_pickle=True)", "np.load"),
        ("subprocess.run(x, shell=True)", "shell=True"), ("AutoConfig.from_pretrained(x, trust_remote_code=True)", "trust_remote_code"),
        ("command = ['--trust-remote-code']", "trust_remote_code"), ("yaml.load(f)", "yaml.load"),
    ],
)  # fmt: skip
def test_each_danger_is_seen_when_planted(planted, danger):
    assert danger in dangers(planted)
    assert (
        dangers(
            "torch.load(p, weights_only=True); model.eval(); ast.literal_eval(x); json.load(f); re.compile(x)"
        )
        == []
    )


@pytest.mark.parametrize("name", PROFILES)
def test_servers_listen_on_loopback_and_run_no_code_of_a_checkpoint(name):
    command = server_command(load_profile(name), Path("checkpoint"), 30000)
    assert command[command.index("--host") + 1] == "127.0.0.1" and command.count("--host") == 1
    assert not any(word.startswith(("--trust-remote-code", "--api-key")) for word in command)


@pytest.mark.parametrize(
    "words",
    [
        ("--host", "0.0.0.0"),
        ("--host=0.0.0.0",),
        ("--hos", "::"),
        ("--trust-remote-code",),
        ("--trust",),
        ("--api-key", "x"),
    ],
)
def test_a_profile_cannot_open_a_server_to_others(words):
    with pytest.raises(ValueError, match="servers listen on loopback"):
        load_profile("cpu", **{"rollout.server_arguments": words})


def test_ray_listens_on_loopback_with_a_token_that_is_no_argument(monkeypatch):
    started = []

    class Stopped(Exception):
        pass

    def popen(command, **more):
        started.append((command, more["env"]))
        raise Stopped

    monkeypatch.setattr("helpers.cluster.subprocess.Popen", popen)
    for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    head = RayHead(load_profile("cpu"))
    with pytest.raises(Stopped):
        head.start()
    (command, environment), token = started[0], head.token
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"} <= set(command)
    assert (
        environment["RAY_AUTH_MODE"] == "token"
        and environment["RAY_AUTH_TOKEN"] == token
        and len(token) >= 32
    )
    assert not any(token in word for word in command) and "0.0.0.0" not in " ".join(command)
    os.environ.pop("RAY_AUTH_MODE"), os.environ.pop("RAY_AUTH_TOKEN")


def test_no_command_shows_a_token_of_the_environment(tmp_path, monkeypatch, capsys):
    """What the commands print and write, with a token planted in every variable that holds one."""
    token = "hf" + "_" + "pLaNtEd" * 5
    for variable in (
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "RAY_AUTH_TOKEN",
        "JUPYTER_TOKEN",
        "WANDB_API_KEY",
    ):
        monkeypatch.setenv(variable, token)
    (tmp_path / "checkpoint").mkdir()
    doctor.main(["--checkpoint", "checkpoint", "--json", "findings.json"])
    real_weights.main(
        [
            "--checkpoint",
            "checkpoint",
            "--skip-step",
            "--repository",
            "none",
            "--out",
            "result.json",
            "--profile",
            "cpu",
        ]
    )
    series.main(["list"])
    series.main(["run", "--only", "zz"])
    planner.main(["--top", "1"])
    said = capsys.readouterr()
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "findings.json").exists() and (tmp_path / "result.json").exists()
    assert token not in said.out + said.err + "".join(written)
