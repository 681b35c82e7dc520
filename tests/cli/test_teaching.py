"""`schema`, `explain`, `new`, `doctor` and `completion`, as a person meets them."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from beam_llm.cli.explain import paths
from beam_llm.knobs import walk
from beam_llm.registry import TRANSFORMS
from beam_llm.schemas import DRAFTS, published

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


def beam_llm(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "beam_llm", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    from beam_llm.cli import main

    try:
        code = main(arguments)
    except SystemExit as left:  # argparse refuses the command line
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def typed(command: list[str], keys: str, until: str, **environment: str) -> str:
    """Runs a command on a terminal, types keys, and waits for words on it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", **environment})
    seen = ""
    try:
        os.write(terminal, keys.encode())
        deadline = time.monotonic() + 60
        while until not in seen and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                try:
                    seen += os.read(terminal, 65536).decode(errors="replace")
                except OSError:  # it ended
                    break
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert until in seen, seen
    return seen


# schema


@pytest.mark.parametrize("draft", DRAFTS)
def test_schema_prints_a_document(capsys: pytest.CaptureFixture[str], draft: str) -> None:
    code, out, _ = in_process(capsys, "schema", "VLLMChat", "--draft", draft)
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(published(TRANSFORMS["VLLMChat"], draft)))


def test_schema_without_a_name_prints_all(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process(capsys, "schema")
    assert code == 0
    assert [document["title"] for document in json.loads(out)] == list(TRANSFORMS)


def test_schema_writes_what_is_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for draft in DRAFTS:
        code, out, _ = in_process(capsys, "schema", "--draft", draft, "--out", str(tmp_path))
        assert code == 0
        assert out.count("wrote ") == len(TRANSFORMS)
    written = {f.relative_to(tmp_path): f.read_text() for f in tmp_path.rglob("*.json")}
    folder = ROOT / "schemas"
    assert written == {f.relative_to(folder): f.read_text() for f in folder.rglob("*.json")}


def test_schema_of_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = in_process(capsys, "schema", "--pipeline", "--out", str(tmp_path))
    assert code == 0
    (file,) = tmp_path.iterdir()
    assert f"# yaml-language-server: $schema={file.name}" in out
    jsonschema.Draft7Validator.check_schema(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("schema", "VLLMChatt"), 2, "no transform 'VLLMChatt'; did you mean 'VLLMChat'?"),
        (("schema", "VLLMChat", "--pipeline"), 2, "--pipeline takes no NAME"),
        (("schema", "--out", "/dev/null/x"), 2, "/dev/null"),
        (("explain", "vllmchat"), 2, "did you mean 'VLLMChat'? (there are "),
        (("explain", "VLLMChat.sampling.max_token"), 2, "VLLMChat.sampling has no 'max_token'; did"
         " you mean 'max_tokens'? (there are max_tokens,"),
        (("explain", "VLLMChat.model.x"), 2, "VLLMChat.model is string: nothing is inside"),
        (("explain", "requests.max_retries"), 2, "say where: VLLMCompletions.requests.max_retries"),
        (("explain", ""), 2, "no transform ''"),
        (("new", "chatt"), 2, "invalid choice: 'chatt'"),
        (("completion", "csh"), 2, "invalid choice: 'csh'"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_words(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, expected: str
) -> None:
    got, out, err = in_process(capsys, *arguments)
    assert (got, out) == (code, "")
    assert expected in err


# explain


def test_everything_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for spec in TRANSFORMS.values():
        code, out, _ = in_process(capsys, "explain", spec.name)
        assert code == 0
        assert spec.urn in out
        for knob in walk(spec.config):
            code, out, _ = in_process(capsys, "explain", ".".join((spec.name, *knob.path)))
            assert code == 0
            words = " ".join(out.split())
            assert " ".join(knob.description.split()) in words
            if knob.unit:
                assert f"unit {knob.unit}" in words
            if knob.bounds_words():
                assert knob.bounds_words() in words
            if knob.example is not None:
                assert yaml.safe_load(out.partition("  example\n")[2]), out


def test_explain_says_type_bounds_unit_default_and_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = in_process(capsys, "explain", "VLLMChat.requests.timeout_secs")
    assert code == 0
    assert out == (
        "VLLMChat.requests.timeout_secs\n"
        "\n"
        "  Longest time one attempt of one request may take.\n"
        "\n"
        "  type     number > 0, ≤ 31536000\n"
        "  unit     seconds\n"
        "  default  600.0\n"
        "\n"
        "  example\n"
        "    requests:\n"
        "      timeout_secs: 600\n"
    )


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("VLLMChat.messages[0].role", "VLLMChat.messages.role"),
        ("VLLMChat.server.env.ANY_NAME", "VLLMChat.server.env"),
    ],
)
def test_explain_takes_paths_as_messages_have_them(
    capsys: pytest.CaptureFixture[str], name: str, same_as: str
) -> None:
    assert in_process(capsys, "explain", name) == in_process(capsys, "explain", same_as)


def test_explain_without_a_name_lists_the_transforms(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process(capsys, "explain")
    assert code == 0
    assert all(name in out for name in TRANSFORMS)


def test_explain_is_coloured_on_a_terminal() -> None:
    command = [sys.executable, "-m", "beam_llm", "explain", "VLLMChat.sampling"]
    seen = typed(command, "", "json_schema", COLUMNS="100")
    assert "\x1b[" in seen
    assert "\x1b[" not in beam_llm("explain", "VLLMChat.sampling").stdout


# new


@pytest.mark.parametrize("kind", ["chat", "completions", "streaming"])
def test_new_writes_a_valid_pipeline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "folder" / "mine.yaml"
    code, out, _ = in_process(capsys, "new", kind, str(file))
    assert code == 0
    assert f"beam-llm validate {file}" in out
    text = file.read_text()
    assert f"beam-llm run {file}" in text
    assert "PIPELINE.yaml" not in text
    code, out, err = in_process(capsys, "validate", "--strict", "--format=text", str(file))
    assert (code, out) == (0, ""), out + err

    assert in_process(capsys, "new", kind) == (0, text.replace(str(file), "PIPELINE.yaml"), "")
    code, _, err = in_process(capsys, "new", kind, str(file))
    assert code == 1
    assert f"{file} is there already" in err
    assert file.read_text() == text


def run_new(kind: str, env: dict[str, str], folder: Path, *options: str) -> list[dict[str, Any]]:
    """Writes a pipeline, runs it against the stand-in for vLLM, and gives what it wrote."""
    file = folder / f"{kind}.yaml"
    assert beam_llm("new", kind, str(file)).returncode == 0
    env = {**os.environ, **env}
    done = beam_llm("run", str(file), f"--var=output={folder}/out", *options, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Summary" in done.stdout
    files = [f for f in (folder / "out").glob("*.json*") if not f.name.startswith("failures")]
    return [json.loads(line) for f in files for line in f.read_text().splitlines()]


def test_a_new_chat_runs(standin_env: dict[str, str], tmp_path: Path) -> None:
    rows = run_new("chat", standin_env, tmp_path)
    assert sorted(row["id"] for row in rows) == [1, 2, 3]
    assert all(row["label"] for row in rows)


def test_a_new_completion_runs(standin_env: dict[str, str], tmp_path: Path) -> None:
    rows = run_new("completions", standin_env, tmp_path)
    assert {row["summary"].splitlines()[0] for row in rows} == {"Product: lamp", "Product: kettle"}


@pytest.mark.prism
def test_a_new_stream_runs(standin_env: dict[str, str], tmp_path: Path, prism: str) -> None:
    rows = run_new(
        "streaming",
        standin_env,
        tmp_path,
        "--streaming",
        "--runner=PrismRunner",
        f"--prism_location={prism}",
        "--environment_type=LOOPBACK",
    )
    assert len(rows) >= 5
    assert all(row["reply"] for row in rows)


# doctor


def test_doctor_finds_what_is_here() -> None:
    done = beam_llm("doctor", "--json", cwd=ROOT)
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    for name in ("Python", "beam-llm", "apache-beam", "vLLM", "runtime directory"):
        assert found[name]["status"] == "ok", found[name]
    assert re.match(r"2\.\d+\.\d+", found["apache-beam"]["found"])
    for name, program in (("Java", "java"), ("Maven", "mvn"), ("Go", "go")):
        assert (found[name]["status"] == "ok") == (shutil.which(program) is not None)
    said = beam_llm("doctor", cwd=ROOT)
    assert said.returncode == 0
    assert all(name in said.stdout for name in found)


def test_doctor_says_what_to_do_about_what_is_missing(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("JAVA_HOME", None)
    done = beam_llm("doctor", "--json", env=environment, cwd=tmp_path)
    assert done.returncode == 0
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    for name in ("Java", "Maven", "Go", "Prism"):
        assert found[name]["status"] == "missing"
        assert found[name]["advice"]


def test_doctor_fails_only_for_what_is_broken(tmp_path: Path) -> None:
    old = tmp_path / "msgspec-0.1.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: msgspec\nVersion: 0.1\n")
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "java").write_text("#!/bin/sh\nexit 3\n")
    (broken / "java").chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "PATH": f"{broken}:{os.environ['PATH']}",
    }
    environment.pop("JAVA_HOME", None)
    done = beam_llm("doctor", "--json", env=environment)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [f["name"] for f in report["findings"] if f["status"] == "broken"] == ["msgspec"]
    found = {finding["name"]: finding for finding in report["findings"]}
    assert "pip install 'msgspec" in found["msgspec"]["advice"]
    assert "does not work" in found["Java"]["found"]
    assert beam_llm("doctor", env=environment).returncode == 1


# completion


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("beam-llm expl\t", "beam-llm explain "),
        ("beam-llm explain VLLMChat.sampling.max\t", "max_tokens "),
        ("beam-llm schema VLLMCom\t", "VLLMCompletions "),
        ("beam-llm schema --dra\t", "--draft "),
        ("beam-llm new str\t", "streaming "),
    ],
)
def test_bash_completes(keys: str, expected: str, tmp_path: Path) -> None:
    start = tmp_path / "bashrc"
    start.write_text('PS1="> "\neval "$(beam-llm completion bash)"\necho ready\n')
    path = f"{BIN}:{os.environ['PATH']}"
    shell = ["bash", "--noprofile", "--rcfile", str(start), "-i"]
    # Readline takes keys that were typed before it was there, and echoes what it completes.
    typed(shell, keys, expected, PATH=path, HISTFILE="")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    code, out, _ = in_process(capsys, "completion", shell)
    assert code == 0
    assert "beam-llm" in out
    program = shutil.which(shell)
    if program is not None:
        check = subprocess.run([program, "-n"], input=out, text=True, check=False)
        assert check.returncode == 0


def test_paths_for_completion_are_all_explained() -> None:
    found = list(paths())
    assert len(set(found)) == len(found) > 150


# all of them


@pytest.mark.parametrize(
    "command",
    ["--help", "explain VLLMChat", "schema VLLMChat", "schema --pipeline", "new chat",
     "completion bash", "doctor --json"],
)  # fmt: skip
def test_commands_import_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom beam_llm.cli import main\n"
        f"try: main({command.split()!r})\nexcept SystemExit: pass\n"
        "print([m for m in ('apache_beam', 'vllm', 'torch', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
