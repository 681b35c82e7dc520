package io.beamllm;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Expansion services that were started for this JVM, one for each Python and its options.
 *
 * <p>Each has a pipe from this JVM as its standard input, and stops when that ends: when the JVM
 * exits, and also when it is killed.
 */
final class PythonService {
  private static final Logger LOG = LoggerFactory.getLogger("io.beamllm.service");
  private static final String MODULE = "beam_llm_expansion";
  private static final Duration STOP = Duration.ofSeconds(10);
  private static final Duration LOOK = Duration.ofMillis(20);
  private static final Pattern ROUTINE = Pattern.compile("^\\S+ \\S+ (DEBUG|INFO) |^\\S+:\\d+$");
  private static final int KEPT_LINES = 20;

  private static final Map<List<String>, PythonService> RUNNING = new HashMap<>();

  // Apart from the map and its lock: the JVM may end while one starts.
  private static final List<PythonService> STARTED = new CopyOnWriteArrayList<>();

  static {
    Runtime.getRuntime().addShutdownHook(new Thread(PythonService::stopAll, "beam-llm-stop"));
  }

  private final String transform;
  private final ExpansionService wanted;
  private final List<String> command;
  private final Deque<String> lastLines = new ArrayDeque<>();
  private Process process;
  private Thread log;
  private String address;

  private PythonService(String transform, ExpansionService wanted) {
    this.transform = transform;
    this.wanted = wanted;
    command =
        new ArrayList<>(List.of(wanted.python, "-m", MODULE, "--port=0", "--exit-with-parent"));
    command.addAll(
        wanted.options.isEmpty() ? List.of("--environment-type=LOOPBACK") : wanted.options);
  }

  /**
   * Gives the address of the service, which is started unless it runs.
   *
   * @throws BeamLlmException if it does not start, with its last words
   */
  static String address(String transform, ExpansionService wanted) {
    PythonService service = new PythonService(transform, wanted);
    synchronized (RUNNING) {
      PythonService running = RUNNING.get(service.command);
      if (running != null && running.process.isAlive()) {
        return running.address;
      }
      STARTED.remove(running);
      service.start();
      RUNNING.put(service.command, service);
      return service.address;
    }
  }

  private static void stopAll() {
    STARTED.forEach(PythonService::askToStop);
    STARTED.forEach(PythonService::awaitStop);
  }

  private void start() {
    long deadline = System.nanoTime() + wanted.timeout.toNanos();
    Path directory = null;
    boolean started = false;
    try {
      directory = Files.createTempDirectory("beam-llm-");
      Path file = directory.resolve("address");
      List<String> line = new ArrayList<>(command);
      line.add("--address-file=" + file);
      process = new ProcessBuilder(line).redirectErrorStream(true).start();
      STARTED.add(this);
      log = new Thread(this::readLog, "beam-llm-service-log");
      log.setDaemon(true);
      log.start();
      while (!Files.exists(file)) {
        if (process.waitFor(LOOK.toMillis(), TimeUnit.MILLISECONDS)) {
          log.join(STOP.toMillis());
          throw failed("ended with exit code " + process.exitValue());
        }
        if (System.nanoTime() > deadline) {
          throw failed("did not serve within " + wanted.timeout.toSeconds() + " s");
        }
      }
      address = Files.readString(file).strip();
      ExpansionClient.awaitHealth(transform, wanted, address, deadline - System.nanoTime());
      started = true;
    } catch (IOException e) {
      throw new BeamLlmException(
          transform,
          "the expansion service cannot be started: "
              + e.getMessage()
              + ". Give a Python that has"
              + " beam-llm: ExpansionService.python(\"…/bin/python\"), or "
              + ExpansionService.PYTHON_VARIABLE,
          e);
    } catch (InterruptedException e) {
      Thread.currentThread().interrupt();
      throw new BeamLlmException(transform, "interrupted while the expansion service starts", e);
    } finally {
      delete(directory);
      if (!started && process != null) {
        askToStop();
        awaitStop();
        STARTED.remove(this);
      }
    }
  }

  private BeamLlmException failed(String what) {
    String said;
    synchronized (lastLines) {
      said = String.join("\n", lastLines);
    }
    String hint =
        said.contains("No module named " + MODULE)
            ? "this Python has no beam-llm: install it there, or give another one"
            : said;
    return new BeamLlmException(
        transform,
        "the expansion service (" + String.join(" ", command) + ") " + what + ": " + hint,
        null);
  }

  private void readLog() {
    try (BufferedReader lines =
        new BufferedReader(
            new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8))) {
      for (String line = lines.readLine(); line != null; line = lines.readLine()) {
        if (ROUTINE.matcher(line).find()) {
          LOG.debug("{}", line);
        } else {
          LOG.info("{}", line);
        }
        synchronized (lastLines) {
          lastLines.add(line);
          if (lastLines.size() > KEPT_LINES) {
            lastLines.remove();
          }
        }
      }
    } catch (IOException e) {
      LOG.debug("the service's output ended", e);
    }
  }

  private void askToStop() {
    try {
      process.getOutputStream().close();
    } catch (IOException e) {
      LOG.debug("the service is gone already", e);
    }
  }

  private void awaitStop() {
    try {
      if (!process.waitFor(STOP.toMillis(), TimeUnit.MILLISECONDS)) {
        process.destroyForcibly();
      }
    } catch (InterruptedException e) {
      process.destroyForcibly();
      Thread.currentThread().interrupt();
    }
  }

  private static void delete(Path directory) {
    if (directory != null) {
      try {
        Files.deleteIfExists(directory.resolve("address"));
        Files.deleteIfExists(directory);
      } catch (IOException e) {
        LOG.debug("a temporary folder is left: {}", directory, e);
      }
    }
  }
}
