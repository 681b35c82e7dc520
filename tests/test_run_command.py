"""`beam-llm run` as a person meets it: a process, its words, its exit code, what it leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from beam_llm.vllm.supervisor import MARKER

ROOT = Path(__file__).parent.parent

PIPELINE = """\
# A comment with {{ braces }}
pipeline:
  transforms:
    - type: Create
      name: Rows
      config:
        elements:
          - {id: 1, text: one}
          - {id: 2, text: two BAD}
          - {id: 3, text: three}
    - type: VLLMCompletions
      name: Ask
      input: Rows
      config:
        model: m
        prompt: "{text}"
        error_handling: {output: failures}
    - type: WriteToJson
      name: Results
      input: Ask
      config: {path: "%(out)s/results.json"}
    - type: WriteToJson
      name: Failed
      input: Ask.failures
      config: {path: "%(out)s/failed.json"}
"""


@pytest.fixture
def environment(standin_env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    runtime = tmp_path / "run"
    runtime.mkdir()
    return {**os.environ, **standin_env, "XDG_RUNTIME_DIR": str(runtime)}


def write(tmp_path: Path, text: str = PIPELINE) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text % {"out": tmp_path} if "%(out)s" in text else text)
    return path


def command(path: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "beam_llm", "run", str(path), *arguments]


def run(
    path: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(path, *arguments), env=environment, capture_output=True, text=True, check=False
    )


def left_over(environment: dict[str, str]) -> list[psutil.Process]:
    """Processes of the servers under this runtime directory."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            mine = environment["XDG_RUNTIME_DIR"] in process.environ().get("XDG_RUNTIME_DIR", "")
            if mine and (
                MARKER in process.environ() or "supervisor" in " ".join(process.cmdline())
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(environment: dict[str, str]) -> None:
    _, alive = psutil.wait_procs(left_over(environment), timeout=30)
    assert alive == []
    assert left_over(environment) == []


def test_a_run_says_what_came_of_it(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(write(tmp_path), environment)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "3: 2 answered, 1 failed" in said
    assert f"1 refused → Ask.failures → Failed ({tmp_path}/failed.json)" in said.replace(" /", "/")
    assert "of the prompt tokens came from it" in said
    assert "server start" in said
    (results,) = tmp_path.glob("results.json*")
    assert sorted(json.loads(line)["id"] for line in results.read_text().splitlines()) == [1, 3]
    assert "Traceback" not in done.stderr
    assert_nothing_left(environment)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("prompt:", "promt:"),
            [
                ":14:7: error: transforms[1].config.prompt: required, and missing",
                ":16:9: error: transforms[1].config.promt: unknown key; did you mean 'prompt'?",
            ],
        ),
        (
            ('"{text}"', '"{text"'),
            [":16:9: error: transforms[1].config.prompt: expected '}' before end of string"],
        ),
        (
            ("model: m", "model: m\n        server: {args: [--port=1]}"),
            [":16:25: error: transforms[1].config.server.args[0]: '--port=1' is not yours"],
        ),
    ],
)
def test_problems_of_our_steps_have_line_and_column(
    environment: dict[str, str], tmp_path: Path, change: tuple[str, str], expected: list[str]
) -> None:
    path = write(tmp_path, PIPELINE.replace(*change))
    done = run(path, environment)
    assert done.returncode == 1
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith(str(path)))
    assert len(lines) == len(expected)
    for line, words in zip(lines, sorted(expected), strict=True):
        assert line.startswith(f"{path}{words}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, 2, "pipeline.yaml: error: cannot be read: No such file or directory"),
        ("a: [", 1, "pipeline.yaml:1:5: error: not YAML: "),
        ("a: 1", 1, "not a Beam YAML pipeline: it has no 'pipeline:' mapping"),
        ("[1]", 1, "not a Beam YAML pipeline"),
        ("", 1, "not a Beam YAML pipeline"),
        ("pipeline: {a: {{ b }} }", 2, "'b' is undefined: give it with --var b=VALUE"),
        ("pipeline: {{ ", 1, "pipeline.yaml:1: error: Jinja: "),
        ("pipeline: {a: {{ 1 + 'a' }} }", 1, "Jinja: TypeError: "),
        ("pipeline: {a: {{ 1 // 0 }} }", 1, "Jinja: ZeroDivisionError: "),
        ("pipeline: {a: 2024-13-45}", 1, "not YAML: month must be in 1..12"),
        (
            "pipeline: &p {transforms: [*p]}",
            1,
            "an alias leads back to itself: values nest without end",
        ),
        ("pipeline: {type: chain, transforms: [{type: NoSuch}]}", 1, "NoSuch"),
        (
            PIPELINE.replace('"{text}"', '"{txt}"'),
            1,
            ":16:9: error: transforms[1].config.prompt: the input has no field 'txt'; did you mean",
        ),
    ],
)
def test_what_cannot_run_is_said_in_words(
    environment: dict[str, str], tmp_path: Path, text: str | None, code: int, words: str
) -> None:
    path = tmp_path / "pipeline.yaml" if text is None else write(tmp_path, text)
    done = run(path, environment)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_left(environment)


def test_odd_names_and_neighbours_of_the_output_do_not_spoil_the_summary(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "results.json-old").mkdir()
    text = PIPELINE.replace("name: Results", 'name: "Results [/v2]"')
    text = text.replace("model: m", 'model: m\n        model_identifier: "t[/x]"')
    done = run(write(tmp_path, text), environment)
    assert done.returncode == 0, done.stderr
    assert "Results [/v2]" in done.stdout
    assert "(t[/x])" in done.stdout
    assert "results.json-old" not in done.stdout


def test_options_before_the_file_need_an_equals_sign(
    environment: dict[str, str], tmp_path: Path
) -> None:
    path = write(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "beam_llm", "run", "--runner", "FnApiRunner", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--runner before the file: write --runner=VALUE" in done.stderr


def test_misspelt_options_are_refused(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(write(tmp_path), environment, "--streming", "--runner=FnApiRunner")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "--streming: error: Beam has no such option; did you mean '--streaming'?"
    )
    assert_nothing_left(environment)


def test_warnings_are_said_and_do_not_stop_a_run(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = run(write(tmp_path, PIPELINE.replace("id: 3", "id: 03")), environment, "--preview=0")
    assert done.returncode == 0, done.stderr
    assert ":10:18: warning: transforms[0].config.elements[2].id: 03 is 3, an octal" in done.stderr


def test_a_wrong_variable_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(write(tmp_path), environment, "--var", "novalue")
    assert done.returncode == 2
    assert "--var novalue: error: not of the form NAME=VALUE" in done.stderr


def test_a_server_that_cannot_start_is_said_with_its_words(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = run(write(tmp_path), {**environment, "STANDIN_FAIL": "badflag"})
    assert done.returncode == 1
    assert "exited with code 2: bad flag" in done.stderr
    assert "The last lines of its output" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_left(environment)


def test_a_failed_row_without_an_error_output_is_said(
    environment: dict[str, str], tmp_path: Path
) -> None:
    text = PIPELINE.replace("        error_handling: {output: failures}\n", "")
    text = text[: text.index("    - type: WriteToJson\n      name: Failed")]
    done = run(write(tmp_path, text), environment)
    assert done.returncode == 1
    assert "VLLMCompletions: a row failed: This model's maximum context length" in done.stderr
    assert "error_handling: {output: NAME}" in done.stderr
    assert "Traceback" not in done.stderr
    assert_nothing_left(environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("when", ["starting", "asking"])
def test_a_signal_ends_the_run_and_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, number: int, when: str
) -> None:
    slow = {"STANDIN_STARTUP_SECS": "60"} if when == "starting" else {"STANDIN_LATENCY_SECS": "60"}
    path = write(tmp_path)
    with subprocess.Popen(
        command(path), env={**environment, **slow}, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        awaited = "importing" if when == "starting" else "ready after"
        seen = [next(line for line in process.stderr if awaited in line)]
        assert left_over(environment), seen
        process.send_signal(number)
        rest = process.stderr.read()
        code = process.wait(timeout=60)
    if number == signal.SIGINT:
        assert code == 130
        assert "interrupted" in rest
        assert "Traceback" not in rest
    else:
        assert code == -number
    assert_nothing_left(environment)


def test_help_is_quick_and_teaches() -> None:
    code = (
        "import sys\nfrom beam_llm.cli import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "print({'apache_beam', 'rich', 'jsonschema'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert "--var" in done.stdout
    assert "--runner=PrismRunner" in done.stdout


def test_without_a_command_the_help_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "beam_llm"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "demo-model" in done.stdout


def test_demo_data_has_real_text(tmp_path: Path) -> None:
    file = tmp_path / "new" / "questions.jsonl"
    done: Any = subprocess.run(
        [sys.executable, "-m", "beam_llm", "demo-data", str(file), "--packages=40"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert "120 questions about 40 installed packages" in done.stdout
    assert len({row["package"] for row in rows}) == 40
    assert len({row["guide"] for row in rows}) == 3
    # A KV block of vLLM on a CPU is 128 tokens, and a token at most a few characters.
    assert all(len(row["guide"]) > 500 for row in rows)
