// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** What the workers that run this transform need (Beam's resource hints). */
public final class ResourceHints extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("accelerator", Rule.string().minLength(1))
          .optional("min_ram", Rule.string().pattern("^ *([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)? *([KMGTP]i?)?B *$", "an amount of memory such as 30GB or 1.5GiB"))
          .optional("cpu_count", Rule.integer().minimum(1).maximum(9223372036854775807L));

  private ResourceHints(Builder builder) {
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

  /** Collects the knobs of a {@link ResourceHints} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * GPUs, in the runner's own words.
     *
     * <p>Text, at least 1 character. Default: none. Example: {@code
     * type:nvidia-l4;count:1;install-nvidia-driver}.
     *
     * @param accelerator {@code accelerator}
     * @return this builder
     */
    public Builder accelerator(String accelerator) {
      return set("accelerator", accelerator);
    }

    /**
     * Least memory.
     *
     * <p>Text, an amount of memory such as 30GB or 1.5GiB. Default: none. Example: {@code 30GB}.
     *
     * @param minRam {@code min_ram}
     * @return this builder
     */
    public Builder minRam(String minRam) {
      return set("min_ram", minRam);
    }

    /**
     * Least number of CPUs.
     *
     * <p>An integer, at least 1. Default: none. Example: {@code 4}.
     *
     * @param cpuCount {@code cpu_count}
     * @return this builder
     */
    public Builder cpuCount(long cpuCount) {
      return set("cpu_count", cpuCount);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public ResourceHints build() {
      return new ResourceHints(this);
    }
  }
}
