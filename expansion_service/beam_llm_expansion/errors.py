"""What a client is told."""

from __future__ import annotations


class RequestError(Exception):
    """A request that is refused; the message is for the client.

    Attributes:
      outcome: The metric's label: ``invalid`` (the client can mend it), ``forbidden`` (it asks
        for what this service never does), ``busy`` or ``timeout``.
    """

    def __init__(self, message: str, outcome: str = "invalid"):
        super().__init__(message)
        self.outcome = outcome
