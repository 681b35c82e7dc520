package io.beamllm.integration;

import org.apache.beam.sdk.options.PortablePipelineOptions;

/** Options of the programs that run a pipeline. */
public interface Options extends PortablePipelineOptions {
  /** Address of the expansion service. */
  String getService();

  void setService(String value);

  /** Base address of the model server. */
  String getEndpoint();

  void setEndpoint(String value);

  /** JSON lines to read. */
  String getInput();

  void setInput(String value);

  /** File to write. */
  String getOutput();

  void setOutput(String value);
}
