package io.beamllm;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/**
 * What one value of a configuration may be: a part of the published JSON Schema.
 *
 * <p>The words of a refusal are those of the Python package ({@code beam_llm.validation}), so that
 * a mistake reads the same wherever it is found.
 */
final class Rule {
  enum Type {
    STRING,
    INTEGER,
    NUMBER,
    BOOLEAN,
    LIST,
    MAP,
    SECTION
  }

  /** Says what is wrong with a value, or nothing. */
  private interface Check {
    String refuse(Object value);
  }

  final Type type;

  /** What a list's items, or a mapping's values, may be; null for other types. */
  final Rule inner;

  /** The knobs of a section; null for other types. */
  final Knobs knobs;

  private final List<Check> checks = new ArrayList<>();

  private Rule(Type type, Rule inner, Knobs knobs) {
    this.type = type;
    this.inner = inner;
    this.knobs = knobs;
  }

  static Rule string() {
    return new Rule(Type.STRING, null, null);
  }

  static Rule integer() {
    return new Rule(Type.INTEGER, null, null);
  }

  static Rule number() {
    return new Rule(Type.NUMBER, null, null);
  }

  static Rule bool() {
    return new Rule(Type.BOOLEAN, null, null);
  }

  static Rule list(Rule items) {
    return new Rule(Type.LIST, items, null);
  }

  static Rule map(Rule values) {
    return new Rule(Type.MAP, values, null);
  }

  static Rule section(Knobs knobs) {
    return new Rule(Type.SECTION, null, knobs);
  }

  Rule minimum(Number limit) {
    return check(
        v -> number(v) < number(limit) ? beyond(v, "less than the minimum of", limit) : null);
  }

  Rule maximum(Number limit) {
    return check(
        v -> number(v) > number(limit) ? beyond(v, "greater than the maximum of", limit) : null);
  }

  Rule exclusiveMinimum(Number limit) {
    return check(v -> number(v) <= number(limit) ? beyond(v, "not greater than", limit) : null);
  }

  Rule exclusiveMaximum(Number limit) {
    return check(v -> number(v) >= number(limit) ? beyond(v, "not less than", limit) : null);
  }

  Rule minLength(int limit) {
    return check(
        v -> {
          String text = (String) v;
          return text.codePointCount(0, text.length()) < limit
              ? tooShort(v, limit, "character")
              : null;
        });
  }

  Rule minItems(int limit) {
    return check(v -> ((List<?>) v).size() < limit ? tooShort(v, limit, "item") : null);
  }

  /** Takes texts in which the expression is found; {@code words} say what those are. */
  Rule pattern(String expression, String words) {
    // As Python reads it: classes are Unicode's, and after "$" comes nothing, no line break either.
    String exact = expression.replaceAll("\\$$", "\\\\z");
    Pattern compiled = Pattern.compile(exact, Pattern.UNICODE_CHARACTER_CLASS);
    return check(
        v -> compiled.matcher((String) v).find() ? null : Json.shown(v) + " is not " + words);
  }

  Rule oneOf(String... allowed) {
    List<String> words = Arrays.asList(allowed);
    String shown = words.stream().map(Json::shown).collect(Collectors.joining(", "));
    return check(
        v ->
            words.contains(v)
                ? null
                : Json.shown(v) + " is not one of " + shown + Words.nearest((String) v, words));
  }

  /** Gives what is wrong with a value of this type itself, without what is inside it. */
  List<String> refusals(Object value) {
    List<String> found = new ArrayList<>();
    for (Check check : checks) {
      String words = check.refuse(value);
      if (words != null) {
        found.add(words);
      }
    }
    return found;
  }

  private Rule check(Check check) {
    checks.add(check);
    return this;
  }

  private static double number(Object value) {
    return ((Number) value).doubleValue();
  }

  private static String beyond(Object value, String relation, Number limit) {
    return Json.shown(value) + " is " + relation + " " + Json.number(limit);
  }

  private static String tooShort(Object value, int limit, String unit) {
    return Json.shown(value)
        + " is too short: at least "
        + limit
        + " "
        + unit
        + (limit == 1 ? "" : "s");
  }
}
