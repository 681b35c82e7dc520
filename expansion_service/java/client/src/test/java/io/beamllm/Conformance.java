package io.beamllm;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.lang.reflect.ParameterizedType;
import java.lang.reflect.Type;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.Consumer;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.options.PipelineOptions;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.Schema.FieldType;
import org.apache.beam.sdk.schemas.Schema.TypeName;
import org.apache.beam.sdk.schemas.logicaltypes.EnumerationType;
import org.apache.beam.sdk.schemas.logicaltypes.SqlTypes;
import org.apache.beam.sdk.testing.CrashingRunner;
import org.apache.beam.sdk.transforms.Create;
import org.apache.beam.sdk.util.construction.PipelineTranslation;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.Row;

/**
 * Drives the builders by reflection, for the tests in Python that hold them against the published
 * JSON Schemas. Knows nothing of the generator: what it calls is what a user can call.
 *
 * <p>Without arguments it reads a JSON object a line, {@code {"class": "VllmChat", "config": {…}}},
 * and answers with what the builder made of it; with {@code "service"} and {@code "fields"} beside
 * them, it expands the transform there over such rows. With {@code describe CLASS…} it lists their
 * setters.
 */
public final class Conformance {
  private static final ObjectMapper JSON = new ObjectMapper();

  private Conformance() {}

  /** The configuration cannot be written in Java at all: no such setter, or of another type. */
  private static final class Inexpressible extends Exception {
    private static final long serialVersionUID = 1L;

    Inexpressible(String message) {
      super(message);
    }
  }

  public static void main(String[] args) throws Exception {
    PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    if (args.length > 0) {
      ObjectNode found = JSON.createObjectNode();
      for (int i = 1; i < args.length; i++) {
        found.set(args[i], setters(type(args[i])));
      }
      out.println(found);
      out.flush();
      return;
    }
    BufferedReader lines =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      out.println(answer(JSON.readTree(line)));
      out.flush();
    }
  }

  private static Class<?> type(String name) throws ClassNotFoundException {
    return Class.forName("io.beamllm." + name);
  }

  private static ObjectNode answer(JsonNode request) throws Exception {
    ObjectNode answer = JSON.createObjectNode();
    try {
      LlmTransform built =
          (LlmTransform) build(type(request.get("class").asText()), request.get("config"));
      byte[] payload = Payload.of(built.urn(), built.configuration());
      answer.put("payload", Base64.getEncoder().encodeToString(payload));
      answer.put("text", built.toString());
      byte[] identifier = built.getAnnotations().get("model_identifier");
      if (identifier != null) {
        answer.put("identifier", new String(identifier, StandardCharsets.UTF_8));
      }
      if (request.has("service")) {
        expand(request, answer);
      }
    } catch (BeamLlmException e) {
      answer.put("error", e.getMessage());
      e.problems().forEach(problem -> answer.withArray("paths").add(problem.path()));
    } catch (IllegalArgumentException e) {
      answer.put("refused", e.getMessage());
    } catch (Inexpressible e) {
      answer.put("inexpressible", e.getMessage());
    }
    return answer;
  }

  /** Expands the transform over rows with the fields of the request; nothing runs. */
  private static void expand(JsonNode request, ObjectNode answer) throws Exception {
    PipelineOptions options = PipelineOptionsFactory.create();
    options.setRunner(CrashingRunner.class);
    Object builder = configured(type(request.get("class").asText()), request.get("config"));
    ((LlmTransform.Builder<?>) builder).expansionService(service(request.get("service")));
    LlmTransform transform = (LlmTransform) invoke(builder, builder.getClass().getMethod("build"));
    Pipeline pipeline = Pipeline.create(options);
    PCollection<Row> rows = pipeline.apply(Create.empty(schema(request.get("fields"))));
    LlmOutput output = rows.apply("Ask", transform);
    output.rows().getSchema().getFieldNames().forEach(answer.withArray("rows")::add);
    if (request.get("config").has("error_handling")) {
      output.failures().getSchema().getFieldNames().forEach(answer.withArray("failures")::add);
    }
    PipelineTranslation.toProto(pipeline)
        .getComponents()
        .getTransformsMap()
        .values()
        .forEach(
            part -> {
              if (part.getUniqueName().equals("Ask")) {
                part.getAnnotationsMap()
                    .forEach((key, value) -> answer.put("annotation_" + key, value.toStringUtf8()));
              }
            });
  }

  private static ExpansionService service(JsonNode given) {
    ExpansionService service;
    if (given.has("python")) {
      List<String> options = new ArrayList<>();
      given.path("options").forEach(option -> options.add(option.asText()));
      service =
          ExpansionService.python(given.get("python").asText(), options.toArray(new String[0]));
    } else if (given.has("tls")) {
      service = ExpansionService.tls(given.get("tls").asText());
      if (given.has("trust")) {
        service = service.withTrust(Path.of(given.get("trust").asText()));
      }
      if (given.has("certificate")) {
        service =
            service.withClientCertificate(
                Path.of(given.get("certificate").asText()), Path.of(given.get("key").asText()));
      }
      if (given.has("authority")) {
        service = service.withAuthority(given.get("authority").asText());
      }
    } else {
      service = ExpansionService.at(given.get("at").asText());
    }
    return service.withTimeout(Duration.ofMillis(given.path("timeout_millis").asLong(120_000)));
  }

  private static Schema schema(JsonNode fields) {
    Schema.Builder schema = Schema.builder();
    fields
        .fields()
        .forEachRemaining(field -> schema.addField(field.getKey(), type(field.getValue())));
    return schema.build();
  }

  private static FieldType type(JsonNode field) {
    switch (field.isObject() ? "row" : field.asText()) {
      case "row":
        return FieldType.row(schema(field));
      case "date":
        return FieldType.logicalType(SqlTypes.DATE);
      case "time":
        return FieldType.logicalType(SqlTypes.TIME);
      case "enum":
        return FieldType.logicalType(EnumerationType.create("a", "b"));
      default:
        return FieldType.of(TypeName.valueOf(field.asText().toUpperCase(Locale.ROOT)));
    }
  }

  private static Object build(Class<?> type, JsonNode config) throws Exception {
    Object builder = configured(type, config);
    return invoke(builder, builder.getClass().getMethod("build"));
  }

  private static Object configured(Class<?> type, JsonNode config) throws Exception {
    Object builder = type.getMethod("builder").invoke(null);
    List<Map.Entry<String, JsonNode>> knobs = new ArrayList<>();
    config.fields().forEachRemaining(knobs::add);
    for (Map.Entry<String, JsonNode> knob : knobs) {
      set(builder, knob.getKey(), knob.getValue());
    }
    return builder;
  }

  private static void set(Object builder, String knob, JsonNode value) throws Exception {
    String reason = "no setter for " + knob;
    for (Method method : builder.getClass().getMethods()) {
      if (!method.getName().equals(camel(knob)) || method.getParameterCount() != 1) {
        continue;
      }
      Type wanted = method.getGenericParameterTypes()[0];
      if (method.isVarArgs() || raw(wanted) == Consumer.class) {
        continue; // beside one that takes the same as a value
      }
      try {
        invoke(builder, method, convert(wanted, value));
        return;
      } catch (Inexpressible e) {
        reason = knob + ": " + e.getMessage();
      }
    }
    throw new Inexpressible(reason);
  }

  private static Object invoke(Object on, Method method, Object... arguments) throws Exception {
    try {
      return method.invoke(on, arguments);
    } catch (InvocationTargetException e) {
      throw (Exception) e.getCause();
    }
  }

  private static Object convert(Type wanted, JsonNode value) throws Exception {
    Class<?> type = raw(wanted);
    if (type == String.class && value.isTextual()) {
      return value.asText();
    } else if ((type == long.class || type == Long.class)
        && value.canConvertToLong()
        && value.isIntegralNumber()) {
      return value.asLong();
    } else if ((type == double.class || type == Double.class) && value.isNumber()) {
      return value.asDouble();
    } else if ((type == double.class || type == Double.class) && value.isObject()) {
      return Double.valueOf(value.path("double").asText("none")); // JSON has no NaN
    } else if ((type == boolean.class || type == Boolean.class) && value.isBoolean()) {
      return value.asBoolean();
    } else if (type.isEnum() && value.isTextual()) {
      for (Object constant : type.getEnumConstants()) {
        if (constant.toString().equals(value.asText())) {
          return constant;
        }
      }
    } else if (type == Collection.class && value.isArray()) {
      List<Object> items = new ArrayList<>();
      for (JsonNode item : value) {
        items.add(convert(((ParameterizedType) wanted).getActualTypeArguments()[0], item));
      }
      return items;
    } else if (type == Map.class && value.isObject()) {
      Map<String, Object> entries = new LinkedHashMap<>();
      List<Map.Entry<String, JsonNode>> given = new ArrayList<>();
      value.fields().forEachRemaining(given::add);
      for (Map.Entry<String, JsonNode> entry : given) {
        Type inner = ((ParameterizedType) wanted).getActualTypeArguments()[1];
        entries.put(entry.getKey(), convert(inner, entry.getValue()));
      }
      return entries;
    } else if (Section.class.isAssignableFrom(type) && value.isObject()) {
      return build(type, value);
    }
    throw new Inexpressible(value + " is no " + wanted.getTypeName());
  }

  private static Class<?> raw(Type type) {
    return (Class<?>)
        (type instanceof ParameterizedType ? ((ParameterizedType) type).getRawType() : type);
  }

  private static ObjectNode setters(Class<?> type) throws Exception {
    Class<?> builder = type.getMethod("builder").getReturnType();
    ObjectNode found = JSON.createObjectNode();
    for (Method method : builder.getDeclaredMethods()) {
      boolean isSetter = Modifier.isPublic(method.getModifiers()) && !method.isSynthetic();
      if (isSetter && method.getParameterCount() == 1) {
        ArrayNode forms = found.withArray(method.getName());
        forms.add(method.getGenericParameterTypes()[0].getTypeName().replaceAll("[a-z]+\\.", ""));
      }
    }
    return found;
  }

  private static String camel(String knob) {
    StringBuilder name = new StringBuilder();
    boolean upper = false;
    for (char c : knob.toCharArray()) {
      if (c == '_') {
        upper = true;
      } else {
        name.append(upper ? Character.toUpperCase(c) : c);
        upper = false;
      }
    }
    return name.toString();
  }
}
