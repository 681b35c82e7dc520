package io.beamllm;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.concurrent.CountDownLatch;
import org.apache.beam.model.expansion.v1.ExpansionApi.DiscoverSchemaTransformRequest;
import org.apache.beam.model.expansion.v1.ExpansionApi.DiscoverSchemaTransformResponse;
import org.apache.beam.model.expansion.v1.ExpansionApi.ExpansionRequest;
import org.apache.beam.model.expansion.v1.ExpansionApi.ExpansionResponse;
import org.apache.beam.model.expansion.v1.ExpansionApi.SchemaTransformConfig;
import org.apache.beam.model.expansion.v1.ExpansionServiceGrpc.ExpansionServiceImplBase;
import org.apache.beam.sdk.Pipeline;
import org.apache.beam.sdk.options.PipelineOptions;
import org.apache.beam.sdk.options.PipelineOptionsFactory;
import org.apache.beam.sdk.schemas.Schema;
import org.apache.beam.sdk.testing.CrashingRunner;
import org.apache.beam.sdk.transforms.Create;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.Grpc;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.InsecureServerCredentials;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.Server;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.Status;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.stub.StreamObserver;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** What a caller is told when the service is not as it should be. */
class ExpansionServiceTest {
  private static final String URN = "beam:schematransform:beam_llm:vllm_completions:v";

  /** A service that offers what it is told, and answers as it is told. */
  private static class Fake extends ExpansionServiceImplBase {
    final String[] offered;

    Fake(String... offered) {
      this.offered = offered;
    }

    @Override
    public void discoverSchemaTransform(
        DiscoverSchemaTransformRequest request,
        StreamObserver<DiscoverSchemaTransformResponse> answer) {
      DiscoverSchemaTransformResponse.Builder response =
          DiscoverSchemaTransformResponse.newBuilder();
      for (String urn : offered) {
        response.putSchemaTransformConfigs(urn, SchemaTransformConfig.getDefaultInstance());
      }
      answer.onNext(response.build());
      answer.onCompleted();
    }
  }

  private static String refusal(ExpansionService service) {
    PipelineOptions options = PipelineOptionsFactory.create();
    options.setRunner(CrashingRunner.class);
    Schema schema = Schema.builder().addStringField("text").build();
    VllmCompletions transform =
        VllmCompletions.builder()
            .model("m")
            .prompt("{text}")
            .expansionService(service.withTimeout(Duration.ofSeconds(20)))
            .build();
    return assertThrows(
            BeamLlmException.class,
            () -> Pipeline.create(options).apply(Create.empty(schema)).apply(transform))
        .getMessage();
  }

  private static String refusal(Fake fake) throws Exception {
    Server server =
        Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
            .addService(fake)
            .build()
            .start();
    try {
      return refusal(ExpansionService.at("localhost:" + server.getPort()));
    } finally {
      server.shutdownNow().awaitTermination();
    }
  }

  @Test
  void anotherVersionIsToldByItsUrn() throws Exception {
    String message = refusal(new Fake(URN + "2", URN + "3", "other"));
    assertTrue(
        message.endsWith(
            "is of another version: this client speaks "
                + URN
                + "1, it offers "
                + URN
                + "2, "
                + URN
                + "3; use client and service of one release"),
        message);
  }

  @Test
  void aServiceWithoutTheTransformSaysWhatItOffers() throws Exception {
    assertTrue(refusal(new Fake("a", "b")).endsWith("(it offers a, b)"));
    assertTrue(refusal(new Fake()).endsWith("(it offers nothing)"));
  }

  @Test
  void aStockServiceIsNotOurs() throws Exception {
    String message =
        refusal(
            new Fake() {
              @Override
              public void discoverSchemaTransform(
                  DiscoverSchemaTransformRequest request,
                  StreamObserver<DiscoverSchemaTransformResponse> answer) {
                answer.onError(Status.UNIMPLEMENTED.asRuntimeException());
              }
            });
    assertTrue(message.endsWith("is no expansion service of beam-llm"), message);
  }

  @Test
  void theServicesProblemsComeWithTheirKnobs() throws Exception {
    Fake fake =
        new Fake(URN + "1") {
          @Override
          public void expand(ExpansionRequest request, StreamObserver<ExpansionResponse> answer) {
            answer.onNext(
                ExpansionResponse.newBuilder()
                    .setError(
                        "VLLMCompletions: sampling.regex: given beside choices\n"
                            + "VLLMCompletions: server.args[0]: '--port=1' is not yours to set:"
                            + " the server is ours")
                    .build());
            answer.onCompleted();
          }
        };
    assertEquals(
        "VLLMCompletions: sampling.regex: given beside choices\n"
            + "VLLMCompletions: server.args[0]: '--port=1' is not yours to set: the server is ours",
        refusal(fake));
    BeamLlmException error = BeamLlmException.fromService("T", "T: a.b[0].c: no\nmore\nT: whole");
    assertEquals("a.b[0].c", error.problems().get(0).path());
    assertEquals("no\nmore", error.problems().get(0).message());
    assertEquals("", error.problems().get(1).path());
  }

  @Test
  void aBusyServiceIsQuoted() throws Exception {
    Fake fake =
        new Fake(URN + "1") {
          @Override
          public void expand(ExpansionRequest request, StreamObserver<ExpansionResponse> answer) {
            answer.onError(
                Status.RESOURCE_EXHAUSTED
                    .withDescription("too many expansions are waiting: try again later")
                    .asRuntimeException());
          }
        };
    assertEquals(
        "VLLMCompletions: too many expansions are waiting: try again later", refusal(fake));
  }

  @Test
  void aServiceThatIsDownIsNamed() throws Exception {
    int port;
    try (ServerSocket free = new ServerSocket(0, 1, InetAddress.getLoopbackAddress())) {
      port = free.getLocalPort();
    }
    String message = refusal(ExpansionService.at("127.0.0.1:" + port));
    assertTrue(
        message.startsWith(
            "VLLMCompletions: no expansion service answers at 127.0.0.1:" + port + ": "),
        message);
    assertTrue(message.contains("refused"), message);
  }

  @Test
  void aWebServerIsNoExpansionService() throws Exception {
    try (ServerSocket web = new ServerSocket(0, 9, InetAddress.getLoopbackAddress())) {
      Thread answers =
          new Thread(
              () -> {
                try {
                  while (true) {
                    try (Socket client = web.accept()) {
                      client
                          .getOutputStream()
                          .write(
                              "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
                                  .getBytes(StandardCharsets.US_ASCII));
                    }
                  }
                } catch (java.io.IOException e) {
                  // closed: the test is over
                }
              });
      answers.start();
      String message = refusal(ExpansionService.at("127.0.0.1:" + web.getLocalPort()));
      assertTrue(message.contains("127.0.0.1:" + web.getLocalPort()), message);
      assertTrue(message.contains("expansion service"), message);
    }
  }

  @Test
  void aServiceThatDoesNotAnswerIsGivenUp() throws Exception {
    CountDownLatch over = new CountDownLatch(1);
    Fake fake =
        new Fake() {
          @Override
          public void discoverSchemaTransform(
              DiscoverSchemaTransformRequest request,
              StreamObserver<DiscoverSchemaTransformResponse> answer) {
            try {
              over.await();
            } catch (InterruptedException e) {
              Thread.currentThread().interrupt();
            }
          }
        };
    Server server =
        Grpc.newServerBuilderForPort(0, InsecureServerCredentials.create())
            .addService(fake)
            .build()
            .start();
    try {
      ExpansionService service =
          ExpansionService.at("localhost:" + server.getPort()).withTimeout(Duration.ofMillis(200));
      BeamLlmException error =
          assertThrows(
              BeamLlmException.class, () -> ExpansionClient.connect("T", URN + "1", service));
      assertTrue(error.getMessage().endsWith("did not answer within 0.2 s"), error.getMessage());
    } finally {
      over.countDown();
      server.shutdownNow().awaitTermination();
    }
  }

  @ParameterizedTest
  @ValueSource(strings = {"localhost", "http://localhost:1", "localhost:0", "localhost:99999", ""})
  void whatIsNoAddressIsRefused(String address) {
    String message =
        assertThrows(IllegalArgumentException.class, () -> ExpansionService.at(address))
            .getMessage();
    assertEquals(
        "'" + address + "' is not an address of an expansion service, such as 127.0.0.1:8097",
        message);
  }

  @Test
  void plaintextStaysOnThisMachineUnlessAskedFor() {
    ExpansionService.at("[::1]:8097");
    ExpansionService.at("127.1.2.3:8097");
    ExpansionService.insecure("10.0.0.1:8097");
    for (String address : new String[] {"10.0.0.1:8097", "127.0.0.1.example.com:8097"}) {
      assertThrows(IllegalArgumentException.class, () -> ExpansionService.at(address));
    }
  }

  @Test
  void certificatesNeedTls() {
    ExpansionService plain = ExpansionService.at("localhost:1");
    assertThrows(IllegalStateException.class, () -> plain.withAuthority("name"));
    String message =
        refusal(
            ExpansionService.tls("localhost:1").withTrust(java.nio.file.Path.of("no-such.pem")));
    assertTrue(message.contains("the certificates for localhost:1 (TLS) cannot be read"), message);
  }

  @Test
  void aPythonThatIsNotThereIsNamed() {
    String message = refusal(ExpansionService.python("no-such-python"));
    assertTrue(message.contains("cannot be started"), message);
    assertTrue(message.contains("no-such-python"), message);
  }

  @Test
  void aServiceThatDoesNotStartIsQuoted() {
    // Not a Python: it ends at once, with an exit code.
    String message = refusal(ExpansionService.python("/bin/false"));
    assertTrue(message.contains("ended with exit code 1"), message);
  }
}
