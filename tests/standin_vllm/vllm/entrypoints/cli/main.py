"""A stand-in for `vllm serve`: the same processes, pages and errors, in half a second.

It is found instead of vLLM by putting `tests/standin_vllm` on a server's PYTHONPATH.

| variable | effect |
| --- | --- |
| STANDIN_STARTUP_SECS | time from the first line of output to the first answer (0.05) |
| STANDIN_FAIL | badflag, oom, model, port: fails as vLLM does; hang: never answers |
| STANDIN_FAIL_ONCE | a file: with STANDIN_FAIL, fails only while it exists, and removes it |
| STANDIN_LATENCY_SECS | time every completion takes (0) |
| STANDIN_LOG | a file: each completion answered appends its prompt as a line of JSON |
| STANDIN_OBEDIENT | any value: replies obey constraints and `max_tokens`; prompts have a limit |
| STANDIN_STUBBORN | any value: the process itself ignores SIGTERM |

A prompt that contains BAD is answered by 400; the first time a prompt comes, FLAKY429 and
FLAKY500 in it by 429 and 500, CRASH by this process's death by SIGKILL (once in all with
STANDIN_LOG, beside which it is noted; else once in every server started). SLOW takes a
second. Any other prompt is its own completion.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ENGINE = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-S", "-c",
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
    "signal.pause()", *sys.argv[1:]], stdout=subprocess.PIPE, env={})
worker.stdout.readline()
print(flush=True)
while True:
    signal.pause()
"""
TRACKER = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(flush=True)
os.read(0, 1)
"""
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} 0.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="{model}"}} {prompt_tokens}
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="{model}"}} {cached_tokens}
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="{model}"}} {prompt_tokens}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="{model}"}} {completion_tokens}
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{model}"}} {answered}
vllm:request_success_total{{engine="0",finished_reason="length",model_name="{model}"}} 0.0
vllm:request_success_total{{engine="0",finished_reason="abort",model_name="{model}"}} 0.0
vllm:request_success_total{{engine="0",finished_reason="error",model_name="{model}"}} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="128",engine="0",kv_cache_max_concurrency="22.75"}} 1.0
"""


def say(text: str, level: str = "INFO", process: str = "APIServer") -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(
        f"\x1b[0;36m({process} pid={os.getpid()})\x1b[0;0m {level} {stamp} [standin.py:1] {text}",
        flush=True,
    )


def fail(kind: str) -> None:
    if kind == "badflag":
        print("usage: vllm serve [model_tag] [options]", file=sys.stderr)
        sys.exit(_last("vllm serve: error: unrecognized arguments: --no-such-flag", 2))
    if kind == "oom":
        say("EngineCore failed to start.", "ERROR", "EngineCore")
        say(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "ERROR",
            "EngineCore",
        )
        sys.exit(
            _last(
                "RuntimeError: Engine core initialization failed. See root cause above. "
                "Failed core proc(s): {}",
                1,
            )
        )
    if kind == "model":
        sys.exit(
            _last(
                "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
                "'/no/such/model'. Use `repo_type` argument if needed.",
                1,
            )
        )
    if kind == "port":
        sys.exit(_last("OSError: [Errno 98] Address already in use", 1))
    raise ValueError(kind)


def _last(line: str, code: int) -> int:
    print(line, file=sys.stderr, flush=True)
    return code


def start_children() -> list[subprocess.Popen[bytes]]:
    """As vLLM: an engine with a worker, whose new names hide their environment, and a tracker.

    Tests find them by the server's mark among their arguments, where ours does not look.
    """
    mark = os.environ.get("BEAM_LLM_SERVER", "")
    children = []
    for program, env in ((ENGINE, {}), (TRACKER, dict(os.environ))):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", program, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        child.stdout.readline()  # its signals are set
        children.append(child)
    return children


class Server:
    """The HTTP side, on bare asyncio: aiohttp would be the bottleneck of what it measures."""

    def __init__(self, model: str, names: list[str], max_model_len: int, engine):
        self.model = model
        self.names = names
        self.max_model_len = max_model_len
        self.engine = engine
        self.latency = float(os.environ.get("STANDIN_LATENCY_SECS", "0"))
        log = os.environ.get("STANDIN_LOG")
        self.log = open(log, "a", buffering=1) if log else None  # noqa: SIM115
        self.seen: set[str] = set()
        self.crashes = Path(f"{log}.crashes") if log else None
        if self.crashes is not None and self.crashes.exists():
            self.seen |= {json.loads(line) for line in self.crashes.read_text().splitlines()}
        self.prefixes: set[str] = set()
        self.running = self.answered = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def error(self, code: int, kind: str, message: str, param: str | None = None):
        error = {"message": message, "type": kind, "param": param, "code": code}
        return code, json.dumps({"error": error}).encode()

    def respond(self, method: str, path: str, body: bytes):
        """The status and body of an answer, or a coroutine for it where it takes time."""
        if path == "/health":
            return (503 if self.engine.poll() is not None else 200), b""
        if path == "/v1/models":
            data = [
                {"id": name, "object": "model", "owned_by": "vllm", "root": self.model,
                 "max_model_len": self.max_model_len}
                for name in self.names
            ]  # fmt: skip
            return 200, json.dumps({"object": "list", "data": data}).encode()
        if path == "/metrics":
            page = METRICS.format_map({**vars(self), "model": self.names[0]})
            return 200, page.encode()
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            return self.complete(json.loads(body), chat="chat" in path)
        return self.error(404, "NotFoundError", "Not Found")

    def complete(self, request, *, chat: bool):
        if request.get("model") and request["model"] not in self.names:
            return self.error(
                404,
                "NotFoundError",
                f"The model `{request.get('model')}` does not exist.",
                "model",
            )
        prompt = request["messages"][-1]["content"] if chat else request["prompt"]
        if not isinstance(prompt, str):
            return self.error(400, "BadRequestError", "prompt must be a string", "prompt")
        maximum = request.get("max_tokens") or 0
        if "BAD" in prompt or maximum > self.max_model_len:
            message = (
                f"max_tokens={maximum} cannot be greater than max_model_len={self.max_model_len}."
                if maximum > self.max_model_len
                else "This model's maximum context length is exceeded by BAD prompts."
            )
            return self.error(400, "BadRequestError", message, "input")
        if ("FLAKY" in prompt or "CRASH" in prompt) and prompt not in self.seen:
            self.seen.add(prompt)
            if "FLAKY429" in prompt:
                return self.error(429, "RateLimitError", "Too many requests")
            if "FLAKY500" in prompt:
                return self.error(500, "InternalServerError", "Internal server error")
            if "CRASH" in prompt:
                if self.crashes is not None:
                    with self.crashes.open("a") as file:
                        file.write(json.dumps(prompt) + "\n")
                os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("STANDIN_OBEDIENT"):
            return self.obey(request, prompt, chat)
        latency = self.latency + ("SLOW" in prompt)
        return self.later(latency, prompt, chat) if latency else self.answer(prompt, chat)

    def obey(self, request, prompt: str, chat: bool):
        if prompt.count(" ") >= self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            return self.error(400, "BadRequestError", message, "input")
        text = prompt
        if choices := request.get("structured_outputs", {}).get("choice"):
            text = choices[0]
        elif form := request.get("response_format"):
            samples = {"string": "a", "integer": 1}
            properties = form["json_schema"]["schema"]["properties"]
            text = json.dumps({k: samples[rule["type"]] for k, rule in properties.items()})
        tokens = request.get("max_tokens") if request.get("ignore_eos") else None
        return self.answer(prompt, chat, text, tokens)

    async def later(self, latency: float, prompt: str, chat: bool):
        self.running += 1
        try:
            await asyncio.sleep(latency)
        finally:
            self.running -= 1
        return self.answer(prompt, chat)

    def answer(self, prompt: str, chat: bool, reply: str | None = None, spent: int | None = None):
        tokens = prompt.count(" ") + 1
        prefix = prompt[:64]
        cached = tokens // 2 if prefix in self.prefixes else 0
        if len(self.prefixes) < 10000:
            self.prefixes.add(prefix)
        self.answered += 1
        self.prompt_tokens += tokens
        self.cached_tokens += cached
        self.completion_tokens += tokens
        if self.log:
            self.log.write(json.dumps(prompt) + "\n")
        text = json.dumps(prompt if reply is None else reply)
        choice = (
            f'"message":{{"role":"assistant","content":{text},"refusal":null}}'
            if chat
            else f'"text":{text}'
        )
        kind = "chat.completion" if chat else "text_completion"
        return 200, (
            f'{{"id":"cmpl-1","object":"{kind}","created":1,"model":{json.dumps(self.names[0])},'
            f'"choices":[{{"index":0,{choice},"logprobs":null,"finish_reason":"stop",'
            f'"stop_reason":null}}],"usage":{{"prompt_tokens":{tokens},'
            f'"total_tokens":{tokens + (spent or tokens)},"completion_tokens":{spent or tokens},'
            f'"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}'
        ).encode()


class Connection(asyncio.Protocol):
    """HTTP/1.1 with kept connections and bodies of a stated length: what clients send."""

    def __init__(self, server: Server):
        self.server = server
        self.received = bytearray()
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data
        if self.task is None:
            self.process()

    def process(self):
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].decode("latin-1").lower()
            _, found, length = head.partition("\r\ncontent-length:")
            end += 4 + (int(length.partition("\r\n")[0]) if found else 0)
            if len(self.received) < end:
                return
            body = bytes(self.received[self.received.index(b"\r\n\r\n") + 4 : end])
            method, path, _ = self.received.split(b" ", 2)
            del self.received[:end]
            close = "\r\nconnection: close" in head
            answer = self.server.respond(method.decode(), path.decode().partition("?")[0], body)
            if not isinstance(answer, tuple):
                self.task = asyncio.create_task(self.wait(answer, close))
                return
            self.send(answer, close)

    async def wait(self, coming, close: bool):
        answer = await coming
        self.task = None
        self.send(answer, close)
        self.process()

    def send(self, answer, close: bool):
        status, body = answer
        kind = b"text/plain" if body[:1] == b"#" else b"application/json"
        self.transport.write(
            b"HTTP/1.1 %d X\r\nserver: standin\r\ncontent-type: %s\r\n"
            b"content-length: %d\r\n\r\n%s" % (status, kind, len(body), body)
        )
        if close:
            self.transport.close()

    def connection_lost(self, exc):
        if self.task is not None:
            self.task.cancel()


async def serve(options: argparse.Namespace) -> None:
    startup = float(os.environ.get("STANDIN_STARTUP_SECS", "0.05"))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options.host, options.port))  # as vLLM, long before it listens
    say(f"non-default args: {{'model': {options.model!r}}}")
    await asyncio.sleep(startup / 4)
    children = start_children()
    say("Initializing a V1 LLM engine (v0.32.0)", process="EngineCore")
    await asyncio.sleep(startup / 4)
    say(f"Starting to load model {options.model}...", process="Worker")
    await asyncio.sleep(startup / 4)
    say("CPU KV cache size: 46,592 tokens", process="EngineCore")
    await asyncio.sleep(startup / 4)
    if os.environ.get("STANDIN_FAIL") == "hang":
        await asyncio.Event().wait()
    server = Server(
        options.model,
        options.served_model_name or [options.model],
        options.max_model_len,
        children[0],
    )
    say(f"Starting vLLM server on http://{options.host}:{options.port}")
    stopped = asyncio.Event()
    if "STANDIN_STUBBORN" not in os.environ:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Connection(server), sock=listener, backlog=2048):
        engine = asyncio.create_task(asyncio.to_thread(children[0].wait))
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait({engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        # The worker is not this process's to stop: only the supervisor finds it.
        children[0].kill()
        os._exit(0)


def main() -> None:
    if "STANDIN_STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    once = os.environ.get("STANDIN_FAIL_ONCE")
    kind = os.environ.get("STANDIN_FAIL", "")
    if once is not None:
        try:
            Path(once).unlink()
        except FileNotFoundError:
            kind = ""
    if kind and kind != "hang":
        fail(kind)
    parser = argparse.ArgumentParser("vllm")
    parser.add_argument("subcommand", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--max-model-len", type=int, default=100_000)
    options, _ = parser.parse_known_args()
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
