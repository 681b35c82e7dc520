package io.beamllm;

import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.beam.model.pipeline.v1.RunnerApi.FunctionSpec;
import org.apache.beam.sdk.runners.AppliedPTransform;
import org.apache.beam.sdk.transforms.PTransform;
import org.apache.beam.sdk.util.construction.PTransformTranslation.TransformPayloadTranslator;
import org.apache.beam.sdk.util.construction.SdkComponents;
import org.apache.beam.sdk.util.construction.TransformPayloadTranslatorRegistrar;

/**
 * Registers the transforms with Beam, which writes the annotations of registered ones only into the
 * job graph. Beam finds this class by {@code META-INF/services}.
 */
public final class Annotated implements TransformPayloadTranslatorRegistrar {
  /** For Beam. */
  public Annotated() {}

  @Override
  @SuppressWarnings("rawtypes") // Beam's
  public Map<Class<? extends PTransform>, TransformPayloadTranslator>
      getTransformPayloadTranslators() {
    Map<Class<? extends PTransform>, TransformPayloadTranslator> translators =
        new LinkedHashMap<>();
    Transforms.ALL.forEach(transform -> translators.put(transform, new Composite()));
    return translators;
  }

  /** A composite like any other, without a payload. */
  private static final class Composite implements TransformPayloadTranslator<LlmTransform> {
    @Override
    public String getUrn() {
      return null;
    }

    @Override
    public FunctionSpec translate(
        AppliedPTransform<?, ?, LlmTransform> applied, SdkComponents components) {
      return null;
    }
  }
}
