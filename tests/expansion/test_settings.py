"""Where settings come from, and which are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from beam_llm_expansion.settings import SettingsError, read


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("port: 1\nmax_pending: 2\ntimeout_secs: 3\nextra_packages: []\n")
    environment = {
        "BEAM_LLM_EXPANSION_CONFIG": str(file),
        "BEAM_LLM_EXPANSION_PORT": "4",
        "BEAM_LLM_EXPANSION_MAX_PENDING": "5",
        "BEAM_LLM_EXPANSION_REFLECTION": "true",
        "BEAM_LLM_EXPANSION_ENVIRONMENT_CONFIG": "8:1",
        "BEAM_LLM_EXPANSION_ENVIRONMENT_TYPE": "EXTERNAL",
    }
    settings = read(["--port=6"], environment)
    assert (settings.port, settings.max_pending, settings.timeout_secs) == (6, 5, 3.0)
    assert settings.reflection
    assert settings.environment_config == "8:1"  # not YAML's 481
    assert not read(["--no-reflection"], environment).reflection


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port=70000"], "port: 70000 is greater than the maximum of 65535"),
        (["--host=0.0.0.0"], "host: '0.0.0.0' can be reached from other machines: give tls_cert"),
        (["--host=db.example"], "host: 'db.example' can be reached from other machines"),
        (["--tls-cert=x"], "tls_cert and tls_key: one needs the other"),
        (["--tls-client-ca=x"], "tls_client_ca: needs tls_cert and tls_key"),
        (["--tls-cert=no", "--tls-key=no"], "tls_cert: 'no' cannot be read"),
        (["--environment-type=EXTERNAL"], "environment_config: needed by environment_type"),
        (["--environment-config=x"], "environment_config: has no effect with environment_type"),
        (
            ["--environment-type=LOOPBACK", "--sdk-container-image=x"],
            "sdk_container_image: needs environment_type DOCKER",
        ),
        (
            ["--host=0.0.0.0", "--insecure", "--serve-loopback-worker"],
            "serve_loopback_worker: for clients on this machine: host '0.0.0.0' is for others",
        ),
    ],
)
def test_what_cannot_work_is_said(flags: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(flags, {})
    assert words in str(raised.value)


def test_plaintext_beyond_the_machine_needs_a_word() -> None:
    assert not read(["--host=0.0.0.0", "--insecure"], {}).is_loopback
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert read([f"--host={host}"], {}).is_loopback


def test_a_misspelt_entry_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("prot: 1\n")
    with pytest.raises(SettingsError, match="did you mean 'port'"):
        read([f"--config={file}"], {})
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read(["--config=none.yaml"], {})


@pytest.mark.parametrize("program", [["beam_llm_expansion"], ["beam_llm", "serve"]])
def test_a_wrong_setting_ends_both_commands_with_2(program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *program, "--host=0.0.0.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("expansion service: host: ")
    assert "Traceback" not in done.stderr
