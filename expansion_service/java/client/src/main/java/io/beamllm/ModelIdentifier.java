package io.beamllm;

import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/** The identifier of a step's model server, as the Python package derives it. */
final class ModelIdentifier {
  private ModelIdentifier() {}

  /** Gives the identifier that is set, else the hash of model and server; null without a model. */
  static String of(Map<String, Object> values) {
    if (values.get("model_identifier") != null || values.get("model") == null) {
      return (String) values.get("model_identifier");
    }
    Section section = (Section) values.get("server");
    Map<String, Object> server = section == null ? Map.of() : section.values();
    List<Object> material =
        new ArrayList<>(
            Arrays.asList(
                values.get("model"),
                server.getOrDefault("args", List.of()),
                server.getOrDefault("env", Map.of()),
                server.getOrDefault("env_from_worker", List.of()),
                server.get("endpoint")));
    try {
      byte[] hash =
          MessageDigest.getInstance("SHA-256")
              .digest(Json.canonical(material).getBytes(StandardCharsets.UTF_8));
      StringBuilder text = new StringBuilder("beam-llm-");
      for (int i = 0; i < 8; i++) {
        text.append(String.format(Locale.ROOT, "%02x", hash[i]));
      }
      return text.toString();
    } catch (NoSuchAlgorithmException e) {
      throw new IllegalStateException(e); // every Java platform has it
    }
  }
}
