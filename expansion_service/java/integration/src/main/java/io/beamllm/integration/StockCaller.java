package io.beamllm.integration;

import java.util.ArrayList;
import java.util.List;
import org.apache.beam.fn.harness.ExternalWorkerService;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.extensions.python.PythonExternalTransform;
import org.apache.beam.sdk.fn.server.GrpcFnServer;
import org.apache.beam.sdk.io.TextIO;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.Schema.FieldType;
import org.apache.beam.sdk.transforms.Create;
import org.apache.beam.sdk.transforms.ToJson;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.PCollectionTuple;
import org.apache.beam.sdk.values.Row;

/** Calls a transform with Beam's own classes alone: our client is not on the class path. */
public final class StockCaller {
  private static final Schema INPUT =
      Schema.builder().addInt64Field("id").addStringField("text").build();
  private static final Schema MESSAGE =
      Schema.builder().addStringField("role").addStringField("content").build();
  private static final Schema SAMPLING =
      Schema.builder().addInt64Field("max_tokens").addDoubleField("temperature").build();
  private static final Schema SERVER = Schema.builder().addStringField("endpoint").build();
  private static final Schema ERRORS = Schema.builder().addStringField("output").build();

  private StockCaller() {}

  public static void main(String[] args) throws Exception {
    Options options = PipelineOptionsFactory.fromArgs(args).as(Options.class);
    GrpcFnServer<ExternalWorkerService> workers = new ExternalWorkerService(options).start();
    options.setDefaultEnvironmentType("EXTERNAL");
    options.setDefaultEnvironmentConfig(workers.getApiServiceDescriptor().getUrl());
    try {
      Pipeline pipeline = Pipeline.create(options);
      PCollection<Row> rows =
          pipeline.apply(
              "Rows",
              Create.of(row(INPUT, 1L, "good"), row(INPUT, 2L, "BAD")).withRowSchema(INPUT));
      PCollectionTuple asked =
          rows.apply(
              "Ask",
              PythonExternalTransform.<PCollection<Row>, PCollectionTuple>from(
                      "beam_llm.VLLMChat", options.getService())
                  .withKwarg("model", "m")
                  .withTypeHint(ArrayList.class, FieldType.array(FieldType.row(MESSAGE)))
                  .withKwarg(
                      "messages", new ArrayList<>(List.of(row(MESSAGE, "user", "Say {text}"))))
                  .withKwarg("sampling", row(SAMPLING, 4L, 0.0))
                  .withKwarg("server", row(SERVER, options.getEndpoint()))
                  .withKwarg("error_handling", row(ERRORS, "failures")));
      write(asked, "output", options);
      write(asked, "failures", options);
      pipeline.run().waitUntilFinish();
    } finally {
      workers.close();
    }
  }

  private static Row row(Schema schema, Object... values) {
    return Row.withSchema(schema).addValues(values).build();
  }

  private static void write(PCollectionTuple outputs, String tag, Options options) {
    outputs
        .<Row>get(tag)
        .apply(tag + "Json", ToJson.of())
        .apply(tag + "Write", TextIO.write().to(options.getOutput() + "-" + tag).withoutSharding());
  }
}
