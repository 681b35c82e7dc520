package io.beamllm.example;

import org.apache.beam.fn.harness.ExternalWorkerService;
import org.apache.beam.sdk.fn.server.GrpcFnServer;
import org.apache.beam.sdk.options.PortablePipelineOptions;

/**
 * Java workers inside this process, for runs on a local job service.
 *
 * <p>{@code --defaultEnvironmentType=LOOPBACK} is meant for that, but has no address yet when an
 * external transform is expanded. So the workers are started first, and named as EXTERNAL ones.
 */
public final class LocalWorkers {
  private final GrpcFnServer<ExternalWorkerService> server;

  private LocalWorkers(GrpcFnServer<ExternalWorkerService> server) {
    this.server = server;
  }

  /**
   * Starts them, and points a pipeline's options to them.
   *
   * @param options options of the pipeline to be made
   * @return to be closed when the pipeline has ended
   * @throws Exception if no port can be had
   */
  public static LocalWorkers start(PortablePipelineOptions options) throws Exception {
    GrpcFnServer<ExternalWorkerService> server = new ExternalWorkerService(options).start();
    options.setDefaultEnvironmentType("EXTERNAL");
    options.setDefaultEnvironmentConfig(server.getApiServiceDescriptor().getUrl());
    return new LocalWorkers(server);
  }

  /**
   * Stops them.
   *
   * @throws Exception if they cannot be stopped
   */
  public void close() throws Exception {
    server.close();
  }
}
