// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

import java.util.Collection;

/** How the reply is generated. Names and meanings are vLLM's ({@code SamplingParams}). */
public final class Sampling extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("max_tokens", Rule.integer().minimum(1).maximum(9223372036854775807L))
          .optional("min_tokens", Rule.integer().minimum(0).maximum(9223372036854775807L))
          .optional("temperature", Rule.number().minimum(0).maximum(2))
          .optional("top_p", Rule.number().exclusiveMinimum(0).maximum(1))
          .optional("top_k", Rule.integer().minimum(-1).maximum(9223372036854775807L))
          .optional("min_p", Rule.number().minimum(0).maximum(1))
          .optional("presence_penalty", Rule.number().minimum(-2).maximum(2))
          .optional("frequency_penalty", Rule.number().minimum(-2).maximum(2))
          .optional("repetition_penalty", Rule.number().exclusiveMinimum(0).maximum(100))
          .optional("seed", Rule.integer().minimum(-9223372036854775808L).maximum(9223372036854775807L))
          .optional("stop", Rule.list(Rule.string().minLength(1)))
          .optional("choices", Rule.list(Rule.string().minLength(1)).minItems(1))
          .optional("regex", Rule.string().minLength(1))
          .optional("json_schema", Rule.string().minLength(2))
          .optional("extra_body", Rule.string().minLength(2));

  private Sampling(Builder builder) {
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

  /** Collects the knobs of a {@link Sampling} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * Most tokens to generate; the server's default when absent.
     *
     * <p>An integer (tokens), at least 1. Default: none. Example: {@code 64}.
     *
     * @param maxTokens {@code max_tokens}
     * @return this builder
     */
    public Builder maxTokens(long maxTokens) {
      return set("max_tokens", maxTokens);
    }

    /**
     * Fewest tokens to generate before a stop counts.
     *
     * <p>An integer (tokens), at least 0. Default: none. Example: {@code 1}.
     *
     * @param minTokens {@code min_tokens}
     * @return this builder
     */
    public Builder minTokens(long minTokens) {
      return set("min_tokens", minTokens);
    }

    /**
     * Randomness; 0 always takes the likeliest token.
     *
     * <p>A number, at least 0, at most 2. Default: none. Example: {@code 0.0}.
     *
     * @param temperature {@code temperature}
     * @return this builder
     */
    public Builder temperature(double temperature) {
      return set("temperature", temperature);
    }

    /**
     * Sample from the likeliest tokens of this total probability.
     *
     * <p>A number, above 0, at most 1. Default: none. Example: {@code 0.9}.
     *
     * @param topP {@code top_p}
     * @return this builder
     */
    public Builder topP(double topP) {
      return set("top_p", topP);
    }

    /**
     * Sample from the K likeliest tokens; -1 means all.
     *
     * <p>An integer, at least -1. Default: none. Example: {@code 40}.
     *
     * @param topK {@code top_k}
     * @return this builder
     */
    public Builder topK(long topK) {
      return set("top_k", topK);
    }

    /**
     * Least probability of a token, relative to the likeliest.
     *
     * <p>A number, at least 0, at most 1. Default: none. Example: {@code 0.05}.
     *
     * @param minP {@code min_p}
     * @return this builder
     */
    public Builder minP(double minP) {
      return set("min_p", minP);
    }

    /**
     * Positive values discourage tokens already present.
     *
     * <p>A number, at least -2, at most 2. Default: none. Example: {@code 0.2}.
     *
     * @param presencePenalty {@code presence_penalty}
     * @return this builder
     */
    public Builder presencePenalty(double presencePenalty) {
      return set("presence_penalty", presencePenalty);
    }

    /**
     * Positive values discourage frequent tokens.
     *
     * <p>A number, at least -2, at most 2. Default: none. Example: {@code 0.2}.
     *
     * @param frequencyPenalty {@code frequency_penalty}
     * @return this builder
     */
    public Builder frequencyPenalty(double frequencyPenalty) {
      return set("frequency_penalty", frequencyPenalty);
    }

    /**
     * Values above 1 discourage repetition.
     *
     * <p>A number, above 0, at most 100. Default: none. Example: {@code 1.1}.
     *
     * @param repetitionPenalty {@code repetition_penalty}
     * @return this builder
     */
    public Builder repetitionPenalty(double repetitionPenalty) {
      return set("repetition_penalty", repetitionPenalty);
    }

    /**
     * Seed of the random generator.
     *
     * <p>An integer. Default: none. Example: {@code 1}.
     *
     * @param seed {@code seed}
     * @return this builder
     */
    public Builder seed(long seed) {
      return set("seed", seed);
    }

    /**
     * Texts that end the reply; they are not part of it.
     *
     * <p>A list of strings of at least 1 character. Default: none. Example: {@code ["\n\n"]}.
     *
     * @param stop {@code stop}
     * @return this builder
     */
    public Builder stop(String... stop) {
      return set("stop", (Object[]) stop);
    }

    /**
     * Texts that end the reply; they are not part of it.
     *
     * <p>A list of strings of at least 1 character. Default: none. Example: {@code ["\n\n"]}.
     *
     * @param stop {@code stop}
     * @return this builder
     */
    public Builder stop(Collection<String> stop) {
      return set("stop", stop);
    }

    /**
     * The reply is exactly one of these.
     *
     * <p>A list of strings of at least 1 character, at least 1 item. Default: none. Example: {@code
     * ["bug", "question", "praise"]}.
     *
     * @param choices {@code choices}
     * @return this builder
     */
    public Builder choices(String... choices) {
      return set("choices", (Object[]) choices);
    }

    /**
     * The reply is exactly one of these.
     *
     * <p>A list of strings of at least 1 character, at least 1 item. Default: none. Example: {@code
     * ["bug", "question", "praise"]}.
     *
     * @param choices {@code choices}
     * @return this builder
     */
    public Builder choices(Collection<String> choices) {
      return set("choices", choices);
    }

    /**
     * The reply matches this expression.
     *
     * <p>Text, at least 1 character. Default: none. Example: {@code \d{4}}.
     *
     * @param regex {@code regex}
     * @return this builder
     */
    public Builder regex(String regex) {
      return set("regex", regex);
    }

    /**
     * The reply is JSON of this JSON Schema, given as a string.
     *
     * <p>Text, at least 2 characters. Default: none. Example: {@code {"type": "object"}}.
     *
     * @param jsonSchema {@code json_schema}
     * @return this builder
     */
    public Builder jsonSchema(String jsonSchema) {
      return set("json_schema", jsonSchema);
    }

    /**
     * Further fields of the request's body, as a JSON object in a string, for what has no knob
     * here.
     *
     * <p>Text, at least 2 characters. Default: none. Example: {@code {"chat_template_kwargs":
     * {"enable_thinking": false}}}.
     *
     * @param extraBody {@code extra_body}
     * @return this builder
     */
    public Builder extraBody(String extraBody) {
      return set("extra_body", extraBody);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public Sampling build() {
      return new Sampling(this);
    }
  }
}
