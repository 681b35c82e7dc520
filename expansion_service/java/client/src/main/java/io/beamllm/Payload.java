package io.beamllm;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.beam.model.pipeline.v1.ExternalTransforms.SchemaTransformPayload;
import org.apache.beam.sdk.coders.RowCoder;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.Schema.FieldType;
import org.apache.beam.sdk.schemas.SchemaTranslation;
import org.apache.beam.sdk.util.VarInt;
import org.apache.beam.sdk.values.Row;

/** Encodes configurations as Beam's schema-transform payload. */
final class Payload {
  /** Of every schema transform; the payload says which. */
  static final String URN = "beam:expansion:payload:schematransform:v1";

  private static final int CONFIGURATION_ROW =
      SchemaTransformPayload.CONFIGURATION_ROW_FIELD_NUMBER;
  private static final int LENGTH_DELIMITED = 2; // protobuf's wire type of bytes

  private Payload() {}

  static byte[] of(String urn, Row configuration) {
    Schema schema = configuration.getSchema();
    byte[] start =
        SchemaTransformPayload.newBuilder()
            .setIdentifier(urn)
            .setConfigurationSchema(SchemaTranslation.schemaToProto(schema, true))
            .build()
            .toByteArray();
    try {
      ByteArrayOutputStream row = new ByteArrayOutputStream();
      RowCoder.of(schema).encode(configuration, row);
      // The setter of this field takes a ByteString of the package that Beam renames with each
      // version of gRPC. Messages may be concatenated, so it is written by hand.
      ByteArrayOutputStream payload = new ByteArrayOutputStream();
      payload.write(start);
      VarInt.encode(CONFIGURATION_ROW << 3 | LENGTH_DELIMITED, payload);
      VarInt.encode(row.size(), payload);
      row.writeTo(payload);
      return payload.toByteArray();
    } catch (IOException e) {
      throw new UncheckedIOException(e); // memory does not fail to be written
    }
  }

  /** Gives a configuration as a row that has a field for each knob that was given. */
  static Row row(Knobs knobs, Map<String, Object> values) {
    Schema.Builder schema = Schema.builder();
    List<Object> fields = new ArrayList<>();
    for (Map.Entry<String, Object> entry : values.entrySet()) {
      Rule rule = knobs.rules().get(entry.getKey());
      Object value;
      if (rule.type == Rule.Type.SECTION) {
        Row row = row(rule.knobs, ((Section) entry.getValue()).values());
        schema.addRowField(entry.getKey(), row.getSchema());
        value = row;
      } else {
        schema.addField(entry.getKey(), type(rule));
        value = value(rule, entry.getValue());
      }
      fields.add(value);
    }
    return Row.withSchema(schema.build()).addValues(fields).build();
  }

  private static FieldType type(Rule rule) {
    switch (rule.type) {
      case STRING:
        return FieldType.STRING;
      case INTEGER:
        return FieldType.INT64;
      case NUMBER:
        return FieldType.DOUBLE;
      case BOOLEAN:
        return FieldType.BOOLEAN;
      case LIST:
        return FieldType.array(type(rule.inner));
      case MAP:
        return FieldType.map(FieldType.STRING, type(rule.inner));
      default:
        return FieldType.row(schema(rule.knobs));
    }
  }

  /** Gives the schema of a section inside a list: all items have the same, with nulls. */
  private static Schema schema(Knobs knobs) {
    Schema.Builder schema = Schema.builder();
    knobs
        .rules()
        .forEach(
            (name, rule) ->
                schema.addField(name, type(rule).withNullable(!knobs.isRequired(name))));
    return schema.build();
  }

  private static Object value(Rule rule, Object value) {
    if (value == null) {
      return null;
    }
    switch (rule.type) {
      case LIST:
        List<Object> items = new ArrayList<>();
        ((List<?>) value).forEach(item -> items.add(value(rule.inner, item)));
        return items;
      case MAP:
        Map<Object, Object> entries = new LinkedHashMap<>();
        ((Map<?, ?>) value).forEach((key, item) -> entries.put(key, value(rule.inner, item)));
        return entries;
      case SECTION:
        Map<String, Object> given = ((Section) value).values();
        List<Object> fields = new ArrayList<>();
        rule.knobs.rules().forEach((name, knob) -> fields.add(value(knob, given.get(name))));
        return Row.withSchema(schema(rule.knobs)).addValues(fields).build();
      default:
        return value;
    }
  }
}
