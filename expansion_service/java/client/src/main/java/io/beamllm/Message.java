// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

/** One message of a chat prompt. */
public final class Message extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .required(
              "role",
              "Who speaks.",
              Rule.string().oneOf("assistant", "developer", "system", "user"))
          .required(
              "content",
              "Text with `{field}` placeholders, filled from the row. Literal braces are "
                  + "doubled.",
              Rule.string());

  private Message(Builder builder) {
    super(builder);
  }

  /**
   * Gives a section with its knobs.
   *
   * @param role see {@link Builder#role}
   * @param content see {@link Builder#content}
   * @return the section
   */
  public static Message of(Role role, String content) {
    return builder().role(role).content(content).build();
  }

  /**
   * Starts with every knob at its default.
   *
   * @return a builder
   */
  public static Builder builder() {
    return new Builder();
  }

  /** Collects the knobs of a {@link Message} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * Who speaks.
     *
     * <p>One of {@code assistant}, {@code developer}, {@code system}, {@code user}. Required.
     * Example: {@code user}.
     *
     * @param role {@code role}
     * @return this builder
     */
    public Builder role(Role role) {
      return set("role", role == null ? null : role.toString());
    }

    /**
     * Text with {@code {field}} placeholders, filled from the row. Literal braces are doubled.
     *
     * <p>Text. Required. Example: {@code Label this ticket: {text}}.
     *
     * @param content {@code content}
     * @return this builder
     */
    public Builder content(String content) {
      return set("content", content);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public Message build() {
      return new Message(this);
    }
  }

  /** Values of {@code role}. */
  public enum Role {
    /** {@code assistant}. */
    ASSISTANT("assistant"),

    /** {@code developer}. */
    DEVELOPER("developer"),

    /** {@code system}. */
    SYSTEM("system"),

    /** {@code user}. */
    USER("user");

    private final String word;

    Role(String word) {
      this.word = word;
    }

    /** The value as it is published. */
    @Override
    public String toString() {
      return word;
    }
  }
}
