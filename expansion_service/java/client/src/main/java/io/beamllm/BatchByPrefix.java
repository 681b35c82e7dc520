// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

import java.util.function.Consumer;

/**
 * Groups rows that share a prompt prefix, or another key, into batches.
 *
 * <p>{@code BatchByPrefix} in YAML and in Python. Everything is checked when the transform is
 * built; what depends on the input's fields, when it is applied.
 */
public final class BatchByPrefix extends LlmTransform {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("prefix_batching", Rule.section(PrefixBatching.KNOBS))
          .optional("batching", Rule.section(Batching.KNOBS))
          .optional("error_handling", Rule.section(ErrorHandling.KNOBS))
          .optional("prompt", Rule.string().minLength(1));

  private BatchByPrefix(Builder builder) {
    super("BatchByPrefix", "beam:schematransform:beam_llm:batch_by_prefix:v1", "output", KNOBS, builder);
  }

  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {
    return new Builder();
  }

  /** Collects the knobs of a {@link BatchByPrefix}. */
  public static final class Builder extends LlmTransform.Builder<Builder> {
    private Builder() {}

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
     * The prompt whose start is the key, with {@code {field}} placeholders; needed unless {@code
     * prefix_batching} has a {@code key_field} or {@code key_fn}. Literal braces are doubled.
     *
     * <p>Text, at least 1 character. Default: none. Example: {@code "{guide}\n\n{text}"}.
     *
     * @param prompt {@code prompt}
     * @return this builder
     */
    public Builder prompt(String prompt) {
      return set("prompt", prompt);
    }

    /**
     * Checks the configuration.
     *
     * @return the transform
     * @throws BeamLlmException if it cannot be used; every problem is listed
     */
    public BatchByPrefix build() {
      return new BatchByPrefix(this);
    }
  }
}
