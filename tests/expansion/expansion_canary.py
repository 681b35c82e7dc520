"""Imported, it makes the folder that the variable CANARY names."""

import os

os.makedirs(os.environ["CANARY"], exist_ok=True)


def Runner(*_: object) -> None:  # noqa: N802 - taken for a class
    """Does nothing."""
