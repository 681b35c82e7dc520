package io.beamllm;

import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The knobs of a transform or of a section, in the order of the published JSON Schema. */
final class Knobs {
  private final Map<String, Rule> rules = new LinkedHashMap<>();
  private final Map<String, String> required = new LinkedHashMap<>();

  /** Adds a knob that has a default. */
  Knobs optional(String name, Rule rule) {
    rules.put(name, rule);
    return this;
  }

  /** Adds a knob that must be given; a refusal repeats its description. */
  Knobs required(String name, String description, Rule rule) {
    required.put(name, description);
    return optional(name, rule);
  }

  Map<String, Rule> rules() {
    return Collections.unmodifiableMap(rules);
  }

  boolean isRequired(String name) {
    return required.containsKey(name);
  }

  /**
   * Finds what the JSON Schema says against a configuration.
   *
   * @param values the values by the knobs' names
   * @return every problem, in the order of the Python package
   */
  List<BeamLlmException.Problem> problems(Map<String, Object> values) {
    List<Found> found = new ArrayList<>();
    List<Found> notFinite = new ArrayList<>();
    walk(values, List.of(), found, notFinite);
    // Python sorts by the path as strings, and keeps the order where paths are equal.
    found.sort((a, b) -> compare(a.sortedBy, b.sortedBy));
    notFinite.addAll(found);
    List<BeamLlmException.Problem> problems = new ArrayList<>();
    for (Found one : notFinite) {
      problems.add(new BeamLlmException.Problem(dotted(one.path), one.message));
    }
    return problems;
  }

  private void walk(
      Map<String, Object> values, List<Object> at, List<Found> found, List<Found> notFinite) {
    for (Map.Entry<String, String> entry : required.entrySet()) {
      if (!values.containsKey(entry.getKey())) {
        String message = "required, and missing: " + entry.getValue();
        found.add(new Found(at, with(at, entry.getKey()), message));
      }
    }
    for (Map.Entry<String, Object> entry : values.entrySet()) {
      Rule rule = rules.get(entry.getKey());
      inspect(rule, entry.getValue(), with(at, entry.getKey()), found, notFinite);
    }
  }

  private static void inspect(
      Rule rule, Object value, List<Object> at, List<Found> found, List<Found> notFinite) {
    if (value == null) {
      found.add(new Found(at, at, "null is not allowed here"));
      return;
    }
    if (rule.type == Rule.Type.NUMBER && !Double.isFinite((Double) value)) {
      double number = (Double) value;
      String shown = Double.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
      notFinite.add(new Found(at, at, shown + " is not a finite number"));
      return;
    }
    for (String message : rule.refusals(value)) {
      found.add(new Found(at, at, message));
    }
    switch (rule.type) {
      case LIST:
        List<?> items = (List<?>) value;
        for (int i = 0; i < items.size(); i++) {
          inspect(rule.inner, items.get(i), with(at, i), found, notFinite);
        }
        break;
      case MAP:
        for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
          inspect(rule.inner, entry.getValue(), with(at, entry.getKey()), found, notFinite);
        }
        break;
      case SECTION:
        rule.knobs.walk(((Section) value).values(), at, found, notFinite);
        break;
      default:
        break;
    }
  }

  private static List<Object> with(List<Object> path, Object step) {
    List<Object> longer = new ArrayList<>(path);
    longer.add(step);
    return longer;
  }

  private static int compare(List<Object> a, List<Object> b) {
    for (int i = 0; i < Math.min(a.size(), b.size()); i++) {
      int order = a.get(i).toString().compareTo(b.get(i).toString());
      if (order != 0) {
        return order;
      }
    }
    return Integer.compare(a.size(), b.size());
  }

  /** Writes a path as people do: {@code messages[0].content}. */
  static String dotted(List<Object> path) {
    StringBuilder text = new StringBuilder();
    for (Object step : path) {
      if (step instanceof Integer) {
        text.append('[').append(step).append(']');
      } else {
        text.append(text.length() == 0 ? "" : ".").append(step);
      }
    }
    return text.toString();
  }

  private static final class Found {
    final List<Object> sortedBy;
    final List<Object> path;
    final String message;

    Found(List<Object> sortedBy, List<Object> path, String message) {
      this.sortedBy = sortedBy;
      this.path = path;
      this.message = message;
    }
  }
}
