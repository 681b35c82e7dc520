package io.beamllm.integration;

import io.beamllm.ExpansionService;
import io.beamllm.VllmCompletions;
import io.beamllm.example.LocalWorkers;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.io.TextIO;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.transforms.JsonToRow;
import org.apache.beam.sdk.transforms.ToJson;

/** Reads rows, asks about each, and writes them: the Java side of {@code benchmarks/java}. */
public final class Throughput {
  private static final Schema INPUT =
      Schema.builder().addStringField("group").addStringField("text").build();

  private Throughput() {}

  public static void main(String[] args) throws Exception {
    Options options = PipelineOptionsFactory.fromArgs(args).as(Options.class);
    LocalWorkers workers = LocalWorkers.start(options);
    try {
      Pipeline pipeline = Pipeline.create(options);
      pipeline
          .apply("Read", TextIO.read().from(options.getInput()))
          .apply("Parse", JsonToRow.withSchema(INPUT))
          .apply(
              "Ask",
              VllmCompletions.builder()
                  .model("m")
                  .prompt("Label: {text}")
                  .prefixBatching(p -> p.keyField("group"))
                  .server(s -> s.endpoint(options.getEndpoint()))
                  .expansionService(ExpansionService.python(options.getService()))
                  .build())
          .rows()
          .apply("Json", ToJson.of())
          .apply("Write", TextIO.write().to(options.getOutput()).withoutSharding());
      pipeline.run().waitUntilFinish();
    } finally {
      workers.close();
    }
  }
}
