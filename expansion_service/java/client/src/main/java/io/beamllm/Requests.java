// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** How requests are sent to the server. */
public final class Requests extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("max_in_flight", Rule.integer().minimum(1).maximum(4096))
          .optional("timeout_secs", Rule.number().exclusiveMinimum(0).maximum(31536000))
          .optional("max_retries", Rule.integer().minimum(0).maximum(100));

  private Requests(Builder builder) {
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

  /** Collects the knobs of a {@link Requests} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * Most requests under way at once, in each worker process, of the steps with the same {@code
     * requests} on one server.
     *
     * <p>An integer, at least 1, at most 4096. Default: {@code 64}. Example: {@code 64}.
     *
     * @param maxInFlight {@code max_in_flight}
     * @return this builder
     */
    public Builder maxInFlight(long maxInFlight) {
      return set("max_in_flight", maxInFlight);
    }

    /**
     * Longest time one attempt of one request may take.
     *
     * <p>A number (seconds), above 0, at most 31536000. Default: {@code 600.0}. Example: {@code
     * 600}.
     *
     * @param timeoutSecs {@code timeout_secs}
     * @return this builder
     */
    public Builder timeoutSecs(double timeoutSecs) {
      return set("timeout_secs", timeoutSecs);
    }

    /**
     * Further attempts after a connection error, a timeout, an answer that cannot be read, 408,
     * 425, 429 or 5xx, with exponential, jittered backoff. A restart of our own server does not
     * count.
     *
     * <p>An integer, at least 0, at most 100. Default: {@code 5}. Example: {@code 5}.
     *
     * @param maxRetries {@code max_retries}
     * @return this builder
     */
    public Builder maxRetries(long maxRetries) {
      return set("max_retries", maxRetries);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public Requests build() {
      return new Requests(this);
    }
  }
}
