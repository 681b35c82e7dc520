"""What is measured in processes of their own."""

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.common import ROOT

PIPELINE = ROOT / "tests/corpus/good/two_steps.yaml"
CORPUS = [ROOT / "tests/corpus/good", ROOT / "yaml_examples"]
VARIABLES = {"model": "m", "input": "i", "output": "o", "endpoint": "http://127.0.0.1:1/v1"}
STEP = """\
    - type: VLLMChat
      name: Ask {i}
      input: Rows
      config:
        model: m
        messages:
          - role: user
            content: "Number {i}: {{text}}"
        output_field: reply
        sampling: {{max_tokens: 8, temperature: 0}}
"""


def warm_rate(repeats: int) -> dict[str, float]:
    """Files a second in this process, by wall time and by processor time."""
    from beam_llm.cli.validate import validate

    arguments = [f"{k}={v}" for k, v in VARIABLES.items()]
    files = sum(len(list(folder.glob("*.yaml"))) for folder in CORPUS)
    folders = [str(folder) for folder in CORPUS]
    rates: list[tuple[float, float]] = []
    with open(os.devnull, "w") as nowhere:
        sys.stderr = nowhere
        for _ in range(repeats + 1):
            began, began_cpu = time.perf_counter(), time.process_time()
            if validate(folders, arguments, style="text"):
                raise SystemExit("the corpus is not clean")
            rates.append(
                (files / (time.perf_counter() - began), files / (time.process_time() - began_cpu))
            )
        sys.stderr = sys.__stderr__
    walls, cpus = zip(*rates[1:], strict=True)
    return {"files": files, "wall": statistics.median(walls), "cpu": statistics.median(cpus)}


def timed(text: str) -> dict[str, float]:
    """Checks a text in this process: processor time, problems, and the memory it took."""
    from beam_llm.pipelines import check_source

    check_source("warm.yaml", PIPELINE.read_text(), {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    checked = check_source("p.yaml", text, {})
    took = time.process_time() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"secs": took, "problems": len(checked.findings), "mb": (after - before) / 1024}


def timed_bomb(name: str) -> dict[str, float]:
    return timed(BOMBS[name]())


def timed_lines(lines: int) -> dict[str, float]:
    return timed(long_pipeline(lines))


def long_pipeline(lines: int) -> str:
    head = (
        "pipeline:\n  transforms:\n    - type: Create\n      name: Rows\n"
        "      config: {elements: [{text: hello}]}\n"
    )
    steps = (lines - head.count("\n")) // STEP.count("\n")
    return head + "".join(STEP.format(i=i) for i in range(steps))


def bomb(levels: int, around: str) -> str:
    first = "a0: &a0 {k: 1}" if "<<" in around else "a0: &a0 [x, x, x]"
    lines = [
        f"a{i + 1}: &a{i + 1} " + around.format(", ".join([f"*a{i}"] * 10)) for i in range(levels)
    ]
    return "\n".join([first, *lines, f"pipeline: {{transforms: *a{levels}}}", ""])


BOMBS: dict[str, Callable[[], str]] = {
    "aliases, a billionfold": lambda: bomb(9, "[{}]"),
    "merge keys, a billionfold": lambda: bomb(9, "{{<<: [{}]}}"),
    "10,000 levels of lists": lambda: "pipeline: " + "[" * 10_000 + "]" * 10_000,
    "10,000 levels of blocks": lambda: "\n".join(" " * i + "a:" for i in range(10_000)),
    "keys without end, in a line": lambda: "{" + "a," * 4_000_000,
    "keys without end, in lines": lambda: "\n".join(f"k{i}: 1" for i in range(900_000)),
    "a key of 10 million characters": lambda: "k" * 9_999_990,
    "documents without end": lambda: "---\n" * 2_000_000,
    "a template's loop": lambda: "{% for i in range(100000) %}{% for j in range(100000) %}xxxxxxxx"
    "{% endfor %}{% endfor %}",
}  # fmt: skip
