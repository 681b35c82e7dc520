"""The holder's side: specs, arguments, the object and what it shows."""

import gc
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
from server_helpers import HANG_SECS, family, wait_gone

from beam_llm import progress
from beam_llm.vllm import server as server_module
from beam_llm.vllm.server import (
    VLLMServer,
    VLLMServerError,
    VLLMServerSpec,
    args_from_vllm_server_kwargs,
    runtime_dir,
)

# --- specs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port=8000"], "args[0]: '--port=8000' is not yours to set: it listens on a free port"),
        (["--enforce-eager", "--host", "0.0.0.0"], "args[1]: '--host' is not yours"),
        (["--model", "x"], "args[0]: '--model' is not yours to set: give the model as"),
        (["--uds=/tmp/x"], "'--uds=/tmp/x' is not yours"),
        (["--ssl_keyfile=x"], "'--ssl_keyfile=x' is not yours"),
        (["some/model"], "args[0]: 'some/model' would name the model"),
        (["--seed=1", "some/model"], "args[1]: 'some/model' would name the model"),
        (["--max-model-len 4096"], "holds two arguments: write --max-model-len=4096"),
        ([4096], "args[0]: 4096 is int, not a string: write '4096'"),
    ],
)
def test_arguments_that_are_not_the_users_to_set(args, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are what matters
        VLLMServerSpec(identifier="x", model="m", args=tuple(args))
    assert words in str(caught.value)


def test_arguments_with_their_values_apart_are_fine():
    args = ("--max-model-len", "4096", "--served-model-name", "a", "b", "-O", "3", "--no-x")
    assert VLLMServerSpec(identifier="x", model="m", args=args).args == args


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"identifier": ""}, "identifier: '' is not a non-empty string"),
        ({"model": None}, "model: None is not"),
        ({"model": "--help"}, "looks like a flag"),
        ({"args": "--seed=1"}, "is one string; give a list"),
        ({"env": {"A": 1}}, "env: 'A': 1 is not a string for a string"),
        ({"startup_timeout_secs": 0}, "startup_timeout_secs: 0 is not positive"),
    ],
)
def test_specs_are_checked(settings, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        VLLMServerSpec(**{"identifier": "x", "model": "m", **settings})
    assert words in str(caught.value)


def test_our_defaults_yield_to_the_users():
    spec = VLLMServerSpec(identifier="x", model="m", args=("--no-enable-prompt-tokens-details",))
    assert spec.launch().args == (*spec.args, "--disable-uvicorn-access-log")


def test_variables_the_worker_lacks_are_named(monkeypatch):
    monkeypatch.setenv("THERE", "1")
    spec = VLLMServerSpec(identifier="x", model="m", env_from_worker=("THERE", "MISSING_A", "B_"))
    with pytest.raises(VLLMServerError, match=r"lacks MISSING_A, B_ \(env_from_worker\)"):
        VLLMServer.acquire(spec)


def test_specs_travel():
    spec = VLLMServerSpec(identifier="x", model="m", args=("--seed=1",), env={"A": "b"})
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_beams_server_kwargs_of_any_type():
    kwargs = {
        "max_model_len": 2048,
        "gpu-memory-utilization": 0.5,
        "enforce_eager": None,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "headless": False,
        "dtype": "bfloat16",
        "hf_overrides": {"a": [1, None]},
        "--seed": 0,
    }
    assert args_from_vllm_server_kwargs(kwargs) == (
        "--max-model-len=2048",
        "--gpu-memory-utilization=0.5",
        "--enforce-eager",
        "--enable-prefix-caching",
        "--no-async-scheduling",
        "--dtype=bfloat16",
        '--hf-overrides={"a": [1, null]}',
        "--seed=0",
    )


# --- the object --------------------------------------------------------------------------


def test_acquire_returns_at_once_and_shares(acquire, standin):
    server = acquire(standin())
    assert server.endpoint is None
    assert server.startup_secs is None
    assert "starting" in repr(server) or "importing" in repr(server)
    others = []
    threads = [threading.Thread(target=lambda: others.append(acquire(standin()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(other is server for other in others)
    endpoint = server.wait_ready()
    assert server.endpoint == endpoint
    assert endpoint.url in repr(server)
    assert server.startup_secs > 0


def test_the_same_identifier_with_other_settings_is_an_error(acquire, standin):
    acquire(standin(model="one"))
    with pytest.raises(VLLMServerError, match="model 'one' against 'two'"):
        acquire(standin(model="two"))


def test_the_server_stops_when_nobody_refers_to_it(standin):
    server = VLLMServer.acquire(standin())
    server.wait_ready()
    processes = family(server.pid)
    alive = weakref.ref(server)
    del server
    gc.collect()
    assert alive() is None
    wait_gone(processes)


def test_a_closed_server_says_so(standin):
    with VLLMServer.acquire(standin()) as server:
        server.wait_ready()
        processes = family(server.pid)
    with pytest.raises(VLLMServerError, match="closed"):
        server.wait_ready()
    server.close()
    wait_gone(processes)


def test_closing_wakes_who_waits(acquire, standin):
    server = acquire(standin(STANDIN_FAIL="hang"))
    threading.Timer(0.5, server.close).start()
    with pytest.raises(VLLMServerError, match="closed"):
        server.wait_ready(HANG_SECS)


def test_waiting_has_its_time(acquire, standin):
    server = acquire(standin(STANDIN_FAIL="hang"))
    with pytest.raises(TimeoutError, match=r"not ready after 0\.2 s"):
        server.wait_ready(0.2)


def test_it_cannot_be_pickled(acquire, standin):
    with pytest.raises(TypeError, match="send its spec"):
        pickle.dumps(acquire(standin()))


def _in_fork(server, spec, connection):
    try:
        server.wait_ready()
    except VLLMServerError as error:
        connection.send(str(error))
    mine = VLLMServer.acquire(spec)
    connection.send((mine is server, mine.wait_ready().url, mine.pid))
    connection.close()


def test_a_forked_child_acquires_anew(acquire, standin):
    server = acquire(standin())
    url = server.wait_ready().url
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_in_fork, args=[server, standin(), theirs]
    )
    process.start()
    assert "acquire it here" in ours.recv()
    assert ours.recv() == (False, url, server.pid)
    process.join()
    ours.close()
    theirs.close()
    assert server.wait_ready(after_failure_of=server.endpoint).url == url


def test_nothing_imports_vllm_or_beam():
    program = (
        "import sys, beam_llm.vllm.server;"
        "sys.exit(' '.join({'vllm', 'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_runtime_directory_of_somebody_elses_is_refused(runtime):
    directory = runtime_dir()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    with pytest.raises(VLLMServerError, match="mode 0777"):
        runtime_dir()
    directory.rmdir()
    directory.symlink_to("/tmp")
    with pytest.raises(VLLMServerError, match="must be a directory"):
        runtime_dir()
    directory.unlink()


def test_a_path_too_long_for_a_socket_is_named(runtime, monkeypatch, standin):
    directory = runtime / ("x" * 90)
    directory.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with pytest.raises(VLLMServerError, match="too long for a socket"):
        VLLMServer.acquire(standin()).wait_ready()


def test_a_supervisor_that_cannot_be_started_is_named(acquire, standin, monkeypatch):
    monkeypatch.setattr(server_module, "_SUPERVISOR", "raise SystemExit(1)")
    with pytest.raises(VLLMServerError, match=r"cannot reach its supervisor.*\.log"):
        acquire(standin()).wait_ready()


# --- what a person sees ------------------------------------------------------------------


@pytest.fixture
def events():
    seen = []
    progress.set_server_listener(lambda *event: seen.append(event))
    yield seen
    progress.set_server_listener(None)


def test_a_listener_hears_the_phases_in_order(acquire, standin, events):
    acquire(standin(STANDIN_STARTUP_SECS=0.4)).wait_ready()
    phases = [phase for _, state, phase, _, _ in events if state == "starting"]
    assert list(dict.fromkeys(phases)) == [
        "importing",
        "reading the model's configuration",
        "starting the engine",
        "loading weights",
        "warming up",
        "opening the API",
    ]
    assert {identifier for identifier, *_ in events} == {"standin"}


def test_elsewhere_phases_are_logged_once_and_restarts_warned_of(acquire, standin, caplog):
    caplog.set_level(logging.INFO, "beam_llm")
    server = acquire(standin())
    endpoint = server.wait_ready()
    os.kill(family(server.pid)[0].children()[1].pid, 9)
    server.wait_ready(after_failure_of=endpoint)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert sum("loading weights" in text for _, text in lines) <= 2
    assert [text for level, text in lines if level == "WARNING" and "killed by SIGKILL" in text]


def test_a_failure_is_logged_as_an_error(acquire, standin, caplog):
    with pytest.raises(VLLMServerError):
        acquire(standin(STANDIN_FAIL="badflag")).wait_ready()
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "unrecognized arguments" in record.getMessage()


def test_a_terminal_shows_one_line_rewritten_in_place(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress.report_server("x", "starting", "importing", 1.2)
    progress.report_server("x", "starting", "loading weights", 5.0)
    progress.report_server("x", "ready", "", 9.0, "http://127.0.0.1:1")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.endswith("· vLLM x: ready after 9.0 s on http://127.0.0.1:1\n")
