package io.beamllm;

import java.io.Serializable;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A group of knobs that were given. What was not given has its default. */
public abstract class Section implements Serializable {
  private static final long serialVersionUID = 1L;

  private final LinkedHashMap<String, Object> values;

  Section(Builder<?> builder) {
    values = new LinkedHashMap<>(builder.values);
  }

  /** The given knobs by their published names. */
  final Map<String, Object> values() {
    return Collections.unmodifiableMap(values);
  }

  @Override
  public final boolean equals(Object other) {
    return other != null
        && getClass() == other.getClass()
        && values.equals(((Section) other).values);
  }

  @Override
  public final int hashCode() {
    return values.hashCode();
  }

  /** The given knobs as JSON. */
  @Override
  public final String toString() {
    return Json.canonical(this);
  }

  /**
   * Collects the knobs of a section. Null takes a knob back to its default.
   *
   * @param <B> the builder's own type
   */
  public abstract static class Builder<B extends Builder<B>> {
    final LinkedHashMap<String, Object> values = new LinkedHashMap<>();

    Builder() {}

    @SuppressWarnings("unchecked")
    final B set(String knob, Object value) {
      if (value == null) {
        values.remove(knob);
      } else if (value instanceof Object[]) {
        values.put(knob, new ArrayList<>(Arrays.asList((Object[]) value)));
      } else if (value instanceof Iterable) {
        List<Object> items = new ArrayList<>();
        ((Iterable<?>) value).forEach(items::add);
        values.put(knob, items);
      } else if (value instanceof Map) {
        values.put(knob, new LinkedHashMap<>((Map<?, ?>) value));
      } else {
        values.put(knob, value);
      }
      return (B) this;
    }
  }
}
