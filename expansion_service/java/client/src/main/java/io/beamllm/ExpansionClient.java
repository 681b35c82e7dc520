package io.beamllm;

import java.io.ByteArrayInputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.util.Arrays;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.beam.model.expansion.v1.ExpansionApi.DiscoverSchemaTransformRequest;
import org.apache.beam.model.expansion.v1.ExpansionApi.DiscoverSchemaTransformResponse;
import org.apache.beam.model.expansion.v1.ExpansionApi.ExpansionRequest;
import org.apache.beam.model.expansion.v1.ExpansionApi.ExpansionResponse;
import org.apache.beam.model.expansion.v1.ExpansionServiceGrpc;
import org.apache.beam.model.pipeline.v1.Endpoints.ApiServiceDescriptor;
import org.apache.beam.sdk.util.construction.ExpansionServiceClient;
import org.apache.beam.sdk.util.construction.ExpansionServiceClientFactory;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.CallOptions;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.ChannelCredentials;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.Grpc;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.InsecureChannelCredentials;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.ManagedChannel;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.ManagedChannelBuilder;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.MethodDescriptor;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.Status;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.StatusRuntimeException;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.TlsChannelCredentials;
import org.apache.beam.vendor.grpc.v1p69p0.io.grpc.stub.ClientCalls;

/**
 * One connection to an expansion service, for one transform. In place of Beam's own, which speaks
 * plaintext only and waits without end.
 */
final class ExpansionClient
    implements ExpansionServiceClientFactory, ExpansionServiceClient, AutoCloseable {
  /** {@code HealthCheckResponse} of gRPC's health protocol with the status SERVING. */
  private static final byte[] SERVING = {1 << 3, 1};

  private static final MethodDescriptor<byte[], byte[]> HEALTH =
      MethodDescriptor.<byte[], byte[]>newBuilder()
          .setType(MethodDescriptor.MethodType.UNARY)
          .setFullMethodName("grpc.health.v1.Health/Check")
          .setRequestMarshaller(new Bytes())
          .setResponseMarshaller(new Bytes())
          .build();

  private final String transform;
  private final String urn;
  private final ExpansionService service;
  private final String address;
  private final ManagedChannel channel;

  private ExpansionClient(
      String transform,
      String urn,
      ExpansionService service,
      String address,
      ManagedChannel channel) {
    this.transform = transform;
    this.urn = urn;
    this.service = service;
    this.address = address;
    this.channel = channel;
  }

  /**
   * Connects to a service, which is started first where it has to be.
   *
   * @throws BeamLlmException if there is none, or it does not offer the transform
   */
  static ExpansionClient connect(String transform, String urn, ExpansionService service) {
    String address =
        service.address != null ? service.address : PythonService.address(transform, service);
    ExpansionClient client =
        new ExpansionClient(transform, urn, service, address, open(transform, service, address));
    try {
      client.checkOffered();
      return client;
    } catch (RuntimeException e) {
      client.close();
      throw e;
    }
  }

  private static ManagedChannel open(String transform, ExpansionService service, String address) {
    ChannelCredentials credentials = InsecureChannelCredentials.create();
    if (service.secure) {
      try {
        TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder();
        if (service.trust != null) {
          tls.trustManager(new File(service.trust));
        }
        if (service.certificate != null) {
          tls.keyManager(new File(service.certificate), new File(service.key));
        }
        credentials = tls.build();
      } catch (IOException | IllegalArgumentException e) {
        throw new BeamLlmException(
            transform, "the certificates for " + service + " cannot be read: " + reason(e), e);
      }
    }
    try {
      ManagedChannelBuilder<?> builder = Grpc.newChannelBuilder(address, credentials);
      if (service.authority != null) {
        builder.overrideAuthority(service.authority);
      }
      return builder.maxInboundMessageSize(Integer.MAX_VALUE).build();
    } catch (RuntimeException e) {
      throw new BeamLlmException(
          transform, "the certificates for " + service + " cannot be used: " + reason(e), e);
    }
  }

  /**
   * Waits until a service says that it serves, by gRPC's health protocol.
   *
   * @throws BeamLlmException if it does not in time
   */
  static void awaitHealth(String transform, ExpansionService service, String address, long nanos) {
    ExpansionClient client =
        new ExpansionClient(transform, "", service, address, open(transform, service, address));
    try (client) {
      byte[] answer =
          ClientCalls.blockingUnaryCall(
              client.channel,
              HEALTH,
              CallOptions.DEFAULT.withWaitForReady().withDeadlineAfter(nanos, TimeUnit.NANOSECONDS),
              new byte[0]);
      if (!Arrays.equals(answer, SERVING)) {
        throw new BeamLlmException(
            transform, "the expansion service at " + service + " does not serve", null);
      }
    } catch (StatusRuntimeException e) {
      throw client.refused(e);
    }
  }

  String address() {
    return address;
  }

  private void checkOffered() {
    DiscoverSchemaTransformResponse response =
        discover(DiscoverSchemaTransformRequest.getDefaultInstance());
    Set<String> offered = response.getSchemaTransformConfigsMap().keySet();
    if (offered.contains(urn)) {
      return;
    }
    String name = urn.substring(0, urn.lastIndexOf(':') + 1);
    List<String> versions =
        offered.stream().filter(o -> o.startsWith(name)).sorted().collect(Collectors.toList());
    throw new BeamLlmException(
        transform,
        versions.isEmpty()
            ? "the expansion service at "
                + service
                + " does not offer "
                + urn
                + " (it offers "
                + (offered.isEmpty() ? "nothing" : String.join(", ", new TreeSet<>(offered)))
                + ")"
            : "the expansion service at "
                + service
                + " is of another version: this client speaks "
                + urn
                + ", it offers "
                + String.join(", ", versions)
                + "; use client and service of one release",
        null);
  }

  @Override
  public ExpansionServiceClient getExpansionServiceClient(ApiServiceDescriptor endpoint) {
    return this;
  }

  @Override
  public DiscoverSchemaTransformResponse discover(DiscoverSchemaTransformRequest request) {
    try {
      return stub().discoverSchemaTransform(request);
    } catch (StatusRuntimeException e) {
      throw refused(e);
    }
  }

  @Override
  public ExpansionResponse expand(ExpansionRequest request) {
    ExpansionResponse response;
    try {
      response = stub().expand(request);
    } catch (StatusRuntimeException e) {
      throw refused(e);
    }
    if (!response.getError().isEmpty()) {
      throw BeamLlmException.fromService(transform, response.getError());
    }
    if (service.secure) {
      refuseArtifacts(request, response);
    }
    return response;
  }

  private void refuseArtifacts(ExpansionRequest request, ExpansionResponse response) {
    Set<String> known = request.getComponents().getEnvironmentsMap().keySet();
    response
        .getComponents()
        .getEnvironmentsMap()
        .forEach(
            (id, environment) -> {
              if (!known.contains(id) && environment.getDependenciesCount() > 0) {
                throw new BeamLlmException(
                    transform,
                    "the expansion service at "
                        + service
                        + " stages files for its workers, and Beam's Java SDK fetches such files in"
                        + " plaintext only: put them into the workers' image, or reach the service"
                        + " through a TLS sidecar on this machine",
                    null);
              }
            });
  }

  private ExpansionServiceGrpc.ExpansionServiceBlockingStub stub() {
    return ExpansionServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(service.timeout.toMillis(), TimeUnit.MILLISECONDS);
  }

  private BeamLlmException refused(StatusRuntimeException error) {
    Status status = error.getStatus();
    String words;
    switch (status.getCode()) {
      case UNAVAILABLE:
        words = "no expansion service answers at " + service + ": " + reason(error);
        break;
      case UNIMPLEMENTED:
        words = "what answers at " + service + " is no expansion service of beam-llm";
        break;
      case DEADLINE_EXCEEDED:
        words =
            "the expansion service at "
                + service
                + " did not answer within "
                + service.timeout.toMillis() / 1000.0
                + " s";
        break;
      case INVALID_ARGUMENT:
      case FAILED_PRECONDITION:
      case RESOURCE_EXHAUSTED:
        return BeamLlmException.fromService(
            transform, status.getDescription() == null ? "refused" : status.getDescription());
      default:
        words =
            "what answers at " + service + " is no expansion service, or failed: " + reason(error);
        break;
    }
    return new BeamLlmException(transform, words, error);
  }

  /** The words of an error and of those under it, without repetition. */
  private static String reason(Throwable error) {
    Set<String> words = new LinkedHashSet<>();
    for (Throwable at = error; at != null && words.size() < 4; at = at.getCause()) {
      String message = at.getMessage() == null ? at.getClass().getSimpleName() : at.getMessage();
      words.add(message.strip().split("\n")[0]);
    }
    return String.join(": ", words);
  }

  @Override
  public void close() {
    channel.shutdownNow();
  }

  /** Messages as they are: Beam renames protobuf's classes, and has none of the health protocol. */
  private static final class Bytes implements MethodDescriptor.Marshaller<byte[]> {
    @Override
    public InputStream stream(byte[] value) {
      return new ByteArrayInputStream(value);
    }

    @Override
    public byte[] parse(InputStream stream) {
      try {
        return stream.readAllBytes();
      } catch (IOException e) {
        throw new UncheckedIOException(e);
      }
    }
  }
}
