"""Expands an admitted request: builds our transform, and writes it as protos."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

from apache_beam import pvalue
from apache_beam.coders.typecoders import registry as coder_types
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pipeline import AppliedPTransform, Pipeline
from apache_beam.portability.api import beam_expansion_api_pb2
from apache_beam.runners.pipeline_context import PipelineContext
from apache_beam.runners.runner import PipelineRunner
from apache_beam.transforms import Impulse
from apache_beam.transforms.environments import Environment
from apache_beam.transforms.external import ExternalTransform
from apache_beam.typehints import schemas
from apache_beam.typehints.schema_registry import SCHEMA_REGISTRY

from beam_llm_expansion.admission import Admitted


def expand(
    admitted: Admitted, environment: Environment
) -> beam_expansion_api_pb2.ExpansionResponse:
    """Expands a transform.

    Beam keeps what it learns of types in registries of the process: one expansion at a time.

    Args:
      admitted: The request, checked.
      environment: Where the workers run the transform.

    Returns:
      The transform, its parts, and everything that they refer to.

    Raises:
      beam_llm.validation.ConfigError: The configuration does not fit the input.
    """
    with _fresh_registries(), ExternalTransform.outer_namespace(admitted.namespace):
        transform = admitted.spec.load()(**admitted.config)
        # The client's options are not read: they could name classes to import.
        pipeline = Pipeline(
            runner=PipelineRunner(), options=PipelineOptions(["--experiments=beam_fn_api"])
        )
        os.rmdir(pipeline.local_tempdir)
        context = PipelineContext(
            admitted.components,
            default_environment=environment,
            namespace=admitted.namespace,
            requirements=admitted.requirements,
        )
        inputs = {tag: _input(pipeline, context, name) for tag, name in admitted.inputs.items()}
        given: Any = next(iter(inputs.values())) if len(inputs) == 1 else inputs
        outputs: Any = pipeline.apply(transform, given, admitted.label)
        (applied,) = pipeline._root_transform().parts  # pyright: ignore[reportPrivateUsage]
        if isinstance(outputs, dict):
            applied.outputs = outputs
        proto = pipeline.to_runner_api(context=context)
        for root in proto.root_transform_ids:
            del proto.components.transforms[root]
        expanded = proto.components.transforms.pop(context.transforms.get_id(applied))
        expanded.inputs.clear()
        expanded.inputs.update(admitted.inputs)
        return beam_expansion_api_pb2.ExpansionResponse(
            components=proto.components, transform=expanded, requirements=proto.requirements
        )


def _input(pipeline: Pipeline, context: PipelineContext, name: str) -> pvalue.PCollection[Any]:
    pcollection = context.pcollections.get_by_id(name)
    pcollection.pipeline = pipeline
    pcollection.producer = AppliedPTransform(None, Impulse(), f"input {name}", {}, None, None)
    pcollection.producer.add_output(pcollection, "out")
    context.pcollections._obj_to_id[pcollection] = name  # pyright: ignore[reportPrivateUsage]
    return pcollection


@contextlib.contextmanager
def _fresh_registries() -> Generator[None]:
    """Lets Beam forget the types of one expansion: they would leak, and meet by chosen ids."""
    tables: list[dict[Any, Any]] = [
        SCHEMA_REGISTRY.by_id,
        schemas._SCHEMA_ID_CACHE,  # pyright: ignore[reportPrivateUsage]
        coder_types._coders,  # pyright: ignore[reportPrivateUsage]
    ]
    kept = [dict(table) for table in tables]
    custom_types = list(coder_types.custom_types)
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        coder_types.custom_types[:] = custom_types
