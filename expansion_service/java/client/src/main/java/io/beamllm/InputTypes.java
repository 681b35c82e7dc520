package io.beamllm;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.schemas.Schema.FieldType;
import org.apache.beam.sdk.schemas.Schema.LogicalType;
import org.apache.beam.sdk.schemas.Schema.TypeName;
import org.apache.beam.sdk.transforms.DoFn;
import org.apache.beam.sdk.transforms.ParDo;
import org.apache.beam.sdk.values.PCollection;
import org.apache.beam.sdk.values.Row;

/**
 * Gives the input's fields their types back.
 *
 * <p>Python has one type each for points in time, for text and for bytes: a DATETIME comes back as
 * an instant of microseconds, a VARCHAR as a string.
 */
final class InputTypes {
  private static final String MICROS = "beam:logical_type:micros_instant:v1";

  private InputTypes() {}

  /**
   * Restores the types of an output wherever it holds rows of the input.
   *
   * @param output what Python gave
   * @param input the input's schema
   * @return the same rows; the collection itself if there is nothing to restore
   */
  static PCollection<Row> restore(PCollection<Row> output, Schema input) {
    Schema from = output.getSchema();
    Schema to = restored(from, input);
    if (to.equals(from)) {
      return output;
    }
    String name = "RestoreTypes_" + output.getName().replaceAll("\\W", "_");
    return output.apply(name, ParDo.of(new Restore(from, to))).setRowSchema(to);
  }

  /** Types of a schema of which rows of the input, or their fields, are a part. */
  private static Schema restored(Schema from, Schema input) {
    int width = input.getFieldCount();
    boolean holdsFields =
        from.getFieldCount() >= width
            && from.getFieldNames().subList(0, width).equals(input.getFieldNames());
    Schema.Builder to = Schema.builder();
    for (int i = 0; i < from.getFieldCount(); i++) {
      Schema.Field field = from.getField(i);
      FieldType type =
          holdsFields && i < width
              ? counterpart(field.getType(), input.getField(i).getType())
              : within(field.getType(), input);
      to.addField(field.withType(type));
    }
    return to.build();
  }

  private static FieldType within(FieldType from, Schema input) {
    switch (from.getTypeName()) {
      case ROW:
        return FieldType.row(restored(from.getRowSchema(), input)).withNullable(from.getNullable());
      case ARRAY:
        return FieldType.array(within(from.getCollectionElementType(), input))
            .withNullable(from.getNullable());
      default:
        return from;
    }
  }

  /** The type to restore: the input's where the value can be converted, else the one there is. */
  private static FieldType counterpart(FieldType from, FieldType input) {
    if (from.getTypeName() == TypeName.ROW && input.getTypeName() == TypeName.ROW) {
      Schema there = from.getRowSchema();
      Schema wanted = input.getRowSchema();
      if (!there.getFieldNames().equals(wanted.getFieldNames())) {
        return from;
      }
      Schema.Builder to = Schema.builder();
      for (int i = 0; i < there.getFieldCount(); i++) {
        Schema.Field field = there.getField(i);
        to.addField(field.withType(counterpart(field.getType(), wanted.getField(i).getType())));
      }
      return FieldType.row(to.build()).withNullable(from.getNullable());
    }
    if (isCollection(from) && isCollection(input)) {
      FieldType item =
          counterpart(from.getCollectionElementType(), input.getCollectionElementType());
      FieldType to =
          input.getTypeName() == TypeName.ARRAY ? FieldType.array(item) : FieldType.iterable(item);
      return to.withNullable(from.getNullable());
    }
    if (from.getTypeName() == TypeName.MAP && input.getTypeName() == TypeName.MAP) {
      return FieldType.map(
              counterpart(from.getMapKeyType(), input.getMapKeyType()),
              counterpart(from.getMapValueType(), input.getMapValueType()))
          .withNullable(from.getNullable());
    }
    boolean isInstant = isMicros(from) && input.getTypeName() == TypeName.DATETIME;
    return isInstant || isBaseOf(from, input) ? input.withNullable(from.getNullable()) : from;
  }

  private static boolean isCollection(FieldType type) {
    return type.getTypeName() == TypeName.ARRAY || type.getTypeName() == TypeName.ITERABLE;
  }

  private static boolean isMicros(FieldType type) {
    return type.getTypeName() == TypeName.LOGICAL_TYPE
        && type.getLogicalType().getIdentifier().equals(MICROS);
  }

  private static boolean isBaseOf(FieldType from, FieldType logical) {
    return logical.getTypeName() == TypeName.LOGICAL_TYPE
        && logical.getLogicalType().getBaseType().getTypeName() == from.getTypeName();
  }

  private static Row convert(Row row, Schema from, Schema to) {
    List<Object> values = new ArrayList<>(to.getFieldCount());
    for (int i = 0; i < to.getFieldCount(); i++) {
      values.add(convert(row.getValue(i), from.getField(i).getType(), to.getField(i).getType()));
    }
    return Row.withSchema(to).attachValues(values);
  }

  private static Object convert(Object value, FieldType from, FieldType to) {
    if (value == null || from.equals(to)) {
      return value;
    }
    switch (to.getTypeName()) {
      case DATETIME:
        return new org.joda.time.Instant(((java.time.Instant) value).toEpochMilli());
      case ROW:
        return convert((Row) value, from.getRowSchema(), to.getRowSchema());
      case ARRAY:
      case ITERABLE:
        List<Object> items = new ArrayList<>();
        for (Object item : (Iterable<?>) value) {
          items.add(convert(item, from.getCollectionElementType(), to.getCollectionElementType()));
        }
        return items;
      case MAP:
        Map<Object, Object> entries = new LinkedHashMap<>();
        ((Map<?, ?>) value)
            .forEach(
                (key, item) ->
                    entries.put(
                        convert(key, from.getMapKeyType(), to.getMapKeyType()),
                        convert(item, from.getMapValueType(), to.getMapValueType())));
        return entries;
      case LOGICAL_TYPE:
        return logical(to.getLogicalType(), value);
      default:
        return value;
    }
  }

  @SuppressWarnings("unchecked")
  private static Object logical(LogicalType<?, ?> type, Object value) {
    return ((LogicalType<Object, Object>) type).toInputType(value);
  }

  private static final class Restore extends DoFn<Row, Row> {
    private static final long serialVersionUID = 1L;
    private final Schema from;
    private final Schema to;

    Restore(Schema from, Schema to) {
      this.from = from;
      this.to = to;
    }

    @ProcessElement
    public void process(@Element Row row, OutputReceiver<Row> out) {
      out.output(convert(row, from, to));
    }
  }
}
