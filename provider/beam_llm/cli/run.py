"""``beam-llm run``: a pipeline, its progress, and a summary."""

from __future__ import annotations

import contextlib
import glob
import itertools
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from beam_llm import PROVIDERS_YAML, progress
from beam_llm.cli.variables import parse_variables
from beam_llm.config import LLMConfig
from beam_llm.flows import Step
from beam_llm.pipelines import PipelineFile, PipelineFileError
from beam_llm.validation import nearest, server_spec
from beam_llm.vllm.server import VLLMServer

_LOCAL_RUNNERS = {"fnapirunner", "directrunner", "prismrunner", "bundlebaseddirectrunner"}
# Named in full: "DirectRunner" tries to download Prism first.
_DEFAULT_RUNNER = "FnApiRunner"
_LOG_EVERY_SECS = 10.0
_MAX_PREVIEWED = 10_000


def run_pipeline(
    path: str,
    variables: Sequence[str],
    beam_options: Sequence[str],
    *,
    preview: int = 5,
    verbose: bool = False,
) -> int:
    """Runs a pipeline file.

    Args:
      path: The Beam YAML file.
      variables: Jinja variables as ``NAME=VALUE``.
      beam_options: Options for Beam.
      preview: Rows of each local JSON output to show at the end.
      verbose: Whether to log at INFO level and to show tracebacks.

    Returns:
      The exit code.
    """
    began = time.monotonic()
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s"
    )
    if not verbose:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_not_noise)
    # Ours is what a log without a terminal shows of the progress.
    logging.getLogger("beam_llm").setLevel(logging.INFO)
    try:
        pipeline_file = PipelineFile(Path(path), parse_variables(variables))
        configs = pipeline_file.llm_configs()
        _check_options(pipeline_file, beam_options)
    except PipelineFileError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for warning in pipeline_file.warnings:
        print(warning, file=sys.stderr)

    options, runner = _runner(pipeline_file, beam_options)
    local = runner.lower() in _LOCAL_RUNNERS
    servers: list[VLLMServer] = []
    with _display(console) as display:
        try:
            if local:
                # vLLM takes long to start: it does so while Beam is imported.
                servers += _start_servers(configs)
            result = _run(pipeline_file, options)
        except KeyboardInterrupt:
            display.close()
            print("beam-llm: interrupted; the servers stop with this process", file=sys.stderr)
            _leave(130)
        except Exception as error:
            display.close()
            if verbose:
                traceback.print_exc()
            print(f"beam-llm: the pipeline failed\n{_explained(error)}", file=sys.stderr)
            return 1
    out = Console()
    if not out.is_terminal:
        out.width = 120
    _show_outputs(out, pipeline_file, preview)
    _show_summary(
        out, pipeline_file, configs, _Totals.of(result), display, time.monotonic() - began
    )
    return 0


def _not_noise(record: logging.LogRecord) -> bool:
    """Drops what Beam says of extras that nobody asked for, and its copies of our errors."""
    if record.exc_info and record.name.startswith("apache_beam.runners"):
        return False  # the run fails with the same words
    return not record.getMessage().startswith(
        ("Could not load ML transform module", "apitools not found")
    )


def _leave(code: int) -> NoReturn:
    # Beam's worker threads may be in the middle of a bundle, and are not daemons.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _runner(pipeline_file: PipelineFile, beam_options: Sequence[str]) -> tuple[list[str], str]:
    """Gives Beam's options and the name of the runner they choose."""
    named = str(pipeline_file.options.get("runner", ""))
    for i, option in enumerate(beam_options):
        if option == "--runner" and i + 1 < len(beam_options):
            named = beam_options[i + 1]
        elif option.startswith("--runner="):
            named = option.partition("=")[2]
    if named:
        return list(beam_options), named
    return [*beam_options, f"--runner={_DEFAULT_RUNNER}"], _DEFAULT_RUNNER


def _check_options(pipeline_file: PipelineFile, beam_options: Sequence[str]) -> None:
    """Refuses options that neither Beam nor the runner can know."""
    options, runner = _runner(pipeline_file, beam_options)
    names = [o.partition("=")[0] for o in options if o.startswith("--")]
    if all(name == "--runner" for name in names):
        return
    known = _beam_options()
    for name in names:
        if name in known:
            continue
        words = f"{name}: error: Beam has no such option{nearest(name, known)}"
        if runner.lower() in _LOCAL_RUNNERS:
            raise PipelineFileError(words, 2)
        # Job servers have options of their own.
        print(f"{words.replace('error', 'warning')}; {runner} may have it", file=sys.stderr)


def _beam_options() -> set[str]:
    from apache_beam.options.pipeline_options import PipelineOptions

    found: set[str] = set()

    def note(parser: Any) -> None:
        found.update(parser._option_string_actions)

    PipelineOptions([]).get_all_options(add_extra_args_fn=note)
    return found


def _start_servers(configs: Sequence[tuple[Step, LLMConfig]]) -> list[VLLMServer]:
    return [
        VLLMServer.acquire(server_spec(config))
        for _, config in configs
        if config.server.endpoint is None
    ]


def _run(pipeline_file: PipelineFile, options: list[str]) -> Any:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.yaml import yaml_provider, yaml_transform

    # What the command line sets goes before what the file sets.
    set_here = {o.removeprefix("--").partition("=")[0] for o in options if o.startswith("--")}
    in_file = {k: v for k, v in pipeline_file.options.items() if k not in set_here}
    pipeline = beam.Pipeline(
        options=PipelineOptions(options, **{"pickle_library": "cloudpickle", **in_file})
    )
    yaml_transform.expand_pipeline(
        pipeline,
        _with_lines(pipeline_file.text),
        providers=yaml_provider.merge_providers(yaml_provider.load_providers(PROVIDERS_YAML)),
        pipeline_path=str(pipeline_file.path),
    )
    result = pipeline.run()
    result.wait_until_finish()
    return result


def _with_lines(text: str) -> Any:
    import yaml
    from apache_beam.yaml.yaml_utils import SafeLineLoader

    return yaml.load(text, Loader=SafeLineLoader)  # noqa: S506 - a safe loader with lines


# What went wrong

_OUR_ERRORS = re.compile(
    r"^(?:[\w.]*\.)?(ConfigError|VLLMServerError|RowFailedError|RowError|RequestError"
    r"|KeyFunctionError): (.*)",
    re.M | re.S,
)


def _explained(error: BaseException) -> str:
    """The words for a person, out of a chain of exceptions or a worker's traceback."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.startswith("beam_llm"):
            return str(seen)
        found = _OUR_ERRORS.search(str(seen))
        if found is not None:
            # Beam adds "[while running 'Step']" to what a worker raised.
            words = re.split(
                r"\n(?:\s*\n)?(?:During handling|The above exception|Traceback )", found[2]
            )[0]
            return words.strip()
        seen = seen.__cause__ or seen.__context__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return f"{type(error).__name__}: {last} (--verbose shows the traceback)"


# What is going on


@dataclass
class _Server:
    state: str = "starting"
    phase: str = ""
    since: float = field(default_factory=time.monotonic)
    startup_secs: float | None = None
    restarts: int = 0


class _Display:
    """Progress: one live line for each server and one for the rows, or log lines."""

    def __init__(self, console: Console):
        self._servers: dict[str, _Server] = {}
        self._lock = threading.Lock()
        self._first_answer: float | None = None
        self._done = threading.Event()
        self._live: Live | None = None
        self._log = logging.getLogger("beam_llm")
        if console.is_terminal:
            self._live = Live(
                self, console=console, refresh_per_second=4, transient=True, redirect_stdout=False
            )

    @property
    def servers(self) -> Mapping[str, _Server]:
        """The servers seen, by identifier."""
        return self._servers

    def start(self) -> None:
        progress.set_server_listener(self._server_said)
        if self._live is not None:
            self._live.start()
        else:
            threading.Thread(target=self._log_rows, daemon=True).start()

    def close(self) -> None:
        self._done.set()
        progress.set_server_listener(None)
        if self._live is not None:
            self._live.stop()

    def __rich__(self) -> Text:
        lines: list[str] = []
        with self._lock:
            for name, server in self._servers.items():
                elapsed = time.monotonic() - server.since
                if server.state == "ready":
                    lines.append(f"● vLLM {name}: ready after {server.startup_secs:.0f} s")
                else:
                    doing = server.phase or server.state
                    lines.append(f"○ vLLM {name}: {doing} ({elapsed:.0f} s)")
        rows = self._rows()
        if rows:
            lines.append(rows)
        return Text("\n".join(lines))

    def _rows(self) -> str:
        counts = progress.totals()
        if not counts["read"]:
            return ""
        now = time.monotonic()
        if counts["answered"] and self._first_answer is None:
            self._first_answer = now
        text = (
            f"rows: {counts['read']:,} read, {counts['answered']:,} answered,"
            f" {counts['failed']:,} failed"
        )
        took = now - (self._first_answer or now)
        if took > 1:
            text += f" · {counts['answered'] / took:,.1f} rows/s"
            text += f", {counts['tokens'] / took:,.0f} tokens/s"
        return text

    def _log_rows(self) -> None:
        before = ""
        while not self._done.wait(_LOG_EVERY_SECS):
            rows = self._rows()
            if rows and rows != before:
                self._log.info(rows)
                before = rows

    def _server_said(
        self, identifier: str, state: str, phase: str, elapsed_secs: float, detail: str
    ) -> None:
        with self._lock:
            server = self._servers.setdefault(identifier, _Server())
            changed = (server.state, server.phase) != (state, phase)
            server.state, server.phase = state, phase
            server.since = time.monotonic() - elapsed_secs
            if state == "ready" and server.startup_secs is None:
                server.startup_secs = elapsed_secs
            if state == "restarting":
                server.restarts += 1
        # Restarts and failures are logged by `progress` itself.
        if changed and self._live is None and state in ("starting", "ready"):
            self._log.info("vLLM %s: %s after %.1f s", identifier, phase or state, elapsed_secs)


@contextlib.contextmanager
def _display(console: Console) -> Generator[_Display]:
    display = _Display(console)
    display.start()
    try:
        yield display
    finally:
        display.close()


# What came of it


@dataclass
class _Totals:
    """The job's metrics: sums over steps, and the time between first and last request."""

    counts: Counter[str]
    inference_secs: float | None

    @classmethod
    def of(cls, result: Any) -> _Totals:
        from apache_beam.metrics.metric import MetricsFilter

        from beam_llm.metrics import NAMESPACE

        found = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
        counts: Counter[str] = Counter()
        for counter in found["counters"]:
            counts[counter.key.metric.name] += counter.result or 0
        spread: dict[str, list[Any]] = {}
        for distribution in found["distributions"]:
            if distribution.result is not None and distribution.result.count:
                spread.setdefault(distribution.key.metric.name, []).append(distribution.result)
        inference = None
        if "request_started_unix_ms" in spread:
            first = min(d.min for d in spread["request_started_unix_ms"])
            last = max(d.max for d in spread["request_ended_unix_ms"])
            inference = (last - first) / 1_000
        return cls(counts, inference)


def _show_summary(
    console: Console,
    pipeline_file: PipelineFile,
    configs: Sequence[tuple[Step, LLMConfig]],
    totals: _Totals,
    display: _Display,
    wall_secs: float,
) -> None:
    counts = totals.counts
    table = Table(title="Summary", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    failed = counts["rows_failed"]
    if configs:
        table.add_row(
            "rows", f"{counts['rows_read']:,}: {counts['rows_done']:,} answered, {failed:,} failed"
        )
    elif counts["batches"]:
        table.add_row("batches", f"{counts['batches']:,}")
    if failed:
        kinds = {
            name.removeprefix("rows_failed_"): n
            for name, n in counts.items()
            if name.startswith("rows_failed_") and n
        }
        where = escape("; ".join(_destinations(pipeline_file, configs)))
        table.add_row(
            "failures",
            ", ".join(f"{n:,} {kind}" for kind, n in sorted(kinds.items()))
            + (f" → {where}" if where else ""),
        )
    prompt = counts["prompt_tokens"]
    if configs:
        table.add_row("tokens", f"{prompt:,} in, {counts['completion_tokens']:,} out")
    if prompt:
        share = counts["cached_tokens"] / prompt
        table.add_row("prefix cache", f"{share:.0%} of the prompt tokens came from it")
    for name, server in display.servers.items():
        if server.startup_secs is not None:
            again = f", restarted {server.restarts} times" if server.restarts else ""
            table.add_row("server start", f"{server.startup_secs:.1f} s ({escape(name)}){again}")
    if totals.inference_secs:
        rate = counts["rows_done"] / totals.inference_secs
        table.add_row(
            "inference",
            f"{totals.inference_secs:.1f} s from the first request to the last answer"
            f" ({rate:,.1f} rows/s)",
        )
    table.add_row("in all", f"{wall_secs:.1f} s")
    console.print()
    console.print(table)


def _destinations(
    pipeline_file: PipelineFile, configs: Sequence[tuple[Step, LLMConfig]]
) -> Iterator[str]:
    """Where the error outputs of our steps lead."""
    for step, config in configs:
        if config.error_handling is None:
            continue
        output = f"{step.name}.{config.error_handling.output}"
        takers = _takers(pipeline_file, output)
        yield f"{output} → {', '.join(takers)}" if takers else output


def _takers(pipeline_file: PipelineFile, output: str, depth: int = 8) -> list[str]:
    """The steps that end the way of an output, with the paths they write to."""
    ends: list[str] = []
    for taker in pipeline_file.steps():
        if output in _inputs(taker):
            further = [] if not depth else _takers(pipeline_file, taker.name, depth - 1)
            path = taker.config.get("path")
            ends += further or [f"{taker.name} ({path})" if path else taker.name]
    return ends


def _inputs(step: Step) -> list[str]:
    given: Any = step.spec.get("input")
    if isinstance(given, str):
        return [given]
    values = list(given.values()) if isinstance(given, dict) else given
    return [str(v) for v in values] if isinstance(values, list) else []


def _show_outputs(console: Console, pipeline_file: PipelineFile, preview: int) -> None:
    """Shows what the pipeline's JSON sinks wrote here, as far as this machine can see."""
    for step in pipeline_file.steps():
        pattern = str(step.config.get("path", ""))
        if step.type != "WriteToJson" or "://" in pattern or not pattern:
            continue
        shards = re.compile(re.escape(pattern) + r"(-[^/]*)?-\d+-of-\d+")
        files = [f for f in sorted(glob.glob(glob.escape(pattern) + "-*")) if shards.fullmatch(f)]
        rows = _json_rows(files, preview)
        if rows and preview > 0:
            console.print(_rows_table(step.name, rows))
        if files:
            console.print(f"{step.name} wrote {', '.join(files)}", markup=False)


def _json_rows(files: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """Rows from all over the files: their beginning may be all of one kind."""
    lines: list[bytes] = []
    for file in files:
        with contextlib.suppress(OSError), open(file, "rb") as stream:
            lines += itertools.islice(stream, _MAX_PREVIEWED - len(lines))
    rows: list[dict[str, Any]] = []
    for line in lines[:: max(1, len(lines) // max(1, limit))][:limit]:
        with contextlib.suppress(msgspec.DecodeError):
            row = msgspec.json.decode(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=Text(title), title_justify="left")
    cells = [[_cell(row.get(column)) for column in rows[0]] for row in rows]
    for column, *texts in zip(rows[0], *cells, strict=True):
        # Long columns give way to short ones.
        widest = max(map(len, (column, *texts)))
        table.add_column(Text(column), overflow="ellipsis", no_wrap=True, min_width=min(14, widest))
    for texts in cells:
        table.add_row(*map(Text, texts))
    return table


def _cell(value: Any, limit: int = 60) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
