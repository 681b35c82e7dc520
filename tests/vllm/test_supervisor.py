"""Whatever happens, nothing is left; and while somebody holds a server, it comes back."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from server_helpers import (
    HANG_SECS,
    family,
    sentinel_process,
    supervisor_processes,
    vllm_process,
    wait_gone,
    wait_nothing_left,
)

from beam_llm.vllm import supervisor
from beam_llm.vllm.server import Endpoint, VLLMServerError

# --- nothing is left ---------------------------------------------------------------------


@pytest.mark.parametrize("command", ["exit", "raise", "gc", "close"])
def test_nothing_is_left_after_the_holder_is_done(hold, standin, command):
    holder = hold(standin())
    processes = family(holder.ready())
    assert len(processes) == 6  # supervisor, sentinel, server, engine, worker, tracker
    holder.do(command)
    wait_gone(processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_the_holder_dies_by_a_signal(hold, standin, number):
    holder = hold(standin())
    processes = family(holder.ready())
    holder.signal(number)
    wait_gone(processes)


def test_nothing_is_left_of_a_server_that_ignores_sigterm(hold, standin, monkeypatch):
    holder = hold(standin(STANDIN_STUBBORN=1))
    processes = family(holder.ready())
    holder.signal(signal.SIGKILL)
    wait_gone(processes)


def test_nothing_is_left_after_fifty_kills_at_random_moments(hold, standin, runtime):
    chance = random.Random(3)
    spec = standin(STANDIN_STARTUP_SECS=0.2)
    for _ in range(50):
        holder = hold(spec)
        holder.wait("acquired")
        # Between the supervisor's first instruction and a server that has answered.
        threading.Event().wait(chance.uniform(0, 1.2))
        holder.signal(signal.SIGKILL)
        holder.join()
    wait_nothing_left(runtime)


def test_nothing_is_left_after_the_supervisor_is_killed_with_its_holder(hold, standin):
    holder = hold(standin())
    pid = holder.ready()
    processes = family(pid)
    holder.signal(signal.SIGSTOP)  # it cannot start another
    os.kill(pid, signal.SIGKILL)
    wait_gone(processes)
    holder.signal(signal.SIGKILL)


def test_nothing_is_left_after_the_supervisor_is_killed_at_random_moments(hold, standin, runtime):
    chance = random.Random(4)
    for _ in range(10):
        holder = hold(standin(STANDIN_STARTUP_SECS=0.2))
        holder.wait("acquired")
        threading.Event().wait(chance.uniform(0.1, 1.0))
        holder.signal(signal.SIGSTOP)
        for process in supervisor_processes(runtime):
            process.kill()
        holder.signal(signal.SIGKILL)
        holder.join()
        wait_nothing_left(runtime)


def test_the_sentinel_is_replaced_and_the_new_one_does_its_duty(hold, standin):
    holder = hold(standin())
    pid = holder.ready()
    old = sentinel_process(pid)
    old.kill()
    wait_gone([old])
    deadline = time.monotonic() + HANG_SECS
    while sentinel_process(pid) is None:
        assert time.monotonic() < deadline
    processes = family(pid)
    holder.signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    wait_gone(processes)
    holder.signal(signal.SIGKILL)


def test_what_supervisor_and_sentinel_leave_when_killed_together_the_next_clears(hold, standin):
    first = hold(standin())
    pid = first.ready()
    processes = family(pid)
    first.signal(signal.SIGKILL)
    both = [sentinel_process(pid), psutil.Process(pid)]
    for process in both:
        process.suspend()
    for process in both:
        process.kill()
    second = hold(standin())
    assert second.ready() != pid
    wait_gone(processes)


def test_a_forked_child_does_not_keep_the_hold(hold, standin):
    holder = hold(standin())
    processes = family(holder.ready())
    holder.do("fork")
    child = psutil.Process(holder.wait("forked")["pid"])
    holder.signal(signal.SIGKILL)
    wait_gone(processes)
    assert child.is_running()


# --- sharing -----------------------------------------------------------------------------


def test_two_processes_share_and_the_second_goes_on_without_the_first(hold, standin):
    first, second = hold(standin()), hold(standin())
    one, two = first.wait("ready"), second.wait("ready")
    assert one == two
    server = vllm_process(one["supervisor"])
    first.signal(signal.SIGKILL)
    first.join()
    third = hold(standin())
    assert third.wait("ready") == one
    assert server.is_running()


def test_different_identifiers_never_share(acquire, standin):
    one, two = acquire(standin("one")), acquire(standin("two"))
    assert one.wait_ready().url != two.wait_ready().url
    assert one.pid != two.pid


def test_another_process_with_other_settings_is_refused(hold, acquire, standin):
    hold(standin()).ready()
    with pytest.raises(VLLMServerError) as caught:
        acquire(standin(args=("--max-model-len=7",), STANDIN_SECRET="hidden")).wait_ready()
    message = str(caught.value)
    assert "'standin' runs already with other settings" in message
    assert "--max-model-len=7" in message
    assert "STANDIN_SECRET" in message
    assert "hidden" not in message


def test_leaving_and_coming_at_once_never_fails(acquire, standin):
    """The last holder leaves while the next arrives: taken on, or served by a new one."""
    chance = random.Random(5)
    spec = standin(STANDIN_STARTUP_SECS=0)
    server = acquire(spec)
    for round_number in range(60):
        if round_number % 10 == 0:
            server.wait_ready(HANG_SECS)
        else:
            threading.Event().wait(chance.uniform(0, 0.1))
        server.close()
        server = acquire(spec)
    assert server.wait_ready(HANG_SECS)


def test_many_processes_start_one_server(hold, standin):
    holders = [hold(standin()) for _ in range(6)]
    assert len({holder.ready() for holder in holders}) == 1


# --- it comes back -----------------------------------------------------------------------


def test_a_killed_server_is_restarted(acquire, standin):
    server = acquire(standin())
    endpoint = server.wait_ready()
    vllm = vllm_process(server.pid)
    old = [vllm, *vllm.children(recursive=True)]
    vllm.kill()
    again = server.wait_ready(HANG_SECS, after_failure_of=endpoint)
    assert again.generation == endpoint.generation + 1
    wait_gone(old)


def test_a_server_whose_engine_died_is_restarted(acquire, standin):
    server = acquire(standin())
    endpoint = server.wait_ready()
    vllm_process(server.pid).children()[0].kill()
    again = endpoint
    while again == endpoint:  # healthy, until vLLM itself has noticed its engine's death
        again = server.wait_ready(HANG_SECS, after_failure_of=endpoint)
    assert again.generation == 2


def test_who_comes_while_a_crashed_server_is_cleared_away_waits_for_the_next(
    hold, acquire, standin
):
    holder = hold(standin())
    pid = holder.ready()
    vllm_process(pid).kill()
    server = acquire(standin())
    failed = Endpoint("http://127.0.0.1:1", generation=1)
    assert server.wait_ready(HANG_SECS, after_failure_of=failed).generation == 2
    assert server.pid == pid


def test_a_healthy_server_is_confirmed(acquire, standin):
    server = acquire(standin())
    endpoint = server.wait_ready()
    assert server.wait_ready(HANG_SECS, after_failure_of=endpoint) == endpoint


def test_a_server_whose_supervisor_died_comes_back(acquire, standin):
    server = acquire(standin())
    endpoint = server.wait_ready()
    pid = server.pid
    processes = family(pid)
    os.kill(pid, signal.SIGKILL)
    again = server.wait_ready(HANG_SECS, after_failure_of=endpoint)
    assert again.generation > endpoint.generation
    assert server.pid != pid
    wait_gone(processes)


def test_restarts_are_bounded(acquire, standin, monkeypatch):
    server = acquire(standin(STANDIN_STARTUP_SECS=0))
    endpoint = server.wait_ready()
    for generation in range(2, 7):
        vllm_process(server.pid).kill()
        endpoint = server.wait_ready(HANG_SECS, after_failure_of=endpoint)
        assert endpoint.generation == generation
    vllm_process(server.pid).kill()
    with pytest.raises(VLLMServerError, match="crashed 6 times") as caught:
        server.wait_ready(HANG_SECS, after_failure_of=endpoint)
    assert "SIGKILL" in str(caught.value)


# --- it cannot start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("badflag", ["exited with code 2", "bad flag: unrecognized arguments: --no-such"]),
        ("oom", ["exited with code 1", "out of memory: torch.OutOfMemoryError: CUDA out of"]),
        ("model", ["exited with code 1", "the model is missing: OSError: Repo id must be"]),
        ("port", ["exited with code 1", "the port is in use: OSError: [Errno 98]"]),
    ],
)
def test_a_server_that_cannot_start_says_why(acquire, standin, kind, words):
    server = acquire(standin(STANDIN_FAIL=kind))
    with pytest.raises(VLLMServerError) as caught:
        server.wait_ready()
    for word in [*words, "server 'standin'", "last lines of its output", str(server.log_path)]:
        assert word in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert "other traceback" not in repr(server)


def test_a_start_that_takes_too_long_says_what_it_was_doing(acquire, standin):
    server = acquire(standin(STANDIN_FAIL="hang", startup_timeout_secs=2.0))
    with pytest.raises(VLLMServerError, match=r"within 2 s \(startup_timeout_secs\).*warming up"):
        server.wait_ready()


def test_a_lost_port_is_replaced(acquire, standin, tmp_path):
    once = tmp_path / "once"
    once.touch()
    server = acquire(standin(STANDIN_FAIL="port", STANDIN_FAIL_ONCE=once))
    assert server.wait_ready().generation == 1
    assert not once.exists()


def test_a_failed_server_can_be_asked_for_again(acquire, standin, tmp_path):
    once = tmp_path / "once"
    once.touch()
    spec = standin(STANDIN_FAIL="oom", STANDIN_FAIL_ONCE=once)
    with pytest.raises(VLLMServerError):
        acquire(spec).wait_ready()
    assert acquire(spec).wait_ready()


# --- details -----------------------------------------------------------------------------


def test_the_supervisor_imports_nothing_heavy():
    program = (
        "import sys, beam_llm.vllm.supervisor;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    output = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "msgspec" in output
    assert not {"apache_beam", "vllm", "aiohttp", "grpc", "numpy", "yaml"} & set(output)


def test_the_log_is_bounded(tmp_path):
    program = """
import asyncio, sys, os
from pathlib import Path
from beam_llm.vllm import output as module
module._MAX_LOG_BYTES = 1000
log = Path(sys.argv[1])
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
async def run():
    stream = asyncio.StreamReader()
    for number in range(1000):
        stream.feed_data(b"line %d\\n" % number)
    stream.feed_eof()
    output = module.Output(log, lambda: None)
    await output.read(stream)
    assert "line 999" in output.tail()
    for _ in range(100):
        output._keep(b"x" * 100)
asyncio.run(run())
"""
    log = tmp_path / "x.log"
    subprocess.run([sys.executable, "-c", program, str(log)], check=True)
    assert log.stat().st_size <= 1000
    assert log.with_suffix(".log.1").exists()


def test_the_port_is_kept_for_the_server_until_it_listens():
    keeper = supervisor._keep_port()
    address = keeper.getsockname()
    with keeper, socket.socket() as stranger, socket.socket() as ours:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ours.bind(address)
        ours.listen()
        with socket.create_connection(address):
            pass


def test_nothing_is_left_when_the_runtime_directory_disappears(hold, standin, runtime):
    holder = hold(standin())
    processes = family(holder.ready())
    shutil.rmtree(runtime / "beam-llm")  # as a logout does with /run/user/UID
    holder.signal(signal.SIGKILL)
    wait_gone(processes)


def test_a_successor_keeps_its_socket_when_the_directory_was_made_anew(hold, standin, runtime):
    first = hold(standin())
    processes = family(first.ready())
    shutil.rmtree(runtime / "beam-llm")
    hold(standin()).ready()
    sockets = list((runtime / "beam-llm").glob("*.sock"))
    first.signal(signal.SIGKILL)
    wait_gone(processes)
    assert list((runtime / "beam-llm").glob("*.sock")) == sockets
    assert len(sockets) == 1
