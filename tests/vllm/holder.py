"""A process that holds a server, for tests to end in every way.

    python holder.py SPEC_JSON

Says `acquired`, `ready` and `failed MESSAGE` as they come, each on a line of JSON, and does
what its standard input says: `exit`, `raise`, `gc`, `close`, `fork`.
"""

import gc
import json
import os
import sys
import threading

import msgspec

from beam_llm.vllm.server import VLLMServer, VLLMServerError, VLLMServerSpec


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def report(server: VLLMServer) -> None:
    try:
        endpoint = server.wait_ready()
    except VLLMServerError as error:
        say("failed", message=str(error))
    else:
        say("ready", url=endpoint.url, supervisor=server.pid)


def main() -> None:
    server = VLLMServer.acquire(msgspec.json.decode(sys.argv[1], type=VLLMServerSpec))
    say("acquired")
    threading.Thread(target=report, args=[server], daemon=True).start()
    for line in sys.stdin:
        match line.strip():
            case "exit":
                return
            case "raise":
                raise RuntimeError("asked for")
            case "close":
                server.close()
                say("closed")
            case "gc":
                server.wait_ready()  # the thread above has finished with it
                del server
                gc.collect()
                say("collected")
            case "fork":
                if os.fork() == 0:  # outlives its parent, until its input ends
                    say("forked", pid=os.getpid())
                    sys.stdin.read()
                    os._exit(0)
            case other:
                raise ValueError(other)


if __name__ == "__main__":
    main()
