package io.beamllm;

import java.util.ArrayList;
import java.util.List;
import java.util.regex.Pattern;

/**
 * Reads prompt templates: text with <code>{field}</code> placeholders and doubled literal braces.
 *
 * <p>The syntax, and the words of a refusal, are those of Python's format strings without
 * conversions and format specifications.
 */
final class Template {
  private static final Pattern PATH =
      Pattern.compile("[A-Za-z_][A-Za-z0-9_]*(\\.[A-Za-z_][A-Za-z0-9_]*)*");

  private final String text;
  private final List<String> fields = new ArrayList<>();
  private int at = 0;

  private Template(String text) {
    this.text = text;
  }

  /** A template that cannot be read. */
  static final class Unreadable extends Exception {
    private static final long serialVersionUID = 1L;

    Unreadable(String message) {
      super(message);
    }
  }

  /**
   * Gives the paths in a template, in order, repeated where the template repeats them.
   *
   * @throws Unreadable for a brace without its partner, or a placeholder that is no path
   */
  static List<String> fields(String text) throws Unreadable {
    Template template = new Template(text);
    List<String> shown = new ArrayList<>();
    while (template.at < text.length()) {
      String unusable = template.next();
      if (unusable != null) {
        shown.add(unusable);
      }
    }
    if (!shown.isEmpty()) {
      throw new Unreadable(
          "'{"
              + shown.get(0)
              + "}' is not a field: write '{name}' or '{outer.inner}' (rename other columns first,"
              + " with MapToFields), and a literal brace twice");
    }
    return template.fields;
  }

  /** Reads up to the end of a placeholder or of an escaped brace; gives what is no path. */
  private String next() throws Unreadable {
    char brace = 0;
    while (at < text.length() && brace == 0) {
      char c = text.charAt(at++);
      if (c == '{' || c == '}') {
        brace = c;
      }
    }
    if (brace == 0) {
      return null;
    }
    boolean doubled = at < text.length() && text.charAt(at) == brace;
    if (doubled) {
      at++;
      return null;
    }
    if (brace == '}' || at == text.length()) {
      throw malformed("Single '" + brace + "' encountered in format string");
    }
    return placeholder();
  }

  private String placeholder() throws Unreadable {
    int start = at;
    char end = 0;
    while (at < text.length() && end == 0) {
      char c = text.charAt(at++);
      if (c == '{') {
        throw malformed("unexpected '{' in field name");
      } else if (c == '[') {
        while (at < text.length() && text.charAt(at) != ']') {
          at++;
        }
      } else if (c == '}' || c == ':' || c == '!') {
        end = c;
      }
    }
    if (end == 0) {
      throw malformed("expected '}' before end of string");
    }
    String path = text.substring(start, at - 1);
    String conversion = "";
    String specification = "";
    boolean open = end != '}';
    if (end == '!') {
      if (at == text.length()) {
        throw malformed("end of string while looking for conversion specifier");
      }
      int character = text.codePointAt(at);
      conversion = new String(Character.toChars(character));
      at += conversion.length();
      if (at < text.length()) {
        char c = text.charAt(at++);
        open = c != '}';
        if (open && c != ':') {
          throw malformed("expected ':' after conversion specifier");
        }
      }
    }
    if (open) {
      specification = specification();
    }
    if (conversion.isEmpty() && specification.isEmpty() && PATH.matcher(path).matches()) {
      fields.add(path);
      return null;
    }
    return path
        + (conversion.isEmpty() ? "" : "!" + conversion)
        + (specification.isEmpty() ? "" : ":" + specification);
  }

  private String specification() throws Unreadable {
    int start = at;
    int depth = 1;
    while (at < text.length()) {
      char c = text.charAt(at++);
      depth += c == '{' ? 1 : c == '}' ? -1 : 0;
      if (depth == 0) {
        return text.substring(start, at - 1);
      }
    }
    throw malformed("unmatched '{' in format spec");
  }

  private static Unreadable malformed(String words) {
    return new Unreadable(words + " (a literal brace is written twice: '{{' or '}}')");
  }
}
