"""The service's settings: one model for the command line, the environment and a file."""

from __future__ import annotations

import argparse
import ipaddress
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from beam_llm import validation
from beam_llm.config import Section

#: Before a setting's name, in upper case, in the environment.
ENVIRONMENT_PREFIX = "BEAM_LLM_EXPANSION_"

_MIB = 1024 * 1024


class SettingsError(Exception):
    """Settings that cannot be used; the message has a line for each problem."""


class Settings(Section, frozen=True, kw_only=True):
    """How the expansion service runs."""

    host: Annotated[
        str,
        Meta(
            description="Address to listen on. One that is not loopback needs TLS, or `insecure`.",
            examples=["0.0.0.0"],  # noqa: S104 - an example
            min_length=1,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(description="Port to listen on; 0 takes a free one.", ge=0, le=65_535)
    ] = 8097
    address_file: Annotated[
        str | None,
        Meta(description="File to write the bound address to, once it is served."),
    ] = None
    tls_cert: Annotated[
        str | None, Meta(description="Certificate chain (PEM); turns TLS on.", examples=["tls.crt"])
    ] = None
    tls_key: Annotated[
        str | None, Meta(description="Its private key (PEM).", examples=["tls.key"])
    ] = None
    tls_client_ca: Annotated[
        str | None,
        Meta(
            description="Certificates (PEM) of those who vouch for clients: turns mutual TLS on.",
            examples=["ca.crt"],
        ),
    ] = None
    insecure: Annotated[
        bool, Meta(description="Listen in plaintext beyond loopback; anyone can ask, and listen.")
    ] = False
    allow_callables: Annotated[
        bool,
        Meta(
            description="Let callers name functions (`key_fn`), which are imported here and on the"
            " workers."
        ),
    ] = False
    reflection: Annotated[
        bool, Meta(description="Serve gRPC reflection, for tools such as grpcurl.")
    ] = False
    metrics_port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(
            description="Port for Prometheus metrics, 0 for a free one; none are served when"
            " absent.",
            examples=[9100],
        ),
    ] = None
    metrics_host: Annotated[
        str, Meta(description="Address for the metrics. They hold counts, no content.")
    ] = "127.0.0.1"
    health_port: Annotated[
        Annotated[int, Meta(ge=0, le=65_535)] | None,
        Meta(
            description="A further port, in plaintext, for health alone: probes speak no TLS.",
            examples=[8098],
        ),
    ] = None
    health_host: Annotated[str, Meta(description="Address for that port.")] = "127.0.0.1"
    environment_type: Annotated[
        Literal["DOCKER", "EXTERNAL", "PROCESS", "LOOPBACK"],
        Meta(description="Where workers run the transforms; see the runner table."),
    ] = "DOCKER"
    environment_config: Annotated[
        str | None,
        Meta(
            description="For `EXTERNAL` the worker pool's address, for `PROCESS` the worker's boot"
            " command.",
            examples=["worker-pool:50000"],
        ),
    ] = None
    sdk_container_image: Annotated[
        str | None,
        Meta(
            description="Image for `DOCKER`; Beam's own, of this Python and Beam, when absent.",
            examples=["registry.example/beam-llm-worker:1"],
        ),
    ] = None
    requirements_file: Annotated[
        str | None,
        Meta(
            description="Requirements for workers to install at their start.",
            examples=["requirements.txt"],
        ),
    ] = None
    extra_packages: Annotated[
        tuple[str, ...],
        Meta(
            description="Packages (wheels) for workers to install at their start.",
            examples=[["dist/beam_llm-0.1.0-py3-none-any.whl"]],
        ),
    ] = ()
    serve_loopback_worker: Annotated[
        bool,
        Meta(
            description="Offer to run workers on this machine, for local runs. Whoever reaches the"
            " port can then run code here: loopback only."
        ),
    ] = False
    max_request_bytes: Annotated[
        int, Meta(description="Largest request.", ge=1024, le=1024 * _MIB)
    ] = 4 * _MIB
    max_components: Annotated[
        int, Meta(description="Most components of a request, used or not.", ge=1)
    ] = 10_000
    max_pending: Annotated[
        int,
        Meta(description="Most expansions that wait for their turn; more are refused.", ge=1),
    ] = 64
    max_connections_idle_secs: Annotated[
        float, Meta(description="Idle connections are closed after this time, in seconds.", gt=0)
    ] = 300.0
    timeout_secs: Annotated[
        float,
        Meta(description="Longest time of an expansion, waiting included, in seconds.", gt=0),
    ] = 60.0
    grace_secs: Annotated[
        float,
        Meta(
            description="On SIGTERM, how long running requests may take to finish, in seconds.",
            ge=0,
        ),
    ] = 30.0
    exit_with_parent: Annotated[
        bool,
        Meta(description="Stop when standard input ends, for services that a client starts."),
    ] = False
    log_format: Annotated[
        Literal["text", "json"], Meta(description="How log lines are written.")
    ] = "text"
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        Meta(description="Least level of what is logged."),
    ] = "INFO"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing beyond this machine can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings: the command line first, then the environment, then a file.

    Args:
      argv: Command line without the program's name.
      environment: Variables; the process's own when absent.

    Returns:
      The settings, checked.

    Raises:
      SettingsError: They cannot be used.
      SystemExit: The command line is wrong, or asks for help.
    """
    environment = os.environ if environment is None else environment
    given = vars(parser().parse_args(argv))
    file = given.pop("config") or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    values = {
        **(_from_file(file) if file else {}),
        **_from_environment(environment),
        **{name: value for name, value in given.items() if value is not None},
    }
    try:
        settings = validation.load(Settings, values, "expansion service")
    except validation.ConfigError as error:
        raise SettingsError(str(error)) from None
    _check(settings)
    return settings


def parser() -> argparse.ArgumentParser:
    """The command line, with an option for each setting."""
    made = argparse.ArgumentParser(
        prog="beam-llm serve",
        description="Serves the transforms to Beam pipelines in other languages and processes.",
        epilog=f"Each option can also be a variable, such as {ENVIRONMENT_PREFIX}PORT, or an entry"
        " of the file. The command line wins over the environment, and that over the file.",
        allow_abbrev=False,
    )
    made.add_argument("--config", metavar="FILE", help="settings as YAML: `port: 8097`, …")
    for field in msgspec.structs.fields(Settings):
        kind, description = _kind(field.type)
        default = field.default
        shown = "" if default in (None, False, ()) else f" (default: {default})"
        arguments: dict[str, Any] = {"help": (description + shown).replace("%", "%%")}
        if kind is bool:
            arguments |= {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(kind) is Literal:
            arguments |= {"choices": typing.get_args(kind)}
        elif typing.get_origin(kind) is tuple:
            arguments |= {"action": "append", "metavar": "FILE"}
        else:
            arguments |= {"type": kind, "metavar": kind.__name__.upper()}
        made.add_argument(f"--{field.name.replace('_', '-')}", default=None, **arguments)
    return made


def _kind(annotation: Any) -> tuple[Any, str]:
    kind, meta = typing.get_args(annotation)
    if type(None) in typing.get_args(kind):
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
    if typing.get_origin(kind) is Annotated:
        kind, *_ = typing.get_args(kind)
    return kind, meta.description


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        text = environment.get(ENVIRONMENT_PREFIX + field.name.upper())
        if text is None:
            continue
        kind, _ = _kind(field.type)
        # As in YAML, so that a wrong word is shown by the check that all values pass.
        value = text if kind is str or typing.get_origin(kind) is Literal else yaml.safe_load(text)
        values[field.name] = (
            [value]
            if isinstance(value, str) and kind is not str and (typing.get_origin(kind) is tuple)
            else value
        )
    return values


def _from_file(name: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{name}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}: not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"{name}: not a mapping of settings")
    return values


def _check(settings: Settings) -> None:
    problems: list[str] = []
    if (settings.tls_cert is None) != (settings.tls_key is None):
        problems.append("tls_cert and tls_key: one needs the other")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        problems.append("tls_client_ca: needs tls_cert and tls_key")
    if not settings.is_loopback and settings.tls_cert is None and not settings.insecure:
        problems.append(
            f"host: '{settings.host}' can be reached from other machines: give tls_cert and"
            " tls_key (and tls_client_ca, to admit known clients alone), or insecure"
        )
    if not settings.is_loopback and (
        settings.serve_loopback_worker or settings.environment_type == "LOOPBACK"
    ):
        problems.append(
            f"serve_loopback_worker: for clients on this machine: host '{settings.host}' is for"
            " others"
        )
    needs_config = settings.environment_type in ("EXTERNAL", "PROCESS")
    if needs_config and settings.environment_config is None:
        problems.append(
            f"environment_config: needed by environment_type {settings.environment_type}"
        )
    if not needs_config and settings.environment_config is not None:
        problems.append(
            f"environment_config: has no effect with environment_type {settings.environment_type}"
        )
    if settings.sdk_container_image is not None and settings.environment_type != "DOCKER":
        problems.append("sdk_container_image: needs environment_type DOCKER")
    for name in ("tls_cert", "tls_key", "tls_client_ca", "requirements_file", "extra_packages"):
        given = getattr(settings, name)
        for file in given if isinstance(given, tuple) else (given,):
            if file is not None and not os.access(file, os.R_OK):
                problems.append(f"{name}: '{file}' cannot be read")
    if problems:
        raise SettingsError("\n".join(f"expansion service: {problem}" for problem in problems))
