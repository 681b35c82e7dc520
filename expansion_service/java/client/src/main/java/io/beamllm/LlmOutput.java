package io.beamllm;

import java.util.Map;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.transforms.PTransform;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.PCollectionTuple;
import org.apache.beam.sdk.values.PInput;
import org.apache.beam.sdk.values.POutput;
import org.apache.beam.sdk.values.PValue;
import org.apache.beam.sdk.values.Row;
import org.apache.beam.sdk.values.TupleTag;

/** What a transform gives: its rows and, where {@code error_handling} is set, those that failed. */
public final class LlmOutput implements POutput {
  private final String transform;
  private final TupleTag<Row> main;
  private final TupleTag<Row> failed;
  private final PCollectionTuple outputs;

  LlmOutput(String transform, String main, String failed, PCollectionTuple outputs) {
    this.transform = transform;
    this.main = new TupleTag<>(main);
    this.failed = failed == null ? null : new TupleTag<>(failed);
    this.outputs = outputs;
  }

  /**
   * The rows that were answered: the input's fields and the transform's own.
   *
   * @return rows with their schema, in the windows and with the timestamps of the input's
   */
  public PCollection<Row> rows() {
    return outputs.get(main);
  }

  /**
   * The rows that failed, each alone: {@code element} (the input row), {@code msg} and {@code
   * stack}.
   *
   * @return rows with their schema
   * @throws IllegalStateException if the transform was built without {@code errorHandling}: a row
   *     that fails then fails the pipeline
   */
  public PCollection<Row> failures() {
    if (failed == null) {
      throw new IllegalStateException(
          transform
              + ": no output for failed rows: give the builder .errorHandling(e ->"
              + " e.output(\"failures\"))");
    }
    return outputs.get(failed);
  }

  @Override
  public Pipeline getPipeline() {
    return outputs.getPipeline();
  }

  @Override
  public Map<TupleTag<?>, PValue> expand() {
    return outputs.expand();
  }

  @Override
  public void finishSpecifyingOutput(
      String transformName, PInput input, PTransform<?, ?> transform) {
    outputs.finishSpecifyingOutput(transformName, input, transform);
  }
}
