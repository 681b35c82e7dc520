// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** What becomes of rows that fail. */
public final class ErrorHandling extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .required(
              "output",
              "Name of the output for failed rows: `element`, `msg`, `stack`.",
              Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"));

  private ErrorHandling(Builder builder) {
    super(builder);
  }

  /**
   * Gives a section with its only knob.
   *
   * @param output see {@link Builder#output}
   * @return the section
   */
  public static ErrorHandling of(String output) {
    return builder().output(output).build();
  }

  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {
    return new Builder();
  }

  /** Collects the knobs of a {@link ErrorHandling} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * Name of the output for failed rows: {@code element}, {@code msg}, {@code stack}.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Required. Example:
     * {@code failures}.
     *
     * @param output {@code output}
     * @return this builder
     */
    public Builder output(String output) {
      return set("output", output);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public ErrorHandling build() {
      return new ErrorHandling(this);
    }
  }
}
