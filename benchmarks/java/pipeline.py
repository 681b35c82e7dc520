"""The Python side of the benchmark: the pipeline of `Throughput.java`."""

import argparse
import json
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.typehints.row_type import RowTypeConstraint

import beam_llm

_ROW = RowTypeConstraint.from_fields([("group", str), ("text", str)])


def main() -> None:
    """Reads rows, asks about each, and writes them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--endpoint", "--input", "--output"):
        parser.add_argument(name, required=True)
    options, rest = parser.parse_known_args()
    with beam.Pipeline(options=PipelineOptions(rest)) as pipeline:
        _ = (
            pipeline
            | "Read" >> beam.io.ReadFromText(options.input)
            | "Parse" >> beam.Map(_row).with_output_types(_ROW)
            | "Ask"
            >> beam_llm.VLLMCompletions(
                model="m",
                prompt="Label: {text}",
                prefix_batching={"key_field": "group"},
                server={"endpoint": options.endpoint},
            )
            | "Json" >> beam.Map(_json)
            | "Write" >> beam.io.WriteToText(options.output, shard_name_template="")
        )


def _row(line: str) -> beam.Row:
    values = json.loads(line)
    return beam.Row(group=values["group"], text=values["text"])


def _json(row: Any) -> str:
    values = row._asdict()
    return json.dumps({**values, "usage": values["usage"]._asdict()})


if __name__ == "__main__":
    main()
