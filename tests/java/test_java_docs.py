"""The Java in the documentation compiles, each block by itself."""

import re
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/java.md"
IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)

UNIT = """
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.Row;
{imports}
class Block{number} {{
  static void run(PCollection<Row> tickets) {{
{body}
  }}
}}
"""


def test_the_blocks_of_the_page_compile(java_build: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```java\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    files = []
    for number, block in enumerate(blocks):
        path = tmp_path / f"Block{number}.java"
        imports = "".join(IMPORT.findall(block))
        path.write_text(UNIT.format(imports=imports, number=number, body=IMPORT.sub("", block)))
        files.append(str(path))
    libraries = (java_build / "integration/target/classpath").read_text()
    done = subprocess.run(
        ["javac", "-Xlint:all,-classfile,-processing", "-cp", libraries, "-d", tmp_path, *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
