package io.beamllm;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.transforms.PTransform;
import org.apache.beam.sdk.transforms.display.DisplayData;
import org.apache.beam.sdk.util.construction.External;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.PCollectionTuple;
import org.apache.beam.sdk.values.Row;
import org.apache.beam.sdk.values.TupleTag;

/** What the transforms share: a configuration, and its expansion by a service. */
public abstract class LlmTransform extends PTransform<PCollection<Row>, LlmOutput> {
  private static final long serialVersionUID = 1L;

  private final String transform;
  private final String urn;
  private final String mainOutput;
  private final LinkedHashMap<String, Object> values;
  private final ExpansionService service;
  private final Row configuration;

  LlmTransform(String transform, String urn, String mainOutput, Knobs knobs, Builder<?> builder) {
    super(transform);
    this.transform = transform;
    this.urn = urn;
    this.mainOutput = mainOutput;
    this.values = new LinkedHashMap<>(builder.values);
    this.service = builder.service;
    List<BeamLlmException.Problem> problems = knobs.problems(values);
    if (problems.isEmpty()) {
      problems = InputCheck.templates(values);
    }
    if (!problems.isEmpty()) {
      throw new BeamLlmException(transform, problems);
    }
    this.configuration = Payload.row(knobs, values);
  }

  @Override
  public LlmOutput expand(PCollection<Row> input) {
    check(input);
    ExpansionService where = service == null ? ExpansionService.fromEnvironment() : service;
    try (ExpansionClient client = ExpansionClient.connect(transform, urn, where)) {
      PCollectionTuple outputs =
          input.apply(
              External.<PCollection<Row>, Row>of(
                      Payload.URN, Payload.of(urn, configuration), client.address(), client)
                  .withMultiOutputs());
      return new LlmOutput(
          transform,
          restored(outputs, mainTag(outputs), input.getSchema()),
          errorOutput() == null ? null : restored(outputs, errorOutput(), input.getSchema()));
    }
  }

  private void check(PCollection<Row> input) {
    if (!input.hasSchema()) {
      throw new BeamLlmException(
          transform, "its input has no schema: give it rows, with setRowSchema(…)", null);
    }
    Schema schema = input.getSchema();
    List<String> unsupported = InputCheck.unsupported(schema);
    if (!unsupported.isEmpty()) {
      throw new BeamLlmException(transform, InputCheck.refusal(unsupported), null);
    }
    List<BeamLlmException.Problem> problems = InputCheck.fields(values, schema);
    if (!problems.isEmpty()) {
      throw new BeamLlmException(transform, problems);
    }
  }

  /** The name of the main output: Python's SDK names one that is alone as it pleases. */
  private String mainTag(PCollectionTuple outputs) {
    Set<TupleTag<?>> tags = outputs.getAll().keySet();
    return tags.size() == 1 ? tags.iterator().next().getId() : mainOutput;
  }

  private static PCollection<Row> restored(PCollectionTuple outputs, String tag, Schema input) {
    return InputTypes.restore(outputs.get(new TupleTag<Row>(tag)), input);
  }

  private String errorOutput() {
    Section errors = (Section) values.get("error_handling");
    return errors == null ? null : (String) errors.values().get("output");
  }

  /**
   * The annotations of this transform: the model identifier, which a runner's metrics are read by.
   */
  @Override
  public Map<String, byte[]> getAnnotations() {
    Map<String, byte[]> annotations = new LinkedHashMap<>(super.getAnnotations());
    String identifier = ModelIdentifier.of(values);
    if (identifier != null) {
      annotations.put("model_identifier", identifier.getBytes(StandardCharsets.UTF_8));
    }
    return annotations;
  }

  @Override
  public void populateDisplayData(DisplayData.Builder builder) {
    super.populateDisplayData(builder);
    values.forEach(
        (knob, value) ->
            builder.add(
                DisplayData.item(
                    knob, value instanceof String ? (String) value : Json.shown(value))));
  }

  /** The schema transform that is asked for. */
  final String urn() {
    return urn;
  }

  /** The configuration as it is sent. */
  final Row configuration() {
    return configuration;
  }

  /** The transform's name and the knobs that were given. */
  @Override
  public String toString() {
    List<String> shown = new ArrayList<>();
    values.forEach((knob, value) -> shown.add(knob + "=" + Json.shown(value)));
    return transform + "(" + String.join(", ", shown) + ")";
  }

  /**
   * Collects the knobs of a transform. Null takes a knob back to its default.
   *
   * @param <B> the builder's own type
   */
  public abstract static class Builder<B extends Builder<B>> extends Section.Builder<B> {
    private ExpansionService service;

    Builder() {}

    /**
     * Where to expand the transform; {@link ExpansionService#fromEnvironment()} unless given.
     *
     * @param service the service
     * @return this builder
     */
    @SuppressWarnings("unchecked")
    public B expansionService(ExpansionService service) {
      this.service = service;
      return (B) this;
    }
  }
}
