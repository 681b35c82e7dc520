// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** How large a batch gets and how long a row waits for one. */
public final class Batching extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("min_batch_size", Rule.integer().minimum(1).maximum(100000))
          .optional("max_batch_size", Rule.integer().minimum(1).maximum(100000))
          .optional("max_batch_duration_secs", Rule.number().exclusiveMinimum(0).maximum(31536000))
          .optional("max_batch_weight", Rule.integer().minimum(1).maximum(9223372036854775807L))
          .optional("weight", Rule.string().oneOf("rows", "tokens"));

  private Batching(Builder builder) {
    super(builder);
  }

  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {
    return new Builder();
  }

  /** Collects the knobs of a {@link Batching} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * In streaming, the batches of a key grow from this size towards {@code max_batch_size}, by the
     * time that they take; with both equal the size is fixed. Batch pipelines split a key only
     * above {@code max_batch_size}.
     *
     * <p>An integer (rows), at least 1, at most 100000. Default: {@code 1}. Example: {@code 8}.
     *
     * @param minBatchSize {@code min_batch_size}
     * @return this builder
     */
    public Builder minBatchSize(long minBatchSize) {
      return set("min_batch_size", minBatchSize);
    }

    /**
     * Most rows of one batch.
     *
     * <p>An integer (rows), at least 1, at most 100000. Default: {@code 64}. Example: {@code 64}.
     *
     * @param maxBatchSize {@code max_batch_size}
     * @return this builder
     */
    public Builder maxBatchSize(long maxBatchSize) {
      return set("max_batch_size", maxBatchSize);
    }

    /**
     * Longest wait of an incomplete batch, in streaming.
     *
     * <p>A number (seconds), above 0, at most 31536000. Default: {@code 1.0}. Example: {@code 1.0}.
     *
     * @param maxBatchDurationSecs {@code max_batch_duration_secs}
     * @return this builder
     */
    public Builder maxBatchDurationSecs(double maxBatchDurationSecs) {
      return set("max_batch_duration_secs", maxBatchDurationSecs);
    }

    /**
     * Most weight of one batch; a heavier row goes alone.
     *
     * <p>An integer (of {@code weight}), at least 1. Default: none. Example: {@code 65536}.
     *
     * @param maxBatchWeight {@code max_batch_weight}
     * @return this builder
     */
    public Builder maxBatchWeight(long maxBatchWeight) {
      return set("max_batch_weight", maxBatchWeight);
    }

    /**
     * What a row weighs: 1, or its prompt's tokens, estimated as a quarter of its UTF-8 bytes.
     *
     * <p>One of {@code rows}, {@code tokens}. Default: {@code rows}. Example: {@code tokens}.
     *
     * @param weight {@code weight}
     * @return this builder
     */
    public Builder weight(Weight weight) {
      return set("weight", weight == null ? null : weight.toString());
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public Batching build() {
      return new Batching(this);
    }
  }

  /** Values of {@code weight}. */
  public enum Weight {
    /** {@code rows}. */
    ROWS("rows"),

    /** {@code tokens}. */
    TOKENS("tokens");

    private final String word;

    Weight(String word) {
      this.word = word;
    }

    /** The value as it is published. */
    @Override
    public String toString() {
      return word;
    }
  }
}
