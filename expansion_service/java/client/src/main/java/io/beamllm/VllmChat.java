// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

import java.util.Collection;
import java.util.function.Consumer;

/**
 * Asks a chat model about each row, and adds its reply to the row.
 *
 * <p>{@code VLLMChat} in YAML and in Python. Everything is checked when the transform is built;
 * what depends on the input's fields, when it is applied.
 */
public final class VllmChat extends LlmTransform {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .required(
              "model",
              "Path or hub name of the model.",
              Rule.string().minLength(1))
          .required(
              "messages",
              "The conversation so far, with `{field}` placeholders.",
              Rule.list(Rule.section(Message.KNOBS)).minItems(1))
          .optional("prefix_batching", Rule.section(PrefixBatching.KNOBS))
          .optional("batching", Rule.section(Batching.KNOBS))
          .optional("error_handling", Rule.section(ErrorHandling.KNOBS))
          .optional("model_identifier", Rule.string().pattern("^[ -~]+$", "printable ASCII text, and not empty"))
          .optional("output_field", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("details_prefix", Rule.string().pattern("^([A-Za-z][A-Za-z0-9_]*)?$", "the start of a field name: letters, digits and '_', starting with a letter"))
          .optional("sampling", Rule.section(Sampling.KNOBS))
          .optional("per_row", Rule.section(PerRow.KNOBS))
          .optional("requests", Rule.section(Requests.KNOBS))
          .optional("autoscaling", Rule.section(Autoscaling.KNOBS))
          .optional("server", Rule.section(Server.KNOBS))
          .optional("resource_hints", Rule.section(ResourceHints.KNOBS));

  private VllmChat(Builder builder) {
    super("VLLMChat", "beam:schematransform:beam_llm:vllm_chat:v1", "output", KNOBS, builder);
  }

  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {
    return new Builder();
  }

  /** Collects the knobs of a {@link VllmChat}. */
  public static final class Builder extends LlmTransform.Builder<Builder> {
    private Builder() {}

    /**
     * Path or hub name of the model.
     *
     * <p>Text, at least 1 character. Required. Example: {@code
     * HuggingFaceTB/SmolLM2-135M-Instruct}.
     *
     * @param model {@code model}
     * @return this builder
     */
    public Builder model(String model) {
      return set("model", model);
    }

    /**
     * The conversation so far, with {@code {field}} placeholders.
     *
     * <p>A list of {@link Message}, at least 1 item. Required. Example: {@code [{"role": "user",
     * "content": "{text}"}]}.
     *
     * @param messages {@code messages}
     * @return this builder
     */
    public Builder messages(Message... messages) {
      return set("messages", (Object[]) messages);
    }

    /**
     * The conversation so far, with {@code {field}} placeholders.
     *
     * <p>A list of {@link Message}, at least 1 item. Required. Example: {@code [{"role": "user",
     * "content": "{text}"}]}.
     *
     * @param messages {@code messages}
     * @return this builder
     */
    public Builder messages(Collection<Message> messages) {
      return set("messages", messages);
    }

    /**
     * Which rows share a batch.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param prefixBatching {@code prefix_batching}
     * @return this builder
     */
    public Builder prefixBatching(PrefixBatching prefixBatching) {
      return set("prefix_batching", prefixBatching);
    }

    /**
     * Which rows share a batch.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param prefixBatching {@code prefix_batching}
     * @return this builder
     */
    public Builder prefixBatching(Consumer<PrefixBatching.Builder> prefixBatching) {
      PrefixBatching.Builder section = PrefixBatching.builder();
      prefixBatching.accept(section);
      return set("prefix_batching", section.build());
    }

    /**
     * How large batches get.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param batching {@code batching}
     * @return this builder
     */
    public Builder batching(Batching batching) {
      return set("batching", batching);
    }

    /**
     * How large batches get.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param batching {@code batching}
     * @return this builder
     */
    public Builder batching(Consumer<Batching.Builder> batching) {
      Batching.Builder section = Batching.builder();
      batching.accept(section);
      return set("batching", section.build());
    }

    /**
     * What becomes of failed rows; absent, one fails the pipeline.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param errorHandling {@code error_handling}
     * @return this builder
     */
    public Builder errorHandling(ErrorHandling errorHandling) {
      return set("error_handling", errorHandling);
    }

    /**
     * What becomes of failed rows; absent, one fails the pipeline.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param errorHandling {@code error_handling}
     * @return this builder
     */
    public Builder errorHandling(Consumer<ErrorHandling.Builder> errorHandling) {
      ErrorHandling.Builder section = ErrorHandling.builder();
      errorHandling.accept(section);
      return set("error_handling", section.build());
    }

    /**
     * Steps with one identifier share one server on a worker. Default: a hash of {@code model} and
     * of what {@code server} says of it.
     *
     * <p>Text, printable ASCII text, and not empty. Example: {@code tickets}.
     *
     * @param modelIdentifier {@code model_identifier}
     * @return this builder
     */
    public Builder modelIdentifier(String modelIdentifier) {
      return set("model_identifier", modelIdentifier);
    }

    /**
     * Column for the generated text.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: {@code
     * reply}. Example: {@code reply}.
     *
     * @param outputField {@code output_field}
     * @return this builder
     */
    public Builder outputField(String outputField) {
      return set("output_field", outputField);
    }

    /**
     * Put before the names of the further columns {@code finish_reason}, {@code usage} and {@code
     * model}, for rows that have such columns already.
     *
     * <p>Text, the start of a field name: letters, digits and '_', starting with a letter. Default:
     * none. Example: {@code label_}.
     *
     * @param detailsPrefix {@code details_prefix}
     * @return this builder
     */
    public Builder detailsPrefix(String detailsPrefix) {
      return set("details_prefix", detailsPrefix);
    }

    /**
     * How the reply is generated.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param sampling {@code sampling}
     * @return this builder
     */
    public Builder sampling(Sampling sampling) {
      return set("sampling", sampling);
    }

    /**
     * How the reply is generated.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param sampling {@code sampling}
     * @return this builder
     */
    public Builder sampling(Consumer<Sampling.Builder> sampling) {
      Sampling.Builder section = Sampling.builder();
      sampling.accept(section);
      return set("sampling", section.build());
    }

    /**
     * Sampling knobs taken from columns.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param perRow {@code per_row}
     * @return this builder
     */
    public Builder perRow(PerRow perRow) {
      return set("per_row", perRow);
    }

    /**
     * Sampling knobs taken from columns.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param perRow {@code per_row}
     * @return this builder
     */
    public Builder perRow(Consumer<PerRow.Builder> perRow) {
      PerRow.Builder section = PerRow.builder();
      perRow.accept(section);
      return set("per_row", section.build());
    }

    /**
     * How requests are sent.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param requests {@code requests}
     * @return this builder
     */
    public Builder requests(Requests requests) {
      return set("requests", requests);
    }

    /**
     * How requests are sent.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param requests {@code requests}
     * @return this builder
     */
    public Builder requests(Consumer<Requests.Builder> requests) {
      Requests.Builder section = Requests.builder();
      requests.accept(section);
      return set("requests", section.build());
    }

    /**
     * What workers tell of their capacity.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param autoscaling {@code autoscaling}
     * @return this builder
     */
    public Builder autoscaling(Autoscaling autoscaling) {
      return set("autoscaling", autoscaling);
    }

    /**
     * What workers tell of their capacity.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param autoscaling {@code autoscaling}
     * @return this builder
     */
    public Builder autoscaling(Consumer<Autoscaling.Builder> autoscaling) {
      Autoscaling.Builder section = Autoscaling.builder();
      autoscaling.accept(section);
      return set("autoscaling", section.build());
    }

    /**
     * The model server.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param server {@code server}
     * @return this builder
     */
    public Builder server(Server server) {
      return set("server", server);
    }

    /**
     * The model server.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param server {@code server}
     * @return this builder
     */
    public Builder server(Consumer<Server.Builder> server) {
      Server.Builder section = Server.builder();
      server.accept(section);
      return set("server", section.build());
    }

    /**
     * What the workers need.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param resourceHints {@code resource_hints}
     * @return this builder
     */
    public Builder resourceHints(ResourceHints resourceHints) {
      return set("resource_hints", resourceHints);
    }

    /**
     * What the workers need.
     *
     * <p>A section; absent, its knobs have their defaults.
     *
     * @param resourceHints {@code resource_hints}
     * @return this builder
     */
    public Builder resourceHints(Consumer<ResourceHints.Builder> resourceHints) {
      ResourceHints.Builder section = ResourceHints.builder();
      resourceHints.accept(section);
      return set("resource_hints", section.build());
    }

    /**
     * Checks the configuration.
     *
     * @return the transform
     * @throws BeamLlmException if it cannot be used; every problem is listed
     */
    public VllmChat build() {
      return new VllmChat(this);
    }
  }
}
