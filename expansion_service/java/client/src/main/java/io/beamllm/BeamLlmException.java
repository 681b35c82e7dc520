package io.beamllm;

import java.io.Serializable;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;
import java.util.stream.Collectors;

/**
 * A transform that cannot be built: the configuration, the input's schema or the expansion service
 * stands against it. Thrown while the pipeline is constructed, with every problem that was found.
 */
public final class BeamLlmException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  private final String transform;
  private final ArrayList<Problem> problems;

  BeamLlmException(String transform, List<Problem> problems) {
    this(transform, problems, null);
  }

  BeamLlmException(String transform, List<Problem> problems, Throwable cause) {
    super(
        problems.stream()
            .map(problem -> transform + ": " + problem)
            .collect(Collectors.joining("\n")),
        cause);
    this.transform = transform;
    this.problems = new ArrayList<>(problems);
  }

  /** For what concerns no single knob. */
  BeamLlmException(String transform, String message, Throwable cause) {
    this(transform, List.of(new Problem("", message)), cause);
  }

  /**
   * Reads what a service answered: lines of {@code TRANSFORM: knob.path: message}.
   *
   * @param transform the transform's name
   * @param answer the service's words
   */
  static BeamLlmException fromService(String transform, String answer) {
    List<Problem> problems = new ArrayList<>();
    String start = transform + ": ";
    for (String line : answer.strip().split("\n")) {
      if (line.startsWith(start)) {
        problems.add(Problem.read(line.substring(start.length())));
      } else if (problems.isEmpty()) {
        problems.add(new Problem("", line));
      } else { // a message of several lines
        Problem last = problems.remove(problems.size() - 1);
        problems.add(new Problem(last.path(), last.message() + "\n" + line));
      }
    }
    return new BeamLlmException(transform, problems);
  }

  /**
   * The transform's name, as in YAML.
   *
   * @return for instance {@code VLLMChat}
   */
  public String transform() {
    return transform;
  }

  /**
   * Everything that was found.
   *
   * @return at least one problem
   */
  public List<Problem> problems() {
    return List.copyOf(problems);
  }

  /** One thing that is wrong. */
  public static final class Problem implements Serializable {
    private static final long serialVersionUID = 1L;

    private final String path;
    private final String message;

    Problem(String path, String message) {
      this.path = path;
      this.message = message;
    }

    /** Parts {@code knob.path: message}; a message without a path has none. */
    static Problem read(String line) {
      java.util.regex.Matcher match =
          java.util.regex.Pattern.compile(
                  "([a-z_][a-z0-9_]*(?:\\.[^\\s:.\\[\\]]+|\\[\\d+\\])*): (.*)")
              .matcher(line);
      return match.matches() ? new Problem(match.group(1), match.group(2)) : new Problem("", line);
    }

    /**
     * Where the problem is.
     *
     * @return the knob, such as {@code sampling.max_tokens} or {@code messages[0].content}; empty
     *     when no single knob is at fault
     */
    public String path() {
      return path;
    }

    /**
     * What was received, and what is allowed.
     *
     * @return a sentence
     */
    public String message() {
      return message;
    }

    @Override
    public boolean equals(Object other) {
      return other instanceof Problem
          && path.equals(((Problem) other).path)
          && message.equals(((Problem) other).message);
    }

    @Override
    public int hashCode() {
      return Objects.hash(path, message);
    }

    @Override
    public String toString() {
      return path.isEmpty() ? message : path + ": " + message;
    }
  }
}
