// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

import java.util.Collection;
import java.util.Map;

/** Which rows share a batch, and so the server's KV cache. */
public final class PrefixBatching extends Section {
  private static final long serialVersionUID = 1L;

  static final Knobs KNOBS =
      new Knobs()
          .optional("mode", Rule.string().oneOf("fixed", "none"))
          .optional("prefix_char_len", Rule.integer().minimum(1).maximum(9223372036854775807L))
          .optional("prefix_delimiters", Rule.list(Rule.string().minLength(1)))
          .optional("key_field", Rule.string().pattern("^[A-Za-z][A-Za-z0-9_]*$", "a field name: letters, digits and '_', starting with a letter"))
          .optional("key_fn", Rule.string().pattern("^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*$", "a callable such as package.module:function"))
          .optional("num_shards", Rule.integer().minimum(1).maximum(9223372036854775807L))
          .optional("num_shards_by_key", Rule.map(Rule.integer().minimum(1).maximum(9223372036854775807L)));

  private PrefixBatching(Builder builder) {
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

  /** Collects the knobs of a {@link PrefixBatching} section. */
  public static final class Builder extends Section.Builder<Builder> {
    Builder() {}

    /**
     * {@code fixed} keys rows by the start of their prompt; {@code none} does not key them.
     *
     * <p>One of {@code fixed}, {@code none}. Default: {@code fixed}. Example: {@code fixed}.
     *
     * @param mode {@code mode}
     * @return this builder
     */
    public Builder mode(Mode mode) {
      return set("mode", mode == null ? null : mode.toString());
    }

    /**
     * How much of the prompt makes the key.
     *
     * <p>An integer (characters), at least 1. Default: {@code 512}. Example: {@code 512}.
     *
     * @param prefixCharLen {@code prefix_char_len}
     * @return this builder
     */
    public Builder prefixCharLen(long prefixCharLen) {
      return set("prefix_char_len", prefixCharLen);
    }

    /**
     * The key ends at the first of these, when one starts within {@code prefix_char_len}
     * characters. Default: a blank line for prompts, none for chat.
     *
     * <p>A list of strings of at least 1 character. Example: {@code [":"]}.
     *
     * @param prefixDelimiters {@code prefix_delimiters}
     * @return this builder
     */
    public Builder prefixDelimiters(String... prefixDelimiters) {
      return set("prefix_delimiters", (Object[]) prefixDelimiters);
    }

    /**
     * The key ends at the first of these, when one starts within {@code prefix_char_len}
     * characters. Default: a blank line for prompts, none for chat.
     *
     * <p>A list of strings of at least 1 character. Example: {@code [":"]}.
     *
     * @param prefixDelimiters {@code prefix_delimiters}
     * @return this builder
     */
    public Builder prefixDelimiters(Collection<String> prefixDelimiters) {
      return set("prefix_delimiters", prefixDelimiters);
    }

    /**
     * Column whose value is the key, in place of the prompt's start.
     *
     * <p>Text, a field name: letters, digits and '_', starting with a letter. Default: none.
     * Example: {@code customer}.
     *
     * @param keyField {@code key_field}
     * @return this builder
     */
    public Builder keyField(String keyField) {
      return set("key_field", keyField);
    }

    /**
     * {@code module:function} that takes the row and returns its key, in place of the prompt's
     * start.
     *
     * <p>Text, a callable such as package.module:function. Default: none. Example: {@code
     * my_package.keys:by_customer}.
     *
     * @param keyFn {@code key_fn}
     * @return this builder
     */
    public Builder keyFn(String keyFn) {
      return set("key_fn", keyFn);
    }

    /**
     * Into how many random shards a key is spread in streaming, so that a hot key is not held to
     * one worker. Batch pipelines split a key only above a batch's size.
     *
     * <p>An integer, at least 1. Default: {@code 8}. Example: {@code 8}.
     *
     * @param numShards {@code num_shards}
     * @return this builder
     */
    public Builder numShards(long numShards) {
      return set("num_shards", numShards);
    }

    /**
     * Shards of single keys, by the key's text; {@code num_shards} for the rest.
     *
     * <p>A mapping of names to integers of at least 1. Default: none. Example: {@code {"acme":
     * 32}}.
     *
     * @param numShardsByKey {@code num_shards_by_key}
     * @return this builder
     */
    public Builder numShardsByKey(Map<String, Long> numShardsByKey) {
      return set("num_shards_by_key", numShardsByKey);
    }

    /**
     * Gives the section. Its knobs are checked with the transform that takes it.
     *
     * @return the section
     */
    public PrefixBatching build() {
      return new PrefixBatching(this);
    }
  }

  /** Values of {@code mode}. */
  public enum Mode {
    /** {@code fixed}. */
    FIXED("fixed"),

    /** {@code none}. */
    NONE("none");

    private final String word;

    Mode(String word) {
      this.word = word;
    }

    /** The value as it is published. */
    @Override
    public String toString() {
      return word;
    }
  }
}
