package io.beamllm;

import java.util.Collection;

/** Suggests names for misspelt ones, as Python's {@code difflib} does. */
final class Words {
  private static final double CLOSE = 0.6;

  private Words() {}

  /** Gives {@code "; did you mean 'x'?"}, or nothing where no known name is close. */
  static String nearest(String word, Collection<String> known) {
    String best = null;
    double closest = CLOSE;
    for (String name : known) {
      double ratio = ratio(name, word);
      boolean wins = best == null || ratio > closest || name.compareTo(best) > 0;
      if (ratio >= closest && wins) {
        best = name;
        closest = ratio;
      }
    }
    return best == null ? "" : "; did you mean '" + best + "'?";
  }

  /** Twice the characters in matching blocks, by the characters of both (Ratcliff, Obershelp). */
  static double ratio(String a, String b) {
    int[] x = a.codePoints().toArray();
    int[] y = b.codePoints().toArray();
    int total = x.length + y.length;
    return total == 0 ? 1.0 : 2.0 * matching(x, 0, x.length, y, 0, y.length) / total;
  }

  private static int matching(int[] a, int aFrom, int aTo, int[] b, int bFrom, int bTo) {
    int size = 0;
    int aBest = aFrom;
    int bBest = bFrom;
    int[] before = new int[b.length + 1]; // before[j + 1]: the block that ends at a[i - 1], b[j]
    for (int i = aFrom; i < aTo; i++) {
      int[] now = new int[b.length + 1];
      for (int j = bFrom; j < bTo; j++) {
        if (a[i] == b[j]) {
          now[j + 1] = (j > bFrom ? before[j] : 0) + 1;
          if (now[j + 1] > size) {
            size = now[j + 1];
            aBest = i - size + 1;
            bBest = j - size + 1;
          }
        }
      }
      before = now;
    }
    if (size == 0) {
      return 0;
    }
    return size
        + matching(a, aFrom, aBest, b, bFrom, bBest)
        + matching(a, aBest + size, aTo, b, bBest + size, bTo);
  }
}
