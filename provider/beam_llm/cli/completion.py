"""``beam-llm completion``: what a shell needs to complete the command."""

from __future__ import annotations

from argcomplete.shell_integration import shellcode


def show_completion(shell: str) -> int:
    """Prints the script of a shell.

    Args:
      shell: ``bash``, ``zsh`` or ``fish``.

    Returns:
      The exit code.
    """
    print(shellcode(["beam-llm"], shell=shell))
    return 0
