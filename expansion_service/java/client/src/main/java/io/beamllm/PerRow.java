// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** Sampling knobs taken from a column of the row, by column name. */
public final class PerRow extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("max_tokens", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("min_tokens", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("temperature", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("top_p", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("top_k", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("min_p", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("presence_penalty", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("frequency_penalty", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("repetition_penalty", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("seed", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("stop", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("choices", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("regex", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("json_schema", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"));

  private PerRow(Builder builder) {
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

  /** Collects the knobs of a {@link PerRow} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * Column that holds the row's {@code sampling.max_tokens}; null there means the configured
     * value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code max_tokens_column}.
     *
     * @param maxTokens {@code max_tokens}
     * @return this builder
     */
    public Builder maxTokens(String maxTokens) {
      return set("max_tokens", maxTokens);
    }

    /**
     * Column that holds the row's {@code sampling.min_tokens}; null there means the configured
     * value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code min_tokens_column}.
     *
     * @param minTokens {@code min_tokens}
     * @return this builder
     */
    public Builder minTokens(String minTokens) {
      return set("min_tokens", minTokens);
    }

    /**
     * Column that holds the row's {@code sampling.temperature}; null there means the configured
     * value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code temperature_column}.
     *
     * @param temperature {@code temperature}
     * @return this builder
     */
    public Builder temperature(String temperature) {
      return set("temperature", temperature);
    }

    /**
     * Column that holds the row's {@code sampling.top_p}; null there means the configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code top_p_column}.
     *
     * @param topP {@code top_p}
     * @return this builder
     */
    public Builder topP(String topP) {
      return set("top_p", topP);
    }

    /**
     * Column that holds the row's {@code sampling.top_k}; null there means the configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code top_k_column}.
     *
     * @param topK {@code top_k}
     * @return this builder
     */
    public Builder topK(String topK) {
      return set("top_k", topK);
    }

    /**
     * Column that holds the row's {@code sampling.min_p}; null there means the configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code min_p_column}.
     *
     * @param minP {@code min_p}
     * @return this builder
     */
    public Builder minP(String minP) {
      return set("min_p", minP);
    }

    /**
     * Column that holds the row's {@code sampling.presence_penalty}; null there means the
     * configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code presence_penalty_column}.
     *
     * @param presencePenalty {@code presence_penalty}
     * @return this builder
     */
    public Builder presencePenalty(String presencePenalty) {
      return set("presence_penalty", presencePenalty);
    }

    /**
     * Column that holds the row's {@code sampling.frequency_penalty}; null there means the
     * configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code frequency_penalty_column}.
     *
     * @param frequencyPenalty {@code frequency_penalty}
     * @return this builder
     */
    public Builder frequencyPenalty(String frequencyPenalty) {
      return set("frequency_penalty", frequencyPenalty);
    }

    /**
     * Column that holds the row's {@code sampling.repetition_penalty}; null there means the
     * configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code repetition_penalty_column}.
     *
     * @param repetitionPenalty {@code repetition_penalty}
     * @return this builder
     */
    public Builder repetitionPenalty(String repetitionPenalty) {
      return set("repetition_penalty", repetitionPenalty);
    }

    /**
     * Column that holds the row's {@code sampling.seed}; null there means the configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code seed_column}.
     *
     * @param seed {@code seed}
     * @return this builder
     */
    public Builder seed(String seed) {
      return set("seed", seed);
    }

    /**
     * Column that holds the row's {@code sampling.stop}; null there means the configured value. A
     * list, or one written as JSON.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code stop_column}.
     *
     * @param stop {@code stop}
     * @return this builder
     */
    public Builder stop(String stop) {
      return set("stop", stop);
    }

    /**
     * Column that holds the row's {@code sampling.choices}; null there means the configured value.
     * A list, or one written as JSON.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code choices_column}.
     *
     * @param choices {@code choices}
     * @return this builder
     */
    public Builder choices(String choices) {
      return set("choices", choices);
    }

    /**
     * Column that holds the row's {@code sampling.regex}; null there means the configured value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code regex_column}.
     *
     * @param regex {@code regex}
     * @return this builder
     */
    public Builder regex(String regex) {
      return set("regex", regex);
    }

    /**
     * Column that holds the row's {@code sampling.json_schema}; null there means the configured
     * value.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code json_schema_column}.
     *
     * @param jsonSchema {@code json_schema}
     * @return this builder
     */
    public Builder jsonSchema(String jsonSchema) {
      return set("json_schema", jsonSchema);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public PerRow build() {
      return new PerRow(this);
    }
  }
}
