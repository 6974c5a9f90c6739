"""The environment: locks, scripts and their error paths, and what no file may contain."""

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "environment"
LOCKS = ("bootstrap.lock", "cpu.lock", "gpu.lock", "gpu-built.lock", "site.lock")
SCRIPTS = ("setup.sh", "run.sh", "test.sh", "lab.sh", "lock.sh", "site.sh")

# ---- what no file may contain -------------------------------------------------------------------------------
# Written in pieces, so that this file does not contain what it looks for.
HOSTS = [
    "py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org", "py" + "pi.nvidia.com",
    "npm" + "js.org", "deb." + "debian.org", "archive." + "ubuntu.com", "ana" + "conda.org", "crates" + ".io",
    "proxy.go" + "lang.org", "repo.maven" + ".apache.org",
]  # fmt: skip
FORBIDDEN = {
    "an index line": re.compile(
        r"^\s*(?:-i|-f|--index-url|--extra-index-url|--find-links|--trusted-host)[ =]", re.M
    ),
    "a package registry's host": re.compile("|".join(map(re.escape, HOSTS)) + r"|https?://\S+/simple\b"),
    "a path of one machine": re.compile(
        r"(?<![\w./~})-])/(?:root|work|tmp/w|home/(?!learner\b)[a-z]\w*|Users/\w+)(?=/|\s|[\"'`,;:)]|$)", re.M
    ),
    "a secret": re.compile(
        r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_-]{24,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{40,}"
        r"|\bglpat-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bxox[abprs]-[\w-]{10,}"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^\s/@:\"'{}$]+:[^\s/@\"'{}$]+@"
        r"|(?i:api[_-]?key|token|password|secret)[\"']?\s*[:=]\s*[\"'][A-Za-z0-9+/_-]{24,}[\"']"
    ),
}


def found_in(text: str) -> list[str]:
    """Kinds of forbidden content in `text`, each with the first match."""
    matches = ((kind, pattern.search(text)) for kind, pattern in FORBIDDEN.items())
    return [f"{kind}: {match.group(0).strip()!r}" for kind, match in matches if match]


def project_files() -> list[Path]:
    """Files that are, or would be, in the repository: tracked, or untracked and not ignored."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True)
    if listing.returncode == 0 and listing.stdout:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    skipped = re.compile(
        r"(^|/)(\.venv[^/]*|runs|__pycache__|\.git|[^/]*\.egg-info|\.[a-z]+_cache|\.hypothesis)(/|$)"
    )
    everything = (p for p in ROOT.rglob("*") if p.is_file())  # an unpacked archive has no git
    return [p for p in everything if not skipped.search(p.relative_to(ROOT).as_posix())]


def test_no_file_holds_an_index_a_host_a_machine_path_or_a_secret():
    problems = []
    for path in project_files():
        data = path.read_bytes()
        if b"\0" not in data:
            problems += [
                f"{path.relative_to(ROOT)}: {what}" for what in found_in(data.decode("utf-8", "replace"))
            ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("an index line", "--index" + "-url https://mirror.example/x\n"),
        ("an index line", "torch==2\n--find" + "-links wheels\n"),
        ("a package registry's host", "see https://" + HOSTS[0] + "/project/torch"),
        ("a package registry's host", "url = 'https://mirror.example/" + "simple'"),
        ("a path of one machine", "checkpoint = '/" + "root/models'"),
        ("a path of one machine", "cd /" + "home/alice/project"),
        ("a path of one machine", 'open("/' + 'work/data.json")'),
        ("a secret", "login('hf" + "_" + "aB3" * 12 + "')"),
        ("a secret", "OPENAI=sk" + "-" + "a1B2" * 8),
        ("a secret", "-----BEGIN RSA PRIVATE" + " KEY-----"),
        ("a secret", "https://user:" + "pass@host.example/x"),
        ("a secret", "api_key = '" + "0a1b2c3d" * 5 + "'"),
    ],
)
def test_the_scanner_catches_planted_examples(kind, text):
    assert any(what.startswith(kind) for what in found_in(text))


@pytest.mark.parametrize(
    "text", ["a/work/b", "/workspace/x", "~/root", "tokens = 'abc'", "PIP_INDEX_URL", "sk-learn"]
)
def test_the_scanner_lets_ordinary_text_pass(text):
    assert found_in(text) == []


# ---- locks and inputs ---------------------------------------------------------------------------------------
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(path: Path) -> list[str]:
    """Logical lines without comments; continued lines are joined."""
    text = re.sub(r"(^|\s)#.*", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def locked(name: str) -> dict[str, str]:
    """Package -> version of a lock."""
    pairs = (line.split(" ", 1)[0].split("==") for line in requirement_lines(ENVIRONMENT / name))
    return {normalise(package): version for package, version in pairs}


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_of_a_lock_is_one_version_with_hashes(name):
    lines = requirement_lines(ENVIRONMENT / name)
    assert lines and len(locked(name)) == len(lines)
    for line in lines:
        assert re.fullmatch(rf"{NAME}==\S+(?: --hash=sha256:[0-9a-f]{{64}})+", line), line[:100]


@pytest.mark.parametrize(
    ("source", "locks"),
    [
        ("bootstrap.in", ["bootstrap.lock"]),
        ("cpu.in", ["cpu.lock"]),
        ("gpu.in", ["gpu.lock", "gpu-built.lock"]),
        ("gpu.overrides", ["gpu.lock"]),
        ("site.in", ["site.lock"]),
    ],
)
def test_the_inputs_are_in_the_locks(source, locks):
    versions = {package: version for lock in locks for package, version in locked(lock).items()}
    for line in requirement_lines(ENVIRONMENT / source):
        package, pin = re.fullmatch(rf"({NAME})(?:\[[\w,-]+\])?(?:==(\S+)|[<>]\S+)?", line).groups()
        assert normalise(package) in versions, f"{line} of {source} is in no lock: run environment/lock.sh"
        assert pin in (None, versions[normalise(package)]), f"{line} of {source}: the lock is older"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_excluded_packages_are_not_locked(profile):
    excluded = {normalise(line) for line in requirement_lines(ENVIRONMENT / f"{profile}.excludes")}
    assert not excluded & set(locked(f"{profile}.lock"))


def test_the_engines_have_the_same_versions_on_cpu_and_gpu():
    cpu, gpu = locked("cpu.lock"), locked("gpu.lock")
    for package in ("torch", "transformers", "sglang", "megatron-core", "megatron-bridge", "ray", "uv"):
        assert cpu[package] == gpu[package]
    assert locked("bootstrap.lock")["uv"] == cpu["uv"]


def test_the_table_of_versions_is_what_is_locked():
    locks = [locked("cpu.lock"), locked("gpu.lock") | locked("gpu-built.lock")]
    lines = (ENVIRONMENT / "versions.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    checked = 0
    for package, *cells in ([cell.strip() for cell in row] for row in rows):
        for lock, cell in zip(locks, cells[-2:], strict=True):
            if normalise(package) in locks[1]:
                assert cell == lock.get(package, "none"), (
                    f"{package}: run environment/lock.sh, then mend versions.md"
                )
                checked += 1
    assert checked >= 30


# ---- scripts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name):
    subprocess.run(["bash", "-n", str(ENVIRONMENT / name)], check=True)


def test_ci_runs_the_command_of_the_readme():
    import yaml

    command = "bash environment/test.sh"
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == command
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert command in [step.get("run") for step in workflow["jobs"]["cpu"]["steps"]]


TOOLS = (
    "awk basename bash cat cut df dirname du env flock getconf grep head id ln ls mkdir mv rm sed sha256sum sleep sort "
    "tail touch uname"
).split()


class Project:
    """A copy of environment/ under a path with spaces and accents, and a PATH of only what a test puts there."""

    def __init__(self, folder: Path):
        self.root, self.bin = folder / "a project é", folder / "bin"
        shutil.copytree(ENVIRONMENT, self.root / "environment")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.venv = self.root / ".venv"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "PIP_CONFIG_FILE": os.devnull,
            "LC_ALL": "C.UTF-8",
        }
        self.fake("df", "echo head; echo x 99999999 0 99999999 0% /")

    def fake(self, tool: str, script: str) -> None:
        """Puts a shell script on PATH in a tool's place."""
        (self.bin / tool).unlink(missing_ok=True)
        (self.bin / tool).write_text(f"#!{self.bin}/bash\n{script}\n")
        (self.bin / tool).chmod(0o755)

    def fake_python(self, venv: str) -> None:
        """A python3.12 that answers the questions of the set-up and runs `venv` when asked to make one."""
        self.fake("python3.12", f'case "$*" in *"-m venv"*) {venv} ;; esac')

    def start(self, *arguments: str, script: str = "run.sh", **env: str) -> subprocess.Popen:
        command = [str(self.bin / "bash"), f"environment/{script}", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.root, env=self.env | env, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments: str, **options: str) -> tuple[int, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out + err

    def shell(self, text: str, **env: str) -> str:
        """Output of bash lines after setup.sh was sourced for profile cpu."""
        lines = f". environment/setup.sh; choose_environment; {text}"
        command = [str(self.bin / "bash"), "-c", lines]
        done = subprocess.run(
            command, cwd=self.root, env=self.env | env, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def pretend_ready(self) -> None:
        """A .venv whose stamp says that all is installed."""
        (self.venv / "bin").mkdir(parents=True, exist_ok=True)
        (self.venv / "bin/python").write_text(f"#!{self.bin}/bash\n")
        (self.venv / "bin/python").chmod(0o755)
        (self.venv / "made-by-environment-setup").touch()
        self.shell('wanted_stamp >"$STAMP"')


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def assert_teaches(result: tuple[int, str], *words: str) -> None:
    """Exit 1 and a message with the failure, its likely cause and the next step."""
    code, text = result
    assert code == 1, text
    for word in ("Set-up failed:", "likely cause:", "next:", *words):
        assert word in text, text


@pytest.mark.parametrize("script", ["run.sh", "test.sh", "lab.sh", "site.sh"])
def test_help_explains_without_setting_up(project, script):
    code, text = project.run("--help", script=script)
    assert code == 0 and f"bash environment/{script}" in text
    assert not project.venv.exists()


def test_without_python_3_12(project):
    project.fake("python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    project.fake("python3", "exit 1")
    assert_teaches(project.run(), "no working Python 3.12", "apt-get install python3.12")
    assert not project.venv.exists()


def test_python_without_its_venv_module(project):
    project.fake("python3.12", 'case "$*" in *ensurepip*) exit 1 ;; esac')
    assert_teaches(project.run(), "without its venv module", "python3.12-venv")


def test_pyenvs_python_is_found_behind_a_shim_that_fails(project, tmp_path):
    project.fake("python3.12", "exit 127")
    real = tmp_path / ".pyenv/versions/3.12.9/bin/python3.12"
    real.parent.mkdir(parents=True)
    real.write_text(f"#!{project.bin}/bash\n")
    real.chmod(0o755)
    assert project.shell("find_python; echo $PYTHON").strip() == str(real)


def test_too_little_disk(project):
    project.fake("df", "echo head; echo x 9999999 0 500000 0% /")
    assert_teaches(project.run(), "only 512 MB are free", "df -h")
    assert not project.venv.exists()


@pytest.mark.parametrize(
    ("tool", "script", "words"),
    [
        ("uname", "[ $1 = -s ] && echo Darwin || echo arm64", "Darwin on arm64"),
        ("uname", "[ $1 = -s ] && echo Linux || echo aarch64", "Linux on aarch64"),
        ("getconf", "echo glibc 2.31", "glibc 2.31"),
        ("getconf", "exit 1", "not glibc"),
    ],
)
def test_a_machine_that_does_not_fit(project, tool, script, words):
    project.fake(tool, script)
    assert_teaches(project.run(), words)


@pytest.mark.parametrize(
    ("version", "fits"), [("2.34", True), ("2.39", True), ("2.100", True), ("2.33", False)]
)
def test_glibc_versions_are_compared_as_numbers(project, version, fits):
    assert project.shell(f"at_least_2_34 'glibc {version}' && echo fits").strip() == ("fits" if fits else "")


def test_an_unknown_profile(project):
    assert_teaches(project.run("--profile", "gpu20b"), "no profile 'gpu20b'", "cpu, gpu, gpu-20b, cluster")


def test_a_gpu_profile_without_a_gpu_downloads_nothing(project):
    project.fake("nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert_teaches(project.run("--profile", "gpu-20b"), "needs an NVIDIA GPU", "--profile cpu")
    assert not (project.root / ".venv-gpu").exists()


def test_a_gpu_profile_without_a_compiler(project, tmp_path):
    project.fake("nvidia-smi", "echo 'GPU 0: a card'")
    result = project.run("--profile", "gpu", CUDA_HOME=str(tmp_path / "none"))
    assert_teaches(result, "nvcc", "GPT_OSS_TE_WHEEL")


def test_a_venv_of_somebody_else_is_left_alone(project):
    project.venv.mkdir()
    (project.venv / "precious").touch()
    assert_teaches(project.run(), "was not made by this set-up")
    assert (project.venv / "precious").exists()


def real_python(project: Project) -> None:
    """Puts a real Python 3.12 on PATH whose environments get their pip by a link (made in 1 s instead of 10)."""
    base = Path(sys.base_prefix)
    installed = importlib.util.find_spec("pip")
    pip = Path(installed.origin).parent if installed else base / "lib/python3.12/site-packages/pip"
    assert pip.is_dir(), "these tests run in an environment that has pip: bash environment/test.sh"
    site = "lib/python3.12/site-packages"
    project.fake(
        "python3.12",
        f'''[ "$2" = venv ] || exec "{base}/bin/python3.12" "$@"
        "{base}/bin/python3.12" -m venv --without-pip "$3" && ln -s "{pip}" "$3/{site}/pip"''',
    )


def test_an_index_that_cannot_be_reached(project):
    real_python(project)
    result = project.run(PIP_INDEX_URL="http://127.0.0.1:9/x", PIP_RETRIES="0", PIP_NO_CACHE_DIR="1")
    assert_teaches(result, "the package index cannot be reached", "PIP_INDEX_URL")
    assert not (project.venv / "set-up.stamp").exists()


def test_a_file_with_another_hash(project, tmp_path):
    real_python(project)
    version = locked("bootstrap.lock")["uv"]
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / f"wheels/uv-{version}-py3-none-any.whl", "w") as wheel:
        info = f"uv-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    result = project.run(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / "wheels"))
    assert_teaches(result, "hash is not the one in the lock")


def test_an_interrupted_set_up_ends_its_child_and_is_repaired(project, tmp_path):
    project.fake_python(f"echo $$ >'{tmp_path}/pid'; exec sleep 60")
    process = project.start()
    deadline = time.monotonic() + 20
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "next start repairs it" in err
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    (project.venv / "half-installed").touch()
    project.fake_python("exit 3")
    assert_teaches(project.run(), "did not work")
    assert not (project.venv / "half-installed").exists()


def test_a_second_start_reuses_the_environment(project):
    project.pretend_ready()
    begin = time.monotonic()
    code, text = project.run("--set-up-only")
    assert (code, text) == (0, "") and time.monotonic() - begin < 5


@pytest.mark.parametrize("name", ["environment/cpu.lock", "environment/bootstrap.lock", "pyproject.toml"])
def test_a_changed_lock_is_noticed(project, name):
    project.pretend_ready()
    assert project.shell("ready && echo ready").strip() == "ready"
    with (project.root / name).open("a") as file:
        file.write("# changed\n")
    assert project.shell("ready && echo ready").strip() == ""


def test_two_set_ups_at_once_do_not_collide(project):
    with (project.root / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = project.start("--set-up-only")
        assert "Another set-up is at work" in second.stdout.readline()
        project.pretend_ready()  # the first one finishes
        fcntl.flock(lock, fcntl.LOCK_UN)
        _, err = second.communicate(timeout=20)
    assert second.returncode == 0, err


def test_what_pip_is_configured_with_reaches_uv(project):
    project.pretend_ready()
    listing = "global.index-url='https://mirror.example/x'\nglobal.cert='/etc/ca.pem'\nglobal.timeout='99'"
    (project.venv / "bin/python").write_text(f'#!{project.bin}/bash\necho "{listing}"\n')
    show = 'tell_uv; echo "$UV_DEFAULT_INDEX $SSL_CERT_FILE $UV_HTTP_TIMEOUT [${UV_FIND_LINKS:-}]"'
    assert project.shell(show).strip() == "https://mirror.example/x /etc/ca.pem 99 []"
    given = {"PIP_INDEX_URL": "https://other.example/x", "UV_HTTP_TIMEOUT": "5"}
    assert project.shell(show, **given).strip() == "https://other.example/x /etc/ca.pem 5 []"
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"}
    assert project.shell(show, **offline).strip().endswith("[wheels]")
