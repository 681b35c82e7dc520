package io.beamllm;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.regex.Pattern;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.Schema.FieldType;
import org.apache.beam.sdk.schemas.Schema.TypeName;

/** Checks what can be told of an input's schema before a service sees it. */
final class InputCheck {
  private InputCheck() {}

  /** Finds templates that cannot be read. */
  static List<BeamLlmException.Problem> templates(Map<String, Object> values) {
    List<BeamLlmException.Problem> problems = new ArrayList<>();
    places(values)
        .forEach(
            (path, text) -> {
              try {
                Template.fields(text);
              } catch (Template.Unreadable e) {
                problems.add(new BeamLlmException.Problem(path, e.getMessage()));
              }
            });
    return problems;
  }

  /** Finds templates and knobs that name a field which the input lacks, or which holds bytes. */
  static List<BeamLlmException.Problem> fields(Map<String, Object> values, Schema schema) {
    Set<BeamLlmException.Problem> problems = new LinkedHashSet<>();
    places(values)
        .forEach(
            (place, text) -> {
              try {
                for (String path : new LinkedHashSet<>(Template.fields(text))) {
                  String message = field(path, schema);
                  if (message != null) {
                    problems.add(new BeamLlmException.Problem(place, message));
                  }
                }
              } catch (Template.Unreadable e) {
                throw new IllegalStateException(e); // the builder has read it
              }
            });
    columns(values)
        .forEach(
            (knob, column) -> {
              if (!schema.hasField(column)) {
                problems.add(
                    new BeamLlmException.Problem(knob, unknown(column, schema.getFieldNames())));
              }
            });
    return new ArrayList<>(problems);
  }

  private static String field(String path, Schema schema) {
    List<String> among = schema.getFieldNames();
    Schema at = schema;
    FieldType type = null;
    for (String step : path.split("\\.")) {
      if (at == null || !at.hasField(step)) {
        return unknown(path, among);
      }
      type = at.getField(step).getType();
      at = type.getTypeName() == TypeName.ROW ? type.getRowSchema() : null;
      among = at == null ? List.of() : at.getFieldNames();
    }
    return type != null && type.getTypeName() == TypeName.BYTES
        ? "field '" + path + "' holds bytes: decode it to text first"
        : null;
  }

  private static String unknown(String field, List<String> among) {
    if (among.isEmpty()) {
      String outer = field.contains(".") ? field.substring(0, field.lastIndexOf('.')) : "";
      return "'" + field + "' is not there: '" + outer + "' is no nested row";
    }
    return "the input has no field '"
        + field
        + "'"
        + Words.nearest(field, among)
        + " (fields: "
        + String.join(", ", among)
        + ")";
  }

  /** The templates of a configuration by their place. */
  private static Map<String, String> places(Map<String, Object> values) {
    Map<String, String> found = new LinkedHashMap<>();
    if (values.get("prompt") instanceof String) {
      found.put("prompt", (String) values.get("prompt"));
    }
    if (values.get("messages") instanceof List) {
      List<?> messages = (List<?>) values.get("messages");
      for (int i = 0; i < messages.size(); i++) {
        Object content = ((Section) messages.get(i)).values().get("content");
        found.put("messages[" + i + "].content", (String) content);
      }
    }
    return found;
  }

  /** The columns that knobs name, by the knob. */
  private static Map<String, String> columns(Map<String, Object> values) {
    Map<String, String> found = new LinkedHashMap<>();
    if (values.get("per_row") instanceof Section) {
      ((Section) values.get("per_row"))
          .values()
          .forEach((knob, column) -> found.put("per_row." + knob, (String) column));
    }
    if (values.get("prefix_batching") instanceof Section) {
      Object column = ((Section) values.get("prefix_batching")).values().get("key_field");
      if (column != null) {
        found.put("prefix_batching.key_field", (String) column);
      }
    }
    return found;
  }

  /** Finds fields that Beam itself cannot carry to Python. */
  static List<String> unsupported(Schema schema) {
    List<String> found = new ArrayList<>();
    walk(schema, "", found);
    return found;
  }

  private static final Set<String> PYTHON_WORDS =
      Set.of(
          "False",
          "None",
          "True",
          "and",
          "as",
          "assert",
          "async",
          "await",
          "break",
          "class",
          "continue",
          "def",
          "del",
          "elif",
          "else",
          "except",
          "finally",
          "for",
          "from",
          "global",
          "if",
          "import",
          "in",
          "is",
          "lambda",
          "nonlocal",
          "not",
          "or",
          "pass",
          "raise",
          "return",
          "try",
          "while",
          "with",
          "yield");

  private static final Pattern NAME =
      Pattern.compile("[\\p{L}\\p{Nl}][\\p{L}\\p{Nl}\\p{Mn}\\p{Mc}\\p{Nd}\\p{Pc}]*");

  /** Logical types that have a form in both languages. */
  private static final Set<String> PORTABLE =
      Set.of(
          "beam:logical_type:decimal:v1",
          "beam:logical_type:fixed_decimal:v1",
          "beam:logical_type:millis_instant:v1",
          "beam:logical_type:micros_instant:v1",
          "beam:logical_type:fixed_bytes:v1",
          "beam:logical_type:var_bytes:v1",
          "beam:logical_type:fixed_char:v1",
          "beam:logical_type:var_char:v1");

  private static void walk(Schema schema, String outer, List<String> found) {
    for (Schema.Field field : schema.getFields()) {
      String name = field.getName();
      String path = outer + name;
      if (PYTHON_WORDS.contains(name)) {
        found.add("'" + path + "' is a word of the Python language");
      } else if (name.startsWith("_")) {
        found.add("'" + path + "' starts with '_'");
      } else if (!NAME.matcher(name).matches()) {
        found.add("'" + path + "' is no Python name");
      }
      type(field.getType(), path, found);
    }
  }

  private static void type(FieldType type, String path, List<String> found) {
    switch (type.getTypeName()) {
      case ROW:
        walk(type.getRowSchema(), path + ".", found);
        break;
      case ARRAY:
      case ITERABLE:
        type(type.getCollectionElementType(), path, found);
        break;
      case MAP:
        type(type.getMapKeyType(), path, found);
        type(type.getMapValueType(), path, found);
        break;
      case LOGICAL_TYPE:
        String identifier = type.getLogicalType().getIdentifier();
        if (!PORTABLE.contains(identifier)) {
          found.add("'" + path + "' is of the logical type '" + identifier + "'");
        }
        break;
      default:
        break;
    }
  }

  static String refusal(List<String> unsupported) {
    return "its input has fields that Beam's Python SDK cannot read: "
        + String.join("; ", unsupported)
        + ". Rename or convert them before this step";
  }
}
