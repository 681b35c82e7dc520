package io.beamllm.example;

import io.beamllm.ExpansionService;
import io.beamllm.LlmOutput;
import io.beamllm.Message;
import io.beamllm.VllmChat;
import java.util.Map;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.io.TextIO;
import org.apache.beam.sdk.options.Default;
import org.apache.beam.sdk.options.Description;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.sdk.options.PortablePipelineOptions;
import org.apache.beam.sdk.options.Validation;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.transforms.Select;
import org.apache.beam.sdk.transforms.JsonToRow;
import org.apache.beam.sdk.transforms.ToJson;

/** Labels the summaries of packages, one question a row, with a chat model. */
public final class LabelPackages {
  /** Options of the command line, beside Beam's own. */
  public interface Options extends PortablePipelineOptions {
    @Description("JSON lines with package, summary, question, guide and choices")
    @Validation.Required
    String getInput();

    void setInput(String value);

    @Description("Folder for labels and failures, as JSON lines")
    @Validation.Required
    String getOutput();

    void setOutput(String value);

    @Description("Path or hub name of the model")
    @Validation.Required
    String getModel();

    void setModel(String value);

    @Description("Address of a running expansion service; without one, a service is started")
    String getExpansionService();

    void setExpansionService(String value);

    @Description("Python with beam-llm, to start the service from")
    @Default.String("python3")
    String getPython();

    void setPython(String value);

    @Description("Whether the model runs on a CPU")
    boolean isCpu();

    void setCpu(boolean value);

    @Description("Whether this process runs the Java steps: for Prism and other local job services")
    boolean isLocalWorkers();

    void setLocalWorkers(boolean value);
  }

  private static final Schema QUESTION =
      Schema.builder()
          .addStringField("package")
          .addStringField("summary")
          .addStringField("question")
          .addStringField("guide")
          .addStringField("choices") // a list, as JSON
          .build();

  private LabelPackages() {}

  /**
   * Runs the pipeline.
   *
   * @param args options
   * @throws Exception if the pipeline cannot be run
   */
  public static void main(String[] args) throws Exception {
    Options options = PipelineOptionsFactory.fromArgs(args).withValidation().as(Options.class);
    LocalWorkers workers = options.isLocalWorkers() ? LocalWorkers.start(options) : null;
    try {
      run(options);
    } finally {
      if (workers != null) {
        workers.close();
      }
    }
  }

  private static void run(Options options) {
    Pipeline pipeline = Pipeline.create(options);
    LlmOutput labelled =
        pipeline
            .apply("Read", TextIO.read().from(options.getInput()))
            .apply("Parse", JsonToRow.withSchema(QUESTION))
            .apply("Label", label(options));
    labelled
        .rows()
        .apply("Pick", Select.fieldNames("package", "summary", "question", "label"))
        .apply("WriteJson", ToJson.of())
        .apply("Write", TextIO.write().to(options.getOutput() + "/labels").withSuffix(".jsonl"));
    labelled
        .failures()
        .apply("FailuresJson", ToJson.of())
        .apply(
            "WriteFailures",
            TextIO.write().to(options.getOutput() + "/failures").withSuffix(".jsonl"));
    pipeline.run().waitUntilFinish();
  }

  private static VllmChat label(Options options) {
    VllmChat.Builder chat =
        VllmChat.builder()
            .model(options.getModel())
            .messages(
                Message.of(Message.Role.SYSTEM, "{guide}"),
                Message.of(Message.Role.USER, "{summary}"))
            .outputField("label")
            .sampling(s -> s.maxTokens(8).temperature(0))
            .perRow(p -> p.choices("choices")) // the reply is one of the row's own choices
            .requests(r -> r.maxInFlight(16))
            .errorHandling(e -> e.output("failures"))
            .expansionService(
                options.getExpansionService() == null
                    ? ExpansionService.python(options.getPython())
                    : ExpansionService.at(options.getExpansionService()));
    if (options.isCpu()) {
      chat.server(
          s ->
              s.args("--enforce-eager", "--max-model-len=2048", "--dtype=float32")
                  .env(Map.of("VLLM_CPU_KVCACHE_SPACE", "1", "HF_HUB_OFFLINE", "1")));
    }
    return chat.build();
  }
}
