package io.beamllm;

import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.transforms.PTransform;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.PInput;
import org.apache.beam.sdk.values.POutput;
import org.apache.beam.sdk.values.PValue;
import org.apache.beam.sdk.values.Row;
import org.apache.beam.sdk.values.TupleTag;

/** What a transform gives: its rows and, where {@code error_handling} is set, those that failed. */
public final class LlmOutput implements POutput {
  private static final TupleTag<Row> ROWS = new TupleTag<>("rows");
  private static final TupleTag<Row> FAILURES = new TupleTag<>("failures");

  private final String transform;
  private final PCollection<Row> rows;
  private final PCollection<Row> failures; // null without an error output

  LlmOutput(String transform, PCollection<Row> rows, PCollection<Row> failures) {
    this.transform = transform;
    this.rows = rows;
    this.failures = failures;
  }

  /**
   * The rows that were answered: the input's fields and the transform's own.
   *
   * @return rows with their schema, in the windows and with the timestamps of the input's
   */
  public PCollection<Row> rows() {
    return rows;
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
    if (failures == null) {
      throw new IllegalStateException(
          transform
              + ": no output for failed rows: give the builder .errorHandling(e ->"
              + " e.output(\"failures\"))");
    }
    return failures;
  }

  @Override
  public Pipeline getPipeline() {
    return rows.getPipeline();
  }

  @Override
  public Map<TupleTag<?>, PValue> expand() {
    Map<TupleTag<?>, PValue> found = new LinkedHashMap<>();
    found.put(ROWS, rows);
    if (failures != null) {
      found.put(FAILURES, failures);
    }
    return found;
  }

  @Override
  public void finishSpecifyingOutput(String transformName, PInput input, PTransform<?, ?> applied) {
    // The collections of an external transform are complete.
  }
}
