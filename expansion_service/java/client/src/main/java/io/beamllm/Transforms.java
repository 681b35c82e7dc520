// Written by expansion_service/java/generate.py: do not edit.
package io.beamllm;

import java.util.List;

/** Every transform. */
final class Transforms {
  static final List<Class<? extends LlmTransform>> ALL =
      List.of(
          VllmCompletions.class,
          VllmChat.class,
          BatchByPrefix.class);

  private Transforms() {}
}
