package io.beamllm;

import java.math.BigDecimal;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.StringJoiner;
import java.util.TreeMap;

/** Writes values as JSON, exactly as the Python package writes them. */
final class Json {
  private static final int SHOWN = 80;

  private Json() {}

  /** Writes a value for a message: as Python's {@code json.dumps}, cut at 80 characters. */
  static String shown(Object value) {
    String text = write(value, ", ", ": ", false);
    int length = text.codePointCount(0, text.length());
    return length <= SHOWN ? text : text.substring(0, text.offsetByCodePoints(0, SHOWN - 3)) + "…";
  }

  /** Writes a value without spaces and with sorted keys: the same text for the same value. */
  static String canonical(Object value) {
    return write(value, ",", ":", true);
  }

  /** Writes a number as Python does: the shortest digits that read back as the same. */
  static String number(Number value) {
    if (!(value instanceof Double)) {
      return value.toString();
    }
    double number = (Double) value;
    if (Double.isNaN(number)) {
      return "NaN";
    }
    if (Double.isInfinite(number)) {
      return number > 0 ? "Infinity" : "-Infinity";
    }
    if (number == 0) {
      return 1 / number < 0 ? "-0.0" : "0.0";
    }
    String digits = null; // before Java 19, Double.toString may write one digit too many
    for (int precision = 0; precision < 17; precision++) {
      digits = String.format(Locale.ROOT, "%." + precision + "e", number);
      if (Double.parseDouble(digits) == number) {
        break;
      }
    }
    int split = digits.indexOf('e');
    int exponent = Integer.parseInt(digits.substring(split + 1));
    if (exponent < -4 || exponent >= 16) {
      String power = String.format(Locale.ROOT, "%02d", Math.abs(exponent));
      return digits.substring(0, split) + "e" + (exponent < 0 ? "-" : "+") + power;
    }
    String plain = new BigDecimal(digits).toPlainString();
    return plain.contains(".") ? plain : plain + ".0";
  }

  private static String write(Object value, String comma, String colon, boolean sorted) {
    if (value == null) {
      return "null";
    }
    if (value instanceof Boolean) {
      return value.toString();
    }
    if (value instanceof Number) {
      return number((Number) value);
    }
    if (value instanceof List) {
      StringJoiner items = new StringJoiner(comma, "[", "]");
      for (Object item : (List<?>) value) {
        items.add(write(item, comma, colon, sorted));
      }
      return items.toString();
    }
    Map<?, ?> map = null;
    if (value instanceof Section) {
      map = ((Section) value).values();
    } else if (value instanceof Map) {
      map = (Map<?, ?>) value;
    }
    if (map != null) {
      StringJoiner entries = new StringJoiner(comma, "{", "}");
      for (Map.Entry<?, ?> entry : (sorted ? new TreeMap<>(map) : map).entrySet()) {
        entries.add(
            quoted(entry.getKey().toString())
                + colon
                + write(entry.getValue(), comma, colon, sorted));
      }
      return entries.toString();
    }
    return quoted(value.toString());
  }

  private static String quoted(String text) {
    StringBuilder out = new StringBuilder("\"");
    for (int i = 0; i < text.length(); i++) {
      char c = text.charAt(i);
      int simple = "\"\\\n\r\t\f\b".indexOf(c);
      if (simple >= 0) {
        out.append('\\').append("\"\\nrtfb".charAt(simple));
      } else if (c < ' ') {
        out.append(String.format(Locale.ROOT, "\\u%04x", (int) c));
      } else {
        out.append(c);
      }
    }
    return out.append('"').toString();
  }
}
