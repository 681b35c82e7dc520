package io.beamllm;

import java.io.Serializable;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * Where transforms are expanded: a service that runs ({@code beam-llm serve}), or one that is
 * started for this JVM from a Python environment.
 *
 * <pre>{@code
 * ExpansionService.at("127.0.0.1:8097");
 * ExpansionService.tls("beam-llm.internal:8097").withTrust(Path.of("ca.pem"));
 * ExpansionService.python(".venv/bin/python");
 * }</pre>
 *
 * <p>Values of this class are immutable.
 */
public final class ExpansionService implements Serializable {
  private static final long serialVersionUID = 1L;
  private static final Pattern ADDRESS =
      Pattern.compile("(\\[[0-9A-Fa-f:.]+\\]|[^\\s:/\\[\\]]+):(\\d{1,5})");
  private static final Pattern LOOPBACK = Pattern.compile("localhost|127(\\.\\d+){3}|\\[::1\\]");

  /** Environment variable with the address to use where a builder is given no service. */
  public static final String ADDRESS_VARIABLE = "BEAM_LLM_EXPANSION_SERVICE";

  /** Environment variable with the Python to start a service from, where there is no address. */
  public static final String PYTHON_VARIABLE = "BEAM_LLM_PYTHON";

  final String address; // null where a service is to be started
  final String python;
  final ArrayList<String> options;
  final boolean secure;
  final String trust;
  final String certificate;
  final String key;
  final String authority;
  final Duration timeout;

  private ExpansionService(Settings settings) {
    address = settings.address;
    python = settings.python;
    options = settings.options;
    secure = settings.secure;
    trust = settings.trust;
    certificate = settings.certificate;
    key = settings.key;
    authority = settings.authority;
    timeout = settings.timeout;
  }

  /**
   * A service on this machine, in plaintext.
   *
   * @param address {@code host:port} with a loopback host, such as {@code 127.0.0.1:8097}
   * @return the service
   * @throws IllegalArgumentException if it is no such address; beyond this machine use {@link #tls}
   */
  public static ExpansionService at(String address) {
    if (!LOOPBACK.matcher(host(address)).matches()) {
      throw new IllegalArgumentException(
          "'"
              + address
              + "' is beyond this machine: use ExpansionService.tls(…), or insecure(…) where the"
              + " network between is yours alone");
    }
    return insecure(address);
  }

  /**
   * A service anywhere, in plaintext: whoever is on the network between can read and change what
   * the pipeline runs.
   *
   * @param address {@code host:port}
   * @return the service
   * @throws IllegalArgumentException if it is no such address
   */
  public static ExpansionService insecure(String address) {
    host(address);
    Settings settings = new Settings();
    settings.address = address;
    return new ExpansionService(settings);
  }

  /**
   * A service over TLS, verified against the JVM's certificate authorities.
   *
   * @param address {@code host:port}; the certificate must be for this host
   * @return the service
   * @throws IllegalArgumentException if it is no such address
   */
  public static ExpansionService tls(String address) {
    host(address);
    Settings settings = new Settings();
    settings.address = address;
    settings.secure = true;
    return new ExpansionService(settings);
  }

  /**
   * A service that is started when the first transform needs it, is shared by the transforms with
   * the same Python and options, and stops with this JVM, also when the JVM is killed.
   *
   * <p>Without options, its workers run inside the service itself: right for local runners, such as
   * Prism, and for tests.
   *
   * @param python the Python of an environment that has {@code beam-llm}, such as {@code
   *     .venv/bin/python}
   * @param options options of {@code beam-llm serve} in place of {@code --serve-loopback-worker},
   *     for runs whose workers are elsewhere
   * @return the service
   */
  public static ExpansionService python(String python, String... options) {
    Settings settings = new Settings();
    settings.python = python;
    settings.options = new ArrayList<>(List.of(options));
    return new ExpansionService(settings);
  }

  /**
   * What builders use that are given no service: the address in {@value #ADDRESS_VARIABLE}, else
   * the Python in {@value #PYTHON_VARIABLE}, else {@code python3}.
   *
   * @return the service
   */
  public static ExpansionService fromEnvironment() {
    String address = System.getenv(ADDRESS_VARIABLE);
    if (address != null && !address.isEmpty()) {
      return at(address);
    }
    String python = System.getenv(PYTHON_VARIABLE);
    return python(python == null || python.isEmpty() ? "python3" : python);
  }

  /**
   * Trusts these certificate authorities in place of the JVM's.
   *
   * @param authorities a file of certificates, PEM
   * @return the same service, with that
   */
  public ExpansionService withTrust(Path authorities) {
    Settings settings = forTls("withTrust");
    settings.trust = authorities.toString();
    return new ExpansionService(settings);
  }

  /**
   * Shows this certificate to a service that asks for one (mutual TLS).
   *
   * @param certificate the chain, PEM
   * @param key its private key, PEM, PKCS #8, unencrypted
   * @return the same service, with that
   */
  public ExpansionService withClientCertificate(Path certificate, Path key) {
    Settings settings = forTls("withClientCertificate");
    settings.certificate = certificate.toString();
    settings.key = key.toString();
    return new ExpansionService(settings);
  }

  /**
   * Expects the service's certificate to be for this name, where it is not the address's host.
   *
   * @param name a host name
   * @return the same service, with that
   */
  public ExpansionService withAuthority(String name) {
    Settings settings = forTls("withAuthority");
    settings.authority = name;
    return new ExpansionService(settings);
  }

  /**
   * Limits the time of one expansion, and of the start of a service; 2 minutes unless set.
   *
   * @param timeout a positive duration
   * @return the same service, with that
   */
  public ExpansionService withTimeout(Duration timeout) {
    if (timeout.isNegative() || timeout.isZero()) {
      throw new IllegalArgumentException("timeout: " + timeout + " is not positive");
    }
    Settings settings = new Settings(this);
    settings.timeout = timeout;
    return new ExpansionService(settings);
  }

  /** The address, or how the service is started. */
  @Override
  public String toString() {
    if (address == null) {
      return python + (options.isEmpty() ? "" : " " + String.join(" ", options));
    }
    return secure ? address + " (TLS)" : address;
  }

  private Settings forTls(String method) {
    if (!secure) {
      throw new IllegalStateException(method + " needs ExpansionService.tls(…)");
    }
    return new Settings(this);
  }

  private static String host(String address) {
    Matcher match = ADDRESS.matcher(address);
    int port = match.matches() ? Integer.parseInt(match.group(2)) : 0;
    if (port < 1 || port > 65535) {
      throw new IllegalArgumentException(
          "'" + address + "' is not an address of an expansion service, such as 127.0.0.1:8097");
    }
    return match.group(1);
  }

  private static final class Settings {
    String address;
    String python;
    ArrayList<String> options = new ArrayList<>();
    boolean secure;
    String trust;
    String certificate;
    String key;
    String authority;
    Duration timeout = Duration.ofMinutes(2);

    Settings() {}

    Settings(ExpansionService from) {
      address = from.address;
      python = from.python;
      options = from.options;
      secure = from.secure;
      trust = from.trust;
      certificate = from.certificate;
      key = from.key;
      authority = from.authority;
      timeout = from.timeout;
    }
  }
}
