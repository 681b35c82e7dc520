package io.beamllm.integration;

import io.beamllm.ExpansionService;
import io.beamllm.LlmOutput;
import io.beamllm.VllmCompletions;
import io.beamllm.example.LocalWorkers;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import org.apache.beam.model.pipeline.v1.RunnerApi;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.io.TextIO;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.Schema.FieldType;
import org.apache.beam.sdk.schemas.logicaltypes.FixedBytes;
import org.apache.beam.sdk.schemas.logicaltypes.MicrosInstant;
import org.apache.beam.sdk.schemas.logicaltypes.VariableString;
import org.apache.beam.sdk.transforms.Create;
import org.apache.beam.sdk.transforms.DoFn;
import org.apache.beam.sdk.transforms.ParDo;
import org.apache.beam.sdk.transforms.windowing.BoundedWindow;
import org.apache.beam.sdk.transforms.windowing.FixedWindows;
import org.apache.beam.sdk.transforms.windowing.GlobalWindows;
import org.apache.beam.sdk.transforms.windowing.IntervalWindow;
import org.apache.beam.sdk.transforms.windowing.Window;
import org.apache.beam.sdk.util.construction.PipelineTranslation;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.Row;
import org.apache.beam.sdk.values.TimestampedValue;
import org.joda.time.Duration;
import org.joda.time.Instant;

/**
 * Sends rows of every supported type through a transform, and says what came back changed.
 *
 * <p>Prints the top-level annotation, and writes a line a row: its id, its time, its window, and
 * the fields that differ.
 */
public final class RoundTrip {
  private static final Schema INNER =
      Schema.builder()
          .addStringField("city")
          .addNullableField("zip", FieldType.INT32)
          .addArrayField("tags", FieldType.STRING)
          .build();

  static final Schema SCHEMA =
      Schema.builder()
          .addInt64Field("id")
          .addStringField("text")
          .addByteField("byte")
          .addInt16Field("small")
          .addInt32Field("medium")
          .addFloatField("single")
          .addDoubleField("real")
          .addBooleanField("flag")
          .addByteArrayField("raw")
          .addDecimalField("price")
          .addDateTimeField("at")
          .addNullableField("no_text", FieldType.STRING)
          .addNullableField("no_number", FieldType.INT64)
          .addNullableField("no_time", FieldType.DATETIME)
          .addNullableField("no_price", FieldType.DECIMAL)
          .addNullableField("no_raw", FieldType.BYTES)
          .addRowField("home", INNER)
          .addNullableField("second_home", FieldType.row(INNER))
          .addArrayField("numbers", FieldType.INT64)
          .addArrayField("homes", FieldType.row(INNER))
          .addNullableField("no_list", FieldType.array(FieldType.STRING))
          .addField("gaps", FieldType.array(FieldType.STRING.withNullable(true)))
          .addMapField("counts", FieldType.STRING, FieldType.INT64)
          .addMapField("places", FieldType.STRING, FieldType.row(INNER))
          .addField("times", FieldType.array(FieldType.DATETIME))
          .addLogicalTypeField("exact", new MicrosInstant())
          .addLogicalTypeField("code", VariableString.of(10))
          .addLogicalTypeField("digest", FixedBytes.of(4))
          .build();

  private RoundTrip() {}

  public static void main(String[] args) throws Exception {
    Options options = PipelineOptionsFactory.fromArgs(args).as(Options.class);
    LocalWorkers workers = LocalWorkers.start(options);
    try {
      Pipeline pipeline = Pipeline.create(options);
      List<Row> rows = List.of(full(1), sparse(2), full(13));
      List<TimestampedValue<Row>> timed = new ArrayList<>();
      for (Row row : rows) {
        timed.add(TimestampedValue.of(row, new Instant(row.getInt64("id") * 1000)));
      }
      PCollection<Row> input =
          pipeline
              .apply(
                  "Rows",
                  Create.timestamped(timed)
                      .withCoder(org.apache.beam.sdk.coders.RowCoder.of(SCHEMA)))
              .setRowSchema(SCHEMA)
              .apply("Window", Window.into(FixedWindows.of(Duration.standardSeconds(10))));
      LlmOutput output =
          input.apply(
              "Ask",
              VllmCompletions.builder()
                  .model("m")
                  .prompt("{id}|{text}|{at}|{price}|{home.city}|{numbers}|{home}")
                  .server(s -> s.endpoint(options.getEndpoint()))
                  .errorHandling(e -> e.output("failures"))
                  .expansionService(ExpansionService.at(options.getService()))
                  .build());
      output
          .rows()
          .apply("Compare", ParDo.of(new Compare(rows)))
          .apply("Unwindow", Window.into(new GlobalWindows()))
          .apply("Write", TextIO.write().to(options.getOutput()).withoutSharding());
      System.out.println("fields " + output.rows().getSchema().getFieldNames());
      RunnerApi.Pipeline proto = PipelineTranslation.toProto(pipeline);
      proto
          .getComponents()
          .getTransformsMap()
          .values()
          .forEach(
              transform -> {
                if (transform.getUniqueName().equals("Ask")) {
                  System.out.println(
                      "annotation "
                          + transform.getAnnotationsMap().get("model_identifier").toStringUtf8());
                }
              });
      pipeline.run().waitUntilFinish();
    } finally {
      workers.close();
    }
  }

  private static Row home(String city, Integer zip, String... tags) {
    return Row.withSchema(INNER).addValues(city, zip, Arrays.asList(tags)).build();
  }

  private static Row full(long id) {
    return Row.withSchema(SCHEMA)
        .withFieldValue("id", id)
        .withFieldValue("text", "ünïcode \uD83D\uDE00\n\"quoted\"")
        .withFieldValue("byte", (byte) -7)
        .withFieldValue("small", (short) -300)
        .withFieldValue("medium", Integer.MIN_VALUE)
        .withFieldValue("single", 1.5f)
        .withFieldValue("real", Math.PI)
        .withFieldValue("flag", true)
        .withFieldValue("raw", new byte[] {0, -1, 127})
        .withFieldValue("price", new BigDecimal("12345678901234567890.1200"))
        .withFieldValue("at", Instant.parse("2026-03-04T05:06:07.089Z"))
        .withFieldValue("no_text", "there")
        .withFieldValue("no_number", Long.MAX_VALUE)
        .withFieldValue("no_time", Instant.parse("1969-12-31T23:59:59.999Z"))
        .withFieldValue("no_price", new BigDecimal("-0.001"))
        .withFieldValue("no_raw", "raw".getBytes(StandardCharsets.UTF_8))
        .withFieldValue("home", home("Ulm", 89073, "old", ""))
        .withFieldValue("second_home", home("Bonn", null))
        .withFieldValue("numbers", List.of(1L, -1L, Long.MIN_VALUE))
        .withFieldValue("homes", List.of(home("A", 1, "x"), home("B", null)))
        .withFieldValue("no_list", List.of("a", "b"))
        .withFieldValue("gaps", Arrays.asList("a", null, "b"))
        .withFieldValue("counts", Map.of("a", 1L, "b", 2L))
        .withFieldValue("places", Map.of("home", home("Ulm", 1)))
        .withFieldValue("times", List.of(new Instant(0), new Instant(-1)))
        .withFieldValue("exact", java.time.Instant.parse("2026-03-04T05:06:07.089123Z"))
        .withFieldValue("code", "abc")
        .withFieldValue("digest", new byte[] {1, 2, 3, 4})
        .build();
  }

  private static Row sparse(long id) {
    return Row.fromRow(full(id))
        .withFieldValue("text", "plain")
        .withFieldValue("price", new BigDecimal("3"))
        .withFieldValue("no_text", null)
        .withFieldValue("no_number", null)
        .withFieldValue("no_time", null)
        .withFieldValue("no_price", null)
        .withFieldValue("no_raw", null)
        .withFieldValue("second_home", null)
        .withFieldValue("numbers", List.of())
        .withFieldValue("homes", List.of())
        .withFieldValue("no_list", null)
        .withFieldValue("counts", Map.of())
        .withFieldValue("places", Map.of())
        .build();
  }

  private static final class Compare extends DoFn<Row, String> {
    private static final long serialVersionUID = 1L;
    private final List<Row> expected;

    Compare(List<Row> expected) {
      this.expected = expected;
    }

    @ProcessElement
    public void process(
        @Element Row row,
        @Timestamp Instant time,
        BoundedWindow window,
        OutputReceiver<String> out) {
      long id = row.getInt64("id");
      Row sent = expected.stream().filter(e -> e.getInt64("id") == id).findFirst().orElseThrow();
      List<String> changed = new ArrayList<>();
      for (Schema.Field field : SCHEMA.getFields()) {
        String name = field.getName();
        Schema.Field now = row.getSchema().getField(name);
        if (!now.getType().equals(field.getType())) {
          changed.add(name + ": type " + now.getType() + " for " + field.getType());
        }
        Object before = sent.getValue(name);
        Object after = row.getValue(name);
        boolean same =
            before instanceof byte[]
                ? Arrays.equals((byte[]) before, (byte[]) after)
                : before == null ? after == null : before.equals(after);
        if (!same) {
          changed.add(name + ": " + after + " for " + before);
        }
      }
      out.output(
          id
              + " "
              + time.getMillis()
              + " "
              + ((IntervalWindow) window).start().getMillis()
              + " "
              + changed);
    }
  }
}
