"""Reaches an expansion service over TLS, from Python and from Beam YAML.

Beam's own client speaks plaintext, and to its own machine alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from apache_beam.transforms.external import (
    ExpansionAndArtifactRetrievalStub,
    SchemaAwareExternalTransform,
)

from beam_llm.registry import TRANSFORMS
from beam_llm.validation import nearest


@dataclass(frozen=True)
class SecureExpansionService:
    """An expansion service behind TLS, for wherever Beam takes an ``expansion_service``.

    Attributes:
      address: ``host:port``.
      ca: File (PEM) with the certificates of those who vouch for the service; the system's
        when absent.
      cert: File (PEM) with our own certificate chain, where the service asks for one.
      key: File (PEM) with its private key.
    """

    address: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    _channels: list[grpc.Channel] = field(
        default_factory=list[grpc.Channel], init=False, repr=False, compare=False
    )

    def __enter__(self) -> ExpansionAndArtifactRetrievalStub:
        def content(file: str | None) -> bytes | None:
            return None if file is None else Path(file).read_bytes()

        credentials = grpc.ssl_channel_credentials(
            content(self.ca), content(self.key), content(self.cert)
        )
        unlimited = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        ]
        channel = grpc.secure_channel(self.address, credentials, unlimited)
        self._channels.append(channel)
        return ExpansionAndArtifactRetrievalStub(channel)

    def __exit__(self, *exception: object) -> None:
        self._channels.pop().close()


def over_tls(
    name: str,
    address: str,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
) -> Callable[..., Any]:
    """Gives a transform of ours as an expansion service expands it.

    Args:
      name: The transform, such as ``VLLMChat``.
      address: The service's ``host:port``.
      ca: As in ``SecureExpansionService``.
      cert: As there.
      key: As there.

    Returns:
      What takes the transform's configuration as keyword arguments, and gives the transform:
      also a constructor for a ``python`` provider of Beam YAML.

    Raises:
      ValueError: There is no such transform.
    """
    spec = TRANSFORMS.get(name)
    if spec is None:
        raise ValueError(
            f"no transform '{name}'{nearest(name, TRANSFORMS)} (there are: {', '.join(TRANSFORMS)})"
        )
    service = SecureExpansionService(address, ca, cert, key)
    transform = spec.load()

    @functools.wraps(transform, updated=())
    def construct(**config: Any) -> Any:
        return SchemaAwareExternalTransform(
            spec.urn, service, rearrange_based_on_discovery=True, **config
        )

    construct.__signature__ = inspect.signature(transform)  # type: ignore[attr-defined]
    return construct
