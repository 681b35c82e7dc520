// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

import java.util.Collection;
import java.util.Map;

/** The model server: one of ours, started on each worker, or one that runs already. */
public final class Server extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("args", Rule.list(Rule.string()))
          .optional("env", Rule.map(Rule.string()))
          .optional("env_from_worker", Rule.list(Rule.string().minLength(1)))
          .optional("startup_timeout_secs", Rule.number().exclusiveMinimum(0).maximum(31536000))
          .optional("endpoint", Rule.string().pattern("^https?://[!\"$-.0->@-~]+[!\"$->@-~]*$", "an address such as http://127.0.0.1:8000/v1"))
          .optional("metrics_endpoint", Rule.string().pattern("^https?://[!\"$-.0->@-~]+[!\"$->@-~]*$", "an address such as http://127.0.0.1:8000/v1"))
          .optional("api_key_env", Rule.string().minLength(1));

  private Server(Builder builder) {
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

  /** Collects the knobs of a {@link Server} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * vLLM's own command line; not {@code --model}, {@code --host} or {@code --port}.
     *
     * <p>A list of strings. Default: {@code []}. Example: {@code ["--max-model-len=4096"]}.
     *
     * @param args {@code args}
     * @return this builder
     */
    public Builder args(String... args) {
      return set("args", (Object[]) args);
    }

    /**
     * vLLM's own command line; not {@code --model}, {@code --host} or {@code --port}.
     *
     * <p>A list of strings. Default: {@code []}. Example: {@code ["--max-model-len=4096"]}.
     *
     * @param args {@code args}
     * @return this builder
     */
    public Builder args(Collection<String> args) {
      return set("args", args);
    }

    /**
     * Variables for the server. No secrets: configuration is visible in the job graph.
     *
     * <p>A mapping of names to strings. Default: none. Example: {@code {"VLLM_CPU_KVCACHE_SPACE":
     * "1"}}.
     *
     * @param env {@code env}
     * @return this builder
     */
    public Builder env(Map<String, String> env) {
      return set("env", env);
    }

    /**
     * Variables that the worker's environment must provide; missing ones are an error.
     *
     * <p>A list of strings of at least 1 character. Default: {@code []}. Example: {@code
     * ["HF_TOKEN"]}.
     *
     * @param envFromWorker {@code env_from_worker}
     * @return this builder
     */
    public Builder envFromWorker(String... envFromWorker) {
      return set("env_from_worker", (Object[]) envFromWorker);
    }

    /**
     * Variables that the worker's environment must provide; missing ones are an error.
     *
     * <p>A list of strings of at least 1 character. Default: {@code []}. Example: {@code
     * ["HF_TOKEN"]}.
     *
     * @param envFromWorker {@code env_from_worker}
     * @return this builder
     */
    public Builder envFromWorker(Collection<String> envFromWorker) {
      return set("env_from_worker", envFromWorker);
    }

    /**
     * Longest time the server may take to answer.
     *
     * <p>A number (seconds), above 0, at most 31536000. Default: {@code 600.0}. Example: {@code
     * 600}.
     *
     * @param startupTimeoutSecs {@code startup_timeout_secs}
     * @return this builder
     */
    public Builder startupTimeoutSecs(double startupTimeoutSecs) {
      return set("startup_timeout_secs", startupTimeoutSecs);
    }

    /**
     * Base address of a running OpenAI-compatible server, to use in place of starting one.
     *
     * <p>Text, an address such as http://127.0.0.1:8000/v1. Default: none. Example: {@code
     * http://127.0.0.1:8000/v1}.
     *
     * @param endpoint {@code endpoint}
     * @return this builder
     */
    public Builder endpoint(String endpoint) {
      return set("endpoint", endpoint);
    }

    /**
     * Address of that server's Prometheus page, for {@code autoscaling}; only for a server that
     * belongs to one worker.
     *
     * <p>Text, an address such as http://127.0.0.1:8000/v1. Default: none. Example: {@code
     * http://127.0.0.1:8000/metrics}.
     *
     * @param metricsEndpoint {@code metrics_endpoint}
     * @return this builder
     */
    public Builder metricsEndpoint(String metricsEndpoint) {
      return set("metrics_endpoint", metricsEndpoint);
    }

    /**
     * Variable of the worker's environment that holds the endpoint's API key.
     *
     * <p>Text, at least 1 character. Default: none. Example: {@code OPENAI_API_KEY}.
     *
     * @param apiKeyEnv {@code api_key_env}
     * @return this builder
     */
    public Builder apiKeyEnv(String apiKeyEnv) {
      return set("api_key_env", apiKeyEnv);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public Server build() {
      return new Server(this);
    }
  }
}
