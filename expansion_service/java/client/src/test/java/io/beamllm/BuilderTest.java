package io.beamllm;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.beam.sdk.transforms.display.DisplayData;
import org.junit.jupiter.api.Test;

class BuilderTest {
  private static VllmChat.Builder chat() {
    return VllmChat.builder().model("m").messages(Message.of(Message.Role.USER, "{text}"));
  }

  @Test
  void sectionsAreGivenAsValuesOrFilledInPlace() {
    VllmChat inPlace = chat().sampling(s -> s.maxTokens(8).choices("bug", "praise")).build();
    VllmChat asValue =
        chat()
            .sampling(Sampling.builder().maxTokens(8).choices(List.of("bug", "praise")).build())
            .build();
    assertEquals(inPlace.toString(), asValue.toString());
    assertEquals(inPlace.configuration(), asValue.configuration());
  }

  @Test
  void nullTakesAKnobBackToItsDefault() {
    VllmChat.Builder builder = chat().modelIdentifier("tickets").sampling(s -> s.seed(1));
    VllmChat plain = builder.modelIdentifier(null).sampling((Sampling) null).build();
    assertEquals(chat().build().toString(), plain.toString());
  }

  @Test
  void aBuiltTransformKeepsWhatItWasGiven() {
    List<String> choices = new ArrayList<>(List.of("a"));
    VllmChat.Builder builder = chat().sampling(s -> s.choices(choices));
    VllmChat built = builder.build();
    choices.add("b");
    builder.outputField("other");
    assertEquals(
        "VLLMChat(model=\"m\", messages=[{\"role\": \"user\", \"content\": \"{text}\"}],"
            + " sampling={\"choices\": [\"a\"]})",
        built.toString());
  }

  @Test
  void sectionsAreValues() {
    Requests one = Requests.builder().maxRetries(1).build();
    assertEquals(one, Requests.builder().maxRetries(1).build());
    assertEquals(one.hashCode(), Requests.builder().maxRetries(1).build().hashCode());
    assertNotEquals(one, Requests.builder().maxRetries(2).build());
    assertEquals("{\"max_retries\":1}", one.toString());
  }

  @Test
  void everyProblemIsListedWithItsKnob() {
    BeamLlmException error =
        assertThrows(
            BeamLlmException.class,
            () ->
                VllmCompletions.builder()
                    .sampling(s -> s.maxTokens(0))
                    .server(s -> s.env(Map.of("A", "1")).startupTimeoutSecs(Double.NaN))
                    .build());
    List<String> paths = new ArrayList<>();
    error.problems().forEach(problem -> paths.add(problem.path()));
    assertEquals(
        List.of("server.startup_timeout_secs", "model", "prompt", "sampling.max_tokens"), paths);
    assertEquals("VLLMCompletions", error.transform());
    assertEquals("0 is less than the minimum of 1", error.problems().get(3).message());
    assertTrue(error.getMessage().contains("VLLMCompletions: sampling.max_tokens: 0 is less"));
  }

  @Test
  void nullsInsideListsAndMappingsAreRefused() {
    Map<String, String> env = new java.util.HashMap<>();
    env.put("A", null);
    BeamLlmException error =
        assertThrows(
            BeamLlmException.class, () -> chat().server(s -> s.args("--x", null).env(env)).build());
    assertEquals("server.args[1]", error.problems().get(0).path());
    assertEquals("server.env.A", error.problems().get(1).path());
  }

  @Test
  void displayDataShowsTheKnobs() {
    DisplayData data = DisplayData.from(chat().sampling(s -> s.temperature(0)).build());
    List<String> shown = new ArrayList<>();
    data.items().forEach(item -> shown.add(item.getKey() + "=" + item.getValue()));
    assertTrue(shown.contains("model=m"), shown.toString());
    assertTrue(shown.contains("sampling={\"temperature\": 0.0}"), shown.toString());
  }

  @Test
  void exceptionsAndServicesCanBeSerialized() throws Exception {
    BeamLlmException error =
        BeamLlmException.fromService("VLLMChat", "VLLMChat: sampling.regex: given beside choices");
    assertEquals(error.problems(), ((BeamLlmException) copy(error)).problems());
    ExpansionService service = ExpansionService.tls("host:1").withAuthority("name");
    assertEquals(service.toString(), copy(service).toString());
  }

  private static Object copy(Object value) throws Exception {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    try (ObjectOutputStream out = new ObjectOutputStream(bytes)) {
      out.writeObject(value);
    }
    try (ObjectInputStream in =
        new ObjectInputStream(new ByteArrayInputStream(bytes.toByteArray()))) {
      return in.readObject();
    }
  }
}
