// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** What each worker tells the runner of the messages it can hold. */
public final class Autoscaling extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("enabled", Rule.bool())
          .optional("estimator", Rule.string().oneOf("completion_rate", "saturated_completion_rate"))
          .optional("metric_tag", Rule.string().minLength(1))
          .optional("aggregation", Rule.string().pattern("^(last|lifetime_max|max|mean|p([1-9][0-9]?|100))$", "last, lifetime_max, max, mean or a percentile such as p90"))
          .optional("aggregation_count", Rule.integer().minimum(1).maximum(100000))
          .optional("target_drain_secs", Rule.number().exclusiveMinimum(0).maximum(31536000))
          .optional("window_secs", Rule.number().exclusiveMinimum(0).maximum(31536000))
          .optional("interval_secs", Rule.number().minimum(0.05).maximum(3600))
          .optional("scrape_timeout_secs", Rule.number().exclusiveMinimum(0).maximum(60))
          .optional("min_completions", Rule.integer().minimum(1).maximum(9223372036854775807L))
          .optional("full_concurrency", Rule.integer().minimum(1).maximum(9223372036854775807L))
          .optional("page_port", Rule.integer().minimum(1).maximum(65535))
          .optional("page_host", Rule.string().minLength(1));

  private Autoscaling(Builder builder) {
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

  /** Collects the knobs of a {@link Autoscaling} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * Whether workers publish {@code num_loaded_models_TAG}, by which Dataflow sizes the pool.
     *
     * <p>True or false. Default: {@code true}. Example: {@code true}.
     *
     * @param enabled {@code enabled}
     * @return this builder
     */
    public Builder enabled(boolean enabled) {
      return set("enabled", enabled);
    }

    /**
     * {@code saturated_completion_rate} learns what a worker can do only while it is full, and
     * holds that otherwise; {@code completion_rate} learns whenever something runs.
     *
     * <p>One of {@code completion_rate}, {@code saturated_completion_rate}. Default: {@code
     * saturated_completion_rate}. Example: {@code saturated_completion_rate}.
     *
     * @param estimator {@code estimator}
     * @return this builder
     */
    public Builder estimator(Estimator estimator) {
      return set("estimator", estimator == null ? null : estimator.toString());
    }

    /**
     * The TAG in the metric's name. Default: the model identifier.
     *
     * <p>Text, at least 1 character. Example: {@code tickets}.
     *
     * @param metricTag {@code metric_tag}
     * @return this builder
     */
    public Builder metricTag(String metricTag) {
      return set("metric_tag", metricTag);
    }

    /**
     * Which of the latest {@code aggregation_count} estimates is published: {@code last}, {@code
     * max}, {@code mean}, a percentile such as {@code p90}; or {@code lifetime_max} of all.
     *
     * <p>Text, last, lifetime_max, max, mean or a percentile such as p90. Default: {@code last}.
     * Example: {@code p90}.
     *
     * @param aggregation {@code aggregation}
     * @return this builder
     */
    public Builder aggregation(String aggregation) {
      return set("aggregation", aggregation);
    }

    /**
     * How many estimates {@code aggregation} looks at.
     *
     * <p>An integer (estimates), at least 1, at most 100000. Default: {@code 30}. Example: {@code
     * 30}.
     *
     * @param aggregationCount {@code aggregation_count}
     * @return this builder
     */
    public Builder aggregationCount(long aggregationCount) {
      return set("aggregation_count", aggregationCount);
    }

    /**
     * How many seconds of work a worker should hold: the pool is sized to work off the backlog in
     * about this time.
     *
     * <p>A number (seconds), above 0, at most 31536000. Default: {@code 300.0}. Example: {@code
     * 60}.
     *
     * @param targetDrainSecs {@code target_drain_secs}
     * @return this builder
     */
    public Builder targetDrainSecs(double targetDrainSecs) {
      return set("target_drain_secs", targetDrainSecs);
    }

    /**
     * How much of the latest learnable time the estimate rests on; several times as long as a
     * request takes.
     *
     * <p>A number (seconds), above 0, at most 31536000. Default: {@code 300.0}. Example: {@code
     * 600}.
     *
     * @param windowSecs {@code window_secs}
     * @return this builder
     */
    public Builder windowSecs(double windowSecs) {
      return set("window_secs", windowSecs);
    }

    /**
     * Time between two looks at the server's metrics.
     *
     * <p>A number (seconds), at least 0.05, at most 3600. Default: {@code 5.0}. Example: {@code 5}.
     *
     * @param intervalSecs {@code interval_secs}
     * @return this builder
     */
    public Builder intervalSecs(double intervalSecs) {
      return set("interval_secs", intervalSecs);
    }

    /**
     * Longest time one look may take; a busy server answers late.
     *
     * <p>A number (seconds), above 0, at most 60. Default: {@code 5.0}. Example: {@code 5}.
     *
     * @param scrapeTimeoutSecs {@code scrape_timeout_secs}
     * @return this builder
     */
    public Builder scrapeTimeoutSecs(double scrapeTimeoutSecs) {
      return set("scrape_timeout_secs", scrapeTimeoutSecs);
    }

    /**
     * Fewest completed requests in the window for an estimate; always at least as many as run at
     * once.
     *
     * <p>An integer (requests), at least 1. Default: {@code 10}. Example: {@code 10}.
     *
     * @param minCompletions {@code min_completions}
     * @return this builder
     */
    public Builder minCompletions(long minCompletions) {
      return set("min_completions", minCompletions);
    }

    /**
     * How many requests are under way on a full worker, for {@code saturated_completion_rate}; one
     * with requests that wait at the server is full in any case. Default: the lesser of {@code
     * requests.max_in_flight} and {@code batching.max_batch_size}.
     *
     * <p>An integer (requests), at least 1. Example: {@code 64}.
     *
     * @param fullConcurrency {@code full_concurrency}
     * @return this builder
     */
    public Builder fullConcurrency(long fullConcurrency) {
      return set("full_concurrency", fullConcurrency);
    }

    /**
     * Port of a Prometheus page with the same figures for people, in each worker; none when absent.
     *
     * <p>An integer, at least 1, at most 65535. Default: none. Example: {@code 9400}.
     *
     * @param pagePort {@code page_port}
     * @return this builder
     */
    public Builder pagePort(long pagePort) {
      return set("page_port", pagePort);
    }

    /**
     * Address on which that page listens. Anybody who reaches it can read it.
     *
     * <p>Text, at least 1 character. Default: {@code 127.0.0.1}. Example: {@code 10.0.0.5}.
     *
     * @param pageHost {@code page_host}
     * @return this builder
     */
    public Builder pageHost(String pageHost) {
      return set("page_host", pageHost);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public Autoscaling build() {
      return new Autoscaling(this);
    }
  }

  /** Values of {@code estimator}. */
  public enum Estimator {
    /** {@code completion_rate}. */
    COMPLETION_RATE("completion_rate"),

    /** {@code saturated_completion_rate}. */
    SATURATED_COMPLETION_RATE("saturated_completion_rate");

    private final String word;

    Estimator(String word) {
      this.word = word;
    }

    /** The value as it is published. */
    @Override
    public String toString() {
      return word;
    }
  }
}
